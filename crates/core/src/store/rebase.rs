//! Batches that can be appended behind changes of other instances, without evaluating them again.
//!
//! Such a batch gives the same changes and responses at the later head, apart from revisions, if two conditions hold.
//! First, the other instances changed no key that its evaluation looked at; the log checks that with the [`ReadSet`].
//! Second, the result does not depend on the revision at which the batch starts: no request names a revision above that,
//! and none reads an old revision, which another instance may have compacted. A request that needs anything other than
//! keys and the existence of leases cannot move either: ending a lease looks at all keys attached to it.

use super::{
    request::{
        Compare, CompareTarget, DeleteResponse, Op, OpResponse, PutLease, PutRequest, PutResponse, RangeRequest,
        RangeResponse, TxnRequest, TxnResponse,
    },
    write_request::{Outcome, Request},
};
use crate::{
    index::ReadAt,
    log::ReadSet,
    types::{KeyRange, Rebase, Revision},
};

/// Maximum number of ranges in a read set. The log compares every range with every change of the other instances.
const SPANS_MAX: usize = 16;

/// Whether the rights of callers are checked. A caller who attaches a key to a lease needs rights on all keys of that
/// lease, which the read set does not contain.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RightsCheck {
    On,
    Off,
}

/// Returns what the evaluation of these requests at `base` looked at, or `None` if the batch cannot move.
pub(super) fn read_set<'a>(
    requests: impl Iterator<Item = &'a Request>,
    base: Revision,
    rights: RightsCheck,
) -> Option<ReadSet<'a>> {
    let mut collector = Collector { set: ReadSet::default(), base, rights };
    for request in requests {
        collector.request(request)?;
    }
    Some(collector.set)
}

/// Its functions return `None` if the request cannot move.
struct Collector<'a> {
    set: ReadSet<'a>,
    base: Revision,
    rights: RightsCheck,
}

impl<'a> Collector<'a> {
    fn request(&mut self, request: &'a Request) -> Option<()> {
        match request {
            Request::Put(put) => self.put(put),
            Request::Delete(delete) => self.add(&delete.range),
            Request::Txn(txn) => self.txn(txn),
            Request::Grant { .. } => Some(()),
            Request::Revoke(_) | Request::Expire(_) | Request::Compact(_) | Request::Alarm(_) | Request::Auth(_) => {
                None
            }
        }
    }

    /// Ends at the first range that is too many: each one is compared with all before it.
    fn add(&mut self, range: &'a KeyRange) -> Option<()> {
        self.set.add(range);
        (self.set.spans.len() <= SPANS_MAX).then_some(())
    }

    fn put(&mut self, put: &'a PutRequest) -> Option<()> {
        let looks_at_lease = matches!(put.lease, PutLease::Set(Some(_))) && self.rights == RightsCheck::On;
        self.set.keys.push(&put.key);
        (!looks_at_lease).then_some(())
    }

    /// Adds both branches: which one is executed depends on keys of the set only.
    fn txn(&mut self, txn: &'a TxnRequest) -> Option<()> {
        txn.compares.iter().try_for_each(|compare| self.compare(compare))?;
        txn.success.iter().chain(&txn.failure).try_for_each(|op| match op {
            Op::Range(range) => self.range(range),
            Op::Put(put) => self.put(put),
            Op::Delete(delete) => self.add(&delete.range),
            Op::Txn(nested) => self.txn(nested),
        })
    }

    fn compare(&mut self, compare: &'a Compare) -> Option<()> {
        self.add(&compare.range)?;
        match compare.target {
            CompareTarget::CreateRevision(number) | CompareTarget::ModRevision(number) => {
                self.is_known(Revision(number)).then_some(())
            }
            CompareTarget::Version(_) | CompareTarget::Value(_) | CompareTarget::Lease(_) | CompareTarget::Unknown => {
                Some(())
            }
        }
    }

    fn range(&mut self, range: &'a RangeRequest) -> Option<()> {
        self.add(&range.range)?;
        let filter = &range.filter;
        let bounds = [filter.mod_min, filter.mod_max, filter.create_min, filter.create_max];
        (range.at == ReadAt::Latest && bounds.into_iter().flatten().all(|bound| self.is_known(bound))).then_some(())
    }

    /// Returns whether a comparison with this revision has the same result before and after a move: it is not above
    /// the base, and all revisions that move are.
    fn is_known(&self, revision: Revision) -> bool {
        revision <= self.base
    }
}

/// Moves the revisions in the response to a request of a moved batch.
pub(super) fn outcome(rebase: Rebase, outcome: &mut Outcome) {
    match outcome {
        Outcome::Put(put) => put_response(rebase, put),
        Outcome::Delete(delete) => delete_response(rebase, delete),
        Outcome::Txn(txn) => txn_response(rebase, txn),
        Outcome::Revision(revision) => *revision = rebase.head(*revision),
    }
}

fn put_response(rebase: Rebase, put: &mut PutResponse) {
    put.revision = rebase.head(put.revision);
    put.prev_kv.iter_mut().for_each(|kv| rebase.kv(kv));
}

fn delete_response(rebase: Rebase, delete: &mut DeleteResponse) {
    delete.revision = rebase.head(delete.revision);
    delete.prev_kvs.iter_mut().for_each(|kv| rebase.kv(kv));
}

fn txn_response(rebase: Rebase, txn: &mut TxnResponse) {
    txn.revision = rebase.head(txn.revision);
    for response in &mut txn.responses {
        match response {
            OpResponse::Range(RangeResponse { revision, kvs, .. }) => {
                *revision = rebase.head(*revision);
                kvs.iter_mut().for_each(|kv| rebase.kv(kv));
            }
            OpResponse::Put(put) => put_response(rebase, put),
            OpResponse::Delete(delete) => delete_response(rebase, delete),
            OpResponse::Txn(nested) => txn_response(rebase, nested),
        }
    }
}
