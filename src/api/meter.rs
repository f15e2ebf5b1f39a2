//! Counts gRPC calls: begun, ended and how, messages and bytes either way; and follows those of one question and one
//! answer, so that a slow one is named in the log with the parts of its time.
//!
//! A layer around all services, so that no service counts by itself. The series of every method and code are there from the
//! start, at 0, as etcd's are. What a call costs: a lookup by path, and a look at each frame's length.

use std::{
    collections::{BTreeSet, HashMap},
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::routing::Route;
use bytes::{Buf as _, Bytes};
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response};
use http_body::{Body, Frame, SizeHint};
use http_body_util::Either;
use parking_lot::Mutex;
use prometheus::{Histogram, IntCounter};
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tokio::time::Instant;
use tonic::{Code, codegen::BoxFuture};
use tower::{Layer, Service};
use tracing::warn;

use super::{
    intake::{Intake, Share},
    status::panicked,
    unary::FRAME_HEAD_BYTES,
};
use crate::telemetry::{Ended, Exporter, Parent};
use orlop_core::{
    metrics::Metrics,
    supervise,
    trace::{self, Part, RequestId, Trace},
};
use orlop_wire::proto::DESCRIPTORS;

/// Every code with the name that grpc-go's metrics have for it, by its number.
const CODES: [&str; 17] = [
    "OK",
    "Canceled",
    "Unknown",
    "InvalidArgument",
    "DeadlineExceeded",
    "NotFound",
    "AlreadyExists",
    "PermissionDenied",
    "ResourceExhausted",
    "FailedPrecondition",
    "Aborted",
    "OutOfRange",
    "Unimplemented",
    "Internal",
    "Unavailable",
    "DataLoss",
    "Unauthenticated",
];
/// Client versions that are told apart; a client can name any.
const CLIENT_VERSIONS_MAX: usize = 32;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// See the module's page.
#[derive(Clone)]
pub(super) struct Meter(Arc<Counts>);

struct Counts {
    metrics: Arc<Metrics>,
    methods: HashMap<String, Arc<Method>>,
    clients: Mutex<BTreeSet<String>>,
    intake: Arc<Intake>,
    patience: Duration,
    exporter: Option<Arc<Exporter>>,
}

/// What is counted of one method.
struct Method {
    started: IntCounter,
    handled: [IntCounter; CODES.len()],
    received: IntCounter,
    sent: IntCounter,
    received_bytes: IntCounter,
    sent_bytes: IntCounter,
    panics: IntCounter,
    handling: Option<Histogram>,
    kind: &'static str,
    path: String,
    /// Whether it is a matter of the server alone how long it takes.
    is_followed: bool,
}

impl Meter {
    /// # Errors
    ///
    /// If the descriptors that were compiled in cannot be read.
    pub(super) fn new(
        metrics: Arc<Metrics>,
        intake: Arc<Intake>,
        patience: Duration,
        exporter: Option<Arc<Exporter>>,
    ) -> Result<Self, prost::DecodeError> {
        let descriptors = FileDescriptorSet::decode(DESCRIPTORS)?;
        let mut methods = HashMap::new();
        for file in &descriptors.file {
            for service in &file.service {
                let service_name = format!("{}.{}", file.package(), service.name());
                for method in &service.method {
                    let (grpc, kind) = match (method.client_streaming(), method.server_streaming()) {
                        (false, false) => ("unary", "unary"),
                        (false, true) => ("server_stream", "stream"),
                        (true, false) => ("client_stream", "stream"),
                        (true, true) => ("bidi_stream", "stream"),
                    };
                    let counted = Method::new(&metrics, [grpc, &service_name, method.name()], kind);
                    methods.insert(counted.path.clone(), Arc::new(counted));
                }
            }
        }
        let clients = Mutex::default();
        Ok(Self(Arc::new(Counts { metrics, methods, clients, intake, patience, exporter })))
    }

    pub(super) fn around<S>(&self, inner: S) -> Metered<S> {
        Metered { inner, meter: self.clone() }
    }
}

impl Counts {
    fn count_client(&self, headers: &HeaderMap, kind: &str) {
        let named = headers.get("client-api-version").and_then(|version| version.to_str().ok()).unwrap_or("unknown");
        let is_version = named.len() <= 16 && named.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let version = if is_version && self.is_told_apart(named) { named } else { "unknown" };
        self.metrics.rpc.clients.with_label_values(&[kind, version]).inc();
    }

    fn is_told_apart(&self, version: &str) -> bool {
        let mut known = self.clients.lock();
        if known.contains(version) {
            return true;
        }
        known.len() < CLIENT_VERSIONS_MAX && known.insert(version.to_owned())
    }
}

