//! Bodies of metered calls: counts messages and bytes, limits partial requests, and ends a response that panics.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
};

use bytes::Bytes;
use http::HeaderMap;
use http_body::{Body, Frame, SizeHint};
use tonic::Status;

use super::call::{CallGuard, Method};
use crate::api::{
    grpc::frame::FrameCounter,
    status::{panicked, request_too_late, too_many_requests},
};
use orlop_core::{
    overload::{PartialRequest, PartialRequests},
    supervise, trace,
};

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// The body of a request.
pub struct ReceivedBody<B> {
    inner: B,
    method: Arc<Method>,
    frames: FrameCounter,
    partial: PartialRequest,
}

impl<B> ReceivedBody<B> {
    pub fn new(inner: B, method: Arc<Method>, partial_requests: &Arc<PartialRequests>) -> Self {
        Self { inner, method, frames: FrameCounter::default(), partial: PartialRequest::new(partial_requests) }
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for ReceivedBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
        {
            let messages = self.frames.count(data);
            self.method.received.inc_by(messages);
            self.method.received_bytes.inc_by(data.len() as u64);
            if trace::are_requests_logged() {
                trace::add_request_bytes(data.len());
            }
            let partial_bytes = self.frames.partial_bytes();
            if self.partial.set_bytes(partial_bytes).is_err() {
                return failed(too_many_requests());
            }
        }
        if frame.is_pending() && self.partial.poll_deadline(context).is_ready() {
            return failed(request_too_late());
        }
        frame.map_err(Into::into)
    }

    fn is_end_stream(&self) -> bool {
        self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

fn failed<T>(status: Status) -> Poll<Option<Result<T, BoxError>>> {
    Poll::Ready(Some(Err(status.into())))
}

/// The body of a response.
pub struct SentBody<R> {
    inner: R,
    call: CallGuard,
    frames: FrameCounter,
    has_panicked: bool,
}

impl<R> SentBody<R> {
    pub fn new(inner: R, call: CallGuard) -> Self {
        Self { inner, call, frames: FrameCounter::default(), has_panicked: false }
    }
}

impl<R: Body<Data = Bytes> + Unpin> Body for SentBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        if self.has_panicked {
            return Poll::Ready(None);
        }
        let frame = match supervise::catch_panic(|| Pin::new(&mut self.inner).poll_frame(context)) {
            Ok(frame) => frame,
            Err(panic) => {
                self.has_panicked = true;
                let method = &self.call.method;
                supervise::log_request_panic(&method.panics, &method.path, &panic);
                let mut trailers = HeaderMap::new();
                // The text is ASCII, so it is a valid header value.
                let _ = panicked().add_header(&mut trailers);
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
        };
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            if let Some(data) = frame.data_ref() {
                let messages = self.frames.count(data);
                self.call.method.sent.inc_by(messages);
                self.call.method.sent_bytes.inc_by(data.len() as u64);
                self.call.response_bytes += data.len();
            } else if let Some(trailers) = frame.trailers_ref() {
                self.call.end_with(trailers);
            }
        }
        frame
    }

    fn is_end_stream(&self) -> bool {
        self.has_panicked || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}
