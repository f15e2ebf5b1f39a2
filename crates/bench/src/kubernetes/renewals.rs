//! Renewals of node leases in an open loop: every node renews its lease every 10 seconds, whether or not the server
//! answers in time. Watches receive every renewal. The search finds the number of nodes that the server holds.
//!
//! A number of nodes is held if no renewal failed, the p99 of the renewals is below the limit, and every watch received
//! every renewal a few seconds after the last one.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};
use tonic::{Status, Streaming};

use super::{LEASE_BYTES, objects::Objects, search::Search};
use crate::{
    args::{Common, Plan, parse_duration, parse_value_size},
    bench::Bench,
    closed_loop::{OpCounts, Pace, Recorder, Run, Worker},
    connection::Client,
    error::Error,
    keyspace::incompressible_value,
    report::{Report, Row, Step, per_sec},
    server_cpu::ServerCpu,
    summary::{Stamp, WatchSummary},
    watch::{next_response, open_stream},
};
use orlop_wire::proto::client::etcdserverpb::WatchCreateRequest;

/// Interval between two renewals of a node: kubelet's default.
const RENEWAL_INTERVAL: Duration = Duration::from_secs(10);
/// kube-apiserver's default prefix.
const PREFIX: &str = "/registry/";
const NODES_MAX: usize = 1_000_000;
const NODES_DEFAULT: usize = NODES_MAX;
const WATCHES_DEFAULT: usize = 10;
/// Maximum number of renewals in flight. Others that are due wait.
const CLIENTS_DEFAULT: usize = 1_000;
const DURATION_DEFAULT: Duration = Duration::from_secs(5);
/// Maximum time until the watches have received all events of a step.
const EVENTS_TIME_MAX: Duration = Duration::from_secs(10);
const EVENTS_POLL_INTERVAL: Duration = Duration::from_millis(20);

#[derive(Clone, Debug, clap::Args)]
#[command(next_help_heading = "Lease renewals")]
pub struct Renewals {
    /// Only renew leases: each of --nodes every 10 s, whether or not the server answers in time. Latencies count from
    /// the time at which a renewal is due. At most --clients [default: 1000] renewals are in flight
    #[arg(long, conflicts_with = "pods")]
    renewals: bool,

    /// Find the largest number of nodes, up to --nodes, whose renewals have a p99 below --p99-max
    ///
    /// Creates a Node and a Lease of each of --nodes [default: 1000000] and opens --watches [default: 10], each of which
    /// receives every renewal with the previous lease, as kube-apiserver's do. Then it doubles the number of nodes that
    /// renew, from 1,000, until a number is not held, and bisects to 5 %. Each step takes --duration [default: 5s] after
    /// --warmup; a step that is not held is repeated once. A server needs a quota of at least --nodes times --node-size
    /// and 1 KiB.
    #[arg(long, conflicts_with_all = ["pods", "renewals"])]
    find_nodes: bool,

    /// Limit of the p99 of renewals
    #[arg(long, default_value = "100ms", value_parser = parse_limit, requires = "find_nodes", value_name = "TIME")]
    p99_max: Duration,

    /// Size of each Node in bytes; each Lease has 320
    #[arg(long, default_value = "4096", value_parser = parse_value_size, value_name = "BYTES")]
    node_size: usize,
}

fn parse_limit(text: &str) -> Result<Duration, String> {
    let limit = parse_duration(text)?;
    if limit.is_zero() { Err("must be more than 0".to_owned()) } else { Ok(limit) }
}

impl Renewals {
    pub fn is_requested(&self) -> bool {
        self.renewals || self.find_nodes
    }

    pub fn plan(&self, common: &Common, nodes: Option<usize>) -> Result<Plan, Error> {
        if let Some(nodes) = nodes.filter(|nodes| *nodes > NODES_MAX) {
            return Err(Error::Flags(format!("--nodes must be at most {NODES_MAX}, nodes={nodes}")));
        }
        if common.has_total() {
            let text = "--total has no effect on renewals: --duration sets the time of a step";
            return Err(Error::Flags(text.to_owned()));
        }
        // The default prefix is that of a real cluster.
        let effect = match (common.purge, common.existing) {
            (true, _) => Some("--purge deletes all keys"),
            (false, true) => Some("--existing overwrites leases"),
            (false, false) => None,
        };
        if let Some(effect) = effect.filter(|_| !common.has_prefix()) {
            return Err(Error::Flags(format!("{effect} below {PREFIX}: confirm it with --prefix {PREFIX}")));
        }
        let mut plan = common.plan(CLIENTS_DEFAULT, None)?;
        plan.limits.duration = Some(common.duration.unwrap_or(DURATION_DEFAULT));
        plan.prefix_default = PREFIX;
        Ok(plan)
    }

