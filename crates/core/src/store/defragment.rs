//! Returns the free space of the database to the file system.

use std::sync::Arc;

use prometheus::IntGauge;
use tokio::time::{Instant, sleep};
use tracing::info;

use super::{
    error::{Error, Result},
    handle::Store,
    shared::Shared,
    tasks,
};
use crate::log::{self, Reclaim, Reclaimed};

impl Store {
    /// Returns the database's free space to the file system, in steps between which writes can run for as long as a step
    /// takes. One that was begun is finished even if the future is dropped, as in etcd; the next one waits for it.
    pub async fn defragment(&self) -> Result<()> {
        let running = Arc::clone(&self.shared.defragmenting).lock_owned().await;
        let shared = Arc::clone(&self.shared);
        let work = async move {
            let done = shared.defragment().await;
            drop(running);
            done
        };
        // The work ends without a result if it panics.
        tasks::finish(&self.shared.metrics, "a defragmentation", work).await.unwrap_or(Err(Error::OutcomeUnknown))
    }
}

/// Counts as a running defragmentation until it is dropped, which a panic does, too.
struct InFlight<'a>(&'a IntGauge);

impl<'a> InFlight<'a> {
    fn begin(gauge: &'a IntGauge) -> Self {
        gauge.inc();
        Self(gauge)
    }
}

impl Drop for InFlight<'_> {
    fn drop(&mut self) {
        self.0.dec();
    }
}

impl Shared {
    async fn defragment(&self) -> Result<()> {
        let metrics = &self.metrics.maintenance;
        let begun = Instant::now();
        let _in_flight = InFlight::begin(&metrics.defrag_inflight);
        let done = async {
            let mut step = Instant::now();
            while self.log.reclaim(Reclaim::Space).await? == Reclaimed::More {
                sleep(step.elapsed()).await;
                step = Instant::now();
            }
            Ok(())
        };
        let done: log::Result<()> = done.await;
        metrics.defrag.observe(begun.elapsed().as_secs_f64());
        // A failed one may have freed space, too.
        self.space.note_freed();
        done?;
        info!(elapsed_ms = begun.elapsed().as_millis(), "defragmented");
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{log::memory::MemoryLog, store::Settings};

    #[tokio::test]
    async fn panic_fails_only_its_defragmentation() {
        let store = Store::open(Arc::new(MemoryLog::with_panicking_space()), Settings::default()).await.unwrap();
        let metrics = &store.shared.metrics;
        for number in 1..3 {
            assert!(matches!(store.defragment().await, Err(Error::OutcomeUnknown)));
            assert_eq!((metrics.maintenance.defrag_inflight.get(), metrics.rpc.panics.get()), (0, number));
        }
    }
}
