//! Unary calls: reads the request message, and builds the response.
//!
//! A request is decoded from the frame in which it arrived, without a copy. A small response is encoded once into a
//! buffer of its size; a large response is sent in chunks ([`super::response_body`]).

use std::{convert::Infallible, error::Error, pin::pin};

use bytes::Bytes;
use http::{HeaderValue, header::CONTENT_TYPE};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tonic::{Status, body::Body};

use super::{
    field_limits::LimitedFields,
    frame::{FRAME_HEADER_BYTES, message_len},
    received::Received,
    response_body::ResponseBody,
};
use crate::api::Settings;

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
            if received.len() >= wanted {
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
