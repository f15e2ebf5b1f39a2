//! Attacks by hostile or defective clients: memory stays bounded, other clients are served, and resources held for the
//! attacker are freed.
//!
//! Each test prints a row: attack, backend, the server's memory before the attack and at its peak (MiB), another
//! client's p99 for a put and a get (ms) before, during and after the attack, and the p99 during the attack divided by
//! the mean of the other two. `ORLOP_HOSTILE_LONG=1` makes the attacks as large as docs/explanation/overload.md states;
//! `ORLOP_TEST_TARGET=etcd` attacks an etcd.

mod arena;
mod encoded;
mod gateway;
mod hashes;
mod held;
mod snapshots;
pub mod streams;
mod transactions;
pub mod wire;

use std::{
    future::poll_fn,
    sync::Arc,
    time::{Duration, Instant},
};

use bytes::Bytes;
use orlop_wire::proto::client::etcdserverpb::{
    Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseKeepAliveRequest, RangeResponse, RequestOp, SnapshotRequest,
    TxnRequest, WatchCreateRequest, WatchRequest,
    compare::{CompareResult, TargetUnion},
    request_op::Request,
    watch_request::RequestUnion,
};
use parking_lot::Mutex;
use prost::Message as _;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    task::JoinSet,
    time::timeout,
};
use tonic::Code;

use self::{
    arena::{Arena, is_long, sized},
    encoded::Caller,
    streams::{pump, streams},
    wire::{
        CONTINUATION, DATA, END_HEADERS, END_STREAM, HEADERS, PING, PREFACE, RST_STREAM, SETTINGS, Wire, frame,
        headers, headers_to,
    },
};
use crate::support::{
    Authority, Backend, DEADLINE, Server, Stream, all, eventually, everything, free_port, get, on_both_backends, put,
    skip,
};

const RANGE: &str = "/etcdserverpb.KV/Range";
const PUT: &str = "/etcdserverpb.KV/Put";
const TXN: &str = "/etcdserverpb.KV/Txn";
const GRANT: &str = "/etcdserverpb.Lease/LeaseGrant";
const WATCH: &str = "/etcdserverpb.Watch/Watch";
const SNAPSHOT: &str = "/etcdserverpb.Maintenance/Snapshot";

/// Maximum time between two successful lists of all keys; shorter than the timeout of a list that waits for memory.
const LISTS_PAUSE_MAX: Duration = Duration::from_secs(5);

/// Puts `keys` keys with values of `bytes` bytes each.
async fn fill(arena: &mut Arena, keys: usize, bytes: usize) {
    let mut clients = JoinSet::new();
    for client in 0..8 {
        let mut kv = arena.client().await.kv;
        clients.spawn(async move {
            for number in (client..keys).step_by(8) {
                kv.put(put(format!("k{number:06}"), vec![b'v'; bytes])).await.expect("a put");
            }
        });
    }
    while let Some(done) = clients.join_next().await {
        done.expect("the store is filled");
    }
    arena.measure_idle_state().await;
}

async fn connections(arena: &Arena, count: usize, bytes: &[u8]) -> Vec<Wire> {
    let mut all = Vec::new();
    for _ in 0..count {
        let mut wire = Wire::tcp(arena.endpoint()).await;
        assert!(wire.send(bytes).await);
        all.push(wire);
    }
    all
}

async fn silent_and_unfinished_connections_are_closed(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut held = connections(&arena, sized(200, 3_000), b"").await;
    held.extend(connections(&arena, sized(200, 3_000), &PREFACE[..10]).await);
    held.extend(connections(&arena, sized(100, 1_000), b"POST /v3/kv/").await);
    arena.survives("silent and unfinished connections", 300, ()).await;
    drop(held);
}

