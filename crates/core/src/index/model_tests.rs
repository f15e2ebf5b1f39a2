//! Tests the index against a naive model: one list of all changes, which every query scans.
//!
//! Histories are random, but small and with few keys, so that keys are deleted and created again, tombstones are at
//! compact revisions, and every revision of a history can be compacted and read. proptest prints a minimal failing
//! history.

use std::{
    collections::BTreeSet,
    ops::{Bound, RangeBounds},
};

use proptest::{collection::vec, prelude::*, sample::Index};

use super::{COMPACT_STEP_ROWS, CompactionCursor, Entry, Lease, ReadAt, SavedIndexLoader, TreeIndex, Unreadable};
use crate::types::{Change, ChangeKind, EncodedKv, Key, LeaseId, Revision, RowId, Superseded, Version};

const KEYS: [&str; 6] = ["a", "a\0", "ab", "b", "ba", "c"];

/// One or two operations on a key. As in etcd, a transaction may delete a key and then put it, or put it and then
/// delete it (with a range to the end of the key space), but not put it twice.
#[derive(Clone, Copy, Debug)]
enum Op {
    Put { key: usize, lease: i64 },
    Delete { key: usize },
    DeleteAndPut { key: usize, lease: i64 },
    PutAndDelete { key: usize, lease: i64 },
}

/// All changes in order, and the effects of compactions.
#[derive(Clone, Debug, Default)]
struct Model {
    changes: Vec<Change>,
    compact_revision: Option<Revision>,
    /// Rows removed by compactions.
    compacted_rows: BTreeSet<RowId>,
}

type Bounds = (Bound<Vec<u8>>, Bound<Vec<u8>>);
type Checked = Result<(), TestCaseError>;

