//! The log in SQLite ([`SqliteLog`]) and in Postgres ([`PostgresLog`]). The only crate that uses sqlx and
//! rusqlite.
//!
//! Each log implements [`orlop_core::log::Log`] (append, read, reclaim). For each database there are also a loader,
//! which fills an empty database, and a view, which is a read-only snapshot of a log. A view can be opened even if the
//! database may be damaged. [`KineTable`] reads the table of kine, for an import.

mod archive;
mod auth;
mod error;
mod kine;
mod migrations;
mod postgres;
mod rows;
mod sqlite;

/// Whether commits are synced to the disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Durability {
    Synced,
    /// A crash of the machine can lose the last commits, and damage a SQLite file.
    Unsynced,
}

pub use self::{
    kine::{APISERVER_COMPACTION, KineRow, KineState, KineTable, Values},
    postgres::{POSTGRES_PARAMETERS, PostgresArchive, PostgresLoader, PostgresLog, PostgresSettings, PostgresView},
    sqlite::{Defragmented, SQLITE_THREADS, SqliteArchive, SqliteLoader, SqliteLog, SqliteView},
};
