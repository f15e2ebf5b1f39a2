//! Only the server's user can read its data, through files and sockets, and no output shows a password.

use std::{
    collections::BTreeMap,
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::{Command, Stdio},
};

use orlop_wire::proto::client::etcdserverpb::{MemberListRequest, StatusRequest};
use rustix::process::Signal;
use tempfile::TempDir;

use crate::support::{
    Client, Lines, Postgres, Started, ended, eventually, get, http_get, orlop_program, put, send_signal,
};

/// An Orlop with its own folder; its output goes to files.
struct Orlop {
    /// Before its folder, so that the process has ended when the folder is removed.
    process: Option<Started>,
    home: TempDir,
}

impl Orlop {
    fn new() -> Self {
        Self { home: TempDir::new().expect("a folder"), process: None }
    }

    fn file(&self, name: &str) -> PathBuf {
        self.home.path().join(name)
    }

    /// Returns a command that runs Orlop in its folder with the umask, and appends its output to the log.
    fn command(&self, umask: &str, arguments: &[&str], variables: &[(&str, &str)]) -> Command {
        let mut command = Command::new("sh");
        command.args(["-c", &format!("umask {umask}; exec \"$@\""), "sh"]).arg(orlop_program());
        let log = fs::File::options().create(true).append(true).open(self.file("log")).expect("a file");
        command.args(arguments).envs(variables.iter().copied()).current_dir(self.home.path());
        command.stdout(log.try_clone().expect("a file")).stderr(log);
        command
    }

    /// Starts the server and returns its address.
    fn start(&mut self, umask: &str, arguments: &[&str], variables: &[(&str, &str)]) -> String {
        let mut process = Started::spawn(self.command(umask, arguments, variables).stdout(Stdio::piped()));
        let mut lines = Lines::of(process.stdout.take().expect("stdout is piped"));
        self.process = Some(process);
        let ready = lines.next().unwrap_or_else(|| panic!("the server did not start: {}", self.log()));
        ready.rsplit(' ').next().expect("an address").to_owned()
    }

    /// Runs Orlop, which must exit with an error.
    fn fail(&self, arguments: &[&str], variables: &[(&str, &str)]) {
        let process = Started::spawn(&mut self.command("022", arguments, variables));
        let status = ended(process).status;
        assert!(matches!(status.code(), Some(1 | 2)), "{status:?}");
    }

    fn stop(&mut self) {
        let Some(process) = self.process.take() else { return };
        send_signal(process.id(), Signal::TERM);
        assert!(ended(process).status.success(), "{}", self.log());
    }

    fn log(&self) -> String {
        fs::read_to_string(self.file("log")).unwrap_or_default()
    }

    fn command_line(&self) -> String {
        let pid = self.process.as_ref().expect("the server runs").id();
        String::from_utf8_lossy(&fs::read(format!("/proc/{pid}/cmdline")).expect("a process")).into_owned()
    }
}

fn mode(path: &Path) -> u32 {
    fs::metadata(path).expect("the path exists").permissions().mode() & 0o7777
}

/// Returns the mode of the folder and of everything in it.
fn modes(folder: &Path) -> BTreeMap<PathBuf, u32> {
    let mut found = BTreeMap::from([(folder.to_owned(), mode(folder))]);
    for entry in fs::read_dir(folder).expect("a folder") {
        let path = entry.expect("an entry").path();
        if path.is_dir() {
            found.extend(modes(&path));
        } else {
            found.insert(path.clone(), mode(&path));
        }
    }
    found
}

/// Checks that only the user has access to the folder and to everything in it. Returns the number of paths.
#[track_caller]
fn check_private(folder: &Path) -> usize {
    let modes = modes(folder);
    for (path, mode) in &modes {
        assert_eq!(*mode, if path.is_dir() { 0o700 } else { 0o600 }, "{}: {mode:o}", path.display());
    }
    modes.len()
}

