//! The body of a unary response: one frame for a small response, pieces for a large one.
//!
//! A large range is never in memory twice: its pairs are shared with the value cache, and a piece is copied together only
//! when the connection can take it.

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

use super::frame::FRAME_HEAD_BYTES;
use orlop_wire::proto::server::etcdserverpb::{self as pb, response_op::Response};

/// Larger responses are sent in pieces. For each stream of a client that does not read, this many bytes may wait.
const WHOLE_BYTES_MAX: usize = 64 << 10;
/// A piece ends with the pair that reaches this size.
const PIECE_BYTES: usize = 64 << 10;
/// Time after which a response of at least [`STALL_CHECK_BYTES_MIN`] is dropped if its client takes nothing of it.
const STALL_MAX: Duration = Duration::from_secs(60);
/// Smaller responses are not checked for stalled clients.
const STALL_CHECK_BYTES_MIN: usize = 1 << 20;
/// Smaller responses of operations inside a transaction are encoded at once.
const OP_BYTES_MIN: usize = 64 << 10;

/// A part of an encoded message.
pub enum Segment {
    Encoded(Bytes),
    /// A repeated field of pairs, without their tags and lengths.
    Pairs {
        tag: u32,
        pairs: VecDeque<Bytes>,
    },
}

/// A message that can be encoded piece by piece.
pub trait IntoSegments: Message {
    fn into_segments(self, segments: &mut Segments);
}

/// Collects segments; fields that are encoded at once are joined.
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

/// Small messages.
macro_rules! one_segment {
    ($($message:ty),+) => {
        $(impl IntoSegments for $message {
            fn into_segments(self, segments: &mut Segments) {
                segments.fields(&self);
            }
        })+
    };
}

one_segment!(pb::PutResponse, pb::CompactionResponse);

/// The body of a response that succeeded.
pub struct ResponseBody {
    content: Content,
    trailers_sent: bool,
}

enum Content {
    /// One frame; empty once it was sent.
    Whole(Bytes),
    Pieces {
        waiting: Arc<Mutex<Waiting>>,
        /// Drops the pieces if the client takes none.
        stall_check: Option<JoinHandle<()>>,
    },
}

/// The pieces that were not sent yet.
struct Waiting {
    segments: VecDeque<Segment>,
    /// Pieces sent.
    pieces: usize,
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
        let mut frame = Vec::with_capacity(FRAME_HEAD_BYTES + if is_whole { len } else { 0 });
        frame.put_u8(0);
        frame.put_u32(wire_len);
        let content = if is_whole {
            message.encode_raw(&mut frame);
            Content::Whole(frame.into())
        } else {
            let mut segments = Segments { open: frame, ..Segments::default() };
            message.into_segments(&mut segments);
            Content::in_pieces(segments.finish(), len)
        };
        Ok(Self { content, trailers_sent: false })
    }
}

impl Content {
    fn in_pieces(segments: VecDeque<Segment>, len: usize) -> Self {
        let waiting = Arc::new(Mutex::new(Waiting { segments, pieces: 0, is_dropped: false }));
        // Benches encode without a runtime.
        let runtime = Handle::try_current().ok().filter(|_| len >= STALL_CHECK_BYTES_MIN);
        let stall_check = runtime.map(|runtime| runtime.spawn(drop_when_stalled(Arc::clone(&waiting))));
        Self::Pieces { waiting, stall_check }
    }

    /// # Errors
    ///
    /// If the client took nothing for too long.
    fn next_piece(&mut self) -> Result<Option<Bytes>, Status> {
        match self {
            Self::Whole(frame) => Ok(Some(std::mem::take(frame)).filter(|frame| !frame.is_empty())),
            Self::Pieces { waiting, .. } => {
                let mut waiting = waiting.lock();
                if waiting.is_dropped {
                    Err(Status::aborted("orlop: the client read the response too slowly"))
                } else {
                    Ok(waiting.next_piece())
                }
            }
        }
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        if let Self::Pieces { stall_check: Some(check), .. } = self {
            check.abort();
        }
    }
}

/// Drops the pieces when the client took none for [`STALL_MAX`]. hyper polls a body only when the client can take more, so a
/// task of its own has to check.
async fn drop_when_stalled(waiting: Arc<Mutex<Waiting>>) {
    let mut seen = 0;
    loop {
        sleep(STALL_MAX).await;
        let mut waiting = waiting.lock();
        if waiting.pieces == seen {
            waiting.is_dropped = true;
            waiting.segments = VecDeque::new();
            warn!("dropped a response: its client read nothing of it for 60 s");
            return;
        }
        seen = waiting.pieces;
    }
}

impl Waiting {
    fn next_piece(&mut self) -> Option<Bytes> {
        self.pieces += 1;
        loop {
            match self.segments.front_mut()? {
                Segment::Encoded(bytes) => {
                    let bytes = std::mem::take(bytes);
                    self.segments.pop_front();
                    if !bytes.is_empty() {
                        return Some(bytes);
                    }
                }
                Segment::Pairs { tag, pairs } => {
                    let piece = join_pairs(*tag, pairs);
                    if !piece.is_empty() {
                        return Some(piece);
                    }
                    self.segments.pop_front();
                }
            }
        }
    }
}

fn join_pairs(tag: u32, pairs: &mut VecDeque<Bytes>) -> Bytes {
    let framed = |pair: &Bytes| 1 + encoded_len_varint(pair.len() as u64) + pair.len();
    let mut len = 0;
    let count = pairs
        .iter()
        .take_while(|pair| {
            let has_space = len < PIECE_BYTES;
            if has_space {
                len += framed(pair);
            }
            has_space
        })
        .count();
    let mut piece = BytesMut::with_capacity(len);
    for pair in pairs.drain(..count) {
        encode_key(tag, WireType::LengthDelimited, &mut piece);
        encode_varint(pair.len() as u64, &mut piece);
        piece.extend_from_slice(&pair);
    }
    piece.freeze()
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        match this.content.next_piece() {
            Ok(Some(piece)) => return Poll::Ready(Some(Ok(Frame::data(piece)))),
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
        let mut pieces = 0;
        let mut bytes = Vec::new();
        while let Some(piece) = body.content.next_piece().expect("the client is not slow") {
            pieces += 1;
            bytes.extend_from_slice(&piece);
        }
        (pieces, bytes)
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
    fn check<M: IntoSegments + Clone>(message: M, in_pieces: bool) {
        let (pieces, bytes) = drain(body(message.clone()));
        assert_eq!(bytes[0], 0);
        let len = u32::from_be_bytes([bytes[1], bytes[2], bytes[3], bytes[4]]) as usize;
        assert_eq!(len, bytes.len() - FRAME_HEAD_BYTES);
        assert_eq!(pieces > 1, in_pieces, "sent in {pieces} pieces");
        assert!(bytes[FRAME_HEAD_BYTES..] == message.encode_to_vec(), "the pieces join to the message");
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_response_is_dropped_and_slow_one_is_not() {
        use http_body_util::BodyExt as _;
        let mut body = body(range(3_000, 1_000));
        for _ in 0..5 {
            tokio::time::sleep(STALL_MAX * 9 / 10).await;
            assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
        }
        tokio::time::sleep(STALL_MAX * 3).await;
        let Content::Pieces { waiting, .. } = &body.content else { panic!("a large response has pieces") };
        assert!(waiting.lock().segments.is_empty());
        assert!(body.frame().await.is_some_and(|frame| frame.is_err()));
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
    }
}
