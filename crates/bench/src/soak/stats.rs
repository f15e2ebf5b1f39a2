//! The statistics that the tasks of a soak test record.

use std::sync::Arc;

use hdrhistogram::Histogram;
use parking_lot::Mutex;
use tonic::Status;

use orlop_client::describe;

use crate::kubernetes::Events;

/// The statistics of one server, shared by the tasks. Lock order: no two of the locks are held at the same time.
pub struct Stats {
    /// Latencies since the previous sample.
    pub latencies: Mutex<Latencies>,
    pub totals: Mutex<Totals>,
    pub events: Arc<Mutex<Events>>,
}

/// In nanoseconds.
pub struct Latencies {
    pub writes: Histogram<u64>,
    pub reads: Histogram<u64>,
}

#[derive(Debug, Default)]
pub struct Totals {
    pub operations: u64,
    pub compactions: u64,
    pub visits: u64,
    pub errors: u64,
    pub first_error: Option<String>,
}

impl Stats {
    pub fn new() -> Self {
        Self { latencies: Mutex::new(Latencies::new()), totals: Mutex::default(), events: Arc::default() }
    }

    pub fn record_error(&self, operation: &str, status: &Status) {
        let mut totals = self.totals.lock();
        totals.errors += 1;
        totals.first_error.get_or_insert_with(|| format!("{operation}: {}", describe(status)));
    }
}

impl Latencies {
    /// Returns empty histograms for latencies from 1 us to 1 min with two significant digits.
    pub fn new() -> Self {
        let empty = || Histogram::new_with_bounds(1_000, 60_000_000_000, 2);
        let empty = || empty().expect("the bounds are valid constants");
        Self { writes: empty(), reads: empty() }
    }
}
