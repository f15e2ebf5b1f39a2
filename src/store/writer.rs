//! The writer: group commit.
//!
//! ```text
//! loop {
//!     gather     what waits, up to a bound
//!     evaluate   each in order, on the index and what the batch did before it
//!     append     all in one commit
//!     apply      to the index, the caches, the watchers
//!     answer     all
//! }
//! ```
//!
//! One client sees one commit's latency, a thousand share it. A request that changes nothing is answered in its place in
//! the order. If the outcome of an append is unknown, so are the answers, and the writer reads the log before it goes on.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, mpsc, oneshot},
    task::yield_now,
    time::Instant,
};
use tracing::{error, info};

use super::{
    Error, Result, Shared,
    batch::Batch,
    request::{DeleteRequest, DeleteResponse, Op, PutRequest, PutResponse, PutValue, TxnRequest, TxnResponse},
    txn::{Evaluation, Fetched, Stop},
};
use crate::{
    index::Unreadable,
    log::{Append, Appended},
    types::{LeaseId, Revision, RowId},
};

/// Requests that may wait, as many as etcd lets wait; beyond it: "too many requests".
const QUEUE_REQUESTS_MAX: usize = 5_000;
/// Bytes of keys and values that may wait; beyond it: "too many requests".
const QUEUE_BYTES_MAX: usize = 256 << 20;
/// A batch takes no further request once it has this many; larger ones only add latency.
const BATCH_REQUESTS_MAX: usize = 512;
/// A batch takes no further request once it has this many changes.
const BATCH_CHANGES_MAX: usize = 512;
/// A batch takes no further request once it has this many bytes of keys and values.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// How often the writer steps back before it commits, so that requests that are about to arrive join the batch. Measured:
/// it makes batches an eighth larger, and unlike a timer it costs nothing when nobody comes.
const GATHER_YIELDS: usize = 3;
/// Pause between attempts to read the log when the database is away.
const RESYNC_PAUSE: Duration = Duration::from_millis(200);

/// A request that is evaluated in the order of the log.
#[derive(Debug)]
pub(super) enum Request {
    Put(PutRequest),
    Delete(DeleteRequest),
    Txn(TxnRequest),
    Grant {
        id: LeaseId,
        ttl_secs: i64,
    },
    Revoke(LeaseId),
    /// Revokes the lease if its time is over when this is evaluated.
    Expire(LeaseId),
    Compact(Revision),
}

#[derive(Debug)]
pub(super) enum Outcome {
    Put(PutResponse),
    Delete(DeleteResponse),
    Txn(TxnResponse),
    Revision(Revision),
}

/// The right to answer one request, once.
#[must_use]
#[derive(Debug)]
struct Ticket(oneshot::Sender<Result<Outcome>>);

impl Ticket {
    /// The client may be gone; what it asked for has happened all the same.
    fn answer(self, outcome: Result<Outcome>) {
        let _ = self.0.send(outcome);
    }
}

#[derive(Debug)]
struct Command {
    request: Request,
    bytes: usize,
    ticket: Ticket,
}

/// The way to the writer.
#[derive(Clone)]
pub(super) struct WriteQueue {
    commands: mpsc::Sender<Command>,
    waiting_bytes: Arc<AtomicUsize>,
    close: Arc<Notify>,
}

impl WriteQueue {
    /// # Errors
    ///
    /// [`Error::TooManyRequests`] at once when the queue is full, [`Error::Stopped`] when it is closed; otherwise what the
    /// request came to.
    pub(super) async fn submit(&self, request: Request) -> Result<Outcome> {
        let bytes = request.bytes();
        if self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > QUEUE_BYTES_MAX {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(Error::TooManyRequests);
        }
        let (ticket, outcome) = oneshot::channel();
        let command = Command { request, bytes, ticket: Ticket(ticket) };
        if let Err(refused) = self.commands.try_send(command) {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(match refused {
                mpsc::error::TrySendError::Full(_) => Error::TooManyRequests,
                mpsc::error::TrySendError::Closed(_) => Error::Stopped,
            });
        }
        // A ticket dropped unanswered: the writer died with the request in hand.
        outcome.await.unwrap_or(Err(Error::OutcomeUnknown))
    }

    /// Takes no further request; those that wait are served.
    pub(super) fn close(&self) {
        self.close.notify_one();
    }
}

