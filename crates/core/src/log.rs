//! The log: every change ever made and not yet compacted, in a database. It is the truth; all else is a cache of it.
//!
//! [`Log`] is what the store needs of a database, in the domain's words; each backend is one module, and nothing outside
//! them names sqlx. A log knows nothing of keys' states: it appends rows and gives them back.

mod inspect;
#[cfg(test)]
pub mod memory;

use std::time::Duration;

use async_trait::async_trait;

pub use self::inspect::{Depth, Facts, Inspect, StoredLease, StoredMember, StoredRow, Table};

use crate::types::{Change, EncodedKv, KeyRange, LeaseId, Revision, RowId};

/// What went wrong with the database, by what the caller should do.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Error {
    /// Nothing was written; the request may be tried again.
    #[error("the database is unavailable: {0}")]
    Unavailable(String),
    /// There is no room on its disk for what was to be written. Nothing was.
    #[error("the disk of the database is full: {0}")]
    Full(String),
    /// The append may or may not have happened. Read the log before writing again.
    #[error("the outcome of a write is unknown: {0}")]
    OutcomeUnknown(String),
    /// The store cannot be opened; the text is for the operator.
    #[error("{0}")]
    Open(String),
    /// A row says what no row can say, or a page of the file what no page can.
    #[error("the log is corrupt: {0}; `orlop check` tells all that is wrong")]
    Corrupt(String),
    /// The database is not the one that was read before: it lacks or contradicts what was applied.
    #[error("the log has another history: {0}")]
    Diverged(String),
}

pub type Result<T> = std::result::Result<T, Error>;

/// Where the log stands. Between two equal positions nothing was appended, granted, revoked or compacted.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Position {
    pub head: Revision,
    /// Counts the appends that changed leases or alarms, or compacted.
    pub epoch: i64,
    /// Tells one run of the database server from another: after a failover or a restart the log is looked at again before
    /// it is trusted. Always 0 where the log is this process's own.
    pub server: i64,
}

/// What the log says of the store as a whole.
#[derive(Debug, Clone)]
pub struct Meta {
    pub cluster_id: u64,
    pub member_id: u64,
    pub position: Position,
    pub compact_revision: Option<Revision>,
    pub leases: Vec<LoggedLease>,
    pub alarms: Vec<(Alarm, Cause)>,
}

/// That something is wrong with a member, as etcd has it. Alarms outlive restarts and hold for all instances.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Alarm {
    /// As a client gave it, or the instance's that noticed.
    pub member_id: u64,
    pub kind: AlarmKind,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum AlarmKind {
    NoSpace,
    Corrupt,
}

/// Who raised an alarm: what the server raised it takes back by itself.
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
    /// As etcd prints it.
    pub fn name(self) -> &'static str {
        match self {
            Self::NoSpace => "NOSPACE",
            Self::Corrupt => "CORRUPT",
        }
    }
}

impl Alarm {
    /// How it is called among the facts of a log: `alarm/KIND/MEMBER`, the member in hexadecimal.
    pub fn fact(self) -> String {
        format!("alarm/{}/{:x}", self.kind.name(), self.member_id)
    }

    fn from_fact(name: &str) -> Option<Self> {
        let (kind, member) = name.strip_prefix("alarm/")?.split_once('/')?;
        let kind = [AlarmKind::NoSpace, AlarmKind::Corrupt].into_iter().find(|known| known.name() == kind)?;
        Some(Self { member_id: u64::from_str_radix(member, 16).ok()?, kind })
    }
}

impl AlarmChange {
    /// The fact that it makes or, with no value, takes away.
    pub fn fact(self) -> (String, Option<i64>) {
        match self {
            Self::Raise { alarm, cause: Cause::Client } => (alarm.fact(), Some(1)),
            Self::Raise { alarm, cause: Cause::Quota } => (alarm.fact(), Some(2)),
            Self::Clear { alarm } => (alarm.fact(), None),
        }
    }
}

/// Whether a fact of a log by this name tells of an alarm.
pub fn is_alarm(name: &str) -> bool {
    Alarm::from_fact(name).is_some()
}

/// The alarm that a fact of a log tells of, if it does.
pub fn alarm(name: &str, value: i64) -> Option<(Alarm, Cause)> {
    let cause = if value == 2 { Cause::Quota } else { Cause::Client };
    Some((Alarm::from_fact(name)?, cause))
}

/// A lease that was granted and neither revoked nor expired.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct LoggedLease {
    pub id: LeaseId,
    pub ttl_secs: i64,
    /// Seconds until its deadline by the database's clock, negative once that is past. `None`: the database keeps no
    /// deadlines.
    pub left_secs: Option<f64>,
}

/// What becomes durable together.
#[derive(Debug, Clone, Copy)]
pub struct Append<'a> {
    /// What the rows were evaluated on.
    pub expected: Position,
    /// In order; revisions dense from the expected head's next.
    pub changes: &'a [Change],
    pub leases: &'a [LeaseChange],
    /// A compact revision to record. It never goes back.
    pub compact: Option<Revision>,
    /// An alarm to raise or clear; then there is nothing else.
    pub alarm: Option<AlarmChange>,
}

#[cfg(test)]
impl<'a> Append<'a> {
    /// Rows alone, on a log of this process's own.
    pub fn rows(head: Revision, changes: &'a [Change]) -> Self {
        Self { expected: Position { head, epoch: 0, server: 0 }, changes, leases: &[], compact: None, alarm: None }
    }
}

