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

use super::{FileLock, SqliteLog, append, lease_times, lock_file, refuse_etcd};
use crate::{
    auth::{self, bind_params},
    migrations,
};
use orlop_core::{
    auth::AuthState,
    log::{Appended, Error, FactChange, Load, Meta, Result},
    private,
    types::Change,
};

/// Fills a new database file in one transaction. It writes to a temporary file and renames that file at the end, so an
/// incomplete file never has the name of the database.
pub struct SqliteLoader {
    connection: SqliteConnection,
    destination: Destination,
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
    /// Creates a database file without a journal and without syncs, which a crash may damage.
    async fn scratch(file: &Path) -> Result<SqliteConnection> {
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
        Ok(connection)
    }

    /// Creates the database file of a new instance, with a new cluster ID.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the file, or a WAL or journal of it, exists.
    pub async fn database(file: &Path) -> Result<Self> {
        refuse_etcd(file)?;
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
        let connection = Self::scratch(&scratch).await?;
        Ok(Self { connection, destination: Destination { file: file.to_owned(), scratch, _lock: lock }, newest: 1 })
    }

    /// Deletes a database file that no process uses, with its WAL, whatever it contains.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if another process uses the file, or it cannot be deleted.
    pub fn discard(file: &Path) -> Result<()> {
        let _lock = lock_file(file)?;
        for suffix in ["-wal", "-shm", "-journal", ""] {
            let path = with_suffix(file, suffix);
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    return Err(Error::Open(format!("cannot remove {}: {error}", path.display())));
                }
                Ok(()) | Err(_) => {}
            }
        }
        Ok(())
    }

    fn failed(&self) -> impl Fn(sqlx::Error) -> Error + use<> {
        let file = self.destination.scratch.clone();
        move |error| Error::Unavailable(format!("cannot write {}: {error}", file.display()))
    }

    async fn add_facts(&mut self, meta: &Meta, auth: &AuthState) -> sqlx::Result<()> {
        for statement in auth::all(auth) {
            bind_params!(statement).execute(&mut self.connection).await?;
        }
        for lease in &meta.leases {
            let insert = sqlx::query("INSERT INTO lease (id, ttl) VALUES (?, ?)").bind(lease.id.0).bind(lease.ttl_secs);
            insert.execute(&mut self.connection).await?;
        }
        if let Some(revision) = meta.compact_revision {
            let insert = sqlx::query("INSERT OR REPLACE INTO meta (name, value) VALUES ('compact_revision', ?)");
            insert.bind(revision.0).execute(&mut self.connection).await?;
        }
        if let Some((name, Some(value))) = meta.source.map(|source| FactChange::Source(Some(source)).fact()) {
            let insert = sqlx::query("INSERT INTO meta (name, value) VALUES (?, ?)").bind(name).bind(value);
            insert.execute(&mut self.connection).await?;
        }
        sqlx::raw_sql("COMMIT").execute(&mut self.connection).await?;
        lease_times::record(&mut self.connection, &meta.leases).await
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

    async fn finish(mut self: Box<Self>, meta: &Meta, auth: &AuthState) -> Result<()> {
        let failed = self.failed();
        self.add_facts(meta, auth).await.map_err(&failed)?;
        let Self { connection, destination, .. } = *self;
        connection.close().await.map_err(&failed)?;
        move_file(&destination.scratch, &destination.file).map_err(|error| failed(error.into()))
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
