//! Leases: IDs, deadlines and attached keys.
//!
//! [`table`] is the pure state. [`crate::store`] grants and revokes leases through the writer, so the log orders grants
//! and revokes. A keep-alive appends nothing: it moves the deadline in the table and, if several instances share the
//! log, in the database.

pub mod table;

pub use table::{Expiring, Remaining, Renewal, Table};

/// Minimum TTL in seconds; shorter ones are raised to it. etcd's minimum with its default election timeout.
pub const TTL_SECS_MIN: i64 = 2;
/// Maximum TTL in seconds.
pub const TTL_SECS_MAX: i64 = 9_000_000_000;
