//! The writer: group commit.
//!
//! ```text
//! loop {
//!     collect    waiting requests, up to a limit
//!     evaluate   each in order, on the index and the batch's earlier changes
//!     append     all changes in one commit
//!     apply      them to the index, the caches and the watchers
//!     respond    to all requests
//! }
//! ```
//!
//! A batch of any size costs one commit. A request that changes nothing is answered in the order of the batch, too. If
//! the outcome of an append is unknown, its requests fail as [`Error::OutcomeUnknown`] and the writer reads the log
//! before it continues.
//!
//! If other instances append to the same log, an append can lose a race. The writer then catches up, takes the append
//! lock, evaluates the requests again and appends while no other instance can. It keeps taking the lock until no other
//! instance has appended in between. A batch that changes nothing is answered only if the log's position is still the
//! one at which the batch was evaluated.

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
    time::{Instant, sleep},
};
use tracing::{debug, error, info, warn};

use super::{
    Error, Result, Shared, WAIT_MAX,
    batch::Batch,
    request::{DeleteRequest, DeleteResponse, Op, PutRequest, PutResponse, PutValue, TxnRequest, TxnResponse},
    timing::{Laps, Patience, Times, Timing},
    txn::{Evaluation, Fetched, Stop},
    wakeful::Wakeful,
};
use crate::{
    log::{self, AlarmChange, Append, Appended, Position},
    types::{LeaseId, Revision, RowId},
};

/// Maximum number of waiting requests, as in etcd; above it: "too many requests".
const QUEUE_REQUESTS_MAX: usize = 5_000;
/// Maximum number of waiting bytes of keys and values; above it: "too many requests".
const QUEUE_BYTES_MAX: usize = 256 << 20;
/// Number of requests at which a batch is closed. Larger batches only add latency.
const BATCH_REQUESTS_MAX: usize = 512;
/// Number of changes at which a batch is closed.
const BATCH_CHANGES_MAX: usize = 512;
/// Number of bytes of keys and values at which a batch is closed.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// Number of times the writer yields before it evaluates a batch, so that requests that are about to arrive join it.
/// Measured: batches become one eighth larger. Unlike a timer, yielding costs nothing if no request arrives.
const COLLECT_YIELDS: usize = 3;
/// Interval between warnings while writes fail.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(5);
/// Pause between attempts to read the log while the database is unavailable.
const RESYNC_PAUSE: Duration = Duration::from_millis(200);

/// A request that the writer evaluates in log order.
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
    /// Revokes the lease if it has expired when this is evaluated.
    Expire(LeaseId),
    Compact(Revision),
    Alarm(AlarmChange),
}

#[derive(Debug)]
pub(super) enum Outcome {
    Put(PutResponse),
    Delete(DeleteResponse),
    Txn(TxnResponse),
    Revision(Revision),
}

/// The right to answer one request once.
#[must_use]
#[derive(Debug)]
struct Ticket(oneshot::Sender<Reply>);

/// The outcome of a request and, if it was part of a batch, its timing.
#[derive(Debug)]
struct Reply {
    outcome: Result<Outcome>,
    times: Option<Times>,
}

impl Ticket {
    /// The client may have disconnected; the request has been executed anyway.
    fn reply(self, outcome: Result<Outcome>, times: Option<Times>) {
        let _ = self.0.send(Reply { outcome, times });
    }
}

#[derive(Debug)]
struct Command {
    request: Request,
    bytes: usize,
    since: Instant,
    ticket: Ticket,
}

/// The queue to the writer.
#[derive(Clone)]
pub(super) struct WriteQueue {
    commands: mpsc::Sender<Command>,
    waiting_bytes: Arc<AtomicUsize>,
    close: Arc<Notify>,
}

impl WriteQueue {
    /// # Errors
    ///
    /// [`Error::TooManyRequests`] immediately if the queue is full, [`Error::Stopped`] if it is closed; otherwise the
    /// outcome of the request.
    pub(super) async fn submit(&self, request: Request) -> Result<Outcome> {
        let bytes = request.bytes();
        if self.waiting_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes > QUEUE_BYTES_MAX {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(Error::TooManyRequests);
        }
        let (ticket, reply) = oneshot::channel();
        let command = Command { request, bytes, since: Instant::now(), ticket: Ticket(ticket) };
        if let Err(refused) = self.commands.try_send(command) {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(match refused {
                mpsc::error::TrySendError::Full(_) => Error::TooManyRequests,
                mpsc::error::TrySendError::Closed(_) => Error::Stopped,
            });
        }
        // The ticket was dropped: the writer died while it had the request.
        let Ok(Reply { outcome, times }) = reply.await else { return Err(Error::OutcomeUnknown) };
        if let Some(times) = times {
            times.note();
        }
        outcome
    }

