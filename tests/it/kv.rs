//! Range, Put, DeleteRange and Compact: every option behaves as in etcd.

mod txn;

use std::time::Duration;

use orlop_wire::proto::client::{
    etcdserverpb::{
        CompactionRequest, Compare, DeleteRangeRequest, LeaseGrantRequest, PutRequest, RangeRequest, RangeResponse,
        RequestOp, TxnRequest,
        compare::{CompareTarget, TargetUnion},
        request_op::Request,
        response_op::Response,
    },
    mvccpb::KeyValue,
};
use prost::Message as _;
use tokio::{io::AsyncWriteExt as _, net::TcpStream, time::timeout};
use tonic::{Code, Status};

use self::txn::op;
use crate::{
    hostile::wire::{DATA, END_HEADERS, HEADERS, PREFACE, SETTINGS, frame, headers, message},
    support::{Backend, Client, Server, all, eventually, get, http_get, on_both_backends, put, range},
};

/// A store with this history: a=1 (2), b=1 (3), c=1 (4), b=2 (5), c deleted (6), c=3 (7).
async fn history(backend: Backend) -> Option<(Server, Client)> {
    let server = Server::under_test(backend).await?;
    let mut client = Client::connect(server.endpoint()).await;
    for (key, value) in [("a", "1"), ("b", "1"), ("c", "1"), ("b", "2")] {
        client.put(key, value).await;
    }
    client.kv.delete_range(delete("c", "")).await.expect("a delete");
    client.put("c", "3").await;
    Some((server, client))
}

fn delete(key: &str, end: &str) -> DeleteRangeRequest {
    DeleteRangeRequest { key: key.to_owned().into(), range_end: end.to_owned().into(), prev_kv: true }
}

/// `key=value@mod/version`
fn shown(kv: &KeyValue) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    format!("{}={}@{}/{}", text(&kv.key), text(&kv.value), kv.mod_revision, kv.version)
}

fn list(kvs: &[KeyValue]) -> Vec<String> {
    kvs.iter().map(shown).collect()
}

#[track_caller]
fn check(what: &RangeRequest, answer: &RangeResponse, kvs: &[&str], more: bool, count: i64) {
    assert_eq!(
        (list(&answer.kvs), answer.more, answer.count),
        (kvs.iter().map(ToString::to_string).collect(), more, count),
        "{what:?}"
    );
    assert_eq!(answer.header.as_ref().map(|header| header.revision), Some(7), "the current revision: {what:?}");
}

#[track_caller]
fn check_refused<T: std::fmt::Debug>(what: impl std::fmt::Debug, answer: Result<T, Status>, code: Code, text: &str) {
    let status = answer.expect_err("the request is refused");
    assert_eq!((status.code(), status.message()), (code, text), "{what:?}");
}

const COMPACTED: &str = "etcdserver: mvcc: required revision has been compacted";
const FUTURE: &str = "etcdserver: mvcc: required revision is a future revision";

