//! From times to revisions and back.

use super::{HistoryKeeper, Keep, past::PastResult};
use crate::{
    clock,
    log::{self, Archive, Moment, Time, Written},
    store::handle::Store,
    types::Revision,
};

/// The newest recorded moment at or before a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FoundMoment {
    pub moment: Moment,
    /// Whether later revisions may have been written before the time, too, because nobody recorded times then.
    pub may_lack_revisions: bool,
}

impl Store {
    /// Returns the newest recorded moment at or before a time in milliseconds since 1970; `None` if there is none.
    pub async fn moment_at(&self, unix_ms: i64) -> PastResult<Option<FoundMoment>> {
        let Some(HistoryKeeper { archive, keep, .. }) = &self.shared.history else { return Ok(None) };
        let Some(moment) = archive.moment_at(Time::UnixMs(unix_ms)).await? else { return Ok(None) };
        let next = archive.times(&[moment.revision.next()]).await?.pop().flatten();
        let may_lack_revisions = match (next, keep) {
            (Some(next), _) => next.is_latest,
            (None, Keep::Rows { .. }) => false,
            (None, Keep::Nothing | Keep::AsBefore) => self.head() > moment.revision,
        };
        Ok(Some(FoundMoment { moment, may_lack_revisions }))
    }
}

/// Returns when revisions were written. What was written since the last record was written by now.
pub(super) async fn times_until_now(
    archive: &dyn Archive,
    revisions: &[Revision],
) -> log::Result<Vec<Option<Written>>> {
    let mut times = archive.times(revisions).await?;
    if times.contains(&None)
        && let Some(first) = archive.first_moment().await?
    {
        let by_now = Written { unix_ms: clock::unix_ms(clock::now()), is_latest: true };
        for (time, revision) in times.iter_mut().zip(revisions) {
            if *revision > first.revision {
                time.get_or_insert(by_now);
            }
        }
    }
    Ok(times)
}
