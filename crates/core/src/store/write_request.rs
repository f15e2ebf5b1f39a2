//! The requests that the writer evaluates in log order, and their outcomes.

use super::request::{
    Compare, CompareTarget, DeleteRequest, DeleteResponse, Op, PutRequest, PutResponse, PutValue, TxnRequest,
    TxnResponse,
};
use crate::{
    auth::AuthChange,
    log::AlarmChange,
    types::{KeyRange, LeaseId, Revision},
};

/// A request that the writer evaluates in log order.
#[derive(Clone, Debug)]
pub(super) enum Request {
    Put(PutRequest),
    Delete(DeleteRequest),
    Txn(TxnRequest),
    Grant {
        id: LeaseId,
        ttl_secs: i64,
    },
    Revoke(LeaseId),
    /// Revokes the lease if it has expired when this is evaluated.
    Expire(LeaseId),
    Compact(Revision),
    Alarm(AlarmChange),
    Auth(AuthChange),
}

/// The response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Outcome {
    Put(PutResponse),
    Delete(DeleteResponse),
    Txn(TxnResponse),
    Revision(Revision),
}

impl Request {
    /// Returns whether the request has a batch of its own.
    pub(super) fn is_alone(&self) -> bool {
        matches!(self, Self::Compact(_) | Self::Alarm(_) | Self::Auth(_))
    }

    /// Approximate bytes of keys and values.
    pub(super) fn bytes(&self) -> usize {
        fn txn(txn: &TxnRequest) -> usize {
            let compares: usize = txn.compares.iter().map(compare).sum();
            compares + txn.success.iter().chain(&txn.failure).map(op).sum::<usize>()
        }
        fn compare(compare: &Compare) -> usize {
            let value = if let CompareTarget::Value(value) = &compare.target { value.len() } else { 0 };
            range(&compare.range) + value
        }
        fn op(op: &Op) -> usize {
            match op {
                Op::Put(request) => put(request),
                Op::Txn(request) => txn(request),
                Op::Range(request) => range(&request.range),
                Op::Delete(request) => range(&request.range),
            }
        }
        fn range(range: &KeyRange) -> usize {
            let (key, range_end) = range.to_wire();
            64 + key.len() + range_end.len()
        }
        fn put(put: &PutRequest) -> usize {
            let value = match &put.value {
                PutValue::New(value) => value.len(),
                PutValue::Keep => 0,
            };
            put.key.len() + value
        }
        match self {
            Self::Put(request) => put(request),
            Self::Txn(request) => txn(request),
            Self::Delete(request) => range(&request.range),
            Self::Grant { .. } | Self::Revoke(_) | Self::Expire(_) | Self::Compact(_) | Self::Alarm(_) => 64,
            Self::Auth(change) => change.bytes(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::request::Relation;

    #[test]
    fn bytes_of_a_transaction_include_its_compares_and_ranges() {
        let range = || KeyRange::Single([7; 1_000].as_slice().into());
        let compare = |target| Compare { range: range(), relation: Relation::Equal, target };
        let delete = || Op::Delete(DeleteRequest { range: range(), prev_kv: false });
        let inner =
            TxnRequest { compares: vec![compare(CompareTarget::Version(1))], success: vec![], failure: vec![delete()] };
        let compares = vec![compare(CompareTarget::Value(vec![7; 50_000].into()))];
        let txn = TxnRequest { compares, success: vec![delete()], failure: vec![Op::Txn(inner)] };
        let bytes = Request::Txn(txn).bytes();
        assert!((54_000..54_500).contains(&bytes), "{bytes}");
    }
}
