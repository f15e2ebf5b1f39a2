//! Steps: long work is divided into steps of about 0.1 ms, and between two steps every ready task runs once.
//!
//! A runtime thread runs ready tasks in the order in which they became ready. If a hundred clients list all keys, and
//! each runs its steps without asking, a put waits for a hundred steps at each of its await points. Long work therefore
//! requests each step, and one task grants one request per pass over the ready tasks. A put then waits for at most one
//! step per await point, regardless of the number of lists.
//!
//! An unused grant is discarded, so a client that stops reading does not block others. Known limit: a pass covers only
//! the tasks of one runtime thread, so with several threads up to one step per thread runs at a time.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
};

use futures_util::Stream;
use tokio::{
    sync::{mpsc, oneshot},
    task::yield_now,
};

/// The queue of work that waits for its next step. Unbounded: each waiting task has at most one entry.
#[derive(Debug)]
pub struct Steps(mpsc::UnboundedSender<oneshot::Sender<()>>);

impl Steps {
    /// Returns the queue, and the future that grants steps; it runs until the queue is dropped.
    pub fn new() -> (Arc<Self>, impl Future<Output = ()> + Send + use<>) {
        let (queue, mut requests) = mpsc::unbounded_channel::<oneshot::Sender<()>>();
        let grant = async move {
            while let Some(request) = requests.recv().await {
                // A dropped request uses no pass.
                if request.send(()).is_ok() {
                    yield_now().await;
                }
            }
        };
        (Arc::new(Self(queue)), grant)
    }

    /// Requests a step. The request enters the queue immediately.
    pub fn request(&self) -> Step {
        let (grant, granted) = oneshot::channel();
        // If steps are no longer granted, the server is stopping, and the step is ready at once.
        let _ = self.0.send(grant);
        Step(granted)
    }
}

/// A requested step: ready when it may run. Dropping it cancels the request.
#[must_use]
#[derive(Debug)]
pub struct Step(oneshot::Receiver<()>);

impl Future for Step {
    type Output = ();

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<()> {
        Pin::new(&mut self.0).poll(context).map(drop)
    }
}

/// Requests of one client's stream. After every [`PacedStream::REQUESTS_PER_STEP`] requests, the next one waits for a
/// step.
pub struct PacedStream<S> {
    requests: S,
    steps: Arc<Steps>,
    /// Number of requests returned since the last step, or since the stream had to wait for a request.
    taken: usize,
    step: Option<Step>,
}

impl<S: Stream + Unpin> PacedStream<S> {
    /// Number of requests that are served before the next one waits for a step.
    pub const REQUESTS_PER_STEP: usize = 32;

    pub fn new(requests: S, steps: &Arc<Steps>) -> Self {
        Self { requests, steps: Arc::clone(steps), taken: 0, step: None }
    }
}

impl<S: Stream + Unpin> Stream for PacedStream<S> {
    type Item = S::Item;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<S::Item>> {
        let this = &mut *self;
        if this.taken >= Self::REQUESTS_PER_STEP {
            ready!(Pin::new(this.step.get_or_insert_with(|| this.steps.request())).poll(context));
            (this.step, this.taken) = (None, 0);
        }
        let next = Pin::new(&mut this.requests).poll_next(context);
        this.taken = if next.is_ready() { this.taken + 1 } else { 0 };
        next
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::atomic::{AtomicUsize, Ordering},
        time::Duration,
    };

    use futures_util::{FutureExt as _, StreamExt as _, stream};
    use tokio::time::timeout;

    use super::*;

    #[tokio::test]
    async fn one_step_runs_between_two_passes_over_ready_tasks() {
        let (steps, grant) = Steps::new();
        tokio::spawn(grant);
        let done = Arc::new(AtomicUsize::new(0));
        for _ in 0..100 {
            let (steps, done) = (Arc::clone(&steps), Arc::clone(&done));
            tokio::spawn(async move {
                loop {
                    steps.request().await;
                    done.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
        let mut before = 0;
        for _ in 0..1_000 {
            yield_now().await;
            let now = done.load(Ordering::Relaxed);
            assert!(now - before <= 2, "{} steps in one pass", now - before);
            before = now;
        }
        assert!(before >= 400, "{before} steps in 1,000 passes");
    }

    #[tokio::test]
    async fn unused_steps_do_not_block_others() {
        let (steps, grant) = Steps::new();
        tokio::spawn(grant);
        let mut unused: Vec<Step> = (0..10).map(|_| steps.request()).collect();
        unused.truncate(5);
        for _ in 0..10 {
            timeout(Duration::from_secs(10), steps.request()).await.expect("a step is granted");
        }
        drop(unused);
    }

    #[tokio::test]
    async fn stream_without_pause_waits_for_steps_and_loses_nothing() {
        let (steps, grant) = Steps::new();
        let mut requests = PacedStream::new(stream::iter(0..1_000), &steps);
        let mut at_once = 0;
        while requests.next().now_or_never().is_some() {
            at_once += 1;
        }
        assert_eq!(at_once, PacedStream::<stream::Empty<()>>::REQUESTS_PER_STEP);
        tokio::spawn(grant);
        let rest: Vec<usize> = requests.collect().await;
        assert_eq!(rest, (at_once..1_000).collect::<Vec<_>>());
    }
}
