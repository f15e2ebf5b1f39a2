//! What the tables take on the disk, and how room is made in them.

use sqlx::{Connection as _, PgConnection};

use super::connection::{Database, bounded};
use orlop_core::log::Result;

const TOTAL: &str = "SELECT pg_total_relation_size('kv_log') + pg_total_relation_size('kv_log_more') \
    + pg_total_relation_size('lease') + pg_total_relation_size('meta')";
/// Each row with its head, its numbers and its place in the page; values as they are stored, without reading those that are
/// stored apart. Indexes count whole. Of free pages Postgres itself tells only by an extension.
const IN_USE: &str = "SELECT coalesce(sum(bytes), 0)::bigint + pg_indexes_size('kv_log') + pg_indexes_size('kv_log_more') \
    + pg_total_relation_size('lease') + pg_total_relation_size('meta') \
    FROM (SELECT pg_column_size(key) + coalesce(pg_column_size(value), 0) + 76 AS bytes FROM kv_log \
    UNION ALL SELECT pg_column_size(key) + coalesce(pg_column_size(value), 0) + 84 FROM kv_log_more) r";

pub(super) async fn total(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(TOTAL).fetch_one(connection).await
}

/// Reads the tables, though not the values that are stored apart.
pub(super) async fn in_use(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(IN_USE).fetch_one(connection).await
}

/// Lets deleted rows' pages be written again, and gives those at the end of a table back. Writes go on meanwhile.
pub(super) async fn vacuum(database: &Database) -> Result<()> {
    let unavailable = |error| database.unavailable(&error);
    // A connection of its own, as it may take as long as the tables are large.
    let mut connection = database.connect().await.map_err(unavailable)?;
    bounded(sqlx::raw_sql("SET statement_timeout = 0").execute(&mut connection)).await.map_err(unavailable)?;
    sqlx::query("VACUUM kv_log, kv_log_more, lease, meta").execute(&mut connection).await.map_err(unavailable)?;
    bounded(connection.close()).await.map_err(unavailable)
}
