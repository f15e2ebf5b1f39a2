//! Validation of rows: each row of a key must follow from the previous one. Pure; used while the index is rebuilt and
//! by `orlop check`.
//!
//! ```text
//! put(2)              version 1, create_revision 2, prev_revision 0
//! put(4)              version 2, create_revision 2, prev_revision 2
//! delete(5)           prev_revision 4
//! put(7)              version 1, create_revision 7, prev_revision 0
//! ```
//!
//! All rows above the compact revision exist, so such a row must follow exactly from the previous row. At or below the
//! compact revision only the version that was live at that revision is certain to exist. A row there may follow a row
//! that a compaction deleted, and is valid if some deleted rows would make it valid.
//!
//! Known limit: at or below the compact revision, a wrong number is not detected if deleted rows could explain it.

use std::fmt;

use crate::types::{Change, ChangeKind, Revision, RowId};

/// The columns of a row that are validated.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ValidatedColumns {
    pub row: RowId,
    pub kind: RowKind,
    /// The revision of the version that was live before the transaction; 0 if there was none.
    pub prev_revision: Revision,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowKind {
    Put { create_revision: Revision, version: i64 },
    Delete,
}

/// A contradiction between two rows of a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Contradiction {
    Number {
        column: &'static str,
        found: i64,
        expected: i64,
    },
    /// A delete of a key that does not exist.
    NothingToDelete,
    /// The row creates the key, although no row deletes the version put at `since`.
    MissingDelete {
        since: Revision,
    },
}

impl fmt::Display for Contradiction {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Number { column, found, expected } => write!(f, "{column} is {found}, expected {expected}"),
            Self::NothingToDelete => f.write_str("it deletes a key that does not exist"),
            Self::MissingDelete { since } => {
                write!(f, "it creates the key, expected an earlier delete of the version put at revision {since}")
            }
        }
    }
}

impl ValidatedColumns {
    pub fn of(change: &Change) -> Self {
        let kind = match &change.kind {
            ChangeKind::Put { create_revision, version, .. } => {
                RowKind::Put { create_revision: *create_revision, version: *version }
            }
            ChangeKind::Delete => RowKind::Delete,
        };
        let prev_revision = change.prev.as_ref().map_or(Revision(0), |prev| prev.row.revision);
        Self { row: change.row, kind, prev_revision }
    }

    /// Checks the row against the previous row of the key, if there is one.
    ///
    /// # Errors
    ///
    /// If the row cannot follow `last`, even if rows up to and including `compacted` were deleted.
    pub fn follow(&self, last: Option<&Self>, compacted: Option<Revision>) -> Result<(), Contradiction> {
        let Err(contradiction) = self.follow_directly(last) else { return Ok(()) };
        // A compaction deletes a key's rows from the oldest to the newest. Rows between `last` and this row can
        // nevertheless be missing: several instances delete rows, and each deletes only the rows that it has found.
        let between_may_be_gone = compacted.is_some_and(|compacted| self.row.revision <= compacted)
            && last.is_none_or(|last| last.row.revision < self.row.revision && last.row.revision != self.prev_revision);
        if between_may_be_gone && self.may_follow(last) { Ok(()) } else { Err(contradiction) }
    }

    /// Checks the row as the direct successor of `last`.
    fn follow_directly(&self, last: Option<&Self>) -> Result<(), Contradiction> {
        let live = last.and_then(|last| match last.kind {
            RowKind::Put { create_revision, version } => Some((last.row.revision, create_revision, version)),
            RowKind::Delete => None,
        });
        // All changes of a key in one transaction have the same `prev_revision`, from before the transaction.
        let prev_revision = match last {
            Some(last) if last.row.revision == self.row.revision => last.prev_revision,
            _ => live.map_or(Revision(0), |(revision, ..)| revision),
        };
        let (create_revision, version) = match (self.kind, live) {
            (RowKind::Delete, None) => return Err(Contradiction::NothingToDelete),
            (RowKind::Delete, Some(_)) => return expect("prev_revision", self.prev_revision.0, prev_revision.0),
            (RowKind::Put { create_revision, version }, _) => (create_revision, version),
        };
        let created = (self.row.revision, 1, Revision(0)) == (create_revision, version, self.prev_revision);
        let (create_expected, version_expected) = match live {
            Some((since, ..)) if created && since < self.row.revision => {
                return Err(Contradiction::MissingDelete { since });
            }
            Some((_, create_revision, version)) => (create_revision, version.saturating_add(1)),
            None => (self.row.revision, 1),
        };
        expect("version", version, version_expected)?;
        expect("create_revision", create_revision.0, create_expected.0)?;
        expect("prev_revision", self.prev_revision.0, prev_revision.0)
    }

    /// Returns whether this row is valid if some rows between `last` and it were deleted.
    fn may_follow(&self, last: Option<&Self>) -> bool {
        let RowId { revision, sub } = self.row;
        let prev = self.prev_revision;
        let had_prev = prev > Revision::EMPTY && prev < revision && last.is_none_or(|last| prev > last.row.revision);
        let had_none = prev == Revision(0);
        match self.kind {
            // Without a previous version, an earlier row of the same transaction must have created the key.
            RowKind::Delete => had_prev || (had_none && sub > 0),
            RowKind::Put { create_revision, version } if create_revision == revision => {
                (had_prev && sub > 0 || had_none) && (version == 1 || (version > 1 && sub > 0))
            }
            RowKind::Put { create_revision, version } => {
                version > 1 && had_prev && create_revision > Revision::EMPTY && create_revision <= prev
            }
        }
    }
}

