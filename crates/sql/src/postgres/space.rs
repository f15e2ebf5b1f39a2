//! Disk usage of the tables, VACUUM, and the rebuild of indexes that are mostly free space.

use std::{io::ErrorKind, time::Duration};

use sqlx::{Connection as _, PgConnection};
use tokio::time::sleep;
use tracing::info;

use super::{
    connection::{Database, read, with_timeout},
    primary::Found,
};
use orlop_core::log::{Error, Result};

const TOTAL: &str = "SELECT pg_total_relation_size('kv_log') + pg_total_relation_size('kv_log_more') \
    + pg_total_relation_size('lease') + pg_total_relation_size('meta')";
/// Number of pages of a table, about, that are read to determine its bytes in use: 64 MiB.
const SAMPLED_PAGES: i64 = 8_192;
/// Sums the stored size of each row and its entry in the primary key. Values stored out of line are not read. Postgres
/// reports the free space in pages only through an extension.
///
/// A row of `kv_log` takes 76 bytes beside key and value: 24 for the header, 4 for the line pointer, 41 for the other
/// columns, and on average 7 for their alignment. Its entry takes 16 bytes and 4 for the line pointer. Revisions increase,
/// so pages of the index are filled to 90 %, and an entry is counted with 24 bytes. In `kv_log_more` the row and the entry
/// have 8 bytes more. A lease takes 52 bytes; its ID is random, so pages of the index are filled to about 70 %, and an entry
/// is counted with 28 bytes. The sizes of the indexes are not used, because they have free space, too: revisions only
/// increase, so a page of which compactions leave a few entries is never filled again.
///
/// Reading all pages of a large table would take longer than a statement may, so of a larger table some pages are read,
/// chosen by a hash and always the same, and the sum is multiplied by its size in samples. The result is then an estimate.
const IN_USE: &str = "SELECT ( \
    samples.log * (SELECT coalesce(sum(pg_column_size(key) + coalesce(pg_column_size(value), 0) + 100), 0) \
        FROM kv_log TABLESAMPLE SYSTEM (100 / samples.log) REPEATABLE (0)) \
    + samples.more * (SELECT coalesce(sum(pg_column_size(key) + coalesce(pg_column_size(value), 0) + 116), 0) \
        FROM kv_log_more TABLESAMPLE SYSTEM (100 / samples.more) REPEATABLE (0)) \
    + samples.lease * (SELECT count(*) * 80 FROM lease TABLESAMPLE SYSTEM (100 / samples.lease) REPEATABLE (0)) \
    + pg_total_relation_size('meta'))::bigint \
    FROM (SELECT greatest(1.0, pg_relation_size('kv_log') / sample.bytes) AS log, \
        greatest(1.0, pg_relation_size('kv_log_more') / sample.bytes) AS more, \
        greatest(1.0, pg_relation_size('lease') / sample.bytes) AS lease \
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
/// Whether the role owns the tables, and no other session rebuilds their indexes: two that do would wait for each other.
/// The lock is released when the connection is closed.
const MAY_REBUILD: &str = "SELECT pg_has_role(relowner, 'USAGE') \
    AND pg_try_advisory_lock((1869771888::bigint << 32) | 'kv_log_more'::regclass::oid::bigint) \
    FROM pg_class WHERE oid = 'kv_log'::regclass";
/// Whether an index has 1 MiB and four times the bytes that the entries of its rows need. VACUUM has counted the rows.
const IS_SPARSE: &str = "SELECT EXISTS (SELECT 1 FROM pg_index i JOIN pg_class t ON t.oid = i.indrelid \
    WHERE i.indexrelid = to_regclass($1) \
        AND pg_relation_size(i.indexrelid) > 1048576 + 4 * 32 * greatest(t.reltuples, 0))";
/// The indexes, statements that drop what a failed rebuild left, and the statement that rebuilds.
const REBUILDS: [(&str, [&str; 2], &str); 2] = [
    (
        "kv_log_pkey",
        ["DROP INDEX CONCURRENTLY IF EXISTS kv_log_pkey_ccnew", "DROP INDEX CONCURRENTLY IF EXISTS kv_log_pkey_ccold"],
        "REINDEX INDEX CONCURRENTLY kv_log_pkey",
    ),
    (
        "kv_log_more_pkey",
        [
            "DROP INDEX CONCURRENTLY IF EXISTS kv_log_more_pkey_ccnew",
            "DROP INDEX CONCURRENTLY IF EXISTS kv_log_more_pkey_ccold",
        ],
        "REINDEX INDEX CONCURRENTLY kv_log_more_pkey",
    ),
];
/// A statement that runs holds at least the lock of its virtual transaction. Every role may read the locks of all processes,
/// but `pg_stat_activity` hides the state of another login role, and has none with `track_activities = off`.
const HAS_ENDED: &str = "SELECT NOT EXISTS (SELECT 1 FROM pg_locks WHERE pid = $1 AND locktype = 'virtualxid')";
/// Pause between two checks of a vacuum.
const CHECK_INTERVAL: Duration = Duration::from_secs(3);

