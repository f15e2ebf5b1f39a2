//! The soak test of one server: starts the load, samples the metrics and judges them.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::{
    task::JoinSet,
    time::{Instant, MissedTickBehavior, interval_at, sleep, sleep_until},
};
use tonic::Status;

use super::{
    churn,
    metrics::{MetricsReader, Sample},
    report::ServerResult,
    schedule::Schedule,
    stats::{Latencies, Stats},
    verdict,
};
use crate::{
    bench::Bench,
    compare::server::Server,
    error::Error,
    interrupt::Interrupt,
    keyspace::incompressible_value,
    kubernetes::{Kubernetes, OperationMix, Values},
};
use orlop_wire::proto::client::etcdserverpb::{CompactionRequest, SnapshotRequest};

/// Number of short-lived clients per second.
const CHURN_PER_SEC: f64 = 4.0;

/// Maximum time until the server has released the resources of disconnected clients. All leases expire within it.
const RELEASE_TIME_MAX: Duration = Duration::from_secs(60);

const RELEASE_POLL_INTERVAL: Duration = Duration::from_millis(100);

pub struct ServerRun<'a> {
    bench: Arc<Bench>,
    /// `None` if the server was running before the test.
    server: Option<&'a Server<'a>>,
    cluster: Kubernetes,
    schedule: Schedule,
    /// Operations per second.
    rate: usize,
    stats: Arc<Stats>,
}

impl<'a> ServerRun<'a> {
    pub fn new(
        bench: Arc<Bench>,
        server: Option<&'a Server<'a>>,
        cluster: Kubernetes,
        schedule: Schedule,
        rate: usize,
    ) -> Self {
        Self { bench, server, cluster, schedule, rate, stats: Arc::new(Stats::new()) }
    }

    pub async fn run(self, name: &'static str) -> Result<ServerResult, Error> {
        let metrics = MetricsReader::open(&self.bench.target, self.server).await?;
        let pod_revisions = self.cluster.load(&self.bench).await?;
        let before = metrics.read().await?;
        let readers = self.cluster.start_watches(&self.bench, &self.stats.events).await?;
        let began = Instant::now();
        let mut tasks = self.spawn_clients(began, &pod_revisions);
        let samples = self.sample(name, &metrics, began).await;
        let operations_due = (began.elapsed().as_millis() * self.rate as u128 / 1_000).try_into().unwrap_or(u64::MAX);
        tasks.shutdown().await;
        drop(readers);
        if self.server.is_none()
            && let Err(error) = self.bench.keys.clear(&mut self.bench.pool.client(0)).await
        {
            self.stats.record_error("deleting keys", &Status::unknown(error.to_string()));
        }
        let Self { bench, stats, schedule, rate, .. } = self;
        let interrupt = bench.interrupt.clone();
        // Closes the connections.
        drop(bench);
        let left_behind = wait_for_release(&metrics, &before, &interrupt).await.unwrap_or_else(|error| {
            stats.record_error("reading the metrics at the end", &Status::unknown(error.to_string()));
            Vec::new()
        });
        let verdicts = verdict::judge(&samples, schedule.compact_interval.as_secs_f64());
        let totals = std::mem::take(&mut *stats.totals.lock());
        let events = std::mem::take(&mut *stats.events.lock());
        Ok(ServerResult {
            not_run: None,
            server: name,
            operations: totals.operations,
            operations_due,
            rate: rate as u64,
            events: events.count,
            compactions: totals.compactions,
            visits: totals.visits,
            errors: totals.errors,
            first_error: totals.first_error.or(events.error),
            verdicts,
            left_behind,
            samples,
        })
    }

    fn spawn_clients(&self, began: Instant, pod_revisions: &[i64]) -> JoinSet<()> {
        let mut tasks = JoinSet::new();
        let values = Values::new(incompressible_value);
        let clients = self.bench.plan.clients;
        for number in 0..clients {
            let interval = Duration::from_secs_f64(clients as f64 / self.rate as f64);
            let first = began + interval.mul_f64(number as f64 / clients as f64);
            let mix = OperationMix::new(&self.bench, &self.cluster, values.clone(), pod_revisions, number);
            tasks.spawn(operate(mix, first, interval, Arc::clone(&self.stats)));
        }
        tasks.spawn(compact(Arc::clone(&self.bench), self.schedule, Arc::clone(&self.stats)));
        tasks.spawn(churn::run(Arc::clone(&self.bench), Arc::clone(&self.stats), CHURN_PER_SEC));
        tasks
    }

