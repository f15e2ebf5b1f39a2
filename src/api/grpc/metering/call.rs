//! One call: its counters and its trace.

use std::{sync::Arc, time::Duration};

use http::{HeaderMap, HeaderName, HeaderValue, Response};
use prometheus::{Histogram, IntCounter};
use tokio::time::Instant;
use tonic::Code;
use tracing::{debug, warn};

use crate::{
    api::{
        grpc::frame::FRAME_HEADER_BYTES,
        slow_requests::{SlowRequest, SlowRequests},
    },
    net::Remote,
    telemetry::{Exporter, FinishedCall, Parent},
};
use orlop_core::{
    clock,
    metrics::Metrics,
    trace::{self, Part, RequestId, Trace},
};

/// The names of gRPC's codes in grpc-go's metrics, by number.
pub const CODES: [&str; 17] = [
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

/// The counters of one method.
pub struct Method {
    pub started: IntCounter,
    handled: [IntCounter; CODES.len()],
    pub received: IntCounter,
    pub sent: IntCounter,
    pub received_bytes: IntCounter,
    pub sent_bytes: IntCounter,
    pub panics: IntCounter,
    handling: Option<Histogram>,
    pub kind: &'static str,
    pub path: String,
    /// Whether a call has one request message, which is held until the client ends its stream.
    pub has_one_request: bool,
    /// Whether calls are traced: only if their duration does not depend on other clients.
    pub is_traced: bool,
    /// Maximum size of a request message in bytes.
    pub request_bytes_max: usize,
    slow_requests: Arc<SlowRequests>,
}

impl Method {
    /// Creates the counters. `labels` are the kind of the method, the service and the method.
    pub fn new(
        metrics: &Metrics,
        slow_requests: &Arc<SlowRequests>,
        labels: [&str; 3],
        kind: &'static str,
        request_bytes_max: usize,
    ) -> Self {
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
            has_one_request: matches!(grpc, "unary" | "server_stream"),
            // A call that waits for a lock or an election waits for another client.
            is_traced: grpc == "unary" && service.starts_with("etcdserverpb."),
            request_bytes_max,
            slow_requests: Arc::clone(slow_requests),
        }
    }
}

/// Adds the request ID to the response of a failed call. The server's log contains the same ID.
pub fn add_request_id<R>(response: &mut Response<R>, id: RequestId) {
    const REQUEST_ID: HeaderName = HeaderName::from_static("x-request-id");
    if response.headers().contains_key("grpc-status")
        && let Ok(id) = HeaderValue::try_from(id.to_string())
    {
        response.headers_mut().insert(REQUEST_ID, id);
    }
}

/// Counts a call when it ends. A call that is dropped before its end counts as canceled.
pub struct CallGuard {
    pub method: Arc<Method>,
    pub response_bytes: usize,
    /// The client, if requests are logged.
    remote: Option<Remote>,
    began: Instant,
    has_ended: bool,
    traced: Option<Traced>,
    /// A call that takes longer is logged.
    slow_threshold: Duration,
    exported: Option<(Parent, Arc<Exporter>)>,
}

struct Traced {
    trace: Trace,
    responded: Instant,
}

impl CallGuard {
    pub fn new(
        method: Arc<Method>,
        remote: Option<Remote>,
        slow_threshold: Duration,
        exported: Option<(Parent, Arc<Exporter>)>,
    ) -> Self {
        let began = Instant::now();
        Self { method, response_bytes: 0, remote, began, has_ended: false, traced: None, slow_threshold, exported }
    }

    /// Stores the trace of a call whose response begins now, or that ends without one.
    pub fn set_trace(&mut self, trace: Trace) {
        self.traced = Some(Traced { trace, responded: Instant::now() });
    }

    /// Returns the ID of a traced call.
    pub fn request_id(&self) -> Option<RequestId> {
        self.traced.as_ref().map(|traced| traced.trace.id)
    }

    /// Ends the call if these headers or trailers contain its status.
    pub fn end_with(&mut self, headers: &HeaderMap) {
        if let Some(status) = headers.get("grpc-status") {
            self.end(Code::from_bytes(status.as_bytes()));
        }
    }

