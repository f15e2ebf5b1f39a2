//! Fills a new database file.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use sqlx::{
    ConnectOptions as _, Connection as _, SqliteConnection,
    sqlite::{SqliteJournalMode, SqliteSynchronous},
};

use super::{FileLock, SqliteLog, append, lock_file};
use crate::migrations;
use orlop_core::{
    log::{Appended, Cluster, Error, Load, Meta, Result},
    private,
    types::Change,
};

/// Fills a new database file in one transaction. For the database of an instance ([`Self::database`]), it writes to a
/// temporary file and renames that file at the end, so an incomplete file never has the name of the database.
pub struct SqliteLoader {
    connection: SqliteConnection,
    /// The file that is written.
    file: PathBuf,
    /// Where the file is moved at the end. `None`: it is not moved.
    destination: Option<Destination>,
    cluster: Cluster,
    /// The newest revision in the first table.
    newest: i64,
}

struct Destination {
    /// The final path.
    file: PathBuf,
    /// The temporary file, removed unless it was renamed.
    scratch: PathBuf,
    _lock: FileLock,
}

impl Drop for Destination {
    fn drop(&mut self) {
        // If this fails, the next restore removes the file.
        let _ = std::fs::remove_file(&self.scratch);
    }
}

impl SqliteLoader {
    /// Creates a database file without a journal and without syncs, which a crash may damage. An empty file with this
    /// path may already exist.
    pub async fn scratch(file: &Path, cluster: Cluster) -> Result<Self> {
        let failed = |error: sqlx::Error| Error::Open(format!("cannot write {}: {error}", file.display()));
        private::make_file(file).map_err(|error| failed(error.into()))?;
        let options =
            SqliteLog::creation_options(file).journal_mode(SqliteJournalMode::Off).synchronous(SqliteSynchronous::Off);
        let mut connection = options.connect().await.map_err(failed)?;
        migrations::sqlite()
            .run_direct(None, &mut connection, false)
            .await
            .map_err(|error| Error::Open(format!("cannot write {}: {error}", file.display())))?;
        sqlx::raw_sql("BEGIN").execute(&mut connection).await.map_err(failed)?;
        Ok(Self { connection, file: file.to_owned(), destination: None, cluster, newest: 1 })
    }

    /// Creates the database file of a new instance, with a new cluster ID.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the file, or a WAL or journal of it, exists.
    pub async fn database(file: &Path) -> Result<Self> {
        let lock = lock_file(file)?;
        for suffix in ["", "-wal", "-shm", "-journal"] {
            let path = with_suffix(file, suffix);
            if path.exists() {
                return Err(Error::Open(format!(
                    "{} exists already; move it and the files whose names start with its name to another folder, \
                     or restore to another folder",
                    path.display()
                )));
            }
        }
        let scratch = with_suffix(file, ".restoring");
        match std::fs::remove_file(&scratch) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                return Err(Error::Open(format!("cannot remove {}: {error}", scratch.display())));
            }
            Ok(()) | Err(_) => {}
        }
        let loader = Self::scratch(&scratch, Cluster::New).await?;
        Ok(Self { destination: Some(Destination { file: file.to_owned(), scratch, _lock: lock }), ..loader })
    }

    fn failed(&self) -> impl Fn(sqlx::Error) -> Error + use<> {
        let file = self.file.clone();
        move |error| Error::Unavailable(format!("cannot write {}: {error}", file.display()))
    }

    async fn add_facts(&mut self, meta: &Meta) -> sqlx::Result<()> {
        for lease in &meta.leases {
            let insert = sqlx::query("INSERT INTO lease (id, ttl) VALUES (?, ?)").bind(lease.id.0).bind(lease.ttl_secs);
            insert.execute(&mut self.connection).await?;
        }
        let cluster_id = (self.cluster == Cluster::Same).then_some(("cluster_id", meta.cluster_id.cast_signed()));
        let compact_revision = meta.compact_revision.map(|revision| ("compact_revision", revision.0));
        for (name, value) in [cluster_id, compact_revision].into_iter().flatten() {
            let insert = sqlx::query("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)").bind(name).bind(value);
            insert.execute(&mut self.connection).await?;
        }
        sqlx::raw_sql("COMMIT").execute(&mut self.connection).await.map(drop)
    }
}

#[async_trait]
impl Load for SqliteLoader {
    async fn add(&mut self, changes: &[Change]) -> Result<()> {
        let failed = self.failed();
        let (first, more): (Vec<&Change>, Vec<&Change>) = changes.iter().partition(|change| change.row.sub == 0);
        let appended = append::insert(&mut self.connection, &first, &more, self.newest).await.map_err(failed)?;
        if appended == Appended::Conflict {
            return Err(Error::Corrupt(format!("rows after revision {} are out of order", self.newest)));
        }
        self.newest = first.last().map_or(self.newest, |change| change.row.revision.0);
        Ok(())
    }

    async fn finish(mut self: Box<Self>, meta: &Meta) -> Result<()> {
        let failed = self.failed();
        self.add_facts(meta).await.map_err(&failed)?;
        let Self { connection, file, destination, .. } = *self;
        connection.close().await.map_err(&failed)?;
        let Some(destination) = destination else { return Ok(()) };
        move_file(&file, &destination.file).map_err(|error| failed(error.into()))
    }
}

/// Syncs a file, moves it to its final path and syncs the directory.
fn move_file(file: &Path, destination: &Path) -> std::io::Result<()> {
    File::open(file)?.sync_all()?;
    std::fs::rename(file, destination)?;
    match destination.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        Some(folder) => File::open(folder)?.sync_all(),
        None => File::open(".")?.sync_all(),
    }
}

pub(super) fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
