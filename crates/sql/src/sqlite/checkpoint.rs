//! Checkpoints: copies the WAL into the database file, concurrently with writes.
//!
//! A passive checkpoint copies committed pages without blocking writes. SQLite restarts the WAL at the first write
//! after all of it was copied. Under continuous load, a passive checkpoint never copies the last pages, so the WAL
//! grows. When it is longer than [`WAL_PAGES_MAX`], another passive checkpoint runs while writes are blocked. It copies
//! only the pages that were written during the previous checkpoint.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sqlx::{Connection as _, Row as _, SqliteConnection};
use tokio::{
    sync::{Mutex, Notify},
    task::JoinHandle,
};
use tracing::warn;

use super::writer::Writer;
use orlop_core::{
    supervise::vital,
    types::{Change, ChangeKind},
};

/// Approximate number of bytes written to the WAL between two checkpoints.
const CHECKPOINT_BYTES: usize = 8 << 20;
/// Approximate bytes of a row in the WAL in addition to key and value. A purged row counts as this number of bytes.
const ROW_BYTES: usize = 64;
/// Approximate bytes of a commit in the WAL in addition to its rows. A commit writes whole pages; usually the first and
/// the last contain mostly older rows.
const COMMIT_BYTES: usize = 8 << 10;
/// Length of the WAL above which a checkpoint runs while writes are blocked, in pages of 4 KiB (32 MiB).
const WAL_PAGES_MAX: i64 = 8_192;
/// Maximum time between two checkpoints if the WAL grows slowly.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);

pub(super) struct Checkpointer {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    /// Approximate number of bytes written to the WAL since the last checkpoint began.
    pending_bytes: AtomicUsize,
    wake: Notify,
    stop: Notify,
}

impl Checkpointer {
    pub(super) fn start(connection: SqliteConnection, writer: Arc<Writer>) -> Self {
        let shared = Arc::new(Shared { pending_bytes: AtomicUsize::new(0), wake: Notify::new(), stop: Notify::new() });
        let task = vital("the checkpointer", run(connection, writer, Arc::clone(&shared)));
        Self { shared, task: Mutex::new(Some(task)) }
    }

    pub(super) fn appended(&self, changes: &[Change]) {
        let bytes = changes.iter().map(|change| {
            let pair = match &change.kind {
                ChangeKind::Put { kv, .. } => kv.len(),
                ChangeKind::Delete => change.key.len(),
            };
            ROW_BYTES + pair
        });
        self.add(COMMIT_BYTES + bytes.sum::<usize>());
    }

    pub(super) fn purged(&self, rows: usize) {
        self.add(COMMIT_BYTES + rows * ROW_BYTES);
    }

    fn add(&self, bytes: usize) {
        if self.shared.pending_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes >= CHECKPOINT_BYTES {
            self.shared.wake.notify_one();
        }
    }

    /// Runs a last checkpoint and ends the task.
    pub(super) async fn finish(&self) {
        self.shared.stop.notify_one();
        if let Some(task) = self.task.lock().await.take()
            && let Err(error) = task.await
        {
            warn!(%error, "checkpoint task failed");
        }
    }
}

async fn run(mut connection: SqliteConnection, writer: Arc<Writer>, shared: Arc<Shared>) {
    let mut stopping = false;
    while !stopping {
        tokio::select! {
            () = shared.wake.notified() => {}
            () = tokio::time::sleep(IDLE_INTERVAL) => {}
            () = shared.stop.notified() => stopping = true,
        }
        if shared.pending_bytes.swap(0, Ordering::Relaxed) > 0
            && let Err(error) = checkpoint(&mut connection, &writer).await
        {
            warn!(%error, "checkpoint failed; trying again");
            shared.pending_bytes.fetch_add(1, Ordering::Relaxed);
        }
    }
    if let Err(error) = connection.close().await {
        warn!(%error, "cannot close the connection for checkpoints");
    }
}

async fn checkpoint(connection: &mut SqliteConnection, writer: &Writer) -> sqlx::Result<()> {
    if passive(connection).await? <= WAL_PAGES_MAX {
        return Ok(());
    }
    // Another checkpoint without blocking writes, so that the last one copies only a few pages.
    passive(connection).await?;
    let guard = writer.block().await;
    passive(connection).await?;
    drop(guard);
    Ok(())
}

/// Runs a passive checkpoint. Returns the length of the WAL in pages.
async fn passive(connection: &mut SqliteConnection) -> sqlx::Result<i64> {
    let row = sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").fetch_one(&mut *connection).await?;
    row.try_get(1)
}
