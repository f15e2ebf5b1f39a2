//! The Snapshot calls: stream the store in the form of etcd's snapshots, with its archive or without.
//!
//! Clients that request a snapshot while one is being started share the next one, which is read from the database once
//! for all of them. At most [`EXPORTS_MAX`] are read at a time. A client that reads too slowly is disconnected, because
//! the database has to keep the state of the snapshot until it was read.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::{future::join_all, stream};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore, mpsc, watch},
    time::{Instant, timeout},
};
use tonic::{Response, Status};
use tracing::{error, info, warn};

use super::{Responses, STORAGE_VERSION, status::from_store};
use crate::snapshot::{self, Content, Export};
use orlop_core::{
    clock,
    metrics::Metrics,
    store::{self, PastError, Store, shared_query::SharedQuery},
    supervise::{catch_panics, log_request_panic, vital},
};
use orlop_wire::proto::server::{etcdserverpb::SnapshotResponse, orlopb::HistorySnapshotResponse};

/// Maximum size of a chunk; the same as in etcd.
const BLOB_BYTES: usize = 32 << 10;
/// Number of snapshots that are read from the database at a time.
pub(super) const EXPORTS_MAX: usize = 4;
/// Maximum time in which a client must accept a piece of about 1 MiB. The clients that share a snapshot wait for the
/// slowest of them.
const PIECE_WAIT_MAX: Duration = Duration::from_secs(10);

/// The snapshots of a server.
#[derive(Clone)]
pub(super) struct Snapshots(Arc<SharedQuery<(), Result<Pieces, Status>>>);

fn method(content: Content) -> &'static str {
    match content {
        Content::Log => "/etcdserverpb.Maintenance/Snapshot",
        Content::LogAndArchive => "/orlopb.History/Snapshot",
    }
}

/// A snapshot for one client.
struct Pieces {
    /// Bytes of the database, without the checksum.
    bytes: u64,
    receiver: mpsc::Receiver<Result<Bytes, String>>,
    /// True once the server stops.
    stopping: watch::Receiver<bool>,
}

type Client = mpsc::Sender<Result<Bytes, String>>;

impl Snapshots {
    /// Starts the task that starts snapshots. It ends when the last handle is dropped. `permits` limits the number of snapshots
    /// that are read from the database at a time; both kinds of snapshots share it. All end when `stopping` becomes true.
    pub(super) fn new(
        store: &Arc<Store>,
        content: Content,
        permits: Arc<Semaphore>,
        stopping: watch::Receiver<bool>,
    ) -> Self {
        let store = Arc::clone(store);
        let start = move |waiting: Vec<()>| {
            let (store, metrics) = (Arc::clone(&store), Arc::clone(store.metrics()));
            let (permits, mut stopping) = (Arc::clone(&permits), stopping.clone());
            async move {
                let permit = permits.acquire_owned().await.expect("the semaphore is never closed");
                let begun = Instant::now();
                let begin = catch_panics(Export::of(&store, content));
                let exported = tokio::select! {
                    exported = begin => exported,
                    _ = stopping.wait_for(|stopping| *stopping) => {
                        return waiting.iter().map(|()| Err(stopped())).collect();
                    }
                };
                let failed = match exported {
                    Ok(Ok(export)) => return share(export, content, waiting.len(), metrics, begun, permit, &stopping),
                    Ok(Err(snapshot::Error::History(PastError::Copying { compacted }))) => {
                        Status::unavailable(format!("orlop: {}", PastError::Copying { compacted }))
                    }
                    Ok(Err(error)) => failed(snapshot_failed(&metrics, &error)),
                    Err(panic) => {
                        log_request_panic(&metrics.rpc.panics, method(content), &panic);
                        metrics.maintenance.snapshot_failures.inc();
                        failed("internal error; see the server's log".to_owned())
                    }
                };
                waiting.iter().map(|()| Err(failed.clone())).collect()
            }
        };
        // The watchdog does not follow this task, because the start of a snapshot of a large store takes long.
        let (snapshots, run) = SharedQuery::new(start, Arc::default());
        vital("the snapshot task", run);
        Self(Arc::new(snapshots))
    }
}

fn stopped() -> Status {
    from_store(store::Error::Stopped)
}

fn snapshot_failed(metrics: &Metrics, error: &snapshot::Error) -> String {
    error!(%error, "cannot take a snapshot");
    metrics.maintenance.snapshot_failures.inc();
    error.to_string()
}

