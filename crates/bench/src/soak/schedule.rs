//! The intervals of a soak test.

use std::time::Duration;

/// The intervals of a soak test. All follow from its duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Schedule {
    pub total: Duration,
    /// Interval between compactions, and the length of the periods that metrics are aggregated over.
    pub compact_interval: Duration,
    /// Age of the revision at which the store is compacted.
    pub compact_delay: Duration,
    pub sample_interval: Duration,
}

impl Schedule {
    pub fn new(total: Duration) -> Self {
        let compact_interval = (total / 15).min(Duration::from_secs(60));
        let compact_delay = (total / 12).min(Duration::from_secs(300));
        Self { total, compact_interval, compact_delay, sample_interval: compact_interval / 12 }
    }
}
