//! What a server says of itself on /metrics, which is the same of one that runs elsewhere, and what only the machine knows.

use std::collections::BTreeMap;

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{
    Error,
    compare::server::Server,
    connection::{Client, Pool},
    endpoint::Target,
    keyspace,
    report::rounded,
};

/// What is looked at, and how much of a rise is no leak.
#[derive(Debug)]
pub struct Figure {
    pub name: &'static str,
    pub unit: &'static str,
    pub of: Of,
    /// Whether clients that are gone may leave none of it.
    pub is_clients: bool,
    pub pick: Pick,
    /// A rise is noise up to the larger of the two: so much, ...
    pub least: f64,
    /// ... and this share of what there is.
    pub share: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Of {
    /// A metric's value times the factor.
    Metric(&'static str, f64),
    /// Bytes of the folder with the data.
    Folder,
    /// Anonymous memory of Postgres.
    Database,
    /// How fast this metric of seconds goes up.
    Cpu(&'static str),
    WriteMillis(f64),
    ReadMillis(f64),
}

/// What stands for one period.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pick {
    Median,
    /// Of what goes up and down by design: a file that is filled and compacted must not need more each time.
    Most,
    Mean,
}

const MIB: f64 = 1.0 / 1_048_576.0;

/// The bounds are twice what a server that leaks nothing was seen to do in five minutes, a debug build on a busy machine.
pub const FIGURES: &[Figure] = &[
    figure("memory", "MiB", Of::Metric("process_resident_memory_bytes", MIB), Pick::Median, 15.0, 0.05),
    figure("database memory", "MiB", Of::Database, Pick::Median, 6.0, 0.1),
    figure("size", "MiB", Of::Metric("etcd_mvcc_db_total_size_in_bytes", MIB), Pick::Most, 2.0, 0.1),
    figure("size in use", "MiB", Of::Metric("etcd_mvcc_db_total_size_in_use_in_bytes", MIB), Pick::Most, 2.0, 0.1),
    figure("folder", "MiB", Of::Folder, Pick::Most, 4.0, 0.1),
    theirs("descriptors", "", Of::Metric("process_open_fds", 1.0), 4.0),
    figure("threads", "", Of::Metric("process_threads", 1.0), Pick::Median, 2.0, 0.0),
    theirs("watch streams", "", Of::Metric("etcd_debugging_mvcc_watch_stream_total", 1.0), 3.0),
    theirs("watchers", "", Of::Metric("etcd_debugging_mvcc_watcher_total", 1.0), 6.0),
    theirs("leases", "", Of::Metric("orlop_leases", 1.0), 4.0),
    figure("keys in the index", "", Of::Metric("etcd_debugging_mvcc_keys_total", 1.0), Pick::Most, 30.0, 0.02),
    figure("cache", "MiB", Of::Metric("orlop_value_cache_bytes", MIB), Pick::Median, 1.0, 0.05),
    figure("CPU", "%", Of::Cpu("process_cpu_seconds_total"), Pick::Mean, 20.0, 0.5),
    figure("write p50", "ms", Of::WriteMillis(0.5), Pick::Median, 2.0, 0.5),
    figure("write p99", "ms", Of::WriteMillis(0.99), Pick::Median, 10.0, 1.0),
    figure("read p50", "ms", Of::ReadMillis(0.5), Pick::Median, 2.0, 0.5),
    figure("read p99", "ms", Of::ReadMillis(0.99), Pick::Median, 10.0, 1.0),
];

const fn figure(name: &'static str, unit: &'static str, of: Of, pick: Pick, least: f64, share: f64) -> Figure {
    Figure { name, unit, of, is_clients: false, pick, least, share }
}

const fn theirs(name: &'static str, unit: &'static str, of: Of, least: f64) -> Figure {
    Figure { name, unit, of, is_clients: true, pick: Pick::Median, least, share: 0.0 }
}

/// One look, by the figures' names. What the server does not tell is not there.
#[derive(Clone, Debug, Default, Serialize)]
pub struct Sample {
    /// Since the beginning.
    pub secs: f64,
    #[serde(flatten)]
    pub values: BTreeMap<&'static str, f64>,
    /// Metrics of time, which only count up.
    #[serde(skip)]
    pub cpu_secs: Option<f64>,
}

impl Sample {
    pub fn add_latency(&mut self, writes: &Histogram<u64>, reads: &Histogram<u64>) {
        for figure in FIGURES {
            let (histogram, quantile) = match figure.of {
                Of::WriteMillis(quantile) => (writes, quantile),
                Of::ReadMillis(quantile) => (reads, quantile),
                Of::Metric(..) | Of::Folder | Of::Database | Of::Cpu(_) => continue,
            };
            if !histogram.is_empty() {
                self.values.insert(figure.name, rounded(histogram.value_at_quantile(quantile) as f64 / 1e6));
            }
        }
    }

    pub fn add_cpu(&mut self, last: Option<&Self>) {
        let used = self.cpu_secs.zip(last).and_then(|(now, last)| Some((now - last.cpu_secs?, self.secs - last.secs)));
        if let Some((used, passed)) = used {
            self.values.insert("CPU", rounded(used / passed * 100.0));
        }
    }

    /// Names what clients have of the server and did not have before.
    pub fn more_than(&self, before: &Self) -> Vec<String> {
        let theirs = FIGURES.iter().filter(|figure| figure.is_clients);
        let more = theirs.filter_map(|figure| {
            let (now, then) = (self.values.get(figure.name)?, before.values.get(figure.name)?);
            (now > then).then(|| format!("{} {now} instead of {then}", figure.name))
        });
        more.collect()
    }
}

/// Asks over a connection of its own, which is there from first to last.
pub struct Gauges<'a> {
    client: Client,
    server: Option<&'a Server<'a>>,
}

impl<'a> Gauges<'a> {
    /// Of several endpoints the first is asked.
    pub async fn open(target: &Target, server: Option<&'a Server<'a>>) -> Result<Self, Error> {
        Ok(Self { client: Pool::connect(target, 1).await?.client(0), server })
    }

