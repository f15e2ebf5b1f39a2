//! Clients that send something complete, and then hold their streams or connections open.

use futures_util::future::select_all;

use super::*;
use crate::support::{free_port, http_get};

/// Number of connections that an address for probes accepts.
const PROBES_MAX: usize = 64;
const ACK: u8 = 1;

/// No call begins, because none of the clients ends its stream.
async fn complete_messages_without_end_use_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let message = wire::message(&put("k", 1_000_000).encode_to_vec());
    let (tasks, answers, senders) = streams(arena.endpoint(), sized(1_000, 10_000), PUT, message).await;
    let refused = timeout(DEADLINE * 2, select_all(answers)).await;
    let (refused, _, waiting) = refused.expect("calls are refused when their messages use all memory");
    let refused = refused.expect("an answer");
    let too_many = Code::ResourceExhausted as i32;
    assert_eq!(
        refused.headers().get("grpc-status").and_then(|status| status.to_str().ok()),
        Some(too_many.to_string().as_str())
    );
    arena.survives("complete messages whose streams stay open", 800, (tasks, waiting, senders)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_do_not_keep_probes_out() {
    let probes = format!("http://127.0.0.1:{}", free_port());
    let Some(_server) = Server::orlop_with(Backend::Sqlite, &["--listen-metrics-urls", &probes]).await else { return };
    let mut held = Vec::new();
    for number in 0..PROBES_MAX {
        let mut wire = Wire::tcp(&probes).await;
        let settings = if number % 2 == 0 { frame(SETTINGS, 0, 0, &[]) } else { Vec::new() };
        assert!(wire.send(&[PREFACE.to_vec(), settings].concat()).await);
        held.push(wire);
    }
    let probe = timeout(DEADLINE * 2, http_get(&probes, "/livez")).await.expect("idle connections are closed");
    assert_eq!(probe.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keepalive_interval_of_zero_means_no_pings() {
    let Some(server) = Server::orlop_with(Backend::Sqlite, &["--grpc-keepalive-interval", "0"]).await else { return };
    let mut wire = Wire::open(server.endpoint()).await;
    // The client's own pings measure time: a server that pings without a pause has done so before the last answer.
    for number in 0..1_000_u64 {
        let number = number.to_be_bytes();
        assert!(wire.send(&frame(PING, 0, 0, &number)).await);
        let (flags, payload) = loop {
            let (kind, flags, payload) = wire.next_frame().await;
            if kind == PING {
                break (flags, payload);
            }
        };
        assert_eq!((flags, payload.as_slice()), (ACK, &number[..]), "the server sent a ping");
    }
}

on_both_backends!(complete_messages_without_end_use_bounded_memory);
