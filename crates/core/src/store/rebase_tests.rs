//! Tests that a batch moved behind changes of other instances equals the batch that an evaluation at the later head
//! gives.

use proptest::{collection::vec, prelude::*};
use tokio::time::Instant;

use super::{
    batch::Batch,
    error::Error,
    fixtures::shared,
    generators::{anchored, requests},
    rebase::{self, RightsCheck},
    request::{
        Compare, CompareTarget, Consistency, DeleteRequest, Op, Projection, PutLease, PutRequest, PutValue,
        RangeRequest, Relation, RevisionFilter, TxnRequest,
    },
    shared::Shared,
    txn::{Evaluation, Fetched, Stop},
    write_request::{Outcome, Request},
};
use crate::{
    index::ReadAt,
    log::ReadSet,
    types::{KeyRange, LeaseId, Rebase, Revision},
};

/// The newest values stay in the cache.
const CACHE_BYTES: u64 = 1 << 20;

type Served = Vec<(Request, Result<Outcome, Error>)>;

fn evaluate(shared: &Shared, batch: &mut Batch, request: &Request) -> Result<Outcome, Stop> {
    let (index, leases, fetched) = (shared.index.read(), shared.leases.lock(), Fetched::new());
    let mut evaluation = Evaluation::new(&index, &leases, &shared.values, &shared.read_memory, &fetched, batch);
    evaluation.evaluate(request, &shared.authority)
}

/// Evaluates requests in one batch. A request that reads a revision of the batch, or one that is not cached, is left
/// out.
fn evaluate_all(shared: &Shared, requests: Vec<Request>) -> (Batch, Served) {
    let mut batch = Batch::new(shared.index.read().head());
    let mut served = Vec::new();
    for request in requests {
        let outcome = match evaluate(shared, &mut batch, &request) {
            Ok(outcome) => Ok(outcome),
            Err(Stop::Failed(error)) => Err(error),
            Err(Stop::NeedsCommit | Stop::NeedsValues(_)) => continue,
            Err(Stop::Outdated) => panic!("no other instance writes"),
        };
        served.push((request, outcome));
    }
    (batch, served)
}

/// Evaluates requests of another instance, without those that change a key of the read set or a lease.
fn evaluate_others(shared: &Shared, requests: &[Request], reads: &ReadSet<'_>) -> Batch {
    let mut batch = Batch::new(shared.index.read().head());
    for request in requests {
        let request = anchored(request, batch.head());
        let savepoint = batch.savepoint();
        let before = batch.changes().len();
        let is_evaluated = evaluate(shared, &mut batch, &request).is_ok();
        let is_apart = batch.changes()[before..].iter().all(|change| !reads.contains(&change.key));
        if !is_evaluated || !is_apart || !batch.leases().is_empty() {
            batch.roll_back(savepoint);
        }
    }
    batch
}

fn apply(shared: &Shared, batch: &Batch) {
    shared.apply_batch(batch, shared.position(), Instant::now());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2_000))]

    #[test]
    fn moved_batch_equals_the_one_evaluated_at_the_later_head(
        setup in vec(requests(), 0..12),
        own in vec(requests(), 1..4),
        others in vec(requests(), 0..8),
    ) {
        let shared = shared(CACHE_BYTES);
        for request in &setup {
            let request = anchored(request, shared.index.read().head());
            apply(&shared, &evaluate_all(&shared, vec![request]).0);
        }
        let base = shared.index.read().head();
        let own: Vec<Request> = own.iter().map(|request| anchored(request, base)).collect();
        let (mut moved, mut served) = evaluate_all(&shared, own);
        let others = {
            let requests = served.iter().map(|(request, _)| request);
            let Some(reads) = rebase::read_set(requests, base, RightsCheck::Off) else { return Ok(()) };
            evaluate_others(&shared, &others, &reads)
        };
        apply(&shared, &others);
        let rebase = Rebase { base, by: others.head().0 - base.0 };
        moved.rebase(rebase);
        served.iter_mut().filter_map(|(_, outcome)| outcome.as_mut().ok()).for_each(|outcome| rebase::outcome(rebase, outcome));

        let (requests, outcomes): (Vec<_>, Vec<_>) = served.into_iter().unzip();
        let (evaluated, again) = evaluate_all(&shared, requests);
        let again: Vec<_> = again.into_iter().map(|(_, outcome)| outcome).collect();
        prop_assert_eq!(moved.changes(), evaluated.changes());
        prop_assert_eq!(moved.leases(), evaluated.leases());
        prop_assert_eq!((moved.base(), moved.head()), (evaluated.base(), evaluated.head()));
        prop_assert_eq!(format!("{outcomes:?}"), format!("{again:?}"));
    }
}

