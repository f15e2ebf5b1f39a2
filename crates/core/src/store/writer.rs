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
//! A batch of any size costs one commit. Requests that change nothing are also answered in the order of the batch. If
//! the outcome of an append is unknown, its requests fail as [`Error::OutcomeUnknown`] and the writer reads the log
//! before it continues.
//!
//! If other instances append to the same log, they may be first. If they changed no key that the evaluation of a batch
//! looked at, the log appends the batch behind their changes; the writer applies these, moves its changes and responses
//! ([`rebase`](super::rebase)) and goes on. Otherwise the append has lost a race: the writer catches up and evaluates
//! the requests again. After the second loss it takes the append lock first, so that no other instance can append in
//! between. A batch that changes nothing is answered only if it has missed no write that another instance acknowledged
//! before the requests arrived.

mod commit;
mod joining;
mod recovery;
#[cfg(test)]
mod tests;

use std::{collections::VecDeque, future::ready, mem::Discriminant, sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, mpsc},
    task::yield_now,
    time::{Instant, timeout_at},
};
use tracing::{error, warn};

use self::joining::{Expected, Joining};
use super::{
    batch::Batch,
    busy_poll::BusyPoll,
    error::{Error, Result},
    permissions,
    queue::{Command, QUEUE_REQUESTS_MAX, WriteQueue},
    reader::pairs::FEW_ROWS_MAX,
    shared::Shared,
    timing::{SlowThresholds, Timing},
    txn::{Evaluation, Fetched, Stop},
    write_request::{Outcome, Request},
};
use crate::{
    log::{self, Position},
    types::{Change, RowId},
};

/// Number of pending requests at which the writer takes no more from the queue. Larger batches only add latency.
const BATCH_REQUESTS_MAX: usize = 512;
/// Number of changes at which a batch is closed.
const BATCH_CHANGES_MAX: usize = 512;
/// Number of bytes of keys and values at which a batch is closed.
const BATCH_BYTES_MAX: usize = 4 << 20;
/// Number of times the writer yields before it evaluates a batch, so that requests that are about to arrive join it, and
/// replies of the batch before are sent first. Measured on SQLite, five pairs each: without it, 1, 8, 64 and 256 clients write
/// 8, 2, 3 and 8 % less.
const COLLECT_YIELDS: usize = 3;
/// Number of lost races in a row after which the writer takes the append lock before it evaluates a batch.
const LOSSES_MAX: u32 = 2;
/// Pause before the log is read again while the database is unavailable.
const RESYNC_PAUSE: Duration = Duration::from_millis(200);

/// Evaluated requests with their outcomes.
type Served = Vec<(Command, Result<Outcome>)>;

/// The only task that appends to the log.
pub(super) struct Writer {
    shared: Arc<Shared>,
    timing: Timing,
    commands: mpsc::Receiver<Command>,
    close: Arc<Notify>,
    /// Taken from the queue and not yet part of a committed batch.
    pending: VecDeque<Command>,
    /// Values that were read for the pending requests. A row never changes, so they are kept while a batch is evaluated again;
    /// otherwise a request that reads many would never end while other instances write.
    fetched: Fetched,
    /// Number of races that were lost since the last append.
    losses: u32,
    joining: Joining,
    /// This instance has applied everything that was acknowledged before this time. `None`: it has never caught up.
    caught_up_since: Option<Instant>,
    /// Whether this instance holds the append lock: no other instance can append before this one has appended.
    holds_append_lock: bool,
    is_closed: bool,
    busy_poll: BusyPoll,
    outage: Option<Outage>,
}

/// A period in which the log accepts no writes.
struct Outage {
    since: Instant,
    /// The time and the kind of the last failure that was logged.
    logged: Option<(Instant, Discriminant<log::Error>)>,
}

