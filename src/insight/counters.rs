//! Counters and histograms of a server at one time, from its page of metrics.

use std::collections::BTreeMap;

use orlop_client::{Labels, MetricsPage};

use super::parts::printable;

/// Counters of gRPC calls, and histograms of their durations, by method without the service's package (`KV/Put`).
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Counters {
    pub calls: BTreeMap<String, Calls>,
    pub durations: BTreeMap<String, Histogram>,
    /// Processor time of the process in seconds.
    pub cpu_secs: Option<f64>,
    pub resident_bytes: Option<f64>,
    /// Events sent to watchers, or messages of watch streams.
    pub watch_messages: Option<f64>,
}

/// The calls of one method.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Calls {
    /// Ended calls; of a stream, the messages of the client.
    pub count: f64,
    /// Calls that ended with an error; cancelled ones are not counted.
    pub failed: f64,
}

/// A cumulative histogram: the number of observations up to each bound in seconds, in ascending order of bounds.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Histogram {
    pub buckets: Vec<(f64, f64)>,
    /// Sum of the observations in seconds.
    pub sum: f64,
    pub count: f64,
}

/// Methods whose durations the server measures by kind of request: kind, method.
const KINDS: [(&str, &str); 6] = [
    ("Put", "KV/Put"),
    ("DeleteRange", "KV/DeleteRange"),
    ("Txn", "KV/Txn"),
    ("Compaction", "KV/Compact"),
    ("LeaseGrant", "Lease/LeaseGrant"),
    ("LeaseRevoke", "Lease/LeaseRevoke"),
];

impl Counters {
    pub fn of(page: &MetricsPage) -> Self {
        Self {
            calls: calls(page),
            durations: durations(page),
            cpu_secs: page.value("process_cpu_seconds_total"),
            resident_bytes: page.value("process_resident_memory_bytes"),
            watch_messages: page
                .series("grpc_server_msg_sent_total")
                .find(|(labels, _)| labels.get("grpc_method") == Some(&"Watch"))
                .map(|(_, value)| value),
        }
    }
}

/// Returns SERVICE/METHOD.
fn method(labels: &Labels<'_>) -> Option<String> {
    let service = labels.get("grpc_service")?;
    let service = service.rsplit_once('.').map_or(*service, |(_, name)| name);
    Some(printable(&format!("{service}/{}", labels.get("grpc_method")?)))
}

/// Returns whether the series is of calls with which somebody without the role root looks at figures such as these. They are
/// refused, and would otherwise be the failures of an idle server.
fn is_refused_look(labels: &Labels<'_>) -> bool {
    labels.get("grpc_service") == Some(&"orlopb.Insight") && labels.get("grpc_code") == Some(&"PermissionDenied")
}

fn calls(page: &MetricsPage) -> BTreeMap<String, Calls> {
    let mut calls = BTreeMap::<String, Calls>::new();
    for (labels, value) in page.series("grpc_server_handled_total").filter(|(labels, _)| !is_refused_look(labels)) {
        let Some(method) = method(&labels) else { continue };
        let calls = calls.entry(method).or_default();
        if labels.get("grpc_type") == Some(&"unary") {
            calls.count += value;
        }
        if !matches!(labels.get("grpc_code"), None | Some(&("OK" | "Canceled"))) {
            calls.failed += value;
        }
    }
    for (labels, value) in page.series("grpc_server_msg_received_total") {
        let is_stream = labels.get("grpc_type").is_some_and(|kind| *kind != "unary");
        if let Some(method) = method(&labels).filter(|_| is_stream) {
            calls.entry(method).or_default().count += value;
        }
    }
    calls
}

