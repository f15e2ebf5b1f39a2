//! The state of the log if a compaction is interrupted.

use std::{
    pin::pin,
    sync::{atomic::Ordering, mpsc},
    time::Duration,
};

use futures_util::FutureExt as _;
use tokio::{
    runtime::Builder,
    task::spawn_blocking,
    time::{sleep, timeout},
};

use super::{
    compactor::{CompactionRate, PurgeOwner, SORT_ROWS_MAX, compact, purge, read_garbage, sort},
    fixtures::shared,
    replay::replay,
};
use crate::{
    index::{CompactionCursor, TreeIndex},
    log::{Append, Appended},
    types::{Change, ChangeKind, EncodedKv, Key, Prev, Revision, RowId, Superseded, Version},
};

/// The purge needs more than one step, so an interruption can fall between a key's put and its tombstone.
#[tokio::test(start_paused = true)]
async fn interrupted_purge_does_not_revive_deleted_keys() {
    let shared = shared(0);
    let changes = created_and_deleted(801);
    let head = changes.last().expect("changes").row.revision;
    let append = Append { compact: Some(head), ..Append::rows(Revision::EMPTY, &changes) };
    assert_eq!(shared.log.append(append).await.unwrap(), Appended::Done);

    let mut index = TreeIndex::new();
    changes.iter().for_each(|change| index.apply(change));
    index.begin_compaction(head);
    let mut garbage = Vec::new();
    while index.compact_step(&mut CompactionCursor::default(), usize::MAX, &mut garbage) {}
    let server = Some(shared.position().server);
    *shared.purged_on.lock() = server;
    // The purge is interrupted in the pause after the first transaction.
    timeout(
        Duration::from_millis(1),
        purge(&shared, CompactionRate::default(), &mut garbage, head, PurgeOwner::ThisInstance),
    )
    .await
    .unwrap_err();
    assert_eq!(*shared.purged_on.lock(), None, "a start with a saved index would not find the rows that are left");

    let restored = replay(&*shared.log).await.unwrap().index;
    let live: Vec<Key> = restored.range(.., head).map(|(key, _)| key.clone()).collect();
    assert_eq!(live, [Key::from(&b"a"[..]), Key::from(&b"z"[..])]);

    purge(&shared, CompactionRate::default(), &mut garbage, head, PurgeOwner::ThisInstance).await;
    assert_eq!(*shared.purged_on.lock(), server);
}

/// A failover can lose the last deletions of a compaction. A put that is there again must be deleted before the tombstone of
/// its key.
#[tokio::test(start_paused = true)]
async fn rows_that_a_failover_brought_back_do_not_revive_keys() {
    let shared = shared(0);
    let put = |revision, key: &str, prev: Option<i64>| {
        let row = RowId::new(Revision(revision), 0);
        let version = if prev.is_some() { 2 } else { 1 };
        let create_revision = prev.map_or(row.revision, Revision);
        let kv = EncodedKv::new(key.as_bytes(), Version { row, create_revision, version }, b"value", None);
        let prev = prev.map(|revision| Prev { row: RowId::new(Revision(revision), 0), kv: None });
        Change { row, key: Key::from(key.as_bytes()), kind: ChangeKind::put(kv), prev, prev_lease: None }
    };
    let delete = Change { kind: ChangeKind::Delete, ..put(4, "k", Some(3)) };
    let changes = [put(2, "k", None), put(3, "k", Some(2)), delete, put(5, "z", None)];
    // The first compaction deleted row 2 on server 1. Server 0 has it.
    shared.apply_logged(&changes, Revision(5));
    shared.note_compaction(Revision(3));
    while shared.index.write().compact_step(&mut CompactionCursor::default(), usize::MAX, &mut Vec::new()) {}
    shared.compaction_done.send_replace(Some(Revision(3)));
    *shared.purged_on.lock() = Some(1);

    let append = Append { compact: Some(Revision(5)), ..Append::rows(Revision::EMPTY, &changes) };
    assert_eq!(shared.log.append(append).await.unwrap(), Appended::Done);
    shared.note_compaction(Revision(5));
    compact(&shared, CompactionRate::default()).await;

    let replayed = replay(&*shared.log).await.unwrap();
    let live: Vec<Key> = replayed.index.range(.., Revision(5)).map(|(key, _)| key.clone()).collect();
    assert_eq!((live, replayed.rows), (vec![Key::from(&b"z"[..])], 1));
}

