//! Figures from two snapshots. Pure.

use std::time::Duration;

use serde::Serialize;

use super::{Counters, Histogram, Snapshot};

/// Everything that is shown about a server.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Figures {
    /// The newer snapshot.
    #[serde(flatten)]
    pub now: Snapshot,
    /// `None`: there is only one snapshot, or the server's metrics are not available.
    pub rates: Option<Rates>,
    /// The methods that were called between the snapshots, those with the most calls first.
    pub operations: Option<Vec<Operation>>,
}

/// Changes between the two snapshots.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Rates {
    /// Time between the snapshots in seconds.
    pub interval_secs: f64,
    pub operations_per_sec: f64,
    pub failures_per_sec: f64,
    pub revisions_per_sec: f64,
    /// Messages to watchers.
    pub watch_messages_per_sec: Option<f64>,
    /// Processor time of the server per time: 1.0 is one core.
    pub cpu_cores: Option<f64>,
    pub resident_bytes: Option<f64>,
}

/// The calls of one method between the two snapshots.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Operation {
    /// SERVICE/METHOD without the package.
    pub method: String,
    /// Calls per second; of a stream, messages of the client.
    pub per_sec: f64,
    pub failures_per_sec: f64,
    /// Quantiles in seconds, interpolated within a bucket of the server's histogram. `None`: the server measured none.
    pub p50_secs: Option<f64>,
    pub p99_secs: Option<f64>,
}

impl Figures {
    /// Computes the figures of `now`, with rates since `before`.
    pub fn new(before: Option<&Snapshot>, now: Snapshot) -> Self {
        let interval = before.map(|before| (before, now.taken_at.saturating_duration_since(before.taken_at)));
        let interval = interval.filter(|(_, interval)| !interval.is_zero());
        let counted = interval
            .and_then(|(before, interval)| Some((before, before.counters.as_ref()?, now.counters.as_ref()?, interval)));
        let operations = counted.map(|(_, before, after, interval)| operations(before, after, interval));
        let rates = counted.zip(operations.as_deref()).map(|((before, old, new, interval), operations)| {
            let revisions = (now.server.revision - before.server.revision).max(0) as f64;
            Rates { revisions_per_sec: revisions / interval.as_secs_f64(), ..rates(old, new, interval, operations) }
        });
        Self { now, rates, operations }
    }
}

/// Returns the increase of a counter. A counter that decreased began again with the server's restart.
fn increase(before: f64, after: f64) -> f64 {
    if after < before { after } else { after - before }
}

fn rates(before: &Counters, after: &Counters, interval: Duration, operations: &[Operation]) -> Rates {
    let secs = interval.as_secs_f64();
    let rate = |before: Option<f64>, after: Option<f64>| Some(increase(before?, after?) / secs);
    Rates {
        interval_secs: secs,
        // The sum of no numbers would be -0.
        operations_per_sec: operations.iter().fold(0.0, |sum, operation| sum + operation.per_sec),
        failures_per_sec: operations.iter().fold(0.0, |sum, operation| sum + operation.failures_per_sec),
        revisions_per_sec: 0.0,
        watch_messages_per_sec: rate(before.watch_messages, after.watch_messages),
        cpu_cores: rate(before.cpu_secs, after.cpu_secs),
        resident_bytes: after.resident_bytes,
    }
}

