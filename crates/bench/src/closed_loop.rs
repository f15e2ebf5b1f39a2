//! The closed loop: each client is a task that starts its next operation when the previous one is answered.
//!
//! With a [`Pace`] it is an open loop: operations are due at a fixed rate, and latencies count from the due time. If the
//! server is too slow, operations wait for a free client, and the wait is part of their latency.
//!
//! All clients record into one [`Recorder`] behind a lock, so that the progress can be read at any time. The lock is
//! never contended on the current-thread runtime. Lock order: the recorder is the only lock, and is never held across
//! an await.

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tonic::Status;

use orlop_client::describe;

use crate::{connection::Client, interrupt::Interrupt};

/// Maximum time that operations in flight may take after the end of the run.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(10);
/// Maximum time that operations in flight may take after Ctrl-C.
const DRAIN_TIME_INTERRUPTED_MAX: Duration = Duration::from_secs(1);

/// Delay after a failed operation, so that a client whose operations fail immediately does not spin.
const ERROR_DELAY: Duration = Duration::from_millis(10);

/// One client of the closed loop.
pub trait Worker: Send + 'static {
    /// Runs one operation. `started` is its start time, as returned by [`Run::nanos_at`].
    fn step(&mut self, started: u64) -> impl Future<Output = Result<OpCounts, Status>> + Send;

    fn client(&self) -> &Client;
}

/// Counters of one operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct OpCounts {
    /// Transactions that failed their comparison and were repeated.
    pub retries: u64,
    /// Keys or events received.
    pub keys: u64,
    /// Bytes received.
    pub bytes: u64,
}

/// The length of a run. At least one of `total` and `duration` is set.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Number of operations, not counting those of the warm-up.
    pub total: Option<u64>,
    /// Duration of the measured part, which follows the warm-up.
    pub duration: Option<Duration>,
    pub warmup: Duration,
}

/// The rate of an open loop, and when to give it up.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Pace {
    pub per_sec: f64,
    /// Operations that take longer are late.
    pub latency_max: Duration,
    /// Number of late operations after which the run ends early.
    pub late_max: u64,
}

/// One run of the loop, shared by all clients.
pub struct Run {
    limits: Limits,
    /// `None` in a closed loop.
    pace: Option<Pace>,
    /// Number of operations of the open loop that have a due time.
    scheduled: AtomicU64,
    /// Number of late operations.
    late: AtomicU64,
    began: Instant,
    measured_from: Instant,
    deadline: Option<Instant>,
    /// Number of measured operations that may still be started.
    operations_left: AtomicU64,
    stopping: AtomicBool,
    recorder: Mutex<Recorder>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Warmup,
    Measured,
}

impl Run {
    /// Returns a run that starts now.
    pub fn begin(limits: Limits) -> Arc<Self> {
        Self::begin_at(None, limits)
    }

    /// Returns an open loop that starts now.
    pub fn begin_paced(pace: Pace, limits: Limits) -> Arc<Self> {
        Self::begin_at(Some(pace), limits)
    }

    fn begin_at(pace: Option<Pace>, limits: Limits) -> Arc<Self> {
        debug_assert!(limits.total.is_some() || limits.duration.is_some(), "a run has a limit");
        let began = Instant::now();
        let measured_from = began + limits.warmup;
        Arc::new(Self {
            limits,
            pace,
            scheduled: AtomicU64::new(0),
            late: AtomicU64::new(0),
            began,
            measured_from,
            deadline: limits.duration.map(|duration| measured_from + duration),
            operations_left: AtomicU64::new(limits.total.unwrap_or(u64::MAX)),
            stopping: AtomicBool::new(false),
            recorder: Mutex::new(Recorder::new(measured_from)),
        })
    }

    /// Runs the workers until a limit is reached or the user presses Ctrl-C.
    pub async fn drive<W: Worker>(self: &Arc<Self>, workers: Vec<W>, interrupt: &Interrupt) {
        let mut clients = JoinSet::new();
        for worker in workers {
            clients.spawn(Arc::clone(self).run_client(worker));
        }
        // Joining is cancel safe: it removes only completed tasks from the set.
        let drain_time = tokio::select! {
            () = join_all(&mut clients) => return,
            () = self.wait_for_deadline() => DRAIN_TIME_MAX,
            () = interrupt.wait() => DRAIN_TIME_INTERRUPTED_MAX,
        };
        // The open loop also sends the operations that were due before the deadline and have not been sent yet.
        if self.pace.is_none() || drain_time == DRAIN_TIME_INTERRUPTED_MAX {
            self.stop();
        }
        if timeout(drain_time, join_all(&mut clients)).await.is_err() && drain_time == DRAIN_TIME_MAX {
            self.recorder.lock().fail(clients.len() as u64, || {
                format!("no response within {DRAIN_TIME_MAX:?} after the end of the run")
            });
        }
    }

