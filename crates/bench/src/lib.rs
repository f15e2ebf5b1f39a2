//! `orlop bench`: a closed-loop load generator for any etcd endpoint, over gRPC.
//!
//! The same command runs against Orlop and etcd, so the results are comparable. A run checks that no keys with its
//! prefix exist, writes the keys that the scenario reads, runs the scenario, prints the results and deletes the keys.
//! With `--existing` it uses the keys of an earlier run and deletes none.
//! Every run uses the same keys in the same order.
//!
//! The load generator usually shares the machine with the server, so it must use little CPU: one task per client
//! ([`closed_loop`]), connections without tonic's channel ([`connection`]), and responses of which only the needed
//! fields are decoded ([`summary`]). It is designed for a current-thread runtime. It does not reconnect: the clients of
//! a lost connection stop, and the report contains the error.

mod args;
mod bench;
mod catch_up;
mod closed_loop;
mod compare;
mod connection;
mod error;
mod get;
mod idle;
mod interrupt;
mod keyspace;
mod kubernetes;
mod maintenance;
mod output;
mod progress;
mod range;
mod report;
mod server_cpu;
mod soak;
mod summary;
mod watch;
mod write;

use self::{
    args::{Common, Plan},
    bench::Bench,
    interrupt::Interrupt,
    report::Report,
};

pub use self::error::Error;

/// Arguments of `orlop bench`.
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
    /// Compare Orlop on SQLite, Orlop on Postgres and etcd under all loads
    ///
    /// Starts the servers itself, one at a time, and removes their data afterwards.
    Compare(compare::Compare),
    /// Run a Kubernetes-like load for a long time and check for leaks
    ///
    /// Checks whether memory, database size, file descriptors, latency and other metrics of the server rise. Starts the
    /// servers itself, unless --endpoints names a running server. Exits with status 1 if a metric rises more than
    /// allowed, if the server keeps resources of disconnected clients, or if an operation fails.
    Soak(soak::Soak),
}

#[derive(Debug, clap::Subcommand)]
enum Scenario {
    /// Put keys
    Put(write::Put),
    /// Create keys, each in a transaction that compares the mod_revision with 0
    CreateTxn(write::CreateTxn),
    /// Update keys, each in a transaction that compares the mod_revision with the last known one
    Update(write::Update),
    /// Get single keys
    Get(get::Get),
    /// List all keys: in one request, in pages, or at an old revision
    Range(range::Range),
    /// Put keys under a prefix that many watchers watch
    Watch(watch::Watch),
    /// Start a watch at an old revision and receive all events since
    CatchUp(catch_up::CatchUp),
    /// Keep connections and watches open without any traffic
    Idle(idle::Idle),
    /// Put keys while the server compacts and defragments
    Maintenance(maintenance::Maintenance),
    /// Send the requests of kube-apiserver: lease renewals, pod updates, paged lists, counts, probes and watches
    Kubernetes(kubernetes::Scenario),
}

/// Hides the common flags without effect in the help of `compare`, which starts its own servers.
pub fn hide_rejected_flags(bench: clap::Command) -> clap::Command {
    let common = bench.get_arguments().filter(|flag| flag.is_global_set()).cloned();
    let flags: Vec<clap::Arg> = common
        .map(|flag| match flag.get_id().as_str() {
            "duration" => flag.help(compare::DURATION_HELP).help_heading(compare::LOADS),
            "json" => flag.help_heading(compare::OUTPUT),
            _ => flag.hide(true),
        })
        .collect();
    // A subcommand that has a flag of this name does not inherit the common one.
    bench.mut_subcommand("compare", |compare| compare.args(flags))
}

/// Runs the scenario, the comparison or the soak test, and prints the results to standard output.
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
    // Preparation writes no keys, so there is nothing to delete if it is cancelled.
    let bench = tokio::select! {
        bench = prepare => bench?,
        () = interrupt.wait() => return Err(Error::Interrupted),
    };
    let measured = scenario.measure(&bench).await;
    let printed = measured.and_then(|report| print(&report, common.json));
    let keeps_keys = common.keep || common.existing;
    let cleared = if keeps_keys { Ok(()) } else { bench.keys.clear(&mut bench.pool.client(0)).await };
    printed.and(cleared)
}

impl Scenario {
    fn plan(&self, common: &Common) -> Result<Plan, Error> {
        match self {
            Self::Put(_) | Self::CreateTxn(_) | Self::Update(_) | Self::Get(_) | Self::Maintenance(_) => {
                common.plan(64, None)
            }
            Self::Kubernetes(kubernetes) => kubernetes.plan(common),
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

fn print(report: &Report, json: bool) -> Result<(), Error> {
    output::print(&if json { output::json_line(report)? } else { report.to_string() })?;
    report.check()
}
