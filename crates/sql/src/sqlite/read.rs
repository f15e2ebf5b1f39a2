//! Reads the history: rows in the order of revisions.

use std::{pin::pin, task::Poll};

use futures_util::{TryStreamExt as _, poll};
use sqlx::{SqliteConnection, sqlite::SqliteRow};

use super::{
    integrity::unreadable,
    packed::{self, packed_columns},
};
use crate::auth::{self, AuthRow};
use crate::rows::{
    self, LogRow as _, MetaRow, NEXT_ID, PAGE_BYTES_MAX, PAGE_IDS_MAX, PAGE_ROWS_MAX, PageBuilder, PageRow,
    REPLAY_ROWS_MAX, RowColumns, SqlRange, merge,
};
use orlop_core::{
    auth::AuthState,
    log::{Meta, Page, Result, Size, Visit, WithPrev},
    types::{Change, KeyRange, Revision, RowId},
};

/// Implements [`orlop_core::log::History::meta`].
pub(super) async fn meta(connection: &mut SqliteConnection) -> Result<Meta> {
    const META: &str = "SELECT 'position', '', coalesce(max(id), 1), 0, 0, NULL FROM kv_log \
        UNION ALL SELECT 'fact', name, value, 0, 0, NULL FROM meta \
        UNION ALL SELECT 'lease', '', id, ttl, 0, NULL FROM lease";
    let rows: Vec<MetaRow> = sqlx::query_as(META).fetch_all(connection).await.map_err(unreadable)?;
    rows::meta(&rows)
}

/// Implements [`orlop_core::log::History::auth`].
pub(super) async fn auth(connection: &mut SqliteConnection) -> Result<AuthState> {
    let rows: Vec<AuthRow> = sqlx::query_as(auth::SELECT).fetch_all(connection).await.map_err(unreadable)?;
    auth::state(rows)
}

/// Implements [`orlop_core::log::History::replay`].
pub(super) async fn replay(connection: &mut SqliteConnection, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
    // No other process writes during the start, so several reads return consistent rows.
    let meta = meta(&mut *connection).await?;
    let mut packed = packed_rows(&mut *connection, RowId::new(from, 0), REPLAY_ROWS_MAX).await?;
    loop {
        // The keys of neighboring rows are often as long.
        let rows_max = rows::replay_rows(packed.longest);
        let changes = unpacked(packed)?;
        let Some(last) = changes.last() else { return Ok(meta) };
        let next = last.row.next();
        // SQLite's thread reads the next rows while these are visited. Both take about the same time.
        let mut reading = pin!(packed_rows(&mut *connection, next, rows_max));
        let read = poll!(reading.as_mut());
        visit(&meta, changes)?;
        packed = match read {
            Poll::Ready(read) => read?,
            Poll::Pending => reading.await?,
        };
    }
}

/// Implements [`orlop_core::log::History::changes`].
pub(super) async fn changes(
    connection: &mut SqliteConnection,
    from: Revision,
    to: Revision,
    range: &KeyRange,
    prev: WithPrev,
) -> Result<Page> {
    let end = to.0.min(from.0.saturating_add(PAGE_IDS_MAX - 1));
    let first = page_rows(&mut *connection, Table::First, from.0, end, range, prev).await?;
    let mut page = PageBuilder::new(first, end);
    page.add_more(page_rows(&mut *connection, Table::More, from.0, page.to(), range, prev).await?);
    if let Some(end) = page.empty_below(to) {
        let next = sqlx::query_scalar(NEXT_ID).bind(end).fetch_one(connection).await.map_err(unreadable)?;
        page.skip_to(next, to);
    }
    Ok(page.finish(None))
}

/// The numbers of all pages and of free pages of the file, and the page size in bytes.
pub(super) struct Pages {
    pub(super) all: i64,
    pub(super) free: i64,
    bytes: i64,
}

pub(super) async fn pages(connection: &mut SqliteConnection) -> Result<Pages> {
    let row = sqlx::query(
        "SELECT (SELECT page_count FROM pragma_page_count), (SELECT freelist_count FROM pragma_freelist_count), \
         (SELECT page_size FROM pragma_page_size)",
    )
    .fetch_one(connection)
    .await
    .map_err(unreadable)?;
    Ok(Pages { all: row.int(0)?, free: row.int(1)?, bytes: row.int(2)? })
}

pub(super) async fn size(connection: &mut SqliteConnection) -> Result<Size> {
    let Pages { all, free, bytes } = pages(connection).await?;
    Ok(Size { total: all * bytes, in_use: (all - free) * bytes, disk_free: None })
}

