//! Catching up: applies the part of the log that this instance has not applied yet, whichever instance wrote it.
//!
//! Another instance can append at any time, and an append of this instance can have an unknown outcome. Callers that
//! need the latest state (a linearizable read, a writer that lost a race, the task that follows the log) ask the log
//! for its position and catch up if it is ahead. Only one caller catches up at a time. The writer may apply some of the
//! changes meanwhile; these are skipped under the hub's lock.
//!
//! Two cases are special. If compaction deleted rows before this instance read them, the index is rebuilt from the
//! remaining log. If another server answers at the database's address, or the table of the log was created again, the
//! log is compared with the changes that were applied last. If it is shorter or different, this instance stops, so that
//! clients never see two histories.

#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::{MutexGuard as AsyncMutexGuard, watch},
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{leases::lease_table, replay::replay, shared::Shared, tasks::until_stopped, txn::Fetched};
use crate::{
    index::{Lease, TreeIndex},
    log::{Error, LeaseScope, Meta, Position, Result, SharedLog, WithPrev},
    types::{Change, ChangeKind, KeyRange, LeaseId, Revision, RowId},
};

/// Maximum time to wait for a running append of this instance, which also brings the changes of the other instances
/// before it. After that time the log is read.
const OWN_APPEND_MAX: Duration = Duration::from_millis(10);
/// Pause after a failed read of the log.
const RETRY_PAUSE: Duration = Duration::from_millis(100);

impl Shared {
    /// Returns the log position up to which this instance has applied everything.
    pub(super) fn position(&self) -> Position {
        let index = self.index.read();
        let epoch = self.leases.lock().epoch;
        Position { head: index.head(), epoch, server: self.replication.server.load(Ordering::Relaxed) }
    }

    /// Returns whether this instance has applied everything up to `position`.
    fn has_reached(&self, position: Position) -> bool {
        let own = self.position();
        let is_there = own.server == position.server && own.head >= position.head && own.epoch >= position.epoch;
        is_there && !self.has_pending_compaction()
    }

    /// Returns whether a compaction was read from the log that is not effective yet. While this instance catches up,
    /// the epoch that includes the compaction precedes it.
    pub(super) fn has_pending_compaction(&self) -> bool {
        let recorded = Revision(self.replication.recorded_compaction.load(Ordering::Relaxed));
        recorded > self.index.read().compact_revision().unwrap_or(Revision(i64::MIN))
    }

    /// Returns whether the log, or this instance, is past `position`.
    pub(super) async fn has_moved_past(&self, position: Position) -> Result<bool> {
        let Some(log) = self.log.shared() else { return Ok(false) };
        Ok(self.position() != position || log.position().await? != position)
    }

    /// Asks for the log's position and catches up to it.
    ///
    /// # Errors
    ///
    /// [`Error::Diverged`] stops the instance.
    pub(super) async fn reach_head(&self, log: &dyn SharedLog) -> Result<()> {
        // Everything that was applied before the query is in the log. During the query this instance may append and
        // apply more, so its position afterwards may be higher than that of a sound log.
        let before = self.position();
        let position = log.position().await?;
        let went_back =
            position.server == before.server && (position.head < before.head || position.epoch < before.epoch);
        if !went_back && (self.has_reached(position) || self.wait_for_own_append(position).await) {
            return Ok(());
        }
        // Stops the instance if the log went back.
        self.catch_up().await
    }

