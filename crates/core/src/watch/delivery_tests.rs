//! Tests the delivery guarantees of hub, sessions and outboxes under random schedules.
//!
//! A schedule publishes changes, creates and cancels watches that start in the past, now or in the future, reads
//! slowly, runs sessions one step at a time with other operations in between, compacts, and requests progress. Outboxes
//! are small here, so watches fall behind and catch up. A [`Reader`] knows which messages each watch must receive and
//! checks every message. At the end all messages are read, and none may be missing.

use std::{
    collections::{BTreeMap, VecDeque},
    pin::pin,
    sync::Arc,
};

use futures_util::{FutureExt as _, StreamExt as _, poll};
use proptest::{collection::vec, option, prelude::*, sample::select};
use prost::Message as _;

use super::{Flavor, Hub, Message, Messages, NO_WATCH, Outbox, Session, Spec};
use crate::{
    index::{CompactionCursor, TreeIndex},
    log::{Append, Appended, Log, Reclaim, memory::MemoryLog},
    types::{
        Change, ChangeKind, EncodedEvent, EncodedKv, Key, KeyRange, LeaseId, Prev, Revision, RowId, Version, WatchId,
    },
};
use orlop_wire::proto::client::{etcdserverpb::WatchResponse, mvccpb::Event};

const KEYS: [&str; 5] = ["a", "a\0", "ab", "b", "c"];
const STREAMS: usize = 2;

#[derive(Clone, Debug)]
enum Step {
    /// Transactions of one append. Each puts keys, or deletes them if they exist. A watch may be created after the
    /// append began and before its changes are published.
    Publish {
        txns: Vec<Vec<(usize, bool)>>,
        amid: Option<(usize, Create)>,
    },
    Stream(usize, Action),
    Compact {
        back: i64,
        purge: bool,
    },
}

#[derive(Clone, Debug)]
enum Action {
    Create(Create),
    /// A watch, by its position among the created ones.
    Cancel(usize),
    Progress,
    Tick,
    Read(usize),
    Attend,
    /// Advances a watch. The given operations run before and after its read of the log, and the call may be canceled
    /// before the read.
    Advance {
        amid: [Vec<Amid>; 2],
        give_up: bool,
    },
}

/// Operations of other tasks while a session waits for the log.
#[derive(Clone, Debug)]
enum Amid {
    Publish(Vec<(usize, bool)>),
    Compact { back: i64, purge: bool },
    Read(usize),
}

#[derive(Clone, Debug)]
struct Create {
    id: Option<i64>,
    range: KeyRange,
    /// The distance of the start revision below the head.
    back: Option<i64>,
    flavor: Flavor,
    fragment: Option<usize>,
    progress_notify: bool,
}

type Checked = Result<(), TestCaseError>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(4_000))]

    #[test]
    fn watches_are_ordered_unique_atomic_and_reliable(steps in vec(steps(), 1..60)) {
        run(steps)?;
    }
}

const WHOLE: Flavor = Flavor { prev_kv: false, puts: true, deletes: true };

fn create(id: i64, back: Option<i64>, flavor: Flavor) -> Create {
    let range = KeyRange::from_wire(b"a", b"");
    Create { id: Some(id), range, back, flavor, fragment: None, progress_notify: false }
}

fn publish_one() -> Step {
    Step::Publish { txns: vec![vec![(0, true)]], amid: None }
}

fn cancel(place: usize) -> Step {
    Step::Stream(0, Action::Cancel(place))
}

#[track_caller]
fn check(steps: Vec<Step>) {
    run(steps).unwrap();
}

fn run(steps: Vec<Step>) -> Checked {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(async {
        let mut world = World::new();
        for step in steps {
            world.run(step).await?;
        }
        world.finish().await
    })
}

/// The watch joins between the append and the publishing of changes that were collected without previous pairs.
#[test]
fn watch_that_joins_during_a_commit_gets_previous_pairs() {
    let amid = Some((0, create(1, None, Flavor { prev_kv: true, ..WHOLE })));
    check(vec![publish_one(), Step::Publish { txns: vec![vec![(0, true)]], amid }]);
}

