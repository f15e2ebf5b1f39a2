//! Transactions that look at many keys. They are evaluated in one step, so others wait for each.

use orlop_wire::proto::client::etcdserverpb::RangeRequest;

use super::*;

/// Number of keys that are deleted and not compacted.
const DELETED: usize = 100_000;
/// Number of keys that exist before the second attack.
const LIVE: usize = 5_000;
const PUTS_MAX: usize = 10_000;
/// Number of transactions that arrive together.
const ATTACKERS: usize = 20;

async fn transactions_over_deleted_keys_are_refused_soon(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &["--max-txn-ops", &PUTS_MAX.to_string()]).await else { return };
    let mut kv = arena.client().await.kv;
    let nested = |success| op(Request::RequestTxn(TxnRequest { success, ..Default::default() }));
    let puts = |first: usize, count: usize| {
        let puts = (first..first + count).map(|number| op(Request::RequestPut(put(format!("k{number:06}"), "v"))));
        TxnRequest { success: puts.collect(), ..Default::default() }
    };
    let delete = DeleteRangeRequest { key: "k".into(), range_end: "l".into(), prev_kv: false };
    for first in (0..DELETED).step_by(PUTS_MAX) {
        kv.txn(puts(first, PUTS_MAX)).await.expect("keys are put");
    }
    kv.delete_range(delete.clone()).await.expect("the keys are deleted");
    arena.measure_idle_state().await;
    let count = op(Request::RequestRange(RangeRequest { count_only: true, ..all() }));
    let counts = vec![nested(vec![count; 64]); 60];
    let delete = op(Request::RequestDeleteRange(delete));
    for (attack, live, success) in [
        ("transactions that count deleted keys", 0, counts.clone()),
        ("transactions that delete all keys and count them", LIVE, [vec![delete], counts].concat()),
    ] {
        kv.txn(puts(DELETED, live)).await.expect("keys are put");
        let message = Bytes::from(TxnRequest { success, ..Default::default() }.encode_to_vec());
        let mut caller = Caller::connect(arena.endpoint()).await;
        let refused = caller.call(TXN, message.clone()).await.expect_err("the transaction is refused");
        assert_eq!(refused.message(), "etcdserver: too many requests", "{attack}");
        let mut attackers = JoinSet::new();
        for _ in 0..ATTACKERS {
            let (mut caller, message) = (Caller::connect(arena.endpoint()).await, message.clone());
            attackers.spawn(async move { caller.call(TXN, message).await });
        }
        arena.survives(attack, 400, attackers).await;
    }
}

on_both_backends!(transactions_over_deleted_keys_are_refused_soon);
