//! The results: samples by load, metric and server, and their medians.

use std::time::Duration;

use serde::Serialize;

use super::{
    groups::{Group, Metric, PerformanceTarget},
    server_kind::ServerKind,
};
use crate::report::median;

/// Minimum value for ratios. Smaller values are considered zero.
const RATIO_VALUE_MIN: f64 = 0.01;

/// The measurements of one trial.
pub struct Trial {
    /// The lower of the CPU speeds before and after the trial, see [`super::machine::cpu_speed`].
    pub cpu_speed: f64,
    /// By step and metric.
    pub steps: Vec<Vec<f64>>,
}

#[derive(Debug, Default, Serialize)]
pub struct Results {
    pub tables: Vec<Table>,
    /// Whether the user ended the comparison: the results are those of the completed trials.
    pub interrupted: bool,
    /// Number of repetitions, after trials during which the machine was slow.
    pub repeated_trials: usize,
    /// Time spent on repetitions, estimated from the first trials.
    #[serde(skip)]
    pub repetition_time: Duration,
    /// CPU speed during each trial.
    pub cpu_speeds: Vec<f64>,
}

/// The results of a group.
#[derive(Debug, Serialize)]
pub struct Table {
    pub name: &'static str,
    pub title: String,
    /// Number of instances of the server.
    pub instances: usize,
    pub rounds: usize,
    /// Number of trials on a slow machine, after the repetitions.
    pub slow_trials: usize,
    pub rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
pub struct Row {
    pub load: String,
    pub unit: &'static str,
    #[serde(skip)]
    pub metric: Metric,
    pub cells: Vec<Cell>,
}

/// The samples of one metric of one server.
#[derive(Debug, Serialize)]
pub struct Cell {
    pub server: ServerKind,
    /// One per round.
    pub samples: Vec<f64>,
}

impl Results {
    pub fn median_cpu_speed(&self) -> f64 {
        median(&self.cpu_speeds)
    }

    pub fn add(&mut self, group: &Group, trials: Vec<(ServerKind, Trial)>, slow_trials: usize) {
        let mut servers: Vec<ServerKind> = Vec::new();
        for (kind, _) in &trials {
            if !servers.contains(kind) {
                servers.push(*kind);
            }
        }
        let trials_of =
            |server: ServerKind| trials.iter().filter(move |(kind, _)| *kind == server).map(|(_, trial)| trial);
        let rows =
            group.steps.iter().enumerate().flat_map(|(step, load)| {
                load.metrics.iter().enumerate().map(move |(at, metric)| (step, at, load, metric))
            });
        let rows = rows.map(|(step, at, load, metric)| Row {
            load: load.title.clone(),
            unit: metric.unit,
            metric: metric.clone(),
            cells: servers
                .iter()
                .map(|server| Cell {
                    server: *server,
                    samples: trials_of(*server).map(|trial| trial.steps[step][at]).collect(),
                })
                .collect(),
        });
        let rows = rows.collect();
        let rounds = trials.len() / servers.len().max(1);
        let (name, title, instances) = (group.name, group.title.clone(), group.instances);
        self.tables.push(Table { name, title, instances, rounds, slow_trials, rows });
    }
}

impl Table {
    pub fn servers(&self) -> Vec<ServerKind> {
        self.rows.first().map(|row| row.cells.iter().map(|cell| cell.server).collect()).unwrap_or_default()
    }
}

impl Row {
    pub fn cell(&self, server: ServerKind) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.server == server)
    }

    /// Returns the ratio to etcd; above 1 is better than etcd. `None` if the values cannot be compared.
    pub fn ratio_to_etcd(&self, server: ServerKind) -> Option<f64> {
        let (own, etcd) = (self.cell(server)?.median(), self.cell(ServerKind::Etcd)?.median());
        if own.min(etcd) < RATIO_VALUE_MIN {
            return None;
        }
        let ratio = if self.metric.source.is_higher_better() { own / etcd } else { etcd / own };
        (server != ServerKind::Etcd).then_some(ratio)
    }

    /// Returns whether the server meets the target; `None` without a target, or without a value to compare with.
    pub fn meets_target(&self, server: ServerKind) -> Option<bool> {
        Some(match self.metric.target? {
            PerformanceTarget::EtcdRatio(sqlite, postgres) => {
                self.ratio_to_etcd(server)? >= if server == ServerKind::Sqlite { sqlite } else { postgres }
            }
            PerformanceTarget::NotWorse => self.ratio_to_etcd(server)? >= 1.0,
            PerformanceTarget::AtMost(max) => self.cell(server)?.median() <= max,
        })
    }
}

