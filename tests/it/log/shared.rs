//! A log in Postgres that several instances share. An instance whose knowledge of it is out of date changes nothing.

use orlop_core::{
    log::{Archive as _, Error, LeaseScope, SharedLog as _, Touch},
    types::Superseded,
};
use sqlx::{AssertSqlSafe, Connection as _, PgConnection};

use super::*;
use crate::support::eventually;

const OTHER_LEASE: LeaseId = LeaseId(8);

/// Opens an empty log, and a connection to its database; returns `None` if the machine lacks Postgres.
async fn open_shared() -> Option<(PostgresLog, PgConnection)> {
    let endpoint = Postgres::shared().await?.create_database();
    let log = open_postgres(&endpoint).await;
    Some((log, PgConnection::connect(&endpoint).await.expect("the database exists")))
}

async fn execute(connection: &mut PgConnection, sql: &str) {
    sqlx::raw_sql(AssertSqlSafe(sql)).execute(connection).await.expect("the statement is valid");
}

/// Appends the revisions 2, 3, ... of one key.
async fn append_versions(log: &PostgresLog, to: i64) {
    let version = |revision| put("a", row(revision, 0), (revision > 2).then(|| row(revision - 1, 0)));
    append(log, &(2..=to).map(version).collect::<Vec<_>>(), &[], None).await;
}

async fn append_at<'a>(
    log: &PostgresLog,
    expected: Position,
    (changes, leases): (&'a [Change], &'a [LeaseChange]),
    reads: Option<&'a ReadSet<'a>>,
) -> Appended {
    let append = Append { expected, changes, reads, leases, compact: None, fact: None, auth: None };
    log.append(append).await.expect("the log answers")
}

async fn position(log: &PostgresLog) -> Position {
    log.meta().await.expect("the log answers").position
}

/// After a failover, another history may have the same head and epoch.
#[tokio::test]
async fn append_on_another_server_adds_nothing() {
    let Some((log, _)) = open_shared().await else { return };
    append_versions(&log, 3).await;
    let now = position(&log).await;
    let before = contents(&log).await;
    for head in [2, 3] {
        let expected = Position { head: Revision(head), server: now.server + 1, ..now };
        let changes = [put("b", row(head + 1, 0), None)];
        for reads in [None, Some(&ReadSet::default())] {
            let appended = append_at(&log, expected, (&changes, &[]), reads).await;
            assert_eq!(appended, Appended::Conflict, "head {head}, {reads:?}");
            assert_eq!(contents(&log).await, before, "head {head}, {reads:?}");
        }
    }
    log.close(&[]).await;
}

/// A failover may lose a compaction. Then the revisions of its rows can be used again, for rows that are read.
#[tokio::test]
async fn rows_are_deleted_only_where_they_were_compacted() {
    let Some((log, _)) = open_shared().await else { return };
    append_versions(&log, 4).await;
    append(&log, &[], &[], Some(Revision(3))).await;
    let server = position(&log).await.server;
    let before = contents(&log).await;
    let rows = [row(2, 0), row(3, 0)];
    for (what, compacted, server) in
        [("another server", Revision(3), server + 1), ("a compaction that is not recorded", Revision(4), server)]
    {
        let refused = log.reclaim(Reclaim::Rows { rows: &rows, compacted, server }).await.expect_err(what);
        assert!(matches!(refused, Error::Unavailable(_)), "{what}: {refused}");
        assert_eq!(contents(&log).await, before, "{what}");
    }
    let recorded = Reclaim::Rows { rows: &rows[..1], compacted: Revision(3), server };
    log.reclaim(recorded).await.expect("the row is deleted");
    assert_eq!(contents(&log).await.replayed, before.replayed[1..]);
    log.close(&[]).await;
}

