//! `/debug/vars` and `/debug/pprof/`, as monitoring tools and `go tool pprof` read them.

use std::io::Read as _;

use flate2::read::GzDecoder;
use prost::Message;
use serde_json::Value;

use crate::support::{Backend, Client, Server, eventually, http_bytes, http_get, on_both_backends};

async fn variables_are_served(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let answer = http_get(server.endpoint(), "/debug/vars").await;
    assert_eq!(answer.header("content-type"), Some("application/json; charset=utf-8"));
    let vars: Value = serde_json::from_str(&answer.body).expect("JSON");
    assert!(vars["file_descriptor_limit"].as_u64().is_some_and(|limit| limit > 0), "{vars}");
    for name in ["Alloc", "HeapAlloc", "HeapInuse", "Sys"] {
        assert!(vars["memstats"][name].as_u64().is_some_and(|bytes| bytes > 1 << 20), "{name}: {vars}");
    }
    let words: Vec<&str> = vars["cmdline"].as_array().expect("words").iter().filter_map(Value::as_str).collect();
    assert!(words.contains(&"--data-dir"), "{words:?}");
    match backend {
        Backend::Sqlite => assert!(!words.contains(&"***"), "{words:?}"),
        Backend::Postgres => assert!(words.windows(2).any(|two| two == ["--datastore-endpoint", "***"]), "{words:?}"),
    }
}

async fn profiles_need_the_flag(backend: Backend) {
    for (flags, status) in [(&[][..], 404), (&["--enable-pprof=false"], 404), (&["--enable-pprof"], 200)] {
        let Some(server) = Server::orlop_with(backend, flags).await else { return };
        for path in ["/debug/pprof/", "/debug/pprof/heap", "/debug/pprof/cmdline"] {
            assert_eq!(http_get(server.endpoint(), path).await.status, status, "{path} with {flags:?}");
        }
        for path in ["/debug/requests", "/debug/", "/debug/pprof/unknown"] {
            assert_eq!(http_get(server.endpoint(), path).await.status, 404, "{path} with {flags:?}");
        }
    }
}

/// The fields of a profile in pprof's format that the test reads.
#[derive(Clone, PartialEq, Message)]
struct Profile {
    #[prost(message, repeated, tag = "2")]
    sample: Vec<Sample>,
    #[prost(message, repeated, tag = "4")]
    location: Vec<Location>,
    #[prost(message, repeated, tag = "5")]
    function: Vec<Function>,
    #[prost(string, repeated, tag = "6")]
    string_table: Vec<String>,
    #[prost(int64, tag = "10")]
    duration_nanos: i64,
}

#[derive(Clone, PartialEq, Message)]
struct Sample {
    #[prost(uint64, repeated, tag = "1")]
    location_id: Vec<u64>,
    #[prost(int64, repeated, tag = "2")]
    value: Vec<i64>,
}

#[derive(Clone, PartialEq, Message)]
struct Location {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(message, repeated, tag = "4")]
    line: Vec<Line>,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Line {
    #[prost(uint64, tag = "1")]
    function_id: u64,
}

#[derive(Clone, Copy, PartialEq, Message)]
struct Function {
    #[prost(uint64, tag = "1")]
    id: u64,
    #[prost(int64, tag = "2")]
    name: i64,
}

impl Profile {
    /// Returns the functions of a sample, the innermost first. Every reference must be valid.
    fn stack(&self, sample: &Sample) -> Vec<&str> {
        let location = |id: &u64| self.location.iter().find(|location| location.id == *id).expect("a location");
        let function = |line: &Line| self.function.iter().find(|function| function.id == line.function_id);
        let name =
            |function: &Function| usize::try_from(function.name).ok().and_then(|name| self.string_table.get(name));
        let lines = sample.location_id.iter().flat_map(|id| &location(id).line);
        lines.map(|line| function(line).and_then(name).expect("a name").as_str()).collect()
    }
}

async fn cpu_profile_shows_the_functions_of_requests(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--enable-pprof"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let puts = async {
        loop {
            client.put("k", vec![b'v'; 64 << 10]).await;
        }
    };
    let endpoint = server.endpoint();
    let profile = async |seconds: u32| {
        let path = format!("/debug/pprof/profile?seconds={seconds}");
        http_bytes(endpoint, "GET", &path, "").await
    };
    let is_refused = |response: &[u8]| response.ends_with(b"another one is being recorded\n");
    let recorded = eventually("a profile of the puts", async || {
        let response = profile(2).await;
        if is_refused(&response) { Err("another one is being recorded".to_owned()) } else { shows_puts(&response) }
    });
    let refused = eventually("only one profile at a time", async || {
        let response = profile(1).await;
        if is_refused(&response) { Ok(()) } else { Err("it was recorded") }
    });
    tokio::select! {
        ((), ()) = async { tokio::join!(recorded, refused) } => {}
        () = puts => unreachable!("the loop does not end"),
    }
}

/// Checks the response to a request for 2 seconds. Returns what is missing if too few functions were interrupted.
fn shows_puts(response: &[u8]) -> Result<(), String> {
    let text = || String::from_utf8_lossy(response).into_owned();
    let head = response.windows(4).position(|four| four == b"\r\n\r\n").unwrap_or_else(|| panic!("{:?}", text()));
    assert!(response.starts_with(b"HTTP/1.0 200") || response.starts_with(b"HTTP/1.1 200"), "{:?}", text());
    let mut message = Vec::new();
    GzDecoder::new(&response[head + 4..]).read_to_end(&mut message).expect("gzip");
    let profile = Profile::decode(message.as_slice()).expect("a profile");
    assert_eq!(profile.string_table.first().map(String::as_str), Some(""));
    assert!(profile.duration_nanos >= 2_000_000_000, "{}", profile.duration_nanos);
    assert!(profile.sample.iter().all(|sample| sample.value.len() == 2 && sample.value[1] >= sample.value[0]));
    let stacks: Vec<_> = profile.sample.iter().map(|sample| profile.stack(sample)).collect();
    let has = |part: &str| stacks.iter().flatten().any(|function| function.contains(part));
    if has("orlop") && has("tokio") && has("main") { Ok(()) } else { Err(format!("{stacks:#?}")) }
}

async fn invalid_durations_are_refused(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--enable-pprof"]).await else { return };
    for seconds in ["0", "-1", "301", "1.5", "1s", ""] {
        let answer = http_get(server.endpoint(), &format!("/debug/pprof/profile?seconds={seconds}")).await;
        assert_eq!(answer.status, 400, "{seconds:?}: {answer:?}");
        assert!(answer.body.contains("a whole number from 1 to 300"), "{answer:?}");
    }
    let memory = http_get(server.endpoint(), "/debug/pprof/heap").await.body;
    assert!(memory.lines().any(|line| line.starts_with("resident ")), "{memory}");
}

on_both_backends!(
    variables_are_served,
    profiles_need_the_flag,
    cpu_profile_shows_the_functions_of_requests,
    invalid_durations_are_refused,
);
