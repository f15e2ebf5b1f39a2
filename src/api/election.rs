//! The Election service: the oldest entry of a queue is the leader, and its value is the published value. See
//! [`super::lock_queue`].

use std::sync::Arc;

use bytes::Bytes;
use tonic::{Request, Response, Status};

use super::{
    Context, Responses,
    lock_queue::{Queue, Watch, created_at, oldest_entry, prefix, remove_if, to_unknown, txn_if},
    status::{ELECTION_LEADER_MISSING, ELECTION_NO_LEADER, ELECTION_NOT_LEADER},
    tasks::unfold,
};
use orlop_core::{
    auth::Caller,
    types::{KeyRange, Revision},
};
use orlop_wire::proto::server::{
    etcdserverpb::{self as pb, request_op},
    mvccpb::{KeyValue, event::EventType},
    v3electionpb::{
        CampaignRequest, CampaignResponse, LeaderKey, LeaderRequest, LeaderResponse, ProclaimRequest, ProclaimResponse,
        ResignRequest, ResignResponse, election_server::Election,
    },
};

/// The Election service.
pub(super) struct ElectionService(pub(super) Arc<Context>);

impl ElectionService {
    async fn campaign(&self, request: Request<CampaignRequest>) -> Result<CampaignResponse, Status> {
        let caller = self.0.caller_of(&request).await?;
        let request = request.into_inner();
        let queue = Queue::open(&self.0, &caller, &request.name, request.lease).await?;
        let (entry, removal) = queue.enter(request.value).await?;
        queue.wait(&entry).await?;
        queue.check(&entry, ELECTION_NOT_LEADER).await?;
        removal.cancel();
        let leader = LeaderKey { name: request.name, key: entry.key, rev: entry.create_revision, lease: queue.lease() };
        Ok(CampaignResponse { header: entry.header, leader: Some(leader) })
    }

    async fn proclaim(
        &self,
        caller: &Caller,
        leader: &LeaderKey,
        value: Bytes,
    ) -> Result<Option<pb::ResponseHeader>, Status> {
        let put = pb::PutRequest { key: leader.key.clone(), value, lease: leader.lease, ..Default::default() };
        let put = request_op::Request::RequestPut(put);
        let is_leader = created_at(&leader.key, leader.rev);
        let response = txn_if(&self.0, caller, is_leader, vec![put], Vec::new()).await?;
        if response.succeeded { Ok(response.header) } else { Err(ELECTION_NOT_LEADER.into()) }
    }
}

fn required(leader: Option<LeaderKey>) -> Result<LeaderKey, Status> {
    leader.ok_or_else(|| ELECTION_LEADER_MISSING.into())
}

#[tonic::async_trait]
impl Election for ElectionService {
    async fn campaign(&self, request: Request<CampaignRequest>) -> Result<Response<CampaignResponse>, Status> {
        ElectionService::campaign(self, request).await.map(Response::new).map_err(to_unknown)
    }

    async fn proclaim(&self, request: Request<ProclaimRequest>) -> Result<Response<ProclaimResponse>, Status> {
        let caller = self.0.caller_of(&request).await.map_err(to_unknown)?;
        let request = request.into_inner();
        let leader = required(request.leader)?;
        let header = ElectionService::proclaim(self, &caller, &leader, request.value).await.map_err(to_unknown)?;
        Ok(Response::new(ProclaimResponse { header }))
    }

    async fn leader(&self, request: Request<LeaderRequest>) -> Result<Response<LeaderResponse>, Status> {
        let caller = self.0.caller_of(&request).await.map_err(to_unknown)?;
        let prefix = prefix(&request.into_inner().name);
        let (header, kv) = oldest_entry(&self.0, &caller, &prefix).await.map_err(to_unknown)?;
        match kv {
            Some(kv) => Ok(Response::new(LeaderResponse { header, kv: Some(kv) })),
            None => Err(ELECTION_NO_LEADER.into()),
        }
    }

    type ObserveStream = Responses<LeaderResponse>;

    async fn observe(&self, request: Request<LeaderRequest>) -> Result<Response<Self::ObserveStream>, Status> {
        let caller = self.0.caller_of(&request).await.map_err(to_unknown)?;
        let prefix = prefix(&request.into_inner().name);
        let observer = Observer { context: Arc::clone(&self.0), caller, prefix, leader: None };
        let responses = unfold(&self.0, "/v3electionpb.Election/Observe", observer, |mut observer| async move {
            let response = observer.next().await.map_err(to_unknown)?;
            Ok(Some((response, observer)))
        });
        Ok(Response::new(responses))
    }

    async fn resign(&self, request: Request<ResignRequest>) -> Result<Response<ResignResponse>, Status> {
        let caller = self.0.caller_of(&request).await.map_err(to_unknown)?;
        let leader = required(request.into_inner().leader)?;
        let is_leader = created_at(&leader.key, leader.rev);
        let removed = remove_if(&self.0, &caller, is_leader).await.map_err(to_unknown)?;
        Ok(Response::new(ResignResponse { header: removed.header }))
    }
}

/// Watches the leader and its value.
struct Observer {
    context: Arc<Context>,
    caller: Caller,
    prefix: Vec<u8>,
    /// A watch on the leader's key.
    leader: Option<Watch>,
}

impl Observer {
    async fn next(&mut self) -> Result<LeaderResponse, Status> {
        while let Some(watch) = &mut self.leader {
            let event = watch.next().await?;
            match event.kv {
                Some(kv) if event.r#type == EventType::Put as i32 => return Ok(self.response(kv.mod_revision, kv)),
                // The leader has resigned or its lease has expired.
                _ => self.leader = None,
            }
        }
        let (header, kv) = oldest_entry(&self.context, &self.caller, &self.prefix).await?;
        let head = header.as_ref().map_or(0, |header| header.revision);
        let (revision, kv) = match kv {
            Some(kv) => (head, kv),
            None => wait_for_entry(&self.context, &self.prefix, Revision(head)).await?,
        };
        let range = KeyRange::from_wire(&kv.key, b"");
        self.leader = Some(Watch::new(&self.context, range, Revision(revision).next()));
        Ok(self.response(revision, kv))
    }

    fn response(&self, revision: i64, kv: KeyValue) -> LeaderResponse {
        LeaderResponse { header: self.context.header(Revision(revision)), kv: Some(kv) }
    }
}

/// Waits for the first candidate.
async fn wait_for_entry(context: &Arc<Context>, prefix: &[u8], head: Revision) -> Result<(i64, KeyValue), Status> {
    let mut watch = Watch::new(context, KeyRange::of_prefix(prefix), head.next());
    loop {
        let event = watch.next().await?;
        if let (EventType::Put, Some(kv)) = (event.r#type(), event.kv) {
            return Ok((kv.mod_revision, kv));
        }
    }
}
