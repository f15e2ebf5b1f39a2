//! Archives of SQLite that are damaged, or cannot be written: the server serves, and never a wrong past.

use std::{fs, path::PathBuf};

use orlop_core::{
    log::{Archive as _, Meta, ReadLog as _},
    types::Revision,
};
use orlop_sql::SqliteLog;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, sqlite::SqliteConnectOptions};

use super::*;
use crate::support::Disk;

/// Returns a stopped server with archived rows, and what it had.
async fn stopped() -> (Server, Model, PathBuf) {
    let mut server = Server::orlop_with(Backend::Sqlite, &KEEP).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    let (mut model, mut random) = (Model::new(), Random::new(11));
    for _ in 0..200 {
        write(&mut client, &mut model, &mut random).await;
    }
    compact(&mut client, model.head() - 5).await;
    assert!(server.terminate().await.success());
    let archive = server.data_dir().join("orlop.db-archive");
    assert!(!archive.with_file_name("orlop.db-archive-wal").exists(), "a stop closes the archive");
    (server, model, archive)
}

/// Starts the server again, which must serve, compact, and read the past from its first revision on.
async fn serves(server: &mut Server, model: &mut Model) -> HistoryStateResponse {
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    put(&mut client, model, "a", "after the damage").await;
    compact(&mut client, model.head()).await;
    let state = state(&mut client).await;
    compare(&mut client, model, state.first_revision, &mut Random::new(12)).await;
    state
}

#[tokio::test]
async fn archive_that_is_no_database_is_set_aside() {
    let (mut server, mut model, archive) = stopped().await;
    let compacted = model.head() - 5;
    let bytes = fs::read(&archive).expect("the archive exists");
    let garbage = b"garbage ".repeat(2_000);
    // The pages of the schema and of the facts are at the beginning.
    let mut damaged_schema = bytes.clone();
    damaged_schema[100..4_096].fill(0x5a);
    // Each has another name, so that none is overwritten.
    for (content, aside) in [
        (&garbage[..], "orlop.db-archive.unused"),
        (&damaged_schema[..], "orlop.db-archive.unused.1"),
        (&bytes[..4_096], "orlop.db-archive.unused.2"),
    ] {
        fs::write(&archive, content).expect("a file can be written");
        let first = serves(&mut server, &mut model).await.first_revision;
        assert!(first >= compacted, "{first}");
        assert!(server.log().contains("the archive of the history is not used"), "{}", server.log_tail());
        assert_eq!(fs::read(archive.with_file_name(aside)).expect("it was moved"), content);
        assert!(server.terminate().await.success());
    }
    // A folder in its place, too.
    fs::remove_file(&archive).expect("a file can be removed");
    fs::create_dir(&archive).expect("a folder can be made");
    serves(&mut server, &mut model).await;
    assert!(archive.with_file_name("orlop.db-archive.unused.3").is_dir());
}

/// For example because the two files were copied at different times.
#[tokio::test]
async fn archive_of_an_earlier_state_is_set_aside() {
    let (mut server, mut model, archive) = stopped().await;
    let earlier = fs::read(&archive).expect("the archive exists");
    let mut random = Random::new(14);
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..100 {
        write(&mut client, &mut model, &mut random).await;
    }
    let compacted = model.head() - 5;
    compact(&mut client, compacted).await;
    assert!(server.terminate().await.success());
    fs::write(&archive, &earlier).expect("a file can be written");
    let first = serves(&mut server, &mut model).await.first_revision;
    assert!(first >= compacted, "{first}");
    assert!(server.log().contains("it is of an earlier state than the database"), "{}", server.log_tail());
    assert_eq!(fs::read(archive.with_file_name("orlop.db-archive.unused")).expect("it was moved"), earlier);
}

/// For example because the database was restored from a copy without its archive.
#[tokio::test]
async fn archive_of_a_later_state_is_set_aside() {
    let (mut server, mut model, archive) = stopped().await;
    let database = server.data_dir().join("orlop.db");
    let (earlier, mut later) = (fs::read(&database).expect("the database exists"), model.clone());
    let mut random = Random::new(15);
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..100 {
        write(&mut client, &mut later, &mut random).await;
    }
    compact(&mut client, later.head() - 5).await;
    assert!(server.terminate().await.success());
    let content = fs::read(&archive).expect("the archive exists");
    fs::write(&database, &earlier).expect("a file can be written");
    let compacted = model.head() - 5;
    let first = serves(&mut server, &mut model).await.first_revision;
    assert!(first >= compacted, "{first}");
    assert!(server.log().contains("it is of a later state than the database"), "{}", server.log_tail());
    assert_eq!(fs::read(archive.with_file_name("orlop.db-archive.unused")).expect("it was moved"), content);
}

