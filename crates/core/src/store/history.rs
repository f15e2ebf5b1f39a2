//! The history that outlasts compactions: keeps compacted rows in an archive for some time, and reads past states.
//!
//! The compactor copies rows to the archive before it deletes them ([`delete_rows`]). One task, on the leader,
//! records times and deletes what is too old or too much. [`past`] reads a state or changes at any revision that is complete,
//! and [`moments`] finds the revision of a time, unless it is uncertain because the clock was set ([`clock_steps`]).
//! Requests of etcd's API do not use any of this.

mod clock_steps;
mod even_clock;
mod frozen;
mod moments;
mod past;
#[cfg(test)]
mod tests;

use std::{
    collections::HashMap,
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval, sleep},
};
use tracing::warn;

pub use self::frozen::FrozenStore;
pub use self::moments::FoundMoment;
pub use self::past::{HistoryState, PastChange, PastChanges, PastError, PastPairs};
use self::{clock_steps::ClockSteps, even_clock::EvenClock};
use super::{shared::Shared, tasks::until_stopped};
use crate::{
    log::{self, Archive, Error, Log, Reclaim, Reclaimed},
    sync::Mutex,
    types::{Revision, RowId, Superseded},
};

/// Interval at which the time of the head is recorded, so that the time of each revision is known to the second.
const TIME_INTERVAL: Duration = Duration::from_secs(1);
/// Time without a record after which the times of revisions in between are not known.
const GAP_MIN: Duration = Duration::from_secs(3);
/// Time after a start in which the clock may not be set yet.
const CLOCK_SET_MAX: Duration = Duration::from_secs(600);
/// A clock that is less than this behind the newest recorded time may be set.
const CLOCK_BEHIND_MIN_MS: i64 = 60_000;
/// Interval at which old rows are deleted.
const PRUNE_INTERVAL: Duration = Duration::from_secs(10);
/// Number of attempts to write to the archive, one a second, before rows are given up.
const WRITE_ATTEMPTS: u32 = 10;
/// Bytes of values after which a copy ends, so that it takes little time and memory.
const COPY_BYTES: u64 = 4 << 20;
/// Time for deletions, so that times are recorded in between.
const PRUNE_TIME: Duration = Duration::from_millis(500);
/// Pause between two deletions.
const PRUNE_PAUSE: Duration = Duration::from_millis(10);

/// An archive and what is kept in it.
#[derive(Clone)]
pub struct HistorySettings {
    pub archive: Arc<dyn Archive>,
    pub keep: Keep,
}

/// Which compacted rows are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Keep {
    /// None. Rows that the archive has from earlier are deleted at the next compaction, because the rows between them
    /// and the log are missing.
    Nothing,
    /// Those that were superseded within `retention`; of these, the newest of at most `bytes_max` (see
    /// [`crate::log::ArchiveState::bytes`]).
    Rows { retention: Duration, bytes_max: u64 },
    /// Those that an archive which was begun needs to stay complete; none is deleted. For a process that only looks.
    AsBefore,
}

impl std::fmt::Debug for HistorySettings {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("HistorySettings").field("keep", &self.keep).finish_non_exhaustive()
    }
}

/// The history of a store.
pub struct HistoryKeeper {
    archive: Arc<dyn Archive>,
    keep: Keep,
    /// Number of calls of [`Self::keep`] and [`Self::finish`] that failed since the last one that succeeded.
    failures: AtomicU32,
    /// When this process began to record times.
    began: Instant,
    clock: Mutex<Clock>,
    even_clock: Mutex<EvenClock>,
}

/// What this process has recorded of times.
#[derive(Default)]
struct Clock {
    /// The newest recorded head.
    noted: Revision,
    /// When this process last knew that no revision lacked a time.
    known_at: Option<Instant>,
}

impl HistoryKeeper {
    pub fn new(settings: HistorySettings) -> Self {
        let HistorySettings { archive, keep } = settings;
        let (began, failures) = (Instant::now(), AtomicU32::new(0));
        Self { archive, keep, began, failures, clock: Mutex::default(), even_clock: Mutex::default() }
    }

    /// Begins to keep rows, if they are to be kept, and records the first moment. A store must start even if this is
    /// impossible, for example because the disk is full.
    pub async fn begin(&self, compacted: Option<Revision>, head: Revision) {
        if !matches!(self.keep, Keep::Rows { .. }) {
            return;
        }
        let begun = async {
            self.archive.begin(compacted).await?;
            match self.archive.first_moment().await? {
                Some(_) => Ok(()),
                None => self.note_time(head).await,
            }
        };
        if let Err(error) = begun.await {
            warn!(%error, "cannot begin the history; the next compaction tries again");
        }
    }

    /// Returns whether compacted rows are kept.
    async fn keeps(&self) -> log::Result<bool> {
        Ok(match self.keep {
            Keep::Nothing => false,
            Keep::Rows { .. } => true,
            Keep::AsBefore => self.archive.state().await?.first < Revision::MAX,
        })
    }

