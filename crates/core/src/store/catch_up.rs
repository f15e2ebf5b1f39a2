//! Catching up: applies the part of the log that this instance has not applied yet, whichever instance wrote it.
//!
//! Another instance can append at any time, and an append of this instance can have an unknown outcome. Callers that
//! need the latest state (a linearizable read, a writer that lost a race, the task that follows the log) ask the log
//! for its position and catch up if it is ahead. One caller at a time catches up; changes that the writer applies
//! meanwhile are skipped, under the hub's lock.
//!
//! Three cases are special. If compaction deleted rows before this instance read them, the index is rebuilt from the
//! remaining log. If another server answers at the database's address, its log is compared with the changes that were
//! applied last. If that log is shorter or different, this instance stops, so that clients never see two histories.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicI64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Mutex as AsyncMutex, watch},
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{Shared, open::replay};
use crate::{
    index::{Lease, TreeIndex},
    lease,
    log::{Error, LeaseChange, LoggedLease, Meta, Position, Result, SharedLog, Touch, WithPrev},
    types::{Change, ChangeKind, EncodedKv, KeyRange, LeaseId, Revision, RowId},
};

/// Maximum number of applied changes kept for comparison with another server's log, and maximum bytes of their pairs.
const TAIL_CHANGES_MAX: usize = 256;
const TAIL_BYTES_MAX: usize = 1 << 20;
/// Maximum time to wait for this instance's own append before the log is read instead.
const OWN_APPEND_MAX: Duration = Duration::from_millis(50);
/// Pause after a failed read of the log.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// The state of this instance relative to the log.
pub(super) struct ReplicationState {
    /// Held while catching up.
    lock: AsyncMutex<()>,
    /// The database server whose log was last found to continue this instance's state.
    server: AtomicI64,
    /// The head after the running append of this instance; 0 if none is running.
    own_append: AtomicI64,
    /// Changes whenever something was applied.
    applied: watch::Sender<()>,
    tail: Mutex<AppliedTail>,
    /// The newest compaction that was read from the log, or `i64::MIN`. It is read once per epoch and takes effect when
    /// its revision is applied, which may be in a later attempt.
    recorded_compaction: AtomicI64,
    /// The reason why this instance must stop.
    pub(super) failed: watch::Sender<Option<String>>,
}

impl ReplicationState {
    pub(super) fn new(server: i64) -> Self {
        Self {
            lock: AsyncMutex::new(()),
            server: AtomicI64::new(server),
            own_append: AtomicI64::new(0),
            applied: watch::Sender::new(()),
            tail: Mutex::default(),
            recorded_compaction: AtomicI64::new(i64::MIN),
            failed: watch::Sender::new(None),
        }
    }

    /// Marks an append of this instance that leads to `head` as running until the guard is dropped.
    pub(super) fn mark_append(&self, head: Revision) -> impl Drop + '_ {
        struct Appending<'a>(&'a ReplicationState);
        impl Drop for Appending<'_> {
            fn drop(&mut self) {
                self.0.own_append.store(0, Ordering::Relaxed);
                self.0.applied.send_replace(());
            }
        }
        self.own_append.store(head.0, Ordering::Relaxed);
        Appending(self)
    }

    pub(super) fn note_applied(&self, changes: &[Change], is_shared: bool) {
        if is_shared {
            self.tail.lock().push(changes);
            self.applied.send_replace(());
        }
    }
}

/// The newest applied changes.
#[derive(Default)]
struct AppliedTail {
    changes: VecDeque<Change>,
    bytes: usize,
}

impl AppliedTail {
    fn push(&mut self, changes: &[Change]) {
        for change in &changes[changes.len().saturating_sub(TAIL_CHANGES_MAX)..] {
            self.bytes += pair_bytes(change);
            self.changes.push_back(change.clone());
        }
        while self.changes.len() > TAIL_CHANGES_MAX || (self.bytes > TAIL_BYTES_MAX && self.changes.len() > 1) {
            let Some(oldest) = self.changes.pop_front() else { break };
            self.bytes -= pair_bytes(&oldest);
        }
    }
}

fn pair_bytes(change: &Change) -> usize {
    pair(change).map_or(0, EncodedKv::len)
}

fn pair(change: &Change) -> Option<&EncodedKv> {
    match &change.kind {
        ChangeKind::Put { kv, .. } => Some(kv),
        ChangeKind::Delete => None,
    }
}

