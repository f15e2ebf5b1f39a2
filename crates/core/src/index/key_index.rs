//! The history of one key.
//!
//! A history is a list of generations. A put of an absent key starts a generation, each put adds a version to it, and a
//! delete ends it with a tombstone. The history
//!
//! ```text
//! put(2) put(4) delete(5) put(7) put(9)
//!
//! generation 1: puts 2 4, tombstone 5     closed, in `History::closed`
//! generation 2: puts 7 9                  7 in `History::earlier`, 9 in `newest`
//! ```
//!
//! reads as absent at 1, as version 1 at 2 and 3, as version 2 at 4, as absent at 5 and 6, as version 1 at 7 and 8, and
//! as version 2 from 9 on. Most keys have one version and no lease, so the newest row is stored inline, and the rest and
//! the lease behind one pointer.

use super::{RowKind, ValidatedColumns};
use crate::types::{Change, ChangeKind, LeaseId, Revision, RowId, Superseded, Version};

/// The state of a live key at a revision.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Entry {
    pub version: Version,
    pub lease: Lease,
}

/// The lease of a version. The index stores it only for the newest version.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Lease {
    Known(Option<LeaseId>),
    /// The lease of an older version is in its row.
    InRow,
}

/// The result of a compaction for a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Fate {
    Keep,
    Drop,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct KeyIndex {
    pub(super) newest: Newest,
    pub(super) history: Option<Box<History>>,
}

/// A row of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct IndexedRow {
    pub row: RowId,
    pub is_delete: bool,
}

/// The newest row of the key, packed: version 0 is a tombstone.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Newest {
    pub(super) row: RowId,
    pub(super) create_revision: Revision,
    pub(super) version: i64,
}

/// Never empty.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub(super) struct History {
    /// The lease of the newest row.
    pub(super) lease: Option<LeaseId>,
    /// Closed generations, oldest first. While the newest row is a tombstone, the last generation ends with that
    /// tombstone. If a compaction removed all rows except that tombstone, `KeyIndex::history` is `None`.
    pub(super) closed: Vec<Generation>,
    /// The puts of the open generation except the newest, oldest first. Versions are consecutive, so only the newest
    /// put's version is stored.
    pub(super) earlier: Vec<RowId>,
}

#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Generation {
    pub(super) create_revision: Revision,
    /// The version of `puts[0]`: 1 until a compaction removes the first put.
    pub(super) first_version: i64,
    /// Empty after a compaction at exactly the revision of the tombstone.
    pub(super) puts: Vec<RowId>,
    pub(super) tombstone: RowId,
}

impl KeyIndex {
    pub(super) fn created(row: RowId, create_revision: Revision, version: i64, lease: Option<LeaseId>) -> Self {
        let history = lease.is_some().then(|| Box::new(History { lease, ..History::default() }));
        Self { newest: Newest { row, create_revision, version }, history }
    }

    pub(super) fn deleted(row: RowId) -> Self {
        Self { newest: Newest::tombstone(row), history: None }
    }

    pub(super) fn put(&mut self, row: RowId, create_revision: Revision, version: i64, lease: Option<LeaseId>) {
        if !self.newest.is_tombstone() {
            self.history.get_or_insert_default().earlier.push(self.newest.row);
        } else if self.history.is_none() {
            // Only a tombstone at the compact revision was left. Its row stays in the log until the next compaction.
            self.history.get_or_insert_default().closed.push(Generation::only_tombstone(self.newest.row));
        }
        self.newest = Newest { row, create_revision, version };
        self.history.get_or_insert_default().lease = lease;
    }

    pub(super) fn delete(&mut self, row: RowId) {
        let newest = std::mem::replace(&mut self.newest, Newest::tombstone(row));
        if newest.is_tombstone() {
            return;
        }
        let history = self.history.get_or_insert_default();
        history.lease = None;
        let mut puts = std::mem::take(&mut history.earlier);
        puts.push(newest.row);
        history.closed.push(Generation {
            create_revision: newest.create_revision,
            first_version: newest.version - (puts.len() as i64 - 1),
            puts,
            tombstone: row,
        });
    }

    pub(super) fn apply(&mut self, change: &Change) {
        match &change.kind {
            ChangeKind::Put { create_revision, version, lease, .. } => {
                self.put(change.row, *create_revision, *version, *lease);
            }
            ChangeKind::Delete => self.delete(change.row),
        }
    }

    /// Returns the columns of the newest row, for validating `next`. The index does not store `prev_revision`, so that
    /// column is copied from `next`. Therefore a wrong `prev_revision` is not detected if both rows are of one
    /// transaction.
    pub(super) fn newest_columns(&self, next: &ValidatedColumns) -> ValidatedColumns {
        let Newest { row, create_revision, version, .. } = self.newest;
        let kind = if self.newest.is_tombstone() { RowKind::Delete } else { RowKind::Put { create_revision, version } };
        ValidatedColumns { row, kind, prev_revision: next.prev_revision }
    }

