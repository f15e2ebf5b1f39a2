//! Reads: the index selects rows; their pairs come from the cache or the log.
//!
//! A long range lets go of the index every few thousand keys and goes on at the same revision, in the end when its
//! step is granted ([`Steps`]), so it never holds up the writer. If a compaction overtakes it, a read at the latest revision starts again and any other fails as compacted.

use std::{collections::HashMap, sync::Arc};

use futures_util::{StreamExt as _, stream::FuturesUnordered};
use tokio::{task::yield_now, time::Instant};
use tracing::error;

use super::{
    Error, Result, Shared, Store,
    batch::Batch,
    request::{Consistency, Projection, RangeRequest, RangeResponse, TxnRequest, TxnResponse},
    select::{Selected, Selection},
    timing,
    txn::{Evaluation, Fetched, Stop},
};
use crate::{
    index::{Entry, Lease, ReadAt},
    overload::Steps,
    trace::{self, Part},
    types::{EncodedKv, Key, KeyRange, Revision, RowId},
};

/// Keys visited per step while the index is locked.
const STEP_KEYS: usize = 2_000;
/// Steps of a read that is not long yet: kube-apiserver's pages end before.
const STEPS_FREE: usize = 5;
/// Values that came from the log and are put where they belong, in the answer and in the cache, in one step.
const STEP_VALUES: usize = 500;
/// A read of more rows is a list.
const FEW_ROWS: usize = 100;
/// How many bytes of a list a reader of the log is to bring at once: a MiB would be read no faster, and keep the database
/// from others for longer.
const READ_BYTES: usize = 128 << 10;
/// Rows that it is asked for, at most and at least. Large values may follow small ones.
const READ_ROWS: usize = 250;
const READ_ROWS_MIN: usize = 2;
/// The same as long as nobody knows how large they are.
const READ_ROWS_FIRST: usize = 8;
/// Readers of the log that one list takes at once: not all that there are.
const READS_AT_ONCE: usize = 2;
/// A response with more pairs always has its request described in the trace.
const DESCRIBED_PAIRS: usize = 1_000;

impl Store {
    pub async fn range(&self, request: &RangeRequest) -> Result<RangeResponse> {
        let started = Instant::now();
        let metrics = &self.shared.metrics.store;
        metrics.ranges.inc();
        let answer = self.range_whole(request).await;
        let took = started.elapsed();
        self.range_durations[usize::from(answer.is_ok())].observe(took.as_secs_f64());
        let pairs = answer.as_ref().map_or(0, |answer| answer.kvs.len());
        // A large response may still become slow while it is sent.
        if took > self.patience || pairs > DESCRIBED_PAIRS {
            trace::describe(|| format!("range {} pairs={pairs}", timing::range(&request.range)));
        }
        answer
    }

    async fn range_whole(&self, request: &RangeRequest) -> Result<RangeResponse> {
        self.shared.space.check_sound()?;
        if request.consistency == Consistency::Linearizable {
            self.confirm().await?;
        }
        loop {
            match self.shared.range_once(request).await {
                // No revision was requested, so a newer one is correct.
                Err(Error::Compacted) if request.at == ReadAt::Latest => {}
                answer => return answer,
            }
        }
    }

    /// Returns a range in pieces, all at the revision of the first, so that the whole response need not be in memory.
    pub async fn range_pieces(self: &Arc<Self>, request: RangeRequest) -> Result<RangePieces> {
        self.shared.space.check_sound()?;
        if request.consistency == Consistency::Linearizable {
            self.confirm().await?;
        }
        let index = self.shared.index.read();
        let (revision, at) = (index.head(), index.resolve(request.at)?);
        drop(index);
        Ok(RangePieces { store: Arc::clone(self), request, revision, at, after: None, count: 0, taken: 0, done: false })
    }