/// Sending one byte from time to time does not keep a connection open.
async fn slow_loris_is_closed(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut attackers = JoinSet::new();
    for number in 0..sized(200, 2_000) {
        let mut wire = Wire::tcp(arena.endpoint()).await;
        let http1 = format!("GET /health HTTP/1.1\r\nhost: x\r\n{}", "x: y\r\n".repeat(1_000));
        let text = if number % 2 == 0 { PREFACE.to_vec() } else { http1.into_bytes() };
        attackers.spawn(async move {
            for byte in text {
                tokio::time::sleep(Duration::from_secs(1)).await;
                if wire.0.write_all(&[byte]).await.is_err() {
                    return;
                }
            }
            // The preface is complete; nothing follows it.
            wire.ended().await;
        });
    }
    arena.survives("a byte a second", 300, ()).await;
    let all_closed = async { while attackers.join_next().await.is_some() {} };
    timeout(DEADLINE * 3, all_closed).await.expect("each connection is closed although it still sends");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn unfinished_handshakes_do_not_block_new_connections() {
    let Some(authority) = Authority::new() else { return };
    let certificate = authority.sign("server", 30);
    let [cert, key] = [&certificate.cert, &certificate.key].map(|file| file.to_str().expect("a path in UTF-8"));
    // The port is chosen beforehand because the harness reads only the first address that the server prints.
    let tls = format!("https://127.0.0.1:{}", free_port());
    let both = format!("http://127.0.0.1:0,{tls}");
    let flags = ["--cert-file", cert, "--key-file", key, "--listen-client-urls", &both];
    let Some(mut arena) = Arena::new(Backend::Sqlite, &flags).await else { return };
    let mut held = Vec::new();
    for _ in 0..sized(700, 3_000) {
        let mut wire = Wire::tcp(&tls).await;
        // The start of a ClientHello.
        assert!(wire.send(&[22, 3, 1, 1, 0, 1]).await);
        held.push(wire);
    }
    // A new connection is served at once, not only after the others have timed out, which takes 10 s.
    let address = wire::address(&tls).to_owned();
    let version = tokio::process::Command::new("curl")
        .args(["--silent", "--insecure", "--max-time", "8", &format!("https://{address}/version")])
        .output();
    let Ok(version) = version.await else { return skip("curl") };
    assert!(version.status.success(), "{version:?}");
    arena.survives("unfinished TLS handshakes", 300, ()).await;
    drop(held);
}

/// Some clients send an endpoint with its scheme, or the path of a socket, as `:authority`.
async fn authority_need_not_be_valid_in_a_uri(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let request = get("k").encode_to_vec();
    for authority in ["x", "http://127.0.0.1:2379", "/run/orlop.sock", "run%2Forlop.sock", "<>"] {
        let mut wire = Wire::open(server.endpoint()).await;
        for stream in [1, 3] {
            let head = frame(HEADERS, END_HEADERS, stream, &headers_to(authority, RANGE, &[]));
            assert!(wire.send(&[head, frame(DATA, END_STREAM, stream, &wire::message(&request))].concat()).await);
            let answer = wire.message().await.unwrap_or_else(|| panic!("{authority}: call {stream} is reset"));
            let answer = RangeResponse::decode(&answer[..]).expect("an answer");
            assert_eq!((answer.count, answer.header.expect("a header").revision), (0, 1), "{authority}");
        }
    }
}

async fn half_open_connections_use_little_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let settings = [PREFACE.to_vec(), frame(SETTINGS, 0, 0, &[])].concat();
    let mut held = connections(&arena, sized(300, 3_000), &settings).await;
    let endless = [settings, frame(HEADERS, 0, 1, &headers(PUT, &[]))].concat();
    held.extend(connections(&arena, sized(300, 3_000), &endless).await);
    arena.survives("HTTP/2 connections without requests", 400, held).await;
}

async fn floods_are_harmless(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let resets = |number: usize| {
        let stream = u32::try_from(2 * number + 1).expect("a stream's number");
        let head = frame(HEADERS, END_HEADERS, stream, &headers(RANGE, &[]));
        [head, frame(RST_STREAM, 0, stream, &8_u32.to_be_bytes())].concat()
    };
    type Flood<'a> = (&'static str, &'a dyn Fn(usize) -> Vec<u8>);
    let floods: [Flood<'_>; 3] = [
        ("HEADERS and RST_STREAM", &resets),
        ("PING", &|_| frame(PING, 0, 0, &[7; 8])),
        ("SETTINGS", &|_| frame(SETTINGS, 0, 0, &[])),
    ];
    for (name, one) in floods {
        let frames = Bytes::from((0..20_000).flat_map(one).collect::<Vec<_>>());
        // The server stops reading from a flooding client that never reads its responses.
        let mut wire = Wire::open(arena.endpoint()).await;
        let mut all_sent = true;
        for _ in 0..sized(1, 50) {
            all_sent =
                all_sent && matches!(timeout(Duration::from_secs(3), wire.0.write_all(&frames)).await, Ok(Ok(())));
        }
        println!("{name}: all frames sent: {all_sent}");
        arena.survives(&format!("{name} flood, responses not read"), 300, wire).await;
        let mut attackers = JoinSet::new();
        for _ in 0..sized(2, 8) {
            attackers.spawn(Wire::open(arena.endpoint()).await.flood(arena.endpoint().to_owned(), frames.clone()));
        }
        arena.survives_continuous(&format!("{name} flood"), 300, attackers).await;
    }
}