/// The first watch waits for a revision, which is committed just before the watch is canceled.
#[test]
fn watch_gets_no_event_of_a_canceled_watch_with_its_id() {
    let create = |back| Step::Stream(0, Action::Create(create(1, back, WHOLE)));
    let work = Step::Stream(0, Action::Attend);
    check(vec![publish_one(), create(Some(-2)), publish_one(), publish_one(), cancel(0), create(None), work]);
}

#[test]
fn progress_is_sent_when_the_watch_behind_is_canceled() {
    let create = |id, back| Step::Stream(0, Action::Create(create(id, back, WHOLE)));
    let ask = Step::Stream(0, Action::Progress);
    check(vec![publish_one(), create(2, None), create(1, Some(0)), ask, cancel(1)]);
}

#[test]
fn progress_is_sent_when_the_watch_above_the_head_is_canceled() {
    let create = |id, back| Step::Stream(0, Action::Create(create(id, back, WHOLE)));
    let ask = Step::Stream(0, Action::Progress);
    check(vec![publish_one(), create(2, None), create(1, Some(-9)), ask, cancel(1)]);
}

/// A committed change and its previous pair.
#[derive(Clone, Debug)]
struct Committed {
    change: Change,
    /// The previous pair that the event of a `prev_kv` watch contains.
    shown_prev: Option<EncodedKv>,
}

struct World {
    log: Arc<MemoryLog>,
    hub: Arc<Hub>,
    history: History,
    streams: Vec<Stream>,
}

#[derive(Default)]
struct History {
    index: TreeIndex,
    committed: Vec<Committed>,
    pairs: BTreeMap<Key, (Version, EncodedKv)>,
    compact_revision: Option<Revision>,
}

struct Stream {
    session: Session,
    outbox: Arc<Outbox>,
    messages: Messages,
    reader: Reader,
    /// Whether the session had a watch to advance after its last call. If not, it sleeps until it is notified.
    awake: bool,
}

impl World {
    fn new() -> Self {
        let log = Arc::new(MemoryLog::default());
        let hub = Arc::new(Hub::new(Revision::EMPTY, None, Arc::default()));
        let stream = || {
            let outbox = Arc::new(hub.outbox());
            let session = Session::new(Arc::clone(&hub), Arc::clone(&log) as Arc<dyn Log>, Arc::clone(&outbox));
            let messages = Messages::new(Arc::clone(&outbox));
            Stream { session, messages, outbox, reader: Reader::default(), awake: false }
        };
        let streams = (0..STREAMS).map(|_| stream()).collect();
        Self { log, hub, history: History::default(), streams }
    }

    async fn run(&mut self, step: Step) -> Checked {
        match step {
            Step::Publish { txns, amid } => {
                let changes = self.history.commit(&txns, self.hub.wants_prev());
                if let Some((stream, create)) = amid {
                    self.streams[stream].create(&self.history, create, self.hub.head());
                }
                publish(&self.log, &self.hub, changes).await;
                Ok(())
            }
            Step::Stream(stream, action) => self.act(stream, action).await,
            Step::Compact { back, purge } => {
                compact(&self.log, &self.hub, &mut self.history, back, purge).await;
                Ok(())
            }
        }
    }