fn expect(column: &'static str, found: i64, expected: i64) -> Result<(), Contradiction> {
    if found == expected { Ok(()) } else { Err(Contradiction::Number { column, found, expected }) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        index::TreeIndex,
        types::{EncodedKv, Key, Version},
    };

    fn put(revision: i64, sub: u32, create_revision: i64, version: i64, prev_revision: i64) -> ValidatedColumns {
        let kind = RowKind::Put { create_revision: Revision(create_revision), version };
        ValidatedColumns { row: RowId::new(Revision(revision), sub), kind, prev_revision: Revision(prev_revision) }
    }

    fn delete(revision: i64, sub: u32, prev_revision: i64) -> ValidatedColumns {
        let row = RowId::new(Revision(revision), sub);
        ValidatedColumns { row, kind: RowKind::Delete, prev_revision: Revision(prev_revision) }
    }

    const fn number(column: &'static str, found: i64, expected: i64) -> Contradiction {
        Contradiction::Number { column, found, expected }
    }

    #[test]
    fn rows_above_the_compact_revision_follow_exactly() {
        let created = put(2, 0, 2, 1, 0);
        let deleted = delete(5, 0, 4);
        let rows: [(Option<ValidatedColumns>, ValidatedColumns, Option<Contradiction>); 16] = [
            (None, created, None),
            (Some(created), put(4, 0, 2, 2, 2), None),
            (Some(put(4, 0, 2, 2, 2)), deleted, None),
            (Some(deleted), put(7, 0, 7, 1, 0), None),
            // In one transaction: created and deleted; deleted and put; put and deleted.
            (Some(put(7, 0, 7, 1, 0)), delete(7, 1, 0), None),
            (Some(delete(7, 0, 4)), put(7, 1, 7, 1, 4), None),
            (Some(put(7, 0, 2, 3, 4)), delete(7, 2, 4), None),
            (None, put(4, 0, 2, 2, 2), Some(number("version", 2, 1))),
            (None, delete(4, 0, 2), Some(Contradiction::NothingToDelete)),
            (Some(deleted), delete(7, 0, 5), Some(Contradiction::NothingToDelete)),
            (Some(created), put(4, 0, 2, 3, 2), Some(number("version", 3, 2))),
            (Some(created), put(4, 0, 3, 2, 2), Some(number("create_revision", 3, 2))),
            (Some(created), put(4, 0, 2, 2, 3), Some(number("prev_revision", 3, 2))),
            (Some(created), put(4, 0, 4, 1, 0), Some(Contradiction::MissingDelete { since: Revision(2) })),
            (Some(deleted), put(7, 0, 7, 1, 5), Some(number("prev_revision", 5, 0))),
            (Some(put(4, 0, 2, i64::MAX, 2)), put(5, 0, 2, 1, 4), Some(number("version", 1, i64::MAX))),
        ];
        for (last, next, expected) in rows {
            for compacted in [None, Some(Revision(1)), Some(next.row.revision.prev())] {
                assert_eq!(next.follow(last.as_ref(), compacted).err(), expected, "{last:?} {next:?} {compacted:?}");
            }
        }
    }

    /// Both rows are at or below the compact revision.
    #[test]
    fn rows_left_by_compaction_are_valid() {
        let created = put(2, 0, 2, 1, 0);
        let rows: [(Option<ValidatedColumns>, ValidatedColumns, bool); 17] = [
            (None, put(9, 0, 2, 5, 8), true),
            (None, put(9, 0, 9, 1, 0), true),
            (None, put(9, 1, 9, 1, 8), true),
            (None, delete(9, 0, 8), true),
            (None, delete(9, 1, 0), true),
            (Some(created), put(9, 0, 4, 5, 8), true),
            (Some(created), put(9, 0, 9, 1, 0), true),
            (None, put(9, 0, 2, 1, 8), false),
            (None, put(9, 0, 9, 2, 0), false),
            (None, put(9, 0, 9, 0, 0), false),
            (None, put(9, 0, 1, 5, 8), false),
            (None, put(9, 0, 10, 5, 8), false),
            (None, put(9, 0, 2, 5, 9), false),
            (None, put(9, 0, 7, 5, 6), false),
            (None, delete(9, 0, 0), false),
            // `prev_revision` names `last`, so there was no row between them.
            (Some(created), put(9, 0, 2, 3, 2), false),
            (Some(put(4, 0, 2, 2, 2)), put(9, 0, 2, 3, 2), false),
        ];
        for (last, next, expected) in rows {
            let found = next.follow(last.as_ref(), Some(Revision(9)));
            assert_eq!(found.is_ok(), expected, "{last:?} {next:?}: {found:?}");
        }
    }

    /// Below the compact revision, the other instance has deleted the tombstone of the put at 2, but not the put. The
    /// key was created again above the compact revision.
    #[test]
    fn unfinished_compaction_of_another_instance_does_not_prevent_a_start() {
        let change = |columns: ValidatedColumns| {
            let RowKind::Put { create_revision, version } = columns.kind else { unreachable!("only puts are left") };
            let key = Key::from(&b"k"[..]);
            let kv = EncodedKv::new(&key, Version { row: columns.row, create_revision, version }, b"", None);
            Change { row: columns.row, key, kind: ChangeKind::put(kv), prev: None, prev_lease: None }
        };
        for (compacted, expected) in [(Some(Revision(5)), true), (Some(Revision(2)), false), (None, false)] {
            let mut index = TreeIndex::new();
            index.restore(&change(put(2, 0, 2, 1, 0)), compacted).expect("a creation needs no earlier row");
            let restored = index.restore(&change(put(9, 0, 9, 1, 0)), compacted);
            assert_eq!(restored.is_ok(), expected, "{compacted:?}: {restored:?}");
        }
    }
}
