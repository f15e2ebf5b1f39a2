//! `orlop history` where the history begins, while it follows, and when it is interrupted.

use std::{process::Stdio, time::Duration};

use orlop_wire::proto::client::etcdserverpb::{
    AuthEnableRequest, AuthRoleAddRequest, AuthUserAddRequest, AuthUserGrantRoleRequest, CompactionRequest,
};
use rustix::process::Signal;
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    process::{Child, Command},
    time::{sleep, timeout},
};

use super::{
    KEEP,
    commands::{at, command, fill, without_times},
};
use crate::{
    auth::{CHEAP, act_as, enable, password},
    support::{Backend, Client, DEADLINE, Server, eventually, home, on_both_backends, orlop_program, send_signal},
};

async fn oldest_readable_version_is_printed(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &[]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    fill(&mut client).await;
    let (status, text, error) = at(&server, &["history", "/a/1"]).await;
    let oldest = "revision 4  version 2  9 bytes  /a/1\n    one\n    three\n";
    let no_times = "orlop: the server records no times; it does if it runs with --history-retention\n";
    assert!(text.contains("time unknown"), "{text}");
    assert_eq!((status, &*without_times(&text), &*error), (0, oldest, no_times));
    client.put("/a/1", "one\nfour").await;
    let newest = "revision 7  version 3  8 bytes  /a/1\n    @@ -1,2 +1,2 @@\n     one\n    -three\n    +four\n";
    let both = [oldest, newest].concat();
    let nothing = "orlop: nothing found for the key /a/2; a prefix ends with / or needs --prefix\n";
    // Arguments, exit status, output, error.
    let table: &[(&[&str], i32, &str, &str)] = &[
        (&["history", "/a/1"], 0, &both, no_times),
        (&["history", "/a/1", "--limit", "2"], 0, &both, no_times),
        (&["history", "/a/1", "--limit", "1"], 0, newest, no_times),
        (&["history", "/a/1", "--since", "6"], 0, newest, no_times),
        (&["history", "/a/2"], 1, "", nothing),
        (&["history", "/c", "--brief"], 0, "revision 6  created  8 bytes  /c\n", no_times),
    ];
    for (arguments, status, expected, error) in table {
        let (found, text, said) = at(&server, arguments).await;
        assert_eq!((found, &*without_times(&text), &*said), (*status, *expected, *error), "{arguments:?}");
    }
    let (status, text, error) = at(&server, &["history", "/a/"]).await;
    assert_eq!((status, &*without_times(&text)), (0, newest));
    assert!(error.contains("the history begins at revision 6"), "{error}");
}

async fn time_before_the_recorded_ones_is_a_warning(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &[]).await else { return };
    fill(&mut Client::connect(server.endpoint()).await).await;
    let (status, text, error) = at(&server, &["history", "/c", "--brief", "--since", "1h"]).await;
    assert_eq!((status, &*without_times(&text)), (0, "revision 6  created  8 bytes  /c\n"));
    assert!(error.contains("no revision is known for") && error.contains("all known versions are printed"), "{error}");
    assert_eq!(error.matches("records no times").count(), 1, "{error}");
}

