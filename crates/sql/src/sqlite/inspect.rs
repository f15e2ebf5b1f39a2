//! Reads the tables row by row for `orlop check`.

use async_trait::async_trait;
use sqlx::SqliteConnection;

use super::{
    integrity::{find_damage, unreadable},
    read,
    view::{SqliteView, has_wal},
};
use crate::rows::{REPLAY_ROWS, merge, stored_row};
use orlop_core::log::{Depth, Error, Facts, Inspect, Result, StoredLease, StoredRow, Table};

#[async_trait]
impl Inspect for SqliteView {
    fn name(&self) -> &str {
        &self.name
    }

    async fn integrity(&self, depth: Depth, limit: usize) -> Result<Vec<String>> {
        let connection = &mut *self.connection.lock().await;
        let mut found = find_damage(connection, depth, limit).await?;
        let expected = read::size(connection).await?.total;
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
        let first = rows(&mut *connection, Table::First, FIRST, place).await?;
        let more = rows(connection, Table::More, MORE, place).await?;
        Ok(merge(first, more, REPLAY_ROWS, StoredRow::place))
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

async fn rows(
    connection: &mut SqliteConnection,
    table: Table,
    sql: &'static str,
    (id, sub): (i64, i64),
) -> Result<Vec<StoredRow>> {
    let rows = sqlx::query(sql).bind(id).bind(sub).bind(REPLAY_ROWS as i64).fetch_all(connection).await;
    rows.map_err(unreadable)?.iter().map(|row| stored_row(table, row)).collect()
}
