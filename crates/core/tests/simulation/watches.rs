//! Watches: the server's half of a stream, and the watches of one client. The server's half is that of `api::watch`,
//! but without gRPC. The watches check every response and, when a stream breaks, resume on another one.

use std::{
    collections::{BTreeMap, VecDeque},
    sync::Arc,
};

use prost::Message as _;
use tokio::{
    sync::{mpsc, oneshot},
    time::{Duration, Instant, sleep_until},
};

use super::{
    calls::range,
    random::{below, between, percent},
    truth::Truth,
};
use crate::model::Row;
use orlop_core::{
    store::Store,
    types::{EncodedEvent, Revision, WatchId},
    watch::{Flavor, Message, NO_WATCH, Outbox, Session, Spec},
};
use orlop_wire::proto::client::etcdserverpb::WatchResponse;

/// Pause after a failed read of the log.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Interval of periodic progress notifications.
const TICK: Duration = Duration::from_secs(3);

pub(super) enum Command {
    Create(Spec),
    Cancel(WatchId),
    Progress,
}

/// Serves one stream. When the instance is killed, this task and `_alive` are dropped, which the client treats as a
/// broken connection.
pub(super) async fn serve(
    store: Arc<Store>,
    outbox: Arc<Outbox>,
    mut commands: mpsc::UnboundedReceiver<Command>,
    _alive: oneshot::Sender<()>,
) {
    let mut session = Session::new(Arc::clone(store.hub()), Arc::clone(store.log()), Arc::clone(&outbox));
    let (mut tick, mut not_before) = (Instant::now() + TICK, Instant::now());
    let mut confirming = None;
    while !outbox.has_ended() {
        tokio::select! {
            biased;
            command = commands.recv(), if confirming.is_none() && outbox.has_capacity() => match command {
                Some(Command::Create(spec)) => session.create(spec),
                Some(Command::Cancel(id)) => session.cancel(id),
                Some(Command::Progress) => confirming = Some(Box::pin(store.confirm())),
                None => return,
            },
            confirmed = confirmation(&mut confirming) => {
                confirming = None;
                if confirmed.is_ok() {
                    session.request_progress();
                }
            }
            () = outbox.notified() => session.handle_notifications(),
            advanced = advance(&mut session, not_before) => if advanced.is_err() {
                not_before = Instant::now() + RETRY_PAUSE;
            },
            () = sleep_until(tick) => {
                if outbox.has_capacity() {
                    session.tick();
                }
                tick = Instant::now() + TICK;
            }
        }
    }
}

async fn confirmation<F: Future + Unpin>(confirming: &mut Option<F>) -> F::Output {
    match confirming {
        Some(confirming) => confirming.await,
        None => std::future::pending().await,
    }
}

async fn advance(session: &mut Session, not_before: Instant) -> orlop_core::log::Result<()> {
    if !session.has_work() {
        return std::future::pending().await;
    }
    sleep_until(not_before).await;
    session.advance().await
}

/// All watches of one client, on one stream.
#[derive(Default)]
pub(super) struct Watches {
    pub all: BTreeMap<WatchId, Watch>,
    /// For each unanswered progress request, the newest revision that any client had seen when it was sent.
    pub asked: VecDeque<Revision>,
    /// The watch whose message continues in the next one.
    open: Option<WatchId>,
    /// Number of events received.
    pub events: usize,
}

