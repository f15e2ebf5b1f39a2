//! Tests of the validation of requests: every rule, the order of the rules, and the conversion of sentinels.

use bytes::Bytes;

use super::{
    convert,
    interval_check_tests::{delete, put, range, txn},
    status::Invalid,
};
use orlop_core::{
    index::ReadAt,
    store::request::{
        Compare, CompareTarget, Op, Projection, PutLease, PutValue, RangeRequest, Relation, Sort, SortOrder, SortScope,
        SortTarget, TxnRequest,
    },
    types::{KeyRange, LeaseId, Revision},
};
use orlop_wire::proto::server::etcdserverpb::{
    self as pb,
    compare::{CompareResult, CompareTarget as Target, TargetUnion},
    range_request::{SortOrder as Order, SortTarget as By},
    request_op::Request,
};

const OPS_MAX: usize = 4;

fn key() -> Bytes {
    Bytes::from_static(b"a")
}

fn a_range() -> pb::RangeRequest {
    pb::RangeRequest { key: key(), ..Default::default() }
}

fn a_put() -> pb::PutRequest {
    pb::PutRequest { key: key(), ..Default::default() }
}

fn a_compare() -> pb::Compare {
    pb::Compare { key: key(), ..Default::default() }
}

fn op(request: Request) -> pb::RequestOp {
    pb::RequestOp { request: Some(request) }
}

fn refused<T>(result: Result<T, Invalid>) -> Option<Invalid> {
    result.err()
}

// Range.

#[track_caller]
fn checked(request: &pb::RangeRequest) -> RangeRequest {
    convert::range(request).expect("a valid request")
}

#[track_caller]
fn checked_in_txn(request: pb::RangeRequest) -> RangeRequest {
    let success = vec![op(Request::RequestRange(request))];
    let txn = convert::txn(pb::TxnRequest { success, ..Default::default() }, OPS_MAX).expect("a valid request");
    match txn.success.into_iter().next() {
        Some(Op::Range(range)) => range,
        other => panic!("{other:?}"),
    }
}

#[test]
fn ranges_are_checked_in_etcds_order() {
    let unknown_order = pb::RangeRequest { sort_order: 3, ..a_range() };
    let unknown_target = pb::RangeRequest { sort_target: 5, ..a_range() };
    let no_key = pb::RangeRequest { key: Bytes::new(), ..a_range() };
    let table = [
        (a_range(), None),
        (unknown_order.clone(), Some(Invalid::SortOption)),
        (pb::RangeRequest { sort_order: -1, ..a_range() }, Some(Invalid::SortOption)),
        (unknown_target, Some(Invalid::SortOption)),
        (pb::RangeRequest { sort_target: -1, ..a_range() }, Some(Invalid::SortOption)),
        (pb::RangeRequest { count_only: true, ..unknown_order.clone() }, Some(Invalid::SortOption)),
        (no_key.clone(), Some(Invalid::KeyMissing)),
        (pb::RangeRequest { key: Bytes::new(), ..unknown_order }, Some(Invalid::KeyMissing)),
        (pb::RangeRequest { range_end: key(), ..no_key }, Some(Invalid::KeyMissing)),
    ];
    for (request, expected) in table {
        assert_eq!(refused(convert::range(&request)), expected, "{request:?}");
        let ops = vec![op(Request::RequestRange(request.clone()))];
        let txn = pb::TxnRequest { success: ops, ..Default::default() };
        assert_eq!(refused(convert::txn(txn, OPS_MAX)), expected, "{request:?} in a transaction");
    }
}

#[test]
fn range_reads_the_head_at_revisions_up_to_0_and_in_a_txn_only_at_0() {
    let table = [
        (0, ReadAt::Latest, ReadAt::Latest),
        (-7, ReadAt::Latest, ReadAt::Revision(Revision(-7))),
        (7, ReadAt::Revision(Revision(7)), ReadAt::Revision(Revision(7))),
    ];
    for (revision, alone, in_txn) in table {
        let request = pb::RangeRequest { revision, ..a_range() };
        assert_eq!((checked(&request).at, checked_in_txn(request).at), (alone, in_txn), "{revision}");
    }
}

#[test]
fn limit_of_0_or_less_is_none() {
    for (limit, expected) in [(0, None), (-1, None), (i64::MIN, None), (1, Some(1)), (10_000, Some(10_000))] {
        assert_eq!(checked(&pb::RangeRequest { limit, ..a_range() }).limit, expected, "{limit}");
    }
}

