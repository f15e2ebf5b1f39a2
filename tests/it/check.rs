//! `orlop check`: reports no violation in a store that a server wrote, even if the server was killed, and reports every
//! injected violation.

mod archive;
mod corruptions;
mod indexes;

use std::{
    collections::BTreeMap,
    fs,
    path::{Path, PathBuf},
    process::Output,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use orlop_core::{
    auth::Caller,
    log::Log,
    store::{Settings, Store, request::CompactionWait},
    types::Revision,
};
use orlop_sql::{Durability, PostgresLog, PostgresSettings, SqliteLog};
use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, LeaseGrantRequest, PutRequest, RequestOp, TxnRequest, request_op::Request,
};
use serde_json::Value;
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _, PgConnection, sqlite::SqliteConnectOptions,
};
use tempfile::TempDir;
use tokio::task::JoinSet;

use self::corruptions::{CORRUPTIONS, Copies, Corruption, POSTGRES_CORRUPTIONS};
use crate::{
    damaged::{LEAF, PAGE},
    durability::operate,
    snapshot::write,
    start::check_refused,
    support::{Backend, Client, Postgres, Random, Server, delete, on_both_backends, orlop, put, run, wait_for_writes},
};

/// The location of a store, as the server's flag takes it.
#[derive(Clone, Debug)]
pub struct Place(String);

impl Place {
    /// Returns the location of a store to create, or `None` if the machine lacks the backend.
    pub async fn new(backend: Backend, file: &Path) -> Option<Self> {
        Some(match backend {
            Backend::Sqlite => Self::sqlite(file),
            Backend::Postgres => Self(Postgres::shared().await?.create_database()),
        })
    }

    /// Returns the location of a store with this endpoint.
    pub fn at(datastore: &str) -> Self {
        Self(datastore.to_owned())
    }

    fn sqlite(file: &Path) -> Self {
        Self(format!("sqlite://{}", file.display()))
    }

    fn of(server: &Server) -> Self {
        match server.datastore() {
            Some(endpoint) => Self(endpoint.to_owned()),
            None => Self::sqlite(&server.data_dir().join("orlop.db")),
        }
    }

    /// Returns the location of the rows that a server keeps after a compaction.
    pub fn archive_of(server: &Server) -> Self {
        match server.datastore() {
            Some(endpoint) => Self(endpoint.to_owned()),
            None => Self::sqlite(&server.data_dir().join("orlop.db-archive")),
        }
    }

    fn file(&self) -> Option<PathBuf> {
        self.0.strip_prefix("sqlite://").map(PathBuf::from)
    }

    fn check(&self, flags: &[&str]) -> Output {
        let place = ["check", "--datastore-endpoint", &self.0];
        let output = run(orlop(place).args(flags));
        let text = String::from_utf8_lossy(&output.stderr);
        // `pass%20word` is the password in the endpoints of the tests' databases.
        assert!(!text.contains("panicked") && !text.contains("pass%20word"), "{text}");
        output
    }

    /// Runs the check and returns its report; the exit status must match the report.
    #[track_caller]
    fn report(&self) -> Value {
        let output = self.check(&["--json"]);
        let text = String::from_utf8_lossy(&output.stdout);
        let report: Value =
            serde_json::from_str(&text).unwrap_or_else(|_| panic!("{text}{}", String::from_utf8_lossy(&output.stderr)));
        let status = if report["sound"] == true { 0 } else { 1 };
        assert_eq!(output.status.code(), Some(status), "{report}");
        assert_eq!(output.stderr, b"", "no progress bar without a terminal");
        report
    }

    #[track_caller]
    fn assert_sound(&self) -> Value {
        let report = self.report();
        assert_eq!(report["violations"], Value::Array(Vec::new()), "{self:?}");
        assert_eq!(report["sound"], true);
        report
    }

    /// Returns the lines that report violations.
    fn violations(&self) -> Vec<String> {
        let output = self.check(&[]);
        let text = String::from_utf8(output.stdout).expect("text");
        let lines = text.lines().skip_while(|line| !line.starts_with("violations  ")).skip(1);
        lines
            .take_while(|line| !line.starts_with("Keep a copy") && !line.starts_with("The store is "))
            .map(str::to_owned)
            .collect()
    }

    pub async fn execute(&self, sql: &str) {
        let sql = sqlx::raw_sql(AssertSqlSafe(sql.to_owned()));
        match self.file() {
            Some(file) => {
                let options = SqliteConnectOptions::new().filename(file);
                let mut connection = options.connect().await.expect("the file opens");
                connection.execute(sql).await.expect("the statements");
                connection.close().await.expect("the connection closes");
            }
            None => {
                let mut connection = PgConnection::connect(&self.0).await.expect("the database exists");
                connection.execute(sql).await.expect("the statements");
                connection.close().await.expect("the connection closes");
            }
        }
    }
}

