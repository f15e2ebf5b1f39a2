//! Tests of [`check_intervals`]. Each row is one branch of a transaction.

use bytes::Bytes;

use super::{interval_check::check_intervals, status::Invalid};
use orlop_wire::proto::server::etcdserverpb::{self as pb, request_op::Request};

pub(super) fn put(key: &'static str) -> pb::RequestOp {
    let put = pb::PutRequest { key: Bytes::from_static(key.as_bytes()), ..Default::default() };
    pb::RequestOp { request: Some(Request::RequestPut(put)) }
}

pub(super) fn delete(key: &'static str, end: &'static str) -> pb::RequestOp {
    let (key, range_end) = (Bytes::from_static(key.as_bytes()), Bytes::from_static(end.as_bytes()));
    let delete = pb::DeleteRangeRequest { key, range_end, prev_kv: false };
    pb::RequestOp { request: Some(Request::RequestDeleteRange(delete)) }
}

pub(super) fn range(key: &'static str) -> pb::RequestOp {
    let range = pb::RangeRequest { key: Bytes::from_static(key.as_bytes()), ..Default::default() };
    pb::RequestOp { request: Some(Request::RequestRange(range)) }
}

pub(super) fn txn(success: Vec<pb::RequestOp>, failure: Vec<pb::RequestOp>) -> pb::RequestOp {
    let txn = pb::TxnRequest { compare: vec![], success, failure };
    pb::RequestOp { request: Some(Request::RequestTxn(txn)) }
}

#[track_caller]
fn check(branch: &[pb::RequestOp], expected: Result<(), Invalid>) {
    assert_eq!(check_intervals(branch).map(drop), expected, "{branch:?}");
}

const DUPLICATE: Result<(), Invalid> = Err(Invalid::DuplicateKey);

#[test]
fn duplicate_puts_are_refused() {
    check(&[], Ok(()));
    check(&[put("a"), put("b")], Ok(()));
    check(&[put("a"), put("a\0")], Ok(()));
    check(&[put("a"), put("a")], DUPLICATE);
    check(&[put("a"), put("b"), put("a")], DUPLICATE);
    check(&[range("a"), put("a"), range("a")], Ok(()));
    check(&[pb::RequestOp { request: None }, put("a")], Ok(()));
}

#[test]
fn put_key_must_not_be_deleted_in_either_order() {
    check(&[put("a"), delete("a", "")], DUPLICATE);
    check(&[delete("a", ""), put("a")], DUPLICATE);
    check(&[delete("a", ""), put("a\0")], Ok(()));
    check(&[delete("a", "c"), put("b")], DUPLICATE);
    check(&[put("a"), delete("a", "c")], DUPLICATE);
    check(&[put("c"), delete("a", "c")], Ok(()));
    check(&[delete("b", "d"), put("a")], Ok(()));
}

#[test]
fn deletes_may_overlap() {
    check(&[delete("a", ""), delete("a", "")], Ok(()));
    check(&[delete("a", "c"), delete("b", "d"), delete("b", "")], Ok(()));
    check(&[delete("a", "c"), txn(vec![delete("a", "c")], vec![delete("b", "")])], Ok(()));
}

#[test]
fn empty_ranges_delete_nothing() {
    check(&[delete("c", "a"), put("a"), put("b"), put("c")], Ok(()));
    check(&[delete("b", "b"), put("b")], Ok(()));
    // To the end of the key space: etcd's interval tree treats this range as empty, although the delete removes keys.
    check(&[delete("a", "\0"), put("a"), put("b")], Ok(()));
    check(&[delete("\0", "\0"), put("a")], Ok(()));
}

#[test]
fn nested_transactions_count_toward_their_branch() {
    check(&[put("a"), txn(vec![put("a")], vec![])], DUPLICATE);
    check(&[txn(vec![], vec![put("a")]), put("a")], DUPLICATE);
    check(&[txn(vec![put("a")], vec![]), txn(vec![put("a")], vec![])], DUPLICATE);
    check(&[txn(vec![put("a")], vec![]), txn(vec![], vec![put("a")])], DUPLICATE);
    check(&[txn(vec![put("a")], vec![]), txn(vec![put("b")], vec![put("c")])], Ok(()));
    check(&[delete("a", "c"), txn(vec![put("b")], vec![])], DUPLICATE);
    check(&[delete("a", "c"), txn(vec![], vec![put("b")])], DUPLICATE);
    check(&[put("b"), txn(vec![delete("a", "c")], vec![])], DUPLICATE);
    check(&[put("b"), txn(vec![], vec![delete("a", "c")])], DUPLICATE);
    check(&[txn(vec![txn(vec![put("a")], vec![])], vec![]), put("a")], DUPLICATE);
}

#[test]
fn branches_of_a_nested_transaction_are_distinguished() {
    check(&[txn(vec![put("a")], vec![put("a")])], Ok(()));
    check(&[txn(vec![put("a")], vec![delete("a", "")])], Ok(()));
    check(&[txn(vec![put("a"), put("a")], vec![])], DUPLICATE);
    check(&[txn(vec![], vec![put("a"), delete("a", "")])], DUPLICATE);
    check(&[txn(vec![put("a")], vec![put("a")]), put("a")], DUPLICATE);
}

/// Deletes of a nested transaction conflict with puts of later nested transactions, but not of earlier ones.
#[test]
fn nested_operations_keep_their_order() {
    check(&[txn(vec![delete("a", "")], vec![]), txn(vec![put("a")], vec![])], DUPLICATE);
    check(&[txn(vec![], vec![delete("a", "")]), txn(vec![put("a")], vec![])], DUPLICATE);
    check(&[txn(vec![put("a")], vec![]), txn(vec![delete("a", "")], vec![])], Ok(()));
}
