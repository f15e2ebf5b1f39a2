//! The recording as a list of steps, ordered so that each step runs at the recorded state of the store.

use std::{
    collections::{BTreeMap, VecDeque},
    io::Read,
};

use base64::{Engine, prelude::BASE64_STANDARD};
use flate2::read::GzDecoder;
use orlop_wire::proto::client::{
    etcdserverpb::{
        CompactionRequest, CompactionResponse, LeaseGrantRequest, LeaseGrantResponse, RangeRequest, RangeResponse,
        RequestOp, ResponseHeader, ResponseOp, StatusRequest, StatusResponse, TxnRequest, TxnResponse, WatchRequest,
        WatchResponse, request_op::Request as Op, response_op::Response as OpAnswer, watch_request::RequestUnion,
    },
    mvccpb::Event,
};
use prost::Message;
use serde::Deserialize;
use tonic::metadata::{Ascii, MetadataKey};

const RECORDING: &[u8] = include_bytes!("../../data/kube-trace.jsonl.gz");

/// Names and values of the recorded client's headers.
pub type Metadata = Vec<(String, String)>;

/// Returns a request that carries the recorded metadata.
pub fn with_metadata<T>(metadata: &Metadata, message: T) -> tonic::Request<T> {
    let mut request = tonic::Request::new(message);
    for (name, value) in metadata {
        let name: MetadataKey<Ascii> = name.parse().expect("a recorded name is valid");
        request.metadata_mut().insert(name, value.parse().expect("a recorded value is valid"));
    }
    request
}

/// The number of an RPC in the recording.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug, Deserialize)]
pub struct CallId(u64);

#[derive(Clone, Debug)]
pub enum Request {
    Range(RangeRequest),
    Txn(TxnRequest),
    Compact(CompactionRequest),
    LeaseGrant(LeaseGrantRequest),
    Status(StatusRequest),
    Watch(WatchRequest),
}

#[derive(Clone, PartialEq, Debug)]
pub enum Answer {
    Range(RangeResponse),
    Txn(TxnResponse),
    Compact(CompactionResponse),
    LeaseGrant(LeaseGrantResponse),
    Status(StatusResponse),
    Watch(WatchResponse),
}

/// One request and its recorded response.
#[derive(Clone, Debug)]
pub struct Exchange {
    /// The response's number in the recording.
    pub seq: u64,
    pub request: Request,
    pub answer: Answer,
}

#[derive(Debug)]
pub enum Step {
    Call { exchange: Exchange, metadata: Metadata },
    Watch { stream: CallId, exchange: Exchange, metadata: Metadata, events: VecDeque<RecordedEvent> },
    Progress { stream: CallId, exchange: Exchange },
    End { stream: CallId },
}

/// One event of a stream with a single watch.
#[derive(Clone, Debug)]
pub struct RecordedEvent {
    pub seq: u64,
    pub event: Event,
}

/// Returns the steps of the recording in causal order. See [`Place`].
pub fn load() -> Vec<Step> {
    let calls = calls();
    let mut steps: Vec<(Place, Step)> = Vec::new();
    for (id, lines) in &calls {
        match lines[0].method.as_str() {
            "/etcdserverpb.Watch/Watch" => steps.extend(watch_steps(*id, lines)),
            _ => steps.push(call_step(lines)),
        }
    }
    let ends = calls.iter().filter(|(_, lines)| lines[0].method.ends_with("/Watch")).map(|(id, lines)| {
        let seq = lines.last().expect("a call has lines").seq;
        let revision = steps.iter().map(|(place, _)| place).filter(|place| place.seq < seq).map(|p| p.revision).max();
        let place = Place { revision: revision.expect("a stream's create precedes its end"), order: Order::Read, seq };
        (place, Step::End { stream: *id })
    });
    let ends: Vec<_> = ends.collect();
    steps.extend(ends);
    steps.sort_by_key(|(place, _)| *place);
    let writes = steps.iter().filter(|(place, _)| place.order == Order::Write).map(|(place, _)| place.revision);
    assert!(writes.eq(2..=steps[steps.len() - 1].0.revision), "the recording has one write per revision");
    steps.into_iter().map(|(_, step)| step).collect()
}