    /// Samples the metrics until the end of the test, an interrupt or the loss of the server.
    async fn sample(&self, name: &str, metrics: &MetricsReader<'_>, began: Instant) -> Vec<Sample> {
        let mut samples = Vec::new();
        let until = began + self.schedule.total;
        let mut due = interval_at(began + self.schedule.sample_interval, self.schedule.sample_interval);
        due.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                _ = due.tick() => {}
                () = sleep_until(until) => return samples,
                () = self.bench.interrupt.wait() => return samples,
            }
            match self.take_sample(metrics, began, samples.last()).await {
                Ok(sample) => samples.push(sample),
                Err(error) => {
                    eprintln!("{name}, after {:.0} s: {error}", began.elapsed().as_secs_f64());
                    self.stats.record_error("sampling metrics", &Status::unknown(error.to_string()));
                    if metrics.is_lost() {
                        return samples;
                    }
                }
            }
        }
    }

    async fn take_sample(
        &self,
        metrics: &MetricsReader<'_>,
        began: Instant,
        last: Option<&Sample>,
    ) -> Result<Sample, Error> {
        let latencies = std::mem::replace(&mut *self.stats.latencies.lock(), Latencies::new());
        let mut sample = metrics.read().await?;
        sample.secs = began.elapsed().as_secs_f64();
        sample.add_latency(&latencies.writes, &latencies.reads);
        sample.add_cpu(last);
        Ok(sample)
    }
}

/// Waits until the server has released the resources of all clients. Returns those that it still has after
/// the timeout.
async fn wait_for_release(
    metrics: &MetricsReader<'_>,
    before: &Sample,
    interrupt: &Interrupt,
) -> Result<Vec<String>, Error> {
    let deadline = Instant::now() + RELEASE_TIME_MAX;
    loop {
        let left = metrics.read().await?.client_resources_above(before);
        if left.is_empty() || Instant::now() > deadline || interrupt.is_set() {
            return Ok(left);
        }
        sleep(RELEASE_POLL_INTERVAL).await;
    }
}

/// Runs the operations of one client at fixed intervals. If an operation takes longer than the interval, the missed
/// operations are skipped: otherwise the client would make up for them at a higher rate than the configured one.
async fn operate(mut mix: OperationMix, first: Instant, interval: Duration, stats: Arc<Stats>) {
    let mut due = interval_at(first, interval);
    due.set_missed_tick_behavior(MissedTickBehavior::Skip);
    loop {
        due.tick().await;
        let began = Instant::now();
        let (kind, outcome) = mix.step().await;
        let nanos = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        match outcome {
            Ok(_) => {
                let mut latencies = stats.latencies.lock();
                let histogram = if kind.is_write() { &mut latencies.writes } else { &mut latencies.reads };
                histogram.saturating_record(nanos);
                drop(latencies);
                stats.totals.lock().operations += 1;
            }
            Err(status) => stats.record_error(kind.name(), &status),
        }
    }
}

/// Compacts the store periodically. Like kube-apiserver, it records the current revision and later compacts at the
/// recorded one. After each compaction it reads the first message of a snapshot and cancels the rest.
async fn compact(bench: Arc<Bench>, schedule: Schedule, stats: Arc<Stats>) {
    let client = bench.pool.client(0);
    let mut recorded = VecDeque::new();
    let mut compacted = 0;
    let mut due = interval_at(Instant::now() + schedule.compact_interval, schedule.compact_interval);
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        let now = due.tick().await;
        match bench.keys.revision(&client).await {
            Ok(revision) => recorded.push_back((now, revision)),
            Err(error) => stats.record_error("reading the revision", &Status::unknown(error.to_string())),
        }
        let mut old = None;
        while let Some((_, revision)) = recorded.pop_front_if(|(at, _)| now - *at >= schedule.compact_delay) {
            old = Some(revision);
        }
        // `None` if no recorded revision is old enough, or if nothing was written since the last compaction.
        let Some(revision) = old.filter(|revision| *revision > compacted) else { continue };
        compacted = revision;
        match client.kv.clone().compact(CompactionRequest { revision, physical: false }).await {
            Ok(_) => stats.totals.lock().compactions += 1,
            Err(status) => stats.record_error("compacting", &status),
        }
        let outcome = async { client.maintenance().snapshot(SnapshotRequest {}).await?.into_inner().message().await };
        if let Err(status) = outcome.await {
            stats.record_error("starting a snapshot", &status);
        }
    }
}
