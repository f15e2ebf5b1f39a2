//! Every acknowledged write survives a kill and a clean stop of the process, and the state rebuilt from the log equals
//! the state in memory before.

mod synced;

use std::{
    collections::BTreeMap,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
};

use orlop_core::{
    auth::Caller,
    log::ReadLog as _,
    store::{
        Settings, Store,
        request::{CompactionWait, DeleteRequest, LeaseKeys, Op, PutLease, PutValue, TxnRequest as StoreTxn},
    },
    types::{KeyRange, LeaseId, Revision},
};
use orlop_sql::SqliteLog;
use orlop_wire::proto::client::etcdserverpb::{RequestOp, TxnRequest, request_op::Request};
use sqlx::{Connection as _, PgConnection, SqliteConnection};
use tonic::Code;

use crate::support::{Backend, Client, Random, Server, all, eventually, on_both_backends, put, wait_for_writes};

const CLIENTS: usize = 24;
/// Number of acknowledged writes per round before the server is stopped.
const ROUND_WRITES: usize = 1_500;

/// Acknowledged writes: key to revision.
type Acknowledged = BTreeMap<String, i64>;

async fn acknowledged_writes_survive_kill_9_and_transactions_stay_whole(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut acknowledged = Acknowledged::new();
    for round in 0..4 {
        let load = Load::start(server.endpoint(), round).await;
        wait_for_writes(ROUND_WRITES, &load.written).await;
        server.kill();
        acknowledged.extend(load.finish().await);
        check_density(&server).await;
        server.restart().await;
        check(server.endpoint(), &acknowledged).await;
    }
}

async fn sigterm_under_load_answers_every_write_and_exits_with_0(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let load = Load::start(server.endpoint(), 0).await;
    wait_for_writes(ROUND_WRITES, &load.written).await;
    let status = server.terminate().await;
    assert!(status.success(), "{status:?}");
    let acknowledged = load.finish().await;
    server.restart().await;
    check(server.endpoint(), &acknowledged).await;
}

/// Clients that write until the server stops.
struct Load {
    tasks: Vec<tokio::task::JoinHandle<Acknowledged>>,
    written: Arc<AtomicUsize>,
    stop: Arc<AtomicBool>,
}

impl Load {
    async fn start(endpoint: &str, round: usize) -> Self {
        let written = Arc::new(AtomicUsize::new(0));
        let stop = Arc::new(AtomicBool::new(false));
        let mut tasks = Vec::new();
        for client in 0..CLIENTS {
            let kv = Client::connect(endpoint).await;
            tasks.push(tokio::spawn(write(kv, format!("{round}/{client}"), Arc::clone(&written), Arc::clone(&stop))));
        }
        Self { tasks, written, stop }
    }

    async fn finish(self) -> Acknowledged {
        self.stop.store(true, Ordering::Relaxed);
        let mut all = Acknowledged::new();
        for task in self.tasks {
            all.extend(task.await.expect("a client ends with its acknowledged writes"));
        }
        assert!(all.len() >= ROUND_WRITES);
        all
    }
}

/// Makes single puts and, as every third write, a transaction that puts two keys. Writes each key once.
async fn write(mut client: Client, name: String, written: Arc<AtomicUsize>, stop: Arc<AtomicBool>) -> Acknowledged {
    let mut acknowledged = Acknowledged::new();
    for number in 0.. {
        if stop.load(Ordering::Relaxed) {
            break;
        }
        let pair = number % 3 == 0;
        let keys: Vec<String> = if pair {
            vec![format!("pair/{name}/{number}/a"), format!("pair/{name}/{number}/b")]
        } else {
            vec![format!("one/{name}/{number}")]
        };
        let put = |key: &String| put(key, [b'v'; 300]);
        let header = if pair {
            let success = keys.iter().map(|key| RequestOp { request: Some(Request::RequestPut(put(key))) }).collect();
            client.kv.txn(TxnRequest { success, ..Default::default() }).await.map(|answer| answer.into_inner().header)
        } else {
            client.kv.put(put(&keys[0])).await.map(|answer| answer.into_inner().header)
        };
        match header {
            Ok(header) => {
                let revision = header.expect("an answer has a header").revision;
                acknowledged.extend(keys.into_iter().map(|key| (key, revision)));
                written.fetch_add(1, Ordering::Relaxed);
            }
            Err(status) => {
                let stopped = [Code::Unavailable, Code::Cancelled, Code::Unknown, Code::Internal];
                assert!(stopped.contains(&status.code()), "{status:?}");
                break;
            }
        }
    }
    acknowledged
}

async fn check(endpoint: &str, acknowledged: &Acknowledged) {
    let mut client = Client::connect(endpoint).await;
    let answer = client.kv.range(all()).await.expect("the server takes a range").into_inner();
    let head = answer.header.expect("an answer has a header").revision;
    let text = |key: &[u8]| String::from_utf8(key.to_vec()).expect("keys are text");
    let stored: Acknowledged = answer.kvs.iter().map(|kv| (text(&kv.key), kv.mod_revision)).collect();
    for (key, revision) in acknowledged {
        assert_eq!(stored.get(key), Some(revision), "{key} was acknowledged at {revision}");
        assert!(*revision <= head);
    }
    for (key, revision) in stored.iter().filter(|(key, _)| key.starts_with("pair/")) {
        let other = format!("{}{}", &key[..key.len() - 1], if key.ends_with('a') { 'b' } else { 'a' });
        assert_eq!(stored.get(&other), Some(revision), "{key} and {other} are one transaction");
    }
}

