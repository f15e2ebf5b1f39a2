//! Snapshots that Orlop itself saves: `orlop snapshot save` of a running server, and the server at an interval.

use std::{
    collections::BTreeSet,
    fs,
    os::unix::fs::{FileTypeExt as _, MetadataExt as _, PermissionsExt as _, symlink},
    path::{Path, PathBuf},
    process::{Output, Stdio},
    time::SystemTime,
};

use rustix::{
    fs::{CWD, Mode, mkfifoat},
    process::Signal,
};
use tempfile::TempDir;
use tokio::{
    io::{AsyncReadExt as _, copy},
    net::{TcpListener, TcpStream},
    process::Command,
    time::timeout,
};

use crate::support::{
    Authority, Backend, Client, DEADLINE, Postgres, Server, etcd_tool, eventually, get, on_both_backends,
    orlop_program, run_async, send_signal, skip, text,
};

async fn run(program: &Path, arguments: &[&str]) -> Output {
    let mut command = Command::new(program);
    command.args(arguments);
    run_async(command).await
}

/// Runs Orlop, which must succeed, and returns its output.
async fn prints(arguments: &[&str]) -> String {
    let output = run(Path::new(&orlop_program()), arguments).await;
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Runs Orlop, which must fail with an error that contains `because`.
async fn check_fails(arguments: &[&str], because: &str) {
    let output = run(Path::new(&orlop_program()), arguments).await;
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains(because), "{arguments:?}: no {because:?}: {text}");
    assert!(!text.contains("panicked"), "{text}");
}

/// Returns the names of the files in a folder; none if it does not exist.
fn names(folder: &Path) -> BTreeSet<String> {
    let entries = fs::read_dir(folder).into_iter().flatten();
    entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("text")).collect()
}

/// Returns the snapshots in a folder, oldest first.
fn snapshots(folder: &Path) -> Vec<PathBuf> {
    let is_snapshot = |name: &&String| name.starts_with("orlop-2") && name.ends_with("Z.db");
    names(folder).iter().filter(is_snapshot).map(|name| folder.join(name)).collect()
}

async fn put(endpoint: &str, key: &str) -> i64 {
    Client::connect(endpoint).await.put(key, vec![7; 100_000]).await
}

/// Returns the revision of a snapshot, which must be valid.
async fn revision(file: &Path) -> i64 {
    try_revision(file).await.expect("a valid snapshot")
}

/// Returns the revision of a snapshot that may be deleted meanwhile.
async fn try_revision(file: &Path) -> Result<i64, String> {
    let arguments = ["snapshot", "status", text(file), "--write-out", "json"];
    let output = run(Path::new(&orlop_program()), &arguments).await;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned());
    }
    let status: serde_json::Value = serde_json::from_slice(&output.stdout).expect("JSON");
    Ok(status["revision"].as_i64().expect("a revision"))
}

async fn saved_file_is_complete_and_private(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let head = put(server.endpoint(), "a").await;
    assert_eq!(server.metric("orlop_snapshot_last_timestamp_seconds").await, 0.0);
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    fs::write(&file, "an older snapshot").expect("a file can be written");
    let printed = prints(&["snapshot", "save", "--endpoints", server.endpoint(), text(&file)]).await;
    assert_eq!(printed, format!("{}\n", file.display()));
    assert_eq!(names(home.path()), BTreeSet::from(["saved.db".to_owned()]), "no temporary file remains");
    assert_eq!(file.metadata().expect("a file").permissions().mode() & 0o777, 0o600);
    assert_eq!(revision(&file).await, head);
    assert!(server.metric("orlop_snapshot_last_timestamp_seconds").await > 0.0);
    assert_eq!(server.metric("orlop_snapshot_failures_total").await, 0.0);
}