impl Method {
    fn new(metrics: &Metrics, labels: [&str; 3], kind: &'static str) -> Self {
        let rpc = &metrics.rpc;
        let [grpc, service, method] = labels;
        Self {
            started: rpc.started.with_label_values(&labels),
            handled: CODES.map(|code| rpc.handled.with_label_values(&[grpc, service, method, code])),
            received: rpc.received.with_label_values(&labels),
            sent: rpc.sent.with_label_values(&labels),
            received_bytes: rpc.received_bytes.clone(),
            sent_bytes: rpc.sent_bytes.clone(),
            panics: rpc.panics.clone(),
            handling: metrics.handling.as_ref().map(|handling| handling.with_label_values(&labels)),
            kind,
            path: format!("/{service}/{method}"),
            // Who waits for a lock or an election waits for another client.
            is_followed: grpc == "unary" && service.starts_with("etcdserverpb."),
        }
    }
}

impl Layer<Route> for Meter {
    type Service = Metered<Route>;

    fn layer(&self, inner: Route) -> Metered<Route> {
        self.around(inner)
    }
}

/// A service whose calls are counted.
#[derive(Clone)]
pub(super) struct Metered<S> {
    inner: S,
    meter: Meter,
}

/// An answer whose messages are counted, or one of a path that is not counted by method.
pub type Answer<R> = Response<Either<Sent<R>, R>>;

impl<S, B, R> Service<Request<B>> for Metered<S>
where
    S: Service<Request<B>, Response = Response<R>, Error = Infallible, Future: Send + 'static>
        + Service<Request<Received<B>>, Response = Response<R>, Error = Infallible, Future: Send + 'static>,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    R: Body<Data = Bytes> + Unpin + Default + Send + 'static,
{
    type Response = Answer<R>;
    type Error = Infallible;
    type Future = Served<R>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<B>>::poll_ready(&mut self.inner, context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let counts = &*self.meter.0;
        let Some(method) = counts.methods.get(request.uri().path()).map(Arc::clone) else {
            let of = Of::Other(request.uri().path().to_owned(), counts.metrics.rpc.panics.clone());
            let served = self.inner.call(request);
            return Served { work: Box::pin(async move { Ok(served.await?.map(Either::Right)) }), of };
        };
        let of = Of::Method(Arc::clone(&method));
        method.started.inc();
        counts.count_client(request.headers(), method.kind);
        // Counts the call as canceled when it is dropped before it has ended.
        let exporter = counts.exporter.clone().filter(|_| method.is_followed);
        let exported = exporter.map(|exporter| (exporter.parent(request.headers()), exporter));
        let mut call = Call {
            method: Arc::clone(&method),
            begun: Instant::now(),
            ended: false,
            followed: None,
            patience: counts.patience,
            exported,
        };
        let share = Share::new(&counts.intake);
        let request = request.map(|inner| Received { inner, method, frames: Frames::default(), share });
        let intake = Arc::clone(&counts.intake);
        let served = self.inner.call(request);
        let work = Box::pin(async move {
            let response = if call.method.is_followed {
                let (response, trace) = trace::follow(served).await;
                let id = trace.id;
                call.followed = Some(Followed { trace, answered: Instant::now() });
                with_id(response?, id)
            } else {
                served.await?
            };
            // An answer without messages has its status in its head.
            call.end_with(response.headers());
            if is_refusal(&response) {
                intake.refused().await;
            }
            let sent = |inner| Sent { inner, call, frames: Frames::default(), has_panicked: false };
            Ok(response.map(|body| Either::Left(sent(body))))
        });
        Served { work, of }
    }
}

/// What is called.
enum Of {
    Method(Arc<Method>),
    /// A path that is not counted by method.
    Other(String, IntCounter),
}

/// A call under way. If it panics it is answered Internal.
pub struct Served<R> {
    work: BoxFuture<Answer<R>, Infallible>,
    of: Of,
}

impl<R: Default> Future for Served<R> {
    type Output = Result<Answer<R>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match supervise::catch(|| self.work.as_mut().poll(context)) {
            Ok(polled) => polled,
            Err(panic) => {
                let (path, panics) = match &self.of {
                    Of::Method(method) => (&method.path, &method.panics),
                    Of::Other(path, panics) => (path, panics),
                };
                supervise::tell_request(panics, path, &panic);
                Poll::Ready(Ok(panicked().into_http::<R>().map(Either::Right)))
            }
        }
    }
}

fn is_refusal<R>(response: &Response<R>) -> bool {
    response.headers().get("grpc-status").is_some_and(|status| status != "0")
}

