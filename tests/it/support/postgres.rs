//! Postgres servers, each in its own folder and on its own port. A server is removed when the test process ends, even if
//! the process is killed.

use std::{
    fs,
    io::{BufRead as _, BufReader, Write as _},
    net::TcpListener,
    os::unix::fs::MetadataExt as _,
    path::{Path, PathBuf},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
    sync::{
        Mutex,
        atomic::{AtomicU32, Ordering},
    },
};

use rustix::process::{Pid, Signal, kill_process};
use sqlx::{
    Connection as _, PgConnection, SqlStr,
    migrate::{Migration, MigrationType, Migrator},
};
use tokio::sync::OnceCell;

use super::{eventually, home, run, skip};

/// A shell script that runs the server and starts, stops (in immediate or fast mode) or crashes it on the orders that it
/// reads from its standard input. When the input ends, it stops the server and removes the folder. `$1` is the folder; the
/// remaining arguments are the server's command.
const GUARD: &str = r#"
# The reader of the answers may be gone; SIGPIPE must not end this script before it has removed the folder.
trap '' PIPE
folder=$1; shift
start() { "$@" >>"$folder/log" 2>&1 & server=$!; }
runs() { { read -r _ _ state _ <"/proc/$server/stat"; } 2>/dev/null && [ "$state" != Z ]; }
# Kills all processes at once, because a postmaster that still ran would start new ones. Waits for the end of each,
# because a new postmaster does not start while a process uses the shared memory of the old one.
crash() {
  all="$server $(cat "/proc/$server/task/$server/children")"
  kill -KILL $all
  wait "$server"
  for gone in $all; do while kill -0 "$gone" 2>/dev/null; do sleep 0.01; done; done
}
# Sends the signal repeatedly, because a background job of the shell ignores it until Postgres has set its handler.
stop() { while runs; do kill "-$1" "$server"; sleep 0.05; done; wait "$server"; }
start "$@"
while read -r order; do
  case $order in
    stop) stop QUIT ;;
    shut-down) stop INT ;;
    start) start "$@" ;;
    crash) crash ;;
  esac
  echo done
done
stop QUIT
rm -rf "$folder"
"#;

/// The schema of the release 0.2.0.
const FIRST_MIGRATION: &str = include_str!("../../../crates/sql/migrations/postgres/0001_log.sql");

/// A running cluster.
pub struct Postgres {
    programs: PathBuf,
    folder: PathBuf,
    port: u16,
    guard: Mutex<Guard>,
    databases: AtomicU32,
}

struct Guard {
    _process: Child,
    orders: ChildStdin,
    answers: BufReader<ChildStdout>,
}

static SHARED: OnceCell<Option<Postgres>> = OnceCell::const_new();