/// Reads the rows of one table for a page. The first change of a revision is in `kv_log`, the others are in `kv_log_more`.
async fn page_rows(
    connection: &mut SqliteConnection,
    table: Table,
    from: i64,
    to: i64,
    range: &KeyRange,
    prev: WithPrev,
) -> Result<Vec<PageRow>> {
    let range = SqlRange::of(range);
    let mut rows = sqlx::query(table.changes_sql(prev))
        .bind(from)
        .bind(to)
        .bind(range.start)
        .bind(range.unbounded)
        .bind(range.end)
        .fetch(&mut *connection);
    let mut found: Vec<PageRow> = Vec::new();
    let mut bytes = 0;
    while let Some(row) = rows.try_next().await.map_err(unreadable)? {
        let columns = RowColumns::read(&row, 0)?;
        let is_full = found.len() >= PAGE_ROWS_MAX || bytes > PAGE_BYTES_MAX;
        if is_full && found.last().is_some_and(|(last, _)| last.row.revision != columns.row.revision) {
            break;
        }
        let prev_kv = columns.prev_kv(&row, 9, prev)?;
        found.push((columns, prev_kv));
        bytes += found.last().map_or(0, rows::bytes);
    }
    Ok(found)
}

/// Returns how many rows of each table are read at a time, from a row on.
pub(super) async fn replay_rows(connection: &mut SqliteConnection, (id, sub): (i64, i64)) -> sqlx::Result<usize> {
    // The length of a key is read without the key.
    const LONGEST: &str = "SELECT max( \
        (SELECT coalesce(max(n), 0) FROM (SELECT length(key) AS n FROM kv_log WHERE (id, 0) >= (?1, ?2) ORDER BY id LIMIT ?3)), \
        (SELECT coalesce(max(n), 0) FROM \
        (SELECT length(key) AS n FROM kv_log_more WHERE (id, sub) >= (?1, ?2) ORDER BY id, sub LIMIT ?3)))";
    let longest = sqlx::query_scalar(LONGEST).bind(id).bind(sub).bind(REPLAY_ROWS_MAX as i64);
    Ok(rows::replay_rows(longest.fetch_one(connection).await?))
}

/// Rows of both tables, packed and without values.
struct Packed {
    tables: [SqliteRow; 2],
    /// The maximum number of rows of each table.
    rows_max: usize,
    /// The length of the longest key.
    longest: i64,
}

/// Reads rows from `from` on: of each table as many as their longest key permits, but at most `rows_max`.
async fn packed_rows(connection: &mut SqliteConnection, from: RowId, mut rows_max: usize) -> Result<Packed> {
    const FIRST: &str = concat!(
        "SELECT ",
        packed_columns!("0"),
        " FROM (SELECT id, key, lease, version, create_revision, prev_revision, deleted FROM kv_log \
         WHERE (id, 0) >= (?1, ?2) ORDER BY id LIMIT ?3)"
    );
    const MORE: &str = concat!(
        "SELECT ",
        packed_columns!("sub"),
        " FROM (SELECT id, sub, key, lease, version, create_revision, prev_revision, deleted FROM kv_log_more \
         WHERE (id, sub) >= (?1, ?2) ORDER BY id, sub LIMIT ?3)"
    );
    let mut read = async |sql, rows_max: usize| {
        let query = sqlx::query(sql).bind(from.revision.0).bind(i64::from(from.sub)).bind(rows_max as i64);
        query.bind(rows::replayed_key_max(rows_max)).fetch_one(&mut *connection).await.map_err(unreadable)
    };
    loop {
        let tables = [read(FIRST, rows_max).await?, read(MORE, rows_max).await?];
        let longest = tables[0].int(2)?.max(tables[1].int(2)?);
        if longest <= rows::replayed_key_max(rows_max) {
            return Ok(Packed { tables, rows_max, longest });
        }
        rows_max = rows::replay_rows(longest);
    }
}

/// Unpacks the rows of both tables and returns them in order.
fn unpacked(packed: Packed) -> Result<Vec<Change>> {
    let mut tables = [Vec::new(), Vec::new()];
    for (packed, changes) in packed.tables.iter().zip(&mut tables) {
        for row in packed::rows(packed)? {
            changes.push(RowColumns::from(row?).into_change(None));
        }
        // SQLite currently keeps the order of the subquery in an aggregate, but does not guarantee it.
        changes.sort_by_key(|change| change.row);
    }
    let [first, more] = tables;
    Ok(merge(first, more, packed.rows_max, |change| change.row))
}

/// The two tables of rows.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Table {
    First,
    More,
}

/// `$sub` is the expression for the number of a change in its revision.
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

/// Returns a JSON array for `json_each`, which needs one parameter for any number of items; `None` if there are no
/// items.
pub(super) fn json_list(items: impl Iterator<Item = String>) -> Option<String> {
    let items: Vec<String> = items.collect();
    (!items.is_empty()).then(|| format!("[{}]", items.join(",")))
}