/// The version before the new one is read when the token of the command has expired.
async fn expired_token_is_renewed(backend: Backend) {
    let flags = ["--auth-token-ttl", "3", "--bcrypt-cost", "4"];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put("/a/1", "one\ntwo").await;
    client.put("/a/2", "two").await;
    let root = || "root".to_owned();
    let user = AuthUserAddRequest { name: root(), password: "secret".to_owned(), ..Default::default() };
    client.auth.user_add(user).await.expect("a user");
    client.auth.role_add(AuthRoleAddRequest { name: root() }).await.expect("a role");
    client.auth.user_grant_role(AuthUserGrantRoleRequest { user: root(), role: root() }).await.expect("a grant");
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("authentication is enabled");
    let follow = ["history", "/a/", "--since", "3", "--follow", "--user", "root:secret"];
    let mut process = command(&[&follow[..], &["--endpoints", server.endpoint()]].concat());
    let mut process = process.stdout(Stdio::piped()).spawn().expect("orlop starts");
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let mut text = async |count: usize| {
        let mut text = String::new();
        for _ in 0..count {
            let line = timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("a line");
            text += &format!("{}\n", line.expect("a line"));
        }
        without_times(&text)
    };
    assert_eq!(text(2).await, "revision 3  created  3 bytes  /a/2\n    two\n");
    sleep(Duration::from_secs(5)).await;
    let token = client.log_in("root", "secret").await.expect("a token");
    client.act_with(Some(&token));
    client.put("/a/1", "one\nthree").await;
    let changed = "revision 4  version 2  9 bytes  /a/1\n    @@ -1,2 +1,2 @@\n     one\n    -two\n    +three\n";
    assert_eq!(text(5).await, changed);
}

/// The past is longer than a pipe holds, and is read when the token of the command has expired.
async fn watch_begins_with_a_new_token(backend: Backend) {
    let flags = [&CHEAP[..], &["--auth-token-ttl", "3"]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put("/a/1", "a line of text\n".repeat(10_000)).await;
    enable(&mut client).await;
    let follow = ["history", "/a/", "--follow", "--user", "root", "--password", &password("root")];
    let mut process = command(&[&follow[..], &["--endpoints", server.endpoint()]].concat());
    let mut process = process.stdout(Stdio::piped()).spawn().expect("orlop starts");
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let mut heading = async || {
        while let Some(line) = timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("a line") {
            if line.starts_with("revision ") {
                return without_times(&format!("{line}\n"));
            }
        }
        String::new()
    };
    assert!(heading().await.starts_with("revision 2  created"));
    sleep(Duration::from_secs(5)).await;
    act_as(&mut client, "root").await;
    client.put("/a/2", "two").await;
    assert_eq!(heading().await, "revision 3  created  3 bytes  /a/2\n");
}

/// Starts a command that prints new versions.
fn follower(server: &Server, flags: &[&str]) -> Child {
    let follow = ["history", "/a/", "--follow", "--brief", "--endpoints", server.endpoint()];
    let mut process = command(&[&follow[..], flags].concat());
    process.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().expect("orlop starts")
}

/// The revision in the error is the next one, which may not exist yet.
async fn error_of_a_follower_tells_how_to_go_on(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &[]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.put("/a/1", "one").await;
    let mut process = follower(&server, &[]);
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let mut line = async || {
        let line = timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("a line");
        without_times(&format!("{}\n", line.expect("a line")))
    };
    assert_eq!(line().await, "revision 2  created  3 bytes  /a/1\n");
    client.put("/a/1", "two").await;
    assert_eq!(line().await, "revision 3  version 2  3 bytes  /a/1\n");
    server.terminate().await;
    let ended = timeout(DEADLINE, process.wait_with_output()).await.expect("in time").expect("an exit status");
    let error = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(2) && error.ends_with("; go on with --since 4\n"), "{error}");

    server.restart().await;
    let mut process = follower(&server, &["--since", "4"]);
    eventually("the watch of the command", async || {
        let streams = server.metric("etcd_debugging_mvcc_watch_stream_total").await;
        if streams == 1.0 { Ok(()) } else { Err(streams) }
    })
    .await;
    Client::connect(server.endpoint()).await.put("/a/1", "three").await;
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let line = timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("a line").expect("a line");
    assert_eq!(without_times(&format!("{line}\n")), "revision 4  version 3  5 bytes  /a/1\n");
}

