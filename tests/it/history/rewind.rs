//! `orlop rewind` of large states, beside other clients, and while its output waits.

use std::{process::Stdio, time::Duration};

use orlop_wire::proto::client::etcdserverpb::{
    DeleteRangeRequest, LeaseGrantRequest, PutRequest, RangeRequest, RequestOp, TxnRequest, request_op::Request,
};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader, Lines},
    process::{Child, ChildStdout},
    time::{sleep, timeout},
};

use super::{
    KEEP,
    commands::{at, command, head},
};
use crate::{
    auth::{CHEAP, enable, password},
    support::{Backend, Client, DEADLINE, Server, delete, get, on_both_backends, put, range},
};

const LARGE_KEYS: usize = 3000;
/// Keys whose past values have a lease each.
const LEASES: usize = 500;

async fn put_all(client: &mut Client, puts: impl Iterator<Item = PutRequest>) {
    let success = puts.map(|put| RequestOp { request: Some(Request::RequestPut(put)) }).collect();
    client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction");
}

/// Puts values of 10 KB, together 30 MB.
async fn put_large(client: &mut Client, byte: u8, leases: usize) {
    let put = |number: usize| {
        let put = put(format!("n/{number:04}"), vec![byte; 10_000]);
        PutRequest { lease: lease_of(number, leases), ..put }
    };
    for first in (0..LARGE_KEYS).step_by(100) {
        put_all(client, (first..first + 100).map(put)).await;
    }
}

fn lease_of(number: usize, leases: usize) -> i64 {
    if number < leases { i64::try_from(number).expect("it is small") + 1 } else { 0 }
}

/// The two states are larger than the flow-control windows of a connection, and leases are looked up while they are
/// read.
async fn large_states_are_rewound(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..LEASES {
        let request = LeaseGrantRequest { id: lease_of(number, LEASES), ttl: 10_000 };
        client.lease.lease_grant(request).await.expect("a lease");
    }
    put_large(&mut client, b'a', LEASES).await;
    let past = head(&mut client).await.to_string();
    put_large(&mut client, b'b', 0).await;
    let rewind = ["rewind", "n/", "--to", &past, "--yes", "--keys-only"];
    let (status, _, error) = at(&server, &rewind).await;
    assert_eq!((status, &*error), (0, ""));
    let kvs = client.kv.range(range("n/", "n0")).await.expect("a range").into_inner().kvs;
    assert_eq!(kvs.len(), LARGE_KEYS);
    let old = vec![b'a'; 10_000];
    assert!(kvs.iter().all(|kv| kv.value[..] == old[..]));
    assert!(kvs.iter().enumerate().all(|(number, kv)| kv.lease == lease_of(number, LEASES)));
}

