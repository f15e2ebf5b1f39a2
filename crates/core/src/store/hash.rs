//! etcd's hash of all pairs: stores with the same history have the same hash.
//!
//! The hash is a CRC-32 (Castagnoli) over the name of etcd's bucket, `key`, followed by each change up to a revision,
//! in order: the revision as etcd encodes it in 17 bytes (18 for a delete), then the pair. Changes at or below the
//! compact revision are included only if a compaction at the requested revision would keep them, so the hash does not
//! depend on the progress of the deletion.
//!
//! At the compact revision itself, etcd returns the hash that it computed before that compaction, until etcd restarts.
//! Orlop does so only after a compaction that the client waited for (`physical`). Computing a hash reads the whole
//! history, which is too slow for each of Kubernetes' compactions. Beside other instances it does not: they do not have that
//! hash, and the hash of a revision must be the same at all of them.
//!
//! A store computes one hash at a time, in steps: each reads the whole history and, after a compaction, keeps the row of
//! every key in memory. Further calls wait for as long as their clients do, in the order of their arrival.

use std::{collections::HashSet, future::ready, sync::Arc};

use tokio::time::Instant;

use super::{
    error::{Error, Result},
    handle::Store,
    shared::Shared,
    tasks,
    write_request::Request,
};
use crate::{
    auth::Caller,
    index::{ReadAt, TreeIndex},
    log::{self, ReadLog, WithPrev},
    overload::Steps,
    types::{Change, ChangeKind, EncodedKv, KeyRange, Revision, RowId, Version},
};

const BUCKET: &[u8] = b"key";
/// Keys visited per step while the index is locked.
const STEP_KEYS: usize = 2_000;

/// A hash and the revisions to which it applies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Hashed {
    pub hash: u32,
    /// The newest revision that is included.
    pub revision: Revision,
    pub compact_revision: Option<Revision>,
}

impl Store {
    /// Returns the hash of the pairs at a revision; `None`: at the head.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a call that is dropped leaves the queue, or ends its computation.
    pub async fn hash(&self, revision: Option<Revision>) -> Result<Hashed> {
        self.confirm().await?;
        self.shared.hash(revision).await
    }

    /// Stores the hash at `revision`, then records the compaction at it. Returns the head. If there are other instances, or the
    /// hash cannot be computed, for example because the revision is compacted already, none is stored.
    ///
    /// One that was begun is finished even if the future is dropped, as in etcd: on a large store the hash takes longer than
    /// clients wait. The next one waits for it.
    pub(super) async fn compact_with_hash(&self, caller: &Caller, revision: Revision) -> Result<Revision> {
        let running = Arc::clone(&self.shared.hashing).lock_owned().await;
        let (shared, queue, caller) = (Arc::clone(&self.shared), self.queue.clone(), caller.clone());
        let work = async move {
            if shared.members.is_alone()
                && let Ok(hashed) = shared.hash(Some(revision)).await
            {
                *shared.hash_before_compaction.lock() = Some(hashed);
            }
            let recorded = queue.submit_for_revision(&caller, Request::Compact(revision)).await;
            drop(running);
            recorded
        };
        // The work ends without a result if it panics.
        tasks::finish(&self.shared.metrics, "a compaction", work).await.unwrap_or(Err(Error::OutcomeUnknown))
    }

    /// Returns a hash of everything in the log: pairs, leases and the compact revision.
    pub async fn hash_all(&self) -> Result<u32> {
        let begun = Instant::now();
        let hashed = self.hash(None).await?;
        let mut leases = self.shared.log.meta().await?.leases;
        leases.sort_unstable_by_key(|lease| lease.id);
        let compacted = hashed.compact_revision.map_or(0, |revision| revision.0);
        let hash = crc32c::crc32c_append(hashed.hash, &compacted.to_be_bytes());
        let hash = leases.iter().fold(hash, |hash, lease| {
            let hash = crc32c::crc32c_append(hash, &lease.id.0.to_be_bytes());
            crc32c::crc32c_append(hash, &lease.ttl_secs.to_be_bytes())
        });
        self.shared.metrics.maintenance.hash.observe(begun.elapsed().as_secs_f64());
        Ok(hash)
    }
}