    /// Returns how many of these rows, from the first on, are copied together. If their lengths cannot be read, it is all
    /// of them, because then the copy fails, too.
    async fn rows_of_copy(&self, log: &dyn Log, rows: &[Superseded]) -> usize {
        if self.keep == Keep::Nothing {
            return rows.len();
        }
        let ids: Vec<RowId> = rows.iter().map(|superseded| superseded.row).collect();
        let Ok(lengths) = log.value_lengths(&ids).await else { return rows.len() };
        rows_within(COPY_BYTES, &ids, &lengths.into_iter().collect())
    }

    /// Copies rows that the compaction at `compacted` removes, unless they are not to be kept. If the disk is full, or
    /// copying fails again and again, the rows are given up: their deletion from the log frees space that the store
    /// needs.
    async fn keep(&self, rows: &[Superseded], compacted: Revision) -> log::Result<()> {
        if !self.keeps().await? {
            self.archive.give_up(compacted).await?;
            // What is left is deleted in the background.
            let _ = self.archive.prune(compacted, u64::MAX).await;
            return Ok(());
        }
        let Err(error) = self.archive.copy(rows).await else {
            self.failures.store(0, Ordering::Relaxed);
            return Ok(());
        };
        if self.is_worth_another_attempt(&error) {
            return Err(error);
        }
        self.archive.give_up(compacted).await?;
        warn!(
            %error,
            compact_revision = compacted.0,
            "compacted rows cannot be kept; the history begins at the compact revision now"
        );
        Ok(())
    }

    /// Records that all rows of a compaction were copied or given up, on this server. An archive that could not be begun
    /// at the start begins here. If this fails again and again, the history before the compaction is given up. If even
    /// that fails, nothing is recorded, and reads of the past fail until a later compaction, because the rows count as not
    /// copied yet.
    pub async fn finish(&self, compacted: Revision, server: i64) -> log::Result<()> {
        let finished = async {
            if matches!(self.keep, Keep::Rows { .. }) {
                self.archive.begin(Some(compacted)).await?;
            }
            self.archive.finish_copy(compacted, server).await
        };
        let Err(error) = finished.await else {
            self.failures.store(0, Ordering::Relaxed);
            return Ok(());
        };
        if self.is_worth_another_attempt(&error) {
            return Err(error);
        }
        let given_up = self.archive.give_up(compacted).await;
        warn!(
            %error,
            compact_revision = compacted.0,
            given_up = given_up.is_ok(),
            "cannot record in the history that compacted rows were copied"
        );
        Ok(())
    }

    /// Counts a failure to write to the archive. Returns whether the caller should try again.
    fn is_worth_another_attempt(&self, error: &Error) -> bool {
        match error {
            // The outage passes, and until then the rows cannot be deleted from the log either.
            Error::Unavailable(_) if self.archive.shares_database() => true,
            Error::Full(_) => false,
            Error::Unavailable(_)
            | Error::Refused(_)
            | Error::OutcomeUnknown(_)
            | Error::Open(_)
            | Error::Corrupt(_)
            | Error::Diverged(_) => self.failures.fetch_add(1, Ordering::Relaxed) + 1 < WRITE_ATTEMPTS,
        }
    }

    /// Returns whether there is an archive, and the rows of a compaction were not copied yet or given up.
    pub(super) async fn lacks(&self, compacted: Revision) -> bool {
        let lacks = |state: log::ArchiveState| state.first < Revision::MAX && state.copied < compacted;
        self.archive.state().await.is_ok_and(lacks)
    }

    /// Records the time of the head, if it is new.
    pub async fn note_time(&self, head: Revision) -> log::Result<()> {
        if !matches!(self.keep, Keep::Rows { .. }) {
            return Ok(());
        }
        let (is_new, has_gap) = {
            let clock = self.clock.lock();
            (head > clock.noted, clock.known_at.is_none_or(|at| at.elapsed() > GAP_MIN))
        };
        if is_new {
            if has_gap && self.may_have_unset_clock().await? {
                return Ok(());
            }
            self.archive.note_time(head, has_gap).await?;
        }
        *self.clock.lock() = Clock { noted: head, known_at: Some(Instant::now()) };
        Ok(())
    }

    /// Returns whether the clock is soon after a start behind the recorded times. A machine without a clock of its own starts
    /// with the time of its last stop, or an older one, until it has reached a time server. A record of that time would make
    /// all times in between uncertain; without one, the revisions are known to be no newer than the next record.
    async fn may_have_unset_clock(&self) -> log::Result<bool> {
        if self.began.elapsed() > CLOCK_SET_MAX {
            return Ok(false);
        }
        let newest = self.archive.moment_at(i64::MAX).await?;
        let Some(newest) = newest else { return Ok(false) };
        if newest.unix_ms <= self.archive.now_ms().await?.saturating_add(CLOCK_BEHIND_MIN_MS) {
            return Ok(false);
        }
        // After a clock that was ahead, the time of the last record is an earlier one.
        Ok(self.archive.clock_steps().await?.iter().all(|step| step.revision <= newest.revision))
    }

