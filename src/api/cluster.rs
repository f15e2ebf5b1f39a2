//! The Cluster service: the instances that serve the store.

use tonic::{Request, Response, Status};

use super::{
    Context,
    status::{MEMBER_NOT_FOUND, MEMBER_NOT_LEARNER, MEMBER_URLS_INVALID, NOT_ENOUGH_MEMBERS},
};
use orlop_core::{log::Member, types::Revision};
use orlop_wire::proto::server::etcdserverpb::{self as pb, cluster_server::Cluster};

fn member(member: Member) -> pb::Member {
    pb::Member {
        id: member.id,
        name: member.name,
        // There are no peers, but clients read the first of these URLs. As in kine, they are the client URLs.
        peer_ur_ls: member.client_urls.clone(),
        client_ur_ls: member.client_urls,
        is_learner: false,
    }
}

#[tonic::async_trait]
impl Cluster for Context {
    /// Needs no user: clients find the members before they log in, for example Patroni.
    async fn member_list(&self, _: Request<pb::MemberListRequest>) -> Result<Response<pb::MemberListResponse>, Status> {
        let members = self.store.members().await.into_iter().map(member).collect();
        // This header has no revision, as in etcd.
        Ok(Response::new(pb::MemberListResponse { header: self.header(Revision(0)), members }))
    }

    /// An instance joins when it starts on the database, so this call is not needed.
    async fn member_add(
        &self,
        request: Request<pb::MemberAddRequest>,
    ) -> Result<Response<pb::MemberAddResponse>, Status> {
        // etcd checks the URLs first, but those of an update afterwards.
        check_urls(&request.get_ref().peer_ur_ls)?;
        self.check_root(&request).await?;
        Err(Status::unimplemented("orlop: a member joins when it is started on the same database"))
    }

    async fn member_remove(
        &self,
        request: Request<pb::MemberRemoveRequest>,
    ) -> Result<Response<pb::MemberRemoveResponse>, Status> {
        self.check_root(&request).await?;
        self.check_member(request.into_inner().id).await?;
        if self.store.members().await.len() == 1 {
            return Err(NOT_ENOUGH_MEMBERS.into());
        }
        Err(Status::unimplemented("orlop: a member leaves when it is stopped"))
    }

    /// Only peer URLs can be updated in etcd, and Orlop has no peers.
    async fn member_update(
        &self,
        request: Request<pb::MemberUpdateRequest>,
    ) -> Result<Response<pb::MemberUpdateResponse>, Status> {
        self.check_root(&request).await?;
        let request = request.into_inner();
        check_urls(&request.peer_ur_ls)?;
        self.check_member(request.id).await?;
        Err(Status::unimplemented("orlop: the URLs of a member are those of its advertise-client-urls"))
    }

    async fn member_promote(
        &self,
        request: Request<pb::MemberPromoteRequest>,
    ) -> Result<Response<pb::MemberPromoteResponse>, Status> {
        self.check_root(&request).await?;
        self.check_member(request.into_inner().id).await?;
        Err(MEMBER_NOT_LEARNER.into())
    }
}

impl Context {
    async fn check_member(&self, id: u64) -> Result<(), Status> {
        let known = self.store.members().await.iter().any(|member| member.id == id);
        if known { Ok(()) } else { Err(MEMBER_NOT_FOUND.into()) }
    }
}

fn check_urls(urls: &[String]) -> Result<(), Status> {
    let is_url = |url: &String| {
        let address = url.strip_prefix("http://").or_else(|| url.strip_prefix("https://"));
        address
            .and_then(|address| address.rsplit_once(':'))
            .is_some_and(|(host, port)| !host.is_empty() && port.parse::<u16>().is_ok())
    };
    if !urls.is_empty() && urls.iter().all(is_url) { Ok(()) } else { Err(MEMBER_URLS_INVALID.into()) }
}
