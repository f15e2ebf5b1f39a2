//! The operations of a sequence, and the responses to them.

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest,
    LeaseGrantResponse, LeaseKeepAliveResponse, LeaseLeasesResponse, LeaseRevokeResponse, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse, MemberListResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, ResponseHeader,
    StatusResponse, TxnRequest, TxnResponse, WatchCreateRequest, WatchResponse,
};

use tonic::Code;

use super::auth::AuthOp;

/// One operation, sent to both servers at the same time.
#[derive(Clone, Debug)]
pub enum Op {
    Put(PutRequest),
    Range(RangeRequest),
    DeleteRange(DeleteRangeRequest),
    Txn(TxnRequest),
    Compact(CompactionRequest),
    Grant(LeaseGrantRequest),
    /// Grants a lease, puts a key with it and revokes the lease at once, for TTLs that would expire during the run. If
    /// the server chooses the lease id, no key is put, because the two servers choose different ids.
    GrantBriefly(LeaseGrantRequest),
    Revoke {
        id: i64,
    },
    KeepAlive {
        ids: Vec<i64>,
    },
    TimeToLive(LeaseTimeToLiveRequest),
    Leases,
    Status,
    Members,
    Watch {
        on: On,
        create: WatchCreateRequest,
    },
    CancelWatch {
        stream: usize,
        id: i64,
    },
    /// Waits until the server reports that every stream is synced.
    Progress,
    Auth(AuthOp),
}

/// The stream that carries a new watch.
#[derive(Clone, Copy, Debug)]
pub enum On {
    Stream(usize),
    /// A new stream for this watch alone.
    Fresh,
    /// A new stream for a watch that starts below the compact revision and is canceled right after its creation.
    Doomed,
}

/// A server's response with masked headers.
#[derive(Clone, Debug, PartialEq)]
pub enum Answer {
    Put(PutResponse),
    Range(RangeResponse),
    DeleteRange(DeleteRangeResponse),
    Txn(TxnResponse),
    Compact(CompactionResponse),
    Grant(LeaseGrantResponse),
    GrantBriefly {
        grant: LeaseGrantResponse,
        put: Option<PutResponse>,
        revoke: LeaseRevokeResponse,
    },
    Revoke(LeaseRevokeResponse),
    KeepAlive(Vec<LeaseKeepAliveResponse>),
    TimeToLive(LeaseTimeToLiveResponse),
    Leases(LeaseLeasesResponse),
    Status(StatusResponse),
    Members(MemberListResponse),
    /// The response to a create or cancel request.
    Watch(WatchResponse),
    Auth {
        header: Option<ResponseHeader>,
        /// The other fields.
        rest: String,
    },
    /// The request has no response.
    Silence,
    Refused {
        code: Code,
        message: String,
    },
    /// An expected response did not come.
    Stalled(String),
}

impl Answer {
    /// Returns whether the response is a failure of the server or the harness, even if both servers return it.
    pub fn is_failure(&self) -> bool {
        match self {
            Self::Stalled(_) => true,
            Self::Refused { code, message } => {
                // etcd sends this text without a code.
                matches!(code, Code::Unavailable | Code::Unknown | Code::Internal)
                    && message != "auth: authentication failed, password was given for no password user"
            }
            _ => false,
        }
    }

    /// Returns the revision in the header, from which the harness knows the current revision.
    pub fn revision(&self) -> Option<i64> {
        let header = match self {
            Self::Put(it) => &it.header,
            Self::Range(it) => &it.header,
            Self::DeleteRange(it) => &it.header,
            Self::Txn(it) => &it.header,
            Self::Compact(it) => &it.header,
            Self::Grant(it) => &it.header,
            Self::GrantBriefly { revoke, .. } => &revoke.header,
            Self::Revoke(it) => &it.header,
            Self::KeepAlive(it) => &it.last()?.header,
            Self::TimeToLive(it) => &it.header,
            Self::Leases(it) => &it.header,
            Self::Status(it) => &it.header,
            Self::Members(it) => &it.header,
            Self::Watch(it) => &it.header,
            Self::Auth { header, .. } => header,
            Self::Silence | Self::Refused { .. } | Self::Stalled(_) => &None,
        };
        header.map(|it: ResponseHeader| it.revision)
    }
}

impl From<tonic::Status> for Answer {
    fn from(status: tonic::Status) -> Self {
        Self::Refused { code: status.code(), message: status.message().to_owned() }
    }
}