    pub fn began(&self) -> Instant {
        self.began
    }

    /// Whether the open loop ended early because too many operations were late.
    pub fn is_given_up(&self) -> bool {
        self.pace.is_some_and(|pace| self.late.load(Relaxed) > pace.late_max)
    }

    /// Returns the time since the start of the run, in nanoseconds.
    pub fn nanos_at(&self, moment: Instant) -> u64 {
        u64::try_from(moment.duration_since(self.began).as_nanos()).unwrap_or(u64::MAX)
    }

    /// Returns the time from the start of the run to the end of the warm-up, in nanoseconds.
    pub fn measured_from_nanos(&self) -> u64 {
        self.nanos_at(self.measured_from)
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn measured_from(&self) -> Instant {
        self.measured_from
    }

    /// Prevents further operations. The run ends when the operations in flight are answered.
    pub fn stop(&self) {
        self.stopping.store(true, Relaxed);
    }

    /// Stops the run and returns the measurements.
    pub fn finish(&self) -> Recorder {
        self.stop();
        std::mem::replace(&mut *self.recorder.lock(), Recorder::new(self.measured_from))
    }

    /// Returns the progress of the run.
    pub fn progress(&self) -> Progress {
        let recorder = self.recorder.lock();
        Progress {
            count: recorder.latency.len(),
            errors: recorder.errors,
            p99_nanos: recorder.latency.value_at_quantile(0.99),
            elapsed: Instant::now().saturating_duration_since(self.measured_from),
        }
    }

    async fn run_client<W: Worker>(self: Arc<Self>, mut worker: W) {
        loop {
            let Some(started) = self.next_start().await else { return };
            let Some(phase) = self.admit(started) else { return };
            let outcome = worker.step(self.nanos_at(started)).await;
            if phase == Phase::Measured {
                let ended = Instant::now();
                self.recorder.lock().record(started, ended, &outcome);
                self.count_late(ended - started);
            }
            if outcome.is_err() {
                if worker.client().is_lost() {
                    return;
                }
                sleep(ERROR_DELAY).await;
            }
        }
    }

    /// Waits until the next operation is due. Returns its due time, which is now in a closed loop; `None` if it is due
    /// after the end of the run.
    async fn next_start(&self) -> Option<Instant> {
        let Some(pace) = self.pace else { return Some(Instant::now()) };
        let sequence = self.scheduled.fetch_add(1, Relaxed);
        let due = self.began + Duration::from_secs_f64(sequence as f64 / pace.per_sec);
        if self.deadline.is_some_and(|deadline| due >= deadline) {
            return None;
        }
        if due > Instant::now() {
            sleep_until(due).await;
        }
        Some(due)
    }

    /// Ends the open loop when too many operations are late.
    fn count_late(&self, took: Duration) {
        let Some(pace) = self.pace else { return };
        if took > pace.latency_max && self.late.fetch_add(1, Relaxed) >= pace.late_max {
            self.stop();
        }
    }

    /// Returns the phase of an operation that starts at `now`; `None` if the run is over.
    fn admit(&self, now: Instant) -> Option<Phase> {
        if self.stopping.load(Relaxed) || self.deadline.is_some_and(|deadline| now >= deadline) {
            return None;
        }
        if now < self.measured_from {
            return Some(Phase::Warmup);
        }
        let reserved = self.operations_left.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        reserved.ok().map(|_| Phase::Measured)
    }

    async fn wait_for_deadline(&self) {
        match self.deadline {
            Some(deadline) => sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    }
}

async fn join_all(clients: &mut JoinSet<()>) {
    while clients.join_next().await.is_some() {}
}

/// The measurements of a run so far.
#[derive(Clone, Copy, Debug)]
pub struct Progress {
    pub count: u64,
    pub errors: u64,
    pub p99_nanos: u64,
    /// Time since the end of the warm-up.
    pub elapsed: Duration,
}

/// The measurements of a run, or of one kind of operation in it.
pub struct Recorder {
    /// In nanoseconds.
    pub latency: Histogram<u64>,
    /// Sums over the successful operations.
    pub counts: OpCounts,
    pub errors: u64,
    pub first_error: Option<String>,
    measured_from: Instant,
    last_end: Instant,
}

impl Recorder {
    /// Returns an empty recorder for latencies from 1 us to 1 h with three significant digits. It uses a few hundred
    /// KiB.
    pub fn new(measured_from: Instant) -> Self {
        let latency = Histogram::new_with_bounds(1_000, 3_600_000_000_000, 3);
        Self {
            latency: latency.expect("the bounds are valid constants"),
            counts: OpCounts::default(),
            errors: 0,
            first_error: None,
            measured_from,
            last_end: measured_from,
        }
    }

    pub fn succeed(&mut self, took: Duration, ended: Instant) {
        self.latency.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        self.last_end = self.last_end.max(ended);
    }

    pub fn fail(&mut self, count: u64, describe: impl FnOnce() -> String) {
        self.errors += count;
        if count > 0 {
            self.first_error.get_or_insert_with(describe);
        }
    }

    /// Returns the time from the end of the warm-up to the end of the last successful operation.
    pub fn elapsed(&self) -> Duration {
        self.last_end - self.measured_from
    }

    fn record(&mut self, started: Instant, ended: Instant, outcome: &Result<OpCounts, Status>) {
        match outcome {
            Ok(counts) => {
                self.succeed(ended - started, ended);
                self.counts.retries += counts.retries;
                self.counts.keys += counts.keys;
                self.counts.bytes += counts.bytes;
            }
            Err(status) => self.fail(1, || describe(status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn warmup_operations_are_not_counted() {
        let run = Run::begin(Limits { total: Some(2), duration: None, warmup: SECOND });
        for _ in 0..10 {
            assert_eq!(run.admit(Instant::now()), Some(Phase::Warmup));
        }
        sleep(SECOND).await;
        let admitted: Vec<_> = (0..4).map(|_| run.admit(Instant::now())).collect();
        assert_eq!(admitted, [Some(Phase::Measured), Some(Phase::Measured), None, None]);
    }

    #[tokio::test(start_paused = true)]
    async fn duration_starts_after_the_warmup() {
        let run = Run::begin(Limits { total: None, duration: Some(SECOND), warmup: SECOND });
        sleep(SECOND).await;
        assert_eq!(run.admit(Instant::now()), Some(Phase::Measured));
        sleep(SECOND).await;
        assert_eq!(run.admit(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn finish_stops_the_run() {
        let run = Run::begin(Limits { total: Some(9), duration: None, warmup: Duration::ZERO });
        run.finish();
        assert_eq!(run.admit(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn operations_of_an_open_loop_are_due_at_the_rate() {
        let pace = Pace { per_sec: 4.0, latency_max: SECOND, late_max: 1 };
        let run = Run::begin_paced(pace, Limits { total: None, duration: Some(SECOND), warmup: SECOND });
        // The third operation starts when the clients are free, three seconds late.
        let mut due = Vec::new();
        for sequence in 0.. {
            let Some(moment) = run.next_start().await else { break };
            due.push((run.nanos_at(moment) / 1_000_000, run.admit(moment)));
            if sequence == 2 {
                sleep(3 * SECOND).await;
            }
        }
        let warmup = [0, 250, 500, 750].map(|due| (due, Some(Phase::Warmup)));
        let measured = [1_000, 1_250, 1_500, 1_750].map(|due| (due, Some(Phase::Measured)));
        assert_eq!(due, [warmup, measured].concat());
    }

    #[tokio::test(start_paused = true)]
    async fn open_loop_is_given_up_when_too_many_operations_are_late() {
        let pace = Pace { per_sec: 4.0, latency_max: SECOND, late_max: 1 };
        let run = Run::begin_paced(pace, Limits { total: None, duration: Some(SECOND), warmup: Duration::ZERO });
        for (took, is_given_up) in [(SECOND, false), (2 * SECOND, false), (SECOND, false), (2 * SECOND, true)] {
            run.count_late(took);
            assert_eq!(run.is_given_up(), is_given_up);
        }
        assert_eq!(run.admit(run.began()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn recorder_sums_successes_and_keeps_the_first_error() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        let counts = OpCounts { retries: 1, keys: 10, bytes: 100 };
        recorder.record(start, start + SECOND, &Ok(counts));
        recorder.record(start, start + SECOND / 2, &Ok(counts));
        recorder.record(start, start + 9 * SECOND, &Err(Status::unavailable("gone")));
        recorder.record(start, start + 9 * SECOND, &Err(Status::internal("later")));
        assert_eq!(recorder.counts, OpCounts { retries: 2, keys: 20, bytes: 200 });
        assert_eq!((recorder.latency.len(), recorder.errors), (2, 2));
        assert_eq!(recorder.first_error.as_deref(), Some("Unavailable: gone"));
        assert_eq!(recorder.elapsed(), SECOND);
    }
}
