//! A rate limit for log messages that clients can cause, which could otherwise fill the log.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Counts events between two messages.
pub(crate) struct LogLimit {
    /// Minimum time between two messages.
    interval: Duration,
    count: Mutex<Count>,
}

struct Count {
    last_message: Option<Instant>,
    events: u64,
}

impl LogLimit {
    pub(crate) const fn every(interval: Duration) -> Self {
        Self { interval, count: Mutex::new(Count { last_message: None, events: 0 }) }
    }

    /// Counts an event. If a message is due, returns the number of events since the last one, including this event.
    pub(crate) fn count(&self) -> Option<u64> {
        let mut count = self.count.lock();
        count.events += 1;
        if count.last_message.is_some_and(|last| last.elapsed() < self.interval) {
            return None;
        }
        count.last_message = Some(Instant::now());
        Some(std::mem::take(&mut count.events))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn first_event_is_logged_at_once_and_later_ones_together() {
        const INTERVAL: Duration = Duration::from_secs(10);
        let limit = LogLimit::every(INTERVAL);
        assert_eq!(limit.count(), Some(1));
        assert_eq!((limit.count(), limit.count()), (None, None));
        tokio::time::sleep(INTERVAL).await;
        assert_eq!((limit.count(), limit.count()), (Some(3), None));
    }
}