impl Request {
    pub fn method(&self) -> &'static str {
        match self {
            Self::Range(_) => "KV/Range",
            Self::Txn(_) => "KV/Txn",
            Self::Compact(_) => "KV/Compact",
            Self::LeaseGrant(_) => "Lease/LeaseGrant",
            Self::Status(_) => "Maintenance/Status",
            Self::Watch(_) => "Watch/Watch",
        }
    }
}

impl Answer {
    pub fn header_mut(&mut self) -> Option<&mut ResponseHeader> {
        match self {
            Self::Range(answer) => answer.header.as_mut(),
            Self::Txn(answer) => answer.header.as_mut(),
            Self::Compact(answer) => answer.header.as_mut(),
            Self::LeaseGrant(answer) => answer.header.as_mut(),
            Self::Status(answer) => answer.header.as_mut(),
            Self::Watch(answer) => answer.header.as_mut(),
        }
    }

    pub fn revision(&self) -> i64 {
        let header = match self {
            Self::Range(answer) => &answer.header,
            Self::Txn(answer) => &answer.header,
            Self::Compact(answer) => &answer.header,
            Self::LeaseGrant(answer) => &answer.header,
            Self::Status(answer) => &answer.header,
            Self::Watch(answer) => &answer.header,
        };
        header.as_ref().expect("every recorded answer has a header").revision
    }
}

/// The position of a step: steps are ordered by the revision in their response; at one revision, the write that created
/// it comes first, and the others follow in the order of responses.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Place {
    revision: i64,
    order: Order,
    seq: u64,
}

#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Order {
    Write,
    Read,
}

/// One line of the file.
#[derive(Deserialize)]
struct Line {
    seq: u64,
    call: CallId,
    method: String,
    event: LineKind,
    #[serde(default)]
    note: String,
    #[serde(default)]
    body: String,
}

#[derive(Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum LineKind {
    Open,
    Req,
    Resp,
    End,
}

fn calls() -> BTreeMap<CallId, Vec<Line>> {
    let mut text = String::new();
    GzDecoder::new(RECORDING).read_to_string(&mut text).expect("the recording is gzipped text");
    let mut calls: BTreeMap<CallId, Vec<Line>> = BTreeMap::new();
    for line in text.lines() {
        let line: Line = serde_json::from_str(line).expect("each line of the recording is an object");
        calls.entry(line.call).or_default().push(line);
    }
    calls
}

fn call_step(lines: &[Line]) -> (Place, Step) {
    let [open, request, answer, end] = lines else { panic!("seq {}: not a unary call", lines[0].seq) };
    assert_eq!(end.note, "ok", "seq {}: no recorded call failed", end.seq);
    let (request, seq) = (request.request(), answer.seq);
    let answer = answer.answer();
    let order = match (&request, &answer) {
        (Request::Txn(request), Answer::Txn(answer)) if writes(request, answer) => Order::Write,
        _ => Order::Read,
    };
    let place = Place { revision: answer.revision(), order, seq };
    (place, Step::Call { exchange: Exchange { seq, request, answer }, metadata: open.metadata() })
}

/// Returns a stream's create and progress requests, each with its response: the stream has one watch and at most one
/// pending progress request, so responses come in the order of requests.
fn watch_steps(stream: CallId, lines: &[Line]) -> Vec<(Place, Step)> {
    let mut events = VecDeque::new();
    let mut answers = VecDeque::new();
    for line in lines.iter().filter(|line| line.event == LineKind::Resp) {
        let Answer::Watch(answer) = line.answer() else { unreachable!("a watch stream carries watch answers") };
        assert!(answer.watch_id <= 0 && !answer.canceled, "seq {}: one watch per stream, never canceled", line.seq);
        if answer.created || answer.events.is_empty() {
            answers.push_back((line.seq, answer));
        } else {
            events.extend(answer.events.into_iter().map(|event| RecordedEvent { seq: line.seq, event }));
        }
    }
    let exchanges = lines.iter().filter(|line| line.event == LineKind::Req).map(|line| {
        let (seq, answer) = answers.pop_front().expect("every recorded watch request was answered");
        Exchange { seq, request: line.request(), answer: Answer::Watch(answer) }
    });
    exchanges
        .map(|exchange| {
            let place = Place { revision: exchange.answer.revision(), order: Order::Read, seq: exchange.seq };
            (place, watch_step(stream, exchange, &lines[0], &mut events))
        })
        .collect()
}