/// The keys are most of the request: each of them is in it three times.
async fn transactions_of_many_operations_are_accepted(backend: Backend) {
    const KEYS: usize = 20_000;
    let Some(server) = Server::orlop_with(backend, &["--max-txn-ops", "50000"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let put = |number: usize| put(format!("/registry/many/{number:06}"), "v");
    for first in (0..KEYS).step_by(5_000) {
        put_all(&mut client, (first..first + 5_000).map(put)).await;
    }
    let past = head(&mut client).await;
    let (first, end) = ("/registry/many/", "/registry/many0");
    let delete = DeleteRangeRequest { key: first.into(), range_end: end.into(), prev_kv: false };
    client.kv.delete_range(delete).await.expect("a delete");
    let to = past.to_string();
    let rewind = ["rewind", first, "--to", &to, "--yes", "--keys-only", "--txn-ops", "50000"];
    let (status, _, error) = at(&server, &rewind).await;
    assert_eq!((status, &*error), (0, ""));
    let count = RangeRequest { count_only: true, ..range(first, end) };
    assert_eq!(client.kv.range(count).await.expect("a range").into_inner().count, 20_000);
    let transactions = head(&mut client).await - past - 1;
    assert!((2..10).contains(&transactions), "{transactions} transactions");
}

/// Beside the longest values, only the compare of their key fits into a request.
async fn longest_values_are_rewound(backend: Backend) {
    /// The server's limit.
    const REQUEST_BYTES: usize = 1_572_864;
    let Some(server) = Server::orlop_with(backend, &[]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let key = format!("/long/{}", "k".repeat(1_000));
    let longest = "v".repeat(REQUEST_BYTES - 2 * key.len() - 32);
    client.put(&key, &longest).await;
    let past = head(&mut client).await.to_string();
    client.put(&key, "new").await;
    let (status, _, error) = at(&server, &["rewind", "/long/", "--to", &past, "--yes", "--keys-only"]).await;
    assert_eq!((status, &*error), (0, ""));
    let kvs = client.kv.range(get(key)).await.expect("a range").into_inner().kvs;
    assert!(kvs.len() == 1 && kvs[0].value == longest);

    // The compare does not fit beside the longest value that a put accepts.
    client.put("/longer", "v".repeat(REQUEST_BYTES - 13)).await;
    let past = head(&mut client).await.to_string();
    client.put("/longer", "new").await;
    let (status, _, error) = at(&server, &["rewind", "/longer", "--to", &past, "--yes", "--keys-only"]).await;
    let expected = "request is too large: /longer (see the server's --max-request-bytes); 0 puts";
    assert!(status == 2 && error.contains(expected), "{error}");
}

fn key(number: usize) -> String {
    format!("/k/{number:0400}")
}

/// Puts 300 keys with long names, and puts them again. Returns the revision of the first values.
async fn put_twice(client: &mut Client) -> i64 {
    for number in 0..300 {
        client.put(key(number), "old").await;
    }
    let past = head(client).await;
    for number in 0..300 {
        client.put(key(number), "new").await;
    }
    past
}

/// A rewind of [`put_twice`]. The plan is longer than a pipe holds, so the command does not write anything before its
/// output is read.
struct Planned {
    process: Child,
    lines: Lines<BufReader<ChildStdout>>,
}

impl Planned {
    /// Starts the command and reads the first line of the plan.
    async fn start(server: &Server, past: i64, flags: &[&str]) -> Self {
        let past = past.to_string();
        let rewind = ["rewind", "/k/", "--to", &past, "--yes", "--keys-only", "--endpoints", server.endpoint()];
        let mut process = command(&[&rewind[..], flags].concat());
        let mut process = process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("orlop starts");
        let lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let mut planned = Self { process, lines };
        assert!(planned.line().await.is_some_and(|line| line.starts_with("changed")));
        planned
    }

    async fn line(&mut self) -> Option<String> {
        timeout(DEADLINE, self.lines.next_line()).await.expect("in time").expect("the output is read")
    }

    /// Reads the rest of the output. Returns the exit status, the lines and the error.
    async fn finish(mut self) -> (Option<i32>, Vec<String>, String) {
        let mut rest = Vec::new();
        while let Some(line) = self.line().await {
            rest.push(line);
        }
        let ended = timeout(DEADLINE, self.process.wait_with_output()).await.expect("in time").expect("an exit status");
        (ended.status.code(), rest, String::from_utf8_lossy(&ended.stderr).into_owned())
    }
}

fn conflicts(lines: &[String]) -> Vec<&str> {
    lines.iter().map(String::as_str).filter(|line| line.starts_with("conflict")).collect()
}

async fn changes_of_others_after_the_plan_are_conflicts(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put("/k/kept", "kept").await;
    let past = put_twice(&mut client).await;
    let planned = Planned::start(&server, past, &[]).await;
    client.put("/k/created", "by others").await;
    client.put("/k/kept", "changed by others").await;
    let changed = head(&mut client).await;
    let (status, lines, error) = planned.finish().await;
    assert_eq!((status, &*error), (Some(1), ""));
    let expected = [
        format!("conflict  /k/created  was changed by others at revision {}", changed - 1),
        format!("conflict  /k/kept  was changed by others at revision {changed}"),
    ];
    assert_eq!(conflicts(&lines), expected);
    let again = format!("2 keys were changed meanwhile: run the command again with --to {past} to write the rest");
    assert!(lines.last().is_some_and(|last| last.starts_with("300 puts") && last.ends_with(&again)), "{lines:?}");
}

/// The transaction of a single operation does not read its key if the compare fails.
async fn conflicts_of_single_operations_are_named(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let past = put_twice(&mut client).await;
    let planned = Planned::start(&server, past, &["--txn-ops", "1"]).await;
    client.put(key(7), "by others").await;
    client.kv.delete_range(delete(key(8))).await.expect("a delete");
    let changed = head(&mut client).await - 1;
    let (status, lines, error) = planned.finish().await;
    assert_eq!((status, &*error), (Some(1), ""));
    let not_written = "it and its transaction are not written";
    let expected = [
        format!("conflict  {}  was revision {}, now revision {changed}: {not_written}", key(7), past + 8),
        format!("conflict  {}  was revision {}, now absent: {not_written}", key(8), past + 9),
    ];
    assert_eq!(conflicts(&lines), expected);
    assert!(lines.last().is_some_and(|last| last.starts_with("298 puts")), "{lines:?}");
}

/// An operator may think for long before the answer to the question, or read the plan slowly.
async fn token_that_expires_while_the_plan_is_read_is_renewed(backend: Backend) {
    let flags = [&CHEAP[..], &["--auth-token-ttl", "3"]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let past = put_twice(&mut client).await;
    enable(&mut client).await;
    let planned = Planned::start(&server, past, &["--user", "root", "--password", &password("root")]).await;
    sleep(Duration::from_secs(5)).await;
    let (status, lines, error) = planned.finish().await;
    assert_eq!((status, &*error), (Some(0), ""));
    assert!(lines.last().is_some_and(|last| last.starts_with("300 puts and 0 deletes written")), "{lines:?}");
}

on_both_backends!(
    large_states_are_rewound,
    transactions_of_many_operations_are_accepted,
    longest_values_are_rewound,
    changes_of_others_after_the_plan_are_conflicts,
    conflicts_of_single_operations_are_named,
    token_that_expires_while_the_plan_is_read_is_renewed,
);
