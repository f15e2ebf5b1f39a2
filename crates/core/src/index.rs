//! The treeIndex: for every key, which revisions it was written and deleted at. It answers "what did this range look like
//! at revision R" for every R from the compact revision to the head, and holds no values.
//!
//! Pure and single-threaded; the store keeps it behind a lock and nothing but the applier changes it. It can be rebuilt
//! from the log at any time. About 150 bytes a key, beside the key itself, for a key with one version.
//!
//! Known limit: counting a range walks it, as in etcd.

mod key_index;
#[cfg(test)]
mod model_tests;
mod succession;

use std::{
    collections::BTreeMap,
    ops::{Bound, RangeBounds},
};

use self::key_index::{Fate, KeyIndex};
pub use self::{
    key_index::{Entry, Lease},
    succession::{Claim, ClaimKind, Contradiction},
};

use crate::types::{Change, ChangeKind, Key, KeyBounds, Revision, RowId};

/// At which revision to read.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ReadAt {
    Latest,
    Revision(Revision),
}

/// A revision that cannot be read.
#[derive(Clone, Copy, PartialEq, Eq, Debug, thiserror::Error)]
pub enum Unreadable {
    #[error("required revision has been compacted")]
    Compacted,
    #[error("required revision is a future revision")]
    Future,
}

/// See the module's page. Two indexes are equal when they give equal answers at every readable revision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TreeIndex {
    keys: BTreeMap<Key, KeyIndex>,
    head: Revision,
    compact_revision: Option<Revision>,
}

/// How far a compaction has come through the keys.
#[derive(Debug, Default)]
pub struct CompactionCursor {
    after: Option<Key>,
}

impl TreeIndex {
    pub fn new() -> Self {
        Self { keys: BTreeMap::new(), head: Revision::EMPTY, compact_revision: None }
    }

    /// The newest revision applied.
    pub fn head(&self) -> Revision {
        self.head
    }

    /// The revision of the newest compaction; none on a store that was never compacted.
    pub fn compact_revision(&self) -> Option<Revision> {
        self.compact_revision
    }

    /// Keys with any history, deleted ones that are not yet compacted away among them.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// The revision to read at. A client's compact revision itself is readable.
    pub fn resolve(&self, at: ReadAt) -> Result<Revision, Unreadable> {
        match at {
            ReadAt::Latest => Ok(self.head),
            ReadAt::Revision(at) if at > self.head => Err(Unreadable::Future),
            ReadAt::Revision(at) if self.compact_revision.is_some_and(|compacted| at < compacted) => {
                Err(Unreadable::Compacted)
            }
            ReadAt::Revision(at) => Ok(at),
        }
    }

    /// Takes up one change. Changes come in the order of their rows.
    ///
    /// # Panics
    ///
    /// If the change is older than one applied before: going on would serve a history that the log does not have.
    pub fn apply(&mut self, change: &Change) {
        self.move_on(change);
        match self.keys.get_mut(&change.key) {
            Some(key) => key.apply(change),
            None => self.begin(change),
        }
    }

    /// As [`TreeIndex::apply`], of a change that was read from a log whose compact revision is `compacted`.
    ///
    /// # Errors
    ///
    /// If it does not follow from what the log said of its key before.
    pub fn restore(&mut self, change: &Change, compacted: Option<Revision>) -> Result<(), Contradiction> {
        self.move_on(change);
        let claim = Claim::of(change);
        match self.keys.get_mut(&change.key) {
            Some(key) => {
                let last = key.claim(&claim);
                match claim.follow(Some(&last), compacted) {
                    // An old version that a compaction should have taken with its delete; the key is right again from here on.
                    Err(Contradiction::MissingDelete { since }) if compacted.is_some_and(|at| since < at) => {}
                    followed => followed?,
                }
                key.apply(change);
            }
            None => {
                claim.follow(None, compacted)?;
                self.begin(change);
            }
        }
        Ok(())
    }

    fn move_on(&mut self, change: &Change) {
        let revision = change.row.revision;
        assert!(revision >= self.head, "changes are applied in order: revision={revision} head={}", self.head);
        self.head = revision;
    }

    /// Of a key without any history.
    fn begin(&mut self, change: &Change) {
        let key = match &change.kind {
            ChangeKind::Put { create_revision, version, lease, .. } => {
                KeyIndex::created(change.row, *create_revision, *version, *lease)
            }
            // The tombstone at the compact revision outlives what it deleted, so a restore may meet it alone.
            ChangeKind::Delete => KeyIndex::deleted(change.row),
        };
        self.keys.insert(change.key.clone(), key);
    }

    /// The key's state at `at`, if it was live then.
    pub fn get(&self, key: &[u8], at: Revision) -> Option<Entry> {
        self.keys.get(key)?.at(at)
    }

    /// The live keys at `at` within `bounds`, in order.
    pub fn range(
        &self,
        bounds: impl RangeBounds<[u8]>,
        at: Revision,
    ) -> impl DoubleEndedIterator<Item = (&Key, Entry)> {
        self.keys.range::<[u8], _>(bounds).filter_map(move |(key, index)| Some((key, index.at(at)?)))
    }

    /// Visits at most `budget` keys with any history within `bounds`, offering those live at `at` to `visit`.
    /// Returns the last key visited when the budget ended the walk, so that the caller can let go of the index and come
    /// back for the rest.
    pub fn walk(
        &self,
        bounds: KeyBounds<'_>,
        at: Revision,
        budget: usize,
        mut visit: impl FnMut(&Key, Entry),
    ) -> Option<Key> {
        let mut left = budget;
        for (key, index) in self.keys.range::<[u8], _>(bounds) {
            if let Some(entry) = index.at(at) {
                visit(key, entry);
            }
            left -= 1;
            if left == 0 {
                return Some(key.clone());
            }
        }
        None
    }

    /// Forbids reads below `revision` from now on; [`TreeIndex::compact_step`] then frees what they needed.
    /// The compact revision never goes back.
    pub fn begin_compaction(&mut self, revision: Revision) {
        self.compact_revision = self.compact_revision.max(Some(revision));
    }

    /// Frees what no read at or above the compact revision can see, for at most `budget` keys; adds the rows that went to
    /// `removed`. Returns whether keys are left.
    pub fn compact_step(&mut self, cursor: &mut CompactionCursor, budget: usize, removed: &mut Vec<RowId>) -> bool {
        let Some(revision) = self.compact_revision else { return false };
        let start = cursor.after.take().map_or(Bound::Unbounded, Bound::Excluded);
        let mut dropped = Vec::new();
        let mut last = None;
        let mut seen = 0;
        for (key, index) in self.keys.range_mut((start, Bound::Unbounded)) {
            if index.compact(revision, removed) == Fate::Drop {
                dropped.push(key.clone());
            }
            seen += 1;
            if seen == budget {
                last = Some(key.clone());
                break;
            }
        }
        for key in dropped {
            self.keys.remove(&key);
        }
        cursor.after = last;
        cursor.after.is_some()
    }
}

impl Default for TreeIndex {
    fn default() -> Self {
        Self::new()
    }
}
