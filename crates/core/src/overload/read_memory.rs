//! Limits the memory of pairs that were read from the log, or made from the index, for responses and are not sent yet.
//! Lists of leases, and of the keys of a lease, count like these pairs.
//!
//! A value in the value cache uses no additional memory in a response. Other values are read from the log and stay in
//! memory until the response is sent; each is counted until its last reference is dropped. Above the limit, reads wait.
//! A read that waits too long fails, and its client may retry.
//!
//! At most [`LISTS_MAX`] lists read at the same time. A list that has started does not wait again, so lists cannot
//! deadlock. Lists therefore use at most `256 MiB + 2 * value-cache-bytes` plus the size of [`LISTS_MAX`] lists. The
//! limit of reads of a few pairs is twice as high, so that lists do not block these reads.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use bytes::Bytes;
use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::timeout,
};
use tracing::warn;

use crate::types::{EncodedKv, RowId, held_by};

/// Maximum counted bytes, in addition to twice the size of the value cache. The first cache size is for values in the
/// cache, which are counted too; the second is for values that the cache has evicted and responses still hold.
const BYTES_MAX: usize = 256 << 20;
/// Maximum number of lists that read from the log at the same time; others wait in the order of their arrival.
const LISTS_MAX: usize = 2;
/// Maximum time a read waits for memory.
const WAIT_MAX: Duration = Duration::from_secs(7);
/// Waiting reads are notified whenever the counted bytes fall below a multiple of 2^`FREED_BYTES_BITS`.
const FREED_BYTES_BITS: u32 = 20;

/// Counts the bytes of values and of lists of leases that were read for responses.
pub struct ReadMemory {
    used: Arc<Used>,
    lists: Semaphore,
}

struct Used {
    bytes: AtomicUsize,
    bytes_max: usize,
    freed: Notify,
}

/// Counts one value, or a part of a list, until it is dropped.
struct Counted {
    used: Arc<Used>,
    bytes: usize,
}

impl Drop for Counted {
    fn drop(&mut self) {
        let before = self.used.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        if before >> FREED_BYTES_BITS != (before - self.bytes) >> FREED_BYTES_BITS {
            self.used.freed.notify_waiters();
        }
    }
}

/// Permission to read a list from the log.
#[must_use]
pub struct ListPermit<'a>(#[expect(dead_code, reason = "held")] SemaphorePermit<'a>);

/// A read waited too long for memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Exhausted;

impl ReadMemory {
    pub fn new(value_cache_bytes: u64) -> Self {
        let cached = usize::try_from(value_cache_bytes).unwrap_or(usize::MAX);
        Self::with_limit(cached.saturating_mul(2).saturating_add(BYTES_MAX))
    }

    pub(crate) fn with_limit(bytes_max: usize) -> Self {
        let used = Used { bytes: AtomicUsize::new(0), bytes_max, freed: Notify::new() };
        Self { used: Arc::new(used), lists: Semaphore::new(LISTS_MAX) }
    }

    /// Waits until a list may be read.
    ///
    /// # Errors
    ///
    /// If too little memory is freed within 7 s, because clients do not read their responses.
    pub async fn list(&self) -> Result<ListPermit<'_>, Exhausted> {
        let permit = self.lists.acquire().await.expect("the semaphore is never closed");
        self.wait_until_below(self.used.bytes_max).await?;
        Ok(ListPermit(permit))
    }

    /// Returns whether a few pairs may be read without waiting.
    pub fn has_free(&self) -> bool {
        self.bytes() < self.single_read_bytes_max()
    }

    /// Returns whether a list may be read without waiting, beside those that have a permit.
    pub fn has_free_for_list(&self) -> bool {
        self.bytes() < self.used.bytes_max
    }

    /// Waits until a few pairs may be read.
    ///
    /// # Errors
    ///
    /// Like [`Self::list`].
    pub async fn wait_until_free(&self) -> Result<(), Exhausted> {
        self.wait_until_below(self.single_read_bytes_max()).await
    }

    fn single_read_bytes_max(&self) -> usize {
        self.used.bytes_max.saturating_mul(2)
    }

    async fn wait_until_below(&self, bytes_max: usize) -> Result<(), Exhausted> {
        let wait = async {
            while self.bytes() >= bytes_max {
                let freed = self.used.freed.notified();
                if self.bytes() >= bytes_max {
                    // Not every freed value causes a notification, so the condition is also checked periodically.
                    let _ = timeout(WAIT_MAX / 50, freed).await;
                }
            }
        };
        timeout(WAIT_MAX, wait).await.map_err(|_| {
            warn!(bytes = self.bytes(), "a read failed: clients have not read the responses that they requested");
            Exhausted
        })
    }

    pub fn bytes(&self) -> usize {
        self.used.bytes.load(Ordering::Relaxed)
    }

    /// Counts values that were read from the log.
    pub fn count(&self, found: Vec<(RowId, EncodedKv)>) -> Vec<(RowId, EncodedKv)> {
        found.into_iter().map(|(row, kv)| (row, self.counted(kv))).collect()
    }

    /// Counts a pair that is not in the value cache.
    pub fn counted(&self, kv: EncodedKv) -> EncodedKv {
        let bytes = kv.len();
        kv.held_by(self.count_bytes(bytes))
    }

    /// Counts `bytes` until the last reference to this part of a list is dropped.
    pub fn hold(&self, part: Bytes, bytes: usize) -> Bytes {
        held_by(part, self.count_bytes(bytes))
    }

    fn count_bytes(&self, bytes: usize) -> Counted {
        self.used.bytes.fetch_add(bytes, Ordering::Relaxed);
        Counted { used: Arc::clone(&self.used), bytes }
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::types::{Revision, Version};

    fn values(count: usize) -> Vec<(RowId, EncodedKv)> {
        let row = RowId::new(Revision(2), 0);
        let version = Version { row, create_revision: Revision(2), version: 1 };
        vec![(row, EncodedKv::new(b"k", version, &[7; 1_000], None)); count]
    }

    #[tokio::test(start_paused = true)]
    async fn list_waits_until_unsent_responses_are_dropped() {
        let memory = ReadMemory::with_limit(10_000);
        let response = memory.count(values(11));
        assert!(memory.wait_until_free().now_or_never().is_some(), "a few pairs may still be read");
        assert_eq!(memory.list().await.err(), Some(Exhausted));
        let part_of_a_pair: Vec<_> = response.iter().map(|(_, kv)| kv.value()).collect();
        drop(response);
        let mut waiting = Box::pin(memory.list());
        assert!(waiting.as_mut().now_or_never().is_none(), "a part of a pair keeps the whole pair in memory");
        drop(part_of_a_pair);
        assert!(waiting.await.is_ok());
        assert_eq!(memory.bytes(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn lists_beyond_the_limit_wait_for_others_to_end() {
        let memory = ReadMemory::with_limit(10_000);
        let mut lists = Vec::new();
        for _ in 0..LISTS_MAX {
            lists.push(memory.list().await.expect("memory is free"));
        }
        assert!(memory.list().now_or_never().is_none());
        lists.pop();
        assert!(memory.list().now_or_never().is_some());
    }
}
