//! A server process with its own data directory: Orlop or a real etcd.

use std::{
    ffi::OsString,
    fs::File,
    io::{BufRead as _, BufReader},
    net::TcpListener,
    path::{Path, PathBuf},
    process::{Child, ChildStdout, Command, ExitStatus, Stdio},
    time::Duration,
};

use orlop_wire::proto::client::etcdserverpb::StatusRequest;
use rustix::process::Signal;
use tempfile::TempDir;
use tokio::{
    sync::mpsc,
    time::{Instant, timeout},
};

use tonic::Code;

use super::{
    Backend, Client, DEADLINE, Etcd, Postgres, Started, eventually, get, http_get, orlop_program, run, send_signal,
    skip,
};

/// Start of the line that Orlop prints for each listener once it serves; the listener's URL follows.
const READY: &str = "orlop: serving client requests on ";

/// A server process; dropping it kills the process and removes its data.
pub struct Server {
    program: Program,
    arguments: Vec<OsString>,
    environment: Vec<(String, OsString)>,
    home: TempDir,
    process: Started,
    endpoint: String,
}

enum Program {
    Orlop { datastore: Option<String> },
    Etcd { binary: PathBuf, no_fsync: bool },
}

/// The folders and the environment variables of a server process.
#[derive(Default)]
pub struct Place {
    /// Parent of the server's own folder; by default a file system in memory.
    pub folder: Option<PathBuf>,
    /// A separate folder for the data, to which the data directory is a link. The log file stays in the server's own
    /// folder.
    pub data: Option<PathBuf>,
    pub environment: Vec<(String, OsString)>,
}

impl Server {
    /// Starts Orlop, or a real etcd if `ORLOP_TEST_TARGET` is `etcd`. A run on etcd shows whether the test expects what
    /// etcd does.
    pub async fn under_test(backend: Backend) -> Option<Self> {
        Self::under_test_with(backend, &[]).await
    }

    /// Starts the same server as [`Server::under_test`]; `flags` are for Orlop only.
    pub async fn under_test_with(backend: Backend, flags: &[&str]) -> Option<Self> {
        match std::env::var("ORLOP_TEST_TARGET").as_deref() {
            // The tests on SQLite run on etcd instead; a second run, as Postgres, would only repeat them.
            Ok("etcd") if backend == Backend::Postgres => None,
            Ok("etcd") => Self::etcd().await,
            Ok(other) => panic!("ORLOP_TEST_TARGET is `{other}`, expected `etcd` or no value"),
            Err(_) => Self::orlop_with(backend, flags).await,
        }
    }

    /// Starts Orlop on a new, empty store; returns `None` if the machine lacks the backend.
    pub async fn orlop(backend: Backend) -> Option<Self> {
        Self::orlop_with(backend, &[]).await
    }

    /// Starts Orlop with flags in addition to the data directory, a free port and a log level.
    pub async fn orlop_with(backend: Backend, arguments: &[&str]) -> Option<Self> {
        let datastore = match backend {
            Backend::Sqlite => None,
            Backend::Postgres => Some(Postgres::shared().await?.create_database()),
        };
        Some(Self::orlop_at(datastore, arguments, Place::default()).await)
    }

    /// Starts Orlop on a database or, without one, on a new SQLite file.
    pub async fn orlop_at(datastore: Option<String>, arguments: &[&str], place: Place) -> Self {
        let arguments = arguments.iter().map(OsString::from).collect();
        Self::start(Program::Orlop { datastore }, arguments, place).await
    }

    /// Starts Orlop on a database that other instances may serve too.
    pub async fn orlop_on(datastore: &str, arguments: &[&str]) -> Self {
        Self::orlop_at(Some(datastore.to_owned()), arguments, Place::default()).await
    }

    /// Starts a real etcd, if the machine has one. It does not sync to the disk, unless it is too old for that flag.
    pub async fn etcd() -> Option<Self> {
        Self::etcd_with(&[]).await
    }

    /// Starts the same server as [`Server::etcd`], with additional flags.
    pub async fn etcd_with(arguments: &[&str]) -> Option<Self> {
        Self::etcd_of(Etcd::Reference, arguments, None).await
    }

    /// Starts an etcd of one version, if the machine has it, on `data` or on a new folder. It does not sync to the disk.
    pub async fn etcd_of(etcd: Etcd, arguments: &[&str], data: Option<PathBuf>) -> Option<Self> {
        let binary = found(etcd)?;
        let help = run(Command::new(&binary).arg("--help"));
        let help = [help.stdout, help.stderr].concat();
        let no_fsync = String::from_utf8_lossy(&help).contains("--unsafe-no-fsync");
        let arguments = arguments.iter().map(OsString::from).collect();
        let place = Place { data, ..Place::default() };
        Some(Self::start(Program::Etcd { binary, no_fsync }, arguments, place).await)
    }

    /// Starts a real etcd that syncs to the disk, as Orlop does.
    pub async fn etcd_at(place: Place) -> Option<Self> {
        let binary = found(Etcd::Reference)?;
        Some(Self::start(Program::Etcd { binary, no_fsync: false }, Vec::new(), place).await)
    }

