//! Fills a new database file.

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use async_trait::async_trait;
use rusqlite::Connection;
use sqlx::{
    ConnectOptions as _, Connection as _,
    migrate::Migrator,
    sqlite::{SqliteJournalMode, SqliteSynchronous},
};

use super::{
    FileLock, SqliteLog,
    append::{self, OwnedStatement, Row, SET_FACT},
    archive,
    foreign::refuse_etcd,
    lease_times, lock_file, writer,
};
use crate::{auth, migrations};
use orlop_core::{
    auth::AuthState,
    files::rename_durably,
    log::{Appended, ArchivePart, Error, FactChange, Load, LoggedLease, Meta, Result},
    private,
    types::{Change, Revision},
};

/// End of the names of temporary files.
const RESTORING: &str = ".restoring";
const CLUSTER: &str = "SELECT value FROM meta WHERE name = 'cluster_id'";

/// Fills a new database file, and that of its archive, each in one transaction.
pub struct SqliteLoader {
    database: Scratch,
    archive: Option<archive::Loader>,
    /// The newest revision in the first table.
    newest: Revision,
    _lock: FileLock,
}

/// A new file. Its content is written to a temporary file that is renamed at the end, so an incomplete file never has the
/// name.
pub(super) struct Scratch {
    /// The final path.
    file: PathBuf,
    /// The temporary file, removed unless it was renamed.
    scratch: PathBuf,
    /// `None` after an error.
    connection: Option<Connection>,
}

impl Drop for Scratch {
    fn drop(&mut self) {
        // If this fails, the next restore removes the file.
        let _ = std::fs::remove_file(&self.scratch);
    }
}

impl Scratch {
    /// Creates the temporary file and begins a transaction in it, without a journal and without syncs.
    pub(super) async fn new(file: &Path, schema: &Migrator) -> Result<Self> {
        let scratch = with_suffix(file, RESTORING);
        remove(&scratch)?;
        let failed =
            |error: &dyn std::fmt::Display| Error::Open(format!("cannot write {}: {error}", scratch.display()));
        private::make_file(&scratch).map_err(|error| failed(&error))?;
        let options = SqliteLog::creation_options(&scratch)
            .journal_mode(SqliteJournalMode::Off)
            .synchronous(SqliteSynchronous::Off);
        let mut creator = options.connect().await.map_err(|error| failed(&error))?;
        schema.run_direct(None, &mut creator, false).await.map_err(|error| failed(&error))?;
        creator.close().await.map_err(|error| failed(&error))?;
        let open = || {
            let connection = Connection::open(&scratch)?;
            connection.execute_batch(
                "PRAGMA journal_mode = OFF; PRAGMA synchronous = OFF; PRAGMA cache_size = -8192; BEGIN",
            )?;
            Ok(connection)
        };
        let connection = open().map_err(|error: rusqlite::Error| failed(&error))?;
        Ok(Self { file: file.to_owned(), scratch, connection: Some(connection) })
    }

    fn failed(&self) -> impl Fn(rusqlite::Error) -> Error + use<> {
        let file = self.scratch.clone();
        move |error| Error::Unavailable(format!("cannot write {}: {error}", file.display()))
    }

    /// Runs work on the connection.
    pub(super) async fn run<T, W>(&mut self, work: W) -> Result<T>
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

    /// Closes and syncs the file, after the transaction was committed.
    pub(super) fn complete(mut self) -> Result<Complete> {
        let failed = self.failed();
        let connection = self.connection.take();
        connection.map_or(Ok(()), |connection| connection.close().map_err(|(_, error)| failed(error)))?;
        let synced = File::open(&self.scratch).and_then(|file| file.sync_all());
        synced.map_err(|error| Error::Unavailable(format!("cannot write {}: {error}", self.scratch.display())))?;
        Ok(Complete(self))
    }
}

/// A complete file that still has its temporary name.
pub(super) struct Complete(Scratch);

impl Complete {
    /// Gives the file its name.
    fn publish(self) -> Result<()> {
        let Scratch { file, scratch, .. } = &self.0;
        rename_durably(scratch, file)
            .map_err(|error| Error::Unavailable(format!("cannot write {}: {error}", file.display())))
    }
}

