//! Looks up in the index what a watch that is behind has missed.
//!
//! The log finds the changes of a key only by reading those of all keys, so watches of single keys would each read the
//! whole history: after a restart, each client resumes its watches from the last revision that it saw, and that of a quiet
//! watch is old.
//!
//! The index has every row from its compact revision to its head.

use std::sync::Arc;

use super::{Hub, State};
use crate::{
    index::{IndexedChange, TreeIndex},
    sync::RwLock,
    types::{Key, KeyRange, Revision},
};

/// Maximum number of keys of a range that are looked up. The hub is locked meanwhile.
const RANGE_KEYS_MAX: usize = if cfg!(test) { 3 } else { 500 };

impl Hub {
    /// Lets watches look up in `index` what they have missed. The `apply` of [`Hub::publish`], [`Hub::reset_to`] and
    /// [`Hub::record_compaction`] must change the index accordingly.
    #[must_use]
    pub(crate) fn with_index(self, index: Arc<RwLock<TreeIndex>>) -> Self {
        Self { index: Some(index), ..self }
    }

    /// Returns the first revision that a watch needs of those from `next` on: the one after the head if no key of the range
    /// has changed since `next`. Nothing is published while the hub's state is locked, so no change is missed in between.
    pub(super) fn skip_unchanged(&self, state: &State, range: &KeyRange, next: Revision) -> Revision {
        let Some(index) = &self.index else { return next };
        // A watch that begins at a compacted revision ends, whether its keys have changed or not.
        if next > state.head || state.compact_revision.is_some_and(|compacted| next < compacted) || range.is_empty() {
            return next;
        }
        let index = index.read();
        let is_unchanged =
            is_complete(&index, next, state.head) && index.is_unchanged_since(range.bounds(), next, RANGE_KEYS_MAX);
        if is_unchanged { state.head.next() } else { next }
    }

    /// Returns the first changes of a key in [from, to], at most `max`. `None`: the index may lack some of them.
    pub(in crate::watch) fn indexed_changes(
        &self,
        key: &Key,
        from: Revision,
        to: Revision,
        max: usize,
    ) -> Option<Vec<IndexedChange>> {
        let index = self.index.as_ref()?.read();
        if !is_complete(&index, from, to) {
            return None;
        }
        let mut changes = index.changes(key, from, max);
        changes.retain(|change| change.row.revision <= to);
        Some(changes)
    }
}

/// Returns whether the index has all rows in [from, to].
fn is_complete(index: &TreeIndex, from: Revision, to: Revision) -> bool {
    to <= index.head() && index.compact_revision().is_none_or(|compacted| compacted <= from)
}
