//! What was measured: samples by load, figure and server, and their medians.

use std::time::Duration;

use serde::Serialize;

use super::{
    groups::{Aim, Figure, Group},
    server::Kind,
};

/// Less than this is nothing, and nothing is a multiple of nothing.
const LEAST_COMPARED: f64 = 0.01;

/// What a server did in one turn.
pub struct Sample {
    /// The machine's pace meanwhile, see [`super::machine::pace`].
    pub pace: f64,
    /// By step and figure.
    pub steps: Vec<Vec<f64>>,
}

#[derive(Debug, Default, Serialize)]
pub struct Figures {
    pub tables: Vec<Table>,
    /// Turns that were taken again, and how long that took or nearly.
    pub retaken: usize,
    #[serde(skip)]
    pub retaking: Duration,
    /// Of each turn.
    pub pace: Vec<f64>,
}

/// A group's figures.
#[derive(Debug, Serialize)]
pub struct Table {
    pub name: &'static str,
    pub title: String,
    pub rounds: usize,
    /// Turns with a slow machine, although they were taken again where there was time.
    pub noisy_turns: usize,
    pub rows: Vec<Row>,
}

#[derive(Debug, Serialize)]
pub struct Row {
    pub load: String,
    pub unit: &'static str,
    #[serde(skip)]
    pub figure: Figure,
    pub cells: Vec<Cell>,
}

/// One server's samples of one figure.
#[derive(Debug, Serialize)]
pub struct Cell {
    pub server: Kind,
    /// A round each.
    pub samples: Vec<f64>,
}

impl Figures {
    /// The pace that most turns had, or better.
    pub fn usual_pace(&self) -> f64 {
        median(&self.pace)
    }

    pub fn add(&mut self, group: &Group, turns: Vec<(Kind, Sample)>, noisy_turns: usize) {
        let mut servers: Vec<Kind> = Vec::new();
        for (kind, _) in &turns {
            if !servers.contains(kind) {
                servers.push(*kind);
            }
        }
        let of = |server: Kind| turns.iter().filter(move |(kind, _)| *kind == server).map(|(_, sample)| sample);
        let rows =
            group.steps.iter().enumerate().flat_map(|(step, load)| {
                load.figures.iter().enumerate().map(move |(at, figure)| (step, at, load, figure))
            });
        let rows = rows.map(|(step, at, load, figure)| Row {
            load: load.title.clone(),
            unit: figure.unit,
            figure: figure.clone(),
            cells: servers
                .iter()
                .map(|server| Cell {
                    server: *server,
                    samples: of(*server).map(|sample| sample.steps[step][at]).collect(),
                })
                .collect(),
        });
        let rows = rows.collect();
        let rounds = turns.len() / servers.len().max(1);
        self.tables.push(Table { name: group.name, title: group.title.clone(), rounds, noisy_turns, rows });
    }
}

impl Table {
    pub fn servers(&self) -> Vec<Kind> {
        self.rows.first().map(|row| row.cells.iter().map(|cell| cell.server).collect()).unwrap_or_default()
    }
}

impl Row {
    pub fn cell(&self, server: Kind) -> Option<&Cell> {
        self.cells.iter().find(|cell| cell.server == server)
    }

    /// How many times as good as etcd's the server's figure is; `None` where they cannot be compared.
    pub fn times_etcd(&self, server: Kind) -> Option<f64> {
        let (own, etcd) = (self.cell(server)?.median(), self.cell(Kind::Etcd)?.median());
        if own.min(etcd) < LEAST_COMPARED {
            return None;
        }
        let times = if self.figure.of.is_better_when_more() { own / etcd } else { etcd / own };
        (server != Kind::Etcd).then_some(times)
    }

