//! Evaluates requests. Pure: a view of the store and a request in, changes and a response out; no clock, no log, no
//! waiting.
//!
//! If a value is neither in the batch nor in the cache, the evaluation returns [`Stop::NeedsValues`]. The caller reads
//! those rows and evaluates the request again, so only cache misses cost a second pass.
//!
//! The order of operations is etcd's: compares read the state before the transaction and choose a branch of each nested
//! transaction; then everything that can fail is checked in the chosen branches; then the operations run in order and
//! see each other's writes.

use std::collections::HashMap;

use super::{
    authority::CurrentAuthority,
    batch::{AuthUpdate, Batch, Current, Savepoint},
    error::Error,
    request::{
        Compare, CompareTarget, DeleteRequest, DeleteResponse, Op, OpResponse, Projection, PutLease, PutRequest,
        PutResponse, PutValue, RangeRequest, RangeResponse, Relation, TxnRequest, TxnResponse,
    },
    select::{Selected, Selection},
    values::ValueCache,
    write_request::{Outcome, Request},
};
use crate::{
    index::{ReadAt, TreeIndex, Unreadable},
    lease,
    log::LeaseChange,
    overload::ReadMemory,
    types::{Change, ChangeKind, EncodedKv, Key, LeaseId, Prev, Revision, RowId, Version},
};

/// The reason why an evaluation returned no response.
#[derive(Debug)]
pub enum Stop {
    /// The request failed and changed nothing.
    Failed(Error),
    /// The pairs of these rows have to be read first.
    NeedsValues(Vec<RowId>),
    /// The request reads a revision of this batch: evaluate it again when the batch is committed.
    NeedsCommit,
    /// The store is past the position at which the batch is evaluated.
    Outdated,
}

impl From<Error> for Stop {
    fn from(error: Error) -> Self {
        Self::Failed(error)
    }
}

/// Keys that a transaction may look at, in addition to four times those in the index. It is evaluated in one step, while
/// nothing else is read or written.
const VISITS_MAX: usize = 1_000_000;

/// Pairs that the compares of a transaction ask for at first. They may need only the first of them. Then they ask for as
/// many as were read before, so that the number of evaluations grows with the logarithm of the number of pairs.
const COMPARED_ROWS_FIRST: usize = 1_000;
/// Maximum number of pairs that they ask for at a time. It limits the time and the memory of one read.
const COMPARED_ROWS_MAX: usize = 50_000;

/// Pairs read from the log for an evaluation; `None` for a row that no longer exists.
pub type Fetched = HashMap<RowId, Option<EncodedKv>>;

/// The inputs of an evaluation and the batch that it writes to.
pub struct Evaluation<'a> {
    pub index: &'a TreeIndex,
    pub leases: &'a lease::Table,
    pub cache: &'a ValueCache,
    /// Counts the pairs that are made from the index, until they are dropped.
    pub memory: &'a ReadMemory,
    pub fetched: &'a Fetched,
    pub batch: &'a mut Batch,
    missing: Vec<RowId>,
    /// Keys looked at by compares, ranges and deletes, including deleted keys, and pairs of ranges.
    visits: usize,
}

type Evaluated<T> = Result<T, Stop>;

impl<'a> Evaluation<'a> {
    pub fn new(
        index: &'a TreeIndex,
        leases: &'a lease::Table,
        cache: &'a ValueCache,
        memory: &'a ReadMemory,
        fetched: &'a Fetched,
        batch: &'a mut Batch,
    ) -> Self {
        Self { index, leases, cache, memory, fetched, batch, missing: Vec::new(), visits: 0 }
    }

