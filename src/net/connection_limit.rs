//! The maximum number of connected clients.

use std::sync::Arc;

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{info, warn};

use super::log_limit::LogLimit;

/// File descriptors reserved for the database, snapshots and the log, as many as etcd reserves.
const RESERVED_FILES: u64 = 150;
/// Minimum limit, if there are fewer file descriptors than reserved.
const CONNECTIONS_MIN: usize = 16;
/// Limit of addresses for metrics and health, which have their own, so that clients cannot lock out probes.
const PROBES_MAX: usize = 64;

static FULL_LOG: LogLimit = LogLimit::new();

/// Limits the connections of all addresses that share it.
#[derive(Clone, Debug)]
pub struct ConnectionLimit {
    free: Arc<Semaphore>,
    max: usize,
}

impl ConnectionLimit {
    /// Returns the limit for clients: the limit on open files, raised to the hard limit, less those reserved.
    pub fn for_clients() -> Self {
        let limit = getrlimit(Resource::Nofile);
        let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
        let files = match setrlimit(Resource::Nofile, raised) {
            Ok(()) => limit.maximum,
            Err(error) => {
                warn!(%error, "cannot raise the limit on open files");
                limit.current
            }
        };
        // `None`: no limit.
        let max = files.map_or(Semaphore::MAX_PERMITS, |files| {
            usize::try_from(files.saturating_sub(RESERVED_FILES)).unwrap_or(usize::MAX)
        });
        let max = max.clamp(CONNECTIONS_MIN, Semaphore::MAX_PERMITS);
        info!(clients = max, "maximum number of connected clients, from the limit on open files");
        Self::new(max)
    }

    pub fn for_probes() -> Self {
        Self::new(PROBES_MAX)
    }

    fn new(max: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(max)), max }
    }

    /// Waits until one more client may connect. Meanwhile clients wait in the system's queue.
    pub(super) async fn acquire(&self) -> OwnedSemaphorePermit {
        if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            return permit;
        }
        if FULL_LOG.count().is_some() {
            warn!(
                clients = self.max,
                "no more clients can connect until one disconnects: raise the limit on open files"
            );
        }
        Arc::clone(&self.free).acquire_owned().await.expect("the semaphore is never closed")
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;

    #[tokio::test]
    async fn client_that_disconnects_admits_the_next() {
        let limit = ConnectionLimit::new(2);
        let (first, _second) = (limit.acquire().await, limit.acquire().await);
        let mut third = Box::pin(limit.acquire());
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.now_or_never().is_some());
    }
}
