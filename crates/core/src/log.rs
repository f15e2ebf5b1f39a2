//! The log: all changes that are not compacted, in a database. All other state is a cache of it.
//!
//! [`Log`] is the interface that the store needs from a database, in the domain's terms. A log does not know the state of keys.

mod archive;
mod inspect;
#[cfg(test)]
pub mod memory;
mod read_set;
mod saved_index;
mod shared;

use async_trait::async_trait;

pub use self::{
    archive::{
        ARCHIVE_PAGE_BYTES, ARCHIVE_PAGE_KEYS, ARCHIVE_PAGE_MOMENTS, ARCHIVE_PAGE_ROWS, ARCHIVE_VISITED_ROWS,
        ARCHIVED_ROW_BYTES, Archive, ArchivePart, ArchiveState, ArchivedChanges, ArchivedMoment, ArchivedRow,
        ClockStep, FrozenArchive, Moment, Order, PastRow, Written,
    },
    inspect::{Depth, Facts, Inspect, StoredArchive, StoredArchivedRow, StoredLease, StoredMember, StoredRow, Table},
    read_set::ReadSet,
    saved_index::{SAVED_INDEX_MARK, SavedIndex, SavedIndexReader, SavedIndexState, SavedIndexWriter},
    shared::{HEARTBEAT_INTERVAL, HEARTBEAT_TIMEOUT, LeaseScope, Member, SharedLog, Touch},
};

use crate::auth::{AuthChange, AuthState};
use crate::types::{Change, EncodedKv, KeyRange, LeaseId, Revision, RowId};

/// Errors of the database, by what the caller should do.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// Nothing was written; the request may be repeated.
    #[error("the database is unavailable: {0}")]
    Unavailable(String),
    /// The database's disk is full. Nothing was written.
    #[error("the disk of the database is full: {0}")]
    Full(String),
    /// The database does not permit this, and would refuse it again. Nothing was written.
    #[error("refused by the database: {0}")]
    Refused(String),
    /// The append may or may not have happened. Read the log before the next write.
    #[error("the outcome of a write is unknown: {0}")]
    OutcomeUnknown(String),
    /// The store cannot be opened; the text is for the operator.
    #[error("{0}")]
    Open(String),
    /// A row or a page of the file has content that Orlop never writes.
    #[error("the log is corrupt: {0}; `orlop check` reports all damage")]
    Corrupt(String),
    /// The database is not the one that was read before: it lacks or contradicts applied changes.
    #[error("the log has another history: {0}")]
    Diverged(String),
}

pub type Result<T> = std::result::Result<T, Error>;

/// The position of the log. If two reads of it are equal, nothing was appended between them: no rows, no change of a
/// lease, an alarm, a user or a role, no compaction. `epoch` and `server` are always 0 if this process is the only one on the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    pub head: Revision,
    /// Number of appends that changed leases, alarms, users or roles, or compacted.
    pub epoch: i64,
    /// Identifies one run of the database server and the table of the log. When it changes, the store compares the end
    /// of the log before the next append.
    pub server: i64,
}

/// The state of the store as recorded in the log.
#[derive(Debug, Clone)]
pub struct Meta {
    pub cluster_id: u64,
    pub member_id: u64,
    pub position: Position,
    pub compact_revision: Option<Revision>,
    pub leases: Vec<LoggedLease>,
    pub alarms: Vec<(Alarm, Cause)>,
    pub auth: AuthMark,
    /// The cluster that an unfinished migration copies into this log. No server serves such a log.
    pub source: Option<u64>,
}

/// Identifies a state of users and roles ([`ReadLog::auth`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AuthMark {
    pub enabled: bool,
    pub revision: u64,
}

impl AuthMark {
    pub fn of(state: &AuthState) -> Self {
        Self { enabled: state.enabled, revision: state.revision }
    }
}

impl Default for AuthMark {
    fn default() -> Self {
        Self::of(&AuthState::default())
    }
}

/// An alarm of a member, as in etcd. Alarms survive restarts and apply to all instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alarm {
    /// The member that a client named, or the instance that raised the alarm.
    pub member_id: u64,
    pub kind: AlarmKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlarmKind {
    NoSpace,
    Corrupt,
}

