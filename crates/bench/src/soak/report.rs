//! What came of it: a table in Markdown, or JSON with every sample.

use std::fmt;

use serde::Serialize;

use super::{gauges::Sample, verdict::Verdict};
use crate::compare::page::number;

#[derive(Debug, Serialize)]
pub struct Outcome {
    pub scenario: &'static str,
    pub minutes: f64,
    pub rate: usize,
    pub pods: usize,
    pub compact_every_secs: f64,
    pub compact_behind_secs: f64,
    /// The user ended the run before its time.
    pub interrupted: bool,
    pub servers: Vec<Lived>,
}

/// What one server went through.
#[derive(Debug, Serialize)]
pub struct Lived {
    pub server: &'static str,
    pub operations: u64,
    pub events: u64,
    pub compactions: u64,
    /// Clients that came and went.
    pub visits: u64,
    pub errors: u64,
    pub first_error: Option<String>,
    pub figures: Vec<Verdict>,
    /// What was still there when all clients were gone.
    pub left_behind: Vec<String>,
    pub samples: Vec<Sample>,
}

impl Outcome {
    /// A line for each thing that is not as it should be.
    pub fn complaints(&self) -> Vec<String> {
        self.servers.iter().flat_map(Lived::complaints).collect()
    }
}

impl Lived {
    fn complaints(&self) -> Vec<String> {
        let rising = self.figures.iter().filter(|verdict| !verdict.is_flat).map(|verdict| {
            let Verdict { figure, unit, rise, allowed, .. } = verdict;
            format!("{figure} rose by {} {unit}, allowed are {}", number(*rise), number(*allowed))
        });
        let left = self.left_behind.iter().map(|what| format!("left behind: {what}"));
        let error = self.first_error.iter().map(|error| format!("{} operations failed: {error}", self.errors));
        rising.chain(left).chain(error).map(|what| format!("{}: {what}", self.server)).collect()
    }
}

impl fmt::Display for Outcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { minutes, rate, pods, compact_every_secs: every, compact_behind_secs: behind, .. } = self;
        writeln!(
            f,
            "{} minutes, {rate} operations a second and {pods} pods on each server, a compaction every {} s at the revision of {} s before.",
            number(*minutes),
            number(*every),
            number(*behind),
        )?;
        for lived in &self.servers {
            lived.fmt(f)?;
        }
        for complaint in self.complaints() {
            writeln!(f, "\n**{complaint}**")?;
        }
        if self.interrupted {
            writeln!(f, "\ninterrupted: only what was seen so far")?;
        }
        Ok(())
    }
}

impl fmt::Display for Lived {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { server, operations, events, compactions, visits, errors, .. } = self;
        let [operations, events, compactions, visits, errors] =
            [operations, events, compactions, visits, errors].map(|count| number(*count as f64));
        writeln!(
            f,
            "\n**{server}**: {operations} operations, {events} events, {compactions} compactions, {visits} clients came and \
             went, {errors} errors.\n"
        )?;
        if self.figures.is_empty() {
            return writeln!(f, "Too short to tell whether anything rises.");
        }
        writeln!(f, "| | median | rise | allowed | a day, at this slope | a leak is seen from, a day | |")?;
        writeln!(f, "|---|---|---|---|---|---|---|")?;
        for verdict in &self.figures {
            let Verdict { figure, unit, median, rise, allowed, per_day, seen_from_per_day, is_flat } = verdict;
            let unit = if unit.is_empty() { String::new() } else { format!(", {unit}") };
            let [median, rise, allowed, per_day, from] =
                [median, rise, allowed, per_day, seen_from_per_day].map(|value| signed(*value));
            let verdict = if *is_flat { "flat" } else { "**rises**" };
            writeln!(f, "| {figure}{unit} | {median} | {rise} | {allowed} | {per_day} | {from} | {verdict} |")?;
        }
        Ok(())
    }
}

fn signed(value: f64) -> String {
    if value < 0.0 { format!("-{}", number(-value)) } else { number(value) }
}
