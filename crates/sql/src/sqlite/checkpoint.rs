//! Checkpoints: copies the WAL into the database file, concurrently with writes.
//!
//! A passive checkpoint copies committed pages without blocking writes. SQLite restarts the WAL at the first write
//! after all of it was copied. Under continuous load, a passive checkpoint never copies the last pages, so the WAL
//! grows. When it is longer than [`WAL_PAGES_MAX`], another passive checkpoint runs while writes are blocked. It copies
//! only the pages that were written during the previous checkpoint.
//!
//! SQLite syncs the database file only in the checkpoint that copies the last page. It would sync everything that the
//! others copied, while writes are blocked. Therefore each checkpoint syncs the file here (docs/adr/0001).
//!
//! If that sync fails, pages may be lost that SQLite will not copy again, because Linux marks them as clean. Then the
//! process ends. The next one rebuilds the index of the WAL, and so copies all of it.

use std::{
    fs::File,
    io,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use sqlx::{Connection as _, Row as _, SqliteConnection};
use tokio::{
    sync::{Mutex, Notify},
    task::{JoinHandle, spawn_blocking},
};
use tracing::warn;

use super::writer::Writer;
use crate::Durability;
use orlop_core::{
    supervise::{disk_failed, vital},
    types::{Change, EncodedKv},
};

/// Approximate number of bytes written to the WAL between two checkpoints. A commit waits while the disk syncs these
/// bytes in the database file.
const CHECKPOINT_BYTES: usize = 1 << 20;
/// Approximate bytes of a row in the WAL in addition to key and value. A purged row counts as this number of bytes.
const ROW_BYTES: usize = 64;
/// Approximate bytes of a commit in the WAL in addition to its rows. A commit writes whole pages; usually the first and
/// the last contain mostly older rows.
const COMMIT_BYTES: usize = 8 << 10;
/// Length of the WAL above which a checkpoint runs while writes are blocked, in pages of 4 KiB (32 MiB).
const WAL_PAGES_MAX: i64 = 8_192;
/// Maximum time between two checkpoints if the WAL grows slowly.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
const SYNC_FAILED: &str = "cannot sync the database file; see the kernel log. The process exits, because the kernel may have \
                           discarded pages: the next start writes them again from the WAL";

pub(super) struct Checkpointer {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    /// Approximate number of bytes written to the WAL since the last checkpoint began.
    pending_bytes: AtomicUsize,
    wake: Notify,
    stop: Notify,
    /// To sync the database file; `None` if nothing is synced. It must not be closed before the connections that write:
    /// that would release the locks that they have on the file, because POSIX locks belong to a process and not to a
    /// descriptor.
    database: Option<File>,
}

impl Checkpointer {
    /// Starts the task.
    ///
    /// # Errors
    ///
    /// If the database file cannot be opened.
    pub(super) fn start(
        connection: SqliteConnection,
        writer: Arc<Writer>,
        file: &Path,
        durability: Durability,
    ) -> io::Result<Self> {
        let database = match durability {
            Durability::Synced => Some(File::open(file)?),
            Durability::Unsynced => None,
        };
        let shared = Shared { pending_bytes: AtomicUsize::new(0), wake: Notify::new(), stop: Notify::new(), database };
        let shared = Arc::new(shared);
        let task = vital("the checkpointer", run(Arc::clone(&shared), writer, connection));
        Ok(Self { shared, task: Mutex::new(Some(task)) })
    }

    pub(super) fn appended(&self, changes: &[Change]) {
        let bytes = changes.iter().map(|change| ROW_BYTES + change.kv().map_or(change.key.len(), EncodedKv::len));
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

// The parameters are dropped in reverse order: the connection before the descriptor of its file in `shared`.
async fn run(shared: Arc<Shared>, writer: Arc<Writer>, mut connection: SqliteConnection) {
    let mut stopping = false;
    while !stopping {
        tokio::select! {
            () = shared.wake.notified() => {}
            () = tokio::time::sleep(IDLE_INTERVAL) => {}
            () = shared.stop.notified() => stopping = true,
        }
        if shared.pending_bytes.swap(0, Ordering::Relaxed) > 0
            && let Err(error) = checkpoint(&mut connection, &writer, &shared).await
        {
            warn!(%error, "checkpoint failed; trying again");
            shared.pending_bytes.fetch_add(1, Ordering::Relaxed);
        }
    }
    if let Err(error) = connection.close().await {
        warn!(%error, "cannot close the connection for checkpoints");
    }
}

async fn checkpoint(connection: &mut SqliteConnection, writer: &Writer, shared: &Arc<Shared>) -> sqlx::Result<()> {
    if passive(connection, shared).await? <= WAL_PAGES_MAX {
        return Ok(());
    }
    // Another checkpoint without blocking writes, so that the last one copies and syncs only a few pages.
    passive(connection, shared).await?;
    let guard = writer.block().await;
    passive(connection, shared).await?;
    drop(guard);
    Ok(())
}

/// Runs a passive checkpoint and syncs the database file. Returns the length of the WAL in pages.
async fn passive(connection: &mut SqliteConnection, shared: &Arc<Shared>) -> sqlx::Result<i64> {
    let copied = sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").fetch_one(&mut *connection).await;
    // Also after an error, which may be that of a sync of this file.
    let shared = Arc::clone(shared);
    let synced = spawn_blocking(move || shared.database.as_ref().map_or(Ok(()), File::sync_data));
    // Syncing does not panic, so an error of the task means that the runtime ends.
    if let Err(error) = synced.await.map_err(|error| sqlx::Error::Io(error.into()))? {
        disk_failed(&error, SYNC_FAILED);
    }
    copied?.try_get(1)
}
