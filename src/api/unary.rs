//! Unary calls served by hand: one message in, one answer out, over an HTTP/2 exchange that tonic's transport carries.
//!
//! tonic's own path copies a request into a buffer of its own and an answer into one that doubles as it grows. Here a
//! request is decoded from the frame that it came in, and an answer is encoded once into a buffer of its size, or sent in
//! pieces (see [`super::reply`]).

use std::{convert::Infallible, error::Error, pin::pin, sync::Arc};

use bytes::{Buf as _, Bytes, BytesMut};
use http::{HeaderValue, header::CONTENT_TYPE};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tonic::{Status, body::Body};

use super::{
    Settings,
    reply::{IntoSegments, ReplyBody},
    status::message_too_large,
    undecoded::Looked,
};
use orlop_core::turns::Turns;

/// A gRPC frame's head: one byte of flags, four of length.
pub(super) const FRAME_HEAD_BYTES: usize = 5;
/// What comes in a frame of its own may be part of a buffer of sixteen KiB.
const PART_BYTES: usize = 4 << 10;
/// What is shorter is gathered to so much.
const TAIL_BYTES: usize = 64 << 10;

pub(super) type Response = Result<http::Response<Body>, Infallible>;

/// What a request comes in.
pub(super) trait RequestBody:
    http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>> + Send> + Send + 'static
{
}

impl<B> RequestBody for B where
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>> + Send> + Send + 'static
{
}

/// Reads the one message of a unary call, and says how many bytes it had.
pub(super) async fn request<M: Looked>(
    request: http::Request<impl RequestBody>,
    settings: &Settings,
) -> Result<(M, usize), Status> {
    let message_bytes_max = settings.max_message_bytes();
    let mut body = pin!(request.into_body());
    let mut received = Received::default();
    let wanted = loop {
        if let Some(head) = received.head() {
            let wanted = FRAME_HEAD_BYTES + message_len(head, message_bytes_max)?;
            if received.len >= wanted {
                break wanted;
            }
        }
        let Some(frame) = body.frame().await else {
            return Err(Status::internal("orlop: the request ended before its message did"));
        };
        let Ok(data) = frame.map_err(|error| Status::from_error(error.into()))?.into_data() else { continue };
        received.push(data);
        if let Some(beginning) = received.beginning() {
            M::look(beginning, settings.max_txn_ops)?;
        }
    };
    // A stream that the client has not ended would be reset when its body is dropped. One that broke never ends: it gives
    // its error again and again.
    while !body.is_end_stream() {
        match body.frame().await {
            Some(frame) => drop(frame.map_err(|error| Status::from_error(error.into()))?),
            None => break,
        }
    }
    let message = received.joined().slice(FRAME_HEAD_BYTES..wanted);
    M::check(&message, settings.max_txn_ops)?;
    let len = message.len();
    match M::decode(message) {
        Ok(message) => Ok((message, len)),
        Err(error) => Err(Status::internal(format!("orlop: cannot decode the request: {error}"))),
    }
}

fn message_len(mut head: &[u8], message_bytes_max: usize) -> Result<usize, Status> {
    if head.get_u8() != 0 {
        return Err(Status::unimplemented(
            "orlop: compressed requests are not supported; send them with identity encoding",
        ));
    }
    let len = usize::try_from(head.get_u32()).unwrap_or(usize::MAX);
    if len > message_bytes_max { Err(message_too_large(len, message_bytes_max)) } else { Ok(len) }
}

/// What has come of a message. Most come in one frame and are not copied; of a long one each byte is copied once, when it is
/// whole: a buffer that doubles as it grows would be copied as often, into memory that the kernel has to clear each time.
#[derive(Default)]
struct Received {
    first: Bytes,
    more: Vec<Bytes>,
    /// Parts so short that each would hold much more than itself.
    tail: BytesMut,
    len: usize,
    is_looked_at: bool,
}

impl Received {
    fn push(&mut self, data: Bytes) {
        let is_first = self.len == 0;
        self.len += data.len();
        let is_part = data.len() >= if is_first { FRAME_HEAD_BYTES } else { PART_BYTES };
        // The head is not cut in two.
        let may_end = !self.first.is_empty() || self.tail.is_empty() || self.tail.len() >= FRAME_HEAD_BYTES;
        if is_part && may_end {
            self.end_tail();
            self.push_part(data);
            return;
        }
        self.tail.extend_from_slice(&data);
        if self.tail.len() >= TAIL_BYTES {
            self.end_tail();
        }
    }