/// Checks that the revisions on disk have no gap.
async fn check_density(server: &Server) {
    const COUNT: &str = "SELECT count(*), min(id), max(id) FROM kv_log";
    let counted = match server.datastore() {
        Some(url) => {
            let mut database = PgConnection::connect(url).await.expect("the database exists");
            sqlx::query_as(COUNT).fetch_one(&mut database).await
        }
        None => {
            let file = server.data_dir().join("orlop.db");
            let mut database =
                SqliteConnection::connect(&format!("sqlite://{}", file.display())).await.expect("the file opens");
            sqlx::query_as(COUNT).fetch_one(&mut database).await
        }
    };
    let (rows, first, last): (i64, i64, i64) = counted.expect("the log can be read with SQL");
    assert_eq!((first, rows), (2, last - first + 1));
}

#[tokio::test]
async fn index_and_leases_rebuilt_from_the_log_equal_memory() {
    for seed in 1..=6 {
        let home = tempfile::tempdir().expect("a temporary directory can be made");
        let file = home.path().join("orlop.db");
        let mut random = Random::new(seed);
        // Opens the log several times. Each time the store rebuilds the state that the previous one wrote.
        for _ in 0..3 {
            let store = open(&file).await;
            for _ in 0..400 {
                operate(&store, &mut random).await;
            }
            // Half of the compactions do not wait for the deletion of their rows, so the stop may interrupt it.
            let wait = if random.chance(50) { CompactionWait::ForRows } else { CompactionWait::ForRevision };
            let revision = Revision(random.between(store.head().0 - 100, store.head().0));
            // A compaction at or below the previous one is refused, which leaves a valid history.
            let _ = store.compact(&Caller::Server, revision, wait).await;
            let compacted = store.index_snapshot().compact_revision();
            if let Some(compacted) = compacted {
                eventually("compaction of the index", || {
                    let index = store.index_snapshot();
                    let mut again = index.clone();
                    while again.compact_step(&mut Default::default(), usize::MAX, &mut Vec::new()) {}
                    async move { if again == index { Ok(()) } else { Err(compacted) } }
                })
                .await;
            }
            let before = (store.index_snapshot(), leases(&store).await);
            store.stop().await;
            drop(store);

            let store = open(&file).await;
            assert_eq!(store.index_snapshot(), before.0, "seed {seed}");
            assert_eq!(leases(&store).await, before.1, "seed {seed}");
            store.stop().await;
        }
    }
}

async fn open(file: &Path) -> Store {
    let log = SqliteLog::open(file).await.expect("the file opens");
    assert!(log.meta().await.is_ok());
    Store::open(Arc::new(log), Settings { value_cache_bytes: 64 << 10, ..Settings::default() })
        .await
        .expect("the log can be read")
}

/// Returns for each lease its id with each of its keys, and its id with its granted TTL as text.
async fn leases(store: &Store) -> Vec<(LeaseId, Vec<u8>)> {
    let mut all = Vec::new();
    for id in store.leases(&Caller::Server).await.expect("leases are listed") {
        let lease = store
            .lease(&Caller::Server, id, LeaseKeys::Returned)
            .await
            .expect("a lease can be read")
            .expect("the lease is listed");
        all.extend(lease.keys.iter().map(|key| (id, key.to_vec())));
        all.push((id, lease.granted_secs.to_string().into_bytes()));
    }
    all.sort();
    all
}

/// Runs one random operation.
pub async fn operate(store: &Store, random: &mut Random) {
    let key = |random: &mut Random| vec![b'a' + random.below(9) as u8];
    let lease = |random: &mut Random| LeaseId(random.between(1, 4));
    let put = |random: &mut Random| orlop_core::store::request::PutRequest {
        key: key(random).into(),
        value: PutValue::New(vec![b'v'; random.below(400)].into()),
        lease: PutLease::Set(random.chance(30).then(|| lease(random))),
        prev_kv: false,
    };
    let delete = |random: &mut Random| DeleteRequest {
        range: KeyRange::from_wire(&key(random), if random.chance(30) { b"e" } else { b"" }),
        prev_kv: random.chance(50),
    };
    // Errors such as an unknown lease, or a lease that already exists, are expected.
    match random.weighted(&[50, 12, 20, 6, 4]) {
        0 => drop(store.put(&Caller::Server, put(random)).await),
        1 => drop(store.delete(&Caller::Server, delete(random)).await),
        2 => {
            let success = vec![Op::Delete(delete(random)), Op::Delete(delete(random)), Op::Put(put(random))];
            drop(store.txn(&Caller::Server, StoreTxn { compares: Vec::new(), success, failure: Vec::new() }).await);
        }
        3 => drop(store.grant(&Caller::Server, Some(lease(random)), random.between(1_000, 9_000)).await),
        _ => drop(store.revoke(&Caller::Server, lease(random)).await),
    }
}

on_both_backends!(
    acknowledged_writes_survive_kill_9_and_transactions_stay_whole,
    sigterm_under_load_answers_every_write_and_exits_with_0,
);
