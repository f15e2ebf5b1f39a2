//! The archive in a SQLite file of its own, beside the database.
//!
//! In a file of its own it costs nothing elsewhere: the page check of a start, the quota, defragmentation and the
//! connection for writes do not see it, and damage to it does not affect the store. The two files are not committed
//! together; a row is committed here before it is deleted there.

mod file;
mod frozen;
mod load;
mod sql;
mod writer;

use std::sync::Arc;

use async_trait::async_trait;
use orlop_core::{
    clock,
    log::{
        ARCHIVE_PAGE_KEYS, ARCHIVE_PAGE_ROWS, ARCHIVE_VISITED_ROWS, ARCHIVED_ROW_BYTES, Archive, ArchiveState,
        ArchivedChanges, ArchivedMoment, ClockStep, Error, FrozenArchive, Log, Moment, Order, PastRow, ReadLog,
        Reclaimed, Result,
    },
    types::{EncodedKv, Key, KeyRange, Revision, RowId, Superseded},
};
use parking_lot::Mutex;
use sqlx::{Connection as _, Row as _, SqliteConnection, SqlitePool, sqlite::SqliteRow};
use tracing::warn;

use self::{
    file::{Failure, Kind, Owner},
    frozen::Frozen,
    sql::*,
    writer::{Writer, WriterGuard},
};
pub(super) use self::{
    file::{archive_file, set_aside},
    load::Loader,
    sql::STATE,
};
use super::{
    append::SET_FACT,
    close::close_readers,
    integrity::unreadable,
    read::json_list,
    result_code::{CODE_FULL, has_code},
};
use crate::{
    archive::{self, CLOCK_STEPS, FIRST_MOMENT, PRUNE_ROWS, archive_columns, visited_columns},
    error::unavailable,
    rows::{LogRow as _, SqlRange, row_id},
};

/// Number of rows that are in memory at a time while they are copied.
const COPY_ROWS: usize = 100;

/// The archive of a log in SQLite.
pub struct SqliteArchive {
    writer: Writer,
    /// `None`: the file is not open, because it could not be opened or created ([`SqliteArchive::open`]). It may be the
    /// archive of another log.
    readers: Mutex<Option<SqlitePool>>,
    /// Connections for reads of the log.
    log: SqlitePool,
    log_writer: Arc<super::writer::Writer>,
    owner: Owner,
}

impl SqliteArchive {
    fn readers(&self) -> Result<SqlitePool> {
        let readers = self.readers.lock().clone();
        readers.ok_or_else(|| Error::Unavailable("the archive of the history is not open".to_owned()))
    }

    async fn lock(&self) -> std::result::Result<WriterGuard<'_>, Failure> {
        self.open().await?;
        self.writer.lock().await.map_err(|error| Failure::of(&error))
    }

    /// Raises a fact.
    async fn raise(&self, name: &'static str, revision: Revision) -> std::result::Result<(), Failure> {
        let mut writer = self.lock().await?;
        let raised = async {
            sqlx::query(SYNC).execute(writer.connection()).await?;
            sqlx::query(RAISE).bind(revision.0).bind(name).execute(writer.connection()).await
        };
        raised.await.map_err(|error| Failure::of(&error))?;
        writer.keep();
        Ok(())
    }

    /// Reads rows of the log, in any order.
    async fn rows_of_log(&self, rows: &[Superseded]) -> Result<Vec<(SqliteRow, Superseded)>> {
        let mut found = Vec::with_capacity(rows.len());
        let mut log = self.log.acquire().await.map_err(unavailable)?;
        for table in ["kv_log", "kv_log_more"] {
            let is_first = table == "kv_log";
            let wanted = rows.iter().filter(|it| (it.row.sub == 0) == is_first);
            let list = json_list(wanted.map(|it| format!("[{},{},{}]", it.row.revision.0, it.row.sub, it.end.0)));
            let Some(list) = list else { continue };
            let condition = if is_first { "" } else { " AND l.sub = w.value ->> 1" };
            let sql = format!(
                "SELECT w.value ->> 0, w.value ->> 1, w.value ->> 2, {COLUMNS_OF_LOG} FROM json_each(?) w \
                 JOIN {table} l ON l.id = w.value ->> 0{condition}"
            );
            // The text is safe: it has no parts from outside.
            let sql = sqlx::AssertSqlSafe(sql);
            for row in sqlx::query(sql).bind(list).fetch_all(&mut *log).await.map_err(unavailable)? {
                let superseded = Superseded { row: row_id(row.int(0)?, row.int(1)?)?, end: Revision(row.int(2)?) };
                found.push((row, superseded));
            }
        }
        Ok(found)
    }
}