    fn push_part(&mut self, part: Bytes) {
        if self.first.is_empty() { self.first = part } else { self.more.push(part) }
    }

    fn end_tail(&mut self) {
        if !self.tail.is_empty() {
            let tail = std::mem::take(&mut self.tail).freeze();
            self.push_part(tail);
        }
    }

    fn head(&self) -> Option<&[u8]> {
        let first = if self.first.is_empty() { &self.tail[..] } else { &self.first[..] };
        first.get(..FRAME_HEAD_BYTES)
    }

    /// What is known of a long message's content once there is more than one part of it; asked once.
    fn beginning(&mut self) -> Option<&[u8]> {
        let second = self.more.first()?;
        if std::mem::replace(&mut self.is_looked_at, true) {
            return None;
        }
        self.first.get(FRAME_HEAD_BYTES..).filter(|content| !content.is_empty()).or(Some(second))
    }

    fn joined(mut self) -> Bytes {
        self.end_tail();
        if self.more.is_empty() {
            return self.first;
        }
        let mut joined = BytesMut::with_capacity(self.len);
        joined.extend_from_slice(&self.first);
        self.more.iter().for_each(|part| joined.extend_from_slice(part));
        joined.freeze()
    }
}

pub(super) fn respond<M: IntoSegments>(answer: Result<M, Status>, turns: &Arc<Turns>) -> Response {
    let body = answer.and_then(|answer| ReplyBody::new(answer, turns));
    Ok(match body {
        Ok(body) => grpc_response(Body::new(body)),
        Err(status) => status.into_http(),
    })
}

pub(super) fn grpc_response(body: Body) -> http::Response<Body> {
    let mut response = http::Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_the_same_however_it_comes() {
        let message: Vec<u8> = (0..300_000_u32).map(|number| (number % 251) as u8).collect();
        let table: [(&str, &[usize], bool); 7] = [
            ("whole", &[300_000], false),
            ("byte by byte", &[1], true),
            ("a head cut in two", &[2, 16 << 10], true),
            ("a head, and frames", &[5, 16 << 10], true),
            ("frames", &[16 << 10], true),
            ("frames and crumbs", &[16 << 10, 3, 0, 20, 16 << 10], true),
            ("nothing first", &[0, 0, 100_000], true),
        ];
        for (name, sizes, is_copied) in table {
            let whole = Bytes::from(message.clone());
            let (mut received, mut rest) = (Received::default(), whole.clone());
            for size in sizes.iter().cycle() {
                received.push(rest.split_to(rest.len().min(*size)));
                let head = (received.len >= FRAME_HEAD_BYTES).then(|| &message[..FRAME_HEAD_BYTES]);
                assert_eq!(received.head(), head, "{name}");
                assert!(received.more.len() * PART_BYTES <= received.len, "{name}: many short parts");
                if rest.is_empty() {
                    break;
                }
            }
            let joined = received.joined();
            assert!(joined == message, "{name}");
            assert_eq!(joined.as_ptr() != whole.as_ptr(), is_copied, "{name}");
        }
    }

    #[test]
    fn a_message_of_many_parts_is_looked_at_once_and_early() {
        // Sizes of parts, and how many bytes are looked at after each.
        let table: [(&str, &[usize], &[usize]); 4] = [
            ("whole", &[100_000], &[0]),
            ("two frames", &[9_000, 16_000], &[0, 8_995]),
            ("many frames", &[16_000, 16_000, 16_000], &[0, 15_995, 0]),
            ("a head, and frames", &[5, 16_000, 16_000, 16_000], &[0, 16_000, 0, 0]),
        ];
        for (name, sizes, expected) in table {
            let mut received = Received::default();
            let looked = sizes.iter().map(|size| {
                received.push(vec![0; *size].into());
                received.beginning().map_or(0, <[u8]>::len)
            });
            assert_eq!(looked.collect::<Vec<_>>(), expected, "{name}");
        }
    }
}
