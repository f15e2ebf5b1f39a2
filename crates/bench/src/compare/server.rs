//! The servers under test. Each is a process with its own directory, port and, for Orlop on Postgres, its own database.

use std::{fs, io, path::Path, process::Stdio, time::Duration};

use rustix::process::Signal;
use tempfile::TempDir;
use tokio::{
    process::{Child, Command},
    time::{Instant, sleep, timeout},
};

use super::{
    postgres::Postgres,
    process::{free_port, stop},
    server_kind::ServerKind,
    test_bed::TestBed,
};
use orlop_client::{Address, Endpoint, Target};

use crate::{
    connection::{Client, Pool},
    error::Error,
};
use orlop_wire::proto::client::etcdserverpb::{RangeRequest, StatusRequest};

/// Maximum time until a server answers, including the time to load its data.
const START_TIME_MAX: Duration = Duration::from_secs(120);

const READY_POLL_INTERVAL: Duration = Duration::from_millis(5);

/// A running server, of one or several instances. Dropping it kills the processes and removes the data.
pub struct Server<'a> {
    test_bed: &'a TestBed,
    datastore: Option<String>,
    instances: Vec<Instance>,
}

/// A process of a server.
struct Instance {
    /// Dropped first: the process is killed before its directory is removed.
    process: Child,
    home: TempDir,
    command: Vec<String>,
    port: u16,
}

impl<'a> Server<'a> {
    /// Starts a server without data, with this number of instances. etcd does not receive `flags`.
    pub async fn start(
        test_bed: &'a TestBed,
        kind: ServerKind,
        flags: &[&str],
        instances: usize,
    ) -> Result<Self, Error> {
        let datastore = match (kind, &test_bed.postgres) {
            (ServerKind::Postgres, Some(postgres)) => Some(postgres.create_database().await?),
            _ => None,
        };
        let mut commands = match (kind, &test_bed.etcd) {
            (ServerKind::Etcd, Some(etcd)) => etcd_commands(&etcd.display().to_string(), instances)?,
            _ => orlop_commands(datastore.as_deref(), flags, instances)?,
        };
        let mut server = Self { test_bed, datastore, instances: Vec::with_capacity(instances) };
        for command in &mut commands {
            let home = tempfile::Builder::new().prefix("server-").tempdir_in(test_bed.folder())?;
            let port = free_port()?;
            let (data, url) = (home.path().join("data").display().to_string(), url(port));
            command.extend(["--data-dir", &data, "--listen-client-urls", &url].map(str::to_owned));
            if kind == ServerKind::Etcd {
                command.extend(["--advertise-client-urls".to_owned(), url]);
            }
            let process = spawn(command, home.path())?;
            server.instances.push(Instance { home, command: std::mem::take(command), port, process });
        }
        server.wait_until_ready().await?;
        Ok(server)
    }

    /// Returns the endpoints of all instances, separated by commas.
    pub fn endpoints(&self) -> String {
        self.instances.iter().map(|instance| url(instance.port)).collect::<Vec<_>>().join(",")
    }

    /// Stops all instances gracefully and starts them again with their data. Returns the time from the start of the
    /// processes to their first responses.
    pub async fn restart(&mut self) -> Result<Duration, Error> {
        for instance in &mut self.instances {
            stop(&mut instance.process, Signal::TERM).await;
        }
        let began = Instant::now();
        for instance in &mut self.instances {
            instance.process = spawn(&instance.command, instance.home.path())?;
        }
        self.wait_until_ready().await?;
        Ok(began.elapsed())
    }

    pub async fn stop(mut self) {
        for instance in &mut self.instances {
            stop(&mut instance.process, Signal::TERM).await;
        }
        if let (Some(postgres), Some(datastore)) = (&self.test_bed.postgres, &self.datastore) {
            // A database that cannot be dropped is removed with the cluster.
            postgres.drop_database(datastore).await.ok();
        }
    }

    /// Returns the size of the data directories, without that of Postgres.
    pub fn folder_bytes(&self) -> u64 {
        self.instances.iter().map(|instance| bytes_below(&instance.home.path().join("data"))).sum()
    }

    /// Returns the anonymous memory of the Postgres processes; `None` without Postgres.
    pub fn database_memory_bytes(&self) -> Option<u64> {
        self.datastore.as_ref().and(self.test_bed.postgres.as_ref())?.memory_bytes().ok()
    }

    /// Returns the process ids of all instances, and that of Postgres if the server uses it.
    pub fn pids(&self) -> Vec<u32> {
        let postgres = self.datastore.as_ref().and(self.test_bed.postgres.as_ref());
        let instances = self.instances.iter().filter_map(|instance| instance.process.id());
        instances.chain(postgres.and_then(Postgres::pid)).collect()
    }

