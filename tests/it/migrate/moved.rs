//! Clients that are moved from the source to the copy while they write, watch and renew a lease.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use orlop_wire::proto::client::{
    etcdserverpb::{
        Compare, LeaseGrantRequest, LeaseKeepAliveRequest, PutRequest, RequestOp, TxnRequest, WatchRequest,
        compare::{CompareResult, CompareTarget, TargetUnion},
        request_op::Request,
        watch_request::RequestUnion,
    },
    mvccpb::Event,
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_stream::StreamExt as _;
use tonic::Status;

use super::{Destination, Source, WRITERS, source};
use crate::support::{Backend, Client, DEADLINE, Etcd, Link, everything, get, on_both_backends, put};

/// Writes of each client after it was moved.
const WRITES_AFTER: usize = 20;

/// What the clients of a store have seen: acknowledged writes and events.
#[derive(Default)]
struct Record {
    /// By revision.
    writes: BTreeMap<i64, (String, String)>,
    /// Each with its revision, in the order in which a watcher got them.
    events: Vec<(i64, String, String)>,
}

/// Writes with compare-and-swap on the revision of its key until it has made some writes after `moved` was set.
async fn swap(endpoint: String, key: String, moved: Arc<AtomicBool>) -> BTreeMap<i64, (String, String)> {
    let mut client = Client::connect(&endpoint).await;
    let (mut acknowledged, mut revision, mut after) = (BTreeMap::new(), 0, 0);
    for number in 0.. {
        let is_moved = moved.load(Ordering::Relaxed);
        let (value, is_last) = (number.to_string(), after == WRITES_AFTER);
        if is_last {
            break;
        }
        match swap_once(&mut client, &key, &value, revision).await {
            Ok(Some(written)) => {
                acknowledged.insert(written, (key.clone(), value));
                revision = written;
                after += usize::from(is_moved);
            }
            // The outcome of an earlier write was unknown, or the key is new: it has another revision.
            Ok(None) => revision = current(&mut client, &key).await.unwrap_or(revision),
            Err(_) => {
                sleep(Duration::from_millis(20)).await;
                revision = current(&mut client, &key).await.unwrap_or(revision);
            }
        }
    }
    acknowledged
}

async fn swap_once(client: &mut Client, key: &str, value: &str, revision: i64) -> Result<Option<i64>, Status> {
    let unchanged = Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Mod.into(),
        key: key.to_owned().into(),
        target_union: Some(TargetUnion::ModRevision(revision)),
        ..Default::default()
    };
    let put = Request::RequestPut(put(key, value));
    let txn = TxnRequest { compare: vec![unchanged], success: vec![RequestOp { request: Some(put) }], failure: vec![] };
    let answer = client.kv.txn(txn).await?.into_inner();
    Ok(answer.succeeded.then(|| answer.header.expect("a header").revision))
}

async fn current(client: &mut Client, key: &str) -> Result<i64, Status> {
    let found = client.kv.range(get(key)).await?.into_inner().kvs;
    Ok(found.first().map_or(0, |pair| pair.mod_revision))
}

/// Watches everything until the event at `end` has arrived, through all interruptions.
async fn watch(endpoint: String, end: Arc<AtomicI64>) -> Vec<(i64, String, String)> {
    let mut client = Client::connect(&endpoint).await;
    let mut all: Vec<(i64, String, String)> = Vec::new();
    loop {
        let from = all.last().map_or(2, |(revision, _, _)| revision + 1);
        // An error is followed by another try.
        let _ = watch_from(&mut client, from, &end, &mut all).await;
        let last = all.last().map_or(0, |(revision, _, _)| *revision);
        if last == end.load(Ordering::Relaxed) {
            return all;
        }
        sleep(Duration::from_millis(20)).await;
    }
}