    /// Returns the value of a metric without labels.
    pub async fn metric(&self, name: &str) -> f64 {
        let page = http_get(&self.endpoint, "/metrics").await.body;
        let value = page.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(' ')?.parse().ok());
        value.unwrap_or_else(|| panic!("no {name}"))
    }

    /// `http://127.0.0.1:PORT`
    pub fn endpoint(&self) -> &str {
        &self.endpoint
    }

    pub fn port(&self) -> u16 {
        let port = self.endpoint.rsplit_once(':').and_then(|(_, port)| port.parse().ok());
        port.expect("an endpoint ends with its port")
    }

    pub fn pid(&self) -> u32 {
        self.process.id()
    }

    pub fn is_orlop(&self) -> bool {
        matches!(self.program, Program::Orlop { .. })
    }

    /// Returns the datastore endpoint that Orlop was started with, if any.
    pub fn datastore(&self) -> Option<&str> {
        match &self.program {
            Program::Orlop { datastore } => datastore.as_deref(),
            Program::Etcd { .. } => None,
        }
    }

    /// Returns the endpoint of the database: the one that Orlop was started with, or that of its SQLite file.
    pub fn url(&self) -> String {
        let file = || format!("sqlite://{}", self.data_dir().join("orlop.db").display());
        self.datastore().map_or_else(file, str::to_owned)
    }

    pub fn data_dir(&self) -> PathBuf {
        self.home.path().join("data")
    }

    /// Returns the server's log.
    pub fn log(&self) -> String {
        log(self.home.path())
    }

    /// Returns the end of the server's log.
    pub fn log_tail(&self) -> String {
        const CHARS: usize = 3_000;
        let log = self.log();
        let skipped = log.chars().count().saturating_sub(CHARS);
        log.chars().skip(skipped).collect()
    }

    /// Sends SIGKILL and waits for the end of the process.
    pub fn kill(&mut self) {
        // `kill` fails only if the process has already ended.
        self.process.kill().ok();
        self.process.wait().expect("our child can be waited for");
    }

    /// Sends SIGTERM and waits for the end of the process.
    pub async fn terminate(&mut self) -> ExitStatus {
        send_signal(self.pid(), Signal::TERM);
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(status) = self.process.try_wait().expect("our child can be waited for") {
                return status;
            }
            assert!(Instant::now() < deadline, "the server did not end within {DEADLINE:?} of SIGTERM");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Stops all threads until [`Server::resume`].
    pub fn pause(&self) {
        send_signal(self.pid(), Signal::STOP);
    }

    pub fn resume(&self) {
        send_signal(self.pid(), Signal::CONT);
    }

    /// Returns whether the process still runs.
    pub fn runs(&mut self) -> bool {
        self.process.try_wait().expect("our child can be waited for").is_none()
    }

    /// Waits until the process ends by itself.
    pub async fn ended(&mut self) -> ExitStatus {
        eventually("the end of the server", || {
            std::future::ready(self.process.try_wait().expect("our child can be waited for").ok_or("it runs"))
        })
        .await
    }

    /// Kills the server, if it still runs, and starts it again on the same data, on a new port.
    pub async fn restart(&mut self) {
        self.kill();
        (self.process, self.endpoint) =
            launch(&self.program, &self.arguments, &self.environment, self.home.path()).await;
    }

    /// Like [`Server::restart`], with other arguments.
    pub async fn restart_with(&mut self, arguments: &[&str]) {
        self.arguments = arguments.iter().map(Into::into).collect();
        self.restart().await;
    }

    async fn start(program: Program, arguments: Vec<OsString>, place: Place) -> Self {
        let home = place
            .folder
            .map_or_else(home, |folder| tempfile::tempdir_in(folder).expect("a temporary directory can be made"));
        if let Some(data) = place.data {
            std::os::unix::fs::symlink(data, home.path().join("data")).expect("a link can be made");
        }
        let (process, endpoint) = launch(&program, &arguments, &place.environment, home.path()).await;
        Self { program, arguments, environment: place.environment, home, process, endpoint }
    }
}

impl Drop for Server {
    /// Ends the process. If the test failed, its output shows what became of the server.
    fn drop(&mut self) {
        if std::thread::panicking() {
            let state = match self.process.try_wait() {
                Ok(Some(status)) => format!("had ended ({status})"),
                Ok(None) => "was running".to_owned(),
                Err(error) => format!("cannot be waited for ({error})"),
            };
            println!("the server at {} {state}; the end of its log:\n{}", self.endpoint, self.log_tail());
        }
        self.kill();
    }
}

/// Returns the server's program, or prints that the test is skipped.
fn found(etcd: Etcd) -> Option<PathBuf> {
    let binary = etcd.server();
    if binary.is_none() {
        skip(&etcd.to_string());
    }
    binary
}

