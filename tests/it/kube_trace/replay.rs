//! Sends the steps of the recording one after the other and compares the responses.

use std::{
    collections::{BTreeMap, VecDeque},
    time::Duration,
};

use orlop_wire::proto::client::etcdserverpb::{
    LeaseGrantRequest, LeaseGrantResponse, LeaseKeepAliveRequest, StatusRequest, kv_client::KvClient,
    lease_client::LeaseClient, maintenance_client::MaintenanceClient, watch_client::WatchClient,
};
use tokio::time::{Instant, timeout};
use tokio_stream::StreamExt;
use tonic::{
    Status,
    transport::{Channel, Endpoint},
};

use super::{
    compare::{Mismatch, Peer, difference},
    trace::{Answer, CallId, Exchange, Metadata, RecordedEvent, Request, Step, with_metadata},
    watched::{RESPONSE_TIMEOUT, Watched},
};
use crate::support::get;

/// Number of recorded responses that were compared.
#[derive(PartialEq, Eq, Debug, Default)]
pub struct Compared {
    pub txn: usize,
    pub range: usize,
    pub lease_grant: usize,
    pub compact: usize,
    pub status: usize,
    pub streams: usize,
    pub events: usize,
    pub progress: usize,
}

/// Replays the steps on the empty store behind the endpoints, up to the first difference. Calls and streams go to each
/// endpoint in turn.
pub async fn replay(endpoints: &[&str], peer: Peer, steps: Vec<Step>) -> Result<Compared, Box<Mismatch>> {
    let mut replay = Replay::new(peer);
    for endpoint in endpoints {
        replay.instances.push_back(Instance::new(connect(endpoint).await));
    }
    replay.run(steps).await?;
    Ok(replay.compared)
}

/// Replays the first half of the steps on the empty store behind `endpoint`, and the second half on Orlop, which
/// `cut_over` starts as a copy of it. Watches that are open then go on at the copy.
pub async fn replay_moved<C>(
    endpoint: &str,
    peer: Peer,
    mut steps: Vec<Step>,
    cut_over: impl Future<Output = (String, C)>,
) -> Result<Compared, Box<Mismatch>> {
    let mut replay = Replay::new(peer);
    replay.instances.push_back(Instance::new(connect(endpoint).await));
    let rest = steps.split_off(steps.len() / 2);
    replay.run(steps).await?;
    replay.settle().await?;
    let (endpoint, _copy) = cut_over.await;
    replay.move_to(Instance::new(connect(&endpoint).await)).await?;
    replay.run(rest).await?;
    Ok(replay.compared)
}

pub async fn etcd_minor_version(endpoint: &str) -> u32 {
    let status = MaintenanceClient::new(connect(endpoint).await).status(StatusRequest {}).await;
    let version = status.expect("a running etcd returns its status").into_inner().version;
    let minor = version.split('.').nth(1).and_then(|minor| minor.parse().ok());
    minor.unwrap_or_else(|| panic!("an etcd's version has a minor part: {version}"))
}

struct Replay {
    peer: Peer,
    /// The first one receives the next call.
    instances: VecDeque<Instance>,
    /// The current revision of the store: that of the newest response.
    head: i64,
    streams: BTreeMap<CallId, Stream>,
    leases: Leases,
    compared: Compared,
}

/// The gRPC clients of one server.
#[derive(Clone)]
struct Instance {
    kv: KvClient<Channel>,
    lease: LeaseClient<Channel>,
    maintenance: MaintenanceClient<Channel>,
    watch: WatchClient<Channel>,
}

struct Stream {
    watched: Watched,
    created: Exchange,
    metadata: Metadata,
    instance: Instance,
}

/// The leases granted so far. They are renewed because none expired in the recording and the replay has a different
/// speed.
struct Leases {
    granted: Vec<i64>,
    renewed: Instant,
}

impl Leases {
    /// Well below the shortest recorded TTL, 15 s.
    const RENEW_AFTER: Duration = Duration::from_secs(3);
}

impl Instance {
    fn new(channel: Channel) -> Self {
        Self {
            kv: KvClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            lease: LeaseClient::new(channel.clone()),
            maintenance: MaintenanceClient::new(channel.clone()),
            watch: WatchClient::new(channel).max_decoding_message_size(usize::MAX),
        }
    }

