//! The saved index, a file beside SQLite's database or a table in Postgres: a start with it serves the same as a start that
//! reads the whole log, and one that is damaged or of another database is not used.

use std::{fs, path::Path};

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, DeleteRangeRequest, HashKvRequest, RangeRequest, RequestOp, SnapshotRequest, TxnRequest,
    request_op::Request,
};
use sqlx::{ConnectOptions as _, Connection as _, sqlite::SqliteConnectOptions};
use tempfile::TempDir;

use crate::support::{
    self, Backend, Client, Place, Postgres, Server, all, database_name, eventually, on_both_backends, prints, range,
};

const LARGE: [&str; 4] = ["--max-txn-ops", "1000", "--log-level", "info"];
const LOADED: &str = "saved index loaded";
const SAVED: &str = "index saved";
/// More than the rows that a start reads rather than that the index is saved.
const TXNS: usize = 105;

fn put(key: String, value: usize) -> RequestOp {
    RequestOp { request: Some(Request::RequestPut(support::put(key, value.to_string()))) }
}

async fn write(client: &mut Client, ops: impl IntoIterator<Item = RequestOp>) {
    let txn = TxnRequest { success: ops.into_iter().collect(), ..Default::default() };
    client.kv.txn(txn).await.expect("a transaction");
}

async fn delete(client: &mut Client, key: &str, range_end: &str) {
    let (key, range_end) = (key.to_owned().into(), range_end.to_owned().into());
    client.kv.delete_range(DeleteRangeRequest { key, range_end, ..Default::default() }).await.expect("a delete");
}

/// Puts keys, each once.
async fn fill(client: &mut Client) {
    for txn in 0..TXNS {
        write(client, (0..1_000).map(|number| put(format!("k/{number:04}/{txn:03}"), txn))).await;
    }
}

/// What a server shows: the head, hashes of the history at some revisions, and pairs at an old one.
#[derive(Debug, PartialEq)]
struct Shown {
    head: i64,
    hashes: Vec<(u32, i64)>,
    count: i64,
    old: Vec<(Vec<u8>, i64)>,
}

async fn shown(server: &Server) -> Shown {
    let mut client = Client::connect(server.endpoint()).await;
    let count = RangeRequest { count_only: true, ..all() };
    let count = client.kv.range(count).await.expect("a count").into_inner();
    let head = count.header.expect("a header").revision;
    let mut hashes = Vec::new();
    for revision in [head, head - 1] {
        let hash = client.maintenance.hash_kv(HashKvRequest { revision }).await.expect("a hash").into_inner();
        hashes.push((hash.hash, hash.compact_revision));
    }
    let old = RangeRequest { revision: head - 1, ..range("k/0500", "k/0502") };
    let old = client.kv.range(old).await.expect("a range").into_inner().kvs;
    Shown {
        head,
        hashes,
        count: count.count,
        old: old.into_iter().map(|kv| (kv.key.to_vec(), kv.mod_revision)).collect(),
    }
}

fn loaded(server: &Server) -> usize {
    server.log().matches(LOADED).count()
}

/// Starts a server on a folder with a database.
async fn server_on(folder: &Path) -> Server {
    let place = Place { data: Some(folder.to_owned()), ..Place::default() };
    Server::orlop_at(None, &LARGE, place).await
}

fn copy(from: &Path, to: &Path, names: &[&str]) {
    for name in names {
        fs::copy(from.join(name), to.join(name)).expect("a file can be copied");
    }
}

/// Returns a folder with a database and its saved index, an older state of the database in `older`, and what a server shows
/// that reads the whole log.
async fn stopped() -> (TempDir, Shown, Shown) {
    let folder = crate::support::home();
    let older = folder.path().join("older");
    fs::create_dir(&older).expect("a folder");
    let mut server = server_on(folder.path()).await;
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    delete(&mut client, "k/0001", "k/0002").await;
    assert!(server.terminate().await.success());
    copy(folder.path(), &older, &["orlop.db", "orlop.db-index"]);
    server.restart().await;
    let shown_older = shown(&server).await;
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    delete(&mut client, "k/0500/003", "").await;
    delete(&mut client, "k/0900", "k/0901").await;
    write(&mut client, [put("last".to_owned(), 1), put("last/2".to_owned(), 2)]).await;
    assert!(server.terminate().await.success());
    let whole = crate::support::home();
    copy(folder.path(), whole.path(), &["orlop.db"]);
    let reader = server_on(whole.path()).await;
    let expected = shown(&reader).await;
    assert_eq!(loaded(&reader), 0);
    (folder, expected, shown_older)
}

