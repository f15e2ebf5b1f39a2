//! Sizes of the newest pairs by prefix, for operators.
//!
//! The index contains the keys and the rows of their newest pairs. The lengths of the values come from the value cache,
//! or else from the log, which knows them without reading the values. The keys are visited in order in small batches
//! that wait for steps, and after the first batches there are pauses, so writers are never blocked. The children of a
//! prefix are consecutive, so memory is needed only for one batch and the largest children.
//!
//! The figures are not of one moment: a key that changes meanwhile counts with the size that it had when it was
//! visited. One scan runs at a time. Its result is reused for 200 times the time that it took, so scans use at most
//! 0.5 % of a core.
//!
//! Known limit: older revisions are not included; only a compaction shows how much they need.

use std::{
    cmp::Reverse,
    collections::{BinaryHeap, HashMap},
    ops::AddAssign,
    sync::Arc,
    time::Duration,
};

use tokio::time::{Instant, sleep};

use super::{error::Result, handle::Store, shared::Shared};
use crate::{
    index::TreeIndex,
    sync::Mutex,
    types::{Key, KeyRange, RowId, child_prefix, common_path},
};

/// Maximum number of children of a prefix that are returned.
pub const CHILDREN_MAX: usize = 256;
/// Maximum number of keys that are returned.
pub const KEYS_MAX: usize = 64;
/// Maximum length of a name that is returned, and of a prefix; longer ones are cut.
pub const NAME_BYTES_MAX: usize = 4096;
/// Number of keys that are visited while the index is locked, and whose lengths one query returns.
const BATCH_KEYS: usize = 1_000;
/// Number of first batches without a pause.
const UNPACED_BATCHES: usize = 20;
/// After each further batch, the pause in multiples of the batch's duration.
const PAUSE_FACTOR: u32 = 2;
/// Minimum time for which figures are reused.
const REUSE_MIN: Duration = Duration::from_secs(10);
/// Time for which figures are reused, in multiples of the time that they took.
const REUSE_FACTOR: u32 = 200;
/// Maximum number of prefixes whose figures are kept.
const KEPT_MAX: usize = 8;

/// A number of pairs and their bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct PairSizes {
    pub keys: u64,
    pub key_bytes: u64,
    pub value_bytes: u64,
}

impl PairSizes {
    pub fn bytes(&self) -> u64 {
        self.key_bytes + self.value_bytes
    }
}

impl AddAssign for PairSizes {
    fn add_assign(&mut self, other: Self) {
        self.keys += other.keys;
        self.key_bytes += other.key_bytes;
        self.value_bytes += other.value_bytes;
    }
}

/// What a name stands for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum ChildKind {
    Key,
    /// All keys that begin with the name, which ends in `/`.
    Prefix,
}

/// A path segment below a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Child {
    /// The whole key or prefix; its first 4,096 bytes if it is longer.
    pub name: Vec<u8>,
    pub kind: ChildKind,
    pub sizes: PairSizes,
}

/// The sizes below a prefix.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Sizes {
    pub prefix: Vec<u8>,
    pub total: PairSizes,
    /// The largest first.
    pub children: Vec<Child>,
    pub children_total: u64,
    /// The largest first.
    pub largest_keys: Vec<Child>,
    /// Time of the scan without its pauses.
    pub cost: Duration,
    pub collected_at: Instant,
}

/// The figures of the last scans.
#[derive(Default)]
pub(super) struct SizesCache {
    kept: Mutex<Vec<Arc<Sizes>>>,
    /// Locked during a scan, so that one runs at a time.
    scanning: tokio::sync::Mutex<()>,
}

impl SizesCache {
    fn get(&self, prefix: &[u8]) -> Option<Arc<Sizes>> {
        let mut kept = self.kept.lock();
        kept.retain(|sizes| sizes.collected_at.elapsed() < REUSE_MIN.max(sizes.cost * REUSE_FACTOR));
        kept.iter().find(|sizes| sizes.prefix == prefix).map(Arc::clone)
    }

    fn keep(&self, sizes: &Arc<Sizes>) {
        let mut kept = self.kept.lock();
        if kept.len() == KEPT_MAX {
            kept.remove(0);
        }
        kept.push(Arc::clone(sizes));
    }
}

impl Store {
    /// Returns the sizes below a prefix, or below the longest one ending in `/` that all keys below it share.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a scan that is dropped has no effect.
    pub async fn sizes(&self, prefix: &[u8]) -> Result<Arc<Sizes>> {
        let cache = &self.shared.sizes;
        let prefix = common_prefix(&self.shared.index.read(), prefix);
        if let Some(sizes) = cache.get(&prefix) {
            return Ok(sizes);
        }
        let _scanning = cache.scanning.lock().await;
        // Another request may have scanned the same prefix meanwhile.
        if let Some(sizes) = cache.get(&prefix) {
            return Ok(sizes);
        }
        let sizes = Arc::new(self.shared.scan(prefix).await?);
        cache.keep(&sizes);
        Ok(sizes)
    }
}

