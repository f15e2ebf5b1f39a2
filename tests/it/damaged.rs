//! Database files that are truncated, have a flipped bit, or come from another version: a start either refuses them
//! with an error that names the file, or serves everything that was in them.

use std::{
    fs,
    os::unix::fs::FileExt as _,
    path::{Path, PathBuf},
    process::Stdio,
};

use orlop_wire::proto::client::{
    etcdserverpb::{
        AlarmRequest, AlarmType, CompactionRequest, LeaseGrantRequest, PutRequest, RequestOp, TxnRequest,
        request_op::Request,
    },
    mvccpb::KeyValue,
};
use sqlx::{
    AssertSqlSafe, ConnectOptions as _, Connection as _, Executor as _,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};
use tempfile::TempDir;
use tonic::Code;

use crate::support::{
    Backend, Client, DEADLINE, Lines, Postgres, Server, Started, all, ended, eventually, orlop, put, run, run_within,
};

/// SQLite's page size in bytes.
pub const PAGE: usize = 4_096;
/// The first byte of a page of rows.
pub const LEAF: u8 = 13;

/// The outcome of a start.
#[derive(Debug)]
enum Start {
    Refused(String),
    Served(Vec<KeyValue>),
}

/// Whether most of the history is compacted, which leaves gaps in the log that are not damage.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum History {
    Whole,
    Compacted,
}

/// Returns an empty folder, the bytes of a database file, and the pairs in it. Some values are larger than a page, most
/// keys have several versions, and some keys have a lease.
async fn store(history: History) -> (TempDir, Vec<u8>, Vec<KeyValue>) {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: 5_000, id: 7 }).await.expect("a lease");
    for number in 0..120_u8 {
        let bytes = if number % 10 == 0 { 9_000 } else { 100 };
        let lease = if number % 7 == 0 { 7 } else { 0 };
        let put = PutRequest { lease, ..put(format!("key/{}", number % 50), vec![number; bytes]) };
        client.kv.put(put).await.expect("a put");
    }
    if history == History::Compacted {
        let compaction = CompactionRequest { revision: 118, physical: true };
        client.kv.compact(compaction).await.expect("a compaction");
    }
    let kvs = everything(server.endpoint()).await.expect("a range");
    assert!(server.terminate().await.success());
    let bytes = fs::read(server.data_dir().join("orlop.db")).expect("the database exists");
    (tempfile::tempdir().expect("a folder"), bytes, kvs)
}

async fn everything(endpoint: &str) -> Result<Vec<KeyValue>, tonic::Status> {
    let mut client = Client::connect(endpoint).await;
    client.kv.range(all()).await.map(|answer| answer.into_inner().kvs)
}

/// Starts Orlop on a file of these bytes. Returns the pairs that it serves, or its error output.
async fn start(folder: &Path, bytes: &[u8]) -> Start {
    for old in fs::read_dir(folder).expect("a folder") {
        let old: PathBuf = old.expect("an entry").path();
        if old.is_file() {
            fs::remove_file(old).expect("a file can be removed");
        }
    }
    let file = folder.join("given.db");
    fs::write(&file, bytes).expect("a file can be written");
    start_on(&file).await
}

/// Starts Orlop on a file, as [`start`] does.
async fn start_on(file: &Path) -> Start {
    let endpoint = format!("sqlite://{}", file.display());
    let flags =
        ["--listen-client-urls", "http://127.0.0.1:0", "--log-level", "error", "--datastore-endpoint", &endpoint];
    let mut process = Started::spawn(orlop(flags).stdout(Stdio::piped()).stderr(Stdio::piped()));
    // The server prints a line or ends.
    let line = Lines::of(process.stdout.take().expect("stdout is piped")).next();
    let found = match line {
        Some(line) => Some(everything(line.rsplit(' ').next().expect("a URL")).await),
        None => None,
    };
    process.kill().expect("our child can be ended");
    let text = String::from_utf8(ended(process).stderr).expect("text");
    assert!(!text.contains("panicked"), "{text}");
    match found {
        None => Start::Refused(text),
        Some(Ok(kvs)) => Start::Served(kvs),
        Some(Err(status)) => panic!("the server serves a file that it cannot read: {status}"),
    }
}

