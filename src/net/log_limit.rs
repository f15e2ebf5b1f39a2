//! A rate limit for log messages about clients, which could otherwise fill the log.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Minimum time between two messages.
const INTERVAL: Duration = Duration::from_secs(10);

/// Counts events between two messages.
pub(super) struct LogLimit(Mutex<Count>);

struct Count {
    last_message: Option<Instant>,
    events: u64,
}

impl LogLimit {
    pub(super) const fn new() -> Self {
        Self(Mutex::new(Count { last_message: None, events: 0 }))
    }

    /// Counts an event. If a message is due, returns the number of events since the last one, including this event.
    pub(super) fn count(&self) -> Option<u64> {
        let mut count = self.0.lock();
        count.events += 1;
        if count.last_message.is_some_and(|last| last.elapsed() < INTERVAL) {
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
        let limit = LogLimit::new();
        assert_eq!(limit.count(), Some(1));
        assert_eq!((limit.count(), limit.count()), (None, None));
        tokio::time::sleep(INTERVAL).await;
        assert_eq!((limit.count(), limit.count()), (Some(3), None));
    }
}
