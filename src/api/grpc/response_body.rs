//! The body of a unary response. A small response is sent in one frame, a large response in chunks.
//!
//! A large range is never completely copied: its pairs are shared with the value cache, and a chunk is built only when
//! the connection can send it.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::{BufMut as _, Bytes, BytesMut};
use http::{HeaderMap, HeaderValue};
use http_body::{Body, Frame};
use parking_lot::Mutex;
use prost::{
    Message,
    encoding::{WireType, encode_key, encode_varint, encoded_len_varint},
};
use tokio::{runtime::Handle, task::JoinHandle, time::sleep};
use tonic::Status;
use tracing::warn;

use super::frame::FRAME_HEADER_BYTES;
use orlop_core::overload::ReadMemory;
use orlop_wire::proto::server::etcdserverpb::{self as pb, response_op::Response};

/// Maximum size of a response that is sent in one frame. It is also the number of bytes that are buffered for each
/// stream of a client that does not read.
const WHOLE_BYTES_MAX: usize = 64 << 10;
/// A chunk ends with the pair with which it reaches this size. A longer pair is sent in slices of this size.
const CHUNK_BYTES: usize = 64 << 10;
/// Time after which a response in chunks is dropped if the client reads nothing of it.
const STALL_TIME_MAX: Duration = Duration::from_secs(60);
/// Maximum size of the tag and the length of a pair.
const PAIR_HEADER_BYTES_MAX: usize = 11;
/// Minimum size of the response of an operation in a transaction that is split into segments; smaller ones are encoded
/// at once.
const OP_BYTES_MIN: usize = 64 << 10;

/// A part of an encoded message.
pub enum Segment {
    Encoded(Bytes),
    /// A repeated field of pairs or keys, without their tags and lengths.
    Pairs {
        tag: u32,
        pairs: VecDeque<Bytes>,
    },
}

/// A message that can be encoded in segments.
pub trait IntoSegments: Message {
    fn into_segments(self, segments: &mut Segments);
}

/// Collects segments. Consecutive encoded fields form one segment.
#[derive(Default)]
pub struct Segments {
    done: VecDeque<Segment>,
    open: Vec<u8>,
}

impl Segments {
    /// Adds the fields of a message.
    fn fields(&mut self, message: &impl Message) {
        message.encode_raw(&mut self.open);
    }

    fn nested(&mut self, tag: u32, len: usize) {
        encode_key(tag, WireType::LengthDelimited, &mut self.open);
        encode_varint(len as u64, &mut self.open);
    }

    fn pairs(&mut self, tag: u32, pairs: Vec<Bytes>) {
        self.done.push_back(Segment::Encoded(std::mem::take(&mut self.open).into()));
        self.done.push_back(Segment::Pairs { tag, pairs: pairs.into() });
    }

    fn finish(mut self) -> VecDeque<Segment> {
        self.done.push_back(Segment::Encoded(self.open.into()));
        self.done
    }
}

impl IntoSegments for pb::RangeResponse {
    fn into_segments(mut self, segments: &mut Segments) {
        let pairs = std::mem::take(&mut self.kvs);
        segments.fields(&Self { header: self.header.take(), ..Self::default() });
        segments.pairs(2, pairs);
        segments.fields(&self);
    }
}

impl IntoSegments for pb::DeleteRangeResponse {
    fn into_segments(mut self, segments: &mut Segments) {
        let pairs = std::mem::take(&mut self.prev_kvs);
        segments.fields(&self);
        segments.pairs(3, pairs);
    }
}

impl IntoSegments for pb::LeaseTimeToLiveResponse {
    fn into_segments(mut self, segments: &mut Segments) {
        let keys = std::mem::take(&mut self.keys);
        segments.fields(&self);
        segments.pairs(5, keys);
    }
}

