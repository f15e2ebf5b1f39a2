//! Compares responses with the truth: acknowledged changes are in the log as requested, refused ones are not, and a
//! read shows the state at one revision, which is never older than the newest revision that any client had seen when
//! the read started.

use std::collections::BTreeMap;

use tokio::time::Instant;

use super::{
    calls::{Answer, Call},
    truth::Truth,
};
use crate::model::{Model, Row, select};
use orlop_core::{
    auth::Caller,
    index::ReadAt,
    log::Order,
    store::{
        Error, PastError,
        request::{Consistency, Op, PutLease, PutRequest, RangeRequest, RangeResponse, TxnRequest, TxnResponse},
    },
    types::{Key, LeaseId, Revision},
};

#[derive(Default)]
pub(super) struct Ledger {
    /// The newest revision in any response or event so far.
    shown: Revision,
    /// The newest acknowledged compaction.
    compacted: Option<Revision>,
    asked: Vec<Asked>,
    /// For each acknowledged revision, the number of the request that created it.
    claims: BTreeMap<Revision, usize>,
    /// Number of requests per [`RequestOutcome`].
    pub answers: [usize; 3],
    /// Number of reads of the past, and of those that were refused.
    pub past: [usize; 2],
    /// Whether there are no more faults, so that no read of the past may be refused in vain.
    pub is_calm: bool,
}

/// A request, with the time and the values of the ledger when it was sent.
struct Asked {
    caller: Caller,
    call: Call,
    at: Instant,
    shown: Revision,
    compacted: Option<Revision>,
    /// The first revision that could be read, from the log or the archive.
    first: Revision,
    request_outcome: RequestOutcome,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum RequestOutcome {
    Done,
    Refused,
    /// The outcome is unknown.
    Unknown,
}

impl Ledger {
    /// Returns the newest revision that any client has seen.
    pub fn shown(&self) -> Revision {
        self.shown
    }

    /// Records a revision that a client has seen.
    pub fn show(&mut self, revision: Revision, truth: &Truth) {
        assert!(revision <= truth.head, "a response has revision {revision}, but the log ends at {}", truth.head);
        self.shown = self.shown.max(revision);
    }

    /// Records a request that is about to be sent, and returns its number.
    pub fn ask(&mut self, caller: Caller, call: Call, first: Revision) -> usize {
        let (at, shown, compacted) = (Instant::now(), self.shown, self.compacted);
        self.asked.push(Asked { caller, call, at, shown, compacted, first, request_outcome: RequestOutcome::Unknown });
        self.asked.len() - 1
    }

    /// Returns the number of the next request.
    pub fn next(&self) -> usize {
        self.asked.len()
    }

    /// Checks the response to a request; `None` means that the outcome is unknown.
    pub fn answered(
        &mut self,
        number: usize,
        outcome: Option<Result<Answer, Error>>,
        first: Revision,
        truth: &mut Truth,
    ) {
        let request_outcome = match outcome {
            None | Some(Err(Error::OutcomeUnknown)) => RequestOutcome::Unknown,
            Some(Err(error)) => {
                self.check_refusal(number, &error, truth);
                RequestOutcome::Refused
            }
            Some(Ok(answer)) => {
                self.check_answer(number, answer, first, truth);
                RequestOutcome::Done
            }
        };
        self.answers[request_outcome as usize] += 1;
        self.asked[number].request_outcome = request_outcome;
    }

    fn check_refusal(&self, number: usize, error: &Error, truth: &Truth) {
        let asked = &self.asked[number];
        let call = &asked.call;
        if let Error::Auth(error) = error {
            return truth.auth.check_refused(&asked.caller, call, *error, asked.at);
        }
        let is_past = matches!(call, Call::PastPairs(..) | Call::PastChanges(..));
        let is_right = match (error, call) {
            (Error::Corrupt, _) => false,
            (Error::FutureRevision, Call::PastPairs(_, at)) => *at > asked.shown,
            // A compaction overtook the read until it gave up.
            (Error::Compacted | Error::Unavailable, _) if is_past => !self.is_calm,
            (Error::Unavailable | Error::Stopped | Error::TooManyRequests, _) | (_, Call::Txn(_)) => true,
            (Error::KeyNotFound, Call::Put(put)) => truth.was_absent_since(&Key::from(&put.key[..]), asked.shown),
            (Error::LeaseNotFound, Call::Put(PutRequest { lease: PutLease::Set(Some(id)), .. }) | Call::Revoke(id)) => {
                truth.lease_was_gone_since(*id, asked.at)
            }
            (Error::LeaseExists, Call::Grant(id, _)) => truth.lease_was_there_since(*id, asked.at),
            (Error::Compacted, Call::Range(RangeRequest { at: ReadAt::Revision(at), .. })) => {
                Some(*at) < truth.compact_revision
            }
            (Error::FutureRevision, Call::Range(RangeRequest { at: ReadAt::Revision(at), consistency, .. })) => {
                *consistency == Consistency::Serializable || *at > asked.shown
            }
            (Error::Compacted, Call::Compact(at, _)) => Some(*at) <= truth.compact_revision,
            (Error::FutureRevision, Call::Compact(at, _)) => *at > asked.shown,
            _ => false,
        };
        assert!(is_right, "{call:?} is refused by {error:?}");
    }

