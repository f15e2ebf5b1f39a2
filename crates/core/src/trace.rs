//! One request on its way: its number, what it asked for if that took long, and how long each part took.
//!
//! The parts are noted where they happen, in the task that serves the request; whoever began the trace ([`follow`]) has
//! them in the end. Outside of a request nothing is noted.

use std::{
    cell::RefCell,
    fmt,
    hash::{BuildHasher as _, RandomState},
    sync::{
        LazyLock,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

tokio::task_local! {
    static CURRENT: RefCell<Trace>;
}

/// Tells a request from all others, of this process and of others: half of it was drawn at the start.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RequestId(u64);

impl RequestId {
    fn next() -> Self {
        static RUN: LazyLock<u64> = LazyLock::new(|| RandomState::new().hash_one(0) << 32);
        static NEXT: AtomicU32 = AtomicU32::new(1);
        Self(*RUN | u64::from(NEXT.fetch_add(1, Ordering::Relaxed)))
    }
}

impl fmt::Display for RequestId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// What a request spends its time on, in the order in which that comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Waiting for the writer.
    Queue,
    /// Evaluation, with the batch before it.
    Evaluate,
    /// The append, and the changes applied.
    Commit,
    /// Asking where the log stands, for a read that must not be older.
    Confirm,
    /// Walking the index.
    Select,
    /// Pairs from the cache and the log.
    Read,
    /// From the answer to its last byte on the connection.
    Send,
}

impl Part {
    pub const ALL: [Self; 7] =
        [Self::Queue, Self::Evaluate, Self::Commit, Self::Confirm, Self::Select, Self::Read, Self::Send];

    pub fn name(self) -> &'static str {
        match self {
            Self::Queue => "queue",
            Self::Evaluate => "evaluate",
            Self::Commit => "commit",
            Self::Confirm => "confirm",
            Self::Select => "select",
            Self::Read => "read",
            Self::Send => "send",
        }
    }
}

/// See the module's page.
#[derive(Clone, Debug)]
pub struct Trace {
    pub id: RequestId,
    /// What was asked, without any value.
    pub request: Option<String>,
    parts: [Duration; Part::ALL.len()],
}

impl Trace {
    fn new() -> Self {
        Self { id: RequestId::next(), request: None, parts: Default::default() }
    }

    pub fn add(&mut self, part: Part, took: Duration) {
        self.parts[part as usize] += took;
    }

    /// `None`: it had no such part.
    pub fn part(&self, part: Part) -> Option<Duration> {
        Some(self.parts[part as usize]).filter(|took| !took.is_zero())
    }
}

/// Serves a request, and gives what was noted on the way.
pub async fn follow<T>(serve: impl Future<Output = T>) -> (T, Trace) {
    let noted = async {
        let outcome = serve.await;
        (outcome, CURRENT.with(|trace| trace.borrow().clone()))
    };
    CURRENT.scope(RefCell::new(Trace::new()), noted).await
}

/// Notes a part of the request at hand. Returns false where there is none.
pub fn note(part: Part, took: Duration) -> bool {
    CURRENT.try_with(|trace| trace.borrow_mut().add(part, took)).is_ok()
}

/// Notes what the request at hand asked for.
pub fn describe(request: impl FnOnce() -> String) {
    // Outside of a request there is nobody to know it.
    let _ = CURRENT.try_with(|trace| trace.borrow_mut().request = Some(request()));
}

/// The request at hand.
pub fn current() -> Option<RequestId> {
    CURRENT.try_with(|trace| trace.borrow().id).ok()
}
