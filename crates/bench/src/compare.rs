//! `orlop bench compare`: Orlop on SQLite, Orlop on Postgres and a real etcd under the same loads on one machine.
//!
//! A group of loads is a turn: a server starts with no data, takes the group's loads one after another, and is gone. The
//! servers take turns within a round, and there are several rounds, so that what slows the machine for a while slows all
//! of them; what counts is the median. Before and after a turn the machine itself is timed ([`machine::pace`]); a turn
//! with a slow machine is taken again, as far as there is time, and where that does not help the page says so.
//!
//! The load comes from the same command in a process of its own, as a user would run it. Everything listens on
//! 127.0.0.1, syncs its commits, and lies in one folder, which is removed in the end.

mod figures;
mod groups;
mod machine;
pub(super) mod page;
pub(super) mod plot;
mod postgres;
pub(super) mod server;
mod turn;

use std::{io::Write as _, path::PathBuf, time::Duration};

use tokio::time::Instant;

use self::{
    figures::{Figures, Sample},
    groups::Group,
    machine::Machine,
    server::{Kind, Lab, Needs},
};
use super::{Error, args::Common, interrupt::Interrupt};

#[derive(Debug, clap::Args)]
pub struct Compare {
    /// Which servers
    #[arg(long, value_enum, value_delimiter = ',', default_value = "etcd,sqlite,postgres", value_name = "SERVERS")]
    servers: Vec<Kind>,

    /// Which groups of loads [default: all]
    #[arg(long, value_delimiter = ',', value_parser = groups::name, value_name = "GROUPS")]
    groups: Vec<String>,

    /// Rounds of each group
    #[arg(long, default_value = "3", value_parser = clap::value_parser!(u32).range(1..=99), value_name = "N")]
    rounds: u32,

    /// The etcd to compare with [default: the one of scripts/fetch-etcd, else the one on PATH]
    #[arg(long, env = "ORLOP_ETCD", value_name = "FILE")]
    etcd: Option<PathBuf>,

    /// Where initdb and postgres are [default: where PATH has initdb, else where Debian has it]
    #[arg(long, value_name = "FOLDER")]
    postgres_programs: Option<PathBuf>,

    /// Where the servers' data lies meanwhile: the disk that is measured
    #[arg(long, default_value = ".", value_name = "FOLDER")]
    work_dir: PathBuf,

    /// A page in Markdown whose figures are replaced, with its plots beside it [default: the standard output, no plots]
    #[arg(long, conflicts_with = "json", value_name = "FILE")]
    output: Option<PathBuf>,
}

/// Of each load, where --duration does not say.
const DURATION_DEFAULT: Duration = Duration::from_millis(500);

/// A turn below this share of the machine's usual pace is not trusted.
const PACE_MIN: f64 = 0.85;

/// How often a turn is taken again at most, and how long all that may take, as a run is to end in a quarter of an hour.
const RETRIES: usize = 2;
const RETRY_TIME: Duration = Duration::from_secs(60);

impl Compare {
    pub async fn run(&self, common: &Common) -> Result<(), Error> {
        common.refuse_a_target()?;
        let page = self.output.as_ref().map(|path| page::Page::open(path)).transpose()?;
        let interrupt = Interrupt::listen();
        let compared = async {
            let lab = Lab::open(self.needs()).await?;
            let machine = Machine::describe(&lab)?;
            let figures = self.measure(&lab, common.duration.unwrap_or(DURATION_DEFAULT)).await?;
            lab.close().await;
            Ok::<_, Error>((machine, figures))
        };
        // Servers end when they are dropped.
        let (machine, figures) = tokio::select! {
            compared = compared => compared?,
            () = interrupt.wait() => return Err(Error::Interrupted),
        };
        match page {
            Some(page) => page.write(&machine, &figures),
            None if common.json => print(&(serde_json::to_string(&figures).map_err(std::io::Error::from)? + "\n")),
            None => print(&page::text(&machine, &figures, None)),
        }
    }

    fn needs(&self) -> Needs<'_> {
        Needs {
            work_dir: &self.work_dir,
            servers: &self.servers,
            etcd: self.etcd.as_deref(),
            postgres_programs: self.postgres_programs.as_deref(),
            postgres_settings: &[],
        }
    }

    async fn measure(&self, lab: &Lab, duration: Duration) -> Result<Figures, Error> {
        let mut figures = Figures::default();
        for group in groups::all() {
            if self.groups.is_empty() || self.groups.iter().any(|name| name == group.name) {
                self.measure_group(lab, &group, duration, &mut figures).await?;
            }
        }
        Ok(figures)
    }

    async fn measure_group(
        &self,
        lab: &Lab,
        group: &Group,
        duration: Duration,
        figures: &mut Figures,
    ) -> Result<(), Error> {
        let (mut turns, mut took) = (Vec::new(), Vec::new());
        for round in 1..=group.rounds(self.rounds) {
            for kind in &self.servers {
                let began = Instant::now();
                let sample = turn::take(lab, *kind, group, duration).await?;
                figures.pace.push(sample.pace);
                eprintln!("{}, round {round}, {}: {:.1} s", group.name, kind.name(), began.elapsed().as_secs_f64());
                turns.push((*kind, sample));
                took.push(began.elapsed());
            }
        }
        for ((kind, samples), took) in turns.iter_mut().zip(took) {
            for _ in 0..RETRIES {
                if samples.pace >= figures.usual_pace() * PACE_MIN || figures.retaking + took > RETRY_TIME {
                    break;
                }
                eprintln!("{}, {} again, as the machine was slow", group.name, kind.name());
                figures.retaken += 1;
                figures.retaking += took;
                let again = turn::take(lab, *kind, group, duration).await?;
                if again.pace > samples.pace {
                    *samples = again;
                }
            }
        }
        let noisy = turns.iter().filter(|(_, samples)| samples.pace < figures.usual_pace() * PACE_MIN).count();
        figures.add(group, turns, noisy);
        Ok(())
    }
}

pub(super) fn print(text: &str) -> Result<(), Error> {
    let mut stdout = std::io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    Ok(stdout.flush()?)
}