async fn range_supports_every_field(backend: Backend) {
    let Some((_server, mut client)) = history(backend).await else { return };
    let with = |change: fn(&mut RangeRequest)| {
        let mut request = all();
        change(&mut request);
        request
    };
    let (a, b, c) = ("a=1@2/1", "b=2@5/2", "c=3@7/1");
    let table: Vec<(RangeRequest, Vec<&str>, bool, i64)> = vec![
        (all(), vec![a, b, c], false, 3),
        (get("a"), vec![a], false, 1),
        (range("a", "c"), vec![a, b], false, 2),
        (range("b", "\0"), vec![b, c], false, 2),
        (range("c", "a"), vec![], false, 0),
        (range("b", "b"), vec![], false, 0),
        (get("x"), vec![], false, 0),
        (with(|r| r.revision = -7), vec![a, b, c], false, 3),
        (with(|r| r.revision = 1), vec![], false, 0),
        (with(|r| r.revision = 4), vec![a, "b=1@3/1", "c=1@4/1"], false, 3),
        (with(|r| r.revision = 6), vec![a, b], false, 2),
        (with(|r| r.limit = 2), vec![a, b], true, 3),
        (with(|r| r.limit = 3), vec![a, b, c], false, 3),
        (with(|r| r.limit = -1), vec![a, b, c], false, 3),
        (with(|r| (r.limit, r.revision) = (1, 4)), vec![a], true, 3),
        (with(|r| r.count_only = true), vec![], false, 3),
        (with(|r| (r.count_only, r.limit) = (true, 1)), vec![], false, 3),
        (with(|r| r.keys_only = true), vec!["a=@2/1", "b=@5/2", "c=@7/1"], false, 3),
        (with(|r| (r.keys_only, r.revision) = (true, 4)), vec!["a=@2/1", "b=@3/1", "c=@4/1"], false, 3),
        (
            with(|r| (r.keys_only, r.sort_target, r.sort_order) = (true, 4, 2)),
            vec!["c=@7/1", "b=@5/2", "a=@2/1"],
            false,
            3,
        ),
        (with(|r| r.serializable = true), vec![a, b, c], false, 3),
        (with(|r| r.sort_order = 2), vec![c, b, a], false, 3),
        (with(|r| (r.sort_order, r.limit) = (2, 1)), vec![c], true, 3),
        (with(|r| (r.sort_target, r.sort_order, r.limit) = (1, 2, 1)), vec![b], true, 3),
        (with(|r| (r.sort_target, r.sort_order) = (2, 1)), vec![a, b, c], false, 3),
        (with(|r| (r.sort_target, r.sort_order) = (3, 2)), vec![c, b, a], false, 3),
        (with(|r| (r.sort_target, r.sort_order) = (4, 2)), vec![c, b, a], false, 3),
        (with(|r| r.min_mod_revision = 5), vec![b, c], false, 3),
        (with(|r| r.max_mod_revision = 5), vec![a, b], false, 3),
        (with(|r| (r.min_mod_revision, r.limit) = (3, 1)), vec![b], true, 3),
        (with(|r| r.min_create_revision = 3), vec![b, c], false, 3),
        (with(|r| r.max_create_revision = 3), vec![a, b], false, 3),
    ];
    for (request, kvs, more, count) in table {
        let answer = client.kv.range(request.clone()).await.expect("a range is answered").into_inner();
        check(&request, &answer, &kvs, more, count);
    }
    check_refused("no key", client.kv.range(get("")).await, Code::InvalidArgument, "etcdserver: key is not provided");
    check_refused("future", client.kv.range(with(|r| r.revision = 8)).await, Code::OutOfRange, FUTURE);
}

async fn unknown_sorts_are_refused_everywhere(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for (order, target) in [(7, 0), (0, 7), (-1, 0), (0, -1)] {
        let request = RangeRequest { sort_order: order, sort_target: target, ..all() };
        let text = "etcdserver: invalid sort option";
        check_refused((order, target), client.kv.range(request.clone()).await, Code::InvalidArgument, text);
        let txn = TxnRequest { success: vec![op(Request::RequestRange(request))], ..Default::default() };
        check_refused((order, target), client.kv.txn(txn).await, Code::InvalidArgument, text);
    }
}

async fn range_stream_chunks_equal_the_range(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..400 {
        client.put(format!("k{number:03}"), "v".repeat(number * 40)).await;
    }
    let requests = [
        all(),
        RangeRequest { limit: 37, ..all() },
        RangeRequest { limit: 400, ..all() },
        RangeRequest { keys_only: true, ..all() },
        RangeRequest { count_only: true, ..all() },
        RangeRequest { revision: 100, ..all() },
        range("x", "z"),
        get("k001"),
        // Sorted by value without an order, which means ascending; by key, descending; by modification, descending.
        RangeRequest { sort_target: 4, ..all() },
        RangeRequest { sort_order: 2, limit: 50, ..all() },
        RangeRequest { sort_order: 2, sort_target: 3, keys_only: true, ..all() },
        RangeRequest { min_mod_revision: 100, ..all() },
    ];
    for request in requests {
        let whole = client.kv.range(request.clone()).await.expect("a range").into_inner();
        let mut pieces = client.kv.range_stream(request.clone()).await.expect("a stream").into_inner();
        let mut merged = RangeResponse::default();
        let mut count = 0;
        while let Some(piece) = pieces.message().await.expect("a piece") {
            let piece = piece.range_response.expect("a piece holds an answer");
            assert!(merged.header.is_none(), "header, more and count are in the last piece");
            merged.kvs.extend(piece.kvs);
            (merged.header, merged.more, merged.count) = (piece.header, piece.more, piece.count);
            count += 1;
        }
        assert!(merged == whole, "{request:?}");
        assert!(count > 1 || whole.kvs.len() <= 10, "{request:?} came in {count} pieces");
    }
}

