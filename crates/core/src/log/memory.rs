//! A log in memory, for unit tests: one list of all rows, which every query scans. It returns rows as a database does:
//! a row contains the revision of the row that it replaced, but not that row's `sub` or lease. Pages are short, so that
//! small tests need several.

use std::{
    collections::{BTreeMap, BTreeSet},
    time::Duration,
};

use async_trait::async_trait;
use tokio::{task::yield_now, time::sleep};

use super::{
    Alarm, AlarmChange, Append, Appended, AuthMark, AuthState, Cause, Connections, FactChange, LeaseChange, LeaseScope,
    Log, LoggedLease, Member, Meta, Page, Position, Precision, ReadLog, Reclaim, Reclaimed, Result, SharedLog, Size,
    Touch, Visit, WithPrev,
};
use crate::{
    sync::Mutex,
    types::{Change, EncodedKv, KeyRange, LeaseId, Prev, Revision, RowId},
};

/// Maximum number of revisions in a page of [`ReadLog::changes`].
const PAGE_REVISIONS_MAX: usize = 6;
/// Maximum number of rows visited for a page of [`ReadLog::changes`], not counting the rest of its last revision.
const PAGE_ROWS_MAX: usize = 16;

/// A log in memory. Shared behind an `Arc`.
#[derive(Default)]
pub struct MemoryLog(Mutex<State>);

#[derive(Clone, Default)]
struct State {
    append_time: Duration,
    is_shared: bool,
    /// Whether reads of values yield, as [`ReadLog::changes`] does.
    values_yield: bool,
    /// Whether the return of space to the file system panics.
    space_panics: bool,
    /// Number of pages of [`ReadLog::changes`] that were read.
    pages: usize,
    /// Number of rows whose values were read.
    values: usize,
    rows: Vec<Change>,
    leases: BTreeMap<LeaseId, i64>,
    alarms: Vec<(Alarm, Cause)>,
    auth: AuthState,
    compact_revision: Option<Revision>,
    purged: Option<Revision>,
}

impl MemoryLog {
    /// Returns an empty log, an append to which takes `append_time`.
    pub fn with_append_time(append_time: Duration) -> Self {
        Self(Mutex::new(State { append_time, ..State::default() }))
    }

    /// Returns an empty log that other instances may use as well.
    pub fn shared_with_others() -> Self {
        Self(Mutex::new(State { is_shared: true, ..State::default() }))
    }

    /// Returns an empty log whose reads of values yield, so that a test can run other operations in between.
    pub fn with_yielding_values() -> Self {
        Self(Mutex::new(State { values_yield: true, ..State::default() }))
    }

    /// Returns an empty log that panics when it shall return space to the file system.
    pub fn with_panicking_space() -> Self {
        Self(Mutex::new(State { space_panics: true, ..State::default() }))
    }

    /// Returns the number of pages of [`ReadLog::changes`] that were read.
    pub fn pages(&self) -> usize {
        self.0.lock().pages
    }

    /// Returns the number of rows whose values were read.
    pub fn values_read(&self) -> usize {
        self.0.lock().values
    }
}

impl State {
    fn head(&self) -> Revision {
        self.rows.last().map_or(Revision::EMPTY, |change| change.row.revision)
    }

    fn pair(&self, row: RowId) -> Option<EncodedKv> {
        self.rows.iter().find(|change| change.row == row)?.kv().cloned()
    }

    /// Returns the change as a database returns it.
    fn read(&self, change: &Change, with_prev: WithPrev) -> Change {
        let prev = change.prev.as_ref().map(|prev| {
            let kv = if with_prev == WithPrev::Yes { self.pair(prev.row) } else { None };
            Prev { row: RowId::new(prev.row.revision, 0), kv }
        });
        Change { prev, prev_lease: None, ..change.clone() }
    }
}

#[async_trait]
impl ReadLog for MemoryLog {
    async fn meta(&self) -> Result<Meta> {
        let state = self.0.lock();
        Ok(Meta {
            cluster_id: 1,
            member_id: 1,
            compact_revision: state.compact_revision,
            alarms: state.alarms.clone(),
            auth: AuthMark::of(&state.auth),
            source: None,
            position: Position { head: state.head(), epoch: 0, server: 0 },
            leases: state
                .leases
                .iter()
                .map(|(id, ttl_secs)| LoggedLease { id: *id, ttl_secs: *ttl_secs, left_secs: None })
                .collect(),
        })
    }

