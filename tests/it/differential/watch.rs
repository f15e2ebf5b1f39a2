//! One server's watch streams: the responses that each watch received, and whether they keep the guarantees of a watch.
//!
//! A server may group events into responses in any way, but the events of one revision must stay together.

use std::collections::VecDeque;

use orlop_wire::proto::client::{
    etcdserverpb::{
        WatchCancelRequest, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
        watch_create_request::FilterType, watch_request::RequestUnion,
    },
    mvccpb::Event,
};
use tokio::{
    sync::mpsc,
    time::{Duration, Instant, timeout_at},
};
use tokio_stream::wrappers::ReceiverStream;
use tonic::Status;

use super::{generate::KEYS, mask::mask, op::Answer};
use crate::support::{Client, DEADLINE};

/// etcd drops a progress request that comes too early, so the harness repeats it.
const PROGRESS_INTERVAL: Duration = Duration::from_millis(50);

const STREAM_ENDED: &str = "the watch stream has ended";

/// A stream and all watches created on it, including canceled ones.
pub struct WatchStream {
    requests: mpsc::Sender<WatchRequest>,
    /// Unbounded, because a slow reader would change the server's behaviour.
    responses: mpsc::UnboundedReceiver<Result<WatchResponse, Status>>,
    pub watches: Vec<WatchLog>,
    pub violations: Vec<String>,
}

/// The responses that one watch received.
pub struct WatchLog {
    create: WatchCreateRequest,
    id: i64,
    /// Events not compared yet, in the order of arrival.
    pub events: VecDeque<Event>,
    /// The response that canceled the watch.
    pub end: Option<WatchResponse>,
    pub violations: Vec<String>,
    last_revision: i64,
    in_fragment: bool,
}

/// The two revisions at the end of a sequence: one puts every key, the next deletes them all.
#[derive(Clone, Copy)]
pub struct Watermark {
    pub put: i64,
    pub delete: i64,
}

impl WatchStream {
    /// Opens a stream with its first watch: before that a server may send nothing, not even headers.
    pub async fn open(client: &Client, create: WatchCreateRequest) -> Result<(Self, Answer), Status> {
        let (requests, receiver) = mpsc::channel(16);
        let first = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create.clone())) };
        requests.send(first).await.expect("the receiver is here");
        let mut inbound = client.watch.clone().watch(ReceiverStream::new(receiver)).await?.into_inner();
        let (sender, responses) = mpsc::unbounded_channel();
        tokio::spawn(async move {
            loop {
                let message = match inbound.message().await {
                    Ok(Some(response)) => Ok(response),
                    Ok(None) => Err(Status::cancelled("the server ended the stream")),
                    Err(status) => Err(status),
                };
                let ended = message.is_err();
                if sender.send(message).is_err() || ended {
                    return;
                }
            }
        });
        let mut stream = Self { requests, responses, watches: Vec::new(), violations: Vec::new() };
        let answer = stream.created(create).await;
        Ok((stream, answer))
    }

    pub async fn create(&mut self, create: WatchCreateRequest) -> Answer {
        if let Err(trouble) = self.send(RequestUnion::CreateRequest(create.clone())).await {
            return Answer::Stalled(trouble);
        }
        self.created(create).await
    }

    /// Cancels a watch. A cancel of an unknown watch has no response; if it wrongly ends another watch, a later
    /// comparison detects that.
    pub async fn cancel(&mut self, id: i64) -> Answer {
        let known = self.live(id).is_some();
        if let Err(trouble) = self.send(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: id })).await {
            return Answer::Stalled(trouble);
        }
        if known { self.ended(id).await } else { Answer::Silence }
    }

    /// Waits for the response that cancels a watch.
    pub async fn ended(&mut self, id: i64) -> Answer {
        self.receive("a canceled response", |answer| answer.canceled && answer.watch_id == id).await
    }

    /// Waits until the server confirms that every event up to `head` has been sent.
    pub async fn catch_up(&mut self, head: i64) -> Result<(), String> {
        if self.sends_no_progress(head) {
            return Ok(());
        }
        let deadline = Instant::now() + DEADLINE;
        while Instant::now() < deadline {
            self.send(RequestUnion::ProgressRequest(WatchProgressRequest {})).await?;
            let again = Instant::now() + PROGRESS_INTERVAL;
            while let Ok(received) = timeout_at(again, self.responses.recv()).await {
                let response = self.record(received)?;
                // A lower revision is the response to an earlier repetition.
                if is_stream_progress(&response) && revision(&response) == head {
                    return Ok(());
                }
            }
        }
        let watches: Vec<_> = self.watches.iter().map(|watch| (&watch.create, watch.id, watch.end.is_some())).collect();
        Err(format!(
            "no progress response at revision {head} within {DEADLINE:?}; watches with id and end: {watches:?}"
        ))
    }

    /// Waits until every watch has received the sequence's last two revisions, as far as its range and filters select
    /// them.
    pub async fn reach(&mut self, watermark: Watermark) -> Result<(), String> {
        while let Some(late) = self.watches.iter().find(|watch| watch.is_late(watermark)) {
            let what = format!("the last events of {:?}, which has them up to {}", late.create, late.last_revision);
            if let Answer::Stalled(trouble) = self.receive(&what, |_| true).await {
                return Err(trouble);
            }
        }
        Ok(())
    }

    async fn send(&mut self, request: RequestUnion) -> Result<(), String> {
        let request = WatchRequest { request_union: Some(request) };
        self.requests.send(request).await.map_err(|_| STREAM_ENDED.to_owned())
    }

    async fn created(&mut self, create: WatchCreateRequest) -> Answer {
        let answer = self.receive("a created response", |answer| answer.created).await;
        if let Answer::Watch(created) = &answer
            && !created.canceled
        {
            self.watches.push(WatchLog::new(create, created.watch_id));
        }
        answer
    }

    /// Records responses until `wanted` accepts one.
    async fn receive(&mut self, what: &str, wanted: impl Fn(&WatchResponse) -> bool) -> Answer {
        let deadline = Instant::now() + DEADLINE;
        loop {
            let Ok(received) = timeout_at(deadline, self.responses.recv()).await else {
                return Answer::Stalled(format!("{what} did not come within {DEADLINE:?}"));
            };
            match self.record(received) {
                Ok(response) if wanted(&response) => return Answer::Watch(response),
                Ok(_) => {}
                Err(trouble) => return Answer::Stalled(trouble),
            }
        }
    }

    fn record(&mut self, received: Option<Result<WatchResponse, Status>>) -> Result<WatchResponse, String> {
        let mut response = received.ok_or(STREAM_ENDED)?.map_err(|status| format!("{STREAM_ENDED}: {status:?}"))?;
        mask(&mut response.header);
        if !response.created && !is_stream_progress(&response) {
            match self.live(response.watch_id) {
                Some(watch) => watch.take(&response),
                None => self.violations.push(format!("a response for an unknown watch: {response:?}")),
            }
        }
        Ok(response)
    }

    fn live(&mut self, id: i64) -> Option<&mut WatchLog> {
        self.watches.iter_mut().find(|watch| watch.id == id && watch.end.is_none())
    }

    /// Returns true if the stream has no live watch, or if etcd would not answer a progress request on it. etcd answers
    /// only if every watch of the stream has started and none was compacted.
    fn sends_no_progress(&self, head: i64) -> bool {
        let compacted = |watch: &WatchLog| watch.end.as_ref().is_some_and(|end| end.compact_revision != 0);
        let waits = |watch: &WatchLog| watch.end.is_none() && watch.create.start_revision > head;
        self.watches.iter().all(|watch| watch.end.is_some())
            || self.watches.iter().any(|watch| compacted(watch) || waits(watch))
    }
}

