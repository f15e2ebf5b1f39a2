//! The Maintenance service: Status, Alarm, Defragment, Hash, HashKV, Snapshot, MoveLeader and Downgrade.

use tonic::{Request, Response, Status};

use super::{
    CLUSTER_VERSION, Context, ETCD_VERSION, RAFT_TERM, Responses, STORAGE_VERSION,
    status::{BAD_LEADER_TRANSFEREE, DOWNGRADE_FORMAT, DOWNGRADE_TARGET, NO_DOWNGRADE, NOT_LEADER, from_store},
};
use orlop_core::{
    log::{Alarm, AlarmChange, AlarmKind, Cause, Size},
    store,
    types::Revision,
};
use orlop_wire::proto::server::etcdserverpb::{
    self as pb, AlarmType, alarm_request::AlarmAction, downgrade_request::DowngradeAction,
    maintenance_server::Maintenance,
};

#[tonic::async_trait]
impl Maintenance for Context {
    /// Needs a user, as in the newest etcd. Users whom this instance knows are answered without the database.
    async fn status(&self, request: Request<pb::StatusRequest>) -> Result<Response<pb::StatusResponse>, Status> {
        // A token that is sent although Auth is disabled would be checked with the database.
        if self.store.is_auth_enabled() {
            let caller = self.caller_of(&request).await?;
            self.store.check_known_user(&caller).await.map_err(from_store)?;
        }
        let head = self.store.head();
        // As in etcd, the call succeeds if the database is unavailable, and the response contains the error.
        let (size, failure) = match self.store.size().await {
            Ok(size) => (size, (!self.store.accepts_writes()).then_some(store::Error::Unavailable)),
            Err(error) => (Size { total: 0, in_use: 0, disk_free: None, wal: None }, Some(error)),
        };
        let leader = if failure.is_none() { self.store.leader() } else { 0 };
        let failure = failure.map(|error| from_store(error).message().to_owned());
        let errors = failure.into_iter().chain(self.store.alarms().into_iter().map(alarm_text)).collect();
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
            db_size_quota: self.store.quota().cast_signed(),
            downgrade_info: Some(pb::DowngradeInfo::default()),
        }))
    }

    async fn alarm(&self, request: Request<pb::AlarmRequest>) -> Result<Response<pb::AlarmResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        // The checks also bring the newest alarms: a list is linearizable, as in etcd.
        if request.get_ref().action() == AlarmAction::Get {
            self.store.check_user(&caller).await.map_err(from_store)?;
        } else {
            self.store.check_root(&caller).await.map_err(from_store)?;
        }
        let request = request.into_inner();
        let requested = alarm_kind(request.alarm());
        let is_requested = |kind: AlarmKind| request.alarm() == AlarmType::None || requested == Some(kind);
        let alarms = match (request.action(), requested) {
            (AlarmAction::Get, _) => self.store.alarms().into_iter().filter(|alarm| is_requested(alarm.kind)).collect(),
            (AlarmAction::Activate, Some(kind)) => {
                let alarm = Alarm { member_id: request.member_id, kind };
                self.store
                    .change_alarm(&caller, AlarmChange::Raise { alarm, cause: Cause::Client })
                    .await
                    .map_err(from_store)?;
                vec![alarm]
            }
            (AlarmAction::Deactivate, Some(kind)) => {
                let alarm = Alarm { member_id: request.member_id, kind };
                let is_raised = self.store.alarms().contains(&alarm);
                if is_raised {
                    self.store.change_alarm(&caller, AlarmChange::Clear { alarm }).await.map_err(from_store)?;
                }
                is_raised.then_some(alarm).into_iter().collect()
            }
            (AlarmAction::Activate | AlarmAction::Deactivate, None) => Vec::new(),
        };
        let alarms = alarms.into_iter().map(alarm_member).collect();
        Ok(Response::new(pb::AlarmResponse { header: self.header(self.store.head()), alarms }))
    }

    async fn defragment(
        &self,
        request: Request<pb::DefragmentRequest>,
    ) -> Result<Response<pb::DefragmentResponse>, Status> {
        self.check_root(&request).await?;
        self.store.defragment().await.map_err(from_store)?;
        // Without a header, as in etcd.
        Ok(Response::new(pb::DefragmentResponse { header: None }))
    }

    async fn hash(&self, request: Request<pb::HashRequest>) -> Result<Response<pb::HashResponse>, Status> {
        self.check_root(&request).await?;
        let hashed = self.store.hash_all().await.map_err(from_store)?;
        Ok(Response::new(pb::HashResponse { header: self.header(self.store.head()), hash: hashed }))
    }

    async fn hash_kv(&self, request: Request<pb::HashKvRequest>) -> Result<Response<pb::HashKvResponse>, Status> {
        self.check_root(&request).await?;
        let revision = request.into_inner().revision;
        let hashed = self.store.hash((revision != 0).then_some(Revision(revision))).await.map_err(from_store)?;
        Ok(Response::new(pb::HashKvResponse {
            header: self.header(self.store.head()),
            hash: hashed.hash,
            compact_revision: hashed.compact_revision.map_or(-1, |revision| revision.0),
            hash_revision: hashed.revision.0,
        }))
    }

    type SnapshotStream = Responses<pb::SnapshotResponse>;

    async fn snapshot(&self, request: Request<pb::SnapshotRequest>) -> Result<Response<Self::SnapshotStream>, Status> {
        self.check_root(&request).await?;
        self.snapshots.send().await
    }

    /// Every instance accepts writes, so there is no leader to move. The error text is that of etcd for a member that
    /// cannot become the leader.
    async fn move_leader(
        &self,
        request: Request<pb::MoveLeaderRequest>,
    ) -> Result<Response<pb::MoveLeaderResponse>, Status> {
        self.check_root(&request).await?;
        let (target, leader) = (request.into_inner().target_id, self.store.leader());
        if leader != self.store.identity().member_id {
            return Err(NOT_LEADER.into());
        }
        if target != leader {
            return Err(BAD_LEADER_TRANSFEREE.into());
        }
        Ok(Response::new(pb::MoveLeaderResponse { header: None }))
    }

    /// The storage has no older version, so there is nothing to enable.
    async fn downgrade(
        &self,
        request: Request<pb::DowngradeRequest>,
    ) -> Result<Response<pb::DowngradeResponse>, Status> {
        self.check_root(&request).await?;
        let request = request.into_inner();
        if request.action() == DowngradeAction::Cancel {
            return Err(NO_DOWNGRADE.into());
        }
        let target = minor_version(&request.version).ok_or(DOWNGRADE_FORMAT)?;
        let current = minor_version(CLUSTER_VERSION).unwrap_or_default();
        if target.0 != current.0 || target.1 + 1 != current.1 {
            return Err(DOWNGRADE_TARGET.into());
        }
        match request.action() {
            DowngradeAction::Validate => Ok(Response::new(pb::DowngradeResponse {
                header: self.header(self.store.head()),
                version: CLUSTER_VERSION.to_owned(),
            })),
            DowngradeAction::Enable | DowngradeAction::Cancel => {
                Err(Status::unimplemented("orlop: there is no older storage format to downgrade to"))
            }
        }
    }
}