    /// Waits, by a linearizable read, until this instance has reached the current revision. Responses that are not
    /// linearizable, such as the status and a watch's created response, contain the revision of the instance. The
    /// linearizable read itself must never return an older revision.
    async fn reach(&mut self, head: i64) {
        let answer = self.kv.range(get("\0")).await.expect("the server takes a range").into_inner();
        let revision = answer.header.expect("an answer has a header").revision;
        assert_eq!(revision, head, "a linearizable read sees every write that was answered, on any instance");
    }
}

impl Replay {
    fn new(peer: Peer) -> Self {
        Self {
            peer,
            instances: VecDeque::new(),
            head: 1,
            streams: BTreeMap::new(),
            leases: Leases { granted: Vec::new(), renewed: Instant::now() },
            compared: Compared::default(),
        }
    }

    async fn run(&mut self, steps: Vec<Step>) -> Result<(), Box<Mismatch>> {
        for step in steps {
            self.instances.rotate_left(1);
            match step {
                Step::Call { exchange, metadata } => self.call(exchange, &metadata).await?,
                Step::Watch { stream, exchange, metadata, events } => {
                    self.watch(stream, exchange, &metadata, events).await?;
                }
                Step::Progress { stream, exchange } => self.progress(stream, exchange).await?,
                Step::End { stream } => self.end(stream).await?,
            }
        }
        Ok(())
    }

    /// Continues with another server, which is Orlop.
    async fn move_to(&mut self, instance: Instance) -> Result<(), Box<Mismatch>> {
        self.peer = Peer::Orlop;
        self.instances = VecDeque::from([instance.clone()]);
        for (id, stream) in std::mem::take(&mut self.streams) {
            let Stream { watched, created, metadata, .. } = stream;
            let Request::Watch(request) = &created.request else { unreachable!("a watch begins with a watch request") };
            let mut instance = instance.clone();
            let resumed = watched.resume(self.peer, &mut instance.watch, (&metadata, request), self.head + 1).await;
            let watched = resumed.map_err(|what| created.mismatch(format!("resumed: {what}")))?;
            self.streams.insert(id, Stream { watched, created, metadata, instance });
        }
        Ok(())
    }

    async fn call(&mut self, exchange: Exchange, metadata: &Metadata) -> Result<(), Box<Mismatch>> {
        self.renew_leases().await;
        if matches!(exchange.request, Request::Compact(_)) {
            // An unsynced watch would be canceled by a compaction; the recorded watches were not.
            self.settle().await?;
        }
        let what = match timeout(RESPONSE_TIMEOUT, self.send(&exchange, metadata)).await {
            Ok(Ok(answer)) => difference(self.peer, &exchange.answer, &answer),
            Ok(Err(status)) => Some(format!("expected: {:?}\ngot: {status}", exchange.answer)),
            Err(_) => Some("no answer in time".to_owned()),
        };
        exchange.fail_on(what)?;
        match &exchange.answer {
            Answer::Range(_) => self.compared.range += 1,
            Answer::Txn(_) => self.compared.txn += 1,
            Answer::Compact(_) => self.compared.compact += 1,
            Answer::LeaseGrant(answer) => {
                self.leases.granted.push(answer.id);
                self.compared.lease_grant += 1;
            }
            Answer::Status(_) => self.compared.status += 1,
            Answer::Watch(_) => unreachable!("a watch is not a unary call"),
        }
        self.head = exchange.answer.revision();
        Ok(())
    }

    async fn send(&mut self, exchange: &Exchange, metadata: &Metadata) -> Result<Answer, Status> {
        let instance = self.instances.front_mut().expect("there is a server");
        Ok(match &exchange.request {
            Request::Range(request) => {
                Answer::Range(instance.kv.range(with_metadata(metadata, request.clone())).await?.into_inner())
            }
            Request::Txn(request) => {
                Answer::Txn(instance.kv.txn(with_metadata(metadata, request.clone())).await?.into_inner())
            }
            Request::Compact(request) => {
                Answer::Compact(instance.kv.compact(with_metadata(metadata, *request)).await?.into_inner())
            }
            Request::LeaseGrant(request) => {
                let request = with_recorded_id(request, &exchange.answer);
                Answer::LeaseGrant(instance.lease.lease_grant(with_metadata(metadata, request)).await?.into_inner())
            }
            Request::Status(request) => {
                instance.reach(self.head).await;
                Answer::Status(instance.maintenance.status(with_metadata(metadata, *request)).await?.into_inner())
            }
            Request::Watch(_) => unreachable!("a watch is not a unary call"),
        })
    }

