//! The archive: rows that compactions removed from the log, kept for people.
//!
//! A compaction copies rows to the archive before it deletes them from the log, so each row is in the log, in the
//! archive, or, for a moment, in both. Clients of etcd's API never read the archive: for them a compacted revision is
//! unreadable, with an archive and without. The oldest rows leave the archive first, when they are older than the
//! retention or when the archive is too large.
//!
//! The archive also records times: which revision was the head at which moment.

use std::sync::Arc;

use async_trait::async_trait;

use super::{Log, ReadLog, Reclaimed, Result};
use crate::types::{Change, EncodedKv, Key, KeyRange, Revision, RowId, Superseded};

/// Bytes that a row counts in [`ArchiveState::bytes`], in addition to its key and value.
pub const ARCHIVED_ROW_BYTES: usize = 64;
/// Maximum number of changes in one response of an archive.
pub const ARCHIVE_PAGE_ROWS: usize = 500;
/// Maximum number of keys that an archive visits for one response, whether they were live or not.
pub const ARCHIVE_PAGE_KEYS: usize = 200;
/// Maximum number of rows that an archive visits for one response with the changes of a span, matching or not.
pub const ARCHIVE_VISITED_ROWS: usize = 5_000;
/// Maximum number of moments in one response of an archive.
pub const ARCHIVE_PAGE_MOMENTS: usize = 10_000;
/// Bytes of keys and values after which a response of an archive ends.
pub const ARCHIVE_PAGE_BYTES: usize = 1 << 20;

/// What an archive contains.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchiveState {
    /// The first revision that is complete: its state, and its changes and all later ones, are in the log and the
    /// archive. [`Revision::MAX`]: the archive was never begun.
    pub first: Revision,
    /// The newest compaction whose rows were all copied. Rows of a later one may still be on their way.
    pub copied: Revision,
    /// Bytes of all keys and values, and [`ARCHIVED_ROW_BYTES`] per row. The files or tables are larger.
    pub bytes: u64,
    pub rows: u64,
}

/// A moment at which a revision was the head of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Moment {
    pub revision: Revision,
    pub unix_ms: i64,
}

/// When a revision was written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Written {
    /// Milliseconds since 1970, exact to about a second.
    pub unix_ms: i64,
    /// It was written at this time or before: nobody recorded times then, or the clock may have been ahead.
    pub is_latest: bool,
}

/// A place where the recorded times go back, because the clock was set back.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ClockStep {
    /// The first revision that was recorded after the step.
    pub revision: Revision,
    /// The recorded times before and after the step, in milliseconds since 1970.
    pub from_ms: i64,
    pub to_ms: i64,
}

/// The order of rows in a response.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    OldestFirst,
    NewestFirst,
}

/// A change of the past.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PastRow {
    pub row: RowId,
    pub key: Key,
    /// The pair that was put; `None`: the key was deleted.
    pub kv: Option<EncodedKv>,
}

/// A row of an archive, with all that a copy of the archive needs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ArchivedRow {
    /// Without the pair that it replaced.
    pub change: Change,
    /// See [`Superseded::end`].
    pub end: Revision,
}

impl ArchivedRow {
    /// Returns whether a compaction at this revision has removed the row from the log.
    pub fn is_below(&self, compacted: Revision) -> bool {
        self.change.row.revision < compacted && self.end <= compacted
    }
}

/// A recorded moment of an archive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ArchivedMoment {
    pub moment: Moment,
    /// See [`Archive::note_time`].
    pub has_gap: bool,
}

/// A part of an archive on its way into another one. An archive is its beginning, all rows in order, and all moments in
/// order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ArchivePart {
    /// [`ArchiveState::first`] and [`ArchiveState::copied`].
    Begin {
        first: Revision,
        copied: Revision,
    },
    Rows(Vec<ArchivedRow>),
    Moments(Vec<ArchivedMoment>),
}

/// An archive as of one moment.
#[async_trait]
pub trait FrozenArchive: Send + Sync + 'static {
    async fn state(&self) -> Result<ArchiveState>;

    /// Returns the rows from `from` on, in order: at most [`ARCHIVE_PAGE_ROWS`], and none at the end.
    async fn rows(&self, from: RowId) -> Result<Vec<ArchivedRow>>;

    /// Returns the moments of later revisions than `after`, in order: at most [`ARCHIVE_PAGE_MOMENTS`], and none at the end.
    async fn moments(&self, after: Revision) -> Result<Vec<ArchivedMoment>>;
}

