//! Tokens. Both kinds are signed, so every instance can verify a token that another one gave, and none is stored.
//!
//! A simple token is signed with a key in the database and follows changes of the user's rights. It expires some minutes
//! after its last use at the instance; at an instance that has not seen it yet, after it was given. In etcd, too, each
//! member counts the time by itself. A JWT is signed with keys that the operator provides and is good for one auth
//! revision.

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::{Duration, Instant, UNIX_EPOCH},
};

use foldhash::fast::RandomState;
use parking_lot::RwLock;
use serde::{Deserialize, Serialize, Serializer};
use tonic::Status;

use super::keys::Keys;
use orlop_core::{
    auth::{Caller, Credential, Identity},
    clock,
};

/// Maximum number of tokens that are known without verifying them again.
const KNOWN_MAX: usize = 10_000;

/// What a token states.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Claims {
    username: String,
    /// The auth revision at which the token was given. Other issuers may write a number with a fraction.
    #[serde(serialize_with = "as_integer")]
    revision: f64,
    /// Seconds since 1970 from which the token is no longer valid, and from which it is valid.
    #[serde(serialize_with = "as_integers")]
    exp: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    nbf: Option<f64>,
}

/// Writes a number without a fraction, as etcd does.
#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde passes a reference")]
fn as_integer<S: Serializer>(number: &f64, serializer: S) -> Result<S::Ok, S::Error> {
    as_integers(&Some(*number), serializer)
}

#[expect(clippy::ref_option, clippy::cast_possible_truncation, reason = "serde passes a reference; a cast saturates")]
fn as_integers<S: Serializer>(number: &Option<f64>, serializer: S) -> Result<S::Ok, S::Error> {
    number.map(|number| number as i64).serialize(serializer)
}

/// Gives and verifies tokens.
pub struct Tokens {
    keys: Keys,
    ttl: Duration,
    is_simple: bool,
    started: Instant,
    /// Verified tokens that have not expired. Only who has the key could choose them, so a fast hash suffices.
    known: RwLock<HashMap<Box<[u8]>, Known, RandomState>>,
}

struct Known {
    caller: Caller,
    expiry: Expiry,
}

enum Expiry {
    /// Milliseconds since the start of the server, moved on by each use.
    AfterUse(AtomicU64),
    /// Seconds since 1970; `None`: never.
    At(Option<f64>),
}

/// The time by the clock of each kind of [`Expiry`].
#[derive(Clone, Copy)]
struct Now {
    /// Milliseconds since the start of the server.
    millis: u64,
    /// Seconds since 1970.
    secs: f64,
}

impl Tokens {
    /// Creates simple tokens, which are signed with the secret key of the log and expire if they are not used for `ttl`.
    ///
    /// # Errors
    ///
    /// If the key cannot be used.
    pub fn simple(key: &[u8], ttl: Duration) -> Result<Self, String> {
        Ok(Self { is_simple: true, ..Self::jwt(Keys::of_secret(key)?, ttl) })
    }

    /// Creates JWTs, which expire after `ttl`.
    pub fn jwt(keys: Keys, ttl: Duration) -> Self {
        Self { keys, ttl, is_simple: false, started: Instant::now(), known: RwLock::default() }
    }

    /// Returns a token for a user at an auth revision.
    ///
    /// # Errors
    ///
    /// If this server has only the public key, with which it can verify tokens but not sign them.
    pub fn give(&self, user: &str, revision: u64) -> Result<String, Status> {
        #[expect(clippy::cast_precision_loss, reason = "revisions are below 2^53")]
        let claims = Claims {
            username: user.to_owned(),
            revision: revision as f64,
            exp: Some((now_secs() + self.ttl.as_secs_f64()).floor()),
            nbf: None,
        };
        self.keys.sign(&claims).map_err(Status::unknown)
    }

