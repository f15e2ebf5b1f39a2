//! What a sequence is made of, and what a server answers to it.

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, CompactionResponse, DeleteRangeRequest, DeleteRangeResponse, LeaseGrantRequest,
    LeaseGrantResponse, LeaseKeepAliveResponse, LeaseLeasesResponse, LeaseRevokeResponse, LeaseTimeToLiveRequest,
    LeaseTimeToLiveResponse, MemberListResponse, PutRequest, PutResponse, RangeRequest, RangeResponse, ResponseHeader,
    StatusResponse, TxnRequest, TxnResponse, WatchCreateRequest, WatchResponse,
};

use tonic::Code;

/// One step, made on both servers at once.
#[derive(Clone, Debug)]
pub enum Op {
    Put(PutRequest),
    Range(RangeRequest),
    DeleteRange(DeleteRangeRequest),
    Txn(TxnRequest),
    Compact(CompactionRequest),
    Grant(LeaseGrantRequest),
    /// Grants, puts a key with the lease and revokes at once: for leases that would expire during the run. No key where
    /// the server picks the id, as both would pick another.
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
    /// Waits until the server says that every stream has caught up.
    Progress,
}

/// The stream that carries a new watch.
#[derive(Clone, Copy, Debug)]
pub enum On {
    Stream(usize),
    /// A new one for this watch alone.
    Fresh,
    /// The same, for a watch that begins below the compact revision: it is canceled right after it was created.
    Doomed,
}

/// A server's answer, headers masked.
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
    /// The answer to a create or cancel request.
    Watch(WatchResponse),
    /// Nothing is answered to this request.
    Silence,
    Refused {
        code: Code,
        message: String,
    },
    /// What should have come did not.
    Stalled(String),
}

impl Answer {
    /// No operation here makes a sound server answer so, even where both do.
    pub fn is_failure(&self) -> bool {
        match self {
            Self::Stalled(_) => true,
            Self::Refused { code, .. } => matches!(code, Code::Unavailable | Code::Unknown | Code::Internal),
            _ => false,
        }
    }

    /// The revision in the header, by which the harness knows the head.
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
