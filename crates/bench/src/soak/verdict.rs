//! Decides whether a metric rises.
//!
//! The first third of a test is ignored: until then the caches fill, and the history since the compact revision and the
//! free space that Postgres's vacuum leaves in the tables grow to their steady sizes. The rest is divided into periods
//! between two compactions.
//! The samples of a period are aggregated to one value ([`Aggregate`]). The trend line is the Theil-Sen estimator: its
//! slope is the median of the slopes between all pairs of periods, and outliers in up to 29 % of the periods do not
//! affect it. The rise of this line from the first to the last period is compared with the allowed rise. The longer the
//! test, the smaller the leak that it detects; each verdict contains the smallest detectable leak per day.

use serde::Serialize;

use super::metrics::{Aggregate, METRICS, Metric, Sample};
use crate::report::{median, rounded};

/// Minimum length of the ignored part; a shorter test is not judged. Most metrics rise while a server starts.
const STARTUP_SECS_MIN: f64 = 30.0;
/// Minimum length of a test that judges latencies and CPU. In a shorter one, whatever else begins to run on the machine
/// raises them.
const TIMING_SECS_MIN: f64 = 600.0;
/// Minimum number of periods for a verdict.
const PERIODS_MIN: usize = 6;

const SECS_PER_DAY: f64 = 86_400.0;

/// The trend of one metric.
#[derive(Debug, Serialize)]
pub struct Verdict {
    /// Name of the metric.
    pub metric: &'static str,
    pub unit: &'static str,
    /// Median over the periods of the last two thirds.
    pub median: f64,
    /// Rise of the trend line over the last two thirds.
    pub rise: f64,
    /// Maximum rise that does not count as a leak.
    pub allowed: f64,
    /// Rise per day at the slope of the trend line.
    pub per_day: f64,
    /// Smallest rise per day that a test of this length detects.
    pub detectable_per_day: f64,
    pub is_flat: bool,
}

/// Returns the verdicts in the order of the metrics. Metrics with too few samples have no verdict, nor have latencies and
/// CPU in a short test.
pub fn judge(samples: &[Sample], period_secs: f64) -> Vec<Verdict> {
    METRICS.iter().filter_map(|metric| judge_one(metric, samples, period_secs)).collect()
}

fn judge_one(metric: &Metric, samples: &[Sample], period_secs: f64) -> Option<Verdict> {
    let secs = samples.last()?.secs;
    if metric.source.is_timing() && secs < TIMING_SECS_MIN {
        return None;
    }
    let startup_secs = secs / 3.0;
    let points = by_period(metric, samples, period_secs);
    let points: Vec<_> = points.into_iter().filter(|(secs, _)| *secs > startup_secs).collect();
    if startup_secs < STARTUP_SECS_MIN || points.len() < PERIODS_MIN {
        return None;
    }
    let median = median(&points.iter().map(|(_, value)| *value).collect::<Vec<_>>());
    let length = points.last()?.0 - points.first()?.0;
    let slope = slope(&points);
    let rise = slope * length;
    // The share is relative to the start of the trend line.
    let allowed = metric.rise_allowed.max(metric.rise_allowed_share * (median - rise / 2.0));
    Some(Verdict {
        metric: metric.name,
        unit: metric.unit,
        median: rounded(median),
        rise: rounded(rise),
        allowed: rounded(allowed),
        per_day: rounded(slope * SECS_PER_DAY),
        detectable_per_day: rounded(allowed / length * SECS_PER_DAY),
        is_flat: rise <= allowed,
    })
}

/// Returns the aggregated value of each period, with the time of its middle.
pub fn by_period(metric: &Metric, samples: &[Sample], period_secs: f64) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    let number = |sample: &Sample| (sample.secs / period_secs).floor();
    for chunk in samples.chunk_by(|a, b| number(a) == number(b)) {
        let values: Vec<f64> = chunk.iter().filter_map(|sample| sample.values.get(metric.name).copied()).collect();
        if values.is_empty() {
            continue;
        }
        let value = match metric.aggregate {
            Aggregate::Median => median(&values),
            Aggregate::Max => values.into_iter().fold(f64::NEG_INFINITY, f64::max),
            Aggregate::Mean => values.iter().sum::<f64>() / values.len() as f64,
        };
        points.push(((number(&chunk[0]) + 0.5) * period_secs, value));
    }
    points
}

