//! A naive store: a list of all changes that every request scans. It follows etcd's documentation literally, so that
//! the reference for the other tests can be verified by reading.

#![allow(dead_code, reason = "each test binary uses a part of it")]

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;

use orlop_core::{
    index::ReadAt,
    log::LeaseChange,
    store::{
        Error,
        request::{
            Compare, CompareTarget, DeleteRequest, DeleteResponse, Op, OpResponse, Projection, PutLease, PutRequest,
            PutResponse, PutValue, RangeRequest, RangeResponse, Relation, RevisionFilter, Sort, SortOrder, SortScope,
            SortTarget, TxnRequest, TxnResponse,
        },
    },
    types::{EncodedKv, Key, KeyRange, LeaseId, Revision, RowId, Version},
};

/// A version of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub key: Key,
    pub version: Version,
    pub value: Bytes,
    pub lease: Option<LeaseId>,
}

impl Pair {
    pub fn encoded(&self) -> EncodedKv {
        EncodedKv::new(&self.key, self.version, &self.value, self.lease)
    }
}

/// A change; `None` as the pair means a delete.
#[derive(Clone, Debug)]
pub struct Row {
    pub id: RowId,
    pub key: Key,
    pub pair: Option<Pair>,
    /// The pair that was live before the transaction.
    pub prev: Option<Pair>,
    pub prev_lease: Option<LeaseId>,
}

#[derive(Clone, Debug)]
pub struct Model {
    pub rows: Vec<Row>,
    pub head: Revision,
    pub compact_revision: Option<Revision>,
    pub leases: BTreeMap<LeaseId, i64>,
    pub lease_changes: Vec<LeaseChange>,
    /// Index of the first row of the current transaction.
    txn: usize,
}

type Result<T> = std::result::Result<T, Error>;

impl Model {
    pub fn new() -> Self {
        Self {
            rows: Vec::new(),
            head: Revision::EMPTY,
            compact_revision: None,
            leases: BTreeMap::new(),
            lease_changes: Vec::new(),
            txn: 0,
        }
    }

    /// Returns a model that holds these pairs at `head`.
    pub fn of(pairs: Vec<Pair>, head: Revision, leases: impl Iterator<Item = LeaseId>) -> Self {
        let row = |pair: Pair| Row {
            id: pair.version.row,
            key: pair.key.clone(),
            pair: Some(pair),
            prev: None,
            prev_lease: None,
        };
        let rows = pairs.into_iter().map(row).collect();
        Self { rows, head, leases: leases.map(|id| (id, 0)).collect(), ..Self::new() }
    }

    // Requests. A failed request may leave the model partly changed.

    pub fn put(&mut self, put: &PutRequest) -> Result<PutResponse> {
        self.begin();
        self.check_lease(put)?;
        self.check_kept(put)?;
        let response = self.run_put(put)?;
        self.end();
        Ok(response)
    }

    pub fn delete(&mut self, delete: &DeleteRequest) -> DeleteResponse {
        self.begin();
        let response = self.run_delete(delete);
        self.end();
        response
    }

    pub fn txn(&mut self, txn: &TxnRequest) -> Result<TxnResponse> {
        self.begin();
        let before = self.clone();
        for op in before.executed(txn) {
            if let Op::Put(put) = op {
                self.check_kept(put)?;
                self.check_lease(put)?;
            }
        }
        for op in before.executed(txn) {
            if let Op::Range(RangeRequest { at: ReadAt::Revision(at), .. }) = op {
                if *at > self.head {
                    return Err(Error::FutureRevision);
                }
                if *at < self.compact_revision.unwrap_or(Revision(-1)) {
                    return Err(Error::Compacted);
                }
            }
        }
        let response = self.run_txn(txn, &before)?;
        self.end();
        Ok(response)
    }

    pub fn grant(&mut self, id: LeaseId, ttl_secs: i64) -> Result<Revision> {
        if self.leases.contains_key(&id) {
            return Err(Error::LeaseExists);
        }
        self.leases.insert(id, ttl_secs);
        self.lease_changes.push(LeaseChange::Grant { id, ttl_secs });
        Ok(self.head)
    }

    pub fn revoke(&mut self, id: LeaseId) -> Result<Revision> {
        self.begin();
        if self.leases.remove(&id).is_none() {
            return Err(Error::LeaseNotFound);
        }
        for key in self.lease_keys(id) {
            self.push(key, None);
        }
        self.lease_changes.push(LeaseChange::Revoke { id });
        self.end();
        Ok(self.head)
    }

    // Reads.

    /// Returns the live pairs after all changes, in the order of their keys.
    pub fn live(&self) -> Vec<Pair> {
        self.live_at(Revision(i64::MAX))
    }

