//! The Maintenance service: Status, and the list of alarms, of which there are none yet.

use tonic::{Request, Response, Status};

use super::{Context, ETCD_VERSION, RAFT_TERM, STORAGE_VERSION, status::not_built};
use crate::{
    log::Size,
    proto::server::etcdserverpb::{self as pb, alarm_request::AlarmAction, maintenance_server::Maintenance},
};

type SnapshotStream = futures_util::stream::Empty<Result<pb::SnapshotResponse, Status>>;

#[tonic::async_trait]
impl Maintenance for Context {
    async fn status(&self, _: Request<pb::StatusRequest>) -> Result<Response<pb::StatusResponse>, Status> {
        let head = self.store.head();
        // As in etcd, one that is cut off says so and still answers.
        let (size, leader, errors) = match self.store.size().await {
            Ok(size) => (size, self.store.leader(), Vec::new()),
            Err(error) => (Size { total: 0, in_use: 0 }, 0, vec![Status::from(error).message().to_owned()]),
        };
        let applied = head.0.cast_unsigned();
        Ok(Response::new(pb::StatusResponse {
            header: self.header(head),
            version: ETCD_VERSION.to_owned(),
            db_size: size.total,
            db_size_in_use: size.in_use,
            leader,
            raft_index: applied,
            raft_applied_index: applied,
            raft_term: RAFT_TERM,
            errors,
            is_learner: false,
            storage_version: STORAGE_VERSION.to_owned(),
            db_size_quota: 0,
            downgrade_info: Some(pb::DowngradeInfo::default()),
        }))
    }

    async fn alarm(&self, request: Request<pb::AlarmRequest>) -> Result<Response<pb::AlarmResponse>, Status> {
        match request.into_inner().action() {
            AlarmAction::Get => {
                let header = self.header(self.store.head());
                Ok(Response::new(pb::AlarmResponse { header, alarms: Vec::new() }))
            }
            AlarmAction::Activate | AlarmAction::Deactivate => Err(not_built("Alarm other than GET")),
        }
    }

    async fn defragment(&self, _: Request<pb::DefragmentRequest>) -> Result<Response<pb::DefragmentResponse>, Status> {
        Err(not_built("Defragment"))
    }

    async fn hash(&self, _: Request<pb::HashRequest>) -> Result<Response<pb::HashResponse>, Status> {
        Err(not_built("Hash"))
    }

    async fn hash_kv(&self, _: Request<pb::HashKvRequest>) -> Result<Response<pb::HashKvResponse>, Status> {
        Err(not_built("HashKV"))
    }

    type SnapshotStream = SnapshotStream;

    async fn snapshot(&self, _: Request<pb::SnapshotRequest>) -> Result<Response<SnapshotStream>, Status> {
        Err(not_built("Snapshot"))
    }

    async fn move_leader(&self, _: Request<pb::MoveLeaderRequest>) -> Result<Response<pb::MoveLeaderResponse>, Status> {
        Err(not_built("MoveLeader"))
    }

    async fn downgrade(&self, _: Request<pb::DowngradeRequest>) -> Result<Response<pb::DowngradeResponse>, Status> {
        Err(not_built("Downgrade"))
    }
}