    /// Returns the anonymous memory of all instances, without that of Postgres. It does not include mapped files: their
    /// pages belong to the kernel's cache of files, which a server that reads its file by system calls uses as well.
    pub fn memory_mib(&self) -> Result<f64, Error> {
        let unreadable = |error: procfs::ProcError| Error::Io(io::Error::other(error));
        let mut kibibytes = 0;
        for instance in &self.instances {
            let id = instance.process.id().and_then(|id| i32::try_from(id).ok()).unwrap_or_default();
            let process = procfs::process::Process::new(id).map_err(unreadable)?;
            kibibytes += process.status().map_err(unreadable)?.rssanon.unwrap_or_default();
        }
        Ok(kibibytes as f64 / 1024.0)
    }

    /// Returns the size of the database, as reported by the Status method.
    pub async fn size_mib(&self) -> Result<f64, Error> {
        let Some(instance) = self.instances.first() else { return Ok(0.0) };
        let status = client(instance.port).await?.maintenance().status(StatusRequest::default()).await;
        let status = status.map_err(|status| failed("reading the database size", instance.port, status.message()))?;
        Ok(status.into_inner().db_size as f64 / f64::from(1 << 20))
    }

    async fn wait_until_ready(&mut self) -> Result<(), Error> {
        for instance in &mut self.instances {
            instance.wait_until_ready().await?;
        }
        Ok(())
    }
}

impl Instance {
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
                sleep(READY_POLL_INTERVAL).await;
            }
        };
        let ended = tokio::select! {
            ready = timeout(START_TIME_MAX, ready) => match ready {
                Ok(()) => return Ok(()),
                Err(_) => format!("no response within {START_TIME_MAX:?}"),
            },
            ended = self.process.wait() => ended.map_or_else(|error| error.to_string(), |status| status.to_string()),
        };
        let log = fs::read_to_string(self.home.path().join("log")).unwrap_or_default();
        let tail: Vec<_> = log.lines().rev().take(5).collect();
        Err(failed("starting a server", self.port, &format!("{ended}: {}", tail.join("\n"))))
    }
}

fn failed(step: &'static str, port: u16, error: &str) -> Error {
    Error::Step { step, endpoint: url(port), error: error.to_owned() }
}

fn url(port: u16) -> String {
    format!("http://127.0.0.1:{port}")
}

/// Returns the commands of the members of an etcd cluster, without those flags that all servers have.
fn etcd_commands(program: &str, members: usize) -> Result<Vec<Vec<String>>, Error> {
    let peers = (0..members).map(|_| Ok(url(free_port()?))).collect::<Result<Vec<_>, Error>>()?;
    let cluster: Vec<_> = peers.iter().enumerate().map(|(number, peer)| format!("n{number}={peer}")).collect();
    let cluster = cluster.join(",");
    let command = |(number, peer): (usize, &String)| {
        let flags = [
            ["--log-level", "error"],
            ["--name", &format!("n{number}")],
            ["--listen-peer-urls", peer],
            ["--initial-advertise-peer-urls", peer],
            ["--initial-cluster", &cluster],
        ];
        std::iter::once(program).chain(flags.concat()).map(str::to_owned).collect()
    };
    Ok(peers.iter().enumerate().map(command).collect())
}

fn orlop_commands(datastore: Option<&str>, flags: &[&str], instances: usize) -> Result<Vec<Vec<String>>, Error> {
    let program = std::env::current_exe()?.display().to_string();
    let command = |number| {
        let name = format!("n{number}");
        let own = ["--log-level", "warn", "--name", &name];
        let datastore = datastore.into_iter().flat_map(|endpoint| ["--datastore-endpoint", endpoint]);
        let flags = own.into_iter().chain(datastore).chain(flags.iter().copied());
        std::iter::once(&*program).chain(flags).map(str::to_owned).collect()
    };
    Ok((0..instances).map(command).collect())
}

/// Returns the total size of the files below the directory. Files that are deleted meanwhile are not counted.
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
    let endpoint = Endpoint { address: Address::Tcp(format!("127.0.0.1:{port}")), has_tls: false };
    Ok(Pool::connect(&Target { endpoints: vec![endpoint], tls: None, token: None }, 1).await?.client(0))
}

fn spawn(command: &[String], home: &Path) -> Result<Child, Error> {
    let log = fs::File::options().create(true).append(true).open(home.join("log"))?;
    let mut process = Command::new(&command[0]);
    process.args(&command[1..]).stdin(Stdio::null()).stdout(Stdio::null()).stderr(log).kill_on_drop(true);
    process.spawn().map_err(|error| Error::Program { program: command[0].clone(), error: error.to_string() })
}
