//! The contract of the log, tested without a server.

mod shared;

use std::{path::Path, sync::Arc, time::Duration};

use orlop_core::{
    auth::AuthState,
    log::{Append, Appended, AuthMark, LeaseChange, Load, Log, Meta, Position, ReadLog, ReadSet, Reclaim, WithPrev},
    types::{
        Change, ChangeKind, EncodedEvent, EncodedKv, Key, KeyRange, LeaseId, Prev, Rebase, Revision, RowId, Version,
    },
};
use orlop_sql::{Durability, PostgresLoader, PostgresLog, PostgresSettings, SqliteLoader, SqliteLog};
use tempfile::TempDir;

use crate::support::{Backend, Postgres, on_both_backends};

const LEASE: LeaseId = LeaseId(7);

/// Opens an empty log; returns `None` if the machine lacks the backend.
async fn open(backend: Backend, home: &TempDir) -> Option<Arc<dyn Log>> {
    let place = place(backend, home).await?;
    Some(open_at(backend, &place).await)
}

/// Returns the path of the file, or the endpoint of an empty database.
async fn place(backend: Backend, home: &TempDir) -> Option<String> {
    Some(match backend {
        Backend::Sqlite => home.path().join("orlop.db").display().to_string(),
        Backend::Postgres => Postgres::shared().await?.create_database(),
    })
}

async fn open_at(backend: Backend, place: &str) -> Arc<dyn Log> {
    match backend {
        Backend::Sqlite => Arc::new(SqliteLog::open(Path::new(place)).await.expect("the file opens")),
        Backend::Postgres => Arc::new(open_postgres(place).await),
    }
}

async fn open_postgres(endpoint: &str) -> PostgresLog {
    let settings = PostgresSettings {
        endpoint: endpoint.to_owned(),
        poll_interval: Duration::from_secs(1),
        connections_max: 2,
        name: "test".to_owned(),
        client_urls: Vec::new(),
        durability: Durability::Synced,
    };
    PostgresLog::open(settings).await.expect("the database opens")
}

const fn row(revision: i64, sub: u32) -> RowId {
    RowId::new(Revision(revision), sub)
}

fn put(key: &'static str, row: RowId, prev: Option<RowId>) -> Change {
    let version = Version { row, create_revision: row.revision, version: if prev.is_some() { 2 } else { 1 } };
    let value = format!("{key} at {}", row.revision.0);
    let kind = ChangeKind::put(EncodedKv::new(key.as_bytes(), version, value.as_bytes(), None));
    Change { row, key: key.as_bytes().into(), kind, prev: prev.map(|row| Prev { row, kv: None }), prev_lease: None }
}

async fn append(log: &dyn Log, changes: &[Change], leases: &[LeaseChange], compact: Option<Revision>) {
    let expected = log.meta().await.expect("the log answers").position;
    let appended = log.append(Append { expected, changes, reads: None, leases, compact, fact: None, auth: None }).await;
    assert_eq!(appended.expect("the log takes rows"), Appended::Done);
}

/// The whole contents of a log, except for the remaining TTL of leases.
#[derive(Debug, PartialEq)]
struct Contents {
    position: Position,
    compact_revision: Option<Revision>,
    leases: Vec<(LeaseId, i64)>,
    events: Vec<(RowId, EncodedEvent)>,
    replayed: Vec<(RowId, Key)>,
}

async fn contents(log: &dyn ReadLog) -> Contents {
    let meta = log.meta().await.expect("the log answers");
    let page = log.changes(Revision(2), meta.position.head, &KeyRange::all(), WithPrev::Yes).await;
    let page = page.expect("the log answers");
    assert_eq!(page.next, meta.position.head.next(), "a few rows are one page");
    let mut replayed = Vec::new();
    let mut visit = |_: &Meta, changes: Vec<Change>| {
        replayed.extend(changes.into_iter().map(|change| (change.row, change.key)));
        Ok(())
    };
    log.replay(Revision::EMPTY, &mut visit).await.expect("the log answers");
    Contents {
        position: meta.position,
        compact_revision: meta.compact_revision,
        leases: meta.leases.iter().map(|lease| (lease.id, lease.ttl_secs)).collect(),
        events: page.changes.iter().map(|change| (change.row, change.event_with_prev())).collect(),
        replayed,
    }
}

