//! The log in one SQLite file, owned by one Orlop process.
//!
//! Connections: one for writing, a few for reading, one for checkpoints. WAL mode and `synchronous=FULL`: a commit has
//! returned only when the WAL is on the disk. Other processes may read the file with plain SQL while Orlop runs; a second
//! Orlop is refused at start by a lock on a file beside it.
//!
//! Checkpoints are taken in the background (see [`checkpoint`]), never by a write; free pages are given back there too
//! ([`vacuum`]).

mod append;
mod checkpoint;
mod inspect;
mod load;
mod lock;
mod packed;
mod read;
mod vacuum;
mod view;
mod wal;
mod writer;

use std::{fs::File, io::Read as _, path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use sqlx::{
    ConnectOptions as _, Connection as _, Sqlite, SqlitePool,
    pool::PoolConnection,
    sqlite::{SqliteAutoVacuum, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tracing::warn;

use self::{checkpoint::Checkpointer, lock::FileLock, vacuum::Vacuum, writer::Writer};
pub use self::{load::SqliteLoader, view::SqliteView};
use crate::migrations;
use crate::rows::{cannot_migrate, connections, unavailable};
use orlop_core::log::{
    Append, Appended, Connections, Error, History, Log, Meta, Page, Precision, Reclaim, Reclaimed, Result, SharedLog,
    Size, Visit, WithPrev,
};
use orlop_core::{
    private,
    types::{EncodedKv, KeyRange, Revision, RowId},
};

/// Readers beyond this wait for one another.
const READERS_MAX: u32 = 4;

/// See the module's page.
pub struct SqliteLog {
    writer: Arc<Writer>,
    readers: SqlitePool,
    /// For a reader of its own.
    options: SqliteConnectOptions,
    checkpointer: Arc<Checkpointer>,
    vacuum: Vacuum,
    /// Held until the log is dropped.
    _lock: FileLock,
}

impl SqliteLog {
    /// Opens the database file, made if it is not there, and migrates its schema.
    ///
    /// # Errors
    ///
    /// [`Error::Open`], naming the file, if another process holds it or it cannot be read, written or understood.
    pub async fn open(file: &Path) -> Result<Self> {
        let name = file.display();
        let lock = take_place(file)?;
        let open = |error: sqlx::Error| Error::Open(format!("cannot open database {name}: {error}"));

        refuse_cut_off(file)?;
        // SQLite gives the files that it makes beside it the same mode.
        private::make_file(file).map_err(|error| open(error.into()))?;
        let options = Self::options(file);
        // Saying this writes to the file, whatever it says already, which a connection made later may have no room for.
        let mut writer = Self::options_to_make(file).connect().await.map_err(open)?;
        migrations::sqlite()
            .run(&mut writer)
            .await
            .map_err(|error| Error::Open(cannot_migrate(&name.to_string(), &error)))?;
        if let Err(error) = wal::lengthen(file) {
            warn!(%error, database = %name, "the WAL cannot be given its full length; writes are slower while it grows");
        }
        let read_only = options.clone().pragma("query_only", "ON");
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS_MAX)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(read_only.clone())
            .await
            .map_err(open)?;
        let writer = Arc::new(Writer::new(options.clone(), writer));
        let checkpointer = Checkpointer::start(options.connect().await.map_err(open)?, Arc::clone(&writer));
        let checkpointer = Arc::new(checkpointer);
        let vacuum = Vacuum::start(Arc::clone(&writer), Arc::clone(&checkpointer));
        Ok(Self { writer, readers, options: read_only, checkpointer, vacuum, _lock: lock })
    }

    async fn reader(&self) -> Result<PoolConnection<Sqlite>> {
        self.readers.acquire().await.map_err(unavailable)
    }

    /// For the connection that may be the first to write to the file.
    fn options_to_make(file: &Path) -> SqliteConnectOptions {
        Self::options(file).auto_vacuum(SqliteAutoVacuum::Incremental)
    }

    fn options(file: &Path) -> SqliteConnectOptions {
        SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(5))
            .pragma("wal_autocheckpoint", "0")
            .pragma("journal_size_limit", wal::FILE_BYTES_MAX)
            .pragma("temp_store", "MEMORY")
            .pragma("cache_size", "-8192")
            .disable_statement_logging()
    }
}

/// Whether an error is this of SQLite's primary result codes; the upper bits say more of what was found.
fn has_code(error: &sqlx::Error, primary: i32) -> bool {
    let code = error.as_database_error().and_then(|error| error.code()?.parse::<i32>().ok());
    code.is_some_and(|code| code & 0xff == primary)
}

/// Makes the folder of a database file and keeps others out of the file.
fn take_place(file: &Path) -> Result<FileLock> {
    if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
        private::make_folder(folder)
            .map_err(|error| Error::Open(format!("cannot create folder {}: {error}", folder.display())))?;
        if let Some(mode) = private::exposed(folder) {
            let mode = format!("{mode:04o}");
            warn!(folder = %folder.display(), mode, "others than its user can look into the data folder; chmod 700 it");
        }
    }
    FileLock::acquire(file)
}

