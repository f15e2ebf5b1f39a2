//! Packs many rows into one row, because sqlx passes each row separately from SQLite's thread to the caller's thread,
//! and usually wakes the caller's thread each time (docs/adr/0004). Numbers are packed as text; keys and values are
//! concatenated.

use sqlx::sqlite::SqliteRow;

use crate::rows::{LogRow as _, RowColumns, row_id};
use orlop_core::{
    log::{Error, Result},
    types::{EncodedKv, LeaseId, Revision, RowId, Version},
};

/// The columns that [`rows`] unpacks. `$sub` is the expression for the number of a change in its revision. If `$value`
/// is NULL, values are omitted.
macro_rules! packed_columns {
    ($sub:literal, $value:literal) => {
        concat!(
            "group_concat(format('%d %d %d %d %d %d %d %d %d', id, ",
            $sub,
            ", lease, version, create_revision, prev_revision, deleted, length(key), coalesce(length(",
            $value,
            "), 0)), ' '), CAST(group_concat(key, '') AS BLOB), CAST(group_concat(",
            $value,
            ", '') AS BLOB)"
        )
    };
}
pub(super) use packed_columns;

/// One unpacked row.
pub(super) struct PackedRow<'a> {
    pub(super) row: RowId,
    lease: i64,
    version: i64,
    create_revision: i64,
    prev_revision: i64,
    deleted: bool,
    key: &'a [u8],
    value: &'a [u8],
}

impl PackedRow<'_> {
    pub(super) fn kv(&self) -> EncodedKv {
        let version = Version { row: self.row, create_revision: Revision(self.create_revision), version: self.version };
        EncodedKv::new(self.key, version, self.value, LeaseId::from_wire(self.lease))
    }
}

impl From<PackedRow<'_>> for RowColumns {
    fn from(row: PackedRow<'_>) -> Self {
        Self {
            row: row.row,
            key: row.key.to_vec(),
            value: row.value.to_vec(),
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
    let (mut keys, mut values) = (packed.slice(1)?, packed.slice(2)?);
    let numbers = str::from_utf8(packed.slice(0)?).map_err(|_| corrupt())?;
    let mut numbers = numbers.split_ascii_whitespace();
    Ok(std::iter::from_fn(move || {
        let Some(id) = numbers.next() else {
            return (!keys.is_empty() || !values.is_empty()).then(|| {
                (keys, values) = (&[], &[]);
                Err(corrupt())
            });
        };
        Some(row(id, &mut numbers, &mut keys, &mut values))
    }))
}

fn row<'a>(
    id: &str,
    numbers: &mut impl Iterator<Item = &'a str>,
    keys: &mut &'a [u8],
    values: &mut &'a [u8],
) -> Result<PackedRow<'a>> {
    let parse = |text: &str| text.parse::<i64>().map_err(|_| corrupt());
    let mut number = || parse(numbers.next().ok_or_else(corrupt)?);
    let row = row_id(parse(id)?, number()?)?;
    let [lease, version, create_revision, prev_revision, deleted] =
        [number()?, number()?, number()?, number()?, number()?];
    let mut len = || usize::try_from(number()?).map_err(|_| corrupt());
    let key = keys.split_off(..len()?).ok_or_else(corrupt)?;
    let value = values.split_off(..len()?).ok_or_else(corrupt)?;
    Ok(PackedRow { row, lease, version, create_revision, prev_revision, deleted: deleted != 0, key, value })
}

fn corrupt() -> Error {
    Error::Corrupt("the packed columns of a query do not match".to_owned())
}
