//! Orlop: etcd's v3 API over an append-only log in a database.
//!
//! The server: it takes requests from connections to [`orlop_core::store::Store`] and answers back. In reading order:
//!
//! - [`server`]: the composition root, which puts log, store and listeners together and stops them
//! - [`config`], [`logging`], [`telemetry`]: settings, the server's own log, OpenTelemetry spans
//! - [`net`]: addresses, TLS, connection limits
//! - [`api`]: etcd's gRPC services
//! - [`http`]: probes, metrics and the JSON gateway
//! - [`snapshot`], [`check`]: a log as one file; validation of a log

pub mod api;
pub mod check;
pub mod config;
pub mod http;
pub mod logging;
pub mod net;
pub mod server;
pub mod snapshot;
pub mod telemetry;
