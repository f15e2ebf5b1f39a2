//! Maintenance's Snapshot: the log as one file, in pieces.

use std::{io::Read, pin::Pin, time::Instant};

use futures_util::Stream;
use prometheus::Histogram;
use tokio::{
    sync::mpsc::{self, Sender},
    task::spawn_blocking,
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;
use tracing::{error, info};

use super::{Context, STORAGE_VERSION, status::panicked};
use crate::{
    proto::server::etcdserverpb::SnapshotResponse,
    snapshot::{Hashing, Snapshot},
    supervise::{catch, tell_request},
};

/// As etcd's.
const BLOB_BYTES: usize = 32 << 10;
/// Pieces that are read ahead of the client.
const AHEAD_MAX: usize = 4;

pub(super) type SnapshotStream = Pin<Box<dyn Stream<Item = Result<SnapshotResponse, Status>> + Send>>;

impl Context {
    /// Takes a snapshot and sends it. The whole file is written before the first piece leaves, as each says how many bytes
    /// follow it.
    pub(super) async fn send_snapshot(&self) -> Result<SnapshotStream, Status> {
        let begun = Instant::now();
        let snapshot = self.settings.snapshots.take(&**self.store.log()).await.map_err(|error| {
            error!(%error, "a snapshot could not be taken");
            Status::internal(format!("etcdserver: a snapshot cannot be taken: {error}"))
        })?;
        info!(bytes = snapshot.bytes, elapsed_ms = begun.elapsed().as_millis(), "snapshot taken");
        let (sender, pieces) = mpsc::channel(AHEAD_MAX);
        let times = self.store.metrics().maintenance.snapshot.clone();
        // The file is read, and hashed, off the threads that serve.
        let panics = self.store.metrics().rpc.panics.clone();
        spawn_blocking(move || {
            if let Err(panic) = catch(|| send(snapshot, &sender, &times)) {
                tell_request(&panics, "/etcdserverpb.Maintenance/Snapshot", &panic);
                // Who asked may be gone.
                let _ = sender.blocking_send(Err(panicked()));
            }
        });
        Ok(Box::pin(ReceiverStream::new(pieces)))
    }
}

/// Ends early when the client is gone.
fn send(snapshot: Snapshot, sender: &Sender<Result<SnapshotResponse, Status>>, times: &Histogram) {
    let begun = Instant::now();
    let mut hashing = Hashing::new(&snapshot.file);
    let mut left = snapshot.bytes;
    while left > 0 {
        let mut blob = vec![0; usize::try_from(left).unwrap_or(BLOB_BYTES).min(BLOB_BYTES)];
        let piece = match hashing.read_exact(&mut blob) {
            Ok(()) => {
                left -= blob.len() as u64;
                Ok(response(left, blob))
            }
            Err(error) => {
                error!(%error, "a snapshot could not be read");
                left = 0;
                Err(Status::internal(format!("etcdserver: a snapshot cannot be read: {error}")))
            }
        };
        let failed = piece.is_err();
        if sender.blocking_send(piece).is_err() || failed {
            return;
        }
    }
    // The answer that ends with nothing left is the checksum.
    if sender.blocking_send(Ok(response(0, hashing.checksum()))).is_ok() {
        times.observe(begun.elapsed().as_secs_f64());
    }
}

fn response(remaining_bytes: u64, blob: Vec<u8>) -> SnapshotResponse {
    SnapshotResponse { header: None, remaining_bytes, blob: blob.into(), version: STORAGE_VERSION.to_owned() }
}
