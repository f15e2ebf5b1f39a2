//! Turns of long work: steps of a long range and pieces of a large answer, of which one is done at a time, with all that is
//! short in between.
//!
//! A runtime runs what is ready in the order in which it became so. Where a hundred clients list everything a hundred steps
//! would stand before a put, again at each place where it waits. So long work asks for its turn before each step; one is
//! given, and then whoever is ready comes first. Nobody holds a turn: one that is not used is gone, so that a client that
//! stops reading cannot keep it. Alone, it need not ask.
//!
//! What a step sets off goes on elsewhere: in the database, in the kernel, in clients of the same machine. Where that has no
//! processor left a short request waits there as well, behind what many steps set off. So beside short requests the next turn
//! waits, for a millisecond at most, until none of them waits for the database and what steps have set off is done; and turns
//! rest now and then, three times as long as they were given, so that at most a quarter of the time is left to all that is
//! long.
//!
//! What clients send is taken in at turns as well ([`Portions`]), and what is refused is told at one, as it costs the client
//! nothing to ask again. Those are brief and never rest, so that a put of 64 KiB does not wait for others' lists, unless all
//! that is sent takes more of the time than [`Allowance`] grants.

mod allowance;
mod portions;

use std::{
    future::poll_fn,
    sync::{
        Arc, Weak,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    task::{Context, Poll, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, mpsc},
    task::yield_now,
    time::{Instant, sleep, timeout},
};

use self::allowance::Allowance;

pub use self::portions::Portions;

/// How long turns are given before a rest. On a machine that has one core for the server, its database and a client, that
/// client's p99 for a put and a get is, beside floods, 0.27 ms more on SQLite with this, 0.37 with 0.3 ms, and 0.2 with half of
/// it: a client on the same core asks when turns rest, as the kernel lets a thread go on that does not sleep.
const STRETCH: Duration = Duration::from_micros(100);
/// So many times that is the rest, and at least the 1 to 2 ms that a timer can measure.
const REST: u32 = 3;
/// A rest is no longer, whatever the machine did in the meantime.
const REST_MAX: Duration = Duration::from_millis(10);
/// So long a turn may wait for what short requests and steps before it wait for.
const HOLD_MAX: Duration = Duration::from_millis(1);
/// So many bytes of a long request take as long to read as a short one, or less.
const REQUEST_BYTES: usize = 4 << 10;
/// What one step has set off counts for no more: it may have waited.
const SET_OFF_MAX: Duration = Duration::from_millis(1);

/// See the module's page.
#[derive(Debug)]
pub struct Turns {
    /// Works under way.
    works: AtomicUsize,
    brief: mpsc::UnboundedSender<Weak<Place>>,
    long: mpsc::UnboundedSender<Weak<Place>>,
    beside: Arc<Beside>,
    /// What long requests that were done amount to, in short ones.
    taken_in: AtomicU64,
    /// Of brief turns.
    allowance: Mutex<Allowance>,
}

/// What somebody asks a turn for.
#[derive(Clone, Copy, Debug)]
enum Kind {
    /// To take in a portion of what clients send.
    Brief,
    /// The same, where clients send too much.
    Excess,
    /// For a step of long work.
    Step,
}

/// What goes on beside the turns.
#[derive(Debug, Default)]
struct Beside {
    /// Short requests that were answered.
    answers: AtomicU64,
    /// Short requests that wait for the database.
    waiting: AtomicUsize,
    /// What steps have set off and is not done.
    under_way: AtomicUsize,
    /// Nothing of either is left.
    quiet: Notify,
    /// How long others were busy with what is done of it, since the last look, in nanoseconds.
    set_off: AtomicU64,
}

impl Beside {
    /// Whether there are short requests, when so many had been answered before.
    fn has_short(&self, answered: u64) -> bool {
        self.answers.load(Ordering::Relaxed) != answered || self.waiting.load(Ordering::Relaxed) > 0
    }

    /// Waits until no short request waits for the database, and what steps have set off is done. Not for ever: false if it
    /// took too long.
    async fn is_quiet(&self) -> bool {
        let quiet = async {
            loop {
                let quiet = self.quiet.notified();
                if self.waiting.load(Ordering::Relaxed) + self.under_way.load(Ordering::Relaxed) == 0 {
                    break;
                }
                quiet.await;
            }
        };
        timeout(HOLD_MAX, quiet).await.is_ok()
    }

    /// One less of those who wait, or of what is under way.
    fn end(&self, one: &AtomicUsize) {
        if one.fetch_sub(1, Ordering::Relaxed) == 1 {
            self.quiet.notify_waiters();
        }
    }

    fn take_set_off(&self) -> Duration {
        Duration::from_nanos(self.set_off.swap(0, Ordering::Relaxed))
    }
}

/// A place in the queue.
#[derive(Debug)]
struct Place {
    given: AtomicBool,
    waker: Mutex<Waker>,
    /// Until it is given.
    excess: Mutex<Option<Excess>>,
}

/// Somebody who sends too much, and waits for it.
#[derive(Debug)]
struct Excess(Arc<Turns>);

impl Excess {
    fn new(turns: &Arc<Turns>) -> Self {
        turns.allowance.lock().waits(Instant::now());
        Self(Arc::clone(turns))
    }
}

impl Drop for Excess {
    fn drop(&mut self) {
        self.0.allowance.lock().has_waited(Instant::now());
    }
}

impl Turns {
    /// And what gives them, as long as there is anybody who may ask.
    pub fn new() -> (Arc<Self>, impl Future<Output = ()> + Send + use<>) {
        let (brief, brief_asked) = mpsc::unbounded_channel();
        let (long, long_asked) = mpsc::unbounded_channel();
        let beside = Arc::new(Beside::default());
        let allowance = Mutex::new(Allowance::default());
        let turns = Self {
            works: AtomicUsize::new(0),
            brief,
            long,
            beside: Arc::clone(&beside),
            taken_in: AtomicU64::new(0),
            allowance,
        };
        let give = async move {
            tokio::join!(give(brief_asked, None), give(long_asked, Some(beside)));
        };
        (Arc::new(turns), give)
    }

    /// A short request is answered: turns rest now and then.
    pub fn leave_time(&self) {
        self.beside.answers.fetch_add(1, Ordering::Relaxed);
    }

    /// A request of so many bytes was done: what reading it took was not for nothing.
    pub fn taken_in(&self, bytes: usize) {
        if bytes >= REQUEST_BYTES {
            self.taken_in.fetch_add((bytes / REQUEST_BYTES) as u64, Ordering::Relaxed);
        }
    }

    /// Short requests wait for the database, for as long as this is held: the next turn waits for them, and turns rest as
    /// beside one that is answered. The database may be waiting for the processor that turns keep busy.
    pub fn leave_time_to_the_database(&self) -> Waiting {
        self.beside.waiting.fetch_add(1, Ordering::Relaxed);
        Waiting(Arc::clone(&self.beside))
    }

    /// A step of long work has somebody else busy, for as long as this is held: beside short requests the next step comes
    /// when that is done, and it counts for turns to rest.
    pub fn set_off(&self) -> SetOff {
        self.beside.under_way.fetch_add(1, Ordering::Relaxed);
        SetOff { beside: Arc::clone(&self.beside), begun: Instant::now() }
    }

    /// Lets others go first, after something of which clients may ask for more and more, and which takes so long.
    pub async fn after(self: &Arc<Self>, took: Duration) {
        let (mut asking, kind) = (self.asking(), self.after_portion(took));
        poll_fn(|context| asking.poll_given(kind, context)).await;
    }

    /// What to ask for after a portion that took so long.
    fn after_portion(&self, took: Duration) -> Kind {
        let mut allowance = self.allowance.lock();
        let answers = self.beside.answers.load(Ordering::Relaxed) + self.taken_in.load(Ordering::Relaxed);
        if allowance.is_exceeded(Instant::now(), took, answers) { Kind::Excess } else { Kind::Brief }
    }

    /// Work that has more than one step.
    pub fn work(self: &Arc<Self>) -> Work {
        self.works.fetch_add(1, Ordering::Relaxed);
        Work(self.asking())
    }

    /// What asks for turns without being work that others have to take turns with.
    fn asking(self: &Arc<Self>) -> Asking {
        Asking { turns: Arc::clone(self), place: None }
    }
}

/// Gives turns one after the other, with rests where it is told what is beside them.
async fn give(mut asked: mpsc::UnboundedReceiver<Weak<Place>>, beside: Option<Arc<Beside>>) {
    let (mut stretch, mut answered) = (Duration::ZERO, 0);
    while let Some(place) = asked.recv().await {
        let Some(place) = place.upgrade() else { continue };
        let began = Instant::now();
        place.given.store(true, Ordering::Release);
        place.waker.lock().wake_by_ref();
        // One who does not come for it waits no longer than this.
        let _excess = place.excess.lock().take();
        // Until all that was ready has had its chance.
        yield_now().await;
        let Some(beside) = &beside else { continue };
        let took = began.elapsed();
        // What was waited for and did not come in time was a rest.
        let has_rested = beside.has_short(answered) && !beside.is_quiet().await;
        let took = took + beside.take_set_off();
        stretch += took;
        // There is time for another one that is as long.
        if stretch + took <= STRETCH {
            continue;
        }
        let is_beside_short = beside.has_short(answered);
        // Those that are answered in the rest are a reason for the next one: turns may leave them no other time.
        answered = beside.answers.load(Ordering::Relaxed);
        if is_beside_short && !has_rested {
            sleep((stretch * REST).min(REST_MAX)).await;
        }
        stretch = Duration::ZERO;
    }
}

/// See [`Turns::leave_time_to_the_database`].
#[must_use]
#[derive(Debug)]
pub struct Waiting(Arc<Beside>);

impl Drop for Waiting {
    fn drop(&mut self) {
        self.0.end(&self.0.waiting);
    }
}

/// See [`Turns::set_off`].
#[must_use]
#[derive(Debug)]
pub struct SetOff {
    beside: Arc<Beside>,
    begun: Instant,
}

impl Drop for SetOff {
    fn drop(&mut self) {
        let time = self.begun.elapsed().min(SET_OFF_MAX);
        let nanos = u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        self.beside.set_off.fetch_add(nanos, Ordering::Relaxed);
        self.beside.end(&self.beside.under_way);
    }
}

/// Somebody who asks for a turn, or soon will.
#[derive(Debug)]
struct Asking {
    turns: Arc<Turns>,
    place: Option<Arc<Place>>,
}

impl Asking {
    /// Ready when it is its turn.
    fn poll_given(&mut self, kind: Kind, context: &mut Context<'_>) -> Poll<()> {
        if self.place.is_none() && !self.ask(kind, context) {
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
    fn ask(&mut self, kind: Kind, context: &Context<'_>) -> bool {
        let place = Arc::new(Place {
            given: AtomicBool::new(false),
            waker: Mutex::new(context.waker().clone()),
            excess: Mutex::new(matches!(kind, Kind::Excess).then(|| Excess::new(&self.turns))),
        });
        // Where nobody gives any more the server is at its end.
        let queue = match kind {
            Kind::Brief => &self.turns.brief,
            Kind::Excess | Kind::Step => &self.turns.long,
        };
        let asked = queue.send(Arc::downgrade(&place)).is_ok();
        self.place = asked.then_some(place);
        asked
    }
}

/// See [`Turns::work`].
#[derive(Debug)]
pub struct Work(Asking);

impl Work {
    /// Ready when the next step may be done.
    pub fn poll_turn(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.0.place.is_none() && self.0.turns.works.load(Ordering::Relaxed) < 2 {
            return Poll::Ready(());
        }
        self.0.poll_given(Kind::Step, context)
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
        self.0.turns.works.fetch_sub(1, Ordering::Relaxed);
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
        // Milliseconds of a step, what it sets off that takes as long, whether short requests are answered, whether one waits
        // for the database, and the rest.
        let rows = [
            (1, 0, false, false, 0),
            (1, 1, false, false, 0),
            (1, 0, true, false, 3),
            (1, 1, true, false, 6),
            (1, 2, true, false, 9),
            (2, 1, true, false, 9),
            (50, 0, true, false, 10),
            // What waits is waited for, which is rest enough.
            (1, 0, false, true, 1),
            (2, 0, true, true, 1),
        ];
        for (millis, set_off, is_short, waits, rested) in rows {
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
                let set_off: Vec<SetOff> = (0..set_off).map(|_| turns.set_off()).collect();
                tokio::time::advance(Duration::from_millis(millis)).await;
                drop(set_off);
            }
            works[0].turn().await;
            let rested = Duration::from_millis(20 * (millis + rested));
            let row = format!("{millis} ms a step that sets off {set_off}, beside short requests: {is_short}, {waits}");
            assert_eq!(began.elapsed(), rested, "{row}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn turns_are_given_without_a_rest_as_long_as_another_one_fits() {
        // What a turn takes, in microseconds, and how many there are before a rest.
        for (micros, turns_before) in [(110, 1), (60, 1), (50, 2), (40, 2), (25, 4)] {
            let (turns, give) = Turns::new();
            tokio::spawn(give);
            let mut works = [turns.work(), turns.work()];
            let mut rests = 0;
            for number in 0..24 {
                let asked = Instant::now();
                works[number % 2].turn().await;
                rests += usize::from(asked.elapsed() > Duration::from_micros(200));
                turns.leave_time();
                tokio::time::advance(Duration::from_micros(micros)).await;
            }
            assert!((24 / turns_before - 1..=24 / turns_before).contains(&rests), "{micros} us: {rests} rests");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn short_requests_that_are_answered_in_rests_are_a_reason_for_more() {
        let (turns, give) = Turns::new();
        tokio::spawn(give);
        let mut works = [turns.work(), turns.work()];
        turns.leave_time();
        let begun = Instant::now();
        for number in 0..20 {
            works[number % 2].turn().await;
            tokio::time::advance(Duration::from_millis(1)).await;
            sleep(Duration::from_millis(1)).await;
            turns.leave_time();
        }
        works[0].turn().await;
        assert_eq!(begun.elapsed(), Duration::from_millis(20 * (1 + 3)));
    }

    #[tokio::test(start_paused = true)]
    async fn beside_short_requests_the_next_turn_comes_when_what_is_under_way_is_done() {
        // Whether a short request was answered, whether one waits for the database, whether a step has set something off, and
        // whether the next turn waits for it.
        let rows = [
            (false, false, false, false),
            (true, false, false, false),
            (false, false, true, false),
            (true, false, true, true),
            (false, true, false, true),
            (true, true, true, true),
        ];
        for (is_short, waits, sets_off, is_held) in rows {
            for is_done in [true, false] {
                let (turns, give) = Turns::new();
                tokio::spawn(give);
                let mut works = [turns.work(), turns.work()];
                let waiting = waits.then(|| turns.leave_time_to_the_database());
                works[0].turn().await;
                if is_short {
                    turns.leave_time();
                }
                let set_off = sets_off.then(|| turns.set_off());
                let is_given = async |works: &mut [Work; 2]| {
                    for _ in 0..10 {
                        if !asks(&mut works[1]) {
                            return true;
                        }
                        // The clock stands still as long as something is ready.
                        yield_now().await;
                    }
                    false
                };
                let row = format!("{is_short}, {waits}, {sets_off}, done: {is_done}");
                assert_eq!(is_given(&mut works).await, !is_held, "{row}");
                if is_held && is_done {
                    drop((waiting, set_off));
                } else if is_held {
                    tokio::time::advance(HOLD_MAX - Duration::from_micros(1)).await;
                    assert!(!is_given(&mut works).await, "{row}");
                    // By which a timer may be late.
                    tokio::time::advance(Duration::from_millis(1)).await;
                }
                assert!(!is_held || is_given(&mut works).await, "{row}");
            }
        }
    }

    #[tokio::test]
    async fn what_clients_send_is_no_work_beside_which_a_list_takes_turns() {
        let (turns, give) = Turns::new();
        tokio::spawn(give);
        let mut list = turns.work();
        let mut portions = Portions::new(&turns, 1..=1);
        portions.took(Poll::Ready(1));
        assert!(poll_fn(|context| portions.poll(context)).now_or_never().is_none(), "it waits for a turn");
        assert!(!asks(&mut list));
    }

    /// What was rested while clients sent so many portions that took 50 microseconds each, and so many short requests were
    /// answered and so many bytes of long ones done in each.
    async fn rested(portions: u32, answered: usize, bytes: usize, waits: bool) -> Duration {
        const PORTION: Duration = Duration::from_micros(50);
        let (turns, give) = Turns::new();
        tokio::spawn(give);
        let _waiting = waits.then(|| turns.leave_time_to_the_database());
        let began = Instant::now();
        for _ in 0..portions {
            (0..answered).for_each(|_| turns.leave_time());
            turns.taken_in(bytes);
            turns.after(PORTION).await;
            tokio::time::advance(PORTION).await;
        }
        began.elapsed() - portions * PORTION
    }

    #[tokio::test(start_paused = true)]
    async fn beside_short_requests_floods_rest_and_what_is_answered_does_not() {
        // Portions, with each of them short requests answered and bytes of long ones done, whether one waits for the
        // database, and milliseconds of rests: one or two for each two portions that are too much, for each one where one waits.
        let rows = [
            (90, 0, 0, true, 0..=0),
            (1_000, 0, 0, false, 0..=0),
            (1_000, 0, 0, true, 850..=1_700),
            (1_000, 1, 0, false, 410..=825),
            (1_000, 10, 0, true, 0..=0),
            (1_000, 0, 4_095, true, 850..=1_700),
            (1_000, 1, 40 << 10, true, 0..=0),
            // What is long is nothing for which others rest.
            (1_000, 0, 4_096, false, 0..=0),
        ];
        for (portions, answered, bytes, waits, rests) in rows {
            let rested = rested(portions, answered, bytes, waits).await.as_millis();
            let row = format!("{portions} portions, {answered} answered, {bytes} bytes, {waits}");
            assert!(rests.contains(&rested), "{row}: {rested} ms of rests");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn who_does_not_come_for_a_turn_does_not_wait_for_it() {
        let (turns, give) = Turns::new();
        tokio::spawn(give);
        while let Kind::Brief = turns.after_portion(STRETCH) {}
        let mut asking = turns.asking();
        assert!(poll_fn(|context| asking.poll_given(Kind::Excess, context)).now_or_never().is_none());
        sleep(Duration::from_secs(10)).await;
        assert!(matches!(turns.after_portion(STRETCH), Kind::Brief), "time was granted");
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