    async fn act(&mut self, stream: usize, action: Action) -> Checked {
        let Self { log, hub, history, streams } = self;
        let stream = &mut streams[stream];
        let head = hub.head();
        // Requests are read only while the outbox has capacity.
        let has_room = stream.outbox.has_room();
        match action {
            Action::Create(create) if has_room => stream.create(history, create, head),
            Action::Cancel(place) if has_room => stream.cancel(place),
            Action::Progress if has_room => {
                stream.reader.asked_for_progress(head);
                stream.session.request_progress();
            }
            Action::Tick if has_room => stream.session.tick(),
            Action::Create(_) | Action::Cancel(_) | Action::Progress | Action::Tick => return Ok(()),
            Action::Read(messages) => return stream.read(history, messages),
            Action::Attend => {
                stream.attend();
                return Ok(());
            }
            Action::Advance { .. } if !stream.awake => return Ok(()),
            Action::Advance { amid, give_up } => {
                let Stream { session, messages, reader, .. } = stream;
                let mut advance = pin!(session.advance());
                let mut waits = poll!(&mut advance).is_pending();
                for amid in amid {
                    if !waits {
                        break;
                    }
                    for amid in amid {
                        match amid {
                            Amid::Publish(txn) => {
                                let changes = history.commit(&[txn], hub.wants_prev());
                                publish(log, hub, changes).await;
                            }
                            Amid::Compact { back, purge } => compact(log, hub, history, back, purge).await,
                            Amid::Read(most) => read(messages, reader, history, most)?,
                        }
                    }
                    waits = !give_up && poll!(&mut advance).is_pending();
                }
                if waits {
                    advance.await.unwrap();
                }
            }
        }
        stream.awake = stream.session.is_behind();
        Ok(())
    }

    /// Completes all work and checks that no event is missing.
    async fn finish(&mut self) -> Checked {
        for stream in &mut self.streams {
            loop {
                stream.read(&self.history, usize::MAX)?;
                let attended = stream.attend();
                let advanced = stream.awake;
                if advanced {
                    stream.session.advance().await.unwrap();
                    stream.awake = stream.session.is_behind();
                }
                if !attended && !advanced {
                    break;
                }
            }
            stream.reader.check_nothing_is_owed(&self.history)?;
        }
        let pending = &self.hub.pending;
        prop_assert_eq!((pending.messages.get(), pending.slots()), (0, 0), "nothing is counted as waiting");
        Ok(())
    }
}

/// Another instance compacts, and the hub does not know it yet when the watch reads the log.
#[tokio::test]
async fn watch_ends_as_compacted_if_another_instance_deleted_its_rows() {
    for (start, told) in [(2, true), (4, true), (5, false), (6, false)] {
        let (log, hub) = (Arc::new(MemoryLog::default()), Arc::new(Hub::new(Revision::EMPTY, None, Arc::default())));
        let mut history = History::default();
        for _ in 0..6 {
            let changes = history.commit(&[vec![(0, true)]], true);
            publish(&log, &hub, changes).await;
        }
        let outbox = Arc::new(hub.outbox());
        let mut messages = Messages::new(Arc::clone(&outbox));
        let mut session = Session::new(Arc::clone(&hub), log.clone() as Arc<dyn Log>, outbox);
        let rows: Vec<RowId> = (2..5).map(|revision| RowId::new(Revision(revision), 0)).collect();
        log.reclaim(Reclaim::Rows { rows: &rows, compacted: Revision(5), server: 0 }).await.unwrap();
        session.create(Spec {
            id: None,
            range: KeyRange::all(),
            start: Some(Revision(start)),
            flavor: Flavor { prev_kv: false, puts: true, deletes: true },
            fragment: None,
            progress_notify: false,
        });
        while session.is_behind() {
            session.advance().await.unwrap();
        }
        let mut compacted = None;
        while let Some(Some(message)) = messages.next().now_or_never() {
            if let Message::Compacted { compact_revision, .. } = message.unwrap() {
                compacted = Some(compact_revision);
            }
        }
        assert_eq!(compacted, told.then_some(Revision(5)), "from {start}");
    }
}

async fn publish(log: &MemoryLog, hub: &Hub, changes: Vec<Change>) {
    let (Some(first), Some(last)) = (changes.first(), changes.last()) else { return };
    let append = Append::rows(first.row.revision.prev(), &changes);
    assert_eq!(log.append(append).await.unwrap(), Appended::Done);
    hub.publish(&changes, last.row.revision, |_| {});
}

