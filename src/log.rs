//! The log: every change ever made and not yet compacted, in a database. It is the truth; all else is a cache of it.
//!
//! [`Log`] is what the store needs of a database, in the domain's words; each backend is one module, and nothing outside
//! them names sqlx. A log knows nothing of keys' states: it appends rows and gives them back.

#[cfg(test)]
pub(crate) mod memory;
mod sqlite;

use async_trait::async_trait;

pub use sqlite::SqliteLog;

use crate::types::{Change, EncodedKv, Key, KeyRange, LeaseId, Revision, RowId};

/// What went wrong with the database, by what the caller should do.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// Nothing was written; the request may be tried again.
    #[error("the database is unavailable: {0}")]
    Unavailable(String),
    /// The append may or may not have happened. Read the log before writing again.
    #[error("the outcome of a write is unknown: {0}")]
    OutcomeUnknown(String),
    /// The store cannot be opened; the text is for the operator.
    #[error("{0}")]
    Open(String),
    /// A row says what no row can say.
    #[error("the log is corrupt: {0}")]
    Corrupt(String),
}

pub type Result<T> = std::result::Result<T, Error>;

/// What the log says of the store as a whole.
#[derive(Debug, Clone)]
pub struct Meta {
    pub cluster_id: u64,
    pub member_id: u64,
    pub compact_revision: Option<Revision>,
    pub head: Revision,
    pub leases: Vec<(LeaseId, i64)>,
}

/// Rows and lease changes that become durable together.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a> {
    /// The revision that the rows were evaluated on.
    pub expected_head: Revision,
    /// In order; revisions dense from `expected_head` + 1.
    pub changes: &'a [Change],
    pub leases: &'a [LeaseChange],
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseChange {
    Grant { id: LeaseId, ttl_secs: i64 },
    Revoke { id: LeaseId },
}

#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appended {
    /// All is durable.
    Done,
    /// The head was not the expected one; nothing was written.
    Conflict,
}

/// A part of the log, in order.
#[derive(Debug, Clone)]
pub struct Page {
    pub changes: Vec<Change>,
    /// Where the next page begins.
    pub next: Revision,
}

/// Whether changes are read with the pairs that they replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithPrev {
    Yes,
    No,
}

/// Bytes that the database takes on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub total: i64,
    /// `total` less the free pages.
    pub in_use: i64,
}

/// An append-only log of changes.
#[async_trait]
pub trait Log: Send + Sync + 'static {
    async fn meta(&self) -> Result<Meta>;

    /// The rows from `from` on in their order, values left out (every put's pair has an empty one), at most about `limit` of
    /// them. Empty at the end of the log.
    async fn replay(&self, from: RowId, limit: usize) -> Result<Vec<Change>>;

    /// Appends all of it if the head is the expected one, and nothing otherwise. Durable once it returns.
    ///
    /// # Cancel safety
    ///
    /// None: when the future is dropped the append may still happen.
    async fn append(&self, append: Append<'_>) -> Result<Appended>;

    /// The pairs in these rows, in no order; rows that hold a delete or were compacted away are left out.
    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>>;

    /// The changes within `range` at revisions from `from` to at most `to`, whole revisions only. A page ends early by
    /// size or by rows looked at; it may be empty before `to` is reached.
    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page>;

    /// Records the compact revision, which never goes back.
    async fn compact(&self, revision: Revision) -> Result<()>;

    /// Deletes rows that were compacted away, and gives free space back to the file system in steps.
    async fn purge(&self, rows: &[RowId]) -> Result<()>;

    async fn size(&self) -> Result<Size>;

    /// Finishes what is under way and lets go of the database.
    async fn close(&self);
}

/// Builds a [`Change`] from a row's columns.
struct RowColumns {
    row: RowId,
    key: Vec<u8>,
    value: Vec<u8>,
    lease: i64,
    version: i64,
    create_revision: i64,
    prev_revision: i64,
    deleted: bool,
}

impl RowColumns {
    fn kv(&self) -> EncodedKv {
        let version = crate::types::Version {
            row: self.row,
            create_revision: Revision(self.create_revision),
            version: self.version,
        };
        EncodedKv::new(&self.key, version, &self.value, LeaseId::from_wire(self.lease))
    }

    fn into_change(self, prev_kv: Option<EncodedKv>) -> Change {
        use crate::types::{ChangeKind, Prev};
        let kind = if self.deleted {
            ChangeKind::Delete
        } else {
            ChangeKind::Put {
                kv: self.kv(),
                create_revision: Revision(self.create_revision),
                version: self.version,
                lease: LeaseId::from_wire(self.lease),
            }
        };
        let prev =
            (self.prev_revision != 0).then(|| Prev { row: RowId::new(Revision(self.prev_revision), 0), kv: prev_kv });
        Change { row: self.row, key: Key::from(self.key), kind, prev, prev_lease: None }
    }
}
