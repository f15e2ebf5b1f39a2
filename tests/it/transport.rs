//! HTTP/2 and HTTP/1 below the calls: which requests reach a method, and what ends a connection.

use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::{future::join_all, stream};
use http::uri::PathAndQuery;
use orlop_wire::proto::client::{
    authpb::Permission,
    etcdserverpb::{AuthRoleAddRequest, AuthRoleGrantPermissionRequest, PutRequest, PutResponse, WatchCreateRequest},
};
use prost::Message as _;
use tokio::time::sleep;
use tonic::{
    Code, Request, Status,
    client::Grpc,
    transport::{Channel, Endpoint},
};
use tonic_prost::ProstCodec;

use crate::{
    hostile::wire::{DATA, END_HEADERS, END_STREAM, HEADERS, RST_STREAM, Wire, frame, headers, message},
    support::{Backend, Client, Server, Stream, eventually, get, http, on_both_backends, put},
};

const PUT: &str = "/etcdserverpb.KV/Put";
/// The code CANCEL of HTTP/2.
const CANCEL: [u8; 4] = [0, 0, 0, 8];

/// While the server pauses, the deadlines of a client's calls pass. Its watches are on the same connection.
async fn connection_survives_calls_that_are_cancelled_during_a_pause(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut wire = Wire::open(server.endpoint()).await;
    assert!(wire.answers_ping().await);
    server.pause();
    for stream in (1..).step_by(2).take(200) {
        assert!(wire.call(stream, PUT, &put("k", "v").encode_to_vec(), END_STREAM).await);
        assert!(wire.send(&frame(RST_STREAM, 0, stream, &CANCEL)).await);
    }
    server.resume();
    assert!(wire.answers_ping().await);
}

/// A client sends the rest of a long request although the server has refused it after its first bytes.
async fn watch_survives_refused_requests_on_its_connection(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut stream = Stream::open(&mut client).await;
    stream.create(WatchCreateRequest { key: "k".into(), ..Default::default() }).await;
    let value = Bytes::from(vec![0; 4_000_000]);
    for _ in 0..20 {
        let puts = (0..8).map(|_| {
            let (mut kv, value) = (client.kv.clone(), value.clone());
            async move { kv.put(PutRequest { key: "k".into(), value, ..Default::default() }).await }
        });
        for refused in join_all(puts).await {
            assert_eq!(refused.expect_err("it is too large").code(), Code::ResourceExhausted);
        }
    }
    client.put("k", "v").await;
    assert_eq!(stream.next().await.events.len(), 1);
}

/// A browser sends such a request for any web page, without asking the server first.
async fn methods_answer_only_grpc(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let body = String::from_utf8(message(&put("k", "v").encode_to_vec())).expect("the message is ASCII");
    for path in [PUT, "/etcdserverpb.Lease/LeaseLeases", "/grpc.health.v1.Health/Check"] {
        assert_eq!(http(server.endpoint(), "POST", path, &body).await.status, 404, "{path}");
    }
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.kv.range(get("k")).await.expect("a range").into_inner().count, 0, "nothing is written");
}

async fn grpc(endpoint: &str) -> Grpc<Channel> {
    let channel = Endpoint::from_shared(endpoint.to_owned()).expect("a URL").connect().await;
    Grpc::new(channel.expect("a connection"))
}

/// Sends a put to a method, whose message is of the same form on the wire but for its fields. Returns the error.
async fn put_to(client: &mut Grpc<Channel>, path: &'static str, put: PutRequest) -> Option<Status> {
    client.ready().await.expect("a connection");
    let codec = ProstCodec::<PutRequest, PutResponse>::default();
    client.unary(Request::new(put), PathAndQuery::from_static(path), codec).await.err()
}

async fn too_long_messages_have_etcds_error(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = grpc(server.endpoint()).await;
    let (small, long) = (256 << 10, 2 << 20);
    for (path, max) in [
        (PUT, long),
        ("/etcdserverpb.Watch/Watch", long),
        ("/v3lockpb.Lock/Lock", long),
        ("/v3electionpb.Election/Campaign", long),
        ("/etcdserverpb.Lease/LeaseGrant", small),
        ("/etcdserverpb.Lease/LeaseKeepAlive", small),
        ("/etcdserverpb.Lease/LeaseTimeToLive", small),
        ("/etcdserverpb.Auth/UserAdd", small),
        ("/etcdserverpb.Cluster/MemberList", small),
        ("/etcdserverpb.Maintenance/Snapshot", small),
        ("/orlopb.Insight/Sizes", small),
        ("/grpc.health.v1.Health/Check", small),
    ] {
        let of = |bytes: usize| put("k", vec![0; bytes]);
        let (long, text) = (of(max), "grpc: received message larger than max");
        let text = format!("{text} ({} vs. {max})", long.encoded_len());
        let refused = put_to(&mut client, path, long).await.unwrap_or_else(|| panic!("{path}: it is too long"));
        assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, text.as_str()), "{path}");
        let other = put_to(&mut client, path, of(max - 8)).await;
        assert!(other.is_none_or(|other| other.code() != Code::ResourceExhausted), "{path}");
    }
}