async fn write(endpoint: &str) {
    Client::connect(endpoint).await.put("k", vec![1; 5_000]).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn data_is_private_under_any_umask() {
    for umask in ["000", "022", "077"] {
        let mut orlop = Orlop::new();
        let server = ["--data-dir", "a/data", "--listen-client-urls", "http://127.0.0.1:0", "--auto-tls"];
        let flags = [&server[..], &["--log-outputs", "stderr,new.log,given.log"]].concat();
        let given = fs::File::create(orlop.file("given.log")).expect("a file");
        given.set_permissions(fs::Permissions::from_mode(0o640)).expect("a mode");
        for _ in 0..2 {
            write(&orlop.start(umask, &flags, &[])).await;
            // The folders a, data, fixtures and client; the certificate and its key; the database, its lock, its WAL
            // and its shared memory.
            assert_eq!(check_private(&orlop.file("a")), 10, "{:?}", modes(&orlop.file("a")));
            orlop.stop();
        }
        assert!(!orlop.log().contains("chmod"), "{}", orlop.log());
        assert_eq!(mode(&orlop.file("new.log")), 0o600);
        assert_eq!(mode(&orlop.file("given.log")), 0o640, "a file that exists keeps its mode");

        // The folder of a restored snapshot.
        let flags = ["snapshot", "restore", "a/data/orlop.db", "--skip-hash-check", "--data-dir", "restored"];
        let restored = orlop.command(umask, &flags, &[]).status().expect("sh");
        assert!(restored.success(), "{}", orlop.log());
        assert_eq!(check_private(&orlop.file("restored")), 3);
    }
}

#[tokio::test]
async fn folder_open_to_others_is_served_with_a_warning() {
    for (given, warned) in
        [(0o700, false), (0o755, true), (0o750, true), (0o777, true), (0o2775, false), (0o2777, true)]
    {
        let mut orlop = Orlop::new();
        let folder = orlop.file("data");
        fs::create_dir(&folder).expect("a folder");
        fs::set_permissions(&folder, fs::Permissions::from_mode(given)).expect("a mode");
        write(&orlop.start("022", &["--data-dir", "data", "--listen-client-urls", "http://127.0.0.1:0"], &[])).await;
        assert_eq!(mode(&folder), given, "the server does not change the mode");
        assert_eq!(mode(&folder.join("orlop.db")), 0o600);
        let log = orlop.log();
        assert_eq!(log.contains("chmod 700"), warned, "{given:o}: {log}");
        assert!(!warned || log.contains(&format!("{given:04o}")), "{log}");
    }
}

#[tokio::test]
async fn unix_socket_is_private_by_default() {
    for (umask, flags, expected) in [
        ("000", &[][..], 0o600),
        ("077", &[], 0o600),
        ("077", &["--unix-socket-mode", "0660"], 0o660),
        ("022", &["--unix-socket-mode", "777"], 0o777),
    ] {
        let mut orlop = Orlop::new();
        let url = format!("unix://{}", orlop.file("orlop.sock").display());
        orlop.start(umask, &[&["--listen-client-urls", &url][..], flags].concat(), &[]);
        assert_eq!(mode(&orlop.file("orlop.sock")), expected, "{umask} {flags:?}");
        write(&url).await;
    }
}

/// Starts a cluster whose roles need passwords. Returns it with a database's endpoint, once with the password and once
/// without.
async fn postgres_with_passwords() -> Option<(Postgres, String, String)> {
    let postgres = Postgres::start().await?;
    let endpoint = postgres.create_database();
    let hba = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
    fs::write(postgres.data().join("pg_hba.conf"), hba).expect("a file can be written");
    postgres.stop();
    postgres.start_again().await;
    let without_password = endpoint.replace(":pass%20word@", "@");
    assert_ne!(endpoint, without_password);
    Some((postgres, endpoint, without_password))
}

/// Checks that a text contains neither the right password nor the wrong one, `not it`.
#[track_caller]
fn no_password_in(what: &str, text: &str) {
    for form in ["pass word", "pass%20word", "pass+word", "not it"] {
        assert!(!text.contains(form), "{what}: {text}");
    }
}

/// Writes `.pgpass` in a folder.
fn password_file(folder: &Path, lines: &[u8], mode: u32) -> PathBuf {
    let file = folder.join(".pgpass");
    fs::write(&file, lines).expect("a file can be written");
    fs::set_permissions(&file, fs::Permissions::from_mode(mode)).expect("a mode");
    file
}

/// Returns the log of a server after its first attempt to connect to a Postgres that does not run.
async fn log_without_postgres(log_level: &str, variable: (&str, &Path)) -> String {
    let mut waiting = Orlop::new();
    let endpoint = "postgres://u@127.0.0.1:1/db";
    let listen = ["--listen-client-urls", "http://127.0.0.1:0", "--datastore-endpoint", endpoint];
    let flags = [&["--log-level", log_level][..], &listen].concat();
    let (name, path) = variable;
    let mut command = waiting.command("022", &flags, &[(name, path.to_str().expect("text"))]);
    waiting.process = Some(Started::spawn(&mut command));
    eventually("an attempt to connect", async || {
        if waiting.log().contains("cannot connect yet") { Ok(()) } else { Err(waiting.log()) }
    })
    .await;
    waiting.log()
}

const VALUE: &str = "a value that is never logged";
const TRACE_FLAGS: [&str; 4] = ["--log-level", "trace", "--listen-client-urls", "http://127.0.0.1:0"];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn database_password_is_never_printed() {
    let Some((postgres, endpoint, _)) = postgres_with_passwords().await else { return };
    let mut orlop = Orlop::new();
    let flags = [&TRACE_FLAGS[..], &["--enable-pprof", "--datastore-endpoint", &endpoint]].concat();
    let url = orlop.start("022", &flags, &[]);
    let mut client = Client::connect(&url).await;
    client.put("k", VALUE).await;
    let shown = client.kv.range(get("k")).await.expect("a range");
    assert_eq!(shown.into_inner().kvs[0].value, VALUE);
    let status = client.maintenance.status(StatusRequest {}).await.expect("a status");
    let members = client.cluster.member_list(MemberListRequest::default()).await.expect("members");
    no_password_in("answers", &format!("{status:?} {members:?}"));
    for path in ["/metrics", "/version", "/health", "/livez?verbose", "/readyz?verbose", "/config", "/"] {
        no_password_in(path, &http_get(&url, path).await.body);
    }
    for path in ["/debug/vars", "/debug/pprof/cmdline"] {
        let body = http_get(&url, path).await.body;
        assert!(body.contains("--datastore-endpoint"), "{path}: {body}");
        no_password_in(path, &body);
    }
    // While the database is stopped, the server also logs and returns errors.
    postgres.stop();
    let failed = client.kv.put(put("k", "")).await.expect_err("no database");
    no_password_in("an error", &format!("{failed:?}"));
    no_password_in("health", &http_get(&url, "/health").await.body);
    no_password_in("readyz", &http_get(&url, "/readyz?verbose").await.body);
    postgres.start_again().await;
    drop(client);
    orlop.stop();
    assert!(orlop.log().contains("\"trace\"") && orlop.log().len() > 10_000, "the log level is trace");
    no_password_in("the log", &orlop.log());
    assert!(!orlop.log().contains(VALUE), "values are not logged either");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn wrong_database_password_is_never_printed() {
    let Some((postgres, endpoint, without_password)) = postgres_with_passwords().await else { return };
    let wrong = endpoint.replace("pass%20word", "not%20it");
    let orlop = Orlop::new();
    for datastore in [&wrong, &without_password, &format!("{wrong}?sslmode=some")] {
        orlop.fail(&[&TRACE_FLAGS[..], &["--datastore-endpoint", datastore]].concat(), &[]);
        orlop.fail(&["check", "--datastore-endpoint", datastore], &[]);
    }
    assert!(orlop.log().contains("password authentication failed"), "{}", orlop.log());
    postgres.stop();
    let mut waiting = Orlop::new();
    let command = &mut waiting.command("022", &[&TRACE_FLAGS[..], &["--datastore-endpoint", &endpoint]].concat(), &[]);
    waiting.process = Some(Started::spawn(command));
    eventually("a second attempt", async || {
        if waiting.log().matches("cannot connect yet").count() >= 2 { Ok(()) } else { Err(waiting.log()) }
    })
    .await;
    no_password_in("refusals", &orlop.log());
    no_password_in("attempts", &waiting.log());
}

#[tokio::test]
async fn malformed_line_of_a_password_file_is_never_printed() {
    let files = TempDir::new().expect("a folder");
    // It lacks a field.
    let file = password_file(files.path(), b"127.0.0.1:1:db:not it\n", 0o600);
    for variable in [("PGPASSFILE", file.as_path()), ("HOME", files.path())] {
        for log_level in ["trace", "info,sqlx=debug"] {
            no_password_in(log_level, &log_without_postgres(log_level, variable).await);
        }
    }
}

#[tokio::test]
async fn password_file_that_others_can_read_is_warned_of_once() {
    let files = TempDir::new().expect("a folder");
    let file = password_file(files.path(), b"127.0.0.1:1:db:u:not it\n", 0o644);
    for variable in [("PGPASSFILE", file.as_path()), ("HOME", files.path())] {
        let log = log_without_postgres("info,sqlx=debug", variable).await;
        let warnings: Vec<&str> = log.lines().filter(|line| line.contains(file.to_str().expect("text"))).collect();
        assert!(warnings.len() == 1 && warnings[0].contains("its mode is 644"), "{log}");
        no_password_in("the log", &log);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn password_can_stay_out_of_the_process_list() {
    let Some((_postgres, endpoint, without_password)) = postgres_with_passwords().await else { return };
    let files = TempDir::new().expect("a folder");
    let settings = files.path().join("orlop.toml");
    fs::write(&settings, format!("datastore-endpoint = \"{endpoint}\"\n")).expect("a file can be written");
    // The first line is Latin-1, and the second one lacks a field.
    let lines = b"# \xe9\n127.0.0.1:*:*:not it\n127.0.0.1:*:*:*:pass word\n";
    let passwords = password_file(files.path(), lines, 0o600);
    let (settings, passwords) = (settings.to_str().expect("text"), passwords.to_str().expect("text"));
    let home = files.path().to_str().expect("text");
    type Row<'a> = (&'a [&'a str], (&'a str, &'a str));
    let rows: [Row<'_>; 5] = [
        (&[], ("ORLOP_DATASTORE_ENDPOINT", &endpoint)),
        (&[], ("ORLOP_CONFIG_FILE", settings)),
        (&["--datastore-endpoint", &without_password], ("PGPASSFILE", passwords)),
        (&["--datastore-endpoint", &without_password], ("HOME", home)),
        (&["--datastore-endpoint", &without_password], ("PGPASSWORD", "pass word")),
    ];
    for (flags, variable) in rows {
        let variables = &[variable];
        let mut orlop = Orlop::new();
        let url = orlop.start("022", &[&TRACE_FLAGS[..], flags].concat(), variables);
        write(&url).await;
        no_password_in("the command line", &orlop.command_line());
        orlop.stop();
        no_password_in("the log", &orlop.log());
        let checked = orlop.command("022", &[&["check"], flags].concat(), variables).status().expect("sh");
        assert!(checked.success(), "{}", orlop.log());
    }
}
