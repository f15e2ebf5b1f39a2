//! The scenario `kubernetes`: the requests that kube-apiserver sends for a cluster. Nodes renew their leases, which are
//! Kubernetes objects and not etcd's leases, and update their pods. Both are compare-and-swap transactions. Other
//! requests list pods in pages, count them and read the current revision. Watches receive all changes.
//!
//! With `--renewals` or `--find-nodes` it only renews leases, in an open loop ([`renewals`]).

mod objects;
mod renewals;
mod search;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use parking_lot::Mutex;
use tokio::{task::JoinSet, time::Instant};
use tonic::{Status, Streaming};

use orlop_client::describe;

use self::renewals::Renewals;
use crate::{
    args::{Common, Plan, parse_count, parse_keys},
    bench::Bench,
    closed_loop::{OpCounts, Recorder, Run, Worker},
    connection::Client,
    error::Error,
    keyspace::{KeySpace, filler_value},
    report::{Report, Row},
    summary::WatchSummary,
    watch::{next_response, open_stream},
    write::CompareAndSwap,
};
use orlop_wire::proto::client::etcdserverpb::{RangeRequest, WatchCreateRequest};

/// Size of a pod in bytes.
const POD_BYTES: usize = 2 << 10;
/// Size of a node's lease object in bytes.
const LEASE_BYTES: usize = 320;
/// Number of pods per page.
const PAGE_PAIRS: i64 = 500;

/// Parts of the key space: the first argument of [`KeySpace::key`]. This scenario has one part per kind of object
/// instead of one per client.
pub const PODS: usize = 0;
const LEASES: usize = 1;
/// A part without keys.
pub const EMPTY: usize = 2;

const NODES_DEFAULT: usize = 500;
const WATCHES_DEFAULT: usize = 60;

/// The scenario: all requests of kube-apiserver, or lease renewals only.
#[derive(Clone, Debug, clap::Args)]
pub struct Scenario {
    #[command(flatten)]
    cluster: Kubernetes,

    #[command(flatten)]
    renewals: Renewals,
}

impl Scenario {
    pub fn plan(&self, common: &Common) -> Result<Plan, Error> {
        if self.renewals.is_requested() {
            self.renewals.plan(common, self.cluster.nodes)
        } else {
            common.plan(64, None)
        }
    }

    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        if self.renewals.is_requested() {
            return self.renewals.measure(bench, self.cluster.nodes, self.cluster.watches).await;
        }
        self.cluster.measure(bench).await
    }
}

/// The size of the cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct Kubernetes {
    /// Number of nodes; each has a lease [default: 500]
    #[arg(long, value_parser = parse_keys, value_name = "N")]
    nodes: Option<usize>,

    /// Number of pods; each has 2 KiB
    #[arg(long, default_value = "5000", value_parser = parse_keys, value_name = "N")]
    pods: usize,

    /// Number of watches, each on its own stream: a third on the pods, a third on the leases, the rest on a prefix
    /// without keys [default: 60]
    #[arg(long, value_parser = parse_count, value_name = "N")]
    watches: Option<usize>,
}

/// The kinds of operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OperationKind {
    RenewLease,
    UpdatePod,
    /// Reads a key that does not exist, for the revision in the response header.
    Probe,
    Count,
    ListPage,
}

impl OperationKind {
    const ALL: [Self; 5] = [Self::RenewLease, Self::UpdatePod, Self::Probe, Self::Count, Self::ListPage];

