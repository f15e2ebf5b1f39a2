//! Counts gRPC calls, messages and bytes. Limits the size of requests. Traces unary calls, so that a slow call is logged
//! with the duration of each phase.
//!
//! It is one layer around all services. As in etcd, the time series of every method and code exist from the start with
//! the value 0. The cost per call is one lookup by path, and reading the header of each frame.

mod body;
mod call;

use std::{
    collections::{BTreeSet, HashMap},
    convert::Infallible,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use axum::routing::Route;
use bytes::Bytes;
use http::{HeaderMap, Request, Response};
use http_body::Body;
use http_body_util::Either;
use parking_lot::Mutex;
use prometheus::IntCounter;
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tonic::codegen::BoxFuture;
use tonic_health::pb::FILE_DESCRIPTOR_SET as HEALTH;
use tonic_reflection::pb::{v1::FILE_DESCRIPTOR_SET as REFLECTION, v1alpha::FILE_DESCRIPTOR_SET as REFLECTION_ALPHA};
use tower::{Layer, Service};

pub use self::body::{ReceivedBody, SentBody};
use self::call::{CallGuard, Method, add_request_id};
use crate::{
    api::{
        Settings,
        grpc::deadline::Deadline,
        slow_requests::SlowRequests,
        status::{panicked, unknown_method},
    },
    net::Remote,
    telemetry::Exporter,
};
use orlop_core::{metrics::Metrics, overload::PartialRequests, supervise, trace};
use orlop_wire::proto::DESCRIPTORS;

/// Maximum number of client versions with a separate time series. It limits the number of time series, because a client
/// can send any version.
const CLIENT_VERSIONS_MAX: usize = 32;

type BoxError = Box<dyn std::error::Error + Send + Sync>;

/// A layer that counts the calls of all methods.
#[derive(Clone)]
pub struct Meter(Arc<Counters>);

struct Counters {
    metrics: Arc<Metrics>,
    methods: HashMap<String, Arc<Method>>,
    clients: Mutex<BTreeSet<String>>,
    partial_requests: Arc<PartialRequests>,
    slow_threshold: Duration,
    exporter: Option<Arc<Exporter>>,
}

impl Meter {
    /// Creates the counters. Slow calls are logged and added to `slow_requests`.
    ///
    /// # Errors
    ///
    /// If the compiled-in descriptors cannot be read.
    pub fn new(
        metrics: Arc<Metrics>,
        partial_requests: Arc<PartialRequests>,
        slow_requests: &Arc<SlowRequests>,
        settings: &Settings,
    ) -> Result<Self, prost::DecodeError> {
        let mut methods = HashMap::new();
        let mut files = Vec::new();
        for descriptors in [DESCRIPTORS, HEALTH, REFLECTION, REFLECTION_ALPHA] {
            files.extend(FileDescriptorSet::decode(descriptors)?.file);
        }
        for file in &files {
            for service in &file.service {
                let service_name = format!("{}.{}", file.package(), service.name());
                let request_bytes_max = settings.max_request_message_bytes(&service_name);
                for method in &service.method {
                    let (grpc, kind) = match (method.client_streaming(), method.server_streaming()) {
                        (false, false) => ("unary", "unary"),
                        (false, true) => ("server_stream", "stream"),
                        (true, false) => ("client_stream", "stream"),
                        (true, true) => ("bidi_stream", "stream"),
                    };
                    let labels = [grpc, &service_name, method.name()];
                    let counted = Method::new(&metrics, slow_requests, labels, kind, request_bytes_max);
                    methods.insert(counted.path.clone(), Arc::new(counted));
                }
            }
        }
        let clients = Mutex::default();
        let (slow_threshold, exporter) = (settings.slow_threshold, settings.exporter.clone());
        Ok(Self(Arc::new(Counters { metrics, methods, clients, partial_requests, slow_threshold, exporter })))
    }

    pub fn wrap<S>(&self, inner: S) -> Metered<S> {
        Metered { inner, meter: self.clone() }
    }
}

impl Counters {
    /// Returns whether a path without counters is that of a service whose methods have them.
    fn is_unknown_method(&self, path: &str) -> bool {
        fn service(path: &str) -> Option<&str> {
            path.strip_prefix('/')?.split_once('/').map(|(service, _)| service)
        }
        self.methods.keys().any(|known| service(known) == service(path))
    }

    fn count_client(&self, headers: &HeaderMap, kind: &str) {
        let named = headers.get("client-api-version").and_then(|version| version.to_str().ok()).unwrap_or("unknown");
        let is_version = named.len() <= 16 && named.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
        let version = if is_version && self.has_separate_series(named) { named } else { "unknown" };
        self.metrics.rpc.clients.with_label_values(&[kind, version]).inc();
    }

    fn has_separate_series(&self, version: &str) -> bool {
        let mut known = self.clients.lock();
        if known.contains(version) {
            return true;
        }
        known.len() < CLIENT_VERSIONS_MAX && known.insert(version.to_owned())
    }
}

impl Layer<Route> for Meter {
    type Service = Metered<Route>;

    fn layer(&self, inner: Route) -> Metered<Route> {
        self.wrap(inner)
    }
}

/// A service whose calls are counted.
#[derive(Clone)]
pub struct Metered<S> {
    inner: S,
    meter: Meter,
}

impl<S, B, R> Service<Request<B>> for Metered<S>
where
    S: Service<Request<B>, Response = Response<R>, Error = Infallible, Future: Send + 'static>
        + Service<Request<ReceivedBody<B>>, Response = Response<R>, Error = Infallible, Future: Send + 'static>,
    B: Body<Data = Bytes, Error: Into<BoxError>> + Unpin,
    R: Body<Data = Bytes> + Unpin + Default + Send + 'static,
{
    type Response = MeteredResponse<R>;
    type Error = Infallible;
    type Future = MeteredCall<R>;

    fn poll_ready(&mut self, context: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Service::<Request<B>>::poll_ready(&mut self.inner, context)
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        let counters = &*self.meter.0;
        let Some(method) = counters.methods.get(request.uri().path()).map(Arc::clone) else {
            let kind = CallKind::Other(request.uri().path().to_owned(), counters.metrics.rpc.panics.clone());
            if counters.is_unknown_method(request.uri().path()) {
                let refused = unknown_method(request.uri().path()).into_http().map(Either::Right);
                return MeteredCall { work: Box::pin(async { Ok(refused) }), kind };
            }
            let served = self.inner.call(request);
            return MeteredCall { work: Box::pin(async move { Ok(served.await?.map(Either::Right)) }), kind };
        };
        let kind = CallKind::Method(Arc::clone(&method));
        method.started.inc();
        counters.count_client(request.headers(), method.kind);
        let remote = request.extensions().get::<Remote>().cloned();
        let exporter = counters.exporter.clone().filter(|_| method.is_traced);
        let exported = exporter.map(|exporter| (exporter.parent(request.headers()), exporter));
        let mut call = CallGuard::new(Arc::clone(&method), remote, counters.slow_threshold, exported);
        let mut deadline = Deadline::of(request.headers());
        let partial_requests = &counters.partial_requests;
        let request = request.map(|body| ReceivedBody::new(body, method, partial_requests));
        let served = self.inner.call(request);
        let work = Box::pin(async move {
            let served = async { deadline.limit(served).await.unwrap_or_else(|late| Ok(late.into_http())) };
            let mut response = if call.method.is_traced {
                trace::follow(served, |trace| call.set_trace(trace)).await?
            } else {
                served.await?
            };
            if let Some(id) = call.request_id() {
                add_request_id(&mut response, id);
            }
            // A response without messages has its status in its headers.
            call.end_with(response.headers());
            Ok(response.map(|body| Either::Left(SentBody::new(body, call, deadline))))
        });
        MeteredCall { work, kind }
    }
}

/// A response whose messages are counted, or a response for a path without counters.
pub type MeteredResponse<R> = Response<Either<SentBody<R>, R>>;

/// The method of a call.
enum CallKind {
    Method(Arc<Method>),
    /// A path without counters, and the counter of panics.
    Other(String, IntCounter),
}

/// A call until its response begins. If it panics, the status of the response is Internal.
pub struct MeteredCall<R> {
    work: BoxFuture<MeteredResponse<R>, Infallible>,
    kind: CallKind,
}

impl<R: Default> Future for MeteredCall<R> {
    type Output = Result<MeteredResponse<R>, Infallible>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        match supervise::catch_panic(|| self.work.as_mut().poll(context)) {
            Ok(polled) => polled,
            Err(panic) => {
                let (path, panics) = match &self.kind {
                    CallKind::Method(method) => (&method.path, &method.panics),
                    CallKind::Other(path, panics) => (path, panics),
                };
                supervise::log_request_panic(panics, path, &panic);
                Poll::Ready(Ok(panicked().into_http::<R>().map(Either::Right)))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::{Router, body::Body, routing::post};
    use futures_util::{StreamExt as _, stream};
    use http_body_util::BodyExt as _;
    use tokio::time::{sleep, timeout};
    use tower::ServiceExt as _;

    use super::*;

    const RANGE: &str = "/etcdserverpb.KV/Range";
    const PUT: &str = "/etcdserverpb.KV/Put";

    fn meter(metrics: &Arc<Metrics>, slow_requests: &Arc<SlowRequests>) -> Meter {
        let settings = Settings {
            max_request_bytes: 0,
            max_txn_ops: 0,
            watch_progress_notify_interval: Duration::from_secs(1),
            slow_threshold: Duration::from_secs(1),
            exporter: None,
        };
        Meter::new(Arc::clone(metrics), Arc::default(), slow_requests, &settings).unwrap()
    }

    /// Returns the status in the headers, the status in the trailers, the count of calls with this code, and panics.
    async fn call(router: &Router, metrics: &Metrics, path: &str, code: &str) -> (Option<i32>, Option<i32>, u64, u64) {
        let status = |headers: &HeaderMap| headers.get("grpc-status")?.to_str().ok()?.parse().ok();
        let request = Request::post(path).body(Body::empty()).unwrap();
        let response = router.clone().oneshot(request).await.unwrap();
        let head = status(response.headers());
        let trailers = response.into_body().collect().await.unwrap().trailers().and_then(status);
        let method = path.rsplit('/').next().unwrap();
        let handled = metrics.rpc.handled.with_label_values(&["unary", "etcdserverpb.KV", method, code]);
        (head, trailers, handled.get(), metrics.rpc.panics.get())
    }

    /// In an outage, most calls end like this.
    #[tokio::test(start_paused = true)]
    async fn slow_calls_that_their_client_gives_up_are_kept() {
        let (metrics, slow_requests) = (Arc::<Metrics>::default(), Arc::<SlowRequests>::default());
        let meter = meter(&metrics, &slow_requests);
        let waits = async || std::future::pending::<Body>().await;
        let router = Router::new().route(RANGE, post(waits)).route(PUT, post(waits)).layer(meter);
        let request = |path| Request::post(path).header("grpc-timeout", "3S").body(Body::empty()).unwrap();
        let late = router.clone().oneshot(request(RANGE)).await.unwrap();
        assert_eq!(late.headers()["grpc-status"], "4");
        assert!(late.headers().contains_key("x-request-id"));
        let cancelled = timeout(Duration::from_secs(2), router.oneshot(request(PUT))).await;
        assert!(cancelled.is_err(), "its client gives up first");
        let kept = slow_requests.list().0;
        let kept: Vec<_> = kept.iter().map(|slow| (&*slow.method, slow.code)).collect();
        assert_eq!(kept, [("etcdserverpb.KV/Put", "Canceled"), ("etcdserverpb.KV/Range", "DeadlineExceeded")]);
    }

    /// A peer without a user can make any number of such calls.
    #[tokio::test(start_paused = true)]
    async fn call_whose_request_never_arrived_is_not_slow() {
        const PARTS: [&[u8]; 2] = [&[0, 0, 0, 0], &[0]];
        let rest_after = |pause| async move {
            sleep(pause).await;
            Ok::<_, Infallible>(PARTS[1])
        };
        let reads = |body: Body| async move {
            let _ = body.collect().await;
            std::future::pending::<Body>().await
        };
        for (pause_secs, kept) in [(2, 1), (3_600, 0)] {
            let slow_requests = Arc::default();
            let router = Router::new().route(RANGE, post(reads)).layer(meter(&Arc::default(), &slow_requests));
            let parts = stream::iter([Ok(PARTS[0])]).chain(stream::once(rest_after(Duration::from_secs(pause_secs))));
            let request = Request::post(RANGE).body(Body::from_stream(parts)).unwrap();
            let cancelled = timeout(Duration::from_secs(10), router.oneshot(request)).await;
            assert!(cancelled.is_err(), "its client gives up first");
            assert_eq!(slow_requests.list().0.len(), kept, "the rest comes after {pause_secs} s");
        }
    }

    #[tokio::test]
    async fn panicking_call_returns_internal_and_the_next_call_is_served() {
        let metrics = Arc::new(Metrics::default());
        let panics_late = async || {
            let frames = stream::iter([0, 1]).map(|number| match number {
                0 => Ok::<_, Infallible>("a part"),
                _ => panic!("within the response"),
            });
            Body::from_stream(frames)
        };
        let router = Router::new()
            .route(RANGE, post(async || -> Body { panic!("before the response") }))
            .route(PUT, post(panics_late))
            .route("/other", post(async || -> Body { panic!("not counted by method") }))
            .layer(meter(&metrics, &Arc::default()));
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
}
