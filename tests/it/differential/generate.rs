//! Generates random operations over a small key space, so that they often affect the same keys.

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseTimeToLiveRequest, PutRequest,
    RangeRequest, RequestOp, TxnRequest, WatchCreateRequest, compare::TargetUnion, request_op::Request,
    watch_create_request::FilterType,
};

use super::{
    auth::{Caller, draw_caller, draw_op, is_checked_differently},
    op::{On, Op},
};
use crate::support::Random;

/// Every key that is put, in order.
pub const KEYS: [&[u8]; 12] =
    [b"\0", b"a", b"a\0", b"a/", b"a/1", b"a/1\0", b"a/2", b"a\xff", b"b", b"b/1", b"\xff", b"\xff\xff"];
/// The keys, and range ends between them.
const BOUNDS: [&[u8]; 16] = [
    b"\0",
    b"\0\0",
    b"a",
    b"a\0",
    b"a/",
    b"a/1",
    b"a/1\0",
    b"a/2",
    b"a0",
    b"a\xff",
    b"b",
    b"b/1",
    b"c",
    b"\xff",
    b"\xff\xff",
    BEYOND_ALL,
];
const BEYOND_ALL: &[u8] = b"\xff\xff\xff";
const VALUES: [&[u8]; 5] = [b"", b"\0", b"x", b"y", b"\xff\xfe a value that is no text"];
const LEASES: [i64; 10] = [1, 2, 3, 4, 5, 6, -1, -7, i64::MAX, i64::MIN];
const WATCH_IDS: [i64; 7] = [1, 2, 3, 4, 5, -5, 77];
/// Minimum and maximum, so long that no lease expires during a run.
const LEASE_TTL_SECS: (i64, i64) = (100_000, 200_000);
/// The maximum TTL that etcd accepts.
const LEASE_TTL_SECS_MAX: i64 = 9_000_000_000;
/// Streams that carry many watches.
pub const SHARED_STREAMS: usize = 3;
const WATCHES_PER_STREAM: usize = 6;
/// Sizes of values: the first exceeds etcd's limit on requests, the second its limit on gRPC messages.
const TOO_LARGE_BYTES: [usize; 2] = [1_600_000, 3_000_000];

/// The state of the store as known from the responses.
#[derive(Clone, Debug)]
pub struct Known {
    pub head: i64,
    /// -1 before the first compaction.
    pub compacted: i64,
    /// Live watches of the shared streams: (stream, id).
    pub watches: Vec<(usize, i64)>,
}

/// The source of one round's operations.
pub struct Generator {
    random: Random,
    known: Known,
    /// Weight of each kind of operation; chosen at random for each round.
    weights: [usize; 16],
    /// Whether the round has users and roles.
    pub has_auth: bool,
}

