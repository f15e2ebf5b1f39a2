//! A log as it stands in its database, for who does not yet believe it: rows with all their columns, facts by their names.
//! Nothing is written.

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

/// A row's columns, whatever they say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StoredRow {
    pub table: Table,
    pub id: i64,
    /// 0 in [`Table::First`], which has no such column.
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
    /// Whether it was heard of after its start.
    pub beats_after_start: bool,
}

/// What stands beside the rows.
#[derive(Debug, Clone, Default)]
pub struct Facts {
    /// The smallest and the largest id in [`Table::First`].
    pub ids: Option<(i64, i64)>,
    pub named: Vec<(String, i64)>,
    pub leases: Vec<StoredLease>,
    pub members: Vec<StoredMember>,
    /// Facts that a log of this kind always has.
    pub required: &'static [&'static str],
    /// That the database takes.
    pub bytes: i64,
}

/// How thoroughly a database looks through its own file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Depth {
    Whole,
    /// Indexes are not compared with their tables.
    Quick,
}

/// A log at one moment. What is unreadable is [`super::Error::Corrupt`].
#[async_trait]
pub trait Inspect: History {
    /// The database's, for people.
    fn name(&self) -> &str;

    /// What the database itself finds wrong with its file, at most `limit` texts.
    async fn integrity(&self, depth: Depth, limit: usize) -> Result<Vec<String>>;

    async fn facts(&self) -> Result<Facts>;

    /// The rows behind a place, in their order, some thousands of them; none: there are no more.
    async fn rows_after(&self, place: (i64, i64)) -> Result<Vec<StoredRow>>;

    /// Ends the moment, and looks whether what was read may be believed.
    ///
    /// # Errors
    ///
    /// If somebody may have written meanwhile.
    async fn finish(&self) -> Result<()>;
}
