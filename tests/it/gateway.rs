//! The JSON gateway: the calls in etcd's documentation, with responses compared with a real etcd's.

use std::path::Path;

use serde_json::{Value, json};
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    process::Command,
    time::timeout,
};

use crate::support::{
    Answer, Authority, Backend, Certificate, Client, DEADLINE, Server, http, http_with, on_both_backends, put, skip,
    text,
};

/// The calls are made in this order.
const CALLS: [(&str, &str); 49] = [
    ("kv/put", r#"{"key": "Zm9v", "value": "YmFy"}"#),
    ("kv/range", r#"{"key": "Zm9v"}"#),
    // Some encoders of base64 insert line breaks.
    ("kv/range", r#"{"key": "Zm\r\n9v"}"#),
    ("kv/txn", r#"{"success":[{"requestPut":{"key":"Zm9v","value":"YmFy\n"}}, {"request_range":{"key":"\nZm9v"}}]}"#),
    ("kv/range", r#"{"key": "Zm 9v\n"}"#),
    ("kv/range", r#"{"key": "Zm9v", "range_end": "Zm9w"}"#),
    ("kv/range", r#"{"key": "Zm9v", "rangeEnd": "Zm9w", "limit": "1", "sort_order": "DESCEND", "sort_target": 3}"#),
    ("kv/range", r#"{"key": "AA==", "range_end": "AA==", "keys_only": true, "count_only": false}"#),
    ("kv/range", r#"{"key": "bm9uZQ=="}"#),
    ("kv/put", r#"{"key": "Zm9v", "value": "YmF6", "prev_kv": true}"#),
    ("kv/put", r#"{"key":"X3Rlc3Q=","value":""}"#),
    (
        "kv/txn",
        r#"{"compare":[{"target":"CREATE","key":"Zm9v","createRevision":"2"}],"success":[{"requestPut":{"key":"Zm9v","value":"YmFy"}}]}"#,
    ),
    (
        "kv/txn",
        r#"{"compare":[{"version":"4","result":"EQUAL","target":"VERSION","key":"Zm9v"}],"success":[{"requestRange":{"key":"Zm9v"}}],"failure":[{"request_range":{"key":"Zm9v"}}]}"#,
    ),
    ("kv/deleterange", r#"{"key": "Zm9v", "prev_kv": true}"#),
    ("lease/grant", r#"{"TTL": "600", "ID": 7}"#),
    ("lease/grant", r#"{"TTL": 600, "ID": "7"}"#),
    ("kv/put", r#"{"key": "a2V5", "value": "dg==", "lease": "7"}"#),
    ("lease/timetolive", r#"{"ID": "7", "keys": true}"#),
    ("kv/lease/timetolive", r#"{"ID": "8"}"#),
    ("lease/leases", "{}"),
    ("kv/lease/leases", "{}"),
    ("lease/keepalive", r#"{"ID": "7"}"#),
    ("lease/keepalive", r#"{"ID": "8"}"#),
    ("lease/revoke", r#"{"ID": "7"}"#),
    ("kv/lease/revoke", r#"{"ID": "7"}"#),
    ("kv/compaction", r#"{"revision": "3", "physical": true}"#),
    ("kv/range", r#"{"key": "Zm9v", "revision": "2"}"#),
    ("kv/range", r#"{"key": "Zm9v", "revision": "1000"}"#),
    ("kv/range", "{}"),
    ("cluster/member/list", "{}"),
    ("maintenance/status", "{}"),
    ("maintenance/alarm", "{}"),
    ("maintenance/alarm", r#"{"action": "ACTIVATE", "memberID": "7", "alarm": "NOSPACE"}"#),
    ("kv/put", r#"{"key": "Zm9v", "value": "YmFy"}"#),
    ("maintenance/alarm", r#"{"action": 2, "memberID": "7", "alarm": 1}"#),
    ("maintenance/hashkv", r#"{"revision": "0"}"#),
    ("lock/unlock", "{}"),
    ("election/leader", r#"{"name": "ZQ=="}"#),
    ("election/proclaim", "{}"),
    ("maintenance/defragment", "{}"),
    // Invalid requests.
    ("kv/put", r#"{"key": "Zm9v"#),
    ("kv/put", r#"{"key": 7}"#),
    ("kv/put", r#"{"key": "Zm9v", "lease": "seven"}"#),
    ("kv/put", "[]"),
    ("kv/range", r#"{"key": "Zm9v", "sort_order": "SIDEWAYS"}"#),
    ("kv/range", r#"{"key": "Zm9v", "no_such_field": 1}"#),
    ("nothing", "{}"),
    ("kv/nothing", "{}"),
    ("kv/rangestream", r#"{"key": "Zm9v"}"#),
];

/// Replaces values that differ between any two servers.
fn masked(body: &str) -> Value {
    fn mask(value: &mut Value) {
        match value {
            Value::Object(fields) => {
                for field in
                    ["cluster_id", "member_id", "raft_term", "dbSize", "dbSizeInUse", "raftIndex", "raftAppliedIndex"]
                {
                    fields.remove(field);
                }
                fields.values_mut().for_each(mask);
            }
            Value::Array(values) => values.iter_mut().for_each(mask),
            _ => {}
        }
    }
    let mut value = serde_json::from_str(body.trim()).unwrap_or_else(|error| panic!("{error}: {body}"));
    mask(&mut value);
    value
}

async fn call(server: &Server, path: &str, body: &str) -> Answer {
    http(server.endpoint(), "POST", &format!("/v3/{path}"), body).await
}

async fn answers_equal_those_of_etcd(backend: Backend) {
    let (Some(etcd), Some(orlop)) = (Server::etcd().await, Server::orlop(backend).await) else { return };
    for (number, (path, body)) in CALLS.into_iter().enumerate() {
        let (theirs, ours) = (call(&etcd, path, body).await, call(&orlop, path, body).await);
        let what = format!("call {number}: {path} {body}\netcd: {theirs:?}\norlop: {ours:?}");
        let (their_body, mut our_body) = (masked(&theirs.body), masked(&ours.body));
        if our_body.get("code").is_some() {
            // Texts of parse errors differ between the two parsers, and etcd 3.5 reports unknown fields differently.
            let is_parse_error = theirs.status == 400 && !ours.body.contains("etcdserver:");
            assert_eq!(ours.status, theirs.status, "{what}");
            assert_eq!(our_body["code"], their_body["code"], "{what}");
            assert!(is_parse_error || our_body["message"] == their_body["message"], "{what}");
            continue;
        }
        assert_eq!(ours.status, theirs.status, "{what}");
        assert_eq!(ours.header("content-type"), theirs.header("content-type"), "{what}");
        match path {
            // Names, addresses and versions differ between servers; etcd 3.6 returns more fields.
            "cluster/member/list" => {
                let [theirs, ours] = [&their_body, &our_body].map(|body| &body["members"][0]);
                for field in ["ID", "name"] {
                    assert!(ours[field].is_string() && theirs[field].is_string(), "{field}: {what}");
                }
                for field in ["peerURLs", "clientURLs"] {
                    assert!(ours[field][0].is_string() && theirs[field][0].is_string(), "{field}: {what}");
                }
            }
            "maintenance/status" => {
                assert!(our_body["leader"].is_string() && our_body["version"].is_string(), "{what}")
            }
            "maintenance/hashkv" => {
                // etcd before 3.6 does not return this field.
                our_body.as_object_mut().expect("an object").remove("hash_revision");
                assert_eq!(our_body, their_body, "{what}");
            }
            _ => assert_eq!(our_body, their_body, "{what}"),
        }
    }
    let range = r#"{"key": "Zm9v"}"#;
    for (method, path, body) in [
        ("GET", "/v3/kv/range", ""),
        ("PUT", "/v3/kv/range", ""),
        ("DELETE", "/v3/kv/range", ""),
        ("OPTIONS", "/v3/kv/range", ""),
        ("OPTIONS", "/health", ""),
        ("OPTIONS", "/metrics", ""),
        ("POST", "/v3beta/kv/range", range),
        ("POST", "/v3alpha/kv/range", range),
    ] {
        let theirs = http(etcd.endpoint(), method, path, body).await;
        let ours = http(orlop.endpoint(), method, path, body).await;
        assert_eq!(ours.status, theirs.status, "{method} {path}: {theirs:?} {ours:?}");
    }
}

/// Watches as `curl -N` does.
async fn watch_streams_events(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let address = server.endpoint().strip_prefix("http://").expect("an http endpoint");
    let mut stream = TcpStream::connect(address).await.expect("a ready server accepts connections");
    let (mut stream, mut requests) = stream.split();
    let body = r#"{"create_request": {"key":"Zm9v"} }"#;
    let length = body.len();
    // Some clients send the body only when they are asked to.
    let head = format!(
        "POST /v3/watch HTTP/1.1\r\nHost: {address}\r\nExpect: 100-continue\r\nContent-Length: {length}\r\n\r\n"
    );
    requests.write_all(head.as_bytes()).await.expect("the server reads");
    let mut received = String::new();
    let mut read_until = async |wanted: &str| {
        while !received.contains(wanted) {
            let mut part = vec![0; 4096];
            let len =
                timeout(DEADLINE, stream.read(&mut part)).await.expect("a chunk in time").expect("the stream is open");
            assert!(len > 0, "the stream continues: {received}");
            received += &String::from_utf8_lossy(&part[..len]);
        }
        received.clone()
    };
    assert_eq!(read_until("\r\n\r\n").await, "HTTP/1.1 100 Continue\r\n\r\n");
    requests.write_all(body.as_bytes()).await.expect("the server reads");
    let created = read_until("\"created\":true").await;
    assert!(created.contains("{\"result\":{\"header\":{"), "{created}");
    for value in ["MQ==", "Mg=="] {
        let put = json!({ "key": "Zm9v", "value": value }).to_string();
        assert_eq!(call(&server, "kv/put", &put).await.status, 200);
        let events = read_until(&format!("\"value\":\"{value}\"")).await;
        assert!(events.contains("\"events\":[{\"kv\":{\"key\":\"Zm9v\""), "{events}");
    }
}

async fn origins_and_hosts_are_limited_as_by_etcd(backend: Backend) {
    let flags = ["--cors", "http://a.example:80", "--host-whitelist", "good.example,::1"];
    let (Some(etcd), Some(orlop)) = (Server::etcd_with(&flags).await, Server::orlop_with(backend, &flags).await) else {
        return;
    };
    let hosts = ["good.example", "good.example:2379", "[::1]:2379", "GOOD.example", "127.0.0.1:2379", "[::1]"];
    let origins = ["http://a.example:80", "http://a.example", "http://b.example:80"];
    for (method, path) in [("GET", "/health"), ("GET", "/none"), ("OPTIONS", "/health"), ("OPTIONS", "/none")] {
        for headers in hosts.iter().flat_map(|host| origins.map(|origin| [("Host", *host), ("Origin", origin)])) {
            let theirs = http_with(etcd.endpoint(), method, path, &headers).await;
            let ours = http_with(orlop.endpoint(), method, path, &headers).await;
            let what = format!("{method} {path} {headers:?}\netcd: {theirs:?}\norlop: {ours:?}");
            assert_eq!((ours.status, &ours.body), (theirs.status, &theirs.body), "{what}");
            for name in ["origin", "methods", "headers"] {
                let name = format!("access-control-allow-{name}");
                assert_eq!(ours.header(&name), theirs.header(&name), "{what}");
            }
        }
    }
    let mut client = Client::connect(orlop.endpoint()).await;
    client.kv.put(put("k", "")).await.expect("gRPC is not limited");
}

/// With status 200 alone, a client would take the end of its watch for a regular one.
async fn unreadable_watch_ends_with_its_error(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let answer = http(server.endpoint(), "POST", "/v3/watch", "x").await;
    assert!(answer.body.contains("\"error\""), "{answer:?}");
}

/// A browser with a client certificate.
struct Browser<'a> {
    endpoint: &'a str,
    root: &'a Path,
    certificate: &'a Certificate,
}

impl Browser<'_> {
    /// Sends what a browser sends without asking the server before. Returns the body and, on a last line, the status. Over
    /// HTTP/2, old versions of curl take an answer before the end of their body for an error, with status 000.
    async fn post(&self, path: &str, body: &str, headers: &[&str], version: &str) -> String {
        let Certificate { cert, key } = self.certificate;
        let mut curl = Command::new("curl");
        curl.args(["-sS", "--max-time", "20", version, "--cacert", text(self.root), "--cert", text(cert)]);
        curl.args(["--key", text(key), "-H", "Content-Type: text/plain", "-d", body, "-w", "\n%{http_code}"]);
        headers.iter().for_each(|header| _ = curl.args(["-H", header]));
        let output = curl.arg(format!("{}/v3/{path}", self.endpoint)).kill_on_drop(true).output();
        let output = timeout(DEADLINE, output).await.expect("curl ends").expect("curl can be started");
        String::from_utf8(output.stdout).expect("text")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_from_elsewhere_cannot_use_the_certificate_of_a_browser() {
    let Some(authority) = Authority::new() else { return };
    if std::process::Command::new("curl").arg("-V").output().is_err() {
        return skip("curl");
    }
    let (own, certificate, root) = (authority.sign("server", 30), authority.sign("client", 30), authority.root());
    let mut flags = vec!["--listen-client-urls", "https://127.0.0.1:0", "--cert-file", text(&own.cert)];
    flags.extend(["--key-file", text(&own.key), "--trusted-ca-file", text(&root)]);
    flags.extend(["--cors", "*,https://listed.example:8443"]);
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let browser = Browser { endpoint: server.endpoint(), root: &root, certificate: &certificate };
    let key = r#"{"key": "Zm9v"}"#;
    for (headers, is_served) in [
        (&["Sec-Fetch-Site: cross-site", "Origin: https://evil.example"][..], false),
        (&["Sec-Fetch-Site: same-site", "Origin: https://127.0.0.1:3000"], false),
        (&["Sec-Fetch-Site: cross-site"], false),
        (&["Sec-Fetch-Site: cross-site", "Origin: https://listed.example:8443"], true),
        (&["Sec-Fetch-Site: same-origin"], true),
        // Programs.
        (&[], true),
        (&["Origin: https://evil.example"], true),
    ] {
        // Without a version, curl and the server agree on HTTP/2 if curl has it.
        for version in ["--http1.1", "--tlsv1.2"] {
            let put = browser.post("kv/put", r#"{"key": "Zm9v", "value": "YmFy"}"#, &[], version).await;
            assert!(put.ends_with("\n200"), "{put}");
            let answer = browser.post("kv/deleterange", key, headers, version).await;
            assert_eq!(answer.ends_with("\n200"), is_served, "{version} {headers:?}: {answer}");
            if !is_served && version == "--http1.1" {
                let is_refused = answer.contains("a web page of another site") && answer.ends_with("\n403");
                assert!(is_refused, "{headers:?}: {answer}");
            }
            let left = browser.post("kv/range", key, &[], version).await;
            assert_eq!(left.contains("\"count\":\"1\""), !is_served, "{version} {headers:?}: {left}");
        }
    }
}

on_both_backends!(
    unreadable_watch_ends_with_its_error,
    answers_equal_those_of_etcd,
    watch_streams_events,
    origins_and_hosts_are_limited_as_by_etcd
);
