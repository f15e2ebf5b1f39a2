//! A cluster's traffic as kube-apiserver makes it: nodes renew their leases and report on pods by compare-and-swap, lists
//! are read in pages, collections are counted, reads ask for the newest revision, and watches follow all of it.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::{task::JoinSet, time::Instant};
use tonic::{Status, Streaming};

use super::{
    Bench, Error,
    args::at_least_one,
    closed_loop::{Done, Recorder, Run, Worker, describe},
    connection::Client,
    keyspace::KeySpace,
    report::{Report, Row},
    watch::open_stream,
    wire::WatchTally,
    write::{CompareAndSwap, filler},
};
use orlop_wire::proto::client::etcdserverpb::{RangeRequest, WatchCreateRequest};

const POD_BYTES: usize = 2 << 10;
const LEASE_BYTES: usize = 320;
const PAGE_PAIRS: i64 = 500;

/// Whose keys lie in which part of the key space.
pub(super) const PODS: usize = 0;
const LEASES: usize = 1;
/// Holds none.
pub(super) const NOTHING: usize = 2;

#[derive(Clone, Debug, clap::Args)]
pub struct Kubernetes {
    /// Nodes, each with a lease
    #[arg(long, default_value = "500", value_parser = at_least_one, value_name = "N")]
    nodes: usize,

    /// Pods, of 2 KiB
    #[arg(long, default_value = "5000", value_parser = at_least_one, value_name = "N")]
    pods: usize,

    /// Watches, each on a stream of its own: a third on pods, a third on leases, the rest on what does not change
    #[arg(long, default_value = "60", value_parser = at_least_one, value_name = "N")]
    watches: usize,
}

/// What a client does next.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Kind {
    RenewLease,
    UpdatePod,
    /// A range of a key that is not there, for the revision in its header.
    Probe,
    Count,
    ListPage,
}

impl Kind {
    const ALL: [Self; 5] = [Self::RenewLease, Self::UpdatePod, Self::Probe, Self::Count, Self::ListPage];

    pub fn writes(self) -> bool {
        matches!(self, Self::RenewLease | Self::UpdatePod)
    }

    pub fn name(self) -> &'static str {
        match self {
            Self::RenewLease => "renew-lease",
            Self::UpdatePod => "update-pod",
            Self::Probe => "probe",
            Self::Count => "count",
            Self::ListPage => "list-page",
        }
    }

    /// Of a hundred operations.
    fn share(self) -> u64 {
        match self {
            Self::RenewLease => 50,
            Self::UpdatePod => 20,
            Self::Probe => 20,
            Self::Count => 6,
            Self::ListPage => 4,
        }
    }

    /// The kind that a number from 0 to 99 stands for.
    fn of(mut number: u64) -> Self {
        for kind in Self::ALL {
            if number < kind.share() {
                return kind;
            }
            number -= kind.share();
        }
        Self::RenewLease
    }
}

impl Kubernetes {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        self.load(bench).await?;
        let events = Arc::new(Mutex::new(Events::default()));
        // Ends the readers when it goes out of scope.
        let _readers = self.follow(bench, &events).await?;

        let run = Run::begin(bench.plan.limits);
        let recorders = Kind::ALL.map(|_| Recorder::new(run.measured_from()));
        let told = Arc::new(Told { recorders: Mutex::new(recorders), measured_from: run.stamp_measured_from() });
        let values = Values::from(filler);
        let worker = |number| Node { mix: Mix::new(bench, self, values.clone(), number), told: Arc::clone(&told) };
        bench.show(&run, run.drive(bench.workers(worker), &bench.interrupt)).await;
        let whole = run.take();

