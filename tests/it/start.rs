//! A failed start exits promptly with status 1 and an error that names the remedy.

use std::{
    ffi::OsStr,
    fs,
    os::unix::ffi::OsStrExt as _,
    path::Path,
    process::{Output, Stdio},
};

use rustix::process::Signal;

use crate::support::{
    Backend, Client, DEADLINE, Disk, Lines, Place, Server, Started, ended, get, orlop, orlop_program, run_within,
    send_signal,
};

/// Runs orlop until it ends by itself.
pub fn run(home: &Path, arguments: &[&str], variables: &[(&str, &str)]) -> Output {
    run_within(DEADLINE, orlop(arguments).envs(variables.iter().copied()).current_dir(home))
}

#[track_caller]
pub fn check_refused(arguments: &[&str], variables: &[(&str, &str)], named: &[&str]) {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    fs::write(home.path().join("bad.toml"), "max-txn-opps = 3\n").expect("a file can be written");
    fs::write(home.path().join("bad.yaml"), "max-txn-ops: many\n").expect("a file can be written");
    fs::write(home.path().join("garbage.db"), vec![7; 8192]).expect("a file can be written");
    fs::create_dir(home.path().join("folder.db")).expect("a folder can be made");
    let output = run(home.path(), arguments, variables);
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(matches!(output.status.code(), Some(1 | 2)), "{arguments:?} {variables:?}: {:?} {text}", output.status);
    for name in named {
        assert!(text.contains(name), "{arguments:?} {variables:?}: no {name}: {text}");
    }
    assert!(!text.contains("panicked") && !text.contains("secret"), "{text}");
}

#[test]
fn errors_name_accepted_values_of_a_url_with_several_hosts() {
    for (parameter, accepted) in [
        ("target_session_attrs=standby", "read-write, primary or any"),
        ("load_balance_hosts=yes", "disable or random"),
        ("connect_timeout=soon", "1 to 3600 seconds"),
        ("port=1,2,3", "2 hosts and 3 ports"),
        ("hostaddr=192.0.2.1", "2 hosts, but 1 in hostaddr"),
        ("hostaddr=192.0.2.1,192.0.2.2&sslmode=verify-full", "/etc/hosts"),
        ("sslmode=require&channel_binding=require", "channel_binding=require is not supported; remove it"),
        ("sslmode=some", "sslmode must be disable, prefer, require, verify-ca or verify-full"),
    ] {
        let endpoint = format!("postgres://user:secret@a,b/db?{parameter}");
        check_refused(&["--datastore-endpoint", &endpoint], &[], &[accepted]);
    }
    for (name, value, named) in [
        ("PGTARGETSESSIONATTRS", "prefer-standby", "read-write, primary or any"),
        ("PGSSLMODE", "verify_full", "PGSSLMODE must be disable, prefer, require, verify-ca or verify-full"),
    ] {
        check_refused(&["--datastore-endpoint", "postgres://user:secret@a/db"], &[(name, value)], &[named]);
    }
}

#[test]
fn page_must_be_https_where_clients_need_certificates() {
    check_refused(
        &[
            "--console-listen-url",
            "http://127.0.0.1:0",
            "--trusted-ca-file",
            "a",
            "--cert-file",
            "b",
            "--key-file",
            "c",
        ],
        &[],
        &["console-listen-url http://127.0.0.1:0 must be https", "trusted-ca-file"],
    );
}