/// Archived changes of a range of keys.
#[derive(Debug, Clone)]
pub struct ArchivedChanges<'a> {
    pub range: &'a KeyRange,
    /// The first and the last row, both included.
    pub rows: (RowId, RowId),
    pub order: Order,
}

/// Rows that compactions removed from the log.
#[async_trait]
pub trait Archive: Send + Sync + 'static {
    /// Begins the archive of a log with this compact revision, or a newer one of the log, unless it was begun before.
    async fn begin(&self, compacted: Option<Revision>) -> Result<()>;

    /// Closes connections that are only for the archive.
    async fn close(&self) {}

    /// Returns whether the archive is in the database of the log, so that an outage of one is an outage of the other.
    fn shares_database(&self) -> bool {
        false
    }

    async fn state(&self) -> Result<ArchiveState>;

    /// Returns the log as it is now, and the archive as of the same or a later moment; later changes are not visible in
    /// them.
    async fn freeze(&self, log: &dyn Log) -> Result<(Arc<dyn ReadLog>, Arc<dyn FrozenArchive>)>;

    /// Copies rows of the log, which the caller then deletes there. Rows that are in the archive, or no longer in the
    /// log, are skipped. The copies are durable when the call returns.
    ///
    /// # Errors
    ///
    /// [`super::Error::Full`] if there is no space for them. If the archive is in the database of the log,
    /// [`super::Error::Unavailable`] only for failures that concern the log, too.
    async fn copy(&self, rows: &[Superseded]) -> Result<()>;

    /// Records that all rows which the compaction at this revision removes were copied ([`ArchiveState::copied`]).
    ///
    /// # Errors
    ///
    /// [`super::Error::Unavailable`] if another server than `server` answers ([`super::Position::server`]): it may lack
    /// the copies.
    async fn finish_copy(&self, compacted: Revision, server: i64) -> Result<()>;

    /// Raises [`ArchiveState::first`], because rows will be missing. Needs no space, and works in a damaged archive: if
    /// nothing else helps, all that the archive has is deleted, and it begins again at `first`. Durable when the call
    /// returns.
    async fn give_up(&self, first: Revision) -> Result<()>;

    /// Deletes some rows, oldest first: those that no revision from `first` on needs, and as many as it takes to have at
    /// most `bytes_max`. [`ArchiveState::first`] is raised before anything is deleted.
    async fn prune(&self, first: Revision, bytes_max: u64) -> Result<Reclaimed>;

    /// Records that `head` is the head now, unless that is recorded. With `has_gap`, nobody has recorded times for a while
    /// ([`Written::is_latest`]). Recorded times stay as they are, also if the clock turns out to have been wrong. If it was set
    /// back by up to a minute, the recorded time stands still.
    async fn note_time(&self, head: Revision, has_gap: bool) -> Result<()>;

    /// Returns the time of the clock by which moments are recorded, in milliseconds since 1970.
    async fn now_ms(&self) -> Result<i64>;

    /// Returns the first recorded moment, which is the lower limit of all times.
    async fn first_moment(&self) -> Result<Option<Moment>>;

    /// Returns the moment with the newest recorded time at or before a time in milliseconds since 1970.
    async fn moment_at(&self, unix_ms: i64) -> Result<Option<Moment>>;

    /// Returns the first moments that were recorded with or after these revisions, in the same order; `None` for a revision
    /// that is not newer than the first recorded moment, or not recorded yet.
    async fn records(&self, revisions: &[Revision]) -> Result<Vec<Option<ArchivedMoment>>>;

    /// Returns all places where the recorded times go back, oldest first.
    async fn clock_steps(&self) -> Result<Vec<ClockStep>>;

    /// Returns archived changes, at most [`ARCHIVE_PAGE_ROWS`], and the last row that was visited, which may be none of
    /// them; `None`: there are no more.
    async fn changes(&self, wanted: ArchivedChanges<'_>) -> Result<(Vec<PastRow>, Option<RowId>)>;

    /// Returns the archived pairs that are the state of the keys of `range` after `after` at a revision, in the order of
    /// keys, and the last key that was visited ([`ARCHIVE_PAGE_KEYS`]), which may be none of theirs; `None`: there are
    /// no more.
    async fn pairs_at(
        &self,
        range: &KeyRange,
        after: Option<&Key>,
        at: Revision,
    ) -> Result<(Vec<(Key, EncodedKv)>, Option<Key>)>;
}
