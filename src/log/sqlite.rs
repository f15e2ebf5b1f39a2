//! The log in one SQLite file, owned by one Orlop process.
//!
//! Connections: one for writing, a few for reading, one for checkpoints. WAL mode and `synchronous=FULL`: a commit has
//! returned only when the WAL is on the disk. Other processes may read the file with plain SQL while Orlop runs; a second
//! Orlop is refused at start by a lock on a file beside it.
//!
//! Checkpoints are taken in the background (see [`checkpoint`]), never by a write.

mod append;
mod checkpoint;
mod lock;

use std::{path::Path, sync::Arc, time::Duration};

use async_trait::async_trait;
use futures_util::TryStreamExt as _;
use sqlx::{
    ConnectOptions as _, Connection as _, SqliteConnection, SqlitePool,
    sqlite::{SqliteAutoVacuum, SqliteConnectOptions, SqliteJournalMode, SqlitePoolOptions, SqliteSynchronous},
};
use tokio::sync::Mutex;

use self::{checkpoint::Checkpointer, lock::FileLock};
use super::{
    Append, Appended, Error, Log, LoggedLease, Meta, Page, Position, Precision, Reclaim, Reclaimed, Result, SharedLog,
    Size, Visit, WithPrev, alarms,
    rows::{
        LogRow as _, PAGE_BYTES_MAX, PAGE_IDS_MAX, PAGE_REVISIONS_MAX, PageBuilder, PageRow, REPLAY_ROWS, RowColumns,
        SqlRange, VALUES_ROWS_MAX, merge, unavailable,
    },
};
use crate::types::{Change, EncodedKv, KeyRange, LeaseId, Revision, RowId};

/// Readers beyond this wait for one another.
const READERS_MAX: u32 = 4;
/// Bytes that the WAL's file keeps when it is written from its start again; one large transaction may make it longer.
const WAL_FILE_BYTES_MAX: &str = "67108864";
/// Gives at most this many free pages back to the file system.
const RECLAIM_STEP: &str = "PRAGMA incremental_vacuum(256)";
const RECLAIM_STEP_PAGES: usize = 256;
/// Free pages kept for what is written next: giving them back only to take them again costs more than they do.
const RECLAIM_KEEP_PAGES: i64 = 256;

/// See the module's page.
pub struct SqliteLog {
    writer: Arc<Mutex<SqliteConnection>>,
    readers: SqlitePool,
    checkpointer: Checkpointer,
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
        if let Some(folder) = file.parent().filter(|folder| !folder.as_os_str().is_empty()) {
            std::fs::create_dir_all(folder)
                .map_err(|error| Error::Open(format!("cannot create folder {}: {error}", folder.display())))?;
        }
        let lock = FileLock::acquire(file)?;
        let open = |error: sqlx::Error| Error::Open(format!("cannot open database {name}: {error}"));

