//! `orlop bench soak`: a server under the traffic of a control plane for long, at a rate that leaves it time, and the
//! question whether it stays as it was.
//!
//! Beside the mix of [`super::kubernetes`] connections, watches, leases and locks come and go ([`churn`]), as what is forgotten
//! is forgotten there, and the store is compacted every minute as kube-apiserver does it: at the revision of a while
//! ago. The number of live keys stays the same, so all that the server holds should. Every few seconds it is asked what
//! it uses ([`gauges`]); in the end a line is laid through each figure ([`verdict`]), and once all clients are gone what
//! was theirs must be gone too.
//!
//! There are fewer pods where not all of them would be written anew four times in the first third.
//! All times follow from how long it takes: an hour has compactions every minute five minutes back; what lasts less has
//! them in proportion, and so has Postgres its vacuum.

mod churn;
mod gauges;
mod plot;
mod report;
mod verdict;

use std::{path::PathBuf, sync::Arc, time::Duration};

use bytes::Bytes;
use hdrhistogram::Histogram;
use parking_lot::Mutex;
use sha2::{Digest as _, Sha256};
use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval_at, sleep, sleep_until},
};
use tonic::Status;

use self::{
    gauges::{Gauges, Sample},
    report::{Lived, Outcome},
};
use super::{
    Bench, Error,
    args::{Common, at_least_one},
    closed_loop::describe,
    compare::server::{Kind, Lab, Needs, Server},
    endpoint::Target,
    interrupt::Interrupt,
    kubernetes::{Events, Kubernetes, Mix, Values},
    log_in,
};
use orlop_wire::proto::client::etcdserverpb::{CompactionRequest, SnapshotRequest};

#[derive(Debug, clap::Args)]
pub struct Soak {
    /// What the servers that are started have their log in, at the same time
    #[arg(long, value_enum, value_delimiter = ',', default_value = "sqlite,postgres", value_name = "BACKENDS")]
    backend: Vec<Backend>,

    /// How long, in minutes
    #[arg(long, default_value = "60", value_parser = minutes, value_name = "MINUTES")]
    minutes: f64,

    /// Operations a second on each server, all clients together
    #[arg(long, default_value = "200", value_parser = at_least_one, value_name = "N")]
    rate: usize,

    #[command(flatten)]
    cluster: Kubernetes,

    /// Where initdb and postgres are [default: where PATH has initdb, else where Debian has it]
    #[arg(long, value_name = "FOLDER")]
    postgres_programs: Option<PathBuf>,

    /// Where the servers' data lies meanwhile
    #[arg(long, default_value = ".", value_name = "FOLDER")]
    work_dir: PathBuf,

    /// Where to write plots and a table in Markdown [default: none are written]
    #[arg(long, value_name = "FOLDER")]
    output: Option<PathBuf>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Backend {
    Sqlite,
    Postgres,
}

const CLIENTS: usize = 16;

/// Of connections that come and go, a second.
const CHURN_PER_SEC: f64 = 4.0;

/// Until what was the clients' must be gone, the lease that runs longest included.
const GONE_MAX: Duration = Duration::from_secs(60);

const POLL: Duration = Duration::from_millis(100);

impl Soak {
    pub async fn run(&self, common: &Common) -> Result<(), Error> {
        common.refuse_limits("--minutes")?;
        let interrupt = Interrupt::listen();
        let outcome = if common.has_endpoints() {
            let bench = self.prepare(log_in(common).await?, common, &interrupt).await?;
            let lived = Life::new(self, bench, None).live("endpoints").await?;
            self.outcome(vec![lived], &interrupt)
        } else {
            self.run_servers(common, &interrupt).await?
        };
        if let Some(folder) = &self.output {
            std::fs::create_dir_all(folder)?;
            plot::draw(&outcome, folder)?;
            std::fs::write(folder.join("soak.md"), outcome.to_string())?;
        }
        super::compare::print(&if common.json {
            serde_json::to_string(&outcome).map_err(std::io::Error::from)? + "\n"
        } else {
            outcome.to_string()
        })?;
        match outcome.complaints() {
            complaints if complaints.is_empty() => Ok(()),
            complaints => Err(Error::NotFlat(complaints.join("; "))),
        }
    }

