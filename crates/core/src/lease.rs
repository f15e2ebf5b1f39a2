//! Leases: who holds them, which keys hang on them, when they end.
//!
//! [`table`] is the pure state. [`crate::store`] grants and revokes through the writer, so that both are in the log's order;
//! keep-alives touch only the table.

pub mod table;

pub use table::{Remaining, Renewal, Table};

/// Seconds: what a shorter lease is raised to. etcd's minimum with its default election timeout.
pub const TTL_SECS_MIN: i64 = 2;
/// Seconds: the longest lease.
pub const TTL_SECS_MAX: i64 = 9_000_000_000;
