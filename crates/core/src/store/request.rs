//! Requests to the store and its responses, in domain types. The server has validated the requests.

use bytes::Bytes;

use super::reader::pairs::FEW_ROWS_MAX;
use crate::{
    index::ReadAt,
    types::{EncodedKv, KeyRange, LeaseId, Revision},
};

/// A read of a range.
#[derive(Clone, Debug)]
pub struct RangeRequest {
    pub range: KeyRange,
    pub at: ReadAt,
    /// `None`: no limit.
    pub limit: Option<usize>,
    /// `None`: key order.
    pub sort: Option<Sort>,
    pub filter: RevisionFilter,
    pub projection: Projection,
    pub consistency: Consistency,
}

/// Whether a read must see everything that any instance acknowledged before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    Linearizable,
    /// The state of this instance is sufficient, even if it is not the latest.
    Serializable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sort {
    pub target: SortTarget,
    pub order: SortOrder,
    pub scope: SortScope,
}

/// The keys that a sort with a limit considers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortScope {
    All,
    /// The first limit + 1 keys of the range. etcd does this if a sort target is given without an order.
    FirstKeys,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortTarget {
    Key,
    Version,
    CreateRevision,
    ModRevision,
    Value,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortOrder {
    Ascend,
    Descend,
}

impl RangeRequest {
    /// Returns whether the response may be a long list of keys without values. These are copied, so they take as much memory
    /// as values, although no row is read.
    pub fn lists_keys(&self) -> bool {
        self.projection == Projection::KeysOnly
            && !matches!(self.range, KeyRange::Single(_))
            && self.limit.is_none_or(|limit| limit > FEW_ROWS_MAX)
    }
}

/// Inclusive bounds on a pair's revisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RevisionFilter {
    pub mod_min: Option<Revision>,
    pub mod_max: Option<Revision>,
    pub create_min: Option<Revision>,
    pub create_max: Option<Revision>,
}

/// The parts of the result that a read returns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    Full,
    KeysOnly,
    CountOnly,
}

#[derive(Clone, Debug)]
pub struct PutRequest {
    pub key: Bytes,
    pub value: PutValue,
    pub lease: PutLease,
    pub prev_kv: bool,
}

#[derive(Clone, Debug)]
pub enum PutValue {
    New(Bytes),
    /// Keeps the value; the key must exist.
    Keep,
}

#[derive(Clone, Copy, Debug)]
pub enum PutLease {
    Set(Option<LeaseId>),
    /// Keeps the lease; the key must exist.
    Keep,
}

#[derive(Clone, Debug)]
pub struct DeleteRequest {
    pub range: KeyRange,
    pub prev_kv: bool,
}

/// A transaction. Executes the `success` operations if all compares hold, otherwise the `failure` operations.
#[derive(Clone, Debug)]
pub struct TxnRequest {
    pub compares: Vec<Compare>,
    pub success: Vec<Op>,
    pub failure: Vec<Op>,
}

#[derive(Clone, Debug)]
pub enum Op {
    Range(RangeRequest),
    Put(PutRequest),
    Delete(DeleteRequest),
    Txn(TxnRequest),
}

#[derive(Clone, Debug)]
pub struct Compare {
    pub range: KeyRange,
    pub relation: Relation,
    pub target: CompareTarget,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Relation {
    Equal,
    NotEqual,
    Greater,
    Less,
    /// A relation that etcd does not know. It holds, as in etcd.
    Unknown,
}

/// The compared field and the value that it is compared with.
#[derive(Clone, Debug)]
pub enum CompareTarget {
    Version(i64),
    CreateRevision(i64),
    ModRevision(i64),
    Value(Bytes),
    Lease(i64),
    /// A target that etcd does not know. It compares as equal, as in etcd.
    Unknown,
}

impl TxnRequest {
    /// Returns whether no branch writes. Such a transaction bypasses the writer.
    pub fn is_read_only(&self) -> bool {
        let reads = |op: &Op| match op {
            Op::Range(_) => true,
            Op::Put(_) | Op::Delete(_) => false,
            Op::Txn(nested) => nested.is_read_only(),
        };
        self.success.iter().chain(&self.failure).all(reads)
    }

    /// Returns whether an operation [lists keys](RangeRequest::lists_keys).
    pub fn lists_keys(&self) -> bool {
        self.success.iter().chain(&self.failure).any(|op| match op {
            Op::Range(range) => range.lists_keys(),
            Op::Put(_) | Op::Delete(_) => false,
            Op::Txn(nested) => nested.lists_keys(),
        })
    }

    /// Returns whether all operations are serializable reads. Returns false for a transaction without operations or
    /// with a nested transaction.
    pub fn is_serializable(&self) -> bool {
        let serializable = |op: &Op| match op {
            Op::Range(range) => range.consistency == Consistency::Serializable,
            Op::Put(_) | Op::Delete(_) | Op::Txn(_) => false,
        };
        let mut ops = self.success.iter().chain(&self.failure).peekable();
        ops.peek().is_some() && ops.all(serializable)
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RangeResponse {
    /// The head at the time of the read, even if an older revision was read.
    pub revision: Revision,
    pub kvs: Vec<EncodedKv>,
    /// Whether the limit cut off some keys.
    pub more: bool,
    /// Number of keys in the range at the requested revision, regardless of limit and filters.
    pub count: usize,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PutResponse {
    pub revision: Revision,
    pub prev_kv: Option<EncodedKv>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DeleteResponse {
    pub revision: Revision,
    pub deleted: usize,
    pub prev_kvs: Vec<EncodedKv>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TxnResponse {
    pub revision: Revision,
    pub succeeded: bool,
    pub responses: Vec<OpResponse>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OpResponse {
    Range(RangeResponse),
    Put(PutResponse),
    Delete(DeleteResponse),
    Txn(TxnResponse),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LeaseGranted {
    pub revision: Revision,
    pub id: LeaseId,
    pub ttl_secs: i64,
}

/// Whether a lease is returned with its keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LeaseKeys {
    Returned,
    Omitted,
}

/// Whether a compaction request returns when the compact revision is recorded or after the rows are deleted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionWait {
    ForRevision,
    ForRows,
}
