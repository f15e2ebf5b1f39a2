//! Reads rows.

use std::collections::HashMap;

use futures_util::TryStreamExt as _;
use sqlx::PgConnection;

use crate::auth::{self, AuthRow};
use crate::error::in_row;
use crate::rows::{
    self, LogRow, MetaRow, NEXT_ID, PAGE_BYTES_MAX, PAGE_IDS_MAX, PAGE_ROWS_MAX, PageBuilder, PageRow, REPLAY_ROWS_MAX,
    RowColumns, SqlRange, merge, row_id,
};
use orlop_core::{
    auth::AuthState,
    log::{Meta, Page, Position, Result, WithPrev},
    types::{Change, EncodedKv, KeyRange, LeaseId, Revision, RowId, Version},
};

/// Budget units of a row in addition to those of its bytes, see [`rows::consume_budget_for`].
const ROW_UNITS: usize = 4;
/// Maximum number of rows in one statement of [`orlop_core::log::Log::values`]: it keeps reads short.
const VALUES_ROWS_MAX: usize = 2_000;

/// Reads rows of [`MetaRow`] with all leases, to which a condition can be added.
macro_rules! meta_sql {
    () => {
        "SELECT 'position', '', (SELECT coalesce(max(id), 1) FROM kv_log), \
            (SELECT value FROM meta WHERE name = 'epoch'), orlop_server(), NULL::float8 \
        UNION ALL SELECT 'fact', name, value, 0, 0, NULL FROM meta \
        UNION ALL SELECT 'lease', '', id, ttl, 0, extract(epoch FROM deadline - clock_timestamp())::float8 FROM lease"
    };
}

/// Implements [`orlop_core::log::ReadLog::meta`], except for the member ID.
pub(super) async fn meta(connection: &mut PgConnection) -> sqlx::Result<Meta> {
    let rows: Vec<MetaRow> = sqlx::query_as(meta_sql!()).fetch_all(connection).await?;
    rows::meta(&rows).map_err(in_row)
}

/// Returns the state of the log with the leases that have changed since `known`, and the ids of all that have changed. `None`
/// if an epoch since then has no row, or if another server answers.
pub(super) async fn meta_since(
    connection: &mut PgConnection,
    known: Position,
) -> sqlx::Result<Option<(Meta, Vec<LeaseId>)>> {
    // With both bounds, and with an array, the planner expects few rows and uses the indexes, also without statistics.
    const META_SINCE: &str = concat!(
        "WITH recent AS (SELECT leases FROM lease_change \
            WHERE epoch BETWEEN $1 + 1 AND (SELECT value FROM meta WHERE name = 'epoch')) ",
        meta_sql!(),
        " WHERE id = ANY (ARRAY(SELECT unnest(leases) FROM recent)) \
        UNION ALL SELECT 'epochs', '', count(*), 0, 0, NULL FROM recent \
        UNION ALL SELECT 'changed', '', unnest(leases), 0, 0, NULL FROM recent"
    );
    let mut rows: Vec<MetaRow> = sqlx::query_as(META_SINCE).bind(known.epoch).fetch_all(connection).await?;
    let (mut epochs, mut changed) = (0, Vec::new());
    rows.retain(|(kind, _, a, ..)| {
        match kind.as_str() {
            "epochs" => epochs = *a,
            "changed" => changed.push(LeaseId(*a)),
            _ => return true,
        }
        false
    });
    let meta = rows::meta(&rows).map_err(in_row)?;
    let position = meta.position;
    let is_complete = position.server == known.server && position.epoch == known.epoch + epochs;
    Ok(is_complete.then_some((meta, changed)))
}

/// Implements [`orlop_core::log::ReadLog::auth`].
pub(super) async fn auth(connection: &mut PgConnection) -> sqlx::Result<AuthState> {
    let rows: Vec<AuthRow> = sqlx::query_as(auth::SELECT).fetch_all(connection).await?;
    auth::state(rows).map_err(in_row)
}