async fn compact(log: &MemoryLog, hub: &Hub, history: &mut History, back: i64, purge: bool) {
    let revision = Revision(history.index.head().0 - back);
    if Some(revision) <= history.compact_revision {
        return;
    }
    let append = Append { compact: Some(revision), ..Append::rows(history.index.head(), &[]) };
    assert_eq!(log.append(append).await.unwrap(), Appended::Done);
    hub.compacted(revision, || history.compact_revision = Some(revision));
    if purge {
        let mut removed = Vec::new();
        history.index.begin_compaction(revision);
        while history.index.compact_step(&mut CompactionCursor::default(), usize::MAX, &mut removed) {}
        log.reclaim(Reclaim::Rows { rows: &removed, compacted: revision, server: 0 }).await.unwrap();
    }
}

impl History {
    /// Commits the changes. They contain previous pairs only if a watch wants them.
    fn commit(&mut self, txns: &[Vec<(usize, bool)>], with_prev: bool) -> Vec<Change> {
        let known = self.committed.len();
        for txn in txns {
            let revision = self.index.head().next();
            for (sub, (key, put)) in (0..).zip(txn) {
                self.change(RowId::new(revision, sub), KEYS[*key], *put);
            }
        }
        let mut changes: Vec<Change> =
            self.committed[known..].iter().map(|committed| committed.change.clone()).collect();
        if !with_prev {
            changes.iter_mut().filter_map(|change| change.prev.as_mut()).for_each(|prev| prev.kv = None);
        }
        changes
    }

    fn change(&mut self, row: RowId, key: &str, put: bool) {
        let key = Key::from(key.as_bytes());
        let before = self.pairs.get(&key).cloned();
        let kind = if put || before.is_none() {
            let version = match &before {
                Some((version, _)) => Version { row, version: version.version + 1, ..*version },
                None => Version { row, create_revision: row.revision, version: 1 },
            };
            let kv = EncodedKv::new(&key, version, format!("value at {}", row.revision).as_bytes(), None::<LeaseId>);
            self.pairs.insert(key.clone(), (version, kv.clone()));
            ChangeKind::Put { kv, create_revision: version.create_revision, version: version.version, lease: None }
        } else {
            self.pairs.remove(&key);
            ChangeKind::Delete
        };
        let prev = before.map(|(version, kv)| Prev { row: version.row, kv: Some(kv) });
        let shown_prev = prev.as_ref().and_then(|prev| prev.kv.clone());
        let change = Change { row, key, kind, prev, prev_lease: None };
        self.index.apply(&change);
        self.committed.push(Committed { change, shown_prev });
    }
}

impl Stream {
    fn create(&mut self, history: &History, create: Create, head: Revision) {
        let start = create.back.map(|back| Revision((history.index.head().0 - back).max(1)));
        let spec = Spec {
            id: create.id.map(WatchId),
            range: create.range,
            start,
            flavor: create.flavor,
            fragment: create.fragment,
            progress_notify: create.progress_notify,
        };
        self.reader.created(spec.clone(), head);
        self.session.create(spec);
        self.awake = self.session.is_behind();
    }

    fn cancel(&mut self, place: usize) {
        let ids: Vec<WatchId> = self.reader.ids().collect();
        if !ids.is_empty() {
            let id = ids[place % ids.len()];
            self.reader.canceled(id);
            self.session.cancel(id);
        }
    }

    /// Lets the session handle notifications, if there are any.
    fn attend(&mut self) -> bool {
        let called = self.outbox.attention().now_or_never().is_some();
        if called {
            self.session.attend();
            self.awake = self.session.is_behind();
        }
        called
    }

    fn read(&mut self, history: &History, most: usize) -> Checked {
        read(&mut self.messages, &mut self.reader, history, most)
    }
}