async fn put_all(client: &mut Client, keys: &[&str]) {
    let success = keys.iter().map(|key| RequestOp { request: Some(Request::RequestPut(put(key, "1"))) }).collect();
    client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction");
}

/// Writes this history of revisions:
///
/// ```text
///  2 put a      5 put c, put d, put e     8 put a      11 delete e
///  3 put b      6 delete a                9 put d      12 put f
///  4 put a      7 put a                  10 put b
/// ```
///
/// Key b is attached to lease 7f.
async fn write_worked_history(server: &Server) {
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { id: 0x7f, ttl: 5_000 }).await.expect("a lease");
    for (key, lease) in [("a", 0), ("b", 0x7f), ("a", 0)] {
        client.kv.put(PutRequest { lease, ..put(key, "1") }).await.expect("a put");
    }
    put_all(&mut client, &["c", "d", "e"]).await;
    client.kv.delete_range(delete("a")).await.expect("a delete");
    for (key, lease) in [("a", 0), ("a", 0), ("d", 0), ("b", 0x7f)] {
        client.kv.put(PutRequest { lease, ..put(key, "2") }).await.expect("a put");
    }
    client.kv.delete_range(delete("e")).await.expect("a delete");
    client.put("f", "1").await;
}

async fn corruptions_are_reported_with_their_rows(backend: Backend) {
    let Some(copies) = Copies::new(backend).await else { return };
    let of_backend: &[Corruption] = if backend == Backend::Postgres { &POSTGRES_CORRUPTIONS } else { &[] };
    for (number, (sql, expected, start)) in CORRUPTIONS.iter().chain(of_backend).enumerate() {
        let place = copies.copy(number);
        place.execute(sql).await;
        let found = place.violations();
        assert_eq!(found.len(), expected.len(), "{sql}: {found:#?}");
        for (line, expected) in found.iter().zip(*expected) {
            assert!(line.contains(expected), "{sql}: {line:?} does not contain {expected:?}");
        }
        let report = place.report();
        assert_eq!(report["violationsTotal"], expected.len(), "{report}");
        if let Some(because) = start {
            let flags = ["--datastore-endpoint", &place.0, "--listen-client-urls", "http://127.0.0.1:0"];
            check_refused(&flags, &[], &["cannot read the database", because, "`orlop check`"]);
        }
    }
}