async fn metadata_has_a_limit(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    // A call with a header above the limit is refused; the connection stays open.
    let long = "x".repeat(20_000);
    let mut wire = Wire::open(arena.endpoint()).await;
    let block = headers(PUT, &[("x-long", &long)]);
    let (first, second) = block.split_at(16_000);
    let refused = [frame(HEADERS, END_STREAM, 1, first), frame(CONTINUATION, END_HEADERS, 1, second)].concat();
    assert!(wire.send(&refused).await);
    assert!(wire.call(3, RANGE, &all().encode_to_vec(), END_STREAM).await, "the connection stays open");
    // A header block without end is refused.
    let mut endless = Wire::open(arena.endpoint()).await;
    let mut all_sent = endless.send(&frame(HEADERS, 0, 1, &headers(PUT, &[]))).await;
    for _ in 0..sized(2_000, 20_000) {
        all_sent = all_sent && endless.send(&frame(CONTINUATION, 0, 1, &[0, 1, b'x', 100, b'y'].repeat(100))).await;
    }
    assert!(!all_sent || endless.ended().await.is_some(), "a header block without end is refused");
    drop(wire);
    let block = frame(CONTINUATION, 0, 1, &[0, 1, b'x', 100, b'y'].repeat(100));
    let endless = Bytes::from([frame(HEADERS, 0, 1, &headers(PUT, &[])), block.repeat(2_000)].concat());
    let mut attackers = JoinSet::new();
    for _ in 0..sized(2, 8) {
        attackers.spawn(Wire::open(arena.endpoint()).await.flood(arena.endpoint().to_owned(), endless.clone()));
    }
    arena.survives_continuous("metadata without end", 300, attackers).await;
}

async fn ten_thousand_streams_on_one_connection_are_served(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let watch = WatchRequest { request_union: Some(RequestUnion::CreateRequest(everything(0))) };
    let body = wire::message(&watch.encode_to_vec());
    let held = streams(arena.endpoint(), 10_000, WATCH, body).await;
    eventually("the streams are there", async || {
        let metrics = crate::support::http_get(arena.endpoint(), "/metrics").await.body;
        let watchers = metrics.lines().find(|line| line.starts_with("etcd_debugging_mvcc_watcher_total"));
        if watchers == Some("etcd_debugging_mvcc_watcher_total 10000") {
            Ok(())
        } else {
            Err(watchers.map(str::to_owned))
        }
    })
    .await;
    arena.survives("10,000 watch streams on one connection", sized(500, 400) as u64, held).await;
}

/// A message is announced, most of it is sent, and the rest never arrives.
async fn unfinished_messages_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut half = wire::message(&vec![0; 1 << 20]);
    half.truncate(1_000_000);
    let held = streams(arena.endpoint(), sized(2_000, 10_000), PUT, half.clone()).await;
    let lease = "/etcdserverpb.Lease/LeaseKeepAlive";
    let more = streams(arena.endpoint(), sized(1_000, 5_000), lease, half).await;
    // Gives the messages time to arrive before the other client is measured.
    tokio::time::sleep(Duration::from_secs(5)).await;
    arena.survives("unfinished messages of megabytes", 800, (held, more)).await;
}

async fn too_long_messages_are_refused(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut client = arena.client().await;
    let long = put("k", vec![b'v'; 100 << 20]);
    for _ in 0..3 {
        let refused = client.kv.put(long.clone()).await.expect_err("100 MiB are too much");
        assert_eq!(refused.code(), Code::ResourceExhausted, "{refused:?}");
        assert!(refused.message().starts_with("grpc: received message larger than max"), "{refused:?}");
    }
    // A compressed message could expand to any size, so it is refused with status 12, unimplemented.
    let (tasks, mut answers, _senders) = streams(arena.endpoint(), 1, PUT, vec![1, 0, 0, 0, 1, 0]).await;
    let answer = timeout(DEADLINE, answers.remove(0)).await.expect("in time").expect("an answer");
    assert_eq!(answer.headers().get("grpc-status").map(|status| status.as_bytes()), Some(&b"12"[..]));
    drop(tasks);
    let mut attackers = JoinSet::new();
    let message = Bytes::from(long.encode_to_vec());
    for _ in 0..sized(2, 8) {
        attackers.spawn(Caller::connect(arena.endpoint()).await.call_in_a_loop(PUT, message.clone()));
    }
    arena.survives_continuous("messages of 100 MiB", 300, attackers).await;
}

