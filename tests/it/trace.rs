//! The log and the spans of a request contain its id and the durations of its parts, but never a value.

use std::sync::{
    Arc,
    atomic::{AtomicU64, Ordering},
};

use futures_util::future::join_all;
use opentelemetry_proto::tonic::{
    collector::trace::v1::{
        ExportTraceServiceRequest, ExportTraceServiceResponse,
        trace_service_server::{TraceService, TraceServiceServer},
    },
    common::v1::{KeyValue, any_value::Value},
    trace::v1::Span,
};
use orlop_wire::proto::client::etcdserverpb::{RequestOp, TxnRequest, request_op::Request as Op};
use parking_lot::Mutex;
use tokio::net::TcpListener;
use tokio_stream::wrappers::TcpListenerStream;
use tonic::{Request, Response, Status, transport};

use crate::support::{Backend, Client, Server, delete, eventually, get, on_both_backends, put, range};

const VALUE: &str = "a value that is never logged";
/// With this flag the server treats every request as slow.
const SLOW: [&str; 2] = ["--warning-unary-request-duration", "1ns"];

/// Returns the log lines about slow requests of one method.
async fn slow(server: &Server, method: &str) -> Vec<serde_json::Value> {
    eventually(method, async || {
        let log = server.log();
        let lines = log.lines().map(|line| serde_json::from_str::<serde_json::Value>(line).expect("a JSON object"));
        let found: Vec<_> = lines.filter(|line| line["method"] == method).collect();
        if found.is_empty() { Err(log) } else { Ok(found) }
    })
    .await
}

