//! The interface of a log that several instances share.

use std::time::Duration;

use async_trait::async_trait;

use super::{LoggedLease, Meta, Position, Result};
use crate::types::{LeaseId, Revision};

/// An instance of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub id: u64,
    pub name: String,
    /// Empty: a command that uses the database beside servers. Clients do not learn of it.
    pub client_urls: Vec<String>,
}

/// Whether reading leases renews them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    Renew,
    Read,
}

/// The leases that a [`Meta`] contains.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum LeaseScope {
    All,
    /// Those of the listed leases that exist. The list may contain a lease twice.
    Changed(Vec<LeaseId>),
}

/// The interface that several instances on one log need to act as one server.
#[async_trait]
pub trait SharedLog: Send + Sync {
    /// Returns the log's position, which includes everything that was acknowledged before the call.
    async fn position(&self) -> Result<Position>;

    /// Returns the state of the log at one moment. If the log still knows which leases have changed since `known`, the state
    /// contains no others.
    async fn meta_since(&self, known: Position) -> Result<(Meta, LeaseScope)>;

    /// Waits until the log may have rows above `seen`. Returns the log's newest revision if a notification contained
    /// it, and `None` if it is time to poll.
    async fn wait_for_append(&self, seen: Revision) -> Option<Revision>;

    /// Acquires the lock under which all instances append, and holds it until the next
    /// [`Log::append`](super::Log::append). An empty append only releases it. Used by an instance that has lost races. If
    /// the append does not follow soon, the lock is lost and the append fails.
    async fn lock_appends(&self) -> Result<()>;

    /// Returns the TTL and the remaining time of each of these leases that exists. Renewal sets a lease to its full TTL
    /// unless it has expired, and is durable when the call returns.
    async fn leases(&self, ids: &[LeaseId], touch: Touch) -> Result<Vec<LoggedLease>>;

    /// Records that this instance is alive, and returns all live instances, including this one: those that serve clients
    /// before others, the oldest first.
    async fn beat(&self) -> Result<Vec<Member>>;
}

/// Maximum time since the last heartbeat of a live instance; after that the instance is considered dead.
pub const HEARTBEAT_TIMEOUT: Duration = Duration::from_secs(10);
/// Interval of heartbeats.
pub const HEARTBEAT_INTERVAL: Duration = Duration::from_secs(1);