/// Inserts rows of the log, unless they are in the archive.
async fn insert(transaction: &mut SqliteConnection, rows: Vec<(SqliteRow, Superseded)>) -> sqlx::Result<()> {
    let (mut added, mut bytes) = (0_i64, 0_i64);
    for (row, Superseded { row: id, end }) in rows {
        let (key, value): (&[u8], Option<&[u8]>) = (row.try_get(3)?, row.try_get(4)?);
        let len = key.len() + value.map_or(0, <[u8]>::len) + ARCHIVED_ROW_BYTES;
        let inserted = sqlx::query(INSERT)
            .bind(id.revision.0)
            .bind(i64::from(id.sub))
            .bind(key)
            .bind(value)
            .bind(row.try_get::<i64, _>(5)?)
            .bind(row.try_get::<i64, _>(6)?)
            .bind(row.try_get::<i64, _>(7)?)
            .bind(row.try_get::<i64, _>(8)?)
            .bind(row.try_get::<i64, _>(9)?)
            .bind(end.0)
            .execute(&mut *transaction)
            .await?;
        if inserted.rows_affected() > 0 {
            added += 1;
            bytes += i64::try_from(len).unwrap_or(i64::MAX);
        }
    }
    sqlx::query(ADD).bind(added).bind(bytes).execute(transaction).await?;
    Ok(())
}

fn not_written(error: sqlx::Error) -> Error {
    if has_code(&error, CODE_FULL) { Error::Full(error.to_string()) } else { unavailable(error) }
}

/// Deletes rows that no revision from `first` on needs. Returns their number.
async fn delete_old(connection: &mut SqliteConnection, first: i64) -> sqlx::Result<usize> {
    let lengths: Vec<i64> =
        sqlx::query_scalar(DELETE_OLD).bind(first).bind(PRUNE_ROWS).fetch_all(&mut *connection).await?;
    let rows = i64::try_from(lengths.len()).unwrap_or(i64::MAX);
    let bytes = lengths.iter().sum::<i64>() + rows * ARCHIVED_ROW_BYTES as i64;
    sqlx::query(ADD).bind(-rows).bind(-bytes).execute(connection).await?;
    Ok(lengths.len())
}

/// Returns the first revision that remains complete if the oldest rows, of at least `bytes`, are deleted; `None`: there are
/// no rows, so the fact `bytes` is wrong.
async fn first_without(connection: &mut SqliteConnection, bytes: i64) -> sqlx::Result<Option<i64>> {
    let oldest: Vec<(i64, i64)> = sqlx::query_as(OLDEST).bind(PRUNE_ROWS).fetch_all(connection).await?;
    let (mut first, mut freed) = (None, 0);
    for (needed_until, len) in oldest {
        if freed >= bytes {
            break;
        }
        freed += len + ARCHIVED_ROW_BYTES as i64;
        first = first.max(Some(needed_until));
    }
    Ok(first)
}

async fn prune(connection: &mut SqliteConnection, first: Revision, bytes_max: u64) -> sqlx::Result<Reclaimed> {
    let mut transaction = connection.begin().await?;
    sqlx::query(RAISE).bind(first.0).bind("first_revision").execute(&mut *transaction).await?;
    let facts = sqlx::query_as(STATE).fetch_one(&mut *transaction).await.map(archive::state)?;
    if facts.first == Revision::MAX {
        return Ok(Reclaimed::All);
    }
    let deleted = delete_old(&mut transaction, facts.first.0).await?;
    let mut reclaimed = Reclaimed::More;
    if deleted < PRUNE_ROWS as usize {
        sqlx::query(DELETE_TIMES).bind(facts.first.0).bind(now_ms()).execute(&mut *transaction).await?;
        let facts = sqlx::query_as(STATE).fetch_one(&mut *transaction).await.map(archive::state)?;
        let excess = facts.bytes.saturating_sub(bytes_max);
        let excess = i64::try_from(excess).unwrap_or(i64::MAX);
        match if excess == 0 { None } else { first_without(&mut transaction, excess).await? } {
            None => reclaimed = Reclaimed::All,
            Some(first) => {
                sqlx::query(RAISE).bind(first).bind("first_revision").execute(&mut *transaction).await?;
            }
        }
    }
    transaction.commit().await?;
    Ok(reclaimed)
}