    /// Whether the server does what Orlop aims at; `None` where there is no aim, or nothing to compare with.
    pub fn reaches_aim(&self, server: Kind) -> Option<bool> {
        Some(match self.figure.aim? {
            Aim::Times(sqlite, postgres) => {
                self.times_etcd(server)? >= if server == Kind::Sqlite { sqlite } else { postgres }
            }
            Aim::Better => self.times_etcd(server)? >= 1.0,
            Aim::AtMost(most) => self.cell(server)?.median() <= most,
        })
    }
}

impl Cell {
    pub fn median(&self) -> f64 {
        median(&self.samples)
    }

    /// From the least to the most, as a share of the median; 0 of next to nothing.
    pub fn spread(&self) -> f64 {
        if self.median() < LEAST_COMPARED {
            return 0.0;
        }
        let least = self.samples.iter().copied().fold(f64::INFINITY, f64::min);
        let most = self.samples.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        (most - least) / self.median()
    }
}

/// 0 of nothing.
fn median(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let middle = sorted.len() / 2;
    match sorted.len() {
        0 => 0.0,
        len if len % 2 == 1 => sorted[middle],
        _ => f64::midpoint(sorted[middle - 1], sorted[middle]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::compare::groups::Of;

    fn row(of: Of, aim: Option<Aim>, etcd: &[f64], sqlite: &[f64]) -> Row {
        let cell = |server, samples: &[f64]| Cell { server, samples: samples.to_vec() };
        let figure = Figure { unit: "", of, aim };
        Row { load: String::new(), unit: "", figure, cells: vec![cell(Kind::Etcd, etcd), cell(Kind::Sqlite, sqlite)] }
    }

    #[test]
    fn median_and_spread() {
        for (samples, want) in [(&[][..], 0.0), (&[3.0], 3.0), (&[9.0, 1.0, 2.0], 2.0), (&[1.0, 2.0, 3.0, 9.0], 2.5)] {
            assert_eq!(median(samples), want, "{samples:?}");
        }
        let cell = |samples: &[f64]| Cell { server: Kind::Etcd, samples: samples.to_vec() };
        assert_eq!(cell(&[9.0, 10.0, 12.0]).spread(), 0.3);
        assert_eq!(cell(&[]).spread(), 0.0);
        assert_eq!(cell(&[0.001, 0.001, 3.0]).spread(), 0.0);
    }

    #[test]
    fn more_is_better_of_rates_and_less_of_the_rest() {
        let rates = row(Of::PerSec("put"), None, &[10.0], &[20.0]);
        assert_eq!(rates.times_etcd(Kind::Sqlite), Some(2.0));
        assert_eq!(rates.times_etcd(Kind::Etcd), None);
        assert_eq!(rates.times_etcd(Kind::Postgres), None);
        assert_eq!(row(Of::P99("put"), None, &[10.0], &[20.0]).times_etcd(Kind::Sqlite), Some(0.5));
        assert_eq!(row(Of::Fact("events_per_sec"), None, &[10.0], &[20.0]).times_etcd(Kind::Sqlite), Some(2.0));
        assert_eq!(row(Of::P99("put"), None, &[10.0], &[0.0]).times_etcd(Kind::Sqlite), None);
    }

    #[test]
    fn aims_are_reached_or_missed() {
        let reaches = |of, aim, etcd, sqlite| row(of, aim, &[etcd], &[sqlite]).reaches_aim(Kind::Sqlite);
        assert_eq!(reaches(Of::PerSec("put"), Some(Aim::Times(2.0, 9.0)), 10.0, 20.0), Some(true));
        assert_eq!(reaches(Of::PerSec("put"), Some(Aim::Times(2.1, 1.0)), 10.0, 20.0), Some(false));
        assert_eq!(reaches(Of::P99("put"), Some(Aim::Better), 10.0, 9.0), Some(true));
        assert_eq!(reaches(Of::P99("put"), Some(Aim::Better), 10.0, 11.0), Some(false));
        assert_eq!(reaches(Of::Start, Some(Aim::AtMost(3.0)), 9.0, 3.0), Some(true));
        assert_eq!(reaches(Of::Start, None, 9.0, 3.0), None);
    }
}