    fn end(&mut self, code: Code) {
        if std::mem::replace(&mut self.has_ended, true) {
            return;
        }
        self.method.handled[code as usize].inc();
        let now = Instant::now();
        // As in etcd, the time in which the client sends the request is not part of a call's.
        let received = self.traced.as_ref().and_then(|traced| traced.trace.received);
        let took = now - received.unwrap_or(self.began);
        if let Some(handling) = &self.method.handling {
            handling.observe(took.as_secs_f64());
        }
        if let Some(Traced { mut trace, responded }) = self.traced.take() {
            trace.add(Part::Send, now - responded);
            self.report(&trace, took, code);
        }
    }

    /// Exports the call. Logs and keeps it if it was slow.
    fn report(&self, trace: &Trace, took: Duration, code: Code) {
        let path = &self.method.path;
        if let Some((parent, exporter)) = &self.exported {
            exporter.record(&FinishedCall { path, parent, took, code: code as i32, trace });
        }
        // What a client never sent completely says nothing about the server.
        if took > self.slow_threshold && !trace.is_awaited {
            if let Some(count) = self.method.slow_requests.log_limit.count() {
                self.log_slow(trace, took, code, count - 1);
            }
            let (method, bytes) =
                (path.trim_start_matches('/'), self.response_bytes.saturating_sub(FRAME_HEADER_BYTES));
            let slow = SlowRequest::ending_now(method, CODES[code as usize], took, bytes, trace);
            self.method.slow_requests.add(slow);
        }
        if trace::are_requests_logged() {
            self.log_statistics(trace, took);
        }
    }

    /// Logs a slow call. The message and the first fields are etcd's. `omitted` slow calls before it were not logged.
    fn log_slow(&self, trace: &Trace, took: Duration, code: Code, omitted: u64) {
        let part = |part| trace.part(part).map(tracing::field::debug);
        let size = self.response_bytes.saturating_sub(FRAME_HEADER_BYTES);
        let response = match trace.pairs {
            Some(pairs) => format!("range_response_count:{pairs} size:{size}"),
            None => format!("size:{size}"),
        };
        warn!(
            id = %trace.id,
            method = self.method.path.trim_start_matches('/'),
            ?took,
            "expected-duration" = ?self.slow_threshold,
            prefix = prefix(&self.method.path, trace),
            request = trace.request,
            response,
            code = CODES[code as usize],
            queue = part(Part::Queue),
            evaluate = part(Part::Evaluate),
            commit = part(Part::Commit),
            confirm = part(Part::Confirm),
            select = part(Part::Select),
            read = part(Part::Read),
            send = part(Part::Send),
            omitted = (omitted > 0).then_some(omitted),
            "apply request took too long"
        );
    }

    /// Logs a call with etcd's message and fields.
    fn log_statistics(&self, trace: &Trace, took: Duration) {
        let start = clock::now().checked_sub(took).unwrap_or(std::time::UNIX_EPOCH);
        debug!(
            target: trace::REQUESTS,
            remote = self.remote.as_ref().map(Remote::text),
            "start time" = %humantime::format_rfc3339_micros(start),
            "time spent" = ?took,
            "response type" = self.method.path,
            "request size" = trace.request_bytes.saturating_sub(FRAME_HEADER_BYTES),
            "response count" = trace.pairs.unwrap_or(0),
            "response size" = self.response_bytes.saturating_sub(FRAME_HEADER_BYTES),
            "request content" = trace.request,
            "request stats"
        );
    }
}

/// Returns etcd's prefix of the message about a slow request.
fn prefix(path: &str, trace: &Trace) -> &'static str {
    match path {
        "/etcdserverpb.KV/Range" => "read-only range ",
        // A transaction that writes nothing has no commit.
        "/etcdserverpb.KV/Txn" if trace.part(Part::Commit).is_none() => "read-only txn ",
        _ => "",
    }
}

impl Drop for CallGuard {
    fn drop(&mut self) {
        self.end(if std::thread::panicking() { Code::Internal } else { Code::Cancelled });
    }
}