#[test]
fn errors_name_invalid_settings_and_accepted_values() {
    check_refused(&["--max-txn-ops", "0"], &[], &["max-txn-ops", "at least 1"]);
    check_refused(&["--max-txn-ops", "many"], &[], &["--max-txn-ops", "many"]);
    check_refused(&["--no-such-flag"], &[], &["--no-such-flag"]);
    check_refused(
        &["--listen-client-urls", "127.0.0.1:2379"],
        &[],
        &["127.0.0.1:2379", "http://HOST:PORT, https://HOST:PORT, unix://PATH or unixs://PATH"],
    );
    check_refused(&["--listen-client-urls", "unixs:///x.sock"], &[], &["unixs:///x.sock requires a certificate"]);
    check_refused(&["--listen-address", "nowhere"], &[], &["listen-address: \"nowhere\" has no port; use HOST:PORT"]);
    check_refused(&["--auto-compaction-retention", "soon"], &[], &["auto-compaction-retention", "soon", "10m"]);
    check_refused(
        &["--auto-compaction-mode", "revision", "--auto-compaction-retention", "10m"],
        &[],
        &["auto-compaction-retention", "number of revisions"],
    );
    check_refused(&["--auto-compaction-mode", "some"], &[], &["some", "periodic", "revision"]);
    check_refused(&["--metrics", "all"], &[], &["all", "basic", "extensive"]);
    check_refused(&["--compaction-batch-limit", "0"], &[], &["compaction-batch-limit", "at least 1"]);
    check_refused(&["--listen-client-urls", ""], &[], &["listen-client-urls"]);
    check_refused(&["--unix-socket-mode", "rw"], &[], &["rw", "octal, for example 0660"]);
    check_refused(&[], &[("ORLOP_UNIX_SOCKET_MODE", "1777")], &["1777", "octal, for example 0660"]);
    check_refused(&["--watch-progress-notify-interval", "1ms"], &[], &["at least 100ms"]);
    check_refused(&["--watch-progress-notify-interval", "soon"], &[], &["soon", "10m"]);
    for level in ["=,", "verbose", "WARNING", "none", "warn,", "info,orlop_core=loud"] {
        check_refused(&["--log-level", level], &[], &["log-level", level, "unknown level", "error, warn, info"]);
    }
    check_refused(&[], &[("ORLOP_DATASTORE_ENDPONT", "x")], &["ENDPONT", "did you mean ORLOP_DATASTORE_ENDPOINT?"]);
    check_refused(&[], &[("ORLOP_DATADIR", "x")], &["ORLOP_DATADIR", "did you mean ORLOP_DATA_DIR?"]);
    check_refused(&["--log-format", "xml"], &[], &["xml", "text", "json"]);
    check_refused(&[], &[("ORLOP_MAX_TXN_OPS", "many")], &["ORLOP_MAX_TXN_OPS", "many"]);
    // A string setting accepts a value that looks like a number: each of these starts fails for another reason.
    let numbers = [("ORLOP_NAME", "12"), ("ORLOP_AUTO_COMPACTION_RETENTION", "5"), ("ORLOP_DATA_DIR", "1.50")];
    check_refused(&["--max-txn-ops", "0"], &numbers, &["max-txn-ops must be at least 1"]);
    check_refused(&["--config-file", "bad.toml"], &[], &["config-file bad.toml: unknown key max-txn-opps;"]);
    check_refused(&["--config-file", "bad.yaml"], &[], &["max-txn-ops", "bad.yaml"]);
    check_refused(&["--config-file", "none.toml"], &[], &["none.toml: No such file"]);
    check_refused(&["--datastore-endpoint", "mysql://user:secret@host/db"], &[], &["sqlite://", "postgres://"]);
    check_refused(&["--datastore-endpoint", "postgres://"], &[], &["sqlite://", "postgres://"]);
    check_refused(
        &["--datastore-endpoint", "postgres://user:secret@host:many/db"],
        &[],
        &["not a Postgres URL", "port"],
    );
    for cut in
        ["postgres://user:12/secret@host/db", "postgres://user:12?secret@host/db", "postgres://user:12#secret@host/db"]
    {
        check_refused(&["--datastore-endpoint", cut], &[], &["percent-encoded in the password"]);
    }
    for (endpoint, named) in [
        ("postgres://user:secret@host/db?sslmod=require", "unknown parameter sslmod; did you mean sslmode?"),
        ("postgres://user:secret@host/db?sslmode=require&sslrootca=x", "sslrootca; did you mean sslrootcert?"),
        // sqlx would log the value of a parameter that it does not know.
        ("postgres://127.0.0.1:1/db?user=u&pasword=secret@host", "unknown parameter with an @ behind it"),
        ("sqlite://state.db?_journal=WAL", "a sqlite:// URL has no parameters"),
    ] {
        check_refused(&["--datastore-endpoint", endpoint], &[], &[named]);
    }
    for size in ["8GX", "many", "1.5GiB", "99999999999G"] {
        check_refused(
            &["--quota-backend-bytes", size],
            &[],
            &["quota-backend-bytes", size, "examples: 8589934592, 8GiB"],
        );
        check_refused(&[], &[("ORLOP_QUOTA_BACKEND_BYTES", size)], &["ORLOP_QUOTA_BACKEND_BYTES", size, "8GiB"]);
    }
    check_refused(&["--datastore-connections", "0"], &[], &["datastore-connections", "at least 1"]);
    check_refused(&["--datastore-poll-interval", "1us"], &[], &["datastore-poll-interval", "at least 1ms"]);
}

