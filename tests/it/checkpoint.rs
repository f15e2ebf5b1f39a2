//! SQLite's database file while the WAL is copied into it: a failed sync, and other processes that read the file.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::MetadataExt as _,
    path::PathBuf,
    process::Command,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    time::Duration,
};

use orlop_core::supervise::EXIT_DISK_FAILED;
use sqlx::{ConnectOptions as _, Connection as _, sqlite::SqliteConnectOptions};
use tokio::{task::JoinSet, time::sleep};

use crate::{
    support::{Backend, Client, Place, Server, get, put, skip, wait_for_writes},
    torture::{
        judge::check_store,
        preload::{DATABASE, EIO, Field, Preload},
    },
};

const CLIENTS: usize = 8;
const VALUE_BYTES: usize = 64 << 10;
/// More writes than the WAL has space for before SQLite starts again at its beginning.
const WAL_WRITES: usize = 1_500;
const READ_TIME: Duration = Duration::from_millis(20);

/// Clients that put new keys until a put fails or there are enough.
struct Load {
    clients: JoinSet<BTreeSet<String>>,
    written: Arc<AtomicUsize>,
}

impl Load {
    async fn start(endpoint: &str, round: &str, writes_max: usize) -> Self {
        let mut load = Self { clients: JoinSet::new(), written: Arc::default() };
        for number in 0..CLIENTS {
            let (mut client, written) = (Client::connect(endpoint).await, Arc::clone(&load.written));
            let name = format!("{round}/{number}");
            load.clients.spawn(async move {
                let mut acknowledged = BTreeSet::new();
                while written.load(Ordering::Relaxed) < writes_max {
                    let key = format!("{name}/{}", acknowledged.len());
                    if client.kv.put(put(&key, value(&key))).await.is_err() {
                        break;
                    }
                    acknowledged.insert(key);
                    written.fetch_add(1, Ordering::Relaxed);
                }
                acknowledged
            });
        }
        load
    }

    /// Returns the keys of all acknowledged puts.
    async fn finish(self) -> BTreeSet<String> {
        self.clients.join_all().await.into_iter().flatten().collect()
    }
}

fn value(key: &str) -> Vec<u8> {
    key.bytes().cycle().take(VALUE_BYTES).collect()
}

async fn check(endpoint: &str, acknowledged: &BTreeSet<String>) {
    let mut client = Client::connect(endpoint).await;
    for key in acknowledged {
        let found = client.kv.range(get(key)).await.expect("the server takes a range").into_inner().kvs;
        assert!(found.len() == 1 && found[0].value == value(key), "{key} was acknowledged");
    }
}

/// Reads the file again and again until `stop`. While a read goes on, a checkpoint copies only the pages before it. The
/// connection cannot write: otherwise it would copy the WAL itself when it is closed after the end of the server.
async fn read_continually(file: PathBuf, stop: Arc<AtomicBool>) {
    let options = SqliteConnectOptions::new().filename(file).read_only(true);
    let mut database = options.connect().await.expect("the file opens");
    while !stop.load(Ordering::Relaxed) {
        let mut read = database.begin().await.expect("a transaction begins");
        sqlx::query("SELECT count(*) FROM kv_log").execute(&mut *read).await.expect("the table can be read");
        // The read goes on until the transaction is dropped.
        sleep(READ_TIME).await;
    }
    database.close().await.expect("a connection can be closed");
}

/// A sync that fails loses all pages that were copied since the last one, and SQLite does not repeat the copies of an
/// unfinished checkpoint. So a failed sync must not become a loss when the WAL, which still has the pages, is written
/// from its beginning.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_whose_sync_failed_are_on_the_disk_before_the_wal_restarts() {
    let preload = Preload::build();
    let place = Place { environment: preload.environment(), ..Place::default() };
    let mut server = Server::orlop_at(None, &[], place).await;
    preload.set(Field::SyncErrno, EIO);

    let load = Load::start(server.endpoint(), "before", usize::MAX).await;
    let stop = Arc::new(AtomicBool::new(false));
    let reader = tokio::spawn(read_continually(server.data_dir().join("orlop.db"), Arc::clone(&stop)));
    wait_for_writes(100, &load.written).await;
    preload.set(Field::SyncFiles, DATABASE);
    let status = server.ended().await;
    preload.set(Field::SyncFiles, 0);
    assert_eq!(status.code(), Some(EXIT_DISK_FAILED), "{}", server.log_tail());
    let mut acknowledged = load.finish().await;
    // The index of the WAL survives a restart while another process has it open.
    stop.store(true, Ordering::Relaxed);
    reader.await.expect("the reader ends");

    server.restart().await;
    acknowledged.extend(Load::start(server.endpoint(), "after", WAL_WRITES).await.finish().await);
    server.kill();
    preload.cut_power(&server.data_dir());
    check_store(&server);
    server.restart().await;
    check(server.endpoint(), &acknowledged).await;
}

/// A process that closes a database as its last user deletes the WAL. The server's locks on the file prevent that, and a
/// process loses all its locks on a file when it closes any descriptor of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wal_stays_when_another_process_has_read_the_file() {
    if Command::new("sqlite3").arg("--version").output().is_err() {
        return skip("sqlite3");
    }
    let Some(server) = Server::orlop(Backend::Sqlite).await else { return };
    let wal = server.data_dir().join("orlop.db-wal");
    let inode = fs::metadata(&wal).expect("there is a WAL").ino();
    let acknowledged = Load::start(server.endpoint(), "k", WAL_WRITES).await.finish().await;
    let read = Command::new("sqlite3")
        .arg(server.data_dir().join("orlop.db"))
        .arg("SELECT count(*) FROM kv_log")
        .output()
        .expect("sqlite3 can be started");
    assert_eq!(String::from_utf8_lossy(&read.stdout).trim(), acknowledged.len().to_string());
    assert_eq!(fs::metadata(&wal).expect("there is a WAL").ino(), inode);
}
