//! The commands that report and maintain: `orlop status`, `version`, `defrag`, and the last line of `check`. Others have
//! their own modules: `backup`, `hashkv`, `check`, `bench`.

use std::{fs, io, process::Stdio};

use orlop_wire::proto::client::etcdserverpb::{AlarmRequest, CompactionRequest, DeleteRangeRequest, LeaseGrantRequest};
use serde_json::Value;
use tempfile::TempDir;

use crate::{
    auth::{CHEAP, enable},
    insight::top,
    support::{Backend, Client, Server, Stream, ended, everything, on_both_backends, orlop, prints, run},
};

/// Runs Orlop, which must fail with an error that contains `because`.
#[track_caller]
fn check_fails(arguments: &[&str], because: &str) {
    let output = run(&mut orlop(arguments));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains(because), "{arguments:?}: no {because:?}: {text}");
}

/// Returns the JSON and the lines that `orlop status` prints.
fn status(endpoint: &str) -> (Value, String) {
    let json = prints(&["status", "--endpoints", endpoint, "-w", "json"]);
    (serde_json::from_str(&json).expect("JSON"), prints(&["status", "--endpoints", endpoint]))
}

async fn status_shows_the_state_of_a_server(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--quota-backend-bytes", "1GiB"]).await else { return };
    let (json, text) = status(server.endpoint());
    assert_eq!((&json["revision"], &json["compactRevision"], &json["keys"]), (&1.into(), &(-1).into(), &0.into()));
    assert_eq!((&json["lastCompaction"], &json["lastSnapshot"]), (&0.into(), &0.into()));
    for line in [
        "compact revision  none",
        "last compaction   none since the start of the server",
        "last snapshot     none",
        "alarms, errors    none",
    ] {
        assert!(text.contains(&format!("{line}\n")), "no {line:?}: {text}");
    }

    let mut client = Client::connect(server.endpoint()).await;
    for key in ["a", "b", "b"] {
        client.put(key, [7; 10]).await;
    }
    client.kv.compact(CompactionRequest { revision: 3, physical: true }).await.expect("a compaction");
    client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: 7 }).await.expect("a lease");
    client.maintenance.alarm(AlarmRequest { action: 1, member_id: 1, alarm: 1 }).await.expect("an alarm can be raised");
    let mut stream = Stream::open(&mut client).await;
    stream.create(everything(0)).await;
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    prints(&["snapshot", "save", "--endpoints", server.endpoint(), file.to_str().expect("text")]);

    let (json, text) = status(server.endpoint());
    let database = if backend == Backend::Sqlite { "SQLite" } else { "Postgres" };
    for (name, want) in [
        ("endpoint", Value::from(server.endpoint())),
        ("orlopVersion", env!("CARGO_PKG_VERSION").into()),
        ("version", orlop::api::ETCD_VERSION.into()),
        ("database", database.into()),
        ("revision", 4.into()),
        ("compactRevision", 3.into()),
        ("keys", 2.into()),
        ("dbSizeQuota", (1 << 30).into()),
        ("instances", 1.into()),
        ("isLeader", true.into()),
        ("watchers", 1.into()),
        ("watchStreams", 1.into()),
        ("leases", 1.into()),
        ("alarms", vec!["memberID:1 alarm:NOSPACE"].into()),
    ] {
        assert_eq!(json[name], want, "{name}: {json}");
        assert!(!text.contains("unknown"), "{text}");
    }
    for name in ["dbSize", "dbSizeInUse", "lastCompaction", "lastSnapshot"] {
        assert!(json[name].as_i64().expect(name) > 0, "{name}: {json}");
    }
    // Which kinds are the slowest depends on the machine.
    let slowest = json["slowestRequests"].as_array().expect("a list");
    assert_eq!(slowest.len(), 3, "{json}");
    for kind in slowest {
        let puts = kind["request"] == "KV/Put";
        assert_eq!(kind["count"], if puts { 3 } else { 1 }, "{json}");
    }
    let database = format!("database          {database}\n");
    for line in [&*database, "of the quota 1.0 GiB\n", "kept history      none\n", ": p99 "] {
        assert!(text.contains(line), "no {line:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_of_etcd_has_unknown_properties() {
    let Some(etcd) = Server::etcd().await else { return };
    Client::connect(etcd.endpoint()).await.put("a", [7; 10]).await;
    let (json, text) = status(etcd.endpoint());
    assert_eq!((&json["revision"], &json["isLeader"], &json["leases"]), (&2.into(), &true.into(), &Value::Null));
    assert!(text.contains("version           etcd 3.") && text.contains("leases            unknown\n"), "{text}");
    check_fails(&["status", "--endpoints", "http://127.0.0.1:1"], "cannot connect");
    check_fails(&["status", "--endpoints", "nowhere"], "http://HOST:PORT");
}

/// etcdctl asks for it.
#[test]
fn user_without_a_password_is_an_error() {
    for command in [&["status"][..], &["history", "a"], &["bench", "put"]] {
        let arguments = [command, &["--user", "root"]].concat();
        check_fails(&arguments, "no password for the user root: use --user NAME:PASSWORD, --password");
    }
}

async fn commands_that_need_a_user_say_how_to_log_in(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    enable(&mut Client::connect(server.endpoint()).await).await;
    for command in ["status", "top"] {
        let hint = "etcdserver: user name is empty; log in: --user, or the variables ETCDCTL_USER and ETCDCTL_PASSWORD";
        check_fails(&[command, "--endpoints", server.endpoint()], hint);
    }
    assert_eq!(prints(&["status", "--ready", "--endpoints", server.endpoint()]), "ok\n");
    let as_user = ["--endpoints", server.endpoint(), "--user", "user:user's password"];
    assert!(prints(&[&["status"][..], &as_user].concat()).contains("revision "));
    assert!(top(&as_user).contains("revision "));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_does_not_wait_for_ever() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    server.pause();
    for arguments in [&["status"][..], &["status", "--ready"]] {
        check_fails(&[arguments, &["--endpoints", server.endpoint()]].concat(), "no answer within 10 s");
    }
}

#[test]
fn version_names_orlop_and_etcd() {
    let text = prints(&["version"]);
    let lines: Vec<&str> = text.lines().collect();
    let etcd = format!("etcd Version: {}", orlop::api::ETCD_VERSION);
    assert_eq!((lines[0], lines[2]), (concat!("Orlop Version: ", env!("CARGO_PKG_VERSION")), etcd.as_str()));
    assert!(lines.len() == 3 && lines[1].starts_with("Git SHA: "), "{text}");
}

#[test]
fn each_command_that_the_manual_names_has_a_page() {
    let folder = TempDir::new().expect("a folder");
    prints(&["man", folder.path().to_str().expect("text")]);
    let mut names = vec!["orlop".to_owned()];
    let mut pages = 0;
    while let Some(name) = names.pop() {
        let page = fs::read_to_string(folder.path().join(format!("{name}.1")));
        let page = page.unwrap_or_else(|error| panic!("{name}(1): {error}")).replace("\\-", "-");
        let named = page.lines().filter_map(|line| line.strip_suffix("(1)"));
        names.extend(named.filter(|name| name.starts_with("orlop-")).map(str::to_owned));
        pages += 1;
    }
    assert!(pages > 20, "{pages} pages");
}

#[test]
fn help_of_compare_lists_only_its_own_options() {
    let text = prints(&["bench", "compare", "--help"]);
    for listed in ["Servers:", "--servers", "Loads:", "--duration", "500ms", "Output:", "--json"] {
        assert!(text.contains(listed), "no {listed}: {text}");
    }
    for hidden in ["--endpoints", "--cacert", "--total", "--prefix", "Common options"] {
        assert!(!text.contains(hidden), "{hidden}: {text}");
    }
    assert!(prints(&["bench", "put", "--help"]).contains("--endpoints"));
    check_fails(&["bench", "compare", "--total", "3"], "--total has no effect here");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn defrag_returns_free_space_of_a_stopped_server() {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..40 {
        client.put(format!("k{number}"), vec![7; 100_000]).await;
    }
    let delete = DeleteRangeRequest { key: "k".into(), range_end: "k3".into(), ..Default::default() };
    let header = client.kv.delete_range(delete).await.expect("a delete").into_inner().header;
    let revision = header.expect("a header").revision;
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: 7 }).await.expect("a lease");
    let data = server.data_dir();
    let folder = data.to_str().expect("text").to_owned();
    check_fails(&["defrag", "--data-dir", &folder], "is in use by another orlop process");
    server.terminate().await;

    let size = || fs::metadata(data.join("orlop.db")).expect("the database").len();
    let (before, hash) = (size(), prints(&["hashkv", "--data-dir", &folder]));
    let text = prints(&["defrag", "--data-dir", &folder]);
    assert!(text.starts_with("defragmented sqlite://") && text.contains(" MiB before, "), "{text}");
    assert!(size() < before / 2, "{} of {before}", size());
    assert_eq!(prints(&["hashkv", "--data-dir", &folder]), hash);
    assert!(prints(&["check", "--data-dir", &folder]).ends_with("\nThe store is sound.\n"));
    let names: Vec<_> =
        fs::read_dir(&data).expect("the folder").map(|entry| entry.expect("an entry").file_name()).collect();
    assert!(names.iter().all(|name| name == "orlop.db" || name == "orlop.db.lock"), "{names:?}");
    server.restart().await;
    let (json, _) = status(server.endpoint());
    assert_eq!((&json["revision"], &json["leases"]), (&revision.into(), &1.into()));

    check_fails(&["defrag", "--data-dir", "/absent"], "/absent/orlop.db: the file does not exist");
    check_fails(&["defrag", "--datastore-endpoint", "postgres://a:b@localhost/c"], "defrag is for SQLite");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn check_finds_the_store_in_a_configuration_file() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("orlop.toml");
    let settings = format!("data-dir = {:?}\nlisten-client-urls = \"http://127.0.0.1:1\"\n", server.data_dir());
    fs::write(&file, settings).expect("a file can be written");
    let text = prints(&["check", "--config-file", file.to_str().expect("text")]);
    assert!(text.ends_with("\nThe store is sound.\n") && text.contains("orlop.db"), "{text}");
    check_fails(&["check", "--data-dir", "/absent"], "--config-file, --data-dir or --datastore-endpoint");
}