    /// Ends the history of a store whose last revision is `head`.
    pub async fn close(&self, head: Revision) {
        // Otherwise the next start finds a gap. Another instance may be the one that records times.
        if self.clock.lock().known_at.is_some_and(|at| at.elapsed() <= GAP_MIN) {
            let _ = self.note_time(head).await;
        }
        self.archive.close().await;
    }

    /// Returns the newest revision that is older than `age` by the recorded times, if they do not contradict each other.
    async fn revision_before(&self, now_ms: i64, age: Duration) -> log::Result<Option<Revision>> {
        let unix_ms = now_ms.saturating_sub(i64::try_from(age.as_millis()).unwrap_or(i64::MAX));
        // The revision that is found for such a time may be one that a clock which was behind has recorded later.
        if ClockSteps::read(self.archive.as_ref()).await?.is_repeated(unix_ms) {
            return Ok(None);
        }
        let found = self.archive.moment_at(unix_ms).await?;
        Ok(found.map(|moment| moment.revision))
    }

    /// Deletes rows that are no longer to be kept, for [`PRUNE_TIME`].
    async fn prune(&self) -> log::Result<Reclaimed> {
        let (first, bytes_max) = match self.keep {
            Keep::AsBefore => return Ok(Reclaimed::All),
            Keep::Nothing => (Revision::EMPTY, u64::MAX),
            Keep::Rows { retention, bytes_max } => {
                let now_ms = self.archive.now_ms().await?;
                let is_even = self.even_clock.lock().observe(Instant::now(), now_ms, retention);
                let oldest = if is_even { self.revision_before(now_ms, retention).await? } else { None };
                (oldest.unwrap_or(Revision::EMPTY), bytes_max)
            }
        };
        let began = Instant::now();
        loop {
            let reclaimed = self.archive.prune(first, bytes_max).await?;
            if reclaimed == Reclaimed::All || began.elapsed() >= PRUNE_TIME {
                return Ok(reclaimed);
            }
            sleep(PRUNE_PAUSE).await;
        }
    }
}

/// Deletes rows from the log that the compaction at `compacted` removes. With a history, it deletes only the first of them, as
/// many as are copied together, after it has copied them or given them up ([`HistoryKeeper::keep`]). Returns their number.
///
/// After an error it can be called again with the same rows.
pub async fn delete_rows(
    log: &dyn Log,
    history: Option<&HistoryKeeper>,
    mut rows: &[Superseded],
    compacted: Revision,
    server: i64,
) -> log::Result<usize> {
    if let Some(history) = history {
        rows = &rows[..history.rows_of_copy(log, rows).await];
        history.keep(rows, compacted).await?;
    }
    let rows: Vec<RowId> = rows.iter().map(|superseded| superseded.row).collect();
    log.reclaim(Reclaim::Rows { rows: &rows, compacted, server }).await?;
    Ok(rows.len())
}

/// Returns how many rows, from the first on and at least one, it takes to have `bytes` together. A row without a length
/// counts nothing.
fn rows_within(bytes: u64, rows: &[RowId], lengths: &HashMap<RowId, u64>) -> usize {
    let mut sum = 0;
    let reaches = |row: &RowId| {
        sum += lengths.get(row).copied().unwrap_or_default();
        sum >= bytes
    };
    rows.iter().position(reaches).map_or(rows.len(), |last| last + 1)
}

/// Records times and deletes old rows, until stopped.
pub(super) async fn run(shared: Arc<Shared>, stop: watch::Receiver<bool>) {
    let Some(history) = &shared.history else { return };
    let work = async {
        let mut ticks = interval(TIME_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let (mut pruned_at, mut is_failing) = (None::<Instant>, false);
        loop {
            ticks.tick().await;
            if !shared.members.is_leader() {
                continue;
            }
            let is_due = pruned_at.is_none_or(|at| at.elapsed() >= PRUNE_INTERVAL);
            let done = async {
                let head = shared.index.read().head();
                history.note_time(head).await?;
                if is_due {
                    if history.prune().await? == Reclaimed::All {
                        pruned_at = Some(Instant::now());
                    }
                    let state = history.archive.state().await?;
                    shared.metrics.maintenance.history_rows.set(state.rows.cast_signed());
                    shared.metrics.maintenance.history_bytes.set(state.bytes.cast_signed());
                }
                log::Result::Ok(())
            };
            let done = done.await;
            if let (Err(error), false) = (&done, is_failing) {
                warn!(%error, "cannot maintain the history; trying again");
            }
            is_failing = done.is_err();
        }
    };
    until_stopped(stop, work).await;
    if shared.members.is_leader() {
        // Otherwise the next start finds a gap. The last writes are recorded when the history is closed.
        let head = shared.index.read().head();
        let _ = history.note_time(head).await;
    }
}
