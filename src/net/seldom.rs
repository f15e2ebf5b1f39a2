//! What would fill the log if it were told each time.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// How often it is told, at most.
const INTERVAL: Duration = Duration::from_secs(10);

/// Counts until it is time to tell.
pub(super) struct Seldom(Mutex<Count>);

struct Count {
    told: Option<Instant>,
    since: u64,
}

impl Seldom {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Count { told: None, since: 0 }))
    }

    /// How often it happened since it was told last, now included, if it is to be told now.
    pub(super) fn happens(&self) -> Option<u64> {
        let mut count = self.0.lock();
        count.since += 1;
        if count.told.is_some_and(|told| told.elapsed() < INTERVAL) {
            return None;
        }
        count.told = Some(Instant::now());
        Some(std::mem::take(&mut count.since))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn first_is_told_at_once_and_others_together() {
        let seldom = Seldom::new();
        assert_eq!(seldom.happens(), Some(1));
        assert_eq!((seldom.happens(), seldom.happens()), (None, None));
        tokio::time::sleep(INTERVAL).await;
        assert_eq!((seldom.happens(), seldom.happens()), (Some(3), None));
    }
}
