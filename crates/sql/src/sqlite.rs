//! The log in one SQLite file, owned by one Orlop process.
//!
//! Connections: one for writes, [`READERS_MAX`] for reads of the history, as many for reads of values and for the start
//! ([`readers`]), one for checkpoints. The mode is WAL with `synchronous=FULL`, so a commit returns when the WAL is on
//! disk. Other processes may read the database with SQL while Orlop runs. A lock on a separate file prevents a second
//! Orlop process on the same database ([`lock`]). The process ends if the file is replaced ([`identity`]).
//!
//! Checkpoints ([`checkpoint`]) and the return of free pages to the file system ([`vacuum`]) run in the background,
//! never as part of a write.

mod append;
mod archive;
mod checkpoint;
mod close;
mod defragment;
mod files;
mod foreign;
mod identity;
mod inspect;
mod integrity;
mod lease_times;
mod load;
mod lock;
mod read;
mod readers;
mod result_code;
mod saved_index;
mod schema;
mod vacuum;
mod values;
mod view;
mod wal;
mod writer;

use std::{collections::HashMap, io::ErrorKind, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use sqlx::{
    ConnectOptions as _, Connection as _, Sqlite, SqlitePool,
    pool::PoolConnection,
    sqlite::{SqliteAutoVacuum, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tracing::warn;

use self::{
    append::Batch,
    checkpoint::Checkpointer,
    close::close_readers,
    foreign::{refuse_etcd, refuse_kine, refuse_other_tables},
    identity::Identity,
    integrity::{Damage, is_damage, unreadable, unwritable},
    lock::FileLock,
    readers::Readers,
    result_code::{CODE_BUSY, CODE_FULL, CODE_READ_ONLY, ResultCode, disk_hint, has_code},
    vacuum::Vacuum,
    writer::Writer,
};
pub use self::{archive::SqliteArchive, defragment::Defragmented, load::SqliteLoader, view::SqliteView};
pub(crate) use self::{
    integrity::{is_not_a_database, refuse_damage},
    view::may_be_immutable,
};
use crate::{Durability, auth, error::unavailable};
use orlop_core::log::{
    Append, Appended, Connections, Error, Log, LoggedLease, Meta, Page, Precision, ReadLog, Reclaim, Reclaimed, Result,
    SavedIndex, SharedLog, Size, Visit, WithPrev,
};
use orlop_core::{
    auth::AuthState,
    private,
    types::{EncodedKv, KeyRange, LeaseId, Revision, RowId},
};

/// Prefix of the names of sqlx's threads that run SQLite.
pub const SQLITE_THREADS: &str = "sqlx-sqlite-worker";
/// Maximum time to wait for a lock of SQLite, which another process may hold, for example while it opens the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);
/// Settings of every connection to the log.
const PRAGMAS: [(&str, &str); 4] = [
    ("wal_autocheckpoint", "0"),
    ("journal_size_limit", wal::FILE_BYTES_MAX),
    ("temp_store", "MEMORY"),
    ("cache_size", "-8192"),
];
/// Maximum number of connections of each kind for reads. Further reads wait.
const READERS_MAX: u32 = 4;
/// Growth of the WAL at which a check of the pages ends early: the space of a disk is worth more than the check.
const CHECK_WAL_GROWTH_MAX: u64 = 1 << 30;
/// Why a write is refused while checkpoints fail because of a full disk or damage.
const NOT_COPIED: &str = "the WAL cannot be copied to the database file";

/// The log in SQLite.
pub struct SqliteLog {
    writer: Arc<Writer>,
    /// For reads of the history.
    readers: SqlitePool,
    /// For reads of single rows, and of all rows.
    values: Readers,
    /// Options for another connection for reads, outside the pool.
    options: SqliteConnectOptions,
    checkpointer: Arc<Checkpointer>,
    vacuum: Vacuum,
    /// Remaining seconds of leases, recorded when the previous server stopped.
    lease_times: HashMap<LeaseId, f64>,
    damage: Arc<Damage>,
    identity: Arc<Identity>,
    /// Locked until the log is dropped.
    _lock: Arc<FileLock>,
}

impl SqliteLog {
    /// Opens the database file, creating it if it does not exist, and migrates its schema.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] with the name of the file, if another process has locked it, or it cannot be read or written, or
    /// is not a database.
    pub async fn open(file: &Path) -> Result<Self> {
        Self::open_with(file, Durability::Synced).await
    }

    /// Like [`SqliteLog::open`], optionally without syncing commits.
    pub async fn open_with(file: &Path, durability: Durability) -> Result<Self> {
        let name = file.display();
        refuse_etcd(file)?;
        refuse_kine(file).await?;
        let lock = Arc::new(lock_file(file)?);
        if let Err(error) = load::remove_unfinished(file) {
            warn!(%error, database = %name, "a file of an interrupted restore stays");
        }
        let open = |error: sqlx::Error| cannot_open(file, &error);

        files::check(file)?;
        // SQLite creates the WAL and the shared-memory file with the mode of this file.
        private::make_file(file).map_err(|error| open(error.into()))?;
        let synchronous = match durability {
            Durability::Synced => SqliteSynchronous::Full,
            Durability::Unsynced => SqliteSynchronous::Off,
        };
        let options = Self::options(file).synchronous(synchronous);
        refuse_other_tables(file).await?;
        match wal::rewrite(file).await {
            // A file system that copies on each write needs space for it. The store still serves reads.
            Err(error) if error.kind() == ErrorKind::StorageFull => {
                warn!(%error, database = %name, "no space to write the WAL of the previous process again");
            }
            rewritten => rewritten.map_err(|error| open(error.into()))?,
        }
        // Only for a new file, because the pragma auto_vacuum always writes, which fails if the disk is full.
        let is_new = file.metadata().is_ok_and(|metadata| metadata.len() == 0);
        let creation = if is_new { Self::creation_options(file) } else { options.clone() };
        let mut creator = creation.synchronous(synchronous).connect().await.map_err(open)?;
        schema::migrate(&mut creator, &name.to_string()).await?;
        let identity = Arc::new(Identity::new(file, &lock).map_err(|error| open(error.into()))?);
        let settings = writer::Settings { file: file.to_owned(), durability, identity: Arc::clone(&identity) };
        let open_writer = |error: rusqlite::Error| cannot_open(file, &error);
        let mut writer = settings.connect().map_err(open_writer)?;
        // Not before: the last connection to a database deletes its WAL.
        creator.close().await.map_err(open)?;
        let lease_times = lease_times::read(&writer).map_err(open_writer)?;
        if let Err(error) = wal::preallocate(&mut writer, file) {
            warn!(%error, database = %name, "cannot preallocate the WAL; writes are slower while it grows");
        }
        let read_only = options.clone().create_if_missing(false).pragma("query_only", "ON");
        let readers = pool(&identity).connect_with(read_only.clone()).await.map_err(open)?;
        let settings = Arc::new(settings);
        let values = Readers::new(Arc::clone(&settings));
        let writer = Arc::new(Writer::new(settings, writer));
        let connection = options.connect().await.map_err(open)?;
        let damage = Arc::<Damage>::default();
        let checkpointer = Checkpointer::start(connection, &writer, &identity, &damage, file, durability);
        let checkpointer = Arc::new(checkpointer.map_err(|error| open(error.into()))?);
        let vacuum = Vacuum::start(Arc::clone(&writer), Arc::clone(&checkpointer));
        Ok(Self {
            writer,
            readers,
            values,
            options: read_only,
            checkpointer,
            vacuum,
            lease_times,
            damage,
            identity,
            _lock: lock,
        })
    }

    async fn reader(&self) -> Result<PoolConnection<Sqlite>> {
        self.readers.acquire().await.map_err(unavailable)
    }

    /// Options of the first connection, which may write to the file.
    fn creation_options(file: &Path) -> SqliteConnectOptions {
        Self::options(file).auto_vacuum(SqliteAutoVacuum::Incremental)
    }

    fn options(file: &Path) -> SqliteConnectOptions {
        let options = SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(BUSY_TIMEOUT)
            .disable_statement_logging();
        PRAGMAS.into_iter().fold(options, |options, (name, value)| options.pragma(name, value))
    }
}

/// Returns the options of a pool, each of whose connections is to the same file.
fn pool(identity: &Arc<Identity>) -> SqlitePoolOptions {
    let identity = Arc::clone(identity);
    let options = SqlitePoolOptions::new().max_connections(READERS_MAX).idle_timeout(None).max_lifetime(None);
    options.after_connect(move |_, _| {
        let identity = Arc::clone(&identity);
        Box::pin(async move {
            identity.check_async().await;
            Ok(())
        })
    })
}

fn cannot_open(file: &Path, error: &impl ResultCode) -> Error {
    Error::Open(format!("cannot open database {}: {}{}", file.display(), error.text(), disk_hint(error, file)))
}

/// Creates the directory of a database file and locks the file.
fn lock_file(file: &Path) -> Result<FileLock> {
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        private::make_folder(folder)
            .map_err(|error| Error::Open(format!("cannot create folder {}: {error}", folder.display())))?;
        if let Some(mode) = private::exposed(folder) {
            let mode = format!("{mode:04o}");
            warn!(folder = %folder.display(), mode, "other users can read the data folder; run chmod 700 on it");
        }
    }
    FileLock::acquire(file)
}

#[async_trait]
impl ReadLog for SqliteLog {
    async fn meta(&self) -> Result<Meta> {
        read::meta(&mut *self.reader().await?).await
    }

    async fn auth(&self) -> Result<AuthState> {
        read::auth(&mut *self.reader().await?).await
    }

    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
        // No other process writes during the start, so several reads return consistent rows.
        let mut meta = self.meta().await?;
        read::replay(&self.values, &meta, from, visit).await?;
        for lease in &mut meta.leases {
            lease.left_secs = self.lease_times.get(&lease.id).copied();
        }
        Ok(meta)
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        self.watched(read::changes(&mut *self.reader().await?, from, to, range, prev).await)
    }
}

#[async_trait]
impl Log for SqliteLog {
    async fn freeze(&self) -> Result<Box<dyn ReadLog>> {
        SqliteView::now(&self.options, &self.identity).await.map(|view| Box::new(view) as Box<dyn ReadLog>)
    }

    async fn append(&self, append: Append<'_>) -> Result<Appended> {
        if append.changes.iter().any(|change| change.kv().is_some()) {
            self.refuse_put()?;
        }
        let writer = self.writer.lock().await.map_err(|error| self.refusal(error))?;
        let batch = Batch::of(&append);
        let appended = writer.run(move |writer| batch.append(writer)).await;
        self.checkpointer.appended(append.changes);
        appended.map_err(|error| self.failure(&error))
    }

    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        let rows = rows.to_vec();
        let read = self.values.run(move |connection| values::values(connection, &rows).map_err(unreadable));
        self.watched(read.await)
    }

    async fn value_lengths(&self, rows: &[RowId]) -> Result<Vec<(RowId, u64)>> {
        let rows = rows.to_vec();
        let read = self.values.run(move |connection| values::value_lengths(connection, &rows).map_err(unreadable));
        self.watched(read.await)
    }

    async fn token_key(&self) -> Result<Vec<u8>> {
        sqlx::query_scalar(auth::SELECT_TOKEN_KEY).fetch_one(&mut *self.reader().await?).await.map_err(unavailable)
    }

    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed> {
        match what {
            Reclaim::Rows { rows, .. } => self.watched(self.delete(rows).await).map(|()| Reclaimed::All),
            Reclaim::Space => self.watched(self.return_free_pages().await),
        }
    }

    async fn size(&self, _: Precision) -> Result<Size> {
        let size = read::size(&mut *self.reader().await?).await?;
        let wal = Some(wal::file_bytes(self.options.get_filename()).await);
        Ok(Size { disk_free: self.disk_free(), wal, ..size })
    }

    fn connections(&self) -> Connections {
        let values = self.values.connections();
        let (all, idle) = (usize::try_from(self.readers.size()).unwrap_or(usize::MAX), self.readers.num_idle());
        // They are read at different times, so `idle` may exceed `all`.
        Connections { idle: idle + values.idle, used: all.saturating_sub(idle) + values.used }
    }

    fn saved_index(&self) -> Option<&dyn SavedIndex> {
        Some(self)
    }

    /// A damaged page may hide rows, and the log without these rows may still be consistent.
    async fn check(&self) -> Result<()> {
        let checked = integrity::check_beside_writes(&self.options, CHECK_WAL_GROWTH_MAX).await;
        // Damage of another file is none of this log.
        self.identity.check_async().await;
        checked
    }

    async fn damaged(&self) -> String {
        self.damage.found().await
    }

    async fn forget_lease_times(&self) -> Result<()> {
        self.remove_lease_times().await
    }

    async fn close(&self, leases: &[LoggedLease]) {
        close_readers(async {
            tokio::join!(self.readers.close(), self.values.close());
        })
        .await;
        self.vacuum.finish().await;
        self.checkpointer.finish().await;
        self.identity.release();
        if let Err(error) = self.record_lease_times(leases).await {
            warn!(%error, "cannot record the remaining times of leases; after the next start they have their full TTL");
        }
        self.end_wal().await;
    }

    fn shared(&self) -> Option<&dyn SharedLog> {
        None
    }
}