/// The renewal of another instance is complete, or it holds the lock of the row.
#[tokio::test]
async fn lease_that_another_instance_renews_does_not_expire() {
    const WAITING: &str = "SELECT count(*) FROM pg_stat_activity \
        WHERE datname = current_database() AND wait_event_type = 'Lock'";
    let Some(postgres) = Postgres::shared().await else { return };
    let Some((log, mut other)) = open_shared().await else { return };
    let database: String =
        sqlx::query_scalar("SELECT current_database()::text").fetch_one(&mut other).await.expect("a name");
    append(&log, &[], &[LeaseChange::Grant { id: LEASE, ttl_secs: 5_000 }], None).await;
    let before = contents(&log).await;
    let (changes, expire) = ([put("a", row(2, 0), None)], [LeaseChange::Expire { id: LEASE }]);
    for reads in [None, Some(&ReadSet::default())] {
        let expiry = || append_at(&log, before.position, (&changes, &expire), reads);
        assert_eq!(expiry().await, Appended::Conflict, "renewed, {reads:?}");

        execute(&mut other, "UPDATE lease SET deadline = clock_timestamp() - interval '1 second'").await;
        execute(&mut other, "BEGIN; UPDATE lease SET deadline = clock_timestamp() + interval '1 hour'").await;
        let renewal = async {
            eventually("an expiry that waits", async || match postgres.psql(&database, WAITING) {
                none if none == "0" => Err(none),
                _ => Ok(()),
            })
            .await;
            execute(&mut other, "COMMIT").await;
        };
        let (appended, ()) = tokio::join!(expiry(), renewal);
        assert_eq!(appended, Appended::Conflict, "being renewed, {reads:?}");
        assert_eq!(contents(&log).await, before, "{reads:?}");
    }
    log.close(&[]).await;
}

/// The instance that ends it may already have evaluated requests without its keys.
#[tokio::test]
async fn lease_that_has_expired_is_not_renewed() {
    let Some((log, mut other)) = open_shared().await else { return };
    let grant = |id| LeaseChange::Grant { id, ttl_secs: 5_000 };
    append(&log, &[], &[grant(LEASE), grant(OTHER_LEASE)], None).await;
    let deadlines = format!(
        "UPDATE lease SET deadline = clock_timestamp() + make_interval(secs => CASE id WHEN {} THEN -1 ELSE 10 END)",
        LEASE.0
    );
    execute(&mut other, &deadlines).await;
    let mut leases = log.leases(&[LEASE, OTHER_LEASE], Touch::Renew).await.expect("the log answers");
    leases.sort_by_key(|lease| lease.id);
    let left: Vec<f64> = leases.iter().filter_map(|lease| lease.left_secs).collect();
    assert!(left.len() == 2 && left[0] <= -1.0 && left[1] > 4_900.0, "{left:?}");
    log.close(&[]).await;
}

#[tokio::test]
async fn all_leases_are_read_on_another_server() {
    let Some((log, _)) = open_shared().await else { return };
    let grant = |id| LeaseChange::Grant { id, ttl_secs: 5_000 };
    append(&log, &[], &[grant(LEASE)], None).await;
    let known = position(&log).await;
    append(&log, &[], &[grant(OTHER_LEASE)], None).await;
    for (server, expected_scope, expected_leases) in [
        (known.server, LeaseScope::Changed(vec![OTHER_LEASE]), &[OTHER_LEASE][..]),
        (known.server + 1, LeaseScope::All, &[LEASE, OTHER_LEASE]),
    ] {
        let (meta, scope) = log.meta_since(Position { server, ..known }).await.expect("the log answers");
        let mut leases: Vec<LeaseId> = meta.leases.iter().map(|lease| lease.id).collect();
        leases.sort();
        assert_eq!((scope, &leases[..]), (expected_scope, expected_leases));
    }
    log.close(&[]).await;
}

/// The append lock is held while they are compared.
#[tokio::test]
async fn append_moves_behind_5_000_changes_and_no_more() {
    let revisions = |count| (0..count).map(|number| put("a", row(2 + number, 0), None)).collect::<Vec<_>>();
    let further = |count| (0..=count).map(|sub| put("a", row(2, sub), None)).collect::<Vec<_>>();
    for (what, others, moves) in [
        ("5,000 revisions", revisions(5_000), true),
        ("5,001 revisions", revisions(5_001), false),
        ("5,000 further changes of a transaction", further(5_000), true),
        ("5,001 further changes of a transaction", further(5_001), false),
    ] {
        let Some((log, _)) = open_shared().await else { return };
        let expected = position(&log).await;
        append(&log, &others, &[], None).await;
        let (own, reads) = ([put("k", row(2, 0), None)], ReadSet { keys: vec![b"k"], spans: Vec::new() });
        match append_at(&log, expected, (&own, &[]), Some(&reads)).await {
            Appended::Behind { base, .. } if moves => assert_eq!(Some(base), others.last().map(|it| it.row.revision)),
            Appended::Conflict if !moves => {}
            other => panic!("{what}: {other:?}"),
        }
        log.close(&[]).await;
    }
}