    /// Returns whether the key exists at the head.
    pub(super) fn is_live(&self) -> bool {
        !self.newest.is_tombstone()
    }

    pub(super) fn at(&self, at: Revision) -> Option<Entry> {
        let newest = &self.newest;
        if newest.row.revision <= at {
            let lease = Lease::Known(self.history.as_ref().and_then(|history| history.lease));
            return (!newest.is_tombstone()).then(|| Entry { version: newest.version(), lease });
        }
        self.history.as_ref()?.at(newest, at)
    }

    /// Removes the rows that no read at or above `revision` needs. Of the rows at or below `revision`, reads need only
    /// the newest, and not even that one if it is a tombstone below `revision`. Every row of exactly `revision` stays,
    /// because a watch may start there and because the log reads its head from the first row of the newest revision.
    pub(super) fn compact(&mut self, revision: Revision, removed: &mut Vec<Superseded>) -> Fate {
        if self.has_one_row() && (self.is_live() || self.newest.row.revision >= revision) {
            return Fate::Keep;
        }
        let before = removed.len();
        let fate = self.remove_before(revision, removed);
        // They are the oldest rows of the key, so the next change of each is the next of them, or the oldest that is left.
        let own = &mut removed[before..];
        own.sort_unstable();
        for at in 0..own.len() {
            let next = own.get(at + 1).map_or_else(|| self.oldest_row(), |next| next.row);
            own[at].end = own[at].end.min(next.revision);
        }
        fate
    }

    /// Returns the rows in [from, to], oldest first. Does not walk others, from either end.
    pub(super) fn rows(&self, from: RowId, to: RowId) -> impl DoubleEndedIterator<Item = IndexedRow> {
        let history = self.history.as_deref();
        let closed = history.map(|history| history.closed.as_slice()).unwrap_or_default();
        let earlier = history.map(|history| history.earlier.as_slice()).unwrap_or_default();
        let is_newest_closed = closed.last().is_some_and(|last| last.tombstone == self.newest.row);
        let has_newest = !is_newest_closed && (from..=to).contains(&self.newest.row);
        let newest = has_newest.then(|| IndexedRow { row: self.newest.row, is_delete: self.newest.is_tombstone() });
        let closed = &closed[closed.partition_point(|generation| generation.tombstone < from)..];
        let closed = &closed[..closed.partition_point(|generation| generation.oldest_row() <= to)];
        closed
            .iter()
            .flat_map(move |generation| {
                let tombstone = IndexedRow { row: generation.tombstone, is_delete: true };
                puts_within(&generation.puts, from, to).chain((tombstone.row <= to).then_some(tombstone))
            })
            .chain(puts_within(earlier, from, to))
            .chain(newest)
    }

    fn has_one_row(&self) -> bool {
        self.history.as_ref().is_none_or(|history| history.closed.is_empty() && history.earlier.is_empty())
    }

    fn oldest_row(&self) -> RowId {
        let history = self.history.as_deref();
        let in_history = history.and_then(|history| match history.closed.first() {
            Some(generation) => Some(generation.oldest_row()),
            None => history.earlier.first().copied(),
        });
        in_history.unwrap_or(self.newest.row)
    }

    /// Removes rows as [`KeyIndex::compact`] describes. The end of a removed put is not set yet.
    fn remove_before(&mut self, revision: Revision, removed: &mut Vec<Superseded>) -> Fate {
        if self.has_row_at(revision) {
            self.drop_before(revision, removed);
            return Fate::Keep;
        }
        if self.newest.row.revision > revision {
            if let Some(history) = &mut self.history {
                history.compact(revision, removed);
            }
            self.forget_empty_history();
            return Fate::Keep;
        }
        if let Some(history) = &mut self.history {
            removed.extend(std::mem::take(&mut history.earlier).into_iter().map(removed_put));
            for generation in std::mem::take(&mut history.closed) {
                removed.extend(generation.puts.into_iter().map(removed_put));
                if generation.tombstone != self.newest.row {
                    removed.push(removed_tombstone(generation.tombstone));
                }
            }
        }
        self.forget_empty_history();
        if self.newest.is_tombstone() && self.newest.row.revision < revision {
            removed.push(removed_tombstone(self.newest.row));
            return Fate::Drop;
        }
        Fate::Keep
    }

    fn has_row_at(&self, revision: Revision) -> bool {
        let in_history = |history: &History| {
            has_row_at(&history.earlier, revision)
                || history.closed.iter().any(|g| g.tombstone.revision == revision || has_row_at(&g.puts, revision))
        };
        self.newest.row.revision == revision || self.history.as_deref().is_some_and(in_history)
    }

    fn drop_before(&mut self, revision: Revision, removed: &mut Vec<Superseded>) {
        let Some(history) = &mut self.history else { return };
        history.drop_before(revision, removed);
        if let [only] = history.closed.as_slice()
            && only.puts.is_empty()
            && only.tombstone == self.newest.row
        {
            history.closed.clear();
        }
        self.forget_empty_history();
    }