        let seen = events.lock();
        let facts = BTreeMap::from([
            ("nodes", self.nodes as f64),
            ("pods", self.pods as f64),
            ("watches", self.watches as f64),
            ("events", seen.count as f64),
        ]);
        let mut report = bench.report("kubernetes", POD_BYTES, &whole, facts);
        let recorders = told.recorders.lock();
        report.results.extend(Kind::ALL.iter().zip(recorders.iter()).map(|(kind, own)| Row::new(kind.name(), own)));
        report.first_error = report.first_error.or_else(|| seen.error.clone());
        Ok(report)
    }

    /// With fewer pods, and nodes in proportion, where that many operations would not write each pod so many times.
    pub(super) fn rewritten_within(&self, operations: u64, times: u64, pods_min: usize) -> Self {
        let most = operations * Kind::UpdatePod.share() / 100 / times;
        let most = usize::try_from(most).unwrap_or(usize::MAX).max(pods_min);
        let pods = self.pods.min(most);
        Self { pods, nodes: (self.nodes * pods / self.pods).max(1), watches: self.watches }
    }

    pub(super) fn pods(&self) -> usize {
        self.pods
    }

    /// Loads what is there from the beginning.
    pub(super) async fn load(&self, bench: &Bench) -> Result<(), Error> {
        bench.load(self.pods, POD_BYTES).await
    }

    /// Opens the watches. Their readers end when they are dropped.
    pub(super) async fn follow(&self, bench: &Bench, events: &Arc<Mutex<Events>>) -> Result<JoinSet<()>, Error> {
        let mut readers = JoinSet::new();
        for number in 0..self.watches {
            readers.spawn(follow(self.open(bench, number).await?, Arc::clone(events)));
        }
        Ok(readers)
    }

    async fn open(&self, bench: &Bench, number: usize) -> Result<Streaming<WatchTally>, Error> {
        let part = [PODS, LEASES, NOTHING][number * 3 / self.watches.max(1) % 3];
        let create = WatchCreateRequest {
            key: bench.keys.key(part, 0),
            range_end: bench.keys.key(part + 1, 0),
            progress_notify: true,
            ..WatchCreateRequest::default()
        };
        open_stream(bench, number, vec![create]).await
    }
}

#[derive(Debug, Default)]
pub(super) struct Events {
    pub count: u64,
    pub error: Option<String>,
}

async fn follow(mut answers: Streaming<WatchTally>, events: Arc<Mutex<Events>>) {
    loop {
        let ended = match answers.message().await {
            Ok(Some(answer)) if answer.canceled => format!("a watch was canceled: {}", answer.cancel_reason),
            Ok(Some(answer)) => {
                events.lock().count += answer.events;
                continue;
            }
            Ok(None) => "the watch stream ended".to_owned(),
            Err(status) => describe(&status),
        };
        events.lock().error.get_or_insert(ended);
        return;
    }
}

/// What was measured of each kind.
struct Told {
    recorders: Mutex<[Recorder; Kind::ALL.len()]>,
    measured_from: u64,
}

#[derive(Clone, Copy, Debug)]
struct Cluster {
    nodes: usize,
    pods: usize,
    clients: usize,
}

impl Cluster {
    /// A client's own keys in turn, so that no two clients write one key.
    fn own(self, keys: usize, client: usize, turn: u64) -> u64 {
        let own = (keys.saturating_sub(client)).div_ceil(self.clients).max(1) as u64;
        (client as u64 + turn % own * self.clients as u64).min(keys as u64 - 1)
    }
}

/// One client's part of the traffic.
pub(super) struct Mix {
    swap: CompareAndSwap,
    keys: Arc<KeySpace>,
    cluster: Cluster,
    number: usize,
    turn: u64,
    values: Values,
}

/// What is written: any bytes, as many as such objects have.
#[derive(Clone)]
pub(super) struct Values {
    pod: Bytes,
    lease: Bytes,
}

impl Values {
    /// From a source of so many bytes.
    pub fn from(source: impl Fn(usize) -> Bytes) -> Self {
        Self { pod: source(POD_BYTES), lease: source(LEASE_BYTES) }
    }
}