#[tokio::test]
async fn archive_of_another_store_is_set_aside() {
    let (mut server, mut model, archive) = stopped().await;
    // The same writes, so that nothing but its cluster ID distinguishes it.
    let (_other, _, foreign) = stopped().await;
    let foreign = fs::read(foreign).expect("the archive exists");
    fs::write(&archive, &foreign).expect("a file can be written");
    let compacted = model.head() - 5;
    let first = serves(&mut server, &mut model).await.first_revision;
    assert!(first >= compacted, "{first}");
    assert!(server.log().contains("it belongs to another store"), "{}", server.log_tail());
    assert_eq!(fs::read(archive.with_file_name("orlop.db-archive.unused")).expect("it was moved"), foreign);
}

/// For example because a newer version wrote it.
#[tokio::test]
async fn archive_that_cannot_be_opened_at_a_start_stays_and_is_used_later() {
    let (mut server, mut model, archive) = stopped().await;
    let place = Place::archive_of(&server);
    place
        .execute(
            "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
             VALUES (99, 'newer', 1, x'', 0)",
        )
        .await;
    server.restart().await;
    assert!(server.log().contains("cannot open the archive of the history"), "{}", server.log_tail());
    let mut client = Client::connect(server.endpoint()).await;
    put(&mut client, &mut model, "a", "meanwhile").await;
    let refused = pairs(&mut client, (b"a", b""), 1).await.expect_err("the archive is not open");
    assert_eq!(refused.code(), Code::Unavailable, "{refused:?}");
    place.execute("DELETE FROM _sqlx_migrations WHERE version = 99").await;
    eventually("the history", async || client.clone().history.state(HistoryStateRequest {}).await.map(drop)).await;
    compare(&mut client, &model, 1, &mut Random::new(13)).await;
    assert!(!archive.with_file_name("orlop.db-archive.unused").exists());
}

/// SQLite cannot create the index of the WAL.
#[tokio::test]
async fn archive_stays_if_the_disk_is_full_at_a_start() {
    let Some(disk) = Disk::mount(32) else { return };
    let log = SqliteLog::open(&disk.path().join("orlop.db")).await.expect("a log");
    let meta = log.meta().await.expect("facts");
    let archive = log.archive(&meta, true).await.expect("it was created");
    archive.begin(None).await.expect("the archive begins");
    archive.close().await;
    disk.fill();
    let archive = log.archive(&meta, true).await.expect("there is one");
    assert!(archive.state().await.is_err(), "the file cannot be opened");
    assert!(!disk.path().join("orlop.db-archive.unused").exists());
    disk.empty();
    archive.note_time(Revision(2), true).await.expect("the file is opened");
    assert_eq!(archive.state().await.expect("a state").first, Revision::EMPTY);
    archive.close().await;
}

/// For example for a VACUUM.
#[tokio::test]
async fn archive_that_another_process_has_locked_is_not_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = SqliteLog::open(&folder.path().join("orlop.db")).await.expect("a log");
    let archive = log.archive(&log.meta().await.expect("facts"), true).await.expect("it was created");
    archive.begin(None).await.expect("the archive begins");
    let options = SqliteConnectOptions::new().filename(folder.path().join("orlop.db-archive"));
    let mut other = options.connect().await.expect("the archive opens");
    other.execute("BEGIN IMMEDIATE").await.expect("the lock is free");
    assert!(archive.copy(&[]).await.is_err(), "a copy takes the lock");
    assert!(archive.give_up(Revision(9)).await.is_err(), "the file stays");
    other.execute("ROLLBACK").await.expect("the lock is released");
    assert_eq!(archive.state().await.expect("a state").first, Revision::EMPTY);
    archive.copy(&[]).await.expect("rows can be copied");
    archive.give_up(Revision(9)).await.expect("the fact is raised");
    assert_eq!(archive.state().await.expect("a state").first, Revision(9));
    archive.close().await;
}

