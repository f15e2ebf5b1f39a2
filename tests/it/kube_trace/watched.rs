//! One replayed watch stream: it takes what the server sends and holds it against the recorded events.

use std::{collections::VecDeque, time::Duration};

use orlop_wire::proto::client::{
    etcdserverpb::{
        WatchProgressRequest, WatchRequest, WatchResponse, watch_client::WatchClient, watch_request::RequestUnion,
    },
    mvccpb::Event,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::{StreamExt, wrappers::UnboundedReceiverStream};
use tonic::{Status, transport::Channel};

use super::{
    compare::{Peer, difference, line_difference},
    replay::with_metadata,
    trace::{Answer, Metadata, RecordedEvent},
};

/// How long anything that must come may take.
pub const PATIENCE: Duration = Duration::from_secs(30);

/// The watch id of an answer for the whole stream.
const WHOLE_STREAM: i64 = -1;

/// What differs from the recording.
type Difference = String;

pub struct Watched {
    peer: Peer,
    requests: mpsc::UnboundedSender<WatchRequest>,
    /// Filled by a task of its own, so that no stream's events stand in the way of another's on the connection.
    answers: mpsc::UnboundedReceiver<Result<WatchResponse, Status>>,
    watch_id: i64,
    /// The first revision that it was to see.
    start_revision: i64,
    /// What is still to come.
    events: VecDeque<RecordedEvent>,
    events_taken: usize,
    /// Progress requests that were repeated and may yet be answered.
    repeats: usize,
}

impl Watched {
    /// Opens the stream with its first request, and expects that one's answer first.
    pub async fn open(
        peer: Peer,
        client: &mut WatchClient<Channel>,
        (metadata, request): (&Metadata, &WatchRequest),
        created: &Answer,
        events: VecDeque<RecordedEvent>,
    ) -> Result<Self, Difference> {
        let (requests, outgoing) = mpsc::unbounded_channel();
        requests.send(request.clone()).expect("the receiver is still here");
        let stream = client.watch(with_metadata(metadata, UnboundedReceiverStream::new(outgoing)));
        let mut stream = match timeout(PATIENCE, stream).await {
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
        difference(peer, created, &Answer::Watch(answer)).map_or(Ok(watched), Err)
    }

    /// Takes answers until every event up to `revision` is here.
    pub async fn settle(&mut self, revision: i64) -> Result<(), Difference> {
        while self.expects_event_by(revision) {
            let answer = self.next().await?;
            self.take(answer)?;
        }
        Ok(())
    }

    /// Asks how far the stream is, while the store stands at `head`, and expects the recorded answer.
    pub async fn progress(&mut self, head: i64, recorded: &Answer) -> Result<(), Difference> {
        let answer = self.ask_progress(head).await?;
        difference(self.peer, recorded, &Answer::Watch(answer)).map_or(Ok(()), Err)
    }

    /// Ends the stream: no recorded event is missing, no other one came. Returns how many came.
    pub async fn end(mut self, head: i64) -> Result<usize, Difference> {
        // The answer covers all events, so behind it there is nothing to wait for. A server owes none, and etcd since 3.6.2
        // gives none (etcd issue 20221), before the revision at which the watch begins; and no event comes before that.
        if self.start_revision <= head {
            self.ask_progress(head).await?;
        }
        match self.events.front() {
            None => Ok(self.events_taken),
            Some(RecordedEvent { seq, event }) => Err(format!("an event is missing: seq={seq} {event:#?}")),
        }
    }

    async fn ask_progress(&mut self, head: i64) -> Result<WatchResponse, Difference> {
        // Etcd drops a request when a watch of the stream is behind; its clients ask again. Orlop answers every one.
        let (tries, patience) = match self.peer {
            Peer::Orlop => (1, PATIENCE),
            Peer::Etcd { .. } => (200, PATIENCE / 200),
        };
        for repeats in 0..tries {
            let request = RequestUnion::ProgressRequest(WatchProgressRequest {});
            let sent = self.requests.send(WatchRequest { request_union: Some(request) });
            sent.map_err(|_| "the stream ended".to_owned())?;
            while let Ok(answer) = timeout(patience, self.next()).await {
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
        match timeout(PATIENCE, self.answers.recv()).await {
            Ok(Some(Ok(answer))) => Ok(answer),
            Ok(Some(Err(status))) => Err(format!("the stream ended: {status}")),
            Ok(None) => Err("the stream ended".to_owned()),
            Err(_) => Err(format!("no answer in time; the next event was to be {:#?}", self.events.front())),
        }
    }

    /// Holds an answer against the recording. Returns it if it is the answer to a progress request.
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
            // The server's own idea, as the watch asked for with progress_notify.
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
