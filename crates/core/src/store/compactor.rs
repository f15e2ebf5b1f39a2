//! Deletes the versions that a compaction made unreadable, first from the index, then from the log, in small steps
//! between client writes.
//!
//! If several instances share the log, the one that recorded a compaction deletes its rows. It can be killed before it
//! has finished. If another instance then deleted only the rows of the next compaction, a key's tombstone could
//! disappear before an older put of the key, and the key would exist again after the next start. So at each compaction
//! every other instance first deletes the rows of the previous compaction again; usually none are left. An instance
//! remembers the rows of only one compaction. After a failover, which may have lost deletions, or a restart of the database,
//! which looks the same, it reads the rows to delete from the log.

use std::{collections::HashMap, future::pending, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, sleep, timeout},
};
use tracing::{info, warn};

use super::{history::delete_rows, shared::Shared, tasks::until_stopped};
use crate::{
    clock,
    index::{CompactionCursor, TreeIndex},
    log,
    supervise::blocking,
    types::{Change, Key, Revision, RowId, Superseded},
};

/// Keys visited per step while the index is locked.
const INDEX_STEP_KEYS: usize = 1_000;
/// Maximum number of rows that are sorted without leaving the thread: it takes a few milliseconds.
pub(super) const SORT_ROWS_MAX: usize = 100_000;
/// Pause after a failed deletion.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// The same after damage of the database, which does not pass. The watchdog waits longer ([`crate::watchdog::STUCK_AFTER`]).
const DAMAGED_PAUSE: Duration = Duration::from_secs(20);
/// Time for other instances to read rows before they are deleted. An instance that takes longer must rebuild its index
/// from the whole log.
const OTHERS_READ_TIME: Duration = Duration::from_millis(500);

/// Time for the instance that recorded a compaction to copy its rows to the archive. Then the leader does it, because
/// past states cannot be read before.
const LEFT_ROWS_TIME: Duration = Duration::from_secs(60);

/// The rate at which compacted rows are deleted.
#[derive(Clone, Copy, Debug)]
pub struct CompactionRate {
    /// Rows deleted per transaction (etcd's --compaction-batch-limit).
    pub rows: usize,
    /// Pause between transactions (etcd's --compaction-sleep-interval).
    pub pause: Duration,
}

impl Default for CompactionRate {
    fn default() -> Self {
        Self { rows: 1_000, pause: Duration::from_millis(10) }
    }
}

/// Runs until stopped. `garbage` contains rows that were compacted before the server started and are not deleted yet.
pub(super) async fn run(
    shared: Arc<Shared>,
    rate: CompactionRate,
    mut garbage: Vec<Superseded>,
    stop: watch::Receiver<bool>,
) {
    let work = async {
        let compacted = *shared.compaction_done.borrow();
        match compacted {
            Some(compacted) => purge(&shared, rate, &mut garbage, compacted, PurgeOwner::ThisInstance).await,
            None => *shared.purged_on.lock() = Some(shared.position().server),
        }
        loop {
            compact(&shared, rate).await;
            shared.pulses.compactor.rest();
            let notified = timeout(LEFT_ROWS_TIME, shared.compaction.notified()).await;
            shared.pulses.compactor.beat();
            if notified.is_err() {
                purge_left_rows(&shared, rate).await;
            }
        }
    };
    // An interrupted step is repeated after the next start, which finds the remaining rows in the log.
    until_stopped(stop, work).await;
}

fn elapsed_ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