    /// Waits up to [`OWN_APPEND_MAX`] while an append of this instance is running. Returns whether `position` was
    /// reached.
    async fn wait_for_own_append(&self, position: Position) -> bool {
        let mut applied = self.replication.applied.subscribe();
        let waiting = async {
            while self.replication.is_appending.load(Ordering::Relaxed) && !self.has_reached(position) {
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
        let caught_up = self.catch_up_locked().await;
        if let Err(Error::Diverged(text)) = &caught_up {
            self.replication.failed.send_replace(Some(text.clone()));
        }
        caught_up
    }

    /// Reads and applies the log; repeats while a recorded compaction is above the applied head.
    async fn catch_up_locked(&self) -> Result<()> {
        loop {
            let before = self.position();
            let (position, state) = self.read_position(before).await?;
            if position.head < before.head {
                return Err(Error::Diverged(format!(
                    "this instance had revision {}, the database ends at revision {}",
                    before.head, position.head
                )));
            }
            if position.epoch < before.epoch {
                return Err(Error::Diverged(format!(
                    "the database lost changes of leases, alarms or users, or a compaction: this instance had change {}, \
                     the database ends at change {}",
                    before.epoch, position.epoch
                )));
            }
            let auth = match &state {
                Some((meta, _)) if !self.authority.is_at(meta.auth) => Some(self.log.auth().await?),
                _ => None,
            };
            if position.server != before.server {
                self.compare_tail(position.head).await?;
                // From here on nothing fails until the leases are updated: a known server means that they are.
                self.replication.server.store(position.server, Ordering::Relaxed);
            }
            if let Some((meta, scope)) = &state {
                if let Some(compacted) = meta.compact_revision {
                    self.replication.recorded_compaction.fetch_max(compacted.0, Ordering::Relaxed);
                }
                self.update_leases(meta, scope, auth);
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
            // A compaction above the head was recorded after the position was read. The loop then reads the log again.
            if compacted <= head {
                if compacted > known.unwrap_or(Revision(-1)) {
                    self.note_compaction(compacted);
                }
                return Ok(());
            }
        }
    }

    /// Reads the log's position, and, if they may have changed since `before`, the leases and the other facts.
    async fn read_position(&self, before: Position) -> Result<(Position, Option<(Meta, LeaseScope)>)> {
        let Some(log) = self.log.shared() else {
            let meta = self.log.meta().await?;
            return Ok((Position { epoch: before.epoch, ..meta.position }, Some((meta, LeaseScope::All))));
        };
        let position = log.position().await?;
        let is_unchanged = position.epoch == before.epoch && position.server == before.server;
        Ok((position, if is_unchanged { None } else { Some(log.meta_since(before).await?) }))
    }

    /// Applies the next page of changes up to `to`. Returns false if compaction has deleted some of them.
    async fn read_page(&self, to: Revision) -> Result<bool> {
        let next = self.index.read().head().next();
        if next > to {
            // The writer, on another thread, has applied them.
            return Ok(true);
        }
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

    /// Applies changes of other instances up to `head`, behind which an append of this instance was added on `server`.
    /// Without `changes`, reads them from the log. While the returned guard exists, no other server is accepted: the caller
    /// applies its own changes.
    ///
    /// # Errors
    ///
    /// [`Error::OutcomeUnknown`] if another server was accepted since the append. It may lack these changes.
    pub(super) async fn apply_others(
        &self,
        mut changes: Vec<Change>,
        head: Revision,
        server: i64,
    ) -> Result<AsyncMutexGuard<'_, ()>> {
        complete_prev(&self.index.read(), &mut changes);
        if self.hub.wants_prev() {
            self.fill_cached_prev(&mut changes);
            self.fill_prev(&mut changes, &mut Fetched::new()).await;
        }
        let lock = self.replication.lock.lock().await;
        if self.replication.server.load(Ordering::Relaxed) != server {
            return Err(Error::OutcomeUnknown("another server has become the primary".to_owned()));
        }
        if !changes.is_empty() {
            self.apply_logged(&changes, head);
        }
        while self.index.read().head() < head {
            if !self.read_page(head).await? {
                self.rebuild().await?;
            }
        }
        Ok(lock)
    }

    /// Fills in the previous pairs that are in memory.
    fn fill_cached_prev(&self, changes: &mut [Change]) {
        let mut earlier = HashMap::new();
        for change in changes {
            if let Some(prev) = &mut change.prev {
                prev.kv = earlier.get(&prev.row).cloned().or_else(|| self.values.get(prev.row));
            }
            if let Some(kv) = change.kv() {
                earlier.insert(change.row, kv.clone());
            }
        }
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
        let auth = if self.authority.is_at(replayed.meta.auth) { None } else { Some(self.log.auth().await?) };
        // The swaps leave the old state here, so that it is dropped after the locks are released.
        let mut rebuilt = (replayed.index, leases);
        self.hub.reset_to(head, compacted, || {
            let mut index = self.index.write();
            let mut leases = self.leases.lock();
            std::mem::swap(&mut *index, &mut rebuilt.0);
            std::mem::swap(&mut *leases, &mut rebuilt.1);
            self.space.set_alarms(&replayed.meta);
            if let Some(auth) = auth {
                self.authority.set(auth);
            }
        });
        {
            // The instance that recorded the compaction deletes these rows, if it is alive. Under one lock, so that the
            // compactor does not take them for those of an earlier compaction.
            let mut left = self.rows_left_to_others.lock();
            *left = replayed.garbage;
            self.compaction_done.send_replace(compacted);
        }
        self.lease_deadline.notify_one();
        self.fill_tail().await
    }

    /// Replaces the kept changes by the newest revision of the log, for a later comparison.
    pub(super) async fn fill_tail(&self) -> Result<()> {
        if self.log.shared().is_none() {
            return Ok(());
        }
        let head = self.index.read().head();
        if head > Revision::EMPTY {
            let page = self.log.changes(head, head, &KeyRange::all(), WithPrev::No).await?;
            let mut tail = self.replication.tail.lock();
            tail.clear();
            tail.push(&page.changes);
        }
        Ok(())
    }

    /// Checks that the log contains the changes that this instance applied last.
    async fn compare_tail(&self, log_head: Revision) -> Result<()> {
        let (applied, newest): (HashMap<RowId, Change>, Option<Change>) = {
            let tail = self.replication.tail.lock();
            let by_row = tail.iter().map(|change| (change.row, change.clone())).collect();
            (by_row, tail.iter().next_back().cloned())
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
                // Only rows that are in both are compared: rows of the tail may be compacted, and the tail may begin in
                // the middle of a revision.
                if let Some(applied) = applied.get(&found.row)
                    && (applied.key != found.key || applied.kv() != found.kv())
                {
                    return Err(diverged(found.row.revision));
                }
            }
            next = page.next;
        }
        // The newest row of a log is never deleted, so a log that ends here must contain the newest applied revision.
        if !newest_found && self.log_head().await? <= newest.row.revision {
            return Err(diverged(newest.row.revision));
        }
        Ok(())
    }

    /// Returns the newest revision of the log. Since the position was read before, other instances may have appended to
    /// it and compacted it.
    async fn log_head(&self) -> Result<Revision> {
        match self.log.shared() {
            Some(log) => Ok(log.position().await?.head),
            None => Ok(self.log.meta().await?.position.head),
        }
    }

    /// Makes a recorded compaction effective for reads. The instance that recorded it deletes the rows.
    pub(super) fn note_compaction(&self, revision: Revision) {
        self.hub.record_compaction(revision, || self.index.write().begin_compaction(revision));
        self.compaction.notify_one();
    }
}

/// Completes changes that were read from the log. A change contains only the revision of the version that it replaced;
/// the row and the lease of that version are in the index.
fn complete_prev(index: &TreeIndex, changes: &mut [Change]) {
    /// The newest change of a key: its row, the row that it replaced, and its lease.
    type Newest = (RowId, Option<RowId>, Option<LeaseId>);
    let mut newest: HashMap<&[u8], Newest> = HashMap::new();
    for change in changes {
        let known = newest.get(change.key.as_slice()).copied().or_else(|| {
            let entry = index.get(&change.key, index.head())?;
            let Lease::Known(lease) = entry.lease else { return None };
            Some((entry.version.row, None, lease))
        });
        if let Some((row, replaced, lease)) = known {
            change.prev_lease = lease;
            // The second change of a key in a transaction shows the version before the transaction.
            let shown = if row.revision == change.row.revision { replaced } else { Some(row) };
            if let (Some(prev), Some(shown)) = (&mut change.prev, shown)
                && prev.row.revision == shown.revision
            {
                prev.row = shown;
            }
        }
        let change: &Change = change;
        let lease = match &change.kind {
            ChangeKind::Put { lease, .. } => *lease,
            ChangeKind::Delete => None,
        };
        let replaced = change.prev.as_ref().map(|prev| prev.row);
        newest.insert(change.key.as_slice(), (change.row, replaced, lease));
    }
}

/// Follows a shared log, so that the changes of other instances reach the watchers of this one.
pub(super) async fn run(shared: Arc<Shared>, poll_interval: Duration, stop: watch::Receiver<bool>) {
    let work = async {
        let Some(log) = shared.log.shared() else { return };
        let mut last_read = Instant::now();
        let mut is_failing = false;
        loop {
            shared.pulses.follower.beat();
            let seen = shared.index.read().head();
            let notified_head = log.wait_for_append(seen).await;
            // Most notifications are for this instance's own commits, and arrive shortly before or after it applies
            // them, or for changes that a running append brings. They need no read of the log, except once per poll
            // interval.
            if let Some(notified_head) = notified_head.filter(|_| last_read.elapsed() < poll_interval) {
                let mut applied = shared.replication.applied.subscribe();
                if notified_head <= shared.index.read().head() {
                    continue;
                }
                let is_appending = shared.replication.is_appending.load(Ordering::Relaxed);
                if is_appending && timeout(OWN_APPEND_MAX, applied.changed()).await.is_ok() {
                    continue;
                }
            }
            last_read = Instant::now();
            let caught_up = match notified_head {
                Some(_) => shared.catch_up().await,
                // Most polls find nothing, and need no lock then.
                None => shared.reach_head(log).await,
            };
            match caught_up {
                Ok(()) if is_failing => {
                    is_failing = false;
                    info!("the log can be followed again");
                }
                // A notification follows its commit, so this one is false: every role that may connect can send one.
                Ok(()) if notified_head.is_some_and(|notified| notified > shared.index.read().head()) => {
                    sleep(RETRY_PAUSE).await;
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
    until_stopped(stop, work).await;
}
