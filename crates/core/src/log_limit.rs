//! A rate limit for log messages that clients can cause, which could otherwise fill the log.

use std::time::Duration;

use parking_lot::Mutex;
use tokio::time::Instant;

/// Counts events between messages.
#[derive(Debug)]
pub struct LogLimit {
    /// Maximum number of messages in an interval.
    messages_max: u32,
    interval: Duration,
    count: Mutex<Count>,
}

#[derive(Debug)]
struct Count {
    /// When the first message of the current interval was logged.
    began: Option<Instant>,
    messages: u32,
    /// Events since the last message.
    events: u64,
}

impl LogLimit {
    /// Allows one message per interval.
    pub const fn every(interval: Duration) -> Self {
        Self::at_most(1, interval)
    }

    /// Allows this number of messages per interval, as soon as their events occur.
    pub const fn at_most(messages_max: u32, interval: Duration) -> Self {
        let count = Count { began: None, messages: 0, events: 0 };
        Self { messages_max, interval, count: Mutex::new(count) }
    }

    /// Counts an event. If a message is due, returns the number of events since the last one, including this event.
    pub fn count(&self) -> Option<u64> {
        let mut count = self.count.lock();
        count.events += 1;
        if count.began.is_none_or(|began| began.elapsed() >= self.interval) {
            (count.began, count.messages) = (Some(Instant::now()), 0);
        }
        if count.messages == self.messages_max {
            return None;
        }
        count.messages += 1;
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

    #[tokio::test(start_paused = true)]
    async fn several_events_of_an_interval_are_logged() {
        const INTERVAL: Duration = Duration::from_secs(1);
        let limit = LogLimit::at_most(2, INTERVAL);
        for omitted in [0, 3] {
            assert_eq!((limit.count(), limit.count()), (Some(omitted + 1), Some(1)));
            assert_eq!((limit.count(), limit.count(), limit.count()), (None, None, None));
            tokio::time::sleep(INTERVAL).await;
        }
    }
}
