//! Whether the database accepts writes, as far as this instance knows.
//!
//! A database may answer reads while it accepts no write: a synchronous standby is missing, transactions are read-only, a
//! table is locked, the disk cannot sync. The writer learns of it and notes it here, for probes and metrics. If nothing is
//! written, it learns nothing; on a shared log the heartbeat is also a write. A full disk has an alarm of its own
//! ([`Space`](super::space)).

use std::{sync::atomic::Ordering, time::Duration};

use tokio::time::Instant;

use super::handle::Store;
use crate::{
    log::{self, HEARTBEAT_TIMEOUT},
    sync::Mutex,
};

/// Time after the last failure at which an outage counts as over: it may have ended while nothing was written. Longer than
/// an attempt to connect and to write.
const FORGOTTEN_AFTER: Duration = Duration::from_secs(30);

/// The failures of the writer since its last success.
#[derive(Default)]
pub(super) struct WriteOutage(Mutex<Option<Failures>>);

struct Failures {
    first: Instant,
    last: Instant,
}

impl WriteOutage {
    /// Notes that a write failed, or that it cannot be tried because the log cannot be read.
    pub(super) fn note_failure(&self, failure: &log::Error) {
        if matches!(failure, log::Error::Full(_)) {
            return;
        }
        let now = Instant::now();
        let mut failures = self.0.lock();
        let known = failures.take().filter(|known| now - known.last < FORGOTTEN_AFTER);
        *failures = Some(Failures { first: known.map_or(now, |known| known.first), last: now });
    }

    pub(super) fn note_success(&self) {
        *self.0.lock() = None;
    }

    /// Returns whether writes have failed again after more than [`HEARTBEAT_TIMEOUT`]. A single failure tells nothing of the
    /// time after it.
    fn is_long(&self) -> bool {
        let failures = self.0.lock();
        let is_long =
            |known: &Failures| known.last - known.first > HEARTBEAT_TIMEOUT && known.last.elapsed() < FORGOTTEN_AFTER;
        failures.as_ref().is_some_and(is_long)
    }
}

impl Store {
    /// Returns whether the database accepts writes, as far as this instance knows. A full disk does not count.
    pub fn accepts_writes(&self) -> bool {
        let shared = &self.shared;
        let beats = shared.log.shared().is_none() || shared.members.since_last_beat() < HEARTBEAT_TIMEOUT;
        beats && (!shared.write_outage.is_long() || shared.space.is_disk_full.load(Ordering::Relaxed))
    }
}

#[cfg(test)]
mod tests {
    use tokio::time::advance;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn failure() -> log::Error {
        log::Error::Unavailable("read-only".to_owned())
    }

    #[tokio::test(start_paused = true)]
    async fn outage_is_long_after_ten_seconds_until_a_success() {
        let outage = WriteOutage::default();
        for second in 0..20 {
            outage.note_failure(&failure());
            assert_eq!(outage.is_long(), second > 10, "second {second}");
            advance(SECOND).await;
        }
        outage.note_success();
        assert!(!outage.is_long());
        outage.note_failure(&failure());
        assert!(!outage.is_long(), "another outage begins");
    }

    #[tokio::test(start_paused = true)]
    async fn outage_after_which_nothing_is_written_is_forgotten() {
        let outage = WriteOutage::default();
        outage.note_failure(&failure());
        advance(29 * SECOND).await;
        outage.note_failure(&failure());
        advance(29 * SECOND).await;
        assert!(outage.is_long(), "few writes, none of which succeeds");
        advance(SECOND).await;
        assert!(!outage.is_long(), "the next write may succeed");
        outage.note_failure(&failure());
        assert!(!outage.is_long(), "another outage begins");
    }

    #[tokio::test(start_paused = true)]
    async fn one_failure_is_no_outage() {
        let outage = WriteOutage::default();
        outage.note_failure(&failure());
        for second in 0..40 {
            assert!(!outage.is_long(), "second {second}");
            advance(SECOND).await;
        }
    }

    #[tokio::test(start_paused = true)]
    async fn full_disk_is_no_outage() {
        let outage = WriteOutage::default();
        for _ in 0..20 {
            outage.note_failure(&log::Error::Full("no space".to_owned()));
            advance(SECOND).await;
        }
        assert!(!outage.is_long());
    }
}