async fn put_options_keep_and_return_values(backend: Backend) {
    let Some((_server, mut client)) = history(backend).await else { return };
    let lease =
        client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: 77 }).await.expect("a lease").into_inner().id;
    let rows: [(PutRequest, Option<&str>, &str, i64); 5] = [
        (PutRequest { prev_kv: true, ..put("a", "2") }, Some("a=1@2/1"), "a=2@8/2", 0),
        (PutRequest { prev_kv: true, lease, ..put("new", "1") }, None, "new=1@9/1", 77),
        (PutRequest { ignore_lease: true, ..put("new", "2") }, None, "new=2@10/2", 77),
        (PutRequest { ignore_value: true, prev_kv: true, ..put("new", "") }, Some("new=2@10/2"), "new=2@11/3", 0),
        (put("new", ""), None, "new=@12/4", 0),
    ];
    for (request, prev, now, lease) in rows {
        let key = request.key.clone();
        let answer = client.kv.put(request.clone()).await.expect("a put").into_inner();
        assert_eq!(answer.prev_kv.as_ref().map(shown).as_deref(), prev, "{request:?}");
        let found = client.kv.range(get(key)).await.expect("a range").into_inner().kvs;
        assert_eq!((shown(&found[0]).as_str(), found[0].lease), (now, lease), "{request:?}");
    }
    let refused = [
        (put("", "v"), Code::InvalidArgument, "etcdserver: key is not provided"),
        (PutRequest { ignore_value: true, ..put("a", "v") }, Code::InvalidArgument, "etcdserver: value is provided"),
        (
            PutRequest { ignore_lease: true, lease: 1, ..put("a", "v") },
            Code::InvalidArgument,
            "etcdserver: lease is provided",
        ),
        (PutRequest { ignore_value: true, ..put("none", "") }, Code::InvalidArgument, "etcdserver: key not found"),
        (PutRequest { lease: 1, ..put("a", "v") }, Code::NotFound, "etcdserver: requested lease not found"),
        (put("a", "v".repeat(1_600_000)), Code::InvalidArgument, "etcdserver: request is too large"),
    ];
    for (request, code, text) in refused {
        check_refused(&request.key, client.kv.put(request.clone()).await, code, text);
    }
    let too_long = client.kv.put(put("a", "v".repeat(3_000_000))).await.expect_err("the transport refuses it");
    assert_eq!(too_long.code(), Code::ResourceExhausted);
    assert!(too_long.message().starts_with("grpc: received message larger than max (30000"), "{too_long:?}");
    let head = client.kv.range(get("a")).await.expect("a range").into_inner().header.expect("a header").revision;
    assert_eq!(head, 12, "a refused request uses no revision");
}

async fn delete_range_returns_count_and_previous_pairs_at_one_revision(backend: Backend) {
    let Some((_server, mut client)) = history(backend).await else { return };
    let rows: [(&str, &str, &[&str], i64); 5] = [
        ("x", "", &[], 7),
        ("c", "a", &[], 7),
        ("a", "c", &["a=1@2/1", "b=2@5/2"], 8),
        ("a", "c", &[], 8),
        ("\0", "\0", &["c=3@7/1"], 9),
    ];
    for (key, end, prev, head) in rows {
        let answer = client.kv.delete_range(delete(key, end)).await.expect("a delete").into_inner();
        assert_eq!(list(&answer.prev_kvs), prev, "{key} {end}");
        assert_eq!(
            (answer.deleted, answer.header.expect("a header").revision),
            (prev.len() as i64, head),
            "{key} {end}"
        );
    }
    check_refused(
        "no key",
        client.kv.delete_range(delete("", "")).await,
        Code::InvalidArgument,
        "etcdserver: key is not provided",
    );
}

async fn compaction_refuses_older_revisions_and_keeps_later_ones(backend: Backend) {
    let Some((_server, mut client)) = history(backend).await else { return };
    let compact = |revision, physical| CompactionRequest { revision, physical };
    check_refused("future", client.kv.compact(compact(8, false)).await, Code::OutOfRange, FUTURE);
    let before = client.kv.range(RangeRequest { revision: 6, ..all() }).await.expect("a range").into_inner();
    for (revision, physical) in [(4, false), (6, true)] {
        client.kv.compact(compact(revision, physical)).await.expect("a compaction");
    }
    for revision in [6, 5, 0, -1] {
        check_refused(revision, client.kv.compact(compact(revision, false)).await, Code::OutOfRange, COMPACTED);
    }
    let after = client.kv.range(RangeRequest { revision: 6, ..all() }).await.expect("a range").into_inner();
    assert_eq!(after, before);
    let below = client.kv.range(RangeRequest { revision: 5, ..all() }).await;
    check_refused("below", below, Code::OutOfRange, COMPACTED);
    let txn = TxnRequest {
        success: vec![
            op(Request::RequestPut(put("k", "v"))),
            op(Request::RequestRange(RangeRequest { revision: 5, ..all() })),
        ],
        ..Default::default()
    };
    check_refused("inner", client.kv.txn(txn).await, Code::OutOfRange, COMPACTED);
}

