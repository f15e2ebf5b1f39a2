//! Reads: the index selects rows; their pairs come from the cache or the log.
//!
//! A long range releases the index every few thousand keys and continues at the same revision. After its first steps it
//! waits until each step is granted ([`Steps`](crate::overload::Steps)), so it never delays the writer. If a compaction
//! overtakes it, a read at the latest revision starts again; any other read fails as compacted.

pub(super) mod pairs;
mod pieces;
mod read_txn;

use tokio::time::Instant;

use self::pairs::{STEP_KEYS, StepCount};
pub use self::pieces::RangePieces;
use super::{
    error::{Error, Result},
    handle::Store,
    request::{Consistency, Projection, RangeRequest, RangeResponse},
    select::Selection,
    shared::Shared,
    timing::describe_range,
};
use crate::{
    auth::Caller,
    index::{Entry, ReadAt},
    trace::{self, Part},
    types::{Key, KeyRange, Revision},
};

/// Number of pairs in a response above which its trace always contains a description of the request.
const DESCRIBED_PAIRS: usize = 1_000;

impl Store {
    /// Reads a range.
    pub async fn range(&self, caller: &Caller, request: &RangeRequest) -> Result<RangeResponse> {
        let started = Instant::now();
        let metrics = &self.shared.metrics.store;
        metrics.ranges.inc();
        let response = self.range_whole(caller, request).await;
        let took = started.elapsed();
        self.range_durations[usize::from(response.is_ok())].observe(took.as_secs_f64());
        let pairs = response.as_ref().map_or(0, |response| response.kvs.len());
        trace::set_pairs(pairs);
        // A large response may still become slow while it is sent.
        if took > self.slow_threshold || pairs > DESCRIBED_PAIRS || trace::are_requests_logged() {
            trace::set_request(|| format!("range {} pairs={pairs}", describe_range(&request.range)));
        }
        response
    }

    /// Reads a range. Repeats a read at the latest revision if a compaction overtook it.
    async fn range_whole(&self, caller: &Caller, request: &RangeRequest) -> Result<RangeResponse> {
        if request.consistency == Consistency::Linearizable {
            self.confirm().await?;
        }
        loop {
            match self.shared.range_once(caller, request).await {
                // No revision was requested, so a newer one is correct.
                Err(Error::Compacted) if request.at == ReadAt::Latest => {}
                response => return response,
            }
        }
    }
}

impl Shared {
    /// Reads a range at one revision.
    pub(super) async fn range_once(&self, caller: &Caller, request: &RangeRequest) -> Result<RangeResponse> {
        // It waits before it selects, because it holds the keys from then on.
        let list = if request.lists_keys() { Some(self.read_memory.list().await?) } else { None };
        // Both are read under one lock, so that a read of the latest state is at the revision in its header. A watch
        // from the next revision then misses no change.
        let (revision, at) = {
            let index = self.index.read();
            (index.head(), index.resolve(request.at))
        };
        // After the revision is chosen: a pair that was written after the rights were withdrawn is then not in the
        // response.
        self.check_read(caller, &request.range)?;
        let at = at?;
        let begun = Instant::now();
        let mut selection = Selection::new(request);
        let (mut after, mut step) = (None, StepCount::default());
        loop {
            after = self.walk(&request.range, after.as_ref(), at, STEP_KEYS, &mut |key, entry| {
                selection.offer(key, entry);
            })?;
            if after.is_none() {
                break;
            }
            step.next(&self.steps).await;
        }
        let count = selection.count();
        let selected = selection.take();
        let selected_at = Instant::now();
        let kvs = self.pairs(&selected, request.projection, at, &mut step, list).await?;
        trace::add_to_part(Part::Select, selected_at - begun);
        trace::add_to_part(Part::Read, selected_at.elapsed());
        let (mut kvs, more) = selection.finish(kvs);
        if request.projection == Projection::KeysOnly {
            kvs.iter_mut().for_each(|kv| *kv = kv.without_value());
        }
        Ok(RangeResponse { revision, kvs, more, count })
    }

    /// Makes one step of a walk over a range at a fixed revision: visits at most `budget` keys after the key `after`.
    /// Returns the `after` of the next step, or `None` at the end of the range.
    pub(super) fn walk(
        &self,
        range: &KeyRange,
        after: Option<&Key>,
        at: Revision,
        budget: usize,
        visit: &mut dyn FnMut(&Key, Entry),
    ) -> Result<Option<Key>> {
        let index = self.index.read();
        index.resolve(ReadAt::Revision(at))?;
        if let KeyRange::Single(key) = range {
            if let Some(entry) = index.get(key, at) {
                visit(key, entry);
            }
            return Ok(None);
        }
        if range.is_empty() {
            return Ok(None);
        }
        let bounds = after.map_or_else(|| range.bounds(), |after| range.bounds_after(after));
        Ok(index.walk(bounds, at, budget, visit))
    }
}
