//! Short-lived clients, each with its own connection. They reveal resources that the server does not release.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use tokio::time::{MissedTickBehavior, interval, timeout};
use tokio_stream::{iter, wrappers::ReceiverStream};
use tonic::Status;

use super::stats::Stats;
use crate::{
    bench::Bench,
    connection::{Client, Pool},
    kubernetes::{EMPTY, PODS},
    watch::create_watches,
};
use orlop_wire::proto::client::{
    etcdserverpb::{
        LeaseGrantRequest, LeaseKeepAliveRequest, LeaseRevokeRequest, PutRequest, RangeRequest, WatchCancelRequest,
        WatchCreateRequest, WatchRequest, watch_request::RequestUnion,
    },
    v3lockpb::{LockRequest, UnlockRequest},
};

/// TTL of a lease that expires.
const TTL_SHORT_SECS: i64 = 10;
/// TTL of a lease that is revoked.
const TTL_LONG_SECS: i64 = 20;

/// Time after which a client cancels its request.
const CANCEL_AFTER: Duration = Duration::from_millis(3);

/// The behaviour of one short-lived client.
#[derive(Clone, Copy, Debug)]
enum Visit {
    /// Connects and disconnects.
    ConnectOnly,
    /// Requests /health over HTTP.
    HealthCheck,
    /// Creates two watches, cancels one, then closes the stream.
    CancelsWatch,
    /// Disconnects with open watches.
    DropsWatches,
    /// Disconnects while its watch receives old revisions.
    DropsCatchUp,
    /// Creates a lease, attaches a key, renews the lease once and revokes it.
    RevokesLease,
    /// Creates a lease, attaches a key and disconnects, so that the lease expires.
    AbandonsLease,
    /// Cancels a Range request.
    CancelsRange,
    /// Waits for a lock that another lease holds, and cancels the request.
    CancelsLock,
}

const VISITS: [Visit; 9] = [
    Visit::ConnectOnly,
    Visit::HealthCheck,
    Visit::CancelsWatch,
    Visit::DropsWatches,
    Visit::DropsCatchUp,
    Visit::RevokesLease,
    Visit::AbandonsLease,
    Visit::CancelsRange,
    Visit::CancelsLock,
];

/// Runs the short-lived clients one at a time, endlessly.
pub async fn run(bench: Arc<Bench>, stats: Arc<Stats>, per_sec: f64) {
    let mut due = interval(Duration::from_secs_f64(1.0 / per_sec));
    due.set_missed_tick_behavior(MissedTickBehavior::Delay);
    for number in 0_u64.. {
        due.tick().await;
        let visit = VISITS[usize::try_from(number).unwrap_or_default() % VISITS.len()];
        let outcome = match Pool::connect(&bench.target, 1).await {
            Ok(pool) => Box::pin(visit.run(&bench, pool.client(0), number)).await,
            Err(error) => Err(Status::unavailable(error.to_string())),
        };
        match outcome {
            Ok(()) => stats.totals.lock().visits += 1,
            Err(status) => stats.record_error(&format!("{visit:?}"), &status),
        }
    }
}

impl Visit {
    async fn run(self, bench: &Bench, mut client: Client, number: u64) -> Result<(), Status> {
        // One of 50 keys, so that the number of keys is bounded.
        let key = bench.keys.key(EMPTY + 1, number % 50);
        let watch = |part, start_revision| WatchCreateRequest {
            key: bench.keys.key(part, 0),
            range_end: bench.keys.key(part + 1, 0),
            start_revision,
            ..WatchCreateRequest::default()
        };
        match self {
            Self::ConnectOnly => Ok(()),
            Self::HealthCheck => client.get("/health").await.map(drop),
            Self::CancelsWatch => cancel_watch(client, [watch(PODS, 0), watch(EMPTY, 0)]).await,
            Self::DropsWatches => create_watches(&mut client, vec![watch(PODS, 0); 5]).await.map(drop),
            Self::DropsCatchUp => {
                let current = bench.keys.revision(&client).await.map_err(|error| Status::unknown(error.to_string()))?;
                // The revision is recent enough that it is not compacted.
                let mut responses = create_watches(&mut client, vec![watch(PODS, (current - 50).max(1))]).await?;
                responses.message().await.map(drop)
            }
            Self::RevokesLease => {
                let id = lease_with_key(&client, TTL_LONG_SECS, key).await?;
                let alive = LeaseKeepAliveRequest { id };
                client.leases().lease_keep_alive(iter([alive])).await?.into_inner().message().await?;
                client.leases().lease_revoke(LeaseRevokeRequest { id }).await.map(drop)
            }
            Self::AbandonsLease => lease_with_key(&client, TTL_SHORT_SECS, key).await.map(drop),
            Self::CancelsRange => {
                let (key, range_end) = bench.keys.range();
                let range = RangeRequest { key, range_end, limit: 500, ..RangeRequest::default() };
                // The timeout cancels the request; it is not an error.
                timeout(CANCEL_AFTER, client.range(range)).await.map_or(Ok(()), |response| response.map(drop))
            }
            Self::CancelsLock => cancel_lock(&client).await,
        }
    }
}

async fn cancel_watch(mut client: Client, creates: [WatchCreateRequest; 2]) -> Result<(), Status> {
    let (requests, queue) = tokio::sync::mpsc::channel(4);
    let create = |create| WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    for request in creates.map(create) {
        requests.send(request).await.map_err(|_| Status::aborted("the request stream is closed"))?;
    }
    let cancel = WatchRequest { request_union: Some(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 0 })) };
    requests.send(cancel).await.map_err(|_| Status::aborted("the request stream is closed"))?;
    let mut responses = client.watch(ReceiverStream::new(queue)).await?;
    loop {
        match responses.message().await? {
            Some(response) if response.canceled => break,
            Some(_) => {}
            None => return Err(Status::aborted("the watch stream ended")),
        }
    }
    // The request stream ends first. The response stream stays open until the client drops it.
    drop(requests);
    drop(responses);
    client.get("/health").await.map(drop)
}

async fn lease_with_key(client: &Client, ttl: i64, key: Bytes) -> Result<i64, Status> {
    let lease = client.leases().lease_grant(LeaseGrantRequest { ttl, id: 0 }).await?.into_inner().id;
    let put = PutRequest { key, value: "held".into(), lease, ..PutRequest::default() };
    client.kv.clone().put(put).await?;
    Ok(lease)
}

async fn cancel_lock(client: &Client) -> Result<(), Status> {
    let grant = LeaseGrantRequest { ttl: TTL_LONG_SECS, id: 0 };
    let holder = client.leases().lease_grant(grant).await?.into_inner().id;
    let waiter = client.leases().lease_grant(grant).await?.into_inner().id;
    let lock = |lease| LockRequest { name: "orlop-soak".into(), lease };
    let held = client.locks().lock(lock(holder)).await?.into_inner().key;
    // The lock is held, so the request always times out.
    let waited = timeout(CANCEL_AFTER, client.locks().lock(lock(waiter))).await;
    if waited.is_ok_and(|response| response.is_ok()) {
        return Err(Status::internal("two clients hold the lock"));
    }
    client.locks().unlock(UnlockRequest { key: held }).await?;
    client.leases().lease_revoke(LeaseRevokeRequest { id: holder }).await?;
    client.leases().lease_revoke(LeaseRevokeRequest { id: waiter }).await.map(drop)
}