    pub fn is_write(self) -> bool {
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

    /// Share of the operations, in percent.
    fn share(self) -> u64 {
        match self {
            Self::RenewLease => 50,
            Self::UpdatePod => 20,
            Self::Probe => 20,
            Self::Count => 6,
            Self::ListPage => 4,
        }
    }

    /// Maps a number from 0 to 99 to a kind, by the shares.
    fn from_percentile(mut number: u64) -> Self {
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
        let pod_revisions = self.load(bench).await?;
        let events = Arc::new(Mutex::new(Events::default()));
        // Aborts the readers when dropped.
        let _readers = self.start_watches(bench, &events).await?;

        let run = Run::begin(bench.plan.limits);
        let recorders = OperationKind::ALL.map(|_| Recorder::new(run.measured_from()));
        let by_kind = Arc::new(RecordersByKind {
            recorders: Mutex::new(recorders),
            measured_from_nanos: run.measured_from_nanos(),
        });
        let values = Values::new(filler_value);
        let worker = |number| MixWorker {
            mix: OperationMix::new(bench, self, values.clone(), &pod_revisions, number),
            by_kind: Arc::clone(&by_kind),
        };
        bench.observe(&run, run.drive(bench.workers(worker), &bench.interrupt)).await;
        let all = run.finish();

        let received = events.lock();
        let extra = BTreeMap::from([
            ("nodes", self.nodes() as f64),
            ("pods", self.pods as f64),
            ("watches", self.watches() as f64),
            ("events", received.count as f64),
            ("retries", all.counts.retries as f64),
        ]);
        let mut report = bench.report("kubernetes", POD_BYTES, &all, extra);
        let mut recorders = by_kind.recorders.lock();
        for recorder in recorders.iter_mut() {
            run.extend(recorder);
        }
        report.results.extend(
            OperationKind::ALL.iter().zip(recorders.iter()).map(|(kind, recorder)| Row::new(kind.name(), recorder)),
        );
        report.first_error = report.first_error.or_else(|| received.error.clone());
        Ok(report)
    }

    /// Returns the cluster with at most as many pods as `operations` can write `writes_per_pod_min` times each, but not
    /// reduced below `pods_min` pods. Nodes are reduced in proportion to pods.
    pub fn scaled_down(&self, operations: u64, writes_per_pod_min: u64, pods_min: usize) -> Self {
        let pods_max = operations * OperationKind::UpdatePod.share() / 100 / writes_per_pod_min;
        let pods_max = usize::try_from(pods_max).unwrap_or(usize::MAX).max(pods_min);
        let pods = self.pods.min(pods_max);
        Self { pods, nodes: Some((self.nodes() * pods / self.pods).max(1)), watches: self.watches }
    }

    fn nodes(&self) -> usize {
        self.nodes.unwrap_or(NODES_DEFAULT)
    }

    fn watches(&self) -> usize {
        self.watches.unwrap_or(WATCHES_DEFAULT)
    }

    pub fn pods(&self) -> usize {
        self.pods
    }

    /// Writes the pods. Returns their mod revisions, which kube-apiserver knows as well when it updates pods.
    pub async fn load(&self, bench: &Bench) -> Result<Vec<i64>, Error> {
        bench.load(self.pods, POD_BYTES).await?;
        bench.keys.mod_revisions(&bench.pool.client(0), self.pods).await
    }

    /// Opens the watches and starts their readers. The readers are aborted when the set is dropped.
    pub async fn start_watches(&self, bench: &Bench, events: &Arc<Mutex<Events>>) -> Result<JoinSet<()>, Error> {
        let mut readers = JoinSet::new();
        for number in 0..self.watches() {
            readers.spawn(count_events(self.open_watch(bench, number).await?, Arc::clone(events)));
        }
        Ok(readers)
    }

    async fn open_watch(&self, bench: &Bench, number: usize) -> Result<Streaming<WatchSummary>, Error> {
        let part = [PODS, LEASES, EMPTY][number * 3 / self.watches().max(1) % 3];
        let create = WatchCreateRequest {
            key: bench.keys.key(part, 0),
            range_end: bench.keys.key(part + 1, 0),
            progress_notify: true,
            ..WatchCreateRequest::default()
        };
        open_stream(bench, number, vec![create]).await
    }
}

/// The events that all watches received, and the first error of a watch.
#[derive(Debug, Default)]
pub struct Events {
    pub count: u64,
    pub error: Option<String>,
}

async fn count_events(mut responses: Streaming<WatchSummary>, events: Arc<Mutex<Events>>) {
    loop {
        match next_response(&mut responses).await {
            Ok(response) => events.lock().count += response.events.len() as u64,
            Err(error) => {
                events.lock().error.get_or_insert(error);
                return;
            }
        }
    }
}

/// The measurements of each kind of operation.
struct RecordersByKind {
    recorders: Mutex<[Recorder; OperationKind::ALL.len()]>,
    /// End of the warm-up, in nanoseconds since the start of the run.
    measured_from_nanos: u64,
}

#[derive(Clone, Copy, Debug)]
struct Cluster {
    nodes: usize,
    pods: usize,
    clients: usize,
}

impl Cluster {
    /// Returns the number of the key for a client's operation. Clients share no key, unless there are more
    /// clients than keys.
    fn own_key(self, keys: usize, client: usize, sequence: u64) -> u64 {
        let own = (keys.saturating_sub(client)).div_ceil(self.clients).max(1) as u64;
        (client as u64 + sequence % own * self.clients as u64).min(keys as u64 - 1)
    }
}

/// The operations of one client.
pub struct OperationMix {
    swap: CompareAndSwap,
    keys: Arc<KeySpace>,
    cluster: Cluster,
    number: usize,
    sequence: u64,
    values: Values,
}

/// The values of pods and leases: bytes without meaning, of realistic sizes.
#[derive(Clone)]
pub struct Values {
    pod: Bytes,
    lease: Bytes,
}

impl Values {
    /// `source` returns a value of the given size.
    pub fn new(source: impl Fn(usize) -> Bytes) -> Self {
        Self { pod: source(POD_BYTES), lease: source(LEASE_BYTES) }
    }
}

impl OperationMix {
    /// Returns the operations of the client with this number. `pod_revisions` contains the mod revision of each pod.
    pub fn new(bench: &Bench, cluster: &Kubernetes, values: Values, pod_revisions: &[i64], number: usize) -> Self {
        let clients = bench.plan.clients;
        let mut swap = CompareAndSwap::new(bench.pool.client(number));
        for (pod, revision) in pod_revisions.iter().enumerate().skip(number).step_by(clients) {
            swap.learn(bench.keys.key(PODS, pod as u64), *revision);
        }
        Self {
            swap,
            keys: Arc::clone(&bench.keys),
            cluster: Cluster { nodes: cluster.nodes(), pods: cluster.pods, clients },
            number,
            sequence: 0,
            values,
        }
    }

