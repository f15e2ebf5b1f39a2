//! Reads of a log that has not been checked yet, for `orlop check`: rows with all columns, and [`Facts`]. Nothing is
//! written.

use async_trait::async_trait;

use super::{ReadLog, Result};

/// The two tables that contain the rows of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    /// The first row of each revision.
    First,
    /// The further rows of each revision.
    More,
}

impl Table {
    pub fn name(self) -> &'static str {
        match self {
            Self::First => "kv_log",
            Self::More => "kv_log_more",
        }
    }
}

/// The columns of a row, unchecked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRow {
    pub table: Table,
    /// The revision.
    pub id: i64,
    /// The row's number within its revision; 0 in [`Table::First`], which lacks this column.
    pub sub: i64,
    pub key: Vec<u8>,
    /// `None`: the value is NULL.
    pub value_bytes: Option<i64>,
    pub lease: i64,
    pub version: i64,
    pub create_revision: i64,
    pub prev_revision: i64,
    /// 0 or 1.
    pub deleted: i64,
}

impl StoredRow {
    /// Returns `id` and `sub`, by which rows are ordered.
    pub fn place(&self) -> (i64, i64) {
        (self.id, self.sub)
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredLease {
    pub id: i64,
    pub ttl: i64,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredMember {
    pub id: i64,
    pub name: String,
    /// Whether the member has sent a heartbeat since its start.
    pub beats_after_start: bool,
}

/// The data of a log other than its rows.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The smallest and the largest id in [`Table::First`].
    pub ids: Option<(i64, i64)>,
    /// The facts of the log: numbers with a name, such as `compact_revision`.
    pub named: Vec<(String, i64)>,
    pub leases: Vec<StoredLease>,
    pub members: Vec<StoredMember>,
    /// Names of the facts that a log in this kind of database always contains.
    pub required: &'static [&'static str],
    /// Bytes that the database uses.
    pub bytes: i64,
}

/// What an archive contains besides its rows, unchecked.
#[derive(Debug, Clone, Default)]
pub struct StoredArchive {
    /// The damage that the database finds in a file of the archive. If there is any, nothing else was read.
    pub damage: Vec<String>,
    /// The compact revision of the log at the same moment or later.
    pub compact_revision: Option<i64>,
    pub first: Option<i64>,
    pub copied: Option<i64>,
    pub bytes: Option<i64>,
    pub rows: Option<i64>,
}

/// A row of an archive, unchecked.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredArchivedRow {
    pub id: i64,
    pub sub: i64,
    pub key: Vec<u8>,
    /// Bytes of key and value.
    pub bytes: i64,
    /// 0 or 1.
    pub deleted: i64,
    pub end_revision: i64,
}

/// The extent of a database's check of its own file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    Whole,
    /// Does not compare indexes with their tables.
    Quick,
}

/// A log at one moment. Unreadable content causes [`super::Error::Corrupt`].
#[async_trait]
pub trait Inspect: ReadLog {
    /// Returns the name of the database for messages.
    fn name(&self) -> &str;

    /// Returns the damage that the database finds in its file, at most `limit` texts, or the indexes that its tables lack.
    async fn integrity(&self, depth: Depth, limit: usize) -> Result<Vec<String>>;

    async fn facts(&self) -> Result<Facts>;

    /// Returns the next few thousand rows after `place` ([`StoredRow::place`]), in order. Returns no rows at the end of
    /// the log.
    async fn rows_after(&self, place: (i64, i64)) -> Result<Vec<StoredRow>>;

    /// Returns the archive; `None`: there is none, or it was never begun. It is read after the log.
    async fn archive(&self, depth: Depth, limit: usize) -> Result<Option<StoredArchive>>;

    /// Returns the next few thousand rows of the archive after `id` and `sub`, in order.
    async fn archived_after(&self, place: (i64, i64)) -> Result<Vec<StoredArchivedRow>>;

    /// Ends the read and checks that no other process can have written in the meantime.
    ///
    /// # Errors
    ///
    /// If another process may have written to the log during the read.
    async fn finish(&self) -> Result<()>;
}