/// Compacts until the newest recorded compaction is done: first the index, then the rows.
pub(super) async fn compact(shared: &Shared, rate: CompactionRate) {
    let mut garbage = Vec::new();
    loop {
        let Some((target, recorded_by)) = shared.newest_compaction() else { return };
        if Some(target) <= *shared.compaction_done.borrow() {
            return;
        }
        // Without other instances nobody else deletes them, even if it is unknown who recorded the compaction.
        let is_own = recorded_by == PurgeOwner::ThisInstance || shared.members.is_alone();
        let metrics = &shared.metrics.store;
        let begun = Instant::now();
        // The rows are deleted as those of this compaction, so they must not contain any of a later one.
        let mut cursor = CompactionCursor::at(target);
        while shared.index.write().compact_step(&mut cursor, INDEX_STEP_KEYS, &mut garbage) {
            shared.pulses.compactor.beat();
            yield_now().await;
        }
        while shared.values.compact(target, INDEX_STEP_KEYS) {
            yield_now().await;
        }
        metrics.index_compaction_pause.observe(elapsed_ms(begun));
        let (mut left, before) = shared.take_left_rows();
        let purged_on = *shared.purged_on.lock();
        if let Some(before) = before {
            purge(shared, rate, &mut left, before, PurgeOwner::OtherInstance).await;
        }
        if is_own {
            if !shared.members.is_alone() {
                sleep(OTHERS_READ_TIME).await;
            }
            if purged_on != Some(shared.position().server) {
                garbage = read_garbage(shared, target).await;
            }
            let rows = garbage.len();
            purge(shared, rate, &mut garbage, target, PurgeOwner::ThisInstance).await;
            metrics.compaction_total.observe(elapsed_ms(begun));
            shared.metrics.state.last_compaction.set(clock::unix_secs(clock::now()));
            info!(compact_revision = target.0, rows, "compaction finished");
            shared.space.note_freed();
        } else {
            shared.rows_left_to_others.lock().append(&mut garbage);
        }
        shared.compaction_done.send_if_modified(|done| {
            let is_newer = *done < Some(target);
            *done = (*done).max(Some(target));
            is_newer
        });
    }
}

/// Reads which rows of compactions up to `target` the log has: those at or below it that are not in the index. The server is
/// another one than that on which rows were last deleted, so it may have lost their deletion. Without an older put, its
/// tombstone would be deleted alone.
pub(super) async fn read_garbage(shared: &Shared, target: Revision) -> Vec<Superseded> {
    loop {
        let mut garbage = Garbage { target, rows: Vec::new(), last: HashMap::new() };
        let read = shared
            .log
            .replay(Revision(i64::MIN), &mut |_, changes| {
                shared.pulses.compactor.beat();
                for changes in changes.chunks(INDEX_STEP_KEYS) {
                    let index = shared.index.read();
                    changes.iter().for_each(|change| garbage.visit(change, &index));
                }
                Ok(())
            })
            .await;
        match read {
            Ok(_) => return garbage.rows,
            Err(error) => {
                warn!(%error, "cannot read which rows another database server still has; trying again");
                sleep(RETRY_PAUSE).await;
            }
        }
    }
}

/// The rows that are found while the log is read in order.
struct Garbage {
    target: Revision,
    rows: Vec<Superseded>,
    /// For each key the position of its last row in `rows`, until its next change is read.
    last: HashMap<Key, usize>,
}

impl Garbage {
    fn visit(&mut self, change: &Change, index: &TreeIndex) {
        let RowId { revision, .. } = change.row;
        if let Some(last) = self.last.remove(change.key.as_slice()) {
            let end = &mut self.rows[last].end;
            *end = revision.min(*end);
        }
        // A tombstone at the revision itself stays until the next compaction.
        let is_needed = || index.get(&change.key, self.target).is_some_and(|entry| entry.version.row == change.row);
        if revision < self.target && !is_needed() {
            let end = if change.is_delete() { revision } else { Revision::MAX };
            self.last.insert(change.key.clone(), self.rows.len());
            self.rows.push(Superseded { row: change.row, end });
        }
    }
}

/// Deletes the rows of the newest compaction that another instance did not copy to the archive. That instance was killed.
async fn purge_left_rows(shared: &Shared, rate: CompactionRate) {
    let (Some(history), Some(compacted)) = (&shared.history, *shared.compaction_done.borrow()) else { return };
    if shared.members.is_leader()
        && history.lacks(compacted).await
        && let (mut left, Some(compacted)) = shared.take_left_rows()
    {
        purge(shared, rate, &mut left, compacted, PurgeOwner::OtherInstance).await;
    }
}

