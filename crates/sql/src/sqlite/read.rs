//! Reads the history: rows in the order of revisions.

use std::mem;

use futures_util::TryStreamExt as _;
use rusqlite::{Connection, Row};
use sqlx::SqliteConnection;
use tokio::sync::mpsc;

use super::{integrity::unreadable, readers::Readers};
use crate::auth::{self, AuthRow};
use crate::rows::{
    self, LogRow as _, MetaRow, NEXT_ID, PAGE_BYTES_MAX, PAGE_IDS_MAX, PAGE_ROWS_MAX, PageBuilder, PageRow,
    REPLAY_KEY_BYTES_MAX, REPLAY_ROWS_MAX, RowColumns, SqlRange, row_id,
};
use orlop_core::{
    auth::AuthState,
    log::{Error, Meta, Page, Result, Size, Table, Visit, WithPrev},
    types::{Change, KeyRange, Revision, RowId},
};

/// Implements [`orlop_core::log::ReadLog::meta`].
pub(super) async fn meta(connection: &mut SqliteConnection) -> Result<Meta> {
    const META: &str = "SELECT 'position', '', coalesce(max(id), 1), 0, 0, NULL FROM kv_log \
        UNION ALL SELECT 'fact', name, value, 0, 0, NULL FROM meta \
        UNION ALL SELECT 'lease', '', id, ttl, 0, NULL FROM lease";
    let rows: Vec<MetaRow> = sqlx::query_as(META).fetch_all(connection).await.map_err(unreadable)?;
    rows::meta(&rows)
}

/// Implements [`orlop_core::log::ReadLog::auth`].
pub(super) async fn auth(connection: &mut SqliteConnection) -> Result<AuthState> {
    let rows: Vec<AuthRow> = sqlx::query_as(auth::SELECT).fetch_all(connection).await.map_err(unreadable)?;
    auth::state(rows)
}

/// The rows of both tables from a revision on, in order and without values. SQLite merges the tables while it reads them; a
/// read of the view `kv_events` would sort all rows.
const ROWS: &str = "SELECT id, 0 AS sub, key, NULL, lease, version, create_revision, prev_revision, deleted \
    FROM kv_log WHERE id >= ?1 \
    UNION ALL SELECT id, sub, key, NULL, lease, version, create_revision, prev_revision, deleted \
    FROM kv_log_more WHERE id >= ?1 ORDER BY id, sub";

/// Visits the rows of a log from revision `from` on. A thread reads the next rows while others are visited.
pub(super) async fn replay(readers: &Readers, meta: &Meta, from: Revision, visit: &mut Visit<'_>) -> Result<()> {
    let (parts, mut unvisited) = mpsc::channel(1);
    let reading = readers.run(move |connection| send_rows(connection, from, &parts));
    // It owns the receiver, so the thread does not wait for a visitor that has failed.
    let visiting = async move {
        while let Some(part) = unvisited.recv().await {
            visit(meta, part)?;
        }
        Ok::<_, Error>(())
    };
    let (read, visited) = tokio::join!(reading, visiting);
    visited.and(read)
}

/// Sends the rows from revision `from` on, until the receiver is dropped.
fn send_rows(connection: &Connection, from: Revision, parts: &mpsc::Sender<Vec<Change>>) -> Result<()> {
    let mut statement = connection.prepare(ROWS).map_err(unreadable)?;
    let mut rows = statement.query([from.0]).map_err(unreadable)?;
    let mut part = Part::default();
    while let Some(row) = rows.next().map_err(unreadable)? {
        if let Some(full) = part.add(columns(row)?)?
            && parts.blocking_send(full).is_err()
        {
            return Ok(());
        }
    }
    let _ = parts.blocking_send(part.changes);
    Ok(())
}

/// Reads a row of [`ROWS`].
fn columns(row: &Row<'_>) -> Result<RowColumns> {
    let corrupt = |error: rusqlite::Error| Error::Corrupt(error.to_string());
    let int = |column: usize| row.get::<_, i64>(column).map_err(corrupt);
    Ok(RowColumns {
        row: row_id(int(0)?, int(1)?)?,
        key: row.get_ref(2).and_then(|key| Ok(key.as_blob()?.to_vec())).map_err(corrupt)?,
        value: Vec::new(),
        lease: int(4)?,
        version: int(5)?,
        create_revision: int(6)?,
        prev_revision: int(7)?,
        deleted: int(8)? != 0,
    })
}

