//! The complete list of permitted differences between two responses, each with its reason.
//!
//! Where an exception permits a difference, it changes our response to etcd's. Otherwise it leaves our response
//! unchanged.

use std::{
    cmp::Ordering,
    collections::{BTreeMap, VecDeque},
    ops::Range,
};

use orlop_wire::proto::client::{
    etcdserverpb::{
        RangeRequest, RangeResponse, ResponseOp, TxnRequest, TxnResponse,
        range_request::{SortOrder, SortTarget},
        request_op::Request,
        response_op::Response,
    },
    mvccpb::{Event, KeyValue},
};

use tonic::Code;

use super::{
    auth::is_empty_range,
    op::{Answer, Op},
};

struct Exception {
    reason: &'static str,
    /// (operation, etcd's response, ours)
    allow: fn(&Op, &Answer, &mut Answer),
}

const EXCEPTIONS: &[Exception] = &[
    Exception { reason: "a lease's remaining time differs between the two responses", allow: remaining_time },
    Exception { reason: "etcd before 3.6 lists the keys of a lease in random order", allow: order_of_lease_keys },
    Exception { reason: "leases with equal remaining times have no guaranteed order", allow: order_of_leases },
    Exception { reason: "pairs that are equal in the sort target have no guaranteed order", allow: ties },
    Exception { reason: "version, sizes and raft numbers differ between servers", allow: status },
    Exception { reason: "names, ids and addresses of members differ between servers", allow: members },
    Exception { reason: "etcd before 3.6 answers these requests without a check of rights", allow: unchecked },
    Exception { reason: "etcd answers a transaction without operations without a check of rights", allow: empty_txn },
    Exception { reason: "Orlop looks at the size of a request before its user", allow: too_large },
    Exception { reason: "an empty range needs no rights, except sometimes in etcd", allow: empty_range },
    Exception { reason: "etcd before 3.6 treats an unknown sort order as no order", allow: unknown_sort_order },
];

/// The only exception for events.
const SUPERSEDED: &str = "compaction keeps all rows of the compact revision";

/// Number of uses of each exception, by its reason.
pub type Used = BTreeMap<&'static str, usize>;

/// Changes `ours` to `etcd` wherever an exception permits the difference.
pub fn allow(op: &Op, etcd: &Answer, ours: &mut Answer, used: &mut Used) {
    for Exception { reason, allow } in EXCEPTIONS {
        if ours == etcd {
            return;
        }
        let before = ours.clone();
        allow(op, etcd, ours);
        if *ours != before {
            *used.entry(reason).or_default() += 1;
        }
    }
}

/// Removes the events from `ours` that a watch may receive from Orlop and not from etcd. Both lists contain the events
/// that one watch received since the last comparison.
pub fn allow_events(compact_revision: i64, etcd: &VecDeque<Event>, ours: &mut VecDeque<Event>, used: &mut Used) {
    let mut index = 0;
    while index < ours.len() {
        if etcd.get(index) != ours.get(index) && is_superseded(compact_revision, ours, index) {
            ours.remove(index);
            *used.entry(SUPERSEDED).or_default() += 1;
        } else {
            index += 1;
        }
    }
}

/// Returns whether an event is at the compact revision and a later event of the same revision has the same key. A
/// compaction in etcd deletes the row of such an event; ours keeps all rows of the compact revision.
fn is_superseded(compact_revision: i64, events: &VecDeque<Event>, index: usize) -> bool {
    let pair = |index: usize| events.get(index).and_then(|event| event.kv.as_ref());
    let Some(first) = pair(index).filter(|kv| kv.mod_revision == compact_revision) else { return false };
    (index + 1..events.len())
        .filter_map(pair)
        .any(|later| later.key == first.key && later.mod_revision == first.mod_revision)
}

/// Maximum difference in seconds between the remaining times in two responses of the same moment.
const REMAINING_TTL_TOLERANCE_SECS: u64 = 3;

fn remaining_time(_: &Op, etcd: &Answer, ours: &mut Answer) {
    if let (Answer::TimeToLive(etcd), Answer::TimeToLive(ours)) = (etcd, ours)
        && etcd.ttl > 0
        && etcd.ttl.abs_diff(ours.ttl) <= REMAINING_TTL_TOLERANCE_SECS
    {
        ours.ttl = etcd.ttl;
    }
}

fn order_of_lease_keys(_: &Op, etcd: &Answer, ours: &mut Answer) {
    if let (Answer::TimeToLive(etcd), Answer::TimeToLive(ours)) = (etcd, ours)
        && sorted(etcd.keys.iter()) == sorted(ours.keys.iter())
    {
        ours.keys.clone_from(&etcd.keys);
    }
}

