//! Archives of SQLite that are damaged, or cannot be written: the server serves, and never a wrong past.

use std::{fs, path::PathBuf};

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
        for suffix in ["-wal", "-shm"] {
            let _ = fs::remove_file(archive.with_file_name(format!("orlop.db-archive{suffix}")));
        }
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