/// No time is recorded then. A rewind to the time could bring back the state before the put.
#[tokio::test]
async fn time_is_uncertain_while_another_process_has_locked_the_archive() {
    let server = Server::orlop_with(Backend::Sqlite, &KEEP).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    put_until_recorded(&mut client, &mut model).await;
    let recorded = model.head();
    let options = SqliteConnectOptions::new().filename(server.data_dir().join("orlop.db-archive"));
    let mut other = options.connect().await.expect("the archive opens");
    other.execute("BEGIN IMMEDIATE").await.expect("the lock is free");
    put(&mut client, &mut model, "a", "not recorded").await;
    let written_by = clock::unix_ms(clock::now());
    assert_eq!(revision_at(&mut client, written_by).await, (Some(recorded), true));
    other.execute("ROLLBACK").await.expect("the lock is released");
    let end = put_until_recorded(&mut client, &mut model).await;
    assert_eq!(revision_at(&mut client, end).await, (Some(model.head()), false));
}

#[tokio::test]
async fn empty_archive_begins_again() {
    let (mut server, mut model, archive) = stopped().await;
    let compacted = model.head() - 5;
    fs::write(&archive, b"").expect("a file can be written");
    assert_eq!(serves(&mut server, &mut model).await.first_revision, compacted);
}

/// A page in the middle is damaged, which is found when it is read.
#[tokio::test]
async fn damaged_page_fails_reads_of_the_past_only() {
    let (mut server, mut model, archive) = stopped().await;
    let bytes = fs::read(&archive).expect("the archive exists");
    for page in 1..bytes.len() / 4_096 {
        let mut damaged = bytes.clone();
        damaged[page * 4_096..][..4_096].fill(0xa5);
        fs::write(&archive, &damaged).expect("a file can be written");
        server.restart().await;
        let mut client = Client::connect(server.endpoint()).await;
        for revision in [1, model.head() / 2] {
            match pairs(&mut client, (b"\0", b"\0"), revision).await {
                Ok(found) => assert_eq!(found, model.pairs(revision, |_| true), "page {page}"),
                Err(error) => assert!(
                    [Code::Unavailable, Code::DataLoss, Code::OutOfRange].contains(&error.code()),
                    "page {page}: {error:?}"
                ),
            }
        }
        put(&mut client, &mut model, "a", "after the damage").await;
        assert!(server.terminate().await.success());
    }
    // Compactions finish, even if nothing can be copied.
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    compact(&mut client, model.head()).await;
}

/// Nothing can be written any more, as on a full disk.
#[tokio::test]
async fn archive_that_cannot_be_written_is_replaced() {
    let folder = tempfile::tempdir().expect("a folder");
    let log = SqliteLog::open(&folder.path().join("orlop.db")).await.expect("a log");
    let meta = log.meta().await.expect("facts");
    let archive = log.archive(&meta, true).await.expect("it was created");
    archive.begin(None).await.expect("the archive begins");
    archive.note_time(Revision(2), true).await.expect("a time is recorded");
    assert_eq!(archive.state().await.expect("a state").first, Revision::EMPTY);
    let file = folder.path().join("orlop.db-archive");
    let options = SqliteConnectOptions::new().filename(&file);
    let mut connection = options.connect().await.expect("the archive opens");
    connection.execute("DROP TABLE meta").await.expect("the table is dropped");
    connection.close().await.expect("the connection closes");
    assert!(archive.state().await.is_err() && archive.copy(&[]).await.is_err());
    // Another connection does not create a file without tables.
    fs::remove_file(&file).expect("a file can be removed");
    assert!(archive.copy(&[]).await.is_err() && !file.exists());
    archive.give_up(Revision(9)).await.expect("another file is created");
    let state = archive.state().await.expect("a state");
    assert_eq!((state.first, state.copied, state.rows), (Revision(9), Revision(9), 0));
    archive.copy(&[]).await.expect("rows can be copied");
    archive.finish_copy(Revision(10), 0).await.expect("a fact can be written");
    archive.close().await;
    // The next start uses it.
    let archive = log.archive(&Meta { compact_revision: Some(Revision(10)), ..meta }, true).await;
    let archive = archive.expect("there is one");
    assert_eq!(archive.state().await.expect("a state").copied, Revision(10));
}