impl Postgres {
    /// Returns the cluster that most tests share, each with its own database; `None` if Postgres is not installed.
    pub async fn shared() -> Option<&'static Self> {
        SHARED.get_or_init(Self::start).await.as_ref()
    }

    /// Returns whether Postgres is installed.
    pub fn is_installed() -> bool {
        programs().is_some()
    }

    /// Returns the folder with Postgres's programs.
    pub fn programs() -> Option<PathBuf> {
        programs()
    }

    /// Starts a separate cluster, which the test may stop.
    pub async fn start() -> Option<Self> {
        Self::start_at(None, &[]).await
    }

    /// Starts a cluster with its data below `folder` and additional environment variables (`NAME=value`).
    pub async fn start_at(folder: Option<&Path>, environment: &[String]) -> Option<Self> {
        let Some(programs) = programs() else {
            skip("postgres");
            return None;
        };
        let folder = make_folder(folder);
        let data = folder.join("data");
        run_as_user(Command::new(programs.join("initdb")).args(INITDB).arg("-D").arg(&data));
        Some(Self::launch(programs, folder, free_port(), environment).await)
    }

    /// Starts a standby of a server: a copy of its data, which follows it through `port`.
    pub async fn standby_of(primary: &Self, port: u16, name: &str) -> Self {
        let folder = make_folder(None);
        let own_port = free_port();
        let mut copy = Command::new(primary.programs.join("pg_basebackup"));
        copy.args(["--checkpoint=fast", "--no-sync", "-h", "127.0.0.1", "-p", &primary.port.to_string()]);
        run_as_user(copy.args(["-U", "postgres", "-D"]).arg(folder.join("data")));
        follow(&folder.join("data"), port, name);
        Self::launch(primary.programs.clone(), folder, own_port, &[]).await
    }

    /// Starts the server on existing data.
    async fn launch(programs: PathBuf, folder: PathBuf, port: u16, environment: &[String]) -> Self {
        let settings = [
            format!("port={port}"),
            "listen_addresses=127.0.0.1".to_owned(),
            format!("unix_socket_directories={}", folder.display()),
            // Tests kill processes and not the machine.
            "fsync=off".to_owned(),
            "max_connections=300".to_owned(),
            "shared_buffers=64MB".to_owned(),
            // By default a killed server leaves its segments in /dev/shm.
            "dynamic_shared_memory_type=mmap".to_owned(),
        ];
        let mut process = Command::new("sh")
            .args(["-c", GUARD, "guard"])
            .arg(&folder)
            .args(user().0)
            .arg("env")
            .args(environment)
            .arg(programs.join("postgres"))
            .arg("-D")
            .arg(folder.join("data"))
            .args(settings.iter().flat_map(|setting| ["-c", setting]))
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .expect("sh can be started");
        let orders = process.stdin.take().expect("stdin is piped");
        let answers = BufReader::new(process.stdout.take().expect("stdout is piped"));
        let guard = Mutex::new(Guard { _process: process, orders, answers });
        let server = Self { programs, folder, port, guard, databases: AtomicU32::new(0) };
        server.wait_until_ready().await;
        server
    }

    /// Creates a database, and a role that owns a schema in it and nothing else. Returns the endpoint.
    pub fn create_database(&self) -> String {
        let name = format!("orlop_{}", self.databases.fetch_add(1, Ordering::Relaxed));
        self.psql("postgres", &format!("CREATE DATABASE {name}"));
        self.psql(
            &name,
            &format!(
                "CREATE ROLE {name} LOGIN PASSWORD 'pass word'; REVOKE ALL ON SCHEMA public FROM PUBLIC; \
                 CREATE SCHEMA AUTHORIZATION {name}"
            ),
        );
        format!("postgres://{name}:pass%20word@127.0.0.1:{}/{name}", self.port)
    }

    /// Creates a database as [`Postgres::create_database`] does, with the tables and functions of the release 0.2.0.
    pub async fn create_database_of_the_first_schema(&self) -> String {
        let endpoint = self.create_database();
        let mut connection = PgConnection::connect(&endpoint).await.expect("the database exists");
        let sql = SqlStr::from_static(FIRST_MIGRATION);
        let first = Migration::new(1, "log".into(), MigrationType::Simple, sql, false);
        let migrated = Migrator::with_migrations(vec![first]).run(&mut connection).await;
        migrated.expect("the migration succeeds");
        connection.close().await.expect("the connection closes");
        endpoint
    }

    /// Returns psql's output, run as the superuser.
    pub fn psql(&self, database: &str, sql: &str) -> String {
        psql(self.port, database, sql)
    }

    pub fn port(&self) -> u16 {
        self.port
    }

    /// Stops the cluster in immediate mode: it does not write a checkpoint, and the next start recovers from the WAL.
    pub fn stop(&self) {
        self.order("stop");
    }

    /// Stops the server in fast mode: its standbys receive everything before it ends.
    pub fn shut_down(&self) {
        self.order("shut-down");
    }

    /// Makes a primary of this standby.
    pub fn promote(&self) {
        let mut promote = Command::new(self.programs.join("pg_ctl"));
        run_as_user(promote.args(["promote", "-w", "-D"]).arg(self.data()));
    }

    /// Lets this standby, running or not, follow the server behind `port`.
    pub fn follow(&self, port: u16, name: &str) {
        follow(&self.data(), port, name);
        if self.runs() {
            self.psql("postgres", "SELECT pg_reload_conf()");
        }
    }

    /// Removes the changes that a former primary, which does not run, has and its successor lacks.
    pub fn rewind(&self, primary: &Self) {
        // Before the first checkpoint of the new timeline, pg_rewind does not see it.
        primary.psql("postgres", "CHECKPOINT");
        let source = format!("host=127.0.0.1 port={} user=postgres dbname=postgres", primary.port);
        let mut rewind = Command::new(self.programs.join("pg_rewind"));
        rewind.args(["--no-sync", "--source-server", &source, "--target-pgdata"]);
        run_as_user(rewind.arg(self.data()));
    }

    /// Sends SIGKILL to all processes of the cluster.
    pub fn crash(&self) {
        self.order("crash");
    }

    /// Returns whether the postmaster runs.
    pub fn runs(&self) -> bool {
        self.postmaster_pid().is_some_and(|pid| Path::new("/proc").join(pid).exists())
    }

    /// Returns the postmaster's process id from its pid file.
    pub fn postmaster_pid(&self) -> Option<String> {
        let written = fs::read_to_string(self.data().join("postmaster.pid")).ok()?;
        written.lines().next().map(str::to_owned)
    }

    pub async fn start_again(&self) {
        self.order("start");
        self.wait_until_ready().await;
    }

    /// Pauses all processes of the cluster until the returned value is dropped: connections stay open, but the server
    /// does not respond.
    pub fn pause(&self) -> Paused {
        let pid = self.postmaster_pid().expect("a running server has a pid file");
        let server: i32 = pid.trim().parse().expect("the first line is a pid");
        // The postmaster is paused first; otherwise it could start another child after its children are listed.
        let mut paused = Paused(vec![server]);
        paused.signal(Signal::STOP);
        let children = procfs::process::all_processes().expect("there is a /proc").filter_map(Result::ok);
        let children = children.filter_map(|child| child.stat().ok()).filter(|stat| stat.ppid == server);
        paused.0.extend(children.map(|stat| stat.pid));
        paused.signal(Signal::STOP);
        paused
    }

    /// Returns the data directory, to copy or replace it while the server is stopped.
    pub fn data(&self) -> PathBuf {
        self.folder.join("data")
    }

    fn order(&self, order: &str) {
        let mut guard = self.guard.lock().expect("the lock is not poisoned");
        writeln!(guard.orders, "{order}").expect("the guard runs");
        guard.answers.read_line(&mut String::new()).expect("the guard answers");
    }

    /// Waits until this server accepts connections. It states this in the eighth line of its pid file; what answers at its
    /// port may be another server.
    async fn wait_until_ready(&self) {
        eventually("the start of postgres", async || {
            let stated = fs::read_to_string(self.data().join("postmaster.pid")).unwrap_or_default();
            let is_ready = stated.lines().nth(7).is_some_and(|line| line.trim() == "ready");
            if is_ready && self.runs() { Ok(()) } else { Err(self.log()) }
        })
        .await;
    }

    pub fn log(&self) -> String {
        fs::read_to_string(self.folder.join("log")).unwrap_or_default()
    }
}

