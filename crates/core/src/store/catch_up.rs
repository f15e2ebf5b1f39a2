//! Catching up: taking in what the log has beyond this instance, whoever wrote it.
//!
//! Another instance may append at any time, and an append of this one may have an unknown outcome. Whoever needs to stand
//! where the log stands (a linearizable read, a writer that lost a race, the task that follows the log) asks for its
//! position and comes here if that is ahead. One at a time catches up; what the writer applies meanwhile is left out, under
//! the hub's lock.
//!
//! Three things end the usual way of it. Rows that compaction took before they were read: the index is built anew from what
//! the log still holds. Another server behind the address: its log is compared with what was applied last. A log that is
//! shorter or other than what was applied: this instance stops, rather than serve two histories.

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

/// Changes remembered to compare another server's log with, and bytes of their pairs.
const TAIL_CHANGES_MAX: usize = 256;
const TAIL_BYTES_MAX: usize = 1 << 20;
/// How long this instance's own append may be waited for before the log is read instead.
const OWN_APPEND_MAX: Duration = Duration::from_millis(50);
/// Pause before the log is looked at again after it could not be read.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

/// What catching up goes by.
pub(super) struct Standing {
    /// Held by the one that catches up.
    turn: AsyncMutex<()>,
    /// The server whose log was last found to continue this instance's.
    server: AtomicI64,
    /// The head that an append of this instance leads to, while it is under way.
    own_append: AtomicI64,
    /// Turns with everything that is applied.
    applied: watch::Sender<()>,
    tail: Mutex<Tail>,
    /// The newest compaction that the log told of. It is told of once an epoch, and takes effect when its revision is applied,
    /// which may be in a later attempt. The least number: there was none.
    recorded: AtomicI64,
    /// Why this instance must stop.
    pub(super) failed: watch::Sender<Option<String>>,
}

impl Standing {
    pub(super) fn new(server: i64) -> Self {
        Self {
            turn: AsyncMutex::new(()),
            server: AtomicI64::new(server),
            own_append: AtomicI64::new(0),
            applied: watch::Sender::new(()),
            tail: Mutex::default(),
            recorded: AtomicI64::new(i64::MIN),
            failed: watch::Sender::new(None),
        }
    }

    /// Says that an append of this instance is under way that leads to `head`; until the guard is dropped.
    pub(super) fn appending(&self, head: Revision) -> impl Drop + '_ {
        struct Appending<'a>(&'a Standing);
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

/// The newest changes that were applied.
#[derive(Default)]
struct Tail {
    changes: VecDeque<Change>,
    bytes: usize,
}

impl Tail {
    fn push(&mut self, changes: &[Change]) {
        for change in &changes[changes.len().saturating_sub(TAIL_CHANGES_MAX)..] {
            self.bytes += bytes(change);
            self.changes.push_back(change.clone());
        }
        while self.changes.len() > TAIL_CHANGES_MAX || (self.bytes > TAIL_BYTES_MAX && self.changes.len() > 1) {
            let Some(oldest) = self.changes.pop_front() else { break };
            self.bytes -= bytes(&oldest);
        }
    }
}

fn bytes(change: &Change) -> usize {
    pair(change).map_or(0, EncodedKv::len)
}

fn pair(change: &Change) -> Option<&EncodedKv> {
    match &change.kind {
        ChangeKind::Put { kv, .. } => Some(kv),
        ChangeKind::Delete => None,
    }
}

impl Shared {
    /// Where this instance stands.
    pub(super) fn position(&self) -> Position {
        let index = self.index.read();
        let epoch = self.leases.lock().epoch;
        Position { head: index.head(), epoch, server: self.standing.server.load(Ordering::Relaxed) }
    }

    fn stands_at(&self, position: Position) -> bool {
        let own = self.position();
        own.server == position.server && own.head >= position.head && own.epoch >= position.epoch
    }

    /// Whether the log, or this instance, has moved beyond `position`.
    pub(super) async fn is_beyond(&self, position: Position) -> Result<bool> {
        let Some(log) = self.log.shared() else { return Ok(false) };
        Ok(self.position() != position || log.position().await? != position)
    }

