//! Metrics of the process that the `prometheus` crate does not read from `/proc`. Elsewhere than on Linux they are
//! absent.

use prometheus::{
    Counter, Gauge, Opts,
    core::{Collector, Desc},
    proto::MetricFamily,
};

const RECEIVED: (&str, &str) =
    ("process_network_receive_bytes_total", "Bytes received over IP, in the network namespace of the process.");
const SENT: (&str, &str) =
    ("process_network_transmit_bytes_total", "Bytes sent over IP, in the network namespace of the process.");
const MEMORY_MAX: (&str, &str) =
    ("process_virtual_memory_max_bytes", "Maximum virtual memory of the process in bytes, 2^64 if it is unlimited.");

/// Reads the metrics when they are requested.
pub(super) struct Process(Vec<Desc>);

impl Process {
    pub(super) fn new() -> Self {
        let desc = |(name, help): (&str, &str)| {
            Desc::new(name.to_owned(), help.to_owned(), Vec::new(), Default::default()).expect("the name is valid")
        };
        Self([RECEIVED, SENT, MEMORY_MAX].map(desc).into())
    }
}

impl Collector for Process {
    fn desc(&self) -> Vec<&Desc> {
        self.0.iter().collect()
    }

    fn collect(&self) -> Vec<MetricFamily> {
        let network = std::fs::read_to_string("/proc/self/net/netstat").unwrap_or_default();
        let limits = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let counters = [(RECEIVED, "InOctets"), (SENT, "OutOctets")].into_iter().filter_map(|((name, help), field)| {
            let counter = Counter::with_opts(Opts::new(name, help)).ok()?;
            counter.inc_by(ip_counter(&network, field)?);
            Some(counter.collect())
        });
        let limit = memory_max(&limits).and_then(|bytes| {
            let (name, help) = MEMORY_MAX;
            let gauge = Gauge::with_opts(Opts::new(name, help)).ok()?;
            gauge.set(bytes);
            Some(gauge.collect())
        });
        counters.chain(limit).flatten().collect()
    }
}

/// Replaces the CPU time of the `prometheus` crate, which has whole seconds, by one with the kernel's resolution.
pub(super) fn set_cpu_time(families: &mut [MetricFamily]) {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let family = families.iter_mut().find(|family| family.name() == "process_cpu_seconds_total");
    let metric = family.and_then(|family| family.mut_metric().first_mut());
    if let (Some(metric), Some(secs)) = (metric, cpu_secs(&stat)) {
        let mut counter = metric.get_counter().clone();
        counter.set_value(secs);
        metric.set_counter(counter);
    }
}

/// Returns the CPU time in user and kernel mode. Linux counts it in units of 10 ms on all platforms of Orlop.
fn cpu_secs(stat: &str) -> Option<f64> {
    // The name of the program, in parentheses, may contain spaces. The fields after it begin with the third.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let (user, system): (f64, f64) = (fields.next()?.parse().ok()?, fields.next()?.parse().ok()?);
    Some((user + system) / 100.0)
}

/// Returns a counter of the group `IpExt`: a line of names, then a line of values.
fn ip_counter(netstat: &str, name: &str) -> Option<f64> {
    let mut lines = netstat.lines().filter_map(|line| line.strip_prefix("IpExt: "));
    let position = lines.next()?.split(' ').position(|found| found == name)?;
    lines.next()?.split(' ').nth(position)?.parse().ok()
}

fn memory_max(limits: &str) -> Option<f64> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max address space"))?;
    match line.split_whitespace().next()? {
        "unlimited" => Some(2_f64.powi(64)),
        bytes => bytes.parse().ok(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn counters_and_limits_are_read() {
        let netstat = "TcpExt: InOctets\nTcpExt: 1\nIpExt: InNoRoutes InOctets OutOctets\nIpExt: 0 25 70\n";
        for (name, value) in [("InOctets", Some(25.0)), ("OutOctets", Some(70.0)), ("Other", None)] {
            assert_eq!(ip_counter(netstat, name), value, "{name}");
        }
        for (text, value) in [("unlimited", Some(2_f64.powi(64))), ("4096", Some(4096.0)), ("?", None)] {
            let line = format!("Max file size  1 1 bytes\nMax address space  {text}  unlimited  bytes\n");
            assert_eq!(memory_max(&line), value, "{text}");
        }
        assert_eq!((ip_counter("", "InOctets"), memory_max("")), (None, None));
        let stat = "29491 (a b) c) S 1 29491 29491 34816 29491 4194304 99 0 0 0 150 75 0 0 20 0";
        assert_eq!((cpu_secs(stat), cpu_secs(""), cpu_secs("1 (a) S")), (Some(2.25), None, None));
    }
}
