//! The rows of another store, made into those of a log.
//!
//! A log keeps more rules than the stores of etcd and kine: above the compact revision every revision has a change, and
//! every row follows from the one before. Where a store has a revision without a change, everything up to it becomes
//! compacted, so that no reader sees the hole. Of the compact revision itself a log has all changes; those that the
//! store's compaction has removed are replaced by deletes of keys that do not exist.

use std::{cmp::Ordering, collections::BTreeMap};

use orlop_core::{
    auth::AuthState,
    index::{RowKind, ValidatedColumns},
    log::{self, AuthMark, Load, LoggedLease, Meta, Position},
    store::ROW_BYTES,
    types::{Change, ChangeKind, Key, Prev, Revision, RowId, shown},
};

/// Bytes of keys and values after which a batch of rows is added, and the maximum number of its rows.
const BATCH_BYTES: usize = 1 << 20;
const BATCH_ROWS: usize = 512;
/// Maximum number of changes that the compact revision may lack. They take time and memory, and a small file can state any
/// number.
const MISSING_MAX: u32 = 1 << 16;
/// The beginning of the keys of their replacements; the rest is a number of 8 bytes.
const REPLACEMENT_PREFIX: &[u8] = b"\0missing change ";
/// The lowest revision that can be a compact revision without changes: a delete there needs a revision before it.
const COMPACTED_MIN: Revision = Revision(3);

/// A row of another store.
#[derive(Debug)]
pub struct StoredRow {
    pub row: RowId,
    /// `None`: a revision without a change.
    pub change: Option<(Key, ChangeKind)>,
}

/// The newest revision of a log, and its compact revision.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Bounds {
    pub head: Revision,
    pub compacted: Option<Revision>,
}

/// The highest revision of a log that is loaded. Many more follow than a store ever writes.
pub const HEAD_MAX: Revision = Revision(1 << 62);
/// The highest version of a key that is loaded. It grows no faster than the revision.
pub const VERSION_MAX: i64 = HEAD_MAX.0;

impl Bounds {
    /// Returns the bounds of a log that is made from a store with the newest revision `head`. Everything up to the compact
    /// revision and up to the last revision without a change is compacted.
    pub fn new(head: Revision, compacted: Option<Revision>, last_hole: Option<Revision>) -> Self {
        let mut bounds = Self { head, compacted: compacted.max(last_hole.filter(|hole| Some(*hole) > compacted)) };
        // The store may have no change at its compact revision.
        let may_lack_change = bounds.compacted == Some(head) || bounds.compacted == last_hole;
        if may_lack_change && bounds.compacted.is_some() {
            bounds.compacted = bounds.compacted.max(Some(COMPACTED_MIN));
            bounds.head = head.max(COMPACTED_MIN);
        }
        bounds
    }

    /// Returns the state of the log of a new cluster.
    pub fn meta(self, leases: Vec<LoggedLease>, auth: &AuthState) -> Meta {
        Meta {
            cluster_id: 0,
            member_id: 0,
            position: Position { head: self.head, epoch: 0, server: 0 },
            compact_revision: self.compacted.filter(|revision| *revision > Revision(0)),
            leases,
            alarms: Vec::new(),
            auth: AuthMark::of(auth),
            source: None,
        }
    }
}

/// The newest row of each key. A tree takes less memory than a hash table, which doubles when it grows.
pub type NewestRows = BTreeMap<Key, ValidatedColumns>;

/// Makes the rows of a log, in order. Below the compact revision these are the rows of the pairs that were live there.
pub struct Rows {
    /// The newest row of each key: at the compact revision, until the rows above it are read.
    newest: NewestRows,
    compacted: Option<Revision>,
    /// The newest rows of the keys that the compact revision changes.
    at_compacted: NewestRows,
    /// The number of the next change of the compact revision; `None` when it is complete.
    next_sub: Option<u32>,
    /// The number of changes of the compact revision that were missing so far.
    missing: u32,
    batch: Vec<Change>,
    /// Bytes of keys and values in `batch`.
    bytes: usize,
    /// Bytes of all rows so far, about, as they count toward the quota.
    total: i64,
}

impl Rows {
    pub fn new(newest: NewestRows, compacted: Option<Revision>) -> Self {
        let next_sub = compacted.filter(|revision| *revision > Revision::EMPTY).map(|_| 0);
        Self {
            newest,
            compacted,
            at_compacted: NewestRows::new(),
            next_sub,
            missing: 0,
            batch: Vec::new(),
            bytes: 0,
            total: 0,
        }
    }

    /// Returns the size of all rows that were added so far in bytes, about, as it counts toward the quota.
    pub fn size(&self) -> i64 {
        self.total
    }