/// The cause of an alarm. The server clears only alarms that it raised itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cause {
    Client,
    Quota,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AlarmChange {
    Raise { alarm: Alarm, cause: Cause },
    Clear { alarm: Alarm },
}

impl AlarmKind {
    /// Returns etcd's name.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoSpace => "NOSPACE",
            Self::Corrupt => "CORRUPT",
        }
    }
}

impl Alarm {
    /// Returns the name of the alarm's fact (see [`Facts::named`]): `alarm/KIND/MEMBER`, the member in hexadecimal.
    pub fn fact(self) -> String {
        format!("alarm/{}/{:x}", self.kind.name(), self.member_id)
    }

    fn from_fact(name: &str) -> Option<Self> {
        let (kind, member) = name.strip_prefix("alarm/")?.split_once('/')?;
        let kind = [AlarmKind::NoSpace, AlarmKind::Corrupt].into_iter().find(|known| known.name() == kind)?;
        Some(Self { member_id: u64::from_str_radix(member, 16).ok()?, kind })
    }
}

/// A change of a fact ([`Facts::named`]).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FactChange {
    Alarm(AlarmChange),
    /// Begins a migration from the cluster with this ID, or ends it.
    Source(Option<u64>),
}

impl FactChange {
    /// Returns the name of the fact and the value to which the change sets it; `None` removes the fact.
    pub fn fact(self) -> (String, Option<i64>) {
        match self {
            Self::Alarm(AlarmChange::Raise { alarm, cause: Cause::Client }) => (alarm.fact(), Some(1)),
            Self::Alarm(AlarmChange::Raise { alarm, cause: Cause::Quota }) => (alarm.fact(), Some(2)),
            Self::Alarm(AlarmChange::Clear { alarm }) => (alarm.fact(), None),
            Self::Source(cluster) => (MIGRATION_SOURCE.to_owned(), cluster.map(u64::cast_signed)),
        }
    }
}

/// Name of the fact that stores [`Meta::source`].
pub const MIGRATION_SOURCE: &str = "migration_source";

/// Returns whether the fact with this name is an alarm.
pub fn is_alarm(name: &str) -> bool {
    Alarm::from_fact(name).is_some()
}

/// Returns the alarm of a fact, if it is one.
pub fn alarm(name: &str, value: i64) -> Option<(Alarm, Cause)> {
    let cause = if value == 2 { Cause::Quota } else { Cause::Client };
    Some((Alarm::from_fact(name)?, cause))
}

/// Prefix of the names of facts ([`Facts::named`]) that store remaining seconds of leases: `lease_left/ID`, the ID in
/// hexadecimal.
const LEASE_LEFT: &str = "lease_left/";

/// Returns the name of the fact that stores a lease's remaining seconds while no server runs.
pub fn lease_left_fact(id: LeaseId) -> String {
    format!("{LEASE_LEFT}{:x}", id.0)
}

/// Returns the lease whose remaining seconds the fact with this name stores.
pub fn lease_of_fact(name: &str) -> Option<LeaseId> {
    let id = u64::from_str_radix(name.strip_prefix(LEASE_LEFT)?, 16).ok()?;
    Some(LeaseId(id.cast_signed()))
}

/// A lease that was granted and not yet removed by [`LeaseChange::Revoke`] or [`LeaseChange::Expire`]. Its deadline may
/// have passed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoggedLease {
    pub id: LeaseId,
    pub ttl_secs: i64,
    /// Seconds until the deadline, negative after it. If several instances share the log, by the database's clock.
    /// Otherwise the seconds that the previous process recorded when it stopped; `None` if it recorded none.
    pub left_secs: Option<f64>,
}

/// Changes that become durable together.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a> {
    /// The position of the log at which the requests were evaluated.
    pub expected: Position,
    /// In order. Their revisions are dense and start with the one after the expected head.
    pub changes: &'a [Change],
    /// The keys that the evaluation looked at. If other instances have appended since then, but changed none of these
    /// keys, a shared log may append behind their changes. `None`: append at the expected position only.
    pub reads: Option<&'a ReadSet<'a>>,
    pub leases: &'a [LeaseChange],
    /// A compact revision to record. The log ignores a revision that is lower than the recorded one.
    pub compact: Option<Revision>,
    /// A fact to set or remove. If it is present, everything else is empty.
    pub fact: Option<FactChange>,
    /// A change of users and roles. If it is present, everything else is empty.
    pub auth: Option<AuthAppend<'a>>,
}