    pub async fn read(&self) -> Result<Sample, Error> {
        let asked = async { self.client.get("/metrics").await.map(tonic::Response::new) };
        let text = keyspace::step("asking for metrics", &self.client, asked).await?;
        let mut sample = Sample::default();
        for figure in FIGURES {
            let value = match figure.of {
                Of::Metric(name, factor) => metric(&text, name).map(|value| value * factor),
                Of::Folder => self.server.map(|server| server.folder_bytes() as f64 * MIB),
                Of::Database => self.server.and_then(Server::database_memory_bytes).map(|bytes| bytes as f64 * MIB),
                Of::Cpu(name) => {
                    sample.cpu_secs = metric(&text, name);
                    None
                }
                Of::WriteMillis(_) | Of::ReadMillis(_) => None,
            };
            sample.values.extend(value.map(|value| (figure.name, rounded(value))));
        }
        sample.values.extend(machine_load().map(|load| ("machine load", load)));
        Ok(sample)
    }
}

/// Tasks that run or would, averaged over a minute. It is not judged; it tells what else went on.
fn machine_load() -> Option<f64> {
    std::fs::read_to_string("/proc/loadavg").ok()?.split(' ').next()?.parse().ok()
}

/// Of a metric without labels.
fn metric(text: &str, name: &str) -> Option<f64> {
    text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.trim().parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metric_is_found_by_its_whole_name() {
        let text = "# HELP a_b c\na_b_c 1\na_b{d=\"e\"} 2\na_b 3.5\nbig 1.5e+09\n";
        for (name, want) in [("a_b", Some(3.5)), ("a_b_c", Some(1.0)), ("a", None), ("big", Some(1.5e9)), ("z", None)] {
            assert_eq!(metric(text, name), want, "{name}");
        }
    }

    #[test]
    fn what_clients_left_is_named() {
        let sample = |watchers: f64, memory: f64| Sample {
            values: BTreeMap::from([("watchers", watchers), ("memory", memory)]),
            ..Sample::default()
        };
        assert_eq!(sample(3.0, 99.0).more_than(&sample(1.0, 1.0)), ["watchers 3 instead of 1"]);
        assert_eq!(sample(1.0, 99.0).more_than(&sample(1.0, 1.0)), Vec::<String>::new());
    }
}
