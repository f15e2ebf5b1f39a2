//! Disk usage of the tables, and VACUUM.

use std::{io::ErrorKind, time::Duration};

use sqlx::{Connection as _, PgConnection};
use tokio::time::sleep;

use super::{
    connection::{Database, read, with_timeout},
    primary::Found,
};
use orlop_core::log::{Error, Result};

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

/// A table that the role may not vacuum, its owner, and the role. Postgres skips such a table with a warning.
const NOT_PERMITTED: &str = "SELECT c.relname::text, pg_get_userbyid(c.relowner)::text, current_user::text \
    FROM pg_class c JOIN pg_database d ON d.datname = current_database() \
    WHERE c.oid IN ('kv_log'::regclass, 'kv_log_more'::regclass, 'lease'::regclass, 'lease_change'::regclass, \
            'meta'::regclass, 'saved_index'::regclass) \
        AND NOT pg_has_role(c.relowner, 'USAGE') AND NOT pg_has_role(d.datdba, 'USAGE') \
        AND CASE WHEN current_setting('server_version_num')::int >= 170000 \
            THEN NOT has_table_privilege(c.oid, 'MAINTAIN') ELSE true END \
    LIMIT 1";
/// A statement that runs holds at least the lock of its virtual transaction. Every role may read the locks of all processes,
/// but `pg_stat_activity` hides the state of another login role, and has none with `track_activities = off`.
const HAS_ENDED: &str = "SELECT NOT EXISTS (SELECT 1 FROM pg_locks WHERE pid = $1)";
/// Pause between two checks of a vacuum.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);

pub(super) async fn total(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(TOTAL).fetch_one(connection).await
}

/// Returns the bytes in use. Reads about [`SAMPLED_PAGES`] of each table.
pub(super) async fn in_use(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(IN_USE).bind(SAMPLED_PAGES).fetch_one(connection).await
}

/// Makes the space of deleted rows reusable and returns free pages at the end of a table to the file system. Writes
/// continue concurrently.
///
/// # Errors
///
/// [`Error::Refused`] if the role may not vacuum a table.
pub(super) async fn vacuum(database: &Database) -> Result<()> {
    let unavailable = |error| database.unavailable(&error);
    // A separate connection, because a vacuum takes time in proportion to the size of the tables.
    let Found { mut connection, generation, .. } = database.find().await.map_err(unavailable)?;
    let set_up = async {
        // Another vacuum of a table is waited for; meanwhile reads and writes continue. Postgres goes on waiting for a client
        // that has gone.
        sqlx::raw_sql("SET statement_timeout = 0; SET lock_timeout = '10min'").execute(&mut connection).await?;
        let process: i32 = sqlx::query_scalar("SELECT pg_backend_pid()").fetch_one(&mut connection).await?;
        let refused: Option<(String, String, String)> =
            sqlx::query_as(NOT_PERMITTED).fetch_optional(&mut connection).await?;
        Ok((process, refused))
    };
    let (process, refused) = with_timeout(set_up).await.map_err(unavailable)?;
    if let Some((table, owner, role)) = refused {
        return Err(Error::Refused(format!(
            "the role {role} may not vacuum the table {table}, whose owner is {owner}"
        )));
    }
    let vacuum =
        sqlx::query("VACUUM kv_log, kv_log_more, lease, lease_change, meta, saved_index").execute(&mut connection);
    let vacuum = tokio::select! {
        vacuum = database.unless_superseded(generation, vacuum) => vacuum.map(drop),
        () = lost(database, process) => Err(sqlx::Error::Io(ErrorKind::ConnectionReset.into())),
    };
    vacuum.map_err(unavailable)?;
    with_timeout(connection.close()).await.map_err(unavailable)
}

/// Returns when the server has ended a statement without a timeout and its result has not arrived: the connection was lost
/// without a trace.
async fn lost(database: &Database, process: i32) {
    loop {
        sleep(CHECK_INTERVAL).await;
        if has_ended(database, process).await {
            // The result may be on its way, or the vacuum is between two tables.
            sleep(CHECK_INTERVAL).await;
            if has_ended(database, process).await {
                return;
            }
        }
    }
}

/// Returns whether a process of the server is known to execute no statement.
async fn has_ended(database: &Database, process: i32) -> bool {
    read!(database, connection => sqlx::query_scalar(HAS_ENDED).bind(process).fetch_one(connection)).unwrap_or(false)
}