async fn watch_from(
    client: &mut Client,
    from: i64,
    end: &AtomicI64,
    all: &mut Vec<(i64, String, String)>,
) -> Result<(), Status> {
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(everything(from))) };
    let requests = tokio_stream::once(request).chain(tokio_stream::pending());
    let mut answers = client.watch.watch(requests).await?.into_inner();
    while all.last().map_or(0, |(revision, _, _)| *revision) != end.load(Ordering::Relaxed) {
        // The end may be set while no event arrives.
        let Ok(answer) = timeout(Duration::from_millis(200), answers.message()).await else { continue };
        let Some(answer) = answer? else { return Ok(()) };
        assert!(!answer.canceled, "{answer:?}");
        all.extend(answer.events.into_iter().map(seen_event));
    }
    Ok(())
}

fn seen_event(event: Event) -> (i64, String, String) {
    let pair = event.kv.expect("an event has a pair");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (pair.mod_revision, text(&pair.key), text(&pair.value))
}

/// Clients that a balancer moves from the source to the copy lose nothing, see nothing twice, and keep their lease.
async fn clients_go_on_at_the_copy_of(of: Source, backend: Backend) {
    let Some(source) = source(of, backend).await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let balancer = Link::to(source.port()).await;
    let address = format!("http://127.0.0.1:{}", balancer.port());
    let mut client = Client::connect(&address).await;
    let lease = client.lease.lease_grant(LeaseGrantRequest { ttl: 30, id: 0 }).await.expect("a lease").into_inner().id;
    client.kv.put(PutRequest { lease, ..put("leased", "1") }).await.expect("a put");
    let (moved, end) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicI64::new(-1)));
    let mut writers = JoinSet::new();
    for writer in 0..WRITERS {
        writers.spawn(swap(address.clone(), format!("key/{writer}"), Arc::clone(&moved)));
    }
    let watcher = tokio::spawn(watch(address.clone(), Arc::clone(&end)));
    // A migration that follows is replaced by one that cuts over.
    let mut migrator = destination.migrate(source.endpoint(), &[]);
    migrator.says("restored a snapshot").await;
    migrator.kill();
    let copy = destination.cut_over(&source, &["--fence"]).await;
    balancer.set_target(copy.port());
    balancer.reset();
    moved.store(true, Ordering::Relaxed);
    let mut record = Record::default();
    while let Some(acknowledged) = writers.join_next().await {
        record.writes.extend(acknowledged.expect("a writer"));
    }
    let mut client = Client::connect(copy.endpoint()).await;
    let head = client.kv.range(get("leased")).await.expect("a range").into_inner();
    assert_eq!(head.kvs.first().map(|pair| pair.lease), Some(lease), "the key is attached to its lease");
    let head = head.header.expect("a header").revision;
    end.store(head, Ordering::Relaxed);
    record.events = timeout(DEADLINE, watcher).await.expect("the watcher ends in time").expect("the watcher");
    let revisions: Vec<i64> = record.events.iter().map(|(revision, _, _)| *revision).collect();
    assert!(revisions.iter().copied().eq(2..=head), "each revision has one event: {revisions:?}");
    for (revision, (key, value)) in &record.writes {
        let index = usize::try_from(revision - 2).expect("a revision after the first");
        assert_eq!(record.events[index], (*revision, key.clone(), value.clone()), "an acknowledged write");
    }
    let alive = tokio_stream::once(LeaseKeepAliveRequest { id: lease }).chain(tokio_stream::pending());
    let mut answers = client.lease.lease_keep_alive(alive).await.expect("a stream").into_inner();
    assert_eq!(answers.message().await.expect("an answer").expect("an answer").ttl, 30, "the lease goes on");
    let refused = Client::connect(source.endpoint()).await.kv.put(put("late", "")).await;
    assert!(refused.is_err_and(|status| status.message() == "etcdserver: corrupt cluster"), "the source is fenced");
}

async fn clients_of_etcd_go_on_at_the_copy(backend: Backend) {
    for etcd in Etcd::ALL {
        println!("{etcd}");
        clients_go_on_at_the_copy_of(Source::Etcd(etcd), backend).await;
    }
}

async fn clients_of_orlop_go_on_at_the_copy(backend: Backend) {
    clients_go_on_at_the_copy_of(Source::Orlop, backend).await;
}

on_both_backends!(clients_of_etcd_go_on_at_the_copy, clients_of_orlop_go_on_at_the_copy);
