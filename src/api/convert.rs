//! Conversion between wire messages and the store's requests and responses. Includes all validation of requests, except
//! of their size ([`super::kv`]), and of the numbers of their fields and of all operations in nested transactions
//! ([`super::grpc::field_limits`]).

use tonic::Status;

use super::{Context, interval_check::check_intervals, status::Invalid};
use orlop_core::{
    auth::{Access, Permissions},
    index::ReadAt,
    store::request::{
        Compare, CompareTarget, Consistency, DeleteRequest, DeleteResponse, Op, OpResponse, Projection, PutLease,
        PutRequest, PutResponse, PutValue, RangeRequest, RangeResponse, Relation, RevisionFilter, Sort, SortOrder,
        SortScope, SortTarget, TxnRequest, TxnResponse,
    },
    types::{EncodedKv, KeyRange, LeaseId, Revision},
};
use orlop_wire::proto::server::{
    authpb::{Permission, permission::Type},
    etcdserverpb::{self as pb, compare::TargetUnion, range_request, request_op::Request, response_op::Response},
};

type Checked<T> = Result<T, Invalid>;

/// Converts a Range call. A revision of 0 or less means the head.
pub fn range(request: &pb::RangeRequest) -> Checked<RangeRequest> {
    range_at(request, if request.revision > 0 { ReadAt::Revision(Revision(request.revision)) } else { ReadAt::Latest })
}

/// Converts a Range in a transaction. Only revision 0 means the head.
fn range_in_txn(request: &pb::RangeRequest) -> Checked<RangeRequest> {
    range_at(request, if request.revision == 0 { ReadAt::Latest } else { ReadAt::Revision(Revision(request.revision)) })
}

fn range_at(request: &pb::RangeRequest, at: ReadAt) -> Checked<RangeRequest> {
    Ok(RangeRequest {
        range: key_range(&request.key, &request.range_end)?,
        at,
        limit: usize::try_from(request.limit).ok().filter(|limit| *limit > 0),
        sort: sort(request)?,
        filter: RevisionFilter {
            mod_min: bound(request.min_mod_revision),
            mod_max: bound(request.max_mod_revision),
            create_min: bound(request.min_create_revision),
            create_max: bound(request.max_create_revision),
        },
        projection: match (request.count_only, request.keys_only) {
            (true, _) => Projection::CountOnly,
            (false, true) => Projection::KeysOnly,
            (false, false) => Projection::Full,
        },
        consistency: if request.serializable { Consistency::Serializable } else { Consistency::Linearizable },
    })
}

fn sort(request: &pb::RangeRequest) -> Checked<Option<Sort>> {
    let invalid = |_| Invalid::SortOption;
    let order = range_request::SortOrder::try_from(request.sort_order).map_err(invalid)?;
    let target = match range_request::SortTarget::try_from(request.sort_target).map_err(invalid)? {
        range_request::SortTarget::Key => SortTarget::Key,
        range_request::SortTarget::Version => SortTarget::Version,
        range_request::SortTarget::Create => SortTarget::CreateRevision,
        range_request::SortTarget::Mod => SortTarget::ModRevision,
        range_request::SortTarget::Value => SortTarget::Value,
    };
    let filtered =
        [request.min_mod_revision, request.max_mod_revision, request.min_create_revision, request.max_create_revision];
    let (order, scope) = match order {
        range_request::SortOrder::None if filtered == [0; 4] => (SortOrder::Ascend, SortScope::FirstKeys),
        range_request::SortOrder::None | range_request::SortOrder::Ascend => (SortOrder::Ascend, SortScope::All),
        range_request::SortOrder::Descend => (SortOrder::Descend, SortScope::All),
    };
    let is_key_order = target == SortTarget::Key && order == SortOrder::Ascend;
    Ok((!is_key_order).then_some(Sort { target, order, scope }))
}

fn bound(revision: i64) -> Option<Revision> {
    (revision != 0).then_some(Revision(revision))
}

pub(super) fn key_range(key: &[u8], range_end: &[u8]) -> Checked<KeyRange> {
    if key.is_empty() { Err(Invalid::KeyMissing) } else { Ok(KeyRange::from_wire(key, range_end)) }
}