/// A change of users and roles.
#[derive(Debug, Clone, Copy)]
pub struct AuthAppend<'a> {
    pub change: &'a AuthChange,
    /// The state after the change.
    pub next: &'a AuthState,
}

#[cfg(test)]
impl<'a> Append<'a> {
    /// Creates an append of rows only, for a log without other instances.
    pub fn rows(head: Revision, changes: &'a [Change]) -> Self {
        Self {
            expected: Position { head, epoch: 0, server: 0 },
            changes,
            reads: None,
            leases: &[],
            compact: None,
            fact: None,
            auth: None,
        }
    }
}

impl Append<'_> {
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty()
            && self.leases.is_empty()
            && self.compact.is_none()
            && self.fact.is_none()
            && self.auth.is_none()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LeaseChange {
    Grant {
        id: LeaseId,
        ttl_secs: i64,
    },
    Revoke {
        id: LeaseId,
    },
    /// Like `Revoke`, but only if the lease has expired by the log's clock; otherwise nothing is appended, and the
    /// result is [`Appended::Conflict`].
    Expire {
        id: LeaseId,
    },
}

#[must_use]
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Appended {
    /// All changes are durable.
    Done,
    /// All changes are durable, behind those of other instances: apply [`Rebase`](crate::types::Rebase) to them.
    Behind {
        /// The head before the own changes.
        base: Revision,
        /// The changes of the other instances from the expected head to `base`. Empty if they are in the log only,
        /// because they are large.
        others: Vec<Change>,
    },
    /// Nothing was written: the log was not at the expected position, and the append could not be moved; or a lease to
    /// expire was renewed.
    Conflict,
}

/// A part of the log, in order.
#[derive(Debug, Clone)]
pub struct Page {
    pub changes: Vec<Change>,
    /// The first revision of the next page.
    pub next: Revision,
    /// Rows below this revision may be missing because a compaction deleted them; all rows at or above it exist. `None`
    /// if only this process deletes rows, since it knows which ones.
    pub purged: Option<Revision>,
}

/// Whether changes are read with the pairs that they replaced.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum WithPrev {
    Yes,
    No,
}

/// Bytes that the database uses on disk.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    pub total: i64,
    /// `total` less the free space inside the database.
    pub in_use: i64,
    /// Bytes that are free on the database's disk; `None` if that is unknown.
    pub disk_free: Option<u64>,
    /// Bytes of SQLite's WAL, which `total` does not contain; `None` on other databases.
    pub wal: Option<u64>,
}

/// Number of database connections for reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    pub idle: usize,
    pub used: usize,
}

/// The precision of [`Log::size`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// The free space may be the result of an earlier count.
    Quick,
    /// The free space is determined anew, which may read a part of the log.
    Fresh,
}

/// A step that reclaims space. Writes wait for it, so it is short.
#[derive(Debug, Clone, Copy)]
pub enum Reclaim<'a> {
    /// Deletes rows that are unreadable since a compaction at or below `compacted`, and may return some free space to
    /// the file system. Fails if the log is no longer on `server` ([`Position::server`]), on which the rows were found.
    Rows { rows: &'a [RowId], compacted: Revision, server: i64 },
    /// Returns free space to the file system.
    Space,
}

/// Whether another step would reclaim more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaimed {
    More,
    All,
}

/// A callback that receives the log's rows in order, a part per call, and the state of the log.
pub type Visit<'a> = dyn FnMut(&Meta, Vec<Change>) -> Result<()> + Send + 'a;

/// Reads of the log as a whole.
#[async_trait]
pub trait ReadLog: Send + Sync + 'static {
    /// Returns the state of the log at one moment.
    async fn meta(&self) -> Result<Meta>;

    /// Returns users and roles as of one moment, which may be later than that of an earlier call of [`ReadLog::meta`].
    async fn auth(&self) -> Result<AuthState>;

    /// Visits the rows from revision `from` on, as of one moment, without values: the pair of every put has an empty value.
    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta>;

    /// Returns the changes within `range` at revisions from `from` to at most `to`, whole revisions only. A page is
    /// limited in bytes and visited rows; it may be empty before `to` is reached.
    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page>;
}

