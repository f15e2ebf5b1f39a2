//! HTTP/2 and HTTP/1 below the calls: which requests reach a method, and what ends a connection.

use bytes::Bytes;
use futures_util::future::join_all;
use orlop_wire::proto::client::etcdserverpb::{PutRequest, RangeRequest, WatchCreateRequest};
use prost::Message as _;
use tonic::Code;

use crate::{
    hostile::wire::{END_STREAM, RST_STREAM, Wire, frame, message},
    support::{Backend, Client, Server, Stream, http, on_both_backends},
};

const PUT: &str = "/etcdserverpb.KV/Put";
/// The code CANCEL of HTTP/2.
const CANCEL: [u8; 4] = [0, 0, 0, 8];

fn put() -> PutRequest {
    PutRequest { key: "k".into(), value: "v".into(), ..Default::default() }
}

/// While the server pauses, the deadlines of a client's calls pass. Its watches are on the same connection.
async fn connection_survives_calls_that_are_cancelled_during_a_pause(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut wire = Wire::open(server.endpoint()).await;
    assert!(wire.answers_ping().await);
    server.pause();
    for stream in (1..).step_by(2).take(200) {
        assert!(wire.call(stream, PUT, &put().encode_to_vec(), END_STREAM).await);
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
    client.kv.put(put()).await.expect("a put");
    assert_eq!(stream.next().await.events.len(), 1);
}

/// A browser sends such a request for any web page, without asking the server first.
async fn methods_answer_only_grpc(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let body = String::from_utf8(message(&put().encode_to_vec())).expect("the message is ASCII");
    for path in [PUT, "/etcdserverpb.Lease/LeaseLeases", "/grpc.health.v1.Health/Check"] {
        assert_eq!(http(server.endpoint(), "POST", path, &body).await.status, 404, "{path}");
    }
    let mut client = Client::connect(server.endpoint()).await;
    let range = RangeRequest { key: "k".into(), ..Default::default() };
    assert_eq!(client.kv.range(range).await.expect("a range").into_inner().count, 0, "nothing is written");
}

on_both_backends!(
    connection_survives_calls_that_are_cancelled_during_a_pause,
    watch_survives_refused_requests_on_its_connection,
    methods_answer_only_grpc,
);