fn alarm_kind(alarm: AlarmType) -> Option<AlarmKind> {
    match alarm {
        AlarmType::None => None,
        AlarmType::Nospace => Some(AlarmKind::NoSpace),
        AlarmType::Corrupt => Some(AlarmKind::Corrupt),
    }
}

fn alarm_member(alarm: Alarm) -> pb::AlarmMember {
    let kind = match alarm.kind {
        AlarmKind::NoSpace => AlarmType::Nospace,
        AlarmKind::Corrupt => AlarmType::Corrupt,
    };
    pb::AlarmMember { member_id: alarm.member_id, alarm: kind.into() }
}

/// Formats a raised alarm as in etcd's Status, which leaves out the member 0.
fn alarm_text(alarm: Alarm) -> String {
    let member = if alarm.member_id == 0 { String::new() } else { format!("memberID:{} ", alarm.member_id) };
    format!("{member}alarm:{} ", alarm.kind.name())
}

/// Returns MAJOR.MINOR of MAJOR.MINOR[.PATCH].
fn minor_version(text: &str) -> Option<(u64, u64)> {
    let mut parts = text.split('.').map(|part| part.parse::<u64>().ok());
    let version = (parts.next()??, parts.next()??);
    match parts.next() {
        None | Some(Some(_)) if parts.next().is_none() => Some(version),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn alarms_are_written_as_by_etcd() {
        for (member_id, kind, want) in [
            (7, AlarmKind::NoSpace, "memberID:7 alarm:NOSPACE "),
            (7, AlarmKind::Corrupt, "memberID:7 alarm:CORRUPT "),
            (0, AlarmKind::NoSpace, "alarm:NOSPACE "),
        ] {
            assert_eq!(alarm_text(Alarm { member_id, kind }), want);
        }
    }
}
