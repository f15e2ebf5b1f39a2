//! The effect of settings that no other module tests, and the places from which settings are read.

use std::fs;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use orlop_wire::proto::client::etcdserverpb::{
    MemberListRequest, RangeRequest, RequestOp, StatusRequest, TxnRequest, request_op::Request,
};
use serde_json::json;
use tonic::Code;

use crate::{
    hostile::wire::{ACK, PING, SETTINGS, Wire, frame},
    start::run,
    support::{Backend, Client, Place, Server, eventually, get, http, on_both_backends, put, text},
};

/// Puts a key five times: the revisions 2 to 6.
async fn put_five_times(server: &Server) {
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..5 {
        client.put("k", [number]).await;
    }
}

/// Each place sets what the next one overrides, and one setting alone.
#[tokio::test]
async fn flags_override_variables_and_variables_override_the_file() {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let file = home.path().join("orlop.toml");
    let settings = "name = \"file\"\nmax-txn-ops = 1\nquota-backend-bytes = 12345678\n";
    fs::write(&file, settings).expect("a file can be written");
    let variables = [("ORLOP_NAME", "variable"), ("ORLOP_MAX_TXN_OPS", "2")];
    let environment = variables.map(|(name, value)| (name.to_owned(), value.into())).to_vec();
    let flags = ["--config-file", text(&file), "--name", "flag"];
    let server = Server::orlop_at(None, &flags, Place { environment, ..Place::default() }).await;
    let mut client = Client::connect(server.endpoint()).await;
    let list = client.cluster.member_list(MemberListRequest::default()).await.expect("members").into_inner();
    assert_eq!(list.members[0].name, "flag");
    assert_eq!(list.members[0].client_ur_ls, [server.endpoint()]);
    let status = client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    assert_eq!(status.db_size_quota, 12_345_678, "the file's");
    let op = RequestOp { request: Some(Request::RequestRange(get("k"))) };
    let txn = |ops: usize| TxnRequest { success: vec![op.clone(); ops], ..Default::default() };
    client.kv.txn(txn(2)).await.expect("two operations are as many as the variable allows");
    let refused = client.kv.txn(txn(3)).await.expect_err("three operations are more than the variable allows");
    assert_eq!(refused.message(), "etcdserver: too many operations in txn request");
}

#[test]
fn manual_page_and_completions_name_every_setting() {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let help = String::from_utf8(run(home.path(), &["--help"], &[]).stdout).expect("help is text");
    // The lines of descriptions are indented by more.
    let flags = help.lines().filter_map(|line| line.strip_prefix("      --")?.split([' ', '[']).next());
    let flags: Vec<&str> = flags.collect();
    assert!(flags.len() > 60 && flags.contains(&"max-txn-ops") && flags.contains(&"enable-pprof"), "{flags:?}");
    for (arguments, before, after) in [
        (&["man"][..], "\n\\fB--", "\\fR"),
        (&["completions", "bash"], " --", " "),
        (&["completions", "zsh"], "'--", "="),
        (&["completions", "fish"], " -l ", " "),
    ] {
        let output = run(home.path(), arguments, &[]);
        assert!(output.status.success(), "{arguments:?}: {output:?}");
        let printed = String::from_utf8_lossy(&output.stdout).replace("\\-", "-");
        for flag in &flags {
            assert!(printed.contains(&format!("{before}{flag}{after}")), "{arguments:?}: no {flag}");
        }
    }
}

#[test]
fn reference_has_a_row_for_every_setting() {
    let page = include_str!("../../docs/reference/configuration.md");
    let names = page.lines().filter_map(|line| line.strip_prefix("| ")?.split(" | ").next());
    let rows: Vec<&str> = names.flat_map(|names| names.split(", ")).collect();
    let settings = serde_json::to_value(orlop::config::Settings::default()).expect("settings have a form in JSON");
    let settings = settings.as_object().expect("settings have names");
    assert!(settings.contains_key("max-txn-ops"), "{settings:?}");
    let missing: Vec<_> = settings.keys().filter(|name| !rows.contains(&format!("`{name}`").as_str())).collect();
    assert!(missing.is_empty(), "docs/reference/configuration.md has no row for {missing:?}");
}