    fn check_answer(&mut self, number: usize, answer: Answer, first: Revision, truth: &mut Truth) {
        let (call, since) = (self.asked[number].call.clone(), self.asked[number].at);
        truth.auth.check_served(&self.asked[number].caller, &call, since);
        let revision = match (call, answer) {
            (Call::Put(request), Answer::Put(answer)) => {
                let mut model = truth.model_at(answer.revision.prev());
                let known = model.rows.len();
                assert_eq!(model.put(&request).as_ref(), Ok(&answer), "{request:?}");
                self.claim(number, answer.revision, &model.rows[known..], truth);
                answer.revision
            }
            (Call::Delete(request), Answer::Delete(answer)) => {
                let at = if answer.deleted > 0 { answer.revision.prev() } else { answer.revision };
                let mut model = truth.model_at(at);
                let known = model.rows.len();
                assert_eq!(model.delete(&request), answer, "{request:?}");
                if answer.deleted > 0 {
                    self.claim(number, answer.revision, &model.rows[known..], truth);
                }
                answer.revision
            }
            (Call::Txn(request), Answer::Txn(answer)) => self.check_txn(number, &request, &answer, truth),
            (Call::Range(request), Answer::Range(answer)) => return self.check_range(number, &request, answer, truth),
            (Call::Grant(id, _), Answer::Revision(revision)) => {
                truth.lease_granted(id, since);
                revision
            }
            (Call::Revoke(id), Answer::Revision(revision)) => {
                truth.lease_revoked(id, since);
                revision
            }
            (Call::KeepAlive(id), Answer::Lease(0)) => {
                assert!(truth.lease_was_gone_since(id, since), "a keep-alive reports {id:?} as expired");
                return;
            }
            (Call::KeepAlive(id), Answer::Lease(ttl_secs)) => return truth.lease_renewed(id, ttl_secs, since),
            (Call::Leases, Answer::Leases(ids)) => return check_leases(&ids, since, truth),
            (Call::Compact(at, _), Answer::Revision(revision)) => {
                assert!(truth.compact_revision >= Some(at), "the compaction at {at} was not recorded");
                self.compacted = self.compacted.max(Some(at));
                revision
            }
            (Call::Auth(change), Answer::Revision(revision)) => {
                truth.auth.acknowledged(&change, since);
                revision
            }
            (call @ (Call::PastPairs(..) | Call::PastChanges(..)), answer) => {
                return self.check_past(number, call, answer, first, truth);
            }
            (call, answer) => panic!("{answer:?} is not a response to {call:?}"),
        };
        let asked = &self.asked[number];
        assert!(revision >= asked.shown, "{:?} returned {revision}, {} was seen before", asked.call, asked.shown);
        self.show(revision, truth);
    }

    /// Records that a request created a revision. Checks that the revision contains exactly the changes of the request,
    /// and that no other request created it.
    fn claim(&mut self, number: usize, revision: Revision, rows: &[Row], truth: &Truth) {
        let call = &self.asked[number].call;
        assert!(truth.has_exactly(rows), "{call:?} is acknowledged at {revision}, where the log has other changes");
        assert!(
            revision > self.asked[number].shown,
            "{call:?} is acknowledged at {revision}, which had been seen before"
        );
        assert_eq!(self.claims.insert(revision, number), None, "{revision} is acknowledged twice");
    }

    fn check_txn(&mut self, number: usize, request: &TxnRequest, answer: &TxnResponse, truth: &Truth) -> Revision {
        let run = |at: Revision| {
            let mut model: Model = if reads_back(request) { truth.whole_model_at(at) } else { truth.model_at(at) };
            let known = model.rows.len();
            let response = model.txn(request);
            (response, model.rows.split_off(known))
        };
        // Either the transaction created the revision of its response, or it changed nothing at that revision.
        let (changed, rows) = run(answer.revision.prev());
        if changed.as_ref() == Ok(answer) && truth.has_exactly(&rows) {
            self.claim(number, answer.revision, &rows, truth);
        } else {
            let (unchanged, rows) = run(answer.revision);
            assert!(
                unchanged.as_ref() == Ok(answer) && rows.is_empty(),
                "{request:?} returned {answer:?}, expected {changed:?} or {unchanged:?}"
            );
        }
        answer.revision
    }