#[async_trait]
impl Archive for SqliteArchive {
    /// The last connection moves the WAL into the file.
    async fn close(&self) {
        let readers = self.readers.lock().clone();
        if let Some(readers) = readers {
            close_readers(readers.close()).await;
        }
        if let Some(connection) = self.writer.block().await.take()
            && let Err(error) = connection.close().await
        {
            warn!(%error, "cannot close the archive of the history");
        }
    }

    async fn begin(&self, compacted: Option<Revision>) -> Result<()> {
        let mut writer = self.lock().await?;
        let compacted = compacted.unwrap_or(Revision::EMPTY).0;
        sqlx::query(BEGIN).bind(compacted).execute(writer.connection()).await.map_err(unavailable)?;
        writer.keep();
        Ok(())
    }

    async fn state(&self) -> Result<ArchiveState> {
        sqlx::query_as(STATE).fetch_one(&self.readers()?).await.map(archive::state).map_err(unavailable)
    }

    async fn freeze(&self, log: &dyn Log) -> Result<(Arc<dyn ReadLog>, Arc<dyn FrozenArchive>)> {
        // Otherwise it may be the archive of another log.
        drop(self.readers()?);
        let log = log.freeze().await?.into();
        Ok((log, Arc::new(Frozen::now(self.writer.options()).await?)))
    }

    /// Copies all rows in one transaction, which costs one sync. It takes the lock for writes at once: a transaction that
    /// has read fails, and does not wait, if another process holds the lock.
    async fn copy(&self, rows: &[Superseded]) -> Result<()> {
        let mut writer = self.lock().await?;
        sqlx::query(SYNC).execute(writer.connection()).await.map_err(not_written)?;
        let mut transaction = writer.connection().begin_with("BEGIN IMMEDIATE").await.map_err(not_written)?;
        let state = sqlx::query_as(STATE).fetch_one(&mut *transaction).await.map(archive::state);
        if state.map_err(not_written)?.first == Revision::MAX {
            transaction.rollback().await.map_err(not_written)?;
            writer.keep();
            return Ok(());
        }
        for rows in rows.chunks(COPY_ROWS) {
            let found = self.rows_of_log(rows).await?;
            insert(&mut transaction, found).await.map_err(not_written)?;
        }
        transaction.commit().await.map_err(not_written)?;
        writer.keep();
        Ok(())
    }

    async fn finish_copy(&self, compacted: Revision, _: i64) -> Result<()> {
        self.raise("copied_revision", compacted).await?;
        // Not before: an archive that does not know it is taken for an older one.
        let log = self.log_writer.lock().await.map_err(unreadable)?;
        log.run(move |log| log.execute(SET_FACT, (ARCHIVED_FACT, compacted.0))).await.map(drop).map_err(unreadable)
    }

    /// If the fact cannot be written, for example because the disk is full or the file is damaged, replaces the file. A
    /// file that another process has locked stays, because the lock will be released.
    async fn give_up(&self, first: Revision) -> Result<()> {
        let Err(failure) = self.raise("first_revision", first).await else { return Ok(()) };
        if failure.kind == Kind::Busy {
            return Err(failure.into());
        }
        warn!(error = failure.text, "cannot write to the archive of the history; replacing it");
        self.replace_file(first, &failure).await
    }

    async fn prune(&self, first: Revision, bytes_max: u64) -> Result<Reclaimed> {
        let mut writer = self.lock().await?;
        let reclaimed = prune(writer.connection(), first, bytes_max).await.map_err(unavailable)?;
        writer.keep();
        Ok(reclaimed)
    }

    /// Does not sync: a crash of the machine may lose the last moments.
    async fn note_time(&self, head: Revision, has_gap: bool) -> Result<()> {
        let mut writer = self.lock().await?;
        let noted = async {
            sqlx::query(DO_NOT_SYNC).execute(writer.connection()).await?;
            sqlx::query(NOTE_TIME).bind(head.0).bind(now_ms()).bind(has_gap).execute(writer.connection()).await
        };
        noted.await.map_err(unavailable)?;
        writer.keep();
        Ok(())
    }

