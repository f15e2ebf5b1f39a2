//! Random requests of clients.

use bytes::Bytes;

use super::{
    auth::draw_change,
    random::{below, between, percent, pick},
    truth::LEASES,
};
use orlop_core::{
    auth::{AuthChange, Caller},
    index::ReadAt,
    log::{Order, PastRow},
    store::{
        Error, PastError, Store,
        request::{
            CompactionWait, Compare, CompareTarget, Consistency, DeleteRequest, DeleteResponse, Op, Projection,
            PutLease, PutRequest, PutResponse, PutValue, RangeRequest, RangeResponse, Relation, TxnRequest,
            TxnResponse,
        },
    },
    types::{EncodedKv, KeyRange, LeaseId, Revision, RowId},
};

const KEYS: [&str; 6] = ["a", "a\0", "ab", "b", "c", "d"];
const RANGES: [(&str, &str); 5] = [("a", "b"), ("a\0", "c"), ("b", "\0"), ("\0", "\0"), ("c", "d")];

#[derive(Debug, Clone)]
pub(super) enum Call {
    Put(PutRequest),
    Delete(DeleteRequest),
    Txn(TxnRequest),
    Range(RangeRequest),
    Grant(LeaseId, i64),
    Revoke(LeaseId),
    KeepAlive(LeaseId),
    Leases,
    Compact(Revision, CompactionWait),
    Auth(AuthChange),
    PastPairs(KeyRange, Revision),
    /// Changes between two revisions, both included.
    PastChanges(KeyRange, (Revision, Revision), Order),
}

#[derive(Debug)]
pub(super) enum Answer {
    Put(PutResponse),
    Delete(DeleteResponse),
    Txn(TxnResponse),
    Range(RangeResponse),
    Revision(Revision),
    /// The TTL in seconds; 0 if the lease does not exist.
    Lease(i64),
    Leases(Vec<LeaseId>),
    PastPairs(Vec<EncodedKv>),
    PastChanges(Vec<PastRow>),
    /// The past that was asked for is not readable.
    NotPast(PastError),
}

impl Call {
    /// Returns a random request for the past, with revisions from just before `first` until `head`, which a client has
    /// seen. A state may be asked for at a later revision.
    pub fn draw_past(first: Revision, head: Revision) -> Self {
        let from = between((first.0 - 2).clamp(1, head.0), head.0);
        if percent(60) {
            return Self::PastPairs(range(), Revision(from + i64::from(percent(5))));
        }
        let (range, to) = (range(), between(from, head.0));
        let is_single = matches!(range, KeyRange::Single(_));
        let order = if is_single && percent(50) { Order::NewestFirst } else { Order::OldestFirst };
        Self::PastChanges(range, (Revision(from), Revision(to)), order)
    }

    /// Returns a random request. Its values start with `number`, and `head` is near the current revision.
    pub fn draw(number: usize, head: Revision, has_auth: bool) -> Self {
        if has_auth && percent(8) {
            return Self::Auth(draw_change());
        }
        match below(100) {
            0..34 => Self::Put(put(&format!("{number}."), pick(&KEYS))),
            34..44 => Self::Delete(DeleteRequest { range: range(), prev_kv: percent(30) }),
            44..58 => Self::Txn(txn(number, head)),
            58..80 => Self::Range(read(head)),
            80..86 => Self::Grant(lease(), between(1, 9)),
            86..89 => Self::Revoke(lease()),
            89..95 => Self::KeepAlive(lease()),
            95..97 => Self::Leases,
            _ => {
                let wait = if percent(20) { CompactionWait::ForRows } else { CompactionWait::ForRevision };
                Self::Compact(Revision(head.0 - between(-2, 12)).max(Revision::EMPTY), wait)
            }
        }
    }

    /// Returns a put that is always valid.
    pub fn plain_put(number: usize) -> Self {
        let key = Bytes::from_static(b"a");
        let value = PutValue::New(format!("{number}.").into());
        Self::Put(PutRequest { key, value, lease: PutLease::Set(None), prev_kv: false })
    }

    /// Returns a list of all keys at the current revision.
    pub fn list() -> Self {
        Self::Range(RangeRequest { range: KeyRange::all(), ..latest() })
    }

    /// Returns whether the request may create a revision.
    pub fn writes(&self) -> bool {
        match self {
            Self::Put(_) | Self::Delete(_) | Self::Txn(_) | Self::Revoke(_) => true,
            Self::Range(_) | Self::Grant(..) | Self::KeepAlive(_) | Self::Leases => false,
            Self::Compact(..) | Self::Auth(_) | Self::PastPairs(..) | Self::PastChanges(..) => false,
        }
    }

    pub async fn serve(self, store: &Store, caller: &Caller) -> Result<Answer, Error> {
        Ok(match self {
            Self::Put(request) => Answer::Put(store.put(caller, request).await?),
            Self::Delete(request) => Answer::Delete(store.delete(caller, request).await?),
            Self::Txn(request) => Answer::Txn(store.txn(caller, request).await?),
            Self::Range(request) => Answer::Range(store.range(caller, &request).await?),
            Self::Grant(id, ttl_secs) => Answer::Revision(store.grant(caller, Some(id), ttl_secs).await?.revision),
            Self::Revoke(id) => Answer::Revision(store.revoke(caller, id).await?),
            Self::KeepAlive(id) => Answer::Lease(store.keep_alive(caller, id).await?.1),
            Self::Leases => Answer::Leases(store.leases(caller).await?),
            Self::Compact(revision, wait) => Answer::Revision(store.compact(caller, revision, wait).await?),
            Self::Auth(change) => Answer::Revision(store.change_auth(caller, change).await?),
            Self::PastPairs(range, at) => past(past_pairs(store, caller, &range, at).await.map(Answer::PastPairs))?,
            Self::PastChanges(range, revisions, order) => {
                past(past_changes(store, caller, &range, revisions, order).await.map(Answer::PastChanges))?
            }
        })
    }
}

