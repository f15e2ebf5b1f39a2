//! Attacks on snapshots.

use super::*;

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

on_both_backends!(unread_snapshots_do_not_block_others,);
