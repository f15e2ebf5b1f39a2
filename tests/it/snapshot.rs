//! Snapshots: each contains the whole log at one revision, and restores to the same state in either database.

pub mod etcd;

use std::{
    collections::{BTreeMap, BTreeSet},
    fs,
    path::{Path, PathBuf},
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use orlop_wire::proto::client::{
    etcdserverpb::{
        CompactionRequest, HashKvRequest, HashRequest, LeaseGrantRequest, LeaseLeasesRequest, LeaseRevokeRequest,
        LeaseTimeToLiveRequest, PutRequest, RangeRequest, RequestOp, SnapshotRequest, TxnRequest, request_op::Request,
    },
    mvccpb::KeyValue,
};
use tempfile::TempDir;
use tokio::task::JoinSet;

use crate::support::{
    Backend, Client, Postgres, Random, Server, all, database_name, delete, etcd_tool, eventually, get,
    on_both_backends, orlop, prints, put, run, skip,
};

const WRITERS: u64 = 4;
/// Number of requests before the snapshot is requested. A tenth of this number follows the snapshot.
const WRITES_BEFORE: usize = 1_000;

/// The leases that were granted and revoked, each with the revision in the response's header.
#[derive(Default)]
pub struct Leases {
    granted: BTreeMap<i64, i64>,
    revoked: BTreeMap<i64, i64>,
}

/// Saves a snapshot as etcdctl does: the file contains all received pieces. Its last 32 bytes are the checksum.
pub async fn save(client: &mut Client, folder: &Path) -> PathBuf {
    let mut pieces = client.maintenance.snapshot(SnapshotRequest {}).await.expect("a snapshot").into_inner();
    let mut bytes = Vec::new();
    let mut remaining = Vec::new();
    while let Some(piece) = pieces.message().await.expect("a piece") {
        assert!(!piece.blob.is_empty() && piece.blob.len() <= 32 << 10, "{}", piece.blob.len());
        bytes.extend_from_slice(&piece.blob);
        remaining.push((piece.remaining_bytes, bytes.len() as u64));
    }
    let whole = bytes.len() as u64 - 32;
    for (remaining, sent) in &remaining {
        assert_eq!(remaining + sent.min(&whole), whole);
    }
    assert_eq!(whole % 4096, 0, "pages of a database");
    let file = folder.join("snapshot.db");
    fs::write(&file, bytes).expect("a file can be written");
    file
}

fn status(file: &Path) -> serde_json::Value {
    let found = prints(&["snapshot", "status", path(file), "--write-out", "json"]);
    serde_json::from_str(&found).expect("JSON")
}

fn path(file: &Path) -> &str {
    file.to_str().expect("a path in UTF-8")
}

/// Starts a server on a database that was filled from a snapshot.
pub async fn restored(backend: Backend, file: &Path, folder: &Path) -> Option<Server> {
    let datastore = backend.empty_database(folder, "restored.db").await?;
    let found = prints(&["snapshot", "restore", path(file), "--datastore-endpoint", &datastore]);
    assert!(found.starts_with("restored into ") && !found.contains("pass%20word"), "{found}");
    prints(&["check", "--datastore-endpoint", &datastore]);
    Some(Server::orlop_on(&datastore, &[]).await)
}

async fn pairs(client: &mut Client, revision: i64) -> Vec<KeyValue> {
    let range = RangeRequest { revision, ..all() };
    client.kv.range(range).await.expect("a range").into_inner().kvs
}

async fn hash(client: &mut Client, revision: i64) -> u32 {
    client.maintenance.hash_kv(HashKvRequest { revision }).await.expect("a hash").into_inner().hash
}

async fn hash_of_all(client: &mut Client) -> u32 {
    client.maintenance.hash(HashRequest {}).await.expect("a hash").into_inner().hash
}

async fn cluster(client: &mut Client) -> u64 {
    client.kv.range(get("k")).await.expect("a range").into_inner().header.expect("a header").cluster_id
}

async fn leases(client: &mut Client) -> BTreeSet<i64> {
    let listed = client.lease.lease_leases(LeaseLeasesRequest {}).await.expect("leases").into_inner().leases;
    listed.into_iter().map(|lease| lease.id).collect()
}

/// Sends puts, deletes, transactions, leases and compactions until `stop` is set. Counts the requests in `done`.
pub async fn write(
    mut client: Client,
    writer: u64,
    stop: Arc<AtomicBool>,
    done: Arc<std::sync::atomic::AtomicUsize>,
) -> Leases {
    let mut random = Random::new(writer);
    let mut leases = Leases::default();
    while !stop.load(Ordering::Relaxed) {
        let key = format!("key/{}", random.below(200));
        match random.weighted(&[60, 15, 15, 5, 3, 1]) {
            0 => drop(client.kv.put(put(key, vec![7; random.below(3_000)])).await.expect("a put")),
            1 => drop(client.kv.delete_range(delete(key)).await.expect("a delete")),
            2 => {
                let puts = [key, format!("txn/{}", random.below(50)), format!("txn/{}", 50 + random.below(50))];
                let success = puts.map(|key| RequestOp { request: Some(Request::RequestPut(put(key, [8]))) });
                let txn = TxnRequest { success: success.to_vec(), ..Default::default() };
                client.kv.txn(txn).await.expect("a transaction");
            }
            3 => {
                let granted = client.lease.lease_grant(LeaseGrantRequest { ttl: 5_000, id: 0 }).await;
                let granted = granted.expect("a lease").into_inner();
                leases.granted.insert(granted.id, granted.header.expect("a header").revision);
                let put = PutRequest { lease: granted.id, ..put(format!("leased/{:x}", granted.id), [9]) };
                client.kv.put(put).await.expect("a put");
            }
            4 => {
                let id = leases.granted.keys().copied().find(|id| !leases.revoked.contains_key(id));
                let Some(id) = id else { continue };
                let revoked = client.lease.lease_revoke(LeaseRevokeRequest { id }).await.expect("a revocation");
                leases.revoked.insert(id, revoked.into_inner().header.expect("a header").revision);
            }
            _ => {
                let head = client.kv.range(get("k")).await;
                let revision = head.expect("a range").into_inner().header.expect("a header").revision - 50;
                // This fails if another writer has compacted at a later revision.
                let _ = client.kv.compact(CompactionRequest { revision, physical: false }).await;
            }
        }
        done.fetch_add(1, Ordering::Relaxed);
    }
    leases
}

/// Saves a snapshot while clients write. Returns the file and the leases of all clients.
async fn save_under_load(server: &Server, folder: &Path) -> (PathBuf, Leases) {
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::default());
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        let client = Client::connect(server.endpoint()).await;
        writers.spawn(write(client, writer, Arc::clone(&stop), Arc::clone(&done)));
    }
    let written = async |count: usize| {
        eventually("the writes", async || match done.load(Ordering::Relaxed) {
            enough if enough >= count => Ok(()),
            few => Err(few),
        })
        .await;
    };
    written(WRITES_BEFORE).await;
    let file = save(&mut Client::connect(server.endpoint()).await, folder).await;
    written(done.load(Ordering::Relaxed) + WRITES_BEFORE / 10).await;
    stop.store(true, Ordering::Relaxed);
    let mut all = Leases::default();
    while let Some(leases) = writers.join_next().await {
        let leases = leases.expect("a writer");
        all.granted.extend(leases.granted);
        all.revoked.extend(leases.revoked);
    }
    (file, all)
}