#[test]
fn errors_name_sources_and_settings_that_do_not_fit() {
    let traces = ["--enable-distributed-tracing", "--distributed-tracing-address", "http://localhost:4317"];
    check_refused(&traces, &[], &["distributed-tracing-address must be HOST:PORT without a scheme"]);
    let port = "the port of \"http://localhost:99999\" is not a number from 0 to 65535";
    check_refused(&["--listen-client-urls", "http://localhost:99999"], &[], &[port]);
    check_refused(&[], &[("ORLOP_ENDPOINT", "mysql://host/db")], &["datastore-endpoint must be sqlite://"]);
    let members = "initial-cluster names 3 members, but SQLite serves one instance";
    let cluster = "a=http://a:2380,b=http://b:2380,c=http://c:2380";
    check_refused(&["--initial-cluster", cluster], &[], &[members]);
    check_refused(&[], &[("ETCD_INITIAL_CLUSTER", cluster)], &[members]);
    check_refused(&["--cors=nowhere"], &[], &["cors", "nowhere", "is not an origin", "http://HOST:PORT"]);
    check_refused(&["--max-txn-ops", "0", "--config-file="], &[("ETCD_CONFIG_FILE", "")], &["at least 1"]);
    check_refused(&["--max-txn-ops", "0"], &[("ORLOP_CONFIG_FILE", "")], &["at least 1"]);
    for variable in ["ORLOP_CONFIG_FILE", "ETCD_CONFIG_FILE"] {
        check_refused(&[], &[("ORLOP_CONFIG_FILE", ""), (variable, "none.toml")], &["none.toml: No such file"]);
    }
    for password in ["s3c@ret?secret", "s3c@ret?secret=x", "s3c@ret?x&secret"] {
        let endpoint = format!("postgres://user:{password}@host/db");
        check_refused(&["--datastore-endpoint", &endpoint], &[], &["special characters must be percent-encoded"]);
    }
    let file = "datastore-endpoint = \"postgres://user:secret@host/db\n";
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let path = home.path().join("orlop.toml");
    fs::write(&path, file).expect("a file can be written");
    check_refused(&["--config-file", &path.display().to_string()], &[], &["line 1, column", "invalid", "orlop.toml"]);
}

#[test]
fn errors_name_databases_that_cannot_be_opened() {
    let port = ["--listen-client-urls", "http://127.0.0.1:0"];
    for (endpoint, named) in [
        ("sqlite://garbage.db", "garbage.db"),
        ("sqlite://folder.db", "folder.db"),
        ("sqlite:///proc/none/orlop.db", "/proc/none"),
    ] {
        check_refused(&[&port[..], &["--datastore-endpoint", endpoint]].concat(), &[], &[named]);
    }
    check_refused(&["--listen-client-urls", "http://256.0.0.1:1"], &[], &["256.0.0.1"]);
}

