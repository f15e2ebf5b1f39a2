//! `orlop bench compare`: Orlop on SQLite, Orlop on Postgres and etcd under the same loads on one machine.
//!
//! A trial starts one server without data, runs the loads of one group on it and stops it. The servers alternate within
//! a round, and there are several rounds, each of which begins with another server, so that a temporarily slow machine
//! affects all servers; the result is the median. The speed of the machine is measured before and after each trial
//! ([`machine::cpu_speed`]). A trial on a slow machine is repeated, within a time limit; if that does not help, the
//! report says so.
//!
//! The load generator is `orlop bench` in a separate process. All servers listen on 127.0.0.1 and sync their commits.
//! Their data is in one temporary directory, which is removed at the end.

mod groups;
mod machine;
mod page;
pub mod plot;
mod postgres;
mod process;
mod results;
pub mod server;
pub mod server_kind;
pub mod test_bed;
mod trial;

use std::{path::PathBuf, time::Duration};

use tokio::time::Instant;

use self::{
    groups::Group,
    machine::Machine,
    page::Page,
    results::{Results, Trial},
    server_kind::ServerKind,
    test_bed::{TestBed, TestBedOptions},
};
use crate::{args::Common, error::Error, interrupt::Interrupt, output};

// Headings of `--help`.
const SERVERS: &str = "Servers";
pub const LOADS: &str = "Loads";
pub const OUTPUT: &str = "Output";
/// Help of the common flag `--duration`, which has another default here.
pub const DURATION_HELP: &str = "Duration of each load, such as 500ms or 2s [default: 500ms]";

#[derive(Debug, clap::Args)]
pub struct Compare {
    /// Servers to compare, separated by commas
    #[arg(help_heading = SERVERS, long, value_enum, value_delimiter = ',', default_value = "etcd,sqlite,postgres", value_name = "SERVERS")]
    servers: Vec<ServerKind>,

    /// Groups of loads to run, separated by commas [default: all]
    #[arg(help_heading = LOADS, long, value_delimiter = ',', value_parser = groups::parse_name, value_name = "GROUPS")]
    groups: Vec<String>,

    /// Number of rounds
    #[arg(help_heading = LOADS, long, default_value = "3", value_parser = clap::value_parser!(u32).range(1..=99), value_name = "N")]
    rounds: u32,

    /// Program file of etcd [default: that of scripts/fetch-etcd, else that in PATH]
    #[arg(help_heading = SERVERS, long, env = "ORLOP_ETCD", value_name = "FILE")]
    etcd: Option<PathBuf>,

    /// Directory of initdb and postgres [default: that of initdb in PATH, else that of the Debian package]
    #[arg(help_heading = SERVERS, long, value_name = "DIR")]
    postgres_programs: Option<PathBuf>,

    /// Directory for the temporary data of the servers; the comparison measures its disk
    #[arg(help_heading = SERVERS, long, default_value = ".", value_name = "DIR")]
    work_dir: PathBuf,

    /// Markdown page whose tables are replaced; the plots are written to the directory of the page [default: standard
    /// output, no plots]
    #[arg(help_heading = OUTPUT, long, conflicts_with = "json", value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Duration of each load, unless `--duration` is given.
const DURATION_DEFAULT: Duration = Duration::from_millis(500);

/// Minimum duration of each load: the unit in which the load generator receives it.
const DURATION_MIN: Duration = Duration::from_millis(1);

/// Minimum CPU speed during a trial, as a share of the median. A slower trial is repeated.
const CPU_SPEED_MIN: f64 = 0.85;

/// Maximum number of repetitions of a trial.
const REPETITIONS_MAX: usize = 2;
/// Maximum time of all repetitions together, so that they do not make a comparison much longer.
const REPETITION_TIME_MAX: Duration = Duration::from_secs(60);

impl Compare {
    pub async fn run(&self, common: &Common) -> Result<(), Error> {
        common.reject_target()?;
        let duration = common.duration.unwrap_or(DURATION_DEFAULT);
        let groups = self.selected_groups(duration)?;
        let page = self.output.as_ref().map(|path| Page::open(path)).transpose()?;
        let interrupt = Interrupt::listen();
        let opened = async {
            let test_bed = TestBed::open(self.test_bed_options()).await?;
            let machine = Machine::describe(&test_bed)?;
            Ok::<_, Error>((test_bed, machine))
        };
        let (test_bed, machine) = tokio::select! {
            opened = opened => opened?,
            () = interrupt.wait() => return Err(Error::Interrupted),
        };
        let measurement = Measurement { compare: self, test_bed: &test_bed, duration, interrupt: &interrupt };
        let mut results = Results::default();
        let measured = measurement.run(&groups, &mut results).await;
        test_bed.close().await;
        match page {
            _ if results.tables.is_empty() => return measured.and(Err(Error::Interrupted)),
            // Incomplete results do not replace those on the page.
            Some(page) if !results.interrupted && measured.is_ok() => page.write(&machine, &results)?,
            _ if common.json => output::print(&output::json_line(&results)?)?,
            _ => output::print(&page::text(&machine, &results, None))?,
        }
        measured
    }