async fn unknown_methods_are_named(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = grpc(server.endpoint()).await;
    for (path, text) in [
        ("/etcdserverpb.KV/Nothing", "unknown method Nothing for service etcdserverpb.KV"),
        ("/etcdserverpb.Watch/Nothing", "unknown method Nothing for service etcdserverpb.Watch"),
        ("/etcdserverpb.Lease/Nothing", "unknown method Nothing for service etcdserverpb.Lease"),
        ("/etcdserverpb.Auth/Nothing", "unknown method Nothing for service etcdserverpb.Auth"),
        ("/v3lockpb.Lock/Nothing", "unknown method Nothing for service v3lockpb.Lock"),
        ("/etcdserverpb.KV/Put/x", "unknown method Put/x for service etcdserverpb.KV"),
        ("/etcdserverpb.Watch/Watch/x", "unknown method Watch/x for service etcdserverpb.Watch"),
        ("/etcdserverpb.Watch//", "unknown method / for service etcdserverpb.Watch"),
        ("/grpc.health.v1.Health/Nothing", "unknown method Nothing for service grpc.health.v1.Health"),
        ("/etcdserverpb.Nothing/Put", "unknown service or method"),
    ] {
        let refused = put_to(&mut client, path, put("k", "v")).await.expect("an error");
        assert_eq!((refused.code(), refused.message()), (Code::Unimplemented, text), "{path}");
    }
}

/// A client may send its request slowly.
async fn time_of_a_call_begins_with_its_whole_request(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--metrics", "extensive"]).await else { return };
    let mut client = grpc(server.endpoint()).await;
    let pause = Duration::from_secs(3);
    let late = stream::once(async move {
        sleep(pause).await;
        put("k", "v")
    });
    client.ready().await.expect("a connection");
    let codec = ProstCodec::<PutRequest, PutResponse>::default();
    client.client_streaming(Request::new(late), PathAndQuery::from_static(PUT), codec).await.expect("a put");
    let took = eventually("the call is counted", async || {
        let metrics = http(server.endpoint(), "GET", "/metrics", "").await.body;
        let sum = metrics.lines().find_map(|line| {
            let (labels, sum) = line.strip_prefix("grpc_server_handling_seconds_sum")?.split_once(' ')?;
            labels.contains("\"Put\"").then(|| sum.parse::<f64>().expect("a number"))
        });
        sum.filter(|sum| *sum > 0.0).ok_or(metrics)
    });
    let took = took.await;
    assert!(took < pause.as_secs_f64(), "{took} s");
}

/// A peer that has no user opens calls, sends a part of their requests, and resets them.
async fn calls_that_never_arrive_are_not_logged(backend: Backend) {
    const RANGE: &str = "/etcdserverpb.KV/Range";
    let flags = ["--warning-unary-request-duration", "1ns"];
    let Some(mut server) = Server::orlop_with(backend, &flags).await else { return };
    let mut wire = Wire::open(server.endpoint()).await;
    let calls = (1..).step_by(2).take(20);
    for stream in calls.clone() {
        assert!(wire.send(&frame(HEADERS, END_HEADERS, stream, &headers(RANGE, &[]))).await);
        assert!(wire.send(&frame(DATA, 0, stream, &[0, 0, 0, 0, 4])).await);
    }
    assert!(wire.answers_ping().await);
    for stream in calls {
        assert!(wire.send(&frame(RST_STREAM, 0, stream, &CANCEL)).await);
    }
    assert!(wire.answers_ping().await);
    Client::connect(server.endpoint()).await.put("k", "v").await;
    server.terminate().await;
    let log = server.log();
    assert!(log.contains("etcdserverpb.KV/Put"), "a slow call is logged: {log}");
    assert!(!log.contains("etcdserverpb.KV/Range"), "{log}");
}

/// A server knows from the answer to a PING that the client has received its GOAWAY. Until then it accepts new streams. Each of
/// the calls is a commit of its own, so that writes wait at any moment.
async fn client_that_answers_no_ping_does_not_delay_a_stop(backend: Backend) {
    const GRANT: &str = "/etcdserverpb.Auth/RoleGrantPermission";
    const AT_ONCE: usize = 300;
    /// Clients have 5 seconds to finish.
    const STOP_TIME_MAX: Duration = Duration::from_secs(20);
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.auth.role_add(AuthRoleAddRequest { name: "role".to_owned() }).await.expect("a role");
    let perm = Some(Permission { key: "k".into(), ..Default::default() });
    let grant = AuthRoleGrantPermissionRequest { name: "role".to_owned(), perm }.encode_to_vec();
    let mut wire = Wire::open(server.endpoint()).await;
    let mut streams = (1..).step_by(2);
    for stream in streams.by_ref().take(AT_ONCE) {
        assert!(wire.call(stream, GRANT, &grant, END_STREAM).await);
    }
    let calls = async {
        while let Ok((kind, flags, _)) = wire.frame_or_end().await {
            if kind == RST_STREAM || (kind == HEADERS && flags & END_STREAM != 0) {
                let stream = streams.next().expect("there are many streams");
                // The next frame tells if the server has closed the connection.
                wire.call(stream, GRANT, &grant, END_STREAM).await;
            }
        }
    };
    let began = Instant::now();
    let (status, ()) = tokio::join!(server.terminate(), calls);
    assert!(status.success());
    assert!(began.elapsed() < STOP_TIME_MAX, "{:?}", began.elapsed());
}

on_both_backends!(
    client_that_answers_no_ping_does_not_delay_a_stop,
    connection_survives_calls_that_are_cancelled_during_a_pause,
    watch_survives_refused_requests_on_its_connection,
    methods_answer_only_grpc,
    too_long_messages_have_etcds_error,
    unknown_methods_are_named,
    time_of_a_call_begins_with_its_whole_request,
    calls_that_never_arrive_are_not_logged,
);
