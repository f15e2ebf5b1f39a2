//! Runs the tasks of a simulation one at a time under tokio's paused clock: each step polls a random woken task, and
//! when no task is woken the clock advances to the next timer.
//!
//! The next task is drawn from the woken tasks sorted by number, because tokio does not fully define the order of
//! wakeups. Tasks belong to groups (an instance, the database, the world), which can be paused and killed at any await
//! point.

use std::{
    cell::{Cell, RefCell},
    collections::{BTreeMap, BTreeSet},
    future::poll_fn,
    pin::Pin,
    rc::Rc,
    sync::Arc,
    task::{Context, Poll, Wake, Waker},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::time::Instant;

use super::random;
use orlop_core::store::tasks;

pub(super) type Group = u64;

/// Clients and fault injection.
pub(super) const WORLD: Group = 0;
/// Work inside the database, requested by any instance.
pub(super) const DATABASE: Group = 1;

/// A run that takes longer than this in simulated time is stuck.
const TIME_MAX: Duration = Duration::from_secs(1_200);

thread_local! {
    static CURRENT: RefCell<Option<Rc<Scheduler>>> = const { RefCell::new(None) };
}

/// The result of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Report {
    pub steps: u64,
    pub elapsed: Duration,
    /// A hash of the task and the time of every step, and of the head after every append.
    pub trace: u64,
}

#[derive(Default)]
struct Scheduler {
    tasks: RefCell<BTreeMap<u64, Task>>,
    woken: Arc<Mutex<Woken>>,
    paused: RefCell<BTreeSet<Group>>,
    /// The group of the polled task.
    group: Cell<Group>,
    next_number: Cell<u64>,
    steps: Cell<u64>,
    started: Cell<Option<Instant>>,
    trace: Cell<u64>,
}

struct Task {
    group: Group,
    waker: Waker,
    /// `None` while it is polled.
    future: Option<Pin<Box<dyn Future<Output = ()>>>>,
}

#[derive(Default)]
struct Woken {
    tasks: BTreeSet<u64>,
    /// The waker of the scheduler itself while it sleeps.
    scheduler: Option<Waker>,
}

struct TaskWaker {
    task: u64,
    woken: Arc<Mutex<Woken>>,
}

impl Wake for TaskWaker {
    fn wake(self: Arc<Self>) {
        let mut woken = self.woken.lock();
        woken.tasks.insert(self.task);
        let scheduler = woken.scheduler.take();
        drop(woken);
        if let Some(scheduler) = scheduler {
            scheduler.wake();
        }
    }
}

/// Runs `main` and all tasks that it spawns, until `main` ends.
pub(super) fn run(seed: u64, main: impl Future<Output = ()> + 'static) -> Report {
    random::seed(seed);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().start_paused(true).build();
    let runtime = runtime.expect("a runtime can be built");
    let scheduler = Rc::new(Scheduler::default());
    CURRENT.set(Some(Rc::clone(&scheduler)));
    tasks::set_spawner(Some(|task| {
        spawn(task);
    }));
    let main = spawn_in(WORLD, main);
    let started = runtime.block_on(async { Instant::now() });
    scheduler.started.set(Some(started));
    runtime.block_on(poll_fn(|context| scheduler.poll(context, main)));
    let elapsed = runtime.block_on(async { started.elapsed() });
    let left = std::mem::take(&mut *scheduler.tasks.borrow_mut());
    drop(left);
    tasks::set_spawner(None);
    CURRENT.set(None);
    Report { steps: scheduler.steps.get(), elapsed, trace: scheduler.trace.get() }
}

fn current() -> Rc<Scheduler> {
    CURRENT.with_borrow(|current| current.clone().expect("a simulation runs on this thread"))
}

/// Spawns a task in the group of the calling task.
pub(super) fn spawn(task: impl Future<Output = ()> + 'static) -> u64 {
    spawn_in(current().group.get(), task)
}

