//! `orlop bench soak`: sends requests to a server for a long time, at a fixed rate below its capacity, and checks for
//! leaks.
//!
//! The load is the mix of operations of [`crate::kubernetes`]. In addition, short-lived clients create and abandon
//! connections, watches, leases and locks ([`churn`]), because leaks are most likely in cleanup. The store is compacted
//! periodically at an earlier revision, as kube-apiserver does. The number of live keys is constant, so the resources
//! that the server uses should be constant as well. They are sampled periodically ([`metrics`]). At the end a trend
//! line is fitted to each metric ([`verdict`]), and after all clients have disconnected the server must release their
//! resources.
//!
//! The number of pods is reduced if the load would not write each pod four times in the first third of the run. The
//! intervals depend on the duration ([`schedule`]): a run of an hour or more compacts every minute, at the revision of
//! five minutes ago. In a run shorter than an hour that revision is younger; in a run shorter than 15 minutes the
//! compactions and Postgres's autovacuum are also more frequent.

mod churn;
mod metrics;
mod plot;
mod report;
mod schedule;
mod server_run;
mod stats;
mod verdict;

use std::{path::PathBuf, sync::Arc, time::Duration};

use self::{
    report::{ServerResult, SoakReport},
    schedule::Schedule,
    server_run::ServerRun,
};
use orlop_client::Target;

use crate::{
    args::{Common, parse_count},
    bench::{Bench, log_in},
    compare::{
        server::Server,
        server_kind::ServerKind,
        test_bed::{TestBed, TestBedOptions},
    },
    error::Error,
    interrupt::Interrupt,
    kubernetes::Kubernetes,
    output,
};

#[derive(Debug, clap::Args)]
pub struct Soak {
    /// Databases of the servers to start, separated by commas; all servers run at the same time
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sqlite,postgres", value_name = "BACKENDS")]
    backend: Vec<Backend>,

    /// Duration in minutes
    #[arg(long, default_value = "60", value_parser = parse_minutes, value_name = "MINUTES")]
    minutes: f64,

    /// Operations per second on each server, of all clients together
    #[arg(long, default_value = "200", value_parser = parse_count, value_name = "N")]
    rate: usize,

    #[command(flatten)]
    cluster: Kubernetes,

    /// Directory of initdb and postgres [default: that of initdb in PATH, else that of the Debian package]
    #[arg(long, value_name = "DIR")]
    postgres_programs: Option<PathBuf>,

    /// Directory for the temporary data of the servers
    #[arg(long, default_value = ".", value_name = "DIR")]
    work_dir: PathBuf,

    /// Directory to write plots and a table in Markdown to [default: none are written]
    #[arg(long, value_name = "DIR")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    Sqlite,
    Postgres,
}

const CLIENTS: usize = 16;

/// Minimum number of writes to each pod in the first third of the run, which is not judged.
const POD_WRITES_MIN: u64 = 4;

impl Soak {
    pub async fn run(&self, common: &Common) -> Result<(), Error> {
        common.reject_limits("--minutes")?;
        let interrupt = Interrupt::listen();
        let report = if common.has_endpoints() {
            let bench = self.prepare(log_in(common).await?, common, &interrupt).await?;
            let result = self.server_run(bench, None).run("endpoints").await?;
            self.report(vec![result], &interrupt)
        } else {
            self.run_servers(common, &interrupt).await?
        };
        if let Some(folder) = &self.output {
            std::fs::create_dir_all(folder)?;
            plot::draw(&report, folder)?;
            std::fs::write(folder.join("soak.md"), report.to_string())?;
        }
        output::print(&if common.json { output::json_line(&report)? } else { report.to_string() })?;
        match report.problems() {
            problems if problems.is_empty() => Ok(()),
            problems => Err(Error::Soak(problems.join("; "))),
        }
    }

