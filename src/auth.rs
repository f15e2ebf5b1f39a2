//! Who sends a request: tokens, passwords and the names in client certificates.
//!
//! What callers may do is decided in [`orlop_core::auth`], when a request is evaluated. Here a token or a certificate
//! becomes a [`Caller`]; whether that user exists is not checked.

mod keys;
mod passwords;
mod tokens;

use std::sync::Arc;

use http::{Extensions, HeaderMap, HeaderValue, header};
use tonic::Status;

use self::passwords::EnteredPassword;
pub use self::{
    keys::{Keys, SignMethod},
    passwords::{COST_DEFAULT as BCRYPT_COST, COSTS as BCRYPT_COSTS, PasswordError, Passwords, sent_hash},
    tokens::Tokens,
};
use crate::{
    api::status::{AUTH_NOT_ENABLED, NO_PASSWORD_USER, WRONG_PASSWORD, from_store},
    net::{CertificateUser, Remote},
};
use orlop_core::{
    auth::{self, Caller},
    store::{self, Store},
    types::shown,
};

/// The metadata in which etcd's clients send a token.
const TOKEN: &str = "token";

/// What a client sent with a request or a stream, from which its user is known.
pub struct Credentials {
    pub headers: HeaderMap,
    pub extensions: Extensions,
}

impl Credentials {
    pub fn of<T>(request: &tonic::Request<T>) -> Self {
        Self { headers: request.metadata().as_ref().clone(), extensions: request.extensions().clone() }
    }

    /// Returns whether there is a token.
    pub fn has_token(&self) -> bool {
        token(&self.headers).is_some()
    }
}

/// Identifies callers, and gives tokens to users.
pub struct Authenticator {
    tokens: Tokens,
    pub passwords: Passwords,
    /// Whether the common name of a client's certificate is a user.
    trusts_certificates: bool,
}

impl Authenticator {
    pub fn new(tokens: Tokens, passwords: Passwords, trusts_certificates: bool) -> Self {
        Self { tokens, passwords, trusts_certificates }
    }

    /// Returns who sent a request: the user of its token, else that of its client certificate, else nobody.
    ///
    /// # Errors
    ///
    /// If the token is not valid.
    pub async fn caller(&self, store: &Store, headers: &HeaderMap, extensions: &Extensions) -> Result<Caller, Status> {
        let token = token(headers);
        if !store.is_auth_enabled() {
            if token.is_none() {
                // Also while Auth is disabled here: another instance may have enabled it.
                return Ok(self.owner_of_certificate(extensions));
            }
            // Another instance, which gave the token, may have enabled Auth.
            store.confirm().await.map_err(from_store)?;
            if !store.is_auth_enabled() {
                return Ok(Caller::Nobody);
            }
        }
        let Some(token) = token else { return Ok(self.owner_of_certificate(extensions)) };
        let token = token.as_bytes();
        let caller = self.tokens.verify(token.strip_prefix(b"Bearer ").unwrap_or(token));
        caller.ok_or_else(|| from_store(store::Error::Auth(auth::Error::InvalidToken)))
    }

    fn owner_of_certificate(&self, extensions: &Extensions) -> Caller {
        let user = extensions.get::<CertificateUser>().filter(|_| self.trusts_certificates);
        user.map_or(Caller::Nobody, |CertificateUser(user)| Caller::User(Arc::clone(user)))
    }

    /// Checks a user's password and returns a token for the user.
    ///
    /// # Errors
    ///
    /// With etcd's codes and texts.
    pub async fn log_in(
        &self,
        store: &Store,
        remote: Option<&Remote>,
        user: &str,
        password: String,
    ) -> Result<String, Status> {
        let password = EnteredPassword::from(password);
        let mut authority = store.confirmed_authority().await.map_err(from_store)?;
        loop {
            if !authority.state().enabled {
                return Err(AUTH_NOT_ENABLED.into());
            }
            let Some(found) = authority.state().users.get(user) else { return Err(WRONG_PASSWORD.into()) };
            let auth::Password::Hash(hash) = &found.password else {
                return Err(NO_PASSWORD_USER.into());
            };
            if !self.passwords.check(remote, password.clone(), hash.clone()).await? {
                tracing::info!(user = shown(user.as_bytes()), "invalid password");
                return Err(WRONG_PASSWORD.into());
            }
            // The check takes long: the password may have been changed, or the user deleted.
            let now = store.confirmed_authority().await.map_err(from_store)?;
            let is_same = now.state().users.get(user).is_some_and(|current| {
                (&current.password, current.tokens_from) == (&found.password, found.tokens_from)
            });
            if is_same && now.state().enabled {
                return self.tokens.give(user, now.state().revision);
            }
            authority = now;
        }
    }
}

fn token(headers: &HeaderMap) -> Option<&HeaderValue> {
    headers.get(TOKEN).or_else(|| headers.get(header::AUTHORIZATION))
}