async fn frozen_log_does_not_change(backend: Backend) {
    let home = TempDir::new().expect("a folder");
    let Some(log) = open(backend, &home).await else { return };
    let delete = Change { kind: ChangeKind::Delete, ..put("a", row(4, 0), Some(row(2, 0))) };
    let first = [put("a", row(2, 0), None), put("b", row(3, 0), None), delete, put("c", row(5, 0), None)];
    append(&*log, &first, &[LeaseChange::Grant { id: LEASE, ttl_secs: 5_000 }], None).await;
    append(&*log, &[put("d", row(6, 0), None), put("e", row(6, 1), None)], &[], None).await;
    let before = contents(&*log).await;
    let frozen = log.freeze().await.expect("the log can be frozen");

    let later = [put("b", row(7, 0), Some(row(3, 0))), put("e", row(8, 0), Some(row(6, 1)))];
    append(&*log, &later, &[LeaseChange::Revoke { id: LEASE }], None).await;
    append(&*log, &[], &[], Some(Revision(8))).await;
    let server = log.meta().await.expect("the log answers").position.server;
    let rows = [row(2, 0), row(3, 0), row(4, 0), row(6, 1)];
    for what in [Reclaim::Rows { rows: &rows, compacted: Revision(8), server }, Reclaim::Space] {
        log.reclaim(what).await.expect("rows can be deleted");
    }
    let now = contents(&*log).await;
    let left = [row(5, 0), row(6, 0), row(7, 0), row(8, 0)];
    assert!(now.events.iter().map(|(row, _)| *row).eq(left) && now.leases.is_empty(), "{now:?}");

    assert_eq!(contents(&*frozen).await, before);
    drop(frozen);
    log.close(&[]).await;
}

/// Returns a put of a value of `len` bytes.
fn large(key: &str, row: RowId, prev: Option<RowId>, len: usize) -> Change {
    let version = Version { row, create_revision: row.revision, version: if prev.is_some() { 2 } else { 1 } };
    let kind = ChangeKind::put(EncodedKv::new(key.as_bytes(), version, &vec![b'v'; len], None));
    Change { row, key: key.as_bytes().into(), kind, prev: prev.map(|row| Prev { row, kv: None }), prev_lease: None }
}

/// A page ends at the end of a revision, after about 1 MiB or 1,000 rows. Previous pairs and all rows of a transaction
/// count.
async fn pages_are_limited_in_bytes_and_rows(backend: Backend) {
    const LARGE: usize = 100_000;
    let home = TempDir::new().expect("a folder");
    let Some(log) = open(backend, &home).await else { return };
    // 40 transactions whose second put is large, then small puts of the same keys, then one of many rows.
    let key = |name: &str, number: i64| format!("{name}{number:04}");
    let first: Vec<Change> = (0..40)
        .flat_map(|number| [("a", 0, 1), ("b", 1, LARGE)].map(|(name, sub, len)| (name, number, sub, len)))
        .map(|(name, number, sub, len)| large(&key(name, number), row(2 + number, sub), None, len))
        .collect();
    let then: Vec<Change> =
        (0..40).map(|number| large(&key("b", number), row(42 + number, 0), Some(row(2 + number, 1)), 1)).collect();
    let last: Vec<Change> = (0..5_000).map(|sub| large(&key("c", sub.into()), row(82, sub), None, 1)).collect();
    let end: Vec<Change> = (0..10).map(|number| large("d", row(83 + number, 0), None, 1)).collect();
    for changes in [&first, &then, &last, &end] {
        append(&*log, changes, &[], None).await;
    }
    let head = Revision(92);
    let all = KeyRange::all();
    let second = KeyRange::from_wire(b"b", b"c");
    let table = [
        ("the second puts of transactions", 2, &all, WithPrev::No, 5_130, 4),
        ("only the second puts", 2, &second, WithPrev::No, 80, 4),
        ("previous pairs", 42, &second, WithPrev::Yes, 40, 4),
        ("a transaction of many rows", 82, &all, WithPrev::Yes, 5_010, 2),
    ];
    for (what, from, range, prev, rows, pages_min) in table {
        let (mut next, mut found, mut pages) = (Revision(from), Vec::new(), 0);
        while next <= head {
            let page = log.changes(next, head, range, prev).await.expect("the log answers");
            let bytes: usize = page.changes.iter().map(Change::pair_bytes).sum();
            assert!(bytes < (1 << 20) + 2 * LARGE, "{what}: a page from {next} has {bytes} bytes");
            assert!(
                page.next > next && page.changes.iter().all(|change| (next..page.next).contains(&change.row.revision))
            );
            found.extend(page.changes.iter().map(|change| change.row));
            (next, pages) = (page.next, pages + 1);
        }
        assert!(
            found.is_sorted_by(|before, after| before < after),
            "{what}: rows are in order, and none is read twice"
        );
        assert_eq!(found.len(), rows, "{what}");
        assert!(pages >= pages_min, "{what}: {pages} pages");
    }
    log.close(&[]).await;
}

