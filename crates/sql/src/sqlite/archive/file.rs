//! The file of the archive: opens it, sets it aside if it cannot be used, and replaces it if it cannot be written.

use std::{
    io::ErrorKind,
    path::{Path, PathBuf},
    sync::atomic::{AtomicI64, Ordering},
};

use orlop_core::{
    log::{Archive as _, Error, Meta, Result},
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
    sql::{BEGIN, CLUSTER},
    writer::Writer,
};
use crate::{
    migrations,
    rows::{cannot_migrate, unavailable},
    sqlite::{BUSY_TIMEOUT, CODE_FULL, SqliteLog, has_code, load::with_suffix},
};

/// Maximum number of connections for reads.
const READERS_MAX: u32 = 2;
/// Size to which SQLite truncates a WAL that has grown beyond it.
const WAL_BYTES_MAX: &str = "67108864";

/// Returns the archive's file of a database file.
pub(in crate::sqlite) fn archive_file(database: &Path) -> PathBuf {
    with_suffix(database, "-archive")
}

/// Renames the archive of a database file, if there is one, so that it is not used.
///
/// # Errors
///
/// [`Error::Open`] if it cannot be renamed.
pub(in crate::sqlite) fn set_aside(database: &Path) -> Result<()> {
    let file = archive_file(database);
    if !file.exists() {
        return Ok(());
    }
    let aside = with_suffix(&file, ".unused");
    warn!(file = %file.display(), moved_to = %aside.display(), "setting an archive of the history aside");
    for suffix in ["-wal", "-shm"] {
        // They exist only after a crash.
        let _ = std::fs::rename(with_suffix(&file, suffix), with_suffix(&aside, suffix));
    }
    std::fs::rename(&file, &aside).map_err(|error| Error::Open(format!("cannot rename {}: {error}", file.display())))
}

impl SqliteLog {
    /// Returns whether there is an archive beside the database.
    pub fn has_archive(&self) -> bool {
        archive_file(self.options.get_filename()).exists()
    }

    /// Opens the archive beside the database, or creates it if `create`; `None`: there is none. An archive that cannot be
    /// read, for example because it is damaged, or that belongs to another log or to a later state of this one, is set
    /// aside with a warning.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if it cannot be set aside, or another file cannot be created; [`Error::Full`] if the disk is full.
    pub async fn archive(&self, meta: &Meta, create: bool) -> Result<Option<SqliteArchive>> {
        let file = archive_file(self.options.get_filename());
        if !create && !file.exists() {
            return Ok(None);
        }
        let reason = match SqliteArchive::open(&file, self.readers.clone()).await {
            Ok(archive) => match archive.refusal(meta).await {
                Ok(None) => return Ok(Some(archive)),
                Ok(Some(reason)) => {
                    archive.close().await;
                    reason
                }
                Err(error) => {
                    archive.close().await;
                    usable_later(error)?
                }
            },
            Err(error) => usable_later(error)?,
        };
        warn!(file = %file.display(), reason, "the archive of the history is not used");
        set_aside(self.options.get_filename())?;
        if !create {
            return Ok(None);
        }
        let archive = SqliteArchive::open(&file, self.readers.clone()).await?;
        // It records the cluster.
        archive.refusal(meta).await?;
        Ok(Some(archive))
    }
}

/// Returns the text of an error that makes the archive unusable.
///
/// # Errors
///
/// The same error, if the archive can be used later.
fn usable_later(error: Error) -> Result<String> {
    if matches!(error, Error::Full(_)) { Err(error) } else { Ok(error.to_string()) }
}

/// Creates or opens the file, and connects to it.
async fn connect(options: SqliteConnectOptions) -> Result<(SqliteConnection, SqlitePool)> {
    let file = options.get_filename();
    let name = file.display().to_string();
    let failed = |error: sqlx::Error| {
        let text = format!("cannot open archive {name}: {error}");
        if has_code(&error, CODE_FULL) { Error::Full(text) } else { Error::Open(text) }
    };
    private::make_file(file).map_err(|error| failed(error.into()))?;
    let mut writer = options.connect().await.map_err(failed)?;
    migrations::sqlite_archive().run(&mut writer).await.map_err(|error| {
        if let MigrateError::Execute(full) = &error
            && has_code(full, CODE_FULL)
        {
            return Error::Full(format!("cannot open archive {name}: {full}"));
        }
        Error::Open(cannot_migrate(&name, &error))
    })?;
    let readers = SqlitePoolOptions::new()
        .max_connections(READERS_MAX)
        .min_connections(0)
        .connect_with(options.clone().pragma("query_only", "ON"))
        .await
        .map_err(failed)?;
    Ok((writer, readers))
}

/// Creates an archive that begins at `first`.
async fn create(
    options: SqliteConnectOptions,
    cluster: i64,
    first: Revision,
) -> Result<(SqliteConnection, SqlitePool)> {
    let (mut writer, readers) = connect(options).await?;
    sqlx::query(CLUSTER).bind(cluster).execute(&mut writer).await.map_err(unavailable)?;
    sqlx::query(BEGIN).bind(first.0).execute(&mut writer).await.map_err(unavailable)?;
    Ok((writer, readers))
}

impl SqliteArchive {
    async fn open(file: &Path, log: SqlitePool) -> Result<Self> {
        let options = SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            .pragma("journal_size_limit", WAL_BYTES_MAX)
            .pragma("cache_size", "-2048")
            .disable_statement_logging();
        let (writer, readers) = connect(options.clone()).await?;
        Ok(Self { writer: Writer::new(options, writer), readers: Mutex::new(readers), log, cluster: AtomicI64::new(0) })
    }

    /// Deletes the file, which frees its space, and creates another that begins at `first`. Unless the file can be
    /// created, the archive fails until the next start.
    pub(super) async fn replace_file(&self, first: Revision) -> Result<()> {
        let mut slot = self.writer.block().await;
        let options = self.writer.options();
        let file = options.get_filename();
        if let Some(connection) = slot.take() {
            // It may be unable to close properly, and is dropped then.
            let _ = connection.close().await;
        }
        self.readers().close().await;
        for path in [file.to_path_buf(), with_suffix(file, "-wal"), with_suffix(file, "-shm")] {
            match std::fs::remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => {
                    return Err(Error::Unavailable(format!("cannot delete {}: {error}", path.display())));
                }
                Ok(()) | Err(_) => {}
            }
        }
        let (options, cluster) = (options.clone(), self.cluster.load(Ordering::Relaxed));
        // On a thread of its own, because the future that migrates the schema cannot move between threads.
        let runtime = Handle::current();
        let created = spawn_blocking(move || runtime.block_on(create(options, cluster, first))).await;
        match created.unwrap_or_else(|error| Err(Error::Unavailable(error.to_string()))) {
            Ok((writer, readers)) => {
                slot.put(writer);
                *self.readers.lock() = readers;
            }
            Err(error) => warn!(%error, "there is no archive of the history now"),
        }
        Ok(())
    }
}