/// SQLite notices that pages are missing when it comes to read them, which may be never. While there is a WAL the file may be
/// shorter than it says, as what is missing is there.
fn refuse_cut_off(file: &Path) -> Result<()> {
    const HEADER_BYTES: usize = 100;
    const MAGIC: &[u8] = b"SQLite format 3\0";
    let unreadable = |error: std::io::Error| Error::Open(format!("cannot read database {}: {error}", file.display()));
    let opened = match File::open(file) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        opened => opened.map_err(unreadable)?,
    };
    let bytes = opened.metadata().map_err(unreadable)?.len();
    let mut header = Vec::new();
    opened.take(HEADER_BYTES as u64).read_to_end(&mut header).map_err(unreadable)?;
    // An empty file is a new database's; a shorter one than its first page counts for SQLite as empty too, and must not here.
    let begins_rightly = MAGIC.starts_with(&header[..header.len().min(MAGIC.len())]);
    if bytes == 0 || !begins_rightly || view::has_wal(file) {
        return Ok(());
    }
    if header.len() < HEADER_BYTES {
        let name = file.display();
        return Err(Error::Open(format!(
            "database {name} is cut off: it has {bytes} bytes; restore a snapshot or a copy of it"
        )));
    }
    // 1 stands for what does not fit.
    let page = match u16::from_be_bytes([header[16], header[17]]) {
        1 => 65_536,
        page => u64::from(page),
    };
    let pages = u64::from(u32::from_be_bytes([header[28], header[29], header[30], header[31]]));
    if pages * page <= bytes {
        return Ok(());
    }
    Err(Error::Open(format!(
        "database {} is cut off: it has {bytes} bytes and says that it has {pages} pages of {page}; restore a snapshot or a \
         copy of it",
        file.display()
    )))
}

#[async_trait]
impl History for SqliteLog {
    async fn meta(&self) -> Result<Meta> {
        read::meta(&mut *self.reader().await?).await
    }

    /// Nobody else writes while this process starts, so that what is read in parts is of one moment. The pages are looked at
    /// by another reader meanwhile, which takes less time unless values are long.
    async fn replay(&self, visit: &mut Visit<'_>) -> Result<Meta> {
        let (mut rows, mut pages) = (self.reader().await?, self.reader().await?);
        let (meta, ()) = tokio::try_join!(read::replay(&mut rows, visit), inspect::refuse_damage(&mut pages))?;
        Ok(meta)
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        read::changes(&mut *self.reader().await?, from, to, range, prev).await
    }
}

#[async_trait]
impl Log for SqliteLog {
    async fn freeze(&self) -> Result<Box<dyn History>> {
        SqliteView::now(&self.options).await.map(|view| Box::new(view) as Box<dyn History>)
    }

