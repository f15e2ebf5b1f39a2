//! A database file of SQLite has one process, by whatever name it is opened, and the process has one file.

use std::{fs, os::unix::fs::symlink, path::Path};

use orlop_core::supervise::EXIT_DISK_FAILED;
use orlop_wire::proto::client::etcdserverpb::SnapshotRequest;
use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};

use crate::{
    start::run,
    support::{Backend, Client, Server, get},
};

/// Starts a server with one key.
async fn server_with_a_key() -> Server {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    Client::connect(server.endpoint()).await.put("k", "value").await;
    server
}

async fn has_key(server: &Server, key: &str) -> bool {
    let found = Client::connect(server.endpoint()).await.kv.range(get(key)).await.expect("a range");
    found.into_inner().kvs.len() == 1
}

/// Returns whether the server sends a whole snapshot.
async fn sends_snapshot(client: &mut Client) -> bool {
    let Ok(snapshot) = client.maintenance.snapshot(SnapshotRequest {}).await else { return false };
    let mut parts = snapshot.into_inner();
    loop {
        match parts.message().await {
            Ok(Some(_)) => {}
            Ok(None) => return true,
            Err(_) => return false,
        }
    }
}

/// Writes a copy of the database without a WAL.
async fn copy(database: &Path, to: &Path) {
    let options = SqliteConnectOptions::new().filename(database).read_only(true);
    let mut connection = options.connect().await.expect("the file opens");
    let vacuum = sqlx::query("VACUUM INTO ?").bind(to.to_str().expect("a path")).execute(&mut connection).await;
    vacuum.expect("a copy");
    connection.close().await.expect("a connection can be closed");
}

/// Reads the state of now until it is dropped.
async fn reader_of(database: &Path) -> SqliteConnection {
    let mut reader = SqliteConnectOptions::new().filename(database).read_only(true).connect().await.expect("it opens");
    sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut reader).await.expect("a state");
    reader
}

#[track_caller]
fn check_log(server: &Server, because: &str) {
    assert!(server.log().contains(because), "{because}: {}", server.log_tail());
}

fn endpoint(file: &Path) -> String {
    format!("sqlite://{}", file.display())
}

/// Runs orlop, which must fail with an error that contains `because`.
#[track_caller]
fn check_fails(home: &Path, arguments: &[&str], because: &str) {
    let output = run(home, arguments, &[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains(because), "{arguments:?}: {text}");
}

/// SQLite keeps the WAL beside the file to which a link leads.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn link_to_the_file_is_followed() {
    let home = tempfile::tempdir().expect("a folder");
    let (file, link, dangling) =
        (home.path().join("real.db"), home.path().join("link.db"), home.path().join("nothing.db"));
    symlink(&file, &link).expect("a link can be made");
    symlink(home.path().join("absent/orlop.db"), &dangling).expect("a link can be made");
    let listen = ["--listen-client-urls", "http://127.0.0.1:0"];
    let start =
        |file: &Path| [&["--datastore-endpoint".to_owned(), endpoint(file)], &listen.map(str::to_owned)[..]].concat();
    let check_start_fails = |file: &Path, because: &str| {
        let arguments = start(file);
        check_fails(home.path(), &arguments.iter().map(String::as_str).collect::<Vec<_>>(), because);
    };
    check_start_fails(&link, "is a link");
    check_start_fails(&dangling, "is a link");

    let mut server = Server::orlop_on(&endpoint(&file), &[]).await;
    Client::connect(server.endpoint()).await.put("k", "value").await;
    check_start_fails(&link, "is in use by another orlop process");
    server.kill();
    let restored = endpoint(&home.path().join("restored.db"));
    let restore = ["snapshot", "restore", "link.db", "--skip-hash-check", "--datastore-endpoint", &restored];
    check_fails(home.path(), &restore, "is incomplete: the last commits are in");
    let again = Server::orlop_on(&endpoint(&link), &[]).await;
    assert_eq!(Client::connect(again.endpoint()).await.put("k", "value").await, 3);
}