/// Returns how many rows of each table are read at a time, from a row on.
pub(super) async fn replay_rows(connection: &mut PgConnection, (id, sub): (i64, i64)) -> sqlx::Result<usize> {
    // The length of a long key is read without the key.
    const LONGEST: &str = "SELECT coalesce(greatest( \
        (SELECT max(n) FROM (SELECT octet_length(key) AS n FROM kv_log WHERE id >= $1 ORDER BY id LIMIT $3) AS f), \
        (SELECT max(n) FROM (SELECT octet_length(key) AS n FROM kv_log_more \
        WHERE (id, sub) >= ($1, $2) ORDER BY id, sub LIMIT $3) AS m)), 0)::bigint";
    let longest = sqlx::query_scalar(LONGEST).bind(id).bind(sub).bind(REPLAY_ROWS_MAX as i64);
    Ok(rows::replay_rows(longest.fetch_one(connection).await?))
}

/// Returns changes from a row on, as many as are read at a time, without values. Empty: there are no more.
pub(super) async fn replay_page(connection: &mut PgConnection, from: RowId) -> sqlx::Result<Vec<Change>> {
    const FIRST: &str = "SELECT id, 0::bigint, key, NULL::bytea, lease, version, create_revision, prev_revision, \
        deleted::int::bigint FROM kv_log WHERE id >= $1 + ($2 > 0)::int ORDER BY id LIMIT $3";
    const MORE: &str = "SELECT id, sub, key, NULL::bytea, lease, version, create_revision, prev_revision, \
        deleted::int::bigint FROM kv_log_more WHERE (id, sub) >= ($1, $2) ORDER BY id, sub LIMIT $3";
    let (id, sub) = (from.revision.0, i64::from(from.sub));
    let rows_max = replay_rows(&mut *connection, (id, sub)).await?;
    let mut tables = [Vec::new(), Vec::new()];
    for (sql, changes) in [FIRST, MORE].into_iter().zip(&mut tables) {
        let mut rows = sqlx::query(sql).bind(id).bind(sub).bind(rows_max as i64).fetch(&mut *connection);
        while let Some(row) = rows.try_next().await? {
            changes.push(RowColumns::read(&row, 0).map_err(in_row)?.into_change(None));
        }
    }
    let [first, more] = tables;
    Ok(merge(first, more, rows_max, |change: &Change| change.row))
}

/// Implements [`orlop_core::log::Log::values`].
pub(super) async fn values(connection: &mut PgConnection, rows: &[RowId]) -> sqlx::Result<Vec<(RowId, EncodedKv)>> {
    const FIRST: &str = "SELECT id, 0::bigint, key, value, lease, version, create_revision \
        FROM kv_log WHERE id = ANY ($1) AND NOT deleted";
    const MORE: &str = "SELECT id, sub, key, value, lease, version, create_revision \
        FROM kv_log_more JOIN unnest($1, $2) AS wanted (wanted_id, wanted_sub) ON id = wanted_id AND sub = wanted_sub \
        WHERE NOT deleted";
    let mut found = Vec::with_capacity(rows.len());
    for chunk in rows.chunks(VALUES_ROWS_MAX) {
        let mut unordered = HashMap::with_capacity(chunk.len());
        let (first, more): (Vec<RowId>, Vec<RowId>) = chunk.iter().partition(|row| row.sub == 0);
        let ids = |rows: &[RowId]| rows.iter().map(|row| row.revision.0).collect::<Vec<i64>>();
        let subs: Vec<i64> = more.iter().map(|row| i64::from(row.sub)).collect();
        let queries = [
            (!first.is_empty()).then(|| sqlx::query(FIRST).bind(ids(&first))),
            (!more.is_empty()).then(|| sqlx::query(MORE).bind(ids(&more)).bind(subs)),
        ];
        for query in queries.into_iter().flatten() {
            let mut fetched = query.fetch(&mut *connection);
            while let Some(row) = fetched.try_next().await? {
                let (row, kv) = pair(&row).map_err(in_row)?;
                // If all rows are in memory, nothing else in this loop yields to other tasks.
                rows::consume_budget_for(ROW_UNITS, kv.len()).await;
                unordered.insert(row, kv);
            }
        }
        found.extend(chunk.iter().filter_map(|row| unordered.remove_entry(row)));
    }
    Ok(found)
}

/// Reads the pair of a put from `id, sub, key, value, lease, version, create_revision`.
fn pair(row: &impl LogRow) -> Result<(RowId, EncodedKv)> {
    let id = row_id(row.int(0)?, row.int(1)?)?;
    let version = Version { row: id, create_revision: Revision(row.int(6)?), version: row.int(5)? };
    Ok((id, EncodedKv::new(row.slice(2)?, version, row.slice(3)?, LeaseId::from_wire(row.int(4)?))))
}

