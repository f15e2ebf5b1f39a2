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
    grpc::{deadline::Deadline, frame::FrameCounter},
    status::{DEADLINE_EXCEEDED, message_too_large, panicked, request_too_late, too_many_requests},
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
    /// Number of messages whose header has arrived.
    messages: u64,
    bytes: usize,
    partial: PartialRequest,
    /// The message is complete and exceeds the memory of partial requests. It is refused unless the stream ends at once.
    is_excess: bool,
    /// The stream had to wait for the client.
    is_awaited: bool,
}

impl<B> ReceivedBody<B> {
    pub fn new(inner: B, method: Arc<Method>, partial_requests: &Arc<PartialRequests>) -> Self {
        let partial = PartialRequest::new(partial_requests);
        let frames = FrameCounter::default();
        Self { inner, method, frames, messages: 0, bytes: 0, partial, is_excess: false, is_awaited: false }
    }
}

impl<B: Body> ReceivedBody<B> {
    /// Counts data that has arrived.
    ///
    /// # Errors
    ///
    /// If a message is too long, partial requests have too many bytes, or a call with one request message has a second
    /// one.
    fn count(&mut self, data: &[u8]) -> Result<(), Status> {
        let messages = self.frames.count(data);
        self.method.received.inc_by(messages);
        self.method.received_bytes.inc_by(data.len() as u64);
        if trace::are_requests_logged() {
            trace::add_request_bytes(data.len());
        }
        let (longest, max) = (self.frames.longest_bytes(), self.method.request_bytes_max);
        if longest > max {
            return Err(message_too_large(longest, max));
        }
        if !self.method.has_one_request {
            // The service has taken each message that is complete.
            return self.partial.set_bytes(self.frames.partial_bytes()).map_err(|_| too_many_requests());
        }
        self.messages += messages;
        if self.messages > 1 {
            return Err(Status::internal("orlop: the request has more than one message"));
        }
        // The service holds the message, even a complete one, until the client ends the stream.
        self.bytes += data.len();
        let held = if self.inner.is_end_stream() { 0 } else { self.bytes };
        let is_full = self.partial.set_bytes(held).is_err();
        if is_full && self.frames.partial_bytes() > 0 {
            return Err(too_many_requests());
        }
        // Some clients end the stream with another, empty frame, which arrives together with the message.
        self.is_excess = is_full;
        Ok(())
    }

    /// Returns an error if the rest of the request has not arrived and may not arrive later.
    fn poll_late(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if self.is_excess {
            return Poll::Ready(too_many_requests());
        }
        self.partial.poll_deadline(context).map(|_| request_too_late())
    }
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for ReceivedBody<B> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        let frame = Pin::new(&mut self.inner).poll_frame(context);
        if let Poll::Ready(Some(Ok(frame))) = &frame
            && let Some(data) = frame.data_ref()
            && let Err(status) = self.count(data)
        {
            return failed(status);
        }
        match &frame {
            Poll::Pending => {
                self.is_awaited = true;
                trace::set_awaited();
                if let Poll::Ready(status) = self.poll_late(context) {
                    return failed(status);
                }
            }
            Poll::Ready(Some(Ok(_)) | None) if self.is_awaited => trace::set_received(),
            Poll::Ready(Some(Ok(_)) | None) => {}
            // The rest of the request never arrives.
            Poll::Ready(Some(Err(_))) => trace::set_awaited(),
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
    deadline: Deadline,
    /// Whether the body was ended before its end.
    is_cut_off: bool,
}

impl<R> SentBody<R> {
    pub fn new(inner: R, call: CallGuard, deadline: Deadline) -> Self {
        Self { inner, call, frames: FrameCounter::default(), deadline, is_cut_off: false }
    }

