//! etcd's check that a transaction does not change a key twice.
//!
//! Within a branch, including nested transactions, a key may be put once, and a put key may not be in a deleted range.
//! Deletes may overlap, the two branches of a nested transaction may put the same key, and a delete to the end of the
//! key space (`range_end` "\0") counts as empty, all as in etcd.
//!
//! A request may contain hundreds of thousands of operations. The check does not compare each put with each delete,
//! which would take billions of steps.

use std::collections::{BTreeMap, HashSet};

use super::status::Invalid;
use orlop_core::types::{Key, KeyRange};
use orlop_wire::proto::server::etcdserverpb::{self as pb, request_op::Request};

/// Keys that a branch puts, and ranges that it deletes.
#[derive(Default)]
pub struct Writes<'a> {
    puts: HashSet<&'a [u8]>,
    deletes: DeletedRanges,
}

/// Checks one branch of a transaction and returns its writes.
///
/// # Errors
///
/// If a key would be changed twice.
pub fn check_intervals(ops: &[pb::RequestOp]) -> Result<Writes<'_>, Invalid> {
    let requests = || ops.iter().filter_map(|op| op.request.as_ref());
    let mut writes = Writes::default();
    for request in requests() {
        if let Request::RequestDeleteRange(delete) = request
            && *delete.range_end != [0]
        {
            writes.deletes.add(KeyRange::from_wire(&delete.key, &delete.range_end));
        }
    }
    for request in requests() {
        if let Request::RequestTxn(txn) = request {
            let success = check_intervals(&txn.success)?;
            let failure = check_intervals(&txn.failure)?;
            for key in &success.puts {
                writes.put(key)?;
            }
            // Only one of the two branches is executed.
            for key in failure.puts.iter().filter(|key| !success.puts.contains(*key)) {
                writes.put(key)?;
            }
            writes.deletes.add_all(success.deletes);
            writes.deletes.add_all(failure.deletes);
        }
    }
    for request in requests() {
        if let Request::RequestPut(put) = request {
            writes.put(&put.key)?;
        }
    }
    Ok(writes)
}

impl<'a> Writes<'a> {
    fn put(&mut self, key: &'a [u8]) -> Result<(), Invalid> {
        if self.deletes.contains(key) || !self.puts.insert(key) { Err(Invalid::DuplicateKey) } else { Ok(()) }
    }
}

/// Deleted ranges: a map from start to end. The ranges do not overlap and are not adjacent.
#[derive(Default)]
struct DeletedRanges(BTreeMap<Key, End>);

#[derive(Clone, PartialEq, Eq, PartialOrd, Ord)]
enum End {
    Before(Key),
    Unbounded,
}

impl DeletedRanges {
    fn add(&mut self, range: KeyRange) {
        if range.is_empty() {
            return;
        }
        let (start, end) = match range {
            KeyRange::Single(key) => {
                let end = [&key[..], &[0]].concat();
                (key, End::Before(end.into()))
            }
            KeyRange::Span { start, end } => (start, end.map_or(End::Unbounded, End::Before)),
        };
        self.merge(start, end);
    }

    fn add_all(&mut self, other: Self) {
        // The smaller set is merged into the larger one.
        let other = if other.0.len() > self.0.len() { std::mem::replace(self, other) } else { other };
        other.0.into_iter().for_each(|(start, end)| self.merge(start, end));
    }

    fn merge(&mut self, mut start: Key, mut end: End) {
        let before = self.0.range::<Key, _>(..=&start).next_back();
        if let Some((first, until)) = before.filter(|(_, until)| **until >= End::Before(start.clone())) {
            end = end.max(until.clone());
            start = first.clone();
        }
        while let Some((next, until)) = self.0.range::<Key, _>(&start..).next() {
            if end < End::Before(next.clone()) {
                break;
            }
            end = end.max(until.clone());
            let next = next.clone();
            self.0.remove(&next);
        }
        self.0.insert(start, end);
    }

    fn contains(&self, key: &[u8]) -> bool {
        let before = self.0.range::<[u8], _>((std::ops::Bound::Unbounded, std::ops::Bound::Included(key))).next_back();
        before.is_some_and(|(_, end)| match end {
            End::Before(end) => key < end.as_slice(),
            End::Unbounded => true,
        })
    }
}
