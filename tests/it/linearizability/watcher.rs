//! Watches that run during the whole test and must be ordered, unique, atomic, reliable and resumable across streams.

use std::{collections::BTreeMap, time::Duration};

use orlop_wire::proto::client::etcdserverpb::{
    WatchProgressRequest, WatchRequest, WatchResponse, watch_request::RequestUnion,
};
use tokio::{
    sync::{mpsc, watch},
    time::{Instant, sleep, timeout},
};
use tokio_stream::wrappers::UnboundedReceiverStream;

use super::connection::{Endpoints, connect, value};
use crate::support::{DEADLINE, everything};

/// A change of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Event {
    pub revision: i64,
    pub key: String,
    /// `None` after a delete.
    pub value: Option<u64>,
}

/// All events, by revision.
pub type Log = BTreeMap<i64, Vec<Event>>;

/// Interval between progress requests.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

pub struct Watcher {
    /// Number of the instance to watch; it increases when a stream breaks.
    instance: usize,
    endpoints: Endpoints,
    seen: Log,
    /// Every event up to this revision was delivered.
    covered: i64,
    /// Number of streams that were opened.
    streams: usize,
}

impl Watcher {
    pub fn new(instance: usize, endpoints: Endpoints) -> Self {
        Self { instance, endpoints, seen: Log::new(), covered: 1, streams: 0 }
    }

    /// Follows the log until `end` contains a revision, and then up to that revision.
    ///
    /// # Panics
    ///
    /// If a stream violates a guarantee, or the end is not reached in time.
    pub async fn run(mut self, end: watch::Receiver<Option<i64>>) -> Self {
        let is_done = |watcher: &Self| end.borrow().is_some_and(|end| watcher.covered >= end);
        let mut end_deadline: Option<Instant> = None;
        while !is_done(&self) {
            self.watch(is_done).await;
            self.instance += 1;
            if end.borrow().is_some() {
                let deadline = *end_deadline.get_or_insert_with(|| Instant::now() + DEADLINE);
                assert!(Instant::now() < deadline, "the watch reached only {} of {:?}", self.covered, *end.borrow());
            }
        }
        self
    }

    /// Compares the received events up to `head` with the log.
    pub fn check(&self, log: &Log, head: i64) {
        let expected: Vec<_> = log.range(..=head).collect();
        let seen: Vec<_> = self.seen.range(..=head).collect();
        assert!(
            expected == seen,
            "the events up to revision {head}, received over {} streams, differ: {}",
            self.streams,
            difference(log, &self.seen)
        );
    }

    /// Follows one stream until it breaks or `done` returns true.
    async fn watch(&mut self, done: impl Fn(&Self) -> bool) {
        let Some(mut connection) = connect(&self.endpoints, self.instance).await else { return };
        let (requests, receiver) = mpsc::unbounded_channel();
        let ask = |request| requests.send(WatchRequest { request_union: Some(request) }).is_ok();
        ask(RequestUnion::CreateRequest(everything(self.covered + 1)));
        let opening = connection.watch.watch(UnboundedReceiverStream::new(receiver));
        let Ok(Ok(stream)) = timeout(Duration::from_secs(5), opening).await else { return };
        let mut answers = stream.into_inner();
        self.streams += 1;
        let mut last_answer = Instant::now();
        while !done(self) {
            match timeout(PROGRESS_INTERVAL, answers.message()).await {
                Ok(Ok(Some(answer))) => {
                    last_answer = Instant::now();
                    assert!(!answer.canceled, "nothing was compacted: {answer:?}");
                    self.record(answer);
                }
                Ok(Ok(None) | Err(_)) => return,
                // A paused instance may send nothing for some seconds; another instance may respond.
                Err(_)
                    if last_answer.elapsed() > Duration::from_secs(2)
                        || !ask(RequestUnion::ProgressRequest(WatchProgressRequest {})) =>
                {
                    return;
                }
                Err(_) => {}
            }
        }
    }

