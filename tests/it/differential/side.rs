//! One of the two servers: sends operations to it and masks its responses.

use std::collections::BTreeMap;

use orlop_wire::proto::client::etcdserverpb::{
    LeaseGrantRequest, LeaseKeepAliveRequest, LeaseLeasesRequest, LeaseRevokeRequest, MemberListRequest, PutRequest,
    StatusRequest, WatchCreateRequest,
};
use tokio::time::timeout;
use tonic::Status;

use super::{
    auth::{Caller, ROOT},
    generate::SHARED_STREAMS,
    mask::masked,
    op::{Answer, On, Op},
    watch::{WatchStream, Watermark},
};
use crate::support::{Client, DEADLINE};

pub struct Side {
    client: Client,
    /// The shared streams, which are opened on first use, and then the streams with a single watch.
    pub streams: Vec<Option<WatchStream>>,
    fault: Option<Fault>,
    /// The token of each user from the last login.
    tokens: BTreeMap<&'static str, String>,
}

/// An error that the harness injects and must detect.
#[derive(Clone, Copy, Debug)]
pub enum Fault {
    Count,
    Header,
    ErrorText,
    PairOrder,
    LostEvent,
    EventOrder,
}

impl Side {
    pub fn new(client: Client, fault: Option<Fault>) -> Self {
        Self { client, streams: (0..SHARED_STREAMS).map(|_| None).collect(), fault, tokens: BTreeMap::new() }
    }

    pub async fn perform(&mut self, caller: Caller, op: &Op) -> Answer {
        let token = match caller {
            Caller::Root => self.tokens.get(ROOT).map(String::as_str),
            Caller::User(user) => self.tokens.get(user).map(String::as_str),
            Caller::Nobody => None,
            Caller::Forger => Some("forged.1"),
        };
        self.client.act_with(token);
        let answer = match timeout(DEADLINE * 2, self.answer(op)).await {
            Ok(answer) => answer.unwrap_or_else(Answer::from),
            Err(_) => Answer::Stalled("no response".to_owned()),
        };
        self.inject_fault(masked(answer))
    }

    /// Waits until all events up to `head` have been received.
    pub async fn catch_up(&mut self, head: i64) -> Result<(), String> {
        for stream in self.streams.iter_mut().flatten() {
            stream.catch_up(head).await?;
        }
        self.inject_event_fault();
        Ok(())
    }

    /// Waits until every watch has received the events of the watermark.
    pub async fn reach(&mut self, watermark: Watermark) -> Result<(), String> {
        for stream in self.streams.iter_mut().flatten() {
            stream.reach(watermark).await?;
        }
        self.inject_event_fault();
        Ok(())
    }

    /// Closes all streams at the end of a sequence.
    pub fn forget_streams(&mut self) {
        self.streams = (0..SHARED_STREAMS).map(|_| None).collect();
    }

    async fn answer(&mut self, op: &Op) -> Result<Answer, Status> {
        let Client { kv, lease, maintenance, cluster, .. } = &mut self.client;
        Ok(match op.clone() {
            Op::Put(request) => Answer::Put(kv.put(request).await?.into_inner()),
            Op::Range(request) => Answer::Range(kv.range(request).await?.into_inner()),
            Op::DeleteRange(request) => Answer::DeleteRange(kv.delete_range(request).await?.into_inner()),
            Op::Txn(request) => Answer::Txn(kv.txn(request).await?.into_inner()),
            Op::Compact(request) => Answer::Compact(kv.compact(request).await?.into_inner()),
            Op::Grant(request) => Answer::Grant(lease.lease_grant(request).await?.into_inner()),
            Op::GrantBriefly(request) => self.grant_briefly(request).await?,
            Op::Revoke { id } => Answer::Revoke(lease.lease_revoke(LeaseRevokeRequest { id }).await?.into_inner()),
            Op::KeepAlive { ids } => self.keep_alive(ids).await?,
            Op::TimeToLive(request) => Answer::TimeToLive(lease.lease_time_to_live(request).await?.into_inner()),
            Op::Leases => Answer::Leases(lease.lease_leases(LeaseLeasesRequest {}).await?.into_inner()),
            Op::Status => Answer::Status(maintenance.status(StatusRequest {}).await?.into_inner()),
            Op::Members => Answer::Members(cluster.member_list(MemberListRequest::default()).await?.into_inner()),
            Op::Watch { on, create } => self.watch(on, create).await?,
            Op::CancelWatch { stream, id } => match &mut self.streams[stream] {
                Some(stream) => stream.cancel(id).await,
                None => Answer::Silence,
            },
            Op::Progress => Answer::Silence,
            Op::Auth(op) => {
                let (answer, token) = op.send(&mut self.client).await?;
                self.tokens.extend(token);
                answer
            }
        })
    }

