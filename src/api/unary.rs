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
use crate::turns::Turns;

/// A gRPC frame's head: one byte of flags, four of length.
pub(super) const FRAME_HEAD_BYTES: usize = 5;

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

/// Reads the one message of a unary call.
pub(super) async fn request<M: Looked>(
    request: http::Request<impl RequestBody>,
    settings: &Settings,
) -> Result<M, Status> {
    let message_bytes_max = settings.max_message_bytes();
    let mut body = pin!(request.into_body());
    let mut received = Bytes::new();
    let mut wanted = FRAME_HEAD_BYTES;
    loop {
        if received.len() >= FRAME_HEAD_BYTES {
            wanted = FRAME_HEAD_BYTES + message_len(&received, message_bytes_max)?;
        }
        if received.len() >= wanted && received.len() >= FRAME_HEAD_BYTES {
            break;
        }
        let Some(frame) = body.frame().await else {
            return Err(Status::internal("orlop: the request ended before its message did"));
        };
        let Ok(data) = frame.map_err(|error| Status::from_error(error.into()))?.into_data() else { continue };
        received = append(received, data);
    }
    // A stream that the client has not ended would be reset when its body is dropped. One that broke never ends: it gives
    // its error again and again.
    while !body.is_end_stream() {
        match body.frame().await {
            Some(frame) => drop(frame.map_err(|error| Status::from_error(error.into()))?),
            None => break,
        }
    }
    let message = received.slice(FRAME_HEAD_BYTES..wanted);
    M::check(&message, settings.max_txn_ops)?;
    M::decode(message).map_err(|error| Status::internal(format!("orlop: cannot decode the request: {error}")))
}

fn message_len(received: &Bytes, message_bytes_max: usize) -> Result<usize, Status> {
    let mut head = &received[..FRAME_HEAD_BYTES];
    if head.get_u8() != 0 {
        return Err(Status::unimplemented(
            "orlop: compressed requests are not supported; send them with identity encoding",
        ));
    }
    let len = usize::try_from(head.get_u32()).unwrap_or(usize::MAX);
    if len > message_bytes_max { Err(message_too_large(len, message_bytes_max)) } else { Ok(len) }
}

/// Most messages come in one frame and are not copied.
fn append(received: Bytes, data: Bytes) -> Bytes {
    if received.is_empty() {
        return data;
    }
    let mut joined = received.try_into_mut().unwrap_or_else(|received| BytesMut::from(&received[..]));
    joined.extend_from_slice(&data);
    joined.freeze()
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
