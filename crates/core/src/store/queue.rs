//! The queue of write requests. It is limited by requests and by bytes; when it is full, requests fail immediately.

use std::sync::{Arc, atomic::Ordering};

use tokio::{
    sync::{Notify, mpsc, oneshot},
    time::Instant,
};

use super::{
    error::{Error, Result},
    timing::Times,
    write_request::{Outcome, Request},
};
use crate::{auth::Caller, sync::AtomicUsize, types::Revision};

/// Maximum number of waiting requests, as in etcd. Further requests fail with "too many requests".
pub(super) const QUEUE_REQUESTS_MAX: usize = 5_000;

/// Maximum bytes of keys and values in requests that are not answered. Further requests fail with "too many requests".
/// Small in tests of races.
const QUEUE_BYTES_MAX: usize = if cfg!(feature = "shuttle") { 1 << 10 } else { 256 << 20 };

/// The handle through which one request is answered, exactly once.
#[must_use]
#[derive(Debug)]
pub(super) struct Ticket(oneshot::Sender<Reply>);

/// The outcome of a request and, if it was part of a batch, its timing.
#[derive(Debug)]
struct Reply {
    outcome: Result<Outcome>,
    times: Option<Times>,
}

impl Ticket {
    /// Returns whether nobody waits for the outcome any more.
    pub(super) fn is_abandoned(&self) -> bool {
        self.0.is_closed()
    }

    /// Sends the outcome. Does nothing if the client has disconnected.
    pub(super) fn reply(self, outcome: Result<Outcome>, times: Option<Times>) {
        let _ = self.0.send(Reply { outcome, times });
    }
}

/// A queued request.
#[derive(Debug)]
pub(super) struct Command {
    pub(super) caller: Caller,
    pub(super) request: Request,
    pub(super) bytes: WaitingBytes,
    /// The time at which the request arrived.
    pub(super) since: Instant,
    /// Whether values were read for it. It has memory then, which they use, and does not need it again.
    pub(super) has_started: bool,
    pub(super) ticket: Ticket,
}

/// Approximate bytes of a request's keys and values. They count as waiting until this is dropped, which is after the
/// request was answered.
#[derive(Debug)]
pub(super) struct WaitingBytes {
    pub(super) count: usize,
    all: Arc<AtomicUsize>,
}

impl WaitingBytes {
    /// # Errors
    ///
    /// [`Error::TooManyRequests`] if more than [`QUEUE_BYTES_MAX`] would wait.
    fn new(count: usize, all: &Arc<AtomicUsize>) -> Result<Self> {
        let others = all.fetch_add(count, Ordering::Relaxed);
        // If they are too many, they are dropped here and no longer count.
        let bytes = Self { count, all: Arc::clone(all) };
        if others + count > QUEUE_BYTES_MAX { Err(Error::TooManyRequests) } else { Ok(bytes) }
    }
}

impl Drop for WaitingBytes {
    fn drop(&mut self) {
        self.all.fetch_sub(self.count, Ordering::Relaxed);
    }
}

/// The queue to the writer.
#[derive(Clone)]
pub(super) struct WriteQueue {
    pub(super) commands: mpsc::Sender<Command>,
    pub(super) waiting_bytes: Arc<AtomicUsize>,
    pub(super) close: Arc<Notify>,
}

impl WriteQueue {
    /// Queues a request and waits for its outcome.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyRequests`] immediately if the queue is full, [`Error::Stopped`] if it is closed; otherwise the
    /// outcome of the request.
    pub(super) async fn submit(&self, caller: &Caller, request: Request) -> Result<Outcome> {
        let bytes = WaitingBytes::new(request.bytes(), &self.waiting_bytes)?;
        let (ticket, reply) = oneshot::channel();
        let caller = caller.clone();
        let command =
            Command { caller, request, bytes, since: Instant::now(), has_started: false, ticket: Ticket(ticket) };
        if let Err(refused) = self.commands.try_send(command) {
            return Err(match refused {
                mpsc::error::TrySendError::Full(_) => Error::TooManyRequests,
                mpsc::error::TrySendError::Closed(_) => Error::Stopped,
            });
        }
        // If the ticket was dropped, the writer panicked while it had the request.
        let Ok(Reply { outcome, times }) = reply.await else { return Err(Error::OutcomeUnknown) };
        if let Some(times) = times {
            times.note();
        }
        outcome
    }

    /// Like [`WriteQueue::submit`], for a request whose outcome is a revision.
    pub(super) async fn submit_for_revision(&self, caller: &Caller, request: Request) -> Result<Revision> {
        let Outcome::Revision(revision) = self.submit(caller, request).await? else {
            unreachable!("this request returns a revision")
        };
        Ok(revision)
    }

    /// Returns a function that checks whether requests are waiting. The function returns false after the queue was
    /// dropped.
    pub(super) fn has_waiting(&self) -> impl Fn() -> bool + Send + 'static {
        let commands = self.commands.downgrade();
        move || commands.upgrade().is_some_and(|commands| commands.capacity() < commands.max_capacity())
    }

    /// Returns the number of waiting requests.
    pub(super) fn len(&self) -> usize {
        self.commands.max_capacity() - self.commands.capacity()
    }

    /// Rejects new requests; waiting ones are still served.
    pub(super) fn close(&self) {
        self.close.notify_one();
    }
}