const INITDB: [&str; 5] = ["--no-sync", "--auth=trust", "--username=postgres", "--encoding=UTF8", "--locale=C"];

/// Creates a server's folder. The guard removes it, because the guard runs even if this process is killed.
fn make_folder(parent: Option<&Path>) -> PathBuf {
    let home = match parent {
        Some(parent) => tempfile::tempdir_in(parent).expect("a temporary directory can be made"),
        None => home(),
    };
    let (folder, (_, user)) = (home.keep(), user());
    let chown = Command::new("chown").arg(&user).arg(&folder).status();
    assert!(chown.is_ok_and(|status| status.success()), "the folder can be given to {user}");
    folder
}

/// Returns psql's output, run as the superuser of the server behind a port.
pub fn psql(port: u16, database: &str, sql: &str) -> String {
    let programs = programs().expect("Postgres is installed");
    let mut psql = Command::new(programs.join("psql"));
    psql.args(["-h", "127.0.0.1", "-p", &port.to_string(), "-U", "postgres", "-d", database]);
    psql.args(["-X", "-q", "-A", "-t", "-v", "ON_ERROR_STOP=1", "-c", sql]);
    // Only Patroni's superuser has a password.
    let output = run(psql.env("PGPASSWORD", "x"));
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8_lossy(&output.stdout).trim().to_owned()
}