async fn interrupted_command_leaves_no_folder(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &[]).await else { return };
    Client::connect(server.endpoint()).await.put("/a/1", "one").await;
    let (flag, place) = match server.datastore() {
        Some(datastore) => ("--datastore-endpoint", datastore.to_owned()),
        None => ("--data-dir", server.data_dir().display().to_string()),
    };
    server.terminate().await;
    // The tests may run with SIGHUP ignored.
    let (usual, nohup) = (&["env", "--default-signal=HUP"][..], &["nohup"][..]);
    for (starter, signals, status) in [
        (usual, &[Signal::INT][..], 130),
        (usual, &[Signal::TERM], 143),
        (usual, &[Signal::HUP], 129),
        (nohup, &[Signal::HUP, Signal::TERM], 143),
    ] {
        let folder = home();
        let mut process = Command::new(starter[0]);
        process.args(&starter[1..]).arg(orlop_program()).args(["history", "/a/", "--follow", flag, &place]);
        process.env("TMPDIR", folder.path()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = process.spawn().expect("orlop starts");
        let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let line = timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("a line");
        assert!(line.is_some_and(|line| line.starts_with("revision 2")));
        for signal in signals {
            send_signal(process.id().expect("the command runs"), *signal);
        }
        let ended = timeout(DEADLINE, process.wait()).await.expect("in time").expect("an exit status");
        assert_eq!(ended.code(), Some(status), "{starter:?} {signals:?}");
        assert_eq!(std::fs::read_dir(folder.path()).expect("a folder").count(), 0, "{starter:?} {signals:?}");
    }
}

/// The past is longer than a pipe holds, so the watch begins only after the output was read, and the compaction.
async fn slow_reader_gets_all_versions_in_spite_of_a_compaction(backend: Backend) {
    for flags in [&KEEP[..], &[]] {
        let Some(server) = Server::orlop_with(backend, flags).await else { return };
        let mut client = Client::connect(server.endpoint()).await;
        for number in 0..30 {
            client.put(format!("/big/{number}"), "a line of text\n".repeat(1_400)).await;
        }
        let mut process = command(&["history", "/big/", "--follow", "--endpoints", server.endpoint()]);
        let process = process.stdout(Stdio::piped()).stderr(Stdio::piped());
        let mut process = process.spawn().expect("orlop starts");
        let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
        let mut revision = async || {
            while let Some(line) = timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("a line") {
                if let Some(rest) = line.strip_prefix("revision ") {
                    return rest.split(' ').next()?.parse::<i64>().ok();
                }
            }
            None
        };
        assert_eq!(revision().await, Some(2));
        for key in ["/big/late", "/other", "/big/late"] {
            client.put(key, "value").await;
        }
        client.kv.compact(CompactionRequest { revision: 34, physical: true }).await.expect("a compaction");
        for expected in 3..=31 {
            assert_eq!(revision().await, Some(expected));
        }
        if flags.is_empty() {
            assert_eq!(revision().await, None);
            let ended = timeout(DEADLINE, process.wait_with_output()).await.expect("in time").expect("an exit status");
            let error = String::from_utf8_lossy(&ended.stderr);
            let expected = "revisions 32 to 33 were compacted meanwhile, and their versions are not known";
            assert!(ended.status.code() == Some(2) && error.contains(expected), "{error}");
            assert!(error.contains("--history-retention"), "{error}");
            continue;
        }
        assert_eq!((revision().await, revision().await), (Some(32), Some(34)));
        client.put("/big/late", "another value").await;
        assert_eq!(revision().await, Some(35));
        // The watch that the compaction has ended leaves no stream open.
        eventually("the end of the first stream", async || {
            let streams = server.metric("etcd_debugging_mvcc_watch_stream_total").await;
            if streams == 1.0 { Ok(()) } else { Err(streams) }
        })
        .await;
    }
}

on_both_backends!(
    slow_reader_gets_all_versions_in_spite_of_a_compaction,
    oldest_readable_version_is_printed,
    time_before_the_recorded_ones_is_a_warning,
    expired_token_is_renewed,
    watch_begins_with_a_new_token,
    error_of_a_follower_tells_how_to_go_on,
    interrupted_command_leaves_no_folder,
);
