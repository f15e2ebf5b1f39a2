//! etcd's check that a transaction does not change a key twice.
//!
//! Within a branch, nested transactions included, a key may be put once and a put key may not lie in a deleted range.
//! Deletes may overlap, the two branches of one nested transaction may put the same key, and a delete to the end of the
//! key space (`range_end` "\0") counts as empty here, all as in etcd.

use std::collections::HashSet;

use super::status::Invalid;
use crate::{
    proto::server::etcdserverpb::{self as pb, request_op::Request},
    types::KeyRange,
};

/// What a branch writes.
#[derive(Default)]
pub(super) struct Writes<'a> {
    puts: HashSet<&'a [u8]>,
    deletes: Vec<KeyRange>,
}

pub(super) fn check_intervals(ops: &[pb::RequestOp]) -> Result<Writes<'_>, Invalid> {
    let requests = || ops.iter().filter_map(|op| op.request.as_ref());
    let mut writes = Writes::default();
    for request in requests() {
        if let Request::RequestDeleteRange(delete) = request
            && *delete.range_end != [0]
        {
            writes.deletes.push(KeyRange::from_wire(&delete.key, &delete.range_end));
        }
    }
    for request in requests() {
        if let Request::RequestTxn(txn) = request {
            let success = check_intervals(&txn.success)?;
            let failure = check_intervals(&txn.failure)?;
            for key in &success.puts {
                writes.put(key)?;
            }
            // Only one of the two branches runs.
            for key in failure.puts.iter().filter(|key| !success.puts.contains(*key)) {
                writes.put(key)?;
            }
            writes.deletes.extend(success.deletes);
            writes.deletes.extend(failure.deletes);
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
        let deleted = self.deletes.iter().any(|range| range.contains(key));
        if deleted || !self.puts.insert(key) { Err(Invalid::DuplicateKey) } else { Ok(()) }
    }
}
