//! The body of a unary answer: one frame for a small one, pieces for a large one.
//!
//! A large range is never in memory twice: its pairs are shared with the value cache, and each piece is copied together
//! only when the connection has room for it.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, ready},
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

use super::unary::FRAME_HEAD_BYTES;
use orlop_core::turns::{Turns, Work};
use orlop_wire::proto::server::etcdserverpb::{self as pb, response_op::Response};

/// Answers above this are sent in pieces. As much may wait for a client that does not read, for each of its streams.
const WHOLE_BYTES_MAX: usize = 64 << 10;
/// Bytes after which a piece ends with its pair.
const PIECE_BYTES: usize = 64 << 10;
/// Pieces of an answer that is not large yet: kube-apiserver's pages end before.
const PIECES_FREE: usize = 16;
/// How long a client may take none of an answer above [`HELD_BYTES_MIN`] before that is dropped.
const STALL_MAX: Duration = Duration::from_secs(60);
/// What an answer has to weigh to be worth a look at its client now and then.
const HELD_BYTES_MIN: usize = 1 << 20;
/// An operation's answer inside a transaction's that is worth taking apart.
const OP_BYTES_MIN: usize = 64 << 10;

/// A part of an encoded message, in order.
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

/// Collects segments, joining what is encoded at once.
#[derive(Default)]
pub struct Segments {
    done: VecDeque<Segment>,
    open: Vec<u8>,
}

impl Segments {
    /// Adds fields, as the message that has only them.
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

/// Messages that are small, or as large as what they answer.
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

/// See the module's page.
pub struct ReplyBody {
    content: Content,
    trailers_sent: bool,
}

enum Content {
    /// A frame, until it is taken.
    Whole(Bytes),
    Pieces {
        waiting: Arc<Mutex<Waiting>>,
        work: Option<Work>,
        turns: Arc<Turns>,
        /// Looks whether the client takes what waits.
        look: Option<JoinHandle<()>>,
    },
}

/// What is still to be sent.
struct Waiting {
    segments: VecDeque<Segment>,
    /// Pieces taken by now.
    pieces: usize,
    dropped: bool,
}

impl ReplyBody {
    pub fn new(message: impl IntoSegments, turns: &Arc<Turns>) -> Result<Self, Status> {
        let len = message.encoded_len();
        let wire_len = u32::try_from(len).map_err(|_| {
            Status::resource_exhausted(format!("orlop: the answer has {len} bytes; a message holds 4 GiB"))
        })?;
        let is_whole = len <= WHOLE_BYTES_MAX;
        let mut frame = Vec::with_capacity(FRAME_HEAD_BYTES + if is_whole { len } else { 0 });
        frame.put_u8(0);
        frame.put_u32(wire_len);
        let content = if is_whole {
            turns.leave_time();
            message.encode_raw(&mut frame);
            Content::Whole(frame.into())
        } else {
            let mut segments = Segments { open: frame, ..Segments::default() };
            message.into_segments(&mut segments);
            Content::in_pieces(segments.finish(), len, Arc::clone(turns))
        };
        Ok(Self { content, trailers_sent: false })
    }
}

impl Content {
    fn in_pieces(segments: VecDeque<Segment>, len: usize, turns: Arc<Turns>) -> Self {
        let waiting = Arc::new(Mutex::new(Waiting { segments, pieces: 0, dropped: false }));
        // Where nobody serves there is nobody who does not read.
        let runtime = Handle::try_current().ok().filter(|_| len >= HELD_BYTES_MIN);
        let look = runtime.map(|runtime| runtime.spawn(drop_when_stalled(Arc::clone(&waiting))));
        Self::Pieces { waiting, work: None, turns, look }
    }

    /// # Errors
    ///
    /// If the client took too long.
    fn poll_piece(&mut self, context: &mut Context<'_>) -> Poll<Result<Option<Bytes>, Status>> {
        Poll::Ready(match self {
            Self::Whole(frame) => Ok(Some(std::mem::take(frame)).filter(|frame| !frame.is_empty())),
            Self::Pieces { waiting, work, turns, .. } => {
                let mut waiting = waiting.lock();
                if waiting.pieces >= PIECES_FREE {
                    ready!(work.get_or_insert_with(|| turns.work()).poll_turn(context));
                }
                if waiting.dropped {
                    Err(Status::aborted("orlop: the answer was taken too slowly"))
                } else {
                    Ok(waiting.next_piece())
                }
            }
        })
    }
}

impl Drop for Content {
    fn drop(&mut self) {
        if let Self::Pieces { look: Some(look), .. } = self {
            look.abort();
        }
    }
}

/// A body is only asked for more when its client has made room, so somebody else has to see that it is not.
async fn drop_when_stalled(waiting: Arc<Mutex<Waiting>>) {
    let mut seen = 0;
    loop {
        sleep(STALL_MAX).await;
        let mut waiting = waiting.lock();
        if waiting.pieces == seen {
            waiting.dropped = true;
            waiting.segments = VecDeque::new();
            warn!("an answer is dropped, as its client takes nothing of it");
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
            let room = len < PIECE_BYTES;
            if room {
                len += framed(pair);
            }
            room
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

impl Body for ReplyBody {
    type Data = Bytes;
    type Error = Status;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, Status>>> {
        let this = self.get_mut();
        match ready!(this.content.poll_piece(context)) {
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
    use std::future::poll_fn;

    use futures_util::FutureExt as _;

    use super::*;

    fn body(message: impl IntoSegments) -> ReplyBody {
        ReplyBody::new(message, &Turns::new().0).expect("small enough for a message")
    }

    fn drain(mut body: ReplyBody) -> (usize, Vec<u8>) {
        let mut pieces = 0;
        let mut bytes = Vec::new();
        let mut piece = || poll_fn(|context| body.content.poll_piece(context)).now_or_never();
        while let Some(piece) = piece().expect("it is alone").expect("nobody is slow") {
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
        assert!(bytes[FRAME_HEAD_BYTES..] == message.encode_to_vec(), "the pieces together are the message");
    }

    #[tokio::test(start_paused = true)]
    async fn answer_that_is_not_taken_is_dropped_and_one_that_is_goes_on() {
        use http_body_util::BodyExt as _;
        let mut body = body(range(3_000, 1_000));
        for _ in 0..5 {
            tokio::time::sleep(STALL_MAX * 9 / 10).await;
            assert!(body.frame().await.is_some_and(|frame| frame.is_ok()));
        }
        tokio::time::sleep(STALL_MAX * 3).await;
        let Content::Pieces { waiting, .. } = &body.content else { panic!("it is large") };
        assert!(waiting.lock().segments.is_empty());
        assert!(body.frame().await.is_some_and(|frame| frame.is_err()));
    }

    #[test]
    fn pieces_together_are_the_message() {
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