/// Returns the pairs without their values. A flipped bit in a value is not detected because values have no checksum.
fn without_values(kvs: &[KeyValue]) -> Vec<KeyValue> {
    kvs.iter().map(|kv| KeyValue { value: Default::default(), ..kv.clone() }).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn truncated_file_is_refused() {
    let (folder, whole, kvs) = store(History::Whole).await;
    assert!(matches!(start(folder.path(), &whole).await, Start::Served(served) if served == kvs));
    let pages = whole.len() / PAGE;
    let mut lengths = vec![1, 15, 16, 99, 100, 511, 512, 1_024, PAGE - 1, PAGE, PAGE + 1, whole.len() - 1];
    lengths.extend([pages / 4, pages / 2, pages - 1].map(|pages| pages * PAGE));
    lengths.push(whole.len() - PAGE - 512);
    for length in lengths {
        let Start::Refused(text) = start(folder.path(), &whole[..length]).await else {
            panic!("the first {length} of {} bytes are served", whole.len())
        };
        assert!(text.contains("given.db"), "{length}: {text}");
    }
}

/// A process that is killed while it changes the mode of a new file leaves a rollback journal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_transaction_is_rolled_back() {
    let (folder, whole, kvs) = store(History::Whole).await;
    let (open, left) = (folder.path().join("open.db"), folder.path().join("left.db"));
    fs::write(&open, &whole).expect("a file can be written");
    let options = SqliteConnectOptions::new().filename(&open).journal_mode(SqliteJournalMode::Delete);
    let mut connection = options.pragma("cache_size", "1").connect().await.expect("a database");
    connection
        .execute("BEGIN; UPDATE kv_log SET value = zeroblob(length(value)); DELETE FROM kv_log")
        .await
        .expect("changes");
    for suffix in ["", "-journal"] {
        let with_suffix = |file: &Path| format!("{}{suffix}", file.display());
        fs::copy(with_suffix(&open), with_suffix(&left)).expect("a file can be copied");
    }
    assert_ne!(fs::read(&left).expect("a file"), whole, "some pages are written");
    let started = start_on(&left).await;
    assert!(matches!(&started, Start::Served(served) if *served == kvs), "{started:?}");
}

/// Flips a bit in the file's header and, for each page, in its type, its cell count, the offset of its first cell, and
/// its last byte.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn flipped_bit_is_refused_or_in_a_value() {
    for history in [History::Whole, History::Compacted] {
        let (folder, whole, kvs) = store(history).await;
        let mut places: Vec<usize> = vec![0, 16, 18, 21, 28, 31, 40, 47, 56, 59, 100, 104];
        for page in 1..whole.len() / PAGE {
            places.extend([0, 4, 9, PAGE - 1].map(|place| page * PAGE + place));
        }
        let (mut refused, mut served) = (0, 0);
        for place in places {
            let mut bytes = whole.clone();
            bytes[place] ^= 4;
            match start(folder.path(), &bytes).await {
                Start::Refused(text) => {
                    assert!(text.contains("given.db"), "{history:?}, byte {place}: {text}");
                    refused += 1;
                }
                Start::Served(found) => {
                    let (found, whole) = (without_values(&found), without_values(&kvs));
                    assert!(
                        found == whole,
                        "{history:?}, byte {place}: {} of {} keys are unchanged",
                        found.iter().filter(|kv| whole.contains(kv)).count(),
                        whole.len()
                    );
                    served += 1;
                }
            }
        }
        println!("{history:?}: {refused} refused, {served} served");
        assert!(refused > 10, "only {refused} starts are refused");
    }
}

/// Lowers the number of rows in the header of each page of rows. On the last page this truncates the log without a gap
/// in its revisions.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn page_that_hides_rows_is_refused() {
    let (folder, whole, _) = store(History::Whole).await;
    let pages: Vec<usize> =
        (1..whole.len() / PAGE).map(|page| page * PAGE).filter(|page| whole[*page] == LEAF).collect();
    let snapshots = tempfile::tempdir().expect("a folder");
    let mut hidden = 0;
    for page in pages {
        let cells = whole[page + 4];
        for bit in (0..8).map(|bit| 1 << bit).filter(|bit| cells & bit != 0) {
            let mut bytes = whole.clone();
            bytes[page + 4] ^= bit;
            let Start::Refused(text) = start(folder.path(), &bytes).await else {
                panic!("page {}: {} of {cells} rows are served", page / PAGE, cells - bit)
            };
            // Damage to the page with the schema's versions is reported by the migration check, which reads it first.
            let names_the_remedy = text.contains("`orlop check`") || text.contains("cannot migrate");
            assert!(text.contains("given.db") && names_the_remedy, "page {}: {text}", page / PAGE);
            // A start leaves files next to the database, and a snapshot with such files is refused.
            let copy = snapshots.path().join("copy.db");
            fs::write(&copy, &bytes).expect("a file can be written");
            let mut restore = orlop(["snapshot", "restore", "--skip-hash-check"]);
            let restored = run(restore.arg(&copy).arg("--data-dir").arg(snapshots.path().join("data")));
            let text = String::from_utf8_lossy(&restored.stderr);
            assert!(!restored.status.success() && text.contains("copy.db"), "page {}: {text}", page / PAGE);
            hidden += 1;
        }
    }
    assert!(hidden > 5, "{hidden}");
}