impl Mix {
    pub fn new(bench: &Bench, cluster: &Kubernetes, values: Values, number: usize) -> Self {
        Self {
            swap: CompareAndSwap::new(bench.pool.client(number)),
            keys: Arc::clone(&bench.keys),
            cluster: Cluster { nodes: cluster.nodes, pods: cluster.pods, clients: bench.plan.clients },
            number,
            turn: 0,
            values,
        }
    }

    /// Does the next operation.
    pub async fn step(&mut self) -> (Kind, Result<Done, Status>) {
        let turn = self.turn;
        self.turn += 1;
        let kind = Kind::of((turn * STRIDE + self.number as u64) % 100);
        (kind, self.serve(kind, turn).await)
    }

    async fn serve(&mut self, kind: Kind, turn: u64) -> Result<Done, Status> {
        let Cluster { nodes, pods, .. } = self.cluster;
        let keys = &self.keys;
        let (request, wanted) = match kind {
            Kind::RenewLease => {
                let key = keys.key(LEASES, self.cluster.own(nodes, self.number, turn));
                return self.swap.update(key, self.values.lease.clone()).await;
            }
            Kind::UpdatePod => {
                let key = keys.key(PODS, self.cluster.own(pods, self.number, turn));
                return self.swap.update(key, self.values.pod.clone()).await;
            }
            Kind::Probe => (RangeRequest { key: keys.key(NOTHING, 0), limit: 1, ..RangeRequest::default() }, 0),
            Kind::Count => (RangeRequest { count_only: true, ..self.pods_from(0) }, 0),
            Kind::ListPage => {
                let pages = (pods as u64).div_ceil(PAGE_PAIRS.unsigned_abs());
                let first = turn % pages * PAGE_PAIRS.unsigned_abs();
                let wanted = (pods as u64 - first).min(PAGE_PAIRS.unsigned_abs());
                (RangeRequest { limit: PAGE_PAIRS, ..self.pods_from(first) }, wanted)
            }
        };
        let answer = self.swap.client.range_of(request, wanted).await?;
        Ok(Done { retries: 0, keys: answer.kvs, bytes: answer.bytes })
    }

    fn pods_from(&self, first: u64) -> RangeRequest {
        let end: Bytes = self.keys.key(PODS, self.cluster.pods as u64);
        RangeRequest { key: self.keys.key(PODS, first), range_end: end, ..RangeRequest::default() }
    }
}

/// Steps through the hundred kinds so that they come well mixed, and in another order for each client.
const STRIDE: u64 = 37;

struct Node {
    mix: Mix,
    told: Arc<Told>,
}

impl Worker for Node {
    async fn step(&mut self, started: u64) -> Result<Done, Status> {
        let begun = Instant::now();
        let (kind, outcome) = self.mix.step().await;
        if started >= self.told.measured_from {
            let now = Instant::now();
            let took: Duration = now - begun;
            let mut recorders = self.told.recorders.lock();
            let recorder = &mut recorders[kind as usize];
            match &outcome {
                Ok(_) => recorder.succeed(took, now),
                Err(status) => recorder.fail(1, || describe(status)),
            }
        }
        outcome
    }

    fn client(&self) -> &Client {
        &self.mix.swap.client
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn kinds_have_their_shares() {
        for kind in Kind::ALL {
            let turns = (0..100).filter(|turn| Kind::of(turn * STRIDE % 100) == kind).count();
            assert_eq!(turns as u64, kind.share(), "{kind:?}");
        }
    }

    #[test]
    fn clients_write_keys_of_their_own() {
        let cluster = Cluster { nodes: 10, pods: 10, clients: 4 };
        let mut owners = BTreeMap::new();
        for client in 0..4 {
            for turn in 0..20 {
                let key = cluster.own(10, client, turn);
                assert!(key < 10);
                assert_eq!(*owners.entry(key).or_insert(client), client, "key {key}");
            }
        }
        assert_eq!(owners.len(), 10, "each key is written");
    }
}
