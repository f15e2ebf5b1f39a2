//! The connection to Postgres breaks at every point of a commit. Every acknowledged write must exist afterwards, and no
//! refused write may.

use std::{
    collections::{BTreeMap, BTreeSet},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use tonic::Code;

use crate::support::{Client, Cut, Postgres, Proxy, Random, Server, Stream, all, eventually, everything, put};

const CLIENTS: usize = 6;
const CUTS: usize = 300;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_commits_keep_acknowledged_writes_and_apply_no_refused_write() {
    let Some(postgres) = Postgres::shared().await else { return };
    let proxy = Proxy::start(postgres.port()).await;
    let server = Server::orlop_on(&proxy.endpoint(&postgres.create_database()), &[]).await;
    let client = Client::connect(server.endpoint()).await;
    let mut watching = client.clone();
    let mut stream = Stream::open(&mut watching).await;
    stream.create(everything(0)).await;

    let mut tasks = Vec::new();
    let answered = Arc::new(AtomicUsize::new(0));
    let (stop, stopped) = tokio::sync::watch::channel(false);
    for number in 0..CLIENTS {
        tasks.push(tokio::spawn(write(client.clone(), number, Arc::clone(&answered), stopped.clone())));
    }
    let mut random = Random::new(7);
    let mut cuts_by_kind = BTreeMap::new();
    while proxy.cuts() < CUTS {
        let kind = random.pick(&[Cut::Before, Cut::During, Cut::After]);
        let before = proxy.cuts();
        proxy.arm(kind);
        eventually("a cut", async || if proxy.cuts() > before { Ok(()) } else { Err("no append came") }).await;
        *cuts_by_kind.entry(format!("{kind:?}")).or_insert(0) += 1;
        let before = answered.load(Ordering::Relaxed);
        eventually("a write on the next connection", async || {
            if answered.load(Ordering::Relaxed) > before { Ok(()) } else { Err("no write is acknowledged") }
        })
        .await;
    }
    stop.send_replace(true);
    let (mut acknowledged, mut refused, mut unknown) = (BTreeMap::new(), BTreeSet::new(), 0);
    for task in tasks {
        let outcomes = task.await.expect("a client ends");
        acknowledged.extend(outcomes.acknowledged);
        refused.extend(outcomes.refused);
        unknown += outcomes.unknown;
    }
    println!("{cuts_by_kind:?}: {} acknowledged, {} refused, {unknown} unknown", acknowledged.len(), refused.len());
    assert!(unknown > CUTS / 2 && acknowledged.len() >= CUTS, "enough commits were interrupted, and enough succeeded");

    let answer = eventually("a read", async || client.clone().kv.range(all()).await).await.into_inner();
    let head = answer.header.expect("a header").revision;
    let stored: BTreeMap<String, i64> =
        answer.kvs.iter().map(|kv| (String::from_utf8_lossy(&kv.key).into_owned(), kv.mod_revision)).collect();
    for (key, revision) in &acknowledged {
        assert_eq!(stored.get(key), Some(revision), "{key} was acknowledged");
    }
    for key in &refused {
        assert!(!stored.contains_key(key), "{key} was refused");
    }
    assert_eq!(stream.read_until(head).await, (2..=head).collect::<Vec<_>>(), "the watch has no gap");
    assert_eq!(stored.len() as i64, head - 1, "no write was applied twice");
}

#[derive(Default)]
struct Outcomes {
    acknowledged: BTreeMap<String, i64>,
    refused: BTreeSet<String>,
    unknown: usize,
}

/// Puts new keys, each once, until `stopped` is true.
async fn write(
    mut client: Client,
    number: usize,
    answered: Arc<AtomicUsize>,
    stopped: tokio::sync::watch::Receiver<bool>,
) -> Outcomes {
    let mut outcomes = Outcomes::default();
    for round in 0.. {
        if *stopped.borrow() {
            break;
        }
        let key = format!("{number}/{round}");
        match client.kv.put(put(&key, "value")).await {
            Ok(answer) => {
                answered.fetch_add(1, Ordering::Relaxed);
                outcomes.acknowledged.insert(key, answer.into_inner().header.expect("a header").revision);
            }
            Err(status) if status.message() == "etcdserver: no leader" => {
                outcomes.refused.insert(key);
            }
            Err(status) => {
                assert_eq!((status.code(), status.message()), (Code::Unavailable, "etcdserver: request timed out"));
                outcomes.unknown += 1;
            }
        }
    }
    outcomes
}

/// Notifications may not arrive: for example, a connection pooler between Orlop and Postgres does not forward them.
#[tokio::test]
async fn rows_of_other_instances_arrive_without_notifications() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let proxy = Proxy::start(postgres.port()).await;
    proxy.drop_notifications();
    let one = Server::orlop_on(&datastore, &["--name", "one"]).await;
    let two = Server::orlop_on(&proxy.endpoint(&datastore), &["--name", "two"]).await;
    let (mut a, mut b) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    let mut stream = Stream::open(&mut b).await;
    stream.create(everything(0)).await;
    for round in 0..10 {
        let revision = a.put("k", round.to_string()).await;
        assert_eq!(stream.read_until(revision).await, [revision]);
    }
}