proptest! {
    #[test]
    fn index_equals_the_model_at_every_revision(history in histories(14)) {
        let model = Model::of(&history);
        check_reads(&model.index(), &model)?;
    }

    #[test]
    fn ranges_and_walks_equal_the_model(
        history in histories(14),
        bounds in bounds(),
        budget in 1..8_usize,
    ) {
        let model = Model::of(&history);
        let index = model.index();
        for at in model.readable() {
            check_range(&index, &model, &bounds, at)?;
            check_walk(&index, &model, &bounds, at, budget)?;
        }
    }

    #[test]
    fn compaction_at_every_revision_keeps_only_readable_versions(
        history in histories(10),
        budget in budgets(),
    ) {
        let model = Model::of(&history);
        for revision in model.revisions() {
            let (mut model, mut index) = (model.clone(), model.index());
            check_compaction(&mut index, &mut model, revision, budget)?;
        }
    }

    #[test]
    fn repeated_compactions_keep_only_readable_versions(
        history in histories(14),
        revisions in vec(any::<Index>(), 1..5),
        budget in budgets(),
    ) {
        let mut model = Model::of(&history);
        let mut index = model.index();
        let all: Vec<_> = model.revisions().collect();
        let mut revisions: Vec<_> = revisions.iter().map(|index| *index.get(&all)).collect();
        revisions.sort_unstable();
        for revision in revisions {
            check_compaction(&mut index, &mut model, revision, budget)?;
        }
    }

    #[test]
    fn history_continues_unchanged_after_each_compaction(
        parts in vec((histories(6), any::<Index>()), 1..5),
        budget in budgets(),
    ) {
        let mut model = Model::default();
        let mut index = TreeIndex::new();
        for (history, revision) in parts {
            let known = model.changes.len();
            history.iter().for_each(|ops| model.commit(ops));
            model.changes[known..].iter().for_each(|change| index.apply(change));
            let readable: Vec<_> = model.readable().collect();
            check_compaction(&mut index, &mut model, *revision.get(&readable), budget)?;
        }
    }

    #[test]
    fn changes_between_compaction_steps_equal_the_model(
        history in histories(8),
        later in histories(8),
        revision in any::<Index>(),
        budget in 1..3_usize,
    ) {
        let mut model = Model::of(&history);
        let mut index = model.index();
        let all: Vec<_> = model.revisions().collect();
        let revision = *revision.get(&all);
        index.begin_compaction(revision);
        model.compact_revision = Some(revision);
        let (mut cursor, mut removed) = (CompactionCursor::default(), Vec::new());
        let mut later = later.iter();
        while index.compact_step(&mut cursor, budget, &mut removed) {
            let known = model.changes.len();
            later.next().into_iter().for_each(|ops| model.commit(ops));
            model.changes[known..].iter().for_each(|change| index.apply(change));
            check_reads(&index, &model)?;
        }
        check_removed(&removed, &mut model)?;
        check_reads(&index, &model)?;
        check_rebuilt(&index, &model)?;
    }

    #[test]
    fn index_saved_between_changes_equals_the_model(
        histories in vec(histories(8), 1..4),
        compacted in any::<Index>(),
        keys_max in 1..4_usize,
        part_keys in 1..6_usize,
    ) {
        let mut model = Model::of(&histories[0]);
        let mut index = model.index();
        let readable: Vec<_> = model.readable().collect();
        check_compaction(&mut index, &mut model, *compacted.get(&readable), usize::MAX)?;
        let (head, mut later) = (index.head(), histories[1..].iter().flatten());
        let (mut loader, mut after) = (SavedIndexLoader::in_parts_of(part_keys), None);
        loop {
            let mut block = Vec::new();
            after = index.save_step(after.as_ref(), keys_max, &mut block);
            loader.add(&block)?;
            if after.is_none() {
                break;
            }
            let known = model.changes.len();
            later.next().into_iter().for_each(|ops| model.commit(ops));
            model.changes[known..].iter().for_each(|change| index.apply(change));
        }
        let mut loaded = loader.finish(head, index.compact_revision());
        for change in model.changes.iter().filter(|change| change.row.revision >= head) {
            // Like `restore`; the changes of the model have no previous revision.
            loaded.advance_head(change);
            if loaded.keys.get(&change.key).is_none_or(|key| key.newest.row < change.row) {
                loaded.apply(change);
            }
        }
        prop_assert_eq!(&loaded, &index);
        check_reads(&loaded, &model)?;
    }

    #[test]
    fn parts_of_blocks_and_other_bytes_are_refused_or_have_fewer_keys(
        history in histories(8),
        at in any::<Index>(),
        bytes in vec(any::<u8>(), 0..40),
    ) {
        let index = Model::of(&history).index();
        let mut block = vec![];
        index.save_step(None, usize::MAX, &mut block);
        let mut loader = SavedIndexLoader::new(0);
        if !block.is_empty() && loader.add(&block[..at.index(block.len())]).is_ok() {
            prop_assert!(loader.finish(index.head(), None).len() < index.len());
        }
        // Any bytes: no panic.
        let _ = SavedIndexLoader::new(0).add(&bytes);
    }
}

#[test]
fn older_compaction_does_not_lower_the_compact_revision() {
    let mut index = Model::of(&[vec![Op::Put { key: 0, lease: 0 }], vec![Op::Put { key: 0, lease: 0 }]]).index();
    index.begin_compaction(Revision(3));
    index.begin_compaction(Revision(2));
    assert_eq!(index.compact_revision(), Some(Revision(3)));
    assert_eq!(index.resolve(ReadAt::Revision(Revision(2))), Err(Unreadable::Compacted));
}

#[test]
fn compaction_step_ends_after_many_rows_of_few_keys() {
    // A compaction at the head removes all but one.
    let versions = COMPACT_STEP_ROWS as i64 / 2 + 1;
    let (mut index, mut rebuilt) = (TreeIndex::new(), TreeIndex::new());
    for name in b'0'..=b'9' {
        let create_revision = index.head().next();
        for version in 1..=versions {
            let row = RowId::new(index.head().next(), 0);
            let kv = EncodedKv::new(&[name], Version { row, create_revision, version }, b"", None);
            let (key, kind) = (Key::from(vec![name]), ChangeKind::put(kv));
            let change = Change { row, key, kind, prev: None, prev_lease: None };
            index.apply(&change);
            if version == versions {
                rebuilt.apply(&change);
            }
        }
    }
    index.begin_compaction(index.head());
    rebuilt.begin_compaction(index.head());
    let (mut cursor, mut removed, mut steps) = (CompactionCursor::default(), Vec::new(), 0);
    while index.compact_step(&mut cursor, usize::MAX, &mut removed) {
        steps += 1;
        assert_eq!(removed.len(), steps * COMPACT_STEP_ROWS, "a step is of two keys");
    }
    assert_eq!((steps, removed.len()), (5, 5 * COMPACT_STEP_ROWS));
    assert_eq!(index, rebuilt);
}