impl Request {
    /// Bytes of keys and values, about.
    fn bytes(&self) -> usize {
        fn txn(txn: &TxnRequest) -> usize {
            txn.success.iter().chain(&txn.failure).map(op).sum()
        }
        fn op(op: &Op) -> usize {
            match op {
                Op::Put(request) => put(request),
                Op::Txn(request) => txn(request),
                Op::Range(_) | Op::Delete(_) => 64,
            }
        }
        fn put(put: &PutRequest) -> usize {
            let value = match &put.value {
                PutValue::New(value) => value.len(),
                PutValue::Keep => 0,
            };
            put.key.len() + value
        }
        match self {
            Self::Put(request) => put(request),
            Self::Txn(request) => txn(request),
            Self::Delete(_) | Self::Grant { .. } | Self::Revoke(_) | Self::Expire(_) | Self::Compact(_) => 64,
        }
    }
}

/// The one task that appends.
pub(super) struct Writer {
    shared: Arc<Shared>,
    commands: mpsc::Receiver<Command>,
    waiting_bytes: Arc<AtomicUsize>,
    close: Arc<Notify>,
    /// Taken from the queue and not yet evaluated for good.
    gathered: VecDeque<Command>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>) -> (Self, WriteQueue) {
        let (sender, commands) = mpsc::channel(QUEUE_REQUESTS_MAX);
        let waiting_bytes = Arc::new(AtomicUsize::new(0));
        let close = Arc::new(Notify::new());
        let queue =
            WriteQueue { commands: sender, waiting_bytes: Arc::clone(&waiting_bytes), close: Arc::clone(&close) };
        (Self { shared, commands, waiting_bytes, close, gathered: VecDeque::new() }, queue)
    }

    pub(super) async fn run(mut self) {
        while self.gather().await {
            self.serve_batch().await;
        }
    }

    /// Waits for something to do and takes what else is there. Returns false at the end.
    async fn gather(&mut self) -> bool {
        while self.gathered.is_empty() {
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(command) => self.take(command),
                    None => return false,
                },
                () = self.close.notified() => self.commands.close(),
            }
        }
        for _ in 0..GATHER_YIELDS {
            yield_now().await;
        }
        while self.gathered.len() < BATCH_REQUESTS_MAX {
            let Ok(command) = self.commands.try_recv() else { break };
            self.take(command);
        }
        true
    }

    fn take(&mut self, command: Command) {
        self.waiting_bytes.fetch_sub(command.bytes, Ordering::Relaxed);
        self.gathered.push_back(command);
    }

    async fn serve_batch(&mut self) {
        let mut batch = Batch::new(self.shared.index.read().head());
        let mut served: Vec<(Command, Result<Outcome>)> = Vec::with_capacity(self.gathered.len());
        let mut fetched = Fetched::new();
        let mut bytes = 0;
        while let Some(command) = self.gathered.pop_front() {
            let full = batch.changes().len() >= BATCH_CHANGES_MAX || bytes >= BATCH_BYTES_MAX;
            let alone = matches!(command.request, Request::Compact(_));
            if (full || alone) && !served.is_empty() {
                self.gathered.push_front(command);
                break;
            }
            if let Request::Compact(revision) = command.request {
                let outcome = self.compact(revision).await.map(Outcome::Revision);
                command.ticket.answer(outcome);
                continue;
            }
            match self.evaluate(&command.request, &mut batch, &fetched) {
                Ok(outcome) => {
                    bytes += command.bytes;
                    served.push((command, Ok(outcome)));
                }
                Err(Stop::Failed(error)) => served.push((command, Err(error))),
                Err(Stop::NeedsValues(rows)) => match self.fetch(rows, &mut fetched).await {
                    Ok(()) => self.gathered.push_front(command),
                    Err(error) => command.ticket.answer(Err(error)),
                },
                Err(Stop::NeedsCommit) => {
                    self.gathered.push_front(command);
                    break;
                }
            }
        }
        self.commit(batch, served).await;
    }

    fn evaluate(&self, request: &Request, batch: &mut Batch, fetched: &Fetched) -> std::result::Result<Outcome, Stop> {
        let index = self.shared.index.read();
        let leases = self.shared.leases.lock();
        let mut evaluation = Evaluation::new(&index, &leases, &self.shared.values, fetched, batch);
        match request {
            Request::Put(request) => evaluation.put(request).map(Outcome::Put),
            Request::Delete(request) => evaluation.delete(request).map(Outcome::Delete),
            Request::Txn(request) => evaluation.txn(request).map(Outcome::Txn),
            Request::Grant { id, ttl_secs } => evaluation.grant(*id, *ttl_secs).map(Outcome::Revision),
            Request::Revoke(id) => evaluation.revoke(*id).map(Outcome::Revision),
            Request::Expire(id) if leases.is_expired(*id, Instant::now()) => {
                match evaluation.revoke(*id) {
                    // Another revocation of this batch came first.
                    Err(Stop::Failed(Error::LeaseNotFound)) => Ok(Outcome::Revision(batch.head())),
                    outcome => outcome.map(Outcome::Revision),
                }
            }
            Request::Expire(_) => Ok(Outcome::Revision(batch.head())),
            Request::Compact(_) => unreachable!("a compaction is served on its own"),
        }
    }

    async fn fetch(&self, rows: Vec<RowId>, fetched: &mut Fetched) -> Result<()> {
        if rows.iter().any(|row| fetched.contains_key(row)) {
            // It was asked for, was not there, and is asked for again: the index names a row that the log has not.
            error!(?rows, "rows of live versions are missing from the log");
            return Err(Error::Corrupt);
        }
        fetched.extend(rows.iter().map(|row| (*row, None)));
        let found = self.shared.log.values(&rows).await?;
        fetched.extend(found.into_iter().map(|(row, kv)| (row, Some(kv))));
        Ok(())
    }

    async fn commit(&mut self, mut batch: Batch, served: Vec<(Command, Result<Outcome>)>) {
        if !batch.is_empty() {
            if self.shared.hub.wants_prev() {
                self.shared.fill_prev(batch.changes_mut()).await;
            }
            let append = Append { expected_head: batch.base(), changes: batch.changes(), leases: batch.leases() };
            match self.shared.log.append(append).await {
                Ok(Appended::Done) => self.shared.apply_batch(&batch, Instant::now()),
                Ok(Appended::Conflict) => {
                    info!(revision = batch.base().0, "the log moved on without this instance; reading what it missed");
                    self.resync().await;
                    for (command, _) in served.into_iter().rev() {
                        self.gathered.push_front(command);
                    }
                    return;
                }
                Err(failure) => {
                    error!(error = %failure, batch_len = served.len(), "append failed, its outcome is unknown");
                    for (command, _) in served {
                        command.ticket.answer(Err(Error::OutcomeUnknown));
                    }
                    self.resync().await;
                    return;
                }
            }
        }
        for (command, outcome) in served {
            command.ticket.answer(outcome);
        }
    }

    /// Reads what the log has and the index has not, for as long as it takes.
    async fn resync(&self) {
        while let Err(failure) = self.shared.resync().await {
            error!(error = %failure, "cannot read the log; trying again");
            tokio::time::sleep(RESYNC_PAUSE).await;
        }
    }

    async fn compact(&self, revision: Revision) -> Result<Revision> {
        let head = {
            let index = self.shared.index.read();
            if revision > index.head() {
                return Err(Unreadable::Future.into());
            }
            // A store that was never compacted counts as compacted at -1.
            if revision <= index.compact_revision().unwrap_or(Revision(-1)) {
                return Err(Unreadable::Compacted.into());
            }
            index.head()
        };
        self.shared.log.compact(revision).await.map_err(|failure| {
            error!(error = %failure, revision = revision.0, "recording a compaction failed");
            Error::OutcomeUnknown
        })?;
        self.shared.hub.compacted(revision, || self.shared.index.write().begin_compaction(revision));
        self.shared.compaction.notify_one();
        info!(compact_revision = revision.0, "compaction recorded");
        Ok(head)
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{store::txn_tests::shared, types::KeyRange};

    fn delete() -> Request {
        Request::Delete(DeleteRequest { range: KeyRange::from_wire(b"k", b""), prev_kv: false })
    }

    /// The writer does not run, so everything that is taken waits.
    #[tokio::test]
    async fn full_queue_refuses_at_once_and_takes_again_when_there_is_room() {
        let (mut writer, queue) = Writer::new(Arc::new(shared(0)));
        let mut waiting: Vec<_> = (0..QUEUE_REQUESTS_MAX).map(|_| Box::pin(queue.submit(delete()))).collect();
        assert!(waiting.iter_mut().all(|submitted| submitted.now_or_never().is_none()), "they are taken and wait");
        assert!(matches!(queue.submit(delete()).now_or_never(), Some(Err(Error::TooManyRequests))));

        assert!(writer.gather().await);
        assert!(queue.submit(delete()).now_or_never().is_none(), "there is room again");
    }

    #[tokio::test]
    async fn closed_queue_serves_what_waits_and_refuses_the_rest() {
        let (writer, queue) = Writer::new(Arc::new(shared(0)));
        let mut waiting = Box::pin(queue.submit(delete()));
        assert!(waiting.as_mut().now_or_never().is_none());
        queue.close();
        writer.run().await;
        assert!(matches!(waiting.await, Ok(Outcome::Delete(_))));
        assert!(matches!(queue.submit(delete()).await, Err(Error::Stopped)));
    }
}
