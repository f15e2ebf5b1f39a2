//! Rows of both databases: their columns, and the pages that are built from them.

use sqlx::{ColumnIndex, Decode, Row, Type};
use tokio::task::coop::consume_budget;

use crate::{auth, error::corrupt};
use orlop_core::auth::AuthState;
use orlop_core::log::{
    AuthMark, Error, LoggedLease, MIGRATION_SOURCE, Meta, Page, Position, Result, StoredRow, Table, WithPrev, alarm,
};
use orlop_core::types::{Change, ChangeKind, EncodedKv, Key, KeyRange, LeaseId, Prev, Revision, RowId, Version};

/// Number of rows of a table after which a page of [`orlop_core::log::ReadLog::changes`] ends, at the end of a revision. etcd
/// sends as many revisions in one watch response.
pub(super) const PAGE_ROWS_MAX: usize = 1_000;
/// Maximum number of ids visited for a page of [`orlop_core::log::ReadLog::changes`], matching or not.
pub(super) const PAGE_IDS_MAX: i64 = 20_000;
/// Finds the revision at which a page continues after ids that have no row. Compaction may have deleted the first change of a
/// revision and not the others.
pub(super) const NEXT_ID: &str = "SELECT min(id) FROM (SELECT min(id) AS id FROM kv_log WHERE id > $1 \
    UNION ALL SELECT min(id) FROM kv_log_more WHERE id > $1) AS next";
/// Returns whether there are rows or leases; on Postgres, in the tables of the first schema only.
pub(super) const HAS_ROWS: &str = "SELECT EXISTS (SELECT 1 FROM kv_log) OR EXISTS (SELECT 1 FROM kv_log_more) \
    OR EXISTS (SELECT 1 FROM lease)";
/// Bytes of keys, values and previous pairs after which a page of [`orlop_core::log::ReadLog::changes`] ends, at the end of a
/// revision.
pub(super) const PAGE_BYTES_MAX: usize = 1 << 20;
/// Maximum number of rows per table that [`orlop_core::log::ReadLog::replay`] and checks read at a time.
pub(super) const REPLAY_ROWS_MAX: usize = 10_000;
/// Maximum bytes of the keys of these rows. They are in memory several times.
pub(super) const REPLAY_KEY_BYTES_MAX: usize = 16 << 20;
/// Bytes of values per unit of tokio's cooperative budget. A task yields after 128 units, here 128 KiB, which take
/// about 50 microseconds to decode, or ten times as long if the kernel has to allocate memory.
const UNIT_BYTES: usize = 1 << 10;

/// The columns of a row: `id, sub, key, value, lease, version, create_revision, prev_revision, deleted` (0 or 1).
pub(super) struct RowColumns {
    pub(super) row: RowId,
    pub(super) key: Vec<u8>,
    pub(super) value: Vec<u8>,
    pub(super) lease: i64,
    pub(super) version: i64,
    pub(super) create_revision: i64,
    pub(super) prev_revision: i64,
    pub(super) deleted: bool,
}

/// A row of SQLite or Postgres.
pub(super) trait LogRow: Row {
    fn int(&self, column: usize) -> Result<i64>;
    fn int_or_null(&self, column: usize) -> Result<Option<i64>>;
    /// Reads NULL as an empty value.
    fn slice(&self, column: usize) -> Result<&[u8]>;

    fn bytes(&self, column: usize) -> Result<Vec<u8>> {
        self.slice(column).map(<[u8]>::to_vec)
    }
}

impl<R> LogRow for R
where
    R: Row,
    usize: ColumnIndex<R>,
    for<'r> i64: Decode<'r, R::Database> + Type<R::Database>,
    for<'r> &'r [u8]: Decode<'r, R::Database> + Type<R::Database>,
{
    fn int(&self, column: usize) -> Result<i64> {
        self.try_get_unchecked(column).map_err(corrupt)
    }

    fn int_or_null(&self, column: usize) -> Result<Option<i64>> {
        self.try_get_unchecked(column).map_err(corrupt)
    }

    fn slice(&self, column: usize) -> Result<&[u8]> {
        Ok(self.try_get_unchecked::<Option<&[u8]>, _>(column).map_err(corrupt)?.unwrap_or_default())
    }
}

/// Consumes tokio's budget for decoded rows, so that a long read yields to other tasks.
pub(super) async fn consume_budget_for(units: usize, bytes: usize) {
    for _ in 0..units + bytes / UNIT_BYTES {
        consume_budget().await;
    }
}

/// Reads a row's ID from the columns `id` and `sub`.
pub(super) fn row_id(id: i64, sub: i64) -> Result<RowId> {
    let sub = u32::try_from(sub).map_err(|_| Error::Corrupt(format!("row {id} has the invalid sub {sub}")))?;
    Ok(RowId::new(Revision(id), sub))
}