impl Generator {
    pub fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        let mut weights = [300, 250, 60, 250, 12, 25, 3, 15, 12, 25, 6, 2, 2, 30, 12, 5];
        for weight in &mut weights {
            *weight = *weight * random.pick(&[1, 2, 3, 4]) / 2;
        }
        let has_auth = seed.is_multiple_of(2);
        Self { random, known: Known { head: 1, compacted: -1, watches: Vec::new() }, weights, has_auth }
    }

    /// Returns an operation and who sends it.
    pub fn step(&mut self, known: &Known) -> (Caller, Op) {
        if !self.has_auth {
            return (Caller::Root, self.op(known));
        }
        let caller = draw_caller(&mut self.random);
        if self.random.chance(12) {
            return (if self.random.chance(85) { Caller::Root } else { caller }, Op::Auth(draw_op(&mut self.random)));
        }
        let mut op = self.op(known);
        // etcd before 3.6 renews leases for everybody, so its leases would last longer.
        while let Op::KeepAlive { .. } = op {
            op = self.op(known);
        }
        // etcd 3.5 checks only the first key of a watch without a range end, and then sends all keys.
        if let Op::Watch { create, .. } = &mut op
            && create.range_end[..] == *b"\0"
        {
            create.range_end = BEYOND_ALL.into();
        }
        (if is_checked_differently(caller, &op) { Caller::Root } else { caller }, op)
    }

    pub fn chance(&mut self, percent: usize) -> bool {
        self.random.chance(percent)
    }

    fn op(&mut self, known: &Known) -> Op {
        self.known.clone_from(known);
        match self.random.weighted(&self.weights) {
            0 => Op::Put(self.put()),
            1 => Op::Range(self.range()),
            2 => Op::DeleteRange(self.delete_range()),
            3 => Op::Txn(self.txn()),
            4 => Op::Compact(self.compact()),
            5 => Op::Grant(self.grant()),
            6 => Op::GrantBriefly(self.grant_briefly()),
            7 => Op::Revoke { id: self.lease() },
            8 => Op::KeepAlive { ids: (0..=self.random.below(3)).map(|_| self.lease()).collect() },
            9 => Op::TimeToLive(LeaseTimeToLiveRequest { id: self.lease(), keys: self.random.chance(70) }),
            10 => Op::Leases,
            11 => Op::Status,
            12 => Op::Members,
            13 => self.watch(),
            14 => self.cancel_watch(),
            _ => Op::Progress,
        }
    }

    fn key(&mut self) -> Vec<u8> {
        if self.random.chance(1) { Vec::new() } else { self.random.pick(&KEYS).to_vec() }
    }

    /// Returns a key and a range end of any form, including reversed and empty ranges.
    fn span(&mut self) -> (Vec<u8>, Vec<u8>) {
        let key = self.key();
        let end = match self.random.weighted(&[35, 20, 22, 4, 2, 8, 8, 1]) {
            0 => Vec::new(),
            1 => prefix_end(&key),
            2 => return self.ordered_span(),
            3 => self.random.pick(&BOUNDS).to_vec(),
            4 => key.clone(),
            5 => b"\0".to_vec(),
            6 => return (b"\0".to_vec(), b"\0".to_vec()),
            _ => return (Vec::new(), b"\0".to_vec()),
        };
        (key, end)
    }

    fn ordered_span(&mut self) -> (Vec<u8>, Vec<u8>) {
        let [one, other] = [self.random.pick(&KEYS), self.random.pick(&BOUNDS)];
        if one <= other { (one.to_vec(), other.to_vec()) } else { (other.to_vec(), one.to_vec()) }
    }

    /// Returns one of a few short values or, in 4 of 100 cases, a long one.
    fn value(&mut self) -> Vec<u8> {
        if self.random.chance(4) {
            return vec![b'v'; 100 + self.random.below(2_000)];
        }
        self.random.pick(&VALUES).to_vec()
    }

    fn lease(&mut self) -> i64 {
        if self.random.chance(3) { 0 } else { self.random.pick(&LEASES) }
    }

    /// Returns a revision to read at: mostly 0 or inside the history, otherwise compacted, in the future or negative.
    fn revision(&mut self) -> i64 {
        let Known { head, compacted, .. } = self.known;
        match self.random.weighted(&[55, 28, 4, 4, 3, 3, 3]) {
            0 => 0,
            1 => self.random.between(compacted.max(1), head),
            2 => compacted,
            3 => compacted - self.random.between(1, 3),
            4 => head + self.random.between(1, 5),
            5 => head,
            _ => -self.random.between(1, 9),
        }
    }

    /// Returns a bound for a filter by revision; mostly 0, which disables the filter.
    fn bound(&mut self) -> i64 {
        let head = self.known.head;
        if self.random.chance(90) { 0 } else { self.random.between(head - 40, head + 2) }
    }

    fn put(&mut self) -> PutRequest {
        let mut put = PutRequest {
            key: self.key().into(),
            value: self.value().into(),
            lease: if self.random.chance(25) { self.lease() } else { 0 },
            prev_kv: self.random.chance(40),
            ignore_value: self.random.chance(10),
            ignore_lease: self.random.chance(10),
        };
        // Each flag requires that its field is unset; most requests are valid.
        if put.ignore_value && self.random.chance(80) {
            put.value.clear();
        }
        if put.ignore_lease && self.random.chance(80) {
            put.lease = 0;
        }
        if self.random.below(2_000) == 0 {
            put.value = vec![0; self.random.pick(&TOO_LARGE_BYTES)].into();
        }
        put
    }

    fn range(&mut self) -> RangeRequest {
        let (key, range_end) = self.span();
        let sorted = self.random.chance(35);
        RangeRequest {
            key: key.into(),
            range_end: range_end.into(),
            limit: if self.random.chance(30) { self.random.between(-1, 6) } else { 0 },
            revision: self.revision(),
            sort_order: if sorted { self.random.pick(&[0, 1, 1, 2, 2]) } else { self.default_or_unknown_order() },
            // Known targets only, because etcd 3.5 crashes on an unknown one.
            sort_target: if sorted { self.random.pick(&[0, 1, 2, 3, 4]) } else { 0 },
            serializable: self.random.chance(30),
            keys_only: self.random.chance(10),
            count_only: self.random.chance(8),
            min_mod_revision: self.bound(),
            max_mod_revision: self.bound(),
            min_create_revision: self.bound(),
            max_create_revision: self.bound(),
        }
    }

    fn default_or_unknown_order(&mut self) -> i32 {
        if self.random.chance(1) { self.random.pick(&[7, -1]) } else { 0 }
    }

    fn delete_range(&mut self) -> DeleteRangeRequest {
        let (key, range_end) = self.span();
        DeleteRangeRequest { key: key.into(), range_end: range_end.into(), prev_kv: self.random.chance(50) }
    }

    fn txn(&mut self) -> TxnRequest {
        let mut txn = if self.random.chance(2) { self.crowded_txn() } else { self.small_txn(0) };
        // etcd does not notice that an open-ended delete removes the key of a later put in the same transaction. If
        // that put keeps the value or the lease, etcd crashes at once; otherwise it crashes when the key is compacted.
        // In transactions with a put, such deletes therefore get a range end.
        if any_op(&mut txn, &mut |op| matches!(op, Request::RequestPut(_))) {
            any_op(&mut txn, &mut |op| {
                if let Request::RequestDeleteRange(delete) = op
                    && delete.range_end[..] == *b"\0"
                {
                    delete.range_end = BEYOND_ALL.into();
                }
                false
            });
        }
        txn
    }

    fn small_txn(&mut self, depth: usize) -> TxnRequest {
        let [compares, success, failure] = [[3, 4, 2, 1, 0], [1, 4, 3, 2, 1], [3, 4, 2, 1, 0]];
        TxnRequest {
            compare: (0..self.random.weighted(&compares)).map(|_| self.compare()).collect(),
            success: (0..self.random.weighted(&success)).map(|_| self.inner_op(depth)).collect(),
            failure: (0..self.random.weighted(&failure)).map(|_| self.inner_op(depth)).collect(),
        }
    }

    /// Returns a transaction with about as many operations as the limit of 128 permits. One variant has a part of them
    /// in a nested transaction.
    fn crowded_txn(&mut self) -> TxnRequest {
        let count = self.random.pick(&[100, 127, 128, 129, 130]);
        let mut txn = TxnRequest::default();
        match self.random.below(4) {
            0 => txn.compare = (0..count).map(|_| self.compare()).collect(),
            1 => txn.success = (0..count).map(|_| inner(Request::RequestRange(self.plain_range()))).collect(),
            2 => txn.failure = (0..count).map(|_| inner(Request::RequestRange(self.plain_range()))).collect(),
            _ => {
                txn.success = (0..100).map(|_| inner(Request::RequestRange(self.plain_range()))).collect();
                let rest = self.random.pick(&[26, 27, 28, 29]);
                let nested = (0..rest).map(|_| inner(Request::RequestDeleteRange(self.delete_range()))).collect();
                txn.success[99] = inner(Request::RequestTxn(TxnRequest { success: nested, ..Default::default() }));
            }
        }
        txn
    }

    fn plain_range(&mut self) -> RangeRequest {
        RangeRequest { key: self.random.pick(&KEYS).into(), ..Default::default() }
    }

    fn inner_op(&mut self, depth: usize) -> RequestOp {
        let nested = if depth < 3 { 12 } else { 0 };
        match self.random.weighted(&[50, 30, 15, nested, 1]) {
            0 => inner(Request::RequestPut(self.inner_put())),
            1 => inner(Request::RequestRange(self.inner_range())),
            2 => inner(Request::RequestDeleteRange(self.delete_range())),
            3 => inner(Request::RequestTxn(self.small_txn(depth + 1))),
            _ => RequestOp { request: None },
        }
    }

    /// An error ends the whole transaction, so invalid puts are rarer here.
    fn inner_put(&mut self) -> PutRequest {
        let put = self.put();
        if self.random.chance(70) {
            return PutRequest { lease: 0, ignore_value: false, ignore_lease: false, ..put };
        }
        put
    }

    fn inner_range(&mut self) -> RangeRequest {
        let mut range = self.range();
        if self.random.chance(70) {
            range.revision = 0;
        }
        if !(0..=2).contains(&range.sort_order) {
            // Only etcd since 3.6 refuses the transaction; earlier versions apply it, so the two stores would differ.
            range.sort_order = 0;
        }
        range
    }

    fn compare(&mut self) -> Compare {
        let (key, range_end) =
            if self.random.chance(75) { (self.random.pick(&KEYS).to_vec(), Vec::new()) } else { self.span() };
        let target = if self.random.chance(1) { 9 } else { self.random.pick(&[0, 1, 2, 3, 4]) };
        Compare {
            result: if self.random.chance(1) { 9 } else { self.random.pick(&[0, 1, 2, 3]) },
            target,
            key: key.into(),
            range_end: range_end.into(),
            target_union: self.right_hand_side(target),
        }
    }

    /// Returns a value of the target's type, no value, or a value of another target's type.
    fn right_hand_side(&mut self, target: i32) -> Option<TargetUnion> {
        let field = match self.random.weighted(&[94, 4, 2]) {
            0 => target,
            1 => return None,
            _ => self.random.pick(&[0, 1, 2, 3, 4]),
        };
        let head = self.known.head;
        let revision = if self.random.chance(30) { 0 } else { self.random.between(head - 30, head) };
        Some(match field {
            0 => TargetUnion::Version(self.random.between(-1, 4)),
            1 => TargetUnion::CreateRevision(revision),
            2 => TargetUnion::ModRevision(revision),
            3 => TargetUnion::Value(self.random.pick(&VALUES).into()),
            _ => TargetUnion::Lease(self.lease()),
        })
    }

    fn compact(&mut self) -> CompactionRequest {
        let Known { head, compacted, .. } = self.known;
        let revision = match self.random.weighted(&[40, 15, 15, 10, 10, 10]) {
            0 => self.random.between(compacted + 1, head),
            1 => head,
            2 => compacted,
            3 => compacted - self.random.between(1, 5),
            4 => head + self.random.between(1, 5),
            _ => -self.random.between(0, 5),
        };
        CompactionRequest { revision, physical: self.random.chance(50) }
    }

    fn grant(&mut self) -> LeaseGrantRequest {
        let (least, most) = LEASE_TTL_SECS;
        let ttl = match self.random.weighted(&[85, 5, 5, 5]) {
            0 => self.random.between(least, most),
            1 => LEASE_TTL_SECS_MAX,
            2 => LEASE_TTL_SECS_MAX + 1,
            _ => i64::MAX,
        };
        LeaseGrantRequest { id: self.random.pick(&LEASES), ttl }
    }

    fn grant_briefly(&mut self) -> LeaseGrantRequest {
        LeaseGrantRequest { id: self.random.pick(&[0, 0, 1_000]), ttl: self.random.pick(&[-9, 0, 1, 2, 3, 100]) }
    }

    fn watch(&mut self) -> Op {
        let stream = self.random.below(SHARED_STREAMS);
        if self.known.watches.iter().filter(|(on, _)| *on == stream).count() >= WATCHES_PER_STREAM {
            return self.cancel_watch();
        }
        let (key, range_end) = self.span();
        let mut create = WatchCreateRequest {
            key: key.into(),
            range_end: range_end.into(),
            start_revision: self.start_revision(),
            progress_notify: self.random.chance(10),
            prev_kv: self.random.chance(40),
            watch_id: if self.random.chance(25) { self.random.pick(&WATCH_IDS) } else { 0 },
            fragment: self.random.chance(10),
            ..Default::default()
        };
        if self.random.chance(20) {
            create.filters = (0..=self.random.below(2)).map(|_| self.random.pick(&[0, 0, 0, 1, 1, 1, 9])).collect();
        }
        // The exception for events permits a put at the compact revision if a later event of that revision shows that
        // the put was superseded. That event may be a delete, so such a watch must not filter deletes.
        if create.start_revision == self.known.compacted {
            create.filters.retain(|filter| *filter != FilterType::Nodelete as i32);
        }
        // etcd sends no progress on a stream with a watch that starts in the future or was compacted, so such a watch
        // gets its own stream. A watch from the future has no prev_kv, because a compaction may remove a previous pair
        // before etcd reads it.
        if create.start_revision > self.known.head {
            create.prev_kv = false;
            return Op::Watch { on: On::Fresh, create };
        }
        // Such a watch on a shared stream would also change the ids of later watches, differently on the two servers.
        if create.start_revision != 0 && create.start_revision < self.known.compacted {
            return Op::Watch { on: On::Doomed, create };
        }
        Op::Watch { on: On::Stream(stream), create }
    }

    fn start_revision(&mut self) -> i64 {
        let Known { head, compacted, .. } = self.known;
        // Never a negative revision: etcd before 3.6 starts such a watch, and cancels it at an unpredictable time or
        // never.
        match self.random.weighted(&[55, 20, 5, 7, 6, 7]) {
            0 => 0,
            1 => self.random.between(compacted.max(1), head),
            2 => compacted.max(1),
            3 => head + self.random.between(1, 12),
            4 => self.random.between(1, compacted - 1),
            _ => head,
        }
    }

    fn cancel_watch(&mut self) -> Op {
        if self.known.watches.is_empty() || self.random.chance(10) {
            // No watch has this id.
            return Op::CancelWatch { stream: self.random.below(SHARED_STREAMS), id: 4_711 };
        }
        let (stream, id) = self.random.pick(&self.known.watches);
        Op::CancelWatch { stream, id }
    }
}

fn inner(request: Request) -> RequestOp {
    RequestOp { request: Some(request) }
}

/// Returns whether `find` accepts an operation, including operations of nested transactions.
fn any_op(txn: &mut TxnRequest, find: &mut impl FnMut(&mut Request) -> bool) -> bool {
    txn.success.iter_mut().chain(&mut txn.failure).filter_map(|op| op.request.as_mut()).any(|op| match op {
        Request::RequestTxn(nested) => any_op(nested, find),
        other => find(other),
    })
}

/// Returns the lowest key above all keys with the prefix, or `\0` if there is none.
fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let Some(last) = prefix.iter().rposition(|byte| *byte < 0xff) else { return b"\0".to_vec() };
    let mut end = prefix[..=last].to_vec();
    end[last] += 1;
    end
}