#[test]
fn ranges_convert_to_and_from_the_wire() {
    let with_end = |range_end| checked(&pb::RangeRequest { range_end, ..a_range() }).range;
    let span = |end: Option<&[u8]>| KeyRange::Span { start: (&b"a"[..]).into(), end: end.map(Into::into) };
    assert_eq!(with_end(Bytes::new()), KeyRange::Single((&b"a"[..]).into()));
    assert_eq!(with_end(Bytes::from_static(b"\0")), span(None));
    assert_eq!(with_end(Bytes::from_static(b"c")), span(Some(b"c")));
    assert!(with_end(Bytes::from_static(b"A")).is_empty(), "an empty range is no error");
}

#[test]
fn count_only_has_precedence_over_keys_only() {
    let table = [
        (false, false, Projection::Full),
        (false, true, Projection::KeysOnly),
        (true, false, Projection::CountOnly),
        (true, true, Projection::CountOnly),
    ];
    for (count_only, keys_only, expected) in table {
        assert_eq!(checked(&pb::RangeRequest { count_only, keys_only, ..a_range() }).projection, expected);
    }
}

#[test]
fn sorts_have_etcds_order_and_scope() {
    let sort = |target, order, scope| Some(Sort { target, order, scope });
    let (ascend, descend) = (SortOrder::Ascend, SortOrder::Descend);
    // The sort without a filter, and the scope with a filter if it differs.
    let table = [
        (By::Key, Order::None, None, None),
        (By::Key, Order::Ascend, None, None),
        (By::Key, Order::Descend, sort(SortTarget::Key, descend, SortScope::All), None),
        (By::Version, Order::None, sort(SortTarget::Version, ascend, SortScope::FirstKeys), Some(SortScope::All)),
        (By::Version, Order::Ascend, sort(SortTarget::Version, ascend, SortScope::All), None),
        (By::Create, Order::Descend, sort(SortTarget::CreateRevision, descend, SortScope::All), None),
        (By::Mod, Order::None, sort(SortTarget::ModRevision, ascend, SortScope::FirstKeys), Some(SortScope::All)),
        (By::Value, Order::Descend, sort(SortTarget::Value, descend, SortScope::All), None),
    ];
    for (target, order, expected, filtered_scope) in table {
        let request = pb::RangeRequest { sort_target: target as i32, sort_order: order as i32, ..a_range() };
        assert_eq!(checked(&request).sort, expected, "{target:?} {order:?}");
        let filtered = expected.map(|sort| Sort { scope: filtered_scope.unwrap_or(sort.scope), ..sort });
        for request in [
            pb::RangeRequest { min_mod_revision: 1, ..request.clone() },
            pb::RangeRequest { max_mod_revision: -1, ..request.clone() },
            pb::RangeRequest { min_create_revision: 1, ..request.clone() },
            pb::RangeRequest { max_create_revision: 1, ..request.clone() },
        ] {
            assert_eq!(checked(&request).sort, filtered, "{request:?}");
        }
    }
}

#[test]
fn only_a_bound_of_0_is_none() {
    let request = pb::RangeRequest {
        min_mod_revision: 1,
        max_mod_revision: -1,
        min_create_revision: 0,
        max_create_revision: 4,
        ..a_range()
    };
    let filter = checked(&request).filter;
    assert_eq!((filter.mod_min, filter.mod_max), (Some(Revision(1)), Some(Revision(-1))));
    assert_eq!((filter.create_min, filter.create_max), (None, Some(Revision(4))));
}

// Put and DeleteRange.

#[test]
fn puts_are_checked_in_etcds_order() {
    let value = Bytes::from_static(b"x");
    let both = pb::PutRequest { ignore_value: true, ignore_lease: true, value: value.clone(), lease: 1, ..a_put() };
    let table = [
        (a_put(), None),
        (pb::PutRequest { key: Bytes::new(), ..both.clone() }, Some(Invalid::KeyMissing)),
        (both, Some(Invalid::ValueProvided)),
        (
            pb::PutRequest { ignore_lease: true, lease: -1, value: value.clone(), ..a_put() },
            Some(Invalid::LeaseProvided),
        ),
        (pb::PutRequest { ignore_value: true, lease: 1, ..a_put() }, None),
        (pb::PutRequest { ignore_lease: true, value, ..a_put() }, None),
    ];
    for (request, expected) in table {
        assert_eq!(refused(convert::put(request.clone())), expected, "{request:?}");
        let txn = pb::TxnRequest { failure: vec![op(Request::RequestPut(request.clone()))], ..Default::default() };
        assert_eq!(refused(convert::txn(txn, OPS_MAX)), expected, "{request:?} in a transaction");
    }
}

