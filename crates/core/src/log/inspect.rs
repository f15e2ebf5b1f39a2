//! Reads of a log that is not trusted yet: rows with all columns, facts by name. Nothing is written.

use async_trait::async_trait;

use super::{History, Result};

/// The two tables of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Table {
    First,
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
    pub id: i64,
    /// 0 in [`Table::First`], which lacks this column.
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
    pub named: Vec<(String, i64)>,
    pub leases: Vec<StoredLease>,
    pub members: Vec<StoredMember>,
    /// Facts that a log of this kind always contains.
    pub required: &'static [&'static str],
    /// Bytes that the database uses.
    pub bytes: i64,
}

/// The extent of a database's check of its own file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    Whole,
    /// Does not compare indexes with their tables.
    Quick,
}

/// A log at one moment. Unreadable content is [`super::Error::Corrupt`].
#[async_trait]
pub trait Inspect: History {
    /// Returns the name of the database for messages.
    fn name(&self) -> &str;

    /// Returns the damage that the database finds in its file, at most `limit` texts.
    async fn integrity(&self, depth: Depth, limit: usize) -> Result<Vec<String>>;

    async fn facts(&self) -> Result<Facts>;

    /// Returns the next few thousand rows after a position, in order; none at the end.
    async fn rows_after(&self, place: (i64, i64)) -> Result<Vec<StoredRow>>;

    /// Ends the read and checks whether its result is consistent.
    ///
    /// # Errors
    ///
    /// If another process may have written to the log during the read.
    async fn finish(&self) -> Result<()>;
}
