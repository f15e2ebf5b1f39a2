//! Clients that send something complete, and then hold their streams or connections open.

use futures_util::{StreamExt as _, future::select_all, stream::FuturesUnordered};
use orlop_wire::proto::client::{
    etcdserverpb::{LeaseTimeToLiveRequest, PutRequest},
    v3electionpb::LeaderRequest,
};

use super::{
    streams::{complete_requests, unread_responses},
    *,
};
use crate::support::{free_port, http_get};

/// Number of connections that an address for probes accepts.
const PROBES_MAX: usize = 64;
const ACK: u8 = 1;
const TIME_TO_LIVE: &str = "/etcdserverpb.Lease/LeaseTimeToLive";
const LEASE: i64 = 7;
const PUTS_MAX: usize = 1_000;

/// No call begins, because none of the clients ends its stream.
async fn complete_messages_without_end_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let message = wire::message(&put("k", vec![b'v'; 1_000_000]).encode_to_vec());
    let (tasks, answers, senders) = streams(arena.endpoint(), sized(1_000, 10_000), PUT, message).await;
    let refused = timeout(DEADLINE * 2, select_all(answers)).await;
    let (refused, _, waiting) = refused.expect("calls are refused when their messages use all memory");
    let refused = refused.expect("an answer");
    let too_many = Code::ResourceExhausted as i32;
    assert_eq!(
        refused.headers().get("grpc-status").and_then(|status| status.to_str().ok()),
        Some(too_many.to_string().as_str())
    );
    arena.survives("complete messages whose streams stay open", 800, (tasks, waiting, senders)).await;
}

async fn watches_of_long_ranges_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut client = arena.client().await;
    let mut stream = Stream::open(&mut client).await;
    let mut refused = 0;
    for number in 0..200 {
        let range_end = [format!("z{number}").into_bytes(), vec![b'z'; 1_400_000]].concat();
        let watch = WatchCreateRequest { key: "a".into(), range_end: range_end.into(), ..Default::default() };
        let created = stream.create(watch).await;
        if created.canceled {
            assert_eq!((created.watch_id, &created.cancel_reason[..]), (-1, "etcdserver: too many requests"));
            refused += 1;
        }
    }
    if arena.server.is_orlop() {
        assert!((1..200).contains(&refused), "{refused} of 200 watches are refused");
        // Watches inside the server have the same limit.
        let observed = async {
            let name = vec![b'e'; 1_400_000].into();
            client.election.observe(LeaderRequest { name }).await?.into_inner().message().await
        };
        let ended = timeout(DEADLINE, observed).await.expect("an end in time").expect_err("no watch can be created");
        assert_eq!((ended.code(), ended.message()), (Code::Unknown, "etcdserver: too many requests"));
    }
    arena.survives("watches of long ranges", 900, (stream, client)).await;
}

async fn unread_keys_of_a_lease_use_bounded_memory(backend: Backend) {
    let puts_max = PUTS_MAX.to_string();
    let flags = ["--value-cache-bytes", "8388608", "--max-txn-ops", puts_max.as_str()];
    let Some(mut arena) = Arena::new(backend, &flags).await else { return };
    let mut client = arena.client().await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: 3_600, id: LEASE }).await.expect("a grant");
    let put = |number: usize| PutRequest { lease: LEASE, ..put(format!("{number:0100}"), "") };
    for first in (0..sized(20_000, 100_000)).step_by(PUTS_MAX) {
        let puts = (first..first + PUTS_MAX).map(|number| op(Request::RequestPut(put(number))));
        let txn = TxnRequest { success: puts.collect(), ..Default::default() };
        client.kv.txn(txn).await.expect("keys are put");
    }
    arena.measure_idle_state().await;
    let message = LeaseTimeToLiveRequest { id: LEASE, keys: true }.encode_to_vec();
    let message: &'static [u8] = wire::message(&message).leak();
    let served = unread_responses(arena.endpoint(), sized(50, 10), TIME_TO_LIVE, message).await;
    assert!(served.1.iter().all(|answer| !answer.headers().contains_key("grpc-status")), "the first ones are served");
    // Served ones are held, until one is refused because memory is short.
    let (connection, waiting) = complete_requests(arena.endpoint(), 550, TIME_TO_LIVE, message).await;
    let (mut waiting, mut held): (FuturesUnordered<_>, _) = (waiting.into_iter().collect(), Vec::new());
    let refusal = async {
        loop {
            let answer = waiting.next().await.expect("a call is refused").expect("a head");
            if answer.headers().contains_key("grpc-status") {
                return;
            }
            held.push(answer);
        }
    };
    timeout(DEADLINE * 4, refusal).await.expect("a call is refused in time");
    arena.survives("keys of a lease, never read", 700, (served, connection, waiting, held)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_do_not_keep_probes_out() {
    let probes = format!("http://127.0.0.1:{}", free_port());
    let Some(_server) = Server::orlop_with(Backend::Sqlite, &["--listen-metrics-urls", &probes]).await else { return };
    let mut held = Vec::new();
    for number in 0..PROBES_MAX {
        let mut wire = Wire::tcp(&probes).await;
        let settings = if number % 2 == 0 { frame(SETTINGS, 0, 0, &[]) } else { Vec::new() };
        assert!(wire.send(&[PREFACE.to_vec(), settings].concat()).await);
        held.push(wire);
    }
    let probe = timeout(DEADLINE * 2, http_get(&probes, "/livez")).await.expect("idle connections are closed");
    assert_eq!(probe.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keepalive_interval_of_zero_means_no_pings() {
    let Some(server) = Server::orlop_with(Backend::Sqlite, &["--grpc-keepalive-interval", "0"]).await else { return };
    let mut wire = Wire::open(server.endpoint()).await;
    // The client's own pings measure time: a server that pings without a pause has done so before the last answer.
    for number in 0..1_000_u64 {
        let number = number.to_be_bytes();
        assert!(wire.send(&frame(PING, 0, 0, &number)).await);
        let (flags, payload) = loop {
            let (kind, flags, payload) = wire.next_frame().await;
            if kind == PING {
                break (flags, payload);
            }
        };
        assert_eq!((flags, payload.as_slice()), (ACK, &number[..]), "the server sent a ping");
    }
}

on_both_backends!(
    complete_messages_without_end_use_bounded_memory,
    unread_keys_of_a_lease_use_bounded_memory,
    watches_of_long_ranges_use_bounded_memory,
);
