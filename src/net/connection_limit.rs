//! The maximum number of connected clients.

use std::{
    sync::{Arc, LazyLock},
    time::Duration,
};

use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tracing::{info, warn};

use orlop_core::log_limit::LogLimit;

/// File descriptors reserved for the database, snapshots and the log; the same number as in etcd.
const RESERVED_FILES: u64 = 150;
/// Minimum of the limit, for a limit on open files that is not above the reserved number.
const CONNECTIONS_MIN: usize = 16;
/// Limit of the addresses for metrics and health. It is separate, so that probes can connect when the limit for clients
/// is reached. It is at most an eighth of the limit on open files.
const PROBES_MAX: usize = 64;
/// Maximum time without a byte on a connection to an address for metrics and health. Without it, 64 idle connections
/// would keep all probes out.
const PROBE_IDLE_TIME_MAX: Duration = Duration::from_secs(20);
/// Limit of the web page. A browser has up to six connections, which it keeps. It is at most a quarter of the limit on
/// open files.
const PAGES_MAX: usize = 256;
/// Maximum time without a byte on a connection to the web page. A stream of events sends one every 15 seconds, and other
/// responses come sooner. HTTP/2's keepalive pings must be less frequent.
const PAGE_IDLE_TIME_MAX: Duration = Duration::from_secs(90);

static FULL_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));

/// The limit on open files, which is raised to the hard limit; `None`: no limit.
static FILES: LazyLock<Option<u64>> = LazyLock::new(|| {
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            warn!(%error, "cannot raise the limit on open files");
            limit.current
        }
    }
});

/// Limits the number of connections of all addresses that share it.
#[derive(Clone, Debug)]
pub struct ConnectionLimit {
    free: Arc<Semaphore>,
    max: usize,
    idle_time_max: Option<Duration>,
}

impl ConnectionLimit {
    /// Returns the limit for clients: the limit on open files less the reserved ones and those of the web page, if the
    /// server has one.
    pub fn for_clients(page: Option<&Self>) -> Self {
        let max = clients_max(*FILES, page.map_or(0, |page| page.max));
        if max == CONNECTIONS_MIN {
            warn!(
                clients = max,
                files = *FILES,
                "few clients can connect, because the limit on open files is low; raise it (ulimit -n, LimitNOFILE)"
            );
        } else {
            info!(clients = max, "maximum number of connected clients, from the limit on open files");
        }
        Self::new(max)
    }

    /// The limit of the web page: idle connections are closed, too.
    pub fn for_pages() -> Self {
        Self { idle_time_max: Some(PAGE_IDLE_TIME_MAX), ..Self::new(part_of(*FILES, 4, PAGES_MAX)) }
    }

    /// The limit of an address that serves only probes and metrics: idle connections are closed, too.
    pub fn for_metrics() -> Self {
        Self { idle_time_max: Some(PROBE_IDLE_TIME_MAX), ..Self::new(part_of(*FILES, 8, PROBES_MAX)) }
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

/// Returns the limit for clients; `pages`: the limit of the web page.
fn clients_max(files: Option<u64>, pages: usize) -> usize {
    let free =
        |files: u64| usize::try_from(files.saturating_sub(RESERVED_FILES)).unwrap_or(usize::MAX).saturating_sub(pages);
    files.map_or(Semaphore::MAX_PERMITS, free).clamp(CONNECTIONS_MIN, Semaphore::MAX_PERMITS)
}

/// Returns a part of the limit on open files, at least 1 and at most `max`.
fn part_of(files: Option<u64>, parts: u64, max: usize) -> usize {
    files.map_or(max, |files| usize::try_from(files / parts).unwrap_or(max).clamp(1, max))
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

    #[test]
    fn limits_together_leave_files_to_the_database() {
        for (files, clients, clients_beside_a_page, pages, probes) in [
            (Some(0), 16, 16, 1, 1),
            (Some(64), 16, 16, 16, 8),
            (Some(256), 106, 42, 64, 32),
            (Some(512), 362, 234, 128, 64),
            (Some(1024), 874, 618, 256, 64),
            (Some(1_048_576), 1_048_426, 1_048_170, 256, 64),
            (Some(u64::MAX), Semaphore::MAX_PERMITS, Semaphore::MAX_PERMITS, 256, 64),
            (None, Semaphore::MAX_PERMITS, Semaphore::MAX_PERMITS, 256, 64),
        ] {
            let (found_pages, found_probes) = (part_of(files, 4, PAGES_MAX), part_of(files, 8, PROBES_MAX));
            assert_eq!((found_pages, found_probes), (pages, probes), "{files:?}");
            let found = (clients_max(files, 0), clients_max(files, found_pages));
            assert_eq!(found, (clients, clients_beside_a_page), "{files:?}");
        }
    }
}