/// All rows of a page are in memory several times, and on SQLite their keys are one value, which has a maximum size.
/// A restore may raise the revisions by a billion, as etcd advises.
async fn missing_revisions_take_no_pages(backend: Backend) {
    const FAR: i64 = 1_000_000_002;
    // Compaction has deleted the first change of this revision.
    const MIDDLE: RowId = row(500_000_000, 1);
    let home = tempfile::tempdir().expect("a folder");
    let Some(place) = place(backend, &home).await else { return };
    let mut loader: Box<dyn Load> = match backend {
        Backend::Sqlite => Box::new(SqliteLoader::database(Path::new(&place)).await.expect("a new file")),
        Backend::Postgres => Box::new(PostgresLoader::open(&place).await.expect("an empty database")),
    };
    loader.add(&[put("a", row(2, 0), None), put("m", MIDDLE, None), put("z", row(FAR, 0), None)]).await.expect("rows");
    let head = Revision(FAR);
    let meta = Meta {
        cluster_id: 0,
        member_id: 0,
        position: Position { head, epoch: 0, server: 0 },
        compact_revision: Some(head.prev()),
        leases: Vec::new(),
        alarms: Vec::new(),
        auth: AuthMark::default(),
        source: None,
    };
    loader.finish(&meta, &AuthState::default()).await.expect("a log");
    let log = open_at(backend, &place).await;
    for (range, to, expected) in [
        (KeyRange::all(), head, &["a", "m", "z"][..]),
        (KeyRange::all(), head.prev(), &["a", "m"]),
        (KeyRange::from_wire(b"c", b""), Revision(2 * FAR), &[]),
    ] {
        let (mut next, mut found, mut pages) = (Revision(2), Vec::new(), 0);
        while next <= to {
            let page = log.changes(next, to, &range, WithPrev::No).await.expect("a page");
            assert!(next < page.next && page.next <= to.next(), "{page:?}");
            found.extend(page.changes.into_iter().map(|change| String::from_utf8_lossy(&change.key).into_owned()));
            (next, pages) = (page.next, pages + 1);
            assert!(pages < 7, "the page after {pages} begins at {next}");
        }
        assert_eq!(found, expected);
    }
}