impl IntoSegments for pb::TxnResponse {
    fn into_segments(mut self, segments: &mut Segments) {
        let responses = std::mem::take(&mut self.responses);
        segments.fields(&self);
        for op in responses {
            let op_len = op.encoded_len();
            match op.response {
                Some(Response::ResponseRange(response)) if op_len >= OP_BYTES_MIN => {
                    segments.nested(3, op_len);
                    segments.nested(1, response.encoded_len());
                    response.into_segments(segments);
                }
                Some(Response::ResponseTxn(response)) if op_len >= OP_BYTES_MIN => {
                    segments.nested(3, op_len);
                    segments.nested(4, response.encoded_len());
                    response.into_segments(segments);
                }
                Some(Response::ResponseDeleteRange(response)) if op_len >= OP_BYTES_MIN => {
                    segments.nested(3, op_len);
                    segments.nested(3, response.encoded_len());
                    response.into_segments(segments);
                }
                response => {
                    let op = pb::ResponseOp { response };
                    segments.fields(&Self { responses: vec![op], ..Self::default() });
                }
            }
        }
    }
}

/// Implements [`IntoSegments`] for messages without repeated pairs.
macro_rules! encode_as_one_segment {
    ($($message:ty),+) => {
        $(impl IntoSegments for $message {
            fn into_segments(self, segments: &mut Segments) {
                segments.fields(&self);
            }
        })+
    };
}

encode_as_one_segment!(pb::PutResponse, pb::CompactionResponse, pb::LeaseLeasesResponse);

/// The body of a successful response.
pub struct ResponseBody {
    content: Content,
    trailers_sent: bool,
}

enum Content {
    /// One frame; empty once it was sent.
    Whole(Bytes),
    Chunked {
        pending: Arc<Mutex<PendingChunks>>,
        /// Drops the chunks if the client reads none.
        stall_check: Option<JoinHandle<()>>,
    },
}

/// The part of a response that was not sent yet.
struct PendingChunks {
    segments: VecDeque<Segment>,
    /// Number of sent chunks.
    chunks: usize,
    is_dropped: bool,
}

impl ResponseBody {
    pub fn new(message: impl IntoSegments) -> Result<Self, Status> {
        let len = message.encoded_len();
        let wire_len = u32::try_from(len).map_err(|_| {
            Status::resource_exhausted(format!(
                "orlop: the response has {len} bytes; the maximum of a gRPC message is 4 GiB"
            ))
        })?;
        let is_whole = len <= WHOLE_BYTES_MAX;
        let mut frame = Vec::with_capacity(FRAME_HEADER_BYTES + if is_whole { len } else { 0 });
        frame.put_u8(0);
        frame.put_u32(wire_len);
        let content = if is_whole {
            message.encode_raw(&mut frame);
            Content::Whole(frame.into())
        } else {
            let mut segments = Segments { open: frame, ..Segments::default() };
            message.into_segments(&mut segments);
            Content::in_chunks(segments.finish())
        };
        Ok(Self { content, trailers_sent: false })
    }

    /// Counts the encoded fields of a response in chunks until they are sent. Pairs and keys are counted by the store.
    pub fn counted(self, memory: &ReadMemory) -> Self {
        if let Content::Chunked { pending, .. } = &self.content {
            let mut pending = pending.lock();
            for segment in &mut pending.segments {
                if let Segment::Encoded(fields) = segment {
                    let bytes = fields.len();
                    *fields = memory.hold(std::mem::take(fields), bytes);
                }
            }
        }
        self
    }
}

impl Content {
    fn in_chunks(segments: VecDeque<Segment>) -> Self {
        let pending = Arc::new(Mutex::new(PendingChunks { segments, chunks: 0, is_dropped: false }));
        // Benches encode without a runtime.
        let runtime = Handle::try_current().ok();
        let stall_check = runtime.map(|runtime| runtime.spawn(drop_when_stalled(Arc::clone(&pending))));
        Self::Chunked { pending, stall_check }
    }

    /// # Errors
    ///
    /// If the client has read nothing for [`STALL_TIME_MAX`].
    fn next_chunk(&mut self) -> Result<Option<Bytes>, Status> {
        match self {
            Self::Whole(frame) => Ok(Some(std::mem::take(frame)).filter(|frame| !frame.is_empty())),
            Self::Chunked { pending, .. } => {
                let mut pending = pending.lock();
                if pending.is_dropped {
                    Err(Status::aborted("orlop: the client read the response too slowly"))
                } else {
                    Ok(pending.next_chunk())
                }
            }
        }
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        if let Self::Chunked { stall_check: Some(check), .. } = self {
            check.abort();
        }
    }
}