impl Shared {
    async fn scan(&self, prefix: Vec<u8>) -> Result<Sizes> {
        let range = KeyRange::of_prefix(&prefix);
        let mut scan = Scan::new(prefix);
        let (mut after, mut batches) = (None::<Key>, 0);
        let mut cost = Duration::ZERO;
        loop {
            self.steps.request().await;
            let begun = Instant::now();
            let mut batch = Vec::new();
            after = {
                let index = self.index.read();
                let bounds = match &after {
                    None => range.bounds(),
                    Some(after) => range.bounds_after(after),
                };
                index.walk(bounds, index.head(), BATCH_KEYS, |key, entry| {
                    let name = Key::from(&key[..key.len().min(NAME_BYTES_MAX)]);
                    batch.push((name, key.len() as u64, entry.version.row));
                })
            };
            let lengths = self.value_lengths(batch.iter().map(|(.., row)| *row)).await?;
            for (name, key_bytes, row) in batch {
                let value_bytes = lengths.get(&row).copied().unwrap_or_default();
                scan.add(&name, PairSizes { keys: 1, key_bytes, value_bytes });
            }
            let took = begun.elapsed();
            cost += took;
            batches += 1;
            if after.is_none() {
                return Ok(scan.finish(cost));
            }
            if batches > UNPACED_BATCHES {
                sleep(took * PAUSE_FACTOR).await;
            }
        }
    }

    /// Returns the lengths of the values of these rows. Rows that were compacted meanwhile are missing.
    pub(super) async fn value_lengths(&self, rows: impl Iterator<Item = RowId>) -> Result<HashMap<RowId, u64>> {
        let (mut found, mut missing) = (HashMap::new(), Vec::new());
        for row in rows {
            match self.values.value_len(row) {
                Some(length) => drop(found.insert(row, length)),
                None => missing.push(row),
            }
        }
        if !missing.is_empty() {
            missing.sort_unstable();
            found.extend(self.log.value_lengths(&missing).await?);
        }
        Ok(found)
    }
}

/// The state of a scan, to which keys are added in order.
struct Scan {
    prefix: Vec<u8>,
    total: PairSizes,
    /// The child to which the last key belongs.
    current: Option<Child>,
    children: Largest,
    children_total: u64,
    keys: Largest,
}

impl Scan {
    fn new(prefix: Vec<u8>) -> Self {
        Self {
            prefix,
            total: PairSizes::default(),
            current: None,
            children: Largest::new(CHILDREN_MAX),
            children_total: 0,
            keys: Largest::new(KEYS_MAX),
        }
    }

    /// Adds a key, or the beginning of a long one.
    fn add(&mut self, key: &[u8], sizes: PairSizes) {
        self.total += sizes;
        let (name, kind) = match child_prefix(key, self.prefix.len()) {
            Some(prefix) => (prefix, ChildKind::Prefix),
            None => (key, ChildKind::Key),
        };
        match &mut self.current {
            Some(current) if kind == ChildKind::Prefix && current.kind == kind && current.name == name => {
                current.sizes += sizes;
            }
            _ => {
                self.end_child();
                self.current = Some(Child { name: name.to_vec(), kind, sizes });
            }
        }
        self.keys.offer(sizes.bytes(), || Child { name: key.to_vec(), kind: ChildKind::Key, sizes });
    }

    fn end_child(&mut self) {
        if let Some(child) = self.current.take() {
            self.children_total += 1;
            self.children.offer(child.sizes.bytes(), || child);
        }
    }

    fn finish(mut self, cost: Duration) -> Sizes {
        self.end_child();
        Sizes {
            prefix: self.prefix,
            total: self.total,
            children: self.children.finish(),
            children_total: self.children_total,
            largest_keys: self.keys.finish(),
            cost,
            collected_at: Instant::now(),
        }
    }
}

/// The largest of the offered children.
struct Largest {
    max: usize,
    /// The smallest is on top. Of equal ones, the later is dropped first.
    heap: BinaryHeap<Reverse<Ranked>>,
}

/// Bytes, and the fields of [`Child`].
type Ranked = (u64, Reverse<Vec<u8>>, ChildKind, PairSizes);

impl Largest {
    fn new(max: usize) -> Self {
        Self { max, heap: BinaryHeap::new() }
    }

    fn offer(&mut self, bytes: u64, child: impl FnOnce() -> Child) {
        if self.heap.len() == self.max {
            if self.heap.peek().is_some_and(|Reverse((smallest, ..))| *smallest >= bytes) {
                return;
            }
            self.heap.pop();
        }
        let Child { name, kind, sizes } = child();
        self.heap.push(Reverse((bytes, Reverse(name), kind, sizes)));
    }

    fn finish(self) -> Vec<Child> {
        let child = |Reverse((_, Reverse(name), kind, sizes)): Reverse<Ranked>| Child { name, kind, sizes };
        self.heap.into_sorted_vec().into_iter().map(child).collect()
    }
}