    /// Evaluates a request. A change of users and roles is applied to those of `authority`.
    pub(super) fn evaluate(&mut self, request: &Request, authority: &CurrentAuthority) -> Evaluated<Outcome> {
        match request {
            Request::Put(request) => self.put(request).map(Outcome::Put),
            Request::Delete(request) => self.delete(request).map(Outcome::Delete),
            Request::Txn(request) => self.txn(request).map(Outcome::Txn),
            Request::Grant { id, ttl_secs } => self.grant(*id, *ttl_secs).map(Outcome::Revision),
            Request::Revoke(id) => self.revoke(*id).map(Outcome::Revision),
            Request::Expire(id) => self.expire(*id).map(Outcome::Revision),
            Request::Compact(revision) => self.compact(*revision).map(Outcome::Revision),
            Request::Alarm(change) => {
                self.batch.set_alarm(*change);
                Ok(Outcome::Revision(self.batch.head()))
            }
            Request::Auth(change) => {
                let mut state = authority.get().state().clone();
                if state.apply(change).map_err(Error::from)? {
                    self.batch.set_auth(AuthUpdate { change: change.clone(), state });
                }
                Ok(Outcome::Revision(self.batch.head()))
            }
        }
    }

    /// Evaluates a put.
    pub fn put(&mut self, request: &PutRequest) -> Evaluated<PutResponse> {
        self.check_lease(request)?;
        self.check_kept_key_exists(request)?;
        self.atomically(|this, savepoint| this.apply_put(request, savepoint))
    }

    /// Evaluates a delete.
    fn delete(&mut self, request: &DeleteRequest) -> Evaluated<DeleteResponse> {
        self.atomically(|this, savepoint| this.apply_delete(request, savepoint))
    }

    /// Evaluates a transaction.
    pub fn txn(&mut self, request: &TxnRequest) -> Evaluated<TxnResponse> {
        let mut path = Vec::new();
        self.choose_path(request, &mut path)?;
        self.check_missing()?;
        self.check_txn(request, &mut path.iter(), &|this, op| match op {
            // In a transaction etcd checks the key first; in a single Put it checks the lease first.
            Op::Put(put) => this.check_kept_key_exists(put).and_then(|()| this.check_lease(put)),
            Op::Range(_) | Op::Delete(_) | Op::Txn(_) => Ok(()),
        })?;
        self.check_txn(request, &mut path.iter(), &|this, op| match op {
            Op::Range(range) => this.check_range(range.at),
            Op::Put(_) | Op::Delete(_) | Op::Txn(_) => Ok(()),
        })?;
        self.atomically(|this, savepoint| this.apply_txn(request, &mut path.iter(), savepoint))
    }

    /// Revokes the lease and deletes its keys in one revision.
    fn revoke(&mut self, id: LeaseId) -> Evaluated<Revision> {
        self.end_lease(LeaseChange::Revoke { id }, id)
    }

    /// Like [`Self::revoke`], for a lease that has expired.
    fn expire(&mut self, id: LeaseId) -> Evaluated<Revision> {
        self.end_lease(LeaseChange::Expire { id }, id)
    }

    fn end_lease(&mut self, end: LeaseChange, id: LeaseId) -> Evaluated<Revision> {
        if !self.batch.lease_exists(self.leases, id) {
            return Err(Error::LeaseNotFound.into());
        }
        let keys = self.batch.lease_keys(self.leases, id);
        self.atomically(|this, savepoint| {
            for key in keys {
                if let Some(current) = this.batch.current(this.index, &key) {
                    this.push_delete(key, current, savepoint);
                }
            }
            this.batch.push_lease(end);
            Ok(())
        })?;
        Ok(self.batch.head())
    }

    /// Grants a lease. This does not increase the revision.
    fn grant(&mut self, id: LeaseId, ttl_secs: i64) -> Evaluated<Revision> {
        if self.batch.lease_exists(self.leases, id) {
            return Err(Error::LeaseExists.into());
        }
        self.batch.push_lease(LeaseChange::Grant { id, ttl_secs });
        Ok(self.batch.head())
    }

    /// Checks a compaction. It is the only request in its batch.
    fn compact(&mut self, revision: Revision) -> Evaluated<Revision> {
        if revision > self.index.head() {
            return Err(Error::from(Unreadable::Future).into());
        }
        // etcd treats a store that was never compacted as compacted at -1.
        if revision <= self.index.compact_revision().unwrap_or(Revision(-1)) {
            return Err(Error::from(Unreadable::Compacted).into());
        }
        self.batch.set_compaction(revision);
        Ok(self.index.head())
    }

