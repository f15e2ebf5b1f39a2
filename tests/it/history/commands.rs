//! `orlop history`, `diff`, `get` and `rewind` as processes: their output and exit statuses.

use std::{
    process::Output,
    sync::atomic::{AtomicBool, Ordering},
};

use orlop_wire::proto::client::authpb::Permission;
use orlop_wire::proto::client::etcdserverpb::{
    AuthEnableRequest, AuthRoleAddRequest, AuthRoleGrantPermissionRequest, AuthUserAddRequest,
    AuthUserGrantRoleRequest, CompactionRequest, DeleteRangeRequest, LeaseGrantRequest, PutRequest,
};
use serde_json::Value;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::Command,
    time::timeout,
};

use super::{KEEP, changes, changes_of};
use crate::support::{
    Backend, Client, DEADLINE, Server, all, delete, eventually, get, on_both_backends, orlop_program, put, run_async,
};

/// Creates a command that is killed when it is dropped.
pub(super) fn command(arguments: &[&str]) -> Command {
    let mut command = Command::new(orlop_program());
    command.args(arguments).env_remove("NO_COLOR").kill_on_drop(true);
    command.stdin(std::process::Stdio::null());
    // An address that no machine has: a command on a stopped database does not listen on the server's addresses.
    for setting in ["ORLOP_CONSOLE_LISTEN_URL", "ORLOP_LISTEN_METRICS_URLS", "ORLOP_LISTEN_CLIENT_URLS"] {
        command.env(setting, "http://192.0.2.1:2379");
    }
    // It does not read the server's certificates and keys either.
    command.env("ORLOP_CERT_FILE", "/none/server.crt").env("ORLOP_KEY_FILE", "/none/server.key");
    command.env("ORLOP_AUTH_TOKEN", "jwt,sign-method=RS256,pub-key=/none/jwt.pub,priv-key=/none/jwt.key");
    command
}

/// Runs a command. Returns its exit status, its standard output and its error.
async fn run(arguments: &[&str]) -> (i32, String, String) {
    let Output { status, stdout, stderr } = run_async(command(arguments)).await;
    let text = |bytes: Vec<u8>| String::from_utf8(bytes).expect("the output is UTF-8");
    (status.code().expect("an exit status"), text(stdout), text(stderr))
}

/// Runs a command on a running server.
pub(super) async fn at(server: &Server, arguments: &[&str]) -> (i32, String, String) {
    run(&[arguments, &["--endpoints", server.endpoint()]].concat()).await
}

