//! Frees what a compaction made unreadable: first in the index, then in the log, a little at a time between client writes.
//!
//! Of several instances the one that recorded a compaction deletes its rows, and may be killed before it has. Were the rows
//! of the next compaction deleted then, a key's delete could go before an older put of it, and the next start would find the
//! key alive. So at each compaction every instance first deletes the rows of the one before that it had left to others,
//! which mostly finds none. It remembers those of one compaction, no more.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{
    sync::watch,
    task::yield_now,
    time::{Instant, sleep},
};
use tracing::{info, warn};

use super::Shared;
use crate::{
    index::CompactionCursor,
    log::Reclaim,
    types::{Revision, RowId},
};

/// Keys looked at while the index is locked.
const INDEX_STEP_KEYS: usize = 1_000;
/// Pause before rows are tried again that the database would not delete.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// How long other instances have to read what compaction is about to delete; one that did not must read the whole log anew.
const OTHERS_READ_MAX: Duration = Duration::from_millis(500);

/// How fast compacted rows are deleted.
#[derive(Clone, Copy, Debug)]
pub struct Pace {
    /// Rows deleted by one transaction (etcd's --compaction-batch-limit).
    pub rows: usize,
    /// Pause between such transactions (etcd's --compaction-sleep-interval).
    pub pause: Duration,
}

impl Default for Pace {
    fn default() -> Self {
        Self { rows: 1_000, pause: Duration::from_millis(10) }
    }
}

/// Runs until stopped. `garbage` are rows that an earlier run of the server had compacted away and not yet deleted.
pub(super) async fn run(shared: Arc<Shared>, pace: Pace, mut garbage: Vec<RowId>, mut stop: watch::Receiver<bool>) {
    let work = async {
        let compacted = *shared.compaction_done.borrow();
        if let Some(compacted) = compacted {
            purge(&shared, pace, &mut garbage, compacted, Duty::Own).await;
        }
        loop {
            compact(&shared, pace).await;
            shared.pulses.compactor.rest();
            shared.compaction.notified().await;
            shared.pulses.compactor.beat();
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        // A step that is cut off is done again after the next start: the rows to go are known from the log itself.
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1000.0
}

async fn compact(shared: &Shared, pace: Pace) {
    let mut garbage = Vec::new();
    loop {
        let Some(target) = shared.index.read().compact_revision() else { return };
        if Some(target) <= *shared.compaction_done.borrow() {
            return;
        }
        let is_own = shared.purge_duty.swap(false, Ordering::Relaxed);
        let metrics = &shared.metrics.store;
        let begun = Instant::now();
        let mut cursor = CompactionCursor::default();
        while shared.index.write().compact_step(&mut cursor, INDEX_STEP_KEYS, &mut garbage) {
            shared.pulses.compactor.beat();
            yield_now().await;
        }
        metrics.index_compaction_pause.observe(ms(begun));
        let rows = garbage.len();
        let mut left = std::mem::take(&mut *shared.left_to_others.lock());
        let before = *shared.compaction_done.borrow();
        if let Some(before) = before {
            purge(shared, pace, &mut left, before, Duty::Others).await;
        }
        if is_own {
            if !shared.members.is_alone() {
                sleep(OTHERS_READ_MAX).await;
            }
            purge(shared, pace, &mut garbage, target, Duty::Own).await;
            metrics.compaction_total.observe(ms(begun));
            shared.metrics.state.last_compaction.set(unix_seconds());
            info!(compact_revision = target.0, rows, "compaction finished");
            shared.space.note_freed();
        } else {
            shared.left_to_others.lock().append(&mut garbage);
        }
        shared.compaction_done.send_if_modified(|done| {
            let further = *done < Some(target);
            *done = (*done).max(Some(target));
            further
        });
    }
}

/// Whose rows are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Duty {
    Own,
    /// Another instance has deleted them, or is about to, unless it is gone.
    Others,
}

/// Deletes rows in their order. A key's tombstone comes behind the puts that it ends: with the tombstone gone and a stop
/// before the puts are, the key would live again after the next start. And rows that lie together on the disk go together,
/// so that a step touches few pages and empties them.
pub(super) async fn purge(shared: &Shared, pace: Pace, garbage: &mut Vec<RowId>, compacted: Revision, duty: Duty) {
    garbage.sort_unstable();
    let mut rows = garbage.as_slice();
    while !rows.is_empty() {
        shared.pulses.compactor.beat();
        let (now, later) = rows.split_at(rows.len().min(pace.rows));
        let begun = Instant::now();
        let step = Reclaim::Rows { rows: now, compacted, server: shared.position().server };
        match shared.log.reclaim(step).await {
            Ok(_) => {
                if duty == Duty::Own {
                    shared.metrics.store.compaction_pause.observe(ms(begun));
                    shared.metrics.store.compacted_rows.inc_by(now.len() as u64);
                }
                rows = later;
                sleep(pace.pause).await;
            }
            Err(error) => {
                warn!(%error, rows = rows.len(), "deleting compacted rows failed; it is tried again");
                sleep(RETRY_PAUSE).await;
            }
        }
    }
    garbage.clear();
}

#[expect(clippy::disallowed_methods, reason = "for people, who go by the wall clock")]
fn unix_seconds() -> i64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs().cast_signed())
}