        let options = Self::options(file);
        let mut writer = options.connect().await.map_err(open)?;
        sqlx::migrate!("migrations/sqlite")
            .run(&mut writer)
            .await
            .map_err(|error| Error::Open(format!("cannot migrate database {name}: {error}")))?;
        let readers = SqlitePoolOptions::new()
            .max_connections(READERS_MAX)
            .idle_timeout(None)
            .max_lifetime(None)
            .connect_with(options.clone().pragma("query_only", "ON"))
            .await
            .map_err(open)?;
        let writer = Arc::new(Mutex::new(writer));
        let checkpointer = Checkpointer::start(options.connect().await.map_err(open)?, Arc::clone(&writer));
        Ok(Self { writer, readers, checkpointer, _lock: lock })
    }

    fn options(file: &Path) -> SqliteConnectOptions {
        SqliteConnectOptions::new()
            .filename(file)
            .create_if_missing(true)
            .auto_vacuum(SqliteAutoVacuum::Incremental)
            .journal_mode(SqliteJournalMode::Wal)
            .synchronous(SqliteSynchronous::Full)
            .busy_timeout(Duration::from_secs(5))
            .pragma("wal_autocheckpoint", "0")
            .pragma("journal_size_limit", WAL_FILE_BYTES_MAX)
            .pragma("temp_store", "MEMORY")
            .pragma("cache_size", "-8192")
            .disable_statement_logging()
    }

    /// The changes of one revision beyond the first live in `kv_log_more`; both tables are read with the same columns.
    async fn page_rows(
        &self,
        table: Table,
        from: i64,
        to: i64,
        range: &KeyRange,
        prev: WithPrev,
        revisions_max: usize,
    ) -> Result<Vec<PageRow>> {
        let range = SqlRange::of(range);
        let mut rows = sqlx::query(table.changes_sql(prev))
            .bind(from)
            .bind(to)
            .bind(range.start)
            .bind(range.unbounded)
            .bind(range.end)
            .fetch(&self.readers);
        let mut found = Vec::new();
        let (mut bytes, mut revisions, mut last) = (0, 0, None);
        while let Some(row) = rows.try_next().await.map_err(unavailable)? {
            let columns = RowColumns::read(&row, 0)?;
            if last != Some(columns.row.revision) {
                if revisions == revisions_max || bytes > PAGE_BYTES_MAX {
                    break;
                }
                last = Some(columns.row.revision);
                revisions += 1;
            }
            bytes += columns.len();
            let prev_kv = columns.prev_kv(&row, 9, prev)?;
            found.push((columns, prev_kv));
        }
        Ok(found)
    }

    /// Rows from `from` on in their order, values left out, about `limit` of them.
    async fn rows_from(&self, from: RowId, limit: usize) -> Result<Vec<Change>> {
        const FIRST: &str = "SELECT id, 0, key, NULL, lease, version, create_revision, prev_revision, deleted \
            FROM kv_log WHERE (id, 0) >= (?, ?) ORDER BY id LIMIT ?";
        const MORE: &str = "SELECT id, sub, key, NULL, lease, version, create_revision, prev_revision, deleted \
            FROM kv_log_more WHERE (id, sub) >= (?, ?) ORDER BY id, sub LIMIT ?";
        let mut tables = [Vec::new(), Vec::new()];
        for (sql, changes) in [FIRST, MORE].into_iter().zip(&mut tables) {
            let mut rows = sqlx::query(sql)
                .bind(from.revision.0)
                .bind(i64::from(from.sub))
                .bind(i64::try_from(limit).unwrap_or(i64::MAX))
                .fetch(&self.readers);
            while let Some(row) = rows.try_next().await.map_err(unavailable)? {
                changes.push(RowColumns::read(&row, 0)?.into_change(None));
            }
        }
        let [first, more] = tables;
        Ok(merge(first, more, limit))
    }
}

/// The two tables of rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    First,
    More,
}

/// `$sub` is the table's number of a change in its revision.
macro_rules! changes_sql {
    ($table:literal, $sub:literal, $more_columns:literal, $join:literal) => {
        concat!(
            "SELECT r.id, ",
            $sub,
            ", r.key, r.value, r.lease, r.version, r.create_revision, r.prev_revision, r.deleted",
            $more_columns,
            " FROM ",
            $table,
            " r",
            $join,
            " WHERE r.id BETWEEN ? AND ? AND r.key >= ? AND (? OR r.key < ?) ORDER BY r.id, 2"
        )
    };
    ($table:literal, $sub:literal, prev) => {
        changes_sql!(
            $table,
            $sub,
            ", coalesce(p.value, q.value), coalesce(p.lease, q.lease), coalesce(p.version, q.version), \
             coalesce(p.create_revision, q.create_revision)",
            " LEFT JOIN kv_log p ON p.id = r.prev_revision AND p.key = r.key AND p.deleted = 0 \
             LEFT JOIN kv_log_more q ON q.id = r.prev_revision AND q.key = r.key AND q.deleted = 0"
        )
    };
}