    async fn now_ms(&self) -> Result<i64> {
        Ok(now_ms())
    }

    async fn first_moment(&self) -> Result<Option<Moment>> {
        let found = sqlx::query_as(FIRST_MOMENT).fetch_optional(&self.readers()?).await.map_err(unavailable)?;
        Ok(found.map(archive::moment))
    }

    async fn moment_at(&self, unix_ms: i64) -> Result<Option<Moment>> {
        let query = sqlx::query_as(MOMENT_AT).bind(unix_ms);
        let found = query.fetch_optional(&self.readers()?).await.map_err(unavailable)?;
        Ok(found.map(archive::moment))
    }

    async fn records(&self, revisions: &[Revision]) -> Result<Vec<Option<ArchivedMoment>>> {
        let mut reader = self.readers()?.acquire().await.map_err(unavailable)?;
        let mut records = Vec::with_capacity(revisions.len());
        for revision in revisions {
            let record = sqlx::query_as(RECORD_OF).bind(revision.0).fetch_optional(&mut *reader).await;
            records.push(record.map_err(unavailable)?.map(archive::archived_moment));
        }
        Ok(records)
    }

    async fn clock_steps(&self) -> Result<Vec<ClockStep>> {
        let found = sqlx::query_as(CLOCK_STEPS).fetch_all(&self.readers()?).await.map_err(unavailable)?;
        Ok(archive::clock_steps(found))
    }

    async fn changes(&self, wanted: ArchivedChanges<'_>) -> Result<(Vec<PastRow>, Option<RowId>)> {
        let range = SqlRange::of(wanted.range);
        let (from, mut to) = wanted.rows;
        let sql = match (wanted.range, wanted.order) {
            (KeyRange::Single(_), Order::OldestFirst) => changes_of_key!("ASC"),
            (KeyRange::Single(_), Order::NewestFirst) => changes_of_key!("DESC"),
            (KeyRange::Span { .. }, _) => CHANGES_OF_SPAN,
        };
        let readers = self.readers()?;
        let mut bound = None;
        if matches!(wanted.range, KeyRange::Span { .. }) {
            let query = sqlx::query_as(BOUND_OF_VISIT)
                .bind(from.revision.0)
                .bind(i64::from(from.sub))
                .bind(to.revision.0)
                .bind(i64::from(to.sub))
                .bind(ARCHIVE_VISITED_ROWS as i64 - 1);
            let found: Option<(i64, i64)> = query.fetch_optional(&readers).await.map_err(unavailable)?;
            bound = found.map(|(id, sub)| row_id(id, sub)).transpose()?;
            to = bound.unwrap_or(to);
        }
        let query = sqlx::query(sql)
            .bind(&range.start)
            .bind(from.revision.0)
            .bind(i64::from(from.sub))
            .bind(to.revision.0)
            .bind(i64::from(to.sub))
            .bind(ARCHIVE_PAGE_ROWS as i64);
        let query = match wanted.range {
            KeyRange::Single(_) => query,
            KeyRange::Span { .. } => query.bind(range.unbounded).bind(&range.end),
        };
        let page = archive::page(query.fetch(&readers), ARCHIVE_PAGE_ROWS).await.map_err(unavailable)?;
        Ok(archive::changes(page, bound))
    }

    async fn pairs_at(
        &self,
        range: &KeyRange,
        after: Option<&Key>,
        at: Revision,
    ) -> Result<(Vec<(Key, EncodedKv)>, Option<Key>)> {
        let bounds = SqlRange::of(range);
        let start = after.map_or(bounds.start.as_slice(), |after| after.as_slice());
        let sql = match (after.is_some(), bounds.unbounded) {
            (true, true) => pairs_at!("> ?1", ""),
            (true, false) => pairs_at!("> ?1", " AND key < ?4"),
            (false, true) => pairs_at!(">= ?1", ""),
            (false, false) => pairs_at!(">= ?1", " AND key < ?4"),
        };
        let query = sqlx::query(sql).bind(start).bind(at.0).bind(ARCHIVE_PAGE_KEYS as i64);
        let query = if bounds.unbounded { query } else { query.bind(&bounds.end) };
        let page = archive::page(query.fetch(&self.readers()?), ARCHIVE_PAGE_KEYS).await.map_err(unavailable)?;
        Ok(archive::pairs(page))
    }
}

fn now_ms() -> i64 {
    clock::unix_ms(clock::now())
}