fn read(messages: &mut Messages, reader: &mut Reader, history: &History, most: usize) -> Checked {
    for _ in 0..most {
        let Some(message) = messages.next().now_or_never() else { break };
        let message = message.expect("the stream is open").expect("the server is running");
        reader.take(message, history)?;
    }
    Ok(())
}

/// The messages that one stream must receive. It reads messages and checks each.
#[derive(Default)]
struct Reader {
    /// Requests whose responses were not read yet.
    requests: VecDeque<Sent>,
    active: BTreeMap<WatchId, Watch>,
    /// The watch whose fragmented message continues.
    open: Option<WatchId>,
    /// The head at the last progress request, unless a response at or above that head was received since.
    asked: Option<Revision>,
    /// Number of unanswered progress requests. One response may answer several.
    asks: usize,
    clock: u64,
    asked_at: u64,
}

enum Sent {
    Create { spec: Spec, head: Revision, at: u64 },
    Cancel(WatchId),
}

struct Watch {
    spec: Spec,
    from: Revision,
    created_at: u64,
    /// Number of changes of the history that were checked.
    cursor: usize,
    last: Option<Revision>,
    header: Revision,
}

impl Reader {
    fn created(&mut self, spec: Spec, head: Revision) {
        self.clock += 1;
        self.requests.push_back(Sent::Create { spec, head, at: self.clock });
    }

    fn canceled(&mut self, id: WatchId) {
        self.requests.push_back(Sent::Cancel(id));
    }

    fn asked_for_progress(&mut self, head: Revision) {
        self.clock += 1;
        (self.asked, self.asked_at) = (Some(head), self.clock);
        self.asks += 1;
    }

    /// Returns the ids that may be in use.
    fn ids(&self) -> impl Iterator<Item = WatchId> {
        let chosen = self.requests.iter().filter_map(|sent| match sent {
            Sent::Create { spec, .. } => spec.id,
            Sent::Cancel(_) => None,
        });
        self.active.keys().copied().chain(chosen)
    }

    /// Returns the next request that has a response. Canceling an unknown watch has none.
    fn next_request(&mut self) -> Option<Sent> {
        while let Some(sent) = self.requests.pop_front() {
            match sent {
                Sent::Cancel(id) if !self.active.contains_key(&id) => {}
                Sent::Create { .. } | Sent::Cancel(_) => return Some(sent),
            }
        }
        None
    }

    fn take(&mut self, message: Message, history: &History) -> Checked {
        let text = format!("{message:?}");
        let head = history.index.head();
        if let Some(open) = self.open {
            prop_assert!(
                matches!(message, Message::Events { id, .. } if id == open),
                "{} within a fragmented message",
                text
            );
        }
        match message {
            Message::Created { id, revision } => {
                let Some(Sent::Create { spec, head, at }) = self.next_request() else {
                    return Err(TestCaseError::fail(format!("{text} without a request")));
                };
                prop_assert!(!self.active.contains_key(&id) && spec.id.is_none_or(|chosen| chosen == id), "{}", text);
                prop_assert_eq!(revision, head);
                let from = spec.start.unwrap_or(head.next());
                let watch = Watch { spec, from, created_at: at, cursor: 0, last: None, header: head };
                self.active.insert(id, watch);
            }
            Message::Refused { .. } => {
                let request = self.next_request();
                let in_use = |id: &WatchId| self.active.contains_key(id);
                let refused =
                    matches!(&request, Some(Sent::Create { spec, .. }) if spec.id.as_ref().is_some_and(in_use));
                prop_assert!(refused, "{}", text);
            }
            Message::Canceled { id, .. } => {
                prop_assert!(matches!(self.next_request(), Some(Sent::Cancel(canceled)) if canceled == id), "{}", text);
                self.active.remove(&id);
            }
            Message::Compacted { id, compact_revision } => {
                let Some(watch) = self.active.remove(&id) else { return Err(TestCaseError::fail(text)) };
                prop_assert!(Some(compact_revision) <= history.compact_revision, "{}", text);
                prop_assert!(watch.from < compact_revision && watch.last < Some(compact_revision), "{}", text);
            }
            Message::Progress { id: NO_WATCH, revision } => {
                prop_assert!(self.asks > 0 && revision <= head, "{}", text);
                self.asks -= 1;
                for watch in self.active.values() {
                    watch.check_progress(revision, history)?;
                }
                self.asked = self.asked.filter(|asked| *asked > revision);
            }
            Message::Progress { id, revision } => {
                let Some(watch) = self.active.get(&id) else { return Err(TestCaseError::fail(text)) };
                prop_assert!(watch.spec.progress_notify && revision <= head, "{}", text);
                watch.check_progress(revision, history)?;
            }
            Message::Events { id, revision, events, fragment } => {
                let Some(watch) = self.active.get_mut(&id) else { return Err(TestCaseError::fail(text)) };
                prop_assert!(revision >= watch.header && revision <= head, "{} after {}", text, watch.header);
                watch.header = revision;
                let bytes = events.concat();
                let limit = watch.spec.fragment.filter(|_| fragment || self.open.is_some());
                watch.take_events(&bytes, limit, history)?;
                prop_assert!(watch.last <= Some(revision), "{}", text);
                self.open = fragment.then_some(id);
                if !fragment {
                    let split =
                        watch.owed(history).is_some_and(|(_, next)| Some(next.change.row.revision) == watch.last);
                    prop_assert!(!split, "{} ends within a revision", text);
                }
            }
        }
        Ok(())
    }