    /// All at the same time, so that an hour takes an hour.
    async fn run_servers(&self, common: &Common, interrupt: &Interrupt) -> Result<Outcome, Error> {
        let kinds: Vec<Kind> = self.backend.iter().map(|backend| backend.kind()).collect();
        // Debian's default is a minute.
        let vacuums = [format!("autovacuum_naptime={}s", self.pace().every.as_secs().max(1))];
        let lab = Lab::open(Needs {
            work_dir: &self.work_dir,
            servers: &kinds,
            etcd: None,
            postgres_programs: self.postgres_programs.as_deref(),
            postgres_settings: &vacuums,
        });
        let lab = tokio::select! {
            lab = lab => lab?,
            () = interrupt.wait() => return Err(Error::Interrupted),
        };
        let mut lives = Vec::new();
        for kind in kinds {
            lives.push(self.live_on(&lab, kind, common, interrupt));
        }
        let lived = futures_util::future::try_join_all(lives).await?;
        lab.close().await;
        Ok(self.outcome(lived, interrupt))
    }

    async fn live_on(&self, lab: &Lab, kind: Kind, common: &Common, interrupt: &Interrupt) -> Result<Lived, Error> {
        let server = Server::start(lab, kind, &[]).await?;
        let endpoint = server.endpoint().parse().map_err(Error::Flags)?;
        let target = Target { endpoints: vec![endpoint], tls: None, token: None };
        let bench = self.prepare(target, common, interrupt).await?;
        let lived = Life::new(self, bench, Some(&server)).live(kind.name()).await?;
        server.stop().await;
        Ok(lived)
    }

    async fn prepare(&self, target: Target, common: &Common, interrupt: &Interrupt) -> Result<Arc<Bench>, Error> {
        let plan = common.plan(CLIENTS, None)?;
        Ok(Arc::new(Bench::prepare_for(target, common, plan, interrupt.clone()).await?))
    }

    fn pace(&self) -> Pace {
        Pace::of(Duration::from_secs_f64(self.minutes * 60.0))
    }

    /// Sizes are steady once everything was written anew some times, which has to be before anything is judged.
    fn cluster(&self) -> Kubernetes {
        let operations = (self.pace().total / 3).as_secs() * self.rate as u64;
        self.cluster.rewritten_within(operations, 4, CLIENTS)
    }

    fn outcome(&self, servers: Vec<Lived>, interrupt: &Interrupt) -> Outcome {
        Outcome {
            scenario: "soak",
            minutes: self.minutes,
            rate: self.rate,
            pods: self.cluster().pods(),
            compact_every_secs: self.pace().every.as_secs_f64(),
            compact_behind_secs: self.pace().behind.as_secs_f64(),
            interrupted: interrupt.is_set(),
            servers,
        }
    }
}

impl Backend {
    fn kind(self) -> Kind {
        match self {
            Self::Sqlite => Kind::Sqlite,
            Self::Postgres => Kind::Postgres,
        }
    }
}

fn minutes(text: &str) -> Result<f64, String> {
    match text.parse() {
        Ok(minutes) if (0.05..=100_000.0).contains(&minutes) => Ok(minutes),
        _ => Err("must be a number of minutes from 0.05 to 100,000".to_owned()),
    }
}

/// When things happen.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Pace {
    total: Duration,
    /// From one compaction to the next, and what is looked at as one.
    every: Duration,
    /// How old the revision is at which is compacted.
    behind: Duration,
    /// From one look at the server to the next.
    look: Duration,
}