#[test]
fn names_that_sqlite_treats_specially_are_names_of_files() {
    for (setting, name, file) in [
        ("--datastore-endpoint", "sqlite://file:a.db", "file:a.db"),
        ("--datastore-endpoint", "sqlite://:memory:", ":memory:"),
        ("--data-dir", "file:folder", "file:folder/orlop.db"),
    ] {
        let home = tempfile::tempdir().expect("a temporary directory can be made");
        let mut start = orlop(["--listen-client-urls", "http://127.0.0.1:0", setting, name]);
        start.current_dir(home.path()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = Started::spawn(&mut start);
        let address = Lines::of(process.stdout.take().expect("stdout is piped")).next();
        assert!(address.is_some(), "{name}: the start failed");
        drop(process);
        assert!(home.path().join(file).metadata().is_ok_and(|file| file.len() > 0), "{name}");
        let check = run(home.path(), &["check", setting, name], &[]);
        assert!(check.status.success(), "{name}: {check:?}");
    }
}

/// Returns the message of a start that waits for its database, and ends the start.
pub fn message_of_waiting_start(endpoint: &str) -> String {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let mut start = orlop(["--listen-client-urls", "http://127.0.0.1:0", "--datastore-endpoint", endpoint]);
    start.current_dir(home.path()).stdout(Stdio::null()).stderr(Stdio::piped());
    let mut process = Started::spawn(&mut start);
    let mut lines = Lines::of(process.stderr.take().expect("stderr is piped"));
    let waiting = lines.find(|line| line.contains("cannot connect yet"));
    waiting.expect("the reason is logged")
}

#[test]
fn errors_name_paths_that_are_not_utf8() {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let path = OsStr::from_bytes(b"a\xff");
    let mut of_flag = orlop([OsStr::new("--data-dir"), path]);
    let mut of_variable = orlop([""; 0]);
    for (command, named) in [
        (&mut of_flag, "for '--data-dir <FOLDER>': the path is not UTF-8"),
        (of_variable.env("ORLOP_DATA_DIR", path), "for ORLOP_DATA_DIR: the path is not UTF-8"),
    ] {
        let output = run_within(DEADLINE, command.current_dir(home.path()));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(matches!(output.status.code(), Some(1 | 2)) && text.contains(named), "{text}");
    }
}

/// The start waits for the file as for a database that is not running, because a file may be mounted later.
#[test]
fn start_that_waits_for_a_certificate_names_its_file() {
    let endpoint = "postgres://user:secret@127.0.0.1:1/db?sslmode=verify-full&sslrootcert=/nofile";
    let waiting = message_of_waiting_start(endpoint);
    assert!(waiting.contains("sslrootcert /nofile: No such file or directory"), "{waiting}");
}

#[tokio::test]
async fn advertised_url_that_leads_clients_to_their_own_machine_is_warned_of() {
    const WARNING: &str = "clients that list the members get a URL that leads each of them to its own machine";
    let listen = ["--listen-client-urls", "http://0.0.0.0:0"];
    let named = [&listen[..], &["--advertise-client-urls", "http://localhost:2379"]].concat();
    for (flags, is_warned_of) in [(&listen[..], true), (&named, false), (&[], false)] {
        let server = sqlite(flags).await;
        assert_eq!(server.log().contains(WARNING), is_warned_of, "{flags:?}: {}", server.log_tail());
    }
}

async fn sqlite(arguments: &[&str]) -> Server {
    Server::orlop_with(Backend::Sqlite, arguments).await.expect("SQLite is always there")
}

#[tokio::test]
async fn second_process_on_the_same_data_is_refused() {
    let server = sqlite(&[]).await;
    let folder = server.data_dir();
    let folder = folder.to_str().expect("a temporary path is text");
    let pid = server.pid().to_string();
    check_refused(
        &["--data-dir", folder, "--listen-client-urls", "http://127.0.0.1:0"],
        &[],
        &["orlop.db", "in use", &pid],
    );
    // The first server continues to run.
    let mut client = Client::connect(server.endpoint()).await;
    client.put("k", "").await;

    let port = server.endpoint();
    check_refused(&["--listen-client-urls", port], &[], &[port, "in use"]);
}

/// A sync must not wait for the file system's journal while the WAL grows, also after a kill.
#[tokio::test]
async fn wal_is_preallocated() {
    let mut server = sqlite(&[]).await;
    let wal = server.data_dir().join("orlop.db-wal");
    let blocks = || std::os::unix::fs::MetadataExt::blocks(&wal.metadata().expect("the WAL exists")) * 512;
    assert!(blocks() >= 48 << 20, "{} bytes", blocks());
    let index = server.data_dir().join("orlop.db-shm").metadata().expect("the index exists");
    let index_bytes = std::os::unix::fs::MetadataExt::blocks(&index) * 512;
    assert!(index_bytes >= 128 << 10, "{index_bytes} bytes");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("k", "").await;
    server.kill();
    server.restart().await;
    assert!(blocks() >= 48 << 20, "{} bytes", blocks());
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.kv.range(get("k")).await.expect("a range").into_inner().count, 1);
}

