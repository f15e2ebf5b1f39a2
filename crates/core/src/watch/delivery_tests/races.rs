//! Hub, sessions and outboxes under schedules of their threads ([`crate::sync`]). The applier publishes, the session of
//! each stream joins, catches up and cancels, its connection reads, and a compaction deletes rows, all at the same time.

use std::{
    collections::BTreeMap,
    sync::{
        Arc, LazyLock,
        atomic::{AtomicUsize, Ordering::Relaxed},
    },
};

use futures_util::StreamExt as _;
use shuttle::{
    sync::atomic::{AtomicI64, Ordering::SeqCst},
    thread,
};

use super::{
    ALL_EVENTS,
    history::{History, decode},
    schedule::KEYS,
};
use crate::{
    index::{CompactionCursor, TreeIndex},
    log::{Append, Appended, Log, Reclaim, memory::MemoryLog},
    metrics::Metrics,
    sync::{
        RwLock,
        schedules::{self, block_on},
    },
    types::{Change, KeyRange, Revision, RowId, WatchId},
    watch::{Flavor, Hub, Message, Messages, NO_WATCH, Outbox, Session, Spec},
};

/// The revisions of the schedule. Each puts three keys, so that a stream that is not read fills its outbox.
const REVISIONS: std::ops::RangeInclusive<i64> = 2..=8;
const LAST: Revision = Revision(*REVISIONS.end());
/// The revisions at which the schedule compacts. They may end every watch but the last one.
const COMPACTIONS: std::ops::RangeInclusive<i64> = 3..=5;
/// The watches of each stream: from the first revision, from the head, and from a future revision.
const STARTS: [Option<Revision>; 3] = [Some(Revision(2)), None, Some(Revision(6))];

/// What happened in all schedules: events of a page of the log or behind a full outbox, and watches that ended as
/// compacted.
static FELL_BEHIND: AtomicUsize = AtomicUsize::new(0);
static ENDED_AS_COMPACTED: AtomicUsize = AtomicUsize::new(0);

#[test]
fn watches_on_several_threads_are_ordered_unique_atomic_and_reliable() {
    schedules::check(1_000, || {
        // Creating the metrics takes longer than a schedule.
        static METRICS: LazyLock<Arc<Metrics>> = LazyLock::new(Arc::default);
        let log = Arc::new(MemoryLog::default());
        let index = Arc::new(RwLock::new(TreeIndex::new()));
        let hub = Hub::new(Revision::EMPTY, None, Arc::clone(&METRICS)).with_index(Arc::clone(&index));
        let hub = Arc::new(hub);
        let readable = Arc::new(AtomicI64::new(Revision::EMPTY.0));
        let streams: Vec<_> = [Client::Hasty, Client::Patient]
            .into_iter()
            .flat_map(|client| serve(client, &hub, &log, &readable))
            .collect();
        let compactor = {
            let (hub, log, index) = (Arc::clone(&hub), Arc::clone(&log), Arc::clone(&index));
            thread::spawn(move || compact(&hub, &log, &index))
        };
        for changes in history() {
            let last = changes.last().expect("each revision has changes").row.revision;
            let appended = block_on(log.append(Append::rows(last.prev(), &changes)));
            assert!(matches!(appended, Ok(Appended::Done)));
            hub.publish(&changes, last, |changes| {
                let mut index = index.write();
                changes.iter().for_each(|change| index.apply(change));
                readable.store(last.0, SeqCst);
            });
            thread::yield_now();
        }
        for thread in streams.into_iter().chain([compactor]) {
            thread.join().expect("the thread does not panic");
        }
        assert_eq!(hub.pending.slots(), 0, "no slot is left");
    });
    assert!(FELL_BEHIND.load(Relaxed) > 0 && ENDED_AS_COMPACTED.load(Relaxed) > 0, "both occur in some schedules");
}

/// Returns the changes of each revision.
fn history() -> Vec<Vec<Change>> {
    let mut history = History::default();
    REVISIONS.map(|_| history.commit(&[vec![(0, true), (2, true), (4, true)]], true)).collect()
}

/// Compacts at each of the revisions as soon as it exists.
fn compact(hub: &Hub, log: &MemoryLog, index: &RwLock<TreeIndex>) {
    for revision in COMPACTIONS.map(Revision) {
        while hub.head() < revision {
            thread::yield_now();
        }
        let mut removed = Vec::new();
        hub.record_compaction(revision, || index.write().begin_compaction(revision));
        while index.write().compact_step(&mut CompactionCursor::at(revision), usize::MAX, &mut removed) {}
        let rows: Vec<RowId> = removed.iter().map(|superseded| superseded.row).collect();
        block_on(log.reclaim(Reclaim::Rows { rows: &rows, compacted: revision, server: 0 })).expect("a log in memory");
    }
}

/// The client of a stream.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Client {
    /// Sends all requests at once, and cancels its first watch.
    Hasty,
    /// Sends a request when its watches have caught up. One of its watches wants previous pairs.
    Patient,
}

