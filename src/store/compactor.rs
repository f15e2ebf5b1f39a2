//! Frees what a compaction made unreadable: first in the index, then in the log, a little at a time between client writes.

use std::{sync::Arc, time::Duration};

use tokio::{sync::watch, task::yield_now, time::sleep};
use tracing::{info, warn};

use super::Shared;
use crate::{index::CompactionCursor, types::RowId};

/// Keys looked at while the index is locked.
const INDEX_STEP_KEYS: usize = 1_000;
/// Rows deleted by one transaction (etcd's --compaction-batch-limit).
const PURGE_ROWS: usize = 1_000;
/// Pause between such transactions (etcd's --compaction-sleep-interval).
const PURGE_PAUSE: Duration = Duration::from_millis(10);
/// Pause before rows are tried again that the database would not delete.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Runs until stopped. `garbage` are rows that an earlier run of the server had compacted away and not yet deleted.
pub(super) async fn run(shared: Arc<Shared>, mut garbage: Vec<RowId>, mut stop: watch::Receiver<bool>) {
    let work = async {
        purge(&shared, &mut garbage).await;
        loop {
            compact(&shared, &mut garbage).await;
            shared.compaction.notified().await;
        }
    };
    tokio::select! {
        () = work => {}
        // A step that is cut off is done again after the next start: the rows to go are known from the log itself.
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

async fn compact(shared: &Shared, garbage: &mut Vec<RowId>) {
    loop {
        let target = shared.index.read().compact_revision();
        if target.is_none() || target <= *shared.compaction_done.borrow() {
            return;
        }
        let mut cursor = CompactionCursor::default();
        while shared.index.write().compact_step(&mut cursor, INDEX_STEP_KEYS, garbage) {
            yield_now().await;
        }
        let rows = garbage.len();
        purge(shared, garbage).await;
        info!(compact_revision = target.map(|revision| revision.0), rows, "compaction finished");
        shared.compaction_done.send_replace(target);
    }
}

/// Deletes rows in their order. A key's tombstone comes behind the puts that it ends: with the tombstone gone and a stop
/// before the puts are, the key would live again after the next start. And rows that lie together on the disk go together,
/// so that a step touches few pages and empties them.
pub(super) async fn purge(shared: &Shared, garbage: &mut Vec<RowId>) {
    garbage.sort_unstable();
    let mut rows = garbage.as_slice();
    while !rows.is_empty() {
        let (now, later) = rows.split_at(rows.len().min(PURGE_ROWS));
        match shared.log.purge(now).await {
            Ok(()) => {
                rows = later;
                sleep(PURGE_PAUSE).await;
            }
            Err(error) => {
                warn!(%error, rows = rows.len(), "deleting compacted rows failed; it is tried again");
                sleep(RETRY_PAUSE).await;
            }
        }
    }
    garbage.clear();
}
