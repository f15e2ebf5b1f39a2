//! Export of requests as OpenTelemetry spans: one span per call, with a child span for each phase.
//!
//! The spans are created from the trace when the call has ended, so a call that is not sampled costs one header lookup
//! and a copy of its path. The caller's `traceparent` is the parent and decides about sampling, as in etcd.

use std::time::{Duration, SystemTime};

use http::HeaderMap;
use opentelemetry::{
    Context, KeyValue,
    propagation::{Extractor, TextMapPropagator as _},
    trace::{Span as _, SpanKind, Status, TraceContextExt as _, Tracer as _, TracerProvider as _},
};
use opentelemetry_otlp::{ExporterBuildError, SpanExporter, WithExportConfig as _};
use opentelemetry_sdk::{
    Resource,
    propagation::TraceContextPropagator,
    trace::{Sampler, SdkTracer, SdkTracerProvider},
};

use orlop_core::{
    clock,
    trace::{Part, Trace},
};

/// Maximum time to export the last spans when the server stops.
const FLUSH_MAX: Duration = Duration::from_secs(3);
const MILLION: f64 = 1_000_000.0;

/// The destination and the sampling of spans.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Settings {
    /// `HOST:PORT` of an OTLP collector (gRPC).
    pub address: String,
    pub service_name: String,
    /// Empty: none.
    pub instance_id: String,
    /// Calls to sample per million of those without a sampled parent.
    pub sampling_rate: u32,
}

/// Exports spans in the background; spans that do not fit into the queue are dropped.
#[derive(Debug)]
pub struct Exporter {
    provider: SdkTracerProvider,
    tracer: SdkTracer,
}

/// A finished call.
#[derive(Debug)]
pub struct FinishedCall<'a> {
    /// `/SERVICE/METHOD`.
    pub path: &'a str,
    pub parent: &'a Parent,
    pub took: Duration,
    /// gRPC's status code.
    pub code: i32,
    pub trace: &'a Trace,
}

/// The caller's span.
#[derive(Clone, Debug)]
pub struct Parent(Context);

impl Exporter {
    /// Creates an exporter. Must be called within a tokio runtime.
    ///
    /// # Errors
    ///
    /// If the address is invalid. An unavailable collector is not an error: a failed export is logged, and the next
    /// batch of spans is sent as usual.
    pub fn new(settings: &Settings) -> Result<Self, ExporterBuildError> {
        let exporter =
            SpanExporter::builder().with_tonic().with_endpoint(format!("http://{}", settings.address)).build()?;
        let mut resource = Resource::builder().with_service_name(settings.service_name.clone());
        if !settings.instance_id.is_empty() {
            resource = resource.with_attribute(KeyValue::new("service.instance.id", settings.instance_id.clone()));
        }
        let sampler = Sampler::TraceIdRatioBased(f64::from(settings.sampling_rate) / MILLION);
        let provider = SdkTracerProvider::builder()
            .with_resource(resource.build())
            .with_sampler(Sampler::ParentBased(Box::new(sampler)))
            .with_batch_exporter(exporter)
            .build();
        Ok(Self { tracer: provider.tracer("orlop"), provider })
    }

    pub fn parent(&self, headers: &HeaderMap) -> Parent {
        Parent(TraceContextPropagator::new().extract_with_context(&Context::new(), &Headers(headers)))
    }

    pub fn record(&self, ended: &FinishedCall<'_>) {
        let end = clock::now();
        let begin = end - ended.took;
        // Attributes are added after the sampling decision, because most calls are not sampled.
        let mut span = self
            .tracer
            .span_builder(ended.name().to_owned())
            .with_kind(SpanKind::Server)
            .with_start_time(begin)
            .start_with_context(&self.tracer, &ended.parent.0);
        if !span.is_recording() {
            return;
        }
        span.set_attributes(ended.attributes());
        if ended.code != 0 {
            span.set_status(Status::error(""));
        }
        self.record_parts(ended, &Context::new().with_remote_span_context(span.span_context().clone()), end);
        span.end_with_timestamp(end);
    }

    /// Exports the phases. They are consecutive and the last one ends with the call, so their start times are computed
    /// from the end.
    fn record_parts(&self, ended: &FinishedCall<'_>, parent: &Context, end: SystemTime) {
        let mut until = end;
        for part in Part::ALL.into_iter().rev() {
            let Some(took) = ended.trace.part(part) else { continue };
            let from = until - took;
            let builder = self.tracer.span_builder(part.name()).with_kind(SpanKind::Internal).with_start_time(from);
            builder.start_with_context(&self.tracer, parent).end_with_timestamp(until);
            until = from;
        }
    }

    /// Exports the remaining spans and stops. Blocks the thread.
    pub fn finish(&self) {
        if let Err(error) = self.provider.shutdown_with_timeout(FLUSH_MAX) {
            tracing::warn!(%error, "the last spans may be lost");
        }
    }
}

impl FinishedCall<'_> {
    fn name(&self) -> &str {
        self.path.trim_start_matches('/')
    }

    fn attributes(&self) -> impl Iterator<Item = KeyValue> {
        let (service, method) = self.name().split_once('/').unwrap_or((self.name(), ""));
        let request = self.trace.request.clone().map(|request| KeyValue::new("request", request));
        [
            KeyValue::new("rpc.system", "grpc"),
            KeyValue::new("rpc.service", service.to_owned()),
            KeyValue::new("rpc.method", method.to_owned()),
            KeyValue::new("rpc.grpc.status_code", i64::from(self.code)),
            KeyValue::new("request_id", self.trace.id.to_string()),
        ]
        .into_iter()
        .chain(request)
    }
}

struct Headers<'a>(&'a HeaderMap);

impl Extractor for Headers<'_> {
    fn get(&self, key: &str) -> Option<&str> {
        self.0.get(key)?.to_str().ok()
    }

    fn keys(&self) -> Vec<&str> {
        self.0.keys().map(http::HeaderName::as_str).collect()
    }
}
