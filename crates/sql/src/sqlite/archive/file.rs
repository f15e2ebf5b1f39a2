//! The file of the archive: opens it, sets it aside if it is damaged, and replaces it if it cannot be written.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::Arc,
};

use orlop_core::{
    log::{Error, Meta, Result},
    private,
    types::Revision,
};
use parking_lot::Mutex;
use sqlx::{
    ConnectOptions as _, Connection as _, SqliteConnection, SqlitePool,
    migrate::MigrateError,
    sqlite::{SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::{runtime::Handle, task::spawn_blocking};
use tracing::warn;

use super::{
    SqliteArchive,
    sql::{ARCHIVED_FACT, BEGIN, CLUSTER, KNOWN, READ_FACT},
    writer::Writer,
};
use crate::{
    error::describe,
    migrations::{self, cannot_migrate},
    sqlite::{
        BUSY_TIMEOUT, SqliteLog,
        load::with_suffix,
        result_code::{
            CODE_BUSY, CODE_CORRUPT, CODE_ERROR, CODE_FULL, CODE_IO, CODE_LOCKED, CODE_NO_MEMORY, CODE_NOT_A_DATABASE,
            ResultCode as _,
        },
        wal::FILE_BYTES_MAX,
    },
};

/// Maximum number of connections for reads.
const READERS_MAX: u32 = 2;

/// Returns the archive's file of a database file.
pub(in crate::sqlite) fn archive_file(database: &Path) -> PathBuf {
    with_suffix(database, "-archive")
}

/// Renames the file of an archive, if it exists, so that it is not used. A file that was set aside before stays.
///
/// # Errors
///
/// [`Error::Open`] if it cannot be renamed.
pub(in crate::sqlite) fn set_aside(file: &Path) -> Result<()> {
    if !file.exists() {
        return Ok(());
    }
    let (mut aside, mut number) = (with_suffix(file, ".unused"), 0);
    while aside.exists() {
        number += 1;
        aside = with_suffix(file, &format!(".unused.{number}"));
    }
    warn!(file = %file.display(), moved_to = %aside.display(), "setting an archive of the history aside");
    for suffix in ["-wal", "-shm"] {
        // They exist only after a crash.
        let _ = std::fs::rename(with_suffix(file, suffix), with_suffix(&aside, suffix));
    }
    std::fs::rename(file, &aside).map_err(|error| Error::Open(format!("cannot rename {}: {error}", file.display())))
}

/// Deletes the file of an archive, which frees its space.
fn delete(file: &Path) -> Result<()> {
    for path in [file.to_path_buf(), with_suffix(file, "-wal"), with_suffix(file, "-shm")] {
        match std::fs::remove_file(&path) {
            Err(error) if error.kind() != ErrorKind::NotFound => {
                return Err(Error::Unavailable(format!("cannot delete {}: {error}", path.display())));
            }
            Ok(()) | Err(_) => {}
        }
    }
    Ok(())
}

/// Why the file cannot be opened or written.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) kind: Kind,
    pub(super) text: String,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// The content is damaged, or is not that of an archive.
    Damage,
    /// It is the archive of another log, or of a later or an earlier state of this one.
    Foreign,
    /// The disk is full or failed.
    Disk,
    /// Another process has locked the file, or there is no memory.
    Busy,
    /// For example, a newer version wrote it, or this user may not read it.
    Other,
}

impl Failure {
    pub(super) fn of(error: &sqlx::Error) -> Self {
        let kind = match error.result_code().map(|code| code & 0xff) {
            Some(CODE_ERROR | CODE_CORRUPT | CODE_NOT_A_DATABASE) => Kind::Damage,
            // If the disk is full, SQLite may report that it cannot extend the index of the WAL.
            Some(CODE_FULL | CODE_IO) => Kind::Disk,
            Some(CODE_BUSY | CODE_LOCKED | CODE_NO_MEMORY) => Kind::Busy,
            Some(_) | None => Kind::Other,
        };
        Self { kind, text: describe(error) }
    }

    fn of_opening(file: &Path, error: &sqlx::Error) -> Self {
        let Self { kind, text } = Self::of(error);
        Self { kind, text: format!("cannot open archive {}: {text}", file.display()) }
    }

    fn of_migration(file: &Path, error: &MigrateError) -> Self {
        let kind = if let MigrateError::Execute(cause) | MigrateError::ExecuteMigration(cause, _) = error {
            Self::of(cause).kind
        } else {
            Kind::Other
        };
        Self { kind, text: cannot_migrate(&file.display().to_string(), error) }
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        Self::Unavailable(failure.text)
    }
}

/// What tells whether an archive belongs to a log.
#[derive(Debug, Clone, Copy)]
pub(super) struct Owner {
    cluster: i64,
    compacted: Revision,
    head: Revision,
    /// The newest compaction whose rows were copied to an archive.
    archived: Revision,
}

impl Owner {
    fn of(meta: &Meta, archived: Option<i64>) -> Self {
        Self {
            archived: Revision(archived.unwrap_or(0)),
            cluster: meta.cluster_id.cast_signed(),
            compacted: meta.compact_revision.unwrap_or(Revision::EMPTY),
            head: meta.position.head,
        }
    }
}

impl SqliteLog {
    /// Returns whether there is an archive beside the database.
    pub fn has_archive(&self) -> bool {
        archive_file(self.options.get_filename()).exists()
    }

    /// Opens the archive beside the database, or creates it if `create`; `None`: there is none. An archive that is damaged,
    /// or that belongs to another log or to another state of this one, is set aside with a warning. If the file cannot be
    /// opened for another reason, for example because the disk is full, it stays: the calls of the archive fail until one
    /// of those that write opens it.
    pub async fn archive(&self, meta: &Meta, create: bool) -> Option<SqliteArchive> {
        let file = archive_file(self.options.get_filename());
        if !create && !file.exists() {
            return None;
        }
        // Without an answer only a later state is recognized.
        let archived =
            sqlx::query_scalar(READ_FACT).bind(ARCHIVED_FACT).fetch_optional(&self.readers).await.unwrap_or_default();
        let archive = SqliteArchive::new(&file, self, Owner::of(meta, archived));
        let mut opened = archive.open().await;
        if let Err(Failure { kind: Kind::Damage | Kind::Foreign, text }) = &opened {
            warn!(file = %file.display(), reason = text, "the archive of the history is not used");
            match set_aside(&file) {
                Ok(()) if !create => return None,
                Ok(()) => opened = archive.open().await,
                Err(error) => warn!(%error, "cannot set the archive of the history aside"),
            }
        }
        if let Err(Failure { text, .. }) = opened {
            warn!(file = %file.display(), reason = text, "cannot open the archive of the history; trying again later");
        }
        Some(archive)
    }
}

/// Opens the file, which is created if it does not exist. A new archive begins at `first`, if that is known.
async fn connect(
    options: SqliteConnectOptions,
    owner: Owner,
    first: Option<Revision>,
) -> std::result::Result<(SqliteConnection, SqlitePool), Failure> {
    let file = options.get_filename();
    if file.is_dir() {
        return Err(Failure { kind: Kind::Damage, text: format!("archive {} is a folder", file.display()) });
    }
    private::make_file(file).map_err(|error| Failure::of_opening(file, &error.into()))?;
    let mut writer = options.connect().await.map_err(|error| Failure::of_opening(file, &error))?;
    let prepared = prepare(&mut writer, &options, owner, first).await;
    match prepared {
        Ok(readers) => Ok((writer, readers)),
        Err(failure) => {
            // Before the file is renamed: the last connection deletes the WAL.
            let _ = writer.close().await;
            Err(failure)
        }
    }
}

/// Migrates the schema, checks whether the archive belongs to the log, and connects for reads.
async fn prepare(
    writer: &mut SqliteConnection,
    options: &SqliteConnectOptions,
    owner: Owner,
    first: Option<Revision>,
) -> std::result::Result<SqlitePool, Failure> {
    let file = options.get_filename();
    let failed = |error: sqlx::Error| Failure::of_opening(file, &error);
    let migrated = migrations::sqlite_archive().run(&mut *writer).await;
    migrated.map_err(|error| Failure::of_migration(file, &error))?;
    if let Some(text) = refusal(&mut *writer, owner).await.map_err(failed)? {
        return Err(Failure { kind: Kind::Foreign, text });
    }
    let readers = SqlitePoolOptions::new()
        .max_connections(READERS_MAX)
        .min_connections(0)
        .connect_with(options.clone().pragma("query_only", "ON"))
        .await
        .map_err(failed)?;
    if let Some(first) = first {
        sqlx::query(BEGIN).bind(first.0).execute(&mut *writer).await.map_err(failed)?;
    }
    Ok(readers)
}

/// Returns why the archive does not belong to the log. A new archive belongs to it.
async fn refusal(connection: &mut SqliteConnection, owner: Owner) -> sqlx::Result<Option<String>> {
    sqlx::query(CLUSTER).bind(owner.cluster).execute(&mut *connection).await?;
    let known: (i64, Option<i64>, i64) = sqlx::query_as(KNOWN).fetch_one(connection).await?;
    let (cluster, copied, noted) = known;
    if cluster != owner.cluster {
        return Ok(Some("it belongs to another store".to_owned()));
    }
    if copied > Some(owner.compacted.0) || noted > owner.head.0 {
        return Ok(Some(format!(
            "it is of a later state than the database, which may have been restored: the head is {}, the archive knows \
             revision {}",
            owner.head,
            copied.unwrap_or(0).max(noted)
        )));
    }
    let earlier = copied.filter(|copied| *copied < owner.archived.0);
    Ok(earlier.map(|copied| {
        format!(
            "it is of an earlier state than the database: it lacks the rows of the compactions after revision {copied}, up \
             to {}",
            owner.archived
        )
    }))
}

impl SqliteArchive {
    /// Does not open the file.
    fn new(file: &Path, log: &SqliteLog, owner: Owner) -> Self {
        // A connection does not create the file, because it would have no tables then ([`connect`]).
        let options = SqliteConnectOptions::new()
            .filename(file)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            .pragma("journal_size_limit", FILE_BYTES_MAX)
            .pragma("cache_size", "-2048")
            .disable_statement_logging();
        let log_writer = Arc::clone(&log.writer);
        Self { writer: Writer::new(options), readers: Mutex::new(None), log: log.readers.clone(), log_writer, owner }
    }

    /// Opens the file, unless it is open, and checks whether it belongs to the log.
    pub(super) async fn open(&self) -> std::result::Result<(), Failure> {
        let mut slot = self.writer.block().await;
        if self.readers.lock().is_some() {
            return Ok(());
        }
        let (writer, readers) = self.connected(None).await?;
        slot.put(writer);
        *self.readers.lock() = Some(readers);
        Ok(())
    }

    /// Calls [`connect`] on a thread of its own, because the future that migrates the schema cannot move between threads.
    async fn connected(&self, first: Option<Revision>) -> std::result::Result<(SqliteConnection, SqlitePool), Failure> {
        let (options, owner, runtime) = (self.writer.options().clone(), self.owner, Handle::current());
        let connected = spawn_blocking(move || runtime.block_on(connect(options, owner, first))).await;
        connected.unwrap_or_else(|error| Err(Failure { kind: Kind::Other, text: error.to_string() }))
    }

    /// Creates another file, which begins at `first`, in place of one that cannot be written. If it cannot be created, the
    /// archive is not open.
    pub(super) async fn replace_file(&self, first: Revision, failure: &Failure) -> Result<()> {
        let mut slot = self.writer.block().await;
        if let Some(connection) = slot.take() {
            // It may be unable to close properly, and is dropped then.
            let _ = connection.close().await;
        }
        let readers = self.readers.lock().take();
        if let Some(readers) = readers {
            readers.close().await;
        }
        let file = self.writer.options().get_filename();
        match failure.kind {
            Kind::Damage | Kind::Disk => delete(file)?,
            Kind::Foreign | Kind::Busy | Kind::Other => set_aside(file)?,
        }
        match self.connected(Some(first)).await {
            Ok((writer, readers)) => {
                slot.put(writer);
                *self.readers.lock() = Some(readers);
            }
            Err(Failure { text, .. }) => warn!(reason = text, "there is no archive of the history now"),
        }
        Ok(())
    }
}
