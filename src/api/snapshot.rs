//! The Snapshot call: sends a copy of the log, a file, in chunks.
//!
//! Clients that request a snapshot while one is being taken share the next one. At most [`FILES_MAX`] snapshots are on
//! disk at a time. A client that reads too slowly is disconnected.

use std::{os::unix::fs::FileExt as _, pin::Pin, sync::Arc, time::Duration};

use futures_util::{Stream, StreamExt as _, stream};
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
use crate::snapshot::{Folder, Hashing, Snapshot, now};
use orlop_core::{
    metrics::Metrics,
    store::{Store, shared_query::SharedQuery},
    supervise::{catch_panics, log_request_panic, vital},
};
use orlop_wire::proto::server::etcdserverpb::SnapshotResponse;

const METHOD: &str = "/etcdserverpb.Maintenance/Snapshot";
/// Size of a chunk; the same as in etcd.
const BLOB_BYTES: usize = 32 << 10;
/// Bytes per read of the file.
const READ_BYTES: u64 = 64 << 10;
/// Maximum number of chunks that are queued for a client.
const READ_AHEAD_CHUNKS_MAX: usize = 2;
/// Maximum number of snapshots on disk. Further clients share one that is taken after another one was sent.
const FILES_MAX: usize = 4;
/// Minimum number of bytes a client must read per interval; a slower client is disconnected and its file is deleted.
const READ_BYTES_MIN: u64 = 1 << 20;
const READ_CHECK_INTERVAL: Duration = Duration::from_secs(30);

pub(super) type SnapshotStream = Pin<Box<dyn Stream<Item = Result<SnapshotResponse, Status>> + Send>>;

/// The snapshots of a server.
#[derive(Clone)]
pub(super) struct Snapshots(Arc<SharedQuery<(), Result<Arc<StoredSnapshot>, String>>>);

/// A snapshot on disk.
struct StoredSnapshot {
    snapshot: Snapshot,
    _permit: OwnedSemaphorePermit,
}

impl Snapshots {
    /// Starts the task that takes snapshots. It ends when the last handle is dropped.
    pub(super) fn new(store: &Arc<Store>, folder: Folder) -> Self {
        let (log, permits) = (Arc::clone(store.log()), Arc::new(Semaphore::new(FILES_MAX)));
        let panics = store.metrics().rpc.panics.clone();
        let failures = store.metrics().maintenance.snapshot_failures.clone();
        let take = move |waiting: Vec<()>| {
            let (log, permits, folder) = (Arc::clone(&log), Arc::clone(&permits), folder.clone());
            let (panics, failures) = (panics.clone(), failures.clone());
            async move {
                let permit = permits.acquire_owned().await.expect("the semaphore is never closed");
                let started = Instant::now();
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
                        info!(bytes, clients, elapsed_ms = started.elapsed().as_millis(), "snapshot taken");
                    }
                    Err(error) => {
                        error!(%error, "cannot take a snapshot");
                        failures.inc();
                    }
                }
                let taken = taken.map(|snapshot| Arc::new(StoredSnapshot { snapshot, _permit: permit }));
                vec![taken; waiting.len()]
            }
        };
        // The watchdog does not follow this task, because a snapshot of a large store takes long.
        let (snapshots, run) = SharedQuery::new(take, Arc::default());
        vital("the snapshot task", run);
        Self(Arc::new(snapshots))
    }
}

impl Context {
    /// Takes a snapshot and sends it. The file is complete before the first chunk is sent, because each chunk contains
    /// the number of remaining bytes.
    pub(super) async fn send_snapshot(&self) -> Result<SnapshotStream, Status> {
        let taken = self.snapshots.0.query(()).await.unwrap_or_else(|| Err("the server is stopping".to_owned()));
        let taken =
            taken.map_err(|error| Status::internal(format!("etcdserver: a snapshot cannot be taken: {error}")))?;
        let (sender, chunks) = mpsc::channel(READ_AHEAD_CHUNKS_MAX);
        let metrics = Arc::clone(self.store.metrics());
        let panics = self.store.metrics().rpc.panics.clone();
        let sending = tokio::spawn(async move {
            catch_panics(send(taken, sender, metrics))
                .await
                .inspect_err(|panic| log_request_panic(&panics, METHOD, panic))
        });
        // A disconnected client receives the status after the queued chunks.
        let end = stream::once(sending).filter_map(async |sent| match sent {
            Ok(Ok(Sent::All)) => None,
            Ok(Ok(Sent::Partial)) => Some(Err(Status::aborted("orlop: the client read the snapshot too slowly"))),
            Ok(Err(_)) | Err(_) => Some(Err(panicked())),
        });
        Ok(Box::pin(ReceiverStream::new(chunks).chain(end)))
    }
}

/// Sends the file. Ends early if the client has disconnected or reads too slowly.
async fn send(
    taken: Arc<StoredSnapshot>,
    sender: Sender<Result<SnapshotResponse, Status>>,
    metrics: Arc<Metrics>,
) -> Sent {
    let started = Instant::now();
    let mut rate = ReadRate { until: started + READ_CHECK_INTERVAL, bytes: 0 };
    let (mut hashing, mut at) = (Hashing::new(std::io::empty()), 0);
    let bytes = taken.snapshot.bytes;
    while at < bytes {
        let len = READ_BYTES.min(bytes - at);
        let read = match read(Arc::clone(&taken), at, len, hashing).await {
            Ok(read) => read,
            Err(error) => {
                error!(%error, "cannot read a snapshot");
                let status = Status::internal(format!("etcdserver: a snapshot cannot be read: {error}"));
                let _ = timeout_at(rate.until, sender.send(Err(status))).await;
                return Sent::Partial;
            }
        };
        hashing = read.0;
        for blob in read.1.chunks(BLOB_BYTES) {
            at += blob.len() as u64;
            if !rate.send(&sender, response(bytes - at, blob.to_vec())).await {
                return Sent::Partial;
            }
        }
    }
    // The last chunk is the checksum.
    if !rate.send(&sender, response(0, hashing.checksum())).await {
        return Sent::Partial;
    }
    metrics.maintenance.snapshot.observe(started.elapsed().as_secs_f64());
    metrics.maintenance.set_last_snapshot(now());
    Sent::All
}

enum Sent {
    All,
    Partial,
}

/// Counts the bytes that a client read since the last check.
struct ReadRate {
    until: Instant,
    bytes: u64,
}

impl ReadRate {
    /// Sends a chunk. Returns false if the client has disconnected or reads too slowly.
    async fn send(&mut self, sender: &Sender<Result<SnapshotResponse, Status>>, chunk: SnapshotResponse) -> bool {
        let bytes = chunk.blob.len() as u64;
        loop {
            if let Ok(permit) = timeout_at(self.until, sender.reserve()).await {
                let Ok(permit) = permit else { return false };
                permit.send(Ok(chunk));
                self.bytes += bytes;
                return true;
            }
            if self.bytes < READ_BYTES_MIN {
                warn!(bytes = self.bytes, "disconnecting a client that reads its snapshot too slowly");
                return false;
            }
            *self = Self { until: Instant::now() + READ_CHECK_INTERVAL, bytes: 0 };
        }
    }
}

type Hash = Hashing<std::io::Empty>;

/// Reads a part of the file and adds it to the checksum, on a blocking thread.
async fn read(taken: Arc<StoredSnapshot>, at: u64, len: u64, mut hashing: Hash) -> std::io::Result<(Hash, Vec<u8>)> {
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