/// Runs Orlop without a reader of its output.
#[track_caller]
fn check_unread(arguments: &[&str], want: i32) {
    let (reader, writer) = io::pipe().expect("a pipe");
    drop(reader);
    let mut command = orlop(arguments);
    command.stdin(Stdio::null()).stdout(writer).stderr(Stdio::piped());
    let output = ended(command.spawn().expect("the program starts"));
    let errors = String::from_utf8_lossy(&output.stderr);
    assert_eq!((output.status.code(), &*errors), (Some(want), ""), "{arguments:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn output_that_nobody_reads_does_not_change_the_exit_status() {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    Client::connect(server.endpoint()).await.put("a", [7; 10]).await;
    let home = TempDir::new().expect("a folder");
    let path = |name: &str| home.path().join(name).to_str().expect("text").to_owned();
    let (saved, restored) = (path("saved.db"), path("restored"));
    let data = server.data_dir();
    let folder = data.to_str().expect("text");
    check_unread(&["snapshot", "save", "--endpoints", server.endpoint(), &saved], 0);
    server.terminate().await;
    check_unread(&["snapshot", "status", &saved], 0);
    check_unread(&["snapshot", "restore", &saved, "--data-dir", &restored], 0);
    check_unread(&["hashkv", "--data-dir", folder], 0);
    check_unread(&["check", "--data-dir", folder], 0);

    let database = fs::File::options().write(true).open(data.join("orlop.db")).expect("the database");
    let bytes = database.metadata().expect("the database").len();
    database.set_len(bytes - 4_096).expect("the database can be cut");
    check_unread(&["check", "--data-dir", folder], 1);
}

on_both_backends!(status_shows_the_state_of_a_server, commands_that_need_a_user_say_how_to_log_in);
