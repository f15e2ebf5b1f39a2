//! Turns of long work: steps of a long range and pieces of a large answer, of which one is done at a time, with all that is
//! short in between.
//!
//! A runtime runs what is ready in the order in which it became so. Where a hundred clients list everything a hundred steps
//! would stand before a put, again at each place where it waits. So long work asks for its turn before each step; one is
//! given, and then whoever is ready comes first. Nobody holds a turn: one that is not used is gone, so that a client that
//! stops reading cannot keep it. Alone, it need not ask.
//!
//! What a step sets off goes on elsewhere: in the database, in the kernel, in clients of the same machine. Where that has no
//! processor left a short request waits there as well, behind what many steps set off. So turns rest now and then, while
//! short requests are answered or wait for the database: twice as long as they were given. That leaves a third of the time to
//! all that is long.

mod portions;

use std::{
    future::poll_fn,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::mpsc,
    task::yield_now,
    time::{Instant, sleep},
};

pub use self::portions::Portions;

/// How long turns are given before a rest: what a timer can measure.
const STRETCH: Duration = Duration::from_millis(1);
/// So many times that is the rest. Beside 64 clients that list 100 MB each the p99 of a put and a get, 1.0 to 1.7 ms without
/// them, is 9 ms without rests, 3.4 to 5 with rests as long as the turns, and 3 with these; on SQLite 7, 3 and 2.5.
const REST: u32 = 2;
/// A rest is no longer, whatever the machine did in the meantime.
const REST_MAX: Duration = Duration::from_millis(10);

/// See the module's page.
#[derive(Debug)]
pub struct Turns {
    /// Works under way.
    works: AtomicUsize,
    asked: mpsc::UnboundedSender<Weak<Place>>,
    short: Arc<Short>,
}

/// What is known of short requests.
#[derive(Debug, Default)]
struct Short {
    /// Whether one was answered since the last rest.
    answered: AtomicBool,
    /// Those that wait for the database.
    waiting: AtomicUsize,
}

impl Short {
    /// Whether there are any. From here on only those that are answered later count.
    fn take(&self) -> bool {
        self.answered.swap(false, Ordering::Relaxed) || self.waiting.load(Ordering::Relaxed) > 0
    }
}

/// A place in the queue.
#[derive(Debug)]
struct Place {
    given: AtomicBool,
    waker: Mutex<Waker>,
}

impl Turns {
    /// And what gives them, as long as there is anybody who may ask.
    pub fn new() -> (Arc<Self>, impl Future<Output = ()> + Send + use<>) {
        let (asked, mut waiting) = mpsc::unbounded_channel::<Weak<Place>>();
        let short = Arc::new(Short::default());
        let turns = Self { works: AtomicUsize::new(0), asked, short: Arc::clone(&short) };
        let give = async move {
            let mut stretch = Duration::ZERO;
            while let Some(place) = waiting.recv().await {
                let Some(place) = place.upgrade() else { continue };
                let began = Instant::now();
                place.given.store(true, Ordering::Release);
                place.waker.lock().wake_by_ref();
                // Until all that was ready has had its chance.
                yield_now().await;
                stretch += began.elapsed();
                if stretch < STRETCH {
                    continue;
                }
                if short.take() {
                    sleep((stretch * REST).min(REST_MAX)).await;
                }
                stretch = Duration::ZERO;
            }
        };
        (Arc::new(turns), give)
    }

    /// A short request is answered: turns rest now and then.
    pub fn leave_time(&self) {
        if !self.short.answered.load(Ordering::Relaxed) {
            self.short.answered.store(true, Ordering::Relaxed);
        }
    }

    /// Short requests wait for the database, for as long as this is held: turns rest as beside one that is answered. The
    /// database may be waiting for the processor that turns keep busy.
    pub fn leave_time_to_the_database(&self) -> Waiting {
        self.short.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(Arc::clone(&self.short))
    }

    /// Work that has more than one step.
    pub fn work(self: &Arc<Self>) -> Work {
        self.works.fetch_add(1, Ordering::Relaxed);
        Work { turns: Arc::clone(self), place: None }
    }
}

/// See [`Turns::leave_time_to_the_database`].
#[must_use]
#[derive(Debug)]
pub struct Waiting(Arc<Short>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.waiting.fetch_sub(1, Ordering::Relaxed);
    }
}

/// See [`Turns::work`].
#[derive(Debug)]
pub struct Work {
    turns: Arc<Turns>,
    place: Option<Arc<Place>>,
}

