//! Packs many rows into one row, because sqlx passes each row separately from SQLite's thread to the caller's thread,
//! and usually wakes the caller's thread each time (docs/adr/0004). Numbers are packed as text, keys are concatenated,
//! values are omitted.

use sqlx::sqlite::SqliteRow;

use crate::rows::{LogRow as _, RowColumns, row_id};
use orlop_core::{
    log::{Error, Result},
    types::RowId,
};

/// The columns that [`rows`] unpacks, and the length of the longest key. `$sub` is the expression for the number of a change in
/// its revision. Keys of more than `?4` bytes are omitted, so that the columns have a maximum size: then the rows cannot be
/// unpacked.
macro_rules! packed_columns {
    ($sub:literal) => {
        concat!(
            "group_concat(format('%d %d %d %d %d %d %d %d', id, ",
            $sub,
            ", lease, version, create_revision, prev_revision, deleted, length(key)), ' '), \
             CAST(group_concat(CASE WHEN length(key) <= ?4 THEN key END, '') AS BLOB), coalesce(max(length(key)), 0)"
        )
    };
}
pub(super) use packed_columns;

/// One unpacked row.
pub(super) struct PackedRow<'a> {
    row: RowId,
    lease: i64,
    version: i64,
    create_revision: i64,
    prev_revision: i64,
    deleted: bool,
    key: &'a [u8],
}

impl From<PackedRow<'_>> for RowColumns {
    fn from(row: PackedRow<'_>) -> Self {
        Self {
            row: row.row,
            key: row.key.to_vec(),
            value: Vec::new(),
            lease: row.lease,
            version: row.version,
            create_revision: row.create_revision,
            prev_revision: row.prev_revision,
            deleted: row.deleted,
        }
    }
}

/// Unpacks a row with the columns [`packed_columns`]. The unpacked rows are in any order.
pub(super) fn rows(packed: &SqliteRow) -> Result<impl Iterator<Item = Result<PackedRow<'_>>>> {
    let mut keys = packed.slice(1)?;
    let numbers = str::from_utf8(packed.slice(0)?).map_err(|_| corrupt())?;
    let mut numbers = numbers.split_ascii_whitespace();
    Ok(std::iter::from_fn(move || {
        let Some(id) = numbers.next() else {
            return (!keys.is_empty()).then(|| {
                keys = &[];
                Err(corrupt())
            });
        };
        Some(row(id, &mut numbers, &mut keys))
    }))
}

fn row<'a>(id: &str, numbers: &mut impl Iterator<Item = &'a str>, keys: &mut &'a [u8]) -> Result<PackedRow<'a>> {
    let parse = |text: &str| text.parse::<i64>().map_err(|_| corrupt());
    let mut number = || parse(numbers.next().ok_or_else(corrupt)?);
    let row = row_id(parse(id)?, number()?)?;
    let [lease, version, create_revision, prev_revision, deleted] =
        [number()?, number()?, number()?, number()?, number()?];
    let len = usize::try_from(number()?).map_err(|_| corrupt())?;
    let key = keys.split_off(..len).ok_or_else(corrupt)?;
    Ok(PackedRow { row, lease, version, create_revision, prev_revision, deleted: deleted != 0, key })
}

fn corrupt() -> Error {
    Error::Corrupt("the packed columns of a query do not match".to_owned())
}
