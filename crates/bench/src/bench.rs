//! The context that all scenarios share: connections, keys, limits and the interrupt.

use std::{collections::BTreeMap, pin::pin, sync::Arc};

use orlop_client::{Endpoint, Target};
use tokio::time::sleep_until;

use crate::{
    args::{Common, Plan},
    closed_loop::{Limits, Recorder, Run, Worker},
    connection::Pool,
    error::Error,
    interrupt::Interrupt,
    keyspace::{KeySpace, filler_value},
    progress,
    report::{Report, Row},
    server_cpu::CpuMeter,
};

pub struct Bench {
    pub target: Target,
    pub plan: Plan,
    pub shows_progress: bool,
    /// `None` without `--server-pid`.
    pub cpu: Option<CpuMeter>,
    /// Whether an earlier run has written the keys.
    pub has_keys: bool,
    pub pool: Pool,
    pub keys: Arc<KeySpace>,
    pub interrupt: Interrupt,
}

impl Bench {
    /// Logs in, connects and checks that the prefix contains no keys.
    pub async fn prepare(common: &Common, plan: Plan, interrupt: Interrupt) -> Result<Self, Error> {
        Self::prepare_for(log_in(common).await?, common, plan, interrupt).await
    }

    /// Connects to `target` instead of the endpoints of the flags, and checks that the prefix contains no keys.
    pub async fn prepare_for(target: Target, common: &Common, plan: Plan, interrupt: Interrupt) -> Result<Self, Error> {
        let cpu = if common.server_pid.is_empty() { None } else { Some(CpuMeter::new(&common.server_pid)?) };
        let pool = Pool::connect(&target, plan.connections).await?;
        let keys = Arc::new(KeySpace::new(common.prefix(&plan)));
        if !common.existing {
            keys.claim(&mut pool.client(0), common.purge).await?;
        }
        let shows_progress = !common.json;
        Ok(Self { target, plan, shows_progress, cpu, has_keys: common.existing, pool, keys, interrupt })
    }

    /// Writes the keys that the scenario reads, unless `--existing` was given.
    pub async fn load(&self, keys: usize, value_size: usize) -> Result<(), Error> {
        if self.has_keys {
            return Ok(());
        }
        self.keys.load(&self.pool, keys, &filler_value(value_size), &self.interrupt).await
    }

    /// Returns one worker per client, made from the client's number.
    pub fn workers<W>(&self, worker: impl Fn(usize) -> W) -> Vec<W> {
        (0..self.plan.clients).map(worker).collect()
    }

    /// Returns the number of keys per client, rounded up.
    pub fn keys_per_client(&self, keys: usize) -> usize {
        keys.div_ceil(self.plan.clients)
    }

    /// Runs the measured load.
    pub async fn drive<W: Worker>(&self, workers: Vec<W>) -> Recorder {
        let run = Run::begin(self.plan.limits);
        self.observe(&run, run.drive(workers, &self.interrupt)).await;
        run.finish()
    }

    /// Runs a load that prepares the measured one.
    pub async fn drive_within<W: Worker>(&self, limits: Limits, workers: Vec<W>) -> Recorder {
        let run = Run::begin(limits);
        self.with_progress(&run, run.drive(workers, &self.interrupt)).await;
        run.finish()
    }

    /// Shows the progress of the run until `driven` completes, and measures the CPU time of the server after the warm-up.
    pub async fn observe(&self, run: &Run, driven: impl Future<Output = ()>) {
        let mut driven = pin!(self.with_progress(run, driven));
        tokio::select! {
            biased;
            () = &mut driven => return,
            () = sleep_until(run.measured_from()) => {}
        }
        self.measure_cpu(driven).await;
    }

    /// Measures the CPU time of the server until `load` completes.
    pub async fn measure_cpu<T>(&self, load: impl Future<Output = T>) -> T {
        let Some(cpu) = &self.cpu else { return load.await };
        let before = cpu.snapshot();
        let outcome = load.await;
        cpu.add_since(&before);
        outcome
    }

    /// Shows the progress of the run until `driven` completes.
    async fn with_progress(&self, run: &Run, driven: impl Future<Output = ()>) {
        if !self.shows_progress {
            return driven.await;
        }
        tokio::select! {
            () = driven => {}
            () = progress::show(run) => {}
        }
    }

    pub fn report(
        &self,
        scenario: &'static str,
        value_size: usize,
        recorder: &Recorder,
        extra: BTreeMap<&'static str, f64>,
    ) -> Report {
        let server_cpu = self.cpu.as_ref().map(|cpu| cpu.finish(recorder.latency.len()));
        let (server_cpu, cpu_error) = match server_cpu {
            Some(Ok(used)) => (Some(used), None),
            Some(Err(error)) => (None, Some(error)),
            None => (None, None),
        };
        Report {
            scenario,
            endpoints: self.target.endpoints.iter().map(Endpoint::to_string).collect(),
            clients: self.plan.clients,
            connections: self.pool.len(),
            value_size,
            interrupted: self.interrupt.is_set(),
            results: vec![Row::new(scenario, recorder)],
            steps: Vec::new(),
            extra,
            server_cpu,
            first_error: recorder.first_error.clone().or(cpu_error),
        }
    }
}

/// Returns the endpoints of the flags, with a token if the flags contain a user.
pub async fn log_in(common: &Common) -> Result<Target, Error> {
    Ok(Target::new(common.endpoints(), &common.credentials).await?)
}
