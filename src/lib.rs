//! Orlop: etcd's v3 API over an append-only log in a database.
//!
//! ```text
//! client ──gRPC──▶ api ──▶ store: writer (group commit) ──append──▶ log: kv_log
//!                   │                                                │
//!                   │                                   committed rows, in revision order
//!                   ▼                                                ▼
//! client ◀─range── reader ◀──── index (key → revisions) ◀──────── applier ──▶ watch: hub ──▶ client
//!                               + value cache                      + leases
//! ```
//!
//! The log is the truth; everything in memory is a cache of it that is rebuilt by reading it once. Data goes one way:
//! nothing but the applier changes the index, and nothing but committed rows reaches the applier.
//!
//! In reading order:
//!
//! - [`types`]: revisions, keys, ranges, changes, and their encoded form
//! - [`metrics`]: what is counted
//! - [`trace`]: a request's number and the parts of its time
//! - [`mod@private`]: folders and files that only the server's user sees
//! - [`index`]: key → revisions, at every readable revision
//! - [`log`]: the trait and the databases behind it
//! - [`lease`]: who holds which keys until when
//! - [`watch`]: committed changes on their way to clients
//! - [`store`]: requests, the writer that commits them in groups, the readers
//! - [`api`]: etcd's gRPC services
//! - [`http`]: what is asked for by plain HTTP
//! - [`listen`], [`mod@gather`]: addresses and TLS; what connections write, sent together
//! - [`config`], [`logging`], [`server`]: settings, the server's own log, and the process put together
//! - [`snapshot`]: a log as one file
//! - [`check`]: whether a log is sound
//! - [`mod@bench`]: a load on any etcd endpoint
//!
//! What must hold:
//!
//! 1. Revisions are dense and in one order; nothing is answered before its commit is durable.
//! 2. The index equals what the log says, at every revision from the compact revision to the head.
//! 3. Watches are ordered, unique, atomic and reliable; progress never overtakes an event that it covers.

pub mod api;
pub mod bench;
pub mod check;
pub mod config;
mod gather;
pub mod http;
pub mod index;
#[cfg(any(test, feature = "internals"))]
pub mod internals;
pub mod lease;
pub mod listen;
pub mod log;
pub mod logging;
pub mod metrics;
mod private;
pub mod proto;
pub mod server;
#[cfg(test)]
mod simulation;
pub mod snapshot;
pub mod store;
pub mod supervise;
pub mod trace;
pub mod turns;
pub mod types;
pub mod watch;
pub mod watchdog;
