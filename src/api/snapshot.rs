//! The Snapshot call: the log as one file, in pieces.
//!
//! Clients that request a snapshot while one is being taken share the next one, and only a few are on disk at a time. A
//! client that reads almost nothing is disconnected.

use std::{os::unix::fs::FileExt as _, pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
use prometheus::Histogram;
use tokio::{
    sync::{
        OwnedSemaphorePermit, Semaphore,
        mpsc::{self, Sender},
    },
    task::spawn_blocking,
    time::{Instant, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tracing::{error, info, warn};

use super::{Context, STORAGE_VERSION, status::panicked};
use crate::snapshot::{Folder, Hashing, Snapshot};
use orlop_core::{
    store::{Store, shared_query::SharedQuery},
    supervise::{catch_panics, log_request_panic, vital},
};
use orlop_wire::proto::server::etcdserverpb::SnapshotResponse;

const METHOD: &str = "/etcdserverpb.Maintenance/Snapshot";
/// etcd's size of a piece.
const BLOB_BYTES: usize = 32 << 10;
/// Bytes read at once for one client.
const READ_BYTES: u64 = 64 << 10;
/// Pieces read ahead of the client.
const AHEAD_MAX: usize = 2;
/// Maximum number of snapshots on disk; further clients share one that is taken when another has been sent.
const FILES_MAX: usize = 4;
/// Minimum number of bytes a client must read per interval; a slower client is disconnected and its file is deleted.
const PACE_BYTES: u64 = 1 << 20;
const PACE_TIME: Duration = Duration::from_secs(30);

pub(super) type SnapshotStream = Pin<Box<dyn Stream<Item = Result<SnapshotResponse, Status>> + Send>>;

/// The snapshots of a server.
#[derive(Clone)]
pub(super) struct Snapshots(Arc<SharedQuery<(), Result<Arc<Taken>, String>>>);

/// A snapshot on disk.
struct Taken {
    snapshot: Snapshot,
    _place: OwnedSemaphorePermit,
}

impl Snapshots {
    /// Starts the task that takes snapshots; it ends with the last handle.
    pub(super) fn new(store: &Arc<Store>, folder: Folder) -> Self {
        let (log, places) = (Arc::clone(store.log()), Arc::new(Semaphore::new(FILES_MAX)));
        let panics = store.metrics().rpc.panics.clone();
        let take = move |waiting: Vec<()>| {
            let (log, places, folder) = (Arc::clone(&log), Arc::clone(&places), folder.clone());
            let panics = panics.clone();
            async move {
                let place = places.acquire_owned().await.expect("the semaphore is never closed");
                let begun = Instant::now();
                let taken = match catch_panics(folder.take(&*log)).await {
                    Ok(taken) => taken.map_err(|error| error.to_string()),
                    Err(panic) => {
                        log_request_panic(&panics, METHOD, &panic);
                        Err("internal error; see the server's log".to_owned())
                    }
                };
                match &taken {
                    Ok(snapshot) => {
                        let (bytes, clients) = (snapshot.bytes, waiting.len());
                        info!(bytes, clients, elapsed_ms = begun.elapsed().as_millis(), "snapshot taken");
                    }
                    Err(error) => error!(%error, "cannot take a snapshot"),
                }
                let taken = taken.map(|snapshot| Arc::new(Taken { snapshot, _place: place }));
                vec![taken; waiting.len()]
            }
        };
        // The watchdog does not follow it: a large store takes long.
        let (snapshots, run) = SharedQuery::new(take, Arc::default());
        vital("the snapshot task", run);
        Self(Arc::new(snapshots))
    }
}

impl Context {
    /// Takes a snapshot and sends it. The file is complete before the first piece is sent, because each piece contains
    /// the number of remaining bytes.
    pub(super) async fn send_snapshot(&self) -> Result<SnapshotStream, Status> {
        let taken = self.snapshots.0.query(()).await.unwrap_or_else(|| Err("the server stops".to_owned()));
        let taken =
            taken.map_err(|error| Status::internal(format!("etcdserver: a snapshot cannot be taken: {error}")))?;
        let (sender, pieces) = mpsc::channel(AHEAD_MAX);
        let times = self.store.metrics().maintenance.snapshot.clone();
        let panics = self.store.metrics().rpc.panics.clone();
        let sending = tokio::spawn(async move {
            catch_panics(send(taken, sender, times))
                .await
                .inspect_err(|panic| log_request_panic(&panics, METHOD, panic))
        });
        // A disconnected client receives the status after the pieces that wait for it.
        let end = stream::once(sending).filter_map(async |sent| match sent {
            Ok(Ok(Sent::All)) => None,
            Ok(Ok(Sent::NotAll)) => Some(Err(Status::aborted("orlop: the client read the snapshot too slowly"))),
            Ok(Err(_)) | Err(_) => Some(Err(panicked())),
        });
        Ok(Box::pin(ReceiverStream::new(pieces).chain(end)))
    }
}

/// Sends the file; ends early if the client is gone or too slow.
async fn send(taken: Arc<Taken>, sender: Sender<Result<SnapshotResponse, Status>>, times: Histogram) -> Sent {
    let begun = Instant::now();
    let mut pace = Pace { until: begun + PACE_TIME, bytes: 0 };
    let (mut hashing, mut at) = (Hashing::new(std::io::empty()), 0);
    let bytes = taken.snapshot.bytes;
    while at < bytes {
        let len = READ_BYTES.min(bytes - at);
        let read = match read(Arc::clone(&taken), at, len, hashing).await {
            Ok(read) => read,
            Err(error) => {
                error!(%error, "cannot read a snapshot");
                let status = Status::internal(format!("etcdserver: a snapshot cannot be read: {error}"));
                let _ = timeout_at(pace.until, sender.send(Err(status))).await;
                return Sent::NotAll;
            }
        };
        hashing = read.0;
        for blob in read.1.chunks(BLOB_BYTES) {
            at += blob.len() as u64;
            if !pace.send(&sender, response(bytes - at, blob.to_vec())).await {
                return Sent::NotAll;
            }
        }
    }
    // The last piece is the checksum.
    if !pace.send(&sender, response(0, hashing.checksum())).await {
        return Sent::NotAll;
    }
    times.observe(begun.elapsed().as_secs_f64());
    Sent::All
}

enum Sent {
    All,
    NotAll,
}

/// Bytes that a client read since the last check.
struct Pace {
    until: Instant,
    bytes: u64,
}

impl Pace {
    /// Returns false if the client is gone or too slow.
    async fn send(&mut self, sender: &Sender<Result<SnapshotResponse, Status>>, piece: SnapshotResponse) -> bool {
        let bytes = piece.blob.len() as u64;
        loop {
            if let Ok(place) = timeout_at(self.until, sender.reserve()).await {
                let Ok(place) = place else { return false };
                place.send(Ok(piece));
                self.bytes += bytes;
                return true;
            }
            if self.bytes < PACE_BYTES {
                warn!(bytes = self.bytes, "disconnecting a client that reads its snapshot too slowly");
                return false;
            }
            *self = Self { until: Instant::now() + PACE_TIME, bytes: 0 };
        }
    }
}

type Hash = Hashing<std::io::Empty>;

/// Runs blocking work on a blocking thread.
async fn read(taken: Arc<Taken>, at: u64, len: u64, mut hashing: Hash) -> std::io::Result<(Hash, Vec<u8>)> {
    let read = spawn_blocking(move || {
        let mut bytes = vec![0; usize::try_from(len).unwrap_or(usize::MAX)];
        taken.snapshot.file.read_exact_at(&mut bytes, at)?;
        hashing.update(&bytes);
        Ok((hashing, bytes))
    });
    read.await.unwrap_or_else(|error| Err(std::io::Error::other(error)))
}

fn response(remaining_bytes: u64, blob: Vec<u8>) -> SnapshotResponse {
    SnapshotResponse { header: None, remaining_bytes, blob: blob.into(), version: STORAGE_VERSION.to_owned() }
}