    /// Runs a request as one transaction: all of its changes get one revision, or nothing is changed.
    fn atomically<T>(&mut self, apply: impl FnOnce(&mut Self, Savepoint) -> Evaluated<T>) -> Evaluated<T> {
        let savepoint = self.batch.savepoint();
        let applied = apply(self, savepoint).and_then(|response| {
            self.check_missing()?;
            Ok(response)
        });
        match applied {
            Ok(_) => self.batch.seal(savepoint),
            Err(_) => self.batch.roll_back(savepoint),
        }
        applied
    }

    /// Stops the evaluation if it needed values that are not available.
    fn check_missing(&mut self) -> Evaluated<()> {
        if self.missing.is_empty() { Ok(()) } else { Err(Stop::NeedsValues(std::mem::take(&mut self.missing))) }
    }

    /// Counts keys that were looked at, or pairs.
    fn count_visits(&mut self, visits: usize) -> Evaluated<()> {
        self.visits += visits;
        let max = self.index.len().saturating_mul(4).saturating_add(VISITS_MAX);
        if self.visits > max { Err(Error::TooManyRequests.into()) } else { Ok(()) }
    }

    // Compares.

    /// Appends to `path`, for each transaction that will be executed, whether its compares hold. The order is that of
    /// execution, and an outer transaction precedes its nested ones.
    fn choose_path(&mut self, txn: &TxnRequest, path: &mut Vec<bool>) -> Evaluated<()> {
        let mut succeeded = true;
        for compare in &txn.compares {
            if !self.holds(compare)? {
                succeeded = false;
                break;
            }
        }
        path.push(succeeded);
        for op in txn.branch(succeeded) {
            if let Op::Txn(nested) = op {
                self.choose_path(nested, path)?;
            }
        }
        Ok(())
    }

    /// Returns whether the compare holds for every live key of its range. If the range has no live key, the compare is
    /// evaluated as for a key that never existed: numbers are 0, and a compare of a value does not hold.
    fn holds(&mut self, compare: &Compare) -> Evaluated<bool> {
        let mut found = Vec::new();
        let visits = self.batch.visit(self.index, &compare.range, |_, current| found.push(current));
        self.count_visits(visits)?;
        if found.is_empty() {
            return Ok(match compare.target {
                CompareTarget::Version(number)
                | CompareTarget::CreateRevision(number)
                | CompareTarget::ModRevision(number)
                | CompareTarget::Lease(number) => compare.relation.holds(&0, &number),
                CompareTarget::Unknown => compare.relation.holds(&0, &0),
                CompareTarget::Value(_) => false,
            });
        }
        // The result does not matter once as many pairs are missing as are read at a time.
        let missing_max = self.fetched.len().clamp(COMPARED_ROWS_FIRST, COMPARED_ROWS_MAX);
        Ok(found.iter().all(|current| self.missing.len() < missing_max && self.holds_for(compare, current)))
    }

    /// A pair that has to be read first counts as one that holds, so that one evaluation finds all pairs to read. It is
    /// repeated with them.
    fn holds_for(&mut self, compare: &Compare, current: &Current) -> bool {
        let relation = compare.relation;
        match &compare.target {
            CompareTarget::Version(number) => relation.holds(&current.version.version, number),
            CompareTarget::CreateRevision(number) => relation.holds(&current.version.create_revision.0, number),
            CompareTarget::ModRevision(number) => relation.holds(&current.version.row.revision.0, number),
            CompareTarget::Lease(number) => relation.holds(&LeaseId::to_wire(current.lease), number),
            CompareTarget::Unknown => relation.holds(&0, &0),
            CompareTarget::Value(value) => {
                self.pair(current).is_none_or(|kv| relation.holds(&kv.value().as_ref(), &value.as_ref()))
            }
        }
    }

    // Checks.