impl Shared {
    /// Returns the log position up to which this instance has applied everything.
    pub(super) fn position(&self) -> Position {
        let index = self.index.read();
        let epoch = self.leases.lock().epoch;
        Position { head: index.head(), epoch, server: self.replication.server.load(Ordering::Relaxed) }
    }

    fn has_reached(&self, position: Position) -> bool {
        let own = self.position();
        own.server == position.server && own.head >= position.head && own.epoch >= position.epoch
    }

    /// Returns whether the log, or this instance, is past `position`.
    pub(super) async fn is_beyond(&self, position: Position) -> Result<bool> {
        let Some(log) = self.log.shared() else { return Ok(false) };
        Ok(self.position() != position || log.position().await? != position)
    }

    /// Refreshes the deadlines of the leases that the batch was to expire.
    pub(super) async fn refresh_expired_leases(&self, changes: &[LeaseChange]) {
        let ids: Vec<LeaseId> = changes
            .iter()
            .filter_map(|change| match change {
                LeaseChange::Expire { id } => Some(*id),
                LeaseChange::Grant { .. } | LeaseChange::Revoke { .. } => None,
            })
            .collect();
        let Some(log) = self.log.shared().filter(|_| !ids.is_empty()) else { return };
        let asked = Instant::now();
        match log.leases(&ids, Touch::Look).await {
            Ok(logged) => self.set_lease_deadlines(&logged, asked),
            Err(error) => warn!(%error, "leases cannot be last_read at"),
        }
    }

    /// Sets lease deadlines from the remaining times that the log returned. `asked` is the time before the query.
    pub(super) fn set_lease_deadlines(&self, logged: &[LoggedLease], asked: Instant) {
        let now = Instant::now();
        let mut leases = self.leases.lock();
        for lease in logged {
            if let Some(left_secs) = lease.left_secs {
                leases.set_left(lease.id, left_secs, asked, now);
            }
        }
    }

    /// Asks for the log's position and catches up to it.
    pub(super) async fn reach_head(&self, log: &dyn SharedLog) -> Result<()> {
        let position = log.position().await?;
        if self.has_reached(position) || self.own_append_reaches(position).await {
            return Ok(());
        }
        self.catch_up().await
    }

    /// Waits up to [`OWN_APPEND_MAX`] for this instance's own append, if that leads to `position`. Returns whether
    /// `position` was reached.
    async fn own_append_reaches(&self, position: Position) -> bool {
        let is_own = || self.replication.own_append.load(Ordering::Relaxed) >= position.head.0;
        let mut applied = self.replication.applied.subscribe();
        let waiting = async {
            while is_own() && !self.has_reached(position) {
                if applied.changed().await.is_err() {
                    return;
                }
            }
        };
        // After that time, reading the log costs less than waiting.
        let _ = timeout(OWN_APPEND_MAX, waiting).await;
        self.has_reached(position)
    }

    /// Applies everything that is in the log.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] stops the instance.
    pub(super) async fn catch_up(&self) -> Result<()> {
        let _lock = self.replication.lock.lock().await;
        let caught_up = self.read_on().await;
        if let Err(Error::Diverged(text)) = &caught_up {
            self.replication.failed.send_replace(Some(text.clone()));
        }
        caught_up
    }

    async fn read_on(&self) -> Result<()> {
        loop {
            let before = self.position();
            let (position, meta) = match self.log.shared() {
                Some(log) => {
                    let position = log.position().await?;
                    let unchanged = position.epoch == before.epoch && position.server == before.server;
                    (position, if unchanged { None } else { Some(self.log.meta().await?) })
                }
                None => {
                    let meta = self.log.meta().await?;
                    (Position { epoch: before.epoch, ..meta.position }, Some(meta))
                }
            };
            if position.head < before.head {
                return Err(Error::Diverged(format!(
                    "this instance had revision {}, the database ends at revision {}",
                    before.head, position.head
                )));
            }
            if position.server != before.server {
                self.compare_tail(position.head).await?;
                self.replication.server.store(position.server, Ordering::Relaxed);
            }
            if let Some(meta) = &meta {
                if let Some(compacted) = meta.compact_revision {
                    self.replication.recorded_compaction.fetch_max(compacted.0, Ordering::Relaxed);
                }
                self.update_leases(meta);
            }
            while self.index.read().head() < position.head {
                if !self.read_page(position.head).await? {
                    self.rebuild().await?;
                }
            }
            let compacted = Revision(self.replication.recorded_compaction.load(Ordering::Relaxed));
            let index = self.index.read();
            let (head, known) = (index.head(), index.compact_revision());
            drop(index);
            // A compaction above the head was recorded after the position was read.
            if compacted <= head {
                if compacted > known.unwrap_or(Revision(-1)) {
                    self.note_compaction(compacted);
                }
                return Ok(());
            }
        }
    }