    pub fn live_at(&self, at: Revision) -> Vec<Pair> {
        let keys: BTreeSet<&Key> = self.rows.iter().map(|row| &row.key).collect();
        let newest = |key: &Key| self.rows.iter().rfind(|row| row.key == *key && row.id.revision <= at);
        keys.into_iter().filter_map(|key| newest(key)?.pair.clone()).collect()
    }

    pub fn get(&self, key: &[u8]) -> Option<Pair> {
        self.rows.iter().rfind(|row| row.key.as_slice() == key)?.pair.clone()
    }

    pub fn within(&self, range: &KeyRange) -> Vec<Pair> {
        self.live().into_iter().filter(|pair| range.contains(&pair.key)).collect()
    }

    pub fn lease_keys(&self, id: LeaseId) -> Vec<Key> {
        self.live().into_iter().filter(|pair| pair.lease == Some(id)).map(|pair| pair.key).collect()
    }

    // All changes of a transaction share a revision.

    fn begin(&mut self) {
        self.txn = self.rows.len();
    }

    fn end(&mut self) {
        self.head = self.revision();
    }

    fn revision(&self) -> Revision {
        if self.rows.len() > self.txn { self.head.next() } else { self.head }
    }

    fn push(&mut self, key: Key, pair: Option<Pair>) {
        let sub = u32::try_from(self.rows.len() - self.txn).expect("a transaction has fewer than 2^32 rows");
        let id = RowId::new(self.head.next(), sub);
        let prev_lease = self.get(&key).and_then(|pair| pair.lease);
        let prev = self.rows[..self.txn].iter().rfind(|row| row.key == key).and_then(|row| row.pair.clone());
        self.rows.push(Row { id, key, pair, prev, prev_lease });
    }

    // The checks that precede every change.

    fn check_lease(&self, put: &PutRequest) -> Result<()> {
        match put.lease {
            PutLease::Set(Some(id)) if !self.leases.contains_key(&id) => Err(Error::LeaseNotFound),
            PutLease::Set(_) | PutLease::Keep => Ok(()),
        }
    }

    fn check_kept(&self, put: &PutRequest) -> Result<()> {
        let keeps = matches!(put.lease, PutLease::Keep) || matches!(put.value, PutValue::Keep);
        if keeps && self.get(&put.key).is_none() { Err(Error::KeyNotFound) } else { Ok(()) }
    }

    /// Returns the operations that are executed, with those of nested transactions in place.
    fn executed<'a>(&self, txn: &'a TxnRequest) -> Vec<&'a Op> {
        let mut ops = Vec::new();
        for op in self.branch(txn) {
            match op {
                Op::Txn(nested) => ops.extend(self.executed(nested)),
                Op::Put(_) | Op::Range(_) | Op::Delete(_) => ops.push(op),
            }
        }
        ops
    }

    fn branch<'a>(&self, txn: &'a TxnRequest) -> &'a [Op] {
        if self.succeeds(txn) { &txn.success } else { &txn.failure }
    }

    fn succeeds(&self, txn: &TxnRequest) -> bool {
        txn.compares.iter().all(|compare| self.holds(compare))
    }

    fn holds(&self, compare: &Compare) -> bool {
        let pairs = self.within(&compare.range);
        if pairs.is_empty() {
            return compare_numbers(compare, [0; 4]).unwrap_or(false);
        }
        pairs.iter().all(|pair| {
            let Version { row, create_revision, version } = pair.version;
            let lease = pair.lease.map_or(0, |id| id.0);
            compare_numbers(compare, [version, create_revision.0, row.revision.0, lease]).unwrap_or_else(|| {
                let CompareTarget::Value(wanted) = &compare.target else { unreachable!("the one that is no number") };
                related(compare.relation, &pair.value, wanted)
            })
        })
    }

    // Operations.

    fn run_put(&mut self, put: &PutRequest) -> Result<PutResponse> {
        let before = self.get(&put.key);
        let row = RowId::new(
            self.head.next(),
            u32::try_from(self.rows.len() - self.txn).expect("a transaction has fewer than 2^32 rows"),
        );
        let kept = || before.clone().ok_or(Error::KeyNotFound);
        let value = match &put.value {
            PutValue::New(value) => value.clone(),
            PutValue::Keep => kept()?.value,
        };
        let lease = match put.lease {
            PutLease::Set(lease) => lease,
            PutLease::Keep => kept()?.lease,
        };
        let version = Version {
            row,
            create_revision: before.as_ref().map_or(row.revision, |pair| pair.version.create_revision),
            version: before.as_ref().map_or(1, |pair| pair.version.version + 1),
        };
        let key = Key::from(&put.key[..]);
        self.push(key.clone(), Some(Pair { key, version, value, lease }));
        let prev_kv = before.filter(|_| put.prev_kv).map(|pair| pair.encoded());
        Ok(PutResponse { revision: row.revision, prev_kv })
    }

    fn run_delete(&mut self, delete: &DeleteRequest) -> DeleteResponse {
        let pairs = self.within(&delete.range);
        for pair in &pairs {
            self.push(pair.key.clone(), None);
        }
        let prev_kvs = pairs.iter().filter(|_| delete.prev_kv).map(Pair::encoded).collect();
        DeleteResponse { revision: self.revision(), deleted: pairs.len(), prev_kvs }
    }

    fn run_range(&self, range: &RangeRequest) -> RangeResponse {
        let pairs = match range.at {
            ReadAt::Revision(at) if at.0 > 0 => self.live_at(at),
            ReadAt::Revision(_) | ReadAt::Latest => self.live(),
        };
        let pairs = pairs.into_iter().filter(|pair| range.range.contains(&pair.key)).collect();
        select(pairs, range, self.revision())
    }

    fn run_txn(&mut self, txn: &TxnRequest, before: &Self) -> Result<TxnResponse> {
        let mut responses = Vec::new();
        for op in before.branch(txn) {
            responses.push(match op {
                Op::Range(range) => OpResponse::Range(self.run_range(range)),
                Op::Put(put) => OpResponse::Put(self.run_put(put)?),
                Op::Delete(delete) => OpResponse::Delete(self.run_delete(delete)),
                Op::Txn(nested) => OpResponse::Txn(self.run_txn(nested, before)?),
            });
        }
        Ok(TxnResponse { revision: self.revision(), succeeded: before.succeeds(txn), responses })
    }
}

