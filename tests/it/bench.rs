//! `orlop bench`: each load does what it was asked to, tells it, and leaves nothing behind.

use std::process::Command;

use orlop::proto::client::etcdserverpb::{PutRequest, RangeRequest};
use serde_json::Value;

use crate::support::{Backend, Client, Server};

const OPERATIONS: u64 = 50;

/// The report of a run.
#[track_caller]
fn bench(server: &Server, scenario: &[&str]) -> Value {
    let total = OPERATIONS.to_string();
    let output = Command::new(env!("CARGO_BIN_EXE_orlop"))
        .arg("bench")
        .args(scenario)
        .args(["--endpoints", server.endpoint(), "--clients", "4", "--total", &total, "--warmup", "0s", "--json"])
        .output()
        .expect("orlop is built with the tests");
    assert!(output.status.success(), "{scenario:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// The keys that are there, and the head.
async fn keys(client: &mut Client) -> (Vec<String>, i64) {
    let all = RangeRequest { key: "\0".into(), range_end: "\0".into(), keys_only: true, ..Default::default() };
    let answer = client.kv.range(all).await.expect("a range").into_inner();
    let keys = answer.kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect();
    (keys, answer.header.expect("a header").revision)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_do_what_they_tell_and_leave_nothing_behind() {
    /// (flags, operations in the report with their counts, revisions that it makes at least)
    type Row<'a> = (&'a [&'a str], &'a [(&'a str, u64)], u64);
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    client.kv.put(PutRequest { key: "of another".into(), ..Default::default() }).await.expect("a put");
    let rows: &[Row<'_>] = &[
        (&["put"], &[("put", OPERATIONS)], OPERATIONS),
        (&["create-txn"], &[("create-txn", OPERATIONS)], OPERATIONS),
        (&["update", "--key-space", "20"], &[("update", OPERATIONS)], OPERATIONS),
        (&["get", "--key-space", "20"], &[("get", OPERATIONS)], 1),
        (&["range", "--keys", "20"], &[("range", OPERATIONS)], 1),
        (
            &["watch", "--watchers", "10", "--streams", "2", "--key-space", "8"],
            &[("put", OPERATIONS), ("event", 10 * OPERATIONS), ("round", OPERATIONS)],
            OPERATIONS,
        ),
        (
            &["kubernetes", "--nodes", "5", "--pods", "20", "--watches", "6"],
            &[("kubernetes", OPERATIONS), ("kubernetes, a kind at a time", OPERATIONS)],
            1,
        ),
    ];
    for (scenario, expected, revisions) in rows {
        let (_, head) = keys(&mut client).await;
        let told = bench(&server, scenario);
        assert_eq!((&told["scenario"], &told["first_error"]), (&scenario[0].into(), &Value::Null));
        assert_eq!((&told["interrupted"], &told["clients"]), (&false.into(), &4.into()), "{told}");
        assert_eq!(counts(&told), *expected, "{told}");
        let (left, now) = keys(&mut client).await;
        assert_eq!(left, ["of another"], "{scenario:?}");
        assert!(now - head > *revisions as i64, "{scenario:?} made the revisions from {head} to {now}");
    }
}

/// Operations with their counts, those of the kinds of one load in one sum. None of them failed.
fn counts(told: &Value) -> Vec<(&str, u64)> {
    let mut counts: Vec<(&str, u64)> = Vec::new();
    for row in told["results"].as_array().expect("a list of operations") {
        let count = row["count"].as_u64().expect("a count");
        let histogram = row["histogram"].as_array().expect("a histogram");
        let in_buckets: u64 = histogram.iter().map(|bucket| bucket["count"].as_u64().expect("a count")).sum();
        assert_eq!((in_buckets, row["errors"].as_u64()), (count, Some(0)), "{row}");
        match row["operation"].as_str().expect("a name") {
            "renew-lease" => counts.push(("kubernetes, a kind at a time", count)),
            "update-pod" | "probe" | "count" | "list-page" => counts.last_mut().expect("behind the first").1 += count,
            operation => counts.push((operation, count)),
        }
    }
    counts
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefix_in_use_is_not_touched_unless_told_to() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    bench(&server, &["create-txn", "--keep"]);
    let (kept, _) = keys(&mut client).await;
    assert_eq!(kept.len() as u64, OPERATIONS);
    let again = Command::new(env!("CARGO_BIN_EXE_orlop"))
        .args(["bench", "put", "--total", "1", "--warmup", "0s", "--endpoints", server.endpoint()])
        .output()
        .expect("orlop is built with the tests");
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(!again.status.success() && said.contains("the prefix is in use") && said.contains("keys=50"), "{said}");
    assert_eq!(keys(&mut client).await.0, kept);
    bench(&server, &["put", "--purge"]);
    assert!(keys(&mut client).await.0.is_empty());
}