/// Revisions 2 to 6; everything before 6 is compacted.
pub(super) async fn fill(client: &mut Client) {
    client.put("/a/1", "one\ntwo").await;
    client.put("/a/2", r#"{"b": 1}"#).await;
    client.put("/a/1", "one\nthree").await;
    client.kv.delete_range(delete("/a/2")).await.expect("a delete");
    client.put("/c", "\u{1b}[31mred").await;
    client.kv.compact(CompactionRequest { revision: 6, physical: true }).await.expect("a compaction");
}

/// Removes the times, which differ.
pub(super) fn without_times(text: &str) -> String {
    let line = |line: &str| match line.split_once("  ") {
        Some((revision, rest)) if revision.starts_with("revision ") => {
            let rest = rest.split_once("  ").map_or(rest, |(_, rest)| rest);
            format!("{revision}  {rest}\n")
        }
        _ => format!("{line}\n"),
    };
    text.lines().map(line).collect()
}

const VERSIONS: &str = "\
revision 2  created  7 bytes  /a/1
    one
    two
revision 3  created  8 bytes  /a/2
    {
      \"b\": 1
    }
revision 4  version 2  9 bytes  /a/1
    @@ -1,2 +1,2 @@
     one
    -two
    +three
revision 5  deleted  /a/2
";

async fn commands_show_the_past(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    let brief = "revision 2  created  7 bytes  /a/1\nrevision 4  version 2  9 bytes  /a/1\n";
    // Arguments, exit status, output.
    let table: &[(&[&str], i32, &str)] = &[
        (&["history", "/a/"], 0, VERSIONS),
        (&["history", "--prefix", "/a"], 0, VERSIONS),
        (&["history", "/a/1", "--brief"], 0, brief),
        (&["history", "--since", "5", "--brief"], 0, "revision 5  deleted  /a/2\nrevision 6  created  8 bytes  /c\n"),
        (&["history", "/a/1", "--brief", "--limit", "1"], 0, "revision 4  version 2  9 bytes  /a/1\n"),
        (&["history", "/a/1", "--since", "3", "--brief"], 0, "revision 4  version 2  9 bytes  /a/1\n"),
        (&["history", "/none"], 1, ""),
        (&["history", "/a/", "--since", "6"], 1, ""),
        (&["get", "/a/1", "--at", "2"], 0, "one\ntwo\n"),
        (&["get", "/a/1", "--at", "2", "--raw"], 0, "one\ntwo\n"),
        (&["get", "/a/1"], 0, "one\nthree\n"),
        (&["get", "/a/2"], 1, ""),
        (&["get", "/a/", "--at", "4", "--keys-only"], 0, "/a/1\n/a/2\n"),
        (&["get", "/c"], 0, "\\x1b[31mred\n"),
        (&["get", "", "--prefix", "--keys-only"], 0, "/a/1\n/c\n"),
        (&["diff", "/a/", "--from", "4", "--to", "4"], 0, ""),
        (
            &["diff", "/a/", "--from", "3", "--keys-only"],
            1,
            "\
changed  /a/1  revision 2 -> 4
deleted  /a/2  revision 3 -> -
",
        ),
        (&["diff", "--from", "4", "--keys-only"], 1, "deleted  /a/2  revision 3 -> -\nadded    /c  revision - -> 6\n"),
        (&["diff", "/a/1", "--from", "2", "--color", "always"], 1, "changed  /a/1  revision 2 -> 4\n"),
        (
            &["rewind", "/a/", "--to", "3", "--dry-run", "--keys-only"],
            1,
            "\
changed  /a/1  revision 4 -> 2
added    /a/2  revision - -> 3
2 puts and 0 deletes bring back the state of revision 3
",
        ),
    ];
    for (arguments, status, expected) in table {
        let (found, text, error) = at(&server, arguments).await;
        // An empty output is explained.
        let not_found = match arguments {
            ["get", key] => {
                format!("orlop: the key {key} did not exist at revision 6; a prefix ends with / or needs --prefix\n")
            }
            _ => "orlop: nothing found for the ".to_owned(),
        };
        let is_named = error.starts_with(&not_found) && error.lines().count() == 1;
        assert!(if (*status, *expected) == (1, "") { is_named } else { error.is_empty() }, "{arguments:?}: {error}");
        assert_eq!(found, *status, "{arguments:?}: {text}");
        match arguments {
            // Colours only: the lines are as above.
            [.., "always"] => assert!(text.starts_with(expected) && text.contains("\u{1b}[3"), "{text:?}"),
            [.., "--raw"] => assert_eq!(format!("{text}\n"), *expected),
            _ => assert_eq!(without_times(&text), *expected, "{arguments:?}"),
        }
    }
}

async fn times_are_answered_with_their_revisions(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    // Times are recorded once a second.
    eventually("the time of the last change", async || {
        let found = at(&server, &["get", "/c", "--at", "1ms"]).await;
        if found.0 == 0 { Ok(()) } else { Err(found) }
    })
    .await;
    let table: &[(&[&str], &str, &str)] = &[
        (&["get", "/a/1", "--at", "1ms", "--raw"], "one\nthree", "at revision 6, the newest one at TIME"),
        (
            &["get", "/a/2", "--at", "1ms"],
            "",
            "the key /a/2 did not exist at revision 6, the newest one at TIME; a prefix ends with / or needs --prefix",
        ),
        (
            &["diff", "/a/", "--from", "4", "--to", "1ms", "--keys-only"],
            "deleted  /a/2  revision 3 -> -\n",
            "to revision 6, the newest one at TIME",
        ),
        (&["diff", "--from", "1ms"], "", "from revision 6, the newest one at TIME"),
    ];
    for (arguments, expected, sentence) in table {
        let (_, text, error) = at(&server, arguments).await;
        let error = match error.split_once("the newest one at ") {
            Some((before, after)) => {
                format!("{before}the newest one at TIME{}", &after["2026-11-26T14:02:00Z".len()..])
            }
            None => error,
        };
        assert_eq!((&*text, error), (*expected, format!("orlop: {sentence}\n")), "{arguments:?}");
    }
    // In JSON, the objects have the revision.
    let table: &[(&[&str], &str)] = &[
        (&["get", "/a/1", "--at", "1ms"], "atRevision"),
        (&["diff", "/a/", "--from", "3", "--to", "1ms"], "toRevision"),
    ];
    for (arguments, name) in table {
        let (_, text, error) = at(&server, &[*arguments, &["-w", "json"]].concat()).await;
        let object = text.lines().next().and_then(|line| serde_json::from_str::<Value>(line).ok()).expect("an object");
        assert_eq!((&object[name], &*error), (&Value::from(6), ""), "{arguments:?}: {text}");
    }
}

async fn json_is_one_object_per_line(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    let objects = async |arguments: &[&str]| -> Vec<Value> {
        let (_, text, error) = at(&server, &[arguments, &["-w", "json"]].concat()).await;
        assert_eq!(error, "");
        text.lines().map(|line| serde_json::from_str(line).expect("a line is JSON")).collect()
    };
    // Times are recorded once a second.
    let versions = eventually("the time of the last change", async || {
        let versions = objects(&["history", "/a/2"]).await;
        if versions[1]["time"].is_string() { Ok(versions) } else { Err(versions) }
    })
    .await;
    assert_eq!(versions.len(), 2);
    assert_eq!((&versions[0]["value"]["b"], &versions[0]["form"]), (&Value::from(1), &Value::from("json")));
    assert_eq!((&versions[1]["type"], &versions[1]["modRevision"]), (&Value::from("delete"), &Value::from(5)));
    assert!(versions[0]["time"].as_str().is_some_and(|time| time.ends_with('Z')), "{versions:?}");
    let differences = objects(&["diff", "/a/", "--from", "3"]).await;
    assert_eq!((&differences[1]["key"], &differences[1]["new"]), (&Value::from("/a/2"), &Value::Null));
    client.put("/s", r#"{"kind":"Secret","stringData":{"a":"one"}}"#).await;
    client.put("/s", r#"{"kind":"Secret","stringData":{"a":"two"}}"#).await;
    client.put("/s", r#"{"kind":"Secret","stringData":{"a":"two"}}"#).await;
    for (from, to, is_changed) in [("7", "8", true), ("8", "9", false)] {
        let differences = objects(&["diff", "/s", "--from", from, "--to", to]).await;
        assert_eq!(differences[0]["old"]["value"], differences[0]["new"]["value"], "both are masked");
        assert_eq!(differences[0]["valueChanged"], Value::from(is_changed), "{from} to {to}");
    }
    let plan = objects(&["rewind", "/a/", "--to", "3", "--dry-run"]).await;
    assert_eq!((&plan[2]["type"], &plan[2]["puts"]), (&Value::from("summary"), &Value::from(2)));
}

async fn invalid_arguments_are_refused(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &[]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    let empty: &[&str] = &["KEY is empty: give a key, or --prefix for all keys"];
    let keep = "the server keeps compacted rows if it runs with --history-retention";
    let table: &[(&[&str], &[&str])] = &[
        (&["get", "/a/1", "--at", "5"], &["revision 5 is older than the history, which begins at revision 6", keep]),
        (&["get", "/a/1", "--at", "99"], &["revision 99 does not exist; the newest one is 6"]),
        (&["get", "/a/1", "--at", "yesterday"], &["use a revision (1234), a duration before now (2h, 30m)"]),
        (&["get", "/a/1", "--at", "1h"], &["the server records no times", "--history-retention"]),
        (&["get", "/a/", "--raw"], &["--raw is for a single key"]),
        (&["get", "a\\q"], &["the escapes are \\xNN and \\\\"]),
        (&["history", "/a/", "--limit", "1"], &["--limit is for a single key; use --since for a prefix"]),
        (&["rewind", "", "--to", "6", "--yes"], empty),
        (&["rewind", "", "--to", "6", "--yes", "--exact"], empty),
        (&["diff", "", "--from", "6"], empty),
        (&["get", ""], empty),
        (&["get", "--at", "6"], &["required", "KEY"]),
        (&["rewind", "--to", "6", "--yes"], &["required", "KEY"]),
        (&["diff", "--from", "6", "--exact"], &["required", "KEY"]),
        (&["history", ""], empty),
        (&["rewind", "/a/1", "--to", "7"], &["revision 7 does not exist"]),
        (&["rewind", "/a/1", "--to", "2100-01-01"], &["2100-01-01T00:00:00Z is in the future; times are in UTC"]),
        (&["get", "/a", "--data-dir", "/nowhere"], &["/nowhere/orlop.db"]),
    ];
    for (arguments, texts) in table {
        let (status, text, error) = at(&server, arguments).await;
        assert_eq!((status, &*text), (2, ""), "{arguments:?}: {error}");
        assert!(texts.iter().all(|part| error.contains(part)), "{arguments:?}: {error}");
    }
}

async fn rewind_writes_the_past_state(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let lease = client.lease.lease_grant(LeaseGrantRequest { id: 7, ttl: 600 }).await.expect("a lease").into_inner().id;
    client.kv.put(PutRequest { lease, ..put("/k/0", "leased") }).await.expect("a put");
    for number in 1..300 {
        client.put(format!("/k/{number}"), number.to_string()).await;
    }
    let past = server_pairs(&mut client).await;
    let revision = head(&mut client).await.to_string();
    let all = DeleteRangeRequest { key: "/k/".into(), range_end: "/k0".into(), ..Default::default() };
    client.kv.delete_range(all).await.expect("a delete");
    client.put("/k/new", "new").await;
    let newest = head(&mut client).await;
    client.kv.compact(CompactionRequest { revision: newest, physical: true }).await.expect("a compaction");

    let refused = at(&server, &["rewind", "/k/", "--to", &revision]).await;
    assert!(refused.0 == 2 && refused.2.contains("use --yes to write, or --dry-run"), "{refused:?}");
    let too_many = ["rewind", "/k/", "--to", &revision, "--yes", "--keys-only", "--txn-ops", "1000"];
    let (status, _, error) = at(&server, &too_many).await;
    let again = format!("run the command again with --to {revision} to continue");
    assert!(status == 2 && error.contains(&again), "{error}");
    assert_eq!(head(&mut client).await, newest, "nothing was written");
    // 301 operations are three transactions.
    let done = at(&server, &["rewind", "/k/", "--to", &revision, "--yes", "--keys-only"]).await;
    let last = format!(
        "300 puts and 1 deletes written, up to revision {}, to bring back the state of revision {revision}\n",
        newest + 3
    );
    assert!(done.0 == 0 && done.1.ends_with(&last), "{done:?}");
    assert_eq!(server_pairs(&mut client).await, past);
    let again = at(&server, &["rewind", "/k/", "--to", &revision, "--yes"]).await;
    assert_eq!(again, (0, format!("nothing to do: the state is that of revision {revision}\n"), String::new()));
}

/// Returns key, value and lease of all pairs.
async fn server_pairs(client: &mut Client) -> Vec<(Vec<u8>, Vec<u8>, i64)> {
    let kvs = client.kv.range(all()).await.expect("a range").into_inner().kvs;
    kvs.into_iter().map(|kv| (kv.key.to_vec(), kv.value.to_vec(), kv.lease)).collect()
}

pub(super) async fn head(client: &mut Client) -> i64 {
    client.kv.range(get("\0")).await.expect("a range").into_inner().header.expect("a header").revision
}

/// While a rewind runs, others write. Each version that the rewind wrote must replace exactly the version that its plan
/// has shown. Repeated until a write of another client came between plan and write.
async fn rewind_overwrites_no_change_of_others(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let key = |number: usize| format!("/k/{number:03}");
    for number in 0..100 {
        client.put(key(number), "old").await;
    }
    let past = head(&mut client).await;
    for _ in 0..20 {
        for number in 0..100 {
            client.put(key(number), "new").await;
        }
        let before = head(&mut client).await;
        let is_done = AtomicBool::new(false);
        let rewinding = async {
            let past = past.to_string();
            let arguments = ["rewind", "/k/", "--to", &past, "--yes", "--keys-only", "--txn-ops", "2"];
            let ended = at(&server, &arguments).await;
            is_done.store(true, Ordering::Relaxed);
            ended
        };
        let mut other = Client::connect(server.endpoint()).await;
        let writing = async {
            for number in (0..100).rev().cycle() {
                other.put(key(number), "other").await;
                if is_done.load(Ordering::Relaxed) {
                    return;
                }
            }
        };
        let ((status, text, error), ()) = tokio::join!(rewinding, writing);
        assert_eq!(error, "");
        let conflicts = text.lines().filter(|line| line.starts_with("conflict")).count();
        assert_eq!(status, i32::from(conflicts > 0), "{text}");
        let not_written = text.lines().filter(|line| line.ends_with("are not written")).count();
        for (number, planned) in planned_revisions(&text) {
            let versions = changes_of((number.as_bytes(), b""), 0, 0);
            let versions = changes(&mut client, versions).await.expect("changes").0;
            for pair in versions.windows(2) {
                let is_rewound = pair[1].0 > before && pair[1].2.as_ref().is_some_and(|kv| kv.value == "old");
                assert!(!is_rewound || pair[0].0 == planned, "{number}: planned {planned}, {pair:?}");
            }
        }
        if not_written > 0 {
            let again = format!("run the command again with --to {past} to write the rest\n");
            assert!(text.ends_with(&again), "{text}");
            return;
        }
    }
    panic!("no write came between the plan and the writes of a rewind");
}

/// Returns the keys that a rewind has planned to change, and the revisions that it has shown.
fn planned_revisions(text: &str) -> Vec<(String, i64)> {
    let planned = text.lines().filter(|line| line.starts_with("changed")).map(|line| {
        let words: Vec<&str> = line.split_whitespace().collect();
        (words[1].to_owned(), words[3].parse().expect("a revision"))
    });
    planned.collect()
}

async fn stopped_database_is_read(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    let place = match server.datastore() {
        Some(datastore) => ["--datastore-endpoint".to_owned(), datastore.to_owned()],
        None => ["--data-dir".to_owned(), server.data_dir().display().to_string()],
    };
    let place: Vec<&str> = place.iter().map(String::as_str).collect();
    server.terminate().await;
    let (status, text, error) = run(&[&["history", "/a/"], &place[..]].concat()).await;
    assert_eq!((status, &*error, &*without_times(&text)), (0, "", VERSIONS));
    let (status, text, error) = run(&[&["rewind", "/a/", "--to", "3", "-y", "--keys-only"], &place[..]].concat()).await;
    assert_eq!((status, &*error), (0, ""), "{text}");
    let last = "2 puts and 0 deletes written, up to revision 7, to bring back the state of revision 3\n";
    assert!(text.ends_with(last), "{text}");
    let (status, text, _) = run(&[&["get", "/a/2"], &place[..]].concat()).await;
    assert_eq!((status, &*text), (0, "{\n  \"b\": 1\n}\n"));
    // The history goes on where it was.
    server.restart().await;
    let (status, text, _) = at(&server, &["get", "/a/1", "--at", "2"]).await;
    assert_eq!((status, &*text), (0, "one\ntwo\n"));
}

async fn followed_history_prints_new_versions(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &[]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put("/a/1", "one").await;
    let mut process = command(&["history", "/a/", "--follow", "--brief", "--endpoints", server.endpoint()]);
    let mut process = process.stdout(std::process::Stdio::piped()).spawn().expect("orlop starts");
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let mut line =
        async || timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("a line").expect("a line");
    assert_eq!(without_times(&line().await), "revision 2  created  3 bytes  /a/1\n");
    client.put("/b", "elsewhere").await;
    client.put("/a/1", "three").await;
    let version = line().await;
    assert_eq!(without_times(&version), "revision 4  version 2  5 bytes  /a/1\n");
    assert!(version.starts_with("revision 4  by 2"), "the time is the latest possible one: {version}");
    // The next version cannot be written.
    drop(lines);
    client.put("/a/1", "nobody reads this").await;
    let status = timeout(DEADLINE, process.wait()).await.expect("in time").expect("an exit status");
    assert!(status.success(), "{status}");
}

async fn values_that_cannot_be_written_are_an_error(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &[]).await else { return };
    Client::connect(server.endpoint()).await.put("/a/1", "one").await;
    for flags in [&[][..], &["--raw"]] {
        let full = std::fs::OpenOptions::new().write(true).open("/dev/full").expect("a device of Linux");
        let mut get = command(&[&["get", "/a/1", "--endpoints", server.endpoint()][..], flags].concat());
        let get = get.stdout(full).stderr(std::process::Stdio::piped()).spawn().expect("orlop starts");
        let ended = timeout(DEADLINE, get.wait_with_output()).await.expect("in time").expect("an output");
        let error = String::from_utf8_lossy(&ended.stderr);
        assert!(ended.status.code() == Some(2) && error.contains("No space left"), "{flags:?}: {error}");
    }
}

async fn past_needs_the_right_to_read(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &[&KEEP[..], &["--bcrypt-cost", "4"]].concat()).await else {
        return;
    };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    for name in ["root", "user"] {
        let user = AuthUserAddRequest { name: name.to_owned(), password: "secret".to_owned(), ..Default::default() };
        client.auth.user_add(user).await.expect("a user");
        client.auth.role_add(AuthRoleAddRequest { name: name.to_owned() }).await.expect("a role");
        let grant = AuthUserGrantRoleRequest { user: name.to_owned(), role: name.to_owned() };
        client.auth.user_grant_role(grant).await.expect("a grant");
    }
    // The user may not read the key of this lease.
    client.lease.lease_grant(LeaseGrantRequest { id: 7, ttl: 1_000 }).await.expect("a lease");
    client.kv.put(PutRequest { lease: 7, ..put("/other", "") }).await.expect("a put");
    let perm = Some(Permission { perm_type: 0, key: "/a/".into(), range_end: "/a0".into() });
    let grant = AuthRoleGrantPermissionRequest { name: "user".to_owned(), perm };
    client.auth.role_grant_permission(grant).await.expect("a permission");
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("authentication is enabled");
    let table: &[(&[&str], i32, &str)] = &[
        (&["get", "/a/1", "--at", "2"], 2, "user name is empty"),
        (&["get", "/a/1", "--at", "2", "--user", "user:wrong"], 2, "authentication failed"),
        (&["get", "/a/1", "--at", "2", "--user", "user:secret"], 0, ""),
        (&["history", "/a/", "--user", "user:secret"], 0, ""),
        (&["diff", "/a/", "--from", "2", "--user", "user:secret"], 1, ""),
        (&["get", "/c", "--user", "user:secret"], 2, "permission denied"),
        (&["history", "/", "--user", "user:secret"], 2, "permission denied"),
        (&["rewind", "/a/", "--to", "2", "--dry-run", "--user", "user:secret"], 1, ""),
        (&["rewind", "/a/", "--to", "2", "-y", "--user", "user:secret"], 2, "permission denied"),
        (&["rewind", "/a/", "--to", "2", "-y", "--user", "root:secret"], 0, ""),
    ];
    for (arguments, status, error) in table {
        let found = at(&server, arguments).await;
        assert!(found.0 == *status && found.2.contains(error), "{arguments:?}: {found:?}");
    }
}

on_both_backends!(
    commands_show_the_past,
    times_are_answered_with_their_revisions,
    json_is_one_object_per_line,
    invalid_arguments_are_refused,
    rewind_writes_the_past_state,
    rewind_overwrites_no_change_of_others,
    stopped_database_is_read,
    followed_history_prints_new_versions,
    values_that_cannot_be_written_are_an_error,
    past_needs_the_right_to_read,
);