fn order_of_leases(_: &Op, etcd: &Answer, ours: &mut Answer) {
    if let (Answer::Leases(etcd), Answer::Leases(ours)) = (etcd, ours)
        && sorted(etcd.leases.iter().map(|lease| lease.id)) == sorted(ours.leases.iter().map(|lease| lease.id))
    {
        ours.leases.clone_from(&etcd.leases);
    }
}

fn sorted<T: Ord>(items: impl Iterator<Item = T>) -> Vec<T> {
    let mut items: Vec<_> = items.collect();
    items.sort();
    items
}

fn status(_: &Op, etcd: &Answer, ours: &mut Answer) {
    if let (Answer::Status(etcd), Answer::Status(ours)) = (etcd, ours) {
        let header = ours.header;
        ours.clone_from(etcd);
        ours.header = header;
    }
}

fn members(_: &Op, etcd: &Answer, ours: &mut Answer) {
    if let (Answer::Members(etcd), Answer::Members(ours)) = (etcd, ours)
        && etcd.members.len() == ours.members.len()
    {
        ours.members.clone_from(&etcd.members);
    }
}

fn unknown_sort_order(op: &Op, etcd: &Answer, ours: &mut Answer) {
    if let (Op::Range(request), Answer::Refused { code, message }) = (op, &*ours)
        && SortOrder::try_from(request.sort_order).is_err()
        && *code == Code::InvalidArgument
        && message == "etcdserver: invalid sort option"
    {
        *ours = etcd.clone();
    }
}

/// The requests do not change the store.
fn unchecked(op: &Op, etcd: &Answer, ours: &mut Answer) {
    if let Op::Leases | Op::TimeToLive(_) | Op::Status = op
        && is_refusal_of_rights(ours)
    {
        *ours = etcd.clone();
    }
}

fn empty_txn(op: &Op, etcd: &Answer, ours: &mut Answer) {
    if let Op::Txn(txn) = op
        && txn.compare.is_empty()
        && txn.success.is_empty()
        && txn.failure.is_empty()
        && is_refusal_of_rights(ours)
    {
        *ours = etcd.clone();
    }
}

fn too_large(_: &Op, etcd: &Answer, ours: &mut Answer) {
    let is_too_large = matches!(ours, Answer::Refused { message, .. } if message == "etcdserver: request is too large");
    if is_too_large && is_refusal_of_rights(etcd) {
        *ours = etcd.clone();
    }
}

fn empty_range(op: &Op, etcd: &Answer, ours: &mut Answer) {
    let has_empty_range = match op {
        Op::Range(range) => is_empty_range(&range.key, &range.range_end),
        Op::DeleteRange(delete) => is_empty_range(&delete.key, &delete.range_end),
        Op::Watch { create, .. } => is_empty_range(&create.key, &create.range_end),
        _ => false,
    };
    if has_empty_range && is_refusal_of_rights(etcd) {
        *ours = etcd.clone();
    }
}

fn is_refusal_of_rights(answer: &Answer) -> bool {
    match answer {
        Answer::Refused { message, .. } => {
            ["etcdserver: permission denied", "etcdserver: user name is empty", "etcdserver: invalid auth token"]
                .contains(&message.as_str())
        }
        Answer::Watch(created) => created.cancel_reason.ends_with("permission denied"),
        _ => false,
    }
}

fn ties(op: &Op, etcd: &Answer, ours: &mut Answer) {
    match (op, etcd, ours) {
        (Op::Range(request), Answer::Range(etcd), Answer::Range(ours)) => ties_in_range(request, etcd, ours),
        (Op::Txn(request), Answer::Txn(etcd), Answer::Txn(ours)) => ties_in_txn(request, etcd, ours),
        _ => {}
    }
}

fn ties_in_txn(request: &TxnRequest, etcd: &TxnResponse, ours: &mut TxnResponse) {
    let requests = if etcd.succeeded { &request.success } else { &request.failure };
    for ((request, etcd), ours) in requests.iter().zip(&etcd.responses).zip(&mut ours.responses) {
        ties_in_operation(request.request.as_ref(), etcd, ours);
    }
}

fn ties_in_operation(request: Option<&Request>, etcd: &ResponseOp, ours: &mut ResponseOp) {
    match (request, etcd.response.as_ref(), ours.response.as_mut()) {
        (
            Some(Request::RequestRange(request)),
            Some(Response::ResponseRange(etcd)),
            Some(Response::ResponseRange(ours)),
        ) => ties_in_range(request, etcd, ours),
        (Some(Request::RequestTxn(request)), Some(Response::ResponseTxn(etcd)), Some(Response::ResponseTxn(ours))) => {
            ties_in_txn(request, etcd, ours)
        }
        _ => {}
    }
}