async fn replayed_pages_are_limited_in_bytes_of_keys(backend: Backend) {
    const LONG: usize = 100_000;
    let home = TempDir::new().expect("a folder");
    let Some(log) = open(backend, &home).await else { return };
    let long = |number: i64| format!("{number:04}{}", "k".repeat(LONG));
    // Short keys, long ones in revisions of their own, and long ones in one revision.
    let short: Vec<Change> =
        (0..600).map(|number| large(&format!("a{number:04}"), row(2 + number, 0), None, 1)).collect();
    let alone: Vec<Change> = (0..200).map(|number| large(&long(number), row(602 + number, 0), None, 1)).collect();
    let together: Vec<Change> =
        (0..200).map(|sub| large(&long(1_000 + i64::from(sub)), row(802, sub), None, 1)).collect();
    for changes in [&short, &alone, &together] {
        append(&*log, changes, &[], None).await;
    }
    let (mut found, mut largest) = (Vec::new(), 0);
    let mut visit = |_: &Meta, changes: Vec<Change>| {
        largest = largest.max(changes.iter().map(|change| change.key.len()).sum());
        found.extend(changes.iter().map(|change| change.row));
        Ok(())
    };
    log.replay(Revision(0), &mut visit).await.expect("the log answers");
    let all = [&short, &alone, &together].into_iter().flatten().map(|change| change.row);
    assert_eq!(found, all.collect::<Vec<_>>());
    // 16 MiB of each table.
    assert!(largest <= 32 << 20, "a page has keys of {largest} bytes");
    log.close(&[]).await;
}

/// Appends of an instance that has read the log up to revision 3, behind the revisions 4 (`b` and `c`) and 5 (`d`) of
/// another one.
#[tokio::test]
async fn append_moves_behind_changes_of_keys_that_it_has_not_read() {
    let range = |start: &str, end: &str| KeyRange::from_wire(start.as_bytes(), end.as_bytes());
    let (nothing, before, over, rest) = (range("b", "b"), range("", "b"), range("a", "c"), range("d", "\0"));
    let behind = [row(4, 0), row(4, 1), row(5, 0)];
    for (keys, spans, what, moves) in [
        (&["k"][..], &[][..], "the key that it writes", true),
        (&["k", "a"], &[&before, &nothing], "keys and ranges beside those that changed", true),
        (&["k", "b"], &[], "the first key of a revision", false),
        (&["k", "c"], &[], "the second key of a revision", false),
        (&["k"], &[&over], "a range", false),
        (&["k"], &[&before, &rest], "a range without end", false),
    ] {
        let home = TempDir::new().expect("a folder");
        let Some(log) = open(Backend::Postgres, &home).await else { return };
        append(&*log, &[put("a", row(2, 0), None), put("k", row(3, 0), None)], &[], None).await;
        let expected = log.meta().await.expect("the log answers").position;
        append(&*log, &[put("b", row(4, 0), None), put("c", row(4, 1), None), put("d", row(5, 0), None)], &[], None)
            .await;

        let own =
            [put("k", row(4, 0), Some(row(3, 0))), put("n", row(5, 0), None), put("k", row(5, 1), Some(row(4, 0)))];
        let reads = ReadSet { keys: keys.iter().map(|key| key.as_bytes()).collect(), spans: spans.to_vec() };
        let grant = [LeaseChange::Grant { id: LEASE, ttl_secs: 5_000 }];
        let of =
            |reads| Append { expected, changes: &own, reads, leases: &grant, compact: None, fact: None, auth: None };
        let refused = log.append(of(None)).await.expect("the log answers");
        assert_eq!(refused, Appended::Conflict, "without a read set");
        let appended = log.append(of(Some(&reads))).await.expect("the log answers");
        let now = contents(&*log).await;
        match appended {
            Appended::Behind { base, others } if moves => {
                assert_eq!(base, Revision(5), "{what}");
                assert!(others.iter().map(|change| change.row).eq(behind), "{what}: {others:?}");
                let rebase = Rebase { base: Revision(3), by: 2 };
                let mut moved = own.clone();
                moved.iter_mut().for_each(|change| rebase.change(change));
                let stored = log.changes(Revision(6), Revision(7), &KeyRange::all(), WithPrev::No).await;
                assert_eq!(stored.expect("the log answers").changes, moved, "{what}");
                assert_eq!((now.position.head, now.position.epoch), (Revision(7), expected.epoch + 1), "{what}");
            }
            Appended::Conflict if !moves => {
                assert_eq!((now.position.head, now.leases), (Revision(5), Vec::new()), "{what}");
            }
            other => panic!("{what}: {other:?}"),
        }
        // The lease and every compaction are at an epoch that the instance has not read.
        append(&*log, &[], &[LeaseChange::Grant { id: LeaseId(8), ttl_secs: 5_000 }], None).await;
        let refused = log.append(of(Some(&ReadSet::default()))).await.expect("the log answers");
        assert_eq!(refused, Appended::Conflict, "{what}: another epoch");
        log.close(&[]).await;
    }
}

