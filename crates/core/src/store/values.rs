//! The value cache: encoded pairs of live keys under a byte budget. With the cache full or off every read is still right;
//! what is missing is read from the log.

use quick_cache::{Weighter, sync::Cache};

use crate::types::{Change, ChangeKind, EncodedKv, RowId};

/// Bytes that an entry takes beside its pair, about: the cache's own bookkeeping and the allocation's.
const ENTRY_BYTES: u64 = 96;
/// How large a pair is taken to be when the cache is laid out; a wrong guess costs speed, not memory.
const PAIR_BYTES_GUESS: u64 = 1024;

/// See the module's page.
pub struct ValueCache(Cache<RowId, EncodedKv, ByBytes>);

#[derive(Clone)]
struct ByBytes;

impl Weighter<RowId, EncodedKv> for ByBytes {
    fn weight(&self, _row: &RowId, kv: &EncodedKv) -> u64 {
        kv.len() as u64 + ENTRY_BYTES
    }
}

impl ValueCache {
    /// `bytes` of 0 turn it off.
    pub fn new(bytes: u64) -> Self {
        let items = usize::try_from(bytes / PAIR_BYTES_GUESS).unwrap_or(usize::MAX);
        Self(Cache::with_weighter(items, bytes, ByBytes))
    }

    pub fn get(&self, row: RowId) -> Option<EncodedKv> {
        self.0.get(&row)
    }

    /// What it takes, about.
    pub fn bytes(&self) -> u64 {
        self.0.weight()
    }

    pub fn hits(&self) -> u64 {
        self.0.hits()
    }

    pub fn misses(&self) -> u64 {
        self.0.misses()
    }

    /// For pairs of live versions only: older ones would push out what is read more.
    pub fn insert(&self, row: RowId, kv: EncodedKv) {
        self.0.insert(row, kv);
    }

    /// Takes up the pair that a change made and lets go of the one that it replaced.
    pub fn apply(&self, change: &Change) {
        if let Some(prev) = &change.prev {
            self.0.remove(&prev.row);
        }
        if let ChangeKind::Put { kv, .. } = &change.kind {
            self.0.insert(change.row, kv.clone());
        }
    }
}
