//! Random requests for property tests.

use bytes::Bytes;
use proptest::{collection::vec, prelude::*, sample::select};

use super::{
    request::{
        Compare, CompareTarget, DeleteRequest, Op, PutLease, PutRequest, PutValue, RangeRequest, Relation,
        RevisionFilter, TxnRequest,
    },
    select_tests,
    write_request::Request,
};
use crate::{
    index::ReadAt,
    types::{Key, KeyRange, LeaseId, Revision},
};

pub(super) const KEYS: [&str; 6] = ["a", "a\0", "ab", "b", "ba", "c"];

pub(super) const LEASES: [i64; 3] = [1, -2, 3];

/// Replaces the distances from the head in a request with revisions.
pub(super) fn anchored(request: &Request, head: Revision) -> Request {
    let mut request = request.clone();
    if let Request::Txn(txn) = &mut request {
        anchor(txn, head);
    }
    request
}

fn anchor(txn: &mut TxnRequest, head: Revision) {
    let revision = |back: i64| head.0 - back;
    for compare in &mut txn.compares {
        if let CompareTarget::CreateRevision(back) | CompareTarget::ModRevision(back) = &mut compare.target {
            *back = revision(*back).max(0);
        }
    }
    for op in txn.success.iter_mut().chain(&mut txn.failure) {
        match op {
            Op::Range(range) => {
                if let ReadAt::Revision(at) = &mut range.at {
                    // In a transaction only 0 means the head, and the server has converted it to `Latest`.
                    *at = Revision(if revision(at.0) == 0 { -1 } else { revision(at.0) });
                }
                let RevisionFilter { mod_min, mod_max, create_min, create_max } = &mut range.filter;
                for back in [mod_min, mod_max, create_min, create_max].into_iter().flatten() {
                    *back = Revision(revision(back.0));
                }
            }
            Op::Txn(nested) => anchor(nested, head),
            Op::Put(_) | Op::Delete(_) => {}
        }
    }
}

pub(super) fn requests() -> impl Strategy<Value = Request> {
    let id = || select(LEASES.to_vec()).prop_map(LeaseId);
    prop_oneof![
        4 => puts().prop_map(Request::Put),
        2 => deletes().prop_map(Request::Delete),
        6 => txns(2).prop_map(|txn| Request::Txn(distinct(txn))),
        2 => (id(), 2..5_i64).prop_map(|(id, ttl)| Request::Grant { id, ttl_secs: ttl * 1_000 }),
        1 => id().prop_map(Request::Revoke),
    ]
}

fn puts() -> impl Strategy<Value = PutRequest> {
    let value = prop_oneof![
        4 => select(vec!["", "x", "y", "a longer value"])
            .prop_map(|value| PutValue::New(Bytes::from_static(value.as_bytes()))),
        1 => Just(PutValue::Keep),
    ];
    let lease = prop_oneof![
        4 => Just(PutLease::Set(None)),
        4 => select(LEASES.to_vec()).prop_map(|id| PutLease::Set(Some(LeaseId(id)))),
        2 => Just(PutLease::Keep),
    ];
    (select(KEYS.to_vec()), value, lease, any::<bool>()).prop_map(|(key, value, lease, prev_kv)| PutRequest {
        key: Bytes::from_static(key.as_bytes()),
        value,
        lease,
        prev_kv,
    })
}

fn deletes() -> impl Strategy<Value = DeleteRequest> {
    (key_ranges(), any::<bool>()).prop_map(|(range, prev_kv)| DeleteRequest { range, prev_kv })
}

/// Single keys and spans: open, closed or empty.
pub(super) fn key_ranges() -> impl Strategy<Value = KeyRange> {
    let key = || select([&KEYS[..], &["\0", "aa", "bb", "d"]].concat());
    prop_oneof![
        4 => key().prop_map(|key| KeyRange::Single(Key::from(key.as_bytes()))),
        1 => key().prop_map(|key| KeyRange::Span { start: Key::from(key.as_bytes()), end: None }),
        4 => (key(), key()).prop_map(|(start, end)| KeyRange::from_wire(start.as_bytes(), end.as_bytes())),
    ]
}