pub(super) struct Watch {
    spec: Spec,
    pub state: State,
    /// The first revision that the watch covers, once it is known.
    from: Revision,
    /// Index in the truth of the first row not yet received; `None` until the watch is created.
    place: Option<usize>,
    /// The value of `place` after the last complete message.
    whole: Option<usize>,
    /// The revision in the last header.
    newest: Revision,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum State {
    Absent,
    Requested,
    Active,
    Cancelling,
}

impl Watches {
    pub fn draw() -> Self {
        let draw = |id| {
            let (puts, deletes) = [(true, true), (true, true), (true, false), (false, true)][below(4)];
            let spec = Spec {
                id: Some(WatchId(id)),
                range: range(),
                start: percent(40).then(|| Revision(between(1, 12))),
                flavor: Flavor { prev_kv: percent(50), puts, deletes },
                fragment: percent(25).then(|| [1, 60, 150][below(3)]),
                progress_notify: percent(40),
            };
            let from = spec.start.unwrap_or(Revision(0));
            (WatchId(id), Watch { spec, state: State::Absent, from, place: None, whole: None, newest: Revision(0) })
        };
        Self { all: (1..=between(1, 3)).map(draw).collect(), ..Self::default() }
    }

    /// Returns the description of a watch that is not created or has not received all events, if there is one.
    pub fn owed(&self, truth: &Truth) -> Option<String> {
        self.all.values().find_map(|watch| {
            let place = watch.place.filter(|_| watch.state == State::Active);
            let Some(place) = place else { return Some(format!("{:?} is {:?}", watch.spec, watch.state)) };
            watch.next(place, truth).map(|(_, row)| format!("{:?} has not received {:?}", watch.spec, row.id))
        })
    }

    /// Returns the request to create a watch, from the first revision whose events it has not received.
    pub fn begin(&mut self, id: WatchId, truth: &Truth) -> Command {
        let watch = self.all.get_mut(&id).expect("a watch of this client");
        watch.state = State::Requested;
        if watch.place.is_some() {
            watch.spec.start = Some(watch.needs(truth));
        }
        watch.place = watch.spec.start.map(|start| truth.place_of(start));
        watch.whole = watch.place;
        Command::Create(watch.spec.clone())
    }

    /// Handles a broken stream. Each watch returns to its last complete message: the rest is sent again.
    pub fn broken(&mut self) {
        self.asked.clear();
        self.open = None;
        for watch in self.all.values_mut() {
            watch.state = State::Absent;
            watch.place = watch.whole;
        }
    }

    /// Checks a message and sets `shown` to its revision. Returns the watch if it was compacted: its client must list
    /// the keys before it resumes.
    pub fn take(&mut self, message: Message, shown: &mut Revision, truth: &Truth) -> Option<WatchId> {
        let text = format!("{message:?}");
        assert!(
            self.open.is_none_or(|open| matches!(message, Message::Events { id, .. } if id == open)),
            "{text} within a fragmented message"
        );
        match message {
            Message::Created { id, revision } => {
                let watch = self.all.get_mut(&id).filter(|watch| watch.state == State::Requested).expect(&text);
                watch.state = State::Active;
                watch.newest = revision;
                if watch.place.is_none() {
                    watch.begin_at(revision.next(), truth);
                }
                *shown = revision;
            }
            Message::Canceled { id, revision } => {
                let watch = self.all.get_mut(&id).filter(|watch| watch.state == State::Cancelling).expect(&text);
                watch.state = State::Absent;
                *shown = revision;
            }
            Message::Refused { .. } => panic!("{text}"),
            Message::Compacted { id, compact_revision } => {
                let watch = self
                    .all
                    .get_mut(&id)
                    .filter(|watch| [State::Active, State::Cancelling].contains(&watch.state))
                    .expect(&text);
                assert!(
                    Some(compact_revision) <= truth.compact_revision,
                    "{text}: the log has {:?}",
                    truth.compact_revision
                );
                let needs = watch.needs(truth);
                assert!(needs < compact_revision, "{text}, but the watch needs only revisions from {needs}");
                watch.state = State::Absent;
                return Some(id);
            }
            Message::Progress { id: NO_WATCH, revision } => {
                let asked = self.asked.pop_front().expect("progress was requested");
                assert!(revision >= asked, "{text}: {asked} was seen when it was requested");
                self.all.values_mut().for_each(|watch| watch.check_progress(revision, truth));
                *shown = revision;
            }
            Message::Progress { id, revision } => {
                let watch = self.all.get_mut(&id).filter(|watch| watch.spec.progress_notify).expect(&text);
                watch.check_progress(revision, truth);
                *shown = revision;
            }
            Message::Events { id, revision, events, fragment } => {
                let watch = self
                    .all
                    .get_mut(&id)
                    .filter(|watch| [State::Active, State::Cancelling].contains(&watch.state))
                    .expect(&text);
                assert!(revision >= watch.newest && revision <= truth.head, "{text} after {}", watch.newest);
                watch.newest = revision;
                self.events += watch.take_events(&events.concat(), truth);
                self.open = fragment.then_some(id);
                if !fragment {
                    watch.check_whole(truth);
                    watch.whole = watch.place;
                }
                *shown = revision;
            }
        }
        None
    }
}

impl Watch {
    /// Sets the first revision whose events the watch must receive.
    pub fn begin_at(&mut self, from: Revision, truth: &Truth) {
        self.from = from;
        self.place = Some(truth.place_of(from));
        self.whole = self.place;
    }