impl SqliteLoader {
    /// Creates the database file of a new instance, with a new cluster ID. The archive of a restore that was killed before its
    /// last step is set aside.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the file or its archive, or a WAL or journal of one of them, exists.
    pub async fn database(file: &Path) -> Result<Self> {
        refuse_etcd(file)?;
        let lock = lock_file(file)?;
        refuse_existing(&["", "-wal", "-shm", "-journal"].map(|suffix| with_suffix(file, suffix)))?;
        if with_suffix(file, RESTORING).exists() {
            archive::set_aside(&archive::archive_file(file))?;
        }
        refuse_existing(&archive::Loader::files(file))?;
        remove_unfinished(file)?;
        let database = Scratch::new(file, &migrations::sqlite()).await?;
        Ok(Self { database, archive: None, newest: Revision::EMPTY, _lock: lock })
    }

    /// Deletes a database file that no process uses, with its WAL and its archive, whatever they contain. An archive without a
    /// database, which may be that of another one, is set aside.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if another process uses the file, or a file cannot be deleted or renamed.
    pub fn discard(file: &Path) -> Result<()> {
        let _lock = lock_file(file)?;
        if file.exists() {
            archive::Loader::files(file).iter().try_for_each(|path| remove(path))?;
        } else {
            archive::set_aside(&archive::archive_file(file))?;
        }
        // The database first: a WAL beside no database is ignored, but a database without its WAL lacks commits.
        ["", "-wal", "-shm", "-journal"].iter().try_for_each(|suffix| remove(&with_suffix(file, suffix)))
    }
}

/// Removes the temporary files that a restore which was killed has left. Call it with the lock of the database.
///
/// # Errors
///
/// [`Error::Open`] if a file cannot be removed.
pub(super) fn remove_unfinished(file: &Path) -> Result<()> {
    [file, &archive::archive_file(file)].into_iter().try_for_each(|file| remove(&with_suffix(file, RESTORING)))
}

fn refuse_existing(files: &[PathBuf]) -> Result<()> {
    files.iter().find(|file| file.exists()).map_or(Ok(()), |file| {
        Err(Error::Open(format!(
            "{} exists already; move it and the files whose names start with its name to another folder, or restore to \
             another folder",
            file.display()
        )))
    })
}

/// Removes a file, if it exists.
fn remove(path: &Path) -> Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::Open(format!("cannot remove {}: {error}", path.display())))
        }
        Ok(()) | Err(_) => Ok(()),
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
        let inserted = self.database.run(move |connection| append::insert(connection, &rows, newest)).await?;
        if inserted == Appended::Conflict {
            return Err(Error::Corrupt(format!("rows after revision {newest} are out of order")));
        }
        let first = changes.iter().rev().find(|change| change.row.sub == 0);
        self.newest = first.map_or(newest, |change| change.row.revision);
        Ok(())
    }

    async fn add_archive(&mut self, part: ArchivePart) -> Result<()> {
        match (&mut self.archive, part) {
            (Some(archive), part) => archive.add(part).await,
            (None, ArchivePart::Begin { first, copied }) => {
                self.archive = Some(archive::Loader::new(&self.database.file, first, copied).await?);
                Ok(())
            }
            (None, ArchivePart::Rows(_) | ArchivePart::Moments(_)) => {
                Err(Error::Corrupt("the archive has no beginning".to_owned()))
            }
        }
    }

    async fn finish(mut self: Box<Self>, meta: &Meta, auth: &AuthState) -> Result<()> {
        let compacted = meta.compact_revision.map(|revision| ("compact_revision".to_owned(), revision.0));
        let source = meta.source.map(|source| FactChange::Source(Some(source)).fact());
        let source = source.and_then(|(name, value)| Some((name, value?)));
        let facts: Vec<(String, i64)> = compacted.into_iter().chain(source).collect();
        let (leases, auth) = (meta.leases.clone(), OwnedStatement::all(auth::all(auth)));
        self.database.run(move |connection| add_facts(connection, &leases, &facts, &auth)).await?;
        let cluster = self.database.run(|connection| connection.query_row(CLUSTER, [], |row| row.get(0))).await?;
        let archive = match self.archive.take() {
            Some(archive) => Some(archive.finish(cluster).await?),
            None => None,
        };
        let file = self.database.file.clone();
        let database = self.database.complete()?;
        // The archive first: a server on a database without its archive would begin another one.
        let published = archive.map_or(Ok(()), Complete::publish).and_then(|()| database.publish());
        if published.is_err() && !file.exists() {
            archive::Loader::files(&file).iter().for_each(|path| drop(remove(path)));
        }
        published
    }
}

pub(super) fn with_suffix(file: &Path, suffix: &str) -> PathBuf {
    let mut name = file.as_os_str().to_owned();
    name.push(suffix);
    name.into()
}