/// Generates transactions of a few operations on different keys. An operation may change nothing.
fn histories(transactions_max: usize) -> impl Strategy<Value = Vec<Vec<Op>>> {
    let op = (0..KEYS.len(), 0..3_i64, 0..8_u32).prop_map(|(key, lease, kind)| match kind {
        0..4 => Op::Put { key, lease },
        4..6 => Op::Delete { key },
        6 => Op::PutAndDelete { key, lease },
        _ => Op::DeleteAndPut { key, lease },
    });
    let transaction = vec(op, 1..5).prop_map(|mut ops| {
        let mut seen = BTreeSet::new();
        ops.retain(|op| seen.insert(op.key()));
        ops
    });
    vec(transaction, 1..=transactions_max)
}

/// Generates bounds that an ordered map accepts: the start is not after the end.
fn bounds() -> impl Strategy<Value = Bounds> {
    let key = proptest::sample::select(vec!["", "a", "a\0", "aa", "ab", "b", "ba", "bb", "c", "d"]);
    (key.clone(), key, 0..3_u8, 0..3_u8).prop_map(|(a, b, start_kind, end_kind)| {
        let bound = |key: &str, kind| match kind {
            0 => Bound::Included(key.as_bytes().to_vec()),
            1 if a != b => Bound::Excluded(key.as_bytes().to_vec()),
            _ => Bound::Unbounded,
        };
        (bound(a.min(b), start_kind), bound(a.max(b), end_kind))
    })
}

/// Generates the budget of a compaction step: one key, a few keys or all keys.
fn budgets() -> impl Strategy<Value = usize> {
    prop_oneof![1..8_usize, Just(usize::MAX)]
}

fn check_reads(index: &TreeIndex, model: &Model) -> Checked {
    prop_assert_eq!(index.head(), model.head());
    prop_assert_eq!(index.resolve(ReadAt::Latest), Ok(model.head()));
    prop_assert_eq!(index.live(), model.range(&(Bound::Unbounded, Bound::Unbounded), model.head()).len());
    for at in (0..model.head().0 + 3).map(Revision) {
        prop_assert_eq!(index.resolve(ReadAt::Revision(at)), model.resolve(at), "resolving {}", at);
    }
    for at in model.readable() {
        for key in KEYS {
            prop_assert_eq!(index.get(key.as_bytes(), at), model.get(key.as_bytes(), at), "{:?} at {}", key, at);
        }
        prop_assert_eq!(index.get(b"never written", at), None);
        check_range(index, model, &(Bound::Unbounded, Bound::Unbounded), at)?;
    }
    Ok(())
}

fn check_range(index: &TreeIndex, model: &Model, bounds: &Bounds, at: Revision) -> Checked {
    let mut expected = model.range(bounds, at);
    let found: Vec<_> = index.range(borrowed(bounds), at).map(|(key, entry)| (key.clone(), entry)).collect();
    prop_assert_eq!(&found, &expected, "{:?} at {}", bounds, at);
    let backwards: Vec<_> = index.range(borrowed(bounds), at).rev().map(|(key, entry)| (key.clone(), entry)).collect();
    expected.reverse();
    prop_assert_eq!(backwards, expected, "{:?} at {}, backwards", bounds, at);
    Ok(())
}