    fn check_nothing_is_owed(&mut self, history: &History) -> Checked {
        prop_assert!(self.next_request().is_none(), "every request was answered");
        prop_assert!(self.open.is_none());
        for (id, watch) in &self.active {
            let owed = watch.owed(history).map(|(_, committed)| &committed.change);
            prop_assert!(owed.is_none(), "{:?} was not sent to {:?}: {:?}", owed, id, watch.spec);
        }
        let begun = |watch: &Watch| watch.spec.start.is_none_or(|start| start <= history.index.head());
        let there_when_asked = |watch: &Watch| watch.created_at < self.asked_at;
        let due = self.active.values().all(begun) && self.active.values().any(there_when_asked);
        prop_assert!(self.asked.is_none() || !due, "no progress notification since {:?}", self.asked);
        Ok(())
    }
}

impl Watch {
    /// Returns the oldest event that was not read yet, with its position.
    fn owed<'a>(&self, history: &'a History) -> Option<(usize, &'a Committed)> {
        let rest = history.committed.iter().enumerate().skip(self.cursor);
        rest.into_iter().find(|(_, Committed { change, .. })| {
            let wanted = if change.is_delete() { self.spec.flavor.deletes } else { self.spec.flavor.puts };
            wanted && change.row.revision >= self.from && self.spec.range.contains(&change.key)
        })
    }

    /// Checks that all events up to the notification's revision were received and that the watch has started.
    fn check_progress(&self, revision: Revision, history: &History) -> Checked {
        prop_assert!(self.spec.start.is_none_or(|start| start <= revision), "{:?} at {}", self.spec, revision);
        let owed = self.owed(history).map(|(_, committed)| &committed.change);
        let overtaken = owed.filter(|change| change.row.revision <= revision);
        prop_assert!(overtaken.is_none(), "progress at {} overtakes {:?}", revision, overtaken);
        Ok(())
    }

    fn take_events(&mut self, bytes: &[u8], limit: Option<usize>, history: &History) -> Checked {
        let events = decode(bytes);
        prop_assert!(!events.is_empty());
        prop_assert!(limit.is_none_or(|limit| bytes.len() <= limit || events.len() == 1), "cut to {:?}", limit);
        for event in events {
            let Some((place, committed)) = self.owed(history) else {
                return Err(TestCaseError::fail(format!("{event:?} is unexpected for {:?}", self.spec)));
            };
            let revision = committed.change.row.revision;
            let prev = committed.shown_prev.as_ref().filter(|_| self.spec.flavor.prev_kv);
            let without_prev = prev.is_some() && Some(revision) <= history.compact_revision;
            prop_assert!(
                event == committed.event(prev) || (without_prev && event == committed.event(None)),
                "{:?} is not {:?}",
                event,
                committed
            );
            (self.cursor, self.last) = (place + 1, Some(revision));
        }
        Ok(())
    }
}