fn past(answer: Result<Answer, PastError>) -> Result<Answer, Error> {
    match answer {
        Err(PastError::Store(error)) => Err(error),
        Err(refused) => Ok(Answer::NotPast(refused)),
        Ok(answer) => Ok(answer),
    }
}

/// Reads a past state, page by page.
async fn past_pairs(
    store: &Store,
    caller: &Caller,
    range: &KeyRange,
    at: Revision,
) -> Result<Vec<EncodedKv>, PastError> {
    let (mut all, mut after) = (Vec::new(), None);
    loop {
        let page = store.past_pairs(caller, range, after.as_ref(), at).await?;
        all.extend(page.pairs);
        assert!(page.after.is_none() || page.after > after, "a page ends at {:?}, after {after:?}", page.after);
        after = page.after;
        if after.is_none() {
            return Ok(all);
        }
    }
}

/// Reads changes, page by page.
async fn past_changes(
    store: &Store,
    caller: &Caller,
    range: &KeyRange,
    revisions: (Revision, Revision),
    order: Order,
) -> Result<Vec<PastRow>, PastError> {
    let mut all = Vec::new();
    let (mut from, mut to) = (RowId::new(revisions.0, 0), RowId::new(revisions.1, u32::MAX));
    let limit = if percent(50) { 1 + below(5) } else { usize::MAX };
    loop {
        let page = store.past_changes(caller, range, (from, to), order, limit).await?;
        assert!(page.changes.len() <= limit, "{} changes instead of {limit}", page.changes.len());
        let known: Vec<i64> =
            page.changes.iter().filter_map(|change| change.written.map(|written| written.unix_ms)).collect();
        let is_in_order =
            if order == Order::OldestFirst { known.is_sorted() } else { known.is_sorted_by(|a, b| a >= b) };
        assert!(is_in_order, "times go back: {known:?}");
        all.extend(page.changes.into_iter().map(|change| change.row));
        match (page.next, order) {
            (None, _) => return Ok(all),
            (Some(next), Order::OldestFirst) if next > from => from = next,
            (Some(next), Order::NewestFirst) if next < to => to = next,
            (Some(next), _) => panic!("a page of {from:?} to {to:?} continues at {next:?}"),
        }
    }
}

fn lease() -> LeaseId {
    LeaseId(between(1, LEASES))
}

pub(super) fn range() -> KeyRange {
    if percent(60) {
        return KeyRange::from_wire(pick(&KEYS).as_bytes(), b"");
    }
    let (start, end) = pick(&RANGES);
    KeyRange::from_wire(start.as_bytes(), end.as_bytes())
}

fn put(tag: &str, key: &'static str) -> PutRequest {
    let lease = match below(10) {
        0..6 => PutLease::Set(None),
        6 => PutLease::Keep,
        _ => PutLease::Set(Some(lease())),
    };
    let value =
        if percent(8) { PutValue::Keep } else { PutValue::New(format!("{tag}{}", "x".repeat(below(40))).into()) };
    PutRequest { key: Bytes::from_static(key.as_bytes()), value, lease, prev_kv: percent(30) }
}

fn latest() -> RangeRequest {
    RangeRequest {
        range: range(),
        at: ReadAt::Latest,
        limit: None,
        sort: None,
        filter: Default::default(),
        projection: Projection::Full,
        consistency: Consistency::Linearizable,
    }
}

fn read(head: Revision) -> RangeRequest {
    let old = ReadAt::Revision(Revision(head.0 - between(-1, 12)).max(Revision::EMPTY));
    RangeRequest {
        at: if percent(35) { old } else { ReadAt::Latest },
        limit: percent(20).then(|| below(3) + 1),
        projection: pick(&[Projection::Full, Projection::Full, Projection::KeysOnly, Projection::CountOnly]),
        consistency: pick(&[Consistency::Linearizable, Consistency::Linearizable, Consistency::Serializable]),
        ..latest()
    }
}

/// The operations use distinct keys, as `api` ensures.
fn txn(number: usize, head: Revision) -> TxnRequest {
    let targets = [
        CompareTarget::Version(between(0, 3)),
        CompareTarget::CreateRevision(0),
        CompareTarget::ModRevision(between(0, 40)),
        CompareTarget::Lease(between(0, 2)),
        CompareTarget::Value(Bytes::from_static(b"5")),
    ];
    let relations = [Relation::Equal, Relation::NotEqual, Relation::Greater, Relation::Less];
    let compare = || Compare { range: range(), relation: pick(&relations), target: pick(&targets) };
    let ops = |most: usize| {
        let mut keys = KEYS.to_vec();
        let mut op = |place| {
            let key = keys.swap_remove(below(keys.len()));
            match below(10) {
                0..5 => Op::Put(put(&format!("{number}.{place}."), key)),
                5..8 => {
                    Op::Delete(DeleteRequest { range: KeyRange::from_wire(key.as_bytes(), b""), prev_kv: percent(30) })
                }
                8 => Op::Range(latest()),
                _ => Op::Range(RangeRequest { consistency: Consistency::Linearizable, ..read(head) }),
            }
        };
        (0..below(most + 1)).map(&mut op).collect()
    };
    TxnRequest { compares: (0..below(3)).map(|_| compare()).collect(), success: ops(4), failure: ops(2) }
}
