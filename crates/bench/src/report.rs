//! The results of a run, as an aligned table or as one JSON object.

use std::{collections::BTreeMap, fmt, time::Duration};

use hdrhistogram::Histogram;
use serde::Serialize;

use crate::{closed_loop::Recorder, error::Error, output::number, server_cpu::ServerCpu};

/// The results of one scenario.
#[derive(Debug, Serialize)]
pub struct Report {
    pub scenario: &'static str,
    pub endpoints: Vec<String>,
    pub clients: usize,
    pub connections: usize,
    pub value_size: usize,
    /// Whether the user ended the run with Ctrl-C.
    pub interrupted: bool,
    /// One row for each kind of operation; first that of all operations, if there is one. Empty in a scenario without
    /// operations.
    pub results: Vec<Row>,
    /// Additional metrics of the scenario, by name. A name ends with the unit, if there is one.
    #[serde(flatten)]
    pub extra: BTreeMap<&'static str, f64>,
    /// The steps of a search, in order.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub steps: Vec<Step>,
    /// CPU time of the server, with `--server-pid`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub server_cpu: Option<ServerCpu>,
    pub first_error: Option<String>,
}

/// The results of one kind of operation.
#[derive(Debug, Serialize)]
pub struct Row {
    pub operation: &'static str,
    pub count: u64,
    pub elapsed_secs: f64,
    pub per_sec: f64,
    pub p50_ms: f64,
    pub p90_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    pub errors: u64,
    pub histogram: Vec<Bucket>,
}

/// A step of the search for the number of nodes that a server holds.
#[derive(Clone, Debug, Serialize)]
pub struct Step {
    pub nodes: usize,
    pub held: bool,
    /// Number of renewals that were answered.
    pub count: u64,
    pub p50_ms: f64,
    pub p99_ms: f64,
    pub max_ms: f64,
    /// Quantile of the time from the due time of a renewal to its event.
    pub event_p99_ms: f64,
    pub events_missing: u64,
    pub errors: u64,
}

impl Step {
    const TITLES: [&str; 9] =
        ["nodes", "held", "count", "p50 ms", "p99 ms", "max ms", "event p99 ms", "missing", "errors"];

    fn cells(&self) -> [String; 9] {
        [
            number(self.nodes as f64),
            if self.held { "yes" } else { "no" }.to_owned(),
            self.count.to_string(),
            format!("{:.3}", self.p50_ms),
            format!("{:.3}", self.p99_ms),
            format!("{:.3}", self.max_ms),
            format!("{:.3}", self.event_p99_ms),
            self.events_missing.to_string(),
            self.errors.to_string(),
        ]
    }
}

/// A histogram bucket: the number of operations that took at most `up_to_ms` and longer than the previous bucket's
/// bound.
#[derive(Debug, Serialize)]
pub struct Bucket {
    pub up_to_ms: f64,
    pub count: u64,
}

/// Width in columns of the longest bar of a histogram.
const BAR_WIDTH: u64 = 40;

impl Row {
    pub fn new(operation: &'static str, recorder: &Recorder) -> Self {
        let quantile = |quantile| millis(recorder.latency.value_at_quantile(quantile));
        let count = recorder.latency.len();
        Self {
            operation,
            count,
            elapsed_secs: rounded(recorder.elapsed().as_secs_f64()),
            per_sec: per_sec(count, recorder.elapsed()),
            p50_ms: quantile(0.5),
            p90_ms: quantile(0.9),
            p99_ms: quantile(0.99),
            max_ms: millis(recorder.latency.max()),
            errors: recorder.errors,
            histogram: histogram(&recorder.latency),
        }
    }

    /// Writes one line per bucket.
    fn write_histogram(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let most = self.histogram.iter().map(|bucket| bucket.count).max().unwrap_or_default();
        for Bucket { up_to_ms, count } in &self.histogram {
            let bar = "#".repeat(usize::try_from((count * BAR_WIDTH).div_ceil(most.max(1))).unwrap_or_default());
            writeln!(f, "{:<10} up to {up_to_ms:>8} ms {count:>10} {bar}", self.operation)?;
        }
        Ok(())
    }

    const TITLES: [&str; 9] =
        ["operation", "count", "seconds", "per second", "p50 ms", "p90 ms", "p99 ms", "max ms", "errors"];