impl Shared {
    /// Notes that this instance is about to record a compaction. Returns false if it may have recorded the same one before.
    pub(super) fn note_own_compaction(&self, revision: Revision) -> bool {
        let mut own = self.own_compactions.lock();
        if let Some(compacted) = self.index.read().compact_revision() {
            *own = own.split_off(&compacted);
        }
        own.insert(revision)
    }

    /// Returns the newest compaction that is effective for reads, and who has to delete its rows.
    fn newest_compaction(&self) -> Option<(Revision, PurgeOwner)> {
        // Locked first: a later compaction removes this one only when the index has the later one.
        let own = self.own_compactions.lock();
        let newest = self.index.read().compact_revision()?;
        Some((newest, if own.contains(&newest) { PurgeOwner::ThisInstance } else { PurgeOwner::OtherInstance }))
    }

    /// Takes the rows that were left to other instances, with their compaction.
    fn take_left_rows(&self) -> (Vec<Superseded>, Option<Revision>) {
        let mut left = self.rows_left_to_others.lock();
        (std::mem::take(&mut *left), *self.compaction_done.borrow())
    }
}

/// The instance that has to delete rows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum PurgeOwner {
    ThisInstance,
    /// Another instance deletes them, unless it is dead.
    OtherInstance,
}

/// Deletes rows in revision order, so a key's tombstone is deleted after the puts before it. If the tombstone were
/// deleted first and the server stopped, the key would exist again after the next start. Neighboring rows are deleted
/// together, so that a step touches few pages and empties them.
pub(super) async fn purge(
    shared: &Shared,
    rate: CompactionRate,
    garbage: &mut Vec<Superseded>,
    compacted: Revision,
    owner: PurgeOwner,
) {
    *shared.purged_on.lock() = None;
    sort(garbage).await;
    let mut server = shared.position().server;
    let mut rows = garbage.as_slice();
    let mut rows_max = rate.rows;
    loop {
        shared.pulses.compactor.beat();
        let begun = Instant::now();
        let is_last = rows.is_empty();
        let step = &rows[..rows.len().min(rows_max)];
        let history = shared.history.as_ref();
        let done = match history {
            Some(history) if is_last => history.finish(compacted, server).await.map(|()| 0),
            None if is_last => Ok(0),
            Some(_) | None => delete_rows(&*shared.log, history, step, compacted, server).await,
        };
        match done {
            Ok(_) if is_last => break,
            Ok(deleted) => {
                if owner == PurgeOwner::ThisInstance {
                    shared.metrics.store.compaction_pause.observe(elapsed_ms(begun));
                    shared.metrics.store.compacted_rows.inc_by(deleted as u64);
                }
                (rows, rows_max) = (&rows[deleted..], rate.rows);
                sleep(rate.pause).await;
            }
            Err(error) => {
                warn!(%error, rows = rows.len(), "cannot delete compacted rows; trying again");
                // It may have taken longer than a statement may.
                rows_max = (rows_max / 2).max(1);
                sleep(if matches!(error, log::Error::Corrupt(_)) { DAMAGED_PAUSE } else { RETRY_PAUSE }).await;
            }
        }
        let current = shared.position().server;
        if current != server {
            // Another server may lack the copies, and may still have the rows.
            (server, rows) = (current, garbage.as_slice());
        }
    }
    garbage.clear();
    *shared.purged_on.lock() = Some(server);
}

/// Sorts rows, many of them on a thread where that may take long. They are lost if the future is dropped.
pub(super) async fn sort(rows: &mut Vec<Superseded>) {
    if rows.len() <= SORT_ROWS_MAX {
        rows.sort_unstable();
        return;
    }
    let mut moved = std::mem::take(rows);
    let sorted = blocking(move || {
        moved.sort_unstable();
        moved
    });
    *rows = match sorted.await {
        Some(sorted) => sorted,
        // The runtime ends. Without its rows, a compaction would be recorded as done.
        None => pending().await,
    };
}
