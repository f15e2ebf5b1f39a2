//! Reads the tables row by row for `orlop check`.

use async_trait::async_trait;
use sqlx::PgConnection;

use super::{
    connection::{Database, sqlstate},
    read::replay_rows,
    schema::missing_indexes,
    space,
    view::PostgresView,
};
use crate::{
    archive::stored_archived_row,
    error::corrupt,
    rows::{merge, stored_row},
};
use orlop_core::log::{
    ARCHIVE_PAGE_ROWS, Depth, Error, Facts, Inspect, Result, StoredArchive, StoredArchivedRow, StoredLease,
    StoredMember, StoredRow, Table,
};

/// `value || ''` makes the server read values that are stored out of line, so that damage is detected. It returns only
/// their lengths.
macro_rules! rows_sql {
    ($sub:literal, $from:literal) => {
        concat!(
            "SELECT id, ",
            $sub,
            ", key, octet_length(value || ''::bytea)::bigint, lease, version, create_revision, prev_revision, \
             deleted::int::bigint FROM ",
            $from,
            " LIMIT $3"
        )
    };
}

impl PostgresView {
    fn unreadable(&self, error: sqlx::Error) -> Error {
        unreadable(&self.database, error)
    }
}

#[async_trait]
impl Inspect for PostgresView {
    fn name(&self) -> &str {
        self.database.name()
    }

    /// Returns the primary keys and indexes that are missing. Postgres verifies pages when it reads them, and further checks
    /// require an extension.
    async fn integrity(&self, _: Depth, _: usize) -> Result<Vec<String>> {
        let connection = &mut *self.connection().await?;
        let missing = self.try_limited(missing_indexes(connection)).await.map_err(|error| self.unreadable(error))?;
        Ok(missing.iter().map(ToString::to_string).collect())
    }

    async fn facts(&self) -> Result<Facts> {
        let connection = &mut *self.connection().await?;
        self.try_limited(facts(connection)).await.map_err(|error| self.unreadable(error))
    }

    async fn rows_after(&self, place: (i64, i64)) -> Result<Vec<StoredRow>> {
        const FIRST: &str = rows_sql!("0::bigint", "kv_log WHERE id >= $1 AND (id > $1 OR $2::bigint < 0) ORDER BY id");
        const MORE: &str = rows_sql!("sub", "kv_log_more WHERE (id, sub) > ($1, $2) ORDER BY id, sub");
        let connection = &mut *self.connection().await?;
        let reading = async {
            let rows_max = replay_rows(&mut *connection, place).await?;
            let first = rows(&mut *connection, FIRST, place, rows_max).await?;
            Ok((rows_max, first, rows(connection, MORE, place, rows_max).await?))
        };
        let (rows_max, first, more) = self.try_limited(reading).await.map_err(|error| self.unreadable(error))?;
        let read = |table, rows: Vec<_>| rows.iter().map(|row| stored_row(table, row)).collect::<Result<Vec<_>>>();
        Ok(merge(read(Table::First, first)?, read(Table::More, more)?, rows_max, StoredRow::place))
    }

    async fn archive(&self, _: Depth, _: usize) -> Result<Option<StoredArchive>> {
        if !self.has_archive() {
            return Ok(None);
        }
        let named = self.facts().await?.named;
        let fact = |wanted| named.iter().find(|(name, _)| name == wanted).map(|(_, value)| *value);
        let first = fact("archive_first");
        Ok(first.map(|first| StoredArchive {
            damage: Vec::new(),
            compact_revision: fact("compact_revision"),
            first: Some(first),
            copied: fact("archive_copied"),
            bytes: fact("archive_bytes"),
            rows: fact("archive_rows"),
        }))
    }

    async fn archived_after(&self, (id, sub): (i64, i64)) -> Result<Vec<StoredArchivedRow>> {
        const ROWS: &str = "SELECT id, sub, key, (octet_length(key) + coalesce(octet_length(value || ''::bytea), 0))::bigint, \
            deleted::int::bigint, end_revision FROM kv_archive WHERE (id, sub) > ($1, $2) ORDER BY id, sub LIMIT $3";
        let connection = &mut *self.connection().await?;
        let reading = rows(connection, ROWS, (id, sub), ARCHIVE_PAGE_ROWS);
        let found = self.try_limited(reading).await.map_err(|error| self.unreadable(error))?;
        found.iter().map(stored_archived_row).collect()
    }

    /// Ends the session, because the command may end before a view that is dropped has done it. Nothing is checked, because
    /// all reads used one snapshot.
    async fn finish(&self) -> Result<()> {
        self.end().await
    }
}

async fn rows(
    connection: &mut PgConnection,
    sql: &'static str,
    (id, sub): (i64, i64),
    rows_max: usize,
) -> sqlx::Result<Vec<sqlx::postgres::PgRow>> {
    sqlx::query(sql).bind(id).bind(sub).bind(rows_max as i64).fetch_all(connection).await
}

async fn facts(connection: &mut PgConnection) -> sqlx::Result<Facts> {
    let ids: (Option<i64>, Option<i64>) =
        sqlx::query_as("SELECT min(id), max(id) FROM kv_log").fetch_one(&mut *connection).await?;
    let named = sqlx::query_as("SELECT name, value FROM meta ORDER BY name").fetch_all(&mut *connection).await?;
    let leases = sqlx::query_as::<_, (i64, i64)>("SELECT id, ttl FROM lease ORDER BY id");
    let leases = leases.fetch_all(&mut *connection).await?;
    let members = sqlx::query_as::<_, (i64, String, bool)>("SELECT id, name, beat >= started FROM member ORDER BY id");
    let members = members.fetch_all(&mut *connection).await?;
    let member = |(id, name, beats_after_start)| StoredMember { id, name, beats_after_start };
    Ok(Facts {
        ids: ids.0.zip(ids.1),
        named,
        leases: leases.into_iter().map(|(id, ttl)| StoredLease { id, ttl }).collect(),
        members: members.into_iter().map(member).collect(),
        required: &["cluster_id", "epoch", "last_beat", "purged_revision"],
        bytes: space::total(connection).await?,
    })
}

/// Maps an error of a read: damage to [`Error::Corrupt`], any other error to [`Error::Unavailable`].
fn unreadable(database: &Database, error: sqlx::Error) -> Error {
    const DATA_CORRUPTED: &str = "XX001";
    const INDEX_CORRUPTED: &str = "XX002";
    match sqlstate(&error).as_deref() {
        Some(DATA_CORRUPTED | INDEX_CORRUPTED) => corrupt(error),
        _ => database.unavailable(&error),
    }
}