impl Drop for SqliteLog {
    fn drop(&mut self) {
        self.identity.release();
    }
}

impl SqliteLog {
    /// Refuses puts while the WAL cannot be copied to the database file.
    fn refuse_put(&self) -> Result<()> {
        let reason = || format!("{}: {NOT_COPIED}", self.options.get_filename().display());
        // The next start could not read them from a damaged file. The alarm CORRUPT is still recorded.
        if self.checkpointer.has_found_damage() {
            return Err(Error::Corrupt(reason()));
        }
        // The space that the WAL still has is for deletes and compactions, without which none may become free.
        if self.checkpointer.wal_bytes_max().is_some() { Err(Error::Full(reason())) } else { Ok(()) }
    }

    /// Maps an error of an append.
    ///
    /// If another process writes, the transaction has not begun: it takes SQLite's lock first. If the file can only be read,
    /// its first statement that writes has failed. If the disk is full, the last page of the commit is not in the WAL, so
    /// SQLite ignores the commit. After any other failure, in particular of a sync, SQLite rolls the commit back. The commit
    /// may nevertheless be complete in the WAL, and then a start after a crash recovers it, so the outcome is unknown. A
    /// failed sync does not affect earlier commits: the next commit overwrites the WAL from the end of the last successful
    /// commit.
    fn failure(&self, error: &rusqlite::Error) -> Error {
        let file = self.options.get_filename().display();
        if is_damage(error) {
            self.damage.see(&Error::Corrupt(error.to_string()));
        }
        if has_code(error, CODE_FULL) {
            return Error::Full(format!("{file}: {error}"));
        }
        if has_code(error, CODE_BUSY) {
            return Error::Unavailable(format!("{file}: {error}: another process writes to it"));
        }
        if has_code(error, CODE_READ_ONLY) {
            return Error::Unavailable(format!("{file}: {error}: it must belong to the user of the server"));
        }
        let hint = disk_hint(error, self.options.get_filename());
        Error::OutcomeUnknown(format!("{file}: {error}{hint}"))
    }