async fn slow_requests_are_logged_with_the_time_of_each_part(backend: Backend) {
    let flags = [&SLOW[..], &["--log-format", "json"]].concat();
    let Some(mut server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..2 {
        client.put("key/1", VALUE).await;
    }
    client.kv.range(range("key/", "key0")).await.expect("a range");
    let success = vec![RequestOp { request: Some(Op::RequestPut(put("key/2", VALUE))) }];
    client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction");
    client.kv.delete_range(delete("key/2")).await.expect("a delete");

    let write = ["queue", "evaluate", "commit", "send"];
    let confirm = if backend == Backend::Postgres { &["confirm"][..] } else { &[] };
    let read = [confirm, &["select", "read", "send"]].concat();
    for (method, request, parts) in [
        ("Put", "put key=key/1", &write[..]),
        ("Range", "range range=", &read),
        ("Txn", "key/2", &write),
        ("DeleteRange", "delete_range key=key/2", &write),
    ] {
        let lines = slow(&server, &format!("etcdserverpb.KV/{method}")).await;
        let line = &lines[0];
        assert_eq!((line["level"].as_str(), line["msg"].as_str()), (Some("warn"), Some("apply request took too long")));
        let is_time = |text: &str| text.len() == "2026-01-01T00:00:00.000000Z".len() && text.ends_with('Z');
        assert!(line["ts"].as_str().is_some_and(is_time), "{line}");
        assert!(
            line["caller"].as_str().is_some_and(|caller| caller.starts_with("api/grpc/metering/call.rs:")),
            "{line}"
        );
        assert!(line["request"].as_str().is_some_and(|asked| asked.contains(request)), "{line}");
        assert_eq!((&line["code"], &line["expected-duration"]), (&"OK".into(), &"1ns".into()));
        let is_range = method == "Range";
        assert_eq!(line["prefix"], if is_range { "read-only range " } else { "" }, "{line}");
        let response = if is_range { "range_response_count:1 size:" } else { "size:" };
        assert!(line["response"].as_str().is_some_and(|shown| shown.starts_with(response)), "{line}");
        for part in parts {
            assert!(
                line[part].as_str().is_some_and(|took| took.ends_with('s')),
                "{method} has the part {part}: {line}"
            );
        }
    }
    let ids: Vec<_> = slow(&server, "etcdserverpb.KV/Put").await.iter().map(|line| line["id"].clone()).collect();
    assert!(ids[0] != ids[1] && ids[0].as_str().is_some_and(|id| id.len() == 16), "{ids:?}");
    server.terminate().await;
    assert!(!server.log().contains(VALUE), "no value is logged");
}

async fn slow_requests_beyond_a_hundred_per_second_are_counted(backend: Backend) {
    let flags = [&SLOW[..], &["--log-format", "json"]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let client = Client::connect(server.endpoint()).await;
    let call = || {
        let mut kv = client.kv.clone();
        async move { kv.range(get("key")).await.expect("a range") }
    };
    let calls = AtomicU64::new(500);
    join_all((0..500).map(|_| call())).await;
    // The last line before a second has passed does not tell how many are left out after it.
    eventually("a line for each call, or its number", async || {
        call().await;
        let calls = calls.fetch_add(1, Ordering::Relaxed) + 1;
        let omitted: Vec<_> =
            slow(&server, "etcdserverpb.KV/Range").await.iter().map(|line| line["omitted"].as_u64()).collect();
        let counted = omitted.iter().map(|omitted| 1 + omitted.unwrap_or(0)).sum::<u64>();
        if counted == calls && omitted.iter().any(Option::is_some) { Ok(()) } else { Err(omitted) }
    })
    .await;
}

/// With the level debug, every unary call is logged with etcd's message and fields.
async fn requests_are_logged_at_debug(backend: Backend) {
    for (level, is_logged) in [("info", false), ("debug", true), ("info,orlop::requests=debug", true)] {
        let flags = ["--log-format", "json", "--log-level", level];
        let Some(mut server) = Server::orlop_with(backend, &flags).await else { return };
        let mut client = Client::connect(server.endpoint()).await;
        client.put("key/1", VALUE).await;
        client.kv.range(get("key/1")).await.expect("a range");
        let found = |server: &Server, path: &str| {
            let log = server.log();
            let mut lines = log.lines().map(|line| serde_json::from_str(line).expect("a JSON object"));
            lines
                .find(|line: &serde_json::Value| line["msg"] == "request stats" && line["response type"] == path)
                .ok_or(log)
        };
        if !is_logged {
            // A line may be written after the response.
            server.terminate().await;
            assert!(found(&server, "/etcdserverpb.KV/Put").is_err(), "{level}");
            continue;
        }
        for (path, count, request) in
            [("/etcdserverpb.KV/Put", 0, "put key=key/1"), ("/etcdserverpb.KV/Range", 1, "range key=key/1 pairs=1")]
        {
            let line = eventually(path, async || found(&server, path)).await;
            assert_eq!((&line["level"], &line["response count"]), (&"debug".into(), &count.into()), "{line}");
            assert_eq!(line["request content"], request, "{line}");
            assert!(line["remote"].as_str().is_some_and(|remote| remote.starts_with("127.0.0.1:")), "{line}");
            assert!(line["request size"].as_u64().is_some_and(|bytes| bytes > 0), "{line}");
            assert!(line["response size"].as_u64().is_some_and(|bytes| bytes > 0), "{line}");
            for time in ["start time", "time spent"] {
                assert!(line[time].as_str().is_some_and(|text| !text.is_empty()), "{line}");
            }
        }
        server.terminate().await;
        assert!(!server.log().contains(VALUE), "no value is logged");
    }
}

async fn start_is_logged_as_in_etcd(backend: Backend) {
    let flags = ["--log-format", "json", "--log-level", "info"];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let log = server.log();
    let lines: Vec<serde_json::Value> =
        log.lines().map(|line| serde_json::from_str(line).expect("a JSON object")).collect();
    let find = |message: &str| lines.iter().find(|line| line["msg"] == message).unwrap_or_else(|| panic!("{log}"));
    find("ready to serve client requests");
    let insecure = find("serving client traffic insecurely; this is strongly discouraged!");
    let address = server.endpoint().trim_start_matches("http://");
    assert_eq!((&insecure["address"], &insecure["traffic"]), (&address.into(), &"grpc+http".into()));
}

/// The id in the error that a client received is also in the log line of the request.
async fn failed_request_reports_its_id(backend: Backend) {
    let flags = [&SLOW[..], &["--log-format", "json"]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let refused = client.kv.put(put("", VALUE)).await.expect_err("a key is needed");
    let id = refused.metadata().get("x-request-id").expect("the error has an id").to_str().expect("text");
    let line = &slow(&server, "etcdserverpb.KV/Put").await[0];
    assert_eq!((line["id"].as_str(), line["code"].as_str()), (Some(id), Some("InvalidArgument")));
}

/// The process of a span.
#[derive(Clone, Debug, PartialEq)]
struct Service {
    name: String,
    /// Empty: none.
    instance: String,
}

impl Service {
    fn of(attributes: &[KeyValue]) -> Self {
        let text = |key: &str| {
            let attribute = attributes.iter().find(|attribute| attribute.key == key);
            match attribute.and_then(|attribute| attribute.value.as_ref()?.value.clone()) {
                Some(Value::StringValue(text)) => text,
                _ => String::new(),
            }
        };
        Self { name: text("service.name"), instance: text("service.instance.id") }
    }
}

/// A collector of spans.
#[derive(Clone, Default)]
struct Collector(Arc<Mutex<Vec<(Service, Span)>>>);

#[tonic::async_trait]
impl TraceService for Collector {
    async fn export(
        &self,
        request: Request<ExportTraceServiceRequest>,
    ) -> Result<Response<ExportTraceServiceResponse>, Status> {
        for spans in request.into_inner().resource_spans {
            let service = Service::of(&spans.resource.unwrap_or_default().attributes);
            let spans = spans.scope_spans.into_iter().flat_map(|scope| scope.spans);
            self.0.lock().extend(spans.map(|span| (service.clone(), span)));
        }
        Ok(Response::new(ExportTraceServiceResponse::default()))
    }
}

impl Collector {
    async fn start(&self) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
        let address = listener.local_addr().expect("a bound socket has an address").to_string();
        let served = transport::Server::builder()
            .add_service(TraceServiceServer::new(self.clone()))
            .serve_with_incoming(TcpListenerStream::new(listener));
        tokio::spawn(served);
        address
    }

    async fn spans(&self, count: usize) -> Vec<(Service, Span)> {
        eventually("spans", async || {
            let spans = self.0.lock().clone();
            if spans.len() >= count { Ok(spans) } else { Err(spans.len()) }
        })
        .await
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn collector_receives_the_spans_of_a_call() {
    const TRACE: &str = "0af7651916cd43dd8448eb211c80319c";
    const CALLER: &str = "b7ad6b7169203331";
    let collector = Collector::default();
    let address = collector.start().await;
    let flags = ["--enable-distributed-tracing", "--distributed-tracing-address", &address];
    let mut server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    for (sampled, key) in [("00", "not this one"), ("01", "key")] {
        let mut request = Request::new(put(key, VALUE));
        let parent = format!("00-{TRACE}-{CALLER}-{sampled}");
        request.metadata_mut().insert("traceparent", parent.parse().expect("text"));
        client.kv.put(request).await.expect("a put");
    }
    // A request without a parent span is not sampled, because the default sampling rate is 0.
    client.put("nor this one", VALUE).await;
    // The server sends the remaining spans before its process ends.
    server.terminate().await;

    let spans = collector.spans(4).await;
    let (service, call) = spans.iter().find(|(_, span)| span.name == "etcdserverpb.KV/Put").expect("the call");
    assert_eq!(
        (service, hex(&call.trace_id), hex(&call.parent_span_id)),
        (&Service { name: "orlop".to_owned(), instance: String::new() }, TRACE.into(), CALLER.into())
    );
    assert!(call.attributes.iter().any(|attribute| attribute.key == "request_id"), "{call:?}");
    for part in ["queue", "evaluate", "commit"] {
        let (_, span) = spans.iter().find(|(_, span)| span.name == part).expect(part);
        assert_eq!(span.parent_span_id, call.span_id);
        assert!(span.start_time_unix_nano <= span.end_time_unix_nano, "{span:?}");
        assert!(call.start_time_unix_nano <= span.start_time_unix_nano, "{part} is within the call");
        assert!(span.end_time_unix_nano <= call.end_time_unix_nano, "{part} is within the call");
    }
    assert_eq!(spans.iter().filter(|(_, span)| span.name.contains("Put")).count(), 1, "{spans:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn spans_name_the_service_and_its_instance_at_the_rate_that_is_set() {
    let collector = Collector::default();
    let address = collector.start().await;
    let export = ["--enable-distributed-tracing", "--distributed-tracing-address", &address];
    let names = ["--distributed-tracing-service-name", "shop", "--distributed-tracing-instance-id", "one"];
    let rate = ["--distributed-tracing-sampling-rate", "1000000"];
    let flags = [&export[..], &names, &rate].concat();
    let mut server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..3 {
        client.put("key", VALUE).await;
    }
    server.terminate().await;
    let is_put = |span: &Span| span.name == "etcdserverpb.KV/Put";
    let puts = eventually("the spans", async || {
        let mut spans = collector.0.lock().clone();
        spans.retain(|(_, span)| is_put(span));
        if spans.len() >= 3 { Ok(spans) } else { Err(spans.len()) }
    });
    let puts = puts.await;
    let service = Service { name: "shop".to_owned(), instance: "one".to_owned() };
    assert!(puts.len() == 3 && puts.iter().all(|(found, _)| *found == service), "{puts:?}");
}

on_both_backends!(
    slow_requests_are_logged_with_the_time_of_each_part,
    slow_requests_beyond_a_hundred_per_second_are_counted,
    requests_are_logged_at_debug,
    start_is_logged_as_in_etcd,
    failed_request_reports_its_id,
);