    /// Returns a function that tells whether requests are waiting. It returns false once the queue is gone.
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

impl Request {
    /// Approximate bytes of keys and values.
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
            Self::Delete(_)
            | Self::Grant { .. }
            | Self::Revoke(_)
            | Self::Expire(_)
            | Self::Compact(_)
            | Self::Alarm(_) => 64,
        }
    }
}

/// The only task that appends to the log.
pub(super) struct Writer {
    shared: Arc<Shared>,
    timing: Timing,
    commands: mpsc::Receiver<Command>,
    waiting_bytes: Arc<AtomicUsize>,
    close: Arc<Notify>,
    /// Taken from the queue and not yet part of a committed batch.
    pending: VecDeque<Command>,
    /// Another instance appended in between, so this one takes the append lock before it evaluates.
    is_contended: bool,
    /// Whether this instance holds the append lock: no other instance can append until it does.
    holds_append_lock: bool,
    is_closed: bool,
    wakeful: Wakeful,
    outage: Option<Outage>,
}

/// The log accepts no writes.
struct Outage {
    since: Instant,
    logged: Instant,
}

/// The result of committing a batch.
enum CommitOutcome {
    /// The requests can be answered.
    Done,
    /// The log's position differs from the one at which the batch was evaluated; nothing was written.
    Raced,
    /// The database accepts no writes at the moment; nothing was written.
    Refused,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, patience: Patience, wakeful: Wakeful) -> (Self, WriteQueue) {
        let (sender, commands) = mpsc::channel(QUEUE_REQUESTS_MAX);
        let waiting_bytes = Arc::new(AtomicUsize::new(0));
        let close = Arc::new(Notify::new());
        let queue =
            WriteQueue { commands: sender, waiting_bytes: Arc::clone(&waiting_bytes), close: Arc::clone(&close) };
        let writer = Self {
            timing: Timing::new(&shared.metrics.store, patience),
            shared,
            commands,
            waiting_bytes,
            close,
            pending: VecDeque::new(),
            is_contended: false,
            holds_append_lock: false,
            is_closed: false,
            wakeful,
            outage: None,
        };
        (writer, queue)
    }

    pub(super) async fn run(mut self) {
        while self.collect().await {
            self.serve_batch().await;
        }
    }

    /// Waits for a request and takes all others that are waiting. Returns false when the queue is closed and empty.
    async fn collect(&mut self) -> bool {
        while self.pending.is_empty() {
            self.shared.pulses.writer.rest();
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(command) => self.enqueue(command),
                    None => return false,
                },
                () = self.close.notified(), if !self.is_closed => {
                    self.commands.close();
                    self.is_closed = true;
                }
            }
        }
        self.shared.pulses.writer.beat();
        for _ in 0..COLLECT_YIELDS {
            yield_now().await;
        }
        while self.pending.len() < BATCH_REQUESTS_MAX {
            let Ok(command) = self.commands.try_recv() else { break };
            self.enqueue(command);
        }
        true
    }

    fn enqueue(&mut self, command: Command) {
        self.waiting_bytes.fetch_sub(command.bytes, Ordering::Relaxed);
        self.pending.push_back(command);
    }

    async fn serve_batch(&mut self) {
        if self.is_contended && !self.holds_append_lock {
            self.lock_appends().await;
        }
        let started = Instant::now();
        if let Some(oldest) = self.pending.front() {
            self.shared.metrics.store.queue.observe((started - oldest.since).as_secs_f64());
        }
        let expected = self.shared.position();
        let mut batch = Batch::new(expected.head);
        let mut served: Served = Vec::with_capacity(self.pending.len());
        let mut fetched = Fetched::new();
        let mut bytes = 0;
        while let Some(command) = self.pending.pop_front() {
            let full = batch.changes().len() >= BATCH_CHANGES_MAX || bytes >= BATCH_BYTES_MAX;
            let alone = matches!(command.request, Request::Compact(_) | Request::Alarm(_));
            if (full || alone) && !served.is_empty() {
                self.pending.push_front(command);
                break;
            }
            self.shared.pulses.writer.beat();
            if let Err(error) = self.shared.admit(&command.request, command.bytes).await {
                served.push((command, Err(error)));
                continue;
            }
            match self.evaluate(&command.request, expected, &mut batch, &fetched) {
                Ok(outcome) => {
                    bytes += command.bytes;
                    served.push((command, Ok(outcome)));
                }
                Err(Stop::Failed(error)) => served.push((command, Err(error))),
                Err(Stop::NeedsValues(rows)) => match self.fetch(rows, expected, &mut fetched).await {
                    Ok(true) => self.pending.push_front(command),
                    Ok(false) => {
                        self.pending.push_front(command);
                        self.requeue(served);
                        return self.resync().await;
                    }
                    Err(error) => command.ticket.reply(Err(error), None),
                },
                Err(Stop::NeedsCommit) => {
                    self.pending.push_front(command);
                    break;
                }
                Err(Stop::Moved) => {
                    self.pending.push_front(command);
                    return self.requeue(served);
                }
            }
            if alone {
                break;
            }
        }
        self.commit(batch, expected, served, started).await;
    }

    /// Takes the append lock and catches up with the instances that appended before. If that fails, the batch is
    /// appended without the lock.
    async fn lock_appends(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(log) = shared.log.shared() else { return };
        let before = shared.position();
        if let Err(failure) = log.take_turn().await {
            warn!(error = %failure, "cannot take the append lock");
            return;
        }
        self.holds_append_lock = true;
        if let Err(failure) = shared.reach_head(log).await {
            warn!(error = %failure, "cannot catch up before an append");
        }
        // No other instance appended in between, so appending without the lock is cheaper.
        self.is_contended = shared.position() != before;
    }

    fn evaluate(
        &self,
        request: &Request,
        expected: Position,
        batch: &mut Batch,
        fetched: &Fetched,
    ) -> std::result::Result<Outcome, Stop> {
        let index = self.shared.index.read();
        let leases = self.shared.leases.lock();
        if index.head() != expected.head || leases.epoch != expected.epoch {
            return Err(Stop::Moved);
        }
        if let Request::Expire(id) = request
            && !batch.is_lease_expired(&leases, *id, Instant::now())
        {
            // The lease was renewed or has already ended.
            return Ok(Outcome::Revision(batch.head()));
        }
        let mut evaluation = Evaluation::new(&index, &leases, &self.shared.values, fetched, batch);
        match request {
            Request::Put(request) => evaluation.put(request).map(Outcome::Put),
            Request::Delete(request) => evaluation.delete(request).map(Outcome::Delete),
            Request::Txn(request) => evaluation.txn(request).map(Outcome::Txn),
            Request::Grant { id, ttl_secs } => evaluation.grant(*id, *ttl_secs).map(Outcome::Revision),
            Request::Revoke(id) => evaluation.revoke(*id).map(Outcome::Revision),
            Request::Expire(id) => evaluation.expire(*id).map(Outcome::Revision),
            Request::Compact(revision) => evaluation.compact(*revision).map(Outcome::Revision),
            Request::Alarm(change) => {
                batch.set_alarm(*change);
                Ok(Outcome::Revision(batch.head()))
            }
        }
    }

    /// Reads rows that an evaluation needs. Returns false if another instance compacted them.
    async fn fetch(&self, rows: Vec<RowId>, expected: Position, fetched: &mut Fetched) -> Result<bool> {
        if rows.iter().any(|row| fetched.contains_key(row)) {
            if self.shared.is_beyond(expected).await? {
                return Ok(false);
            }
            // A row that was read before and not found is needed again: the index names a row that is not in the log.
            error!(?rows, "rows of live versions are missing from the log");
            return Err(Error::Corrupt);
        }
        let found = self.shared.log.values(&rows).await?;
        fetched.extend(rows.iter().map(|row| (*row, None)));
        fetched.extend(found.into_iter().map(|(row, kv)| (row, Some(kv))));
        Ok(true)
    }

    async fn commit(&mut self, mut batch: Batch, expected: Position, served: Served, started: Instant) {
        let evaluated = Instant::now();
        let metrics = &self.shared.metrics.store;
        metrics.batch_requests.observe(served.len() as f64);
        metrics.batch_rows.observe(batch.changes().len() as f64);
        self.shared.pulses.writer.beat();
        let committed = if batch.is_empty() {
            let confirmed = self.confirm_position(expected).await;
            self.release_append_lock(&batch, expected).await;
            confirmed
        } else {
            if self.shared.hub.wants_prev() {
                self.shared.fill_prev(batch.changes_mut()).await;
            }
            self.append(&batch, expected).await
        };
        match committed {
            Ok(CommitOutcome::Done) => self.reply(served, Laps { started, evaluated, committed: Instant::now() }),
            Ok(CommitOutcome::Raced) => {
                self.requeue(served);
                self.resync().await;
            }
            Ok(CommitOutcome::Refused) => {
                self.requeue(served);
                self.reject_overdue();
                sleep(RESYNC_PAUSE).await;
                self.resync().await;
            }
            Err(error) => {
                self.shared.metrics.store.failed.inc();
                let failed = served.into_iter().map(|(command, _)| (command, Err(error.clone()))).collect();
                self.reply(failed, Laps { started, evaluated, committed: Instant::now() });
                self.resync().await;
            }
        }
    }

    fn reply(&self, served: Served, laps: Laps) {
        let mut slow = false;
        for (command, outcome) in served {
            let times = self.timing.note(&command.request, command.since, laps, outcome.is_ok());
            slow |= times.apply_is_slow;
            command.ticket.reply(outcome, Some(times));
        }
        if slow {
            self.shared.metrics.store.slow_applies.inc();
        }
    }

    /// Checks that a batch that changes nothing was evaluated on everything that any instance had acknowledged.
    async fn confirm_position(&mut self, expected: Position) -> Result<CommitOutcome> {
        let Some(log) = self.shared.log.shared() else { return Ok(CommitOutcome::Done) };
        match log.position().await {
            Ok(position) if position == expected => Ok(CommitOutcome::Done),
            Ok(_) => Ok(CommitOutcome::Raced),
            Err(failure) => {
                self.log_failure(&failure);
                Ok(CommitOutcome::Refused)
            }
        }
    }

    /// Releases the append lock after a batch that appends nothing.
    async fn release_append_lock(&mut self, batch: &Batch, expected: Position) {
        if std::mem::take(&mut self.holds_append_lock) {
            let nothing =
                Append { expected, changes: batch.changes(), leases: batch.leases(), compact: None, alarm: None };
            // If it cannot be released, it is lost already.
            if let Err(failure) = self.shared.log.append(nothing).await {
                debug!(error = %failure, "the append lock was lost");
            }
        }
    }

    async fn append(&mut self, batch: &Batch, expected: Position) -> Result<CommitOutcome> {
        let append = Append {
            expected,
            changes: batch.changes(),
            leases: batch.leases(),
            compact: batch.compaction(),
            alarm: batch.alarm(),
        };
        self.holds_append_lock = false;
        let shared = Arc::clone(&self.shared);
        let metrics = &shared.metrics.store;
        let _appending = shared.replication.mark_append(batch.head());
        let begun = Instant::now();
        let is_lone = batch.changes().len() <= 1;
        let _waiting = shared.turns.leave_time_to_the_database();
        match self.wakeful.wait(is_lone, shared.log.append(append)).await {
            Ok(Appended::Done) => {
                let took = begun.elapsed().as_secs_f64();
                metrics.fsync.observe(took);
                metrics.commit.observe(took);
                self.log_recovery();
                shared.apply_batch(batch, expected, Instant::now());
                if let Some(revision) = batch.compaction() {
                    info!(compact_revision = revision.0, "compaction recorded");
                }
                Ok(CommitOutcome::Done)
            }
            Ok(Appended::Conflict) => {
                debug!(revision = expected.head.0, "the log moved on without this instance");
                metrics.raced.inc();
                self.is_contended = true;
                // Another instance may have renewed a lease.
                shared.refresh_expired_leases(batch.leases()).await;
                Ok(CommitOutcome::Raced)
            }
            Err(failure) => {
                self.log_failure(&failure);
                match failure {
                    log::Error::Unavailable(_) => {
                        metrics.failed.inc();
                        Ok(CommitOutcome::Refused)
                    }
                    log::Error::Full(_) => Err(Error::NoSpace),
                    log::Error::OutcomeUnknown(_)
                    | log::Error::Open(_)
                    | log::Error::Corrupt(_)
                    | log::Error::Diverged(_) => Err(Error::OutcomeUnknown),
                }
            }
        }
    }

    fn log_failure(&mut self, failure: &log::Error) {
        let now = Instant::now();
        let outage = self.outage.get_or_insert(Outage { since: now, logged: now });
        if outage.logged != now && now - outage.logged < FAILURE_LOG_INTERVAL {
            return debug!(error = %failure, "writes still fail");
        }
        outage.logged = now;
        match failure {
            log::Error::Unavailable(_) => {
                warn!(error = %failure, "the database accepts no writes; trying again");
            }
            log::Error::Full(_) => {
                error!(error = %failure, "the disk is full: writes are rejected until space is freed, reads continue");
            }
            log::Error::OutcomeUnknown(_) | log::Error::Open(_) | log::Error::Corrupt(_) | log::Error::Diverged(_) => {
                error!(
                    error = %failure,
                    "the outcome of the last writes is unknown; reading the log again"
                )
            }
        }
    }

    fn log_recovery(&mut self) {
        if let Some(outage) = self.outage.take() {
            info!(elapsed_ms = outage.since.elapsed().as_millis(), "the database accepts writes again");
        }
    }

    fn requeue(&mut self, served: Served) {
        for (command, _) in served.into_iter().rev() {
            self.pending.push_front(command);
        }
    }

    /// Applies the part of the log that the index lacks, and retries until that succeeds. Requests that wait longer
    /// than [`WAIT_MAX`] meanwhile fail as not applied.
    async fn resync(&mut self) {
        let shared = Arc::clone(&self.shared);
        // The first attempt starts without a pause.
        let attempt = async |pause| {
            sleep(pause).await;
            shared.catch_up().await
        };
        let mut catching_up = Box::pin(attempt(Duration::ZERO));
        let mut failing = false;
        loop {
            tokio::select! {
                biased;
                caught_up = &mut catching_up => match caught_up {
                    Ok(()) => break,
                    Err(failure) => {
                        if !failing {
                            error!(error = %failure, "cannot read the log; trying again");
                        }
                        failing = true;
                        if matches!(failure, log::Error::Diverged(_)) || self.is_closed {
                            return self.reject_all();
                        }
                        // The beat is here and not in the timer's arm: each attempt to read the log must end, with or
                        // without success.
                        self.shared.pulses.writer.beat();
                        catching_up.set(attempt(RESYNC_PAUSE));
                    }
                },
                () = sleep(RESYNC_PAUSE) => self.reject_overdue(),
                () = self.close.notified(), if !self.is_closed => {
                    self.commands.close();
                    self.is_closed = true;
                }
            }
        }
        if failing {
            info!("the log can be read again");
        }
    }

    fn reject_overdue(&mut self) {
        while self.pending.len() < QUEUE_REQUESTS_MAX {
            let Ok(command) = self.commands.try_recv() else { break };
            self.enqueue(command);
        }
        let (overdue, waiting) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition::<Vec<_>, _>(|command| command.since.elapsed() > WAIT_MAX);
        self.pending = waiting.into();
        for command in overdue {
            command.ticket.reply(Err(Error::Unavailable), None);
        }
    }

    /// Rejects all waiting requests, because nothing can be written any more.
    fn reject_all(&mut self) {
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            self.enqueue(command);
        }
        for command in self.pending.drain(..) {
            command.ticket.reply(Err(Error::Unavailable), None);
        }
    }
}

