use super::*;
use crate::{
    types::{ChangeKind, EncodedKv, Prev, RowId, Version},
    watch::End,
};

#[test]
fn stream_waits_for_progress_at_most_once() {
    let hub = Hub::new(Revision::EMPTY, None, Arc::default());
    let outbox = Arc::new(hub.outbox());
    for start in [9, 9, 8, 7] {
        assert!(!hub.progress(&outbox, Some(Revision(start))));
    }
    let waiting = |hub: &Hub| hub.state.lock().progress.iter().map(|(start, _)| start.0).collect::<Vec<_>>();
    assert_eq!(waiting(&hub), [7]);
    hub.publish(&[], Revision(7), |_| {});
    assert_eq!(waiting(&hub), [0; 0]);
}

#[test]
fn streams_that_have_ended_do_not_wait_for_progress() {
    let hub = Hub::new(Revision::EMPTY, None, Arc::default());
    let open = Arc::new(hub.outbox());
    assert!(!hub.progress(&open, Some(Revision(9))));
    for _ in 0..100 {
        let outbox = Arc::new(hub.outbox());
        assert!(!hub.progress(&outbox, Some(Revision(9))));
        outbox.end(End::ClientGone);
    }
    // The last one is removed by the next that waits, or by the next publication.
    assert_eq!(hub.state.lock().progress.len(), 2);
}

/// A watch falls behind after its session has looked for such watches, and before the session asks for the notification.
#[test]
fn progress_is_not_sent_while_a_watch_is_behind() {
    let hub = Hub::new(Revision::EMPTY, None, Arc::default());
    let outbox = Arc::new(hub.outbox());
    outbox.mark_lagging(WatchId(1), Revision(2));
    assert!(!hub.progress(&outbox, None));
    outbox.take_lagging();
    assert!(hub.progress(&outbox, None));
}

#[test]
fn watches_of_all_streams_have_a_limit_together() {
    let hub = Hub::new(Revision(10), Some(Revision(5)), Arc::default());
    let streams = [Arc::new(hub.outbox()), Arc::new(hub.outbox())];
    let range = KeyRange::from_wire(b"a", b"z");
    let flavor = Flavor { prev_kv: false, puts: true, deletes: true };
    let spec = |start| Spec {
        id: None,
        range: range.clone(),
        start: Some(Revision(start)),
        flavor,
        fragment: None,
        progress_notify: false,
    };
    let (compacted, behind, future) = (spec(3), spec(7), spec(100));
    // Seven more fit.
    let others = WATCH_BYTES_MAX - 7 * behind.watch_bytes();
    hub.state.lock().watch_bytes = others;
    let create = |id: usize, spec: &Spec| hub.create(&streams[id % 2], WatchId(id as i64), spec);
    assert_eq!(create(0, &compacted), Some(JoinOutcome::Compacted(Revision(5))));
    for id in 1..=6 {
        assert_eq!(create(id, &behind), Some(JoinOutcome::Behind));
    }
    assert_eq!(create(7, &future), Some(JoinOutcome::Waiting));
    assert_eq!(create(8, &behind), None);
    hub.remove(&streams[1], WatchId(7), &future);
    assert_eq!(create(8, &behind), Some(JoinOutcome::Behind));
    for id in [1, 2, 3, 4, 5, 6, 8] {
        hub.remove(&streams[id % 2], WatchId(id as i64), &behind);
    }
    assert_eq!(hub.state.lock().watch_bytes, others);
}

/// The first watch is behind from the beginning. Others, which have read the log up to revision 10, join after each case.
#[test]
fn recent_changes_are_sent_only_if_they_are_complete() {
    let version = Version { row: RowId::new(Revision(1), 0), create_revision: Revision(1), version: 1 };
    let pair = || EncodedKv::new(b"k", version, b"v", None);
    let change = |revision, prev: Option<EncodedKv>| Change {
        row: RowId::new(Revision(revision), 0),
        key: b"k".as_slice().into(),
        kind: ChangeKind::Delete,
        prev: Some(Prev { row: RowId::new(Revision(1), 0), kv: prev }),
        prev_lease: None,
    };
    let publish = |hub: &Hub, revision, prev| hub.publish(&[change(revision, prev)], Revision(revision), |_| {});
    let spec = |prev_kv| Spec {
        id: None,
        range: KeyRange::all(),
        start: Some(Revision(11)),
        flavor: Flavor { prev_kv, puts: true, deletes: true },
        fragment: None,
        progress_notify: false,
    };
    type Case<'a> = (&'a str, &'a dyn Fn(&Hub), JoinOutcome, JoinOutcome);
    let cases: [Case<'_>; 5] = [
        ("complete", &|hub| publish(hub, 11, Some(pair())), JoinOutcome::Synced, JoinOutcome::Synced),
        ("without a previous pair", &|hub| publish(hub, 11, None), JoinOutcome::Synced, JoinOutcome::Behind),
        (
            "compacted",
            &|hub| {
                publish(hub, 11, Some(pair()));
                hub.record_compaction(Revision(11), || {});
            },
            JoinOutcome::Synced,
            JoinOutcome::Behind,
        ),
        (
            "behind a gap",
            &|hub| {
                hub.reset_to(Revision(12), None, || {});
                publish(hub, 13, Some(pair()));
            },
            JoinOutcome::Behind,
            JoinOutcome::Behind,
        ),
        (
            "too many",
            &|hub| (11..100).for_each(|revision| publish(hub, revision, Some(pair()))),
            JoinOutcome::Behind,
            JoinOutcome::Behind,
        ),
    ];
    for (case, publish, without_prev, with_prev) in cases {
        let hub = Hub::new(Revision(10), None, Arc::default());
        let outbox = Arc::new(hub.outbox());
        let first = Spec { start: Some(Revision(5)), ..spec(true) };
        assert_eq!(hub.create(&outbox, WatchId(0), &first), Some(JoinOutcome::Behind));
        assert!(hub.wants_prev(), "{case}");
        publish(&hub);
        for (id, prev_kv, expected) in [(1, false, without_prev), (2, true, with_prev)] {
            assert_eq!(hub.create(&outbox, WatchId(id), &spec(prev_kv)), Some(expected), "{case}, prev_kv: {prev_kv}");
        }
    }
}
