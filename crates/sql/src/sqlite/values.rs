//! Reads the values of rows.

use rusqlite::{CachedStatement, Connection, Result, Row};

use orlop_core::types::{EncodedKv, LeaseId, Revision, RowId, Version};

/// The statements that read one row of each table.
struct Statements<'a> {
    first: CachedStatement<'a>,
    more: CachedStatement<'a>,
}

impl Statements<'_> {
    /// Reads a row, unless it is a delete or was compacted.
    fn read<T>(&mut self, row: RowId, columns: impl FnOnce(&Row<'_>) -> Result<T>) -> Result<Option<T>> {
        let statement = if row.sub == 0 {
            &mut self.first
        } else {
            self.more.raw_bind_parameter(2, row.sub)?;
            &mut self.more
        };
        statement.raw_bind_parameter(1, row.revision.0)?;
        statement.raw_query().next()?.map(columns).transpose()
    }
}

/// Implements [`orlop_core::log::Log::values`].
pub(super) fn values(connection: &Connection, rows: &[RowId]) -> Result<Vec<(RowId, EncodedKv)>> {
    const FIRST: &str = "SELECT key, value, lease, version, create_revision FROM kv_log WHERE id = ? AND deleted = 0";
    const MORE: &str =
        "SELECT key, value, lease, version, create_revision FROM kv_log_more WHERE id = ? AND sub = ? AND deleted = 0";
    read_all(connection, [FIRST, MORE], rows, pair)
}

/// Implements [`orlop_core::log::Log::value_lengths`]. `length` of a column reads only the header of its row, not the
/// pages that contain the rest of a long value.
pub(super) fn value_lengths(connection: &Connection, rows: &[RowId]) -> Result<Vec<(RowId, u64)>> {
    const FIRST: &str = "SELECT length(value) FROM kv_log WHERE id = ? AND deleted = 0";
    const MORE: &str = "SELECT length(value) FROM kv_log_more WHERE id = ? AND sub = ? AND deleted = 0";
    read_all(connection, [FIRST, MORE], rows, |_, columns| Ok(columns.get::<_, i64>(0)?.cast_unsigned()))
}

fn read_all<T>(
    connection: &Connection,
    [first, more]: [&str; 2],
    rows: &[RowId],
    columns: impl Fn(RowId, &Row<'_>) -> Result<T>,
) -> Result<Vec<(RowId, T)>> {
    // One transaction, because each takes and releases locks.
    let transaction = connection.unchecked_transaction()?;
    let mut statements =
        Statements { first: transaction.prepare_cached(first)?, more: transaction.prepare_cached(more)? };
    let mut found = Vec::with_capacity(rows.len());
    for &row in rows {
        found.extend(statements.read(row, |read| Ok((row, columns(row, read)?)))?);
    }
    Ok(found)
}

fn pair(row: RowId, columns: &Row<'_>) -> Result<EncodedKv> {
    let version = Version { row, create_revision: Revision(columns.get(4)?), version: columns.get(3)? };
    let value = columns.get_ref(1)?.as_blob_or_null()?.unwrap_or_default();
    Ok(EncodedKv::new(columns.get_ref(0)?.as_blob()?, version, value, LeaseId::from_wire(columns.get(2)?)))
}