impl Committed {
    fn event(&self, prev: Option<&EncodedKv>) -> Event {
        let Change { row, key, kind, .. } = &self.change;
        let encoded = match kind {
            ChangeKind::Put { kv, .. } => EncodedEvent::put(kv, prev),
            ChangeKind::Delete => EncodedEvent::delete(key, row.revision, prev),
        };
        decode(encoded.as_bytes()).remove(0)
    }
}

fn decode(bytes: &[u8]) -> Vec<Event> {
    WatchResponse::decode(bytes).expect("events as a response's fields").events
}

// Schedules.

fn steps() -> impl Strategy<Value = Step> {
    let stream = || 0..STREAMS;
    let amid = option::weighted(0.1, (stream(), creates()));
    prop_oneof![
        6 => (vec(txns(), 1..4), amid).prop_map(|(txns, amid)| Step::Publish { txns, amid }),
        16 => (stream(), actions()).prop_map(|(stream, action)| Step::Stream(stream, action)),
        1 => (0..6_i64, any::<bool>()).prop_map(|(back, purge)| Step::Compact { back, purge }),
    ]
}

fn actions() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => creates().prop_map(Action::Create),
        1 => (0..8_usize).prop_map(Action::Cancel),
        2 => Just(Action::Progress),
        1 => Just(Action::Tick),
        3 => (1..4_usize).prop_map(Action::Read),
        1 => Just(Action::Read(usize::MAX)),
        3 => Just(Action::Attend),
        5 => ([vec(amid(), 0..2), vec(amid(), 0..3)], prop::bool::weighted(0.1))
            .prop_map(|(amid, give_up)| Action::Advance { amid, give_up }),
    ]
}

fn amid() -> impl Strategy<Value = Amid> {
    prop_oneof![
        3 => txns().prop_map(Amid::Publish),
        1 => (0..6_i64, any::<bool>()).prop_map(|(back, purge)| Amid::Compact { back, purge }),
        2 => (1..4_usize).prop_map(Amid::Read),
    ]
}

/// Changes of distinct keys.
fn txns() -> impl Strategy<Value = Vec<(usize, bool)>> {
    vec((0..KEYS.len(), prop::bool::weighted(0.6)), 1..4).prop_map(|mut txn| {
        let mut seen = [false; KEYS.len()];
        txn.retain(|(key, _)| !std::mem::replace(&mut seen[*key], true));
        txn
    })
}

fn creates() -> impl Strategy<Value = Create> {
    let range =
        select(vec![("a", ""), ("b", ""), ("a", "b"), ("a\0", "c"), ("b", "\0"), ("\0", "\0"), ("never written", "")]);
    let back = prop_oneof![3 => Just(None), 3 => (-3..1_i64).prop_map(Some), 4 => (1..12_i64).prop_map(Some)];
    let flavor = prop_oneof![
        2 => Just((true, true)),
        1 => Just((true, false)),
        1 => Just((false, true)),
    ];
    let id = option::weighted(0.4, 1..4_i64);
    let fragment = option::weighted(0.2, select(vec![1_usize, 60, 150]));
    (id, range, back, (flavor, any::<bool>()), fragment, any::<bool>()).prop_map(
        |(id, (key, end), back, ((puts, deletes), prev_kv), fragment, progress_notify)| Create {
            id,
            range: KeyRange::from_wire(key.as_bytes(), end.as_bytes()),
            back,
            flavor: Flavor { prev_kv, puts, deletes },
            fragment,
            progress_notify,
        },
    )
}