/// Creates a folder in memory if possible, because most tests do not need a disk, which is slow and shared.
pub fn home() -> TempDir {
    let memory = Path::new("/dev/shm");
    let made = if memory.is_dir() { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    made.expect("a temporary directory can be made")
}

/// Starts the process. Returns it with its endpoint as soon as it serves.
async fn launch(
    program: &Program,
    arguments: &[OsString],
    environment: &[(String, OsString)],
    home: &Path,
) -> (Started, String) {
    match program {
        Program::Orlop { datastore } => launch_orlop(datastore.as_deref(), arguments, environment, home).await,
        Program::Etcd { binary, no_fsync } => launch_etcd(binary, *no_fsync, arguments, home).await,
    }
}

async fn launch_orlop(
    datastore: Option<&str>,
    arguments: &[OsString],
    environment: &[(String, OsString)],
    home: &Path,
) -> (Started, String) {
    let mut command = Command::new(orlop_program());
    // A command such as migrate precedes the flags.
    let is_command = |first: &&OsString| !first.as_encoded_bytes().starts_with(b"-");
    let (subcommand, arguments) = arguments.split_at(usize::from(arguments.first().as_ref().is_some_and(is_command)));
    command.args(subcommand);
    command.envs(environment.iter().map(|(name, value)| (name, value)));
    command.arg("--data-dir").arg(home.join("data")).args(["--log-level", "warn", "--log-format", "text"]);
    if let Some(datastore) = datastore {
        command.args(["--datastore-endpoint", datastore]);
    }
    if !arguments.iter().any(|argument| argument == "--listen-client-urls") {
        command.args(["--listen-client-urls", "http://127.0.0.1:0"]);
    }
    command.args(arguments).stdout(Stdio::piped()).stderr(log_file(home));
    let mut process = Started::spawn(&mut command);
    let mut lines = lines(process.stdout.take().expect("stdout is piped"));
    let ready = async {
        while let Some(line) = lines.recv().await {
            if let Some(url) = line.strip_prefix(READY) {
                return Some(url.trim().to_owned());
            }
        }
        None
    };
    match timeout(DEADLINE, ready).await {
        Ok(Some(endpoint)) => (process, endpoint),
        ended => {
            process.kill().ok();
            let status = process.wait();
            panic!("orlop is not ready ({ended:?}, {status:?}); it logged:\n{}", log(home))
        }
    }
}

/// Returns the lines of a pipe. A thread reads it to the end, because the process would block on a full pipe.
fn lines(stdout: ChildStdout) -> mpsc::UnboundedReceiver<String> {
    let (sender, receiver) = mpsc::unbounded_channel();
    std::thread::spawn(move || {
        for line in BufReader::new(stdout).lines().map_while(Result::ok) {
            // The receiver is dropped once the server is ready.
            sender.send(line).ok();
        }
    });
    receiver
}

/// Retries if etcd does not serve, because another process may have taken the ports, which were free a moment ago.
async fn launch_etcd(binary: &Path, no_fsync: bool, arguments: &[OsString], home: &Path) -> (Started, String) {
    for _ in 0..3 {
        let [client, peer] = free_urls();
        let mut command = Command::new(binary);
        command.arg("--data-dir").arg(home.join("data"));
        command.args(["--listen-client-urls", &client, "--advertise-client-urls", &client]);
        command.args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer]);
        command.args(["--initial-cluster", &format!("default={peer}"), "--log-level", "error"]);
        if no_fsync {
            command.arg("--unsafe-no-fsync");
        }
        command.args(arguments).stdout(Stdio::null()).stderr(log_file(home));
        let mut process = Started::spawn(&mut command);
        if serves(&mut process, &client).await {
            return (process, client);
        }
    }
    panic!("etcd does not serve; it logged:\n{}", log(home))
}

/// Waits until the server answers a linearizable read; returns false if it ends or never answers.
async fn serves(process: &mut Child, endpoint: &str) -> bool {
    let deadline = Instant::now() + DEADLINE;
    while Instant::now() < deadline && process.try_wait().is_ok_and(|ended| ended.is_none()) {
        if let Ok(mut client) = Client::try_connect(endpoint).await {
            let leader = client.maintenance.status(StatusRequest {}).await.is_ok_and(|it| it.into_inner().leader != 0);
            // A server with Auth enabled refuses the read, because it has no token.
            let served = client.kv.range(get("k")).await.map_or_else(|it| it.code() == Code::InvalidArgument, |_| true);
            if leader && served {
                return true;
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    false
}

fn free_urls() -> [String; 2] {
    // Both sockets stay bound until both ports are known; otherwise the ports could be equal.
    let held = [(); 2].map(|()| TcpListener::bind("127.0.0.1:0").expect("a port is free"));
    held.map(|listener| format!("http://{}", listener.local_addr().expect("a bound socket has an address")))
}

fn log_file(home: &Path) -> File {
    File::options().create(true).append(true).open(home.join("log")).expect("the log can be written")
}

fn log(home: &Path) -> String {
    std::fs::read_to_string(home.join("log")).unwrap_or_else(|error| format!("(unreadable: {error})"))
}
