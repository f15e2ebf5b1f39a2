//! `orlop bench`: a closed-loop load on any etcd endpoint, over real gRPC.
//!
//! The same command drives Orlop and etcd, so that their figures compare. A run claims a prefix that holds no keys,
//! loads what the scenario reads, drives it, prints what it measured, and deletes the prefix. Keys and their order are
//! the same in each run.
//!
//! The client shares the machine with the server more often than not, so it has to be cheap: one task a client
//! ([`closed_loop`]), connections without tonic's channel ([`connection`]), large answers counted instead of decoded
//! ([`wire`]). It is meant for a current-thread runtime. It opens no connection twice: clients of a lost one stop, and
//! the report says so.

mod args;
mod catch_up;
mod closed_loop;
mod compare;
mod connection;
mod endpoint;
mod get;
mod idle;
mod interrupt;
mod keyspace;
mod kubernetes;
mod maintenance;
mod progress;
mod range;
mod report;
mod soak;
mod watch;
mod wire;
mod write;

use std::{
    collections::BTreeMap,
    io::{self, Write as _},
    sync::Arc,
};

use http::HeaderValue;

use self::{
    args::{Common, Plan},
    closed_loop::{Limits, Recorder, Run, Worker},
    connection::Pool,
    endpoint::{Endpoint, Target},
    interrupt::Interrupt,
    keyspace::KeySpace,
    report::{Report, Row},
};

#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    common: Common,

    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, clap::Subcommand)]
enum Command {
    #[command(flatten)]
    Run(Scenario),
    /// Compare Orlop on SQLite, Orlop on Postgres and a real etcd, each started here, under all these loads
    Compare(compare::Compare),
    /// Do for long what kube-apiserver does, and look whether memory, files, descriptors and latency stay as they are
    ///
    /// Starts its servers itself, unless --endpoints names one that runs. Exit status 1 where something leaks.
    Soak(soak::Soak),
}

#[derive(Debug, clap::Subcommand)]
enum Scenario {
    /// Put keys
    Put(write::Put),
    /// Create keys, each in a transaction that compares mod_revision with 0
    CreateTxn(write::CreateTxn),
    /// Update keys, each in a transaction that compares mod_revision with the last one seen
    Update(write::Update),
    /// Get single keys, linearizable
    Get(get::Get),
    /// Range over all keys: at once, in pages, at an old revision
    Range(range::Range),
    /// Put keys below a prefix that many watchers watch
    Watch(watch::Watch),
    /// Watch from many revisions back until all their events are there
    CatchUp(catch_up::CatchUp),
    /// Hold connections and watches while nothing happens
    Idle(idle::Idle),
    /// Put keys while the store is compacted and defragmented
    Maintenance(maintenance::Maintenance),
    /// Do what kube-apiserver does: leases, pods, lists in pages, counts, probes, watches
    Kubernetes(kubernetes::Kubernetes),
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("{0}")]
    Flags(String),
    #[error("cannot connect: {source}, endpoint=`{endpoint}`")]
    Connect { endpoint: Endpoint, source: io::Error },
    #[error(
        "the prefix is in use: give another --prefix, or --purge to delete its keys, prefix=`{prefix}` keys={count}"
    )]
    PrefixInUse { prefix: String, count: i64 },
    #[error("{step} failed: {error}, endpoint=`{endpoint}`")]
    Step { step: &'static str, endpoint: String, error: String },
    #[error("{program} failed: {error}")]
    Program { program: String, error: String },
    #[error("interrupted before anything was measured")]
    Interrupted,
    #[error("no operation succeeded: {0}")]
    NothingSucceeded(String),
    #[error("not as it was: {0}")]
    NotFlat(String),
    #[error("cannot read or write: {0}")]
    Io(#[from] io::Error),
}

/// Runs one scenario, or compares, and prints the outcome to the standard output.
pub async fn run(args: Args) -> Result<(), Error> {
    match args.command {
        Command::Run(scenario) => run_scenario(&args.common, &scenario).await,
        Command::Compare(compare) => compare.run(&args.common).await,
        Command::Soak(soak) => soak.run(&args.common).await,
    }
}

async fn run_scenario(common: &Common, scenario: &Scenario) -> Result<(), Error> {
    let plan = scenario.plan(common)?;
    let interrupt = Interrupt::listen();
    let prepare = Bench::prepare(common, plan, interrupt.clone());
    // Nothing has been written yet when preparing is cut short.
    let bench = tokio::select! {
        bench = prepare => bench?,
        () = interrupt.wait() => return Err(Error::Interrupted),
    };
    let measured = scenario.measure(&bench).await;
    let printed = measured.and_then(|report| print(&report, common.json));
    let cleared = if common.keep { Ok(()) } else { bench.keys.clear(&mut bench.pool.client(0)).await };
    printed.and(cleared)
}

impl Scenario {
    fn plan(&self, common: &Common) -> Result<Plan, Error> {
        match self {
            Self::Put(_) | Self::CreateTxn(_) | Self::Update(_) | Self::Get(_) | Self::Kubernetes(_) => {
                common.plan(64, None)
            }
            Self::Maintenance(_) => common.plan(64, None),
            Self::Range(_) | Self::CatchUp(_) => common.plan(1, None),
            Self::Idle(idle) => common.plan(1, Some(idle.streams())),
            Self::Watch(watch) => {
                watch.check_flags()?;
                common.plan(8, Some(watch.streams()))
            }
        }
    }

    async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        match self {
            Self::Put(put) => put.measure(bench).await,
            Self::CreateTxn(create) => create.measure(bench).await,
            Self::Update(update) => update.measure(bench).await,
            Self::Get(get) => get.measure(bench).await,
            Self::Range(range) => range.measure(bench).await,
            Self::Watch(watch) => watch.measure(bench).await,
            Self::CatchUp(catch_up) => catch_up.measure(bench).await,
            Self::Idle(idle) => idle.measure(bench).await,
            Self::Maintenance(maintenance) => maintenance.measure(bench).await,
            Self::Kubernetes(kubernetes) => kubernetes.measure(bench).await,
        }
    }
}