/// Implements [`orlop_core::log::Log::value_lengths`]. `octet_length` does not read a value that is stored outside of
/// its row.
pub(super) async fn value_lengths(connection: &mut PgConnection, rows: &[RowId]) -> sqlx::Result<Vec<(RowId, u64)>> {
    const FIRST: &str = "SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(0::bigint), '{}'), \
        coalesce(array_agg(octet_length(value)::bigint), '{}') FROM kv_log WHERE id = ANY ($1) AND NOT deleted";
    const MORE: &str = "SELECT coalesce(array_agg(id), '{}'), coalesce(array_agg(sub::bigint), '{}'), \
        coalesce(array_agg(octet_length(value)::bigint), '{}') FROM kv_log_more \
        JOIN unnest($1, $2) AS wanted (wanted_id, wanted_sub) ON id = wanted_id AND sub = wanted_sub WHERE NOT deleted";
    let (first, more): (Vec<RowId>, Vec<RowId>) = rows.iter().partition(|row| row.sub == 0);
    let ids = |rows: &[RowId]| rows.iter().map(|row| row.revision.0).collect::<Vec<i64>>();
    let subs: Vec<i64> = more.iter().map(|row| i64::from(row.sub)).collect();
    let queries = [
        (!first.is_empty()).then(|| sqlx::query_as(FIRST).bind(ids(&first))),
        (!more.is_empty()).then(|| sqlx::query_as(MORE).bind(ids(&more)).bind(subs)),
    ];
    let mut found = Vec::with_capacity(rows.len());
    for query in queries.into_iter().flatten() {
        let (ids, subs, lengths): (Vec<i64>, Vec<i64>, Vec<i64>) = query.fetch_one(&mut *connection).await?;
        found.extend(ids.into_iter().zip(subs).zip(lengths).map(|((id, sub), length)| {
            (RowId::new(Revision(id), u32::try_from(sub).unwrap_or(u32::MAX)), length.cast_unsigned())
        }));
    }
    Ok(found)
}

/// Columns 0 and 1 describe the whole page: the revision below which rows may be missing, and whether the second table
/// has rows of these revisions. If no row matches, one row with only these columns is returned. Rows beyond the limits of a
/// page ($6 rows, $7 bytes) stay on the server, which knows the lengths without reading the values.
macro_rules! first_sql {
    ($columns:literal, $joins:literal) => {
        concat!(
            "SELECT g.purged, g.more, r.id, 0::bigint, r.key, r.value, r.lease, r.version, r.create_revision, \
             r.prev_revision, r.deleted::int::bigint",
            $columns,
            " FROM (SELECT (SELECT value FROM meta WHERE name = 'purged_revision') AS purged, \
             EXISTS (SELECT 1 FROM kv_log_more WHERE id BETWEEN $1 AND $2)::int::bigint AS more) g \
             LEFT JOIN (SELECT * FROM (SELECT l.*, sum(octet_length(key) + coalesce(octet_length(value), 0)) \
             OVER (ORDER BY id ROWS BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM (SELECT * FROM kv_log \
             WHERE id BETWEEN $1 AND $2 AND key >= $3 AND ($4 OR key < $5) ORDER BY id LIMIT $6) l) w \
             WHERE coalesce(before, 0) <= $7) r ON true",
            $joins,
        )
    };
}

/// Rows of one revision stay together: the page ends after the revision in which it exceeds a limit.
macro_rules! more_sql {
    ($columns:literal, $joins:literal) => {
        concat!(
            "SELECT (SELECT value FROM meta WHERE name = 'purged_revision'), 0::bigint, r.id, r.sub, r.key, r.value, \
             r.lease, r.version, r.create_revision, r.prev_revision, r.deleted::int::bigint",
            $columns,
            " FROM (SELECT * FROM (SELECT l.*, sum(octet_length(key) + coalesce(octet_length(value), 0)) \
             OVER (ORDER BY id RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS before FROM kv_log_more l \
             WHERE key >= $3 AND ($4 OR key < $5) AND id BETWEEN $1 AND coalesce((SELECT id FROM kv_log_more \
             WHERE id BETWEEN $1 AND $2 AND key >= $3 AND ($4 OR key < $5) ORDER BY id, sub OFFSET $6 LIMIT 1), $2)) w \
             WHERE coalesce(before, 0) <= $7) r",
            $joins,
        )
    };
}