    fn cells(&self) -> [String; 9] {
        [
            self.operation.to_owned(),
            self.count.to_string(),
            format!("{:.2}", self.elapsed_secs),
            format!("{:.1}", self.per_sec),
            format!("{:.3}", self.p50_ms),
            format!("{:.3}", self.p90_ms),
            format!("{:.3}", self.p99_ms),
            format!("{:.3}", self.max_ms),
            self.errors.to_string(),
        ]
    }
}

/// Returns the buckets from the fastest to the slowest operation; the bounds are 1, 2 and 5 times a power of ten.
fn histogram(latency: &Histogram<u64>) -> Vec<Bucket> {
    let mut recorded = latency.iter_recorded().peekable();
    let mut buckets = Vec::new();
    for up_to in (3..13).flat_map(|power| [1, 2, 5].map(|digit| digit * 10_u64.pow(power))) {
        let mut count = 0;
        while let Some(step) = recorded.next_if(|step| step.value_iterated_to() <= up_to) {
            count += step.count_since_last_iteration();
        }
        if count > 0 || (!buckets.is_empty() && recorded.peek().is_some()) {
            buckets.push(Bucket { up_to_ms: millis(up_to), count });
        }
    }
    buckets
}

/// Returns the rate per second; 0 if `elapsed` is zero.
pub fn per_sec(count: u64, elapsed: Duration) -> f64 {
    if elapsed.is_zero() { 0.0 } else { rounded(count as f64 / elapsed.as_secs_f64()) }
}

fn millis(nanos: u64) -> f64 {
    rounded(nanos as f64 / 1e6)
}

/// Rounds to three decimals.
pub fn rounded(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}

/// Returns the median; 0 without samples.
pub fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

impl Report {
    /// Fails if an operation failed, or if the run ended by itself and measured none.
    pub fn check(&self) -> Result<(), Error> {
        match &self.first_error {
            Some(error) if self.results.iter().all(|row| row.count == 0) => Err(Error::NothingSucceeded(error.clone())),
            Some(error) => Err(Error::PartlyFailed(error.clone())),
            None if !self.interrupted && self.results.first().is_some_and(|row| row.count == 0) => {
                Err(Error::NothingMeasured)
            }
            None => Ok(()),
        }
    }
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { scenario, clients, connections, value_size, .. } = self;
        let endpoints = self.endpoints.join(",");
        writeln!(
            f,
            "{scenario}: endpoints={endpoints} clients={clients} connections={connections} value_size={value_size}"
        )?;
        if !self.results.is_empty() {
            let mut lines = vec![Row::TITLES.map(str::to_owned)];
            lines.extend(self.results.iter().map(Row::cells));
            write_table(f, &lines)?;
        }
        for row in &self.results {
            row.write_histogram(f)?;
        }
        if !self.steps.is_empty() {
            let mut lines = vec![Step::TITLES.map(str::to_owned)];
            lines.extend(self.steps.iter().map(Step::cells));
            write_table(f, &lines)?;
        }
        for (name, value) in &self.extra {
            writeln!(f, "{name}: {value}")?;
        }
        if let Some(cpu) = &self.server_cpu {
            write!(f, "{cpu}")?;
        }
        if let Some(error) = &self.first_error {
            writeln!(f, "first error: {error}")?;
        }
        if self.interrupted {
            writeln!(f, "interrupted: the results are incomplete")?;
        }
        Ok(())
    }
}