    /// Checks the events of a response against the previous ones, and records them.
    fn record(&mut self, answer: WatchResponse) {
        let header = answer.header.expect("an answer has a header").revision;
        if answer.created {
            return;
        }
        let mut batch = Log::new();
        let mut last = 0;
        for event in answer.events {
            let kv = event.kv.expect("an event has a pair");
            let revision = kv.mod_revision;
            assert!(revision >= last, "ordered: {revision} after {last}");
            assert!(revision > self.covered, "unique, and after all progress: {revision} after {}", self.covered);
            assert!(revision <= header, "an event at {revision} is in a response with the header revision {header}");
            last = revision;
            let key = String::from_utf8_lossy(&kv.key).into_owned();
            let value = (event.r#type == 0).then(|| value(&kv.value));
            batch.entry(revision).or_default().push(Event { revision, key, value });
        }
        // A header may be ahead of the events in its response. Only a response without events guarantees that all
        // events up to its header were delivered.
        self.covered = self.covered.max(if batch.is_empty() { header } else { last });
        self.seen.append(&mut batch);
    }
}

/// Returns the events that a new watch receives from the first revision to `head`.
pub async fn read_all(endpoints: &Endpoints, head: i64) -> Log {
    let mut watcher = Watcher::new(0, endpoints.clone());
    let mut deadline = Instant::now() + DEADLINE;
    while watcher.covered < head {
        let before = watcher.covered;
        watcher.watch(|watcher| watcher.covered >= head || Instant::now() > deadline).await;
        // A slow machine must not fail the test while events keep arriving.
        if watcher.covered > before {
            deadline = Instant::now() + DEADLINE;
        }
        assert!(Instant::now() < deadline, "the log cannot be read up to {head}, but to {}", watcher.covered);
        sleep(Duration::from_millis(50)).await;
    }
    watcher.seen
}

fn difference(log: &Log, seen: &Log) -> String {
    let first = log.keys().chain(seen.keys()).filter(|revision| log.get(revision) != seen.get(revision)).min();
    first.map_or_else(
        || "equal".to_owned(),
        |revision| {
            format!("revision {revision}: the log has {:?}, the watch {:?}", log.get(revision), seen.get(revision))
        },
    )
}

mod tests {
    use orlop_wire::proto::client::{
        etcdserverpb::{ResponseHeader, WatchResponse},
        mvccpb::{Event, KeyValue},
    };

    use super::Watcher;

    /// Returns whether a watcher accepts these responses, each given as (header revision, event revisions). A response
    /// without events is a progress notification.
    fn accepts(answers: &[(i64, &[i64])]) -> bool {
        let answers: Vec<WatchResponse> = answers
            .iter()
            .map(|(header, events)| WatchResponse {
                header: Some(ResponseHeader { revision: *header, ..Default::default() }),
                events: events
                    .iter()
                    .map(|revision| {
                        let kv = KeyValue {
                            key: "k".into(),
                            value: "1".into(),
                            mod_revision: *revision,
                            ..Default::default()
                        };
                        Event { kv: Some(kv), ..Default::default() }
                    })
                    .collect(),
                ..Default::default()
            })
            .collect();
        let recorded = std::panic::catch_unwind(|| {
            let mut watcher = Watcher::new(0, super::Endpoints::default());
            answers.into_iter().for_each(|answer| watcher.record(answer));
        });
        recorded.is_ok()
    }

    #[test]
    fn violated_guarantees_are_detected() {
        type Row = (&'static str, &'static [(i64, &'static [i64])], bool);
        let table: [Row; 7] = [
            ("in order", &[(2, &[2]), (4, &[3, 4])], true),
            ("one revision in two answers", &[(3, &[2, 3]), (3, &[3])], false),
            ("an older revision in the next answer", &[(3, &[3]), (3, &[2])], false),
            ("an older revision in the same answer", &[(3, &[3, 2])], false),
            ("progress, then a later event", &[(5, &[]), (6, &[6])], true),
            ("progress that overtook an event", &[(5, &[]), (5, &[5])], false),
            ("an event after its header", &[(5, &[6])], false),
        ];
        for (name, answers, sound) in table {
            assert_eq!(accepts(answers), sound, "{name}");
        }
    }
}