pub fn put(request: pb::PutRequest) -> Checked<PutRequest> {
    if request.key.is_empty() {
        return Err(Invalid::KeyMissing);
    }
    if request.ignore_value && !request.value.is_empty() {
        return Err(Invalid::ValueProvided);
    }
    if request.ignore_lease && request.lease != 0 {
        return Err(Invalid::LeaseProvided);
    }
    Ok(PutRequest {
        key: request.key,
        value: if request.ignore_value { PutValue::Keep } else { PutValue::New(request.value) },
        lease: if request.ignore_lease { PutLease::Keep } else { PutLease::Set(LeaseId::from_wire(request.lease)) },
        prev_kv: request.prev_kv,
    })
}

pub fn delete(request: &pb::DeleteRangeRequest) -> Checked<DeleteRequest> {
    Ok(DeleteRequest { range: key_range(&request.key, &request.range_end)?, prev_kv: request.prev_kv })
}

/// Checks and converts a transaction, including nested transactions. As in etcd, this happens before the store is read.
pub fn txn(request: pb::TxnRequest, ops_max: usize) -> Checked<TxnRequest> {
    check_count(&request, ops_max)?;
    // Intervals are checked on the wire form, before the requests are converted.
    let distinct = check_intervals(&request.success).and(check_intervals(&request.failure)).map(drop);
    let request = txn_level(request, ops_max)?;
    distinct?;
    Ok(request)
}

/// Converts one transaction. Its nested transactions may have as many operations as are left of its limit.
fn txn_level(request: pb::TxnRequest, ops_max: usize) -> Checked<TxnRequest> {
    let ops_left = check_count(&request, ops_max)?;
    let branch =
        |ops: Vec<pb::RequestOp>| ops.into_iter().map(|op| self::op(op, ops_left)).collect::<Checked<Vec<Op>>>();
    Ok(TxnRequest {
        compares: request.compare.into_iter().map(compare).collect::<Checked<_>>()?,
        success: branch(request.success)?,
        failure: branch(request.failure)?,
    })
}

/// Returns the number of operations left for nested transactions.
fn check_count(request: &pb::TxnRequest, ops_max: usize) -> Checked<usize> {
    let ops = request.compare.len().max(request.success.len()).max(request.failure.len());
    ops_max.checked_sub(ops).ok_or(Invalid::TooManyOps)
}

fn op(op: pb::RequestOp, ops_max: usize) -> Checked<Op> {
    Ok(match op.request.ok_or(Invalid::EmptyOp)? {
        Request::RequestRange(request) => Op::Range(range_in_txn(&request)?),
        Request::RequestPut(request) => Op::Put(put(request)?),
        Request::RequestDeleteRange(request) => Op::Delete(delete(&request)?),
        Request::RequestTxn(request) => Op::Txn(txn_level(request, ops_max)?),
    })
}

fn compare(compare: pb::Compare) -> Checked<Compare> {
    use pb::compare::{CompareResult, CompareTarget as Target};
    let range = key_range(&compare.key, &compare.range_end)?;
    let relation = match CompareResult::try_from(compare.result) {
        Ok(CompareResult::Equal) => Relation::Equal,
        Ok(CompareResult::NotEqual) => Relation::NotEqual,
        Ok(CompareResult::Greater) => Relation::Greater,
        Ok(CompareResult::Less) => Relation::Less,
        Err(_) => Relation::Unknown,
    };
    let Ok(target) = Target::try_from(compare.target) else {
        return Ok(Compare { range, relation, target: CompareTarget::Unknown });
    };
    // A union that is absent or belongs to another target counts as 0 or empty.
    let target = match (target, compare.target_union) {
        (Target::Version, Some(TargetUnion::Version(number))) => CompareTarget::Version(number),
        (Target::Version, _) => CompareTarget::Version(0),
        (Target::Create, Some(TargetUnion::CreateRevision(number))) => CompareTarget::CreateRevision(number),
        (Target::Create, _) => CompareTarget::CreateRevision(0),
        (Target::Mod, Some(TargetUnion::ModRevision(number))) => CompareTarget::ModRevision(number),
        (Target::Mod, _) => CompareTarget::ModRevision(0),
        (Target::Lease, Some(TargetUnion::Lease(number))) => CompareTarget::Lease(number),
        (Target::Lease, _) => CompareTarget::Lease(0),
        (Target::Value, Some(TargetUnion::Value(value))) => CompareTarget::Value(value),
        (Target::Value, _) => CompareTarget::Value(bytes::Bytes::new()),
    };
    Ok(Compare { range, relation, target })
}

