//! The closed loop: each client is a task that starts its next operation when the last one has been answered.
//!
//! All clients write into one [`Recorder`] behind a lock: on the current-thread runtime it is never contended, and what
//! was measured so far can be read at any time. Lock order: the recorder is the only lock, and is never held across an
//! await.

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
    time::{Instant, sleep, timeout},
};
use tonic::Status;

use super::{connection::Client, interrupt::Interrupt};

/// How long operations in flight may still take once the run is over.
const GRACE: Duration = Duration::from_secs(10);
const GRACE_INTERRUPTED: Duration = Duration::from_secs(1);

/// Keeps a client whose operations fail at once from spinning.
const PAUSE_AFTER_ERROR: Duration = Duration::from_millis(10);

/// One client of the closed loop.
pub trait Worker: Send + 'static {
    /// Does one operation. `stamp` tells when it started, see [`Run::stamp`].
    fn step(&mut self, stamp: u64) -> impl Future<Output = Result<Done, Status>> + Send;

    fn client(&self) -> &Client;
}

/// What one operation did, beside being answered.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    pub retries: u64,
    pub keys: u64,
    pub bytes: u64,
}

/// When a run ends; at least one of `total` and `duration` is given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Operations, those of the warm-up not counted.
    pub total: Option<u64>,
    /// From the end of the warm-up.
    pub duration: Option<Duration>,
    pub warmup: Duration,
}

/// One run of the closed loop, shared by its clients.
pub struct Run {
    limits: Limits,
    began: Instant,
    measured_from: Instant,
    deadline: Option<Instant>,
    /// Measured operations that may still start.
    tickets: AtomicU64,
    stopping: AtomicBool,
    recorder: Mutex<Recorder>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Phase {
    Warmup,
    Measured,
}

impl Run {
    /// A run that begins now.
    pub fn begin(limits: Limits) -> Arc<Self> {
        debug_assert!(limits.total.is_some() || limits.duration.is_some(), "a run ends");
        let began = Instant::now();
        let measured_from = began + limits.warmup;
        Arc::new(Self {
            limits,
            began,
            measured_from,
            deadline: limits.duration.map(|duration| measured_from + duration),
            tickets: AtomicU64::new(limits.total.unwrap_or(u64::MAX)),
            stopping: AtomicBool::new(false),
            recorder: Mutex::new(Recorder::new(measured_from)),
        })
    }

    /// Runs the workers until a limit is reached or the user interrupts.
    pub async fn drive<W: Worker>(self: &Arc<Self>, workers: Vec<W>, interrupt: &Interrupt) {
        let mut clients = JoinSet::new();
        for worker in workers {
            clients.spawn(Arc::clone(self).client(worker));
        }
        // Joining is cancel safe: nothing but the end of a task is consumed, and the set keeps the others.
        let grace = tokio::select! {
            () = join_all(&mut clients) => return,
            () = self.until_deadline() => GRACE,
            () = interrupt.wait() => GRACE_INTERRUPTED,
        };
        self.stop();
        if timeout(grace, join_all(&mut clients)).await.is_err() && grace == GRACE {
            self.recorder.lock().fail(clients.len() as u64, || format!("not answered within {GRACE:?} of the end"));
        }
    }

    /// The moment as nanoseconds since the run began.
    pub fn stamp(&self, moment: Instant) -> u64 {
        u64::try_from(moment.duration_since(self.began).as_nanos()).unwrap_or(u64::MAX)
    }

    /// The stamp from which operations are measured.
    pub fn stamp_measured_from(&self) -> u64 {
        self.stamp(self.measured_from)
    }

    pub fn limits(&self) -> Limits {
        self.limits
    }

    pub fn measured_from(&self) -> Instant {
        self.measured_from
    }

    /// Ends the run once the operations in flight are answered.
    pub fn stop(&self) {
        self.stopping.store(true, Relaxed);
    }

    /// Ends the run and takes what was measured.
    pub fn take(&self) -> Recorder {
        self.stop();
        std::mem::replace(&mut *self.recorder.lock(), Recorder::new(self.measured_from))
    }

    /// What was measured until now.
    pub fn so_far(&self) -> SoFar {
        let recorder = self.recorder.lock();
        SoFar {
            count: recorder.latency.len(),
            errors: recorder.errors,
            p99_nanos: recorder.latency.value_at_quantile(0.99),
            elapsed: Instant::now().saturating_duration_since(self.measured_from),
        }
    }

    async fn client<W: Worker>(self: Arc<Self>, mut worker: W) {
        loop {
            let started = Instant::now();
            let Some(phase) = self.admit(started) else { return };
            let outcome = worker.step(self.stamp(started)).await;
            if phase == Phase::Measured {
                self.recorder.lock().record(started, Instant::now(), &outcome);
            }
            if outcome.is_err() {
                if worker.client().is_lost() {
                    return;
                }
                sleep(PAUSE_AFTER_ERROR).await;
            }
        }
    }

