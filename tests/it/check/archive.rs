//! Damage to an archive of the history, and what `orlop check` reports.

use super::*;

/// SQL that damages the archive of the worked history, for SQLite and Postgres, and the violations.
const CORRUPTIONS: [([&str; 2], &[&str]); 7] = [
    (
        same("UPDATE kv_archive SET end_revision = 5 WHERE id = 2"),
        &["kv_archive id=2 sub=0 key=\"a\": end_revision is 5, expected 4"],
    ),
    (
        same("UPDATE kv_archive SET end_revision = 99 WHERE id = 3"),
        &["expected both below", "end_revision is 99, expected 10"],
    ),
    (same("UPDATE kv_archive SET end_revision = 7 WHERE id = 6"), &["end_revision is 7, expected id"]),
    (same("DELETE FROM kv_archive WHERE id = 7"), &["name=\"rows\": value is", "name=\"bytes\": value is"]),
    (
        [
            "UPDATE meta SET value = value + 1 WHERE name = 'bytes'",
            "UPDATE meta SET value = value + 1 WHERE name = 'archive_bytes'",
        ],
        &["name=\"bytes\": value is"],
    ),
    (
        [
            "UPDATE meta SET value = 100 WHERE name = 'copied_revision'",
            "UPDATE meta SET value = 100 WHERE name = 'archive_copied'",
        ],
        &["name=\"copied\": value is 100, expected at most 12"],
    ),
    (
        ["DELETE FROM meta WHERE name = 'rows'", "DELETE FROM meta WHERE name = 'archive_rows'"],
        &["the fact is missing"],
    ),
];

const fn same(sql: &'static str) -> [&'static str; 2] {
    [sql, sql]
}

async fn damaged_archive_is_reported(backend: Backend) {
    for (sql, expected) in [(same(""), &[][..])].iter().chain(&CORRUPTIONS) {
        let Some(mut server) = Server::orlop_with(backend, &["--history-retention", "1h"]).await else { return };
        write_worked_history(&server).await;
        let mut client = Client::connect(server.endpoint()).await;
        client.kv.compact(CompactionRequest { revision: 12, physical: true }).await.expect("a compaction");
        let place = Place::of(&server);
        assert_eq!(place.assert_sound()["archivedRows"], 8);
        assert!(server.terminate().await.success());
        match backend {
            Backend::Sqlite => {
                let archive = Place::sqlite(&server.data_dir().join("orlop.db-archive"));
                archive.execute(sql[0]).await;
            }
            Backend::Postgres => place.execute(sql[1]).await,
        }
        let found = place.violations();
        assert_eq!(found.len(), expected.len(), "{sql:?}: {found:#?}");
        for (line, expected) in found.iter().zip(*expected) {
            assert!(line.contains(expected), "{sql:?}: {line:?} does not contain {expected:?}");
        }
    }
}

#[tokio::test]
async fn archive_that_is_no_database_is_reported() {
    let mut server =
        Server::orlop_with(Backend::Sqlite, &["--history-retention", "1h"]).await.expect("SQLite is built in");
    write_worked_history(&server).await;
    assert!(server.terminate().await.success());
    fs::write(server.data_dir().join("orlop.db-archive"), b"garbage ".repeat(1_000)).expect("a file can be written");
    let found = Place::of(&server).violations();
    assert!(found.len() == 1 && found[0].starts_with("kv_archive: "), "{found:?}");
}

on_both_backends!(damaged_archive_is_reported);