/// The new primary has not received the first deletion, which was made a moment before.
#[tokio::test(start_paused = true)]
async fn deletion_begins_again_on_another_server() {
    let shared = shared(0);
    let changes = created_and_deleted(9);
    let head = changes.last().expect("changes").row.revision;
    let append = Append { compact: Some(head), ..Append::rows(Revision::EMPTY, &changes) };
    assert_eq!(shared.log.append(append).await.unwrap(), Appended::Done);
    shared.apply_logged(&changes, head);
    shared.note_compaction(head);
    let mut garbage = Vec::new();
    while shared.index.write().compact_step(&mut CompactionCursor::default(), usize::MAX, &mut garbage) {}
    let first = changes[0].row;
    let failover = async {
        // In the pause after the first transaction.
        sleep(Duration::from_millis(1)).await;
        assert!(shared.log.values(&[first]).await.unwrap().is_empty(), "the first row is deleted");
        assert_eq!(shared.log.append(Append::rows(head, &changes[..1])).await.unwrap(), Appended::Done);
        shared.replication.server.store(1, Ordering::Relaxed);
    };
    let rate = CompactionRate { rows: 4, ..CompactionRate::default() };
    tokio::join!(purge(&shared, rate, &mut garbage, head, PurgeOwner::ThisInstance), failover);
    assert!(shared.log.values(&[first]).await.unwrap().is_empty(), "it is deleted on the other server, too");
    assert_eq!(*shared.purged_on.lock(), Some(1));
}

#[tokio::test]
async fn rows_to_delete_are_those_that_the_log_has_and_the_index_does_not() {
    let changes = created_and_deleted(9);
    let head = changes.last().expect("changes").row.revision;
    for target in (2..=head.0).map(Revision) {
        let shared = shared(0);
        assert_eq!(shared.log.append(Append::rows(Revision::EMPTY, &changes)).await.unwrap(), Appended::Done);
        shared.apply_logged(&changes, head);
        shared.note_compaction(target);
        let mut garbage = Vec::new();
        while shared.index.write().compact_step(&mut CompactionCursor::default(), usize::MAX, &mut garbage) {}
        garbage.sort_unstable();
        assert_eq!(read_garbage(&shared, target).await, garbage, "compacted at {target}");
    }
}

/// Returns changes that put and delete each of `keys` keys, between two keys that are put twice. A purge step that
/// deletes an even number of rows, from either end, therefore separates a put from its tombstone.
fn created_and_deleted(keys: usize) -> Vec<Change> {
    let put = |key: &str| (key.to_owned(), true);
    let pairs = (0..keys).flat_map(|number| [true, false].map(|put| (format!("key {number:05}"), put)));
    let ops = [put("a"), put("a")].into_iter().chain(pairs).chain([put("z"), put("z")]);
    let mut changes: Vec<Change> = Vec::new();
    for (revision, (key, is_put)) in (2..).map(Revision).zip(ops) {
        let replaced = changes.last().filter(|before| *before.key == *key.as_bytes());
        let prev = replaced.map(|before| Prev { row: before.row, kv: None });
        let before = replaced.filter(|_| is_put);
        let row = RowId::new(revision, 0);
        let create_revision = before.map_or(revision, |before| before.row.revision);
        let version = Version { row, create_revision, version: if before.is_some() { 2 } else { 1 } };
        let put = ChangeKind::put(EncodedKv::new(key.as_bytes(), version, b"value", None));
        let kind = if is_put { put } else { ChangeKind::Delete };
        changes.push(Change { row, key: Key::from(key.as_bytes()), kind, prev, prev_lease: None });
    }
    changes
}

/// Other instances learn up to which compaction rows are deleted, so rows of a later one must not be among them.
#[test]
fn pass_of_a_compaction_frees_no_row_of_a_later_one() {
    let mut index = TreeIndex::new();
    created_and_deleted(1).iter().for_each(|change| index.apply(change));
    index.begin_compaction(Revision(3));
    let mut cursor = CompactionCursor::at(Revision(3));
    // A client compacts again before the pass begins.
    index.begin_compaction(Revision(7));
    let mut freed = Vec::new();
    while index.compact_step(&mut cursor, usize::MAX, &mut freed) {}
    let rows: Vec<Revision> = freed.iter().map(|superseded| superseded.row.revision).collect();
    assert_eq!(rows, [Revision(2)]);
}

#[test]
fn many_rows_are_sorted_on_a_thread_that_may_block() {
    let sorted = async |count: usize| {
        let row = |revision| Superseded { row: RowId::new(Revision(revision), 0), end: Revision(revision) };
        let mut rows: Vec<Superseded> = (0..count as i64).rev().map(row).collect();
        sort(&mut rows).await;
        assert_eq!(rows.len(), count);
        rows.is_sorted()
    };
    let runtime = Builder::new_current_thread().max_blocking_threads(1).build().unwrap();
    runtime.block_on(async {
        let (release, released) = mpsc::channel::<()>();
        let busy = spawn_blocking(move || released.recv().is_err());
        assert_eq!(sorted(SORT_ROWS_MAX).now_or_never(), Some(true));
        let mut many = pin!(sorted(SORT_ROWS_MAX + 1));
        assert_eq!(many.as_mut().now_or_never(), None, "the only such thread is busy");
        drop(release);
        assert!(many.await);
        assert!(busy.await.unwrap());
    });
}
