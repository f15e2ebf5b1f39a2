//! Returns pages that compaction has freed to the file system, a few at a time, after the compaction.
//!
//! Not after each step of the compaction: moving the file's last pages into free ones writes as much as the deletes
//! did, while writes wait, and the next writes reuse many of the free pages. So a part of the file stays free.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::{Mutex, Notify},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tracing::warn;

use super::{checkpoint::Checkpointer, read, writer::Writer};
use crate::rows::unavailable;
use orlop_core::{log::Result, supervise::vital};

/// Maximum number of pages returned while a write waits.
const STEP: &str = "PRAGMA incremental_vacuum(64)";
const STEP_PAGES: usize = 64;
const STEP_PAUSE: Duration = Duration::from_millis(5);
/// Longer than the pause between two steps of a compaction.
const SETTLED: Duration = Duration::from_secs(1);
/// Free pages that stay in the file: a number, or a part of the file.
const KEEP_PAGES: i64 = 256;
const KEEP_PART: i64 = 8;

pub(super) struct Vacuum {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    writer: Arc<Writer>,
    checkpointer: Arc<Checkpointer>,
    freed: Notify,
    stop: Notify,
}

impl Vacuum {
    pub(super) fn start(writer: Arc<Writer>, checkpointer: Arc<Checkpointer>) -> Self {
        let shared = Arc::new(Shared { writer, checkpointer, freed: Notify::new(), stop: Notify::new() });
        let task = vital("the vacuum", run(Arc::clone(&shared)));
        Self { shared, task: Mutex::new(Some(task)) }
    }

    /// Notifies the task that rows were deleted.
    pub(super) fn freed(&self) {
        self.shared.freed.notify_one();
    }

    /// Runs one step; returns the number of pages that are still free.
    pub(super) async fn step(&self) -> Result<i64> {
        self.shared.step().await
    }

    /// Ends the task between two steps.
    pub(super) async fn finish(&self) {
        self.shared.stop.notify_one();
        if let Some(task) = self.task.lock().await.take()
            && let Err(error) = task.await
        {
            warn!(%error, "vacuum task failed");
        }
    }
}

async fn run(shared: Arc<Shared>) {
    let work = async {
        loop {
            shared.freed.notified().await;
            while timeout(SETTLED, shared.freed.notified()).await.is_ok() {}
            if let Err(error) = shared.shrink().await {
                warn!(%error, "returning free pages failed; trying again after the next compaction");
            }
        }
    };
    // The task is dropped during a pause, while it waits for the writer, or between two statements, each of which is
    // complete.
    tokio::select! {
        () = work => {}
        () = shared.stop.notified() => {}
    }
}

impl Shared {
    async fn shrink(&self) -> Result<()> {
        let mut writer = self.writer.hold().await.map_err(unavailable)?;
        let pages = read::pages(writer.connection()).await?;
        writer.keep();
        let keep = KEEP_PAGES.max(pages.all / KEEP_PART);
        let mut free = pages.free;
        while free > keep {
            free = self.step().await?;
            sleep(STEP_PAUSE).await;
        }
        Ok(())
    }

    async fn step(&self) -> Result<i64> {
        let mut writer = self.writer.hold().await.map_err(unavailable)?;
        sqlx::query(STEP).execute(writer.connection()).await.map_err(unavailable)?;
        let free = sqlx::query_scalar("PRAGMA freelist_count").fetch_one(writer.connection()).await;
        let free = free.map_err(unavailable)?;
        writer.keep();
        self.checkpointer.purged(STEP_PAGES);
        Ok(free)
    }
}