    /// Takes up how much time these leases have left, those that were to be expired.
    pub(super) async fn look_at_leases(&self, changes: &[LeaseChange]) {
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
            Err(error) => warn!(%error, "leases cannot be looked at"),
        }
    }

    /// Takes up how much time leases have left by the log's clock, which was asked at `asked`.
    pub(super) fn set_lease_deadlines(&self, logged: &[LoggedLease], asked: Instant) {
        let now = Instant::now();
        let mut leases = self.leases.lock();
        for lease in logged {
            if let Some(left_secs) = lease.left_secs {
                leases.set_left(lease.id, left_secs, asked, now);
            }
        }
    }

    /// Asks where the log stands and goes there.
    pub(super) async fn reach_head(&self, log: &dyn SharedLog) -> Result<()> {
        let position = log.position().await?;
        if self.stands_at(position) || self.own_append_reaches(position).await {
            return Ok(());
        }
        self.catch_up().await
    }

    /// Waits for an append of this instance that is about to be applied, if there is one and it leads to `position`.
    async fn own_append_reaches(&self, position: Position) -> bool {
        let is_own = || self.standing.own_append.load(Ordering::Relaxed) >= position.head.0;
        let mut applied = self.standing.applied.subscribe();
        let waiting = async {
            while is_own() && !self.stands_at(position) {
                if applied.changed().await.is_err() {
                    return;
                }
            }
        };
        // When it takes longer than that, reading the log costs less than waiting.
        let _ = timeout(OWN_APPEND_MAX, waiting).await;
        self.stands_at(position)
    }

    /// Takes in all that the log has.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] stops the instance.
    pub(super) async fn catch_up(&self) -> Result<()> {
        let _turn = self.standing.turn.lock().await;
        let caught_up = self.read_on().await;
        if let Err(Error::Diverged(text)) = &caught_up {
            self.standing.failed.send_replace(Some(text.clone()));
        }
        caught_up
    }

    async fn read_on(&self) -> Result<()> {
        loop {
            let stood = self.position();
            let (position, meta) = match self.log.shared() {
                Some(log) => {
                    let position = log.position().await?;
                    let unchanged = position.epoch == stood.epoch && position.server == stood.server;
                    (position, if unchanged { None } else { Some(self.log.meta().await?) })
                }
                None => {
                    let meta = self.log.meta().await?;
                    (Position { epoch: stood.epoch, ..meta.position }, Some(meta))
                }
            };
            if position.head < stood.head {
                return Err(Error::Diverged(format!(
                    "this instance had revision {}, the database ends at revision {}",
                    stood.head, position.head
                )));
            }
            if position.server != stood.server {
                self.compare_tail(position.head).await?;
                self.standing.server.store(position.server, Ordering::Relaxed);
            }
            if let Some(meta) = &meta {
                if let Some(compacted) = meta.compact_revision {
                    self.standing.recorded.fetch_max(compacted.0, Ordering::Relaxed);
                }
                self.take_in_leases(meta);
            }
            while self.index.read().head() < position.head {
                if !self.read_page(position.head).await? {
                    self.rebuild().await?;
                }
            }
            let compacted = Revision(self.standing.recorded.load(Ordering::Relaxed));
            let index = self.index.read();
            let (head, known) = (index.head(), index.compact_revision());
            drop(index);
            // Beyond the head: it was recorded after the position was asked for.
            if compacted <= head {
                if compacted > known.unwrap_or(Revision(-1)) {
                    self.note_compaction(compacted);
                }
                return Ok(());
            }
        }
    }

    /// Takes in the next changes, up to `to`. Returns false if some of them are gone.
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

    /// Replaces everything in memory by what the log holds; watches read on from the log, or learn that what they missed
    /// was compacted.
    async fn rebuild(&self) -> Result<()> {
        info!(
            revision = self.index.read().head().0,
            "rows that were not read yet were compacted away; reading the log anew"
        );
        let rebuilding = &self.metrics.state.applying_snapshot;
        rebuilding.set(1);
        let replayed = replay(&*self.log).await;
        rebuilding.set(0);
        let replayed = replayed?;
        let leases = lease_table(&replayed.meta, &replayed.index, Instant::now());
        let (head, compacted) = (replayed.index.head(), replayed.index.compact_revision());
        self.space.take_in(&replayed.meta);
        let mut before = (replayed.index, leases);
        self.hub.start_over(head, compacted, || {
            std::mem::swap(&mut *self.index.write(), &mut before.0);
            std::mem::swap(&mut *self.leases.lock(), &mut before.1);
        });
        // Those rows are for the instance to delete that compacted, as long as it lives.
        *self.left_to_others.lock() = replayed.garbage;
        self.compaction_done.send_replace(compacted);
        self.lease_deadline.notify_one();
        self.fill_tail().await
    }

    /// Remembers the end of the log, to know it again.
    pub(super) async fn fill_tail(&self) -> Result<()> {
        if self.log.shared().is_none() {
            return Ok(());
        }
        let head = self.index.read().head();
        if head > Revision::EMPTY {
            let page = self.log.changes(head, head, &KeyRange::all(), WithPrev::No).await?;
            *self.standing.tail.lock() = Tail::default();
            self.standing.tail.lock().push(&page.changes);
        }
        Ok(())
    }

    /// Whether the log has what this instance applied last.
    async fn compare_tail(&self, log_head: Revision) -> Result<()> {
        let (applied, newest): (HashMap<RowId, Change>, Option<Change>) = {
            let tail = self.standing.tail.lock();
            let by_row = tail.changes.iter().map(|change| (change.row, change.clone())).collect();
            (by_row, tail.changes.back().cloned())
        };
        let Some(newest) = newest else { return Ok(()) };
        let oldest = applied.keys().min().map_or(newest.row.revision, |row| row.revision);
        let diverged = |revision: Revision| {
            Error::Diverged(format!(
                "revision {revision} is another one than this instance had; it had revision {}, the database ends at \
                 revision {log_head}",
                newest.row.revision
            ))
        };
        let (mut next, mut newest_found) = (oldest, false);
        while next <= newest.row.revision {
            let page = self.log.changes(next, newest.row.revision, &KeyRange::all(), WithPrev::No).await?;
            for found in &page.changes {
                newest_found |= found.row.revision == newest.row.revision;
                // A row that is not there any more was compacted away, and the tail may begin within a revision.
                if let Some(applied) = applied.get(&found.row)
                    && (applied.key != found.key || pair(applied) != pair(found))
                {
                    return Err(diverged(found.row.revision));
                }
            }
            next = page.next;
        }
        // The newest row is never deleted before there is a newer one.
        if !newest_found && log_head <= newest.row.revision {
            return Err(diverged(newest.row.revision));
        }
        Ok(())
    }

    fn take_in_leases(&self, meta: &Meta) {
        let now = Instant::now();
        let mut leases = self.leases.lock();
        if self.log.shared().is_some() && meta.position.epoch < leases.epoch {
            // An append of this instance was applied since that was read.
            return;
        }
        let logged: HashMap<LeaseId, &LoggedLease> = meta.leases.iter().map(|lease| (lease.id, lease)).collect();
        for (id, ttl_secs) in leases.granted() {
            // With another TTL it was revoked and granted anew.
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
        // Under the lease table's lock, as an alarm of this instance's own moves its epoch on.
        self.space.take_in(meta);
        drop(leases);
        self.lease_deadline.notify_one();
    }

    /// Makes a compaction that was recorded effective. Rows are deleted by the instance that recorded it.
    pub(super) fn note_compaction(&self, revision: Revision) {
        self.hub.compacted(revision, || self.index.write().begin_compaction(revision));
        self.compaction.notify_one();
    }
}