/// Returns the longest prefix ending in `/` that all keys below `prefix` share, or `prefix` if there is none.
fn common_prefix(index: &TreeIndex, prefix: &[u8]) -> Vec<u8> {
    let range = KeyRange::of_prefix(prefix);
    let (Some(first), Some(last)) = index.ends(range.bounds()) else { return prefix.to_vec() };
    let path = common_path(first, last).filter(|path| path.len() > prefix.len());
    path.unwrap_or(prefix).to_vec()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        store::fixtures::shared,
        types::{Change, ChangeKind, EncodedKv, Revision, Version},
    };

    fn put(key: &str, revision: i64) -> Change {
        let row = RowId::new(Revision(revision), 0);
        let version = Version { row, create_revision: Revision(revision), version: 1 };
        let kind = ChangeKind::put(EncodedKv::new(key.as_bytes(), version, b"", None));
        Change { row, key: key.as_bytes().into(), kind, prev: None, prev_lease: None }
    }

    /// Scans keys, each with the length of its value, below a prefix.
    fn scan(prefix: &str, keys: &[(&str, u64)]) -> Sizes {
        let mut scan = Scan::new(prefix.into());
        for (key, value_bytes) in keys {
            let sizes = PairSizes { keys: 1, key_bytes: key.len() as u64, value_bytes: *value_bytes };
            scan.add(key.as_bytes(), sizes);
        }
        scan.finish(Duration::ZERO)
    }

    /// Checks the children: name, number of keys, bytes of values.
    #[track_caller]
    fn check(prefix: &str, keys: &[(&str, u64)], want: &[(&str, u64, u64)]) {
        let sizes = scan(prefix, keys);
        let children: Vec<_> = (sizes.children.iter())
            .map(|child| (std::str::from_utf8(&child.name).unwrap(), child.sizes.keys, child.sizes.value_bytes))
            .collect();
        assert_eq!(children, want);
        assert_eq!((sizes.children_total, sizes.total.keys), (want.len() as u64, keys.len() as u64));
    }

    #[test]
    fn children_are_one_segment_below_the_prefix_and_the_largest_is_first() {
        check("", &[], &[]);
        check("", &[("a", 1), ("b", 300)], &[("b", 1, 300), ("a", 1, 1)]);
        check("", &[("/r/a", 1), ("/r/b", 2)], &[("/", 2, 3)]);
        let keys = [("/r/a", 9), ("/r/a/1", 10), ("/r/a/2/x", 20), ("/r/b/1", 500), ("/r/c", 0)];
        check("/r/", &keys, &[("/r/b/", 1, 500), ("/r/a/", 2, 30), ("/r/a", 1, 9), ("/r/c", 1, 0)]);
        check("/r", &[("/r", 1), ("/r/a", 2)], &[("/r/", 1, 2), ("/r", 1, 1)]);
    }

    #[test]
    fn only_the_largest_children_and_keys_are_kept() {
        let names: Vec<String> = (0..1_000).map(|number| format!("{number:04}")).collect();
        let keys: Vec<(&str, u64)> = names.iter().zip(0..).map(|(name, bytes)| (name.as_str(), bytes)).collect();
        let sizes = scan("", &keys);
        assert_eq!((sizes.children.len(), sizes.largest_keys.len()), (CHILDREN_MAX, KEYS_MAX));
        assert_eq!((&*sizes.children[0].name, &*sizes.largest_keys[KEYS_MAX - 1].name), (&b"0999"[..], &b"0936"[..]));
        assert_eq!((sizes.children_total, sizes.total.value_bytes), (1_000, 499_500));
    }

    #[test]
    fn common_prefix_ends_in_a_slash() {
        for (keys, prefix, want) in [
            (&[][..], "", ""),
            (&["/r/a/1", "/r/a/2"], "", "/r/a/"),
            (&["/r/a/1", "/r/ab/2"], "", "/r/"),
            (&["/r/a/1", "/r/ab/2"], "/r/a/", "/r/a/"),
            (&["a", "b"], "", ""),
            (&["/r/a/1", "x"], "/", "/r/a/"),
        ] {
            let mut index = TreeIndex::new();
            keys.iter().zip(2..).for_each(|(key, revision)| index.apply(&put(key, revision)));
            assert_eq!(common_prefix(&index, prefix.as_bytes()), want.as_bytes(), "{keys:?} below {prefix}");
        }
    }

    #[tokio::test]
    async fn cached_values_need_no_query() {
        let shared = shared(1 << 20);
        let change = put("a", 2);
        shared.values.insert(
            change.row,
            EncodedKv::new(b"a", Version { row: change.row, create_revision: Revision(2), version: 1 }, &[7; 50], None),
        );
        let other = RowId::new(Revision(3), 0);
        let lengths = shared.value_lengths([change.row, other].into_iter()).await.unwrap();
        assert_eq!(lengths, HashMap::from([(change.row, 50)]), "the log has no row of revision 3");
    }
}