    /// Returns the first revision whose events have not all been received.
    fn needs(&self, truth: &Truth) -> Revision {
        let last = truth.rows[..self.place.unwrap_or(0)].last().map_or(Revision(0), |row| row.id.revision);
        self.from.max(last.next())
    }

    /// Returns the next row that the watch must receive, with its index.
    fn next<'a>(&self, place: usize, truth: &'a Truth) -> Option<(usize, &'a Row)> {
        truth.rows.iter().enumerate().skip(place).find(|(_, row)| {
            let wanted = if row.pair.is_some() { self.spec.flavor.puts } else { self.spec.flavor.deletes };
            wanted && row.id.revision >= self.from && self.spec.range.contains(&row.key)
        })
    }

    /// Checks that all events up to the revision were received.
    fn check_progress(&mut self, revision: Revision, truth: &Truth) {
        let Some(place) = self.place.filter(|_| self.state == State::Active) else { return };
        let owed = self.next(place, truth).map(|(_, row)| row.id);
        assert!(
            owed.is_none_or(|owed| owed.revision > revision),
            "progress at {revision} overtakes {owed:?} of {:?}",
            self.spec
        );
        self.place = Some(place.max(truth.place_of(revision.next())));
        self.whole = self.place;
    }

    fn take_events(&mut self, bytes: &[u8], truth: &Truth) -> usize {
        let events = WatchResponse::decode(bytes).expect("events are encoded as fields of a response").events;
        assert!(!events.is_empty());
        for event in &events {
            let next = self.next(self.place.expect("the watch was created"), truth);
            let (place, row) = next.unwrap_or_else(|| panic!("{event:?} is not expected by {:?}", self.spec));
            let prev = row.prev.as_ref().filter(|_| self.spec.flavor.prev_kv).map(|pair| pair.encoded());
            let may_lack_prev = Some(row.id.revision) <= truth.compact_revision;
            let is_it = *event == decode(&Truth::event(row, prev))
                || (may_lack_prev && *event == decode(&Truth::event(row, None)));
            assert!(is_it, "{event:?} is not {row:?} for {:?}", self.spec);
            self.place = Some(place + 1);
        }
        events.len()
    }

    /// Checks that the last message did not end within a revision.
    fn check_whole(&self, truth: &Truth) {
        let place = self.place.expect("the watch was created");
        let last = truth.rows[..place].last().map(|row| row.id.revision);
        let next = self.next(place, truth).map(|(_, row)| row.id.revision);
        assert!(next.is_none() || next != last, "a message ends within {last:?} for {:?}", self.spec);
    }
}

fn decode(event: &EncodedEvent) -> orlop_wire::proto::client::mvccpb::Event {
    WatchResponse::decode(event.as_bytes()).expect("an event is encoded as a field of a response").events.remove(0)
}
