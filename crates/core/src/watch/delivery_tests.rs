//! Tests the delivery guarantees of hub, sessions and outboxes under random schedules.
//!
//! A schedule publishes changes, creates and cancels watches that start in the past, now or in the future, reads
//! slowly, runs sessions one step at a time with other operations in between, compacts, and requests progress. Outboxes
//! are small here, so watches fall behind and catch up. A [`reader::Reader`] knows which messages each watch must
//! receive, and checks every message. At the end all messages are read, and none may be missing.

mod history;
#[cfg(feature = "shuttle")]
mod races;
mod reader;
mod schedule;
mod world;

use std::sync::Arc;

use futures_util::{FutureExt as _, StreamExt as _, future::join};
use proptest::{collection::vec, prelude::*};

use self::{
    history::{History, decode},
    reader::Checked,
    schedule::{Action, Concurrent, Create, KEYS, Step, steps},
    world::{Lookup, TestStore, World},
};
use super::{Flavor, Message, Messages, Session, Spec};
use crate::{
    log::{Log, Reclaim},
    types::{KeyRange, Revision, RowId, WatchId},
};

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn watches_are_ordered_unique_atomic_and_reliable(steps in vec(steps(), 1..60)) {
        run(steps, Lookup::Nothing)?;
    }

    #[test]
    fn watches_that_look_up_the_index_are_ordered_unique_atomic_and_reliable(steps in vec(steps(), 1..60)) {
        run(steps, Lookup::Index)?;
    }
}

const ALL_EVENTS: Flavor = Flavor { prev_kv: false, puts: true, deletes: true };

fn create(id: i64, back: Option<i64>, flavor: Flavor) -> Create {
    let range = KeyRange::from_wire(b"a", b"");
    Create { id: Some(id), range, back, flavor, fragment: None, progress_notify: false }
}

fn publish_one() -> Step {
    Step::Publish { txns: vec![vec![(0, true)]], concurrent: None }
}

fn cancel(position: usize) -> Step {
    Step::Stream(0, Action::Cancel(position))
}

#[track_caller]
fn check(steps: Vec<Step>) {
    for lookup in [Lookup::Index, Lookup::Nothing] {
        run(steps.clone(), lookup).unwrap();
    }
}

fn run(steps: Vec<Step>, lookup: Lookup) -> Checked {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new(lookup);
        for step in steps {
            world.run(step).await?;
        }
        world.finish().await
    })
}

/// Changes are collected without previous pairs. A watch that needs them joins before the changes are published.
#[test]
fn watch_that_joins_during_a_commit_gets_previous_pairs() {
    let concurrent = Some((0, create(1, None, Flavor { prev_kv: true, ..ALL_EVENTS })));
    check(vec![publish_one(), Step::Publish { txns: vec![vec![(0, true)]], concurrent }]);
}

/// The first watch waits for a revision, which is committed just before the watch is canceled.
#[test]
fn watch_gets_no_event_of_a_canceled_watch_with_its_id() {
    let create = |back| Step::Stream(0, Action::Create(create(1, back, ALL_EVENTS)));
    let notify = Step::Stream(0, Action::HandleNotifications);
    check(vec![publish_one(), create(Some(-2)), publish_one(), publish_one(), cancel(0), create(None), notify]);
}

#[test]
fn progress_is_sent_when_the_watch_that_catches_up_is_canceled() {
    let create = |id, back| Step::Stream(0, Action::Create(create(id, back, ALL_EVENTS)));
    let progress = Step::Stream(0, Action::Progress);
    check(vec![publish_one(), create(2, None), create(1, Some(0)), progress, cancel(1)]);
}

#[test]
fn progress_is_sent_when_the_watch_from_a_future_revision_is_canceled() {
    let create = |id, back| Step::Stream(0, Action::Create(create(id, back, ALL_EVENTS)));
    let progress = Step::Stream(0, Action::Progress);
    check(vec![publish_one(), create(2, None), create(1, Some(-9)), progress, cancel(1)]);
}

