//! Whether a figure stays as it was.
//!
//! The first third is the time in which a server fills what it fills: caches, the history up to the compact revision,
//! the space that Postgres's vacuum leaves in its tables. What follows is cut into periods, a compaction each; one value
//! stands for each ([`Pick`]). The line through them is Theil's and Sen's: the median of the slopes between every two. A
//! third of the periods can be as wild as they like without moving it. What that line rises from the first period to the last is held
//! against the figure's bound. So the longer it lasts the smaller a leak it sees: each verdict says which, by day.

use serde::Serialize;

use super::gauges::{FIGURES, Figure, Pick, Sample};
use crate::report::rounded;

/// Less says nothing: while a server begins, everything rises.
const SETTLED_SECS_MIN: f64 = 30.0;
const PERIODS_MIN: usize = 6;

const SECS_PER_DAY: f64 = 86_400.0;

#[derive(Debug, Serialize)]
pub struct Verdict {
    pub figure: &'static str,
    pub unit: &'static str,
    /// Of the last two thirds, by period.
    pub median: f64,
    /// Of the line, from the first period that counts to the last.
    pub rise: f64,
    /// The most that is no leak.
    pub allowed: f64,
    /// The rise, were it to go on.
    pub per_day: f64,
    /// A leak of less is not seen in this time.
    pub seen_from_per_day: f64,
    pub is_flat: bool,
}

/// In the figures' order. What was not told, or not for long enough, is left out.
pub fn judge(samples: &[Sample], period_secs: f64) -> Vec<Verdict> {
    FIGURES.iter().filter_map(|figure| judge_one(figure, samples, period_secs)).collect()
}

fn judge_one(figure: &Figure, samples: &[Sample], period_secs: f64) -> Option<Verdict> {
    let settled = samples.last()?.secs / 3.0;
    let points = by_period(figure, samples, period_secs);
    let points: Vec<_> = points.into_iter().filter(|(secs, _)| *secs > settled).collect();
    if settled < SETTLED_SECS_MIN || points.len() < PERIODS_MIN {
        return None;
    }
    let median = median(points.iter().map(|(_, value)| *value).collect());
    let lasted = points.last()?.0 - points.first()?.0;
    let slope = slope(&points);
    let rise = slope * lasted;
    // Of where the line begins.
    let allowed = figure.least.max(figure.share * (median - rise / 2.0));
    Some(Verdict {
        figure: figure.name,
        unit: figure.unit,
        median: rounded(median),
        rise: rounded(rise),
        allowed: rounded(allowed),
        per_day: rounded(slope * SECS_PER_DAY),
        seen_from_per_day: rounded(allowed / lasted * SECS_PER_DAY),
        is_flat: rise <= allowed,
    })
}

/// The middle of each period with what stands for it.
pub fn by_period(figure: &Figure, samples: &[Sample], period_secs: f64) -> Vec<(f64, f64)> {
    let mut points: Vec<(f64, f64)> = Vec::new();
    let number = |sample: &Sample| (sample.secs / period_secs).floor();
    for chunk in samples.chunk_by(|a, b| number(a) == number(b)) {
        let values: Vec<f64> = chunk.iter().filter_map(|sample| sample.values.get(figure.name).copied()).collect();
        if values.is_empty() {
            continue;
        }
        let value = match figure.pick {
            Pick::Median => median(values),
            Pick::Most => values.into_iter().fold(f64::NEG_INFINITY, f64::max),
            Pick::Mean => values.iter().sum::<f64>() / values.len() as f64,
        };
        points.push(((number(&chunk[0]) + 0.5) * period_secs, value));
    }
    points
}

/// Theil's and Sen's.
fn slope(points: &[(f64, f64)]) -> f64 {
    let pairs = points.iter().enumerate().flat_map(|(at, from)| points[at + 1..].iter().map(move |to| (from, to)));
    median(pairs.map(|(from, to)| (to.1 - from.1) / (to.0 - from.0)).collect())
}

/// Of some numbers at least.
fn median(mut numbers: Vec<f64>) -> f64 {
    numbers.sort_by(f64::total_cmp);
    let middle = numbers.len() / 2;
    if numbers.len() % 2 == 1 { numbers[middle] } else { f64::midpoint(numbers[middle - 1], numbers[middle]) }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use super::*;

    /// Five minutes, a look every second, a compaction every 20 seconds.
    #[track_caller]
    fn check(what: &str, name: &'static str, value: impl Fn(f64) -> f64, is_flat: bool) {
        let samples = (1..300).map(|second| {
            let secs = f64::from(second);
            Sample { secs, values: BTreeMap::from([(name, value(secs))]), ..Sample::default() }
        });
        let verdicts = judge(&samples.collect::<Vec<_>>(), 20.0);
        assert_eq!(verdicts.len(), 1, "{what}");
        assert_eq!(verdicts[0].is_flat, is_flat, "{what}: {verdicts:?}");
    }

    /// Not random, but without an order: from -1 to 1.
    fn noise(secs: f64) -> f64 {
        (secs * 12.9898).sin() * 43_758.547 % 1.0
    }

    #[test]
    fn noise_steps_and_saws_are_flat_and_leaks_are_not() {
        check("nothing moves", "memory", |_| 60.0, true);
        check("noise", "memory", |secs| 60.0 + 5.0 * noise(secs), true);
        check("caches that fill, then stay", "memory", |secs| 60.0 + secs.min(90.0), true);
        check("one step", "memory", |secs| if secs < 200.0 { 60.0 } else { 64.0 }, true);
        check("a few wild periods", "memory", |secs| if (100.0..160.0).contains(&secs) { 900.0 } else { 60.0 }, true);
        check("what goes down", "memory", |secs| 900.0 - secs, true);
        check(
            "1 KiB of each of 200 requests a second",
            "memory",
            |secs| 60.0 + 0.195 * secs + 3.0 * noise(secs),
            false,
        );
        check("a saw", "size", |secs| 20.0 + secs % 20.0, true);
        check("a saw that gets longer", "size", |secs| 20.0 + secs % 20.0 + secs * 0.05, false);
        check("descriptors come and go", "descriptors", |secs| (40.0 + 3.0 * noise(secs)).round(), true);
        check("a descriptor every ten seconds", "descriptors", |secs| (40.0 + secs / 10.0).floor(), false);
        check("a watcher every ten seconds", "watchers", |secs| (60.0 + secs / 10.0).floor(), false);
        check("slow now and then", "write p99", |secs| if secs % 7.0 < 1.0 { 300.0 } else { 4.0 }, true);
        check("slower and slower", "write p99", |secs| 4.0 + secs * 0.1, false);
    }

    #[test]
    fn short_runs_are_not_judged() {
        let sample = |secs| Sample { secs, values: BTreeMap::from([("memory", secs * 100.0)]), ..Sample::default() };
        let samples: Vec<_> = (1..80).map(f64::from).map(sample).collect();
        assert!(judge(&samples, 20.0).is_empty());
        assert!(judge(&[], 20.0).is_empty());
    }

    #[test]
    fn verdict_tells_what_a_day_would_bring() {
        let sample = |secs| Sample { secs, values: BTreeMap::from([("memory", 50.0 + secs)]), ..Sample::default() };
        let samples: Vec<_> = (1..300).map(f64::from).map(sample).collect();
        let verdicts = judge(&samples, 20.0);
        assert_eq!((verdicts[0].per_day.round(), verdicts[0].rise.round()), (86_400.0, 180.0));
        assert!(verdicts[0].seen_from_per_day > verdicts[0].allowed);
    }
}