impl Pace {
    fn of(total: Duration) -> Self {
        let every = (total / 15).min(Duration::from_secs(60));
        let behind = (total / 12).min(Duration::from_secs(300));
        Self { total, every, behind, look: every / 12 }
    }
}

/// One server's time.
struct Life<'a> {
    soak: &'a Soak,
    cluster: Kubernetes,
    bench: Arc<Bench>,
    server: Option<&'a Server<'a>>,
    told: Arc<Told>,
}

/// What the tasks tell.
struct Told {
    /// Since the last look.
    window: Mutex<Window>,
    sums: Mutex<Sums>,
    events: Arc<Mutex<Events>>,
}

/// Nanoseconds.
struct Window {
    writes: Histogram<u64>,
    reads: Histogram<u64>,
}

#[derive(Debug, Default)]
struct Sums {
    operations: u64,
    compactions: u64,
    visits: u64,
    errors: u64,
    first_error: Option<String>,
}

impl Told {
    fn fail(&self, what: &str, status: &Status) {
        let mut sums = self.sums.lock();
        sums.errors += 1;
        sums.first_error.get_or_insert_with(|| format!("{what}: {}", describe(status)));
    }
}

impl Window {
    fn new() -> Self {
        // From a microsecond to a minute with two digits.
        let empty = || Histogram::new_with_bounds(1_000, 60_000_000_000, 2);
        let empty = || empty().expect("the bounds are constants in the range that the histogram allows");
        Self { writes: empty(), reads: empty() }
    }
}

impl<'a> Life<'a> {
    fn new(soak: &'a Soak, bench: Arc<Bench>, server: Option<&'a Server<'a>>) -> Self {
        let told = Told { window: Mutex::new(Window::new()), sums: Mutex::default(), events: Arc::default() };
        Self { soak, cluster: soak.cluster(), bench, server, told: Arc::new(told) }
    }

    async fn live(self, name: &'static str) -> Result<Lived, Error> {
        let gauges = Gauges::open(&self.bench.target, self.server).await?;
        self.cluster.load(&self.bench).await?;
        let before = gauges.read().await?;
        let readers = self.cluster.follow(&self.bench, &self.told.events).await?;
        let pace = self.soak.pace();
        let began = Instant::now();
        let mut tasks = JoinSet::new();
        let values = Values::from(incompressible);
        for number in 0..self.bench.plan.clients {
            let every = Duration::from_secs_f64(self.bench.plan.clients as f64 / self.soak.rate as f64);
            let first = began + every.mul_f64(number as f64 / self.bench.plan.clients as f64);
            let mix = Mix::new(&self.bench, &self.cluster, values.clone(), number);
            tasks.spawn(operate(mix, first, every, Arc::clone(&self.told)));
        }
        tasks.spawn(compact(Arc::clone(&self.bench), pace, Arc::clone(&self.told)));
        tasks.spawn(churn::visit(Arc::clone(&self.bench), Arc::clone(&self.told), CHURN_PER_SEC));

        let mut samples = Vec::new();
        let until = began + pace.total;
        let mut looks = interval_at(began + pace.look, pace.look);
        looks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = looks.tick() => {}
                () = sleep_until(until) => break,
                () = self.bench.interrupt.wait() => break,
            }
            match self.look(&gauges, began, samples.last()).await {
                Ok(sample) => samples.push(sample),
                Err(error) => {
                    eprintln!("{name}, after {:.0} s: {error}", began.elapsed().as_secs_f64());
                    self.told.fail("a look", &Status::unknown(error.to_string()));
                }
            }
        }
        tasks.shutdown().await;
        drop(readers);
        if self.server.is_none() {
            self.bench.keys.clear(&mut self.bench.pool.client(0)).await?;
        }
        // With its connections.
        let Self { bench, told, .. } = self;
        let interrupt = bench.interrupt.clone();
        drop(bench);
        let left_behind = wait_until_gone(&gauges, &before, &interrupt).await?;
        let figures = verdict::judge(&samples, pace.every.as_secs_f64());
        let sums = std::mem::take(&mut *told.sums.lock());
        let events = std::mem::take(&mut *told.events.lock());
        Ok(Lived {
            server: name,
            operations: sums.operations,
            events: events.count,
            compactions: sums.compactions,
            visits: sums.visits,
            errors: sums.errors,
            first_error: sums.first_error.or(events.error),
            figures,
            left_behind,
            samples,
        })
    }

    async fn look(&self, gauges: &Gauges<'_>, began: Instant, last: Option<&Sample>) -> Result<Sample, Error> {
        let window = std::mem::replace(&mut *self.told.window.lock(), Window::new());
        let mut sample = gauges.read().await?;
        sample.secs = began.elapsed().as_secs_f64();
        sample.add_latency(&window.writes, &window.reads);
        sample.add_cpu(last);
        Ok(sample)
    }
}

