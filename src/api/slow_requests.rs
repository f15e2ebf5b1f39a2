//! The slow requests of the last hour, in memory, for the Insight service.
//!
//! Only a slow request takes the locks. Bounded: at most [`KEPT_MAX`] requests; when it is full, the fastest of the older
//! half is dropped, so both the newest and the slowest remain. Requests that the server makes itself, such as the expiry
//! of leases, are only logged.

use std::{
    collections::VecDeque,
    time::{Duration, SystemTime},
};

use parking_lot::Mutex;
use tokio::time::Instant;

use orlop_core::{
    clock,
    log_limit::LogLimit,
    trace::{Part, Trace},
};

/// Maximum number of requests.
const KEPT_MAX: usize = 256;
/// Number of the newest requests that are kept regardless of their duration.
const NEWEST: usize = KEPT_MAX / 2;
/// Requests that ended earlier are dropped.
const KEPT_FOR: Duration = Duration::from_secs(60 * 60);

/// A slow request.
#[derive(Clone, Debug)]
pub struct SlowRequest {
    pub ended: SystemTime,
    /// The same time, by a clock that does not jump.
    ended_at: Instant,
    /// SERVICE/METHOD.
    pub method: String,
    /// gRPC's name of the status code.
    pub code: &'static str,
    pub took: Duration,
    pub response_bytes: usize,
    pub trace: Trace,
}

impl SlowRequest {
    /// Creates the record of a request that ends now.
    pub fn ending_now(method: &str, code: &'static str, took: Duration, response_bytes: usize, trace: &Trace) -> Self {
        let method = method.to_owned();
        let (ended, ended_at) = (clock::now(), Instant::now());
        Self { ended, ended_at, method, code, took, response_bytes, trace: trace.clone() }
    }

    /// Returns the phases that occurred, in order.
    pub fn phases(&self) -> impl Iterator<Item = (Part, Duration)> {
        Part::ALL.into_iter().filter_map(|part| Some((part, self.trace.part(part)?)))
    }
}

/// Maximum number of messages per second about slow requests in the log. Clients can make any number of requests slow.
const LOGGED_PER_SECOND_MAX: u32 = 100;

/// The slow requests of one server.
#[derive(Debug)]
pub struct SlowRequests {
    kept: Mutex<Kept>,
    pub log_limit: LogLimit,
}

impl Default for SlowRequests {
    fn default() -> Self {
        let log_limit = LogLimit::at_most(LOGGED_PER_SECOND_MAX, Duration::from_secs(1));
        Self { kept: Mutex::default(), log_limit }
    }
}

#[derive(Debug, Default)]
struct Kept {
    /// The oldest first.
    requests: VecDeque<SlowRequest>,
    total: u64,
}

impl SlowRequests {
    pub fn add(&self, request: SlowRequest) {
        let mut kept = self.kept.lock();
        kept.total += 1;
        kept.drop_old(request.ended_at);
        if kept.requests.len() == KEPT_MAX {
            // The new request is one of the newest.
            let older = kept.requests.iter().take(KEPT_MAX - NEWEST + 1).enumerate();
            if let Some((fastest, _)) = older.min_by_key(|(_, request)| request.took) {
                kept.requests.remove(fastest);
            }
        }
        kept.requests.push_back(request);
    }

    /// Returns the requests of the last hour, the newest first, and the number of all since the start.
    pub fn list(&self) -> (Vec<SlowRequest>, u64) {
        let mut kept = self.kept.lock();
        kept.drop_old(Instant::now());
        (kept.requests.iter().rev().cloned().collect(), kept.total)
    }
}

impl Kept {
    fn drop_old(&mut self, now: Instant) {
        self.requests.retain(|request| now - request.ended_at < KEPT_FOR);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    async fn request(took_ms: u64) -> SlowRequest {
        let mut trace = None;
        orlop_core::trace::follow(async {}, |ended| trace = Some(ended)).await;
        let trace = trace.unwrap();
        SlowRequest::ending_now("Put", "OK", Duration::from_millis(took_ms), 0, &trace)
    }

    #[tokio::test(start_paused = true)]
    async fn newest_and_slowest_of_an_hour_are_kept() {
        let slow = SlowRequests::default();
        let took = || slow.list().0.iter().map(|request| request.took.as_millis()).collect::<Vec<_>>();
        slow.add(request(9_000).await);
        tokio::time::advance(Duration::from_secs(1)).await;
        for number in 0..1_000 {
            slow.add(request(1_000 + number).await);
        }
        let kept = took();
        assert_eq!((kept.len(), kept[0], kept[NEWEST - 1], kept[KEPT_MAX - 1]), (KEPT_MAX, 1_999, 1_872, 9_000));
        assert!(kept[NEWEST..KEPT_MAX - 1].iter().all(|took| *took >= 1_700), "the slowest of the older: {kept:?}");
        assert_eq!(slow.list().1, 1_001);
        tokio::time::advance(KEPT_FOR - Duration::from_secs(1)).await;
        assert_eq!(took().len(), KEPT_MAX - 1, "the first one is older than an hour");
        tokio::time::advance(Duration::from_secs(1)).await;
        assert!(took().is_empty());
    }
}