    pub async fn measure(&self, bench: &Bench, nodes: Option<usize>, watches: Option<usize>) -> Result<Report, Error> {
        let objects = Arc::new(Objects::new(bench.keys.prefix().to_owned(), nodes.unwrap_or(NODES_DEFAULT)));
        if bench.has_keys {
            objects.read_revisions(bench).await?;
        } else {
            objects.create(bench, self.node_size).await?;
        }
        let mut load = Load::start(bench, objects, watches.unwrap_or(WATCHES_DEFAULT)).await?;
        let mut report =
            if self.find_nodes { self.search(bench, &mut load).await? } else { self.run(bench, &load).await? };
        report.extra.extend([
            ("nodes_created", load.objects.nodes() as f64),
            ("node_bytes", self.node_size as f64),
            ("watches", load.watches as f64),
        ]);
        Ok(report)
    }

    /// Renews the leases of all nodes.
    async fn run(&self, bench: &Bench, load: &Load) -> Result<Report, Error> {
        let nodes = load.objects.nodes();
        let measured = load.measure(bench, nodes, None).await?;
        let mut report = measured.report(bench);
        report.extra.insert("nodes", nodes as f64);
        report.extra.insert("events_missing", measured.events_missing as f64);
        Ok(report)
    }

    async fn search(&self, bench: &Bench, load: &mut Load) -> Result<Report, Error> {
        let mut search = Search::new(load.objects.nodes());
        let mut steps = Vec::new();
        let mut best = None;
        while let Some(nodes) = search.next() {
            let mut is_held = false;
            for _attempt in 0..2 {
                let measured = load.measure(bench, nodes, Some(self.p99_max)).await?;
                let step = measured.step(nodes, self.p99_max);
                is_held = step.held;
                if bench.shows_progress {
                    let verdict = if is_held { "held" } else { "not held" };
                    eprintln!("{nodes} nodes: p99 {:.1} ms, {verdict}", step.p99_ms);
                }
                steps.push(step);
                if is_held || best.is_none() {
                    best = Some(measured);
                }
                if is_held || bench.interrupt.is_set() {
                    break;
                }
            }
            if bench.interrupt.is_set() {
                break;
            }
            search.record(nodes, is_held);
        }
        let Some(best) = best else { return Err(Error::Interrupted) };
        let mut report = best.report(bench);
        report.steps = steps;
        report.extra.insert("nodes", search.held() as f64);
        report.extra.insert("p99_max_ms", self.p99_max.as_secs_f64() * 1e3);
        Ok(report)
    }
}

/// The leases, their watches and the order of renewals.
struct Load {
    objects: Arc<Objects>,
    watches: usize,
    events: Arc<Mutex<Events>>,
    /// Number of renewals that succeeded, including those of warm-ups.
    renewed: Arc<AtomicU64>,
    /// The time that stamps count from.
    epoch: Instant,
    /// Aborts the readers of the watches when dropped.
    _readers: JoinSet<()>,
}

/// The events that the watches received.
struct Events {
    /// Number of events, including those of warm-ups.
    received: u64,
    /// Times from the due time of a renewal to its event, since the start of the step.
    recorder: Recorder,
    /// End of the warm-up, in nanoseconds since the epoch. Later renewals are measured.
    measured_from_nanos: u64,
}

/// The measurements of one step.
struct Measured {
    renewals: Recorder,
    events: Recorder,
    events_missing: u64,
    /// Whether the step ended early because too many renewals were late.
    is_given_up: bool,
    cpu: Option<Result<ServerCpu, String>>,
}

impl Load {
    /// Opens the watches.
    async fn start(bench: &Bench, objects: Arc<Objects>, watches: usize) -> Result<Self, Error> {
        let epoch = Instant::now();
        let events = Events { received: 0, recorder: Recorder::new(epoch), measured_from_nanos: 0 };
        let events = Arc::new(Mutex::new(events));
        let mut readers = JoinSet::new();
        for number in 0..watches {
            let (key, range_end) = objects.leases();
            let create = WatchCreateRequest {
                key,
                range_end,
                prev_kv: true,
                progress_notify: true,
                ..WatchCreateRequest::default()
            };
            let responses = open_stream(bench, number, vec![create]).await?;
            readers.spawn(read_events(responses, Arc::clone(&events), epoch));
        }
        let renewed = Arc::new(AtomicU64::new(0));
        Ok(Self { objects, watches, events, renewed, epoch, _readers: readers })
    }