/// Returns `None` if the target is not a number.
fn compare_numbers(compare: &Compare, [version, create, modified, lease]: [i64; 4]) -> Option<bool> {
    let relation = compare.relation;
    match compare.target {
        CompareTarget::Version(wanted) => Some(related(relation, &version, &wanted)),
        CompareTarget::CreateRevision(wanted) => Some(related(relation, &create, &wanted)),
        CompareTarget::ModRevision(wanted) => Some(related(relation, &modified, &wanted)),
        CompareTarget::Lease(wanted) => Some(related(relation, &lease, &wanted)),
        CompareTarget::Unknown => Some(related(relation, &0, &0)),
        CompareTarget::Value(_) => None,
    }
}

fn related<T: Ord>(relation: Relation, left: &T, right: &T) -> bool {
    match relation {
        Relation::Equal => left == right,
        Relation::NotEqual => left != right,
        Relation::Greater => left > right,
        Relation::Less => left < right,
        Relation::Unknown => true,
    }
}

/// Returns the response to a range, given all pairs in it. Pairs that are equal in the sort target stay in the order of
/// their keys; etcd guarantees no order.
pub fn select(mut pairs: Vec<Pair>, range: &RangeRequest, revision: Revision) -> RangeResponse {
    let count = pairs.len();
    if range.projection == Projection::CountOnly {
        return RangeResponse { revision, kvs: Vec::new(), more: false, count };
    }
    pairs.retain(|pair| admits(&range.filter, pair));
    let limit = range.limit.unwrap_or(usize::MAX);
    if range.sort.is_some_and(|sort| sort.scope == SortScope::FirstKeys) {
        pairs.truncate(limit.saturating_add(1));
    }
    if let Some(Sort { target, order, .. }) = range.sort {
        pairs.sort_by(|left, right| {
            let ascending = match target {
                SortTarget::Key => left.key.cmp(&right.key),
                SortTarget::Version => left.version.version.cmp(&right.version.version),
                SortTarget::CreateRevision => left.version.create_revision.cmp(&right.version.create_revision),
                SortTarget::ModRevision => left.version.row.revision.cmp(&right.version.row.revision),
                SortTarget::Value => left.value.cmp(&right.value),
            };
            if order == SortOrder::Descend { ascending.reverse() } else { ascending }
        });
    }
    let more = pairs.len() > limit;
    pairs.truncate(limit);
    if range.projection == Projection::KeysOnly {
        pairs.iter_mut().for_each(|pair| pair.value = Bytes::new());
    }
    RangeResponse { revision, kvs: pairs.iter().map(Pair::encoded).collect(), more, count }
}

fn admits(filter: &RevisionFilter, pair: &Pair) -> bool {
    let (modified, created) = (pair.version.row.revision, pair.version.create_revision);
    !(filter.mod_min.is_some_and(|min| modified < min)
        || filter.mod_max.is_some_and(|max| modified > max)
        || filter.create_min.is_some_and(|min| created < min)
        || filter.create_max.is_some_and(|max| created > max))
}