impl Append<'_> {
    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && self.leases.is_empty() && self.compact.is_none() && self.alarm.is_none()
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
    /// As revoke, but only if its time is over by the clock that the log goes by; otherwise the append is a conflict.
    Expire {
        id: LeaseId,
    },
}

#[must_use]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Appended {
    /// All is durable.
    Done,
    /// The log did not stand where it was expected to; nothing was written.
    Conflict,
}

/// A part of the log, in order.
#[derive(Debug, Clone)]
pub struct Page {
    pub changes: Vec<Change>,
    /// Where the next page begins.
    pub next: Revision,
    /// Rows may be missing below this revision, as they were compacted away; at it and beyond all are there. `None` where
    /// only this process deletes rows.
    pub purged: Option<Revision>,
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
    /// `total` less what is free to be written again.
    pub in_use: i64,
}

/// Connections for reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Connections {
    pub idle: usize,
    pub used: usize,
}

/// How well a size is known.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Precision {
    /// What is free may be as it was counted last.
    Quick,
    /// Counted, which may read the whole log.
    Exact,
}

/// A step of making room, short enough for writes to wait for it.
#[derive(Debug, Clone, Copy)]
pub enum Reclaim<'a> {
    /// Deletes rows that were compacted away, all at or below the compact revision `compacted`, if they are on the server
    /// ([`Position::server`]) on which they were found, and gives some free space back to the file system.
    Rows { rows: &'a [RowId], compacted: Revision, server: i64 },
    /// Gives free space back to the file system.
    Space,
}

/// Whether another step would do more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reclaimed {
    More,
    All,
}

/// Takes the log's rows in their order, a part at a time, with what the log says as a whole.
pub type Visit<'a> = dyn FnMut(&Meta, Vec<Change>) -> Result<()> + Send + 'a;

/// What can be read of a log as a whole.
#[async_trait]
pub trait History: Send + Sync + 'static {
    /// What holds at one moment.
    async fn meta(&self) -> Result<Meta>;

    /// Visits all rows as they are at one moment, values left out (every put's pair has an empty one).
    async fn replay(&self, visit: &mut Visit<'_>) -> Result<Meta>;

    /// The changes within `range` at revisions from `from` to at most `to`, whole revisions only. A page ends early by
    /// size or by rows looked at; it may be empty before `to` is reached.
    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page>;
}

/// Fills an empty database. Nothing of it is there before [`Load::finish`] is done.
#[async_trait]
pub trait Load: Send {
    /// Adds rows, which come in their order.
    async fn add(&mut self, changes: &[Change]) -> Result<()>;

    /// Adds the leases, whose time begins anew, and the compact revision; then all of it is durable.
    async fn finish(self: Box<Self>, meta: &Meta) -> Result<()>;
}

/// Which cluster a database that is filled belongs to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cluster {
    /// The one that the rows are of.
    Same,
    /// One of its own: from here on it has another history.
    New,
}

/// An append-only log of changes.
#[async_trait]
pub trait Log: History {
    /// The log as it is now, whatever is appended or deleted later, for as long as it is held.
    async fn freeze(&self) -> Result<Box<dyn History>>;

    /// Appends all of it if the log stands where it is expected to, and nothing otherwise. Durable once it returns.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] and [`Error::Full`] only if nothing was written and nothing will be.
    ///
    /// # Cancel safety
    ///
    /// None: when the future is dropped the append may still happen.
    async fn append(&self, append: Append<'_>) -> Result<Appended>;

    /// The pairs in these rows, in no order; rows that hold a delete or were compacted away are left out.
    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>>;

    /// Makes room. See [`Reclaim`].
    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed>;

    async fn size(&self, precision: Precision) -> Result<Size>;

    fn connections(&self) -> Connections;

    /// Finishes what is under way and lets go of the database.
    async fn close(&self);

    /// What is asked of a log that other instances append to as well; `None` where this process is the only one.
    fn shared(&self) -> Option<&dyn SharedLog>;
}

/// An instance of the server.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Member {
    pub id: u64,
    pub name: String,
    pub client_urls: Vec<String>,
}

/// Whether looking at leases renews them.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Touch {
    Renew,
    Look,
}

/// What several instances on one log need of it to act as one server.
#[async_trait]
pub trait SharedLog: Send + Sync {
    /// Where the log stands: not before anything that was acknowledged before the call.
    async fn position(&self) -> Result<Position>;

    /// Returns when the log may have moved beyond `seen`: with its head if it told, and with nothing when it is time to look.
    async fn moved(&self, seen: Revision) -> Option<Revision>;

    /// Waits for this instance's turn to append, and keeps it until the next [`Log::append`], which an instance that
    /// loses race after race needs. The turn is lost, and that append fails, if it does not follow soon.
    async fn take_turn(&self) -> Result<()>;

    /// These leases' TTLs and time left, those that are unknown left out. Renewal gives a lease its whole TTL again,
    /// unless its time is over, and is durable once it returns.
    async fn leases(&self, ids: &[LeaseId], touch: Touch) -> Result<Vec<LoggedLease>>;

    /// Says that this instance lives, and returns all that do, this one among them, the one that lives longest first.
    async fn beat(&self) -> Result<Vec<Member>>;
}

/// How long an instance is silent before it counts as gone.
pub const SILENCE_MAX: Duration = Duration::from_secs(10);
/// How often an instance says that it lives.
pub const BEAT_INTERVAL: Duration = Duration::from_secs(1);
