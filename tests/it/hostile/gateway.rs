//! Attacks on the JSON gateway.

use tokio::sync::mpsc;

use super::*;
use crate::support::Answer;

/// JSON in small pieces; the cost of a piece must not grow with the number of pieces before it.
async fn gateway_survives_endless_requests(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut attackers = JoinSet::new();
    for path in ["watch", "kv/put", "lease/keepalive", "kv/txn"] {
        for _ in 0..sized(8, 32) {
            let endpoint = arena.endpoint().to_owned();
            attackers.spawn(async move {
                let head = format!("POST /v3/{path} HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n");
                let piece = format!("100\r\n{}\r\n", "A".repeat(256)).repeat(16);
                // Reconnects when the server closes the connection.
                loop {
                    let mut wire = Wire::tcp(&endpoint).await;
                    let _ = wire.0.write_all(head.as_bytes()).await;
                    let _ = wire.0.write_all(b"7\r\n{\"key\":\r\n1\r\n\"\r\n").await;
                    while wire.0.write_all(piece.as_bytes()).await.is_ok() {}
                    let mut answer = Vec::new();
                    let _ = wire.0.read_to_end(&mut answer).await;
                }
            });
        }
    }
    arena.survives_continuous("JSON without end", 900, attackers).await;
}

async fn unread_gateway_watch_uses_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let mut held = Vec::new();
    for _ in 0..sized(50, 500) {
        let mut wire = Wire::tcp(arena.endpoint()).await;
        let body = r#"{"create_request":{"key":"AA==","range_end":"AA=="}}"#;
        let head = format!("POST /v3/watch HTTP/1.1\r\nhost: x\r\ncontent-length: {}\r\n\r\n{body}", body.len());
        assert!(wire.send(head.as_bytes()).await);
        held.push(wire);
    }
    let mut writer = arena.client().await.kv;
    for _ in 0..sized(200, 1_000) {
        writer.put(put("k", vec![b'v'; 100_000])).await.expect("a put");
    }
    arena.survives("gateway watches, never read", 900, held).await;
}

/// Each object of such JSON is a map with space for eleven fields: the message takes 80 times as much memory as its text.
async fn json_with_many_objects_uses_bounded_memory(backend: Backend) {
    let Some(mut arena) = Arena::new(backend, &[]).await else { return };
    let compares = vec![r#"{"key":""}"#; 380_000].join(",");
    let body = format!(r#"{{"compare":[{compares}]}}"#);
    let head = format!("POST /v3/kv/txn HTTP/1.0\r\nhost: x\r\ncontent-length: {}\r\n\r\n", body.len());
    let request = Bytes::from(head + &body);
    let mut attackers = JoinSet::new();
    let (answered, mut answers) = mpsc::channel(1);
    for _ in 0..sized(8, 32) {
        let (endpoint, request, answered) = (arena.endpoint().to_owned(), request.clone(), answered.clone());
        attackers.spawn(async move {
            loop {
                let mut wire = Wire::tcp(&endpoint).await;
                let _ = wire.0.write_all(&request).await;
                let mut answer = Vec::new();
                let _ = wire.0.read_to_end(&mut answer).await;
                let _ = answered.try_send(answer);
            }
        });
    }
    let answer = timeout(DEADLINE * 2, answers.recv()).await.expect("an answer in time").expect("an answer");
    let answer = Answer::parse(&String::from_utf8_lossy(&answer)).expect("an answer");
    assert!([400, 429].contains(&answer.status), "{answer:?}");
    arena.survives_continuous("JSON with many objects", 1_000, attackers).await;
}

on_both_backends!(
    gateway_survives_endless_requests,
    unread_gateway_watch_uses_bounded_memory,
    json_with_many_objects_uses_bounded_memory,
);