    async fn append(&self, append: Append<'_>) -> Result<Appended> {
        let mut writer = self.writer.hold().await.map_err(|error| self.refusal(error))?;
        let appended = append::append(writer.connection(), append).await.map_err(|error| self.failure(&error));
        if appended.is_ok() {
            writer.keep();
        }
        self.checkpointer.appended(append.changes);
        appended
    }

    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        read::values(&mut *self.reader().await?, rows).await
    }

    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed> {
        match what {
            Reclaim::Rows { rows, .. } => self.delete(rows).await.map(|()| Reclaimed::All),
            Reclaim::Space => self.give_back().await,
        }
    }

    async fn size(&self, _: Precision) -> Result<Size> {
        read::size(&mut *self.reader().await?).await
    }

    fn connections(&self) -> Connections {
        connections(self.readers.size(), self.readers.num_idle())
    }

    async fn close(&self) {
        self.readers.close().await;
        self.vacuum.finish().await;
        self.checkpointer.finish().await;
        // The file is whole without its WAL then, for who copies it while the server is down.
        let emptied = async {
            let mut writer = self.writer.hold().await?;
            sqlx::query("PRAGMA wal_checkpoint(TRUNCATE)").execute(writer.connection()).await
        };
        if let Err(error) = emptied.await {
            warn!(%error, "the WAL could not be emptied; the next start does it");
        }
    }

    fn shared(&self) -> Option<&dyn SharedLog> {
        None
    }
}

/// SQLite's primary result codes, the low byte of those that it gives.
const CODE_IO: i32 = 10;
const CODE_FULL: i32 = 13;

impl SqliteLog {
    /// What an error of an append means.
    ///
    /// When the disk has no room the commit's last page is not in the WAL, so that nobody will ever read the others. When it
    /// fails otherwise, above all in a sync, SQLite takes the commit back; but what is in the WAL may be whole, and then a
    /// start after a crash takes it for one. Nothing that was committed before depends on what a failed sync lost: the next
    /// commit writes the WAL anew from the end of the last one, and the next checkpoint all that this one was to copy.
    fn failure(&self, error: &sqlx::Error) -> Error {
        let file = self.options.get_filename().display();
        if has_code(error, CODE_FULL) {
            return Error::Full(format!("{file}: {error}"));
        }
        let hint = if has_code(error, CODE_IO) {
            "; the disk or its file system failed, of which the kernel's log tells"
        } else {
            ""
        };
        Error::OutcomeUnknown(format!("{file}: {error}{hint}"))
    }

    /// What it means that nobody can write.
    fn refusal(&self, error: sqlx::Error) -> Error {
        let failure = self.failure(&error);
        if matches!(failure, Error::Full(_)) { failure } else { unavailable(error) }
    }

    async fn delete(&self, rows: &[RowId]) -> Result<()> {
        let (first, more): (Vec<RowId>, Vec<RowId>) = rows.iter().partition(|row| row.sub == 0);
        let first = read::json_list(first.iter().map(|row| row.revision.0.to_string()));
        let more = read::json_list(more.iter().map(|row| format!("[{},{}]", row.revision.0, row.sub)));
        let mut writer = self.writer.hold().await.map_err(unavailable)?;
        let mut transaction = writer.connection().begin().await.map_err(unavailable)?;
        for (sql, list) in [
            ("DELETE FROM kv_log WHERE id IN (SELECT value FROM json_each(?))", first),
            ("DELETE FROM kv_log_more WHERE (id, sub) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))", more),
        ] {
            let Some(list) = list else { continue };
            sqlx::query(sql).bind(list).execute(&mut *transaction).await.map_err(unavailable)?;
        }
        transaction.commit().await.map_err(unavailable)?;
        writer.keep();
        self.checkpointer.purged(rows.len());
        self.vacuum.freed();
        Ok(())
    }

    /// One step, after which writes that wait have their turn.
    async fn give_back(&self) -> Result<Reclaimed> {
        let free = self.vacuum.step().await?;
        Ok(if free > 0 { Reclaimed::More } else { Reclaimed::All })
    }
}
