//! The metrics that a soak test samples and judges, from the server's `/metrics` page, from the latencies that the
//! clients measure, and from the operating system for a server that the test has started.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Serialize;

use orlop_client::{MetricsPage, Target};

use crate::{
    compare::server::Server,
    connection::{Client, Pool},
    error::Error,
    keyspace,
    report::rounded,
};

/// A metric, and the rise that does not count as a leak.
#[derive(Debug)]
pub struct Metric {
    pub name: &'static str,
    pub unit: &'static str,
    pub source: Source,
    /// Whether the metric counts resources of clients, which must be released when the clients disconnect.
    pub is_client_resource: bool,
    pub aggregate: Aggregate,
    /// Allowed rise in the unit of the metric. The larger of this bound and `rise_allowed_share` applies.
    pub rise_allowed: f64,
    /// Allowed rise as a share of the value at the start.
    pub rise_allowed_share: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Source {
    /// A metric of `/metrics`, multiplied by the factor.
    Prometheus(&'static str, f64),
    /// Size of the data directory.
    DataDir,
    /// Anonymous memory of Postgres.
    DatabaseMemory,
    /// Increase per second of this metric of `/metrics`, in percent.
    Cpu(&'static str),
    /// This quantile of the latency of writes, in milliseconds.
    WriteMillis(f64),
    /// This quantile of the latency of reads, in milliseconds.
    ReadMillis(f64),
}

impl Source {
    /// Whether the metric depends on how busy the machine is.
    pub const fn is_timing(self) -> bool {
        match self {
            Self::Cpu(_) | Self::WriteMillis(_) | Self::ReadMillis(_) => true,
            Self::Prometheus(..) | Self::DataDir | Self::DatabaseMemory => false,
        }
    }
}

/// The function that aggregates the samples of a period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Aggregate {
    Median,
    /// For metrics that rise and fall between compactions, such as the size of the file.
    Max,
    Mean,
}

/// Factor that converts bytes to MiB.
const MIB: f64 = 1.0 / 1_048_576.0;

/// All metrics. The allowed rises are twice the rises that a debug build without leaks showed in five minutes on a busy
/// machine.
pub const METRICS: &[Metric] = &[
    metric("memory", "MiB", Source::Prometheus("process_resident_memory_bytes", MIB), Aggregate::Median, 15.0, 0.05),
    metric("database memory", "MiB", Source::DatabaseMemory, Aggregate::Median, 6.0, 0.1),
    metric("size", "MiB", Source::Prometheus("etcd_mvcc_db_total_size_in_bytes", MIB), Aggregate::Max, 2.0, 0.1),
    metric(
        "size in use",
        "MiB",
        Source::Prometheus("etcd_mvcc_db_total_size_in_use_in_bytes", MIB),
        Aggregate::Max,
        2.0,
        0.1,
    ),
    metric("folder", "MiB", Source::DataDir, Aggregate::Max, 4.0, 0.1),
    client_metric("descriptors", "", Source::Prometheus("process_open_fds", 1.0), 4.0),
    metric("threads", "", Source::Prometheus("process_threads", 1.0), Aggregate::Median, 2.0, 0.0),
    client_metric("watch streams", "", Source::Prometheus("etcd_debugging_mvcc_watch_stream_total", 1.0), 3.0),
    client_metric("watchers", "", Source::Prometheus("etcd_debugging_mvcc_watcher_total", 1.0), 6.0),
    client_metric("leases", "", Source::Prometheus("orlop_leases", 1.0), 4.0),
    metric(
        "keys in the index",
        "",
        Source::Prometheus("etcd_debugging_mvcc_keys_total", 1.0),
        Aggregate::Max,
        30.0,
        0.02,
    ),
    metric("cache", "MiB", Source::Prometheus("orlop_value_cache_bytes", MIB), Aggregate::Median, 1.0, 0.05),
    metric("CPU", "%", Source::Cpu("process_cpu_seconds_total"), Aggregate::Mean, 20.0, 0.5),
    metric("write p50", "ms", Source::WriteMillis(0.5), Aggregate::Median, 2.0, 0.5),
    metric("write p99", "ms", Source::WriteMillis(0.99), Aggregate::Median, 10.0, 1.0),
    metric("read p50", "ms", Source::ReadMillis(0.5), Aggregate::Median, 2.0, 0.5),
    metric("read p99", "ms", Source::ReadMillis(0.99), Aggregate::Median, 10.0, 1.0),
];

const fn metric(
    name: &'static str,
    unit: &'static str,
    source: Source,
    aggregate: Aggregate,
    rise_allowed: f64,
    rise_allowed_share: f64,
) -> Metric {
    Metric { name, unit, source, is_client_resource: false, aggregate, rise_allowed, rise_allowed_share }
}

const fn client_metric(name: &'static str, unit: &'static str, source: Source, rise_allowed: f64) -> Metric {
    Metric {
        name,
        unit,
        source,
        is_client_resource: true,
        aggregate: Aggregate::Median,
        rise_allowed,
        rise_allowed_share: 0.0,
    }
}

/// The values of all metrics at one time, by name. Metrics that the server does not provide are absent.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sample {
    /// Time since the start of the test.
    pub secs: f64,
    #[serde(flatten)]
    pub values: BTreeMap<&'static str, f64>,
    /// CPU time used by the server since its start.
    #[serde(skip)]
    pub cpu_secs: Option<f64>,
}

impl Sample {
    pub fn add_latency(&mut self, writes: &Histogram<u64>, reads: &Histogram<u64>) {
        for metric in METRICS {
            let (histogram, quantile) = match metric.source {
                Source::WriteMillis(quantile) => (writes, quantile),
                Source::ReadMillis(quantile) => (reads, quantile),
                Source::Prometheus(..) | Source::DataDir | Source::DatabaseMemory | Source::Cpu(_) => continue,
            };
            if !histogram.is_empty() {
                self.values.insert(metric.name, rounded(histogram.value_at_quantile(quantile) as f64 / 1e6));
            }
        }
    }

