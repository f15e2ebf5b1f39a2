//! One replayed watch stream: receives responses and compares them with the recorded events.

use std::{collections::VecDeque, time::Duration};

use orlop_wire::proto::client::{
    etcdserverpb::{
        WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse, watch_client::WatchClient,
        watch_request::RequestUnion,
    },
    mvccpb::Event,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::{StreamExt, wrappers::UnboundedReceiverStream};
use tonic::{Status, transport::Channel};

use super::{
    compare::{Peer, difference, line_difference},
    trace::{Answer, Metadata, RecordedEvent, with_metadata},
};

/// Maximum time to wait for an expected response.
pub const RESPONSE_TIMEOUT: Duration = Duration::from_secs(30);

/// The watch id of a response that concerns the whole stream.
const WHOLE_STREAM: i64 = -1;

/// A description of a difference from the recording.
type Difference = String;

pub struct Watched {
    peer: Peer,
    requests: mpsc::UnboundedSender<WatchRequest>,
    /// Filled by a separate task, so that unread events of a stream do not block other streams of the connection.
    answers: mpsc::UnboundedReceiver<Result<WatchResponse, Status>>,
    watch_id: i64,
    /// The first revision that the watch covers.
    start_revision: i64,
    /// Events that are still expected.
    events: VecDeque<RecordedEvent>,
    events_taken: usize,
    /// Repeated progress requests that may still be answered.
    repeats: usize,
}

impl Watched {
    /// Opens the stream with its first request, whose response must come first.
    pub async fn open(
        peer: Peer,
        client: &mut WatchClient<Channel>,
        (metadata, request): (&Metadata, &WatchRequest),
        created: &Answer,
        events: VecDeque<RecordedEvent>,
    ) -> Result<Self, Difference> {
        let (watched, answer) = Self::begin(peer, client, (metadata, request), events).await?;
        difference(peer, created, &Answer::Watch(answer)).map_or(Ok(watched), Err)
    }

    /// Goes on with the stream at another server, on which it expects the events that are missing.
    pub async fn resume(
        self,
        peer: Peer,
        client: &mut WatchClient<Channel>,
        (metadata, request): (&Metadata, &WatchRequest),
        from: i64,
    ) -> Result<Self, Difference> {
        let Some(RequestUnion::CreateRequest(create)) = request.request_union.clone() else {
            return Err("a stream begins with a create request".to_owned());
        };
        let create = WatchCreateRequest { start_revision: create.start_revision.max(from), ..create };
        let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let (watched, _) = Self::begin(peer, client, (metadata, &request), self.events).await?;
        Ok(Self { events_taken: self.events_taken, ..watched })
    }

    /// Opens the stream. Returns the response to its first request as well.
    async fn begin(
        peer: Peer,
        client: &mut WatchClient<Channel>,
        (metadata, request): (&Metadata, &WatchRequest),
        events: VecDeque<RecordedEvent>,
    ) -> Result<(Self, WatchResponse), Difference> {
        let (requests, outgoing) = mpsc::unbounded_channel();
        requests.send(request.clone()).expect("the receiver is still here");
        let stream = client.watch(with_metadata(metadata, UnboundedReceiverStream::new(outgoing)));
        let mut stream = match timeout(RESPONSE_TIMEOUT, stream).await {
            Ok(Ok(answer)) => answer.into_inner(),
            Ok(Err(status)) => return Err(format!("the stream was refused: {status}")),
            Err(_) => return Err("the stream was not opened in time".to_owned()),
        };
        let (incoming, answers) = mpsc::unbounded_channel();
        tokio::spawn(async move { while stream.next().await.is_some_and(|answer| incoming.send(answer).is_ok()) {} });
        let start_revision = start_revision(request);
        let mut watched =
            Self { peer, requests, answers, watch_id: 0, start_revision, events, events_taken: 0, repeats: 0 };
        let answer = watched.next().await?;
        watched.watch_id = answer.watch_id;
        Ok((watched, answer))
    }

    /// Receives responses until every event up to `revision` has arrived.
    pub async fn settle(&mut self, revision: i64) -> Result<(), Difference> {
        while self.expects_event_by(revision) {
            let answer = self.next().await?;
            self.take(answer)?;
        }
        Ok(())
    }

    /// Requests progress while the store is at revision `head`, and expects the recorded response.
    pub async fn progress(&mut self, head: i64, recorded: &Answer) -> Result<(), Difference> {
        let answer = self.ask_progress(head).await?;
        difference(self.peer, recorded, &Answer::Watch(answer)).map_or(Ok(()), Err)
    }

    /// Closes the stream: no recorded event is missing and none is extra. Returns the number of events.
    pub async fn end(mut self, head: i64) -> Result<usize, Difference> {
        // The progress response covers all events, so no event is pending after it. If the watch starts at a future
        // revision, no event is pending, and a server need not respond; etcd since 3.6.2 does not (etcd issue 20221).
        if self.start_revision <= head {
            self.ask_progress(head).await?;
        }
        match self.events.front() {
            None => Ok(self.events_taken),
            Some(RecordedEvent { seq, event }) => Err(format!("an event is missing: seq={seq} {event:#?}")),
        }
    }

    async fn ask_progress(&mut self, head: i64) -> Result<WatchResponse, Difference> {
        // etcd drops a progress request while a watch of the stream is unsynced, so its clients repeat the request.
        // Orlop answers every request.
        let (tries, time_limit) = match self.peer {
            Peer::Orlop => (1, RESPONSE_TIMEOUT),
            Peer::Etcd { .. } => (200, RESPONSE_TIMEOUT / 200),
        };
        for repeats in 0..tries {
            let request = RequestUnion::ProgressRequest(WatchProgressRequest {});
            let sent = self.requests.send(WatchRequest { request_union: Some(request) });
            sent.map_err(|_| "the stream ended".to_owned())?;
            while let Ok(answer) = timeout(time_limit, self.next()).await {
                let Some(progress) = self.take(answer?)? else { continue };
                if revision(&progress) < head && self.repeats > 0 {
                    self.repeats -= 1;
                    continue;
                }
                self.repeats += repeats;
                return Ok(progress);
            }
        }
        Err(format!("no progress answer to {tries} requests"))
    }

    async fn next(&mut self) -> Result<WatchResponse, Difference> {
        match timeout(RESPONSE_TIMEOUT, self.answers.recv()).await {
            Ok(Some(Ok(answer))) => Ok(answer),
            Ok(Some(Err(status))) => Err(format!("the stream ended: {status}")),
            Ok(None) => Err("the stream ended".to_owned()),
            Err(_) => Err(format!("no answer in time; the next expected event is {:#?}", self.events.front())),
        }
    }

    /// Compares a response with the recording. Returns it if it answers a progress request.
    fn take(&mut self, answer: WatchResponse) -> Result<Option<WatchResponse>, Difference> {
        if answer.created || answer.canceled || answer.compact_revision != 0 || !answer.cancel_reason.is_empty() {
            return Err(format!("neither events nor progress: {answer:#?}"));
        }
        if !answer.events.is_empty() {
            return self.take_events(&answer).map(|()| None);
        }
        let covered = revision(&answer);
        if self.expects_event_by(covered) {
            let next = self.events.front();
            return Err(format!("the progress answer at {covered} came before an event that it covers: {next:#?}"));
        }
        match answer.watch_id {
            WHOLE_STREAM => Ok(Some(answer)),
            // A periodic notification, which the watch requested with progress_notify.
            id if id == self.watch_id => Ok(None),
            id => Err(format!("progress of a watch that the stream does not have: watch_id={id}")),
        }
    }

    fn take_events(&mut self, answer: &WatchResponse) -> Result<(), Difference> {
        if answer.watch_id != self.watch_id {
            return Err(format!("events of a watch that the stream does not have: watch_id={}", answer.watch_id));
        }
        for event in &answer.events {
            self.take_event(event)?;
            if mod_revision(event) > revision(answer) {
                return Err(format!("the header is older than an event of its answer: {answer:#?}"));
            }
        }
        Ok(())
    }

    fn take_event(&mut self, event: &Event) -> Result<(), Difference> {
        let Some(recorded) = self.events.pop_front() else {
            return Err(format!("an event that was not recorded: {event:#?}"));
        };
        if recorded.event != *event {
            let number = self.events_taken + 1;
            let lines = line_difference(&recorded.event, event);
            return Err(format!("event {number} of the watch, seq={}\n{lines}", recorded.seq));
        }
        self.events_taken += 1;
        Ok(())
    }

    fn expects_event_by(&self, revision: i64) -> bool {
        self.events.front().is_some_and(|recorded| mod_revision(&recorded.event) <= revision)
    }
}

fn revision(answer: &WatchResponse) -> i64 {
    answer.header.as_ref().map_or(0, |header| header.revision)
}

fn start_revision(request: &WatchRequest) -> i64 {
    match &request.request_union {
        Some(RequestUnion::CreateRequest(create)) => create.start_revision,
        _ => panic!("a stream begins with a create request"),
    }
}

fn mod_revision(event: &Event) -> i64 {
    event.kv.as_ref().map_or(0, |kv| kv.mod_revision)
}