/// A deleted row cannot be compared, so its key could be one that the append has read.
#[tokio::test]
async fn append_does_not_move_behind_rows_that_may_be_deleted() {
    let Some((log, _)) = open_shared().await else { return };
    append_versions(&log, 4).await;
    append(&log, &[], &[], Some(Revision(4))).await;
    let now = position(&log).await;
    let rows = [row(2, 0), row(3, 0)];
    log.reclaim(Reclaim::Rows { rows: &rows, compacted: Revision(4), server: now.server }).await.expect("it deletes");
    append(&log, &[put("a", row(5, 0), Some(row(4, 0)))], &[], None).await;
    let reads = ReadSet { keys: vec![b"k"], spans: Vec::new() };
    for (head, moves) in [(3, false), (4, true)] {
        let expected = Position { head: Revision(head), ..now };
        let own = [put("k", row(head + 1, 0), None)];
        match append_at(&log, expected, (&own, &[]), Some(&reads)).await {
            Appended::Behind { base: Revision(5), .. } if moves => {}
            Appended::Conflict if !moves => {}
            other => panic!("expected head {head}: {other:?}"),
        }
    }
    log.close(&[]).await;
}

/// Another instance has compacted since this one has read the log: the rows below are not archived.
#[tokio::test]
async fn archive_begins_at_the_newest_compaction() {
    let Some((log, _)) = open_shared().await else { return };
    append_versions(&log, 4).await;
    append(&log, &[], &[], Some(Revision(4))).await;
    let archive = log.archive();
    archive.begin(Some(Revision(3))).await.expect("the archive begins");
    assert_eq!(archive.state().await.expect("a state").first, Revision(4));
    log.close(&[]).await;
}

/// The other server may lack rows that were copied.
#[tokio::test]
async fn copy_to_the_archive_of_another_server_is_not_complete() {
    let Some((log, _)) = open_shared().await else { return };
    let archive = log.archive();
    archive.begin(None).await.expect("the archive begins");
    let server = position(&log).await.server;
    let refused = archive.finish_copy(Revision(4), server + 1).await.expect_err("another server");
    assert!(matches!(refused, Error::Unavailable(_)), "{refused}");
    assert_eq!(archive.state().await.expect("a state").copied, Revision::EMPTY);
    archive.finish_copy(Revision(4), server).await.expect("the fact is written");
    assert_eq!(archive.state().await.expect("a state").copied, Revision(4));
    log.close(&[]).await;
}

/// The delete of a key is in no state, but it is the change of its revision.
#[tokio::test]
async fn archived_delete_is_kept_while_its_revision_is() {
    let Some((log, _)) = open_shared().await else { return };
    append_versions(&log, 3).await;
    let delete = Change { kind: ChangeKind::Delete, ..put("a", row(4, 0), Some(row(3, 0))) };
    append(&log, &[delete], &[], None).await;
    let archive = log.archive();
    archive.begin(None).await.expect("the archive begins");
    let superseded = |(id, end)| Superseded { row: row(id, 0), end: Revision(end) };
    archive.copy(&[(2, 3), (3, 4), (4, 4)].map(superseded)).await.expect("rows are copied");
    for (first, rows) in [(2, 3), (3, 2), (4, 1), (5, 0)] {
        archive.prune(Revision(first), u64::MAX).await.expect("rows are deleted");
        assert_eq!(archive.state().await.expect("a state").rows, rows, "from {first} on");
    }
    log.close(&[]).await;
}

#[tokio::test]
async fn member_without_heartbeats_is_deleted_after_an_hour() {
    let Some((log, mut other)) = open_shared().await else { return };
    let members = "INSERT INTO member VALUES \
        (1, 'gone', '{}', 1, 'epoch', clock_timestamp() - interval '61 minutes'), \
        (2, 'silent', '{}', 1, 'epoch', clock_timestamp() - interval '50 minutes')";
    execute(&mut other, members).await;
    log.beat().await.expect("the log answers");
    let names: Vec<String> =
        sqlx::query_scalar("SELECT name FROM member ORDER BY name").fetch_all(&mut other).await.expect("names");
    assert_eq!(names, ["silent", "test"]);
    log.close(&[]).await;
}
