//! The servers that are compared: each a process with a folder, a port and, where it needs one, a database of its own.

use std::{
    fs, io,
    net::TcpListener,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
    process::Stdio,
    time::Duration,
};

use rustix::process::{Pid, Signal, kill_process};
use serde::Serialize;
use tempfile::TempDir;
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};

use super::{Error, postgres::Postgres};
use crate::{
    connection::{Client, Pool},
    endpoint::{Endpoint, Place, Target},
};
use orlop_wire::proto::client::etcdserverpb::{RangeRequest, StatusRequest};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, clap::ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum Kind {
    Etcd,
    Sqlite,
    Postgres,
}

impl Kind {
    pub fn name(self) -> &'static str {
        match self {
            Self::Etcd => "etcd",
            Self::Sqlite => "Orlop, SQLite",
            Self::Postgres => "Orlop, Postgres",
        }
    }
}

/// Until a server answers, with all its data to read.
const START_MAX: Duration = Duration::from_secs(120);

const STOP_MAX: Duration = Duration::from_secs(30);

const POLL: Duration = Duration::from_millis(5);

/// What all servers share: the folder, the programs, the Postgres cluster.
pub struct Lab {
    folder: TempDir,
    etcd: Option<PathBuf>,
    postgres: Option<Postgres>,
    /// A line each, of etcd and Postgres where they take part.
    pub versions: Vec<String>,
}

/// What a lab is made of.
pub struct Needs<'a> {
    pub work_dir: &'a Path,
    pub servers: &'a [Kind],
    pub etcd: Option<&'a Path>,
    pub postgres_programs: Option<&'a Path>,
    /// Of Postgres, each as `name=value`.
    pub postgres_settings: &'a [String],
}

impl Lab {
    pub async fn open(needs: Needs<'_>) -> Result<Self, Error> {
        let work_dir = needs.work_dir;
        let folder = tempfile::Builder::new().prefix("orlop-bench-").tempdir_in(work_dir);
        let folder = folder.map_err(|error| Error::Flags(format!("--work-dir {}: {error}", work_dir.display())))?;
        // Postgres may run as another user, who has to come through.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let path = folder.path().canonicalize()?;
        let mut lab = Self { folder, etcd: None, postgres: None, versions: Vec::new() };
        if needs.servers.contains(&Kind::Etcd) {
            let etcd = find_etcd(needs.etcd)?;
            let version = run(Command::new(&etcd).arg("--version")).await?;
            lab.versions.extend(version.lines().next().map(|line| line.to_lowercase().replace(" version:", "")));
            lab.etcd = Some(etcd);
        }
        if needs.servers.contains(&Kind::Postgres) {
            let programs = super::postgres::find_programs(needs.postgres_programs)?;
            lab.versions.push(Postgres::version(&programs).await?);
            lab.postgres = Some(Postgres::start(&programs, &path.join("postgres"), needs.postgres_settings).await?);
        }
        Ok(lab)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub async fn close(self) {
        if let Some(postgres) = self.postgres {
            postgres.stop().await;
        }
    }
}

/// A running server; dropping it kills it and removes its data.
pub struct Server<'a> {
    lab: &'a Lab,
    home: TempDir,
    command: Vec<String>,
    port: u16,
    datastore: Option<String>,
    process: Child,
}

/// What the server's processes have used.
#[derive(Clone, Copy, Debug)]
pub struct Usage {
    /// Since they started, Postgres included.
    pub cpu: Duration,
    /// Resident, without Postgres.
    pub memory_mib: f64,
}