async fn snapshot_under_load_is_consistent(backend: Backend) {
    let other = if backend == Backend::Sqlite { Backend::Postgres } else { Backend::Sqlite };
    let Some(server) = Server::orlop(backend).await else { return };
    let home = TempDir::new().expect("a folder");
    let (file, known) = save_under_load(&server, home.path()).await;
    let found = status(&file);
    let revision = found["revision"].as_i64().expect("a revision");
    let Some(copy) = restored(other, &file, home.path()).await else { return };
    let (mut ours, mut theirs) = (Client::connect(server.endpoint()).await, Client::connect(copy.endpoint()).await);

    assert_eq!(pairs(&mut theirs, 0).await, pairs(&mut theirs, revision).await, "the head is the snapshot's");
    // The source may have been compacted at a later revision since. If not, both stores must have the same pairs.
    if let Ok(range) = ours.kv.range(RangeRequest { revision, ..get("k") }).await {
        drop(range);
        assert_eq!(pairs(&mut theirs, revision).await, pairs(&mut ours, revision).await);
    }
    let there = leases(&mut theirs).await;
    let at = |revisions: &BTreeMap<i64, i64>, id: &i64| revisions.get(id).is_some_and(|at| *at <= revision);
    for id in known.granted.keys() {
        // A grant does not create a revision. It came before the snapshot if the revision in its response is lower.
        let granted_before = known.granted[id] < revision;
        let revoked_before = at(&known.revoked, id);
        assert!(!(revoked_before && there.contains(id)), "{id:x} was revoked before revision {revision}");
        assert!(!granted_before || revoked_before || there.contains(id), "{id:x} was granted before {revision}");
    }
    for pair in pairs(&mut theirs, 0).await.iter().filter(|pair| pair.lease != 0) {
        let asked = LeaseTimeToLiveRequest { id: pair.lease, keys: true };
        let lease = theirs.lease.lease_time_to_live(asked).await.expect("an answer").into_inner();
        assert!(lease.keys.contains(&pair.key) && lease.granted_ttl == 5_000 && lease.ttl > 4_000, "{lease:?}");
    }

    // A snapshot of the copy is restored into the first kind of database: nothing differs, and writes continue.
    let file = save(&mut theirs, home.path()).await;
    let back_folder = TempDir::new().expect("a folder");
    let Some(back) = restored(backend, &file, back_folder.path()).await else { return };
    let mut back = Client::connect(back.endpoint()).await;
    assert_eq!(pairs(&mut back, 0).await, pairs(&mut theirs, 0).await);
    assert_eq!(leases(&mut back).await, leases(&mut theirs).await);
    assert_eq!(hash_of_all(&mut back).await, hash_of_all(&mut theirs).await);
    assert_eq!(hash(&mut back, 0).await, hash(&mut theirs, 0).await);
    assert_eq!(back.put("new", "").await, revision + 1);
    let clusters = BTreeSet::from([cluster(&mut ours).await, cluster(&mut theirs).await, cluster(&mut back).await]);
    assert_eq!(clusters.len(), 3, "each store has its own cluster id");
}

