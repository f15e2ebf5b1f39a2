//! The test bed: the directory, the programs and the Postgres cluster that all servers share.

use std::{
    fs,
    os::unix::fs::PermissionsExt as _,
    path::{Path, PathBuf},
};

use tempfile::TempDir;
use tokio::process::Command;

use super::{
    postgres::{self, Postgres},
    process::{find_in_path, run},
    server_kind::ServerKind,
};
use crate::error::Error;

pub struct TestBed {
    folder: TempDir,
    pub etcd: Option<PathBuf>,
    pub postgres: Option<Postgres>,
    /// Versions of etcd and Postgres, as far as they are used.
    pub versions: Vec<String>,
}

pub struct TestBedOptions<'a> {
    pub work_dir: &'a Path,
    pub servers: &'a [ServerKind],
    pub etcd: Option<&'a Path>,
    pub postgres_programs: Option<&'a Path>,
    /// Settings of Postgres, each as `name=value`.
    pub postgres_settings: &'a [String],
}

impl TestBed {
    /// Creates the directory, finds the programs and starts Postgres if it is needed.
    pub async fn open(options: TestBedOptions<'_>) -> Result<Self, Error> {
        let work_dir = options.work_dir;
        let folder = tempfile::Builder::new().prefix("orlop-bench-").tempdir_in(work_dir);
        let folder = folder.map_err(|error| Error::Flags(format!("--work-dir {}: {error}", work_dir.display())))?;
        // Postgres may run as another user, who needs access to the directory.
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755))?;
        let path = folder.path().canonicalize()?;
        let mut test_bed = Self { folder, etcd: None, postgres: None, versions: Vec::new() };
        if options.servers.contains(&ServerKind::Etcd) {
            let etcd = find_etcd(options.etcd)?;
            let version = run(Command::new(&etcd).arg("--version")).await?;
            test_bed.versions.extend(version.lines().next().map(|line| line.to_lowercase().replace(" version:", "")));
            test_bed.etcd = Some(etcd);
        }
        if options.servers.contains(&ServerKind::Postgres) {
            let programs = postgres::find_programs(options.postgres_programs)?;
            test_bed.versions.push(Postgres::version(&programs).await?);
            let postgres = Postgres::start(&programs, &path.join("postgres"), options.postgres_settings).await?;
            test_bed.postgres = Some(postgres);
        }
        Ok(test_bed)
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    /// Stops Postgres and removes the directory.
    pub async fn close(self) {
        if let Some(postgres) = self.postgres {
            postgres.stop().await;
        }
    }
}

fn find_etcd(given: Option<&Path>) -> Result<PathBuf, Error> {
    let fetched = || Some(PathBuf::from("target/tools/etcd/usr/bin/etcd")).filter(|path| path.is_file());
    let found = given.map(Path::to_owned).or_else(fetched).or_else(|| find_in_path("etcd"));
    found.ok_or_else(|| {
        let text = "no etcd in PATH: run scripts/fetch-etcd, use --etcd, or do not select etcd with --servers";
        Error::Flags(text.to_owned())
    })
}
