//! Detects stuck loops: loops that have work but make no progress.
//!
//! Each loop of the core has a [`Pulse`]: the loop beats with each piece of work and rests when there is none. The
//! watchdog checks every second, in a thread of its own, so that it also detects a blocked runtime. A stuck loop is
//! logged once, sets `orlop_stuck_tasks` to 1, and makes `/livez` fail, because a restart may help.
//!
//! An unavailable database does not make a loop stuck: every database call ends after at most 12 s, and the loop then
//! beats and repeats the call. The limit ([`STUCK_AFTER`]) is several times the longest call. Time in which the
//! watchdog itself did not run (a stopped process, an overloaded machine) does not count.

use std::{
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use parking_lot::Mutex;
use prometheus::IntGaugeVec;
use tracing::{error, info};

/// Maximum time without a beat while there is work. One piece of work may make several database calls, each of at most
/// 12 s.
pub const STUCK_AFTER: Duration = Duration::from_secs(60);

const INTERVAL: Duration = Duration::from_secs(1);

/// The pulse of one loop. A beat costs one atomic addition.
#[derive(Debug, Default)]
pub struct Pulse {
    beats: AtomicU64,
    works: AtomicBool,
}

impl Pulse {
    /// Records progress of the loop.
    pub fn beat(&self) {
        self.works.store(true, Relaxed);
        self.beats.fetch_add(1, Relaxed);
    }

    /// Records that the loop has no work.
    pub fn rest(&self) {
        self.works.store(false, Relaxed);
        self.beats.fetch_add(1, Relaxed);
    }
}

/// Returns whether work is waiting for the loop.
type Waits = Box<dyn Fn() -> bool + Send>;

/// Checks all loops.
#[derive(Default)]
pub struct Watchdog(Mutex<Vec<Followed>>);

struct Followed {
    name: &'static str,
    pulse: Arc<Pulse>,
    waits: Waits,
    /// Number of beats at the last check.
    beats: u64,
    /// Time without a beat although there was work.
    silent: Duration,
}

impl fmt::Debug for Watchdog {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.lock().iter().map(|followed| followed.name)).finish()
    }
}

/// A stuck loop.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stuck {
    pub name: &'static str,
    pub silent: Duration,
}

impl fmt::Display for Stuck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} has made no progress for {} s", self.name, self.silent.as_secs())
    }
}

impl Watchdog {
    /// Adds a loop that has work from a beat until it rests.
    pub fn follow(&self, name: &'static str, pulse: &Arc<Pulse>) {
        self.follow_queue(name, pulse, || false);
    }

    /// Adds a loop that also has work while `waits` returns true, even if it rests: it should wake up and do the work.
    pub fn follow_queue(&self, name: &'static str, pulse: &Arc<Pulse>, waits: impl Fn() -> bool + Send + 'static) {
        let (pulse, waits) = (Arc::clone(pulse), Box::new(waits));
        self.0.lock().push(Followed { name, pulse, waits, beats: 0, silent: Duration::ZERO });
    }

    /// Returns the loops that were stuck at the last check.
    pub fn stuck(&self) -> Vec<Stuck> {
        let stuck = |followed: &Followed| {
            let Followed { name, silent, .. } = *followed;
            (silent >= STUCK_AFTER).then_some(Stuck { name, silent })
        };
        self.0.lock().iter().filter_map(stuck).collect()
    }

    /// Checks all loops; `passed` is the time since the last check. Returns the loops that have become stuck, and those
    /// that have recovered.
    fn check_all(&self, passed: Duration) -> (Vec<Stuck>, Vec<&'static str>) {
        // If the check is late, the watchdog itself did not run, and that time does not count.
        let passed = passed.min(2 * INTERVAL);
        let (mut stuck, mut recovered) = (Vec::new(), Vec::new());
        for followed in self.0.lock().iter_mut() {
            let was_stuck = followed.silent >= STUCK_AFTER;
            let beats = followed.pulse.beats.load(Relaxed);
            let has_work = followed.pulse.works.load(Relaxed) || (followed.waits)();
            followed.silent =
                if beats == followed.beats && has_work { followed.silent + passed } else { Duration::ZERO };
            followed.beats = beats;
            match (was_stuck, followed.silent >= STUCK_AFTER) {
                (false, true) => stuck.push(Stuck { name: followed.name, silent: followed.silent }),
                (true, false) => recovered.push(followed.name),
                (true, true) | (false, false) => {}
            }
        }
        (stuck, recovered)
    }

    /// Starts the checks, which run until the returned value is dropped. `gauge` is 1 for each stuck loop.
    ///
    /// # Errors
    ///
    /// If the thread cannot be started.
    pub fn start(self: &Arc<Self>, gauge: IntGaugeVec) -> std::io::Result<Watching> {
        let (stop, stopped) = mpsc::channel::<()>();
        for followed in &*self.0.lock() {
            gauge.with_label_values(&[followed.name]).set(0);
        }
        let watchdog = Arc::clone(self);
        let work = move || {
            let mut last = Instant::now();
            while stopped.recv_timeout(INTERVAL) == Err(mpsc::RecvTimeoutError::Timeout) {
                let now = Instant::now();
                watchdog.report(now - last, &gauge);
                last = now;
            }
        };
        thread::Builder::new().name("orlop-watchdog".to_owned()).spawn(work)?;
        Ok(Watching { _stop: stop })
    }

