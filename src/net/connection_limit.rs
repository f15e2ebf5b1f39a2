//! The maximum number of connected clients.

use std::{sync::Arc, time::Duration};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{info, warn};

use crate::logging::LogLimit;

/// File descriptors reserved for the database, snapshots and the log; the same number as in etcd.
const RESERVED_FILES: u64 = 150;
/// Minimum of the limit, for a limit on open files that is not above the reserved number.
const CONNECTIONS_MIN: usize = 16;
/// Limit of the addresses for metrics and health. It is separate, so that probes can connect when the limit for clients
/// is reached.
const PROBES_MAX: usize = 64;
/// Maximum time without a byte on a connection to an address for metrics and health. Without it, 64 idle connections
/// would keep all probes out.
const PROBE_IDLE_TIME_MAX: Duration = Duration::from_secs(20);
/// Limit of the web page. A browser has up to six connections, which it keeps.
const PAGES_MAX: usize = 256;
/// Maximum time without a byte on a connection to the web page. A stream of events sends one every 15 seconds, and other
/// responses come sooner. HTTP/2's keepalive pings must be less frequent.
const PAGE_IDLE_TIME_MAX: Duration = Duration::from_secs(90);

static FULL_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));

/// Limits the number of connections of all addresses that share it.
#[derive(Clone, Debug)]
pub struct ConnectionLimit {
    free: Arc<Semaphore>,
    max: usize,
    idle_time_max: Option<Duration>,
}

impl ConnectionLimit {
    /// Raises the limit on open files to the hard limit. Returns the limit for clients: that number less the reserved
    /// files.
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

    /// The limit of the web page: idle connections are closed, too.
    pub fn for_pages() -> Self {
        Self { idle_time_max: Some(PAGE_IDLE_TIME_MAX), ..Self::new(PAGES_MAX) }
    }

    /// The limit of an address that serves only probes and metrics: idle connections are closed, too.
    pub fn for_metrics() -> Self {
        Self { idle_time_max: Some(PROBE_IDLE_TIME_MAX), ..Self::new(PROBES_MAX) }
    }

    fn new(max: usize) -> Self {
        Self { free: Arc::new(Semaphore::new(max)), max, idle_time_max: None }
    }

    /// Returns the maximum time without a byte on a connection; `None`: no limit.
    pub(super) fn idle_time_max(&self) -> Option<Duration> {
        self.idle_time_max
    }

    /// Waits until one more client may connect. Until then clients wait in the backlog of the socket.
    pub(super) async fn acquire(&self) -> OwnedSemaphorePermit {
        if let Ok(permit) = Arc::clone(&self.free).try_acquire_owned() {
            return permit;
        }
        if FULL_LOG.count().is_some() {
            warn!(
                clients = self.max,
                "the maximum number of clients is connected; raise the limit on open files to accept more"
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
