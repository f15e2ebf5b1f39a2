//! Measures the duration of requests, for the histograms and for the trace of each request.

use std::time::Duration;

use prometheus::Histogram;
use tokio::time::Instant;
use tracing::warn;

use super::{
    request::{Op, TxnRequest},
    write_request::Request,
};
use crate::{
    metrics,
    trace::{self, Part},
    types::{KeyRange, shown},
};

/// The times at which a batch entered each phase.
#[derive(Clone, Copy, Debug)]
pub(super) struct PhaseTimes {
    /// Evaluation of the first request began.
    pub(super) started: Instant,
    /// Evaluation was complete and the append began.
    pub(super) evaluated: Instant,
    /// The batch was committed and applied.
    pub(super) committed: Instant,
}

/// Durations above which a request is slow.
#[derive(Clone, Copy, Debug)]
pub struct SlowThresholds {
    /// For a batch, from the start of its evaluation to the end of its commit. Slower batches are counted.
    pub apply: Duration,
    /// For a request, from its arrival to its response. Slower requests are logged.
    pub request: Duration,
}

impl Default for SlowThresholds {
    fn default() -> Self {
        Self { apply: Duration::from_millis(100), request: Duration::from_millis(300) }
    }
}

/// Records the durations of requests.
pub(super) struct Timing {
    slow_thresholds: SlowThresholds,
    kinds: [Kind; KINDS.len()],
}

/// Histograms of one kind of request: failed, successful.
struct Kind {
    apply: [Histogram; 2],
    request: [Histogram; 2],
}

const KINDS: [&str; 8] = ["Put", "DeleteRange", "Txn", "LeaseGrant", "LeaseRevoke", "Compaction", "Alarm", "Auth"];

impl Timing {
    pub(super) fn new(metrics: &metrics::Store, slow_thresholds: SlowThresholds) -> Self {
        let apply = |kind: &str, success: &str| metrics.apply.with_label_values(&["v3", kind, success]);
        let request = |kind: &str, success: &str| metrics.request.with_label_values(&[kind, success]);
        let kinds = KINDS.map(|kind| Kind {
            apply: ["false", "true"].map(|success| apply(kind, success)),
            request: ["false", "true"].map(|success| request(kind, success)),
        });
        Self { slow_thresholds, kinds }
    }

    /// Records a request just before its response is sent.
    pub(super) fn note(&self, request: &Request, since: Instant, phases: PhaseTimes, succeeded: bool) -> Times {
        let kind = &self.kinds[kind(request)];
        let (apply, whole) = (phases.committed - phases.started, phases.committed - since);
        let is_slow = whole > self.slow_thresholds.request;
        kind.apply[usize::from(succeeded)].observe(apply.as_secs_f64());
        kind.request[usize::from(succeeded)].observe(whole.as_secs_f64());
        Times {
            queue: phases.started.saturating_duration_since(since),
            evaluate: phases.evaluated - phases.started,
            commit: phases.committed - phases.evaluated,
            apply_is_slow: apply > self.slow_thresholds.apply,
            is_slow,
            request: (is_slow || trace::are_requests_logged()).then(|| describe(request)),
        }
    }
}

/// The duration of each phase of a request.
#[derive(Debug)]
pub(super) struct Times {
    queue: Duration,
    evaluate: Duration,
    commit: Duration,
    pub(super) apply_is_slow: bool,
    is_slow: bool,
    /// Description of the request, if it was slow or requests are logged.
    request: Option<String>,
}

impl Times {
    /// Adds the times to the trace of the current request. A slow request that the server itself made has no trace and
    /// is logged here.
    pub(super) fn note(self) {
        let Self { queue, evaluate, commit, is_slow, request, .. } = self;
        let is_traced = [(Part::Queue, queue), (Part::Evaluate, evaluate), (Part::Commit, commit)]
            .into_iter()
            .fold(false, |_, (part, took)| trace::add_to_part(part, took));
        match request {
            Some(request) if is_traced => trace::set_request(|| request),
            Some(request) if is_slow => {
                let took = queue + evaluate + commit;
                warn!(request, ?took, ?queue, ?evaluate, ?commit, "apply request took too long");
            }
            Some(_) | None => {}
        }
    }
}

fn kind(request: &Request) -> usize {
    match request {
        Request::Put(_) => 0,
        Request::Delete(_) => 1,
        Request::Txn(_) => 2,
        Request::Grant { .. } => 3,
        Request::Revoke(_) | Request::Expire(_) => 4,
        Request::Compact(_) => 5,
        Request::Alarm(_) => 6,
        Request::Auth(_) => 7,
    }
}

/// Describes a request without its values.
fn describe(request: &Request) -> String {
    match request {
        Request::Put(put) => format!("put key={}", shown(&put.key)),
        Request::Delete(delete) => format!("delete_range {}", describe_range(&delete.range)),
        Request::Txn(txn) => describe_txn(txn),
        Request::Grant { id, ttl_secs } => format!("lease_grant id={id:?} ttl={ttl_secs}"),
        Request::Revoke(id) | Request::Expire(id) => format!("lease_revoke id={id:?}"),
        Request::Compact(revision) => format!("compaction revision={revision}"),
        Request::Alarm(change) => format!("alarm {change:?}"),
        Request::Auth(change) => format!("auth {change:?}").chars().take(RANGE_CHARS_MAX).collect(),
    }
}

/// Describes a transaction by its sizes and its first key.
fn describe_txn(txn: &TxnRequest) -> String {
    let first = txn.success.iter().chain(&txn.failure).find_map(|op| match op {
        Op::Put(put) => Some(format!("key={}", shown(&put.key))),
        Op::Range(read) => Some(describe_range(&read.range)),
        Op::Delete(delete) => Some(describe_range(&delete.range)),
        Op::Txn(_) => None,
    });
    let (success, failure) = (txn.success.len(), txn.failure.len());
    format!(
        "txn compares={} success={success} failure={failure} first {}",
        txn.compares.len(),
        first.unwrap_or_default()
    )
}

/// Maximum number of characters shown of a range, or of a change of users and roles.
const RANGE_CHARS_MAX: usize = 256;

/// Describes a range.
pub(super) fn describe_range(range: &KeyRange) -> String {
    match range {
        KeyRange::Single(key) => format!("key={}", shown(key)),
        _ => format!("range={range:?}").chars().take(RANGE_CHARS_MAX).collect(),
    }
}