    /// Maps an error of opening the connection for writes. Nothing was written.
    fn refusal(&self, error: rusqlite::Error) -> Error {
        let failure = self.failure(&error);
        if matches!(failure, Error::Full(_)) { failure } else { writer::unavailable(error) }
    }

    /// Takes note of damage.
    fn watched<T>(&self, done: Result<T>) -> Result<T> {
        done.inspect_err(|error| self.damage.see(error))
    }

    /// Returns the bytes that this process may still write to the disk of the database.
    fn disk_free(&self) -> Option<u64> {
        wal::free_bytes(self.options.get_filename()).ok()
    }

    async fn delete(&self, rows: &[RowId]) -> Result<()> {
        let file = self.options.get_filename();
        // A deletion frees space only after a checkpoint, which needs the space that the WAL would grow into.
        if let Some(bytes_max) = self.checkpointer.wal_bytes_max()
            && wal::file_bytes(file).await > bytes_max
        {
            return Err(Error::Unavailable(format!("{NOT_COPIED}; the disk is full")));
        }
        let (first, more): (Vec<RowId>, Vec<RowId>) = rows.iter().partition(|row| row.sub == 0);
        let first = read::json_list(first.iter().map(|row| row.revision.0.to_string()));
        let more = read::json_list(more.iter().map(|row| format!("[{},{}]", row.revision.0, row.sub)));
        const DELETE_FIRST: &str = "DELETE FROM kv_log WHERE id IN (SELECT value FROM json_each(?))";
        const DELETE_MORE: &str =
            "DELETE FROM kv_log_more WHERE (id, sub) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))";
        let writer = self.writer.lock().await.map_err(|error| unwritable(&error, file))?;
        let deleted = writer.run(move |writer| {
            let transaction = writer.transaction()?;
            for (sql, list) in [(DELETE_FIRST, first), (DELETE_MORE, more)] {
                if let Some(list) = list {
                    transaction.prepare_cached(sql)?.execute([list])?;
                }
            }
            transaction.commit()
        });
        deleted.await.map_err(|error| unwritable(&error, file))?;
        self.checkpointer.purged(rows.len());
        self.vacuum.freed();
        Ok(())
    }

    /// Returns some free pages to the file system. Writes wait until it has ended.
    async fn return_free_pages(&self) -> Result<Reclaimed> {
        let free = self.vacuum.step().await?;
        Ok(if free > 0 { Reclaimed::More } else { Reclaimed::All })
    }
}