/// Visits the rows of a view from revision `from` on. Slower than [`replay`], because sqlx passes each row separately from
/// SQLite's thread; only commands use it.
pub(super) async fn replay_view(
    connection: &mut SqliteConnection,
    from: Revision,
    visit: &mut Visit<'_>,
) -> Result<Meta> {
    let meta = meta(&mut *connection).await?;
    let mut rows = sqlx::query(ROWS).bind(from.0).fetch(connection);
    let mut part = Part::default();
    while let Some(row) = rows.try_next().await.map_err(unreadable)? {
        if let Some(full) = part.add(RowColumns::read(&row, 0)?)? {
            visit(&meta, full)?;
        }
    }
    visit(&meta, part.changes)?;
    Ok(meta)
}

/// Rows for one call of a visitor.
#[derive(Default)]
struct Part {
    changes: Vec<Change>,
    bytes: usize,
    /// The last row, of this part or the one before.
    last: Option<RowId>,
}

impl Part {
    /// Adds a row. Returns the rows before it if they are as many as a part may contain.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if the row is before the last one: SQLite relies on the order in a damaged file.
    fn add(&mut self, row: RowColumns) -> Result<Option<Vec<Change>>> {
        let RowId { revision, sub } = row.row;
        if self.last.replace(row.row) > Some(row.row) {
            return Err(Error::Corrupt(format!("row id={revision} sub={sub} is out of order")));
        }
        let is_long = !self.changes.is_empty() && self.bytes + row.len() > REPLAY_KEY_BYTES_MAX;
        let mut full = None;
        if is_long || self.changes.len() >= REPLAY_ROWS_MAX {
            full = Some(mem::take(&mut self.changes));
            self.bytes = 0;
        }
        self.bytes += row.len();
        self.changes.push(row.into_change(None));
        Ok(full)
    }
}

/// Implements [`orlop_core::log::ReadLog::changes`].
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
    Ok(Size { total: all * bytes, in_use: (all - free) * bytes, disk_free: None, wal: None })
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
    let mut rows = sqlx::query(changes_sql(table, prev))
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

/// Returns how many rows of each table a check reads at a time, from a row on.
pub(super) async fn replay_rows(connection: &mut SqliteConnection, (id, sub): (i64, i64)) -> sqlx::Result<usize> {
    // The length of a key is read without the key.
    const LONGEST: &str = "SELECT max( \
        (SELECT coalesce(max(n), 0) FROM (SELECT length(key) AS n FROM kv_log WHERE (id, 0) >= (?1, ?2) ORDER BY id LIMIT ?3)), \
        (SELECT coalesce(max(n), 0) FROM \
        (SELECT length(key) AS n FROM kv_log_more WHERE (id, sub) >= (?1, ?2) ORDER BY id, sub LIMIT ?3)))";
    let longest = sqlx::query_scalar(LONGEST).bind(id).bind(sub).bind(REPLAY_ROWS_MAX as i64);
    Ok(rows::replay_rows(longest.fetch_one(connection).await?))
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

fn changes_sql(table: Table, prev: WithPrev) -> &'static str {
    match (table, prev) {
        (Table::First, WithPrev::No) => changes_sql!("kv_log", "0", "", ""),
        (Table::More, WithPrev::No) => changes_sql!("kv_log_more", "r.sub", "", ""),
        (Table::First, WithPrev::Yes) => changes_sql!("kv_log", "0", prev),
        (Table::More, WithPrev::Yes) => changes_sql!("kv_log_more", "r.sub", prev),
    }
}

/// Returns a JSON array for `json_each`, which needs one parameter for any number of items; `None` if there are no
/// items.
pub(super) fn json_list(items: impl Iterator<Item = String>) -> Option<String> {
    let items: Vec<String> = items.collect();
    (!items.is_empty()).then(|| format!("[{}]", items.join(",")))
}