impl<'a> Server<'a> {
    /// Starts one without data; `flags` are for Orlop.
    pub async fn start(lab: &'a Lab, kind: Kind, flags: &[&str]) -> Result<Self, Error> {
        let home = tempfile::Builder::new().prefix("server-").tempdir_in(lab.folder())?;
        let port = free_port()?;
        let url = format!("http://127.0.0.1:{port}");
        let data = home.path().join("data").display().to_string();
        let mut datastore = None;
        let mut command = match (kind, &lab.etcd) {
            (Kind::Etcd, Some(etcd)) => {
                let peer = format!("http://127.0.0.1:{}", free_port()?);
                let cluster = format!("default={peer}");
                let program = etcd.display().to_string();
                let flags = [
                    ["--log-level", "error"],
                    ["--advertise-client-urls", &url],
                    ["--listen-peer-urls", &peer],
                    ["--initial-advertise-peer-urls", &peer],
                    ["--initial-cluster", &cluster],
                ];
                std::iter::once(program).chain(flags.concat().into_iter().map(str::to_owned)).collect::<Vec<_>>()
            }
            _ => {
                let program = std::env::current_exe()?.display().to_string();
                if let (Kind::Postgres, Some(postgres)) = (kind, &lab.postgres) {
                    datastore = Some(postgres.create_database().await?);
                }
                let datastore = datastore.iter().flat_map(|endpoint| ["--datastore-endpoint", endpoint]);
                let flags = ["--log-level", "warn"].into_iter().chain(datastore).chain(flags.iter().copied());
                std::iter::once(program).chain(flags.map(str::to_owned)).collect()
            }
        };
        command.extend(["--data-dir", &data, "--listen-client-urls", &url].map(str::to_owned));
        let process = spawn(&command, home.path())?;
        let mut server = Self { lab, home, command, port, datastore, process };
        server.wait_until_ready().await?;
        Ok(server)
    }

    pub fn endpoint(&self) -> String {
        format!("http://127.0.0.1:{}", self.port)
    }

    /// Stops it in order and starts it with its data; returns how long it took from its start to its first answer.
    pub async fn restart(&mut self) -> Result<Duration, Error> {
        interrupt(&mut self.process, Signal::TERM).await;
        let began = Instant::now();
        self.process = spawn(&self.command, self.home.path())?;
        self.wait_until_ready().await?;
        Ok(began.elapsed())
    }

    pub async fn stop(mut self) {
        interrupt(&mut self.process, Signal::TERM).await;
        if let (Some(postgres), Some(datastore)) = (&self.lab.postgres, &self.datastore) {
            // What cannot be dropped goes with the cluster.
            postgres.drop_database(datastore).await.ok();
        }
    }

    /// Of the folder with the data, that of Postgres not included.
    pub fn folder_bytes(&self) -> u64 {
        bytes_below(&self.home.path().join("data"))
    }

    /// Anonymous memory of Postgres's processes; `None` without Postgres.
    pub fn database_memory_bytes(&self) -> Option<u64> {
        self.datastore.as_ref().and(self.lab.postgres.as_ref())?.memory_bytes().ok()
    }

    pub fn usage(&self) -> Result<Usage, Error> {
        let unreadable = |error: procfs::ProcError| Error::Io(io::Error::other(error));
        let id = self.process.id().and_then(|id| i32::try_from(id).ok()).unwrap_or_default();
        let process = procfs::process::Process::new(id).map_err(unreadable)?;
        let stat = process.stat().map_err(unreadable)?;
        let database = match (&self.datastore, &self.lab.postgres) {
            (Some(_), Some(postgres)) => postgres.cpu_ticks().map_err(unreadable)?,
            _ => 0,
        };
        let seconds = (stat.utime + stat.stime + database) as f64 / procfs::ticks_per_second() as f64;
        let kibibytes = process.status().map_err(unreadable)?.vmrss.unwrap_or_default();
        Ok(Usage { cpu: Duration::from_secs_f64(seconds), memory_mib: kibibytes as f64 / 1024.0 })
    }

    /// Of the database, as the server tells it.
    pub async fn size_mib(&self) -> Result<f64, Error> {
        let status = client(self.port).await?.maintenance().status(StatusRequest::default()).await;
        let status = status.map_err(|status| self.failed("asking for the size", status.message()))?;
        Ok(status.into_inner().db_size as f64 / f64::from(1 << 20))
    }