/// By the number of a request that failed it is found in the server's log.
fn with_id<R>(mut response: Response<R>, id: RequestId) -> Response<R> {
    const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
    if response.headers().contains_key("grpc-status")
        && let Ok(id) = HeaderValue::try_from(id.to_string())
    {
        response.headers_mut().insert(REQUEST_ID, id);
    }
    response
}

struct Call {
    method: Arc<Method>,
    begun: Instant,
    ended: bool,
    followed: Option<Followed>,
    patience: Duration,
    exported: Option<(Parent, Arc<Exporter>)>,
}

struct Followed {
    trace: Trace,
    answered: Instant,
}

impl Call {
    /// Ends it if these tell its status.
    fn end_with(&mut self, headers: &HeaderMap) {
        if let Some(status) = headers.get("grpc-status") {
            self.end(Code::from_bytes(status.as_bytes()));
        }
    }

    fn end(&mut self, code: Code) {
        if std::mem::replace(&mut self.ended, true) {
            return;
        }
        self.method.handled[code as usize].inc();
        let now = Instant::now();
        if let Some(handling) = &self.method.handling {
            handling.observe((now - self.begun).as_secs_f64());
        }
        if let Some(Followed { mut trace, answered }) = self.followed.take() {
            trace.add(Part::Send, now - answered);
            self.tell(&trace, now - self.begun, code);
        }
    }

    fn tell(&self, trace: &Trace, took: Duration, code: Code) {
        let path = &self.method.path;
        if let Some((parent, exporter)) = &self.exported {
            exporter.record(&Ended { path, parent, took, code: code as i32, trace });
        }
        if took > self.patience {
            let part = |part| trace.part(part).map(tracing::field::debug);
            warn!(
                id = %trace.id,
                method = path.trim_start_matches('/'),
                request = trace.request,
                code = CODES[code as usize],
                ?took,
                "expected-duration" = ?self.patience,
                queue = part(Part::Queue),
                evaluate = part(Part::Evaluate),
                commit = part(Part::Commit),
                confirm = part(Part::Confirm),
                select = part(Part::Select),
                read = part(Part::Read),
                send = part(Part::Send),
                "apply request took too long"
            );
        }
    }
}

impl Drop for Call {
    fn drop(&mut self) {
        self.end(if std::thread::panicking() { Code::Internal } else { Code::Cancelled });
    }
}

/// Finds the messages in data that is cut anywhere.
#[derive(Default)]
struct Frames {
    head: [u8; FRAME_HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of the message at hand, and those of them that are still to come.
    len: usize,
    left: usize,
}

impl Frames {
    /// Bytes that are there of a message that is not whole.
    fn begun(&self) -> usize {
        if self.left == 0 { self.head_bytes } else { FRAME_HEAD_BYTES + self.len - self.left }
    }