    /// Whether an operation may start now, and whether it counts.
    fn admit(&self, now: Instant) -> Option<Phase> {
        if self.stopping.load(Relaxed) || self.deadline.is_some_and(|deadline| now >= deadline) {
            return None;
        }
        if now < self.measured_from {
            return Some(Phase::Warmup);
        }
        let ticket = self.tickets.fetch_update(Relaxed, Relaxed, |left| left.checked_sub(1));
        ticket.ok().map(|_| Phase::Measured)
    }

    async fn until_deadline(&self) {
        match self.deadline {
            Some(deadline) => tokio::time::sleep_until(deadline).await,
            None => std::future::pending().await,
        }
    }
}

async fn join_all(clients: &mut JoinSet<()>) {
    while clients.join_next().await.is_some() {}
}

/// A look at a run that goes on.
#[derive(Clone, Copy, Debug)]
pub struct SoFar {
    pub count: u64,
    pub errors: u64,
    pub p99_nanos: u64,
    /// Since the end of the warm-up.
    pub elapsed: Duration,
}

/// What was measured.
pub struct Recorder {
    /// Nanoseconds.
    pub latency: Histogram<u64>,
    /// Sums over the operations that succeeded.
    pub done: Done,
    pub errors: u64,
    pub first_error: Option<String>,
    measured_from: Instant,
    last_end: Instant,
}

impl Recorder {
    /// From a microsecond to an hour with three digits, a few hundred KiB.
    pub fn new(measured_from: Instant) -> Self {
        let latency = Histogram::new_with_bounds(1_000, 3_600_000_000_000, 3);
        Self {
            latency: latency.expect("the bounds are constants in the range that the histogram allows"),
            done: Done::default(),
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

    /// From the end of the warm-up to the end of the last operation that succeeded.
    pub fn elapsed(&self) -> Duration {
        self.last_end - self.measured_from
    }

    fn record(&mut self, started: Instant, ended: Instant, outcome: &Result<Done, Status>) {
        match outcome {
            Ok(done) => {
                self.succeed(ended - started, ended);
                self.done.retries += done.retries;
                self.done.keys += done.keys;
                self.done.bytes += done.bytes;
            }
            Err(status) => self.fail(1, || describe(status)),
        }
    }
}

/// The status with what caused it: a transport error says little by itself.
pub fn describe(status: &Status) -> String {
    let mut text = format!("{:?}: {}", status.code(), status.message());
    let mut source = std::error::Error::source(status);
    while let Some(error) = source {
        text = format!("{text}: {error}");
        source = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn warmup_takes_no_tickets() {
        let run = Run::begin(Limits { total: Some(2), duration: None, warmup: SECOND });
        for _ in 0..10 {
            assert_eq!(run.admit(Instant::now()), Some(Phase::Warmup));
        }
        sleep(SECOND).await;
        let admitted: Vec<_> = (0..4).map(|_| run.admit(Instant::now())).collect();
        assert_eq!(admitted, [Some(Phase::Measured), Some(Phase::Measured), None, None]);
    }

    #[tokio::test(start_paused = true)]
    async fn duration_counts_from_the_end_of_the_warmup() {
        let run = Run::begin(Limits { total: None, duration: Some(SECOND), warmup: SECOND });
        sleep(SECOND).await;
        assert_eq!(run.admit(Instant::now()), Some(Phase::Measured));
        sleep(SECOND).await;
        assert_eq!(run.admit(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn taking_the_result_ends_the_run() {
        let run = Run::begin(Limits { total: Some(9), duration: None, warmup: Duration::ZERO });
        run.take();
        assert_eq!(run.admit(Instant::now()), None);
    }

    #[tokio::test(start_paused = true)]
    async fn recorder_sums_successes_and_keeps_the_first_error() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        let done = Done { retries: 1, keys: 10, bytes: 100 };
        recorder.record(start, start + SECOND, &Ok(done));
        recorder.record(start, start + SECOND / 2, &Ok(done));
        recorder.record(start, start + 9 * SECOND, &Err(Status::unavailable("gone")));
        recorder.record(start, start + 9 * SECOND, &Err(Status::internal("later")));
        assert_eq!(recorder.done, Done { retries: 2, keys: 20, bytes: 200 });
        assert_eq!((recorder.latency.len(), recorder.errors), (2, 2));
        assert_eq!(recorder.first_error.as_deref(), Some("Unavailable: gone"));
        assert_eq!(recorder.elapsed(), SECOND);
    }
}