    /// Runs `check` on each operation of the chosen branches.
    fn check_txn<'p>(
        &self,
        txn: &TxnRequest,
        path: &mut impl Iterator<Item = &'p bool>,
        check: &impl Fn(&Self, &Op) -> Evaluated<()>,
    ) -> Evaluated<()> {
        let succeeded = *path.next().expect("the path has an entry for each executed transaction");
        for op in txn.branch(succeeded) {
            match op {
                Op::Txn(nested) => self.check_txn(nested, path, check)?,
                Op::Range(_) | Op::Put(_) | Op::Delete(_) => check(self, op)?,
            }
        }
        Ok(())
    }

    /// Checks that the lease of a put exists.
    fn check_lease(&self, put: &PutRequest) -> Evaluated<()> {
        match put.lease {
            PutLease::Set(Some(lease)) if !self.batch.lease_exists(self.leases, lease) => {
                Err(Error::LeaseNotFound.into())
            }
            PutLease::Set(_) | PutLease::Keep => Ok(()),
        }
    }

    /// Checks that the key exists if the put keeps its value or lease.
    fn check_kept_key_exists(&self, put: &PutRequest) -> Evaluated<()> {
        let keeps = matches!(put.value, PutValue::Keep) || matches!(put.lease, PutLease::Keep);
        if keeps && self.batch.current(self.index, &put.key).is_none() {
            return Err(Error::KeyNotFound.into());
        }
        Ok(())
    }

    /// Checks the revision of a Range in a transaction. A single Range treats a negative revision as the latest one. In
    /// a transaction it fails, as in etcd, if it is below the compact revision (-1 before the first compaction).
    fn check_range(&self, at: ReadAt) -> Evaluated<()> {
        let ReadAt::Revision(at) = at else { return Ok(()) };
        if at > self.batch.head() {
            return Err(Error::from(Unreadable::Future).into());
        }
        if at < self.index.compact_revision().unwrap_or(Revision(-1)) {
            return Err(Error::from(Unreadable::Compacted).into());
        }
        if at > self.batch.base() { Err(Stop::NeedsCommit) } else { Ok(()) }
    }

    // Operations.

    fn apply_put(&mut self, put: &PutRequest, savepoint: Savepoint) -> Evaluated<PutResponse> {
        let current = self.batch.current(self.index, &put.key);
        let row = self.batch.next_row(savepoint);
        let version = match &current {
            Some(current) => Version { row, version: current.version.version + 1, ..current.version },
            None => Version { row, create_revision: row.revision, version: 1 },
        };
        let lease = match (put.lease, &current) {
            (PutLease::Set(lease), _) => lease,
            (PutLease::Keep, Some(current)) => current.lease,
            (PutLease::Keep, None) => return Err(Error::KeyNotFound.into()),
        };
        let kv = match (&put.value, &current) {
            (PutValue::New(value), _) => EncodedKv::new(&put.key, version, value, lease),
            (PutValue::Keep, Some(current)) => {
                let value = self.pair(current).map(|kv| kv.value()).unwrap_or_default();
                EncodedKv::new(&put.key, version, &value, lease)
            }
            (PutValue::Keep, None) => return Err(Error::KeyNotFound.into()),
        };
        let prev_kv = current.as_ref().filter(|_| put.prev_kv).and_then(|current| self.pair(current));
        let prev_lease = current.as_ref().and_then(|current| current.lease);
        let kind = ChangeKind::Put { kv, create_revision: version.create_revision, version: version.version, lease };
        let prev = current.map(|current| self.prev(current));
        self.batch.push(Change { row, key: Key::from(&put.key[..]), kind, prev, prev_lease });
        Ok(PutResponse { revision: row.revision, prev_kv })
    }

    fn apply_delete(&mut self, request: &DeleteRequest, savepoint: Savepoint) -> Evaluated<DeleteResponse> {
        let mut found = Vec::new();
        let visits = self.batch.visit(self.index, &request.range, |key, current| found.push((key.clone(), current)));
        self.count_visits(visits)?;
        let deleted = found.len();
        let mut prev_kvs = Vec::new();
        for (key, current) in found {
            if request.prev_kv {
                prev_kvs.extend(self.pair(&current));
            }
            self.push_delete(key, current, savepoint);
        }
        Ok(DeleteResponse { revision: self.revision(savepoint), deleted, prev_kvs })
    }

    fn apply_range(&mut self, request: &RangeRequest, savepoint: Savepoint) -> Evaluated<RangeResponse> {
        let mut selection = Selection::new(request);
        let mut from_batch = HashMap::new();
        let visits = match request.at {
            _ if request.range.is_empty() => 0,
            ReadAt::Revision(at) if at.0 > 0 => {
                self.index.visit(request.range.bounds(), at, |key, entry| selection.offer(key, entry))
            }
            // A negative revision that was not rejected reads the latest state, as in etcd.
            ReadAt::Latest | ReadAt::Revision(_) => self.batch.visit(self.index, &request.range, |key, current| {
                selection.offer(key, current.entry());
                if let Some(kv) = current.kv {
                    from_batch.insert(current.version.row, kv);
                }
            }),
        };
        let count = selection.count();
        let selected = selection.take();
        self.count_visits(visits + selected.len())?;
        let mut kvs = Vec::new();
        for selected in selected {
            let batch_pair = from_batch.remove(&selected.entry.version.row);
            kvs.extend(self.selected_pair(&selected, batch_pair, request.projection));
        }
        let (mut kvs, more) = selection.finish(kvs);
        if request.projection == Projection::KeysOnly {
            kvs.iter_mut().for_each(|kv| *kv = kv.without_value());
        }
        Ok(RangeResponse { revision: self.revision(savepoint), kvs, more, count })
    }

    fn selected_pair(
        &mut self,
        selected: &Selected,
        from_batch: Option<EncodedKv>,
        projection: Projection,
    ) -> Option<EncodedKv> {
        if let Some(kv) = selected.pair_without_value(projection) {
            return Some(self.memory.counted(kv));
        }
        from_batch.or_else(|| self.read_row(selected.entry.version.row))
    }

    fn apply_txn<'p>(
        &mut self,
        txn: &TxnRequest,
        path: &mut impl Iterator<Item = &'p bool>,
        savepoint: Savepoint,
    ) -> Evaluated<TxnResponse> {
        let succeeded = *path.next().expect("the path has an entry for each executed transaction");
        let mut responses = Vec::new();
        for op in txn.branch(succeeded) {
            responses.push(match op {
                Op::Range(request) => OpResponse::Range(self.apply_range(request, savepoint)?),
                Op::Put(request) => OpResponse::Put(self.apply_put(request, savepoint)?),
                Op::Delete(request) => OpResponse::Delete(self.apply_delete(request, savepoint)?),
                Op::Txn(nested) => OpResponse::Txn(self.apply_txn(nested, path, savepoint)?),
            });
        }
        Ok(TxnResponse { revision: self.revision(savepoint), succeeded, responses })
    }

    /// Adds the delete of a live key.
    fn push_delete(&mut self, key: Key, current: Current, savepoint: Savepoint) {
        let row = self.batch.next_row(savepoint);
        let prev_lease = current.lease;
        let prev = Some(self.prev(current));
        self.batch.push(Change { row, key, kind: ChangeKind::Delete, prev, prev_lease });
    }

    /// Returns the revision for the transaction's responses: its own if it has changed a key, otherwise the head.
    fn revision(&self, savepoint: Savepoint) -> Revision {
        if self.batch.changed_since(savepoint) { self.batch.head().next() } else { self.batch.head() }
    }

    // Values.

    /// Returns the previous version for a change, with its pair if that is in the batch or in the cache.
    fn prev(&self, current: Current) -> Prev {
        let row = current.version.row;
        Prev { row, kv: current.kv.or_else(|| self.cache.get(row)) }
    }

    fn pair(&mut self, current: &Current) -> Option<EncodedKv> {
        current.kv.clone().or_else(|| self.read_row(current.version.row))
    }

    /// Returns the pair of a row. If it is neither fetched nor cached, the row is recorded as missing and the request
    /// is evaluated again. A row that was fetched and not found is recorded again: the caller has to find out why.
    fn read_row(&mut self, row: RowId) -> Option<EncodedKv> {
        let kv = self.fetched.get(&row).cloned().flatten().or_else(|| self.cache.get(row));
        if kv.is_none() {
            self.missing.push(row);
        }
        kv
    }
}

impl TxnRequest {
    fn branch(&self, succeeded: bool) -> &[Op] {
        if succeeded { &self.success } else { &self.failure }
    }
}

impl Relation {
    fn holds<T: Ord>(self, left: &T, right: &T) -> bool {
        match self {
            Self::Equal => left == right,
            Self::NotEqual => left != right,
            Self::Greater => left > right,
            Self::Less => left < right,
            Self::Unknown => true,
        }
    }
}