    /// How many messages begin in this data.
    fn count(&mut self, mut data: &[u8]) -> u64 {
        let mut messages = 0;
        loop {
            let skipped = self.left.min(data.len());
            self.left -= skipped;
            data.advance(skipped);
            if data.is_empty() {
                return messages;
            }
            let taken = (FRAME_HEAD_BYTES - self.head_bytes).min(data.len());
            self.head[self.head_bytes..self.head_bytes + taken].copy_from_slice(&data[..taken]);
            self.head_bytes += taken;
            data.advance(taken);
            if self.head_bytes == FRAME_HEAD_BYTES {
                self.head_bytes = 0;
                let [_, len @ ..] = self.head;
                self.len = u32::from_be_bytes(len) as usize;
                self.left = self.len;
                messages += 1;
            }
        }
    }
}

/// A request's body.
pub(super) struct Received<B> {
    inner: B,
    method: Arc<Method>,
    frames: Frames,
    /// Held by the message that has begun.
    share: Share,
}

impl<B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin> Body for Received<B> {
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
            let begun = self.frames.begun();
            if let Err(status) = self.share.holds(begun) {
                return Poll::Ready(Some(Err(status.into())));
            }
        }
        if frame.is_pending()
            && let Poll::Ready(status) = self.share.poll_deadline(context)
        {
            return Poll::Ready(Some(Err(status.into())));
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

/// An answer's body.
pub struct Sent<R> {
    inner: R,
    call: Call,
    frames: Frames,
    has_panicked: bool,
}

impl<R: Body<Data = Bytes> + Unpin> Body for Sent<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        if self.has_panicked {
            return Poll::Ready(None);
        }
        let frame = match supervise::catch(|| Pin::new(&mut self.inner).poll_frame(context)) {
            Ok(frame) => frame,
            Err(panic) => {
                self.has_panicked = true;
                let method = &self.call.method;
                supervise::tell_request(&method.panics, &method.path, &panic);
                let mut trailers = HeaderMap::new();
                // A text of ours is one that a header can have.
                let _ = panicked().add_header(&mut trailers);
                Poll::Ready(Some(Ok(Frame::trailers(trailers))))
            }
        };
        if let Poll::Ready(Some(Ok(frame))) = &frame {
            if let Some(data) = frame.data_ref() {
                let messages = self.frames.count(data);
                self.call.method.sent.inc_by(messages);
                self.call.method.sent_bytes.inc_by(data.len() as u64);
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

#[cfg(test)]
mod tests {
    use axum::{Router, body::Body, routing::post};
    use futures_util::{FutureExt as _, StreamExt as _};
    use http_body_util::BodyExt as _;
    use tower::ServiceExt as _;

    use super::*;
    use orlop_core::turns::Turns;

    const RANGE: &str = "/etcdserverpb.KV/Range";
    const PUT: &str = "/etcdserverpb.KV/Put";

    /// The head's status, that of the trailers, what is counted as handled with this code, and panics.
    async fn call(router: &Router, metrics: &Metrics, path: &str, code: &str) -> (Option<i32>, Option<i32>, u64, u64) {
        let status = |headers: &HeaderMap| headers.get("grpc-status")?.to_str().ok()?.parse().ok();
        let request = Request::post(path).body(Body::empty()).unwrap();
        let answer = router.clone().oneshot(request).await.unwrap();
        let head = status(answer.headers());
        let trailers = answer.into_body().collect().await.unwrap().trailers().and_then(status);
        let method = path.rsplit('/').next().unwrap();
        let handled = metrics.rpc.handled.with_label_values(&["unary", "etcdserverpb.KV", method, code]);
        (head, trailers, handled.get(), metrics.rpc.panics.get())
    }

    #[tokio::test]
    async fn panicking_call_is_answered_internal_and_the_next_is_served() {
        let metrics = Arc::new(Metrics::default());
        let panics_late = async || {
            let frames = futures_util::stream::iter([0, 1]).map(|number| match number {
                0 => Ok::<_, Infallible>("a part"),
                _ => panic!("within the answer"),
            });
            Body::from_stream(frames)
        };
        let router = Router::new()
            .route(RANGE, post(async || -> Body { panic!("before the answer") }))
            .route(PUT, post(panics_late))
            .route("/other", post(async || -> Body { panic!("not counted by method") }))
            .layer(Meter::new(Arc::clone(&metrics), Arc::default(), Duration::from_secs(9), None).unwrap());
        for (path, want) in [
            (RANGE, (Some(13), None, 1, 1)),
            (RANGE, (Some(13), None, 2, 2)),
            (PUT, (None, Some(13), 1, 3)),
            ("/other", (Some(13), None, 0, 4)),
        ] {
            assert_eq!(call(&router, &metrics, path, "Internal").await, want, "{path}");
        }
        assert_eq!(metrics.rpc.handled.with_label_values(&["unary", "etcdserverpb.KV", "Range", "Canceled"]).get(), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn what_is_refused_is_told_at_a_turn_or_a_little_later() {
        // Turns that nobody gives.
        let (turns, _give) = Turns::new();
        let intake = Arc::new(Intake::new(&turns));
        let metrics = Arc::new(Metrics::default());
        let refuse = async || tonic::Status::not_found("etcdserver: requested lease not found").into_http::<Body>();
        let router = Router::new()
            .route(RANGE, post(async || Body::empty()))
            .route(PUT, post(refuse))
            .layer(Meter::new(metrics, intake, Duration::from_secs(9), None).unwrap());
        for (path, is_told) in [(RANGE, true), (PUT, false)] {
            let request = Request::post(path).body(Body::empty()).unwrap();
            let mut answered = Box::pin(router.clone().oneshot(request));
            assert_eq!(answered.as_mut().now_or_never().is_some(), is_told, "{path}");
            if !is_told {
                tokio::time::timeout(Duration::from_secs(1), answered).await.expect("an answer").unwrap();
            }
        }
    }

    #[test]
    fn messages_are_counted_wherever_the_data_is_cut() {
        let message = |len: u8| [vec![0, 0, 0, 0, len], vec![7; usize::from(len)]].concat();
        let data = [message(3), message(0), message(9)].concat();
        for at in 0..=data.len() {
            let mut frames = Frames::default();
            let first = frames.count(&data[..at]);
            let ends = [8, 13, 27];
            let whole = ends.into_iter().rfind(|end| *end <= at).unwrap_or(0);
            assert_eq!(frames.begun(), at - whole, "cut at {at}");
            assert_eq!(first + frames.count(&data[at..]), 3, "cut at {at}");
            assert_eq!(frames.begun(), 0);
        }
    }
}