    fn check_range(&mut self, number: usize, request: &RangeRequest, answer: RangeResponse, truth: &Truth) {
        let asked = &self.asked[number];
        let at = match request.at {
            ReadAt::Latest => answer.revision,
            ReadAt::Revision(at) => at,
        };
        if request.consistency == Consistency::Linearizable {
            assert!(
                answer.revision >= asked.shown,
                "{request:?} reads at {}, but {} was seen before",
                answer.revision,
                asked.shown
            );
            assert!(Some(at) >= asked.compacted, "{request:?} reads below the compaction at {:?}", asked.compacted);
        }
        let live = truth.live_at(at).into_iter().filter(|pair| request.range.contains(&pair.key)).collect();
        assert_eq!(answer, select(live, request, answer.revision), "{request:?}");
        self.show(answer.revision, truth);
    }

    /// Checks a read of the past. `first` is the first revision that can be read now.
    fn check_past(&mut self, number: usize, call: Call, answer: Answer, first: Revision, truth: &Truth) {
        let (Call::PastPairs(_, from) | Call::PastChanges(_, (from, _), _)) = call else { unreachable!("a past") };
        self.past[0] += 1;
        if let Answer::NotPast(refused) = &answer {
            self.past[1] += 1;
            let is_right = match refused {
                PastError::Begins { first: named } => from < first && *named <= first,
                PastError::Copying { .. } => !self.is_calm,
                PastError::Store(_) => false,
            };
            assert!(is_right, "{call:?} is refused by {refused:?}, the first revision is {first}");
            return;
        }
        // A compaction that was not acknowledged may not have reached the instance.
        let asked = &self.asked[number];
        let known = asked.first.min(asked.compacted.unwrap_or(Revision::EMPTY));
        assert!(from >= known, "{call:?} is served, the first revision is {first}");
        match (&call, answer) {
            (Call::PastPairs(range, at), Answer::PastPairs(found)) => {
                let live = truth.live_at(*at).into_iter().filter(|pair| range.contains(&pair.key));
                assert_eq!(found, live.map(|pair| pair.encoded()).collect::<Vec<_>>(), "{call:?}");
            }
            (Call::PastChanges(range, (from, to), order), Answer::PastChanges(found)) => {
                let mut expected = truth.changes(range, *from, *to);
                if *order == Order::NewestFirst {
                    expected.reverse();
                }
                assert_eq!(found, expected, "{call:?}");
            }
            (call, answer) => panic!("{answer:?} is not a response to {call:?}"),
        }
    }

    /// Checks at the end that every change in the log was requested and not refused.
    pub fn check_all(&self, truth: &Truth) {
        let is_unknown = |asked: &&Asked| asked.request_outcome == RequestOutcome::Unknown && asked.call.writes();
        let unknown = self.asked.iter().filter(is_unknown).count();
        let mut unclaimed = 0;
        for row in &truth.rows {
            let revision = row.id.revision;
            if let Some(number) = row.pair.as_ref().and_then(|pair| tag(&pair.value)).filter(|_| !keeps_value(row)) {
                let request_outcome = self.asked[number].request_outcome;
                let is_own = self.claims.get(&revision).is_none_or(|claimed| *claimed == number);
                let is_asked =
                    request_outcome == RequestOutcome::Unknown || self.claims.get(&revision) == Some(&number);
                assert!(
                    is_own && is_asked,
                    "{:?} ended as {request_outcome:?}, but revision {revision} has its value",
                    self.asked[number].call
                );
            }
            if row.id.sub == 0 && !self.claims.contains_key(&revision) && !truth.lease_ends.contains(&revision) {
                unclaimed += 1;
            }
        }
        assert!(
            unclaimed <= unknown,
            "{unclaimed} revisions belong to no acknowledged request, but only {unknown} outcomes are unknown"
        );
    }
}

/// Returns whether a transaction may read an older revision.
fn reads_back(request: &TxnRequest) -> bool {
    let mut ops = request.success.iter().chain(&request.failure);
    ops.any(|op| matches!(op, Op::Range(RangeRequest { at: ReadAt::Revision(_), .. })))
}

fn check_leases(ids: &[LeaseId], since: Instant, truth: &Truth) {
    for id in ids {
        assert!(truth.lease_was_there_since(*id, since), "{id:?} is listed and did not exist");
    }
    for id in truth.leases_held_since(since) {
        assert!(ids.contains(&id), "{id:?} is not listed");
    }
}

/// Returns the number of the request that wrote a value, with which the value starts.
fn tag(value: &[u8]) -> Option<usize> {
    std::str::from_utf8(value).ok()?.split('.').next()?.parse().ok()
}

/// Returns whether a change left the value of its key as it was.
fn keeps_value(row: &Row) -> bool {
    row.prev.as_ref().map(|prev| &prev.value) == row.pair.as_ref().map(|pair| &pair.value)
}
