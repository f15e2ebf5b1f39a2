//! Archives of SQLite that are damaged, or cannot be written: the server serves, and never a wrong past.

use std::{fs, path::PathBuf};

use orlop_core::{
    log::{Archive as _, History as _, Meta},
    types::Revision,
};
use orlop_sql::SqliteLog;
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, sqlite::SqliteConnectOptions};

use super::*;

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
    for content in [&garbage[..], &damaged_schema, &bytes[..4_096]] {
        fs::write(&archive, content).expect("a file can be written");
        let first = serves(&mut server, &mut model).await.first_revision;
        assert!(first >= compacted, "{first}");
        assert!(server.log().contains("the archive of the history is not used"), "{}", server.log_tail());
        assert_eq!(fs::read(archive.with_file_name("orlop.db-archive.unused")).expect("it was moved"), content);
        assert!(server.terminate().await.success());
    }
    // A folder in its place, too.
    fs::remove_file(&archive).expect("a file can be removed");
    fs::create_dir(&archive).expect("a folder can be made");
    fs::remove_file(archive.with_file_name("orlop.db-archive.unused")).expect("a file can be removed");
    serves(&mut server, &mut model).await;
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
    let archive = log.archive(&meta, true).await.expect("an archive").expect("it was created");
    archive.begin(None).await.expect("the archive begins");
    archive.note_time(Revision(2), true).await.expect("a time is recorded");
    assert_eq!(archive.state().await.expect("a state").first, Revision::EMPTY);
    let options = SqliteConnectOptions::new().filename(folder.path().join("orlop.db-archive"));
    let mut connection = options.connect().await.expect("the archive opens");
    connection.execute("DROP TABLE meta").await.expect("the table is dropped");
    connection.close().await.expect("the connection closes");
    assert!(archive.state().await.is_err() && archive.copy(&[]).await.is_err());
    archive.give_up(Revision(9)).await.expect("another file is created");
    let state = archive.state().await.expect("a state");
    assert_eq!((state.first, state.copied, state.rows), (Revision(9), Revision(9), 0));
    archive.copy(&[]).await.expect("rows can be copied");
    archive.finish_copy(Revision(10), 0).await.expect("a fact can be written");
    archive.close().await;
    // The next start uses it.
    let archive = log.archive(&Meta { compact_revision: Some(Revision(10)), ..meta }, true).await;
    let archive = archive.expect("an archive").expect("there is one");
    assert_eq!(archive.state().await.expect("a state").copied, Revision(10));
}