    /// Renews the leases of the first `nodes` nodes, each every 10 seconds. With a limit, ends as soon as more than 1 %
    /// of the renewals take longer.
    async fn measure(&self, bench: &Bench, nodes: usize, p99_max: Option<Duration>) -> Result<Measured, Error> {
        let limits = bench.plan.limits;
        let duration = limits.duration.unwrap_or(DURATION_DEFAULT);
        let due = nodes as u128 * duration.as_nanos() / RENEWAL_INTERVAL.as_nanos();
        let pace = Pace {
            per_sec: nodes as f64 / RENEWAL_INTERVAL.as_secs_f64(),
            latency_max: p99_max.unwrap_or(Duration::MAX),
            late_max: u64::try_from(due / 100).unwrap_or(u64::MAX),
        };
        let run = Run::begin_paced(pace, limits);
        let expected = self.begin_events(&run);
        let renewed_before = self.renewed.load(Relaxed);
        let order = Arc::new(Order::new(nodes));
        let renewer = |number| Renewer {
            client: bench.pool.client(number),
            objects: Arc::clone(&self.objects),
            order: Arc::clone(&order),
            renewed: Arc::clone(&self.renewed),
            value: incompressible_value(LEASE_BYTES).to_vec(),
            epoch_offset_nanos: nanos(run.began() - self.epoch),
        };
        bench.observe(&run, run.drive(bench.workers(renewer), &bench.interrupt)).await;
        let is_given_up = run.is_given_up();
        let renewals = run.finish();
        if bench.pool.client(0).is_lost() {
            let error = renewals.first_error.unwrap_or_else(|| "the connection was lost".to_owned());
            return Err(Error::Step { step: "renewing leases", endpoint: bench.pool.endpoints(), error });
        }
        let expected = expected + (self.renewed.load(Relaxed) - renewed_before) * self.watches as u64;
        let events_missing = self.drain(expected, bench).await;
        let cpu = bench.cpu.as_ref().map(|cpu| cpu.finish(renewals.latency.len()));
        let mut events = std::mem::replace(&mut self.events.lock().recorder, Recorder::new(Instant::now()));
        run.extend(&mut events);
        if let Some(error) = events.first_error {
            return Err(Error::Step { step: "watching leases", endpoint: bench.pool.endpoints(), error });
        }
        Ok(Measured { renewals, events, events_missing, is_given_up, cpu })
    }

    /// Starts the measurement of events. Returns the number of events received before.
    fn begin_events(&self, run: &Run) -> u64 {
        let mut events = self.events.lock();
        events.recorder = Recorder::new(run.measured_from());
        events.measured_from_nanos = nanos(run.measured_from() - self.epoch);
        events.received
    }

    /// Waits until `expected` events are received. Returns the number of missing ones.
    async fn drain(&self, expected: u64, bench: &Bench) -> u64 {
        let deadline = Instant::now() + EVENTS_TIME_MAX;
        loop {
            let missing = expected.saturating_sub(self.events.lock().received);
            if missing == 0 || Instant::now() > deadline || bench.interrupt.is_set() {
                return missing;
            }
            sleep(EVENTS_POLL_INTERVAL).await;
        }
    }
}

impl Measured {
    fn step(&self, nodes: usize, p99_max: Duration) -> Step {
        let (renewals, events) = (Row::new("renew-lease", &self.renewals), Row::new("event", &self.events));
        let p99 = Duration::from_nanos(self.renewals.latency.value_at_quantile(0.99));
        let is_complete = renewals.count > 0 && renewals.errors == 0 && self.events_missing == 0;
        Step {
            nodes,
            held: is_complete && !self.is_given_up && p99 < p99_max,
            count: renewals.count,
            p50_ms: renewals.p50_ms,
            p99_ms: renewals.p99_ms,
            max_ms: renewals.max_ms,
            event_p99_ms: events.p99_ms,
            events_missing: self.events_missing,
            errors: renewals.errors,
        }
    }

