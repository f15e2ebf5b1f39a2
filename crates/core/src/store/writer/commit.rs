//! Commits a batch and answers its requests.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use tracing::{debug, error, info, warn};

use super::{Outage, RESYNC_PAUSE, Served, Writer};
use crate::{
    log::{self, Append, Appended, Position, ReadSet},
    store::{
        batch::Batch,
        error::{Error, Result},
        rebase::{self, Rights},
        timing::PhaseTimes,
    },
    types::{Change, Rebase},
};

/// Minimum interval between messages about failed writes.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(5);

/// The result of committing a batch.
enum CommitOutcome {
    /// The requests can be answered.
    Done,
    /// The log's position differs from the one at which the batch was evaluated; nothing was written.
    Raced,
    /// The database is unavailable; nothing was written.
    Refused,
}

impl Writer {
    /// Commits a batch and answers its requests. If nothing was written, the requests become pending again.
    pub(super) async fn commit(&mut self, mut batch: Batch, expected: Position, mut served: Served, started: Instant) {
        let evaluated = Instant::now();
        let metrics = &self.shared.metrics.store;
        metrics.batch_requests.observe(served.len() as f64);
        metrics.batch_rows.observe(batch.changes().len() as f64);
        self.shared.pulses.writer.beat();
        let committed = if batch.is_empty() {
            let confirmed = self.confirm_position(expected, &served).await;
            self.release_append_lock(&batch, expected).await;
            confirmed
        } else {
            if self.shared.hub.wants_prev() {
                self.shared.fill_prev(batch.changes_mut()).await;
            }
            self.append(&mut batch, &mut served, expected).await
        };
        match committed {
            Ok(CommitOutcome::Done) => self.reply(served, PhaseTimes { started, evaluated, committed: Instant::now() }),
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
                self.reply(failed, PhaseTimes { started, evaluated, committed: Instant::now() });
                self.resync().await;
            }
        }
    }

    /// Answers the requests of a batch and records their durations.
    fn reply(&self, served: Served, phases: PhaseTimes) {
        let mut is_slow = false;
        for (command, outcome) in served {
            let times = self.timing.note(&command.request, command.since, phases, outcome.is_ok());
            is_slow |= times.apply_is_slow;
            command.ticket.reply(outcome, Some(times));
        }
        if is_slow {
            self.shared.metrics.store.slow_applies.inc();
        }
    }

    /// Checks that a batch without changes has not missed a write that another instance acknowledged before one of the
    /// requests arrived: the log is still at the position at which the batch was evaluated, or this instance has caught
    /// up since the requests arrived.
    async fn confirm_position(&mut self, expected: Position, served: &Served) -> Result<CommitOutcome> {
        let Some(log) = self.shared.log.shared() else { return Ok(CommitOutcome::Done) };
        if let Some(since) = self.caught_up_since
            && served.iter().all(|(command, _)| command.since < since)
        {
            return Ok(CommitOutcome::Done);
        }
        match log.position().await {
            Ok(position) if position == expected => Ok(CommitOutcome::Done),
            Ok(_) => Ok(CommitOutcome::Raced),
            Err(failure) => {
                self.log_failure(&failure);
                Ok(CommitOutcome::Refused)
            }
        }
    }

    /// Releases the append lock after a batch that changes nothing: an empty append releases it.
    async fn release_append_lock(&mut self, batch: &Batch, expected: Position) {
        if std::mem::take(&mut self.holds_append_lock) {
            let nothing = Append {
                expected,
                changes: batch.changes(),
                reads: None,
                leases: batch.leases(),
                compact: None,
                fact: None,
                auth: None,
            };
            // If the release fails, the lock is already lost.
            if let Err(failure) = self.shared.log.append(nothing).await {
                debug!(error = %failure, "the append lock was lost");
            }
        }
    }

    /// Appends the batch to the log and applies it.
    async fn append(&mut self, batch: &mut Batch, served: &mut Served, expected: Position) -> Result<CommitOutcome> {
        let reads = self.read_set(served, expected);
        let append = Append {
            expected,
            changes: batch.changes(),
            reads: reads.as_ref(),
            leases: batch.leases(),
            compact: batch.compaction(),
            fact: batch.alarm().map(log::FactChange::Alarm),
            auth: batch.auth().map(|update| log::AuthAppend { change: &update.change, next: &update.state }),
        };
        self.holds_append_lock = false;
        let shared = Arc::clone(&self.shared);
        let metrics = &shared.metrics.store;
        let _appending = shared.replication.mark_append();
        let begun = Instant::now();
        let is_lone = batch.changes().len() <= 1;
        match self.busy_poll.wait(is_lone, shared.log.append(append)).await {
            Ok(appended @ (Appended::Done | Appended::Behind(_))) => {
                let took = begun.elapsed().as_secs_f64();
                metrics.fsync.observe(took);
                self.log_recovery();
                self.losses = 0;
                if let Appended::Behind(others) = appended {
                    self.rebase(batch, served, others).await;
                }
                shared.apply_batch(batch, Position { head: batch.base(), ..expected }, Instant::now());
                if let Some(revision) = batch.compaction() {
                    info!(compact_revision = revision.0, "compaction recorded");
                }
                Ok(CommitOutcome::Done)
            }
            Ok(Appended::Conflict) => {
                debug!(revision = expected.head.0, "another instance appended first");
                metrics.raced.inc();
                self.losses += 1;
                // The log also refuses the expiry of a lease that another instance has renewed.
                shared.refresh_expired_leases(batch.leases()).await;
                Ok(CommitOutcome::Raced)
            }
            Err(failure) => self.handle_failure(&failure),
        }
    }

    /// Returns what the evaluation of the requests looked at, if the batch can be appended behind changes of other
    /// instances.
    fn read_set<'a>(&self, served: &'a Served, expected: Position) -> Option<ReadSet<'a>> {
        if self.shared.log.shared().is_none() || self.holds_append_lock {
            return None;
        }
        let rights = if self.shared.authority.if_enabled().is_some() { Rights::Checked } else { Rights::NotChecked };
        rebase::read_set(served.iter().map(|(command, _)| &command.request), expected.head, rights)
    }

    /// Applies the changes of other instances behind which the batch was appended, and moves the batch and the
    /// responses behind them.
    async fn rebase(&self, batch: &mut Batch, served: &mut Served, others: Vec<Change>) {
        let Some(newest) = others.last() else { return };
        let (base, head) = (batch.base(), newest.row.revision);
        let rebase = Rebase { base, by: head.0 - base.0 };
        self.shared.metrics.store.appended_behind.inc();
        self.shared.apply_others(others, head).await;
        batch.rebase(rebase);
        for outcome in served.iter_mut().filter_map(|(_, outcome)| outcome.as_mut().ok()) {
            rebase::outcome(rebase, outcome);
        }
    }

    /// Decides what happens to a batch whose append failed.
    fn handle_failure(&mut self, failure: &log::Error) -> Result<CommitOutcome> {
        self.log_failure(failure);
        // A full disk may be the cause.
        self.shared.space.measure_requested.notify_one();
        match failure {
            log::Error::Unavailable(_) => {
                self.shared.metrics.store.failed.inc();
                Ok(CommitOutcome::Refused)
            }
            log::Error::Full(_) => Err(Error::NoSpace),
            log::Error::OutcomeUnknown(_) | log::Error::Open(_) | log::Error::Corrupt(_) | log::Error::Diverged(_) => {
                Err(Error::OutcomeUnknown)
            }
        }
    }

    /// Logs a failed write, at most every [`FAILURE_LOG_INTERVAL`].
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
                    "the outcome of the last writes is unknown; their clients received an error; reading the log again"
                )
            }
        }
    }

    /// Logs the end of an outage.
    fn log_recovery(&mut self) {
        if let Some(outage) = self.outage.take() {
            info!(elapsed_ms = outage.since.elapsed().as_millis(), "the database accepts writes again");
        }
    }
}