async fn newest_files_in_a_folder_are_kept(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let home = TempDir::new().expect("a folder");
    let others = ["orlop.db", "orlop-20200101.db", "orlop-20200101T000000Z.db.copy", "notes"];
    let old = ["orlop-20200101T000000Z.db", "orlop-20210101T000000Z.db", "orlop-20220101T000000Z.db"];
    for name in others.iter().chain(&old) {
        fs::write(home.path().join(name), "").expect("a file can be written");
    }
    let endpoint = format!("--endpoints={}", server.endpoint());
    let printed = prints(&["snapshot", "save", &endpoint, "--keep=2", text(home.path())]).await;
    let file = PathBuf::from(printed.trim_end());
    assert_eq!(file.parent(), Some(home.path()));
    assert_eq!(revision(&file).await, 0);
    let new = file.file_name().and_then(|name| name.to_str()).expect("a name");
    let want: BTreeSet<String> = others.iter().chain(&[old[2], new]).map(|name| (*name).to_owned()).collect();
    assert_eq!(names(home.path()), want);

    // Without --keep, nothing is deleted.
    fs::write(home.path().join(old[0]), "").expect("a file can be written");
    prints(&["snapshot", "save", &endpoint, text(home.path())]).await;
    assert!(home.path().join(old[0]).exists());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_of_etcd_is_saved() {
    let Some(server) = Server::etcd().await else { return };
    let Some(etcdutl) = etcd_tool("etcdutl", "ORLOP_ETCDUTL") else { return skip("etcdutl") };
    put(server.endpoint(), "a").await;
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    prints(&["snapshot", "save", "--endpoints", server.endpoint(), text(&file)]).await;
    let restored = home.path().join("restored");
    for arguments in
        [&["snapshot", "status", text(&file)][..], &["snapshot", "restore", text(&file), "--data-dir", text(&restored)]]
    {
        let output = run(&etcdutl, arguments).await;
        assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_is_saved_with_a_client_certificate() {
    let Some(authority) = Authority::new() else { return };
    let (own, client) = (authority.sign("server", 30), authority.sign("client", 30));
    let root = authority.root();
    let flags = ["--listen-client-urls", "https://127.0.0.1:0", "--cert-file", text(&own.cert)];
    let flags = [&flags[..], &["--key-file", text(&own.key), "--trusted-ca-file", text(&root)]].concat();
    let server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let target = home.path().join("saved.db");
    let save = ["snapshot", "save", "--endpoints", server.endpoint(), text(&target)];
    let identity = ["--cert", text(&client.cert), "--key", text(&client.key)];
    check_fails(&save, "cannot connect").await;
    check_fails(
        &[&save[..], &["--cacert", text(&root)]].concat(),
        "the server requires a client certificate: use --cert and --key",
    )
    .await;
    check_fails(&[&save[..], &["--cacert", text(&home.path().join("absent"))]].concat(), "--cacert").await;
    assert_eq!(names(home.path()), BTreeSet::new());
    prints(&[&save[..], &["--cacert", text(&root)], &identity].concat()).await;
    assert_eq!(revision(&target).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failed_save_leaves_nothing() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    put(server.endpoint(), "a").await;
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    fs::write(&file, "an older snapshot").expect("a file can be written");
    let to = |endpoint: &str, path: &Path, more: &[&str]| {
        let arguments = [&["snapshot", "save", "--endpoints", endpoint, text(path)], more].concat();
        arguments.iter().map(|argument| (*argument).to_owned()).collect::<Vec<_>>()
    };
    let broken = broken_relay(server.endpoint()).await;
    let absent = home.path().join("absent/");
    for (arguments, because) in [
        (to("http://127.0.0.1:1", &file, &[]), "cannot connect"),
        (to(&broken, &file, &[]), "cannot save a snapshot"),
        (to("127.0.0.1", &file, &[]), "http://HOST:PORT"),
        (to("http://127.0.0.1:1,http://127.0.0.1:2", &file, &[]), "only one endpoint"),
        (to(server.endpoint(), &file, &["--keep", "3"]), "--keep needs a folder"),
        (to(server.endpoint(), home.path(), &["--keep", "0"]), "--keep"),
        (to(server.endpoint(), &absent, &[]), "does not exist"),
        (to(server.endpoint(), &absent.join("saved.db"), &[]), "absent"),
    ] {
        let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
        check_fails(&arguments, because).await;
    }
    assert_eq!(names(home.path()), BTreeSet::from(["saved.db".to_owned()]));
    assert_eq!(fs::read_to_string(&file).expect("the file can be read"), "an older snapshot");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_save_leaves_nothing() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    server.pause();
    for signal in [Signal::TERM, Signal::INT, Signal::HUP] {
        // The tests may run with SIGHUP ignored, as under nohup.
        let mut save = Command::new("env");
        save.arg("--default-signal=HUP").arg(orlop_program());
        save.args(["snapshot", "save", "--endpoints", server.endpoint(), text(home.path())]);
        let save = save.stderr(Stdio::piped()).kill_on_drop(true).spawn().expect("env is always there");
        eventually("a temporary file", async || names(home.path()).pop_first().ok_or(())).await;
        send_signal(save.id().expect("the process runs"), signal);
        let output = timeout(DEADLINE, save.wait_with_output()).await.expect("the command ends").expect("an output");
        let error = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && error.contains("nothing was saved"), "{signal:?}: {error}");
        assert_eq!(names(home.path()), BTreeSet::new(), "{signal:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn temporary_file_of_a_killed_save_is_deleted_by_a_later_one() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    let arguments = ["snapshot", "save", "--endpoints", server.endpoint(), text(&file)];
    server.pause();
    let mut save = Command::new(orlop_program()).args(arguments).kill_on_drop(true).spawn().expect("it starts");
    let left = eventually("a temporary file", async || names(home.path()).pop_first().ok_or(())).await;
    save.kill().await.expect("our child can be ended");
    server.resume();
    // The name is one that a user may choose.
    let others = ["orlop-snapshot-monday.db", "saved.db"].map(str::to_owned);
    let age = |name: &str| {
        let file = fs::File::options().create(true).append(true).open(home.path().join(name)).expect("a file");
        file.set_modified(SystemTime::UNIX_EPOCH).expect("the time can be set");
    };
    age(&others[0]);
    prints(&arguments).await;
    assert!(names(home.path()).contains(&left), "it may be in use");
    age(&left);
    prints(&arguments).await;
    assert_eq!(names(home.path()), BTreeSet::from(others));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn save_with_nohup_outlives_its_terminal() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    server.pause();
    let mut save = Command::new("nohup");
    save.arg(orlop_program()).args(["snapshot", "save", "--endpoints", server.endpoint(), text(&file)]);
    let save = save.stdout(Stdio::piped()).stderr(Stdio::piped()).kill_on_drop(true).spawn().expect("nohup starts");
    eventually("a temporary file", async || names(home.path()).pop_first().ok_or(())).await;
    send_signal(save.id().expect("the process runs"), Signal::HUP);
    server.resume();
    let output = timeout(DEADLINE, save.wait_with_output()).await.expect("the command ends").expect("an output");
    assert!(output.status.success(), "{output:?}");
    assert_eq!(revision(&file).await, 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn save_replaces_nothing_but_files() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let head = put(server.endpoint(), "a").await;
    let (home, other) = (TempDir::new().expect("a folder"), TempDir::new().expect("a folder"));
    let at = |name: &str| home.path().join(name);
    let pipe = at("pipe");
    mkfifoat(CWD, text(&pipe), Mode::RUSR | Mode::WUSR).expect("a pipe can be made");
    fs::write(other.path().join("old.db"), "an older snapshot").expect("a file can be written");
    // The link `chain` leads to a file through a relative one. The file of the link `new` does not exist yet.
    let links = [
        ("link", other.path().join("old.db")),
        ("chain", PathBuf::from("link")),
        ("new", other.path().join("new.db")),
        ("to-pipe", pipe.clone()),
        ("round", at("round")),
        ("folder", other.path().to_owned()),
    ];
    for (name, to) in &links {
        symlink(to, at(name)).expect("a link can be made");
    }
    let before = names(home.path());
    for (name, because) in [("pipe", "pipe is not a file"), ("to-pipe", "is not a file"), ("round", "symbolic links")] {
        check_fails(&["snapshot", "save", "--endpoints", server.endpoint(), text(&at(name))], because).await;
    }
    for (name, file) in [("chain", "old.db"), ("new", "new.db")] {
        let file = other.path().join(file);
        let printed = prints(&["snapshot", "save", "--endpoints", server.endpoint(), text(&at(name))]).await;
        assert_eq!(printed, format!("{}\n", file.display()));
        assert_eq!(revision(&file).await, head);
    }
    assert_eq!(names(other.path()), BTreeSet::from(["new.db".to_owned(), "old.db".to_owned()]));
    // A link to a folder is a folder, in which the file gets its name.
    prints(&["snapshot", "save", "--endpoints", server.endpoint(), text(&at("folder"))]).await;
    assert_eq!(snapshots(other.path()).len(), 1);
    assert_eq!(names(home.path()), before, "no temporary file remains");
    assert!(pipe.metadata().expect("the pipe").file_type().is_fifo());
    for (name, to) in &links {
        assert_eq!(at(name).read_link().ok().as_ref(), Some(to), "{name} is still a link");
    }
}

/// Returns the endpoint of a relay that passes the first 50,000 bytes of a server and then closes the connection.
async fn broken_relay(endpoint: &str) -> String {
    const PASSED_BYTES: u64 = 50_000;
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port is free");
    let address = listener.local_addr().expect("an address");
    let server = endpoint.strip_prefix("http://").expect("an http endpoint").to_owned();
    tokio::spawn(async move {
        while let Ok((mut client, _)) = listener.accept().await {
            let mut server = TcpStream::connect(&server).await.expect("the server accepts");
            let ((mut from_client, mut to_client), (from_server, mut to_server)) = (client.split(), server.split());
            let mut passed = from_server.take(PASSED_BYTES);
            tokio::select! {
                _ = copy(&mut from_client, &mut to_server) => {}
                _ = copy(&mut passed, &mut to_client) => {}
            }
        }
    });
    format!("http://{address}")
}

async fn server_saves_snapshots_at_an_interval(backend: Backend) {
    let home = TempDir::new().expect("a folder");
    let folder = home.path().join("new/backup");
    let schedule = ["--snapshot-interval", "1s", "--snapshot-retention", "2", "--snapshot-dir", text(&folder)];
    let flags = [&schedule[..], &["--snapshot-history", "--history-retention", "1h"]].concat();
    let Some(mut server) = Server::orlop_with(backend, &flags).await else { return };
    let head = put(server.endpoint(), "a").await;
    // The clock was set back after this snapshot.
    fs::create_dir_all(&folder).expect("a folder can be made");
    let future = folder.join("orlop-29990101T000000Z.db");
    fs::write(&future, "").expect("a file can be written");
    eventually(
        "a snapshot in spite of one in the future",
        async || {
            if snapshots(&folder).len() > 1 { Ok(()) } else { Err(()) }
        },
    )
    .await;
    fs::remove_file(&future).expect("the file is kept");
    let first = eventually("the first snapshot", async || snapshots(&folder).pop().ok_or(())).await;
    let mode = eventually("a snapshot of the last revision", async || {
        let newest = snapshots(&folder).pop().ok_or("none".to_owned())?;
        let metadata = newest.metadata().map_err(|error| error.to_string())?;
        let found = try_revision(&newest).await?;
        let is_last = newest > first && found == head;
        if is_last { Ok(metadata.permissions().mode() & 0o777) } else { Err(format!("{newest:?}: revision {found}")) }
    })
    .await;
    assert_eq!(mode, 0o600);
    eventually("the deletion of the first snapshot", async || if first.exists() { Err(()) } else { Ok(()) }).await;
    assert!(server.metric("orlop_snapshot_last_timestamp_seconds").await > 1.7e9);
    assert!(server.metric("orlop_snapshot_interval_seconds").await >= 1.0);
    assert_eq!(server.metric("orlop_snapshot_failures_total").await, 0.0);
    server.terminate().await;
    assert!(snapshots(&folder).len() <= 2, "{:?}", names(&folder));

    let file = snapshots(&folder).pop().expect("a snapshot");
    let status = prints(&["snapshot", "status", text(&file), "--write-out", "fields"]).await;
    assert!(status.contains("\"Archived rows\" : 0"), "{status}");
    let data = home.path().join("data");
    prints(&["snapshot", "restore", text(&file), "--data-dir", text(&data)]).await;
    let copy = Server::orlop_on(&format!("sqlite://{}", data.join("orlop.db").display()), &[]).await;
    let found = Client::connect(copy.endpoint()).await.kv.range(get("a")).await.expect("a range").into_inner();
    assert_eq!(found.count, 1);
}

async fn failed_scheduled_snapshots_are_logged_and_counted(backend: Backend) {
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("file");
    fs::write(&file, "").expect("a file can be written");
    let folder = file.join("backup");
    let flags = ["--snapshot-interval", "1s", "--snapshot-dir", text(&folder)];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    eventually("two failures", async || {
        let failures = server.metric("orlop_snapshot_failures_total").await;
        if failures >= 2.0 { Ok(()) } else { Err(failures) }
    })
    .await;
    let log = server.log();
    assert!(log.contains("WARN") && log.contains("cannot take the scheduled snapshot"), "{log}");

    // The next one after the obstacle is gone succeeds.
    fs::remove_file(&file).expect("the file can be removed");
    eventually("a snapshot", async || snapshots(&folder).pop().ok_or(())).await;
}

async fn restart_does_not_take_an_additional_snapshot(backend: Backend) {
    let flags = ["--snapshot-interval", "1h"];
    let Some(mut server) = Server::orlop_with(backend, &flags).await else { return };
    let folder = server.data_dir().join("snapshots");
    let first = eventually("the first snapshot", async || snapshots(&folder).pop().ok_or(())).await;
    // Another one of the same second replaces the file.
    let inode = || first.metadata().expect("the snapshot exists").ino();
    let inode_before = inode();
    server.terminate().await;
    server.restart().await;
    put(server.endpoint(), "a").await;
    eventually("the time of the snapshot on disk", async || {
        let last = server.metric("orlop_snapshot_last_timestamp_seconds").await;
        if last > 1.7e9 { Ok(()) } else { Err(last) }
    })
    .await;
    assert_eq!(inode(), inode_before, "the first snapshot was not replaced");
    assert_eq!(snapshots(&folder), [first]);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_the_leader_saves_snapshots() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let home = TempDir::new().expect("a folder");
    let mut servers = Vec::new();
    let folders = [home.path().join("a"), home.path().join("b")];
    for (name, folder) in ["a", "b"].iter().zip(&folders) {
        let flags = ["--name", name, "--snapshot-interval", "1s", "--snapshot-dir", text(folder)];
        servers.push(Server::orlop_on(&datastore, &flags).await);
    }
    eventually("three snapshots of the leader", async || {
        let taken = snapshots(&folders[0]).len();
        if taken >= 3 { Ok(()) } else { Err(taken) }
    })
    .await;
    assert!(!folders[1].exists(), "{:?}", names(&folders[1]));
    servers[0].terminate().await;
    eventually("a snapshot of the next leader", async || snapshots(&folders[1]).pop().ok_or(())).await;
}

on_both_backends!(
    saved_file_is_complete_and_private,
    newest_files_in_a_folder_are_kept,
    server_saves_snapshots_at_an_interval,
    failed_scheduled_snapshots_are_logged_and_counted,
    restart_does_not_take_an_additional_snapshot,
);