fn put(lease: Option<LeaseId>) -> PutRequest {
    PutRequest { key: "k".into(), value: PutValue::Keep, lease: PutLease::Set(lease), prev_kv: false }
}

fn compare(target: CompareTarget) -> Request {
    let compare = Compare { range: KeyRange::all(), relation: Relation::Less, target };
    Request::Txn(TxnRequest { compares: vec![compare], success: Vec::new(), failure: Vec::new() })
}

fn range(at: ReadAt, mod_max: Option<Revision>) -> Request {
    let range = RangeRequest {
        range: KeyRange::all(),
        at,
        limit: None,
        sort: None,
        filter: RevisionFilter { mod_max, ..RevisionFilter::default() },
        projection: Projection::Full,
        consistency: Consistency::Linearizable,
    };
    let nested = TxnRequest { compares: Vec::new(), success: vec![Op::Range(range)], failure: Vec::new() };
    Request::Txn(TxnRequest { compares: Vec::new(), success: vec![], failure: vec![Op::Txn(nested)] })
}

#[test]
fn previous_pair_that_the_batch_wrote_moves_with_it() {
    let shared = shared(CACHE_BYTES);
    let put = PutRequest { value: PutValue::New("v".into()), ..put(None) };
    let delete = DeleteRequest { range: KeyRange::from_wire(b"k", b""), prev_kv: true };
    let (batch, mut served) = evaluate_all(&shared, vec![Request::Put(put), Request::Delete(delete)]);
    let Ok(outcome) = &mut served[1].1 else { panic!("the key is deleted") };
    rebase::outcome(Rebase { base: batch.base(), by: 5 }, outcome);
    let Outcome::Delete(response) = outcome else { panic!("a delete has the response of a delete") };
    let revisions: Vec<Revision> = response.prev_kvs.iter().map(|kv| kv.mod_revision()).collect();
    assert_eq!((revisions, response.revision), (vec![Revision(7)], Revision(8)));
}

#[test]
fn batches_move_unless_a_request_depends_on_revisions_or_on_keys_of_a_lease() {
    let base = Revision(10);
    for (request, rights, moves) in [
        (Request::Put(put(None)), RightsCheck::On, true),
        (Request::Put(put(Some(LeaseId(1)))), RightsCheck::Off, true),
        (Request::Put(put(Some(LeaseId(1)))), RightsCheck::On, false),
        (Request::Grant { id: LeaseId(1), ttl_secs: 1 }, RightsCheck::On, true),
        (Request::Revoke(LeaseId(1)), RightsCheck::Off, false),
        (Request::Expire(LeaseId(1)), RightsCheck::Off, false),
        (Request::Compact(Revision(1)), RightsCheck::Off, false),
        (compare(CompareTarget::ModRevision(10)), RightsCheck::On, true),
        (compare(CompareTarget::ModRevision(11)), RightsCheck::On, false),
        (compare(CompareTarget::CreateRevision(11)), RightsCheck::On, false),
        (compare(CompareTarget::Version(11)), RightsCheck::On, true),
        (range(ReadAt::Latest, None), RightsCheck::On, true),
        (range(ReadAt::Latest, Some(Revision(10))), RightsCheck::On, true),
        (range(ReadAt::Latest, Some(Revision(11))), RightsCheck::On, false),
        (range(ReadAt::Revision(Revision(1)), None), RightsCheck::On, false),
    ] {
        assert_eq!(rebase::read_set([&request].into_iter(), base, rights).is_some(), moves, "{request:?}");
    }
}