/// Returns the header of a response inside a transaction. As in etcd, it has only the revision.
fn inner_header(revision: Revision) -> Option<pb::ResponseHeader> {
    Some(pb::ResponseHeader { revision: revision.0, ..Default::default() })
}

impl Context {
    pub(super) fn range_response(&self, response: RangeResponse) -> pb::RangeResponse {
        let header = self.header(response.revision);
        range_response(response, header)
    }

    pub(super) fn put_response(&self, response: PutResponse) -> pb::PutResponse {
        let header = self.header(response.revision);
        put_response(response, header)
    }

    pub(super) fn delete_response(&self, response: DeleteResponse) -> pb::DeleteRangeResponse {
        let header = self.header(response.revision);
        delete_response(response, header)
    }

    pub(super) fn txn_response(&self, response: TxnResponse) -> pb::TxnResponse {
        let header = self.header(response.revision);
        txn_response(response, header)
    }
}

fn range_response(response: RangeResponse, header: Option<pb::ResponseHeader>) -> pb::RangeResponse {
    pb::RangeResponse {
        header,
        kvs: response.kvs.into_iter().map(EncodedKv::into_bytes).collect(),
        more: response.more,
        count: wire_count(response.count),
    }
}

fn put_response(response: PutResponse, header: Option<pb::ResponseHeader>) -> pb::PutResponse {
    pb::PutResponse { header, prev_kv: response.prev_kv.map(EncodedKv::into_bytes).unwrap_or_default() }
}

fn delete_response(response: DeleteResponse, header: Option<pb::ResponseHeader>) -> pb::DeleteRangeResponse {
    pb::DeleteRangeResponse {
        header,
        deleted: wire_count(response.deleted),
        prev_kvs: response.prev_kvs.into_iter().map(EncodedKv::into_bytes).collect(),
    }
}

fn txn_response(response: TxnResponse, header: Option<pb::ResponseHeader>) -> pb::TxnResponse {
    let responses = response.responses.into_iter().map(|response| pb::ResponseOp {
        response: Some(match response {
            OpResponse::Range(response) => {
                let header = inner_header(response.revision);
                Response::ResponseRange(range_response(response, header))
            }
            OpResponse::Put(response) => {
                let header = inner_header(response.revision);
                Response::ResponsePut(put_response(response, header))
            }
            OpResponse::Delete(response) => {
                let header = inner_header(response.revision);
                Response::ResponseDeleteRange(delete_response(response, header))
            }
            OpResponse::Txn(response) => {
                Response::ResponseTxn(txn_response(response, Some(pb::ResponseHeader::default())))
            }
        }),
    });
    pb::TxnResponse { header, succeeded: response.succeeded, responses: responses.collect() }
}

fn wire_count(count: usize) -> i64 {
    i64::try_from(count).unwrap_or(i64::MAX)
}

/// Converts the type of a permission.
pub(crate) fn access(number: i32) -> Result<Access, Status> {
    match Type::try_from(number) {
        Ok(Type::Read) => Ok(Access::Read),
        Ok(Type::Write) => Ok(Access::Write),
        Ok(Type::Readwrite) => Ok(Access::ReadWrite),
        Err(_) => Err(Status::invalid_argument(format!(
            "orlop: permission type {number} is not READ (0), WRITE (1) or READWRITE (2)"
        ))),
    }
}

fn permission_type(access: Access) -> Type {
    match access {
        Access::Read => Type::Read,
        Access::Write => Type::Write,
        Access::ReadWrite => Type::Readwrite,
    }
}

/// Returns permissions in the order of their keys.
pub(crate) fn listed(permissions: &Permissions) -> Vec<Permission> {
    let mut listed: Vec<Permission> = permissions
        .iter()
        .map(|(range, access)| {
            let (key, range_end) = range.to_wire();
            let perm_type = permission_type(*access).into();
            Permission { perm_type, key: key.to_vec().into(), range_end: range_end.to_vec().into() }
        })
        .collect();
    listed.sort_by(|a, b| (&a.key, &a.range_end).cmp(&(&b.key, &b.range_end)));
    listed
}
