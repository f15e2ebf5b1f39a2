//! A log that nobody reads does not stop the server.

use std::{
    io::{ErrorKind, PipeReader, PipeWriter, Write as _},
    path::Path,
    process::{ExitStatus, Stdio},
};

use orlop_wire::proto::client::etcdserverpb::CompactionRequest;
use rustix::{
    fs::{OFlags, fcntl_setfl},
    process::Signal,
};
use tokio::{
    process::{Child, Command},
    time::timeout,
};

use crate::support::{Client, DEADLINE, Lines, eventually, free_port, home, http_get, orlop, send_signal};

const FILLED: &str = "filled";

/// Returns a pipe that takes no more bytes.
fn full_pipe() -> (PipeReader, PipeWriter) {
    let (reader, mut writer) = std::io::pipe().expect("a pipe");
    fcntl_setfl(&writer, OFlags::NONBLOCK).expect("the pipe is ours");
    let line = format!("{FILLED}\n");
    let filled = loop {
        if let Err(error) = writer.write_all(line.as_bytes()) {
            break error;
        }
    };
    assert_eq!(filled.kind(), ErrorKind::WouldBlock);
    // The server, which gets the same pipe, would not block either.
    fcntl_setfl(&writer, OFlags::empty()).expect("the pipe is ours");
    (reader, writer)
}

/// Starts a server whose standard output and standard error nobody reads, and waits until it serves.
async fn start(folder: &Path, log_format: &str) -> (Child, PipeReader, String, Client) {
    let (reader, writer) = full_pipe();
    let endpoint = format!("http://127.0.0.1:{}", free_port());
    let mut command = orlop(["--listen-client-urls", &endpoint, "--log-format", log_format]);
    command.arg("--data-dir").arg(folder.join("data")).stdin(Stdio::null());
    command.stdout(writer.try_clone().expect("a descriptor is free")).stderr(writer);
    let process = Command::from(command).kill_on_drop(true).spawn().expect("orlop is built with the tests");
    let mut client = eventually("a connection", async || Client::try_connect(&endpoint).await).await;
    timeout(DEADLINE, client.put("k", "")).await.expect("the server answers");
    (process, reader, endpoint, client)
}

async fn stop(process: &mut Child) {
    send_signal(process.id().expect("it runs"), Signal::TERM);
    let status = timeout(DEADLINE, process.wait()).await.expect("the server ends");
    assert!(status.as_ref().is_ok_and(ExitStatus::success), "{status:?}");
}

#[tokio::test]
async fn server_answers_and_stops_although_nobody_reads_its_log() {
    let home = home();
    let (mut process, _unread, endpoint, mut client) = start(home.path(), "json").await;
    let answers = async {
        for _ in 0..2 {
            let revision = client.put("k", "").await;
            client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
        }
        assert_eq!(http_get(&endpoint, "/livez").await.status, 200);
    };
    timeout(DEADLINE, answers).await.expect("the server answers");
    stop(&mut process).await;
}

#[tokio::test]
async fn number_of_lost_lines_is_logged_when_somebody_reads_the_log() {
    for format in ["json", "text"] {
        let home = home();
        let (mut process, reader, _, _client) = start(home.path(), format).await;
        let mut lines = Lines::of(reader);
        // Then the pipe takes more.
        assert_eq!(lines.next().as_deref(), Some(FILLED));
        stop(&mut process).await;
        let lines: Vec<String> = lines.filter(|line| line != FILLED).collect();
        let is_notice = |line: &&String| line.contains("log messages were lost, because nobody read the output");
        let notice = lines.iter().find(is_notice).unwrap_or_else(|| panic!("no notice: {lines:#?}"));
        let lost: u64 = if format == "json" {
            let notice: serde_json::Value = serde_json::from_str(notice).expect("a JSON object");
            notice["messages"].as_u64().expect("a number")
        } else {
            notice.rsplit_once("messages=").and_then(|(_, lost)| lost.parse().ok()).expect("a number")
        };
        assert!(lost > 0 && lines.last().is_some_and(|line| line.contains("stopped")), "{lines:#?}");
    }
}
