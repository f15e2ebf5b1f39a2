//! `orlop bench` against servers that stall or end, and a comparison that is terminated.

use std::{
    process::{Command, Stdio},
    time::{Duration, Instant},
};

use rustix::process::Signal;
use serde_json::Value;

use super::keys;
use crate::support::{Backend, Client, Lines, Server, ended, eventually, orlop, send_signal};

/// Returns a command whose output is collected.
fn bench(arguments: &[&str]) -> Command {
    let mut command = orlop(["bench"]);
    command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Waits until more than `min` keys exist.
async fn wait_for_keys(server: &Server, min: usize) {
    let client = Client::connect(server.endpoint()).await;
    eventually("a load", async || {
        let (found, _) = keys(&mut client.clone()).await;
        if found.len() > min { Ok(()) } else { Err(found.len()) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stalled_server_gives_an_error_and_the_rate_of_the_whole_run() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let flags = ["put", "--keep", "--clients", "4", "--duration", "10s", "--warmup", "0s", "--json"];
    let put = bench(&flags).args(["--endpoints", server.endpoint()]).spawn().expect("orlop is built with the tests");
    wait_for_keys(&server, 20).await;
    server.pause();
    let ended = ended(put);
    server.resume();
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    let report: Value = serde_json::from_slice(&ended.stdout).expect("one JSON object");
    let error = report["first_error"].as_str().unwrap_or_default();
    assert!(error.starts_with("no response within 10s"), "{report}");
    let row = &report["results"][0];
    assert_eq!((&row["elapsed_secs"], &row["errors"]), (&10.0.into(), &4.into()), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak_reports_a_server_that_ends() {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let flags = ["soak", "--minutes", "3", "--rate", "40", "--nodes", "5", "--pods", "20", "--watches", "6", "--json"];
    let began = Instant::now();
    let soak = bench(&flags).args(["--endpoints", server.endpoint()]).spawn().expect("orlop is built with the tests");
    // Four clients per second come and leave, and of nine, three grant four leases. So eight leases exist after more than
    // four seconds, and a sample is taken each second.
    eventually("eight leases of clients that come and leave", async || {
        let granted = server.metric("etcd_debugging_lease_granted_total").await;
        if granted >= 8.0 { Ok(()) } else { Err(granted) }
    })
    .await;
    server.kill();
    let ended = ended(soak);
    assert_eq!(ended.status.code(), Some(1), "{ended:?}");
    assert!(began.elapsed() < Duration::from_secs(120), "the test ends with its server");
    let report: Value = serde_json::from_slice(&ended.stdout).expect("one JSON object");
    let result = &report["servers"][0];
    assert!(result["operations"].as_u64() > Some(0) && result["errors"].as_u64() > Some(0), "{report}");
    assert!(result["first_error"].is_string() && result["samples"][0]["memory"].is_number(), "{report}");
}

#[test]
fn terminated_comparison_prints_its_results_and_leaves_nothing() {
    let folder = tempfile::tempdir().expect("a folder");
    let flags = ["compare", "--servers", "sqlite", "--groups", "put-256b", "--rounds", "99", "--duration", "800ms"];
    let compare = bench(&flags).arg("--work-dir").arg(folder.path()).spawn();
    let mut compare = compare.expect("orlop is built with the tests");
    let line = Lines::of(compare.stderr.take().expect("it is piped")).next().expect("a line of progress");
    assert!(line.starts_with("put-256b, round 1, Orlop, SQLite"), "{line}");
    send_signal(compare.id(), Signal::TERM);
    let ended = ended(compare);
    let text = String::from_utf8_lossy(&ended.stdout);
    assert!(ended.status.success(), "{ended:?}");
    for expected in
        ["### Puts, 256 B", "| put, 64 clients, 256 B | puts/s |", "interrupted: the results are incomplete"]
    {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("the folder exists").flatten().collect();
    assert!(left.is_empty(), "{left:?}");
}