    fn report(&self, bench: &Bench) -> Report {
        let rate = per_sec(self.events.latency.len(), self.events.elapsed());
        let extra = BTreeMap::from([("events_per_sec", rate)]);
        let mut report = bench.report("kubernetes", LEASE_BYTES, &self.renewals, extra);
        report.results = vec![Row::new("renew-lease", &self.renewals), Row::new("event", &self.events)];
        report.server_cpu = self.cpu.as_ref().and_then(|cpu| cpu.as_ref().ok().cloned());
        let cpu_error = self.cpu.as_ref().and_then(|cpu| cpu.as_ref().err().cloned());
        report.first_error = report.first_error.or(cpu_error);
        report
    }
}

fn nanos(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).unwrap_or(u64::MAX)
}

async fn read_events(mut responses: Streaming<WatchSummary>, events: Arc<Mutex<Events>>, epoch: Instant) {
    loop {
        match next_response(&mut responses).await {
            Ok(response) => events.lock().record(&response, epoch),
            Err(error) => return events.lock().recorder.fail(1, || error),
        }
    }
}

impl Events {
    fn record(&mut self, response: &WatchSummary, epoch: Instant) {
        self.received += response.events.len() as u64;
        let now = Instant::now();
        let now_nanos = nanos(now - epoch);
        for stamp in response.stamps().filter(|stamp| stamp.started >= self.measured_from_nanos) {
            self.recorder.succeed(Duration::from_nanos(now_nanos.saturating_sub(stamp.started)), now);
        }
    }
}

/// The order in which nodes renew their leases: each once per round, and consecutive renewals far from each other.
struct Order {
    nodes: u64,
    stride: u64,
    next: AtomicU64,
}

impl Order {
    fn new(nodes: usize) -> Self {
        let nodes = nodes as u64;
        // Multiples of the golden ratio are evenly spread. A stride without a common divisor visits each node.
        let golden = (nodes * 618_034 / 1_000_000).max(1);
        let stride = (golden..=nodes).find(|stride| greatest_common_divisor(*stride, nodes) == 1).unwrap_or(1);
        Self { nodes, stride, next: AtomicU64::new(0) }
    }

    fn next(&self) -> usize {
        let sequence = self.next.fetch_add(1, Relaxed) % self.nodes;
        usize::try_from(sequence * self.stride % self.nodes).unwrap_or_default()
    }
}

fn greatest_common_divisor(mut a: u64, mut b: u64) -> u64 {
    while b > 0 {
        (a, b) = (b, a % b);
    }
    a
}

/// Renews leases, one at a time.
struct Renewer {
    client: Client,
    objects: Arc<Objects>,
    order: Arc<Order>,
    renewed: Arc<AtomicU64>,
    value: Vec<u8>,
    /// Time from the epoch to the start of the run.
    epoch_offset_nanos: u64,
}

impl Worker for Renewer {
    async fn step(&mut self, started: u64) -> Result<OpCounts, Status> {
        let stamp = Stamp { started: self.epoch_offset_nanos + started, client: 0 };
        stamp.write(&mut self.value);
        let value = Bytes::copy_from_slice(&self.value);
        let counts = self.objects.renew(&mut self.client, self.order.next(), value).await?;
        self.renewed.fetch_add(1, Relaxed);
        Ok(counts)
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_node_renews_once_per_round() {
        for nodes in [1, 2, 3, 10, 1_000, 4_096, 99_991] {
            let order = Order::new(nodes);
            for _round in 0..2 {
                let mut renewed: Vec<_> = (0..nodes).map(|_| order.next()).collect();
                renewed.sort_unstable();
                assert!(renewed.into_iter().eq(0..nodes), "{nodes} nodes");
            }
        }
    }

    #[test]
    fn held_needs_the_limit_and_all_events() {
        let measured = |p99_ms, events_missing, is_given_up, errors| {
            let start = Instant::now();
            let mut renewals = Recorder::new(start);
            renewals.succeed(Duration::from_millis(p99_ms), start);
            renewals.fail(errors, || "Unavailable: gone".to_owned());
            Measured { renewals, events: Recorder::new(start), events_missing, is_given_up, cpu: None }
        };
        for (p99_ms, missing, is_given_up, errors, held) in [
            (99, 0, false, 0, true),
            (101, 0, false, 0, false),
            (99, 1, false, 0, false),
            (99, 0, true, 0, false),
            (99, 0, false, 1, false),
        ] {
            let step = measured(p99_ms, missing, is_given_up, errors).step(10, Duration::from_millis(100));
            assert_eq!(step.held, held, "{step:?}");
        }
    }
}