/// The size of the tables and the bytes in use when these were last counted.
#[derive(Clone, Copy, Default)]
pub(super) struct Counted {
    pub(super) total: i64,
    pub(super) in_use: i64,
}

impl Counted {
    /// Returns the bytes in use now, about, of tables with this size. Pages that were added are full, and pages that were
    /// returned to the file system were free.
    pub(super) fn in_use_of(self, total: i64) -> i64 {
        (self.in_use + (total - self.total).max(0)).min(total)
    }
}

pub(super) async fn total(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(TOTAL).fetch_one(connection).await
}

/// Returns the bytes in use. Reads about [`SAMPLED_PAGES`] of each table.
pub(super) async fn in_use(connection: &mut PgConnection) -> sqlx::Result<i64> {
    sqlx::query_scalar(IN_USE).bind(SAMPLED_PAGES).fetch_one(connection).await
}

/// Makes the space of deleted rows reusable, returns free pages at the end of a table to the file system, and rebuilds
/// indexes that are mostly free space. Writes continue concurrently.
///
/// # Errors
///
/// [`Error::Refused`] if the role may not vacuum a table.
pub(super) async fn vacuum(database: &Database) -> Result<()> {
    let unavailable = |error| database.unavailable(&error);
    // A separate connection, because a vacuum takes time in proportion to the size of the tables.
    let Found { mut connection, generation, .. } = database.find().await.map_err(unavailable)?;
    let set_up = async {
        // Another vacuum of a table is waited for, and by a rebuild also each transaction that began before; meanwhile reads
        // and writes continue. Postgres goes on waiting for a client that has gone.
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
    let work = async {
        let vacuum = sqlx::query("VACUUM kv_log, kv_log_more, lease, lease_change, meta, saved_index");
        vacuum.execute(&mut connection).await?;
        rebuild_indexes(&mut connection).await
    };
    let done = tokio::select! {
        done = database.unless_superseded(generation, work) => done,
        () = lost(database, process) => Err(sqlx::Error::Io(ErrorKind::ConnectionReset.into())),
    };
    done.map_err(unavailable)?;
    with_timeout(connection.close()).await.map_err(unavailable)
}

/// Rebuilds the primary keys that are mostly free space, unless another session does. None of these statements can run in a
/// transaction block.
async fn rebuild_indexes(connection: &mut PgConnection) -> sqlx::Result<()> {
    if !sqlx::query_scalar::<_, bool>(MAY_REBUILD).fetch_one(&mut *connection).await? {
        return Ok(());
    }
    for (index, leftovers, rebuild) in REBUILDS {
        for leftover in leftovers {
            sqlx::query(leftover).execute(&mut *connection).await?;
        }
        if sqlx::query_scalar::<_, bool>(IS_SPARSE).bind(index).fetch_one(&mut *connection).await? {
            info!(index, "rebuilding an index that is mostly free space");
            sqlx::query(rebuild).execute(&mut *connection).await?;
        }
    }
    Ok(())
}

/// Returns when the server has ended a statement without a timeout and its result has not arrived: the connection was lost
/// without a trace.
async fn lost(database: &Database, process: i32) {
    loop {
        sleep(CHECK_INTERVAL).await;
        if has_ended(database, process).await {
            // The result may be on its way, or the work is between two tables or statements.
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

#[cfg(test)]
mod tests {
    use super::Counted;

    #[test]
    fn returned_pages_were_free_and_added_ones_are_full() {
        let counted = Counted { total: 100, in_use: 30 };
        for (total, expected) in [(100, 30), (120, 50), (80, 30), (20, 20)] {
            assert_eq!(counted.in_use_of(total), expected, "{total}");
        }
        assert_eq!(Counted::default().in_use_of(70), 70, "nothing was counted");
    }
}
