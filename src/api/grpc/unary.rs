//! Unary calls: reads the request message, and builds the response.
//!
//! A request is decoded from the frame in which it arrived, without a copy. A small response is encoded once into a
//! buffer of its size; a large response is sent in chunks ([`super::response_body`]).

use std::{convert::Infallible, error::Error, pin::pin};

use bytes::{Bytes, BytesMut};
use http::{HeaderValue, header::CONTENT_TYPE};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tonic::{Status, body::Body};

use super::{
    field_limits::LimitedFields,
    frame::{FRAME_HEADER_BYTES, message_len},
    response_body::ResponseBody,
};
use crate::api::Settings;

/// Minimum size of a part that is not copied. A part may keep a buffer of 16 KiB allocated.
const PART_BYTES_MIN: usize = 4 << 10;
/// Shorter parts are copied into one buffer of up to this size.
const TAIL_BYTES_MAX: usize = 64 << 10;

pub type Response = Result<http::Response<Body>, Infallible>;

/// The body of a request.
pub trait RequestBody:
    http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>> + Send> + Send + 'static
{
}

impl<B> RequestBody for B where
    B: http_body::Body<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>> + Send> + Send + 'static
{
}

/// Reads the request message of a unary call. Its size is limited by [`super::metering`].
///
/// # Errors
///
/// If the stream fails, or the message is compressed, has too many fields or cannot be decoded.
pub async fn request<M: LimitedFields>(body: impl RequestBody, settings: &Settings) -> Result<M, Status> {
    let mut body = pin!(body);
    let mut received = Received::default();
    let wanted = loop {
        if let Some(head) = received.head() {
            let wanted = FRAME_HEADER_BYTES + message_len(head)?;
            if received.len >= wanted {
                break wanted;
            }
        }
        let Some(frame) = body.frame().await else {
            return Err(Status::internal("orlop: the request ended before its message was complete"));
        };
        let Ok(data) = frame.map_err(|error| Status::from_error(error.into()))?.into_data() else { continue };
        received.push(data);
    };
    // Reads until the client has ended the stream, because dropping the body earlier resets the stream. A failed stream
    // never ends, but returns its error repeatedly. Until the end, the message counts as a partial request.
    while !body.is_end_stream() {
        match body.frame().await {
            Some(frame) => drop(frame.map_err(|error| Status::from_error(error.into()))?),
            None => break,
        }
    }
    let message = received.joined().slice(FRAME_HEADER_BYTES..wanted);
    M::check_fields(&message, settings.max_txn_ops)?;
    M::decode(message).map_err(|error| Status::internal(format!("orlop: cannot decode the request: {error}")))
}

/// The received parts of a message. Most messages arrive in one frame and are not copied. A longer message is copied
/// once, when it is complete; a growing buffer would be copied each time its capacity doubles.
#[derive(Default)]
struct Received {
    first: Bytes,
    more: Vec<Bytes>,
    /// Copies of short parts. Without a copy, each part would keep a much larger buffer allocated.
    tail: BytesMut,
    len: usize,
}

impl Received {
    fn push(&mut self, data: Bytes) {
        let is_first = self.len == 0;
        self.len += data.len();
        let is_part = data.len() >= if is_first { FRAME_HEADER_BYTES } else { PART_BYTES_MIN };
        // The frame header must be in one part.
        let may_end = !self.first.is_empty() || self.tail.is_empty() || self.tail.len() >= FRAME_HEADER_BYTES;
        if is_part && may_end {
            self.end_tail();
            self.push_part(data);
            return;
        }
        self.tail.extend_from_slice(&data);
        if self.tail.len() >= TAIL_BYTES_MAX {
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
        first.get(..FRAME_HEADER_BYTES)
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

pub fn respond(outcome: Result<ResponseBody, Status>) -> Response {
    Ok(match outcome {
        Ok(body) => grpc_response(Body::new(body)),
        Err(status) => status.into_http(),
    })
}

pub fn grpc_response(body: Body) -> http::Response<Body> {
    let mut response = http::Response::new(body);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    response
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_does_not_depend_on_chunk_boundaries() {
        let message: Vec<u8> = (0..300_000_u32).map(|number| (number % 251) as u8).collect();
        let table: [(&str, &[usize], bool); 7] = [
            ("in one part", &[300_000], false),
            ("byte by byte", &[1], true),
            ("a head cut in two", &[2, 16 << 10], true),
            ("a head, and frames", &[5, 16 << 10], true),
            ("frames", &[16 << 10], true),
            ("frames and short parts", &[16 << 10, 3, 0, 20, 16 << 10], true),
            ("empty parts first", &[0, 0, 100_000], true),
        ];
        for (name, sizes, is_copied) in table {
            let whole = Bytes::from(message.clone());
            let (mut received, mut rest) = (Received::default(), whole.clone());
            for size in sizes.iter().cycle() {
                received.push(rest.split_to(rest.len().min(*size)));
                let head = (received.len >= FRAME_HEADER_BYTES).then(|| &message[..FRAME_HEADER_BYTES]);
                assert_eq!(received.head(), head, "{name}");
                assert!(received.more.len() * PART_BYTES_MIN <= received.len, "{name}: many short parts");
                if rest.is_empty() {
                    break;
                }
            }
            let joined = received.joined();
            assert!(joined == message, "{name}");
            assert_eq!(joined.as_ptr() != whole.as_ptr(), is_copied, "{name}");
        }
    }
}