    pub fn add_cpu(&mut self, last: Option<&Self>) {
        let used = self.cpu_secs.zip(last).and_then(|(now, last)| Some((now - last.cpu_secs?, self.secs - last.secs)));
        if let Some((used, passed)) = used {
            self.values.insert("CPU", rounded(used / passed * 100.0));
        }
    }

    /// Returns the metrics of client resources that are higher than in `before`, with both values.
    pub fn client_resources_above(&self, before: &Self) -> Vec<String> {
        let owned = METRICS.iter().filter(|metric| metric.is_client_resource);
        let more = owned.filter_map(|metric| {
            let (now, then) = (self.values.get(metric.name)?, before.values.get(metric.name)?);
            (now > then).then(|| format!("{} {now} instead of {then}", metric.name))
        });
        more.collect()
    }
}

/// Reads the metrics over its own connection, which stays open for the whole test.
pub struct MetricsReader<'a> {
    client: Client,
    server: Option<&'a Server<'a>>,
}

impl<'a> MetricsReader<'a> {
    /// Connects to the first endpoint.
    pub async fn open(target: &Target, server: Option<&'a Server<'a>>) -> Result<Self, Error> {
        Ok(Self { client: Pool::connect(target, 1).await?.client(0), server })
    }

    /// Whether the connection to the server is lost. It is not reopened.
    pub fn is_lost(&self) -> bool {
        self.client.is_lost()
    }

    pub async fn read(&self) -> Result<Sample, Error> {
        let request = async { self.client.get("/metrics").await.map(tonic::Response::new) };
        let page = MetricsPage::new(keyspace::setup_request("reading /metrics", &self.client, request).await?);
        let mut sample = Sample::default();
        for metric in METRICS {
            let value = match metric.source {
                Source::Prometheus(name, factor) => page.value(name).map(|value| value * factor),
                Source::DataDir => self.server.map(|server| server.folder_bytes() as f64 * MIB),
                Source::DatabaseMemory => {
                    self.server.and_then(Server::database_memory_bytes).map(|bytes| bytes as f64 * MIB)
                }
                Source::Cpu(name) => {
                    sample.cpu_secs = page.value(name);
                    None
                }
                Source::WriteMillis(_) | Source::ReadMillis(_) => None,
            };
            sample.values.extend(value.map(|value| (metric.name, rounded(value))));
        }
        sample.values.extend(machine_load().map(|load| ("machine load", load)));
        Ok(sample)
    }
}

/// Returns the load average over one minute. It is not judged; it shows how busy the machine was.
fn machine_load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn resources_of_disconnected_clients_are_reported() {
        let sample = |watchers: f64, memory: f64| Sample {
            values: BTreeMap::from([("watchers", watchers), ("memory", memory)]),
            ..Sample::default()
        };
        assert_eq!(sample(3.0, 99.0).client_resources_above(&sample(1.0, 1.0)), ["watchers 3 instead of 1"]);
        assert_eq!(sample(1.0, 99.0).client_resources_above(&sample(1.0, 1.0)), Vec::<String>::new());
    }
}