/// Changes the saved index of a database.
type Harm = fn(&mut Vec<u8>);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saved_index_is_used_only_if_it_is_whole_and_of_this_database() {
    let (folder, expected, shown_older) = stopped().await;
    let index = folder.path().join("orlop.db-index");
    let saved = fs::read(&index).expect("the index was saved");
    let table: [(&str, Harm, usize); 8] = [
        ("as it was saved", |_| (), 1),
        ("a bit of a key is flipped", |file| file[200_000] ^= 1, 0),
        ("a bit of the head is flipped", |file| file[36] ^= 1, 0),
        ("a bit of a length is flipped", |file| file[23] ^= 64, 0),
        ("it is cut off in a block", |file| file.truncate(file.len() / 2), 0),
        ("it is cut off after a block", |file| file.truncate(file.len() - 8), 0),
        ("it is empty", Vec::clear, 0),
        ("it is of another version", |file| file[18] = b'9', 0),
    ];
    for (what, harm, uses) in table {
        let mut changed = saved.clone();
        harm(&mut changed);
        fs::write(&index, changed).expect("the index can be changed");
        let server = server_on(folder.path()).await;
        assert_eq!(loaded(&server), uses, "{what}: {}", server.log_tail());
        assert_eq!(shown(&server).await, expected, "{what}");
    }
    let older = folder.path().join("older");
    fs::write(&index, saved).expect("the index can be put back");
    let folder = folder.path();
    for (what, database, index, uses, expected) in [
        ("an older copy of the database", older.as_path(), folder, 0, &shown_older),
        ("an older copy of both", &older, &older, 1, &shown_older),
        ("an older index", folder, &older, 0, &expected),
    ] {
        let other = crate::support::home();
        copy(database, other.path(), &["orlop.db"]);
        copy(index, other.path(), &["orlop.db-index"]);
        let server = server_on(other.path()).await;
        assert_eq!(loaded(&server), uses, "{what}: {}", server.log_tail());
        assert_eq!(shown(&server).await, *expected, "{what}");
    }
}

/// The server is killed after writes and compactions, so the saved index is older than the log.
async fn newer_rows_are_read_from_the_log_after_a_crash(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &LARGE).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    assert!(server.terminate().await.success());
    server.restart().await;
    assert_eq!(loaded(&server), 1, "{}", server.log_tail());
    let saved_at = shown(&server).await.head;
    // (the revision that is compacted, whether the index can be used after it)
    for (round, (compact_behind_saved, is_used)) in
        [(None, true), (Some(0), true), (Some(2), false)].into_iter().enumerate()
    {
        let mut client = Client::connect(server.endpoint()).await;
        for number in 0..20 {
            write(
                &mut client,
                [put(format!("k/0500/{number:03}"), round), put(format!("new/{round}/{number}"), round)],
            )
            .await;
            delete(&mut client, &format!("k/0700/{:03}", 20 * round + number), "").await;
            delete(&mut client, &format!("new/{round}/{}", number / 2), "").await;
        }
        let saves = server.log().matches(SAVED).count();
        if let Some(behind) = compact_behind_saved {
            let request = CompactionRequest { revision: saved_at + behind, physical: true };
            client.kv.compact(request).await.expect("a compaction");
        }
        let before = shown(&server).await;
        let uses = loaded(&server);
        server.kill();
        // On a slow machine another index may have been saved since the compaction, and that one is used.
        let is_used = is_used || server.log().matches(SAVED).count() > saves;
        server.restart().await;
        assert_eq!(loaded(&server), uses + usize::from(is_used), "round {round}: {}", server.log_tail());
        assert_eq!(shown(&server).await, before, "round {round}");
    }
    // The compaction that made it unusable is the cause to save another one.
    eventually("another index is saved", async || {
        let saved = server.log().matches(SAVED).count();
        if saved >= 2 { Ok(()) } else { Err(saved) }
    })
    .await;
    server.kill();
    match server.datastore() {
        Some(endpoint) => prints(&["check", "--datastore-endpoint", endpoint]),
        None => prints(&["check", "--data-dir", server.data_dir().to_str().expect("text")]),
    };
    server.restart().await;
    assert!(server.log().matches(LOADED).count() >= 3, "{}", server.log_tail());
}

