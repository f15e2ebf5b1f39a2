//! The tree index: for every key, the revisions at which it was put and deleted. It returns the state of a range at any
//! revision from the compact revision to the head. It contains no values.
//!
//! Pure and single-threaded: the store keeps it behind a lock, and only the applier changes it. It can be rebuilt from
//! the log at any time. A key with one version and no lease takes about 125 bytes in
//! addition to the key.
//!
//! Known limit: counting a range walks it, as in etcd.

mod key_index;
#[cfg(test)]
mod model_tests;
mod row_validation;
mod saved;

use std::{
    collections::BTreeMap,
    ops::{Bound, RangeBounds},
};

use self::key_index::{Fate, KeyIndex};
pub use self::{
    key_index::{Entry, IndexedRow, Lease},
    row_validation::{Contradiction, RowKind, ValidatedColumns},
    saved::{InvalidBlock, SavedIndexLoader},
};

use crate::types::{Change, ChangeKind, Key, KeyBounds, Revision, RowId, Superseded};

/// The revision to read.
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

/// Rows that a step of a compaction removes before it ends, at the end of a key: a few keys can have as many rows as all
/// others.
const COMPACT_STEP_ROWS: usize = 20_000;

/// The tree index. Two indexes are equal if they give the same results at every readable revision.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct TreeIndex {
    keys: BTreeMap<Key, KeyIndex>,
    /// Number of keys that exist at the head.
    live: usize,
    head: Revision,
    compact_revision: Option<Revision>,
}

/// A change of a key, without its pair.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexedChange {
    pub row: RowId,
    pub is_delete: bool,
    /// The row of the version that was live before the change.
    pub prev: Option<RowId>,
}