async fn unread_watches_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    // Each stream watches its own range, so that no response is shared.
    let mut held = Vec::new();
    let mut wire = Wire::open(arena.endpoint()).await;
    for number in 0..sized(200, 2_000) {
        let stream = u32::try_from(2 * number + 1).expect("a stream's number");
        let watch = WatchCreateRequest {
            key: "k".into(),
            range_end: format!("z{number}").into(),
            prev_kv: number % 2 == 0,
            ..Default::default()
        };
        let watch = WatchRequest { request_union: Some(RequestUnion::CreateRequest(watch)) };
        assert!(wire.call(stream, WATCH, &watch.encode_to_vec(), 0).await);
    }
    held.push(wire);
    let mut writer = arena.client().await.kv;
    for _ in 0..sized(200, 1_000) {
        timeout(DEADLINE, writer.put(put("k", vec![b'v'; 100_000]))).await.expect("in time").expect("a put");
    }
    arena.survives("watch streams, never read", sized(1_000, 1_600) as u64, held).await;
}

async fn ten_thousand_watches_on_a_stream_are_served(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut client = arena.client().await;
    let mut stream = Stream::open(&mut client).await;
    for number in 0..10_000 {
        let key = format!("k{number}");
        stream.create(WatchCreateRequest { key: key.into(), ..Default::default() }).await;
    }
    client.put("k777", "v").await;
    assert_eq!(stream.next().await.events.len(), 1);
    arena.survives("10,000 watches on a stream", 300, (stream, client)).await;
}

async fn ranges_of_all_keys_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &["--value-cache-bytes", "8388608"]).await else { return };
    fill(&mut arena, sized(400, 2_000), 50_000).await;
    let mut readers = JoinSet::new();
    let (began, served) = (Instant::now(), Arc::new(Mutex::new(Vec::new())));
    for number in 0..64 {
        let (mut kv, served) = (arena.client().await.kv, Arc::clone(&served));
        readers.spawn(async move {
            let txn = TxnRequest { success: vec![op(Request::RequestRange(all()))], ..Default::default() };
            loop {
                let answer = match number % 4 {
                    0 => kv.txn(txn.clone()).await.map(drop),
                    _ => kv.range(all()).await.map(drop),
                };
                match answer {
                    Ok(()) => served.lock().push(began.elapsed()),
                    // Without free memory the server asks the client to retry.
                    Err(status) => {
                        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
                        tokio::task::yield_now().await;
                    }
                }
            }
        });
    }
    tokio::time::sleep(Duration::from_secs(sized(5, 15) as u64)).await;
    arena.survives_continuous("64 clients that list all keys", 1_500, readers).await;
    let mut served = served.lock();
    served.push(began.elapsed());
    let pause = served.array_windows().map(|[one, next]| next.saturating_sub(*one)).max();
    // The last entry is the end. The short form runs as a debug build while other tests run.
    let is_in_time = !is_long() || pause.is_some_and(|pause| pause < LISTS_PAUSE_MAX);
    assert!(served.len() > 1 && is_in_time, "{} lists, at most {pause:?} apart", served.len() - 1);
}

async fn unread_responses_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &["--value-cache-bytes", "8388608"]).await else { return };
    fill(&mut arena, sized(400, 2_000), 50_000).await;
    // A transaction with a put is evaluated by the writer.
    let never = Compare {
        key: "k".into(),
        result: CompareResult::Greater.into(),
        target_union: Some(TargetUnion::Version(1_000_000_000)),
        ..Default::default()
    };
    let never_put = TxnRequest {
        compare: vec![never],
        success: vec![op(Request::RequestPut(put("k", "v")))],
        failure: vec![op(Request::RequestRange(all()))],
    };
    let (mut writer, mut held) = (arena.client().await.kv, Vec::new());
    for _ in 0..sized(64, 256) {
        let mut wire = Wire::open(arena.endpoint()).await;
        for stream in [1, 3] {
            assert!(wire.call(stream, RANGE, &all().encode_to_vec(), END_STREAM).await);
        }
        for stream in [5, 7] {
            assert!(wire.call(stream, TXN, &never_put.encode_to_vec(), END_STREAM).await);
            // Transactions of one batch would share the values. It is refused while memory is short.
            drop(writer.put(put("between", "v")).await);
        }
        held.push(wire);
    }
    tokio::time::sleep(Duration::from_secs(5)).await;
    arena.survives("ranges of all keys, never read", 1_500, held).await;
}

