//! Collects the pairs of a read, from the index, the cache and the log.

use futures_util::{StreamExt as _, stream::FuturesOrdered};
use tokio::{
    task::yield_now,
    time::{Instant, sleep},
};
use tracing::{debug, error};

use crate::{
    index::{Lease, ReadAt},
    log,
    overload::{ListPermit, Steps},
    store::{
        error::{Error, Result},
        request::Projection,
        select::Selected,
        shared::{RETRY_PAUSE, Shared, WAIT_MAX},
    },
    types::{EncodedKv, Revision, RowId},
};

/// Keys visited per step while the index is locked.
pub(in crate::store) const STEP_KEYS: usize = 2_000;
/// Number of first steps of a read that only yield to other tasks. A page for kube-apiserver needs fewer steps.
const UNPACED_STEPS_MAX: usize = 5;
/// Number of values per step that are moved from a read of the log into the response and the cache.
const STEP_VALUES: usize = 500;
/// A read of more than this number of rows is a list. Lists are limited separately.
pub(in crate::store) const FEW_ROWS_MAX: usize = 100;
/// Target size of one read of the log, in bytes. With less, a list changes threads more often (docs/adr/0013); more would
/// block other reads for longer.
const READ_BYTES_TARGET: usize = 512 << 10;
/// Maximum number of rows of one read of the log, because large values can follow small ones.
const READ_ROWS_MAX: usize = 500;
/// Minimum number of rows of one read of the log.
const READ_ROWS_MIN: usize = 2;
/// Number of rows of the first read, when the size of the values is unknown.
const READ_ROWS_FIRST: usize = 8;
/// Maximum number of concurrent reads of the log by one list: fewer than the connections for reads.
const CONCURRENT_READS_MAX: usize = 2;

/// Counts the steps of a read: the first [`UNPACED_STEPS_MAX`] only yield to other tasks, later ones wait to be
/// granted.
#[derive(Default)]
pub(in crate::store) struct StepCount(usize);

impl StepCount {
    /// Waits before the next step.
    pub(in crate::store) async fn next(&mut self, steps: &Steps) {
        self.0 += 1;
        if self.0 <= UNPACED_STEPS_MAX {
            yield_now().await;
        } else {
            steps.request().await;
        }
    }
}

impl Shared {
    /// Returns the pairs that a read at `at` selected, in the order of `selected`. `list` is the permit of a read that has
    /// waited for memory before it selected.
    pub(in crate::store) async fn pairs(
        &self,
        selected: &[Selected],
        projection: Projection,
        at: Revision,
        step: &mut StepCount,
        mut list: Option<ListPermit<'_>>,
    ) -> Result<Vec<EncodedKv>> {
        let mut pairs = self.cached(selected, projection, FEW_ROWS_MAX, step).await;
        let read = loop {
            let is_list = pairs.missing.len() > FEW_ROWS_MAX;
            if pairs.missing.is_empty() {
                return Ok(pairs.present());
            } else if !is_list && self.read_memory.has_free() {
                break self.read_few_retrying(&pairs.missing).await?;
            }
            // A waiting read must hold no values: other reads may be waiting for the memory of these values.
            drop(pairs);
            if is_list {
                let _list = match list.take() {
                    Some(list) => list,
                    None => self.read_memory.list().await?,
                };
                pairs = self.cached(selected, projection, usize::MAX, step).await;
                break self.read_list(&pairs.missing).await?;
            }
            self.read_memory.wait_until_free().await?;
            pairs = self.cached(selected, projection, FEW_ROWS_MAX, step).await;
        };
        self.put_in_place(selected, &mut pairs, read, at, step).await?;
        Ok(pairs.present())
    }

    /// Returns the pairs that need no read of the log. Returns early if more than `missing_max` pairs are missing.
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
                let built = selected.pair_without_value(projection).map(|kv| self.read_memory.counted(kv));
                let kv = built.or_else(|| self.values.get(row));
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

    /// Reads pairs as [`crate::log::Log::values`] does, and counts their memory.
    pub(in crate::store) async fn read_few(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        Ok(self.read_memory.count(self.log.values(rows).await?))
    }

