//! Reads the tables row by row for `orlop check`.

use std::path::Path;

use async_trait::async_trait;
use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};

use super::{
    archive::{self, archive_file},
    integrity::{find_damage, unreadable},
    read,
    view::{SqliteView, has_wal, may_be_immutable},
};
use crate::{
    archive::stored_archived_row,
    rows::{merge, stored_row},
};
use orlop_core::log::{
    ARCHIVE_PAGE_ROWS, Depth, Error, Facts, Inspect, Result, StoredArchive, StoredArchivedRow, StoredLease, StoredRow,
    Table,
};

#[async_trait]
impl Inspect for SqliteView {
    fn name(&self) -> &str {
        &self.name
    }

    async fn integrity(&self, depth: Depth, limit: usize) -> Result<Vec<String>> {
        let connection = &mut *self.connection.lock().await;
        let mut found = find_damage(connection, depth, limit).await?;
        let expected = match read::size(connection).await {
            Err(Error::Corrupt(_)) if !found.is_empty() => return Ok(found),
            size => size?.total,
        };
        let len = self.file_without_wal.as_ref().and_then(|file| i64::try_from(file.metadata().ok()?.len()).ok());
        // SQLite reads zeros for the missing part of a truncated last page.
        if let Some(len) = len.filter(|len| *len != expected) {
            found.push(format!("the file has {len} bytes, expected {expected}"));
        }
        Ok(found)
    }

    async fn facts(&self) -> Result<Facts> {
        let connection = &mut *self.connection.lock().await;
        let ids: (Option<i64>, Option<i64>) = sqlx::query_as("SELECT min(id), max(id) FROM kv_log")
            .fetch_one(&mut *connection)
            .await
            .map_err(unreadable)?;
        let named = sqlx::query_as("SELECT name, value FROM meta ORDER BY name");
        let named = named.fetch_all(&mut *connection).await.map_err(unreadable)?;
        let leases = sqlx::query_as::<_, (i64, i64)>("SELECT id, ttl FROM lease ORDER BY id");
        let leases = leases.fetch_all(&mut *connection).await.map_err(unreadable)?;
        Ok(Facts {
            ids: ids.0.zip(ids.1),
            named,
            leases: leases.into_iter().map(|(id, ttl)| StoredLease { id, ttl }).collect(),
            members: Vec::new(),
            required: &["cluster_id", "member_id"],
            bytes: read::size(connection).await?.total,
        })
    }

    async fn rows_after(&self, place: (i64, i64)) -> Result<Vec<StoredRow>> {
        const FIRST: &str = "SELECT id, 0, key, length(value), lease, version, create_revision, prev_revision, deleted \
            FROM kv_log WHERE id >= ?1 AND (id > ?1 OR ?2 < 0) ORDER BY id LIMIT ?3";
        const MORE: &str = "SELECT id, sub, key, length(value), lease, version, create_revision, prev_revision, \
            deleted FROM kv_log_more WHERE (id, sub) > (?1, ?2) ORDER BY id, sub LIMIT ?3";
        let connection = &mut *self.connection.lock().await;
        let rows_max = read::replay_rows(&mut *connection, place).await.map_err(unreadable)?;
        let first = rows(&mut *connection, Table::First, FIRST, place, rows_max).await?;
        let more = rows(connection, Table::More, MORE, place, rows_max).await?;
        Ok(merge(first, more, rows_max, StoredRow::place))
    }

    async fn archive(&self, depth: Depth, limit: usize) -> Result<Option<StoredArchive>> {
        let file = archive_file(Path::new(&self.name));
        if !file.exists() {
            return Ok(None);
        }
        let opened = match open_archive(&file, depth, limit).await {
            Ok(opened) => opened,
            Err(Error::Corrupt(what)) => {
                return Ok(Some(StoredArchive { damage: vec![what], ..StoredArchive::default() }));
            }
            Err(error) => return Err(error),
        };
        let Some((connection, stored)) = opened else { return Ok(None) };
        *self.archive.lock().await = connection;
        // A compaction may have been recorded since the log was read.
        let options = SqliteConnectOptions::new().filename(&self.name).read_only(true);
        let options = options.immutable(may_be_immutable(Path::new(&self.name)));
        let mut now = options.disable_statement_logging().connect().await.map_err(unreadable)?;
        let compacted = "SELECT max(value) FROM meta WHERE name = 'compact_revision'";
        let compact_revision = sqlx::query_scalar(compacted).fetch_one(&mut now).await.map_err(unreadable)?;
        Ok(Some(StoredArchive { compact_revision, ..stored }))
    }

    async fn archived_after(&self, (id, sub): (i64, i64)) -> Result<Vec<StoredArchivedRow>> {
        const ROWS: &str = "SELECT id, sub, key, length(key) + coalesce(length(value), 0), deleted, end_revision \
            FROM kv_archive WHERE (id, sub) > (?1, ?2) ORDER BY id, sub LIMIT ?3";
        let mut archive = self.archive.lock().await;
        let Some(connection) = &mut *archive else { return Ok(Vec::new()) };
        let rows = sqlx::query(ROWS).bind(id).bind(sub).bind(ARCHIVE_PAGE_ROWS as i64).fetch_all(connection).await;
        rows.map_err(unreadable)?.iter().map(stored_archived_row).collect()
    }

    async fn finish(&self) -> Result<()> {
        match &self.file_without_wal {
            Some(file) if has_wal(file) => {
                Err(Error::Unavailable(format!("a server started to use {} during the check; try again", self.name)))
            }
            Some(_) | None => Ok(()),
        }
    }
}

/// Opens an archive, and begins a transaction, unless it is damaged; `None`: it was never begun.
async fn open_archive(
    file: &Path,
    depth: Depth,
    limit: usize,
) -> Result<Option<(Option<SqliteConnection>, StoredArchive)>> {
    let options = SqliteConnectOptions::new().filename(file).read_only(true).immutable(may_be_immutable(file));
    let mut connection = options.disable_statement_logging().connect().await.map_err(unreadable)?;
    sqlx::raw_sql("BEGIN; SELECT 1 FROM sqlite_master").execute(&mut connection).await.map_err(unreadable)?;
    let damage = find_damage(&mut connection, depth, limit).await?;
    if !damage.is_empty() {
        return Ok(Some((None, StoredArchive { damage, ..StoredArchive::default() })));
    }
    let (first, copied, bytes, rows) = match sqlx::query_as(archive::STATE).fetch_one(&mut connection).await {
        // It was just created.
        Err(sqlx::Error::Database(error)) if error.message().contains("no such table") => return Ok(None),
        facts => facts.map_err(unreadable)?,
    };
    let stored = StoredArchive { first, copied, bytes, rows, ..StoredArchive::default() };
    Ok(first.map(|_| (Some(connection), stored)))
}

async fn rows(
    connection: &mut SqliteConnection,
    table: Table,
    sql: &'static str,
    (id, sub): (i64, i64),
    rows_max: usize,
) -> Result<Vec<StoredRow>> {
    let rows = sqlx::query(sql).bind(id).bind(sub).bind(rows_max as i64).fetch_all(connection).await;
    rows.map_err(unreadable)?.iter().map(|row| stored_row(table, row)).collect()
}
