//! Commits a batch and answers its requests.

use std::{mem::discriminant, sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use tracing::{debug, error, info, warn};

use super::{Outage, RESYNC_PAUSE, Served, Writer, joining};
use crate::{
    log::{self, Append, Appended, Position, ReadSet},
    store::{
        batch::Batch,
        error::{Error, Result},
        rebase::{self, RightsCheck},
        timing::PhaseTimes,
        txn::Fetched,
    },
    types::{Rebase, Revision},
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
            let (since, phases) = (self.caught_up_since, PhaseTimes { started, evaluated, committed: evaluated });
            let (covered, rest) = served.into_iter().partition(|(command, _)| Some(command.since) < since);
            self.reply(covered, phases);
            served = rest;
            let confirmed =
                if served.is_empty() { Ok(CommitOutcome::Done) } else { self.confirm_position(expected).await };
            self.release_append_lock(&batch, expected).await;
            confirmed
        } else {
            if self.shared.hub.wants_prev() {
                self.shared.fill_prev(batch.changes_mut(), &mut self.fetched).await;
            }
            self.append(&mut batch, &mut served, expected).await
        };
        match committed {
            Ok(CommitOutcome::Done) => {
                self.losses = 0;
                self.fetched = Fetched::new();
                self.reply(served, PhaseTimes { started, evaluated, committed: Instant::now() });
            }
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
                self.fetched = Fetched::new();
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

    /// Checks that the log is still at the position at which a batch without changes was evaluated. Otherwise the batch
    /// may have missed a write that another instance has acknowledged.
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
        // Without other instances, nobody else appends.
        let is_alone = self.shared.members.is_alone();
        let reads = if is_alone { None } else { self.read_set(served, expected) };
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
        let _appending = (is_alone || reads.is_some()).then(|| shared.replication.mark_append());
        let begun = Instant::now();
        let is_lone = batch.changes().len() <= 1;
        // Before others, or a read of this instance, can see the compaction. If its outcome is unknown and it was recorded,
        // this instance deletes its rows as well.
        let noted = batch.compaction().filter(|compaction| shared.note_own_compaction(*compaction));
        let appended = self.busy_poll.wait(is_lone, shared.log.append(append)).await;
        if let Some(compaction) = noted.filter(|_| !may_be_appended(&appended)) {
            shared.own_compactions.lock().remove(&compaction);
        }
        match appended {
            Ok(appended @ (Appended::Done | Appended::Behind { .. })) => {
                let took = begun.elapsed();
                metrics.fsync.observe(took.as_secs_f64());
                shared.write_outage.note_success();
                self.log_recovery();
                let mut others_found = if is_alone { joining::Others::None } else { joining::Others::Idle };
                // Held until the batch is applied, so that no other server is accepted before.
                let mut _same_server = None;
                if let Appended::Behind { base, others } = appended {
                    let others = shared.apply_others(others, base, expected.server).await;
                    _same_server = Some(others.map_err(|failure| self.log_unread(&failure))?);
                    shared.metrics.store.appended_behind.inc();
                    move_behind(base, batch, served);
                    others_found = joining::Others::Before;
                }
                let waiting = self.pending.len() + self.commands.len();
                let commit = joining::Commit { served: served.len(), waiting, took, others: others_found };
                self.joining.note_commit(&commit, Instant::now());
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
        let is_checked = self.shared.authority.if_enabled().is_some();
        let rights = if is_checked { RightsCheck::On } else { RightsCheck::Off };
        rebase::read_set(served.iter().map(|(command, _)| &command.request), expected.head, rights)
    }

    /// Logs that changes of other instances, behind which a batch was appended, could not be applied.
    fn log_unread(&mut self, failure: &log::Error) -> Error {
        self.log_failure(&log::Error::OutcomeUnknown(failure.to_string()));
        Error::OutcomeUnknown
    }

    /// Decides what happens to a batch whose append failed.
    fn handle_failure(&mut self, failure: &log::Error) -> Result<CommitOutcome> {
        if let log::Error::Refused(reason) = failure {
            // Not an outage: the next request may succeed.
            warn!(error = %failure, "a request failed on the database");
            return Err(Error::Refused(reason.clone()));
        }
        self.log_failure(failure);
        // A full disk may be the cause.
        self.shared.space.measure_requested.notify_one();
        match failure {
            log::Error::Unavailable(_) => {
                self.shared.metrics.store.failed.inc();
                Ok(CommitOutcome::Refused)
            }
            log::Error::Full(_) => Err(Error::NoSpace),
            log::Error::Corrupt(_) => Err(Error::Corrupt),
            log::Error::OutcomeUnknown(_) | log::Error::Refused(_) | log::Error::Open(_) | log::Error::Diverged(_) => {
                Err(Error::OutcomeUnknown)
            }
        }
    }

    /// Notes a failed write, and logs it at most every [`FAILURE_LOG_INTERVAL`] while the failures are of one kind.
    fn log_failure(&mut self, failure: &log::Error) {
        self.shared.write_outage.note_failure(failure);
        let (now, kind) = (Instant::now(), discriminant(failure));
        let outage = self.outage.get_or_insert(Outage { since: now, logged: None });
        if outage.logged.is_some_and(|(logged, of)| of == kind && now - logged < FAILURE_LOG_INTERVAL) {
            return debug!(error = %failure, "writes still fail");
        }
        outage.logged = Some((now, kind));
        match failure {
            log::Error::Unavailable(_) => {
                warn!(error = %failure, "the database accepts no writes; trying again");
            }
            log::Error::Full(_) => {
                error!(error = %failure, "the disk is full: writes are rejected until space is freed, reads continue");
            }
            log::Error::Corrupt(_) => {
                error!(error = %failure, "the database is damaged: puts are rejected");
            }
            log::Error::OutcomeUnknown(_) | log::Error::Refused(_) | log::Error::Open(_) | log::Error::Diverged(_) => {
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

fn may_be_appended(appended: &log::Result<Appended>) -> bool {
    matches!(appended, Ok(Appended::Done | Appended::Behind { .. }) | Err(log::Error::OutcomeUnknown(_)))
}

/// Moves a batch and the responses to its requests behind the changes of other instances up to `base`.
fn move_behind(base: Revision, batch: &mut Batch, served: &mut Served) {
    let rebase = Rebase { base: batch.base(), by: base.0 - batch.base().0 };
    batch.rebase(rebase);
    for outcome in served.iter_mut().filter_map(|(_, outcome)| outcome.as_mut().ok()) {
        rebase::outcome(rebase, outcome);
    }
}