fn operations(before: &Counters, after: &Counters, interval: Duration) -> Vec<Operation> {
    let secs = interval.as_secs_f64();
    let mut operations: Vec<Operation> = (after.calls.iter())
        .map(|(method, calls)| {
            let earlier = before.calls.get(method).copied().unwrap_or_default();
            let durations = after.durations.get(method).map(|after| after.since(before.durations.get(method)));
            let quantile = |quantile| durations.as_ref().and_then(|found: &Histogram| found.quantile(quantile));
            Operation {
                method: method.clone(),
                per_sec: increase(earlier.count, calls.count) / secs,
                failures_per_sec: increase(earlier.failed, calls.failed) / secs,
                p50_secs: quantile(0.5),
                p99_secs: quantile(0.99),
            }
        })
        .filter(|operation| operation.per_sec > 0.0 || operation.failures_per_sec > 0.0)
        .collect();
    operations.sort_by(|a, b| b.per_sec.total_cmp(&a.per_sec).then_with(|| a.method.cmp(&b.method)));
    operations
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use orlop_client::MetricsPage;
    use tokio::time::Instant;

    use super::*;
    use crate::insight::ServerState;

    /// Returns a snapshot with these numbers of puts, failed puts, puts up to 1 ms and up to 2 ms.
    fn snapshot(taken_at: Instant, revision: i64, puts: [u64; 4]) -> Snapshot {
        let labels = "grpc_method=\"Put\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"";
        let [ok, failed, fast, slow] = puts;
        let page = MetricsPage::new(format!(
            "grpc_server_handled_total{{{labels},grpc_code=\"OK\"}} {ok}\n\
             grpc_server_handled_total{{{labels},grpc_code=\"NotFound\"}} {failed}\n\
             grpc_server_handled_total{{grpc_method=\"Range\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\",grpc_code=\"OK\"}} 5\n\
             etcd_server_request_duration_seconds_bucket{{type=\"Put\",le=\"0.001\"}} {fast}\n\
             etcd_server_request_duration_seconds_bucket{{type=\"Put\",le=\"0.002\"}} {slow}\n\
             etcd_server_request_duration_seconds_count{{type=\"Put\"}} {slow}\n\
             process_cpu_seconds_total {ok}\n"
        ));
        Snapshot {
            taken_at,
            unix_ms: 0,
            endpoint: "http://a:1".to_owned(),
            server: ServerState { revision, ..ServerState::default() },
            counters: Some(Counters::of(&page)),
            members: None,
            watchers: None,
            leases: None,
            slow_requests: None,
            sizes: None,
            missing: BTreeMap::new(),
        }
    }

    /// Checks rate, failures, p50 in milliseconds and revisions per second of puts between two snapshots.
    #[track_caller]
    fn check(before: (u64, i64, [u64; 4]), after: (u64, i64, [u64; 4]), want: Option<(f64, f64, Option<f64>, f64)>) {
        let start = Instant::now();
        let at =
            |(ms, revision, puts): (u64, i64, [u64; 4])| snapshot(start + Duration::from_millis(ms), revision, puts);
        let figures = Figures::new(Some(&at(before)), at(after));
        let got = figures.operations.as_deref().and_then(|operations| {
            let put = operations.iter().find(|operation| operation.method == "KV/Put")?;
            let p50 = put.p50_secs.map(|secs| (secs * 1e6).round() / 1e3);
            Some((put.per_sec, put.failures_per_sec, p50, figures.rates?.revisions_per_sec))
        });
        assert_eq!(got, want, "{before:?} to {after:?}");
    }

    #[test]
    fn rates_and_quantiles_are_differences() {
        check((0, 1, [0; 4]), (2_000, 21, [10, 0, 10, 10]), Some((5.0, 0.0, Some(0.5), 10.0)));
        check((0, 1, [90, 0, 90, 90]), (1_000, 11, [100, 5, 90, 105]), Some((15.0, 5.0, Some(1.5), 10.0)));
        // Nothing happened; no time has passed; the server was restarted.
        check((0, 5, [9, 9, 9, 9]), (1_000, 5, [9, 9, 9, 9]), None);
        check((5, 5, [0; 4]), (5, 5, [9, 9, 9, 9]), None);
        check((0, 50, [90, 0, 90, 90]), (1_000, 5, [4, 0, 4, 4]), Some((4.0, 0.0, Some(0.5), 0.0)));
    }

    #[test]
    fn one_snapshot_has_no_rates() {
        let figures = Figures::new(None, snapshot(Instant::now(), 1, [0; 4]));
        assert_eq!((&figures.rates, &figures.operations), (&None, &None));
        let json = serde_json::to_value(&figures).expect("JSON");
        assert_eq!((&json["server"]["revision"], &json["slowRequests"]), (&1.into(), &serde_json::Value::Null));
    }
}