    /// Ends the body with this status.
    fn cut_off<E>(&mut self, status: &Status) -> Poll<Option<Result<Frame<Bytes>, E>>> {
        self.is_cut_off = true;
        let mut trailers = HeaderMap::new();
        // The texts of these statuses are ASCII, so they are valid header values.
        let _ = status.add_header(&mut trailers);
        Poll::Ready(Some(Ok(Frame::trailers(trailers))))
    }
}

impl<R: Body<Data = Bytes> + Unpin> Body for SentBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        if self.is_cut_off {
            return Poll::Ready(None);
        }
        let mut frame = match supervise::catch_panic(|| Pin::new(&mut self.inner).poll_frame(context)) {
            Ok(frame) => frame,
            Err(panic) => {
                let method = &self.call.method;
                supervise::log_request_panic(&method.panics, &method.path, &panic);
                self.cut_off(&panicked())
            }
        };
        if frame.is_pending() && self.deadline.has_passed(context) {
            frame = self.cut_off(&DEADLINE_EXCEEDED.into());
        }
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
        self.is_cut_off || self.inner.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.inner.size_hint()
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use futures_util::{StreamExt as _, stream};
    use http_body_util::{BodyExt as _, Full, StreamBody};
    use orlop_core::{metrics::Metrics, overload::REQUEST_TIME_MAX};
    use tokio::time::timeout;

    use super::*;

    const MESSAGE: &[u8] = &[0, 0, 0, 0, 3, 7, 7, 7];

    fn received<B>(inner: B, kind: &str, all: &Arc<PartialRequests>) -> ReceivedBody<B> {
        let labels = [kind, "etcdserverpb.KV", "Put"];
        let method = Method::new(&Metrics::default(), &Arc::default(), labels, "unary", MESSAGE.len());
        ReceivedBody::new(inner, Arc::new(method), all)
    }

    fn frame(data: &'static [u8]) -> Result<Frame<Bytes>, Infallible> {
        Ok(Frame::data(Bytes::from_static(data)))
    }

    /// A complete message on a stream that stays open.
    fn open_stream() -> impl Body<Data = Bytes, Error = Infallible> + Unpin {
        StreamBody::new(stream::iter([frame(MESSAGE)]).chain(stream::pending()))
    }

    #[tokio::test(start_paused = true)]
    async fn complete_message_has_a_deadline_until_its_stream_ends() {
        for (kind, stays_open) in
            [("unary", false), ("server_stream", false), ("client_stream", true), ("bidi_stream", true)]
        {
            let all = Arc::default();
            let mut body = received(open_stream(), kind, &all);
            assert!(matches!(body.frame().await, Some(Ok(_))), "{kind}");
            let next = timeout(REQUEST_TIME_MAX * 2, body.frame()).await;
            assert_eq!(next.is_err(), stays_open, "{kind}");
        }
    }

    #[tokio::test]
    async fn complete_message_of_a_call_needs_memory_until_its_stream_ends() {
        let all = Arc::default();
        let mut others = PartialRequest::new(&all);
        assert!(others.set_bytes(1 << 30).is_err(), "all memory is used");
        let ended = received(Full::<Bytes>::from(MESSAGE), "unary", &all);
        assert!(ended.collect().await.is_ok(), "the stream ends with the message");
        let ended = received(StreamBody::new(stream::iter([frame(MESSAGE), frame(&[])])), "unary", &all);
        assert!(ended.collect().await.is_ok(), "the stream ends with the next frame");
        let mut open = received(open_stream(), "unary", &all);
        assert!(matches!(open.frame().await, Some(Ok(_))));
        assert!(matches!(open.frame().await, Some(Err(_))), "the stream stays open");
        let mut open = received(open_stream(), "bidi_stream", &all);
        assert!(matches!(open.frame().await, Some(Ok(_))), "the service takes the message");
    }

    #[tokio::test]
    async fn second_message_of_a_call_is_refused() {
        let twice = [MESSAGE, MESSAGE].concat();
        for (kind, is_refused) in [("unary", true), ("bidi_stream", false)] {
            let body = received(Full::<Bytes>::from(twice.clone()), kind, &Arc::default());
            assert_eq!(body.collect().await.is_err(), is_refused, "{kind}");
        }
    }
}