/// Drops the chunks if the client has read none for [`STALL_TIME_MAX`]. This is a separate task, because hyper polls a
/// body only when the client can receive more.
async fn drop_when_stalled(pending: Arc<Mutex<PendingChunks>>) {
    let mut seen = 0;
    loop {
        sleep(STALL_TIME_MAX).await;
        let mut pending = pending.lock();
        if pending.chunks == seen {
            pending.is_dropped = true;
            pending.segments = VecDeque::new();
            warn!("dropped a response whose client read nothing of it for 60 s");
            return;
        }
        seen = pending.chunks;
    }
}

impl PendingChunks {
    fn next_chunk(&mut self) -> Option<Bytes> {
        self.chunks += 1;
        loop {
            match self.segments.front_mut()? {
                Segment::Encoded(bytes) => {
                    let chunk = bytes.split_to(bytes.len().min(CHUNK_BYTES));
                    if bytes.is_empty() {
                        self.segments.pop_front();
                    }
                    if !chunk.is_empty() {
                        return Some(chunk);
                    }
                }
                Segment::Pairs { tag, pairs } => {
                    let (chunk, long) = join_pairs(*tag, pairs);
                    // The slices of a long pair share its memory, so they count in the memory of reads until they are
                    // sent. A copy would not: a client with a small flow-control window could hold many.
                    if let Some(pair) = long {
                        self.segments.push_front(Segment::Encoded(pair));
                    } else if chunk.is_empty() {
                        self.segments.pop_front();
                    }
                    if !chunk.is_empty() {
                        return Some(chunk);
                    }
                }
            }
        }
    }
}