fn ties_in_range(request: &RangeRequest, etcd: &RangeResponse, ours: &mut RangeResponse) {
    let target = request.sort_target();
    if target == SortTarget::Key || etcd.kvs.len() != ours.kvs.len() {
        return;
    }
    let groups = groups(target, &etcd.kvs);
    let last = groups.len();
    let equal = groups.into_iter().enumerate().all(|(index, group)| {
        let (etcd_group, our_group) = (&etcd.kvs[group.clone()], &ours.kvs[group]);
        let targets_equal = etcd_group.iter().zip(our_group).all(|(a, b)| by_target(target, a, b).is_eq());
        // If the limit cuts a group of equal pairs, the servers may return different members of it.
        let cut = etcd.more && index + 1 == last;
        targets_equal && (cut || sorted_by_key(etcd_group) == sorted_by_key(our_group))
    });
    if equal {
        ours.kvs.clone_from(&etcd.kvs);
    }
}

/// Returns the runs of pairs that are equal in the target.
fn groups(target: SortTarget, kvs: &[KeyValue]) -> Vec<Range<usize>> {
    let mut start = 0;
    let ends = kvs.chunk_by(|a, b| by_target(target, a, b).is_eq()).map(|group| {
        let range = start..start + group.len();
        start = range.end;
        range
    });
    ends.collect()
}

fn by_target(target: SortTarget, a: &KeyValue, b: &KeyValue) -> Ordering {
    match target {
        SortTarget::Key => a.key.cmp(&b.key),
        SortTarget::Version => a.version.cmp(&b.version),
        SortTarget::Create => a.create_revision.cmp(&b.create_revision),
        SortTarget::Mod => a.mod_revision.cmp(&b.mod_revision),
        SortTarget::Value => a.value.cmp(&b.value),
    }
}

fn sorted_by_key(kvs: &[KeyValue]) -> Vec<&KeyValue> {
    let mut sorted: Vec<_> = kvs.iter().collect();
    sorted.sort_by(|a, b| a.key.cmp(&b.key));
    sorted
}

#[test]
fn only_superseded_events_of_the_compact_revision_may_be_extra() {
    /// (key, revision)
    type Row<'a> = (&'a str, i64);
    // Etcd's events, ours, and the number of ours that may be extra, with a compaction at revision 5.
    let rows: &[(&[Row<'_>], &[Row<'_>], usize)] = &[
        (&[("b", 5), ("a", 5)], &[("a", 5), ("b", 5), ("a", 5)], 1),
        (&[("a", 5), ("b", 5)], &[("a", 5), ("b", 5), ("a", 5), ("b", 5)], 2),
        (&[("a", 5), ("a", 5)], &[("a", 5), ("a", 5)], 0),
        (&[("a", 5)], &[("a", 5), ("b", 5)], 0),
        (&[("a", 5)], &[("b", 5), ("a", 5)], 0),
        (&[("a", 6)], &[("a", 5), ("a", 6)], 0),
        (&[("a", 6)], &[("a", 6), ("a", 6)], 0),
        (&[("a", 4)], &[("a", 4), ("a", 4)], 0),
        (&[("a", 5), ("b", 5), ("a", 5)], &[("b", 5), ("a", 5)], 0),
        (&[], &[("a", 5)], 0),
    ];
    // The value distinguishes events of the same key and revision: it is the number of such events that follow.
    let events = |rows: &[Row<'_>]| -> VecDeque<Event> {
        let event = |(index, (key, mod_revision)): (usize, &Row<'_>)| {
            let later = rows[index + 1..].iter().filter(|row| **row == (*key, *mod_revision)).count();
            let kv = KeyValue {
                key: key.to_string().into(),
                mod_revision: *mod_revision,
                value: later.to_string().into(),
                ..Default::default()
            };
            Event { kv: Some(kv), ..Default::default() }
        };
        rows.iter().enumerate().map(event).collect()
    };
    for (etcd, ours, extra) in rows {
        let (theirs, mut left, mut used) = (events(etcd), events(ours), Used::new());
        allow_events(5, &theirs, &mut left, &mut used);
        assert_eq!(left.len(), ours.len() - extra, "{etcd:?} {ours:?}");
        assert_eq!(left == theirs, *extra > 0 || etcd == ours, "{etcd:?} {ours:?}");
        assert_eq!(used.values().sum::<usize>(), *extra, "{etcd:?} {ours:?}");
    }
}
