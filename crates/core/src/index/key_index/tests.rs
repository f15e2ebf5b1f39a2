use super::*;

fn row(revision: i64) -> RowId {
    RowId::new(Revision(revision), 0)
}

/// Returns the history drawn at the top of this file.
fn worked_history() -> KeyIndex {
    let mut key = KeyIndex::created(row(2), Revision(2), 1, None);
    key.put(row(4), Revision(2), 2, LeaseId::from_wire(40));
    key.delete(row(5));
    key.put(row(7), Revision(7), 1, None);
    key.put(row(9), Revision(7), 2, LeaseId::from_wire(90));
    key
}

/// Returns (revision, create_revision, version) of a read.
fn seen(key: &KeyIndex, at: i64) -> Option<(i64, i64, i64)> {
    key.at(Revision(at)).map(|entry| {
        let Version { row, create_revision, version } = entry.version;
        (row.revision.0, create_revision.0, version)
    })
}

#[test]
fn every_revision_of_the_worked_history_reads_as_drawn() {
    let key = worked_history();
    let table = [
        (1, None),
        (2, Some((2, 2, 1))),
        (3, Some((2, 2, 1))),
        (4, Some((4, 2, 2))),
        (5, None),
        (6, None),
        (7, Some((7, 7, 1))),
        (8, Some((7, 7, 1))),
        (9, Some((9, 7, 2))),
        (100, Some((9, 7, 2))),
    ];
    for (at, expected) in table {
        assert_eq!(seen(&key, at), expected, "at {at}");
    }
    assert_eq!(key.at(Revision(9)).map(|entry| entry.lease), Some(Lease::Known(Some(LeaseId(90)))));
    assert_eq!(key.at(Revision(4)).map(|entry| entry.lease), Some(Lease::InRow));
}

#[test]
fn compaction_removes_rows_that_no_readable_revision_needs() {
    let table: [(i64, &[i64]); 9] = [
        (1, &[]),
        (2, &[]),
        (3, &[]),
        (4, &[2]),
        (5, &[2, 4]),
        (6, &[2, 4, 5]),
        (7, &[2, 4, 5]),
        (8, &[2, 4, 5]),
        (9, &[2, 4, 5, 7]),
    ];
    for (revision, expected) in table {
        let whole = worked_history();
        let mut key = whole.clone();
        let mut removed = Vec::new();
        assert_eq!(key.compact(Revision(revision), &mut removed), Fate::Keep);
        let rows: Vec<RowId> = removed.iter().map(|superseded| superseded.row).collect();
        assert_eq!(rows, expected.iter().map(|r| row(*r)).collect::<Vec<_>>(), "compacted at {revision}");
        for at in revision..12 {
            assert_eq!(seen(&key, at), seen(&whole, at), "compacted at {revision}, read at {at}");
        }
    }
}

#[test]
fn put_is_superseded_by_the_next_change_and_a_tombstone_at_once() {
    let mut key = worked_history();
    key.delete(row(10));
    let mut removed = Vec::new();
    assert_eq!(key.compact(Revision(11), &mut removed), Fate::Drop);
    let ends: Vec<_> = removed.iter().map(|it| (it.row.revision.0, it.end.0)).collect();
    assert_eq!(ends, [(2, 4), (4, 5), (5, 5), (7, 9), (9, 10), (10, 10)]);
}

#[test]
fn rows_within_bounds_are_a_part_of_all_rows_in_both_directions() {
    let worked =
        [(2, false), (4, false), (5, true), (7, false), (9, false)].map(|(at, is_delete)| (row(at), is_delete));
    let ended = [worked.as_slice(), &[(row(10), true)]].concat();
    // The key is deleted and put again at one revision.
    let again = RowId::new(Revision(10), 1);
    let created = [ended.as_slice(), &[(again, false)]].concat();
    let (mut deleted, mut compacted) = (worked_history(), worked_history());
    deleted.delete(row(10));
    let mut put_again = deleted.clone();
    put_again.put(again, again.revision, 1, None);
    compacted.compact(Revision(5), &mut Vec::new());
    let bounds = (1..12).flat_map(|revision| [0, 1].map(|sub| RowId::new(Revision(revision), sub)));
    for (key, all) in [
        (worked_history(), worked.as_slice()),
        (deleted, ended.as_slice()),
        (put_again, created.as_slice()),
        (compacted, &worked[2..]),
        (KeyIndex::deleted(row(5)), &worked[2..3]),
    ] {
        for (from, to) in bounds.clone().flat_map(|from| bounds.clone().map(move |to| (from, to))) {
            let within = all.iter().filter(|(row, _)| (from..=to).contains(row));
            let expected: Vec<_> = within.map(|&(row, is_delete)| IndexedRow { row, is_delete }).collect();
            assert_eq!(key.rows(from, to).collect::<Vec<_>>(), expected, "{from:?} to {to:?}");
            let backwards: Vec<_> = expected.into_iter().rev().collect();
            assert_eq!(key.rows(from, to).rev().collect::<Vec<_>>(), backwards, "{to:?} back to {from:?}");
        }
    }
}

#[test]
fn deleted_key_is_removed_once_its_tombstone_is_below_the_compaction() {
    for (revision, fate, expected) in [(4, Fate::Keep, 1), (5, Fate::Keep, 2), (6, Fate::Drop, 3)] {
        let mut key = KeyIndex::created(row(2), Revision(2), 1, None);
        key.put(row(3), Revision(2), 2, None);
        key.delete(row(5));
        let mut removed = Vec::new();
        let kept = key.compact(Revision(revision), &mut removed);
        assert_eq!((kept, removed.len()), (fate, expected), "compacted at {revision}");
    }
}

/// The tombstone stays, even after later writes and a restart, because a watch may start at its revision.
#[test]
fn tombstone_at_the_compact_revision_is_removed_by_the_next_compaction() {
    let mut compacted = KeyIndex::created(row(2), Revision(2), 1, None);
    compacted.delete(row(3));
    compacted.compact(Revision(3), &mut Vec::new());
    let mut put_before = KeyIndex::created(row(2), Revision(2), 1, None);
    put_before.delete(row(3));
    put_before.put(row(5), Revision(5), 1, None);
    put_before.compact(Revision(3), &mut Vec::new());
    let mut restored = KeyIndex::deleted(row(3));
    for key in [&mut compacted, &mut restored] {
        key.put(row(5), Revision(5), 1, None);
        assert_eq!(*key, put_before);
    }
    let mut removed = Vec::new();
    compacted.compact(Revision(4), &mut removed);
    assert_eq!(removed, [Superseded { row: row(3), end: Revision(3) }]);
    assert_eq!(compacted, KeyIndex::created(row(5), Revision(5), 1, None));
}