/// Copies pairs into a chunk. If a long pair is next, the chunk ends with its tag and length, and the pair is returned.
fn join_pairs(tag: u32, pairs: &mut VecDeque<Bytes>) -> (Bytes, Option<Bytes>) {
    let is_long = |pair: &Bytes| pair.len() > CHUNK_BYTES;
    let framed = |pair: &Bytes| 1 + encoded_len_varint(pair.len() as u64) + pair.len();
    let mut len = 0;
    let count = pairs
        .iter()
        .take_while(|pair| {
            let is_joined = len < CHUNK_BYTES && !is_long(pair);
            if is_joined {
                len += framed(pair);
            }
            is_joined
        })
        .count();
    let mut chunk = BytesMut::with_capacity(len + PAIR_HEADER_BYTES_MAX);
    let begin = |pair: &Bytes, chunk: &mut BytesMut| {
        encode_key(tag, WireType::LengthDelimited, chunk);
        encode_varint(pair.len() as u64, chunk);
    };
    for pair in pairs.drain(..count) {
        begin(&pair, &mut chunk);
        chunk.extend_from_slice(&pair);
    }
    let long = if pairs.front().is_some_and(is_long) { pairs.pop_front() } else { None };
    if let Some(pair) = &long {
        begin(pair, &mut chunk);
    }
    (chunk.freeze(), long)
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        match this.content.next_chunk() {
            Ok(Some(chunk)) => return Poll::Ready(Some(Ok(Frame::data(chunk)))),
            Ok(None) => {}
            Err(status) => return Poll::Ready(Some(Err(status))),
        }
        if this.trailers_sent {
            return Poll::Ready(None);
        }
        this.trailers_sent = true;
        let mut trailers = HeaderMap::with_capacity(1);
        trailers.insert("grpc-status", HeaderValue::from_static("0"));
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.trailers_sent
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(message: impl IntoSegments) -> ResponseBody {
        ResponseBody::new(message).expect("below 4 GiB")
    }

    fn drain(mut body: ResponseBody) -> (usize, Vec<u8>) {
        let mut chunks = 0;
        let mut bytes = Vec::new();
        while let Some(chunk) = body.content.next_chunk().expect("the client is not slow") {
            chunks += 1;
            bytes.extend_from_slice(&chunk);
        }
        (chunks, bytes)
    }

    fn range(pairs: usize, bytes: usize) -> pb::RangeResponse {
        pb::RangeResponse {
            header: Some(pb::ResponseHeader { cluster_id: 1, member_id: 2, revision: 3, raft_term: 4 }),
            kvs: (0..pairs).map(|n| vec![n as u8; bytes].into()).collect(),
            more: true,
            count: 7,
        }
    }

    fn txn(responses: Vec<Response>) -> pb::TxnResponse {
        let responses = responses.into_iter().map(|response| pb::ResponseOp { response: Some(response) }).collect();
        pb::TxnResponse { header: None, succeeded: true, responses }
    }

    #[track_caller]
    fn check<M: IntoSegments + Clone>(message: M, in_chunks: bool) {
        let (chunks, bytes) = drain(body(message.clone()));
        assert_eq!(bytes[0], 0);
        let len = u32::from_be_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]) as usize;
        assert_eq!(len, bytes.len() - FRAME_HEADER_BYTES);
        assert_eq!(chunks > 1, in_chunks, "sent in {chunks} chunks");
        assert!(bytes[FRAME_HEADER_BYTES..] == message.encode_to_vec(), "the joined chunks equal the message");
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_response_is_dropped_and_slow_one_is_not() {
        use http_body_util::BodyExt as _;
        for message in [range(3_000, 1_000), range(1, 600_000), range(1, 2 << 20)] {
            let mut body = body(message);
            for _ in 0..5 {
                tokio::time::sleep(STALL_TIME_MAX * 9 / 10).await;
                assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
            }
            tokio::time::sleep(STALL_TIME_MAX * 3).await;
            let Content::Chunked { pending, .. } = &body.content else { panic!("a large response has chunks") };
            assert!(pending.lock().segments.is_empty());
            assert!(body.frame().await.is_some_and(|frame| frame.is_err()));
        }
    }

    #[test]
    fn list_of_leases_counts_until_it_is_sent() {
        let memory = ReadMemory::new(0);
        let leases = vec![pb::LeaseStatus { id: i64::MAX }; 10_000];
        let body = body(pb::LeaseLeasesResponse { leases, ..Default::default() }).counted(&memory);
        assert!(memory.bytes() > 100_000, "{} bytes", memory.bytes());
        let (chunks, bytes) = drain(body);
        assert!(chunks > 1, "{} bytes", bytes.len());
        assert_eq!(memory.bytes(), 0);
    }

    /// Copies would not count in the memory of reads.
    #[test]
    fn long_pairs_are_sent_in_slices_without_a_copy() {
        let pairs = [10, 2 << 20, CHUNK_BYTES + 1, 20, CHUNK_BYTES].map(|len| Bytes::from(vec![7_u8; len])).to_vec();
        let message = pb::RangeResponse { kvs: pairs.clone(), ..Default::default() };
        check(message.clone(), true);
        let mut body = body(message);
        let mut uncopied = 0;
        while let Some(chunk) = body.content.next_chunk().expect("the client is not slow") {
            assert!(chunk.len() <= 2 * CHUNK_BYTES, "a chunk of {} bytes", chunk.len());
            if pairs.iter().any(|pair| pair.as_ptr_range().contains(&chunk.as_ptr())) {
                uncopied += chunk.len();
            }
        }
        assert_eq!(uncopied, (2 << 20) + CHUNK_BYTES + 1);
    }

    #[test]
    fn joined_chunks_equal_the_message() {
        check(range(0, 0), false);
        check(range(1, 1), false);
        check(range(60, 1000), false);
        check(range(1000, 1000), true);
        check(range(3000, 1000), true);
        check(range(1, 2 << 20), true);
        let delete =
            |pairs: usize| pb::DeleteRangeResponse { prev_kvs: range(pairs, 1000).kvs, deleted: 9, header: None };
        check(delete(3), false);
        check(delete(3000), true);
        check(txn(vec![Response::ResponseDeleteRange(delete(3000))]), true);
        let nested = || txn(vec![Response::ResponseRange(range(3, 10)), Response::ResponseRange(range(2000, 1000))]);
        check(nested(), true);
        check(txn(vec![Response::ResponseTxn(nested()), Response::ResponsePut(pb::PutResponse::default())]), true);
        let lease = |keys: usize| pb::LeaseTimeToLiveResponse {
            header: range(0, 0).header,
            id: -7,
            ttl: 9,
            granted_ttl: 10,
            keys: range(keys, 100).kvs,
        };
        check(lease(0), false);
        check(lease(3), false);
        check(lease(3000), true);
    }
}
