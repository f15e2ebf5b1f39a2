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
//!
//! Where other instances append too, an append may lose a race: then the writer catches up, evaluates the requests anew and
//! waits for its turn, in which nobody else can append. While races are lost it goes on taking turns. A batch that changes
//! nothing is answered only if the log still stands where the batch was evaluated.

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
    busy_poll::BusyPoll,
    request::{DeleteRequest, DeleteResponse, Op, PutRequest, PutResponse, PutValue, TxnRequest, TxnResponse},
    timing::{Laps, Patience, Times, Timing},
    txn::{Evaluation, Fetched, Stop},
};
use crate::{
    log::{self, AlarmChange, Append, Appended, Position},
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
/// How often what is wrong is said, while it is.
const TELL_INTERVAL: Duration = Duration::from_secs(5);
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
    Alarm(AlarmChange),
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
struct Ticket(oneshot::Sender<Answer>);

/// What a request came to and, if it was in a batch, how long that took.
#[derive(Debug)]
struct Answer {
    outcome: Result<Outcome>,
    times: Option<Times>,
}

impl Ticket {
    /// The client may be gone; what it asked for has happened all the same.
    fn answer(self, outcome: Result<Outcome>, times: Option<Times>) {
        let _ = self.0.send(Answer { outcome, times });
    }
}

#[derive(Debug)]
struct Command {
    request: Request,
    bytes: usize,
    since: Instant,
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
        let (ticket, answer) = oneshot::channel();
        let command = Command { request, bytes, since: Instant::now(), ticket: Ticket(ticket) };
        if let Err(refused) = self.commands.try_send(command) {
            self.waiting_bytes.fetch_sub(bytes, Ordering::Relaxed);
            return Err(match refused {
                mpsc::error::TrySendError::Full(_) => Error::TooManyRequests,
                mpsc::error::TrySendError::Closed(_) => Error::Stopped,
            });
        }
        // A ticket dropped unanswered: the writer died with the request in hand.
        let Ok(Answer { outcome, times }) = answer.await else { return Err(Error::OutcomeUnknown) };
        if let Some(times) = times {
            times.note();
        }
        outcome
    }

    /// Whether some wait; of a queue that is gone none do.
    pub(super) fn has_waiting(&self) -> impl Fn() -> bool + Send + 'static {
        let commands = self.commands.downgrade();
        move || commands.upgrade().is_some_and(|commands| commands.capacity() < commands.max_capacity())
    }

    /// How many wait.
    pub(super) fn len(&self) -> usize {
        self.commands.max_capacity() - self.commands.capacity()
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
            Self::Delete(_)
            | Self::Grant { .. }
            | Self::Revoke(_)
            | Self::Expire(_)
            | Self::Compact(_)
            | Self::Alarm(_) => 64,
        }
    }
}

/// The one task that appends.
pub(super) struct Writer {
    shared: Arc<Shared>,
    timing: Timing,
    commands: mpsc::Receiver<Command>,
    waiting_bytes: Arc<AtomicUsize>,
    close: Arc<Notify>,
    /// Taken from the queue and not yet evaluated for good.
    gathered: VecDeque<Command>,
    /// Another instance appended in between, so that this one waits for its turn.
    is_contended: bool,
    /// Nobody else can append until this instance has.
    has_turn: bool,
    is_closed: bool,
    busy_poll: BusyPoll,
    trouble: Option<Trouble>,
}

/// The log takes no writes.
struct Trouble {
    since: Instant,
    told: Instant,
}