    async fn watch(
        &mut self,
        stream: CallId,
        created: Exchange,
        metadata: &Metadata,
        events: VecDeque<RecordedEvent>,
    ) -> Result<(), Box<Mismatch>> {
        let Request::Watch(request) = &created.request else { unreachable!("a watch begins with a watch request") };
        let mut instance = self.instances.front().expect("there is a server").clone();
        instance.reach(self.head).await;
        let opened = Watched::open(self.peer, &mut instance.watch, (metadata, request), &created.answer, events).await;
        let watched = opened.map_err(|what| created.mismatch(what))?;
        self.streams.insert(stream, Stream { watched, created, metadata: metadata.clone(), instance });
        Ok(())
    }

    async fn progress(&mut self, stream: CallId, exchange: Exchange) -> Result<(), Box<Mismatch>> {
        let stream = self.streams.get_mut(&stream).expect("a stream asks between its create and its end");
        // Without waiting for this instance: the response must cover every write that any instance acknowledged.
        let progress = stream.watched.progress(self.head, &exchange.answer).await;
        progress.map_err(|what| stream.created.mismatch(format!("progress, seq={}: {what}", exchange.seq)))?;
        self.compared.progress += 1;
        Ok(())
    }

    async fn end(&mut self, stream: CallId) -> Result<(), Box<Mismatch>> {
        let stream = self.streams.remove(&stream).expect("a stream ends once, after its create");
        let Stream { watched, created, mut instance, .. } = stream;
        instance.reach(self.head).await;
        self.compared.events += watched.end(self.head).await.map_err(|what| created.mismatch(what))?;
        self.compared.streams += 1;
        Ok(())
    }

    async fn settle(&mut self) -> Result<(), Box<Mismatch>> {
        for Stream { watched, created, .. } in self.streams.values_mut() {
            watched.settle(self.head).await.map_err(|what| created.mismatch(what))?;
        }
        Ok(())
    }

    async fn renew_leases(&mut self) {
        if self.leases.renewed.elapsed() < Leases::RENEW_AFTER {
            return;
        }
        self.leases.renewed = Instant::now();
        let requests: Vec<_> = self.leases.granted.iter().map(|id| LeaseKeepAliveRequest { id: *id }).collect();
        let count = requests.len();
        let instance = self.instances.front_mut().expect("there is a server");
        let answers = instance.lease.lease_keep_alive(tokio_stream::iter(requests)).await;
        let renewed = answers.expect("the server keeps leases alive").into_inner().take(count);
        let ttls: Vec<_> = renewed.map(|answer| answer.map(|answer| answer.ttl)).collect().await;
        assert!(ttls.iter().all(|ttl| ttl.as_ref().is_ok_and(|ttl| *ttl > 0)), "every lease is live: {ttls:?}");
    }
}

impl Exchange {
    fn mismatch(&self, what: String) -> Box<Mismatch> {
        Box::new(Mismatch { seq: self.seq, request: self.request.clone(), what })
    }

    fn fail_on(&self, what: Option<String>) -> Result<(), Box<Mismatch>> {
        what.map_or(Ok(()), |what| Err(self.mismatch(what)))
    }
}

/// The recorded request left the choice of the id to the server. Requesting the recorded id makes later requests and
/// responses equal to the recording.
fn with_recorded_id(request: &LeaseGrantRequest, recorded: &Answer) -> LeaseGrantRequest {
    let Answer::LeaseGrant(LeaseGrantResponse { id, .. }) = recorded else { unreachable!("a grant answers a grant") };
    LeaseGrantRequest { id: *id, ..*request }
}

async fn connect(endpoint: &str) -> Channel {
    let endpoint = Endpoint::from_shared(endpoint.to_owned()).expect("the endpoint is a URL");
    endpoint.tcp_nodelay(true).connect().await.expect("the server listens")
}