fn compares() -> impl Strategy<Value = Compare> {
    let relation = select(vec![
        Relation::Equal,
        Relation::NotEqual,
        Relation::Greater,
        Relation::Less,
        Relation::Equal,
        Relation::Unknown,
    ]);
    let target = prop_oneof![
        (0..4_i64).prop_map(CompareTarget::Version),
        (0..6_i64).prop_map(CompareTarget::CreateRevision),
        (0..6_i64).prop_map(CompareTarget::ModRevision),
        select(vec!["", "x", "y"]).prop_map(|value| CompareTarget::Value(Bytes::from_static(value.as_bytes()))),
        select(vec![0, 1, -2, 3]).prop_map(CompareTarget::Lease),
        Just(CompareTarget::Unknown),
    ];
    (key_ranges(), relation, target).prop_map(|(range, relation, target)| Compare { range, relation, target })
}

fn ranges() -> impl Strategy<Value = RangeRequest> {
    let at = prop_oneof![
        8 => Just(ReadAt::Latest),
        4 => (0..5_i64).prop_map(|back| ReadAt::Revision(Revision(back))),
        1 => select(vec![-2, -1, 40]).prop_map(|back| ReadAt::Revision(Revision(back))),
    ];
    (select_tests::ranges(), key_ranges(), at).prop_map(|(request, range, at)| RangeRequest { range, at, ..request })
}

fn txns(depth: u32) -> BoxedStrategy<TxnRequest> {
    let op = || {
        let leaf = prop_oneof![
            4 => puts().prop_map(Op::Put),
            2 => deletes().prop_map(Op::Delete),
            3 => ranges().prop_map(Op::Range),
        ];
        if depth == 0 {
            return leaf.boxed();
        }
        prop_oneof![6 => leaf, 1 => txns(depth - 1).prop_map(Op::Txn)].boxed()
    };
    (vec(compares(), 0..3), vec(op(), 0..4), vec(op(), 0..4))
        .prop_map(|(compares, success, failure)| TxnRequest { compares, success, failure })
        .boxed()
}

/// Removes the puts that the server rejects: those of a key that the same branch also puts or deletes elsewhere. As in
/// etcd, a delete to the end of the key space is not considered.
fn distinct(mut txn: TxnRequest) -> TxnRequest {
    for branch in [&mut txn.success, &mut txn.failure] {
        let mut taken = Vec::new();
        add_deleted_ranges(branch, &mut taken);
        remove_duplicate_puts(branch, &mut taken);
    }
    txn
}

/// Adds the ranges that the operations delete.
fn add_deleted_ranges(ops: &[Op], ranges: &mut Vec<KeyRange>) {
    for op in ops {
        match op {
            Op::Delete(DeleteRequest { range: KeyRange::Span { end: None, .. }, .. }) => {}
            Op::Delete(delete) => ranges.push(delete.range.clone()),
            Op::Txn(nested) => {
                add_deleted_ranges(&nested.success, ranges);
                add_deleted_ranges(&nested.failure, ranges);
            }
            Op::Put(_) | Op::Range(_) => {}
        }
    }
}

fn remove_duplicate_puts(ops: &mut Vec<Op>, taken: &mut Vec<KeyRange>) {
    ops.retain_mut(|op| match op {
        Op::Put(put) => {
            let free = !taken.iter().any(|range| range.contains(&put.key));
            taken.push(KeyRange::Single(Key::from(&put.key[..])));
            free
        }
        Op::Txn(nested) => {
            remove_duplicate_puts(&mut nested.success, taken);
            remove_duplicate_puts(&mut nested.failure, taken);
            true
        }
        Op::Range(_) | Op::Delete(_) => true,
    });
}