#[test]
fn puts_keep_or_set_value_and_lease() {
    let put = |request| convert::put(request).expect("a valid request");
    let kept = put(pb::PutRequest { ignore_value: true, ignore_lease: true, prev_kv: true, ..a_put() });
    assert!(matches!((kept.value, kept.lease, kept.prev_kv), (PutValue::Keep, PutLease::Keep, true)));
    let set = put(pb::PutRequest { lease: -3, ..a_put() });
    assert!(matches!(set.value, PutValue::New(value) if value.is_empty()));
    assert!(matches!(set.lease, PutLease::Set(Some(LeaseId(-3)))));
    assert!(matches!(put(a_put()).lease, PutLease::Set(None)));
}

#[test]
fn deletes_are_refused_without_a_key() {
    let delete = |key: &'static [u8], range_end: &'static [u8]| pb::DeleteRangeRequest {
        key: Bytes::from_static(key),
        range_end: Bytes::from_static(range_end),
        prev_kv: true,
    };
    assert_eq!(refused(convert::delete(&delete(b"", b"\0"))), Some(Invalid::KeyMissing));
    let request = convert::delete(&delete(b"a", b"\0")).expect("a valid request");
    assert_eq!((request.range, request.prev_kv), (KeyRange::from_wire(b"a", b"\0"), true));
}

// Txn.

#[track_caller]
fn check(request: pb::TxnRequest, expected: Option<Invalid>) {
    assert_eq!(refused(convert::txn(request.clone(), OPS_MAX)), expected, "{request:?}");
}

fn lists(compares: usize, success: usize, failure: usize) -> pb::TxnRequest {
    pb::TxnRequest {
        compare: vec![a_compare(); compares],
        success: vec![range("a"); success],
        failure: vec![range("a"); failure],
    }
}

#[test]
fn each_list_of_a_transaction_is_limited() {
    check(lists(0, 0, 0), None);
    check(lists(OPS_MAX, OPS_MAX, OPS_MAX), None);
    check(lists(OPS_MAX + 1, 0, 0), Some(Invalid::TooManyOps));
    check(lists(0, OPS_MAX + 1, 0), Some(Invalid::TooManyOps));
    check(lists(0, 0, OPS_MAX + 1), Some(Invalid::TooManyOps));
}

/// The limit of a nested transaction is that of its parent less the parent's longest list.
#[test]
fn nested_transaction_gets_the_rest_of_the_limit() {
    let nested = |ops| txn(vec![range("a"); ops], vec![]);
    let check = |compares, success: Vec<_>, failure: Vec<_>, expected| {
        check(pb::TxnRequest { compare: vec![a_compare(); compares], success, failure }, expected);
    };
    check(0, vec![nested(3)], vec![], None);
    check(0, vec![nested(4)], vec![], Some(Invalid::TooManyOps));
    check(0, vec![], vec![nested(4)], Some(Invalid::TooManyOps));
    check(2, vec![nested(2)], vec![], None);
    check(2, vec![nested(3)], vec![], Some(Invalid::TooManyOps));
    check(0, vec![nested(2)], vec![range("a"), range("a")], None);
    check(0, vec![nested(3)], vec![range("a"), range("a")], Some(Invalid::TooManyOps));
    // Each nested transaction has this limit.
    check(0, vec![nested(2), nested(2)], vec![], None);
    check(OPS_MAX, vec![nested(0)], vec![], None);
    check(OPS_MAX, vec![nested(1)], vec![], Some(Invalid::TooManyOps));
    // Each level uses one operation, so the limit also bounds the depth.
    let deep = |depth| (0..depth).fold(range("a"), |inner, _| txn(vec![inner], vec![]));
    check(0, vec![deep(OPS_MAX - 1)], vec![], None);
    check(0, vec![deep(OPS_MAX)], vec![], Some(Invalid::TooManyOps));
}

