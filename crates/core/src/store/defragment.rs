//! Returns the free space of the database to the file system.

use std::sync::Arc;

use tokio::time::{Instant, sleep};
use tracing::info;

use super::{
    error::{Error, Result},
    handle::Store,
    shared::Shared,
};
use crate::log::{self, Reclaim, Reclaimed};

impl Store {
    /// Returns the database's free space to the file system, in steps between which writes can run for as long as a step
    /// takes. One that was begun is finished even if the future is dropped, as in etcd; the next one waits for it.
    pub async fn defragment(&self) -> Result<()> {
        let running = Arc::clone(&self.shared.defragmenting).lock_owned().await;
        let shared = Arc::clone(&self.shared);
        let work = tokio::spawn(async move {
            let done = shared.defragment().await;
            drop(running);
            done
        });
        // A task ends without a result if the process stops.
        work.await.unwrap_or(Err(Error::Stopped))
    }
}

impl Shared {
    async fn defragment(&self) -> Result<()> {
        let metrics = &self.metrics.maintenance;
        let begun = Instant::now();
        metrics.defrag_inflight.inc();
        let done = async {
            let mut step = Instant::now();
            while self.log.reclaim(Reclaim::Space).await? == Reclaimed::More {
                sleep(step.elapsed()).await;
                step = Instant::now();
            }
            Ok(())
        };
        let done: log::Result<()> = done.await;
        metrics.defrag_inflight.dec();
        metrics.defrag.observe(begun.elapsed().as_secs_f64());
        // A failed one may have freed space, too.
        self.space.note_freed();
        done?;
        info!(elapsed_ms = begun.elapsed().as_millis(), "defragmented");
        Ok(())
    }
}
