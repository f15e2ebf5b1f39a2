//! Orlop: etcd's v3 API over an append-only log in a database.
//!
//! The server crate: passes the requests of clients to [`orlop_core::store::Store`] and returns its responses. In
//! reading order:
//!
//! - [`server`]: the composition root, which starts and stops the log, the store and the listeners
//! - [`config`], [`logging`], [`telemetry`]: settings, the server's own log, OpenTelemetry spans
//! - [`net`]: addresses, TLS, connection limits
//! - [`api`]: etcd's gRPC services
//! - [`auth`]: who sends a request: tokens, passwords, names in certificates
//! - [`http`]: probes, metrics and the JSON gateway
//! - [`snapshot`], [`check`]: snapshots, which contain a log in one file; validation of a log
//! - [`migrate`]: copies a running etcd or Orlop and takes over from it
//! - [`kine`]: imports the table of a kine that has stopped; [`load`]: the rows of another store, made into those of a log
//! - [`datastore`]: opens, creates and deletes the database that the settings name
//! - [`history`]: `orlop history`, `diff`, `get` and `rewind`: past states of a store
//! - [`status`], [`offline`]: the state of a running server on one screen; commands on a store without its server
//! - [`insight`], [`top`]: figures about a running server; `orlop top`, which shows them in a terminal
//! - [`console`]: the web page: load, sizes, keys and their history, events
//! - [`output`], [`progress`], [`text`]: output of commands and how far they are; values as texts for people
//! - [`hangup`]: the end of a command's terminal

/// The commit of the source.
pub const COMMIT: &str = env!("ORLOP_COMMIT");

/// Version and commit, as `--version` prints them.
pub const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (commit ", env!("ORLOP_COMMIT"), ")");

pub mod api;
pub mod auth;
pub mod check;
pub mod config;
pub mod console;
pub mod datastore;
mod hangup;
pub mod history;
pub mod http;
pub mod insight;
pub mod kine;
pub mod load;
pub mod logging;
pub mod migrate;
pub mod net;
pub mod offline;
pub mod output;
mod progress;
pub mod server;
pub mod snapshot;
pub mod status;
pub mod telemetry;
pub mod text;
pub mod top;
