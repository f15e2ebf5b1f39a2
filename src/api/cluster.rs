//! The Cluster service: the instances that serve the store.

use tonic::{Request, Response, Status};

use super::{Context, status::not_built};
use crate::{
    log::Member,
    proto::server::etcdserverpb::{self as pb, cluster_server::Cluster},
    types::Revision,
};

fn member(member: Member) -> pb::Member {
    pb::Member {
        id: member.id,
        name: member.name,
        // There are no peers, but etcdctl's tables want a column.
        peer_ur_ls: Vec::new(),
        client_ur_ls: member.client_urls,
        is_learner: false,
    }
}

#[tonic::async_trait]
impl Cluster for Context {
    async fn member_list(&self, _: Request<pb::MemberListRequest>) -> Result<Response<pb::MemberListResponse>, Status> {
        let members = self.store.members().await.into_iter().map(member).collect();
        // As in etcd, this header has no revision.
        Ok(Response::new(pb::MemberListResponse { header: self.header(Revision(0)), members }))
    }

    async fn member_add(&self, _: Request<pb::MemberAddRequest>) -> Result<Response<pb::MemberAddResponse>, Status> {
        Err(not_built("MemberAdd"))
    }

    async fn member_remove(
        &self,
        _: Request<pb::MemberRemoveRequest>,
    ) -> Result<Response<pb::MemberRemoveResponse>, Status> {
        Err(not_built("MemberRemove"))
    }

    async fn member_update(
        &self,
        _: Request<pb::MemberUpdateRequest>,
    ) -> Result<Response<pb::MemberUpdateResponse>, Status> {
        Err(not_built("MemberUpdate"))
    }

    async fn member_promote(
        &self,
        _: Request<pb::MemberPromoteRequest>,
    ) -> Result<Response<pb::MemberPromoteResponse>, Status> {
        Err(not_built("MemberPromote"))
    }
}
