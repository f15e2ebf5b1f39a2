//! The errors of `orlop bench`.

use std::io;

/// Why a command of `orlop bench` failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The flags are invalid, or name a file or program that cannot be used.
    #[error("{0}")]
    Flags(String),
    #[error(transparent)]
    Client(#[from] orlop_client::Error),
    #[error(
        "the prefix is in use: use another --prefix, or --purge to delete its keys, prefix=`{prefix}` keys={count}"
    )]
    PrefixInUse { prefix: String, count: i64 },
    /// A request outside the measured loop failed.
    #[error("{step} failed: {error}, endpoint=`{endpoint}`")]
    Step { step: &'static str, endpoint: String, error: String },
    #[error("{program} failed: {error}")]
    Program { program: String, error: String },
    #[error("interrupted before anything was measured")]
    Interrupted,
    #[error("no operation succeeded: {0}")]
    NothingSucceeded(String),
    #[error("some operations failed, or the run is incomplete: {0}")]
    PartlyFailed(String),
    #[error("no operation was completed in the measured time")]
    NothingMeasured,
    /// The soak test found a leak or failed operations.
    #[error("soak test failed: {0}")]
    Soak(String),
    #[error("cannot read or write: {0}")]
    Io(#[from] io::Error),
}
