//! The Insight service through a gRPC client, and `orlop top`, which shows it.

use std::{path::Path, time::Instant};

use orlop_wire::proto::client::{
    etcdserverpb::{LeaseGrantRequest, LeaseKeepAliveRequest, PutRequest, WatchCreateRequest},
    orlopb::{
        ChildrenRequest, ExpiringLeasesRequest, MembersRequest, SizesRequest, SlowRequestsRequest, WatchersRequest,
        WatchersResponse,
    },
};
use rustix::process::Signal;
use serde_json::Value;
use tonic::Code;

use crate::{
    auth::{CHEAP, enable},
    support::{
        Backend, Client, DEADLINE, Server, Stream, eventually, everything, free_port, get, on_both_backends, orlop,
        orlop_program, put, run, send_signal,
    },
};

/// Runs `orlop top`, which must succeed, and returns its output. Repeats it if the server does not answer within the 5 s
/// for which it waits.
#[track_caller]
pub fn top(arguments: &[&str]) -> String {
    let deadline = Instant::now() + DEADLINE;
    loop {
        let output = run(orlop(["top"]).args(arguments));
        if output.status.success() {
            return String::from_utf8(output.stdout).expect("text");
        }
        let is_late = String::from_utf8_lossy(&output.stderr).contains("no answer within");
        assert!(is_late && Instant::now() < deadline, "{arguments:?}: {output:?}");
    }
}

fn json(endpoint: &str) -> Value {
    let text = top(&["--endpoints", endpoint, "--interval", "1s", "-w", "json"]);
    serde_json::from_str(&text).expect("JSON")
}

async fn sizes_are_those_of_the_newest_pairs(backend: Backend) {
    // Without a cache, the lengths come from the database.
    for cache in ["0", "16MiB"] {
        let flags = ["--value-cache-bytes", cache];
        let Some(server) = Server::orlop_with(backend, &flags).await else { return };
        let mut client = Client::connect(server.endpoint()).await;
        for (key, bytes) in [("/r/a/1", 9), ("/r/a/1", 100), ("/r/a/2", 50), ("/r/b/x/1", 1_000), ("/r/c", 0)] {
            client.put(key, vec![7; bytes]).await;
        }
        // Rows of one transaction are in two tables.
        let ops = ["/r/d/1", "/r/d/2", "/r/d/3"].map(|key| {
            let request = orlop_wire::proto::client::etcdserverpb::request_op::Request::RequestPut(put(key, [7; 20]));
            orlop_wire::proto::client::etcdserverpb::RequestOp { request: Some(request) }
        });
        let txn = orlop_wire::proto::client::etcdserverpb::TxnRequest { success: ops.into(), ..Default::default() };
        client.kv.txn(txn).await.expect("a transaction");
        for (prefix, limit, want_prefix, want) in [
            ("", 0, "/r/", &[("/r/b/", 1, 1_000), ("/r/a/", 2, 150), ("/r/d/", 3, 60), ("/r/c", 1, 0)][..]),
            ("/r/", 2, "/r/", &[("/r/b/", 1, 1_000), ("/r/a/", 2, 150)]),
            ("/r/a/", 0, "/r/a/", &[("/r/a/1", 1, 100), ("/r/a/2", 1, 50)]),
            ("/none", 0, "/none", &[]),
        ] {
            let request = SizesRequest { prefix: prefix.into(), limit };
            let answer = client.insight.sizes(request).await.expect("sizes").into_inner();
            let children: Vec<_> = (answer.children.iter())
                .map(|child| {
                    let sizes = child.sizes.expect("sizes");
                    (std::str::from_utf8(&child.name).expect("text"), sizes.keys, sizes.value_bytes)
                })
                .collect();
            assert_eq!((&*answer.prefix, &*children), (want_prefix.as_bytes(), want), "below {prefix:?}");
            let first = answer.largest_keys.first().map(|key| (&*key.name, key.is_prefix));
            let largest = want.first().map(|_| if prefix == "/r/a/" { &b"/r/a/1"[..] } else { b"/r/b/x/1" });
            assert_eq!(first, largest.map(|name| (name, false)));
        }
        // The result is reused.
        client.put("/r/a/3", [7]).await;
        let again = SizesRequest { prefix: "/r/a/".into(), ..Default::default() };
        let again = client.insight.sizes(again).await.expect("sizes").into_inner();
        assert_eq!((again.total.expect("sizes").keys, again.children_total), (2, 2));
        let long = SizesRequest { prefix: vec![b'a'; 4_096].into(), ..Default::default() };
        assert_eq!(client.insight.sizes(long).await.expect_err("too long").code(), Code::InvalidArgument);
    }
}

