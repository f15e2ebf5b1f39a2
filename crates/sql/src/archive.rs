//! Code that the archives of both databases share.

use futures_util::{Stream, TryStreamExt as _};
use orlop_core::{
    log::{
        ARCHIVE_PAGE_BYTES, ARCHIVE_PAGE_ROWS, ARCHIVED_ROW_BYTES, ArchiveState, ArchivedMoment, ArchivedRow,
        ClockStep, Moment, PastRow, Result, StoredArchivedRow,
    },
    types::{Change, EncodedKv, Key, LeaseId, Revision, RowId, Version},
};

use crate::{
    error::in_row,
    rows::{LogRow, RowColumns, consume_budget_for, row_id},
};

/// Number of rows that one call of [`orlop_core::log::Archive::prune`] deletes.
pub(crate) const PRUNE_ROWS: i64 = 500;
pub(crate) const FIRST_MOMENT: &str = "SELECT id, at FROM kv_time ORDER BY id LIMIT 1";
pub(crate) const CLOCK_STEPS: &str = "SELECT s.id, s.at, \
    (SELECT p.at FROM kv_time p WHERE p.id < s.id ORDER BY p.id DESC LIMIT 1) FROM kv_time s WHERE s.back ORDER BY s.id";

/// The columns that [`page`] reads.
macro_rules! archive_columns {
    () => {
        "id, sub, key, value, lease, version, create_revision"
    };
}
pub(crate) use archive_columns;

/// The facts `first`, `copied`, `bytes` and `rows`; `None`: the archive was not begun.
type Facts = (Option<i64>, Option<i64>, Option<i64>, Option<i64>);

pub(crate) fn state((first, copied, bytes, rows): Facts) -> ArchiveState {
    ArchiveState {
        first: first.map_or(Revision::MAX, Revision),
        copied: Revision(copied.unwrap_or(0)),
        bytes: bytes.unwrap_or(0).max(0).cast_unsigned(),
        rows: rows.unwrap_or(0).max(0).cast_unsigned(),
    }
}

/// Reads the columns `id, at`.
pub(crate) fn moment((id, unix_ms): (i64, i64)) -> Moment {
    Moment { revision: Revision(id), unix_ms }
}

/// Reads the columns `id, at, gap`.
pub(crate) fn archived_moment((id, unix_ms, has_gap): (i64, i64, bool)) -> ArchivedMoment {
    ArchivedMoment { moment: moment((id, unix_ms)), has_gap }
}

/// Reads the columns of [`CLOCK_STEPS`]. A step whose moment before was deleted is none any more.
pub(crate) fn clock_steps(rows: Vec<(i64, i64, Option<i64>)>) -> Vec<ClockStep> {
    let step = |(id, to_ms, from_ms): (i64, i64, Option<i64>)| {
        Some(ClockStep { revision: Revision(id), from_ms: from_ms?, to_ms })
    };
    rows.into_iter().filter_map(step).collect()
}

/// The columns that [`page`] reads for a visited key `v.key`, of its row `a`, which may be absent.
macro_rules! visited_columns {
    () => {
        "coalesce(a.id, 0), coalesce(a.sub, 0), v.key, a.value, coalesce(a.lease, 0), coalesce(a.version, 0), \
         coalesce(a.create_revision, 0)"
    };
}
pub(crate) use visited_columns;

/// Whether a page is full.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fill {
    Full,
    Rest,
}

/// Reads rows until a page is full: at most `rows_max`. Version 0 is a delete.
pub(crate) async fn page<R: LogRow>(
    rows: impl Stream<Item = sqlx::Result<R>> + Unpin,
    rows_max: usize,
) -> sqlx::Result<(Vec<PastRow>, Fill)> {
    let sized = |row: &R| {
        let past = past_row(row)?;
        Ok((past.key.len() + past.kv.as_ref().map_or(0, EncodedKv::len), past))
    };
    fill(rows, rows_max, sized).await
}

/// Reads rows with the columns of [`RowColumns`] and `end_revision` until a page is full.
pub(crate) async fn archived_rows<R: LogRow>(
    rows: impl Stream<Item = sqlx::Result<R>> + Unpin,
) -> sqlx::Result<Vec<ArchivedRow>> {
    let sized = |row: &R| {
        let (columns, end) = (RowColumns::read(row, 0)?, Revision(row.int(9)?));
        Ok((columns.len(), ArchivedRow { change: columns.into_change(None), end }))
    };
    let (rows, _) = fill(rows, ARCHIVE_PAGE_ROWS, sized).await?;
    Ok(rows)
}

/// Reads rows until a page is full: at most `rows_max`. `sized` reads a row and its bytes.
async fn fill<R: LogRow, T>(
    mut rows: impl Stream<Item = sqlx::Result<R>> + Unpin,
    rows_max: usize,
    sized: impl Fn(&R) -> Result<(usize, T)>,
) -> sqlx::Result<(Vec<T>, Fill)> {
    let (mut page, mut bytes) = (Vec::new(), 0);
    while let Some(row) = rows.try_next().await? {
        let (len, item) = sized(&row).map_err(in_row)?;
        consume_budget_for(1, len).await;
        bytes += len;
        page.push(item);
        if page.len() == rows_max || bytes >= ARCHIVE_PAGE_BYTES {
            return Ok((page, Fill::Full));
        }
    }
    Ok((page, Fill::Rest))
}

/// Returns what a row counts in [`ArchiveState::bytes`].
pub(crate) fn counted_bytes(change: &Change) -> u64 {
    let value_len = change.kv().map_or(0, |kv| kv.value_slice().len());
    (change.key.len() + value_len + ARCHIVED_ROW_BYTES) as u64
}

fn past_row(row: &impl LogRow) -> Result<PastRow> {
    let id = row_id(row.int(0)?, row.int(1)?)?;
    let (key, version) = (row.slice(2)?, row.int(5)?);
    let pair = || -> Result<EncodedKv> {
        let version = Version { row: id, create_revision: Revision(row.int(6)?), version };
        Ok(EncodedKv::new(key, version, row.slice(3)?, LeaseId::from_wire(row.int(4)?)))
    };
    let kv = if version == 0 { None } else { Some(pair()?) };
    Ok(PastRow { row: id, key: Key::from(key), kv })
}

/// Returns the changes of a page, and the last row that was visited: that of a full page, or else `bound`.
pub(crate) fn changes((rows, fill): (Vec<PastRow>, Fill), bound: Option<RowId>) -> (Vec<PastRow>, Option<RowId>) {
    let visited = if fill == Fill::Full { rows.last().map(|past| past.row) } else { bound };
    (rows, visited)
}

/// Returns the pairs of a page of visited keys, and the last of these if the page is full.
pub(crate) fn pairs((rows, fill): (Vec<PastRow>, Fill)) -> (Vec<(Key, EncodedKv)>, Option<Key>) {
    let visited = if fill == Fill::Full { rows.last().map(|past| past.key.clone()) } else { None };
    (rows.into_iter().filter_map(|past| Some((past.key, past.kv?))).collect(), visited)
}

/// Reads the columns `id, sub, key`, the bytes of key and value, `deleted, end_revision`.
pub(crate) fn stored_archived_row(row: &impl LogRow) -> Result<StoredArchivedRow> {
    Ok(StoredArchivedRow {
        id: row.int(0)?,
        sub: row.int(1)?,
        key: row.bytes(2)?,
        bytes: row.int(3)?,
        deleted: row.int(4)?,
        end_revision: row.int(5)?,
    })
}