fn check_walk(index: &TreeIndex, model: &Model, bounds: &Bounds, at: Revision, budget: usize) -> Checked {
    let mut found = Vec::new();
    let mut start = bounds.0.clone();
    loop {
        let before = found.len();
        let rest = (start, bounds.1.clone());
        let last = index.walk(borrowed(&rest), at, budget, |key, entry| found.push((key.clone(), entry)));
        prop_assert!(found.len() - before <= budget);
        let Some(last) = last else { break };
        start = Bound::Excluded(last.to_vec());
    }
    prop_assert_eq!(found, model.range(bounds, at), "{:?} at {} by {}", bounds, at, budget);
    Ok(())
}

/// Compacts both at `revision` and compares them.
fn check_compaction(index: &mut TreeIndex, model: &mut Model, revision: Revision, budget: usize) -> Checked {
    index.begin_compaction(revision);
    model.compact_revision = Some(revision);
    prop_assert_eq!(index.compact_revision(), Some(revision));
    check_reads(index, model)?;
    check_removed(&compact_to_the_end(index, budget), model)?;
    check_reads(index, model)?;
    check_rebuilt(index, model)
}

/// Checks that a compaction removed exactly the rows that the model removes, each once.
fn check_removed(removed: &[Superseded], model: &mut Model) -> Checked {
    let mut removed = removed.to_vec();
    removed.sort_unstable();
    prop_assert_eq!(removed, model.remove_garbage(), "removed by the compaction at {:?}", model.compact_revision);
    Ok(())
}

/// Checks that an index rebuilt from the remaining rows, as after a restart, equals the compacted index.
fn check_rebuilt(index: &TreeIndex, model: &Model) -> Checked {
    let mut rebuilt = TreeIndex::new();
    model.survivors().for_each(|change| rebuilt.apply(change));
    if let Some(revision) = model.compact_revision {
        rebuilt.begin_compaction(revision);
    }
    let removed = compact_to_the_end(&mut rebuilt, usize::MAX);
    prop_assert_eq!(removed, vec![], "the remaining rows contain no garbage");
    prop_assert_eq!(&rebuilt, index);
    Ok(())
}

fn compact_to_the_end(index: &mut TreeIndex, budget: usize) -> Vec<Superseded> {
    let (mut cursor, mut removed) = (CompactionCursor::default(), Vec::new());
    while index.compact_step(&mut cursor, budget, &mut removed) {}
    removed
}

impl Model {
    fn of(history: &[Vec<Op>]) -> Self {
        let mut model = Self::default();
        history.iter().for_each(|ops| model.commit(ops));
        model
    }

    /// Applies a transaction at one revision. A transaction that changes nothing uses no revision.
    fn commit(&mut self, ops: &[Op]) {
        let revision = self.head().next();
        let mut sub = 0;
        let mut next_row = || {
            let row = RowId::new(revision, sub);
            sub += 1;
            row
        };
        for op in ops {
            let live = self.newest(op.key()).is_some_and(|change| !change.is_delete());
            match *op {
                Op::Put { key, lease } => self.put(next_row(), key, lease),
                Op::Delete { key } if live => self.delete(next_row(), key),
                Op::Delete { .. } => {}
                Op::DeleteAndPut { key, lease } => {
                    if live {
                        self.delete(next_row(), key);
                    }
                    self.put(next_row(), key, lease);
                }
                Op::PutAndDelete { key, lease } => {
                    self.put(next_row(), key, lease);
                    self.delete(next_row(), key);
                }
            }
        }
    }

    fn put(&mut self, row: RowId, number: usize, lease: i64) {
        let (create_revision, version) = match self.newest(number).map(|change| &change.kind) {
            Some(ChangeKind::Put { create_revision, version, .. }) => (*create_revision, version + 1),
            Some(ChangeKind::Delete) | None => (row.revision, 1),
        };
        let (key, lease) = (key(number), LeaseId::from_wire(lease));
        let kind = ChangeKind::put(EncodedKv::new(&key, Version { row, create_revision, version }, b"value", lease));
        self.changes.push(Change { row, key, kind, prev: None, prev_lease: None });
    }

    fn delete(&mut self, row: RowId, number: usize) {
        self.changes.push(Change { row, key: key(number), kind: ChangeKind::Delete, prev: None, prev_lease: None });
    }

