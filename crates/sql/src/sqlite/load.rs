//! Fills a new database file.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use rusqlite::Connection;
use sqlx::{
    ConnectOptions as _, Connection as _,
    sqlite::{SqliteJournalMode, SqliteSynchronous},
};

use super::{
    FileLock, SqliteLog,
    append::{self, OwnedStatement, Row, SET_FACT},
    lease_times, lock_file, refuse_etcd, writer,
};
use crate::{auth, migrations};
use orlop_core::{
    auth::AuthState,
    log::{Appended, Error, FactChange, Load, LoggedLease, Meta, Result},
    private,
    types::{Change, Revision},
};

/// Fills a new database file in one transaction. It writes to a temporary file and renames that file at the end, so an
/// incomplete file never has the name of the database.
pub struct SqliteLoader {
    /// `None` after an error.
    connection: Option<Connection>,
    destination: Destination,
    /// The newest revision in the first table.
    newest: Revision,
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
    async fn scratch(file: &Path) -> Result<Connection> {
        let failed = |error: &dyn std::fmt::Display| Error::Open(format!("cannot write {}: {error}", file.display()));
        private::make_file(file).map_err(|error| failed(&error))?;
        let options =
            SqliteLog::creation_options(file).journal_mode(SqliteJournalMode::Off).synchronous(SqliteSynchronous::Off);
        let mut creator = options.connect().await.map_err(|error| failed(&error))?;
        migrations::sqlite().run_direct(None, &mut creator, false).await.map_err(|error| failed(&error))?;
        creator.close().await.map_err(|error| failed(&error))?;
        let open = || {
            let connection = Connection::open(file)?;
            connection.execute_batch(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -8192; BEGIN",
            )?;
            Ok(connection)
        };
        open().map_err(|error: rusqlite::Error| failed(&error))
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
        Ok(Self {
            connection: Some(connection),
            destination: Destination { file: file.to_owned(), scratch, _lock: lock },
            newest: Revision::EMPTY,
        })
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

    fn failed(&self) -> impl Fn(rusqlite::Error) -> Error + use<> {
        let file = self.destination.scratch.clone();
        move |error| Error::Unavailable(format!("cannot write {}: {error}", file.display()))
    }

    /// Runs work on the connection.
    async fn run<T, W>(&mut self, work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&mut Connection) -> rusqlite::Result<T> + Send + 'static,
    {
        let failed = self.failed();
        let connection = self.connection.take().ok_or_else(|| failed(rusqlite::Error::InvalidQuery))?;
        let (connection, done) = writer::run(connection, work).await.map_err(failed)?;
        self.connection = Some(connection);
        Ok(done)
    }
}

fn add_facts(
    connection: &mut Connection,
    leases: &[LoggedLease],
    facts: &[(String, i64)],
    auth: &[OwnedStatement],
) -> rusqlite::Result<()> {
    for statement in auth {
        statement.execute(connection)?;
    }
    for lease in leases {
        append::add_lease(connection, lease.id, lease.ttl_secs)?;
    }
    for fact in facts {
        connection.execute(SET_FACT, (&fact.0, fact.1))?;
    }
    connection.execute_batch("COMMIT")?;
    lease_times::record(connection, leases)
}

#[async_trait]
impl Load for SqliteLoader {
    async fn add(&mut self, changes: &[Change]) -> Result<()> {
        let (rows, newest): (Vec<Row>, _) = (changes.iter().map(Row::of).collect(), self.newest);
        if self.run(move |connection| append::insert(connection, &rows, newest)).await? == Appended::Conflict {
            return Err(Error::Corrupt(format!("rows after revision {newest} are out of order")));
        }
        let first = changes.iter().rev().find(|change| change.row.sub == 0);
        self.newest = first.map_or(newest, |change| change.row.revision);
        Ok(())
    }

    async fn finish(mut self: Box<Self>, meta: &Meta, auth: &AuthState) -> Result<()> {
        let compacted = meta.compact_revision.map(|revision| ("compact_revision".to_owned(), revision.0));
        let source = meta.source.map(|source| FactChange::Source(Some(source)).fact());
        let source = source.and_then(|(name, value)| Some((name, value?)));
        let facts: Vec<(String, i64)> = compacted.into_iter().chain(source).collect();
        let (leases, auth) = (meta.leases.clone(), OwnedStatement::all(auth::all(auth)));
        self.run(move |connection| add_facts(connection, &leases, &facts, &auth)).await?;
        let failed = self.failed();
        let Self { connection, destination, .. } = *self;
        connection.map_or(Ok(()), |connection| connection.close().map_err(|(_, error)| failed(error)))?;
        move_file(&destination.scratch, &destination.file)
            .map_err(|error| Error::Unavailable(format!("cannot write {}: {error}", destination.file.display())))
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
