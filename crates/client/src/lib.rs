//! A connection to an etcd endpoint, with etcdctl's flags for addresses, TLS and authentication. The commands that
//! address a running server use it, and so does the load generator.
//!
//! There is no reconnect: a lost connection is an error of the command.

mod connection;
mod dial;
mod endpoint;
mod metrics;
mod mismatch;
mod watch;

use std::io;

pub use self::{
    connection::{Client, Connection, connection_lost},
    endpoint::{Address, Credentials, Endpoint, ServerFlags, Target},
    metrics::{Labels, MetricsPage},
    mismatch::Tls,
    watch::WatchStream,
};

/// Why an endpoint cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The flags name a file that cannot be used.
    #[error("{0}")]
    Flags(String),
    #[error("cannot connect: {source}, endpoint=`{endpoint}`")]
    Connect { endpoint: String, source: io::Error },
    /// A request failed, or was not answered in time.
    #[error("cannot read the state of the server: {error}, endpoint=`{endpoint}`")]
    Request { endpoint: String, error: String },
    #[error("logging in failed: {error}, endpoint=`{endpoint}`")]
    LogIn { endpoint: String, error: String },
}

/// Formats the status with its sources: the message of a transport error alone does not name the cause. A source that
/// only repeats the text before it is left out.
pub fn describe(status: &tonic::Status) -> String {
    let mut text = format!("{:?}: {}", status.code(), status.message());
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        let part = error.to_string();
        if !text.ends_with(&part) {
            text = format!("{text}: {part}");
        }
        source = error.source();
    }
    text
}

/// Returns what to do about a request that needs any user and was sent without one; an empty text for other errors.
pub fn hint_at_user(status: &tonic::Status) -> &'static str {
    if status.message().contains("user name is empty") {
        "; log in: --user, or the variables ETCDCTL_USER and ETCDCTL_PASSWORD"
    } else {
        ""
    }
}

/// Returns what to do about an error of the server's Auth in a request that only the role root may send; an empty text for
/// other errors.
pub fn hint_at_root(status: &tonic::Status) -> &'static str {
    let of_auth = ["user name is empty", "permission denied"];
    if of_auth.iter().any(|text| status.message().contains(text)) {
        "; log in as a user with the role root: --user, or the variables ETCDCTL_USER and ETCDCTL_PASSWORD"
    } else {
        ""
    }
}