/// Returns the Theil-Sen slope.
fn slope(points: &[(f64, f64)]) -> f64 {
    let pairs = points.iter().enumerate().flat_map(|(at, from)| points[at + 1..].iter().map(move |to| (from, to)));
    median(&pairs.map(|(from, to)| (to.1 - from.1) / (to.0 - from.0)).collect::<Vec<_>>())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Judges a test of this length with a sample every second and a compaction every 20 seconds.
    fn verdicts(secs: u32, name: &'static str, value: impl Fn(f64) -> f64) -> Vec<Verdict> {
        let samples = (1..=secs).map(f64::from);
        let samples =
            samples.map(|secs| Sample { secs, values: BTreeMap::from([(name, value(secs))]), ..Sample::default() });
        judge(&samples.collect::<Vec<_>>(), 20.0)
    }

    /// Judges a test of ten minutes.
    #[track_caller]
    fn check(case: &str, name: &'static str, value: impl Fn(f64) -> f64, is_flat: bool) {
        let verdicts = verdicts(600, name, value);
        assert_eq!(verdicts.len(), 1, "{case}");
        assert_eq!(verdicts[0].is_flat, is_flat, "{case}: {verdicts:?}");
    }

    /// Returns deterministic noise from -1 to 1.
    fn noise(secs: f64) -> f64 {
        (secs * 12.9898).sin() * 43_758.547 % 1.0
    }

    #[test]
    fn noise_steps_and_sawtooths_are_flat_and_leaks_are_not() {
        check("constant", "memory", |_| 60.0, true);
        check("noise", "memory", |secs| 60.0 + 5.0 * noise(secs), true);
        check("caches fill, then stay full", "memory", |secs| 60.0 + secs.min(90.0), true);
        check("one step", "memory", |secs| if secs < 200.0 { 60.0 } else { 64.0 }, true);
        check(
            "a few outlier periods",
            "memory",
            |secs| if (100.0..160.0).contains(&secs) { 900.0 } else { 60.0 },
            true,
        );
        check("falling", "memory", |secs| 900.0 - secs, true);
        check(
            "leak of 1 KiB per request at 200 requests/s",
            "memory",
            |secs| 60.0 + 0.195 * secs + 3.0 * noise(secs),
            false,
        );
        check("sawtooth", "size", |secs| 20.0 + secs % 20.0, true);
        check("sawtooth with a rising maximum", "size", |secs| 20.0 + secs % 20.0 + secs * 0.05, false);
        check("descriptors are opened and closed", "descriptors", |secs| (40.0 + 3.0 * noise(secs)).round(), true);
        check("leak of a descriptor every ten seconds", "descriptors", |secs| (40.0 + secs / 10.0).floor(), false);
        check("leak of a watcher every ten seconds", "watchers", |secs| (60.0 + secs / 10.0).floor(), false);
        check("occasionally slow", "write p99", |secs| if secs % 7.0 < 1.0 { 300.0 } else { 4.0 }, true);
        check("increasingly slow", "write p99", |secs| 4.0 + secs * 0.1, false);
    }

    #[test]
    fn short_tests_are_not_judged() {
        let judged = |secs, name| !verdicts(secs, name, |secs| secs * 100.0).is_empty();
        for (name, too_short, long_enough) in [("memory", 79, 300), ("write p99", 599, 600), ("CPU", 599, 600)] {
            assert!(!judged(too_short, name), "{name}, {too_short} s");
            assert!(judged(long_enough, name), "{name}, {long_enough} s");
        }
        assert!(!judged(0, "memory"));
    }

    #[test]
    fn verdict_contains_rises_per_day() {
        let verdicts = verdicts(300, "memory", |secs| 50.0 + secs);
        assert_eq!((verdicts[0].per_day.round(), verdicts[0].rise.round()), (86_400.0, 200.0));
        assert!(verdicts[0].detectable_per_day > verdicts[0].allowed);
    }
}