type Served = Vec<(Command, Result<Outcome>)>;

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{store::txn_tests::shared, types::KeyRange};

    fn delete() -> Request {
        Request::Delete(DeleteRequest { range: KeyRange::from_wire(b"k", b""), prev_kv: false })
    }

    /// The writer does not run, so every accepted request waits.
    #[tokio::test]
    async fn full_queue_rejects_requests_until_it_is_drained() {
        let (mut writer, queue) = Writer::new(Arc::new(shared(0)), Patience::default(), Wakeful::new(false));
        let mut waiting: Vec<_> = (0..QUEUE_REQUESTS_MAX).map(|_| Box::pin(queue.submit(delete()))).collect();
        assert!(waiting.iter_mut().all(|submitted| submitted.now_or_never().is_none()), "accepted and waiting");
        assert!(matches!(queue.submit(delete()).now_or_never(), Some(Err(Error::TooManyRequests))));

        assert!(writer.collect().await);
        assert!(queue.submit(delete()).now_or_never().is_none(), "the queue has capacity again");
    }

    #[tokio::test]
    async fn closed_queue_serves_waiting_requests_and_rejects_new_ones() {
        let (writer, queue) = Writer::new(Arc::new(shared(0)), Patience::default(), Wakeful::new(false));
        let mut waiting = Box::pin(queue.submit(delete()));
        assert!(waiting.as_mut().now_or_never().is_none());
        queue.close();
        writer.run().await;
        assert!(matches!(waiting.await, Ok(Outcome::Delete(_))));
        assert!(matches!(queue.submit(delete()).await, Err(Error::Stopped)));
    }
}