impl Shared {
    /// Returns the hash of the pairs at a revision; `None`: at the head. Waits while another hash is computed, unless this one
    /// was stored.
    async fn hash(&self, revision: Option<Revision>) -> Result<Hashed> {
        if let Some(stored) = self.stored_hash(revision) {
            return Ok(stored);
        }
        let _computing = self.computing_hash.lock().await;
        let begun = Instant::now();
        let hashed = loop {
            // The compaction at this revision may have been recorded while this call waited or computed.
            if let Some(stored) = self.stored_hash(revision) {
                return Ok(stored);
            }
            // If a compaction changed the set of included rows meanwhile, the hash is computed again.
            if let Some(hashed) = self.hash_once(revision).await? {
                break hashed;
            }
        };
        self.metrics.maintenance.hash_rev.observe(begun.elapsed().as_secs_f64());
        Ok(hashed)
    }

    /// Returns the hash that was stored for the compaction at this revision, if it is the newest one.
    fn stored_hash(&self, revision: Option<Revision>) -> Option<Hashed> {
        if revision.is_none() || revision != self.index.read().compact_revision() || !self.members.is_alone() {
            return None;
        }
        let stored = *self.hash_before_compaction.lock();
        stored.filter(|stored| Some(stored.revision) == revision)
    }

    /// Computes the hash, or returns `None` if a compaction interfered.
    async fn hash_once(&self, revision: Option<Revision>) -> Result<Option<Hashed>> {
        let (target, compacted) = {
            let index = self.index.read();
            let at = revision.map_or(ReadAt::Latest, ReadAt::Revision);
            (index.resolve(at)?, index.compact_revision())
        };
        let kept = match Kept::new(target, compacted, |at| self.live_rows(at)).await {
            Err(Error::Compacted) if revision.is_none() => return Ok(None),
            kept => kept?,
        };
        let log = &*self.log;
        let Some(hash) = hash_rows(log, target, &kept, Some(&self.steps)).await? else {
            // Another instance compacted; catching up applies its compaction.
            self.catch_up().await?;
            return Ok(None);
        };
        let unchanged = self.index.read().compact_revision() == compacted;
        Ok(unchanged.then_some(Hashed { hash, revision: target, compact_revision: compacted }))
    }

    /// Returns the newest row of each key that exists at a revision.
    async fn live_rows(&self, at: Revision) -> Result<HashSet<RowId>> {
        let mut rows = HashSet::new();
        let mut after = None;
        loop {
            after = self.walk(&KeyRange::all(), after.as_ref(), at, STEP_KEYS, &mut |_, entry| {
                rows.insert(entry.version.row);
            })?;
            if after.is_none() {
                return Ok(rows);
            }
            self.steps.request().await;
        }
    }
}

/// Returns the hash of a log that does not change, at a revision that can be read ([`TreeIndex::resolve`]): the one
/// that a store has which is compacted at `compacted`, no lower than the index.
pub async fn of_log(
    log: &dyn ReadLog,
    index: &TreeIndex,
    target: Revision,
    compacted: Option<Revision>,
) -> log::Result<Hashed> {
    let live_rows = |at| {
        let rows = index.range(KeyRange::all().bounds(), at).map(|(_, entry)| entry.version.row).collect();
        ready(log::Result::Ok(rows))
    };
    let kept = Kept::new(target, compacted, live_rows).await?;
    let hash = hash_rows(log, target, &kept, None).await?;
    let hash = hash.ok_or_else(|| log::Error::Unavailable("rows are being deleted".to_owned()))?;
    Ok(Hashed { hash, revision: target, compact_revision: compacted })
}

/// The rows that a hash includes: all above the compact revision, and some at or below it.
///
/// The latter are those that a compaction at the requested revision would keep. If no key exists there, etcd includes every
/// stored row instead, which are those that the last compaction kept: the rows of the keys that existed at the compact
/// revision, and the deletes of this revision.
struct Kept {
    /// [`Revision::EMPTY`], which has no rows: nothing is compacted.
    compacted: Revision,
    live: HashSet<RowId>,
    /// Whether the deletes at the compact revision are included.
    deletes: bool,
}

impl Kept {
    /// Returns the rows that the hash at `target` includes. `live_rows` returns the newest row of each key that exists at a
    /// revision.
    async fn new<F, E>(
        target: Revision,
        compacted: Option<Revision>,
        live_rows: impl Fn(Revision) -> F,
    ) -> std::result::Result<Self, E>
    where
        F: Future<Output = std::result::Result<HashSet<RowId>, E>>,
    {
        let Some(compacted) = compacted else {
            return Ok(Self { compacted: Revision::EMPTY, live: HashSet::new(), deletes: false });
        };
        let live = live_rows(target).await?;
        let deletes = live.is_empty();
        let live = if deletes { live_rows(compacted).await? } else { live };
        Ok(Self { compacted, live, deletes })
    }

