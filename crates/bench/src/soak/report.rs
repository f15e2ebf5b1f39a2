//! The result of a soak test, as a table in Markdown or as JSON with all samples.

use std::fmt;

use serde::Serialize;

use super::{metrics::Sample, verdict::Verdict};
use crate::output::number;

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
#[derive(Debug, Serialize)]
pub struct ServerResult {
    pub server: &'static str,
    pub operations: u64,
    pub events: u64,
    pub compactions: u64,
    /// Number of short-lived clients.
    pub visits: u64,
    pub errors: u64,
    pub first_error: Option<String>,
    pub verdicts: Vec<Verdict>,
    /// Resources that the server had not released after all clients had disconnected.
    pub left_behind: Vec<String>,
    pub samples: Vec<Sample>,
}

impl SoakReport {
    /// Returns one line for each failed check.
    pub fn problems(&self) -> Vec<String> {
        self.servers.iter().flat_map(ServerResult::problems).collect()
    }
}

impl ServerResult {
    fn problems(&self) -> Vec<String> {
        let rising = self.verdicts.iter().filter(|verdict| !verdict.is_flat).map(|verdict| {
            let Verdict { metric, unit, rise, allowed, .. } = verdict;
            format!("{metric} rose by {} {unit}, allowed: {}", number(*rise), number(*allowed))
        });
        let left = self.left_behind.iter().map(|resource| format!("not released: {resource}"));
        let error = self.first_error.iter().map(|error| format!("{} operations failed: {error}", self.errors));
        rising.chain(left).chain(error).map(|problem| format!("{}: {problem}", self.server)).collect()
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
