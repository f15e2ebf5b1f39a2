//! A temporary Postgres cluster with initdb's default settings, which include synchronous commits.

use std::{
    fs,
    path::{Path, PathBuf},
    process::Stdio,
    sync::atomic::{AtomicU32, Ordering::Relaxed},
    time::Duration,
};

use tokio::{
    process::{Child, Command},
    time::{Instant, sleep},
};

use super::process::{find_in_path, free_port, run, stop};
use crate::error::Error;

/// The user of the Postgres processes when this process runs as root. Postgres refuses to run as root.
const USER: &str = "postgres";

/// Maximum time until Postgres accepts connections.
const START_TIME_MAX: Duration = Duration::from_secs(60);

pub struct Postgres {
    programs: PathBuf,
    process: Child,
    port: u16,
    databases: AtomicU32,
}

impl Postgres {
    /// Creates a cluster in the directory, which must not exist, and starts it.
    pub async fn start(programs: &Path, folder: &Path, extra_settings: &[String]) -> Result<Self, Error> {
        fs::create_dir(folder)?;
        let is_root = procfs::process::Process::myself().and_then(|own| own.uid()).is_ok_and(|uid| uid == 0);
        if is_root {
            run(Command::new("chown").arg(USER).arg(folder)).await?;
        }
        let data = folder.join("data");
        let mut initdb = as_user(is_root, &programs.join("initdb"));
        initdb.args(["--auth=trust", "--username=orlop", "--encoding=UTF8", "--locale=C", "-D"]).arg(&data);
        run(&mut initdb).await?;
        let port = free_port()?;
        let settings = [
            format!("port={port}"),
            "listen_addresses=127.0.0.1".to_owned(),
            format!("unix_socket_directories={}", folder.display()),
            // WAL segments are recycled instead of created, as on a server that has been running for some time.
            "min_wal_size=1GB".to_owned(),
        ];
        let process = as_user(is_root, &programs.join("postgres"))
            .arg("-D")
            .arg(&data)
            .args(settings.iter().chain(extra_settings).flat_map(|setting| ["-c", setting]))
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .kill_on_drop(true)
            .spawn()?;
        let cluster = Self { programs: programs.to_owned(), process, port, databases: AtomicU32::new(0) };
        cluster.wait_until_ready().await?;
        // Writes enough WAL to create the segments that are recycled later.
        for sql in ["CREATE TABLE warm AS SELECT repeat('x', 1000) FROM generate_series(1, 500000)", "DROP TABLE warm"]
        {
            cluster.psql(sql).await?;
        }
        cluster.psql("CHECKPOINT").await?;
        Ok(cluster)
    }

    /// Creates a database; returns its endpoint.
    pub async fn create_database(&self) -> Result<String, Error> {
        let name = format!("bench_{}", self.databases.fetch_add(1, Relaxed));
        self.psql(&format!("CREATE DATABASE {name}")).await?;
        Ok(format!("postgres://orlop@127.0.0.1:{}/{name}", self.port))
    }

    pub async fn drop_database(&self, endpoint: &str) -> Result<(), Error> {
        let name = endpoint.rsplit('/').next().unwrap_or_default();
        self.psql(&format!("DROP DATABASE {name} WITH (FORCE)")).await
    }

    /// Returns the process id of the parent of all processes of the cluster.
    pub fn pid(&self) -> Option<u32> {
        self.process.id()
    }

    /// Returns the anonymous memory of all processes of the cluster, which does not include shared memory.
    pub fn memory_bytes(&self) -> Result<u64, procfs::ProcError> {
        let Some(id) = self.process.id().and_then(|id| i32::try_from(id).ok()) else { return Ok(0) };
        let statuses = procfs::process::all_processes()?.filter_map(|process| process.ok()?.status().ok());
        let own = statuses.filter(|status| status.ppid == id || status.pid == id);
        Ok(own.map(|status| status.rssanon.unwrap_or_default() << 10).sum())
    }

    pub async fn version(programs: &Path) -> Result<String, Error> {
        run(Command::new(programs.join("postgres")).arg("--version")).await
    }

    pub async fn stop(mut self) {
        stop(&mut self.process, rustix::process::Signal::INT).await;
    }

    async fn wait_until_ready(&self) -> Result<(), Error> {
        let deadline = Instant::now() + START_TIME_MAX;
        loop {
            match self.psql("SELECT 1").await {
                Err(_) if Instant::now() < deadline => sleep(Duration::from_millis(20)).await,
                ready => return ready,
            }
        }
    }

    async fn psql(&self, sql: &str) -> Result<(), Error> {
        let mut psql = Command::new(self.programs.join("psql"));
        psql.args([
            "-h",
            "127.0.0.1",
            "-p",
            &self.port.to_string(),
            "-U",
            "orlop",
            "-d",
            "postgres",
            "-X",
            "-q",
            "-c",
            sql,
        ]);
        run(&mut psql).await.map(|_| ())
    }
}

/// Returns the directory of the programs: the given one, that of initdb in PATH, or that of a Debian package.
pub fn find_programs(given: Option<&Path>) -> Result<PathBuf, Error> {
    if let Some(folder) = given {
        return Ok(folder.to_owned());
    }
    let in_path = find_in_path("initdb").and_then(|initdb| initdb.canonicalize().ok());
    let debian = || {
        let versions = fs::read_dir("/usr/lib/postgresql").ok()?;
        versions.filter_map(|entry| Some(entry.ok()?.path().join("bin/initdb"))).filter(|path| path.is_file()).max()
    };
    let initdb = in_path.or_else(debian);
    let folder = initdb.as_deref().and_then(Path::parent).map(Path::to_owned);
    folder.ok_or_else(|| {
        let text = "no initdb in PATH: install Postgres, use --postgres-programs, or do not select postgres";
        Error::Flags(text.to_owned())
    })
}

fn as_user(is_root: bool, program: &Path) -> Command {
    if !is_root {
        return Command::new(program);
    }
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={USER}")).arg(format!("--regid={USER}")).arg("--clear-groups").arg(program);
    command
}
