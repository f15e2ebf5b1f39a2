//! Helpers of all integration tests: server processes and their clients.
//!
//! A test prints "skipped" if a program that it needs is not installed; if `CI` is set, it fails instead.

mod certificates;
mod client;
mod cluster;
mod disk;
mod http;
mod link;
mod mysql;
mod patroni;
mod postgres;
mod program;
mod proxy;
mod random;
mod server;
mod stream;
mod tools;

use std::{
    fmt::{Debug, Display},
    future::Future,
    hash::{BuildHasher as _, RandomState},
    path::Path,
    str::FromStr,
    sync::atomic::{AtomicUsize, Ordering},
    time::Duration,
};

use tokio::time::Instant;

pub use self::{
    certificates::{Authority, Certificate},
    client::{Client, Connection, all, delete, get, put, range},
    cluster::{Cluster, Replication},
    disk::Disk,
    http::{Answer, http, http_bytes, http_get, http_with},
    link::{Link, NetworkState},
    mysql::MySql,
    patroni::{Patroni, Scope},
    postgres::{Postgres, database_name, free_port, psql, user},
    program::{
        Lines, Started, ended, memory_kib, orlop, orlop_program, prints, run, run_async, run_within, send_signal, wait,
    },
    proxy::{Cut, Proxy},
    random::Random,
    server::{Place, Server, home},
    stream::{Stream, everything},
    tools::{Etcd, etcd_tool},
};

/// The database that stores a server's log.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Sqlite,
    Postgres,
}

impl Backend {
    /// Returns the address of a new, empty database. That of SQLite is in `folder`.
    pub async fn empty_database(self, folder: &Path, name: &str) -> Option<String> {
        Some(match self {
            Self::Sqlite => format!("sqlite://{}", folder.join(name).display()),
            Self::Postgres => Postgres::shared().await?.create_database(),
        })
    }
}

/// Makes one test per backend of each listed function. The compiler reports a function that is not listed as dead code.
macro_rules! on_both_backends {
    ($($name:ident),+ $(,)?) => {
        mod sqlite {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::Backend::Sqlite).await;
            })+
        }

        mod postgres {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::$name($crate::support::Backend::Postgres).await;
            })+
        }
    };
}
pub(crate) use on_both_backends;

/// Maximum time that a test waits for a condition. Generous, because CI machines stall.
pub const DEADLINE: Duration = Duration::from_secs(30);

/// Prints that a test is skipped because `what` is missing.
///
/// # Panics
/// If `CI` is set, because everything must be installed there.
pub fn skip(what: &str) {
    assert!(std::env::var_os("CI").is_none(), "CI has no {what}");
    println!("skipped: no {what}");
}

/// Calls `probe` until it returns `Ok`. `what` names the awaited event in the panic message.
///
/// # Panics
/// If it does not return `Ok` within [`DEADLINE`].
pub async fn eventually<T, E, F>(what: &str, mut probe: impl FnMut() -> F) -> T
where
    E: Debug,
    F: Future<Output = Result<T, E>>,
{
    let deadline = Instant::now() + DEADLINE;
    loop {
        match probe().await {
            Ok(found) => return found,
            Err(error) if Instant::now() > deadline => panic!("{what} did not happen within {DEADLINE:?}: {error:?}"),
            Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
        }
    }
}

/// Waits until the counter of writes reaches `count`.
pub async fn wait_for_writes(count: usize, counted: &AtomicUsize) {
    eventually("the writes", async || match counted.load(Ordering::Relaxed) {
        enough if enough >= count => Ok(()),
        few => Err(few),
    })
    .await;
}

/// Returns the number in an environment variable, if it is set.
///
/// # Panics
/// If its value is not a number.
pub fn env_number<T: FromStr<Err: Display>>(variable: &str) -> Option<T> {
    let text = std::env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{variable} is `{text}`: {error}")))
}

/// Returns the seed that `ORLOP_SEED` sets, or a random one.
pub fn seed() -> u64 {
    env_number("ORLOP_SEED").unwrap_or_else(|| RandomState::new().hash_one(()) >> 16)
}

/// Returns a path as an argument of a command.
pub fn text(path: &Path) -> &str {
    path.to_str().expect("a temporary path is text")
}
