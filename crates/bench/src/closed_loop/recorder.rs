//! The latencies, counters and errors of the operations of a run.

use std::time::Duration;

use hdrhistogram::Histogram;
use tokio::time::Instant;
use tonic::Status;

use orlop_client::describe;

use super::OpCounts;

/// The measurements of a run, or of one kind of operation in it.
pub struct Recorder {
    /// In nanoseconds.
    pub latency: Histogram<u64>,
    /// Sums over the successful operations.
    pub counts: OpCounts,
    pub errors: u64,
    pub first_error: Option<String>,
    measured_from: Instant,
    last_end: Instant,
}

impl Recorder {
    /// Returns an empty recorder for latencies from 1 us to 1 h with three significant digits. It uses a few hundred
    /// KiB.
    pub fn new(measured_from: Instant) -> Self {
        let latency = Histogram::new_with_bounds(1_000, 3_600_000_000_000, 3);
        Self {
            latency: latency.expect("the bounds are valid constants"),
            counts: OpCounts::default(),
            errors: 0,
            first_error: None,
            measured_from,
            last_end: measured_from,
        }
    }

    pub fn succeed(&mut self, took: Duration, ended: Instant) {
        self.latency.saturating_record(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
        self.last_end = self.last_end.max(ended);
    }

    pub fn fail(&mut self, count: u64, describe: impl FnOnce() -> String) {
        self.errors += count;
        if count > 0 {
            self.first_error.get_or_insert_with(describe);
        }
    }

    /// Returns the time from the end of the warm-up to the end of the last successful operation, or of the run
    /// ([`Recorder::extend_to`]).
    pub fn elapsed(&self) -> Duration {
        self.last_end - self.measured_from
    }

    /// Extends the measured time to `moment`, unless an operation succeeded later.
    pub fn extend_to(&mut self, moment: Instant) {
        self.last_end = self.last_end.max(moment);
    }

    pub fn record(&mut self, started: Instant, ended: Instant, outcome: &Result<OpCounts, Status>) {
        match outcome {
            Ok(counts) => {
                self.succeed(ended - started, ended);
                self.counts.retries += counts.retries;
                self.counts.keys += counts.keys;
                self.counts.bytes += counts.bytes;
            }
            Err(status) => self.fail(1, || describe(status)),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[tokio::test(start_paused = true)]
    async fn recorder_sums_successes_and_keeps_the_first_error() {
        let start = Instant::now();
        let mut recorder = Recorder::new(start);
        let counts = OpCounts { retries: 1, keys: 10, bytes: 100 };
        recorder.record(start, start + SECOND, &Ok(counts));
        recorder.record(start, start + SECOND / 2, &Ok(counts));
        recorder.record(start, start + 9 * SECOND, &Err(Status::unavailable("gone")));
        recorder.record(start, start + 9 * SECOND, &Err(Status::internal("later")));
        assert_eq!(recorder.counts, OpCounts { retries: 2, keys: 20, bytes: 200 });
        assert_eq!((recorder.latency.len(), recorder.errors), (2, 2));
        assert_eq!(recorder.first_error.as_deref(), Some("Unavailable: gone"));
        assert_eq!(recorder.elapsed(), SECOND);
        for (moment, elapsed) in [(SECOND / 2, SECOND), (3 * SECOND, 3 * SECOND)] {
            recorder.extend_to(start + moment);
            assert_eq!(recorder.elapsed(), elapsed);
        }
    }
}