/// Under load, changes are published during each read.
#[tokio::test]
async fn watch_catches_up_although_changes_are_published_during_each_read() {
    for prev_kv in [false, true] {
        let flavor = Flavor { prev_kv, ..ALL_EVENTS };
        let publish_during_reads = || Action::Advance {
            concurrent: [vec![Concurrent::Publish(vec![(0, true)])], vec![]],
            cancel_before_read: false,
        };
        let mut world = World::new(Lookup::Nothing);
        let mut steps = vec![publish_one(), publish_one()];
        // The second watch is behind while the first one reads.
        steps.extend((1..3).map(|id| Step::Stream(0, Action::Create(create(id, Some(1), flavor)))));
        for _ in 0..4 {
            steps.extend([publish_during_reads(), Action::Read(usize::MAX)].map(|action| Step::Stream(0, action)));
        }
        for step in steps {
            world.run(step).await.unwrap();
        }
        assert!(!world.has_work(), "prev_kv: {prev_kv}");
        world.finish().await.unwrap();
    }
}

/// Another instance compacts, and the hub does not know it yet when the watch reads the log.
#[tokio::test]
async fn watch_ends_as_compacted_if_another_instance_deleted_its_rows() {
    let only = KeyRange::from_wire(KEYS[0].as_bytes(), b"");
    let starts = [(2, true), (4, true), (5, false), (6, false)];
    let cases = [KeyRange::all(), only].into_iter().flat_map(|range| starts.map(|start| (range.clone(), start)));
    for (range, (start, is_compacted)) in cases {
        let store = TestStore::new(Lookup::Index);
        let TestStore { log, hub, .. } = &store;
        let mut history = History::default();
        for _ in 0..6 {
            store.publish(history.commit(&[vec![(0, true)]], true)).await;
        }
        let outbox = Arc::new(hub.outbox());
        let mut messages = Messages::new(Arc::clone(&outbox));
        let mut session = Session::new(Arc::clone(hub), log.clone() as Arc<dyn Log>, outbox);
        let rows: Vec<RowId> = (2..5).map(|revision| RowId::new(Revision(revision), 0)).collect();
        log.reclaim(Reclaim::Rows { rows: &rows, compacted: Revision(5), server: 0 }).await.unwrap();
        session.create(Spec {
            id: None,
            range,
            start: Some(Revision(start)),
            flavor: Flavor { prev_kv: false, puts: true, deletes: true },
            fragment: None,
            progress_notify: false,
        });
        while session.has_work() {
            session.advance().await.unwrap();
        }
        let mut compacted = None;
        while let Some(Some(message)) = messages.next().now_or_never() {
            if let Message::Compacted { compact_revision, .. } = message.unwrap() {
                compacted = Some(compact_revision);
            }
        }
        assert_eq!(compacted, is_compacted.then_some(Revision(5)), "from {start}");
    }
}

/// A watch that accepts fragments reads several pages at a time, and another instance compacts after the first of them.
#[tokio::test]
async fn watch_ends_as_compacted_if_rows_are_deleted_between_two_pages() {
    let store = TestStore::new(Lookup::Nothing);
    let TestStore { log, hub, .. } = &store;
    let mut history = History::default();
    for _ in 0..20 {
        store.publish(history.commit(&[vec![(0, true)]], true)).await;
    }
    let outbox = Arc::new(hub.outbox());
    let mut messages = Messages::new(Arc::clone(&outbox));
    let mut session = Session::new(Arc::clone(hub), log.clone() as Arc<dyn Log>, outbox);
    session.create(Spec {
        id: None,
        range: KeyRange::all(),
        start: Some(Revision(2)),
        flavor: ALL_EVENTS,
        fragment: Some(1 << 20),
        progress_notify: false,
    });
    let compact = async {
        while log.pages() == 0 {
            tokio::task::yield_now().await;
        }
        let rows: Vec<RowId> = (2..12).map(|revision| RowId::new(Revision(revision), 0)).collect();
        log.reclaim(Reclaim::Rows { rows: &rows, compacted: Revision(12), server: 0 }).await.unwrap();
    };
    // Polls the session first, always.
    join(session.advance(), compact).await.0.unwrap();
    assert_eq!(log.pages(), 2, "the second page was read after the deletion");
    let mut received = Vec::new();
    while let Some(Some(message)) = messages.next().now_or_never() {
        received.push(message.unwrap());
    }
    let compacted = Revision(12);
    assert!(
        matches!(&received[..], [Message::Created { .. }, Message::Compacted { compact_revision, .. }] if *compact_revision == compacted),
        "{received:?}"
    );
}