/// The append lock is held until the response has been received, so the response is small.
#[tokio::test]
async fn large_changes_of_others_are_left_in_the_log() {
    let home = TempDir::new().expect("a folder");
    let Some(log) = open(Backend::Postgres, &home).await else { return };
    let expected = log.meta().await.expect("the log answers").position;
    let others: Vec<Change> = (2..600).map(|revision| put("other", row(revision, 0), None)).collect();
    append(&*log, &others, &[], None).await;
    let own = [put("k", row(2, 0), None)];
    let reads = ReadSet { keys: vec![b"k"], spans: Vec::new() };
    let append =
        Append { expected, changes: &own, reads: Some(&reads), leases: &[], compact: None, fact: None, auth: None };
    let appended = log.append(append).await.expect("the log answers");
    assert_eq!(appended, Appended::Behind { base: Revision(599), others: Vec::new() });
    assert_eq!(log.meta().await.expect("the log answers").position.head, Revision(600));
    log.close(&[]).await;
}

/// The primary key alone would accept revision 3 again after its row was deleted, and a revision after a gap.
async fn append_at_another_position_adds_nothing(backend: Backend) {
    let home = TempDir::new().expect("a folder");
    let Some(log) = open(backend, &home).await else { return };
    let rows = [put("a", row(2, 0), None), put("b", row(3, 0), None), put("b", row(4, 0), Some(row(3, 0)))];
    append(&*log, &rows, &[], None).await;
    append(&*log, &[], &[], Some(Revision(4))).await;
    let now = log.meta().await.expect("the log answers").position;
    let unreadable = Reclaim::Rows { rows: &[row(3, 0)], compacted: Revision(4), server: now.server };
    log.reclaim(unreadable).await.expect("the row is deleted");
    let before = contents(&*log).await;
    for head in [2, 3, 5, 9] {
        let changes = [put("c", row(head + 1, 0), None)];
        let expected = Position { head: Revision(head), ..now };
        let stale =
            Append { expected, changes: &changes, reads: None, leases: &[], compact: None, fact: None, auth: None };
        assert_eq!(log.append(stale).await.expect("the log answers"), Appended::Conflict, "expected head {head}");
        assert_eq!(contents(&*log).await, before, "expected head {head}");
    }
    log.close(&[]).await;
}

/// An instance that lost its connection may repeat a compaction after a later one of another instance.
async fn lower_compact_revision_is_ignored(backend: Backend) {
    let home = TempDir::new().expect("a folder");
    let Some(log) = open(backend, &home).await else { return };
    append(&*log, &[put("a", row(2, 0), None), put("b", row(3, 0), None), put("c", row(4, 0), None)], &[], None).await;
    append(&*log, &[], &[], Some(Revision(4))).await;
    for reads in [None, Some(&ReadSet::default())] {
        let expected = log.meta().await.expect("the log answers").position;
        let compact = Some(Revision(3));
        let lower = Append { expected, changes: &[], reads, leases: &[], compact, fact: None, auth: None };
        assert_eq!(log.append(lower).await.expect("the log answers"), Appended::Done, "{reads:?}");
        let recorded = log.meta().await.expect("the log answers").compact_revision;
        assert_eq!(recorded, Some(Revision(4)), "{reads:?}");
    }
    log.close(&[]).await;
}

on_both_backends!(
    pages_are_limited_in_bytes_and_rows,
    missing_revisions_take_no_pages,
    replayed_pages_are_limited_in_bytes_of_keys,
    frozen_log_does_not_change,
    append_at_another_position_adds_nothing,
    lower_compact_revision_is_ignored,
);