/// Fills an empty database of a new cluster, because its history differs from here on. Its content becomes visible when
/// [`Load::finish`] returns.
#[async_trait]
pub trait Load: Send {
    /// Adds rows in order.
    async fn add(&mut self, changes: &[Change]) -> Result<()>;

    /// Adds a part of the archive. Without any, there is no archive.
    async fn add_archive(&mut self, part: ArchivePart) -> Result<()>;

    /// Adds the leases of `meta`, each with its remaining time if it is known and its full TTL otherwise, the compact
    /// revision, the source of a migration, and users and roles. Makes everything durable.
    async fn finish(self: Box<Self>, meta: &Meta, auth: &AuthState) -> Result<()>;
}

/// An append-only log of changes.
///
/// The store calls [`Log::append`] and [`SharedLog::lock_appends`] one at a time, from its writer. All other calls may run
/// beside them and beside each other; of [`Log::reclaim`], at most one for rows and one for space.
///
/// [`Log::shared`] says more than that other instances append. The store takes a shared log for a remote database: its
/// outages pass, so failed reads are repeated; calls that take a round trip are shared by concurrent requests; heartbeats
/// show whether it accepts writes. A shared log also keeps the deadlines of leases, by its own clock. An engine with only
/// some of these properties first needs a method for each.
///
/// `tests/it/log.rs` tests this interface, and a variant of `Backend` in `tests/it/support.rs` runs the tests of the server
/// on a new engine. The simulation in `crates/core/tests` has a log whose calls fail in every way that the store survives.
#[async_trait]
pub trait Log: ReadLog {
    /// Returns the log as it is now; later appends and deletions are not visible in it.
    async fn freeze(&self) -> Result<Box<dyn ReadLog>>;

    /// Appends everything if the log is at the expected position, or if it may append behind the changes of other
    /// instances ([`Append::reads`]), and nothing otherwise. The append is durable when the call returns.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`], [`Error::Full`], [`Error::Corrupt`] and [`Error::Refused`] only if nothing was and nothing
    /// will be written; the last only for a change of a fact, or of users and roles.
    ///
    /// # Cancel safety
    ///
    /// Not cancel safe: the append may still happen after the future was dropped.
    async fn append(&self, append: Append<'_>) -> Result<Appended>;

    /// Returns the pairs in these rows, in their order. Omits rows that contain a delete or were compacted. A row that
    /// occurs twice may be omitted once.
    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>>;

    /// Returns the lengths of the values in these rows in bytes, in any order. Omits rows that contain a delete or were
    /// compacted. The log of a database does not read the values for this.
    async fn value_lengths(&self, rows: &[RowId]) -> Result<Vec<(RowId, u64)>> {
        let lengths = self.values(rows).await?.into_iter().map(|(row, kv)| (row, kv.value_slice().len() as u64));
        Ok(lengths.collect())
    }

    /// Returns the secret key that signs tokens. It is random, belongs to this log alone, and never changes.
    async fn token_key(&self) -> Result<Vec<u8>>;

    /// Reclaims space. See [`Reclaim`].
    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed>;

    async fn size(&self, precision: Precision) -> Result<Size>;

    fn connections(&self) -> Connections;

    /// Returns where the index can be saved; `None`: each start reads the whole log.
    fn saved_index(&self) -> Option<&dyn SavedIndex> {
        None
    }

    /// Checks what reading the rows does not show. May read the whole database.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if it is damaged.
    async fn check(&self) -> Result<()> {
        Ok(())
    }

    /// Completes when a statement has found damage, with a text for the operator.
    async fn damaged(&self) -> String {
        std::future::pending().await
    }

    /// Removes the remaining times of leases that the previous process recorded: from now on this process has them, and they
    /// change. Call it when everything was read.
    async fn forget_lease_times(&self) -> Result<()> {
        Ok(())
    }

    /// Finishes running work and closes the database. A log without deadlines records the remaining times of all `leases`
    /// for the next start.
    async fn close(&self, leases: &[LoggedLease]);

    /// Returns the interface of a log that several instances append to; `None` if this process is the only one.
    fn shared(&self) -> Option<&dyn SharedLog>;
}