/// The leases that the log says there are, with the keys that the index says hang on them.
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

/// Rows from the log name the revision of what they replaced; the index knows the row and its lease.
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

/// Follows the log of several instances, so that their changes reach the watchers here.
pub(super) async fn run(shared: Arc<Shared>, poll_interval: Duration, mut stop: watch::Receiver<bool>) {
    let work = async {
        let Some(log) = shared.log.shared() else { return };
        let mut looked = Instant::now();
        let mut is_away = false;
        loop {
            shared.pulses.follower.beat();
            let seen = shared.index.read().head();
            let told = log.moved(seen).await;
            // Mostly it is this instance's own commit that it hears of, a moment before it is applied or after.
            if let Some(told) = told.filter(|_| looked.elapsed() < poll_interval) {
                let mut applied = shared.standing.applied.subscribe();
                if told <= shared.index.read().head() {
                    continue;
                }
                if told.0 <= shared.standing.own_append.load(Ordering::Relaxed) {
                    let _ = timeout(OWN_APPEND_MAX, applied.changed()).await;
                    continue;
                }
            }
            looked = Instant::now();
            match shared.reach_head(log).await {
                Ok(()) if is_away => {
                    is_away = false;
                    info!("the database is back");
                }
                Ok(()) => {}
                Err(error) => {
                    if !is_away {
                        warn!(%error, "the log cannot be followed; trying again");
                    }
                    is_away = true;
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