/// What became of a batch.
enum Committed {
    /// Its requests can be answered.
    Done,
    /// The log stands elsewhere than it was evaluated at; nothing was written.
    Raced,
    /// The database takes nothing just now; nothing was written.
    Refused,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, patience: Patience, busy_poll: BusyPoll) -> (Self, WriteQueue) {
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
            gathered: VecDeque::new(),
            is_contended: false,
            has_turn: false,
            is_closed: false,
            busy_poll,
            trouble: None,
        };
        (writer, queue)
    }

    pub(super) async fn run(mut self) {
        while self.gather().await {
            self.serve_batch().await;
        }
    }

    /// Waits for something to do and takes what else is there. Returns false at the end.
    async fn gather(&mut self) -> bool {
        while self.gathered.is_empty() {
            self.shared.pulses.writer.rest();
            tokio::select! {
                biased;
                command = self.commands.recv() => match command {
                    Some(command) => self.take(command),
                    None => return false,
                },
                () = self.close.notified(), if !self.is_closed => {
                    self.commands.close();
                    self.is_closed = true;
                }
            }
        }
        self.shared.pulses.writer.beat();
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
        if self.is_contended && !self.has_turn {
            self.take_turn().await;
        }
        let started = Instant::now();
        if let Some(oldest) = self.gathered.front() {
            self.shared.metrics.store.queue.observe((started - oldest.since).as_secs_f64());
        }
        let expected = self.shared.position();
        let mut batch = Batch::new(expected.head);
        let mut served: Served = Vec::with_capacity(self.gathered.len());
        let mut fetched = Fetched::new();
        let mut bytes = 0;
        while let Some(command) = self.gathered.pop_front() {
            let full = batch.changes().len() >= BATCH_CHANGES_MAX || bytes >= BATCH_BYTES_MAX;
            let alone = matches!(command.request, Request::Compact(_) | Request::Alarm(_));
            if (full || alone) && !served.is_empty() {
                self.gathered.push_front(command);
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
                    Ok(true) => self.gathered.push_front(command),
                    Ok(false) => {
                        self.gathered.push_front(command);
                        self.gather_again(served);
                        return self.resync().await;
                    }
                    Err(error) => command.ticket.answer(Err(error), None),
                },
                Err(Stop::NeedsCommit) => {
                    self.gathered.push_front(command);
                    break;
                }
                Err(Stop::Moved) => {
                    self.gathered.push_front(command);
                    return self.gather_again(served);
                }
            }
            if alone {
                break;
            }
        }
        self.commit(batch, expected, served, started).await;
    }

    /// Waits until nobody else can append, and catches up with those who did. Where that is not possible the batch takes
    /// its chance.
    async fn take_turn(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(log) = shared.log.shared() else { return };
        let before = shared.position();
        if let Err(failure) = log.take_turn().await {
            warn!(error = %failure, "no turn to append");
            return;
        }
        self.has_turn = true;
        if let Err(failure) = shared.reach_head(log).await {
            warn!(error = %failure, "cannot catch up before an append");
        }
        // Nobody came in between, so racing costs less.
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
            && !batch.lease_is_over(&leases, *id, Instant::now())
        {
            // It was renewed, or has ended by now.
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

    /// Returns false if rows are gone that another instance compacted away.
    async fn fetch(&self, rows: Vec<RowId>, expected: Position, fetched: &mut Fetched) -> Result<bool> {
        if rows.iter().any(|row| fetched.contains_key(row)) {
            if self.shared.is_beyond(expected).await? {
                return Ok(false);
            }
            // It was asked for, was not there, and is asked for again: the index names a row that the log has not.
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
            let confirmed = self.confirm(expected).await;
            self.give_turn_back(&batch, expected).await;
            confirmed
        } else {
            if self.shared.hub.wants_prev() {
                self.shared.fill_prev(batch.changes_mut()).await;
            }
            self.append(&batch, expected).await
        };
        match committed {
            Ok(Committed::Done) => self.answer(served, Laps { started, evaluated, committed: Instant::now() }),
            Ok(Committed::Raced) => {
                self.gather_again(served);
                self.resync().await;
            }
            Ok(Committed::Refused) => {
                self.gather_again(served);
                self.refuse_overdue();
                sleep(RESYNC_PAUSE).await;
                self.resync().await;
            }
            Err(error) => {
                self.shared.metrics.store.failed.inc();
                let failed = served.into_iter().map(|(command, _)| (command, Err(error.clone()))).collect();
                self.answer(failed, Laps { started, evaluated, committed: Instant::now() });
                self.resync().await;
            }
        }
    }

    fn answer(&self, served: Served, laps: Laps) {
        let mut slow = false;
        for (command, outcome) in served {
            let times = self.timing.note(&command.request, command.since, laps, outcome.is_ok());
            slow |= times.apply_is_slow;
            command.ticket.answer(outcome, Some(times));
        }
        if slow {
            self.shared.metrics.store.slow_applies.inc();
        }
    }

    /// Whether a batch that changes nothing was evaluated on all that was acknowledged, by any instance, before.
    async fn confirm(&mut self, expected: Position) -> Result<Committed> {
        let Some(log) = self.shared.log.shared() else { return Ok(Committed::Done) };
        match log.position().await {
            Ok(position) if position == expected => Ok(Committed::Done),
            Ok(_) => Ok(Committed::Raced),
            Err(failure) => {
                self.tell(&failure);
                Ok(Committed::Refused)
            }
        }
    }

    /// Of a batch that appends nothing.
    async fn give_turn_back(&mut self, batch: &Batch, expected: Position) {
        if std::mem::take(&mut self.has_turn) {
            let nothing =
                Append { expected, changes: batch.changes(), leases: batch.leases(), compact: None, alarm: None };
            // Where it cannot be given back it has been lost.
            if let Err(failure) = self.shared.log.append(nothing).await {
                debug!(error = %failure, "the turn to append was lost");
            }
        }
    }

    async fn append(&mut self, batch: &Batch, expected: Position) -> Result<Committed> {
        let append = Append {
            expected,
            changes: batch.changes(),
            leases: batch.leases(),
            compact: batch.compaction(),
            alarm: batch.alarm(),
        };
        self.has_turn = false;
        let shared = Arc::clone(&self.shared);
        let metrics = &shared.metrics.store;
        let _appending = shared.standing.appending(batch.head());
        let begun = Instant::now();
        let is_lone = batch.changes().len() <= 1;
        match self.busy_poll.wait(is_lone, shared.log.append(append)).await {
            Ok(Appended::Done) => {
                let took = begun.elapsed().as_secs_f64();
                metrics.fsync.observe(took);
                metrics.commit.observe(took);
                self.tell_end();
                shared.apply_batch(batch, expected, Instant::now());
                if let Some(revision) = batch.compaction() {
                    info!(compact_revision = revision.0, "compaction recorded");
                }
                Ok(Committed::Done)
            }
            Ok(Appended::Conflict) => {
                debug!(revision = expected.head.0, "the log moved on without this instance");
                metrics.raced.inc();
                self.is_contended = true;
                // A lease may have been renewed elsewhere.
                shared.look_at_leases(batch.leases()).await;
                Ok(Committed::Raced)
            }
            Err(failure) => {
                self.tell(&failure);
                match failure {
                    log::Error::Unavailable(_) => {
                        metrics.failed.inc();
                        Ok(Committed::Refused)
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

    fn tell(&mut self, failure: &log::Error) {
        let now = Instant::now();
        let trouble = self.trouble.get_or_insert(Trouble { since: now, told: now });
        if trouble.told != now && now - trouble.told < TELL_INTERVAL {
            return debug!(error = %failure, "writes fail still");
        }
        trouble.told = now;
        match failure {
            log::Error::Unavailable(_) => {
                warn!(error = %failure, "the database takes no writes just now; trying again");
            }
            log::Error::Full(_) => {
                error!(error = %failure, "writes are refused until there is room on the disk; reads go on");
            }
            log::Error::OutcomeUnknown(_) | log::Error::Open(_) | log::Error::Corrupt(_) | log::Error::Diverged(_) => {
                error!(
                    error = %failure,
                    "the database may or may not have taken the last writes, as their clients are told; reading it again"
                )
            }
        }
    }

    fn tell_end(&mut self) {
        if let Some(trouble) = self.trouble.take() {
            info!(elapsed_ms = trouble.since.elapsed().as_millis(), "the database takes writes again");
        }
    }

    fn gather_again(&mut self, served: Served) {
        for (command, _) in served.into_iter().rev() {
            self.gathered.push_front(command);
        }
    }

    /// Reads what the log has and the index has not, for as long as it takes. Requests that wait too long meanwhile are
    /// answered that nothing was done.
    async fn resync(&mut self) {
        let shared = Arc::clone(&self.shared);
        // At first without a pause.
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
                            return self.refuse_all();
                        }
                        // Not when it only looks who has waited too long: reading the log must end, well or not.
                        self.shared.pulses.writer.beat();
                        catching_up.set(attempt(RESYNC_PAUSE));
                    }
                },
                () = sleep(RESYNC_PAUSE) => self.refuse_overdue(),
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

    fn refuse_overdue(&mut self) {
        while self.gathered.len() < QUEUE_REQUESTS_MAX {
            let Ok(command) = self.commands.try_recv() else { break };
            self.take(command);
        }
        let (overdue, waiting) = std::mem::take(&mut self.gathered)
            .into_iter()
            .partition::<Vec<_>, _>(|command| command.since.elapsed() > WAIT_MAX);
        self.gathered = waiting.into();
        for command in overdue {
            command.ticket.answer(Err(Error::Unavailable), None);
        }
    }

    /// The end: what waits cannot be written any more.
    fn refuse_all(&mut self) {
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            self.take(command);
        }
        for command in self.gathered.drain(..) {
            command.ticket.answer(Err(Error::Unavailable), None);
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

    /// The writer does not run, so everything that is taken waits.
    #[tokio::test]
    async fn full_queue_refuses_at_once_and_takes_again_when_there_is_room() {
        let (mut writer, queue) = Writer::new(Arc::new(shared(0)), Patience::default(), BusyPoll::new(false));
        let mut waiting: Vec<_> = (0..QUEUE_REQUESTS_MAX).map(|_| Box::pin(queue.submit(delete()))).collect();
        assert!(waiting.iter_mut().all(|submitted| submitted.now_or_never().is_none()), "they are taken and wait");
        assert!(matches!(queue.submit(delete()).now_or_never(), Some(Err(Error::TooManyRequests))));

        assert!(writer.gather().await);
        assert!(queue.submit(delete()).now_or_never().is_none(), "there is room again");
    }

    #[tokio::test]
    async fn closed_queue_serves_what_waits_and_refuses_the_rest() {
        let (writer, queue) = Writer::new(Arc::new(shared(0)), Patience::default(), BusyPoll::new(false));
        let mut waiting = Box::pin(queue.submit(delete()));
        assert!(waiting.as_mut().now_or_never().is_none());
        queue.close();
        writer.run().await;
        assert!(matches!(waiting.await, Ok(Outcome::Delete(_))));
        assert!(matches!(queue.submit(delete()).await, Err(Error::Stopped)));
    }
}