    fn report(&self, passed: Duration, gauge: &IntGaugeVec) {
        let (stuck, recovered) = self.check_all(passed);
        for Stuck { name, silent } in stuck {
            gauge.with_label_values(&[name]).set(1);
            error!(
                task = name,
                silent_secs = silent.as_secs(),
                "a task is stuck; /livez fails until it makes progress"
            );
        }
        for task in recovered {
            gauge.with_label_values(&[task]).set(0);
            info!(task, "the task makes progress again");
        }
    }
}

/// Stops the watchdog's thread when dropped.
#[must_use]
pub struct Watching {
    _stop: mpsc::Sender<()>,
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    /// The behavior of the loop during one second.
    #[derive(Clone, Copy)]
    enum Behavior {
        Beats,
        Rests,
        Nothing,
    }
    use Behavior::{Beats, Nothing, Rests};

    /// Runs each behavior for its number of seconds, and checks whether the loop is then stuck.
    #[track_caller]
    fn check(what: &str, waits: bool, history: &[(Behavior, u64)], is_stuck: bool) {
        let watchdog = Watchdog::default();
        let pulse = Arc::new(Pulse::default());
        watchdog.follow_queue("loop", &pulse, move || waits);
        for (behavior, seconds) in history {
            for _ in 0..*seconds {
                match behavior {
                    Beats => pulse.beat(),
                    Rests => pulse.rest(),
                    Nothing => {}
                }
                watchdog.check_all(SECOND);
            }
        }
        assert_eq!(!watchdog.stuck().is_empty(), is_stuck, "{what}");
    }

    #[test]
    fn loop_with_work_and_no_progress_is_stuck() {
        check("never any work", false, &[(Nothing, 500)], false);
        check("resting", false, &[(Beats, 9), (Rests, 1), (Nothing, 500)], false);
        check("working all the time", false, &[(Beats, 500)], false);
        check("one long piece of work", false, &[(Beats, 1), (Nothing, 59)], false);
        check("a piece of work that does not end", false, &[(Beats, 1), (Nothing, 60)], true);
        check(
            "long pieces of work, one after another",
            false,
            &[(Beats, 1), (Nothing, 50), (Beats, 1), (Nothing, 50)],
            false,
        );
        check("resting while work waits", true, &[(Rests, 1), (Nothing, 60)], true);
        check("running while work waits", true, &[(Rests, 500)], false);
        check("progress after being stuck", false, &[(Beats, 1), (Nothing, 90), (Beats, 1)], false);
    }

    #[test]
    fn stuck_and_recovered_tasks_are_each_reported_once() {
        let watchdog = Watchdog::default();
        let [writer, other] = ["writer", "other"].map(|name| {
            let pulse = Arc::new(Pulse::default());
            watchdog.follow(name, &pulse);
            pulse
        });
        writer.beat();
        let mut reports = Vec::new();
        for second in 0..200 {
            other.beat();
            if second == 100 {
                writer.beat();
            }
            let (stuck, recovered) = watchdog.check_all(SECOND);
            reports.extend(stuck.iter().map(|stuck| (second, stuck.to_string())));
            reports.extend(recovered.into_iter().map(|name| (second, format!("{name} recovered"))));
        }
        let stuck = "writer has made no progress for 60 s".to_owned();
        assert_eq!(reports, [(60, stuck.clone()), (100, "writer recovered".to_owned()), (160, stuck)]);
    }

    /// The process was stopped with SIGSTOP and resumed with SIGCONT.
    #[test]
    fn time_without_checks_does_not_count() {
        let watchdog = Watchdog::default();
        let pulse = Arc::new(Pulse::default());
        watchdog.follow("loop", &pulse);
        pulse.beat();
        watchdog.check_all(SECOND);
        watchdog.check_all(Duration::from_secs(3600));
        assert_eq!(watchdog.stuck(), []);
    }

    /// Runs in real time, because the thread has no simulated clock.
    #[test]
    fn thread_checks_loops_and_ends_when_dropped() {
        let watchdog = Arc::new(Watchdog::default());
        let pulse = Arc::new(Pulse::default());
        watchdog.follow("loop", &pulse);
        let gauge = IntGaugeVec::new(prometheus::Opts::new("stuck", "help"), &["task"]).unwrap();
        let watching = watchdog.start(gauge.clone()).unwrap();
        assert_eq!(gauge.with_label_values(&["loop"]).get(), 0);
        pulse.beat();
        let deadline = Instant::now() + Duration::from_secs(20);
        while watchdog.0.lock()[0].beats == 0 {
            assert!(Instant::now() < deadline, "the thread does not check the loops");
            thread::yield_now();
        }
        drop(watching);
        let weak = Arc::downgrade(&watchdog);
        drop(watchdog);
        while weak.strong_count() > 0 {
            assert!(Instant::now() < deadline, "the thread does not end");
            thread::yield_now();
        }
    }
}
