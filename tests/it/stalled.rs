//! Clients that open a stream and then read nothing of it: they keep nothing of the database, so that other clients are
//! served, and the server can stop.

use std::fs;

use orlop_wire::proto::client::{
    etcdserverpb::{
        LeaseGrantRequest, LeaseKeepAliveRequest, PutRequest, RangeRequest, RequestOp, SnapshotRequest, TxnRequest,
        request_op::Request,
    },
    orlopb::{HistoryChangesRequest, HistoryPairsRequest},
    v3electionpb::{CampaignRequest, LeaderRequest},
};
use prost::Message as _;
use tokio::time::timeout;
use tokio_stream as stream;
use tonic::Code;

use crate::{
    hostile::{streams::unread_responses, wire},
    support::{Backend, Client, DEADLINE, Server, Stream, eventually, everything, on_both_backends, put, range},
};

const LEASE: i64 = 7;
const TTL: i64 = 600;
/// Several pages of the history, and chunks of a range.
const KEYS: usize = 400;
/// Operations in a transaction.
const OPS: usize = 100;
/// More streams of a kind than there are connections to the database.
const UNREAD: usize = 40;
const OBSERVERS: usize = 12;
/// Published values of a MB. Most of them are not in the outboxes, but are read from the log.
const VALUES: usize = 24;

fn all() -> RangeRequest {
    range("k/", "k0")
}

/// Puts the keys, and changes one key as often.
async fn fill(client: &mut Client) {
    for first in (0..KEYS).step_by(OPS) {
        let puts = (first..first + OPS).map(|number| put(format!("k/{number:04}"), "value"));
        let success = puts.map(|put| RequestOp { request: Some(Request::RequestPut(put)) }).collect();
        client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("keys are put");
    }
    for _ in 0..KEYS {
        client.put("one", "value").await;
    }
}

async fn wait_until_idle(server: &Server) {
    eventually("a moment without reads of the database", async || {
        let used = server.metric("orlop_database_connections{state=\"used\"}").await;
        if used == 0.0 { Ok(()) } else { Err(used) }
    })
    .await;
}

/// Grants the lease.
async fn grant(client: &mut Client) {
    client.lease.lease_grant(LeaseGrantRequest { ttl: TTL, id: LEASE }).await.expect("a lease");
}

/// Other clients are served, and the server stops, although its clients do not read.
async fn serves_others_and_stops(server: &mut Server, client: &mut Client, keys: usize) {
    wait_until_idle(server).await;
    let others = async {
        let listed = client.kv.range(all()).await.expect("a list").into_inner();
        assert_eq!(listed.kvs.len(), keys);
        let request = stream::iter([LeaseKeepAliveRequest { id: LEASE }]);
        let mut renewed = client.lease.lease_keep_alive(request).await.expect("a stream").into_inner();
        assert_eq!(renewed.message().await.expect("an answer").expect("an answer").ttl, TTL);
        client.put("other", "").await;
    };
    timeout(DEADLINE, others).await.expect("others are served in time");
    assert!(server.terminate().await.success());
    let log = server.log();
    assert!(!log.contains("are abandoned") && !log.contains("cannot truncate"), "{log}");
}

async fn unread_reads_use_no_connections(backend: Backend) {
    let flags = ["--value-cache-bytes", "0", "--history-retention", "24h"];
    let Some(mut server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    grant(&mut client).await;
    fill(&mut client).await;
    let (key, range_end) = (all().key, all().range_end);
    let pairs = HistoryPairsRequest { key, range_end, ..Default::default() };
    let changes = HistoryChangesRequest { key: "one".into(), ..Default::default() };
    let mut held = Vec::new();
    for (path, request) in [
        ("/etcdserverpb.KV/RangeStream", all().encode_to_vec()),
        ("/orlopb.History/Pairs", pairs.encode_to_vec()),
        ("/orlopb.History/Changes", changes.encode_to_vec()),
    ] {
        let request: &'static [u8] = wire::message(&request).leak();
        held.push(unread_responses(server.endpoint(), UNREAD, path, request).await);
    }
    serves_others_and_stops(&mut server, &mut client, KEYS).await;
}

/// They read some of the values, so that the server reads the next ones from the log.
async fn observers_that_stall_use_no_connections(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    grant(&mut client).await;
    let campaign = CampaignRequest { name: "seat".into(), lease: LEASE, value: "first".into() };
    let leader = client.election.campaign(campaign).await.expect("a leader").into_inner().leader.expect("a leader");
    let mut observers = Vec::new();
    for _ in 0..OBSERVERS {
        let mut client = Client::connect(server.endpoint()).await;
        let observed = client.election.observe(LeaderRequest { name: "seat".into() }).await.expect("a stream");
        let mut observed = observed.into_inner();
        observed.message().await.expect("a value").expect("a value");
        observers.push(observed);
    }
    for number in 0..VALUES {
        let value = vec![u8::try_from(number).expect("there are few"); 1_000_000];
        let put = PutRequest { lease: LEASE, ..put(&leader.key, value) };
        client.kv.put(put).await.expect("a put");
    }
    for _ in 0..VALUES / 2 {
        for observed in &mut observers {
            let value = timeout(DEADLINE, observed.message()).await.expect("a value in time");
            value.expect("a value").expect("a value");
        }
        wait_until_idle(&server).await;
    }
    serves_others_and_stops(&mut server, &mut client, 0).await;
}

/// The database has to keep the state of a snapshot until that was read.
async fn snapshot_ends_when_the_server_stops(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..VALUES {
        client.put(format!("k/{number}"), vec![b'v'; 1_000_000]).await;
    }
    let mut watch = Stream::open(&mut client).await;
    watch.create(everything(0)).await;
    let mut reader = Client::connect(server.endpoint()).await;
    let mut snapshot = reader.maintenance.snapshot(SnapshotRequest {}).await.expect("a snapshot").into_inner();
    snapshot.message().await.expect("a piece").expect("a piece");
    let rest = async {
        watch.answers.message().await.expect_err("the server stops");
        loop {
            match snapshot.message().await {
                Ok(Some(_)) => {}
                end => break end,
            }
        }
    };
    let (status, end) = tokio::join!(server.terminate(), timeout(DEADLINE, rest));
    let end = end.expect("an end in time").expect_err("the snapshot is not complete");
    assert_eq!((end.code(), end.message()), (Code::Unavailable, "etcdserver: server stopped"));
    assert!(status.success());
    let left = fs::metadata(server.data_dir().join("orlop.db-wal")).map_or(0, |wal| wal.len());
    assert_eq!(left, 0, "the WAL is in the database file: {}", server.log());
}

on_both_backends!(
    observers_that_stall_use_no_connections,
    snapshot_ends_when_the_server_stops,
    unread_reads_use_no_connections,
);
