//! The value cache: encoded pairs, limited in bytes. Reads are correct without it: missing pairs are read from the log.
//!
//! It keeps the pairs of live versions and, while it has room, those of versions that were overwritten since the last
//! compaction: the later pages of a list are read at the revision of its first page.

use std::collections::VecDeque;

use quick_cache::{Weighter, sync::Cache};

use crate::{
    sync::Mutex,
    types::{Change, EncodedKv, Revision, RowId},
};

/// Approximate overhead of an entry in bytes, in the cache and in the allocator.
const ENTRY_BYTES: u64 = 96;
/// Assumed size of a pair in bytes when the cache is created. A wrong assumption costs speed, not memory.
const PAIR_BYTES_GUESS: u64 = 1024;
/// Maximum number of overwritten pairs that leave the cache at a commit, in addition to [`LEAVING_PER_CHANGE`].
const LEAVING: usize = 64;
/// The same for each change: more than it adds, so that an excess becomes smaller.
const LEAVING_PER_CHANGE: usize = 4;

/// A concurrent cache from rows to pairs.
pub struct ValueCache {
    pairs: Cache<RowId, EncodedKv, ByBytes>,
    /// The rows of overwritten versions that were cached when they were overwritten, and the revision at which that
    /// happened, in the order of that revision.
    overwritten: Mutex<VecDeque<(Revision, RowId)>>,
}

#[derive(Clone)]
struct ByBytes;

impl Weighter<RowId, EncodedKv> for ByBytes {
    fn weight(&self, _row: &RowId, kv: &EncodedKv) -> u64 {
        kv.len() as u64 + ENTRY_BYTES
    }
}

impl ValueCache {
    /// Creates a cache of at most `bytes` bytes; 0 disables it.
    pub fn new(bytes: u64) -> Self {
        let items = usize::try_from(bytes / PAIR_BYTES_GUESS).unwrap_or(usize::MAX);
        Self { pairs: Cache::with_weighter(items, bytes, ByBytes), overwritten: Mutex::default() }
    }

    pub fn get(&self, row: RowId) -> Option<EncodedKv> {
        self.pairs.get(&row)
    }

    /// Returns the length of the value of a pair. Does not count as a use of the pair.
    pub fn value_len(&self, row: RowId) -> Option<u64> {
        self.pairs.peek(&row).map(|kv| kv.value_slice().len() as u64)
    }

    /// Returns whether pairs of this many bytes fit into the cache.
    pub fn fits(&self, bytes: usize) -> bool {
        bytes as u64 <= self.pairs.capacity()
    }

    /// Returns the approximate size in bytes.
    pub fn bytes(&self) -> u64 {
        self.pairs.weight()
    }

    pub fn hits(&self) -> u64 {
        self.pairs.hits()
    }

    pub fn misses(&self) -> u64 {
        self.pairs.misses()
    }

    /// Adds a pair of a live version. Older versions that were read from the log must not be added: they would displace
    /// pairs that are read more often.
    pub fn insert(&self, row: RowId, kv: EncodedKv) {
        self.pairs.insert(row, kv);
    }

    /// Adds the pairs that changes wrote. If the cache is nearly full then, some of those that were overwritten leave it.
    pub fn apply(&self, changes: &[Change]) {
        let mut overwritten = self.overwritten.lock();
        for change in changes {
            if let Some(prev) = &change.prev
                && self.pairs.contains_key(&prev.row)
            {
                overwritten.push_back((change.row.revision, prev.row));
            }
            if let Some(kv) = change.kv() {
                self.pairs.insert(change.row, kv.clone());
            }
        }
        self.shrink_to_fit(&mut overwritten, 0, LEAVING + LEAVING_PER_CHANGE * changes.len());
    }

    /// Makes room for live pairs of this many bytes: at most `max` overwritten ones leave the cache. Returns whether more of
    /// them have to leave. A pair that is added to a full cache would only replace the one that was added before it.
    pub fn make_room(&self, bytes: usize, max: usize) -> bool {
        self.shrink_to_fit(&mut self.overwritten.lock(), bytes as u64, max)
    }

    /// Removes overwritten pairs, the oldest first, until the cache and `bytes` more take at most seven eighths of its
    /// capacity.
    fn shrink_to_fit(&self, overwritten: &mut VecDeque<(Revision, RowId)>, bytes: u64, max: usize) -> bool {
        let capacity = self.pairs.capacity();
        let mut excess = (self.pairs.weight() + bytes).saturating_sub(capacity - capacity / 8);
        for _ in 0..max {
            if excess == 0 {
                return false;
            }
            let Some((_, row)) = overwritten.pop_front() else { return false };
            if let Some((row, kv)) = self.pairs.remove(&row) {
                excess = excess.saturating_sub(ByBytes.weight(&row, &kv));
            }
        }
        excess > 0
    }

