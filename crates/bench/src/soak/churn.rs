//! Clients that come and go, each on a connection of its own: what a server forgets to take back it forgets here.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::{iter, wrappers::ReceiverStream};
use tonic::Status;

use super::Told;
use crate::{
    Bench,
    connection::{Client, Pool},
    kubernetes::{NOTHING, PODS},
    watch::create_watches,
};
use orlop_wire::proto::client::{
    etcdserverpb::{
        LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, PutRequest, RangeRequest, WatchCancelRequest,
        WatchCreateRequest, WatchRequest, watch_request::RequestUnion,
    },
    v3lockpb::{LockRequest, UnlockRequest},
};

/// A lease that nobody ends is over soon.
const TTL_SHORT_SECS: i64 = 10;
const TTL_LONG_SECS: i64 = 20;

/// What is cut off is cut off after this.
const CUT_AFTER: Duration = Duration::from_millis(3);

/// How one client comes and goes.
#[derive(Clone, Copy, Debug)]
enum Visit {
    /// Connects, and is gone.
    Silent,
    /// Asks for its health over HTTP.
    Probe,
    /// Cancels one of its watches, then ends the stream in order.
    EndsWatches,
    /// Is gone with its watches open.
    DropsWatches,
    /// Is gone while its watch reads old revisions.
    CatchesUp,
    /// Ends its lease, on which a key hangs.
    RevokesLease,
    /// Lets its lease run out.
    AbandonsLease,
    /// Does not wait for its answer.
    CutsRange,
    /// Waits for a lock in vain, and gives up.
    GivesUpLock,
}

const VISITS: [Visit; 9] = [
    Visit::Silent,
    Visit::Probe,
    Visit::EndsWatches,
    Visit::DropsWatches,
    Visit::CatchesUp,
    Visit::RevokesLease,
    Visit::AbandonsLease,
    Visit::CutsRange,
    Visit::GivesUpLock,
];

/// Sends one after another for ever.
pub async fn visit(bench: Arc<Bench>, told: Arc<Told>, per_sec: f64) {
    let mut due = interval(Duration::from_secs_f64(1.0 / per_sec));
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0_u64.. {
        due.tick().await;
        let visit = VISITS[usize::try_from(number).unwrap_or_default() % VISITS.len()];
        let outcome = match Pool::connect(&bench.target, 1).await {
            Ok(pool) => Box::pin(visit.make(&bench, pool.client(0), number)).await,
            Err(error) => Err(Status::unavailable(error.to_string())),
        };
        match outcome {
            Ok(()) => told.sums.lock().visits += 1,
            Err(status) => told.fail(&format!("{visit:?}"), &status),
        }
    }
}

impl Visit {
    async fn make(self, bench: &Bench, mut client: Client, number: u64) -> Result<(), Status> {
        // One of a few, so that keys do not become more.
        let own = bench.keys.key(NOTHING + 1, number % 50);
        let watch = |part, start_revision| WatchCreateRequest {
            key: bench.keys.key(part, 0),
            range_end: bench.keys.key(part + 1, 0),
            start_revision,
            ..WatchCreateRequest::default()
        };
        match self {
            Self::Silent => Ok(()),
            Self::Probe => client.get("/health").await.map(drop),
            Self::EndsWatches => end_watches(client, [watch(PODS, 0), watch(NOTHING, 0)]).await,
            Self::DropsWatches => create_watches(&mut client, vec![watch(PODS, 0); 5]).await.map(drop),
            Self::CatchesUp => {
                let head = bench.keys.revision(&client).await.map_err(|error| Status::unknown(error.to_string()))?;
                // So near that no compaction has come past it.
                let mut answers = create_watches(&mut client, vec![watch(PODS, (head - 50).max(1))]).await?;
                answers.message().await.map(drop)
            }
            Self::RevokesLease => {
                let id = lease_with_key(&client, TTL_LONG_SECS, own).await?;
                let alive = LeaseKeepAliveRequest { id };
                client.leases().lease_keep_alive(iter([alive])).await?.into_inner().message().await?;
                client.leases().lease_revoke(LeaseRevokeRequest { id }).await.map(drop)
            }
            Self::AbandonsLease => lease_with_key(&client, TTL_SHORT_SECS, own).await.map(drop),
            Self::CutsRange => {
                let (key, range_end) = bench.keys.range();
                let range = RangeRequest { key, range_end, limit: 500, ..RangeRequest::default() };
                // That it is late is the point.
                timeout(CUT_AFTER, client.range(range)).await.map_or(Ok(()), |answer| answer.map(drop))
            }
            Self::GivesUpLock => give_up_lock(&client).await,
        }
    }
}

async fn end_watches(mut client: Client, wanted: [WatchCreateRequest; 2]) -> Result<(), Status> {
    let (requests, queue) = tokio::sync::mpsc::channel(4);
    let create = |create| WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    for request in wanted.map(create) {
        requests.send(request).await.map_err(|_| Status::aborted("nobody takes requests"))?;
    }
    let cancel = WatchRequest { request_union: Some(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 0 })) };
    requests.send(cancel).await.map_err(|_| Status::aborted("nobody takes requests"))?;
    let mut answers = client.watch(ReceiverStream::new(queue)).await?;
    loop {
        match answers.message().await? {
            Some(answer) if answer.canceled => break,
            Some(_) => {}
            None => return Err(Status::aborted("the watch stream ended")),
        }
    }
    // The answers go on after the last request, until somebody does not want them any more.
    drop(requests);
    drop(answers);
    client.get("/health").await.map(drop)
}

async fn lease_with_key(client: &Client, ttl: i64, key: Bytes) -> Result<i64, Status> {
    let lease = client.leases().lease_grant(LeaseGrantRequest { ttl, id: 0 }).await?.into_inner().id;
    let put = PutRequest { key, value: "held".into(), lease, ..PutRequest::default() };
    client.kv.clone().put(put).await?;
    Ok(lease)
}

async fn give_up_lock(client: &Client) -> Result<(), Status> {
    let grant = LeaseGrantRequest { ttl: TTL_LONG_SECS, id: 0 };
    let holder = client.leases().lease_grant(grant).await?.into_inner().id;
    let waiter = client.leases().lease_grant(grant).await?.into_inner().id;
    let lock = |lease| LockRequest { name: "orlop-soak".into(), lease };
    let held = client.locks().lock(lock(holder)).await?.into_inner().key;
    // It cannot have the lock, and so is always late.
    let waited = timeout(CUT_AFTER, client.locks().lock(lock(waiter))).await;
    if waited.is_ok_and(|answer| answer.is_ok()) {
        return Err(Status::internal("two have the lock"));
    }
    client.locks().unlock(UnlockRequest { key: held }).await?;
    client.leases().lease_revoke(LeaseRevokeRequest { id: holder }).await?;
    client.leases().lease_revoke(LeaseRevokeRequest { id: waiter }).await.map(drop)
}