/// Otherwise the hub would queue events for it forever.
#[tokio::test]
async fn stream_that_ends_leaves_no_watch_behind() {
    let store = TestStore::new(Lookup::Nothing);
    let mut history = History::default();
    for _ in 0..2 {
        store.publish(history.commit(&[vec![(0, true)]], true)).await;
    }
    let outbox = Arc::new(store.hub.outbox());
    let log = Arc::clone(&store.log) as Arc<dyn Log>;
    let mut session = Session::new(Arc::clone(&store.hub), log, Arc::clone(&outbox));
    // Synced, behind and waiting.
    for start in [None, Some(2), Some(99)] {
        session.create(Spec {
            id: None,
            range: KeyRange::all(),
            start: start.map(Revision),
            flavor: ALL_EVENTS,
            fragment: None,
            progress_notify: false,
        });
    }
    drop(session);
    assert_eq!((Arc::strong_count(&outbox), Arc::weak_count(&outbox)), (1, 0));
}

/// Clients resume their watches from old revisions after a restart, and most of the keys have not changed since.
#[tokio::test]
async fn watches_of_single_keys_read_only_their_own_changes() {
    const QUIET: usize = 400;
    for prev_kv in [false, true] {
        let store = TestStore::new(Lookup::Index);
        let mut history = History::default();
        for txn in [vec![(0, true), (1, true), (3, true)], vec![(1, false)]] {
            store.publish(history.commit(&[txn], false)).await;
        }
        let start = store.hub.head().next();
        // Of every 20 changes, 2 are of the first key.
        for number in 0..200 {
            let txn = vec![(if number % 10 == 0 { 0 } else { 4 }, number % 40 != 20)];
            store.publish(history.commit(&[txn], false)).await;
        }
        let outbox = Arc::new(store.hub.outbox());
        let mut messages = Messages::new(Arc::clone(&outbox));
        let mut session =
            Session::new(Arc::clone(&store.hub), Arc::clone(&store.log) as Arc<dyn Log>, Arc::clone(&outbox));
        let quiet = [KEYS[1], KEYS[3], "never written"].into_iter().cycle().take(QUIET);
        for key in [KEYS[0]].into_iter().chain(quiet) {
            session.create(Spec {
                id: None,
                range: KeyRange::from_wire(key.as_bytes(), b""),
                start: Some(start),
                flavor: Flavor { prev_kv, ..ALL_EVENTS },
                fragment: None,
                progress_notify: false,
            });
        }
        let mut received = Vec::new();
        loop {
            while let Some(Some(message)) = messages.next().now_or_never() {
                match message.unwrap() {
                    Message::Events { id: WatchId(0), events, .. } => received.extend(decode(&events.concat())),
                    Message::Created { .. } => {}
                    other @ (Message::Events { .. }
                    | Message::Refused { .. }
                    | Message::Canceled { .. }
                    | Message::Compacted { .. }
                    | Message::Progress { .. }) => panic!("unexpected {other:?}"),
                }
            }
            if !session.has_work() {
                break;
            }
            session.advance().await.unwrap();
        }
        let own = history.committed.iter().filter(|committed| {
            committed.change.row.revision >= start && committed.change.key.as_slice() == KEYS[0].as_bytes()
        });
        let expected: Vec<_> =
            own.map(|committed| committed.event(committed.shown_prev.as_ref().filter(|_| prev_kv))).collect();
        assert_eq!(expected.len(), 20);
        assert_eq!(received, expected, "prev_kv: {prev_kv}");
        assert_eq!(store.log.pages(), 0, "no watch reads the changes of all keys");
    }
}