async fn long_names_are_in_short_pages(backend: Backend) {
    // A request for the next page contains a name, and has at most 256 KiB.
    const NAME_BYTES: usize = 200_000;
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let keys =
        ["a", "b", "c", "d", "e", "f", "g", "h", "i", "j", "k", "l", "m"].map(|letter| letter.repeat(NAME_BYTES));
    for key in &keys {
        client.put(key, [7]).await;
    }
    let (mut names, mut more) = (Vec::new(), true);
    while more {
        let after = names.last().cloned().unwrap_or_default();
        let request = ChildrenRequest { after, limit: 1_000, ..Default::default() };
        let page = client.insight.children(request).await.expect("names").into_inner();
        // The last name of a page may exceed 1 MiB.
        let bytes: usize = page.children.iter().map(|child| child.name.len()).sum();
        assert!(bytes < (1 << 20) + NAME_BYTES, "{} names of {bytes} bytes", page.children.len());
        more = page.more;
        names.extend(page.children.into_iter().map(|child| child.name));
    }
    assert!(names.iter().map(|name| &name[..]).eq(keys.iter().map(String::as_bytes)), "{} names", names.len());
}

async fn watchers(client: &Client) -> WatchersResponse {
    client.insight.clone().watchers(WatchersRequest::default()).await.expect("watchers").into_inner()
}