    async fn wait_until_ready(&mut self) -> Result<(), Error> {
        let port = self.port;
        let ready = async {
            loop {
                if let Ok(client) = client(port).await {
                    let request = RangeRequest { key: "a".into(), ..RangeRequest::default() };
                    if client.kv.clone().range(request).await.is_ok() {
                        return;
                    }
                }
                sleep(POLL).await;
            }
        };
        let ended = tokio::select! {
            ready = timeout(START_MAX, ready) => match ready {
                Ok(()) => return Ok(()),
                Err(_) => format!("it does not answer after {START_MAX:?}"),
            },
            ended = self.process.wait() => ended.map_or_else(|error| error.to_string(), |status| status.to_string()),
        };
        let log = fs::read_to_string(self.home.path().join("log")).unwrap_or_default();
        let tail: Vec<_> = log.lines().rev().take(5).collect();
        Err(self.failed("starting a server", &format!("{ended}: {}", tail.join("\n"))))
    }

    fn failed(&self, step: &'static str, error: &str) -> Error {
        Error::Step { step, endpoint: self.endpoint(), error: error.to_owned() }
    }
}

/// What goes while it is looked at counts nothing.
fn bytes_below(folder: &Path) -> u64 {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let bytes = entries.map(|entry| match entry.metadata() {
        Ok(metadata) if metadata.is_dir() => bytes_below(&entry.path()),
        Ok(metadata) => metadata.len(),
        Err(_) => 0,
    });
    bytes.sum()
}

async fn client(port: u16) -> Result<Client, Error> {
    let endpoint = Endpoint { place: Place::Tcp(format!("127.0.0.1:{port}")), has_tls: false };
    Ok(Pool::connect(&Target { endpoints: vec![endpoint], tls: None, token: None }, 1).await?.client(0))
}

fn spawn(command: &[String], home: &Path) -> Result<Child, Error> {
    let log = fs::File::options().create(true).append(true).open(home.join("log"))?;
    let mut process = Command::new(&command[0]);
    process.args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
    process.spawn().map_err(|error| Error::Program { program: command[0].clone(), error: error.to_string() })
}

/// What the program prints.
pub async fn run(command: &mut Command) -> Result<String, Error> {
    let program = command.as_std().get_program().to_string_lossy().into_owned();
    let failed = |error: String| Error::Program { program: program.clone(), error };
    let output = command.stdin(Stdio::null()).kill_on_drop(true).output().await;
    let output = output.map_err(|error| failed(error.to_string()))?;
    if !output.status.success() {
        return Err(failed(String::from_utf8_lossy(&output.stderr).trim_end().to_owned()));
    }
    Ok(String::from_utf8_lossy(&output.stdout).trim_end().to_owned())
}

/// Signals the process and waits for its end; kills it where that takes too long.
pub async fn interrupt(process: &mut Child, signal: Signal) {
    let pid = process.id().and_then(|id| Pid::from_raw(id.cast_signed()));
    if let Some(pid) = pid {
        // It fails where the process is gone.
        kill_process(pid, signal).ok();
    }
    if timeout(STOP_MAX, process.wait()).await.is_err() {
        process.kill().await.ok();
    }
}

pub fn free_port() -> io::Result<u16> {
    Ok(TcpListener::bind("127.0.0.1:0")?.local_addr()?.port())
}

pub fn on_path(name: &str) -> Option<PathBuf> {
    let folders = std::env::var_os("PATH").unwrap_or_default();
    std::env::split_paths(&folders).map(|folder| folder.join(name)).find(|path| path.is_file())
}

fn find_etcd(given: Option<&Path>) -> Result<PathBuf, Error> {
    let fetched = || Some(PathBuf::from("target/tools/etcd/usr/bin/etcd")).filter(|path| path.is_file());
    let found = given.map(Path::to_owned).or_else(fetched).or_else(|| on_path("etcd"));
    found.ok_or_else(|| {
        let text =
            "no etcd on PATH: run scripts/fetch-etcd, give --etcd, or leave it out with --servers sqlite,postgres";
        Error::Flags(text.to_owned())
    })
}