    async fn auth(&self) -> Result<AuthState> {
        Ok(self.0.lock().auth.clone())
    }

    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
        let meta = self.meta().await?;
        let state = self.0.lock();
        let begin = state.rows.partition_point(|change| change.row.revision < from);
        for rows in state.rows[begin..].chunks(PAGE_ROWS_MAX) {
            visit(&meta, rows.iter().map(|change| state.read(change, WithPrev::No)).collect())?;
        }
        Ok(meta)
    }

    /// Yields once before and once after the page is read, so that a test can run other operations in between.
    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        yield_now().await;
        let mut page = Page { changes: Vec::new(), next: to.next(), purged: None };
        {
            let mut state = self.0.lock();
            state.pages += 1;
            page.purged = state.purged;
            let mut revisions = BTreeSet::new();
            let mut last = None;
            let within = state.rows.iter().filter(|change| (from..=to).contains(&change.row.revision));
            for (visited, change) in within.enumerate() {
                let revision = change.row.revision;
                let full = visited >= PAGE_ROWS_MAX || revisions.len() >= PAGE_REVISIONS_MAX;
                if full && last != Some(revision) {
                    page.next = revision;
                    break;
                }
                last = Some(revision);
                if range.contains(&change.key) {
                    revisions.insert(revision);
                    page.changes.push(state.read(change, prev));
                }
            }
        }
        yield_now().await;
        Ok(page)
    }
}

#[async_trait]
impl Log for MemoryLog {
    async fn freeze(&self) -> Result<Box<dyn ReadLog>> {
        Ok(Box::new(Self(Mutex::new(self.0.lock().clone()))))
    }

    async fn append(&self, append: Append<'_>) -> Result<Appended> {
        let append_time = self.0.lock().append_time;
        if !append_time.is_zero() {
            sleep(append_time).await;
        }
        let mut state = self.0.lock();
        if state.head() != append.expected.head {
            return Ok(Appended::Conflict);
        }
        state.rows.extend(append.changes.iter().cloned());
        for change in append.leases {
            match *change {
                LeaseChange::Grant { id, ttl_secs } => state.leases.insert(id, ttl_secs),
                LeaseChange::Revoke { id } | LeaseChange::Expire { id } => state.leases.remove(&id),
            };
        }
        state.compact_revision = state.compact_revision.max(append.compact);
        match append.fact {
            Some(FactChange::Alarm(AlarmChange::Raise { alarm, cause })) => state.alarms.push((alarm, cause)),
            Some(FactChange::Alarm(AlarmChange::Clear { alarm })) => {
                state.alarms.retain(|(raised, _)| *raised != alarm)
            }
            // A store does not send it.
            Some(FactChange::Source(_)) | None => {}
        }
        if let Some(append) = append.auth {
            state.auth = append.next.clone();
        }
        Ok(Appended::Done)
    }

    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        let values_yield = self.0.lock().values_yield;
        if values_yield {
            yield_now().await;
        }
        let mut state = self.0.lock();
        state.values += rows.len();
        Ok(rows.iter().filter_map(|row| Some((*row, state.pair(*row)?))).collect())
    }

    async fn token_key(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }

    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed> {
        let mut state = self.0.lock();
        let Reclaim::Rows { rows, compacted, .. } = what else {
            assert!(!state.space_panics, "a test expects this panic");
            return Ok(Reclaimed::All);
        };
        state.rows.retain(|change| !rows.contains(&change.row));
        state.purged = state.purged.max(Some(compacted));
        Ok(Reclaimed::All)
    }

    async fn size(&self, _: Precision) -> Result<Size> {
        Ok(Size { total: 0, in_use: 0, disk_free: None, wal: None })
    }

    fn connections(&self) -> Connections {
        Connections { idle: 0, used: 0 }
    }

    async fn close(&self, _: &[LoggedLease]) {}

    fn shared(&self) -> Option<&dyn SharedLog> {
        if self.0.lock().is_shared { Some(self) } else { None }
    }
}

/// Every lease has its full TTL.
#[async_trait]
impl SharedLog for MemoryLog {
    async fn position(&self) -> Result<Position> {
        Ok(self.meta().await?.position)
    }

    async fn meta_since(&self, _: Position) -> Result<(Meta, LeaseScope)> {
        Ok((self.meta().await?, LeaseScope::All))
    }

    async fn wait_for_append(&self, _: Revision) -> Option<Revision> {
        std::future::pending().await
    }

    async fn lock_appends(&self) -> Result<()> {
        Ok(())
    }

    async fn leases(&self, ids: &[LeaseId], _: Touch) -> Result<Vec<LoggedLease>> {
        let state = self.0.lock();
        let logged = |id: &LeaseId| {
            let ttl_secs = *state.leases.get(id)?;
            Some(LoggedLease { id: *id, ttl_secs, left_secs: Some(ttl_secs as f64) })
        };
        Ok(ids.iter().filter_map(logged).collect())
    }

    async fn beat(&self) -> Result<Vec<Member>> {
        Ok(Vec::new())
    }
}
