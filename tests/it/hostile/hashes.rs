//! Hashes of the whole store: each reads the history and keeps the rows of all keys in memory.

use orlop_wire::proto::client::etcdserverpb::CompactionRequest;

use super::*;

const HASH_KV: &str = "/etcdserverpb.Maintenance/HashKV";
/// Number of keys. Their rows take 2 MiB in a hash.
const KEYS: usize = 100_000;
const PUTS_MAX: usize = 10_000;
/// Number of clients. If all their hashes were computed at the same time, they would take 400 MiB.
const ATTACKERS: usize = 200;

async fn hashes_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &["--max-txn-ops", &PUTS_MAX.to_string()]).await else { return };
    let mut kv = arena.client().await.kv;
    let mut revision = 0;
    for first in (0..KEYS).step_by(PUTS_MAX) {
        let puts = (first..first + PUTS_MAX).map(|number| op(Request::RequestPut(put(format!("k{number:06}"), "v"))));
        let txn = TxnRequest { success: puts.collect(), ..Default::default() };
        let done = kv.txn(txn).await.expect("keys are put").into_inner();
        revision = done.header.expect("a header").revision;
    }
    // Before the first compaction, a hash includes all rows and keeps none.
    kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    arena.measure_idle_state().await;
    let mut attackers = JoinSet::new();
    for _ in 0..ATTACKERS {
        let caller = Caller::connect(arena.endpoint()).await;
        // An empty message requests the hash at the newest revision.
        attackers.spawn(caller.call_in_a_loop(HASH_KV, Bytes::new()));
    }
    arena.survives_continuous("200 clients that hash all keys", 300, attackers).await;
}

on_both_backends!(hashes_use_bounded_memory);