/// Starts to send a snapshot to a number of clients. If the server stops, it is no longer read, so that nobody uses the
/// database when that is closed.
fn share(
    export: Export,
    content: Content,
    clients: usize,
    metrics: Arc<Metrics>,
    begun: Instant,
    permit: OwnedSemaphorePermit,
    stopping: &watch::Receiver<bool>,
) -> Vec<Result<Pieces, Status>> {
    let bytes = export.bytes();
    // One piece is in the channel while the client receives the one before.
    let (senders, receivers): (Vec<Client>, Vec<_>) = (0..clients).map(|_| mpsc::channel(1)).unzip();
    let sending = send(export, senders, Arc::clone(&metrics), begun);
    let mut stop = stopping.clone();
    tokio::spawn(async move {
        tokio::select! {
            sent = catch_panics(sending) => if let Err(panic) = sent {
                log_request_panic(&metrics.rpc.panics, method(content), &panic);
            },
            _ = stop.wait_for(|stopping| *stopping) => {}
        }
        drop(permit);
    });
    receivers.into_iter().map(|receiver| Ok(Pieces { bytes, receiver, stopping: stopping.clone() })).collect()
}

/// Sends all pieces to the clients that accept them in time.
async fn send(mut export: Export, mut clients: Vec<Client>, metrics: Arc<Metrics>, begun: Instant) {
    loop {
        let piece = match export.next().await {
            Ok(Some(piece)) => Ok(piece),
            Ok(None) => break,
            Err(error) => Err(snapshot_failed(&metrics, &error)),
        };
        let is_last = piece.is_err();
        let sent = join_all(clients.iter().map(|client| timeout(PIECE_WAIT_MAX, client.send(piece.clone())))).await;
        if sent.iter().any(Result::is_err) {
            warn!("disconnecting clients that read their snapshot too slowly");
        }
        let mut sent = sent.into_iter();
        clients.retain(|_| matches!(sent.next(), Some(Ok(Ok(())))));
        if is_last || clients.is_empty() {
            return;
        }
    }
    let (bytes, clients, elapsed) = (export.bytes(), clients.len(), begun.elapsed());
    info!(bytes, clients, elapsed_ms = elapsed.as_millis(), "snapshot sent");
    metrics.maintenance.snapshot.observe(elapsed.as_secs_f64());
    metrics.maintenance.set_last_snapshot(clock::now());
}

impl Snapshots {
    /// Sends a snapshot. Each chunk contains the number of remaining bytes, so the whole store is read once before the
    /// first one.
    pub(super) async fn send<T: From<Chunk> + 'static>(&self) -> Result<Response<Responses<T>>, Status> {
        let pieces = self.0.query(()).await.unwrap_or_else(|| Err(failed("the server is stopping".to_owned())))?;
        let state = Some((Sent { pieces, bytes: 0 }, Bytes::new()));
        Ok(Response::new(Box::pin(stream::unfold(state, async |state| {
            let (mut sent, piece) = state?;
            match sent.chunk(piece).await {
                Ok(Some((chunk, rest))) => Some((Ok(chunk.into()), Some((sent, rest)))),
                Ok(None) => None,
                Err(status) => Some((Err(status), None)),
            }
        }))))
    }
}

/// A part of the file.
pub(super) struct Chunk {
    blob: Bytes,
    remaining_bytes: u64,
}

impl From<Chunk> for SnapshotResponse {
    fn from(Chunk { blob, remaining_bytes }: Chunk) -> Self {
        Self { header: None, remaining_bytes, blob, version: STORAGE_VERSION.to_owned() }
    }
}

impl From<Chunk> for HistorySnapshotResponse {
    fn from(Chunk { blob, remaining_bytes }: Chunk) -> Self {
        Self { remaining_bytes, blob }
    }
}

fn failed(error: String) -> Status {
    Status::internal(format!("orlop: a snapshot cannot be taken: {error}"))
}

/// A snapshot of which a part was sent to a client.
struct Sent {
    pieces: Pieces,
    bytes: u64,
}

impl Sent {
    /// Returns the next chunk and what remains of its piece; `None` after the checksum.
    async fn chunk(&mut self, mut piece: Bytes) -> Result<Option<(Chunk, Bytes)>, Status> {
        let Pieces { receiver, stopping, .. } = &mut self.pieces;
        if *stopping.borrow() {
            return Err(stopped());
        }
        while piece.is_empty() {
            let next = tokio::select! {
                biased;
                _ = stopping.wait_for(|stopping| *stopping) => return Err(stopped()),
                next = receiver.recv() => next,
            };
            piece = match next {
                Some(piece) => piece.map_err(failed)?,
                None if self.bytes > self.pieces.bytes => return Ok(None),
                None => return Err(Status::aborted("orlop: the client read the snapshot too slowly")),
            };
        }
        let blob = piece.split_to(BLOB_BYTES.min(piece.len()));
        self.bytes += blob.len() as u64;
        let remaining_bytes = self.pieces.bytes.saturating_sub(self.bytes);
        Ok(Some((Chunk { blob, remaining_bytes }, piece)))
    }
}
