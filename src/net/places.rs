//! How many clients may be connected at the same time.

use std::sync::Arc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{info, warn};

use super::seldom::Seldom;

/// File descriptors that are left for the database, snapshots and the log, as many as etcd leaves.
const RESERVED: u64 = 150;
/// If there are fewer file descriptors than that.
const PLACES_MIN: usize = 16;
/// For who asks for metrics and health on addresses of their own, so that clients that fill all places do not keep them out.
const PROBES_MAX: usize = 64;

static FULL: Seldom = Seldom::new();

/// Who has one is connected. Shared by all addresses.
#[derive(Clone, Debug)]
pub struct Places {
    free: Arc<Semaphore>,
    count: usize,
}

impl Places {
    /// As the system's limit on open files has it, which is raised as far as that goes.
    pub fn for_clients() -> Self {
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        let files = match setrlimit(Resource::Nofile, raised) {
            Ok(()) => limit.maximum,
            Err(error) => {
                warn!(%error, "the limit on open files cannot be raised");
                limit.current
            }
        };
        // `None`: no limit.
        let places = files.map_or(Semaphore::MAX_PERMITS, |files| {
            usize::try_from(files.saturating_sub(RESERVED)).unwrap_or(usize::MAX)
        });
        let places = places.clamp(PLACES_MIN, Semaphore::MAX_PERMITS);
        info!(clients = places, "as many clients may be connected as there are file descriptors for");
        Self::new(places)
    }

    pub fn for_probes() -> Self {
        Self::new(PROBES_MAX)
    }

    fn new(count: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(count)), count }
    }

    /// Waits for one; who comes meanwhile waits in the system's queue.
    pub(super) async fn take(&self) -> OwnedSemaphorePermit {
        if let Ok(place) = Arc::clone(&self.free).try_acquire_owned() {
            return place;
        }
        if FULL.happens().is_some() {
            warn!(clients = self.count, "no more clients can connect until one leaves: raise the limit on open files");
        }
        Arc::clone(&self.free).acquire_owned().await.expect("nobody closes it")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn who_leaves_makes_room() {
        let places = Places::new(2);
        let (first, _second) = (places.take().await, places.take().await);
        let mut third = Box::pin(places.take());
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.now_or_never().is_some());
    }
}