    async fn grant_briefly(&mut self, request: LeaseGrantRequest) -> Result<Answer, Status> {
        let Client { kv, lease, .. } = &mut self.client;
        let mut grant = lease.lease_grant(request).await?.into_inner();
        let mut put = None;
        if request.id != 0 {
            let request = PutRequest { key: "a".into(), lease: grant.id, prev_kv: true, ..Default::default() };
            put = Some(kv.put(request).await?.into_inner());
        }
        let revoke = lease.lease_revoke(LeaseRevokeRequest { id: grant.id }).await?.into_inner();
        if request.id == 0 && grant.id > 0 {
            // Each server chooses its own id; only whether it is positive is compared.
            grant.id = 1;
        }
        Ok(Answer::GrantBriefly { grant, put, revoke })
    }

    async fn keep_alive(&mut self, ids: Vec<i64>) -> Result<Answer, Status> {
        let wanted = ids.len();
        let requests = tokio_stream::iter(ids.into_iter().map(|id| LeaseKeepAliveRequest { id }));
        let mut stream = self.client.lease.lease_keep_alive(requests).await?.into_inner();
        let mut answers = Vec::new();
        while answers.len() < wanted
            && let Some(answer) = stream.message().await?
        {
            answers.push(answer);
        }
        Ok(Answer::KeepAlive(answers))
    }

    async fn watch(&mut self, on: On, create: WatchCreateRequest) -> Result<Answer, Status> {
        if let On::Stream(index) = on
            && let Some(stream) = &mut self.streams[index]
        {
            return Ok(stream.create(create).await);
        }
        let (mut stream, answer) = WatchStream::open(&self.client, create).await?;
        if let (On::Doomed, Answer::Watch(created)) = (on, &answer)
            && !created.canceled
            && let stalled @ Answer::Stalled(_) = stream.ended(created.watch_id).await
        {
            return Ok(stalled);
        }
        match on {
            On::Stream(index) => self.streams[index] = Some(stream),
            On::Fresh | On::Doomed => self.streams.push(Some(stream)),
        }
        Ok(answer)
    }

    fn inject_fault(&mut self, mut answer: Answer) -> Answer {
        match (self.fault, &mut answer) {
            (Some(Fault::Count), Answer::Range(it)) => it.count += 1,
            (Some(Fault::Header), Answer::Put(it)) => it.header = None,
            (Some(Fault::ErrorText), Answer::Refused { message, .. }) => message.push('.'),
            (Some(Fault::PairOrder), Answer::Range(it)) => it.kvs.reverse(),
            _ => {}
        }
        answer
    }

    fn inject_event_fault(&mut self) {
        for watch in self.streams.iter_mut().flatten().flat_map(|stream| &mut stream.watches) {
            match self.fault {
                Some(Fault::LostEvent) => drop(watch.events.pop_back()),
                Some(Fault::EventOrder) => watch.events.make_contiguous().reverse(),
                Some(Fault::Count | Fault::Header | Fault::ErrorText | Fault::PairOrder) | None => {}
            }
        }
    }
}