/// Waits until a revision is compacted, and checks that a later one is not.
async fn compacted(server: &Server, revision: i64, kept: i64) {
    let mut client = Client::connect(server.endpoint()).await;
    let at = |revision| RangeRequest { revision, ..get("k") };
    eventually("a compaction", async || match client.clone().kv.range(at(revision)).await {
        Err(refused) if refused.message() == "etcdserver: mvcc: required revision has been compacted" => Ok(()),
        found => Err(format!("{found:?}")),
    })
    .await;
    client.kv.range(at(kept)).await.expect("a later revision");
}

async fn revisions_are_compacted_after_their_time(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--auto-compaction-retention", "1s"]).await else { return };
    put_five_times(&server).await;
    compacted(&server, 2, 6).await;
}

/// The server compacts at its start, and every five minutes.
async fn revisions_are_compacted_by_their_number(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &[]).await else { return };
    put_five_times(&server).await;
    // A member that did not leave the database would lead for some more seconds.
    server.terminate().await;
    server.restart_with(&["--auto-compaction-mode", "revision", "--auto-compaction-retention", "2"]).await;
    compacted(&server, 3, 4).await;
}

async fn requests_may_be_as_long_as_is_set(backend: Backend) {
    const MIB: usize = 1 << 20;
    let Some(server) = Server::orlop_with(backend, &["--max-request-bytes", "4MiB"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for (bytes, code, status, error) in [
        (3 * MIB, Code::Ok, 200, ""),
        (4 * MIB, Code::InvalidArgument, 400, "etcdserver: request is too large"),
        // Longer ones are refused before they are decoded.
        (5 * MIB, Code::ResourceExhausted, 429, "grpc: received message larger than max"),
    ] {
        let value = vec![b'v'; bytes];
        let body = json!({ "key": BASE64_STANDARD.encode("k"), "value": BASE64_STANDARD.encode(&value) });
        let (found, message) = match client.kv.put(put("k", value)).await {
            Ok(_) => (Code::Ok, String::new()),
            Err(refused) => (refused.code(), refused.message().to_owned()),
        };
        assert!(found == code && message.starts_with(error), "{bytes}: {found:?} {message}");
        let answer = http(server.endpoint(), "POST", "/v3/kv/put", &body.to_string()).await;
        assert!(answer.status == status && answer.body.contains(error), "{bytes}: {answer:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn maximum_of_concurrent_calls_is_announced() {
    /// The number of the setting in HTTP/2.
    const MAX_CONCURRENT_STREAMS: [u8; 2] = [0, 3];
    let flags = ["--max-concurrent-streams", "2"];
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is built in");
    let (kind, _, settings) = Wire::open(server.endpoint()).await.next_frame().await;
    assert_eq!(kind, SETTINGS);
    let announced = settings.chunks(6).find_map(|setting| setting.strip_prefix(&MAX_CONCURRENT_STREAMS));
    assert_eq!(announced, Some(&[0, 0, 0, 2][..]), "{settings:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_that_acknowledges_no_ping_is_closed() {
    // A connection on a machine that stalls has some seconds.
    let flags = ["--grpc-keepalive-interval", "1s", "--grpc-keepalive-timeout", "4s"];
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is built in");
    let (mut silent, mut alive) = (Wire::open(server.endpoint()).await, Wire::open(server.endpoint()).await);
    let closed = tokio::spawn(async move { silent.ended().await });
    while !closed.is_finished() {
        if let (PING, 0, payload) = alive.next_frame().await {
            assert!(alive.send(&frame(PING, ACK, 0, &payload)).await);
        }
    }
    closed.await.expect("the connection without acknowledgements is closed");
    assert!(alive.answers_ping().await, "the other one stays");
}

async fn writes_longer_than_is_set_are_counted_as_slow(backend: Backend) {
    for (limit, is_slow) in [("1h", false), ("1ns", true)] {
        let Some(server) = Server::orlop_with(backend, &["--warning-apply-duration", limit]).await else { return };
        put_five_times(&server).await;
        // A write may be counted after its response.
        eventually("the counter", async || match server.metric("etcd_server_slow_apply_total").await {
            slow if (slow > 0.0) == is_slow => Ok(()),
            slow => Err(slow),
        })
        .await;
    }
}

on_both_backends!(
    revisions_are_compacted_after_their_time,
    revisions_are_compacted_by_their_number,
    requests_may_be_as_long_as_is_set,
    writes_longer_than_is_set_are_counted_as_slow,
);