    /// Runs the tests of all servers at the same time, so that they take no longer than the test of one server.
    async fn run_servers(&self, common: &Common, interrupt: &Interrupt) -> Result<SoakReport, Error> {
        let kinds: Vec<ServerKind> = self.backend.iter().map(|backend| backend.kind()).collect();
        // Several visits between two compactions. With one, a visit that falls just before a compaction leaves the
        // deleted rows of a whole interval behind, and the table grows once by as much whenever the two drift apart.
        let settings = [format!("autovacuum_naptime={}s", (self.schedule().compact_interval.as_secs() / 4).max(1))];
        let test_bed = TestBed::open(TestBedOptions {
            work_dir: &self.work_dir,
            servers: &kinds,
            etcd: None,
            postgres_programs: self.postgres_programs.as_deref(),
            postgres_settings: &settings,
        });
        let test_bed = tokio::select! {
            test_bed = test_bed => test_bed?,
            () = interrupt.wait() => return Err(Error::Interrupted),
        };
        let mut runs = Vec::new();
        for &kind in &kinds {
            runs.push(self.run_server(&test_bed, kind, common, interrupt));
        }
        // The failure of one server does not end the tests of the others.
        let results = futures_util::future::join_all(runs).await.into_iter().zip(&kinds);
        let results =
            results.map(|(result, kind)| result.unwrap_or_else(|error| ServerResult::failed(kind.name(), &error)));
        let results = results.collect();
        test_bed.close().await;
        Ok(self.report(results, interrupt))
    }

    async fn run_server(
        &self,
        test_bed: &TestBed,
        kind: ServerKind,
        common: &Common,
        interrupt: &Interrupt,
    ) -> Result<ServerResult, Error> {
        let server = Server::start(test_bed, kind, &[], 1).await?;
        let endpoint = server.endpoints().parse().map_err(Error::Flags)?;
        let target = Target { endpoints: vec![endpoint], tls: None, token: None };
        let bench = self.prepare(target, common, interrupt).await?;
        let result = self.server_run(bench, Some(&server)).run(kind.name()).await?;
        server.stop().await;
        Ok(result)
    }

    async fn prepare(&self, target: Target, common: &Common, interrupt: &Interrupt) -> Result<Arc<Bench>, Error> {
        let plan = common.plan(CLIENTS, None)?;
        Ok(Arc::new(Bench::prepare_for(target, common, plan, interrupt.clone()).await?))
    }

    fn server_run<'a>(&self, bench: Arc<Bench>, server: Option<&'a Server<'a>>) -> ServerRun<'a> {
        ServerRun::new(bench, server, self.cluster(), self.schedule(), self.rate)
    }

    fn schedule(&self) -> Schedule {
        Schedule::new(Duration::from_secs_f64(self.minutes * 60.0))
    }

    /// Returns the cluster, reduced so that each pod is written [`POD_WRITES_MIN`] times in the first third of the run:
    /// after that the size of the database is steady.
    fn cluster(&self) -> Kubernetes {
        let operations = (self.schedule().total / 3).as_secs() * self.rate as u64;
        self.cluster.scaled_down(operations, POD_WRITES_MIN, CLIENTS)
    }

    fn report(&self, servers: Vec<ServerResult>, interrupt: &Interrupt) -> SoakReport {
        SoakReport {
            scenario: "soak",
            minutes: self.minutes,
            rate: self.rate,
            pods: self.cluster().pods(),
            compact_interval_secs: self.schedule().compact_interval.as_secs_f64(),
            compact_delay_secs: self.schedule().compact_delay.as_secs_f64(),
            interrupted: interrupt.is_set(),
            servers,
        }
    }
}

impl Backend {
    fn kind(self) -> ServerKind {
        match self {
            Self::Sqlite => ServerKind::Sqlite,
            Self::Postgres => ServerKind::Postgres,
        }
    }
}

fn parse_minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if (0.05..=100_000.0).contains(&minutes) => Ok(minutes),
        _ => Err("must be a number of minutes from 0.05 to 100,000".to_owned()),
    }
}