/// The limit in bytes applies to previous values as well.
macro_rules! with_prev {
    ($sql:ident) => {
        concat!(
            "SELECT * FROM (",
            $sql!(
                ", coalesce(p.value, q.value), coalesce(p.lease, q.lease), coalesce(p.version, q.version), \
                 coalesce(p.create_revision, q.create_revision), sum(octet_length(coalesce(p.value, q.value))) \
                 OVER (ORDER BY r.id RANGE BETWEEN UNBOUNDED PRECEDING AND 1 PRECEDING) AS prev_before",
                " LEFT JOIN kv_log p ON p.id = r.prev_revision AND p.key = r.key AND NOT p.deleted \
                 LEFT JOIN kv_log_more q ON q.id = r.prev_revision AND q.key = r.key AND NOT q.deleted"
            ),
            ") page WHERE coalesce(prev_before, 0) <= $7 ORDER BY 3, 4"
        )
    };
}

macro_rules! without_prev {
    ($sql:ident) => {
        concat!($sql!("", ""), " ORDER BY 3, 4")
    };
}

/// Implements [`orlop_core::log::ReadLog::changes`].
pub(super) async fn changes(
    connection: &mut PgConnection,
    from: Revision,
    to: Revision,
    range: &KeyRange,
    prev: WithPrev,
) -> sqlx::Result<Page> {
    let end = to.0.min(from.0.saturating_add(PAGE_IDS_MAX - 1));
    let range = SqlRange::of(range);
    let mut info = PageInfo::default();
    let sql = match prev {
        WithPrev::No => without_prev!(first_sql),
        WithPrev::Yes => with_prev!(first_sql),
    };
    let first = info.rows(connection, sql, (from.0, end), &range, prev).await?;
    let mut page = PageBuilder::new(first, end);
    if info.has_more {
        let sql = match prev {
            WithPrev::No => without_prev!(more_sql),
            WithPrev::Yes => with_prev!(more_sql),
        };
        let more = info.rows(connection, sql, (from.0, page.to()), &range, prev).await?;
        if more.is_empty() {
            // The rows may have been purged since the first statement. No row says so.
            let purged = sqlx::query_scalar("SELECT value FROM meta WHERE name = 'purged_revision'");
            let purged: i64 = purged.fetch_one(&mut *connection).await?;
            info.purged = info.purged.max(Revision(purged));
        }
        page.add_more(more);
    }
    if let Some(end) = page.empty_below(to) {
        page.skip_to(sqlx::query_scalar(NEXT_ID).bind(end).fetch_one(connection).await?, to);
    }
    Ok(page.finish(Some(info.purged)))
}

/// The columns that describe the whole page.
#[derive(Default)]
struct PageInfo {
    purged: Revision,
    has_more: bool,
}

impl PageInfo {
    /// Reads the rows of one table. It reads all that the statement returns, because the connection is used again.
    async fn rows(
        &mut self,
        connection: &mut PgConnection,
        sql: &'static str,
        (from, to): (i64, i64),
        range: &SqlRange,
        prev: WithPrev,
    ) -> sqlx::Result<Vec<PageRow>> {
        let mut fetched = sqlx::query(sql)
            .bind(from)
            .bind(to)
            .bind(&range.start)
            .bind(range.unbounded)
            .bind(&range.end)
            .bind(PAGE_ROWS_MAX as i64)
            .bind(PAGE_BYTES_MAX as i64)
            .fetch(connection);
        let mut rows = Vec::new();
        while let Some(row) = fetched.try_next().await? {
            self.take(&row, prev, &mut rows).map_err(in_row)?;
        }
        Ok(rows)
    }

    fn take(&mut self, row: &sqlx::postgres::PgRow, prev: WithPrev, rows: &mut Vec<PageRow>) -> Result<()> {
        self.purged = self.purged.max(Revision(row.int(0)?));
        self.has_more |= row.int(1)? != 0;
        if row.int_or_null(2)?.is_some() {
            let columns = RowColumns::read(row, 2)?;
            let prev_kv = columns.prev_kv(row, 11, prev)?;
            rows.push((columns, prev_kv));
        }
        Ok(())
    }
}
