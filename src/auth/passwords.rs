//! Checks and hashes of passwords, which take tens of milliseconds of CPU on purpose.
//!
//! They run on threads of their own, with a low priority, so that they delay no other request. The threads take
//! the waiting work of one client address after the other: a flood from one address does not delay the login of
//! another. The addresses of an IPv6 network of 64 bits count as one, because one client can use all of them.

use std::{
    collections::{HashMap, VecDeque},
    io,
    net::{IpAddr, Ipv6Addr},
    sync::Arc,
    thread,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use parking_lot::{Condvar, Mutex};
use tokio::sync::oneshot;
use tonic::{Code, Status};
use tracing::{error, warn};

use crate::{api::status::too_many_requests, net::Remote};
use orlop_core::supervise::catch_panic;

/// One thread per this number of cores.
const CORES_PER_THREAD: usize = 4;
/// Maximum number of waiting checks of one address, and of all.
const WAITING_OF_ADDRESS_MAX: usize = 128;
const WAITING_MAX: usize = 1_024;
/// bcrypt uses the first 72 bytes of a password only; etcd refuses to store a longer one.
const PASSWORD_BYTES_MAX: usize = 72;
/// Length of a bcrypt hash.
const HASH_BYTES: usize = 60;

/// The costs that bcrypt accepts, and the default.
pub const COSTS: std::ops::RangeInclusive<u32> = 4..=31;
pub const COST_DEFAULT: u32 = 10;

/// Why a password could not be checked or hashed.
#[derive(Debug, thiserror::Error)]
pub enum PasswordError {
    #[error("too many password checks are waiting")]
    TooMany,
    #[error("bcrypt: password length exceeds 72 bytes")]
    TooLong,
    #[error("bcrypt: {0}")]
    Bcrypt(String),
}

impl From<PasswordError> for Status {
    /// As in etcd, errors of bcrypt have no code.
    fn from(error: PasswordError) -> Self {
        match error {
            PasswordError::TooMany => too_many_requests(),
            PasswordError::TooLong | PasswordError::Bcrypt(_) => Self::new(Code::Unknown, error.to_string()),
        }
    }
}

/// A password that a client sent to log in, as far as bcrypt uses it. Checks wait, and must not keep long passwords
/// meanwhile.
#[derive(Clone)]
pub struct EnteredPassword(Vec<u8>);

impl From<String> for EnteredPassword {
    fn from(password: String) -> Self {
        let bytes = password.as_bytes();
        // The first 72 bytes may end within a character.
        Self(bytes[..bytes.len().min(PASSWORD_BYTES_MAX)].to_vec())
    }
}

type Work = Box<dyn FnOnce() + Send>;

/// Waiting work, by the [`network`] of the client; `None`: unknown, as on a unix socket.
#[derive(Default)]
struct Waiting {
    work: HashMap<Option<IpAddr>, VecDeque<Work>>,
    /// Addresses with waiting work, the next first.
    turns: VecDeque<Option<IpAddr>>,
    len: usize,
    is_closed: bool,
}

impl Waiting {
    fn push(&mut self, address: Option<IpAddr>, work: Work) -> Result<(), PasswordError> {
        // Checked first, so that a refused address leaves no entry in the map.
        if self.len >= WAITING_MAX {
            return Err(PasswordError::TooMany);
        }
        let of_address = self.work.entry(address).or_default();
        if of_address.len() >= WAITING_OF_ADDRESS_MAX {
            return Err(PasswordError::TooMany);
        }
        if of_address.is_empty() {
            self.turns.push_back(address);
        }
        of_address.push_back(work);
        self.len += 1;
        Ok(())
    }

    fn pop(&mut self) -> Option<Work> {
        let address = self.turns.pop_front()?;
        let of_address = self.work.get_mut(&address)?;
        let work = of_address.pop_front()?;
        if of_address.is_empty() {
            self.work.remove(&address);
        } else {
            self.turns.push_back(address);
        }
        self.len -= 1;
        Some(work)
    }
}

#[derive(Default)]
struct Queue {
    waiting: Mutex<Waiting>,
    changed: Condvar,
}

impl Queue {
    /// Runs the waiting work until the queue is closed.
    fn run(&self) {
        // Other threads get ten times as much CPU time. With the lowest priority, logins would starve on a busy machine.
        if let Err(error) = rustix::process::nice(10) {
            warn!(%error, "cannot lower the priority of password checks");
        }
        loop {
            let mut waiting = self.waiting.lock();
            let work = loop {
                if waiting.is_closed {
                    return;
                }
                match waiting.pop() {
                    Some(work) => break work,
                    None => self.changed.wait(&mut waiting),
                }
            };
            drop(waiting);
            if let Err(panic) = catch_panic(work) {
                error!(
                    place = panic.place,
                    message = panic.message,
                    "the check or hash of a password panicked; only its request failed"
                );
            }
        }
    }
}

/// Checks and hashes passwords.
pub struct Passwords {
    queue: Arc<Queue>,
    cost: u32,
}

impl Drop for Passwords {
    fn drop(&mut self) {
        self.queue.waiting.lock().is_closed = true;
        self.queue.changed.notify_all();
    }
}

impl Passwords {
    /// Starts the threads. `cost` is bcrypt's, for new hashes.
    ///
    /// # Errors
    ///
    /// If a thread cannot be started.
    pub fn start(cost: u32) -> io::Result<Self> {
        let cores = thread::available_parallelism().map_or(1, usize::from);
        let queue = Arc::new(Queue::default());
        for _ in 0..cores.div_ceil(CORES_PER_THREAD) {
            let queue = Arc::clone(&queue);
            thread::Builder::new().name("passwords".to_owned()).spawn(move || queue.run())?;
        }
        Ok(Self { queue, cost })
    }

    /// Returns whether a password has this hash.
    pub async fn check(
        &self,
        remote: Option<&Remote>,
        password: EnteredPassword,
        hash: String,
    ) -> Result<bool, PasswordError> {
        self.run(remote, move || {
            bcrypt::verify(password.0, &hash).map_err(|error| PasswordError::Bcrypt(error.to_string()))
        })
        .await
    }

    /// Returns the hash of a new password.
    pub async fn hash(&self, remote: Option<&Remote>, password: String) -> Result<String, PasswordError> {
        if password.len() > PASSWORD_BYTES_MAX {
            return Err(PasswordError::TooLong);
        }
        let cost = self.cost;
        self.run(remote, move || bcrypt::hash(password, cost).map_err(|error| PasswordError::Bcrypt(error.to_string())))
            .await
    }

    async fn run<T: Send + 'static>(
        &self,
        remote: Option<&Remote>,
        work: impl FnOnce() -> Result<T, PasswordError> + Send + 'static,
    ) -> Result<T, PasswordError> {
        let (answer, answered) = oneshot::channel();
        let work = Box::new(move || {
            // The client may have disconnected.
            if !answer.is_closed() {
                let _ = answer.send(work());
            }
        });
        self.queue.waiting.lock().push(remote.and_then(Remote::ip).map(network), work)?;
        self.queue.changed.notify_one();
        // Work that panicked drops the sender.
        answered.await.unwrap_or_else(|_| Err(PasswordError::Bcrypt("the check failed".to_owned())))
    }
}