    /// Applies the next page of changes up to `to`. Returns false if compaction has deleted some of them.
    async fn read_page(&self, to: Revision) -> Result<bool> {
        let next = self.index.read().head().next();
        let prev = if self.hub.wants_prev() { WithPrev::Yes } else { WithPrev::No };
        let mut page = self.log.changes(next, to, &KeyRange::all(), prev).await?;
        if page.purged.is_some_and(|purged| purged > next) {
            return Ok(false);
        }
        let mut expected = next;
        for change in &page.changes {
            if change.row.revision >= expected {
                if change.row.revision > expected {
                    break;
                }
                expected = expected.next();
            }
        }
        if expected != page.next {
            return Err(Error::Corrupt(format!("revision {expected} is missing from the log")));
        }
        complete_prev(&self.index.read(), &mut page.changes);
        self.apply_logged(&page.changes, page.next.prev());
        Ok(true)
    }

    /// Replaces the state in memory by one rebuilt from the log. Watches continue from the log, or end if the revisions
    /// that they need were compacted.
    async fn rebuild(&self) -> Result<()> {
        info!(
            revision = self.index.read().head().0,
            "rows were compacted before they were read; rebuilding the index from the log"
        );
        let rebuilding = &self.metrics.state.applying_snapshot;
        rebuilding.set(1);
        let replayed = replay(&*self.log).await;
        rebuilding.set(0);
        let replayed = replayed?;
        let leases = lease_table(&replayed.meta, &replayed.index, Instant::now());
        let (head, compacted) = (replayed.index.head(), replayed.index.compact_revision());
        self.space.set_alarms(&replayed.meta);
        let mut before = (replayed.index, leases);
        self.hub.start_over(head, compacted, || {
            std::mem::swap(&mut *self.index.write(), &mut before.0);
            std::mem::swap(&mut *self.leases.lock(), &mut before.1);
        });
        // The instance that recorded the compaction deletes these rows, if it is alive.
        *self.rows_left_to_others.lock() = replayed.garbage;
        self.compaction_done.send_replace(compacted);
        self.lease_deadline.notify_one();
        self.fill_tail().await
    }

    /// Keeps the end of the log for comparison with another server's log.
    pub(super) async fn fill_tail(&self) -> Result<()> {
        if self.log.shared().is_none() {
            return Ok(());
        }
        let head = self.index.read().head();
        if head > Revision::EMPTY {
            let page = self.log.changes(head, head, &KeyRange::all(), WithPrev::No).await?;
            *self.replication.tail.lock() = AppliedTail::default();
            self.replication.tail.lock().push(&page.changes);
        }
        Ok(())
    }

    /// Checks that the log contains the changes that this instance applied last.
    async fn compare_tail(&self, log_head: Revision) -> Result<()> {
        let (applied, newest): (HashMap<RowId, Change>, Option<Change>) = {
            let tail = self.replication.tail.lock();
            let by_row = tail.changes.iter().map(|change| (change.row, change.clone())).collect();
            (by_row, tail.changes.back().cloned())
        };
        let Some(newest) = newest else { return Ok(()) };
        let oldest = applied.keys().min().map_or(newest.row.revision, |row| row.revision);
        let diverged = |revision: Revision| {
            Error::Diverged(format!(
                "revision {revision} differs from the one that this instance had; this instance had revision {}, the \
                 database ends at revision {log_head}",
                newest.row.revision
            ))
        };
        let (mut next, mut newest_found) = (oldest, false);
        while next <= newest.row.revision {
            let page = self.log.changes(next, newest.row.revision, &KeyRange::all(), WithPrev::No).await?;
            for found in &page.changes {
                newest_found |= found.row.revision == newest.row.revision;
                // A missing row was compacted. The tail may begin within a revision.
                if let Some(applied) = applied.get(&found.row)
                    && (applied.key != found.key || pair(applied) != pair(found))
                {
                    return Err(diverged(found.row.revision));
                }
            }
            next = page.next;
        }
        // The newest row is never deleted while it is the newest.
        if !newest_found && log_head <= newest.row.revision {
            return Err(diverged(newest.row.revision));
        }
        Ok(())
    }