/// Runs a command as the user of the servers.
fn run_as_user(command: &Command) {
    let (as_user, _) = user();
    let mut program = Command::new(as_user[0]);
    let output = run(program.args(&as_user[1..]).arg(command.get_program()).args(command.get_args()));
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Makes the data that of a standby, which follows the server behind `port`. The last line of a setting is effective.
fn follow(data: &Path, port: u16, name: &str) {
    let line = format!("primary_conninfo = 'host=127.0.0.1 port={port} user=postgres application_name={name}'\n");
    let mut settings = fs::File::options().append(true).open(data.join("postgresql.auto.conf")).expect("it is there");
    settings.write_all(line.as_bytes()).expect("a file can be written");
    fs::write(data.join("standby.signal"), "").expect("a file can be written");
    let (_, user) = user();
    let chown = Command::new("chown").arg(&user).arg(data.join("standby.signal")).status();
    assert!(chown.is_ok_and(|status| status.success()), "the file can be given to {user}");
}

/// Resumes the processes when dropped.
pub struct Paused(Vec<i32>);

impl Paused {
    fn signal(&self, signal: Signal) {
        for pid in self.0.iter().filter_map(|pid| Pid::from_raw(*pid)) {
            // It fails if the process has ended.
            kill_process(pid, signal).ok();
        }
    }
}

impl Drop for Paused {
    fn drop(&mut self) {
        self.signal(Signal::CONT);
    }
}

/// Returns the folder of Postgres's programs: the one that `ORLOP_TEST_POSTGRES_BIN` names, else that of the initdb on the
/// PATH, else Debian's folder of the newest version.
fn programs() -> Option<PathBuf> {
    if let Some(folder) = std::env::var_os("ORLOP_TEST_POSTGRES_BIN") {
        let folder = PathBuf::from(folder);
        assert!(folder.join("initdb").is_file(), "ORLOP_TEST_POSTGRES_BIN names {}: no initdb", folder.display());
        return Some(folder);
    }
    let path = std::env::var_os("PATH").unwrap_or_default();
    let versions = fs::read_dir("/usr/lib/postgresql").into_iter().flatten().flatten();
    let mut debian: Vec<PathBuf> = versions.map(|version| version.path().join("bin")).collect();
    debian.sort();
    let mut folders = std::env::split_paths(&path).chain(debian.into_iter().rev());
    // The initdb on the PATH may be a link into the folder that contains the other programs.
    let initdb = folders.find_map(|folder| folder.join("initdb").canonicalize().ok())?;
    initdb.parent().map(Path::to_owned)
}

/// Returns a prefix for Postgres's commands, and the user that they run as. If this process runs as root, the prefix
/// changes the user, because Postgres refuses to run as root.
pub fn user() -> (Vec<&'static str>, String) {
    let own = fs::metadata("/proc/self").expect("a process sees itself").uid();
    if own == 0 {
        (vec!["setpriv", "--reuid=postgres", "--regid=postgres", "--clear-groups"], "postgres".to_owned())
    } else {
        (vec!["env"], own.to_string())
    }
}

/// Returns a port that was not returned before and that nobody listens on. Linux gives ports from 32768 on to sockets that
/// ask for any port, so none of them takes this one before it is used.
pub fn free_port() -> u16 {
    static USED: AtomicU32 = AtomicU32::new(0);
    loop {
        let number = std::process::id().wrapping_add(USED.fetch_add(1, Ordering::Relaxed));
        let port = 15_000 + (number % 15_000) as u16;
        if TcpListener::bind(("127.0.0.1", port)).is_ok() {
            return port;
        }
    }
}

/// Returns the name of the database that an endpoint names; also that of its role and schema.
pub fn database_name(endpoint: &str) -> &str {
    endpoint.rsplit_once('/').expect("a URL has a path").1
}
