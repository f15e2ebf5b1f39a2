//! The closed loop: each client is a task that starts its next operation when the previous one is answered.
//!
//! With a [`Pace`] it is an open loop: operations are due at a fixed rate, and latencies count from the due time. If the
//! server is too slow, operations wait for a free client, and the wait is part of their latency.
//!
//! All clients record into one [`Recorder`] behind a lock, so that the progress can be read at any time. The lock is
//! never contended on the current-thread runtime. Lock order: the recorder is the only lock, and is never held across
//! an await.

mod recorder;

use std::{
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, sleep_until, timeout},
};
use tonic::Status;

pub use self::recorder::Recorder;
use crate::{connection::Client, interrupt::Interrupt};

/// Maximum time that operations in flight may take after the end of the run.
const DRAIN_TIME_MAX: Duration = Duration::from_secs(10);
/// Maximum time that operations in flight may take after Ctrl-C.
const DRAIN_TIME_INTERRUPTED_MAX: Duration = Duration::from_secs(1);

/// Maximum number of operations of an open loop: those of months at the highest rate.
const SEQUENCE_MAX: u64 = 1 << 40;

/// Delay after a failed operation, so that a client whose operations fail immediately does not spin.
const ERROR_DELAY: Duration = Duration::from_millis(10);

/// One client of the closed loop.
pub trait Worker: Send + 'static {
    /// Maximum time in which no client receives an answer, in a run that has no deadline. After that the run ends.
    const SILENCE_MAX: Duration = Duration::from_secs(30);

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
    /// Number of operations that succeeded or failed, including those of the warm-up.
    answered: AtomicU64,
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
            answered: AtomicU64::new(0),
            began,
            measured_from,
            deadline: limits.duration.map(|duration| measured_from + duration),
            operations_left: AtomicU64::new(limits.total.unwrap_or(u64::MAX)),
            stopping: AtomicBool::new(false),
            recorder: Mutex::new(Recorder::new(measured_from)),
        })
    }

    /// Runs the workers until a limit is reached, the server no longer answers or the user interrupts the run.
    pub async fn drive<W: Worker>(self: &Arc<Self>, workers: Vec<W>, interrupt: &Interrupt) {
        let mut clients = JoinSet::new();
        for worker in workers {
            clients.spawn(Arc::clone(self).run_client(worker));
        }
        // Joining is cancel safe: it removes only completed tasks from the set.
        let end = tokio::select! {
            () = join_all(&mut clients) => End::Completed,
            () = self.wait_for_deadline() => End::Deadline,
            () = self.wait_for_silence(W::SILENCE_MAX) => End::Silence,
            () = interrupt.wait() => End::Interrupted,
        };
        // The open loop also sends the operations that were due before the deadline and have not been sent yet.
        if self.pace.is_none() || end == End::Interrupted {
            self.stop();
        }
        let drain_time = match end {
            End::Completed | End::Silence => Duration::ZERO,
            End::Deadline => DRAIN_TIME_MAX,
            End::Interrupted => DRAIN_TIME_INTERRUPTED_MAX,
        };
        let is_drained = timeout(drain_time, join_all(&mut clients)).await.is_ok();
        if interrupt.is_set() {
            return;
        }
        if !is_drained {
            self.recorder.lock().fail(clients.len() as u64, || match end {
                End::Silence => format!("no response within {:?}", W::SILENCE_MAX),
                End::Completed | End::Deadline | End::Interrupted => {
                    format!("no response within {DRAIN_TIME_MAX:?} after the end of the run")
                }
            });
        }
        self.count_unsent();
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
        let mut recorder = std::mem::replace(&mut *self.recorder.lock(), Recorder::new(self.measured_from));
        self.extend(&mut recorder);
        recorder
    }

    /// Extends the time of the measurements to the end of the run: to the deadline, or to now in a run that ended
    /// before it. Rates then include the time in which the server did not answer. A run without a duration ends with
    /// its last operation.
    pub fn extend(&self, recorder: &mut Recorder) {
        if let Some(deadline) = self.deadline {
            recorder.extend_to(deadline.min(Instant::now()));
        }
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
            self.answered.fetch_add(1, Relaxed);
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
        let due = self.due(pace, self.scheduled.fetch_add(1, Relaxed));
        if self.deadline.is_some_and(|deadline| due >= deadline) {
            return None;
        }
        if due > Instant::now() {
            sleep_until(due).await;
        }
        Some(due)
    }

    /// Returns the due time of an operation of the open loop.
    fn due(&self, pace: Pace, sequence: u64) -> Instant {
        self.began + Duration::from_secs_f64(sequence as f64 / pace.per_sec)
    }

    /// Returns the number of operations of the open loop that are due before `moment`.
    fn due_before(&self, pace: Pace, moment: Instant) -> u64 {
        let (mut count, mut max) = (0, SEQUENCE_MAX);
        while count < max {
            let middle = u64::midpoint(count, max);
            if self.due(pace, middle) < moment { count = middle + 1 } else { max = middle }
        }
        count
    }

    /// Records the operations of the open loop that were due and have not been sent as failed, unless the run was
    /// stopped before.
    fn count_unsent(&self) {
        let (Some(pace), Some(deadline)) = (self.pace, self.deadline) else { return };
        if self.stopping.load(Relaxed) {
            return;
        }
        // The clients have reserved all operations that they have sent, and one each that is due after the deadline.
        let sent = self.scheduled.load(Relaxed).max(self.due_before(pace, self.measured_from));
        let unsent = self.due_before(pace, deadline).saturating_sub(sent);
        self.recorder.lock().fail(unsent, || "not sent: the server was too slow".to_owned());
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

    /// Waits until no operation was answered for `silence_max`, which takes up to twice as long. Never completes in a
    /// run with a deadline.
    async fn wait_for_silence(&self, silence_max: Duration) {
        if self.deadline.is_some() {
            return std::future::pending().await;
        }
        loop {
            let answered = self.answered.load(Relaxed);
            sleep(silence_max).await;
            if self.answered.load(Relaxed) == answered {
                return;
            }
        }
    }
}

