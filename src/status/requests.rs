//! Durations of requests, from the histograms of a server.

use orlop_client::{Labels, MetricsPage};
use serde::Serialize;

use crate::insight::{Histogram, histograms, printable};

/// Durations of the requests of one kind since the start of the server.
#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct Durations {
    /// The gRPC method, or the kind of request that the store distinguishes.
    pub request: String,
    pub count: i64,
    pub mean_seconds: f64,
    /// Upper bound of the quantile 0.99: the bound of the histogram's bucket. `None`: above the last bound.
    pub p99_seconds: Option<f64>,
}

/// Returns the kinds of requests with the greatest p99, slowest first.
///
/// With `--metrics extensive` these are gRPC methods without those that stream, whose duration is that of the client.
/// Otherwise they are writes, by kind, and ranges.
pub(super) fn slowest(page: &MetricsPage, count: usize) -> Vec<Durations> {
    let unary = |labels: &Labels<'_>| {
        let is_unary = labels.get("grpc_type") == Some(&"unary");
        labels.get("grpc_method").filter(|_| is_unary).map(|method| printable(method))
    };
    let mut found = histograms(page, "grpc_server_handling_seconds", unary);
    if found.is_empty() {
        let kind = |labels: &Labels<'_>| labels.get("type").map(|kind| printable(kind));
        found = histograms(page, "etcd_server_request_duration_seconds", kind);
        let range = |_: &Labels<'_>| Some("Range".to_owned());
        found.extend(histograms(page, "etcd_server_range_duration_seconds", range));
    }
    let mut durations: Vec<Durations> =
        found.into_iter().filter(|(_, histogram)| histogram.count > 0.0).map(durations_of).collect();
    let key = |durations: &Durations| (durations.p99_seconds.unwrap_or(f64::INFINITY), durations.mean_seconds);
    durations.sort_by(|a, b| key(b).partial_cmp(&key(a)).unwrap_or(std::cmp::Ordering::Equal));
    durations.truncate(count);
    durations
}

fn durations_of((request, histogram): (String, Histogram)) -> Durations {
    let wanted = histogram.count * 0.99;
    let bound = histogram.buckets.iter().find(|(_, count)| *count >= wanted).map(|(bound, _)| *bound);
    Durations {
        request,
        count: histogram.count as i64,
        mean_seconds: histogram.sum / histogram.count,
        p99_seconds: bound,
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
        check(basic, &[("Range", 4, 0.5, None), ("Put", 100, 0.1, Some(0.2))]);
        let extensive = format!(
            "{basic}\
             grpc_server_handling_seconds_bucket{{grpc_method=\"Status\",grpc_type=\"unary\",le=\"0.005\"}} 1\n\
             grpc_server_handling_seconds_sum{{grpc_method=\"Status\",grpc_type=\"unary\"}} 0.001\n\
             grpc_server_handling_seconds_count{{grpc_method=\"Status\",grpc_type=\"unary\"}} 1\n\
             grpc_server_handling_seconds_count{{grpc_method=\"Watch\",grpc_type=\"bidi_stream\"}} 1\n"
        );
        check(&extensive, &[("Status", 1, 0.001, Some(0.005))]);
    }
}
