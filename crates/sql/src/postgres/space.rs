//! Disk usage of the tables, and VACUUM.

use sqlx::{Connection as _, PgConnection};

use super::{
    connection::{Database, with_timeout},
    primary::Found,
};
use orlop_core::log::Result;

const TOTAL: &str = "SELECT pg_total_relation_size('kv_log') + pg_total_relation_size('kv_log_more') \
    + pg_total_relation_size('lease') + pg_total_relation_size('meta')";
/// Number of pages of a table, about, that are read to determine its bytes in use: 64 MiB.
const SAMPLED_PAGES: i64 = 8_192;
/// Sums the stored size of each row: key, value, numeric columns, header and line pointer. Values stored out of line
/// are not read. Indexes are counted completely. Postgres reports the free space in pages only through an extension.
///
/// Reading all pages of a large table would take longer than a statement may, so of a larger table some pages are read,
/// chosen by a hash and always the same, and the sum is multiplied by its size in samples. The result is then an estimate.
const IN_USE: &str = "SELECT ( \
    samples.log * (SELECT coalesce(sum(pg_column_size(key) + coalesce(pg_column_size(value), 0) + 76), 0) \
        FROM kv_log TABLESAMPLE SYSTEM (100 / samples.log) REPEATABLE (0)) \
    + samples.more * (SELECT coalesce(sum(pg_column_size(key) + coalesce(pg_column_size(value), 0) + 84), 0) \
        FROM kv_log_more TABLESAMPLE SYSTEM (100 / samples.more) REPEATABLE (0)) \
    + pg_indexes_size('kv_log') + pg_indexes_size('kv_log_more') + pg_total_relation_size('lease') \
    + pg_total_relation_size('meta'))::bigint \
    FROM (SELECT greatest(1.0, pg_relation_size('kv_log') / sample.bytes) AS log, \
        greatest(1.0, pg_relation_size('kv_log_more') / sample.bytes) AS more \
        FROM (SELECT $1 * current_setting('block_size')::numeric AS bytes) sample) samples";

pub(super) async fn total(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(TOTAL).fetch_one(connection).await
}

/// Returns the bytes in use. Reads about [`SAMPLED_PAGES`] of each table.
pub(super) async fn in_use(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(IN_USE).bind(SAMPLED_PAGES).fetch_one(connection).await
}

/// Makes the space of deleted rows reusable and returns free pages at the end of a table to the file system. Writes
/// continue concurrently.
pub(super) async fn vacuum(database: &Database) -> Result<()> {
    let unavailable = |error| database.unavailable(&error);
    // A separate connection, because a vacuum takes time in proportion to the size of the tables.
    let Found { mut connection, timeline, .. } = database.find().await.map_err(unavailable)?;
    with_timeout(sqlx::raw_sql("SET statement_timeout = 0").execute(&mut connection)).await.map_err(unavailable)?;
    let vacuum = sqlx::query("VACUUM kv_log, kv_log_more, lease, meta, saved_index").execute(&mut connection);
    database.unless_superseded(timeline, vacuum).await.map_err(unavailable)?;
    with_timeout(connection.close()).await.map_err(unavailable)
}