/// Why a run ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// All clients have stopped.
    Completed,
    Deadline,
    /// The server did not answer for too long, in a run without a deadline.
    Silence,
    Interrupted,
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
    async fn operations_that_an_open_loop_did_not_send_are_errors() {
        // Four operations are due in the warm-up and four after it. Each client also reserves one after the deadline.
        for (reserved, is_stopped, errors) in
            [(9, false, 0), (8, false, 0), (6, false, 2), (3, false, 4), (0, false, 4), (3, true, 0)]
        {
            let pace = Pace { per_sec: 4.0, latency_max: SECOND, late_max: 1 };
            let run = Run::begin_paced(pace, Limits { total: None, duration: Some(SECOND), warmup: SECOND });
            run.scheduled.store(reserved, Relaxed);
            if is_stopped {
                run.stop();
            }
            run.count_unsent();
            assert_eq!(run.finish().errors, errors, "{reserved} reserved");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn time_without_answers_counts() {
        let limits = Limits { total: None, duration: Some(9 * SECOND), warmup: SECOND };
        for (ends_after, elapsed) in [(20_u32, 9_u32), (10, 9), (5, 4), (2, 1), (1, 1)] {
            let run = Run::begin(limits);
            let measured_from = run.measured_from();
            run.recorder.lock().succeed(SECOND, measured_from + SECOND);
            sleep(ends_after * SECOND).await;
            assert_eq!(run.finish().elapsed(), elapsed * SECOND, "ended after {ends_after} s");
        }
        // A run of a number of operations ends with the last one.
        let run = Run::begin(Limits { total: Some(1), duration: None, warmup: Duration::ZERO });
        run.recorder.lock().succeed(SECOND, run.began() + SECOND);
        sleep(9 * SECOND).await;
        assert_eq!(run.finish().elapsed(), SECOND);
    }

    #[tokio::test(start_paused = true)]
    async fn run_without_a_deadline_ends_when_nothing_is_answered() {
        let run = Run::begin(Limits { total: Some(9), duration: None, warmup: Duration::ZERO });
        let answers = async {
            for pause in [20_u32, 20, 15] {
                sleep(pause * SECOND).await;
                run.answered.fetch_add(1, Relaxed);
            }
            std::future::pending().await
        };
        tokio::select! {
            () = run.wait_for_silence(30 * SECOND) => {}
            () = answers => {}
        }
        // The last answer came after 55 s. The run looks every 30 s.
        assert_eq!(run.began().elapsed(), 90 * SECOND);
        let run = Run::begin(Limits { total: None, duration: Some(SECOND), warmup: Duration::ZERO });
        assert!(timeout(900 * SECOND, run.wait_for_silence(30 * SECOND)).await.is_err());
    }
}
