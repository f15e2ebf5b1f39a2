//! `orlop rewind` of large states, and beside other clients.

use std::process::Stdio;

use orlop_wire::proto::client::etcdserverpb::{PutRequest, RangeRequest, RequestOp, TxnRequest, request_op::Request};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    time::timeout,
};

use super::{
    KEEP,
    commands::{at, command, head, put},
};
use crate::support::{Backend, Client, DEADLINE, Server, on_both_backends};

const LARGE_KEYS: usize = 3000;

/// Puts values of 10 KB, together 30 MB.
async fn put_large(client: &mut Client, byte: u8) {
    let put = |number: usize| {
        let (key, value) = (format!("n/{number:04}").into(), vec![byte; 10_000].into());
        RequestOp { request: Some(Request::RequestPut(PutRequest { key, value, ..Default::default() })) }
    };
    for first in (0..LARGE_KEYS).step_by(100) {
        let success = (first..first + 100).map(put).collect();
        client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction");
    }
}

/// The two states are larger than the flow-control windows of a connection.
async fn large_states_are_rewound(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    put_large(&mut client, b'a').await;
    let past = head(&mut client).await.to_string();
    put_large(&mut client, b'b').await;
    let rewind = ["rewind", "n/", "--to", &past, "--yes", "--keys-only"];
    let (status, _, error) = at(&server, &rewind).await;
    assert_eq!((status, &*error), (0, ""));
    let range = RangeRequest { key: "n/".into(), range_end: "n0".into(), ..Default::default() };
    let kvs = client.kv.range(range).await.expect("a range").into_inner().kvs;
    assert_eq!(kvs.len(), LARGE_KEYS);
    let old = vec![b'a'; 10_000];
    assert!(kvs.iter().all(|kv| kv.value[..] == old[..]));
}

/// The plan is longer than a pipe holds, so the command does not write anything before its output is read.
async fn changes_of_others_after_the_plan_are_conflicts(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    put(&mut client, "/k/kept", "kept").await;
    let mut past = String::new();
    for value in ["old", "new"] {
        for number in 0..300 {
            put(&mut client, &format!("/k/{number:0400}"), value).await;
        }
        if value == "old" {
            past = head(&mut client).await.to_string();
        }
    }
    let rewind = ["rewind", "/k/", "--to", &past, "--yes", "--keys-only", "--endpoints", server.endpoint()];
    let mut process = command(&rewind).stdout(Stdio::piped()).spawn().expect("orlop starts");
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let mut line = async || timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("the output is read");
    assert!(line().await.is_some_and(|line| line.starts_with("changed")));
    put(&mut client, "/k/created", "by others").await;
    put(&mut client, "/k/kept", "changed by others").await;
    let changed = head(&mut client).await;
    let mut rest = Vec::new();
    while let Some(line) = line().await {
        rest.push(line);
    }
    let status = timeout(DEADLINE, process.wait()).await.expect("in time").expect("an exit status");
    assert_eq!(status.code(), Some(1));
    let conflicts: Vec<String> = rest.iter().filter(|line| line.starts_with("conflict")).cloned().collect();
    let expected = [
        format!("conflict  /k/created  was changed by others at revision {}", changed - 1),
        format!("conflict  /k/kept  was changed by others at revision {changed}"),
    ];
    assert_eq!(conflicts, expected);
    let again = format!("2 keys were changed meanwhile: run the command again with --to {past} to write the rest");
    assert!(rest.last().is_some_and(|last| last.starts_with("300 puts") && last.ends_with(&again)), "{rest:?}");
}

on_both_backends!(large_states_are_rewound, changes_of_others_after_the_plan_are_conflicts);