/// The lock and the WAL are beside the name by which a file was opened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_that_is_used_by_another_of_its_names_is_refused() {
    let mut server = server_with_a_key().await;
    let link = server.data_dir().join("link.db");
    fs::hard_link(server.data_dir().join("orlop.db"), &link).expect("a link can be made");
    let home = tempfile::tempdir().expect("a folder");
    let link = endpoint(&link);
    let arguments = ["--datastore-endpoint", &link, "--listen-client-urls", "http://127.0.0.1:0"];
    check_fails(home.path(), &arguments, "2 names (hard links)");
    // A link that nobody uses, for example of a backup, prevents no start.
    server.restart().await;
    check_log(&server, "the database file has several names (hard links)");
    assert!(has_key(&server, "k").await);
}

/// The server would write to a file that nobody finds, and the next server would add its WAL to another file.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_whose_file_is_replaced_ends_and_leaves_no_wal() {
    tokio::join!(replaces_file(false), replaces_file(true));
}

/// `is_read`: somebody reads the file, so that the server cannot empty the WAL.
async fn replaces_file(is_read: bool) {
    let mut server = server_with_a_key().await;
    let [file, other, moved] = ["orlop.db", "copy.db", "moved.db"].map(|name| server.data_dir().join(name));
    copy(&file, &other).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("late", "value").await;
    let reader = if is_read { Some(reader_of(&file).await) } else { None };
    client.put("later", "value").await;
    fs::rename(&file, &moved).and_then(|()| fs::rename(&other, &file)).expect("a file can be replaced");
    assert!(!sends_snapshot(&mut client).await, "it would be of the other file: {}", server.log_tail());
    assert_eq!(server.ended().await.code(), Some(EXIT_DISK_FAILED), "{}", server.log_tail());
    check_log(&server, "the database file was replaced or removed while it was in use");
    server.restart().await;
    assert!(has_key(&server, "k").await && !has_key(&server, "late").await);
    // The next server does not share the index of the WAL with the reader.
    let mut client = Client::connect(server.endpoint()).await;
    client.put("new", "value").await;
    server.kill();
    drop(reader);
    server.restart().await;
    assert!(has_key(&server, "new").await);
    assert!(server.terminate().await.success());
    // All acknowledged writes are in the file that was moved away.
    fs::rename(&moved, &file).expect("a file can be replaced");
    let [wal, moved_wal] = ["orlop.db-wal", "orlop.db-wal-of-moved-file-0"].map(|name| server.data_dir().join(name));
    assert_eq!(moved_wal.exists(), is_read);
    if is_read {
        fs::rename(&moved_wal, &wal).expect("a file can be renamed");
    }
    server.restart().await;
    assert!(has_key(&server, "k").await && has_key(&server, "late").await && has_key(&server, "later").await);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_its_file_or_lock_ends() {
    let check = async |name: &str, because: &str| {
        let mut server = server_with_a_key().await;
        fs::remove_file(server.data_dir().join(name)).expect("a file can be removed");
        assert_eq!(server.ended().await.code(), Some(EXIT_DISK_FAILED), "{}", server.log_tail());
        check_log(&server, because);
    };
    tokio::join!(
        check("orlop.db", "the database file was replaced or removed while it was in use"),
        check("orlop.db.lock", "the lock file was replaced or removed while it was in use"),
    );
}

/// Connections that are opened later would use another WAL, or another index of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_without_its_wal_or_the_index_of_it_ends_and_loses_nothing() {
    let check = async |name: &str| {
        let mut server = server_with_a_key().await;
        Client::connect(server.endpoint()).await.put("late", "value").await;
        fs::remove_file(server.data_dir().join(name)).expect("a file can be removed");
        assert_eq!(server.ended().await.code(), Some(EXIT_DISK_FAILED), "{name}: {}", server.log_tail());
        check_log(&server, "the WAL or its index was replaced or removed while it was in use");
        server.restart().await;
        assert!(has_key(&server, "k").await && has_key(&server, "late").await, "{name}");
    };
    tokio::join!(check("orlop.db-wal"), check("orlop.db-shm"));
}