/// The last row that a start reads has the highest number that a change can have.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn row_with_the_highest_number_is_read() {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    let success = ["a", "b"].map(|key| RequestOp { request: Some(Request::RequestPut(put(key, ""))) }).to_vec();
    client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction");
    let compaction = CompactionRequest { revision: 2, physical: true };
    client.kv.compact(compaction).await.expect("a compaction");
    assert!(server.terminate().await.success());
    let file = server.data_dir().join("orlop.db");
    let mut connection = SqliteConnectOptions::new().filename(&file).connect().await.expect("the file opens");
    connection.execute("UPDATE kv_log_more SET sub = 4294967295").await.expect("a statement");
    connection.close().await.expect("the connection closes");
    let folder = tempfile::tempdir().expect("a folder");
    let started = start(folder.path(), &fs::read(&file).expect("a file can be read")).await;
    assert!(matches!(&started, Start::Served(kvs) if kvs.len() == 2), "{started:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn file_of_another_version_is_refused() {
    let (folder, whole, _) = store(History::Whole).await;
    let other = tempfile::tempdir().expect("a folder");
    let file = other.path().join("newer.db");
    for (sql, because) in [
        (
            "UPDATE _sqlx_migrations SET version = 9999 WHERE version = (SELECT max(version) FROM _sqlx_migrations)",
            "newer",
        ),
        (
            "INSERT INTO _sqlx_migrations SELECT 9999, description, installed_on, success, checksum, execution_time \
             FROM _sqlx_migrations LIMIT 1",
            "newer version of Orlop: this version does not know schema 9999",
        ),
        ("UPDATE _sqlx_migrations SET checksum = x'00'", "another version of Orlop"),
    ] {
        fs::write(&file, &whole).expect("a file can be written");
        let options = SqliteConnectOptions::new().filename(&file);
        let mut connection = options.connect().await.expect("the file opens");
        connection.execute(AssertSqlSafe(sql)).await.expect("a statement");
        connection.close().await.expect("the connection closes");
        let Start::Refused(text) = start(folder.path(), &fs::read(&file).expect("a file can be read")).await else {
            panic!("the file is served")
        };
        assert!(text.contains("given.db") && text.contains(because), "{sql}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_of_a_newer_version_is_refused() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    assert!(Server::orlop_on(&datastore, &[]).await.terminate().await.success());
    let name = datastore.rsplit('/').next().expect("a database").to_owned();
    let mut connection = sqlx::PgConnection::connect(&datastore).await.expect("the database exists");
    let newer = "INSERT INTO _sqlx_migrations (version, description, success, checksum, execution_time) \
                 VALUES (9999, 'newer', true, '', 0)";
    connection.execute(newer).await.expect("a statement");
    connection.close().await.expect("the connection closes");
    let flags = ["--listen-client-urls", "http://127.0.0.1:0", "--datastore-endpoint", &datastore];
    let output = run_within(DEADLINE, orlop(flags).args(["--data-dir", "unused"]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(
        text.contains(&name) && text.contains("newer version of Orlop: this version does not know schema 9999"),
        "{text}"
    );
}

/// Overwrites pages of rows under a server that serves them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn damage_that_a_read_finds_raises_the_alarm() {
    let (folder, whole, _) = store(History::Whole).await;
    let file = folder.path().join("given.db");
    fs::write(&file, &whole).expect("a file can be written");
    let server = Server::orlop_on(&format!("sqlite://{}", file.display()), &["--value-cache-bytes", "0"]).await;
    let opened = fs::File::options().write(true).open(&file).expect("the database exists");
    // The first pages are those of other tables; the last ones are needed for an append.
    let pages = whole.len() / PAGE;
    for page in (10..pages * 3 / 4).filter(|page| whole[page * PAGE] == LEAF) {
        opened.write_all_at(&[0; PAGE], (page * PAGE) as u64).expect("a page can be written");
    }
    let mut client = Client::connect(server.endpoint()).await;
    // SQLite reads pages again that it has read during the start, as the file has changed.
    client.put("j", "").await;
    let status = everything(server.endpoint()).await.map(|kvs| kvs.len()).expect_err("rows cannot be read");
    assert_eq!((status.code(), status.message()), (Code::DataLoss, "etcdserver: corrupt cluster"));
    eventually("the alarm", async || {
        let alarms =
            client.clone().maintenance.alarm(AlarmRequest::default()).await.expect("alarms").into_inner().alarms;
        if alarms.iter().any(|alarm| alarm.alarm() == AlarmType::Corrupt) { Ok(()) } else { Err(alarms) }
    })
    .await;
    let status = client.kv.put(put("k", "")).await.expect_err("writes are refused");
    assert_eq!((status.code(), status.message()), (Code::DataLoss, "etcdserver: corrupt cluster"));
}