    /// Executes a read-only transaction at one revision.
    pub(super) async fn read_txn(&self, request: TxnRequest) -> Result<TxnResponse> {
        self.shared.space.check_sound()?;
        if !request.is_serializable() {
            self.confirm().await?;
        }
        let mut fetched = Fetched::new();
        // All that it fetches is one list, however often it finds that it needs more.
        let mut list = None;
        loop {
            let (stood, evaluated) = {
                let index = self.shared.index.read();
                let leases = self.shared.leases.lock();
                let mut batch = Batch::new(index.head());
                let evaluation =
                    Evaluation::new(&index, &leases, &self.shared.values, &fetched, &mut batch).txn(&request);
                ((index.head(), index.compact_revision()), evaluation)
            };
            let rows = match evaluated {
                Ok(response) => return Ok(response),
                Err(Stop::Failed(error)) => return Err(error),
                Err(Stop::NeedsValues(rows)) => rows,
                Err(Stop::NeedsCommit | Stop::Moved) => {
                    unreachable!("a batch without changes has no revision beyond the log's")
                }
            };
            if rows.iter().any(|row| fetched.get(row).is_some_and(Option::is_none)) {
                // Another instance compacted them, or the log is corrupt.
                if self.shared.log.shared().is_some() {
                    self.shared.catch_up().await?;
                }
                let index = self.shared.index.read();
                if (index.head(), index.compact_revision()) == stood {
                    error!(revision = stood.0.0, rows = rows.len(), "rows of live versions are missing from the log");
                    return Err(Error::Corrupt);
                }
            }
            // Rows that a compaction deleted meanwhile are read again only if they are still live.
            fetched.retain(|_, kv| kv.is_some());
            fetched.extend(rows.iter().map(|row| (*row, None)));
            let is_list = fetched.len() > FEW_ROWS;
            let found = match &list {
                Some(_) => self.shared.read_list(&rows).await?,
                None if !is_list && self.shared.read_memory.has_free() => self.shared.read_few(&rows).await?,
                // Who waits holds nothing.
                None => {
                    fetched.clear();
                    if is_list {
                        list = Some(self.shared.read_memory.list().await?);
                    } else {
                        self.shared.read_memory.free().await?;
                    }
                    continue;
                }
            };
            fetched.extend(found.into_iter().map(|(row, kv)| (row, Some(kv))));
        }
    }
}

/// Counts the steps of a read: the first [`STEPS_FREE`] only yield to other tasks, later ones wait to be granted.
#[derive(Default)]
struct StepCount(usize);

impl StepCount {
    async fn next(&mut self, steps: &Steps) {
        self.0 += 1;
        if self.0 <= STEPS_FREE {
            yield_now().await;
        } else {
            steps.request().await;
        }
    }
}

impl Shared {
    async fn range_once(&self, request: &RangeRequest) -> Result<RangeResponse> {
        // The header has the revision at which the range is read: a watch from the next revision continues it.
        let (revision, at) = {
            let index = self.index.read();
            (index.head(), index.resolve(request.at)?)
        };
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
        let kvs = self.pairs(&selected, request.projection, at, &mut step).await?;
        trace::note(Part::Select, selected_at - begun);
        trace::note(Part::Read, selected_at.elapsed());
        let (mut kvs, more) = selection.finish(kvs);
        if request.projection == Projection::KeysOnly {
            kvs.iter_mut().for_each(|kv| *kv = kv.without_value());
        }
        Ok(RangeResponse { revision, kvs, more, count })
    }

    /// Returns the reason why rows of versions live at `at` are missing from the log: another instance compacted them,
    /// or the log is corrupt.
    async fn why_missing(&self, at: Revision, rows: usize) -> Error {
        if self.log.shared().is_some()
            && let Err(error) = self.catch_up().await
        {
            return error.into();
        }
        match self.index.read().resolve(ReadAt::Revision(at)) {
            Err(unreadable) => unreadable.into(),
            Ok(_) => {
                error!(revision = at.0, rows, "rows of live versions are missing from the log");
                Error::Corrupt
            }
        }
    }

    /// Makes one step of a walk over a range at a fixed revision. Returns where the next step starts.
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