fn op(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

async fn messages_with_too_many_parts_are_refused(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let number = |number: usize| number.to_string();
    let delete =
        |at: usize| DeleteRangeRequest { key: number(at).into(), range_end: number(at + 1).into(), prev_kv: false };
    let many: Vec<RequestOp> = (0..45_000)
        .flat_map(|at| {
            let put = put(format!("p{at}"), "");
            [op(Request::RequestDeleteRange(delete(100_000 + 2 * at))), op(Request::RequestPut(put))]
        })
        .collect();
    // Each level is below the limit, but the product is large.
    let wide = |inner: Vec<RequestOp>| {
        let txn = TxnRequest { success: inner, ..Default::default() };
        (0..30).map(|_| op(Request::RequestTxn(txn.clone()))).collect::<Vec<_>>()
    };
    let nested = wide(wide(wide(vec![op(Request::RequestDeleteRange(delete(0))); 3])));
    let mut deep = vec![op(Request::RequestRange(all()))];
    for _ in 0..40 {
        let txn = TxnRequest { compare: vec![Compare::default()], success: deep, failure: Vec::new() };
        deep = vec![op(Request::RequestTxn(txn))];
    }
    let message = |success| Bytes::from(TxnRequest { success, ..Default::default() }.encode_to_vec());
    let empty = vec![RequestOp::default(); 1_000_000];
    let no_such_fields = Bytes::from([0x78, 0].repeat(1_000_000));
    const TOO_MANY: &str = "etcdserver: too many operations in txn request";
    let messages = [
        (TXN, message(many), TOO_MANY),
        (TXN, message(nested), TOO_MANY),
        (TXN, message(deep), "etcdserver: key is not provided"),
        (TXN, message(empty), TOO_MANY),
        (PUT, no_such_fields.clone(), "orlop: the request has more than 1024 fields"),
        (TXN, no_such_fields.clone(), "orlop: the request has more than 1024 fields outside its operations"),
        (GRANT, no_such_fields, "grpc: received message larger than max (2000000 vs. 262144)"),
    ];
    for (method, message, refusal) in &messages {
        let mut caller = Caller::connect(arena.endpoint()).await;
        let refused = caller.call(method, message.clone()).await.expect_err("the call is refused");
        assert_eq!(refused.message(), *refusal, "{} bytes to {method}", message.len());
    }
    // Small messages are refused at little cost, so a loop of them resembles a busy client. They are measured
    // separately.
    let (large, small): (Vec<_>, Vec<_>) = messages.into_iter().partition(|(_, message, _)| message.len() > 1 << 16);
    for (attack, messages) in [
        ("messages of up to a million operations or fields, in a loop", large),
        ("transactions 40 deep, in a loop", small),
    ] {
        let mut attackers = JoinSet::new();
        for (method, message, _) in messages {
            for _ in 0..sized(1, 12) {
                let caller = Caller::connect(arena.endpoint()).await;
                attackers.spawn(caller.call_in_a_loop(method, message.clone()));
            }
        }
        assert!(!attackers.is_empty());
        arena.survives_continuous(attack, 400, attackers).await;
    }
}

async fn endless_keep_alives_do_not_delay_others(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut client = arena.client().await;
    let id = client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: 0 }).await.expect("a lease").into_inner().id;
    // One frame full of keep-alives.
    let one = wire::message(&LeaseKeepAliveRequest { id }.encode_to_vec());
    let many = Bytes::from(one.repeat(16_000 / one.len()));
    let mut attackers = JoinSet::new();
    for _ in 0..8 {
        let endpoint = arena.endpoint().to_owned();
        attackers.spawn(pump(endpoint, "/etcdserverpb.Lease/LeaseKeepAlive", many.clone()));
    }
    arena.survives_continuous("keep-alives without end", 300, attackers).await;
}

on_both_backends!(
    authority_need_not_be_valid_in_a_uri,
    silent_and_unfinished_connections_are_closed,
    slow_loris_is_closed,
    half_open_connections_use_little_memory,
    floods_are_harmless,
    metadata_has_a_limit,
    ten_thousand_streams_on_one_connection_are_served,
    unfinished_messages_use_bounded_memory,
    too_long_messages_are_refused,
    unread_watches_use_bounded_memory,
    ten_thousand_watches_on_a_stream_are_served,
    ranges_of_all_keys_use_bounded_memory,
    unread_responses_use_bounded_memory,
    messages_with_too_many_parts_are_refused,
    endless_keep_alives_do_not_delay_others,
);