async fn watchers_are_counted_by_range_and_slow_ones_come_first(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut reading_client = Client::connect(server.endpoint()).await;
    let mut reading = Stream::open(&mut reading_client).await;
    let prefix = || WatchCreateRequest { key: "b/".into(), range_end: "b0".into(), ..Default::default() };
    reading.create(prefix()).await;
    reading.create(prefix()).await;
    let mut slow_client = Client::connect(server.endpoint()).await;
    let mut slow = Stream::open(&mut slow_client).await;
    slow.create(everything(0)).await;
    let ranges = |found: &WatchersResponse| -> Vec<_> {
        found.ranges.iter().map(|range| (range.key.to_vec(), range.range_end.to_vec(), range.watchers)).collect()
    };
    let found = watchers(&client).await;
    assert_eq!((found.ranges_total, found.watchers_total, found.is_partial), (2, 3, false));
    assert_eq!(ranges(&found)[0], (b"b/".to_vec(), b"b0".to_vec(), 2));
    // The client does not read, so first its connection, then its outbox of 8 MiB is full.
    for _ in 0..40 {
        client.put("k", vec![7; 1 << 20]).await;
    }
    eventually("a watcher is catching up", async || {
        let found = watchers(&client).await;
        let first = &found.ranges[0];
        let is_slow = first.catching_up == 1 && first.queued > 0 && first.revision_lag > 5 && first.revision_lag <= 40;
        if is_slow && *first.key == *b"\0" { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
    slow.read_until(41).await;
    eventually("the watcher is synced", async || {
        let found = watchers(&client).await;
        let lags: Vec<_> =
            found.ranges.iter().map(|range| (range.catching_up, range.queued, range.revision_lag)).collect();
        if lags == [(0, 0, 0), (0, 0, 0)] { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
    drop((slow, reading));
    eventually("the watchers are gone", async || {
        let found = watchers(&client).await;
        if found.watchers_total == 0 && found.ranges.is_empty() { Ok(()) } else { Err(format!("{found:?}")) }
    })
    .await;
}

async fn slow_requests_are_kept_with_their_phases(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--warning-unary-request-duration", "1ns"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..300 {
        client.put(format!("k{number}"), [7; 10]).await;
    }
    client.kv.range(get("missing")).await.expect("a range");
    let found = client.insight.slow_requests(SlowRequestsRequest {}).await.expect("requests").into_inner();
    assert_eq!((found.requests.len(), found.total, found.threshold_us), (256, 301, 0));
    let (range, put) = (&found.requests[0], &found.requests[1]);
    assert_eq!((&*range.method, &*range.code, range.pairs), ("etcdserverpb.KV/Range", "OK", Some(0)));
    assert_eq!((&*put.method, &*put.request, put.pairs), ("etcdserverpb.KV/Put", "put key=k299", None));
    let phases: Vec<&str> = put.phases.iter().map(|phase| &*phase.name).collect();
    assert_eq!(phases, ["queue", "evaluate", "commit", "send"]);
    let phases_us: u64 = put.phases.iter().map(|phase| phase.took_us).sum();
    assert!(phases_us <= put.took_us + 4 && put.took_us < 10_000_000, "{put:?}");
    // The log has the first hundred of each second.
    let log = server.log();
    assert!(found.requests.iter().any(|slow| log.contains(&slow.id)), "the log has the same IDs");

    let Some(fast) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(fast.endpoint()).await;
    let found = client.insight.slow_requests(SlowRequestsRequest {}).await.expect("requests").into_inner();
    assert_eq!((found.total, found.threshold_us), (0, 300_000));
}

async fn leases_that_expire_next_come_first(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--name", "one"]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for (id, ttl) in [(1, 1_000), (2, 100), (3, 500)] {
        client.lease.lease_grant(LeaseGrantRequest { id, ttl }).await.expect("a lease");
    }
    for key in ["a", "b"] {
        client.kv.put(PutRequest { lease: 3, ..put(key, [7]) }).await.expect("a put");
    }
    let request = ExpiringLeasesRequest { limit: 2 };
    let found = client.insight.expiring_leases(request).await.expect("leases").into_inner();
    let leases: Vec<_> = found.leases.iter().map(|lease| (lease.id, lease.ttl_secs, lease.keys)).collect();
    assert_eq!((found.total, &*leases), (3, &[(2, 100, 0), (3, 500, 2)][..]));
    assert!(found.leases[0].remaining_ms > 50_000 && found.leases[0].remaining_ms <= 100_000, "{found:?}");

    let found = client.insight.members(MembersRequest {}).await.expect("members").into_inner();
    assert_eq!((found.members.len(), &*found.members[0].name, found.members[0].leads_expiry), (1, "one", true));
    let has_heartbeat = found.since_heartbeat_ms.is_some_and(|ms| ms < 10_000);
    assert_eq!(has_heartbeat, backend == Backend::Postgres, "{found:?}");
}

/// Each instance has read its own deadlines, so a lease that another instance renewed has a later one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_renewed_by_another_instance_expire_later() {
    const TTL: i64 = 600;
    let Some(server) = Server::orlop_with(Backend::Postgres, &["--name", "one"]).await else { return };
    let other = Server::orlop_on(server.datastore().expect("a database"), &["--name", "two"]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut other_client = Client::connect(other.endpoint()).await;
    for (id, ttl) in [(1, TTL), (2, 10 * TTL)] {
        client.lease.lease_grant(LeaseGrantRequest { id, ttl }).await.expect("a lease");
    }
    let first = async || {
        let found = client.clone().insight.expiring_leases(ExpiringLeasesRequest::default()).await.expect("leases");
        let lease = found.into_inner().leases.swap_remove(0);
        (lease.id, lease.remaining_ms)
    };
    eventually("the passing of two seconds", async || {
        let (id, remaining) = first().await;
        assert_eq!(id, 1, "the lease that expires next");
        if remaining <= 1_000 * TTL - 2_000 { Ok(()) } else { Err(remaining) }
    })
    .await;
    let renewed = Instant::now();
    let requests = tokio_stream::iter([LeaseKeepAliveRequest { id: 1 }]);
    let mut answers = other_client.lease.lease_keep_alive(requests).await.expect("a stream").into_inner();
    assert_eq!(answers.message().await.expect("an answer").expect("an answer").ttl, TTL);
    let (id, remaining) = first().await;
    let min = 1_000 * TTL - 200 - i64::try_from(renewed.elapsed().as_millis()).expect("a short time");
    assert!(id == 1 && remaining >= min, "lease {id} has {remaining} ms, expected at least {min}");
    let members = client.insight.members(MembersRequest {}).await.expect("members").into_inner();
    let leaders: Vec<_> = members.members.iter().map(|member| (&*member.name, member.leads_expiry)).collect();
    assert_eq!(leaders, [("one", true), ("two", false)]);
}

async fn top_prints_one_screen_or_json(backend: Backend) {
    let flags = ["--warning-unary-request-duration", "1ns", "--name", "one"];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..20 {
        client.put(format!("/r/a/{number:02}"), [7; 100]).await;
    }
    client.put("/r/evil\u{1b}[2J", vec![7; 1_000_000]).await;
    // A kube-apiserver has this key beside all others.
    client.put("compact_rev_key", [7; 4]).await;
    // Not a hundredth of the bytes, but larger than all other keys but one.
    client.put("/large", vec![7; 8_000]).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: 123 }).await.expect("a lease");
    // More slow requests than are kept.
    for _ in 0..256 {
        client.put("/r/a/00", [7; 100]).await;
    }
    let mut stream = Stream::open(&mut client).await;
    stream.create(WatchCreateRequest { key: "/r/".into(), range_end: "/r0".into(), ..Default::default() }).await;
    let mut writer = client.clone();
    let load = tokio::spawn(async move {
        loop {
            writer.put("/r/a/00", [7; 100]).await;
        }
    });
    let text = top(&["--once", "--interval", "300ms", "--endpoints", server.endpoint()]);
    let figures = json(server.endpoint());
    load.abort();

    assert!(!text.contains('\u{1b}') && text.lines().all(|line| line.chars().count() <= 100), "{text}");
    for wanted in [
        "revision       ",
        "KV/Put ",
        "Keys below /r/: 21 keys",
        "/r/a/ ",
        "(elsewhere) ",
        "/r/*",
        "7b ",
        "put key=/r/a/",
        "leads, this one",
    ] {
        assert!(text.contains(wanted), "no {wanted:?}: {text}");
    }
    let puts = figures["operations"]
        .as_array()
        .and_then(|operations| operations.iter().find(|operation| operation["method"] == "KV/Put"));
    let puts = puts.unwrap_or_else(|| panic!("no puts: {figures}"));
    let positive = |value: &Value| value.as_f64().is_some_and(|number| number > 0.0);
    assert!(positive(&puts["perSec"]) && positive(&puts["p50Secs"]) && puts["failuresPerSec"] == 0.0, "{puts}");
    assert!(positive(&figures["rates"]["revisionsPerSec"]) && figures["rates"]["cpuCores"].is_number(), "{figures}");
    for (pointer, want) in [
        ("/endpoint", Value::from(server.endpoint())),
        ("/server/orlopVersion", env!("CARGO_PKG_VERSION").into()),
        ("/sizes/prefix/text", "/r/".into()),
        ("/sizes/children/0/name/text", "/r/evil\\x1b[2J".into()),
        ("/sizes/children/1/sizes/keys", 20.into()),
        ("/sizes/children/1/sizes/valueBytes", 2_000.into()),
        ("/sizes/total/keys", 21.into()),
        ("/sizes/rest/keys", 2.into()),
        ("/sizes/rest/valueBytes", 8_004.into()),
        ("/sizes/largestKeys/0/name/base64", "L3IvZXZpbBtbMko=".into()),
        ("/sizes/largestKeys/1/name/text", "/large".into()),
        ("/watchers/ranges/0/text", "/r/*".into()),
        ("/watchers/ranges/0/watchers", 1.into()),
        ("/leases/leases/0/id", "7b".into()),
        ("/members/members/0/responds", true.into()),
        ("/slowRequests/requests/255/code", "OK".into()),
        ("/missing", Value::Object(Default::default())),
    ] {
        assert_eq!(figures.pointer(pointer), Some(&want), "{pointer}: {figures}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_of_etcd_lacks_what_etcd_does_not_report() {
    let Some(etcd) = Server::etcd().await else { return };
    let mut client = Client::connect(etcd.endpoint()).await;
    for key in ["/r/a/1", "/r/a/2", "/r/b"] {
        client.put(key, [7; 10]).await;
    }
    let mut writer = client.clone();
    let load = tokio::spawn(async move {
        loop {
            writer.put("/r/b", [7; 10]).await;
        }
    });
    let (text, figures) = (top(&["--endpoints", etcd.endpoint()]), json(etcd.endpoint()));
    load.abort();
    assert!(
        text.contains("KV/Put ") && text.contains("not reported by etcd") && text.contains("leads, this one"),
        "{text}"
    );
    assert_eq!((&figures["watchers"], &figures["missing"]["leases"]), (&Value::Null, &"not reported by etcd".into()));
    let child = &figures["sizes"]["children"][0];
    assert_eq!(
        (&child["name"]["text"], &child["sizes"]["keys"], &child["sizes"]["valueBytes"]),
        (&"/r/a/".into(), &2.into(), &Value::Null)
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_logs_in_again_after_its_token_has_expired() {
    let flags = [&CHEAP[..], &["--auth-token-ttl", "3"]].concat();
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    enable(&mut Client::connect(server.endpoint()).await).await;
    // The token is not used between the two reads.
    let text = top(&["--interval", "5s", "--user", "user:user's password", "--endpoints", server.endpoint()]);
    assert!(text.contains("revision "), "{text}");
}

#[test]
fn top_without_a_server_fails_if_it_prints_once() {
    for (arguments, want) in [
        (&["--once", "--endpoints", "http://127.0.0.1:1"][..], "cannot connect"),
        (&["--interval", "1ms"], "use 100ms to 1h"),
    ] {
        let output = run(&mut orlop([&["top"], arguments].concat()));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(want), "{arguments:?}: {text}");
    }
}

/// Returns the lines of a terminal that has received this output: positions of the cursor and text; colours are ignored.
fn screen(output: &str) -> String {
    let mut rows = vec![vec![' '; 80]; 24];
    let (mut row, mut column) = (0, 0);
    let mut parts = output.split('\u{1b}');
    parts.next();
    for part in parts {
        let Some(rest) = part.strip_prefix('[') else { continue };
        let end = rest.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(rest.len() - 1);
        let (parameters, text) = (&rest[..end], &rest[end + 1..]);
        if rest[end..].starts_with('H') {
            let mut numbers = parameters.split(';').map(|number| number.parse::<usize>().unwrap_or(1) - 1);
            (row, column) = (numbers.next().unwrap_or(0), numbers.next().unwrap_or(0));
        }
        for c in text.chars().filter(|c| !c.is_control()) {
            if let Some(cell) = rows.get_mut(row).and_then(|row| row.get_mut(column)) {
                *cell = c;
            }
            column += 1;
        }
    }
    rows.into_iter().map(|row| row.into_iter().collect::<String>() + "\n").collect()
}

/// Returns what is on the screen whose output a file contains.
fn typescript_text(file: &Path) -> String {
    screen(&String::from_utf8_lossy(&std::fs::read(file).unwrap_or_default()))
}

/// Runs `orlop top` under a pseudo terminal: it waits for a server that is away, shows it when it is back, and restores
/// the terminal after a key and after a signal.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_waits_for_its_server_and_restores_the_terminal() {
    use tokio::io::AsyncWriteExt as _;
    // The server has the same address after its restart.
    let url = format!("http://127.0.0.1:{}", free_port());
    let flags = ["--listen-client-urls", &url];
    let mut server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is built in");
    let home = tempfile::TempDir::new().expect("a folder");
    let command = format!(
        "stty rows 24 cols 80; exec {} top --interval 100ms --endpoints {}",
        orlop_program().display(),
        server.endpoint()
    );
    for ending in ["q", "signal"] {
        let typescript = home.path().join(ending);
        let mut script = tokio::process::Command::new("script");
        script.kill_on_drop(true).stderr(std::process::Stdio::null());
        script.args(["--quiet", "--flush", "--return", "--command", &command]).arg(&typescript);
        let script =
            script.env("TERM", "xterm").stdin(std::process::Stdio::piped()).stdout(std::process::Stdio::null());
        let Ok(mut script) = script.spawn() else { return crate::support::skip("script of util-linux") };
        let shows = async |what: &str| {
            eventually(what, async || {
                let text = typescript_text(&typescript);
                if text.contains(what) { Ok(()) } else { Err(text) }
            })
            .await;
        };
        shows(concat!("Orlop ", env!("CARGO_PKG_VERSION"))).await;
        if ending == "q" {
            server.terminate().await;
            shows("trying again").await;
            server.restart().await;
            let hides_problem = async || match typescript_text(&typescript).contains("trying again") {
                true => Err("the problem is still shown"),
                false => Ok(()),
            };
            eventually("the server is back", hides_problem).await;
            script.stdin.as_mut().expect("a pipe").write_all(b"5").await.expect("a key");
            shows("took longer than").await;
            script.stdin.as_mut().expect("a pipe").write_all(b"q").await.expect("a key");
        } else {
            let children = format!("/proc/{id}/task/{id}/children", id = script.id().expect("it runs"));
            let children = std::fs::read_to_string(children).expect("script runs");
            let pid = children.split_whitespace().next().and_then(|pid| pid.parse().ok());
            send_signal(pid.expect("the command has a process"), Signal::TERM);
        }
        let status = tokio::time::timeout(DEADLINE, script.wait()).await.expect("top ends").expect("a status");
        assert!(status.success(), "{ending}: {status}");
        let screen = String::from_utf8_lossy(&std::fs::read(&typescript).expect("a typescript")).into_owned();
        let (entered, left) = (screen.find("\u{1b}[?1049h"), screen.rfind("\u{1b}[?1049l"));
        assert!(entered.is_some() && entered < left, "{ending}: the first screen is back: {screen:?}");
    }
}

on_both_backends!(
    sizes_are_those_of_the_newest_pairs,
    long_names_are_in_short_pages,
    watchers_are_counted_by_range_and_slow_ones_come_first,
    slow_requests_are_kept_with_their_phases,
    leases_that_expire_next_come_first,
    top_prints_one_screen_or_json,
);