    /// The pairs of what a read at `at` selected, in its order.
    async fn pairs(
        &self,
        selected: &[Selected],
        projection: Projection,
        at: Revision,
        step: &mut StepCount,
    ) -> Result<Vec<EncodedKv>> {
        let mut pairs = self.cached(selected, projection, FEW_ROWS, step).await;
        let read = loop {
            let is_list = pairs.missing.len() > FEW_ROWS;
            if pairs.missing.is_empty() {
                return Ok(pairs.whole());
            } else if !is_list && self.read_memory.has_free() {
                break self.read_few(&pairs.missing).await?;
            }
            // Who waits holds nothing: what others wait for might be just that.
            drop(pairs);
            if is_list {
                let _list = self.read_memory.list().await?;
                pairs = self.cached(selected, projection, usize::MAX, step).await;
                break self.read_list(&pairs.missing).await?;
            }
            self.read_memory.free().await?;
            pairs = self.cached(selected, projection, FEW_ROWS, step).await;
        };
        self.put_in_place(selected, &mut pairs, read, at, step).await?;
        Ok(pairs.whole())
    }

    /// What needs no read; not all of it where more than `missing_max` do.
    async fn cached(
        &self,
        selected: &[Selected],
        projection: Projection,
        missing_max: usize,
        step: &mut StepCount,
    ) -> Pairs {
        let in_order = Vec::with_capacity(selected.len());
        let mut pairs = Pairs { in_order, missing: Vec::new() };
        for chunk in selected.chunks(STEP_KEYS) {
            if !pairs.in_order.is_empty() {
                step.next(&self.steps).await;
            }
            for selected in chunk {
                let row = selected.entry.version.row;
                let kv = selected.pair_without_value(projection).or_else(|| self.values.get(row));
                if kv.is_none() {
                    pairs.missing.push(row);
                }
                pairs.in_order.push(kv);
                if pairs.missing.len() > missing_max {
                    return pairs;
                }
            }
        }
        pairs
    }

    /// As [`crate::log::Log::values`].
    async fn read_few(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        Ok(self.read_memory.count(self.log.values(rows).await?))
    }

    /// As [`Self::read_few`], of a long list: [`READS_AT_ONCE`] readers at once, each part a step.
    async fn read_list(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        let read = async |rows| {
            self.steps.request().await;
            self.read_few(rows).await
        };
        let (mut found, mut bytes) = (Vec::with_capacity(rows.len()), 0);
        let (mut rest, mut part) = (rows, READ_ROWS_FIRST);
        let mut reads = FuturesUnordered::new();
        loop {
            while reads.len() < READS_AT_ONCE && !rest.is_empty() {
                let (next, later) = rest.split_at(part.min(rest.len()));
                reads.push(read(next));
                rest = later;
            }
            let Some(values) = reads.next().await else { return Ok(found) };
            found.extend(values?.into_iter().inspect(|(_, kv)| bytes += kv.len()));
            let mean = bytes / found.len().max(1) + 1;
            part = (READ_BYTES / mean).clamp(READ_ROWS_MIN, READ_ROWS);
        }
    }

    async fn put_in_place(
        &self,
        selected: &[Selected],
        pairs: &mut Pairs,
        mut read: Vec<(RowId, EncodedKv)>,
        at: Revision,
        step: &mut StepCount,
    ) -> Result<()> {
        let mut found = HashMap::with_capacity(read.len());
        loop {
            found.extend(read.drain(read.len().saturating_sub(STEP_VALUES)..));
            if read.is_empty() {
                break;
            }
            step.next(&self.steps).await;
        }
        if found.len() < pairs.missing.len() {
            return Err(self.why_missing(at, pairs.missing.len() - found.len()).await);
        }
        let absent = selected.iter().zip(&mut pairs.in_order).filter(|(_, pair)| pair.is_none());
        for (number, (selected, pair)) in absent.enumerate() {
            if number % STEP_VALUES == STEP_VALUES - 1 {
                step.next(&self.steps).await;
            }
            let row = selected.entry.version.row;
            *pair = found.remove(&row);
            // The index knows the lease only of a key's newest version.
            if let (Some(kv), Lease::Known(_)) = (&pair, selected.entry.lease) {
                self.values.insert(row, kv.clone());
            }
        }
        Ok(())
    }
}