/// The mark in the database is what makes a saved index believed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_without_the_mark_is_read_whole() {
    let (folder, expected, _) = stopped().await;
    let options = SqliteConnectOptions::new().filename(folder.path().join("orlop.db"));
    let mut connection = options.connect().await.expect("the database opens");
    let deleted = sqlx::query("DELETE FROM meta WHERE name = 'saved_index'").execute(&mut connection).await;
    assert_eq!(deleted.expect("the mark can be deleted").rows_affected(), 1);
    connection.close().await.expect("the connection closes");
    let server = server_on(folder.path()).await;
    assert_eq!(loaded(&server), 0, "{}", server.log_tail());
    assert_eq!(shown(&server).await, expected);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saved_table_is_used_only_if_it_is_whole() {
    let Some(postgres) = Postgres::shared().await else { return };
    let endpoint = postgres.create_database();
    let database = database_name(&endpoint);
    let sql = |sql: &str| postgres.psql(database, &format!("SET search_path = {database}; {sql}"));
    let mut server = Server::orlop_on(&endpoint, &LARGE).await;
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    delete(&mut client, "k/0500/003", "").await;
    assert!(server.terminate().await.success());
    sql("CREATE TABLE kept AS TABLE saved_index; TRUNCATE saved_index");
    server.restart().await;
    let expected = shown(&server).await;
    assert_eq!(loaded(&server), 0, "{}", server.log_tail());
    drop(server);
    let table = [
        ("as it was saved", "SELECT 1", 1),
        (
            // Behind the length and the ten bytes of the first key. Only the checksum shows it.
            "a bit of a revision is flipped",
            "UPDATE saved_index SET block = set_byte(block, 11, get_byte(block, 11) # 1) WHERE part = 3",
            0,
        ),
        (
            // The order of keys does not show it.
            "the last part with keys is missing",
            "DELETE FROM saved_index WHERE part = (SELECT max(part) - 1 FROM saved_index)",
            0,
        ),
        ("the first part is missing", "DELETE FROM saved_index WHERE part = 0", 0),
        ("the last part is missing", "DELETE FROM saved_index WHERE block = ''", 0),
        ("it is empty", "DELETE FROM saved_index", 0),
        ("its head is above that of the log", "UPDATE saved_index SET head = head + 10", 0),
        ("its compact revision is above that of the log", "UPDATE saved_index SET compact_revision = 10", 0),
    ];
    for (what, harm, uses) in table {
        sql(&format!("TRUNCATE saved_index; INSERT INTO saved_index TABLE kept; {harm}"));
        let server = Server::orlop_on(&endpoint, &LARGE).await;
        assert_eq!(loaded(&server), uses, "{what}: {}", server.log_tail());
        assert_eq!(shown(&server).await, expected, "{what}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_of_several_instances_saves_the_index_for_all() {
    let Some(postgres) = Postgres::shared().await else { return };
    let endpoint = postgres.create_database();
    let mut servers = [Server::orlop_on(&endpoint, &LARGE).await, Server::orlop_on(&endpoint, &LARGE).await];
    let mut client = Client::connect(servers[0].endpoint()).await;
    fill(&mut client).await;
    delete(&mut client, "k/0001", "k/0002").await;
    let saved =
        |servers: &[Server]| -> usize { servers.iter().map(|server| server.log().matches(SAVED).count()).sum() };
    let eventually_saved = async |servers: &[Server], expected: usize| {
        eventually("the index is saved", async || match saved(servers) {
            found if found == expected => Ok(()),
            found => Err(found),
        })
        .await;
    };
    eventually_saved(&servers, 1).await;
    for server in &mut servers {
        assert!(server.terminate().await.success());
    }
    assert_eq!(saved(&servers), 1, "an instance that stops finds that the index was saved");
    for server in &mut servers {
        server.restart().await;
        assert_eq!(loaded(server), 1, "{}", server.log_tail());
    }
    // Behind the head of the saved index.
    let mut client = Client::connect(servers[1].endpoint()).await;
    for key in ["k/0002", "k/0003"] {
        delete(&mut client, key, &format!("{key}/999")).await;
    }
    let revision = shown(&servers[1]).await.head;
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    eventually_saved(&servers, 2).await;
    for number in 0..3 {
        write(&mut client, [put("last".to_owned(), number)]).await;
    }
    let before = shown(&servers[1]).await;
    for server in &mut servers {
        server.kill();
        server.restart().await;
        assert_eq!(loaded(server), 2, "{}", server.log_tail());
        assert_eq!(shown(server).await, before);
    }
}

/// Postgres logs a connection that is closed in a transaction, and counts each session that is not ended.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sessions_of_saved_indexes_snapshots_and_starts_are_ended() {
    let Some(postgres) = Postgres::shared().await else { return };
    let version = postgres.psql("postgres", "SHOW server_version_num");
    if version.parse::<u32>().expect("a number") < 140_000 {
        return; // It does not count them.
    }
    let endpoint = postgres.create_database();
    let database = database_name(&endpoint);
    let server = Server::orlop_on(&endpoint, &LARGE).await;
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    eventually("the index is saved", async || if server.log().contains(SAVED) { Ok(()) } else { Err("not saved") })
        .await;
    let mut snapshot = client.maintenance.snapshot(SnapshotRequest {}).await.expect("a stream").into_inner();
    while snapshot.message().await.expect("a part").is_some() {}
    let other = Server::orlop_on(&endpoint, &LARGE).await;
    assert_eq!(loaded(&other), 1, "{}", other.log_tail());
    let open = format!(
        "SELECT count(*) FROM pg_stat_activity WHERE datname = '{database}' AND state LIKE 'idle in transaction%'"
    );
    eventually("the end of all transactions", async || match postgres.psql("postgres", &open) {
        open if open == "0" => Ok(()),
        open => Err(open),
    })
    .await;
    let abandoned = format!("SELECT sessions_abandoned FROM pg_stat_database WHERE datname = '{database}'");
    assert_eq!(postgres.psql("postgres", &abandoned), "0");
}

on_both_backends!(newer_rows_are_read_from_the_log_after_a_crash,);