    fn index(&self) -> TreeIndex {
        let mut index = TreeIndex::new();
        self.changes.iter().for_each(|change| index.apply(change));
        index
    }

    fn head(&self) -> Revision {
        self.changes.last().map_or(Revision::EMPTY, |change| change.row.revision)
    }

    fn revisions(&self) -> impl Iterator<Item = Revision> + use<> {
        (0..=self.head().0).map(Revision)
    }

    fn readable(&self) -> impl Iterator<Item = Revision> + use<> {
        let from = self.compact_revision.unwrap_or(Revision(0));
        (from.0..=self.head().0).map(Revision)
    }

    fn resolve(&self, at: Revision) -> Result<Revision, Unreadable> {
        if at > self.head() {
            Err(Unreadable::Future)
        } else if self.compact_revision.is_some_and(|compacted| at < compacted) {
            Err(Unreadable::Compacted)
        } else {
            Ok(at)
        }
    }

    fn newest(&self, number: usize) -> Option<&Change> {
        let key = key(number);
        self.changes.iter().rfind(|change| change.key == key)
    }

    fn get(&self, key: &[u8], at: Revision) -> Option<Entry> {
        let mut of_key = self.changes.iter().filter(|change| change.key.as_slice() == key);
        let newest = of_key.clone().next_back()?.row;
        let Change { row, kind, .. } = of_key.rfind(|change| change.row.revision <= at)?;
        let ChangeKind::Put { create_revision, version, lease, .. } = kind else { return None };
        let lease = if *row == newest { Lease::Known(*lease) } else { Lease::InRow };
        Some(Entry { version: Version { row: *row, create_revision: *create_revision, version: *version }, lease })
    }

    fn range(&self, bounds: &Bounds, at: Revision) -> Vec<(Key, Entry)> {
        let keys: BTreeSet<_> = self.changes.iter().map(|change| &change.key).collect();
        let inside = keys.into_iter().filter(|key| bounds.contains(&key.to_vec()));
        inside.filter_map(|key| Some((key.clone(), self.get(key, at)?))).collect()
    }

    /// Removes the garbage rows that were not removed before, and returns them in order.
    fn remove_garbage(&mut self) -> Vec<Superseded> {
        let garbage = self.changes.iter().filter(|change| self.is_garbage(change));
        let garbage = garbage.filter(|change| !self.compacted_rows.contains(&change.row));
        let garbage: Vec<Superseded> =
            garbage.map(|change| Superseded { row: change.row, end: self.end(change) }).collect();
        self.compacted_rows.extend(garbage.iter().map(|it| it.row));
        garbage
    }

    /// Returns the first revision whose state does not contain a row.
    fn end(&self, change: &Change) -> Revision {
        let next = self.changes.iter().find(|other| other.key == change.key && other.row > change.row);
        let own = change.row.revision;
        if change.is_delete() { own } else { next.map_or(Revision::MAX, |next| next.row.revision) }
    }

    /// A row below the compact revision is garbage if it is a tombstone, or if its key has a newer row at or below the
    /// compact revision.
    fn is_garbage(&self, change: &Change) -> bool {
        let Some(compacted) = self.compact_revision else { return false };
        let newer = |other: &&Change| other.key == change.key && other.row > change.row;
        let superseded = || self.changes.iter().filter(newer).any(|newer| newer.row.revision <= compacted);
        change.row.revision < compacted && (change.is_delete() || superseded())
    }

    fn survivors(&self) -> impl Iterator<Item = &Change> {
        self.changes.iter().filter(|change| !self.compacted_rows.contains(&change.row))
    }
}

impl Op {
    fn key(self) -> usize {
        match self {
            Self::Put { key, .. }
            | Self::Delete { key }
            | Self::DeleteAndPut { key, .. }
            | Self::PutAndDelete { key, .. } => key,
        }
    }
}

fn key(number: usize) -> Key {
    Key::from(KEYS[number].as_bytes())
}

fn borrowed(bounds: &Bounds) -> (Bound<&[u8]>, Bound<&[u8]>) {
    (bounds.0.as_ref().map(Vec::as_slice), bounds.1.as_ref().map(Vec::as_slice))
}
