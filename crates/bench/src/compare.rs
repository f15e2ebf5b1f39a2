//! `orlop bench compare`: Orlop on SQLite, Orlop on Postgres and etcd under the same loads on one machine.
//!
//! A trial starts one server without data, runs the loads of one group on it and stops it. The servers alternate within
//! a round, and there are several rounds, so that a temporarily slow machine affects all servers; the result is the
//! median. The speed of the machine is measured before and after each trial ([`machine::cpu_speed`]). A trial on a slow
//! machine is repeated, within a time limit; if that does not help, the report says so.
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
    results::Results,
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

/// Minimum CPU speed during a trial, as a share of the median. A slower trial is repeated.
const CPU_SPEED_MIN: f64 = 0.85;

/// Maximum number of repetitions of a trial.
const REPETITIONS_MAX: usize = 2;
/// Maximum time of all repetitions together, so that a comparison takes about a quarter of an hour.
const REPETITION_TIME_MAX: Duration = Duration::from_secs(60);

impl Compare {
    pub async fn run(&self, common: &Common) -> Result<(), Error> {
        common.reject_target()?;
        let page = self.output.as_ref().map(|path| Page::open(path)).transpose()?;
        let interrupt = Interrupt::listen();
        let compared = async {
            let test_bed = TestBed::open(self.test_bed_options()).await?;
            let machine = Machine::describe(&test_bed)?;
            let results = self.measure(&test_bed, common.duration.unwrap_or(DURATION_DEFAULT)).await?;
            test_bed.close().await;
            Ok::<_, Error>((machine, results))
        };
        // If the future is dropped, the servers are killed.
        let (machine, results) = tokio::select! {
            compared = compared => compared?,
            () = interrupt.wait() => return Err(Error::Interrupted),
        };
        match page {
            Some(page) => page.write(&machine, &results),
            None if common.json => output::print(&output::json_line(&results)?),
            None => output::print(&page::text(&machine, &results, None)),
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

    async fn measure(&self, test_bed: &TestBed, duration: Duration) -> Result<Results, Error> {
        let mut results = Results::default();
        for group in groups::all() {
            if self.groups.is_empty() || self.groups.iter().any(|name| name == group.name) {
                self.measure_group(test_bed, &group, duration, &mut results).await?;
            }
        }
        Ok(results)
    }

    async fn measure_group(
        &self,
        test_bed: &TestBed,
        group: &Group,
        duration: Duration,
        results: &mut Results,
    ) -> Result<(), Error> {
        let (mut trials, mut elapsed) = (Vec::new(), Vec::new());
        for round in 1..=group.rounds(self.rounds) {
            for kind in self.servers.iter().filter(|kind| kind.instances_max() >= group.instances) {
                let began = Instant::now();
                let trial = trial::run(test_bed, *kind, group, duration).await?;
                results.cpu_speeds.push(trial.cpu_speed);
                eprintln!("{}, round {round}, {}: {:.1} s", group.name, kind.name(), began.elapsed().as_secs_f64());
                trials.push((*kind, trial));
                elapsed.push(began.elapsed());
            }
        }
        for ((kind, trial), elapsed) in trials.iter_mut().zip(elapsed) {
            for _ in 0..REPETITIONS_MAX {
                if trial.cpu_speed >= results.median_cpu_speed() * CPU_SPEED_MIN
                    || results.repetition_time + elapsed > REPETITION_TIME_MAX
                {
                    break;
                }
                eprintln!("{}, {}: repeated because the machine was slow", group.name, kind.name());
                results.repeated_trials += 1;
                results.repetition_time += elapsed;
                let repeated = trial::run(test_bed, *kind, group, duration).await?;
                if repeated.cpu_speed > trial.cpu_speed {
                    *trial = repeated;
                }
            }
        }
        let speed_min = results.median_cpu_speed() * CPU_SPEED_MIN;
        let slow_trials = trials.iter().filter(|(_, trial)| trial.cpu_speed < speed_min).count();
        results.add(group, trials, slow_trials);
        Ok(())
    }
}