    /// Returns whom a token identifies, or `None` if it is not valid.
    pub fn verify(&self, token: &[u8]) -> Option<Caller> {
        if let Some(known) = self.known.read().get(token) {
            return known.expiry.is_valid(self).then(|| known.caller.clone());
        }
        let now = self.now();
        let is_current = |claims: &Claims| {
            claims.exp.is_none_or(|expires| expires > now.secs) && claims.nbf.is_none_or(|begins| begins <= now.secs)
        };
        let claims: Claims = self.keys.verify(std::str::from_utf8(token).ok()?).filter(is_current)?;
        #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "a cast of a float saturates")]
        let revision = claims.revision as u64;
        let credential = match self.is_simple {
            true => Credential::SimpleToken { given_at: revision },
            false => Credential::RevisionToken { revision },
        };
        let expiry = match self.is_simple {
            true => Expiry::AfterUse(AtomicU64::new(now.millis + self.ttl_millis())),
            false => Expiry::At(claims.exp),
        };
        let caller = Caller::User(Arc::new(Identity { user: claims.username, credential }));
        let mut known = self.known.write();
        if known.len() >= KNOWN_MAX {
            known.retain(|_, known| !known.expiry.is_over(now));
            // Looking for expired ones takes longer than verifying a token. Forgotten JWTs are verified again at their next
            // use, but only this map knows when a simple token was last used.
            if known.len() >= KNOWN_MAX && !self.is_simple {
                known.clear();
            }
        }
        // A token that is not added is verified again at its next use.
        if known.len() < KNOWN_MAX {
            known.insert(token.into(), Known { caller: caller.clone(), expiry });
        }
        Some(caller)
    }

    fn now(&self) -> Now {
        let millis = u64::try_from(self.started.elapsed().as_millis()).unwrap_or(u64::MAX);
        Now { millis, secs: now_secs() }
    }

    fn ttl_millis(&self) -> u64 {
        u64::try_from(self.ttl.as_millis()).unwrap_or(u64::MAX / 2)
    }
}

impl Expiry {
    /// Uses the token. Returns whether it has not expired. A use of a simple token moves its expiry on.
    fn is_valid(&self, tokens: &Tokens) -> bool {
        let now = tokens.now();
        let is_valid = !self.is_over(now);
        if let (true, Self::AfterUse(expires)) = (is_valid, self) {
            expires.store(now.millis + tokens.ttl_millis(), Ordering::Relaxed);
        }
        is_valid
    }

    fn is_over(&self, now: Now) -> bool {
        match self {
            Self::AfterUse(expires) => expires.load(Ordering::Relaxed) <= now.millis,
            Self::At(expires) => expires.is_some_and(|expires| expires <= now.secs),
        }
    }
}

/// Returns the seconds since 1970, by which claims are dated.
fn now_secs() -> f64 {
    clock::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs that verify tokens may refuse fractions.
    #[test]
    fn numbers_of_claims_are_integers() {
        let claims = Claims { username: "u".to_owned(), revision: 3.0, exp: Some(1_795_877_988.0), nbf: None };
        let text = serde_json::to_string(&claims).expect("JSON");
        assert_eq!(text, r#"{"username":"u","revision":3,"exp":1795877988}"#);
    }

    #[test]
    fn looking_for_expired_tokens_is_no_use_of_the_others() {
        const EXPIRES: u64 = 60_000;
        let tokens = Tokens::simple(&[7; 32], Duration::from_secs(300)).expect("a key");
        let known = |_: usize| Known { caller: Caller::Nobody, expiry: Expiry::AfterUse(AtomicU64::new(EXPIRES)) };
        let number = |number: usize| Box::from(number.to_be_bytes());
        tokens.known.write().extend((0..KNOWN_MAX).map(|at| (number(at), known(at))));
        let token = tokens.give("u", 1).expect("a token");
        assert!(tokens.verify(token.as_bytes()).is_some());
        let known = tokens.known.read();
        let is_kept =
            |known: &Known| matches!(&known.expiry, Expiry::AfterUse(at) if at.load(Ordering::Relaxed) == EXPIRES);
        assert!(known.len() == KNOWN_MAX && known.values().all(is_kept));
    }

    #[test]
    fn tokens_that_do_not_expire_leave_space_for_others() {
        let tokens = Tokens::jwt(Keys::of_secret(&[7; 32]).expect("a key"), Duration::from_secs(300));
        let known = || Known { caller: Caller::Nobody, expiry: Expiry::At(None) };
        tokens.known.write().extend((0..KNOWN_MAX).map(|at| (Box::from(at.to_be_bytes()), known())));
        let token = tokens.give("u", 1).expect("a token");
        assert!(tokens.verify(token.as_bytes()).is_some());
        assert!(tokens.known.read().contains_key(token.as_bytes()));
    }
}