async fn report_is_limited_and_counts_the_rest(backend: Backend) {
    let Some(copies) = Copies::new(backend).await else { return };
    let place = copies.copy(0);
    place.execute("UPDATE kv_log SET version = version + 100 WHERE id IN (2, 3, 4, 5, 7)").await;
    let all = place.violations();
    assert!(all.len() > 5, "{all:?}");
    let text = String::from_utf8(place.check(&["--limit", "2"]).stdout).expect("text");
    assert!(text.contains(&format!(
        "violations        {}\n{}\n{}\nand {} more",
        all.len(),
        all[0],
        all[1],
        all.len() - 2
    )));
    assert!(text.contains("docs/how-to/backup.md"), "{text}");
    let output = place.check(&["--limit", "0", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).expect("JSON");
    assert_eq!((&report["violations"], &report["violationsTotal"]), (&Value::Array(Vec::new()), &all.len().into()));
}

/// Rows that compaction has still to delete, and transactions whose first row it has already deleted, are valid.
async fn rows_left_by_compaction_are_no_violations(backend: Backend) {
    let Some(copies) = Copies::new(backend).await else { return };
    // Compact revisions, and the number of rows that compaction has still to delete: up to revision 8 the rows of a at
    // revisions 2, 4, 6 and 7; at 9 also d at 5; at 12 also b at 3, e at 5 and the delete at 11.
    for (number, (compacted, to_purge)) in
        [(2, 0), (4, 1), (6, 2), (7, 3), (8, 4), (9, 5), (12, 8)].into_iter().enumerate()
    {
        let place = copies.copy(number);
        place.execute(&format!("INSERT INTO meta VALUES ('compact_revision', {compacted})")).await;
        let report = place.assert_sound();
        assert_eq!(report["rowsToPurge"], to_purge, "{compacted}: {report}");
        assert_eq!(report["compactRevision"], compacted);
    }

    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    put_all(&mut client, &["c", "d"]).await;
    client.put("c", "2").await;
    // Deletes c at revision 2, which is the first row of its transaction.
    let compaction = CompactionRequest { revision: 3, physical: true };
    client.kv.compact(compaction).await.expect("a compaction");
    let report = Place::of(&server).assert_sound();
    assert_eq!((&report["rows"], &report["firstRevision"], &report["liveKeys"]), (&2.into(), &3.into(), &2.into()));
}

pub async fn open_log(place: &Place) -> Arc<dyn Log> {
    match place.file() {
        Some(file) => Arc::new(SqliteLog::open(&file).await.expect("the file opens")),
        None => {
            let settings = PostgresSettings {
                endpoint: place.0.clone(),
                poll_interval: Duration::from_millis(100),
                connections_max: 4,
                name: "check".to_owned(),
                client_urls: Vec::new(),
                durability: Durability::Synced,
            };
            Arc::new(PostgresLog::open(settings).await.expect("the database opens"))
        }
    }
}

async fn open(place: &Place) -> Store {
    Store::open(open_log(place).await, Settings::default()).await.expect("the log can be read")
}

async fn check_passes_after_random_operations(backend: Backend) {
    let folder = TempDir::new().expect("a folder");
    for seed in 1..=4 {
        let Some(place) = Place::new(backend, &folder.path().join(format!("{seed}.db"))).await else { return };
        println!("seed {seed}");
        let mut random = Random::new(seed);
        for _ in 0..4 {
            let store = open(&place).await;
            for _ in 0..150 {
                operate(&store, &mut random).await;
            }
            // Half of the compactions do not wait for the deletion of their rows, so the stop may interrupt it.
            let wait = if random.chance(50) { CompactionWait::ForRows } else { CompactionWait::ForRevision };
            let revision = Revision(random.between(store.head().0 - 60, store.head().0));
            // A compaction at or below the previous one is refused, which leaves a valid history.
            let _ = store.compact(&Caller::Server, revision, wait).await;
            let report = place.assert_sound();
            assert_eq!(report["revision"], store.head().0);
            let index = store.index_snapshot();
            let live = index.range(.., index.head()).count();
            assert_eq!(report["liveKeys"], live);
            store.stop().await;
            place.assert_sound();
        }
    }
}

async fn check_passes_on_a_running_store(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::<AtomicUsize>::default());
    let mut writers = JoinSet::new();
    for writer in 0..3 {
        let client = Client::connect(server.endpoint()).await;
        writers.spawn(write(client, writer, Arc::clone(&stop), Arc::clone(&done)));
    }
    let place = Place::of(&server);
    for round in 1..=6 {
        wait_for_writes(round * 150, &done).await;
        let place = place.clone();
        let report = tokio::task::spawn_blocking(move || place.assert_sound()).await.expect("a check");
        assert!(report["rows"].as_u64() > Some(0), "{report}");
    }
    stop.store(true, Ordering::Relaxed);
    while writers.join_next().await.is_some() {}
    server.kill();
    let files = || -> BTreeMap<PathBuf, Vec<u8>> {
        let entries = fs::read_dir(server.data_dir()).into_iter().flatten().flatten().map(|entry| entry.path());
        let contents = entries.filter(|path| path.is_file() && !path.to_string_lossy().ends_with("-shm"));
        contents.map(|path| (path.clone(), fs::read(&path).expect("a file can be read"))).collect()
    };
    let before = files();
    place.assert_sound();
    assert!(files() == before, "the check writes nothing, and leaves the WAL of a killed server to the next start");
}

