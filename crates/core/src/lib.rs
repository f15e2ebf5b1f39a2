//! The store: etcd's data model over an append-only log.
//!
//! ```text
//! requests ──▶ store: writer (group commit) ──append──▶ log: kv_log
//!                │                                        │
//!                │                         committed rows, in revision order
//!                ▼                                        ▼
//! responses ◀── reader ◀── index (key → revisions) ◀── applier ──▶ watch: hub ──▶ events
//!                          + value cache               + leases
//! ```
//!
//! The log is the source of truth. The index and the lease table are caches of the log; each start rebuilds them from the
//! log, or from a saved index and the part of the log behind it. Only the applier changes the index, and only committed
//! rows reach the applier.
//!
//! This crate contains no SQL, no gRPC and no HTTP: a database implements [`log::Log`], and a server calls
//! [`store::Store`]. In reading order:
//!
//! - [`types`]: revisions, keys, ranges, changes, and their encoded form
//! - [`log`]: the trait that a database implements
//! - [`index`]: key → revisions, at every readable revision
//! - [`lease`]: the lease table
//! - [`auth`]: users, roles and what they permit
//! - [`watch`]: committed changes on their way to clients
//! - [`store`]: requests, the writer that commits them in groups, the readers
//! - [`overload`]: limits on time and memory under attack
//! - [`metrics`], [`trace`], [`log_limit`], [`supervise`], [`watchdog`], [`mod@private`], [`files`], [`clock`]: counters,
//!   request tracing, how often messages are logged, panics, stuck loops, file modes, file names, the wall clock
//! - [`sync`]: locks, which a scheduler replaces in tests of races
//!
//! Invariants:
//!
//! 1. Revisions are dense and totally ordered. A request is answered only after its commit is durable.
//! 2. The index equals the log at every revision from the compact revision to the head.
//! 3. Watches are ordered, unique, atomic and reliable; progress never overtakes an event that it covers.

#[cfg(test)]
extern crate self as orlop_core; // tests/model, which the unit tests include, imports this crate by this name

pub mod auth;
mod change_tail;
pub mod clock;
pub mod files;
pub mod index;
pub mod lease;
pub mod log;
pub mod log_limit;
pub mod metrics;
pub mod overload;
pub mod private;
pub mod store;
pub mod supervise;
mod sync;
pub mod trace;
pub mod types;
pub mod watch;
pub mod watchdog;