impl Work {
    /// Ready when the next step may be done.
    pub fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.place.is_none() && self.turns.works.load(Ordering::Relaxed) < 2 {
            return Poll::Ready(());
        }
        self.poll_given(context)
    }

    /// As [`Self::poll_turn`], where one who is alone asks as well: for who cannot step back otherwise.
    pub fn poll_given(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.place.is_none() && !self.ask(context) {
            return Poll::Ready(());
        }
        let Some(place) = &self.place else { return Poll::Ready(()) };
        place.waker.lock().clone_from(context.waker());
        if !place.given.load(Ordering::Acquire) {
            return Poll::Pending;
        }
        self.place = None;
        Poll::Ready(())
    }

    /// Whether there is anybody to ask.
    fn ask(&mut self, context: &Context<'_>) -> bool {
        let place = Place { given: AtomicBool::new(false), waker: Mutex::new(context.waker().clone()) };
        let place = Arc::new(place);
        // Where nobody gives any more the server is at its end.
        let asked = self.turns.asked.send(Arc::downgrade(&place)).is_ok();
        self.place = asked.then_some(place);
        asked
    }

    /// Waits until the next step may be done, and lets others go first in any case.
    pub async fn turn(&mut self) {
        if poll_fn(|context| Poll::Ready(self.poll_turn(context))).await.is_ready() {
            yield_now().await;
        } else {
            poll_fn(|context| self.poll_turn(context)).await;
        }
    }
}

impl Drop for Work {
    fn drop(&mut self) {
        self.turns.works.fetch_sub(1, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tokio::time::timeout;

    use super::*;

    fn asks(work: &mut Work) -> bool {
        poll_fn(|context| work.poll_turn(context)).now_or_never().is_none()
    }

    #[test]
    fn who_is_alone_need_not_ask() {
        let (turns, _give) = Turns::new();
        let mut work = turns.work();
        assert!(!asks(&mut work) && !asks(&mut work));
        let other = turns.work();
        assert!(asks(&mut work));
        drop(other);
        drop(work);
        assert!(!asks(&mut turns.work()));
    }

    #[tokio::test]
    async fn between_two_turns_all_that_is_ready_runs() {
        let (turns, give) = Turns::new();
        tokio::spawn(give);
        let steps = Arc::new(AtomicUsize::new(0));
        for _ in 0..100 {
            let (mut work, steps) = (turns.work(), Arc::clone(&steps));
            tokio::spawn(async move {
                loop {
                    work.turn().await;
                    steps.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut before = 0;
        for _ in 0..1_000 {
            yield_now().await;
            let now = steps.load(Ordering::Relaxed);
            assert!(now - before <= 2, "{} steps in one round", now - before);
            before = now;
        }
        assert!(before >= 400, "{before} steps");
    }

    #[tokio::test(start_paused = true)]
    async fn beside_short_requests_turns_rest() {
        // Milliseconds of a step, whether short requests are answered, whether one waits for the database, and the rest.
        let rows = [
            (1, false, false, 0),
            (1, true, false, 2),
            (1, false, true, 2),
            (4, true, false, 8),
            (4, true, true, 8),
            (50, true, false, 10),
        ];
        for (millis, is_short, waits, rested) in rows {
            let (turns, give) = Turns::new();
            tokio::spawn(give);
            drop(turns.leave_time_to_the_database());
            let _waiting = waits.then(|| turns.leave_time_to_the_database());
            let mut works = [turns.work(), turns.work()];
            let began = Instant::now();
            for number in 0..20 {
                works[number % 2].turn().await;
                if is_short {
                    turns.leave_time();
                }
                tokio::time::advance(Duration::from_millis(millis)).await;
            }
            works[0].turn().await;
            let rested = Duration::from_millis(20 * (millis + rested));
            assert_eq!(began.elapsed(), rested, "{millis} ms a step, beside short requests: {is_short}, {waits}");
        }
    }

    #[tokio::test]
    async fn turns_that_are_not_used_keep_nobody_out() {
        let (turns, give) = Turns::new();
        tokio::spawn(give);
        // Each asks, and then never comes back; some are gone.
        let mut idle: Vec<Work> = (0..10).map(|_| turns.work()).collect();
        idle.iter_mut().for_each(|work| assert!(asks(work)));
        idle.truncate(5);
        let mut work = turns.work();
        for _ in 0..10 {
            timeout(Duration::from_secs(10), work.turn()).await.expect("a turn");
        }
        drop(idle);
    }
}