    fn update_leases(&self, meta: &Meta) {
        let now = Instant::now();
        let mut leases = self.leases.lock();
        if self.log.shared().is_some() && meta.position.epoch < leases.epoch {
            // An append of this instance was applied after that was read.
            return;
        }
        let logged: HashMap<LeaseId, &LoggedLease> = meta.leases.iter().map(|lease| (lease.id, lease)).collect();
        for (id, ttl_secs) in leases.granted() {
            // A different TTL means that it was revoked and granted again.
            if logged.get(&id).is_none_or(|logged| logged.ttl_secs != ttl_secs) {
                leases.revoke(id);
            }
        }
        for logged in logged.values() {
            if !leases.contains(logged.id) {
                leases.grant(logged.id, logged.ttl_secs, now);
            }
            if let Some(left_secs) = logged.left_secs {
                leases.set_left(logged.id, left_secs, now, now);
            }
        }
        leases.epoch = leases.epoch.max(meta.position.epoch);
        // Under the lease table's lock, because an alarm of this instance advances the epoch, too.
        self.space.set_alarms(meta);
        drop(leases);
        self.lease_deadline.notify_one();
    }

    /// Makes a recorded compaction effective for reads. The instance that recorded it deletes the rows.
    pub(super) fn note_compaction(&self, revision: Revision) {
        self.hub.compacted(revision, || self.index.write().begin_compaction(revision));
        self.compaction.notify_one();
    }
}

/// Builds the lease table from the leases in the log and the keys in the index.
pub(super) fn lease_table(meta: &Meta, index: &TreeIndex, now: Instant) -> lease::Table {
    let mut leases = lease::Table::default();
    for logged in &meta.leases {
        leases.grant(logged.id, logged.ttl_secs, now);
        if let Some(left_secs) = logged.left_secs {
            leases.set_left(logged.id, left_secs, now, now);
        }
    }
    leases.epoch = meta.position.epoch;
    for (key, entry) in index.range(KeyRange::all().bounds(), index.head()) {
        if let Lease::Known(Some(id)) = entry.lease {
            leases.attach(id, key.clone());
        }
    }
    leases
}

/// Completes changes that were read from the log. They contain the revision that they replaced; the index knows its row
/// and its lease.
fn complete_prev(index: &TreeIndex, changes: &mut [Change]) {
    let mut newest: HashMap<&[u8], (RowId, Option<LeaseId>)> = HashMap::new();
    for change in changes {
        let known = newest.get(change.key.as_slice()).copied().or_else(|| {
            let entry = index.get(&change.key, index.head())?;
            let Lease::Known(lease) = entry.lease else { return None };
            Some((entry.version.row, lease))
        });
        if let Some((row, lease)) = known {
            change.prev_lease = lease;
            if let Some(prev) = change.prev.as_mut().filter(|prev| prev.row.revision == row.revision) {
                prev.row = row;
            }
        }
        let change: &Change = change;
        let lease = match &change.kind {
            ChangeKind::Put { lease, .. } => *lease,
            ChangeKind::Delete => None,
        };
        newest.insert(change.key.as_slice(), (change.row, lease));
    }
}

/// Follows a shared log, so that the changes of other instances reach the watchers here.
pub(super) async fn run(shared: Arc<Shared>, poll_interval: Duration, mut stop: watch::Receiver<bool>) {
    let work = async {
        let Some(log) = shared.log.shared() else { return };
        let mut last_read = Instant::now();
        let mut is_failing = false;
        loop {
            shared.pulses.follower.beat();
            let seen = shared.index.read().head();
            let notified_head = log.moved(seen).await;
            // The notification is usually for this instance's own commit, shortly before or after that is applied.
            if let Some(notified_head) = notified_head.filter(|_| last_read.elapsed() < poll_interval) {
                let mut applied = shared.replication.applied.subscribe();
                if notified_head <= shared.index.read().head() {
                    continue;
                }
                if notified_head.0 <= shared.replication.own_append.load(Ordering::Relaxed) {
                    let _ = timeout(OWN_APPEND_MAX, applied.changed()).await;
                    continue;
                }
            }
            last_read = Instant::now();
            match shared.reach_head(log).await {
                Ok(()) if is_failing => {
                    is_failing = false;
                    info!("the log can be followed again");
                }
                Ok(()) => {}
                Err(error) => {
                    if !is_failing {
                        warn!(%error, "cannot follow the log; trying again");
                    }
                    is_failing = true;
                    sleep(RETRY_PAUSE).await;
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}
