//! The result of a soak test, as a table in Markdown or as JSON with all samples.

use std::fmt;

use serde::Serialize;

use super::{metrics::Sample, verdict::Verdict};
use crate::{error::Error, output::number};

/// Length of a pause of the server or the machine, in seconds, whose skipped operations are not a problem.
const PAUSE_SECS: u64 = 2;
/// Minimum length of a test whose skipped operations are counted. In a shorter one, a pause that is a little longer skips
/// a large part of the operations.
const JUDGED_SECS_MIN: u64 = 30;

#[derive(Debug, Serialize)]
pub struct SoakReport {
    pub scenario: &'static str,
    pub minutes: f64,
    pub rate: usize,
    pub pods: usize,
    pub compact_interval_secs: f64,
    pub compact_delay_secs: f64,
    /// Whether the user ended the test with Ctrl-C.
    pub interrupted: bool,
    pub servers: Vec<ServerResult>,
}

/// The result of one server.
#[derive(Debug, Default, Serialize)]
pub struct ServerResult {
    pub server: &'static str,
    pub operations: u64,
    /// Number of operations at the configured rate until the end of the test.
    pub operations_due: u64,
    /// Configured operations per second.
    #[serde(skip)]
    pub rate: u64,
    pub events: u64,
    pub compactions: u64,
    /// Number of short-lived clients.
    pub visits: u64,
    pub errors: u64,
    pub first_error: Option<String>,
    pub verdicts: Vec<Verdict>,
    /// Resources that the server had not released after all clients had disconnected.
    pub left_behind: Vec<String>,
    /// Why the test could not be run.
    pub not_run: Option<String>,
    pub samples: Vec<Sample>,
}

impl SoakReport {
    /// Returns one line for each failed check.
    pub fn problems(&self) -> Vec<String> {
        self.servers.iter().flat_map(ServerResult::problems).collect()
    }
}

impl ServerResult {
    /// Returns the result of a server whose test could not be run.
    pub fn failed(server: &'static str, error: &Error) -> Self {
        Self { server, not_run: Some(error.to_string()), ..Self::default() }
    }

    /// Returns the number of skipped operations if it is more than a tenth of those that were due, not counting those
    /// of a short pause. A short test is not judged.
    fn skipped(&self) -> Option<u64> {
        let Self { operations_due: due, rate, .. } = self;
        let skipped = due.saturating_sub(self.operations + self.errors);
        (*due >= rate * JUDGED_SECS_MIN && skipped > due / 10 + rate * PAUSE_SECS).then_some(skipped)
    }

    fn problems(&self) -> Vec<String> {
        let rising = self.verdicts.iter().filter(|verdict| !verdict.is_flat).map(|verdict| {
            let Verdict { metric, unit, rise, allowed, .. } = verdict;
            format!("{metric} rose by {} {unit}, allowed: {}", number(*rise), number(*allowed))
        });
        let left = self.left_behind.iter().map(|resource| format!("not released: {resource}"));
        let error = self.first_error.iter().map(|error| match self.errors {
            // The error of a watch, which is not an operation.
            0 => format!("a watch failed: {error}"),
            errors => format!("{errors} operations failed: {error}"),
        });
        let skipped = self.skipped().map(|skipped| {
            let due = self.operations_due;
            format!("{skipped} of {due} operations were skipped because earlier ones took too long")
        });
        let not_run = self.not_run.iter().map(|error| format!("the test could not be run: {error}"));
        rising
            .chain(left)
            .chain(error)
            .chain(skipped)
            .chain(not_run)
            .map(|problem| format!("{}: {problem}", self.server))
            .collect()
    }
}

impl fmt::Display for SoakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { minutes, rate, pods, compact_interval_secs: interval, compact_delay_secs: delay, .. } = self;
        writeln!(
            f,
            "{} minutes, {rate} operations per second and {pods} pods per server, compaction every {} s at the revision \
             of {} s ago.",
            number(*minutes),
            number(*interval),
            number(*delay),
        )?;
        for result in &self.servers {
            result.fmt(f)?;
        }
        for problem in self.problems() {
            writeln!(f, "\n**{problem}**")?;
        }
        if self.interrupted {
            writeln!(f, "\ninterrupted: the results are incomplete")?;
        }
        Ok(())
    }
}

impl fmt::Display for ServerResult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, operations, events, compactions, visits, errors, .. } = self;
        let [operations, events, compactions, visits, errors] =
            [operations, events, compactions, visits, errors].map(|count| number(*count as f64));
        writeln!(
            f,
            "\n**{server}**: {operations} operations, {events} events, {compactions} compactions, {visits} short-lived \
             clients, {errors} errors.\n"
        )?;
        if self.verdicts.is_empty() {
            return writeln!(f, "The test was too short to detect a rise.");
        }
        writeln!(f, "| | median | rise | allowed rise | rise per day | smallest detectable rise per day | |")?;
        writeln!(f, "|---|---|---|---|---|---|---|")?;
        for verdict in &self.verdicts {
            let Verdict { metric, unit, median, rise, allowed, per_day, detectable_per_day, is_flat } = verdict;
            let unit = if unit.is_empty() { String::new() } else { format!(", {unit}") };
            let [median, rise, allowed, per_day, detectable] =
                [median, rise, allowed, per_day, detectable_per_day].map(|value| signed(*value));
            let verdict = if *is_flat { "flat" } else { "**rises**" };
            writeln!(f, "| {metric}{unit} | {median} | {rise} | {allowed} | {per_day} | {detectable} | {verdict} |")?;
        }
        Ok(())
    }
}

fn signed(value: f64) -> String {
    if value < 0.0 { format!("-{}", number(-value)) } else { number(value) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(result: ServerResult, want: &[&str]) {
        assert_eq!(ServerResult { server: "Orlop", ..result }.problems(), want);
    }

    #[test]
    fn failures_and_skipped_operations_are_problems() {
        let result = |operations, errors, first_error: Option<&str>| ServerResult {
            operations,
            operations_due: 10_000,
            rate: 100,
            errors,
            first_error: first_error.map(str::to_owned),
            ..ServerResult::default()
        };
        check(result(10_000, 0, None), &[]);
        check(result(8_800, 0, None), &[]);
        let skipped = "Orlop: 1201 of 10000 operations were skipped because earlier ones took too long";
        check(result(8_799, 0, None), &[skipped]);
        check(result(8_000, 2_000, Some("put: gone")), &["Orlop: 2000 operations failed: put: gone"]);
        check(result(10_000, 0, Some("the watch stream ended")), &["Orlop: a watch failed: the watch stream ended"]);
    }

    #[test]
    fn skipped_operations_are_judged_from_30_seconds_on() {
        let result = |operations_due| ServerResult { operations_due, rate: 100, ..ServerResult::default() };
        check(result(2_999), &[]);
        check(result(3_000), &["Orlop: 3000 of 3000 operations were skipped because earlier ones took too long"]);
    }
}
