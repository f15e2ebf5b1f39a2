//! The errors of the store, by what the caller should do.

use std::{
    sync::{Mutex, PoisonError},
    time::Duration,
};

use tokio::time::Instant;

use crate::{auth, index::Unreadable, log, overload::Exhausted, trace};

/// Minimum interval between two messages about requests that failed because the database is unavailable.
const UNAVAILABLE_LOG_INTERVAL: Duration = Duration::from_secs(5);

/// Why a request failed, by what the caller should do about it. The texts are for the server's log; clients get those of
/// `src/api/status.rs`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("required revision has been compacted")]
    Compacted,
    #[error("required revision is a future revision")]
    FutureRevision,
    #[error("key not found")]
    KeyNotFound,
    #[error("lease not found")]
    LeaseNotFound,
    #[error("lease already exists")]
    LeaseExists,
    #[error("lease ttl too large")]
    LeaseTtlTooLarge,
    /// The queue of writes is full. Nothing was done; try again later.
    #[error("too many requests")]
    TooManyRequests,
    /// The database or its disk is full, or the NOSPACE alarm is raised.
    #[error("database space exceeded")]
    NoSpace,
    /// The write may or may not have happened.
    #[error("request timed out")]
    OutcomeUnknown,
    /// The database is unavailable. Nothing was done.
    #[error("database unavailable")]
    Unavailable,
    /// The database does not permit this, for the reason in the text. Nothing was done; repeating it does not help.
    #[error("refused by the database: {0}")]
    Refused(String),
    /// The server is stopping. Nothing was done.
    #[error("server stopped")]
    Stopped,
    /// The log is corrupt.
    #[error("corrupt log")]
    Corrupt,
    /// The caller may not do this, or users and roles cannot be changed like this.
    #[error(transparent)]
    Auth(#[from] auth::Error),
}

pub type Result<T> = std::result::Result<T, Error>;

impl From<Unreadable> for Error {
    fn from(unreadable: Unreadable) -> Self {
        match unreadable {
            Unreadable::Compacted => Self::Compacted,
            Unreadable::Future => Self::FutureRevision,
        }
    }
}

impl From<Exhausted> for Error {
    fn from(_: Exhausted) -> Self {
        Self::TooManyRequests
    }
}

impl From<log::Error> for Error {
    /// Converts an error of the log to an error of the store, and logs its cause.
    fn from(error: log::Error) -> Self {
        log_failure(&error);
        match error {
            log::Error::Unavailable(_) | log::Error::Open(_) | log::Error::Diverged(_) => Self::Unavailable,
            log::Error::Full(_) => Self::NoSpace,
            log::Error::Refused(reason) => Self::Refused(reason),
            log::Error::OutcomeUnknown(_) => Self::OutcomeUnknown,
            log::Error::Corrupt(_) => Self::Corrupt,
        }
    }
}

/// Logs why a request failed. During an outage, one request every [`UNAVAILABLE_LOG_INTERVAL`] is logged as an error,
/// and the others at the level debug.
fn log_failure(error: &log::Error) {
    /// The time of the last message of this process. The lock is not one of [`crate::sync`], because shuttle's do not
    /// outlive a schedule.
    static LOGGED: Mutex<Option<Instant>> = Mutex::new(None);
    let id = trace::current().map(tracing::field::display);
    if matches!(error, log::Error::Unavailable(_)) {
        let mut logged = LOGGED.lock().unwrap_or_else(PoisonError::into_inner);
        if logged.is_some_and(|logged| logged.elapsed() < UNAVAILABLE_LOG_INTERVAL) {
            drop(logged);
            return tracing::debug!(id, %error, "requests still fail on the database");
        }
        *logged = Some(Instant::now());
    }
    tracing::error!(id, %error, "request failed on the database");
}
