//! The log in SQLite ([`SqliteLog`]) and in Postgres ([`PostgresLog`]): the only crate that names sqlx.
//!
//! Each database implements [`orlop_core::log::Log`] (append, read, reclaim) and has a loader, which fills an empty
//! database, and a view, which reads a database that is not trusted yet.

mod migrations;
mod postgres;
mod rows;
mod sqlite;

pub use self::{
    postgres::{PostgresLoader, PostgresLog, PostgresSettings, PostgresView},
    sqlite::{SqliteLoader, SqliteLog, SqliteView},
};