/// Returns the file of a SQLite store of about 100 pages, which no server uses.
async fn large_sqlite_store(folder: &Path) -> PathBuf {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..300 {
        client.put(format!("key/{number:03}"), "v".repeat(1_000)).await;
    }
    server.terminate().await;
    let file = folder.join("large.db");
    fs::copy(server.data_dir().join("orlop.db"), &file).expect("a copy");
    file
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damaged_sqlite_file_is_reported_without_a_panic() {
    let folder = TempDir::new().expect("a folder");
    let whole = fs::read(large_sqlite_store(folder.path()).await).expect("a file can be read");
    let value = whole.windows(200).rposition(|bytes| bytes.iter().all(|byte| *byte == b'v')).expect("a value");
    let rows: [(&str, Vec<u8>, Option<&str>); 6] = [
        ("whole", whole.clone(), None),
        ("truncated in the middle", whole[..whole.len() / 8192 * 4096].to_vec(), Some("malformed")),
        ("truncated within a page", whole[..whole.len() - 1_000].to_vec(), Some("bytes, expected")),
        ("truncated after the first page", whole[..4_096].to_vec(), Some("malformed")),
        // The byte that holds a page's type.
        ("flipped bit in the middle", flipped(&whole, whole.len() / 8192 * 4096), Some("database: ")),
        // Known limit: values have no checksum.
        ("flipped bit in a value", flipped(&whole, value), None),
    ];
    for (what, bytes, expected) in rows {
        let file = folder.path().join("given.db");
        fs::write(&file, bytes).expect("a file can be written");
        let found = Place::sqlite(&file).violations().join("\n");
        println!("{what}: {found}");
        let quick = Place::sqlite(&file).check(&["--quick"]);
        assert_eq!(quick.status.code(), Some(i32::from(expected.is_some())), "{what}");
        match expected {
            Some(expected) => assert!(found.contains(expected), "{what}: {found}"),
            None => drop(Place::sqlite(&file).assert_sound()),
        }
    }
    // The check may or may not report random wrong bytes, but it must end by itself with one of its exit codes.
    let mut random = Random::new(7);
    for _ in 0..25 {
        let mut bytes = whole.clone();
        for _ in 0..40 {
            let at = 100 + random.below(bytes.len() - 100);
            bytes[at] = random.next() as u8;
        }
        let file = folder.path().join("random.db");
        fs::write(&file, bytes).expect("a file can be written");
        let code = Place::sqlite(&file).check(&[]).status.code();
        assert!(matches!(code, Some(0..=2)), "{code:?}");
    }
}

/// SQLite reports the pages, and then an error when it reads their rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_damaged_page_is_reported_if_sqlite_cannot_read_on() {
    let folder = TempDir::new().expect("a folder");
    let file = large_sqlite_store(folder.path()).await;
    let mut bytes = fs::read(&file).expect("a file can be read");
    // The first pages are those of other tables.
    let leaves: Vec<usize> = (10..bytes.len() / PAGE).filter(|page| bytes[page * PAGE] == LEAF).collect();
    let damaged = [leaves[leaves.len() / 3], leaves[leaves.len() * 2 / 3]];
    for page in damaged {
        bytes[page * PAGE..][..PAGE].fill(0);
    }
    fs::write(&file, bytes).expect("a file can be written");
    let found = Place::sqlite(&file).violations().join("\n").to_lowercase();
    // SQLite counts pages from 1.
    for number in damaged.map(|page| page + 1) {
        assert!(found.contains(&format!("page {number}: ")), "{number}: {found}");
    }
    assert!(found.contains("malformed"), "the check goes on to the rows: {found}");
}

fn flipped(bytes: &[u8], at: usize) -> Vec<u8> {
    let mut bytes = bytes.to_vec();
    bytes[at] ^= 1;
    bytes
}

#[track_caller]
fn cannot_be_checked(place: &Place, because: &[&str]) {
    let output = place.check(&[]);
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(2), "{place:?}: {text}");
    assert_eq!(output.stdout, b"", "{place:?}");
    for because in because {
        assert!(text.contains(because), "{place:?}: no {because:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_stores_of_this_version_are_checked() {
    let folder = TempDir::new().expect("a folder");
    let file = |name: &str| folder.path().join(name);
    fs::write(file("empty.db"), b"").expect("a file can be written");
    fs::write(file("text.db"), vec![7; 8_192]).expect("a file can be written");
    fs::copy(large_sqlite_store(folder.path()).await, file("newer.db")).expect("a copy");
    Place::sqlite(&file("newer.db"))
        .execute(
            "INSERT INTO _sqlx_migrations SELECT 99, description, installed_on, success, checksum, execution_time \
             FROM _sqlx_migrations LIMIT 1",
        )
        .await;
    let mut other = SqliteConnectOptions::new().filename(file("other.db")).create_if_missing(true).connect().await;
    let other = other.as_mut().expect("a database");
    other.execute("CREATE TABLE t (a)").await.expect("a table");
    for (name, because) in [
        ("absent.db", "No such file"),
        ("", "not a file"),
        ("empty.db", "is not an Orlop database"),
        ("text.db", "not a database"),
        ("other.db", "is not an Orlop database"),
        ("newer.db", "another version of Orlop: it has schema 99"),
    ] {
        cannot_be_checked(&Place::sqlite(&file(name)), &[name, because]);
    }
    cannot_be_checked(&Place("mysql://user:secret@host/db".to_owned()), &["sqlite://", "postgres://"]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_without_a_store_of_this_version_cannot_be_checked() {
    let Some(postgres) = Postgres::shared().await else { return };
    let place = Place(postgres.create_database());
    cannot_be_checked(&place, &["database orlop_", "contains no Orlop log"]);
    drop(Server::orlop_on(&place.0, &[]).await);
    place.assert_sound();
    place
        .execute(
            "INSERT INTO _sqlx_migrations SELECT 99, description, installed_on, success, checksum, execution_time \
             FROM _sqlx_migrations LIMIT 1",
        )
        .await;
    cannot_be_checked(&place, &["another version of Orlop: it has schema 99"]);
}

on_both_backends!(
    corruptions_are_reported_with_their_rows,
    report_is_limited_and_counts_the_rest,
    rows_left_by_compaction_are_no_violations,
    check_passes_after_random_operations,
    check_passes_on_a_running_store,
);