async fn empty_and_small_stores_are_saved_by_etcdctl(backend: Backend) {
    let Some(etcdctl) = etcd_tool("etcdctl", "ORLOP_ETCDCTL") else { return skip("etcdctl") };
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    // A store without rows is at revision 1, for which etcdutl prints 0.
    for (revision, keys) in [(0, 0), (2, 1)] {
        let home = TempDir::new().expect("a folder");
        let file = home.path().join("saved.db");
        let save = ["--endpoints", server.endpoint(), "snapshot", "save", path(&file)];
        let saved = run(Command::new(&etcdctl).args(save));
        assert!(saved.status.success(), "{}", String::from_utf8_lossy(&saved.stderr));
        let found = status(&file);
        assert_eq!((&found["revision"], &found["totalKey"]), (&revision.into(), &keys.into()));
        let shown = prints(&["snapshot", "status", path(&file)]);
        assert!(shown.contains(&format!(", {revision}, {keys}, ")), "{shown}");
        if let Some(copy) = restored(backend, &file, home.path()).await {
            assert_eq!(pairs(&mut Client::connect(copy.endpoint()).await, 0).await.len(), keys);
        }
        client.put("a", [1]).await;
    }
}

/// Runs Orlop, which must fail with an error that contains all texts in `because`.
#[track_caller]
fn check_refused(arguments: &[&str], because: &[&str]) {
    let output = run(&mut orlop(arguments));
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{arguments:?}: {text}");
    for because in because {
        assert!(text.contains(because), "{arguments:?}: no {because:?}: {text}");
    }
    assert!(!text.contains("pass%20word"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn incomplete_snapshots_are_refused() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("a", vec![1; 100_000]).await;
    let home = TempDir::new().expect("a folder");
    let whole = fs::read(save(&mut client, home.path()).await).expect("a file can be read");
    let file = home.path().join("given.db");
    let target = home.path().join("data");
    let rows: [(&str, Vec<u8>, &str); 6] = [
        ("truncated", whole[..whole.len() - 5_000].to_vec(), "truncated"),
        ("truncated to whole pages plus the length of a checksum", whole[..whole.len() - 4_096].to_vec(), "damaged"),
        (
            "damaged",
            {
                let mut bytes = whole.clone();
                bytes[60_000] ^= 1;
                bytes
            },
            "damaged",
        ),
        ("without its checksum", whole[..whole.len() - 32].to_vec(), "--skip-hash-check"),
        ("text", b"hello".to_vec(), "is not a snapshot"),
        ("nothing", Vec::new(), "is not a snapshot"),
    ];
    for (what, bytes, because) in rows {
        fs::write(&file, bytes).expect("a file can be written");
        println!("{what}");
        check_refused(&["snapshot", "status", path(&file)], &["given.db", because]);
        check_refused(&["snapshot", "restore", path(&file), "--data-dir", path(&target)], &["given.db", because]);
        assert!(!target.join("orlop.db").exists(), "{what}");
    }
    check_refused(&["snapshot", "status", path(&home.path().join("absent"))], &["absent", "No such file"]);

    // A file without the checksum, such as a copy of the database file, is accepted with --skip-hash-check.
    fs::write(&file, &whole[..whole.len() - 32]).expect("a file can be written");
    prints(&["snapshot", "restore", path(&file), "--skip-hash-check", "--data-dir", path(&target)]);
    let again = ["snapshot", "restore", path(&file), "--skip-hash-check", "--data-dir", path(&target)];
    check_refused(&again, &["orlop.db exists already", "move it and the files"]);
}

/// A command line for etcdutl restores the snapshot.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flags_of_etcdutl_have_no_effect() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let file = save(&mut Client::connect(server.endpoint()).await, home.path()).await;
    let target = home.path().join("data");
    let members = ["--name=m1", "--initial-cluster", "m1=http://a:2380,m2=http://b:2380", "--initial-cluster-token=t"];
    let places = ["--initial-advertise-peer-urls=http://a:2380", "--wal-dir", "wal", "--initial-memory-map-size=1"];
    let restore = [&["snapshot", "restore", path(&file), "--data-dir", path(&target)][..], &members, &places].concat();
    let output = run(&mut orlop(restore));
    let text = String::from_utf8_lossy(&output.stderr);
    let notice = "ignoring flags of etcdutl that have no effect in Orlop: name, initial-cluster, \
                  initial-cluster-token, initial-advertise-peer-urls, initial-memory-map-size, wal-dir\n";
    assert!(output.status.success() && text.ends_with(notice), "{text}");
    assert!(target.join("orlop.db").exists() && !home.path().join("wal").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn foreign_and_newer_databases_are_refused() {
    let home = TempDir::new().expect("a folder");
    let sqlite = |name: &str, statements: &'static str| {
        let file = home.path().join(name);
        async move {
            use sqlx::{ConnectOptions as _, Connection as _, Executor as _, sqlite::SqliteConnectOptions};
            let options = SqliteConnectOptions::new().filename(&file).create_if_missing(true);
            let mut connection = options.connect().await.expect("a database");
            connection.execute(sqlx::raw_sql(statements)).await.expect("the statements");
            connection.close().await.expect("the connection closes");
            file
        }
    };
    let other = sqlite("other.db", "CREATE TABLE t (a)").await;
    let kine = sqlite("kine.db", "CREATE TABLE kine (id INTEGER)").await;
    let target = home.path().join("data");
    // A flag that would not help is not named.
    for flags in [&["--skip-hash-check"][..], &[]] {
        for (file, because) in [
            (&other, ["other.db", "is not an Orlop database"]),
            (&kine, ["kine.db is a database of kine", "orlop import kine --from"]),
        ] {
            let restore = [&["snapshot", "restore", path(file), "--data-dir", path(&target)][..], flags].concat();
            check_refused(&restore, &because);
        }
    }

    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    server.terminate().await;
    let copied = home.path().join("newer.db");
    fs::copy(server.data_dir().join("orlop.db"), &copied).expect("the file can be copied");
    let newer = sqlite(
        copied.file_name().and_then(|name| name.to_str()).expect("a name"),
        "INSERT INTO _sqlx_migrations SELECT 99, description, installed_on, success, checksum, execution_time \
         FROM _sqlx_migrations LIMIT 1",
    )
    .await;
    let restore = ["snapshot", "restore", path(&newer), "--skip-hash-check", "--data-dir", path(&target)];
    check_refused(&restore, &["another version of Orlop", "99"]);
    assert!(!target.join("orlop.db").exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn copied_file_with_a_wal_is_refused() {
    use sqlx::{ConnectOptions as _, Connection as _, sqlite::SqliteConnectOptions};
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    // The first key is in the file, the second in its WAL.
    Client::connect(server.endpoint()).await.put("a", [1]).await;
    server.terminate().await;
    server.restart().await;
    Client::connect(server.endpoint()).await.put("b", [1]).await;
    server.kill();
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("copied.db");
    let wal = home.path().join("copied.db-wal");
    fs::copy(server.data_dir().join("orlop.db"), &file).expect("the file can be copied");
    fs::copy(server.data_dir().join("orlop.db-wal"), &wal).expect("its WAL can be copied");
    let target = home.path().join("data");
    check_refused(&["snapshot", "status", path(&file), "--skip-hash-check"], &["copied.db-wal", "wal_checkpoint"]);
    let because = ["copied.db is a SQLite database without a checksum", "orlop check --datastore-endpoint sqlite:///"];
    check_refused(&["snapshot", "status", path(&file)], &because);
    let unverified = ["snapshot", "restore", path(&file), "--data-dir", path(&target)];
    check_refused(&unverified, &["copied.db has no checksum", "--skip-hash-check"]);
    let restore = ["snapshot", "restore", path(&file), "--skip-hash-check", "--data-dir", path(&target)];
    check_refused(&restore, &["copied.db-wal", "wal_checkpoint"]);
    assert!(!target.join("orlop.db").exists());

    // After the checkpoint that the error text advises, the file is accepted, also if an empty WAL remains.
    let mut connection = SqliteConnectOptions::new().filename(&file).connect().await.expect("a database");
    sqlx::raw_sql("PRAGMA wal_checkpoint(TRUNCATE)").execute(&mut connection).await.expect("a checkpoint");
    connection.close().await.expect("the connection closes");
    fs::write(&wal, "").expect("a file can be written");
    let found = prints(&["snapshot", "restore", path(&file), "--skip-hash-check", "--data-dir", path(&target)]);
    assert!(found.ends_with("revision 3\n"), "{found}");
    check_refused(&["snapshot", "status", path(&file), "--skip-hash-check"], &["copied.db", "0.2.0", "orlop check"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_into_a_used_postgres_is_refused() {
    use sqlx::{Connection as _, PgConnection};

    let Some(postgres) = Postgres::shared().await else { return };
    let source = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let file = save(&mut Client::connect(source.endpoint()).await, home.path()).await;
    let datastore = postgres.create_database();
    let restore = ["snapshot", "restore", path(&file), "--datastore-endpoint", &datastore];
    {
        let mut server = Server::orlop_on(&datastore, &["--name", "alice"]).await;
        check_refused(&restore, &["used by instance alice"]);
        Client::connect(server.endpoint()).await.put("a", [1]).await;
        server.terminate().await;
    }
    check_refused(&restore, &["already contains a log"]);
    let mut other = PgConnection::connect(&datastore).await.expect("a connection");
    sqlx::raw_sql("DELETE FROM kv_log; INSERT INTO auth_role VALUES ('role')")
        .execute(&mut other)
        .await
        .expect("a role");
    check_refused(&restore, &["already contains a log"]);
    for sql in ["DELETE FROM auth_role", "BEGIN; SELECT orlop_lock()"] {
        sqlx::raw_sql(sql).execute(&mut other).await.expect("an empty log, and its lock");
    }
    check_refused(&restore, &["no response within 12s; another restore, import or server may hold the lock"]);
}

/// An instance of the release 0.2.0 could not open the database again after a migration.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restore_that_is_refused_migrates_no_schema() {
    let Some(postgres) = Postgres::shared().await else { return };
    let source = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let file = save(&mut Client::connect(source.endpoint()).await, home.path()).await;
    let rows = [
        ("kv_log VALUES (2, 'a', 'v', 0, 1, 2, 0, false)", Some("already contains a log")),
        ("kv_log_more VALUES (2, 1, 'a', 'v', 0, 1, 2, 0, false)", Some("already contains a log")),
        ("lease VALUES (7, 60, clock_timestamp())", Some("already contains a log")),
        ("member VALUES (7, 'alice', '{}', 1, clock_timestamp(), clock_timestamp())", Some("used by instance alice")),
        ("member VALUES (7, 'alice', '{}', 1, 'epoch', 'epoch')", None),
    ];
    for (row, refusal) in rows {
        let datastore = postgres.create_database_of_the_first_schema().await;
        let name = database_name(&datastore);
        postgres.psql(name, &format!("INSERT INTO {name}.{row}"));
        let restore = ["snapshot", "restore", path(&file), "--datastore-endpoint", &datastore];
        let schema = match refusal {
            Some(because) => {
                check_refused(&restore, &[because]);
                "1"
            }
            // No instance has used it recently.
            None => {
                prints(&restore);
                "2"
            }
        };
        assert_eq!(postgres.psql(name, &format!("SELECT max(version) FROM {name}._sqlx_migrations")), schema, "{row}");
    }
}

on_both_backends!(snapshot_under_load_is_consistent, empty_and_small_stores_are_saved_by_etcdctl,);