impl RowColumns {
    /// Reads the columns from position `at` on.
    pub(super) fn read(row: &impl LogRow, at: usize) -> Result<Self> {
        Ok(Self {
            row: row_id(row.int(at)?, row.int(at + 1)?)?,
            key: row.bytes(at + 2)?,
            value: row.bytes(at + 3)?,
            lease: row.int(at + 4)?,
            version: row.int(at + 5)?,
            create_revision: row.int(at + 6)?,
            prev_revision: row.int(at + 7)?,
            deleted: row.int(at + 8)? != 0,
        })
    }

    /// Reads the pair that this row replaced from the joined columns `value, lease, version, create_revision`, the
    /// first of which is column `at`.
    pub(super) fn prev_kv(&self, row: &impl LogRow, at: usize, prev: WithPrev) -> Result<Option<EncodedKv>> {
        if prev == WithPrev::No || self.prev_revision == 0 {
            return Ok(None);
        }
        // NULL: the replaced row was compacted.
        let Some(version) = row.int_or_null(at + 2)? else { return Ok(None) };
        let prev = Self {
            row: RowId::new(Revision(self.prev_revision), 0),
            key: self.key.clone(),
            value: row.bytes(at)?,
            lease: row.int(at + 1)?,
            version,
            create_revision: row.int(at + 3)?,
            prev_revision: 0,
            deleted: false,
        };
        Ok(Some(prev.kv()))
    }

    pub(super) fn kv(&self) -> EncodedKv {
        let version = Version { row: self.row, create_revision: Revision(self.create_revision), version: self.version };
        EncodedKv::new(&self.key, version, &self.value, LeaseId::from_wire(self.lease))
    }

    pub(super) fn into_change(self, prev_kv: Option<EncodedKv>) -> Change {
        let kind = if self.deleted {
            ChangeKind::Delete
        } else {
            ChangeKind::Put {
                kv: self.kv(),
                create_revision: Revision(self.create_revision),
                version: self.version,
                lease: LeaseId::from_wire(self.lease),
            }
        };
        let prev =
            (self.prev_revision != 0).then(|| Prev { row: RowId::new(Revision(self.prev_revision), 0), kv: prev_kv });
        Change { row: self.row, key: Key::from(self.key), kind, prev, prev_lease: None }
    }

    pub(super) fn len(&self) -> usize {
        self.key.len() + self.value.len()
    }
}

/// Reads the columns `id, sub, key, bytes of the value, lease, version, create_revision, prev_revision, deleted`.
pub(super) fn stored_row(table: Table, row: &impl LogRow) -> Result<StoredRow> {
    Ok(StoredRow {
        table,
        id: row.int(0)?,
        sub: row.int(1)?,
        key: row.bytes(2)?,
        value_bytes: row.int_or_null(3)?,
        lease: row.int(4)?,
        version: row.int(5)?,
        create_revision: row.int(6)?,
        prev_revision: row.int(7)?,
        deleted: row.int(8)?,
    })
}

/// A row of a page and the pair that it replaced.
pub(super) type PageRow = (RowColumns, Option<EncodedKv>);

/// Builds a page of revisions up to `to` from the two tables.
pub(super) struct PageBuilder {
    rows: Vec<PageRow>,
    to: i64,
}

impl PageBuilder {
    /// Starts a page with the rows of the first table (`kv_log`). If they are as many as a page may contain, there may be
    /// more, and the page ends after them.
    pub(super) fn new(first: Vec<PageRow>, to: i64) -> Self {
        Self { to: end_of_full(&first).unwrap_or(to), rows: first }
    }

    /// Returns the last revision to query from the second table.
    pub(super) fn to(&self) -> i64 {
        self.to
    }

    /// Adds the rows of the second table (`kv_log_more`), which may also be as many as a page may contain.
    pub(super) fn add_more(&mut self, more: Vec<PageRow>) {
        if more.is_empty() {
            return;
        }
        self.to = end_of_full(&more).unwrap_or(self.to);
        self.rows.extend(more);
        self.rows.retain(|(columns, _)| columns.row.revision.0 <= self.to);
        self.rows.sort_by_key(|(columns, _)| columns.row);
    }

    /// Returns the last revision that was queried if it has no rows and is below `to`. Many revisions may be missing after
    /// it: of a store whose revisions were raised, a billion.
    pub(super) fn empty_below(&self, to: Revision) -> Option<i64> {
        (self.rows.is_empty() && self.to < to.0).then_some(self.to)
    }