/// Of a read: what is at hand, in the order of what it selected, and the rows that the log has to give.
struct Pairs {
    in_order: Vec<Option<EncodedKv>>,
    missing: Vec<RowId>,
}

impl Pairs {
    fn whole(self) -> Vec<EncodedKv> {
        self.in_order.into_iter().flatten().collect()
    }
}

/// A range that is read in pieces; see [`Store::range_pieces`].
pub struct RangePieces {
    store: Arc<Store>,
    request: RangeRequest,
    /// The head at the start.
    revision: Revision,
    at: Revision,
    after: Option<Key>,
    count: usize,
    taken: usize,
    done: bool,
}

impl RangePieces {
    /// Returns the next pairs, at most `limit` (at least 1). There is always a last piece; it has `count` and `more`.
    pub async fn next(&mut self, limit: usize) -> Result<Option<RangeResponse>> {
        if self.done {
            return Ok(None);
        }
        let limit = limit.min(self.request.limit.map_or(usize::MAX, |all| all - self.taken)).max(1);
        let all_taken = self.request.limit == Some(self.taken) || self.request.projection == Projection::CountOnly;
        let shared = &self.store.shared;
        let mut selected = Vec::new();
        let (mut more, mut step) = (false, StepCount::default());
        loop {
            let budget = if all_taken { STEP_KEYS } else { (limit - selected.len()).min(STEP_KEYS) };
            let (projection, range) = (self.request.projection, &self.request.range);
            let count = &mut self.count;
            let after = shared.walk(range, self.after.as_ref(), self.at, budget, &mut |key, entry| {
                *count += 1;
                if all_taken {
                    more = projection != Projection::CountOnly;
                } else {
                    let key = (projection == Projection::KeysOnly).then(|| key.clone());
                    selected.push(Selected { entry, key });
                }
            })?;
            self.done = after.is_none();
            if after.is_some() {
                self.after = after;
            }
            if self.done || selected.len() == limit {
                break;
            }
            step.next(&shared.steps).await;
        }
        let mut kvs = shared.pairs(&selected, self.request.projection, self.at, &mut step).await?;
        if self.request.projection == Projection::KeysOnly {
            kvs.iter_mut().for_each(|kv| *kv = kv.without_value());
        }
        self.taken += kvs.len();
        Ok(Some(RangeResponse { revision: self.revision, kvs, more, count: self.count }))
    }

    /// Returns whether the last piece was returned.
    pub fn is_done(&self) -> bool {
        self.done
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::{super::fixtures::shared, *};
    use crate::types::Version;

    fn selected(number: u32) -> Selected {
        let row = RowId::new(Revision(2), number);
        let version = Version { row, create_revision: Revision(2), version: 1 };
        Selected { entry: Entry { version, lease: Lease::Known(None) }, key: None }
    }

    #[tokio::test]
    async fn a_list_that_waits_for_its_turn_holds_nothing() {
        let shared = shared(1 << 20);
        let selected: Vec<Selected> = (0..=FEW_ROWS as u32 + 1).map(selected).collect();
        // What the cache has is counted, like all that was read.
        let version = selected[0].entry.version;
        let (row, kv) =
            shared.read_memory.count(vec![(version.row, EncodedKv::new(b"k", version, &[7; 1_000], None))]).remove(0);
        shared.values.insert(row, kv);
        let mut turns = Vec::new();
        while let Some(turn) = shared.read_memory.list().now_or_never() {
            turns.push(turn);
        }
        let mut steps = StepCount::default();
        let mut list = Box::pin(shared.pairs(&selected, Projection::Whole, Revision(2), &mut steps));
        assert!(list.as_mut().now_or_never().is_none(), "it waits");
        assert_ne!(shared.read_memory.bytes(), 0);
        // The cache lets go of it.
        shared.values.insert(row, EncodedKv::new(b"k", version, &[], None));
        assert_eq!(shared.read_memory.bytes(), 0, "nobody but the cache had it");
    }
}