    /// Runs the next operation.
    pub async fn step(&mut self) -> (OperationKind, Result<OpCounts, Status>) {
        let sequence = self.sequence;
        self.sequence += 1;
        let kind = OperationKind::from_percentile((sequence * STRIDE + self.number as u64) % 100);
        (kind, self.run(kind, sequence).await)
    }

    async fn run(&mut self, kind: OperationKind, sequence: u64) -> Result<OpCounts, Status> {
        let Cluster { nodes, pods, .. } = self.cluster;
        let keys = &self.keys;
        let (request, expected) = match kind {
            OperationKind::RenewLease => {
                let key = keys.key(LEASES, self.cluster.own_key(nodes, self.number, sequence));
                return self.swap.update(key, self.values.lease.clone()).await;
            }
            OperationKind::UpdatePod => {
                let key = keys.key(PODS, self.cluster.own_key(pods, self.number, sequence));
                return self.swap.update(key, self.values.pod.clone()).await;
            }
            OperationKind::Probe => (RangeRequest { key: keys.key(EMPTY, 0), limit: 1, ..RangeRequest::default() }, 0),
            OperationKind::Count => (RangeRequest { count_only: true, ..self.pods_from(0) }, 0),
            OperationKind::ListPage => {
                let pages = (pods as u64).div_ceil(PAGE_PAIRS.unsigned_abs());
                let first = sequence % pages * PAGE_PAIRS.unsigned_abs();
                let expected = (pods as u64 - first).min(PAGE_PAIRS.unsigned_abs());
                (RangeRequest { limit: PAGE_PAIRS, ..self.pods_from(first) }, expected)
            }
        };
        let response = self.swap.client.range_exact(request, expected).await?;
        Ok(OpCounts { retries: 0, keys: response.kvs, bytes: response.bytes })
    }

    fn pods_from(&self, first: u64) -> RangeRequest {
        let end: Bytes = self.keys.key(PODS, self.cluster.pods as u64);
        RangeRequest { key: self.keys.key(PODS, first), range_end: end, ..RangeRequest::default() }
    }
}

/// Difference, modulo 100, between the numbers of two consecutive operations of a client. It is coprime with 100, so
/// that the kinds are well mixed.
const STRIDE: u64 = 37;

struct MixWorker {
    mix: OperationMix,
    by_kind: Arc<RecordersByKind>,
}

impl Worker for MixWorker {
    async fn step(&mut self, started: u64) -> Result<OpCounts, Status> {
        let began = Instant::now();
        let (kind, outcome) = self.mix.step().await;
        if started >= self.by_kind.measured_from_nanos {
            let now = Instant::now();
            let took: Duration = now - began;
            let mut recorders = self.by_kind.recorders.lock();
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
    fn operations_have_their_shares() {
        for kind in OperationKind::ALL {
            let sequences =
                (0..100).filter(|sequence| OperationKind::from_percentile(sequence * STRIDE % 100) == kind).count();
            assert_eq!(sequences as u64, kind.share(), "{kind:?}");
        }
    }

    #[test]
    fn clients_do_not_share_keys() {
        let cluster = Cluster { nodes: 10, pods: 10, clients: 4 };
        let mut owners = BTreeMap::new();
        for client in 0..4 {
            for sequence in 0..20 {
                let key = cluster.own_key(10, client, sequence);
                assert!(key < 10);
                assert_eq!(*owners.entry(key).or_insert(client), client, "key {key}");
            }
        }
        assert_eq!(owners.len(), 10, "each key is written");
    }
}
