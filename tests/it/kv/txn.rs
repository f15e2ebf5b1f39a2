//! Txn: compares, nested transactions, reads of its own writes, and refusals.

use super::*;

pub fn op(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

fn compare(key: &str, target: TargetUnion, result: i32) -> Compare {
    let code = match target {
        TargetUnion::Version(_) => 0,
        TargetUnion::CreateRevision(_) => 1,
        TargetUnion::ModRevision(_) => 2,
        TargetUnion::Value(_) => 3,
        TargetUnion::Lease(_) => 4,
    };
    Compare { key: key.to_owned().into(), target: code, result, target_union: Some(target), ..Default::default() }
}

async fn compares_evaluate_as_in_etcd(backend: Backend) {
    let Some((_server, mut client)) = history(backend).await else { return };
    const EQUAL: i32 = 0;
    const GREATER: i32 = 1;
    const LESS: i32 = 2;
    const NOT_EQUAL: i32 = 3;
    let value = |text: &'static str| TargetUnion::Value(text.into());
    let span = |compare: Compare, end: &'static str| Compare { range_end: end.into(), ..compare };
    let table = [
        (compare("b", TargetUnion::Version(2), EQUAL), true),
        (compare("b", TargetUnion::Version(2), NOT_EQUAL), false),
        (compare("b", TargetUnion::ModRevision(4), GREATER), true),
        (compare("b", TargetUnion::CreateRevision(3), LESS), false),
        (compare("b", value("2"), EQUAL), true),
        (compare("b", value("1"), GREATER), true),
        (compare("b", TargetUnion::Lease(0), EQUAL), true),
        (compare("x", TargetUnion::ModRevision(0), EQUAL), true),
        (compare("x", TargetUnion::Version(0), GREATER), false),
        (compare("x", value(""), EQUAL), false),
        (compare("x", value(""), NOT_EQUAL), false),
        (span(compare("a", TargetUnion::Version(0), GREATER), "z"), true),
        (span(compare("a", TargetUnion::Version(1), EQUAL), "z"), false),
        (span(compare("x", TargetUnion::Version(0), EQUAL), "z"), true),
        (Compare { target_union: None, ..compare("x", TargetUnion::ModRevision(9), EQUAL) }, true),
    ];
    for (compare, holds) in table {
        let txn = TxnRequest { compare: vec![compare.clone()], ..Default::default() };
        let answer = client.kv.txn(txn).await.expect("a transaction").into_inner();
        assert_eq!((answer.succeeded, answer.header.expect("a header").revision), (holds, 7), "{compare:?}");
    }
}

async fn transaction_reads_its_own_writes_and_uses_one_revision(backend: Backend) {
    let Some((_server, mut client)) = history(backend).await else { return };
    let nested = TxnRequest {
        // A compare sees the store as it was before the whole transaction.
        compare: vec![compare("new", TargetUnion::Version(0), 0)],
        success: vec![op(Request::RequestDeleteRange(delete("a", ""))), op(Request::RequestRange(all()))],
        ..Default::default()
    };
    let txn = TxnRequest {
        success: vec![
            op(Request::RequestRange(get("new"))),
            op(Request::RequestPut(put("new", "1"))),
            op(Request::RequestTxn(nested)),
            op(Request::RequestRange(RangeRequest { revision: 4, ..all() })),
        ],
        ..Default::default()
    };
    let answer = client.kv.txn(txn).await.expect("a transaction").into_inner();
    let mut seen = Vec::new();
    for response in answer.responses {
        match response.response {
            Some(Response::ResponseRange(range)) => seen.push(list(&range.kvs)),
            Some(Response::ResponsePut(_)) => seen.push(vec!["put".to_owned()]),
            Some(Response::ResponseTxn(nested)) => {
                assert!(nested.succeeded);
                let Some(Response::ResponseRange(range)) = &nested.responses[1].response else {
                    panic!("no range response")
                };
                seen.push(list(&range.kvs));
            }
            other => panic!("{other:?}"),
        }
    }
    let expected: [&[&str]; 4] =
        [&[], &["put"], &["b=2@5/2", "c=3@7/1", "new=1@8/1"], &["a=1@2/1", "b=1@3/1", "c=1@4/1"]];
    assert_eq!(seen, expected);
    assert_eq!(answer.header.expect("a header").revision, 8);
}

/// A transaction is evaluated in one step, so it must end soon.
async fn transaction_that_looks_at_too_many_keys_is_refused(backend: Backend) {
    const KEYS: usize = 1_000;
    let flags = ["--max-txn-ops", "1000"];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let of = |success: Vec<RequestOp>| TxnRequest { success, ..Default::default() };
    let nested = |success: Vec<RequestOp>| op(Request::RequestTxn(of(success)));
    let puts = (0..KEYS).map(|number| op(Request::RequestPut(put(format!("k{number}"), "v"))));
    client.kv.txn(of(puts.collect())).await.expect("a transaction");
    let count = op(Request::RequestRange(RangeRequest { count_only: true, ..all() }));
    const GREATER: i32 = 1;
    let version = Compare { range_end: "l".into(), ..compare("k", TargetUnion::Version(0), GREATER) };
    // The limit is 4 * 1,000 keys and 1,000,000.
    for (compares, ranges, is_accepted) in [(0, 1_004, true), (0, 1_005, false), (500, 504, true), (500, 505, false)] {
        for last in [None, Some(op(Request::RequestPut(put("k0", "w"))))] {
            let halves = [nested(vec![count.clone(); ranges / 2]), nested(vec![count.clone(); ranges - ranges / 2])];
            let success = halves.into_iter().chain(last).collect();
            let txn = TxnRequest { compare: vec![version.clone(); compares], ..of(success) };
            let answer = client.kv.txn(txn).await;
            let refused = answer.err().map(|status| (status.code(), status.message().to_owned()));
            let expected = (Code::ResourceExhausted, "etcdserver: too many requests".to_owned());
            assert_eq!(refused, (!is_accepted).then_some(expected), "{compares} compares, {ranges} ranges");
        }
    }
}

/// Deleted keys count until they are compacted, also at revisions at which they did not exist, and so do keys that the
/// transaction itself has deleted.
async fn deleted_keys_count_toward_the_limit_of_a_transaction(backend: Backend) {
    const KEYS: usize = 1_000;
    const EQUAL: i32 = 0;
    let Some(server) = Server::orlop_with(backend, &["--max-txn-ops", "1000"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let of = |success: Vec<RequestOp>| TxnRequest { success, ..Default::default() };
    let puts = (0..KEYS).map(|number| op(Request::RequestPut(put(format!("k{number}"), "v"))));
    client.kv.txn(of(puts.collect())).await.expect("a transaction");
    let delete = op(Request::RequestDeleteRange(DeleteRangeRequest { prev_kv: false, ..delete("k", "l") }));
    let count = |revision| op(Request::RequestRange(RangeRequest { count_only: true, revision, ..all() }));
    let absent = Compare { range_end: "l".into(), ..compare("k", TargetUnion::Version(0), EQUAL) };
    // Each function returns a transaction that looks at all keys this number of times.
    type Looks<'a> = (&'static str, &'a dyn Fn(usize) -> TxnRequest);
    let table: [Looks<'_>; 5] = [
        ("a delete, and ranges of the deleted keys", &|times| {
            of([vec![delete.clone()], vec![count(0); times - 1]].concat())
        }),
        ("ranges", &|times| of(vec![count(0); times])),
        ("ranges at the first revision", &|times| of(vec![count(1); times])),
        ("deletes", &|times| of(vec![delete.clone(); times])),
        ("compares", &|times| TxnRequest { compare: vec![absent.clone(); times], ..Default::default() }),
    ];
    for (what, looks) in table {
        // The limit is 4 * 1,000 keys and 1,000,000. What is refused deletes nothing.
        for (times, is_accepted) in [(1_005, false), (1_004, true)] {
            let halves = [times / 2, times - times / 2].map(|times| op(Request::RequestTxn(looks(times))));
            let answer = client.kv.txn(of(halves.to_vec())).await;
            let refused = answer.err().map(|status| (status.code(), status.message().to_owned()));
            let expected = (Code::ResourceExhausted, "etcdserver: too many requests".to_owned());
            assert_eq!(refused, (!is_accepted).then_some(expected), "{what}, {times} times");
        }
    }
}

async fn invalid_transactions_are_refused_as_a_whole(backend: Backend) {
    let Some((_server, mut client)) = history(backend).await else { return };
    let put = |key: &str| op(Request::RequestPut(put(key, "v")));
    let delete = |key: &str, end: &str| op(Request::RequestDeleteRange(delete(key, end)));
    let of = |success: Vec<RequestOp>| TxnRequest { success, ..Default::default() };
    let nested = |success: Vec<RequestOp>| op(Request::RequestTxn(of(success)));
    let invalid = Code::InvalidArgument;
    let duplicate = "etcdserver: duplicate key given in txn request";
    let too_many = "etcdserver: too many operations in txn request";
    let at = |revision| op(Request::RequestRange(RangeRequest { revision, ..all() }));
    let leased = op(Request::RequestPut(PutRequest { key: "leased".into(), lease: 5, ..Default::default() }));
    let table = [
        (of(vec![put("k"), put("k")]), invalid, duplicate),
        (of(vec![put("k"), delete("j", "l")]), invalid, duplicate),
        (of(vec![put("k"), nested(vec![put("k")])]), invalid, duplicate),
        (of(vec![nested(vec![delete("j", "l")]), put("k")]), invalid, duplicate),
        (of(vec![put("")]), invalid, "etcdserver: key is not provided"),
        (of(vec![RequestOp { request: None }]), invalid, "etcdserver: key not found"),
        (of(vec![put("k"), at(99)]), Code::OutOfRange, FUTURE),
        (of(vec![put("k"), leased]), Code::NotFound, "etcdserver: requested lease not found"),
        (of((0..129).map(|n| put(&format!("k{n}"))).collect()), invalid, too_many),
        (
            of([
                vec![nested((0..28).map(|n| put(&format!("n{n}"))).collect())],
                (0..100).map(|n| put(&format!("k{n}"))).collect(),
            ]
            .concat()),
            invalid,
            too_many,
        ),
    ];
    for (txn, code, text) in table {
        check_refused(txn.success.len(), client.kv.txn(txn).await, code, text);
    }
    let found = client.kv.range(range("k", "l")).await.expect("a range").into_inner();
    assert_eq!((found.count, found.header.expect("a header").revision), (0, 7));
    for allowed in [vec![delete("a", "c"), delete("b", "d")], (0..128).map(|n| put(&format!("k{n}"))).collect()] {
        client.kv.txn(of(allowed)).await.expect("etcd allows it");
    }
}

/// Each row: the compared keys, the expected value, the range to read if the compare succeeds (otherwise all keys are
/// read), whether it succeeds, and the number of pairs that are read. Values come from the log, because none is cached.
async fn transactions_read_values_that_are_not_cached(backend: Backend) {
    const KEYS: usize = 300;
    let Some(server) = Server::orlop_with(backend, &["--value-cache-bytes", "0"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for prefix in ["a", "b"] {
        for first in (0..KEYS).step_by(100) {
            let puts =
                (first..first + 100).map(|number| op(Request::RequestPut(put(format!("{prefix}{number:03}"), prefix))));
            let txn = TxnRequest { success: puts.collect(), ..Default::default() };
            client.kv.txn(txn).await.expect("a transaction");
        }
    }
    for (compared, value, ranged, succeeds, found) in [
        (get("a000"), "a", get("b000"), true, 1),
        (get("a000"), "a", range("b", "c"), true, KEYS),
        (range("a", "b"), "a", get("b000"), true, 1),
        (range("a", "b"), "a", range("b", "c"), true, KEYS),
        (range("a", "b"), "a", range("a", "b"), true, KEYS),
        (range("a", "c"), "a", range("b", "c"), false, 2 * KEYS),
        (get("a000"), "b", range("b", "c"), false, 2 * KEYS),
    ] {
        let what = format!("{compared:?} is {value}, {ranged:?}");
        let compare = Compare {
            target: CompareTarget::Value as i32,
            key: compared.key,
            range_end: compared.range_end,
            target_union: Some(TargetUnion::Value(value.to_owned().into())),
            ..Default::default()
        };
        let [success, failure] = [ranged, all()].map(|range| vec![op(Request::RequestRange(range))]);
        let txn = TxnRequest { compare: vec![compare], success, failure };
        let answer = client.kv.txn(txn).await.expect("a transaction").into_inner();
        let Some(Response::ResponseRange(range)) = &answer.responses[0].response else { panic!("no range response") };
        assert_eq!((answer.succeeded, range.kvs.len()), (succeeds, found), "{what}");
        assert!(range.kvs.iter().all(|kv| kv.value == kv.key[..1]), "{what}");
    }
}

on_both_backends!(
    compares_evaluate_as_in_etcd,
    transaction_reads_its_own_writes_and_uses_one_revision,
    transaction_that_looks_at_too_many_keys_is_refused,
    deleted_keys_count_toward_the_limit_of_a_transaction,
    invalid_transactions_are_refused_as_a_whole,
    transactions_read_values_that_are_not_cached,
);