impl Table {
    fn changes_sql(self, prev: WithPrev) -> &'static str {
        match (self, prev) {
            (Self::First, WithPrev::No) => changes_sql!("kv_log", "0", "", ""),
            (Self::More, WithPrev::No) => changes_sql!("kv_log_more", "r.sub", "", ""),
            (Self::First, WithPrev::Yes) => changes_sql!("kv_log", "0", prev),
            (Self::More, WithPrev::Yes) => changes_sql!("kv_log_more", "r.sub", prev),
        }
    }
}

#[async_trait]
impl Log for SqliteLog {
    async fn meta(&self) -> Result<Meta> {
        let mut reader = self.readers.acquire().await.map_err(unavailable)?;
        let mut meta = Meta {
            cluster_id: 0,
            member_id: 0,
            position: Position { head: Revision::EMPTY, epoch: 0, server: 0 },
            compact_revision: None,
            leases: Vec::new(),
            alarms: Vec::new(),
        };
        let facts: Vec<(String, i64)> =
            sqlx::query_as("SELECT name, value FROM meta").fetch_all(&mut *reader).await.map_err(unavailable)?;
        meta.alarms = alarms(facts.iter().map(|(name, value)| (name.as_str(), *value)));
        for (name, value) in facts {
            match name.as_str() {
                "cluster_id" => meta.cluster_id = value.cast_unsigned(),
                "member_id" => meta.member_id = value.cast_unsigned(),
                "compact_revision" => meta.compact_revision = Some(Revision(value)),
                _ => {}
            }
        }
        let head: Option<i64> =
            sqlx::query_scalar("SELECT max(id) FROM kv_log").fetch_one(&mut *reader).await.map_err(unavailable)?;
        meta.position.head = head.map_or(Revision::EMPTY, Revision);
        let leases: Vec<(i64, i64)> =
            sqlx::query_as("SELECT id, ttl FROM lease").fetch_all(&mut *reader).await.map_err(unavailable)?;
        let lease = |(id, ttl_secs)| LoggedLease { id: LeaseId(id), ttl_secs, left_secs: None };
        meta.leases = leases.into_iter().map(lease).collect();
        Ok(meta)
    }

    async fn replay(&self, visit: &mut Visit<'_>) -> Result<Meta> {
        // Nobody else writes while this process starts, so that what is read in parts is of one moment.
        let meta = self.meta().await?;
        let mut next = RowId::new(Revision(i64::MIN), 0);
        loop {
            let changes = self.rows_from(next, REPLAY_ROWS).await?;
            let Some(last) = changes.last() else { return Ok(meta) };
            next = RowId::new(last.row.revision, last.row.sub + 1);
            visit(&meta, changes)?;
        }
    }

    async fn append(&self, append: Append<'_>) -> Result<Appended> {
        let mut writer = self.writer.lock().await;
        let appended = append::append(&mut writer, append).await;
        drop(writer);
        self.checkpointer.appended(append.changes);
        appended
    }

    async fn values(&self, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
        const FIRST: &str = "SELECT id, 0, key, value, lease, version, create_revision, prev_revision, deleted \
            FROM kv_log WHERE id IN (SELECT value FROM json_each(?)) AND deleted = 0";
        const MORE: &str = "SELECT id, sub, key, value, lease, version, create_revision, prev_revision, deleted \
            FROM kv_log_more WHERE (id, sub) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?)) AND deleted = 0";
        let mut found = Vec::with_capacity(rows.len());
        for chunk in rows.chunks(VALUES_ROWS_MAX) {
            let (first, more): (Vec<RowId>, Vec<RowId>) = chunk.iter().partition(|row| row.sub == 0);
            let first = json_list(first.iter().map(|row| row.revision.0.to_string()));
            let more = json_list(more.iter().map(|row| format!("[{},{}]", row.revision.0, row.sub)));
            for (sql, list) in [(FIRST, first), (MORE, more)] {
                let Some(list) = list else { continue };
                let mut rows = sqlx::query(sql).bind(list).fetch(&self.readers);
                while let Some(row) = rows.try_next().await.map_err(unavailable)? {
                    let columns = RowColumns::read(&row, 0)?;
                    found.push((columns.row, columns.kv()));
                }
            }
        }
        Ok(found)
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        let to = to.0.min(from.0.saturating_add(PAGE_IDS_MAX - 1));
        let first = self.page_rows(Table::First, from.0, to, range, prev, PAGE_REVISIONS_MAX + 1).await?;
        let mut page = PageBuilder::new(first, to);
        page.add_more(self.page_rows(Table::More, from.0, page.to(), range, prev, PAGE_REVISIONS_MAX + 1).await?);
        Ok(page.finish(None))
    }