/// Starts the session and the connection of a stream.
fn serve(
    client: Client,
    hub: &Arc<Hub>,
    log: &Arc<MemoryLog>,
    readable: &Arc<AtomicI64>,
) -> [thread::JoinHandle<()>; 2] {
    let outbox = Arc::new(hub.outbox());
    let messages = Messages::new(Arc::clone(&outbox));
    let session = Session::new(Arc::clone(hub), Arc::clone(log) as Arc<dyn Log>, Arc::clone(&outbox));
    let readable = Arc::clone(readable);
    [
        thread::spawn(move || block_on(run_session(session, &outbox, client))),
        thread::spawn(move || block_on(read(messages, client, &readable))),
    ]
}

/// Serves one stream as the Watch service does: requests while the outbox has capacity, notifications, pages of the log.
async fn run_session(mut session: Session, outbox: &Outbox, client: Client) {
    let mut requests = (0..).zip(STARTS).map(|(id, start)| Spec {
        id: Some(WatchId(id)),
        range: KeyRange::from_wire(KEYS[0].as_bytes(), b"\0"),
        start,
        flavor: Flavor { prev_kv: client == Client::Patient && id == 1, ..ALL_EVENTS },
        fragment: None,
        progress_notify: id == 1,
    });
    let mut is_requested = false;
    while !outbox.has_ended() {
        let is_ready = |session: &Session| outbox.has_capacity() && (client == Client::Hasty || !session.has_work());
        if is_ready(&session) {
            if let Some(spec) = requests.next() {
                session.create(spec);
            } else if !is_requested {
                is_requested = true;
                session.tick();
                if client == Client::Hasty {
                    session.cancel(WatchId(0));
                }
                session.request_progress();
            }
        }
        let has_requests = !is_requested && is_ready(&session);
        tokio::select! {
            biased;
            () = outbox.notified() => session.handle_notifications(),
            advanced = session.advance(), if session.has_work() => advanced.expect("a log in memory"),
            () = std::future::ready(()), if has_requests => {}
        }
    }
}

/// Reads until each watch has received everything.
async fn read(mut messages: Messages, client: Client, readable: &AtomicI64) {
    let mut watches: BTreeMap<WatchId, Received> = BTreeMap::new();
    let (mut ended, mut progress) = (0, None);
    loop {
        let is_complete = watches.values().all(|watch| watch.next > LAST) && watches.len() + ended == STARTS.len();
        if is_complete && (ended > 0 || client == Client::Patient) && progress.is_some() {
            return;
        }
        let message = messages.next().await.expect("the stream is open").expect("the server is running");
        let text = format!("{message:?}");
        match message {
            Message::Created { id, revision } => {
                let start = STARTS[usize::try_from(id.0).expect("an id of this stream")];
                let watch = Received { next: start.unwrap_or(revision.next()).max(Revision(2)), header: revision };
                assert!(watches.insert(id, watch).is_none(), "{text}");
            }
            Message::Events { id, revision, events, fragment: false } => {
                let watch = watches.get_mut(&id).unwrap_or_else(|| panic!("{text} without a watch"));
                assert!(revision >= watch.header, "{text} after {}", watch.header);
                assert!(revision.0 <= readable.load(SeqCst), "{text} before its revision is readable");
                watch.header = revision;
                let events = decode(&events.concat());
                FELL_BEHIND.fetch_add(usize::from(events.len() > 3), Relaxed);
                for revisions in events.chunks(3) {
                    let found = revisions.iter().map(|event| event.kv.as_ref().map_or(0, |kv| kv.mod_revision));
                    assert_eq!(found.collect::<Vec<_>>(), [watch.next.0; 3], "{text}");
                    watch.next = watch.next.next();
                }
                assert!(watch.next.prev() <= revision, "{text}");
            }
            Message::Progress { id, revision } => {
                for (_, watch) in watches.iter().filter(|(watch, _)| id == NO_WATCH || **watch == id) {
                    assert!(watch.next > revision, "{text} overtakes {}", watch.next);
                }
                if id == NO_WATCH {
                    progress = Some(revision);
                }
            }
            Message::Canceled { id: WatchId(0), .. } => {
                assert!(watches.remove(&WatchId(0)).is_some(), "{text}");
                ended += 1;
            }
            Message::Compacted { id, compact_revision } => {
                let watch = watches.remove(&id).unwrap_or_else(|| panic!("{text} without a watch"));
                assert!(
                    COMPACTIONS.contains(&compact_revision.0) && watch.next < compact_revision,
                    "{text} at {}",
                    watch.next
                );
                ENDED_AS_COMPACTED.fetch_add(1, Relaxed);
                ended += 1;
            }
            Message::Refused { .. } | Message::Events { .. } | Message::Canceled { .. } => {
                panic!("unexpected {text}")
            }
        }
    }
}

/// What a watch has received.
struct Received {
    /// The first revision that it has not received.
    next: Revision,
    /// The revision of the last header.
    header: Revision,
}