fn watch_step(stream: CallId, exchange: Exchange, open: &Line, events: &mut VecDeque<RecordedEvent>) -> Step {
    let Request::Watch(WatchRequest { request_union }) = &exchange.request else {
        unreachable!("a watch stream carries watch requests")
    };
    match request_union {
        Some(RequestUnion::CreateRequest(_)) => {
            Step::Watch { stream, exchange, metadata: open.metadata(), events: std::mem::take(events) }
        }
        Some(RequestUnion::ProgressRequest(_)) => Step::Progress { stream, exchange },
        Some(RequestUnion::CancelRequest(_)) | None => panic!("seq {}: not in the recording", exchange.seq),
    }
}

/// Returns whether the transaction made a revision.
fn writes(request: &TxnRequest, answer: &TxnResponse) -> bool {
    let ops = if answer.succeeded { &request.success } else { &request.failure };
    ops.iter().zip(&answer.responses).any(|(op, answer)| op_writes(op, answer))
}

fn op_writes(op: &RequestOp, answer: &ResponseOp) -> bool {
    match (&op.request, &answer.response) {
        (Some(Op::RequestPut(_)), _) => true,
        (_, Some(OpAnswer::ResponseDeleteRange(answer))) => answer.deleted > 0,
        (Some(Op::RequestTxn(request)), Some(OpAnswer::ResponseTxn(answer))) => writes(request, answer),
        _ => false,
    }
}

impl Line {
    fn metadata(&self) -> Metadata {
        let pairs = self.note.split(',').filter_map(|pair| pair.split_once('='));
        pairs.map(|(name, value)| (name.to_owned(), value.to_owned())).collect()
    }

    fn request(&self) -> Request {
        match self.method.as_str() {
            "/etcdserverpb.KV/Range" => Request::Range(self.decode()),
            "/etcdserverpb.KV/Txn" => Request::Txn(self.decode()),
            "/etcdserverpb.KV/Compact" => Request::Compact(self.decode()),
            "/etcdserverpb.Lease/LeaseGrant" => Request::LeaseGrant(self.decode()),
            "/etcdserverpb.Maintenance/Status" => Request::Status(self.decode()),
            "/etcdserverpb.Watch/Watch" => Request::Watch(self.decode()),
            method => panic!("{method} is not in the recording"),
        }
    }

    fn answer(&self) -> Answer {
        match self.method.as_str() {
            "/etcdserverpb.KV/Range" => Answer::Range(self.decode()),
            "/etcdserverpb.KV/Txn" => Answer::Txn(self.decode()),
            "/etcdserverpb.KV/Compact" => Answer::Compact(self.decode()),
            "/etcdserverpb.Lease/LeaseGrant" => Answer::LeaseGrant(self.decode()),
            "/etcdserverpb.Maintenance/Status" => Answer::Status(self.decode()),
            "/etcdserverpb.Watch/Watch" => Answer::Watch(self.decode()),
            method => panic!("{method} is not in the recording"),
        }
    }

    /// Returns the line's message. It must encode to the recorded bytes: otherwise our protos lack one of its fields,
    /// and the replay would neither send the same request nor compare the whole response.
    fn decode<M: Message + Default>(&self) -> M {
        let bytes = BASE64_STANDARD.decode(&self.body).expect("bodies are base64");
        let message = M::decode(bytes.as_slice()).expect("bodies are protobuf messages");
        assert_eq!(message.encode_to_vec(), bytes, "seq {}: the protos know every recorded field", self.seq);
        message
    }
}
