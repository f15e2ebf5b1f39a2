//! From times to revisions and back.

use tokio::time::{Duration, Instant, sleep};

use super::{GAP_MIN, HistoryKeeper, clock_steps::ClockSteps, past::PastResult};
use crate::{
    log::{self, Archive, Moment, Written},
    store::handle::Store,
    types::Revision,
};

/// Pause between two looks for a record that is expected.
const RECORD_POLL_PAUSE: Duration = Duration::from_millis(100);

/// The newest recorded moment at or before a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundMoment {
    pub moment: Moment,
    /// Whether later revisions may have been written before the time, too, because nobody recorded times then, or since, or
    /// because recorded times contradict each other.
    pub may_lack_revisions: bool,
}

impl Store {
    /// Returns the newest recorded moment at or before a time in milliseconds since 1970; `None` if there is none.
    /// Revisions that are not recorded yet may be as old as the time, so this waits for their record, up to 3 seconds.
    pub async fn moment_at(&self, unix_ms: i64) -> PastResult<Option<FoundMoment>> {
        let Some(HistoryKeeper { archive, .. }) = &self.shared.history else { return Ok(None) };
        self.confirm().await?;
        // A record that comes later has a gap.
        let (head, deadline) = (self.head(), Instant::now() + GAP_MIN);
        loop {
            // First: old records may be deleted meanwhile, and with them what contradicts the others.
            let steps = ClockSteps::read(archive.as_ref()).await?;
            let Some(moment) = archive.moment_at(unix_ms).await? else { return Ok(None) };
            let next = archive.records(&[moment.revision.next()]).await?.pop().flatten();
            let lacks_record = next.is_none() && head > moment.revision;
            if !lacks_record || Instant::now() >= deadline {
                let may_lack_revisions = lacks_record
                    || next.is_some_and(|next| next.has_gap)
                    || steps.make_uncertain(unix_ms, moment, next.map(|next| next.moment));
                return Ok(Some(FoundMoment { moment, may_lack_revisions }));
            }
            sleep(RECORD_POLL_PAUSE).await;
        }
    }
}

/// Returns when revisions were written.
pub(super) async fn times(archive: &dyn Archive, revisions: &[Revision]) -> log::Result<Vec<Option<Written>>> {
    let steps = ClockSteps::read(archive).await?;
    let records = archive.records(revisions).await?;
    Ok(records.into_iter().map(|record| steps.written(record?)).collect())
}

/// Returns when revisions were written. What was written since the last record was written by now.
pub(super) async fn times_until_now(
    archive: &dyn Archive,
    revisions: &[Revision],
) -> log::Result<Vec<Option<Written>>> {
    let steps = ClockSteps::read(archive).await?;
    let records = archive.records(revisions).await?;
    let mut times: Vec<Option<Written>> = records.iter().map(|record| steps.written((*record)?)).collect();
    if records.contains(&None)
        && let Some(first) = archive.first_moment().await?
    {
        let by_now = Written { unix_ms: archive.now_ms().await?, is_latest: true };
        for ((time, record), revision) in times.iter_mut().zip(records).zip(revisions) {
            if record.is_none() && *revision > first.revision {
                *time = Some(by_now);
            }
        }
    }
    Ok(times)
}