/// Returns the durations by method: those that the server measures by kind of request, which have fine buckets, and
/// those of unary gRPC calls (`--metrics extensive`) for other methods.
fn durations(page: &MetricsPage) -> BTreeMap<String, Histogram> {
    let kind = |labels: &Labels<'_>, label: &str| {
        let kind = labels.get(label)?;
        KINDS.iter().find(|(known, _)| known == kind).map(|(_, method)| (*method).to_owned())
    };
    let mut found = histograms(page, "etcd_server_request_duration_seconds", |labels| kind(labels, "type"));
    let range = |_: &Labels<'_>| Some("KV/Range".to_owned());
    found.extend(histograms(page, "etcd_server_range_duration_seconds", range));
    let unary = |labels: &Labels<'_>| method(labels).filter(|_| labels.get("grpc_type") == Some(&"unary"));
    let others = [
        histograms(page, "grpc_server_handling_seconds", unary),
        // An etcd without `--metrics extensive` reports only the part of a write after consensus and the sync to the disk.
        histograms(page, "etcd_server_apply_duration_seconds", |labels| kind(labels, "op")),
    ];
    for (method, histogram) in others.into_iter().flatten() {
        found.entry(method).or_insert(histogram);
    }
    found
}

/// Returns the histograms of a metric, added up by the name that `name` derives from their labels.
fn histograms(
    page: &MetricsPage,
    metric: &str,
    name: impl Fn(&Labels<'_>) -> Option<String>,
) -> BTreeMap<String, Histogram> {
    let mut all = BTreeMap::<String, Histogram>::new();
    for (labels, value) in page.series(&format!("{metric}_bucket")) {
        let bound = labels.get("le").and_then(|bound| bound.parse::<f64>().ok()).filter(|bound| bound.is_finite());
        let (Some(name), Some(bound)) = (name(&labels), bound) else { continue };
        let buckets = &mut all.entry(name).or_default().buckets;
        match buckets.iter_mut().find(|(known, _)| *known == bound) {
            Some((_, count)) => *count += value,
            None => buckets.push((bound, value)),
        }
    }
    for (labels, value) in page.series(&format!("{metric}_sum")) {
        name(&labels).into_iter().for_each(|name| all.entry(name).or_default().sum += value);
    }
    for (labels, value) in page.series(&format!("{metric}_count")) {
        name(&labels).into_iter().for_each(|name| all.entry(name).or_default().count += value);
    }
    all.values_mut().for_each(|histogram| histogram.buckets.sort_by(|a, b| a.0.total_cmp(&b.0)));
    all
}

impl Histogram {
    /// Returns the observations since `before`. If the server was restarted, its histogram began again.
    pub fn since(&self, before: Option<&Self>) -> Self {
        let Some(before) = before.filter(|before| before.count <= self.count) else { return self.clone() };
        let earlier = |bound: f64| before.buckets.iter().find(|(known, _)| *known == bound).map_or(0.0, |(_, n)| *n);
        let buckets = self.buckets.iter().map(|(bound, count)| (*bound, (count - earlier(*bound)).max(0.0))).collect();
        Self { buckets, sum: self.sum - before.sum, count: self.count - before.count }
    }

    /// Returns a quantile in seconds, interpolated within its bucket as Prometheus does; the last bound if it is above
    /// all bounds. `None`: there are no observations.
    pub fn quantile(&self, quantile: f64) -> Option<f64> {
        if self.count <= 0.0 {
            return None;
        }
        let wanted = self.count * quantile;
        let (mut lower, mut below) = (0.0, 0.0);
        for (bound, count) in &self.buckets {
            if *count >= wanted && *count > below {
                return Some(lower + (bound - lower) * (wanted - below) / (count - below));
            }
            (lower, below) = (*bound, *count);
        }
        self.buckets.last().map(|(bound, _)| *bound)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn histogram(buckets: &[(f64, f64)], count: f64) -> Histogram {
        Histogram { buckets: buckets.to_vec(), sum: 0.0, count }
    }

    #[test]
    fn quantiles_are_interpolated() {
        let buckets = [(0.001, 10.0), (0.002, 90.0), (0.004, 90.0), (0.008, 100.0)];
        for (histogram, quantile, want) in [
            (histogram(&[], 0.0), 0.5, None),
            (histogram(&buckets, 100.0), 0.5, Some(0.0015)),
            (histogram(&buckets, 100.0), 0.05, Some(0.0005)),
            (histogram(&buckets, 100.0), 0.99, Some(0.0076)),
            (histogram(&buckets, 100.0), 0.9, Some(0.002)),
            (histogram(&buckets, 200.0), 0.99, Some(0.008)),
        ] {
            let got = histogram.quantile(quantile);
            let is_same = got.zip(want).map_or(got == want, |(got, want)| (got - want).abs() < 1e-9);
            assert!(is_same, "{histogram:?} at {quantile}: {got:?}, expected {want:?}");
        }
    }

    #[test]
    fn difference_begins_again_after_a_restart() {
        let (first, second) = (histogram(&[(1.0, 5.0)], 8.0), histogram(&[(1.0, 7.0), (2.0, 9.0)], 12.0));
        assert_eq!(second.since(Some(&first)), histogram(&[(1.0, 2.0), (2.0, 9.0)], 4.0));
        assert_eq!(first.since(Some(&second)), first);
        assert_eq!(first.since(None), first);
    }

    #[test]
    fn page_has_calls_and_durations_by_method() {
        let page = MetricsPage::new(
            "grpc_server_handled_total{grpc_code=\"OK\",grpc_method=\"Put\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"} 7\n\
             grpc_server_handled_total{grpc_code=\"Unavailable\",grpc_method=\"Put\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"} 2\n\
             grpc_server_handled_total{grpc_code=\"OK\",grpc_method=\"Sizes\",grpc_service=\"orlopb.Insight\",grpc_type=\"unary\"} 3\n\
             grpc_server_handled_total{grpc_code=\"PermissionDenied\",grpc_method=\"Sizes\",grpc_service=\"orlopb.Insight\",grpc_type=\"unary\"} 50\n\
             grpc_server_handled_total{grpc_code=\"Canceled\",grpc_method=\"Watch\",grpc_service=\"etcdserverpb.Watch\",grpc_type=\"bidi_stream\"} 4\n\
             grpc_server_msg_received_total{grpc_method=\"Watch\",grpc_service=\"etcdserverpb.Watch\",grpc_type=\"bidi_stream\"} 5\n\
             grpc_server_msg_sent_total{grpc_method=\"Watch\",grpc_service=\"etcdserverpb.Watch\",grpc_type=\"bidi_stream\"} 90\n\
             etcd_server_request_duration_seconds_bucket{success=\"true\",type=\"Put\",le=\"0.1\"} 3\n\
             etcd_server_request_duration_seconds_bucket{success=\"false\",type=\"Put\",le=\"0.1\"} 1\n\
             etcd_server_request_duration_seconds_bucket{success=\"true\",type=\"Put\",le=\"+Inf\"} 3\n\
             etcd_server_request_duration_seconds_count{success=\"true\",type=\"Put\"} 3\n\
             etcd_server_apply_duration_seconds_count{op=\"Put\",success=\"true\"} 99\n\
             etcd_server_apply_duration_seconds_count{op=\"Txn\",success=\"true\"} 6\n\
             etcd_server_range_duration_seconds_count{success=\"true\"} 8\n\
             process_cpu_seconds_total 1.5\n"
                .to_owned(),
        );
        let counters = Counters::of(&page);
        let calls: Vec<_> = counters.calls.iter().map(|(name, calls)| (&**name, calls.count, calls.failed)).collect();
        assert_eq!(calls, [("Insight/Sizes", 3.0, 0.0), ("KV/Put", 9.0, 2.0), ("Watch/Watch", 5.0, 0.0)]);
        let durations: Vec<_> = counters.durations.iter().map(|(name, found)| (&**name, found.count)).collect();
        assert_eq!(durations, [("KV/Put", 3.0), ("KV/Range", 8.0), ("KV/Txn", 6.0)]);
        assert_eq!(counters.durations["KV/Put"].buckets, [(0.1, 4.0)]);
        assert_eq!(
            (counters.cpu_secs, counters.watch_messages, counters.resident_bytes),
            (Some(1.5), Some(90.0), None)
        );
    }
}