    /// Like [`Self::read_few`], but repeats the read while Postgres restarts or fails over, as [`Store::confirm`] does.
    /// The writer does not use it, because other requests wait for the writer. SQLite has no outage: its errors are
    /// those of the disk.
    ///
    /// Meanwhile the read keeps its cached pairs, and a list keeps its permit. The reads that wait for that memory or
    /// permit need the database, too, except for lists of keys.
    ///
    /// [`Store::confirm`]: crate::store::Store::confirm
    pub(in crate::store) async fn read_few_retrying(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            match self.log.values(rows).await {
                Err(log::Error::Unavailable(reason)) if self.log.shared().is_some() && Instant::now() < deadline => {
                    debug!(reason, "cannot read values yet; trying again");
                    sleep(RETRY_PAUSE).await;
                }
                read => return Ok(self.read_memory.count(read?)),
            }
        }
    }

    /// Reads the pairs of a page, which may be a list, when there is memory for them. A caller must hold no values, like any
    /// waiting read.
    pub(in crate::store) async fn read_when_free(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        if rows.len() > FEW_ROWS_MAX {
            let _list = self.read_memory.list().await?;
            return self.read_list(rows).await;
        }
        if !rows.is_empty() {
            self.read_memory.wait_until_free().await?;
        }
        self.read_few_retrying(rows).await
    }

    /// Reads the pairs of a list in parts, [`CONCURRENT_READS_MAX`] concurrently, and returns them in the order of the rows.
    /// Each part is a step.
    pub(in crate::store) async fn read_list(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        let read = async |rows| {
            self.steps.request().await;
            self.read_few_retrying(rows).await
        };
        let (mut found, mut bytes) = (Vec::with_capacity(rows.len()), 0);
        let (mut rest, mut part) = (rows, READ_ROWS_FIRST);
        let mut reads = FuturesOrdered::new();
        loop {
            while reads.len() < CONCURRENT_READS_MAX && !rest.is_empty() {
                let (next, later) = rest.split_at(part.min(rest.len()));
                reads.push_back(read(next));
                rest = later;
            }
            let Some(values) = reads.next().await else { return Ok(found) };
            found.extend(values?.into_iter().inspect(|(_, kv)| bytes += kv.len()));
            let mean = bytes / found.len().max(1) + 1;
            part = (READ_BYTES_TARGET / mean).clamp(READ_ROWS_MIN, READ_ROWS_MAX);
        }
    }

    /// Moves pairs that were read from the log into the response, and into the cache if they are the newest versions and all
    /// of them fit: a larger list would replace everything that is cached, and then its own first pairs.
    async fn put_in_place(
        &self,
        selected: &[Selected],
        pairs: &mut Pairs,
        read: Vec<(RowId, EncodedKv)>,
        at: Revision,
        step: &mut StepCount,
    ) -> Result<()> {
        if read.len() < pairs.missing.len() {
            return Err(self.missing_rows_error(at, pairs.missing.len() - read.len()).await);
        }
        let absent = selected.iter().zip(&pairs.in_order).filter(|(_, pair)| pair.is_none());
        let live = absent.zip(&read).filter(|((selected, _), _)| matches!(selected.entry.lease, Lease::Known(_)));
        let live_bytes = live.map(|(_, (_, kv))| kv.len()).sum();
        let may_cache = self.values.fits(live_bytes);
        while may_cache && self.values.make_room(live_bytes, STEP_VALUES) {
            step.next(&self.steps).await;
        }
        let absent = selected.iter().zip(&mut pairs.in_order).filter(|(_, pair)| pair.is_none());
        for (number, ((selected, pair), (row, kv))) in absent.zip(read).enumerate() {
            if number % STEP_VALUES == STEP_VALUES - 1 {
                step.next(&self.steps).await;
            }
            assert_eq!(row, selected.entry.version.row, "the log returns pairs in the order of the rows");
            if let (true, Lease::Known(_)) = (may_cache, selected.entry.lease) {
                self.values.insert(row, kv.clone());
            }
            *pair = Some(kv);
        }
        Ok(())
    }

    /// Returns the reason why rows of versions live at `at` are missing from the log: another instance compacted them,
    /// or the log is corrupt.
    async fn missing_rows_error(&self, at: Revision, rows: usize) -> Error {
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
}

/// The pairs of a read.
struct Pairs {
    /// In the order of the selected keys; `None` for a pair that has to be read from the log.
    in_order: Vec<Option<EncodedKv>>,
    /// The rows of the pairs that have to be read from the log.
    missing: Vec<RowId>,
}