    /// Returns the selected groups. Fails if nothing can be measured.
    fn selected_groups(&self, duration: Duration) -> Result<Vec<Group>, Error> {
        if duration < DURATION_MIN {
            return Err(Error::Flags(format!("--duration must be at least {DURATION_MIN:?}")));
        }
        let can_run = |group: &Group| self.servers.iter().any(|kind| kind.instances_max() >= group.instances);
        let is_selected = |group: &Group| self.groups.iter().any(|name| name == group.name);
        let mut groups = groups::all();
        if self.groups.is_empty() {
            groups.retain(can_run);
            return Ok(groups);
        }
        groups.retain(is_selected);
        match groups.iter().find(|group| !can_run(group)) {
            Some(group) => Err(Error::Flags(format!(
                "--servers contains no server that runs in several instances, group=`{}` instances={}",
                group.name, group.instances
            ))),
            None => Ok(groups),
        }
    }

    fn test_bed_options(&self) -> TestBedOptions<'_> {
        TestBedOptions {
            work_dir: &self.work_dir,
            servers: &self.servers,
            etcd: self.etcd.as_deref(),
            postgres_programs: self.postgres_programs.as_deref(),
            postgres_settings: &[],
        }
    }
}

/// The measurement of the selected groups.
struct Measurement<'a> {
    compare: &'a Compare,
    test_bed: &'a TestBed,
    duration: Duration,
    interrupt: &'a Interrupt,
}

impl Measurement<'_> {
    /// Runs the groups. An interrupt or an error ends the measurement; the results are those of the completed trials, in
    /// the second case those of the groups before.
    async fn run(&self, groups: &[Group], results: &mut Results) -> Result<(), Error> {
        for group in groups {
            self.measure_group(group, results).await?;
            if results.interrupted {
                break;
            }
        }
        Ok(())
    }

    async fn measure_group(&self, group: &Group, results: &mut Results) -> Result<(), Error> {
        let (mut trials, mut elapsed) = (Vec::new(), Vec::new());
        'rounds: for round in 1..=group.rounds(self.compare.rounds) {
            for kind in servers_of_round(&self.compare.servers, group.instances, round) {
                let began = Instant::now();
                let Some(trial) = self.trial(kind, group, results).await? else { break 'rounds };
                results.cpu_speeds.push(trial.cpu_speed);
                eprintln!("{}, round {round}, {}: {:.1} s", group.name, kind.name(), began.elapsed().as_secs_f64());
                trials.push((kind, trial));
                elapsed.push(began.elapsed());
            }
        }
        if !results.interrupted {
            self.repeat_slow_trials(group, &mut trials, &elapsed, results).await?;
        }
        let speed_min = results.median_cpu_speed() * CPU_SPEED_MIN;
        let slow_trials = trials.iter().filter(|(_, trial)| trial.cpu_speed < speed_min).count();
        if !trials.is_empty() {
            results.add(group, trials, slow_trials);
        }
        Ok(())
    }

    /// `elapsed` contains the duration of each trial.
    async fn repeat_slow_trials(
        &self,
        group: &Group,
        trials: &mut [(ServerKind, Trial)],
        elapsed: &[Duration],
        results: &mut Results,
    ) -> Result<(), Error> {
        for ((kind, trial), elapsed) in trials.iter_mut().zip(elapsed) {
            for _ in 0..REPETITIONS_MAX {
                if trial.cpu_speed >= results.median_cpu_speed() * CPU_SPEED_MIN
                    || results.repetition_time + *elapsed > REPETITION_TIME_MAX
                {
                    break;
                }
                eprintln!("{}, {}: repeated because the machine was slow", group.name, kind.name());
                results.repeated_trials += 1;
                results.repetition_time += *elapsed;
                let Some(repeated) = self.trial(*kind, group, results).await? else { return Ok(()) };
                if repeated.cpu_speed > trial.cpu_speed {
                    *trial = repeated;
                }
            }
        }
        Ok(())
    }

    /// Runs a trial. Returns `None` if it is interrupted: its servers are killed.
    async fn trial(&self, kind: ServerKind, group: &Group, results: &mut Results) -> Result<Option<Trial>, Error> {
        tokio::select! {
            // A signal may also have reached the servers and the load.
            biased;
            () = self.interrupt.wait() => {
                results.interrupted = true;
                Ok(None)
            }
            trial = trial::run(self.test_bed, kind, group, self.duration) => trial.map(Some),
        }
    }
}

/// Returns the servers that run in this number of instances, in the order of the round. The first round has the number
/// 1. Each round begins with another server, so that none is always the first.
fn servers_of_round(selected: &[ServerKind], instances: usize, round: u32) -> Vec<ServerKind> {
    let mut servers: Vec<ServerKind> =
        selected.iter().copied().filter(|kind| kind.instances_max() >= instances).collect();
    let first = (round as usize - 1) % servers.len().max(1);
    servers.rotate_left(first);
    servers
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_round_begins_with_another_server() {
        use ServerKind::{Etcd, Postgres, Sqlite};
        for (instances, round, want) in [
            (1, 1, &[Etcd, Sqlite, Postgres][..]),
            (1, 2, &[Sqlite, Postgres, Etcd]),
            (1, 3, &[Postgres, Etcd, Sqlite]),
            (1, 4, &[Etcd, Sqlite, Postgres]),
            (3, 1, &[Etcd, Postgres]),
            (3, 2, &[Postgres, Etcd]),
        ] {
            assert_eq!(servers_of_round(&[Etcd, Sqlite, Postgres], instances, round), want, "{instances} {round}");
        }
        assert!(servers_of_round(&[Sqlite], 3, 1).is_empty());
    }
}