    /// Continues an empty page at `next`, the first revision of the log that was not queried; `None`: there is none.
    pub(super) fn skip_to(&mut self, next: Option<i64>, to: Revision) {
        self.to = next.map_or(to.0, |next| to.0.min(next - 1));
    }

    pub(super) fn finish(self, purged: Option<Revision>) -> Page {
        let changes = self.rows.into_iter().map(|(columns, prev_kv)| columns.into_change(prev_kv)).collect();
        Page { changes, next: Revision(self.to + 1), purged }
    }
}

/// Returns the last revision of rows that are as many as a page may contain.
fn end_of_full(rows: &[PageRow]) -> Option<i64> {
    let is_full = rows.len() >= PAGE_ROWS_MAX || rows.iter().map(bytes).sum::<usize>() > PAGE_BYTES_MAX;
    rows.last().filter(|_| is_full).map(|(columns, _)| columns.row.revision.0)
}

/// Returns the bytes of a row's key and value and of the pair that it replaced.
pub(super) fn bytes((columns, prev_kv): &PageRow) -> usize {
    columns.len() + prev_kv.as_ref().map_or(0, EncodedKv::len)
}

/// Returns how many rows of each table are read at a time if their keys have at most `longest` bytes.
pub(super) fn replay_rows(longest: i64) -> usize {
    let longest = usize::try_from(longest).unwrap_or(0).max(1);
    (REPLAY_KEY_BYTES_MAX / longest).clamp(1, REPLAY_ROWS_MAX)
}

/// Merges rows of the two tables. Each list is in order and has at most `limit` rows. A list of `limit` rows may be
/// incomplete, so rows after its last row are removed; the next read returns them.
pub(super) fn merge<T, P: Ord>(mut first: Vec<T>, more: Vec<T>, limit: usize, position: impl Fn(&T) -> P) -> Vec<T> {
    let last = [&first, &more].into_iter().filter(|rows| rows.len() == limit).filter_map(|rows| rows.last());
    let last = last.map(&position).min();
    if !more.is_empty() {
        first.extend(more);
        first.sort_by_key(&position);
    }
    if let Some(last) = last {
        first.truncate(first.partition_point(|row| position(row) <= last));
    }
    first
}

/// The bounds of a range for SQL: `key >= start AND (unbounded OR key < end)`.
pub(super) struct SqlRange {
    pub(super) start: Vec<u8>,
    pub(super) end: Vec<u8>,
    pub(super) unbounded: bool,
}

impl SqlRange {
    pub(super) fn of(range: &KeyRange) -> Self {
        let start = range.start().to_vec();
        let (end, unbounded) = match range {
            KeyRange::Single(key) => ([key, &[0][..]].concat(), false),
            KeyRange::Span { end: Some(end), .. } => (end.to_vec(), false),
            KeyRange::Span { end: None, .. } => (Vec::new(), true),
        };
        Self { start, end, unbounded }
    }
}

/// A row of the statement that reads [`Meta`], with the columns `kind, name, a, b, c, left_secs`. One statement reads
/// everything, so the result is consistent. A row of kind `position` has head, epoch and server in `a`, `b` and `c`; a
/// `fact` has its value in `a`; a `lease` has its ID and TTL in `a` and `b`, and its remaining seconds.
pub(super) type MetaRow = (String, String, i64, i64, i64, Option<f64>);

pub(super) fn meta(rows: &[MetaRow]) -> Result<Meta> {
    let mut auth = AuthState::default();
    let mut meta = Meta {
        cluster_id: 0,
        member_id: 0,
        position: Position { head: Revision::EMPTY, epoch: 0, server: 0 },
        compact_revision: None,
        leases: Vec::new(),
        alarms: Vec::new(),
        auth: AuthMark::default(),
        source: None,
    };
    for (kind, name, a, b, c, left_secs) in rows {
        match (kind.as_str(), name.as_str()) {
            ("position", _) => meta.position = Position { head: Revision(*a), epoch: *b, server: *c },
            ("lease", _) => {
                meta.leases.push(LoggedLease { id: LeaseId(*a), ttl_secs: *b, left_secs: *left_secs });
            }
            (_, "cluster_id") => meta.cluster_id = a.cast_unsigned(),
            (_, "member_id") => meta.member_id = a.cast_unsigned(),
            (_, MIGRATION_SOURCE) => meta.source = Some(a.cast_unsigned()),
            (_, "compact_revision") => meta.compact_revision = Some(Revision(*a)),
            (_, name) => {
                meta.alarms.extend(alarm(name, *a));
                auth::set_fact(&mut auth, name, *a)?;
            }
        }
    }
    meta.auth = AuthMark::of(&auth);
    Ok(meta)
}