    fn includes(&self, change: &Change) -> bool {
        let revision = change.row.revision;
        revision > self.compacted
            || self.live.contains(&change.row)
            || self.deletes && revision == self.compacted && change.is_delete()
    }
}

/// Hashes the rows up to `target`. Returns `None` if some rows may have been deleted. Each page is a step of `steps`;
/// `None`: this process serves no clients.
async fn hash_rows(
    log: &dyn ReadLog,
    target: Revision,
    kept: &Kept,
    steps: Option<&Steps>,
) -> log::Result<Option<u32>> {
    let mut hash = crc32c::crc32c(BUCKET);
    let mut next = Revision::EMPTY.next();
    while next <= target {
        if let Some(steps) = steps {
            steps.request().await;
        }
        let page = log.changes(next, target, &KeyRange::all(), WithPrev::No).await?;
        if page.purged.is_some_and(|purged| purged > kept.compacted) {
            return Ok(None);
        }
        hash = page.changes.iter().filter(|change| kept.includes(change)).fold(hash, append);
        next = page.next;
    }
    Ok(Some(hash))
}

/// Appends a change to the hash.
fn append(hash: u32, change: &Change) -> u32 {
    let mut key = [b'_'; 18];
    key[..8].copy_from_slice(&change.row.revision.0.to_be_bytes());
    key[9..17].copy_from_slice(&i64::from(change.row.sub).to_be_bytes());
    key[17] = b't';
    match &change.kind {
        ChangeKind::Put { kv, .. } => crc32c::crc32c_append(crc32c::crc32c_append(hash, &key[..17]), kv.as_bytes()),
        ChangeKind::Delete => {
            let hash = crc32c::crc32c_append(hash, &key);
            let nothing = Version { row: RowId::new(Revision(0), 0), create_revision: Revision(0), version: 0 };
            crc32c::crc32c_append(hash, EncodedKv::new(&change.key, nothing, b"", None).as_bytes())
        }
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use futures_util::FutureExt as _;
    use tokio::time::timeout;

    use super::*;
    use crate::{
        log::memory::MemoryLog,
        store::{
            Settings,
            request::{CompactionWait, PutLease, PutRequest, PutValue},
        },
    };

    /// Returns a store with one pair, and the pair's revision.
    async fn store_with_a_pair() -> (Store, Revision) {
        let store = Store::open(Arc::new(MemoryLog::default()), Settings::default()).await.unwrap();
        let value = PutValue::New("v".into());
        let put = PutRequest { key: "k".into(), value, lease: PutLease::Set(None), prev_kv: false };
        let revision = store.put(&Caller::Server, put).await.unwrap().revision;
        (store, revision)
    }

    #[tokio::test(start_paused = true)]
    async fn hashes_are_computed_one_after_the_other() {
        let (store, _) = store_with_a_pair().await;
        let minute = Duration::from_secs(60);
        let mut first = Box::pin(store.hash(None));
        assert!(first.as_mut().now_or_never().is_none(), "the hash is being computed");
        let mut second = Box::pin(store.hash(None));
        let waiting = timeout(minute, second.as_mut()).await;
        assert!(waiting.is_err(), "a second hash is computed at the same time: {waiting:?}");
        let mut third = Box::pin(store.hash(None));
        assert!(third.as_mut().now_or_never().is_none());
        drop(first);
        assert!(third.as_mut().now_or_never().is_none(), "the second call is served before the third one");
        drop(second);
        let hashed = timeout(minute, third).await.expect("calls that were dropped do not block others");
        assert!(hashed.is_ok(), "{hashed:?}");
    }

    #[tokio::test(start_paused = true)]
    async fn compaction_is_finished_although_its_client_gives_up() {
        let (store, revision) = store_with_a_pair().await;
        let before = store.hash(Some(revision)).await.unwrap();
        let compacting = store.compact(&Caller::Server, revision, CompactionWait::ForRows);
        assert!(compacting.now_or_never().is_none(), "the hash is being computed");
        let mut done = store.shared.compaction_done.subscribe();
        let finished = done.wait_for(|done| *done == Some(revision));
        timeout(Duration::from_secs(60), finished).await.expect("the compaction is finished").expect("the store runs");
        assert_eq!(store.hash(Some(revision)).await, Ok(before), "the hash before the compaction is stored");
    }
}