/// Otherwise a server that needs little space would raise NOSPACE.
#[tokio::test]
async fn wal_is_not_preallocated_if_that_would_fill_the_disk() {
    let Some(disk) = Disk::mount(60) else { return };
    let place = Place { data: Some(disk.path().to_owned()), ..Place::default() };
    let server = Server::orlop_at(None, &[], place).await;
    let bytes = server.data_dir().join("orlop.db-wal").metadata().expect("the WAL exists").len();
    assert!(bytes < 16 << 20, "{bytes} bytes");
    assert!(server.log().contains("cannot preallocate the WAL"), "{}", server.log_tail());
}

#[test]
fn completions_end_quietly_if_the_reader_stops() {
    let mut process = orlop(["completions", "bash"])
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("orlop is built with the tests");
    drop(process.stdout.take());
    let output = ended(process);
    assert!(output.status.success() && output.stderr.is_empty(), "{output:?}");
}

#[tokio::test]
async fn kine_listen_address_replaces_the_default_and_adds_to_others() {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let run = |flags: &[&str]| {
        let mut start = orlop(flags);
        start.current_dir(home.path()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut process = Started::spawn(&mut start);
        let urls = Lines::of(process.stdout.take().expect("stdout is piped")).take(flags.len() / 2);
        urls.map(|line| line.rsplit(' ').next().unwrap_or_default().to_owned()).collect::<Vec<String>>()
    };
    let socket = format!("unix://{}", home.path().join("sock").display());
    let alone = run(&["--listen-address", "127.0.0.1:0"]);
    assert!(alone[0].starts_with("http://127.0.0.1:") && !alone[0].ends_with(":2379"), "{alone:?}");
    let both = run(&["--listen-address", "127.0.0.1:0", "--listen-client-urls", &socket]);
    assert!(both[0] == socket && both[1].starts_with("http://127.0.0.1:"), "{both:?}");
}

/// The platforms in the docs equal those in the release configuration.
#[test]
fn binary_needs_no_glibc_newer_than_documented() {
    if std::env::var_os("CI").is_none() {
        println!("skipped: only CI builds on the system that is as old as is documented");
        return;
    }
    const MINOR: u32 = 34;
    let documented = format!("glibc 2.{MINOR}");
    assert!(
        include_str!("../../README.md").contains(&documented)
            && include_str!("../../docs/how-to/systemd.md").contains(&documented)
    );
    let binary = fs::read(orlop_program()).expect("orlop is built with the tests");
    let needed = binary.windows(8).enumerate().filter(|(_, bytes)| *bytes == b"GLIBC_2.").map(|(at, _)| {
        let digits = binary[at + 8..].iter().take_while(|byte| byte.is_ascii_digit());
        digits.fold(0, |number, digit| number * 10 + u32::from(digit - b'0'))
    });
    let newest = needed.max();
    assert!(newest.is_some_and(|newest| newest <= MINOR), "the binary needs glibc 2.{newest:?}");
}

#[tokio::test]
async fn unix_socket_serves_and_is_replaced_after_a_kill() {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let url = format!("unix://{}", home.path().join("orlop.sock").display());
    let mut server = sqlite(&["--listen-client-urls", &url]).await;
    for _ in 0..2 {
        let mut client = Client::connect(&url).await;
        client.put("k", "").await;
        server.kill();
        server.restart().await;
    }
}

#[tokio::test]
async fn unix_socket_of_a_running_server_is_not_replaced() {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let url = format!("unix://{}", home.path().join("orlop.sock").display());
    let _server = sqlite(&["--listen-client-urls", &url]).await;
    check_refused(&["--listen-client-urls", &url], &[], &[&url, "in use"]);
    let mut client = Client::connect(&url).await;
    client.put("k", "").await;
}

/// systemd waits in this way with `Type=notify`.
#[test]
fn service_manager_is_notified_of_start_and_stop() {
    let home = tempfile::tempdir().expect("a temporary directory can be made");
    let path = home.path().join("notify.sock");
    let socket = std::os::unix::net::UnixDatagram::bind(&path).expect("a socket can be bound");
    socket.set_read_timeout(Some(DEADLINE)).expect("a deadline can be set");
    let mut start = orlop(["--listen-client-urls", "http://127.0.0.1:0"]);
    start.env("NOTIFY_SOCKET", &path).current_dir(home.path()).stdout(Stdio::null()).stderr(Stdio::null());
    let process = Started::spawn(&mut start);
    let state = || {
        let mut text = [0; 64];
        let len = socket.recv(&mut text).expect("a notification in time");
        String::from_utf8_lossy(&text[..len]).into_owned()
    };
    assert_eq!(state(), "READY=1");
    send_signal(process.id(), Signal::TERM);
    assert_eq!(state(), "STOPPING=1");
    assert!(ended(process).status.success());
}

/// For example a copy that failed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_database_file_is_filled_with_a_warning() {
    const WARNING: &str = "the database file is empty: creating a new store in it";
    let new = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    assert!(!new.log().contains(WARNING), "the start has created the file: {}", new.log());
    let data = tempfile::tempdir().expect("a folder");
    fs::write(data.path().join("orlop.db"), "").expect("a file can be written");
    let place = Place { data: Some(data.path().to_owned()), ..Place::default() };
    let mut server = Server::orlop_at(None, &[], place).await;
    Client::connect(server.endpoint()).await.put("a", "1").await;
    assert!(server.terminate().await.success());
    server.restart().await;
    assert_eq!(server.log().matches(WARNING).count(), 1, "{}", server.log());
}

/// A failed copy over a database that was not stopped: SQLite would delete the WAL.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn empty_database_file_beside_a_wal_is_refused() {
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    Client::connect(server.endpoint()).await.put("a", "1").await;
    server.kill();
    let [database, wal] = ["orlop.db", "orlop.db-wal"].map(|name| server.data_dir().join(name));
    let (whole, commits) = (fs::read(&database).expect("a database"), fs::read(&wal).expect("a WAL"));
    fs::write(&database, "").expect("a file can be written");
    let folder = server.data_dir();
    let folder = folder.to_str().expect("a path in UTF-8");
    check_refused(&["--data-dir", folder], &[], &["is empty, but its WAL is not", "restore a snapshot"]);
    assert!(fs::read(&wal).expect("a WAL") == commits, "the WAL was changed");
    fs::write(&database, whole).expect("a file can be written");
    server.restart().await;
    Client::connect(server.endpoint()).await.kv.range(get("a")).await.expect("the pair is there");
}