    fn forget_empty_history(&mut self) {
        if self.has_one_row() && self.history.as_ref().is_some_and(|history| history.lease.is_none()) {
            self.history = None;
        }
    }
}

impl Newest {
    fn tombstone(row: RowId) -> Self {
        Self { row, create_revision: Revision(0), version: 0 }
    }

    fn is_tombstone(&self) -> bool {
        self.version == 0
    }

    fn version(&self) -> Version {
        Version { row: self.row, create_revision: self.create_revision, version: self.version }
    }
}

impl History {
    fn at(&self, newest: &Newest, at: Revision) -> Option<Entry> {
        let version = match count_until(&self.earlier, at) {
            0 => self.closed_at(at)?,
            puts => Version {
                row: self.earlier[puts - 1],
                create_revision: newest.create_revision,
                version: newest.version - (self.earlier.len() - puts + 1) as i64,
            },
        };
        Some(Entry { version, lease: Lease::InRow })
    }

    fn closed_at(&self, at: Revision) -> Option<Version> {
        // Those before have ended, and those behind begin at or above its tombstone.
        let first = self.closed.partition_point(|generation| generation.tombstone.revision <= at);
        let generation = self.closed.get(first)?;
        let newest = count_until(&generation.puts, at).checked_sub(1)?;
        Some(Version {
            row: generation.puts[newest],
            create_revision: generation.create_revision,
            version: generation.first_version + newest as i64,
        })
    }

    /// Removes all rows before `revision`, for a key with a row at `revision`, which supersedes them.
    fn drop_before(&mut self, revision: Revision, removed: &mut Vec<Superseded>) {
        let older = count_until(&self.earlier, revision.prev());
        removed.extend(self.earlier.drain(..older).map(removed_put));
        let older = self.closed.partition_point(|generation| generation.tombstone.revision < revision);
        removed.extend(self.closed.drain(..older).flat_map(Generation::into_rows));
        if let Some(generation) = self.closed.first_mut() {
            let older = count_until(&generation.puts, revision.prev());
            removed.extend(generation.puts.drain(..older).map(removed_put));
            generation.first_version += older as i64;
            if generation.puts.is_empty() {
                *generation = Generation::only_tombstone(generation.tombstone);
            }
        }
    }

    /// Compacts a key whose newest row is above `revision` and that has no row at `revision`.
    fn compact(&mut self, revision: Revision, removed: &mut Vec<Superseded>) {
        let puts = count_until(&self.earlier, revision);
        if puts > 0 {
            removed.extend(self.earlier.drain(..puts - 1).map(removed_put));
            removed.extend(self.closed.drain(..).flat_map(Generation::into_rows));
            return;
        }
        // Of the generations that start at or below the revision, only the newest can contain rows to keep.
        let Some(pivot) = self.closed.iter().rposition(|generation| generation.starts_at_or_below(revision)) else {
            return;
        };
        removed.extend(self.closed.drain(..pivot).flat_map(Generation::into_rows));
        let generation = &mut self.closed[0];
        if generation.tombstone.revision < revision {
            removed.extend(self.closed.remove(0).into_rows());
        } else {
            let puts = count_until(&generation.puts, revision);
            removed.extend(generation.puts.drain(..puts - 1).map(removed_put));
            generation.first_version += puts as i64 - 1;
        }
    }
}

impl Generation {
    /// Returns the generation that remains after a compaction at exactly the revision of its tombstone.
    fn only_tombstone(tombstone: RowId) -> Self {
        Self { create_revision: Revision(0), first_version: 1, puts: Vec::new(), tombstone }
    }

    fn oldest_row(&self) -> RowId {
        *self.puts.first().unwrap_or(&self.tombstone)
    }

    fn starts_at_or_below(&self, revision: Revision) -> bool {
        self.oldest_row().revision <= revision
    }

    fn into_rows(self) -> impl Iterator<Item = Superseded> {
        self.puts.into_iter().map(removed_put).chain([removed_tombstone(self.tombstone)])
    }
}

/// Returns a put whose end is not known yet.
fn removed_put(row: RowId) -> Superseded {
    Superseded { row, end: Revision::MAX }
}

fn removed_tombstone(row: RowId) -> Superseded {
    Superseded { row, end: row.revision }
}

fn has_row_at(rows: &[RowId], revision: Revision) -> bool {
    count_until(rows, revision) > count_until(rows, revision.prev())
}

/// Returns the puts in [from, to], as [`KeyIndex::rows`] does.
fn puts_within(puts: &[RowId], from: RowId, to: RowId) -> impl DoubleEndedIterator<Item = IndexedRow> {
    let puts = &puts[puts.partition_point(|row| *row < from)..];
    let puts = &puts[..puts.partition_point(|row| *row <= to)];
    puts.iter().map(|row| IndexedRow { row: *row, is_delete: false })
}

/// Returns the number of rows at or below the revision.
fn count_until(rows: &[RowId], revision: Revision) -> usize {
    rows.partition_point(|row| row.revision <= revision)
}

#[cfg(test)]
mod tests;
