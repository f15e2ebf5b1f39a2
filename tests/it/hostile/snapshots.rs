//! Attacks on snapshots.

use orlop_wire::proto::client::etcdserverpb::SnapshotResponse;
use tonic::{Status, Streaming};

use super::*;
use crate::support::Client;

async fn unread_snapshots_do_not_block_others(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    fill(&mut arena, 200, 10_000).await;
    let mut held = Vec::new();
    for _ in 0..600 {
        let mut wire = Wire::open(arena.endpoint()).await;
        assert!(wire.call(1, SNAPSHOT, &[], END_STREAM).await);
        held.push(wire);
    }
    tokio::time::sleep(Duration::from_secs(10)).await;
    // The attack must not exhaust the threads for blocking work: another snapshot still succeeds.
    let mut client = arena.client().await;
    let whole = async {
        loop {
            let Ok(pieces) = client.maintenance.snapshot(SnapshotRequest {}).await else {
                tokio::time::sleep(Duration::from_millis(100)).await;
                continue;
            };
            let (mut pieces, mut bytes) = (pieces.into_inner(), 0);
            while let Some(piece) = pieces.message().await.expect("a piece") {
                bytes += piece.blob.len();
            }
            return bytes;
        }
    };
    assert!(timeout(DEADLINE * 4, whole).await.expect("a snapshot in time") > 2_000_000);
    arena.survives("600 snapshots, never read", 800, held).await;
}

/// Begins a snapshot on a connection of its own, which ends when the returned client is dropped.
async fn begin(server: &Server) -> (Client, Streaming<SnapshotResponse>) {
    let mut client = Client::connect(server.endpoint()).await;
    let pieces = client.maintenance.snapshot(SnapshotRequest {}).await.expect("a snapshot").into_inner();
    (client, pieces)
}

/// Returns the size of a snapshot.
async fn read(pieces: &mut Streaming<SnapshotResponse>) -> Result<usize, Status> {
    let mut bytes = 0;
    while let Some(piece) = timeout(DEADLINE, pieces.message()).await.expect("a piece in time")? {
        bytes += piece.blob.len();
    }
    Ok(bytes)
}

/// The database keeps the state of a snapshot until it was read, and clients that share it wait for the slowest.
async fn client_that_does_not_read_its_snapshot_is_disconnected(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    // More than the buffers of a connection.
    for number in 0..32 {
        client.put(format!("k{number}"), vec![b'v'; 1_000_000]).await;
    }
    // The one that is first has its own snapshot, and the other two share the next one.
    let (mut slow, mut one, mut other) = tokio::join!(begin(&server), begin(&server), begin(&server));
    let (one, other) = tokio::join!(read(&mut one.1), read(&mut other.1));
    for bytes in [one, other] {
        assert!(bytes.expect("a whole snapshot") > 32_000_000);
    }
    eventually("a warning", async || {
        let log = server.log();
        if log.contains("disconnecting clients that read their snapshot too slowly") { Ok(()) } else { Err(log) }
    })
    .await;
    let cut = read(&mut slow.1).await.expect_err("the snapshot is cut off");
    assert_eq!((cut.code(), cut.message()), (Code::Aborted, "orlop: the client read the snapshot too slowly"));
}

on_both_backends!(unread_snapshots_do_not_block_others, client_that_does_not_read_its_snapshot_is_disconnected);
