//! Durations of requests, from the histograms of a server.

use orlop_client::MetricsPage;
use serde::Serialize;

use crate::insight::{Counters, Histogram};

/// Durations of the calls of one method since the start of the server.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Durations {
    /// SERVICE/METHOD.
    pub request: String,
    pub count: i64,
    pub mean_seconds: f64,
    /// The quantile 0.99 as in `orlop top`. `None`: above the last bucket.
    pub p99_seconds: Option<f64>,
}

/// Returns the methods with the greatest p99, slowest first. A stream has no duration.
pub(super) fn slowest(page: &MetricsPage, count: usize) -> Vec<Durations> {
    let found = Counters::of(page).durations.into_iter().filter(|(_, histogram)| histogram.count > 0.0);
    let mut durations: Vec<Durations> = found.map(durations_of).collect();
    let key = |durations: &Durations| (durations.p99_seconds.unwrap_or(f64::INFINITY), durations.mean_seconds);
    durations.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal));
    durations.truncate(count);
    durations
}

fn durations_of((request, histogram): (String, Histogram)) -> Durations {
    let counted = histogram.buckets.last().map_or(0.0, |(_, count)| *count);
    Durations {
        request,
        count: histogram.count as i64,
        mean_seconds: histogram.sum / histogram.count,
        p99_seconds: histogram.quantile(0.99).filter(|_| counted >= histogram.count * 0.99),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: &[(&str, i64, f64, Option<f64>)]) {
        let found = slowest(&MetricsPage::new(text.to_owned()), 2);
        let found: Vec<_> = found
            .iter()
            .map(|durations| (&*durations.request, durations.count, durations.mean_seconds, durations.p99_seconds))
            .collect();
        assert_eq!(found, want);
    }

    #[test]
    fn slowest_requests_come_first() {
        check("", &[]);
        // An etcd reports the part of a write that follows consensus, too.
        let etcd = "etcd_server_apply_duration_seconds_sum{op=\"Put\",success=\"true\",version=\"v3\"} 0.001\n\
             etcd_server_apply_duration_seconds_count{op=\"Put\",success=\"true\",version=\"v3\"} 10\n\
             grpc_server_handling_seconds_sum{grpc_method=\"Put\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"} 0.5\n\
             grpc_server_handling_seconds_count{grpc_method=\"Put\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"} 10\n";
        check(etcd, &[("KV/Put", 10, 0.05, None)]);
        let basic = "etcd_server_request_duration_seconds_bucket{success=\"true\",type=\"Put\",le=\"0.1\"} 90\n\
             etcd_server_request_duration_seconds_bucket{success=\"true\",type=\"Put\",le=\"0.2\"} 98\n\
             etcd_server_request_duration_seconds_bucket{success=\"true\",type=\"Put\",le=\"+Inf\"} 98\n\
             etcd_server_request_duration_seconds_sum{success=\"true\",type=\"Put\"} 8\n\
             etcd_server_request_duration_seconds_count{success=\"true\",type=\"Put\"} 98\n\
             etcd_server_request_duration_seconds_bucket{success=\"false\",type=\"Put\",le=\"0.1\"} 1\n\
             etcd_server_request_duration_seconds_bucket{success=\"false\",type=\"Put\",le=\"0.2\"} 1\n\
             etcd_server_request_duration_seconds_bucket{success=\"false\",type=\"Put\",le=\"+Inf\"} 2\n\
             etcd_server_request_duration_seconds_sum{success=\"false\",type=\"Put\"} 2\n\
             etcd_server_request_duration_seconds_count{success=\"false\",type=\"Put\"} 2\n\
             etcd_server_request_duration_seconds_count{success=\"true\",type=\"Txn\"} 0\n\
             etcd_server_range_duration_seconds_bucket{success=\"true\",le=\"0.1\"} 0\n\
             etcd_server_range_duration_seconds_bucket{success=\"true\",le=\"+Inf\"} 4\n\
             etcd_server_range_duration_seconds_sum{success=\"true\"} 2\n\
             etcd_server_range_duration_seconds_count{success=\"true\"} 4\n";
        check(basic, &[("KV/Range", 4, 0.5, None), ("KV/Put", 100, 0.1, Some(0.2))]);
        let extensive = format!(
            "{basic}\
             grpc_server_handling_seconds_bucket{{{status},le=\"0.5\"}} 1\n\
             grpc_server_handling_seconds_sum{{{status}}} 0.3\n\
             grpc_server_handling_seconds_count{{{status}}} 1\n\
             grpc_server_handling_seconds_count{{{watch}}} 1\n",
            status = "grpc_method=\"Status\",grpc_service=\"etcdserverpb.Maintenance\",grpc_type=\"unary\"",
            watch = "grpc_method=\"Watch\",grpc_service=\"etcdserverpb.Watch\",grpc_type=\"bidi_stream\"",
        );
        check(&extensive, &[("KV/Range", 4, 0.5, None), ("Maintenance/Status", 1, 0.3, Some(0.495))]);
    }
}