impl Cell {
    pub fn median(&self) -> f64 {
        median(&self.samples)
    }

    /// Returns the difference between the highest and the lowest sample, as a share of the median; 0 if the median is
    /// about 0.
    pub fn spread(&self) -> f64 {
        if self.median() < RATIO_VALUE_MIN {
            return 0.0;
        }
        let min = self.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let max = self.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (max - min) / self.median()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::groups::Source;

    fn row(source: Source, target: Option<PerformanceTarget>, etcd: &[f64], sqlite: &[f64]) -> Row {
        let cell = |server, samples: &[f64]| Cell { server, samples: samples.to_vec() };
        let metric = Metric { unit: "", source, target };
        Row {
            load: String::new(),
            unit: "",
            metric,
            cells: vec![cell(ServerKind::Etcd, etcd), cell(ServerKind::Sqlite, sqlite)],
        }
    }

    #[test]
    fn spread_is_a_share_of_the_median() {
        let cell = |samples: &[f64]| Cell { server: ServerKind::Etcd, samples: samples.to_vec() };
        assert_eq!(cell(&[9.0, 10.0, 12.0]).spread(), 0.3);
        assert_eq!(cell(&[]).spread(), 0.0);
        assert_eq!(cell(&[0.001, 0.001, 3.0]).spread(), 0.0);
    }

    #[test]
    fn ratio_above_one_is_better_than_etcd() {
        let rates = row(Source::PerSec("put"), None, &[10.0], &[20.0]);
        assert_eq!(rates.ratio_to_etcd(ServerKind::Sqlite), Some(2.0));
        assert_eq!(rates.ratio_to_etcd(ServerKind::Etcd), None);
        assert_eq!(rates.ratio_to_etcd(ServerKind::Postgres), None);
        assert_eq!(row(Source::P99("put"), None, &[10.0], &[20.0]).ratio_to_etcd(ServerKind::Sqlite), Some(0.5));
        assert_eq!(
            row(Source::ReportField("events_per_sec"), None, &[10.0], &[20.0]).ratio_to_etcd(ServerKind::Sqlite),
            Some(2.0)
        );
        assert_eq!(row(Source::P99("put"), None, &[10.0], &[0.0]).ratio_to_etcd(ServerKind::Sqlite), None);
    }

    #[test]
    fn targets_are_met_or_missed() {
        let meets =
            |source, target, etcd, sqlite| row(source, target, &[etcd], &[sqlite]).meets_target(ServerKind::Sqlite);
        assert_eq!(meets(Source::PerSec("put"), Some(PerformanceTarget::EtcdRatio(2.0, 9.0)), 10.0, 20.0), Some(true));
        assert_eq!(meets(Source::PerSec("put"), Some(PerformanceTarget::EtcdRatio(2.1, 1.0)), 10.0, 20.0), Some(false));
        assert_eq!(meets(Source::P99("put"), Some(PerformanceTarget::NotWorse), 10.0, 9.0), Some(true));
        assert_eq!(meets(Source::P99("put"), Some(PerformanceTarget::NotWorse), 10.0, 11.0), Some(false));
        assert_eq!(meets(Source::StartTime, Some(PerformanceTarget::AtMost(3.0)), 9.0, 3.0), Some(true));
        assert_eq!(meets(Source::StartTime, None, 9.0, 3.0), None);
    }
}