/// Returns the bcrypt hash that a client sent in base64 in place of a password; `None` if it is no such hash.
pub fn sent_hash(text: &str) -> Option<String> {
    let hash = String::from_utf8(BASE64_STANDARD.decode(text).ok()?).ok()?;
    let parts = hash.parse::<bcrypt::HashParts>().ok()?;
    let is_valid = hash.len() == HASH_BYTES && hash.starts_with("$2") && COSTS.contains(&parts.get_cost());
    is_valid.then_some(hash)
}

/// Returns the address for which work of `address` counts: of IPv6, that of the network of 64 bits. An IPv4 address
/// counts for itself, also on a socket for both.
fn network(address: IpAddr) -> IpAddr {
    match address.to_canonical() {
        IpAddr::V4(address) => address.into(),
        IpAddr::V6(address) => Ipv6Addr::from_bits(address.to_bits() & !u128::from(u64::MAX)).into(),
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use tokio::time::timeout;

    use super::*;

    #[test]
    fn addresses_take_turns() {
        let (flooding, other) = (Some(IpAddr::from([10, 0, 0, 1])), Some(IpAddr::from([10, 0, 0, 2])));
        let done = Arc::new(Mutex::new(Vec::new()));
        let work = |address: Option<IpAddr>| {
            let done = Arc::clone(&done);
            Box::new(move || done.lock().push(address))
        };
        let mut waiting = Waiting::default();
        for _ in 0..WAITING_OF_ADDRESS_MAX {
            waiting.push(flooding, work(flooding)).expect("there is room");
        }
        assert!(matches!(waiting.push(flooding, work(flooding)), Err(PasswordError::TooMany)));
        waiting.push(other, work(other)).expect("another address has room");
        while let Some(work) = waiting.pop() {
            work();
        }
        let done = done.lock();
        assert_eq!((done.len(), &done[..3]), (WAITING_OF_ADDRESS_MAX + 1, &[flooding, other, flooding][..]));
        assert_eq!((waiting.len, waiting.work.len()), (0, 0));
    }

    #[test]
    fn refused_addresses_use_no_memory() {
        let mut waiting = Waiting::default();
        let address = |number: usize| Some(IpAddr::from([10, 0, (number >> 8) as u8, number as u8]));
        for number in 0..WAITING_MAX {
            waiting.push(address(number), Box::new(|| {})).expect("there is room");
        }
        for number in WAITING_MAX..2 * WAITING_MAX {
            let refused = waiting.push(address(number), Box::new(|| {}));
            assert!(matches!(refused, Err(PasswordError::TooMany)), "address {number}");
        }
        assert_eq!((waiting.len, waiting.work.len(), waiting.turns.len()), (WAITING_MAX, WAITING_MAX, WAITING_MAX));
    }

    #[test]
    fn addresses_of_an_ipv6_network_count_as_one() {
        for (address, want) in [
            ("10.0.0.7", "10.0.0.7"),
            ("::ffff:10.0.0.7", "10.0.0.7"),
            ("2001:db8:1:2:3:4:5:6", "2001:db8:1:2::"),
            ("2001:db8:1:2:ffff::1", "2001:db8:1:2::"),
            ("2001:db8:1:3::1", "2001:db8:1:3::"),
            ("fe80::1", "fe80::"),
        ] {
            let [address, want] = [address, want].map(|text| text.parse::<IpAddr>().expect("an address"));
            assert_eq!(network(address), want, "{address}");
        }
    }

    #[tokio::test]
    async fn panic_fails_only_its_own_work() {
        let queue = Arc::new(Queue::default());
        let passwords = Passwords { queue: Arc::clone(&queue), cost: 4 };
        thread::spawn(move || queue.run());
        let panicked = passwords.run::<()>(None, || panic!("a test expects this panic")).await;
        assert!(matches!(panicked, Err(PasswordError::Bcrypt(_))));
        let next = timeout(Duration::from_secs(30), passwords.hash(None, "secret".to_owned())).await;
        assert!(next.expect("the thread goes on").is_ok());
    }

    /// Every hash accepts what it accepted when whole passwords were checked.
    #[tokio::test]
    async fn long_passwords_are_checked_by_their_first_72_bytes() {
        let passwords = Passwords::start(4).expect("a thread");
        for password in ["x".repeat(72), "x".repeat(71), "a\0b".to_owned(), format!("{}\u{fc}", "x".repeat(71))] {
            let hash = bcrypt::hash(&password, 4).expect("a hash");
            for entered in [
                password.clone(),
                format!("{password}x"),
                format!("{password}\0"),
                format!("{password}{}", "y".repeat(256 << 10)),
                format!("{}\u{fc}", "x".repeat(71)),
                format!("{}\u{e9}", "x".repeat(71)),
                "x".repeat(100),
                "a".to_owned(),
            ] {
                let want = bcrypt::verify(&entered, &hash).expect("a check");
                let entered_bytes = EnteredPassword::from(entered.clone());
                assert!(entered_bytes.0.capacity() <= PASSWORD_BYTES_MAX);
                let checked = passwords.check(None, entered_bytes, hash.clone()).await.expect("a check");
                assert_eq!(checked, want, "{password:?}, {} bytes entered", entered.len());
            }
        }
    }

    #[tokio::test]
    async fn hashes_verify_their_password_only() {
        let passwords = Passwords::start(4).expect("a thread");
        let hash = passwords.hash(None, "secret".to_owned()).await.expect("a hash");
        for (password, is_right) in [("secret", true), ("Secret", false), ("", false)] {
            let checked = passwords.check(None, password.to_owned().into(), hash.clone()).await;
            assert_eq!(checked.expect("a check"), is_right, "{password}");
        }
        // A hash that etcd (Go) made of "secret".
        let of_go = "$2a$04$MkTyXm2mQjcGJXcvJ9.Zu.2pqLyzHBXdP7/Yr8MQYRL0tbqiM1p8y".to_owned();
        assert!(passwords.check(None, "x".to_owned().into(), of_go).await.is_ok_and(|is_right| !is_right));
        assert!(matches!(passwords.hash(None, "x".repeat(73)).await, Err(PasswordError::TooLong)));
        assert!(matches!(
            passwords.check(None, "x".to_owned().into(), "no hash".to_owned()).await,
            Err(PasswordError::Bcrypt(_))
        ));
    }
}
