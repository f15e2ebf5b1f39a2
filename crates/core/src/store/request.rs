//! What can be asked of the store and what it answers, in the domain's words. Requests come validated from `api`.

use bytes::Bytes;

use crate::{
    index::ReadAt,
    types::{EncodedKv, KeyRange, LeaseId, Revision},
};

#[derive(Clone, Debug)]
pub struct RangeRequest {
    pub range: KeyRange,
    pub at: ReadAt,
    /// `None`: all.
    pub limit: Option<usize>,
    /// `None`: in the order of the keys.
    pub sort: Option<Sort>,
    pub filter: RevisionFilter,
    pub projection: Projection,
    pub consistency: Consistency,
}

/// Whether a read must see all that was acknowledged before it, by whichever instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Consistency {
    Linearizable,
    /// What this instance has may do.
    Serializable,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sort {
    pub target: SortTarget,
    pub order: SortOrder,
    pub scope: SortScope,
}

/// What a sort with a limit looks at.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SortScope {
    All,
    /// The first keys of the range, one more than the limit. It is what etcd does when a target is given without an order.
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

/// Inclusive bounds on a pair's revisions.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct RevisionFilter {
    pub mod_min: Option<Revision>,
    pub mod_max: Option<Revision>,
    pub create_min: Option<Revision>,
    pub create_max: Option<Revision>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Projection {
    Whole,
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
    /// The value that the key has; it must exist.
    Keep,
}

#[derive(Clone, Copy, Debug)]
pub enum PutLease {
    Set(Option<LeaseId>),
    /// The lease that the key has; it must exist.
    Keep,
}

#[derive(Clone, Debug)]
pub struct DeleteRequest {
    pub range: KeyRange,
    pub prev_kv: bool,
}

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
    /// One that etcd does not know either; there it holds.
    Unknown,
}

/// What is compared, and with what.
#[derive(Clone, Debug)]
pub enum CompareTarget {
    Version(i64),
    CreateRevision(i64),
    ModRevision(i64),
    Value(Bytes),
    Lease(i64),
    /// One that etcd does not know either; there it counts as equal.
    Unknown,
}

impl TxnRequest {
    /// Whether no branch writes, so that it need not go through the writer.
    pub fn is_read_only(&self) -> bool {
        let reads = |op: &Op| match op {
            Op::Range(_) => true,
            Op::Put(_) | Op::Delete(_) => false,
            Op::Txn(nested) => nested.is_read_only(),
        };
        self.success.iter().chain(&self.failure).all(reads)
    }
}

impl TxnRequest {
    /// Whether it only reads, and all of its reads are serializable.
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
    /// The head when it was answered, also for a read at an older revision.
    pub revision: Revision,
    pub kvs: Vec<EncodedKv>,
    /// Whether the limit cut something off.
    pub more: bool,
    /// Keys in the range at that revision, whatever limit and filters say.
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

/// Whether Compact answers at once or when the rows are gone.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompactionWait {
    ForRevision,
    ForRows,
}