/// The later pages of a list are read at the revision of its first page.
async fn overwritten_values_are_cached_until_compaction(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let value = "v".repeat(1_000);
    for key in ["a", "b", "a", "a"] {
        client.put(key, &value).await;
    }
    let listed = client.kv.delete_range(delete("b", "")).await.expect("a delete").into_inner();
    let revision = listed.header.expect("a header").revision - 1;
    for old in 3..=revision {
        let list = client.kv.range(RangeRequest { revision: old, ..all() }).await.expect("a list").into_inner();
        assert_eq!(list.count, 2, "at {old}");
    }
    assert_eq!(server.metric("orlop_value_cache_misses").await, 0.0, "each value was cached");
    let compact = CompactionRequest { revision, physical: true };
    client.kv.compact(compact).await.expect("a compaction");
    // The newest version of a, and b, which the compact revision still has.
    let bytes = server.metric("orlop_value_cache_bytes").await;
    assert!((2_000.0..3_000.0).contains(&bytes), "{bytes} bytes");
}

/// Clients list, and then watch from the revision after the one in the header. The list must have all earlier changes.
async fn list_contains_the_store_at_its_header_revision(backend: Backend) {
    const KEYS: usize = 10_000;
    let Some(server) = Server::orlop_with(backend, &["--value-cache-bytes", "500000"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for first in (0..KEYS).step_by(100) {
        let puts = (first..first + 100).map(|number| Request::RequestPut(put(format!("k/{number:05}"), "value")));
        let success = puts.map(|put| RequestOp { request: Some(put) }).collect();
        client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction");
    }
    let mut writer = client.clone();
    let writing = tokio::spawn(async move {
        for number in (0..KEYS).cycle().step_by(7) {
            writer.put(format!("k/{number:05}"), "newer").await;
        }
    });
    for _ in 0..30 {
        let answer = client.kv.range(range("k/", "k0")).await.expect("a range").into_inner();
        let newest = answer.kvs.iter().map(|kv| kv.mod_revision).max().expect("there are keys");
        assert_eq!(newest, answer.header.expect("a header").revision, "every revision writes a key of the list");
    }
    assert!(!writing.is_finished(), "keys were written until now");
    writing.abort();
}

async fn large_responses_arrive_complete(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--value-cache-bytes", "3000000"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    // 40 MiB is larger than the value cache, so most of the response comes from the log.
    for number in 0..40 {
        client.put(format!("k{number:02}"), vec![number; 1 << 20]).await;
    }
    let whole = |kvs: &[KeyValue]| {
        kvs.len() == 40 && kvs.iter().enumerate().all(|(n, kv)| kv.value.len() == 1 << 20 && kv.value[7] == n as u8)
    };
    let answer = client.kv.range(all()).await.expect("a range").into_inner();
    assert!(whole(&answer.kvs) && answer.count == 40 && !answer.more);
    let txn = TxnRequest {
        success: vec![op(Request::RequestRange(all())), op(Request::RequestRange(get("k00")))],
        ..Default::default()
    };
    let answer = client.kv.txn(txn).await.expect("a transaction").into_inner();
    let Some(Response::ResponseRange(first)) = &answer.responses[0].response else { panic!("no range response") };
    assert!(whole(&first.kvs) && answer.responses.len() == 2);
}

/// Raw HTTP/2: a complete message on a stream that is not ended, and then the connection breaks.
async fn interrupted_request_does_not_block_others(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let address = server.endpoint().strip_prefix("http://").expect("an http endpoint");
    let http2 = [
        PREFACE.to_vec(),
        frame(SETTINGS, 0, 0, &[]),
        frame(HEADERS, END_HEADERS, 1, &headers("/etcdserverpb.KV/Range", &[])),
        frame(DATA, 0, 1, &message(&get("a").encode_to_vec())),
    ];
    let mut connection = TcpStream::connect(address).await.expect("the server accepts connections");
    connection.write_all(&http2.concat()).await.expect("the server reads");
    let received =
        "grpc_server_msg_received_total{grpc_method=\"Range\",grpc_service=\"etcdserverpb.KV\",grpc_type=\"unary\"} 1";
    eventually("the message's arrival", async || {
        let metrics = http_get(server.endpoint(), "/metrics").await.body;
        if metrics.contains(received) { Ok(()) } else { Err(metrics) }
    })
    .await;
    drop(connection);
    let puts = async {
        let mut client = Client::connect(server.endpoint()).await;
        client.put("after", "it").await;
    };
    timeout(Duration::from_secs(20), puts).await.expect("others are served");
}

on_both_backends!(
    interrupted_request_does_not_block_others,
    range_supports_every_field,
    unknown_sorts_are_refused_everywhere,
    range_stream_chunks_equal_the_range,
    put_options_keep_and_return_values,
    delete_range_returns_count_and_previous_pairs_at_one_revision,
    compaction_refuses_older_revisions_and_keeps_later_ones,
    overwritten_values_are_cached_until_compaction,
    list_contains_the_store_at_its_header_revision,
    large_responses_arrive_complete,
);
