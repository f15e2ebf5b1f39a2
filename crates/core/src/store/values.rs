//! The value cache: encoded pairs of live keys, limited in bytes. Reads are correct without it: missing pairs are read
//! from the log.

use quick_cache::{Weighter, sync::Cache};

use crate::types::{Change, EncodedKv, RowId};

/// Approximate overhead of an entry in bytes, in the cache and in the allocator.
const ENTRY_BYTES: u64 = 96;
/// Assumed size of a pair in bytes when the cache is created. A wrong assumption costs speed, not memory.
const PAIR_BYTES_GUESS: u64 = 1024;

/// A concurrent cache from rows to pairs.
pub struct ValueCache(Cache<RowId, EncodedKv, ByBytes>);

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
        Self(Cache::with_weighter(items, bytes, ByBytes))
    }

    pub fn get(&self, row: RowId) -> Option<EncodedKv> {
        self.0.get(&row)
    }

    /// Returns the length of the value of a pair. Does not count as a use of the pair.
    pub fn value_len(&self, row: RowId) -> Option<u64> {
        self.0.peek(&row).map(|kv| kv.value_slice().len() as u64)
    }

    /// Returns whether pairs of this many bytes fit into the cache.
    pub fn fits(&self, bytes: usize) -> bool {
        bytes as u64 <= self.0.capacity()
    }

    /// Returns the approximate size in bytes.
    pub fn bytes(&self) -> u64 {
        self.0.weight()
    }

    pub fn hits(&self) -> u64 {
        self.0.hits()
    }

    pub fn misses(&self) -> u64 {
        self.0.misses()
    }

    /// Adds a pair of a live version. Older versions must not be added: they would displace pairs that are read more
    /// often.
    pub fn insert(&self, row: RowId, kv: EncodedKv) {
        self.0.insert(row, kv);
    }

    /// Adds the pair that a change wrote and removes the one that it replaced.
    pub fn apply(&self, change: &Change) {
        if let Some(prev) = &change.prev {
            self.0.remove(&prev.row);
        }
        if let Some(kv) = change.kv() {
            self.0.insert(change.row, kv.clone());
        }
    }
}