#[test]
fn transaction_checks_its_lists_before_duplicates() {
    let no_key = || pb::Compare::default();
    let bad_sort = || op(Request::RequestRange(pb::RangeRequest { sort_order: 9, ..a_range() }));
    let empty = || pb::RequestOp { request: None };
    let request = |compare, success, failure| pb::TxnRequest { compare, success, failure };
    check(request(vec![no_key()], vec![], vec![]), Some(Invalid::KeyMissing));
    check(request(vec![no_key()], vec![range("a"); OPS_MAX + 1], vec![]), Some(Invalid::TooManyOps));
    check(request(vec![no_key()], vec![bad_sort()], vec![]), Some(Invalid::KeyMissing));
    check(request(vec![], vec![bad_sort()], vec![empty()]), Some(Invalid::SortOption));
    check(request(vec![], vec![range("a"), empty()], vec![bad_sort()]), Some(Invalid::EmptyOp));
    check(request(vec![], vec![], vec![empty()]), Some(Invalid::EmptyOp));
    check(request(vec![], vec![txn(vec![empty()], vec![]), bad_sort()], vec![]), Some(Invalid::EmptyOp));
    check(request(vec![], vec![delete("", "b")], vec![]), Some(Invalid::KeyMissing));
    check(request(vec![], vec![put("a"), put("a")], vec![empty()]), Some(Invalid::EmptyOp));
    check(request(vec![], vec![put("a"), put("a")], vec![]), Some(Invalid::DuplicateKey));
    check(request(vec![], vec![], vec![put("a"), delete("a", "")]), Some(Invalid::DuplicateKey));
    check(request(vec![], vec![put("a")], vec![put("a")]), None);
    check(request(vec![], vec![put(""), put("")], vec![]), Some(Invalid::KeyMissing));
}

#[test]
fn compares_convert_as_in_etcd() {
    let compare = |compare: pb::Compare| -> Compare {
        let txn = pb::TxnRequest { compare: vec![compare], ..Default::default() };
        let TxnRequest { compares, .. } = convert::txn(txn, OPS_MAX).expect("a valid request");
        compares.into_iter().next().expect("one was given")
    };
    let results = [
        (CompareResult::Equal as i32, Relation::Equal),
        (CompareResult::Greater as i32, Relation::Greater),
        (CompareResult::Less as i32, Relation::Less),
        (CompareResult::NotEqual as i32, Relation::NotEqual),
        (77, Relation::Unknown),
    ];
    for (result, expected) in results {
        assert_eq!(compare(pb::Compare { result, ..a_compare() }).relation, expected);
    }
    let number = Some(TargetUnion::Version(5));
    let value = Some(TargetUnion::Value(Bytes::from_static(b"x")));
    let targets = [
        (Target::Version as i32, number.clone(), CompareTarget::Version(5)),
        (Target::Version as i32, None, CompareTarget::Version(0)),
        (Target::Version as i32, value.clone(), CompareTarget::Version(0)),
        (Target::Create as i32, Some(TargetUnion::CreateRevision(5)), CompareTarget::CreateRevision(5)),
        (Target::Create as i32, number.clone(), CompareTarget::CreateRevision(0)),
        (Target::Mod as i32, Some(TargetUnion::ModRevision(5)), CompareTarget::ModRevision(5)),
        (Target::Mod as i32, None, CompareTarget::ModRevision(0)),
        (Target::Lease as i32, Some(TargetUnion::Lease(-5)), CompareTarget::Lease(-5)),
        (Target::Lease as i32, number.clone(), CompareTarget::Lease(0)),
        (Target::Value as i32, value, CompareTarget::Value(Bytes::from_static(b"x"))),
        (Target::Value as i32, number.clone(), CompareTarget::Value(Bytes::new())),
        (Target::Value as i32, None, CompareTarget::Value(Bytes::new())),
        (77, number, CompareTarget::Unknown),
    ];
    for (target, target_union, expected) in targets {
        let text = format!("{target} {target_union:?}");
        let compare = compare(pb::Compare { target, target_union, ..a_compare() });
        assert_eq!(format!("{:?}", compare.target), format!("{expected:?}"), "{text}");
    }
    let range = compare(pb::Compare { range_end: Bytes::from_static(b"\0"), ..a_compare() }).range;
    assert_eq!(range, KeyRange::from_wire(b"a", b"\0"));
}