impl Drop for WatchStream {
    /// Closing `responses` ends the reading task.
    fn drop(&mut self) {
        self.responses.close();
    }
}

impl WatchLog {
    pub fn new(create: WatchCreateRequest, id: i64) -> Self {
        Self {
            create,
            id,
            events: VecDeque::new(),
            end: None,
            violations: Vec::new(),
            last_revision: 0,
            in_fragment: false,
        }
    }

    pub fn create(&self) -> &WatchCreateRequest {
        &self.create
    }

    /// Appends the events of a response, and records each violated guarantee.
    pub fn take(&mut self, response: &WatchResponse) {
        if response.canceled {
            self.end = Some(response.clone());
        } else if response.events.is_empty() && !self.create.progress_notify {
            self.record_violation("an answer without events", response);
        }
        let revisions = || response.events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.mod_revision);
        if !revisions().is_sorted() {
            self.record_violation("events out of order", response);
        }
        if let (Some(first), Some(last)) = (revisions().next(), revisions().last()) {
            let least = if self.in_fragment { self.last_revision } else { self.last_revision + 1 };
            if first < least {
                self.record_violation("a split, repeated or late revision", response);
            }
            if first < self.create.start_revision {
                self.record_violation("an event from before the start revision", response);
            }
            if revision(response) < last {
                self.record_violation("a header older than the events", response);
            }
            self.last_revision = self.last_revision.max(last);
        }
        self.in_fragment = response.fragment;
        self.events.extend(response.events.iter().cloned());
    }

    fn record_violation(&mut self, what: &str, response: &WatchResponse) {
        self.violations.push(format!("{what}, after revision {}: {response:?}", self.last_revision));
    }

    /// Returns whether events of the watermark that the watch selects have not arrived yet.
    fn is_late(&self, watermark: Watermark) -> bool {
        let drops = |filter: FilterType| self.create.filters.contains(&(filter as i32));
        let last = match (drops(FilterType::Noput), drops(FilterType::Nodelete)) {
            (_, false) => watermark.delete,
            (false, true) => watermark.put,
            (true, true) => return false,
        };
        let covers = KEYS.iter().any(|key| self.covers(key));
        self.end.is_none() && covers && self.create.start_revision <= last && self.last_revision < last
    }

    fn covers(&self, key: &[u8]) -> bool {
        let first = if self.create.key.is_empty() { b"\0" } else { &self.create.key[..] };
        match &self.create.range_end[..] {
            b"" => key == first,
            b"\0" => key >= first,
            end => first <= key && key < end,
        }
    }
}

fn is_stream_progress(response: &WatchResponse) -> bool {
    response.watch_id == -1 && !response.created && !response.canceled && response.events.is_empty()
}

fn revision(response: &WatchResponse) -> i64 {
    response.header.map_or(0, |header| header.revision)
}