impl Writer {
    pub(super) fn new(shared: Arc<Shared>, slow_thresholds: SlowThresholds, busy_poll: BusyPoll) -> (Self, WriteQueue) {
        let (sender, commands) = mpsc::channel(QUEUE_REQUESTS_MAX);
        let close = Arc::new(Notify::new());
        let queue = WriteQueue { commands: sender, waiting_bytes: Arc::default(), close: Arc::clone(&close) };
        let writer = Self {
            timing: Timing::new(&shared.metrics.store, slow_thresholds),
            shared,
            commands,
            close,
            pending: VecDeque::new(),
            fetched: Fetched::new(),
            losses: 0,
            joining: Joining::default(),
            caught_up_since: None,
            holds_append_lock: false,
            is_closed: false,
            busy_poll,
            outage: None,
        };
        (writer, queue)
    }

    /// Runs until the queue is closed and empty.
    pub(super) async fn run(mut self) {
        while self.collect().await {
            self.serve_batch().await;
        }
    }

    /// Waits until a request is pending, then takes more from the queue, up to [`BATCH_REQUESTS_MAX`]. Returns false
    /// when the queue is closed and empty.
    async fn collect(&mut self) -> bool {
        if self.pending.is_empty() {
            self.fetched = Fetched::new();
        }
        loop {
            if self.pending.is_empty() {
                self.shared.pulses.writer.rest();
            }
            tokio::select! {
                biased;
                // First, and also while requests are pending: clients that always have one waiting do not delay a stop.
                () = self.close.notified(), if !self.is_closed => {
                    self.commands.close();
                    self.is_closed = true;
                }
                () = ready(()), if !self.pending.is_empty() => break,
                command = self.commands.recv() => match command {
                    Some(command) => self.enqueue(command),
                    None => return false,
                },
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
        if let Some(expected) = self.joining.take(Instant::now()) {
            self.wait_for(expected).await;
        }
        true
    }

    /// Waits until as many requests are pending as are expected.
    async fn wait_for(&mut self, expected: Expected) {
        while self.pending.len() < expected.requests {
            let Ok(Some(command)) = timeout_at(expected.until, self.commands.recv()).await else { break };
            self.enqueue(command);
        }
        self.joining.note_wait(expected, self.pending.len(), Instant::now());
    }

    /// Moves a request from the queue to the pending ones.
    fn enqueue(&mut self, command: Command) {
        self.pending.push_back(command);
    }

    /// Evaluates pending requests up to the limits of a batch and commits it. Some requests have a batch of their own.
    async fn serve_batch(&mut self) {
        if self.losses >= LOSSES_MAX && !self.holds_append_lock {
            self.lock_appends().await;
        }
        let started = Instant::now();
        if let Some(oldest) = self.pending.front() {
            self.shared.metrics.store.queue.observe((started - oldest.since).as_secs_f64());
        }
        let expected = self.shared.position();
        if self.shared.has_pending_compaction() {
            return self.resync().await;
        }
        let mut batch = Batch::new(expected.head);
        let mut served: Served = Vec::with_capacity(self.pending.len());
        let mut bytes = 0;
        while let Some(mut command) = self.pending.pop_front() {
            let is_full = batch.changes().len() >= BATCH_CHANGES_MAX || bytes >= BATCH_BYTES_MAX;
            let is_alone = command.request.is_alone();
            if (is_full || is_alone) && !served.is_empty() {
                self.pending.push_front(command);
                break;
            }
            self.shared.pulses.writer.beat();
            if let Err(error) = self.shared.admit(&command.request, command.bytes.count).await {
                served.push((command, Err(error)));
                continue;
            }
            if !command.has_started && self.lacks_memory(&command.request) {
                served.push((command, Err(Error::TooManyRequests)));
                continue;
            }
            let before = batch.changes().len();
            match self.evaluate(&command, expected, &mut batch) {
                Ok(outcome) => {
                    // A put that keeps its value is a small request and a large change.
                    let written: usize = batch.changes()[before..].iter().map(Change::pair_bytes).sum();
                    bytes += command.bytes.count.max(written);
                    served.push((command, Ok(outcome)));
                }
                Err(Stop::Failed(error)) => served.push((command, Err(error))),
                // Values for a client that has left would delay all others.
                Err(Stop::NeedsValues(_)) if command.ticket.is_abandoned() => {}
                Err(Stop::NeedsValues(rows)) => match self.fetch(rows, expected).await {
                    Ok(true) => {
                        command.has_started = true;
                        self.pending.push_front(command);
                    }
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
                Err(Stop::Outdated) => {
                    self.pending.push_front(command);
                    self.requeue(served);
                    return self.note_outdated();
                }
            }
            if is_alone {
                break;
            }
        }
        self.commit(batch, expected, served, started).await;
    }

    /// Takes the append lock and catches up with the instances that appended before. If the lock cannot be taken,
    /// the batch is appended without it.
    async fn lock_appends(&mut self) {
        let shared = Arc::clone(&self.shared);
        let Some(log) = shared.log.shared() else { return };
        if let Err(failure) = log.lock_appends().await {
            warn!(error = %failure, "cannot take the append lock");
            return;
        }
        self.holds_append_lock = true;
        if let Err(failure) = shared.reach_head(log).await {
            warn!(error = %failure, "cannot catch up before an append");
        }
    }

    /// Evaluates a request, unless the store is no longer at the position on which the batch is based. The rights of the
    /// caller are those at this position.
    fn evaluate(
        &self,
        Command { caller, request, .. }: &Command,
        expected: Position,
        batch: &mut Batch,
    ) -> std::result::Result<Outcome, Stop> {
        let index = self.shared.index.read();
        let leases = self.shared.leases.lock();
        if index.head() != expected.head || leases.epoch != expected.epoch {
            return Err(Stop::Outdated);
        }
        if let Some(authority) = self.shared.authority.if_enabled() {
            permissions::check(&authority, caller, request, |lease, set| {
                batch.has_lease_key_outside(&leases, lease, set)
            })
            .map_err(Error::from)?;
        }
        if let Request::Expire(id) = request
            && !batch.is_lease_expired(&leases, *id, Instant::now())
        {
            // The lease was renewed or has already ended.
            return Ok(Outcome::Revision(batch.head()));
        }
        let mut evaluation =
            Evaluation::new(&index, &leases, &self.shared.values, &self.shared.read_memory, &self.fetched, batch);
        evaluation.evaluate(request, &self.shared.authority)
    }

    /// Returns whether a request may list keys and there is no memory for them. It is refused then: a write that waited for
    /// memory would delay all others.
    fn lacks_memory(&self, request: &Request) -> bool {
        matches!(request, Request::Txn(txn) if txn.lists_keys()) && !self.shared.read_memory.has_free_for_list()
    }

    /// Reads rows that an evaluation needs. Returns false if a row is missing and the log is no longer at `expected`:
    /// another instance may have compacted the row.
    async fn fetch(&mut self, rows: Vec<RowId>, expected: Position) -> Result<bool> {
        if rows.iter().any(|row| self.fetched.contains_key(row)) {
            if self.shared.has_moved_past(expected).await? {
                return Ok(false);
            }
            // A row was already fetched and not found: the index refers to a row that the log does not contain.
            error!(?rows, "rows of live versions are missing from the log");
            return Err(Error::Corrupt);
        }
        // As in `lacks_memory`.
        let memory = &self.shared.read_memory;
        let has_free = if rows.len() > FEW_ROWS_MAX { memory.has_free_for_list() } else { memory.has_free() };
        if !has_free {
            return Err(Error::TooManyRequests);
        }
        let found = self.shared.read_few(&rows).await?;
        self.fetched.extend(rows.iter().map(|row| (*row, None)));
        self.fetched.extend(found.into_iter().map(|(row, kv)| (row, Some(kv))));
        Ok(true)
    }
}