/// Writes the first column left-aligned and the others right-aligned.
fn write_table<const N: usize>(f: &mut fmt::Formatter<'_>, lines: &[[String; N]]) -> fmt::Result {
    let widths: [usize; N] =
        std::array::from_fn(|column| lines.iter().map(|line| line[column].len()).max().unwrap_or_default());
    for line in lines {
        for (column, (cell, width)) in line.iter().zip(widths).enumerate() {
            if column == 0 {
                write!(f, "{cell:<width$}")?;
            } else {
                write!(f, "  {cell:>width$}")?;
            }
        }
        writeln!(f)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use tokio::time::Instant;

    use super::*;

    /// Returns a report of 1,000 operations that took 1 ms, 2 ms, ... 1,000 ms, over two seconds.
    fn report() -> Report {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        for millis in 1..=1000 {
            recorder.succeed(Duration::from_millis(millis), start + 2 * Duration::from_millis(millis));
        }
        recorder.fail(3, || "Unavailable: gone".to_owned());
        Report {
            scenario: "update",
            endpoints: vec!["http://a:1".to_owned(), "unix://b".to_owned()],
            clients: 64,
            connections: 8,
            value_size: 256,
            interrupted: true,
            results: vec![Row::new("update", &recorder)],
            extra: BTreeMap::from([("retries", 7.0)]),
            steps: Vec::new(),
            server_cpu: None,
            first_error: recorder.first_error,
        }
    }

    #[track_caller]
    fn check_near(got: f64, want: f64) {
        assert!((got - want).abs() <= want / 1000.0, "{got} is not {want} to three digits");
    }

    #[test]
    fn row_has_rate_and_quantiles() {
        let row = &report().results[0];
        assert_eq!((row.count, row.errors), (1000, 3));
        assert_eq!((row.elapsed_secs, row.per_sec), (2.0, 500.0));
        check_near(row.p50_ms, 500.0);
        check_near(row.p90_ms, 900.0);
        check_near(row.p99_ms, 990.0);
        check_near(row.max_ms, 1000.0);
    }

    #[test]
    fn histogram_contains_all_operations() {
        let row = &report().results[0];
        let counts: Vec<_> = row.histogram.iter().map(|bucket| (bucket.up_to_ms, bucket.count)).collect();
        let steps: Vec<_> = counts.iter().map(|(up_to, _)| *up_to).collect();
        assert_eq!(steps, [2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 200.0, 500.0, 1000.0, 2000.0]);
        assert_eq!(counts.iter().map(|(_, count)| count).sum::<u64>(), 1000);
        let text = report().to_string();
        assert!(text.contains(&format!("{:>10} {}\n", counts[8].1, "#".repeat(40))), "{text}");
    }

    #[test]
    fn row_without_operations_is_zero() {
        let row = Row::new("get", &Recorder::new(Instant::now()));
        assert_eq!((row.count, row.per_sec, row.p50_ms, row.max_ms), (0, 0.0, 0.0, 0.0));
    }

    #[test]
    fn median_is_in_the_middle() {
        for (samples, want) in [(&[][..], 0.0), (&[3.0], 3.0), (&[9.0, 1.0, 2.0], 2.0), (&[1.0, 2.0, 3.0, 9.0], 2.5)] {
            assert_eq!(median(samples), want, "{samples:?}");
        }
    }

    #[test]
    fn failed_and_empty_runs_are_errors() {
        let check = |count, errors, interrupted| {
            let start = Instant::now();
            let mut recorder = Recorder::new(start);
            for _ in 0..count {
                recorder.succeed(Duration::from_millis(1), start);
            }
            recorder.fail(errors, || "gone".to_owned());
            let results = vec![Row::new("put", &recorder)];
            let report = Report { interrupted, results, first_error: recorder.first_error, ..report() };
            report.check().map_err(|error| error.to_string()).err()
        };
        for (count, errors, interrupted, want) in [
            (2, 0, false, None),
            (0, 0, true, None),
            (0, 0, false, Some("no operation was completed in the measured time")),
            (2, 1, false, Some("some operations failed, or the run is incomplete: gone")),
            (2, 1, true, Some("some operations failed, or the run is incomplete: gone")),
            (0, 1, false, Some("no operation succeeded: gone")),
        ] {
            assert_eq!(check(count, errors, interrupted).as_deref(), want, "{count} {errors} {interrupted}");
        }
        // A scenario without operations.
        let idle = Report { interrupted: false, results: Vec::new(), first_error: None, ..report() };
        assert!(idle.check().is_ok());
        assert!(!idle.to_string().contains("operation"), "{idle}");
    }

    #[test]
    fn table_is_aligned() {
        let text = report().to_string();
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "update: endpoints=http://a:1,unix://b clients=64 connections=8 value_size=256");
        assert_eq!(lines[1].len(), lines[2].len());
        assert!(lines[1].starts_with("operation  count  seconds  per second"), "{text}");
        assert!(lines[2].starts_with("update      1000     2.00       500.0"), "{text}");
        let last = &lines[lines.len() - 3..];
        assert_eq!(last[..2], ["retries: 7", "first error: Unavailable: gone"]);
        assert_eq!(last[2], "interrupted: the results are incomplete");
    }

    #[test]
    fn json_is_one_flat_object() {
        let json = serde_json::to_value(report()).unwrap();
        assert_eq!(json["scenario"], "update");
        assert_eq!(json["retries"], 7.0);
        assert_eq!(json["interrupted"], true);
        assert_eq!(json["results"][0]["per_sec"], 500.0);
        assert_eq!(json["results"][0]["errors"], 3);
    }
}