impl Pairs {
    /// Returns the pairs that are present.
    fn present(self) -> Vec<EncodedKv> {
        self.in_order.into_iter().flatten().collect()
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{
        index::Entry,
        store::fixtures::shared,
        types::{Change, ChangeKind, Key, Prev, Version},
    };

    fn selected(number: u32) -> Selected {
        let row = RowId::new(Revision(2), number);
        let version = Version { row, create_revision: Revision(2), version: 1 };
        Selected { entry: Entry { version, lease: Lease::Known(None) }, key: None }
    }

    /// Puts a list that was read from the log into a response. Returns how many of its pairs are then cached.
    async fn cached_of_list(shared: &Shared, len: u32) -> usize {
        let selected: Vec<Selected> = (0..len).map(selected).collect();
        let version = |selected: &Selected| selected.entry.version;
        let missing: Vec<RowId> = selected.iter().map(|selected| version(selected).row).collect();
        let pair = |selected: &Selected| EncodedKv::new(b"k", version(selected), &[7; 1_000], None);
        let read = missing.iter().copied().zip(selected.iter().map(pair)).collect();
        let mut pairs = Pairs { in_order: vec![None; selected.len()], missing: missing.clone() };
        let mut step = StepCount::default();
        let placed = shared.put_in_place(&selected, &mut pairs, read, Revision(2), &mut step);
        placed.await.expect("no row is missing");
        assert_eq!(pairs.present().len(), selected.len(), "{len} pairs");
        missing.iter().filter(|row| shared.values.get(**row).is_some()).count()
    }

    #[tokio::test]
    async fn list_that_exceeds_the_cache_is_not_cached() {
        let shared = shared(1 << 20);
        assert_eq!(cached_of_list(&shared, 2_000).await, 0);
        assert_eq!(cached_of_list(&shared, 100).await, 100);
    }

    #[tokio::test]
    async fn list_gets_the_room_of_overwritten_pairs() {
        let shared = shared(1 << 20);
        let overwriting = |revision| {
            let row = RowId::new(Revision(revision), 0);
            let version = Version { row, create_revision: Revision(3), version: revision - 2 };
            let kind = ChangeKind::put(EncodedKv::new(b"o", version, &[7; 1_000], None));
            let prev = Some(Prev { row: RowId::new(Revision(revision - 1), 0), kv: None });
            Change { row, key: Key::from(&b"o"[..]), kind, prev, prev_lease: None }
        };
        shared.values.apply(&(3..2_000).map(overwriting).collect::<Vec<_>>());
        assert!(shared.values.bytes() > 700_000, "overwritten pairs are cached");
        // The shards of the cache are not filled evenly.
        let cached = cached_of_list(&shared, 600).await;
        assert!(cached > 540, "{cached} of 600 pairs are cached");
    }

    #[tokio::test]
    async fn pairs_without_values_are_counted() {
        let shared = shared(1 << 20);
        let selected: Vec<Selected> = (0..200)
            .map(selected)
            .map(|selected| Selected { key: Some(Key::from(&[b'k'; 1_000][..])), ..selected })
            .collect();
        let mut steps = StepCount::default();
        let read = shared.pairs(&selected, Projection::KeysOnly, Revision(2), &mut steps, None).await.expect("pairs");
        assert!(shared.read_memory.bytes() > 200_000, "{}", shared.read_memory.bytes());
        drop(read);
        assert_eq!(shared.read_memory.bytes(), 0);
    }

    #[tokio::test]
    async fn list_that_waits_holds_no_values() {
        let shared = shared(1 << 20);
        let selected: Vec<Selected> = (0..=FEW_ROWS_MAX as u32 + 1).map(selected).collect();
        // Values in the cache are counted, like all values that were read.
        let version = selected[0].entry.version;
        let (row, kv) =
            shared.read_memory.count(vec![(version.row, EncodedKv::new(b"k", version, &[7; 1_000], None))]).remove(0);
        shared.values.insert(row, kv);
        let mut permits = Vec::new();
        while let Some(permit) = shared.read_memory.list().now_or_never() {
            permits.push(permit);
        }
        let mut steps = StepCount::default();
        let mut list = Box::pin(shared.pairs(&selected, Projection::Full, Revision(2), &mut steps, None));
        assert!(list.as_mut().now_or_never().is_none(), "the list waits");
        assert_ne!(shared.read_memory.bytes(), 0);
        // The cache drops the value.
        shared.values.insert(row, EncodedKv::new(b"k", version, &[], None));
        assert_eq!(shared.read_memory.bytes(), 0, "only the cache held it");
    }
}