/// The result of [`TreeIndex::first`].
pub enum First<'a> {
    Found(&'a Key),
    /// The budget is used up; this key was visited last.
    Paused(&'a Key),
    End,
}

/// The position of a compaction among the keys.
#[derive(Debug, Default)]
pub struct CompactionCursor {
    /// `None`: the compact revision at each step.
    revision: Option<Revision>,
    after: Option<Key>,
}

impl CompactionCursor {
    /// Frees what is unreadable after a compaction at `revision`, even if a later compaction is recorded meanwhile.
    pub fn at(revision: Revision) -> Self {
        Self { revision: Some(revision), after: None }
    }
}

impl TreeIndex {
    pub fn new() -> Self {
        Self { keys: BTreeMap::new(), live: 0, head: Revision::EMPTY, compact_revision: None }
    }

    /// Returns the newest applied revision.
    pub fn head(&self) -> Revision {
        self.head
    }

    /// Returns the revision of the newest compaction, or `None` if the store was never compacted.
    pub fn compact_revision(&self) -> Option<Revision> {
        self.compact_revision
    }

    /// Returns the number of keys with any history, including deleted keys that are not compacted yet.
    pub fn len(&self) -> usize {
        self.keys.len()
    }

    pub fn is_empty(&self) -> bool {
        self.keys.is_empty()
    }

    /// Returns the number of keys that exist at the head.
    pub fn live(&self) -> usize {
        self.live
    }

    /// Resolves the revision to read. The compact revision itself is readable.
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

    /// Applies one change. Changes are applied in the order of their rows.
    ///
    /// # Panics
    ///
    /// If the change is older than one that was applied: continuing would serve a history that the log does not
    /// contain.
    pub fn apply(&mut self, change: &Change) {
        self.advance_head(change);
        match self.keys.get_mut(&change.key) {
            Some(key) => apply_counted(key, change, &mut self.live),
            None => self.begin(change),
        }
    }

    /// Like [`TreeIndex::apply`], for a change read from a log whose compact revision is `compacted`. Skips a change that its
    /// key already has ([`TreeIndex::save_step`]).
    ///
    /// # Errors
    ///
    /// If the change does not follow from the previous rows of its key.
    pub fn restore(&mut self, change: &Change, compacted: Option<Revision>) -> Result<(), Contradiction> {
        self.advance_head(change);
        let columns = ValidatedColumns::of(change);
        match self.keys.get_mut(&change.key) {
            Some(key) if change.row <= key.newest.row => {}
            Some(key) => {
                let last = key.newest_columns(&columns);
                match columns.follow(Some(&last), compacted) {
                    // An unfinished compaction deleted the tombstone of the version put at `since`, but not the version
                    // itself. The key's state is correct from this change on.
                    Err(Contradiction::MissingDelete { since }) if compacted.is_some_and(|at| since < at) => {}
                    followed => followed?,
                }
                apply_counted(key, change, &mut self.live);
            }
            None => {
                columns.follow(None, compacted)?;
                self.begin(change);
            }
        }
        Ok(())
    }

    fn advance_head(&mut self, change: &Change) {
        let revision = change.row.revision;
        assert!(revision >= self.head, "changes are applied in order: revision={revision} head={}", self.head);
        self.head = revision;
    }

    /// Starts the history of a key.
    fn begin(&mut self, change: &Change) {
        let key = match &change.kind {
            ChangeKind::Put { create_revision, version, lease, .. } => {
                KeyIndex::created(change.row, *create_revision, *version, *lease)
            }
            // The tombstone at the compact revision outlives the versions that it deleted, so a restore may find it
            // alone.
            ChangeKind::Delete => KeyIndex::deleted(change.row),
        };
        self.live += usize::from(key.is_live());
        self.keys.insert(change.key.clone(), key);
    }

    /// Returns the key's state at `at`, if it was live.
    pub fn get(&self, key: &[u8], at: Revision) -> Option<Entry> {
        self.keys.get(key)?.at(at)
    }

    /// Returns the rows of a key in [from, to] that no compaction has removed, oldest first. Does not walk others, from
    /// either end.
    pub fn rows(&self, key: &[u8], from: RowId, to: RowId) -> impl DoubleEndedIterator<Item = IndexedRow> {
        self.keys.get(key).into_iter().flat_map(move |index| index.rows(from, to))
    }

    /// Returns the first changes of a key at or above `from`, at most `max`, oldest first.
    pub fn changes(&self, key: &[u8], from: Revision, max: usize) -> Vec<IndexedChange> {
        let Some(index) = self.keys.get(key) else { return Vec::new() };
        let mut live = index.at(from.prev()).map(|entry| entry.version.row);
        let rows = index.rows(RowId::new(from, 0), RowId::new(Revision::MAX, u32::MAX));
        let indexed = rows.take(max).map(|IndexedRow { row, is_delete }| {
            let prev = std::mem::replace(&mut live, (!is_delete).then_some(row));
            IndexedChange { row, is_delete, prev }
        });
        indexed.collect()
    }

    /// Returns whether no key within `bounds` has a row at or above `from`. Visits at most `budget` keys; if there are
    /// more, returns false.
    pub fn is_unchanged_since(&self, bounds: KeyBounds<'_>, from: Revision, budget: usize) -> bool {
        let mut keys = self.keys.range::<[u8], _>(bounds);
        keys.by_ref().take(budget).all(|(_, index)| index.newest.row.revision < from) && keys.next().is_none()
    }

    /// Returns the keys within `bounds` that were live at `at`, in order.
    pub fn range(
        &self,
        bounds: impl RangeBounds<[u8]>,
        at: Revision,
    ) -> impl DoubleEndedIterator<Item = (&Key, Entry)> {
        self.keys.range::<[u8], _>(bounds).filter_map(move |(key, index)| Some((key, index.at(at)?)))
    }

    /// Passes the keys within `bounds` that were live at `at` to `visit`, in order. Returns the number of keys that it has
    /// looked at: those within `bounds` that have any history.
    pub fn visit(&self, bounds: KeyBounds<'_>, at: Revision, mut visit: impl FnMut(&Key, Entry)) -> usize {
        let mut visited = 0;
        for (key, index) in self.keys.range::<[u8], _>(bounds) {
            visited += 1;
            if let Some(entry) = index.at(at) {
                visit(key, entry);
            }
        }
        visited
    }

    /// Returns the first and the last key within `bounds` that have any history.
    pub fn ends(&self, bounds: KeyBounds<'_>) -> (Option<&Key>, Option<&Key>) {
        let mut keys = self.keys.range::<[u8], _>(bounds).map(|(key, _)| key);
        let first = keys.next();
        (first, keys.next_back().or(first))
    }

    /// Returns the first key within `bounds` that was live at `at`. Visits at most `budget` keys that have any history,
    /// and subtracts their number.
    pub fn first(&self, bounds: KeyBounds<'_>, at: Revision, budget: &mut usize) -> First<'_> {
        for (key, index) in self.keys.range::<[u8], _>(bounds) {
            if index.at(at).is_some() {
                return First::Found(key);
            }
            *budget = budget.saturating_sub(1);
            if *budget == 0 {
                return First::Paused(key);
            }
        }
        First::End
    }

    /// Visits at most `budget` keys within `bounds` that have any history, and passes those that were live at `at` to
    /// `visit`. Returns the last visited key if the budget ended the walk, so that the caller can release the index and
    /// continue later.
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

    /// Makes revisions below `revision` unreadable; [`TreeIndex::compact_step`] then frees their history. The compact
    /// revision never decreases.
    pub fn begin_compaction(&mut self, revision: Revision) {
        self.compact_revision = self.compact_revision.max(Some(revision));
    }

    /// Frees the history that no read at or above the compact revision needs, for at most `budget` keys, and adds its
    /// rows to `removed`. Ends earlier after a key with which it has removed [`COMPACT_STEP_ROWS`]. Returns whether keys
    /// may be left.
    pub fn compact_step(
        &mut self,
        cursor: &mut CompactionCursor,
        budget: usize,
        removed: &mut Vec<Superseded>,
    ) -> bool {
        let Some(revision) = cursor.revision.or(self.compact_revision) else { return false };
        let start = cursor.after.take().map_or(Bound::Unbounded, Bound::Excluded);
        let mut dropped = Vec::new();
        let mut last = None;
        let mut seen = 0;
        let rows_max = removed.len() + COMPACT_STEP_ROWS;
        for (key, index) in self.keys.range_mut((start, Bound::Unbounded)) {
            if index.compact(revision, removed) == Fate::Drop {
                dropped.push(key.clone());
            }
            seen += 1;
            if seen == budget || removed.len() >= rows_max {
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

/// Applies a change to its key and updates the number of live keys.
fn apply_counted(key: &mut KeyIndex, change: &Change, live: &mut usize) {
    *live -= usize::from(key.is_live());
    key.apply(change);
    *live += usize::from(key.is_live());
}

impl Default for TreeIndex {
    fn default() -> Self {
        Self::new()
    }
}