/// Once nobody is connected but the one who asks; returns what is still there then.
async fn wait_until_gone(gauges: &Gauges<'_>, before: &Sample, interrupt: &Interrupt) -> Result<Vec<String>, Error> {
    let deadline = Instant::now() + GONE_MAX;
    loop {
        let left = gauges.read().await?.more_than(before);
        if left.is_empty() || Instant::now() > deadline || interrupt.is_set() {
            return Ok(left);
        }
        sleep(POLL).await;
    }
}

/// Postgres stores compressed what can be, and then a hundred rows take the room of one.
fn incompressible(len: usize) -> Bytes {
    let blocks = (0_u64..).flat_map(|block| Sha256::digest(block.to_be_bytes()));
    blocks.take(len).collect()
}

/// One client: an operation when it is due, unless the one before is still under way. On a machine that cannot keep up
/// there are fewer, rather than a queue whose length would be taken for the server's latency.
async fn operate(mut mix: Mix, first: Instant, every: Duration, told: Arc<Told>) {
    let mut due = interval_at(first, every);
    due.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        due.tick().await;
        let began = Instant::now();
        let (kind, outcome) = mix.step().await;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        match outcome {
            Ok(_) => {
                let mut window = told.window.lock();
                let histogram = if kind.writes() { &mut window.writes } else { &mut window.reads };
                histogram.saturating_record(nanos);
                drop(window);
                told.sums.lock().operations += 1;
            }
            Err(status) => told.fail(kind.name(), &status),
        }
    }
}

/// As kube-apiserver: it remembers the revision of now, and compacts at the one that it remembered some time ago. Then
/// somebody begins to read a snapshot and goes away.
async fn compact(bench: Arc<Bench>, pace: Pace, told: Arc<Told>) {
    let client = bench.pool.client(0);
    let mut remembered = std::collections::VecDeque::new();
    let mut compacted = 0;
    let mut due = interval_at(Instant::now() + pace.every, pace.every);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let now = due.tick().await;
        match bench.keys.revision(&client).await {
            Ok(revision) => remembered.push_back((now, revision)),
            Err(error) => told.fail("asking for the revision", &Status::unknown(error.to_string())),
        }
        let mut old = None;
        while let Some((_, revision)) = remembered.pop_front_if(|(at, _)| now - *at >= pace.behind) {
            old = Some(revision);
        }
        // None where nothing was written meanwhile.
        let Some(revision) = old.filter(|revision| *revision > compacted) else { continue };
        compacted = revision;
        match client.kv.clone().compact(CompactionRequest { revision, physical: false }).await {
            Ok(_) => told.sums.lock().compactions += 1,
            Err(status) => told.fail("compacting", &status),
        }
        let outcome = async { client.maintenance().snapshot(SnapshotRequest {}).await?.into_inner().message().await };
        if let Err(status) = outcome.await {
            told.fail("beginning a snapshot", &status);
        }
    }
}
