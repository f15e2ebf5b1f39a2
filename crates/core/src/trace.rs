//! The trace of one request: its ID, the duration of each part, and for a slow request a description.
//!
//! Parts are recorded where they happen, in the task that serves the request; the code that started the trace
//! ([`follow`]) receives them at the end. Outside of a request nothing is recorded.

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

use tokio::time::Instant;

/// Target of the log lines about requests, one for each.
pub const REQUESTS: &str = "orlop::requests";

tokio::task_local! {
    static CURRENT: RefCell<Trace>;
}

/// Identifies a request among all processes: the upper half is chosen at random when the process starts.
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

/// The parts of a request's time, in the order in which they occur.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Part {
    /// Waiting for the writer.
    Queue,
    /// Evaluation, including that of the requests before this one in the batch.
    Evaluate,
    /// The append, and applying the changes.
    Commit,
    /// Reading the log's position for a linearizable read.
    Confirm,
    /// Walking the index.
    Select,
    /// Reading pairs from the cache and the log.
    Read,
    /// From the response to its last byte on the connection.
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

/// The trace of a request that is being served.
#[derive(Clone, Debug)]
pub struct Trace {
    pub id: RequestId,
    /// A description of the request, without values. Set only if the request was or may become slow, or if requests are
    /// logged.
    pub request: Option<String>,
    /// Bytes of the request, if requests are logged.
    pub request_bytes: usize,
    /// When the last part of the request arrived, if the server had to wait for it.
    pub received: Option<Instant>,
    /// Whether the server waits for a part of the request. A request that ends like this has never arrived completely.
    pub is_awaited: bool,
    /// Number of pairs in the response to a range.
    pub pairs: Option<usize>,
    parts: [Duration; Part::ALL.len()],
}

impl Trace {
    fn new() -> Self {
        let (id, parts) = (RequestId::next(), Default::default());
        Self { id, request: None, request_bytes: 0, received: None, is_awaited: false, pairs: None, parts }
    }

    pub fn add(&mut self, part: Part, took: Duration) {
        self.parts[part as usize] += took;
    }

    /// Returns the duration of a part; `None` if it did not occur.
    pub fn part(&self, part: Part) -> Option<Duration> {
        Some(self.parts[part as usize]).filter(|took| !took.is_zero())
    }
}

/// Serves a request, and passes its trace to `finish` when it ends or is dropped.
pub async fn follow<T>(serve: impl Future<Output = T>, finish: impl FnOnce(Trace)) -> T {
    let traced = async {
        let _finish = Finish(Some(finish));
        serve.await
    };
    // The future is also dropped in this scope.
    CURRENT.scope(RefCell::new(Trace::new()), traced).await
}

struct Finish<F: FnOnce(Trace)>(Option<F>);

impl<F: FnOnce(Trace)> Drop for Finish<F> {
    fn drop(&mut self) {
        if let (Some(finish), Ok(trace)) = (self.0.take(), CURRENT.try_with(|trace| trace.borrow().clone())) {
            finish(trace);
        }
    }
}

/// Adds time to a part of the current request. Returns false outside of a request.
pub fn add_to_part(part: Part, took: Duration) -> bool {
    CURRENT.try_with(|trace| trace.borrow_mut().add(part, took)).is_ok()
}

/// Returns whether every request is logged.
pub fn are_requests_logged() -> bool {
    tracing::enabled!(target: REQUESTS, tracing::Level::DEBUG)
}

/// Adds bytes to the size of the current request.
pub fn add_request_bytes(bytes: usize) {
    // Outside of a request there is no trace.
    let _ = CURRENT.try_with(|trace| trace.borrow_mut().request_bytes += bytes);
}

/// Records that the server waits for a part of the current request.
pub fn set_awaited() {
    // Outside of a request there is no trace.
    let _ = CURRENT.try_with(|trace| trace.borrow_mut().is_awaited = true);
}

/// Records that a part of the current request has arrived for which the server had to wait.
pub fn set_received() {
    // Outside of a request there is no trace.
    let _ = CURRENT.try_with(|trace| {
        let mut trace = trace.borrow_mut();
        (trace.received, trace.is_awaited) = (Some(Instant::now()), false);
    });
}

/// Records the number of pairs in the response to the current request.
pub fn set_pairs(pairs: usize) {
    // Outside of a request there is no trace.
    let _ = CURRENT.try_with(|trace| trace.borrow_mut().pairs = Some(pairs));
}

/// Records the description of the current request.
pub fn set_request(request: impl FnOnce() -> String) {
    // Outside of a request there is no trace.
    let _ = CURRENT.try_with(|trace| trace.borrow_mut().request = Some(request()));
}

/// Returns the ID of the current request.
pub fn current() -> Option<RequestId> {
    CURRENT.try_with(|trace| trace.borrow().id).ok()
}