    /// # Errors
    ///
    /// If the row contradicts the one before of its key, or the compact revision lacks more changes than [`MISSING_MAX`].
    pub fn add(&mut self, StoredRow { row, change }: StoredRow) -> std::result::Result<(), String> {
        let Some((key, kind)) = change else { return Ok(()) };
        let prev = match Some(row.revision).cmp(&self.compacted) {
            Ordering::Less => {
                let is_live = self.newest.get(&key).is_some_and(|newest| newest.row == row);
                if !is_live || matches!(kind, ChangeKind::Delete) {
                    return Ok(());
                }
                self.before_compacted(&key, row, &kind)?
            }
            Ordering::Equal => {
                self.count_missing(row)?;
                self.fill(row.sub);
                self.next_sub = Some(row.sub.saturating_add(1));
                self.before_compacted(&key, row, &kind)?
            }
            Ordering::Greater => {
                self.complete();
                self.before(&key, row, &kind)?
            }
        };
        self.push(row, key, kind, prev);
        Ok(())
    }

    fn push(&mut self, row: RowId, key: Key, kind: ChangeKind, prev: Revision) {
        let pair_bytes = if let ChangeKind::Put { kv, .. } = &kind { kv.len() } else { 0 };
        self.bytes += key.len() + pair_bytes;
        self.total += key.len().max(pair_bytes) as i64 + ROW_BYTES;
        let prev = (prev > Revision(0)).then(|| Prev { row: RowId::new(prev, 0), kv: None });
        self.batch.push(Change { row, key, kind, prev, prev_lease: None });
    }

    /// Ends the compact revision, which has at least one change. After the last row this makes the revision complete.
    pub fn complete(&mut self) {
        if self.next_sub == Some(0) {
            self.fill(1);
        }
        self.next_sub = None;
    }

    /// Adds the missing changes of the compact revision before a number. Nobody sees them, because they are compacted.
    fn fill(&mut self, end: u32) {
        let (Some(revision), Some(start)) = (self.compacted, self.next_sub) else { return };
        for sub in start..end {
            let key = self.unused_key(sub);
            self.push(RowId::new(revision, sub), key, ChangeKind::Delete, revision.prev());
        }
    }

    /// Returns a key that does not exist, another one for each number.
    fn unused_key(&self, sub: u32) -> Key {
        let mut number = u64::from(sub);
        loop {
            let key = [REPLACEMENT_PREFIX, &number.to_be_bytes()].concat();
            if !self.newest.contains_key(key.as_slice()) && !self.at_compacted.contains_key(key.as_slice()) {
                return Key::from(key);
            }
            // The lower half remains that of `sub`.
            number = number.wrapping_add(1 << 32);
        }
    }

    fn count_missing(&mut self, row: RowId) -> std::result::Result<(), String> {
        let missing = self.next_sub.map_or(0, |next| row.sub.saturating_sub(next));
        self.missing = self.missing.saturating_add(missing);
        if self.missing > MISSING_MAX {
            return Err(format!(
                "the compact revision {} lacks {} changes before its change {}; at most {MISSING_MAX} may be missing",
                row.revision, self.missing, row.sub
            ));
        }
        Ok(())
    }

    /// Returns the revision of the version that a row at or below the compact revision replaced. It is gone, so any
    /// revision will do at which it may have been.
    fn before_compacted(&mut self, key: &Key, row: RowId, kind: &ChangeKind) -> std::result::Result<Revision, String> {
        let last = self.at_compacted.get(key);
        let prev = match (last, kind) {
            (Some(last), _) => last.prev_revision,
            (None, ChangeKind::Put { create_revision, .. }) if *create_revision < row.revision => *create_revision,
            (None, ChangeKind::Put { .. }) => Revision(0),
            (None, ChangeKind::Delete) => row.revision.prev(),
        };
        let columns = columns(row, kind, prev);
        columns.follow(last, self.compacted).map_err(|error| contradiction(key, row, &error))?;
        if Some(row.revision) == self.compacted {
            self.at_compacted.insert(key.clone(), columns);
        }
        Ok(prev)
    }

    fn before(&mut self, key: &Key, row: RowId, kind: &ChangeKind) -> std::result::Result<Revision, String> {
        let last = self.newest.get(key);
        let prev = last.map_or(Revision(0), |last| match last.kind {
            _ if last.row.revision == row.revision => last.prev_revision,
            RowKind::Put { .. } => last.row.revision,
            RowKind::Delete => Revision(0),
        });
        let columns = columns(row, kind, prev);
        columns.follow(last, self.compacted).map_err(|error| contradiction(key, row, &error))?;
        match self.newest.get_mut(key) {
            Some(newest) => *newest = columns,
            None => drop(self.newest.insert(key.clone(), columns)),
        }
        Ok(prev)
    }

    /// Adds the rows to a database if they are enough for a batch.
    ///
    /// # Errors
    ///
    /// If the database cannot be written.
    pub async fn flush_full(&mut self, into: &mut dyn Load) -> log::Result<()> {
        match self.take_full() {
            Some(batch) => into.add(&batch).await,
            None => Ok(()),
        }
    }