pub(super) fn spawn_in(group: Group, task: impl Future<Output = ()> + 'static) -> u64 {
    let scheduler = current();
    let number = scheduler.next_number.get();
    scheduler.next_number.set(number + 1);
    let waker = Waker::from(Arc::new(TaskWaker { task: number, woken: Arc::clone(&scheduler.woken) }));
    waker.wake_by_ref();
    // Without tokio's cooperative budget, which the whole scheduler would share.
    let future = Some(Box::pin(tokio::task::unconstrained(task)) as Pin<Box<_>>);
    scheduler.tasks.borrow_mut().insert(number, Task { group, waker, future });
    number
}

pub(super) fn abort(task: u64) {
    let aborted = current().tasks.borrow_mut().remove(&task);
    drop(aborted);
}

/// Drops all tasks of a group.
pub(super) fn kill(group: Group) {
    let scheduler = current();
    scheduler.paused.borrow_mut().remove(&group);
    let killed: Vec<Task> =
        scheduler.tasks.borrow_mut().extract_if(.., |_, task| task.group == group).map(|(_, task)| task).collect();
    drop(killed);
}

/// Polls no task of a group until it is resumed.
pub(super) fn pause(group: Group) {
    current().paused.borrow_mut().insert(group);
}

pub(super) fn resume(group: Group) {
    let scheduler = current();
    scheduler.paused.borrow_mut().remove(&group);
    let sleeping = scheduler.woken.lock().scheduler.take();
    sleeping.into_iter().for_each(Waker::wake);
}

/// Returns the simulated time since the start of the run.
pub(super) fn elapsed() -> Duration {
    current().started.get().map_or(Duration::ZERO, |started| started.elapsed())
}

/// Adds a value to the trace hash.
pub(super) fn note(what: u64) {
    let scheduler = current();
    scheduler.trace.set((scheduler.trace.get() ^ what).wrapping_mul(0x0000_0100_0000_01b3).rotate_left(5));
}

impl Scheduler {
    fn poll(&self, context: &mut Context<'_>, main: u64) -> Poll<()> {
        loop {
            let Some(task) = self.next() else {
                self.woken.lock().scheduler = Some(context.waker().clone());
                return Poll::Pending;
            };
            note(task);
            note(u64::try_from(elapsed().as_millis()).unwrap_or_default());
            assert!(elapsed() < TIME_MAX, "the run does not end");
            self.step(task);
            if !self.tasks.borrow().contains_key(&main) {
                return Poll::Ready(());
            }
            // From time to time, tasks that yielded (tokio's yield_now) are polled before the others have finished.
            if random::below(16) == 0 {
                context.waker().wake_by_ref();
                return Poll::Pending;
            }
        }
    }

    fn next(&self) -> Option<u64> {
        let mut woken = self.woken.lock();
        let (tasks, paused) = (self.tasks.borrow(), self.paused.borrow());
        woken.tasks.retain(|task| tasks.contains_key(task));
        let runnable: Vec<u64> =
            woken.tasks.iter().copied().filter(|task| !paused.contains(&tasks[task].group)).collect();
        if runnable.is_empty() {
            return None;
        }
        let next = runnable[random::below(runnable.len())];
        woken.tasks.remove(&next);
        Some(next)
    }

    fn step(&self, number: u64) {
        self.steps.set(self.steps.get() + 1);
        let (group, waker, future) = {
            let mut tasks = self.tasks.borrow_mut();
            let task = tasks.get_mut(&number).expect("the number was drawn from existing tasks");
            (task.group, task.waker.clone(), task.future.take())
        };
        let mut future = future.expect("no other poll of the task is in progress");
        self.group.set(group);
        let done = future.as_mut().poll(&mut Context::from_waker(&waker)).is_ready();
        self.group.set(WORLD);
        if done {
            let ended = self.tasks.borrow_mut().remove(&number);
            drop(ended);
        } else if let Some(task) = self.tasks.borrow_mut().get_mut(&number) {
            task.future = Some(future);
            return;
        }
        drop(future);
    }
}