    async fn reclaim(&self, what: Reclaim<'_>) -> Result<Reclaimed> {
        match what {
            Reclaim::Rows { rows, .. } => self.delete(rows).await.map(|()| Reclaimed::All),
            Reclaim::Space => self.give_back().await,
        }
    }

    async fn size(&self, _: Precision) -> Result<Size> {
        let row = sqlx::query(
            "SELECT (SELECT page_count FROM pragma_page_count), (SELECT freelist_count FROM pragma_freelist_count), \
             (SELECT page_size FROM pragma_page_size)",
        )
        .fetch_one(&self.readers)
        .await
        .map_err(unavailable)?;
        let (pages, free, page_size): (i64, i64, i64) = (row.int(0)?, row.int(1)?, row.int(2)?);
        Ok(Size { total: pages * page_size, in_use: (pages - free) * page_size })
    }

    async fn close(&self) {
        self.readers.close().await;
        self.checkpointer.finish().await;
    }

    fn shared(&self) -> Option<&dyn SharedLog> {
        None
    }
}

impl SqliteLog {
    async fn delete(&self, rows: &[RowId]) -> Result<()> {
        let (first, more): (Vec<RowId>, Vec<RowId>) = rows.iter().partition(|row| row.sub == 0);
        let first = json_list(first.iter().map(|row| row.revision.0.to_string()));
        let more = json_list(more.iter().map(|row| format!("[{},{}]", row.revision.0, row.sub)));
        let mut writer = self.writer.lock().await;
        let mut transaction = writer.begin().await.map_err(unavailable)?;
        for (sql, list) in [
            ("DELETE FROM kv_log WHERE id IN (SELECT value FROM json_each(?))", first),
            ("DELETE FROM kv_log_more WHERE (id, sub) IN (SELECT value ->> 0, value ->> 1 FROM json_each(?))", more),
        ] {
            let Some(list) = list else { continue };
            sqlx::query(sql).bind(list).execute(&mut *transaction).await.map_err(unavailable)?;
        }
        let free: i64 =
            sqlx::query_scalar("PRAGMA freelist_count").fetch_one(&mut *transaction).await.map_err(unavailable)?;
        if free > RECLAIM_KEEP_PAGES {
            sqlx::query(RECLAIM_STEP).execute(&mut *transaction).await.map_err(unavailable)?;
        }
        transaction.commit().await.map_err(unavailable)?;
        drop(writer);
        self.checkpointer.purged(rows.len());
        Ok(())
    }

    /// One step, after which writes that wait have their turn.
    async fn give_back(&self) -> Result<Reclaimed> {
        let mut writer = self.writer.lock().await;
        sqlx::query(RECLAIM_STEP).execute(&mut *writer).await.map_err(unavailable)?;
        let free: i64 =
            sqlx::query_scalar("PRAGMA freelist_count").fetch_one(&mut *writer).await.map_err(unavailable)?;
        drop(writer);
        self.checkpointer.purged(RECLAIM_STEP_PAGES);
        Ok(if free > 0 { Reclaimed::More } else { Reclaimed::All })
    }
}

/// A JSON array of what is given, for `json_each`: one bind and one statement however many there are.
fn json_list(items: impl ExactSizeIterator<Item = String>) -> Option<String> {
    if items.len() == 0 {
        return None;
    }
    let mut list = String::from("[");
    for item in items {
        if list.len() > 1 {
            list.push(',');
        }
        list.push_str(&item);
    }
    list.push(']');
    Some(list)
}