/// What every scenario works with.
struct Bench {
    target: Target,
    plan: Plan,
    /// Whether to show how far a run is.
    shows_progress: bool,
    /// Whether an earlier run has written the keys.
    has_keys: bool,
    pool: Pool,
    keys: Arc<KeySpace>,
    interrupt: Interrupt,
}

impl Bench {
    async fn prepare(common: &Common, plan: Plan, interrupt: Interrupt) -> Result<Self, Error> {
        Self::prepare_for(log_in(common).await?, common, plan, interrupt).await
    }

    async fn prepare_for(target: Target, common: &Common, plan: Plan, interrupt: Interrupt) -> Result<Self, Error> {
        let pool = Pool::connect(&target, plan.connections).await?;
        let keys = Arc::new(KeySpace::new(common.prefix.clone()));
        if !common.existing {
            keys.claim(&mut pool.client(0), common.purge).await?;
        }
        let shows_progress = !common.json;
        Ok(Self { target, plan, shows_progress, has_keys: common.existing, pool, keys, interrupt })
    }

    async fn load(&self, keys: usize, value_size: usize) -> Result<(), Error> {
        if self.has_keys {
            return Ok(());
        }
        self.keys.load(&self.pool, keys, &write::filler(value_size), &self.interrupt).await
    }

    /// One worker for each client, made from the client's number.
    fn workers<W>(&self, worker: impl Fn(usize) -> W) -> Vec<W> {
        (0..self.plan.clients).map(worker).collect()
    }

    /// Each client's share of so many keys, one at least.
    fn share(&self, keys: usize) -> usize {
        keys.div_ceil(self.plan.clients)
    }

    async fn drive<W: Worker>(&self, workers: Vec<W>) -> Recorder {
        self.drive_within(self.plan.limits, workers).await
    }

    async fn drive_within<W: Worker>(&self, limits: Limits, workers: Vec<W>) -> Recorder {
        let run = Run::begin(limits);
        self.show(&run, run.drive(workers, &self.interrupt)).await;
        run.take()
    }

    /// Shows how far a run is while it is driven.
    async fn show(&self, run: &Run, driven: impl Future<Output = ()>) {
        if !self.shows_progress {
            return driven.await;
        }
        tokio::select! {
            () = driven => {}
            () = progress::show(run) => {}
        }
    }

    fn report(
        &self,
        scenario: &'static str,
        value_size: usize,
        recorder: &Recorder,
        facts: BTreeMap<&'static str, f64>,
    ) -> Report {
        Report {
            scenario,
            endpoints: self.target.endpoints.iter().map(Endpoint::to_string).collect(),
            clients: self.plan.clients,
            connections: self.pool.len(),
            value_size,
            interrupted: self.interrupt.is_set(),
            results: vec![Row::new(scenario, recorder)],
            facts,
            first_error: recorder.first_error.clone(),
        }
    }
}

/// The endpoints and, where they ask for a login, its token.
async fn log_in(common: &Common) -> Result<Target, Error> {
    let endpoints = common.endpoints();
    let needs_tls = endpoints.iter().any(|endpoint| endpoint.has_tls);
    let tls = if needs_tls { Some(common.identity.tls()?) } else { None };
    let mut target = Target { endpoints, tls, token: None };
    let Some((name, password)) = common.identity.login() else { return Ok(target) };
    let client = Pool::connect(&target, 1).await?.client(0);
    let failed = |error: String| Error::Step { step: "logging in", endpoint: client.endpoint().to_string(), error };
    let token = client.authenticate(name, password).await.map_err(|status| failed(closed_loop::describe(&status)))?;
    target.token = token.map(HeaderValue::try_from).transpose().map_err(|error| failed(error.to_string()))?;
    Ok(target)
}

fn print(report: &Report, json: bool) -> Result<(), Error> {
    let text = if json { serde_json::to_string(report).map_err(io::Error::from)? + "\n" } else { report.to_string() };
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_bytes())?;
    stdout.flush()?;
    match &report.first_error {
        Some(error) if report.results.iter().all(|row| row.count == 0) => Err(Error::NothingSucceeded(error.clone())),
        _ => Ok(()),
    }
}