    /// Removes at most `max` pairs that were overwritten at or below `compacted`, so that nobody can read them. Returns
    /// whether there may be more.
    pub fn compact(&self, compacted: Revision, max: usize) -> bool {
        let mut overwritten = self.overwritten.lock();
        for _ in 0..max {
            match overwritten.pop_front_if(|(at, _)| *at <= compacted) {
                Some((_, row)) => _ = self.pairs.remove(&row),
                None => {
                    let len = overwritten.len();
                    overwritten.shrink_to(2 * len);
                    return false;
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{ChangeKind, Key, Prev, Version};

    const VALUE_BYTES: usize = 1000;

    fn row(revision: i64) -> RowId {
        RowId::new(Revision(revision), 0)
    }

    /// Returns the change of `k` at a revision, which overwrites the one of the revision before.
    fn change(revision: i64, is_put: bool) -> Change {
        let version = Version { row: row(revision), create_revision: Revision(2), version: revision - 1 };
        let kind = if is_put {
            ChangeKind::put(EncodedKv::new(b"k", version, &[7; VALUE_BYTES], None))
        } else {
            ChangeKind::Delete
        };
        let prev = (revision > 2).then(|| Prev { row: row(revision - 1), kv: None });
        Change { row: row(revision), key: Key::from(&b"k"[..]), kind, prev, prev_lease: None }
    }

    fn cached(values: &ValueCache, revisions: impl IntoIterator<Item = i64>) -> Vec<i64> {
        revisions.into_iter().filter(|revision| values.get(row(*revision)).is_some()).collect()
    }

    #[test]
    fn overwritten_pairs_stay_until_compaction() {
        let values = ValueCache::new(1 << 20);
        values.apply(&[change(2, true), change(3, true), change(4, true)]);
        values.apply(&[change(5, false)]);
        values.apply(&[change(7, true)]);
        assert_eq!(cached(&values, 2..8), [2, 3, 4, 7]);
        // Revision 3 can be read at the compact revision, 3.
        assert!(!values.compact(Revision(3), 10));
        assert_eq!(cached(&values, 2..8), [3, 4, 7]);
        assert!(values.compact(Revision(5), 1), "one of two is removed");
        assert!(!values.compact(Revision(5), 10));
        assert_eq!(cached(&values, 2..8), [7]);
    }

    #[test]
    fn overwritten_pairs_make_room_for_live_ones() {
        for (capacity, batch) in [(0, 1), (10 * VALUE_BYTES as u64, 3), (1 << 20, 50)] {
            let values = ValueCache::new(capacity);
            let changes: Vec<Change> = (2..5_000).map(|revision| change(revision, true)).collect();
            for changes in changes.chunks(batch) {
                values.apply(changes);
                assert!(values.bytes() <= capacity);
                let listed = values.overwritten.lock().len();
                assert!(listed as u64 <= capacity / VALUE_BYTES as u64, "{listed} are listed of {capacity} bytes");
            }
            let newest = values.get(row(4_999)).is_some();
            assert_eq!(newest, capacity > 0, "the newest is cached of {capacity} bytes");
        }
    }

    #[test]
    fn live_pairs_get_the_room_of_overwritten_ones() {
        const CAPACITY: u64 = 1 << 20;
        let values = ValueCache::new(CAPACITY);
        values.apply(&(2..5_000).map(|revision| change(revision, true)).collect::<Vec<_>>());
        let listed = || values.overwritten.lock().len();
        while listed() > 0 && values.bytes() > CAPACITY / 8 * 7 {
            values.apply(&[]);
        }
        let before = listed();
        assert!(before > 500, "{before} overwritten pairs are cached");
        let live: Vec<i64> = (10_000..10_600).collect();
        while values.make_room(live.len() * 1_100, 10) {}
        let pair = |revision: i64| change(revision, true).kv().expect("a put").clone();
        live.iter().for_each(|revision| values.insert(row(*revision), pair(*revision)));
        // The shards are not filled evenly.
        let found = cached(&values, live.iter().copied()).len();
        assert!(found > live.len() * 9 / 10, "{found} live pairs are cached");
        // A commit is not delayed by what other pairs leave to remove.
        let full: Vec<i64> = (20_000..20_900).collect();
        full.iter().for_each(|revision| values.insert(row(*revision), pair(*revision)));
        let before = listed();
        values.apply(&[change(5_000, true)]);
        assert!(before - listed() <= LEAVING + LEAVING_PER_CHANGE, "of {before} {} are left", listed());
    }
}