    /// Returns the rows if they are enough for a batch.
    pub fn take_full(&mut self) -> Option<Vec<Change>> {
        (self.bytes >= BATCH_BYTES || self.batch.len() >= BATCH_ROWS).then(|| self.take())
    }

    /// Adds the last rows to a database.
    ///
    /// # Errors
    ///
    /// If the database cannot be written.
    pub async fn finish(mut self, into: &mut dyn Load) -> log::Result<()> {
        self.complete();
        into.add(&self.take()).await
    }

    fn take(&mut self) -> Vec<Change> {
        self.bytes = 0;
        std::mem::take(&mut self.batch)
    }
}

fn columns(row: RowId, kind: &ChangeKind, prev_revision: Revision) -> ValidatedColumns {
    let kind = match kind {
        ChangeKind::Put { create_revision, version, .. } => {
            RowKind::Put { create_revision: *create_revision, version: *version }
        }
        ChangeKind::Delete => RowKind::Delete,
    };
    ValidatedColumns { row, kind, prev_revision }
}

fn contradiction(key: &Key, row: RowId, error: &impl std::fmt::Display) -> String {
    format!("revision {}, change {}, key \"{}\": {error}", row.revision, row.sub, shown(key))
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use orlop_core::types::{EncodedKv, Version};

    use super::*;

    #[test]
    fn revisions_without_a_change_are_compacted() {
        // Head, compact revision and last hole of the store; head and compact revision of the log; 0: none.
        for (head, compacted, hole, expected) in [
            (1, 0, 0, (1, 0)),
            (9, 0, 0, (9, 0)),
            (9, 5, 0, (9, 5)),
            (9, 5, 4, (9, 5)),
            (9, 5, 7, (9, 7)),
            (9, 9, 0, (9, 9)),
            (9, 0, 9, (9, 9)),
            (9, 2, 0, (9, 2)),
            (9, 0, 2, (9, 3)),
            (2, 0, 2, (3, 3)),
            (1, 1, 0, (3, 3)),
        ] {
            let some = |revision: i64| (revision > 0).then_some(Revision(revision));
            let found = Bounds::new(Revision(head), some(compacted), some(hole));
            let expected = Bounds { head: Revision(expected.0), compacted: some(expected.1) };
            assert_eq!(found, expected, "{head} {compacted} {hole}");
        }
    }

    const COMPACTED: Revision = Revision(10);

    /// Adds a change of the compact revision: the put of a new key.
    fn add(rows: &mut Rows, sub: u32) -> std::result::Result<(), String> {
        let (row, key) = (RowId::new(COMPACTED, sub), format!("key {sub}"));
        let version = Version { row, create_revision: COMPACTED, version: 1 };
        let put = ChangeKind::put(EncodedKv::new(key.as_bytes(), version, b"", None));
        rows.add(StoredRow { row, change: Some((Key::from(key.into_bytes()), put)) })
    }

    #[test]
    fn missing_changes_of_the_compact_revision_are_deletes_of_unused_keys() {
        let used = Key::from([REPLACEMENT_PREFIX, &1_u64.to_be_bytes()].concat());
        let before = columns(RowId::new(Revision(5), 0), &ChangeKind::Delete, Revision(4));
        let mut rows = Rows::new(NewestRows::from([(used.clone(), before)]), Some(COMPACTED));
        for sub in [2, 3, 6] {
            assert_eq!(add(&mut rows, sub), Ok(()));
        }
        let changes = rows.take();
        let subs: Vec<(u32, bool)> = changes.iter().map(|change| (change.row.sub, change.is_delete())).collect();
        assert_eq!(subs, [(0, true), (1, true), (2, false), (3, false), (4, true), (5, true), (6, false)]);
        let keys: BTreeSet<&[u8]> = changes.iter().map(|change| change.key.as_slice()).collect();
        assert!(keys.len() == changes.len() && !keys.contains(used.as_slice()), "{keys:?}");
    }

    #[test]
    fn too_many_missing_changes_are_refused() {
        let max = MISSING_MAX;
        // Numbers of changes, and the number that is missing if it is too large.
        for (subs, refused) in [
            (&[max][..], None),
            (&[max + 1], Some(max + 1)),
            (&[max - 1, max + 1], None),
            (&[max - 1, max + 2], Some(max + 1)),
            (&[u32::MAX], Some(u32::MAX)),
        ] {
            let mut rows = Rows::new(NewestRows::new(), Some(COMPACTED));
            let added = subs.iter().try_for_each(|sub| add(&mut rows, *sub));
            let expected = refused.map(|missing| format!("the compact revision 10 lacks {missing} changes before"));
            match (&added, &expected) {
                (Ok(()), None) => {}
                (Err(error), Some(expected)) if error.starts_with(expected.as_str()) => {}
                (found, expected) => panic!("{subs:?}: {found:?} instead of {expected:?}"),
            }
        }
    }
}
