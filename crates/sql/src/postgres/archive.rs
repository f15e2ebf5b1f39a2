//! The archive in Postgres: tables beside the log.

use std::sync::Arc;

use async_trait::async_trait;
use futures_util::TryStreamExt as _;
use orlop_core::{
    log::{
        ARCHIVE_PAGE_KEYS, ARCHIVE_PAGE_MOMENTS, ARCHIVE_PAGE_ROWS, ARCHIVE_VISITED_ROWS, Archive, ArchiveState,
        ArchivedChanges, ArchivedMoment, ArchivedRow, ClockStep, Error, FrozenArchive, Log, Moment, Order, PastRow,
        ReadLog, Reclaimed, Result,
    },
    types::{EncodedKv, Key, KeyRange, Revision, RowId, Superseded},
};
use sqlx::PgConnection;

use super::{
    connection::{Database, read, sqlstate},
    other_server,
    view::PostgresView,
};
use crate::{
    archive::{self, CLOCK_STEPS, FIRST_MOMENT, Fill, PRUNE_ROWS, archive_columns, visited_columns},
    error::in_row,
    rows::{SqlRange, row_id},
};

const STATE: &str = "SELECT max(value) FILTER (WHERE name = 'archive_first'), \
    max(value) FILTER (WHERE name = 'archive_copied'), max(value) FILTER (WHERE name = 'archive_bytes'), \
    max(value) FILTER (WHERE name = 'archive_rows') FROM meta WHERE name LIKE 'archive\\_%'";
const ROWS: &str = "SELECT id, sub, key, value, lease, version, create_revision, prev_revision, deleted::int::bigint, \
    end_revision FROM kv_archive WHERE (id, sub) >= ($1, $2) ORDER BY id, sub LIMIT $3";
const MOMENTS: &str = "SELECT id, at, gap FROM kv_time WHERE id > $1 ORDER BY id LIMIT $2";
/// Classes of errors that concern the archive and not the log: values that a table refuses, tables or rights that somebody
/// changed, and damage.
const CLASSES_OF_ARCHIVE: [&str; 4] = ["22", "23", "42", "XX"];
const GIVE_UP: &str = "UPDATE meta SET value = $1 WHERE name = 'archive_first' AND value < $1";
const NOW_MS: &str = "SELECT (extract(epoch FROM clock_timestamp()) * 1000)::bigint";
const MOMENT_AT: &str = "SELECT id, at FROM kv_time WHERE at <= $1 ORDER BY at DESC, id DESC LIMIT 1";
const RECORDS: &str = "SELECT w.id, w.at, w.gap FROM unnest($1) WITH ORDINALITY AS r (id, place) \
    LEFT JOIN LATERAL (SELECT t.id, t.at, t.gap FROM kv_time t \
    WHERE t.id >= r.id AND r.id > (SELECT min(f.id) FROM kv_time f) ORDER BY t.id LIMIT 1) w ON true ORDER BY r.place";

/// `$order` is the direction of both columns.
macro_rules! changes_of_key {
    ($order:literal) => {
        concat!(
            "SELECT ",
            archive_columns!(),
            " FROM kv_archive WHERE substr(key, 1, 256) = substr($1, 1, 256) AND key = $1 \
             AND (id, sub) >= ($2, $3) AND (id, sub) <= ($4, $5) ORDER BY id ",
            $order,
            ", sub ",
            $order,
            " LIMIT $6"
        )
    };
}

const CHANGES_OF_SPAN: &str = concat!(
    "SELECT ",
    archive_columns!(),
    " FROM kv_archive WHERE key >= $1 AND ($7 OR key < $8) AND (id, sub) >= ($2, $3) AND (id, sub) <= ($4, $5) \
     ORDER BY id, sub LIMIT $6"
);

/// The row that ends a visit.
const BOUND_OF_VISIT: &str = "SELECT id, sub FROM kv_archive WHERE (id, sub) >= ($1, $2) AND (id, sub) <= ($3, $4) \
    ORDER BY id, sub OFFSET $5 LIMIT 1";

/// Visits `$4` keys one after the other, so that a key with many versions costs no more than others. `$start` is the condition
/// for the first key, `$end` that for the end of the range. The index contains the beginnings of keys; keys that are
/// longer than a beginning, and share it, are visited together and not counted.
macro_rules! pairs_at {
    ($start:literal, $end:literal) => {
        concat!(
            "WITH RECURSIVE visited (part, number) AS (\
                 (SELECT substr(key, 1, 256), (length(substr(key, 1, 256)) < 256)::int FROM kv_archive WHERE substr(key, 1, 256) ",
            $start,
            $end,
            " ORDER BY substr(key, 1, 256) LIMIT 1) \
                 UNION ALL \
                 SELECT n.part, v.number + (length(n.part) < 256)::int FROM visited v CROSS JOIN LATERAL (\
                     SELECT substr(key, 1, 256) AS part FROM kv_archive WHERE substr(key, 1, 256) > v.part",
            $end,
            " ORDER BY substr(key, 1, 256) LIMIT 1) n \
                 WHERE v.number < $4\
             ), v AS (\
                 SELECT part AS key, number, NULL::bigint AS id, NULL::bigint AS sub FROM visited \
                 WHERE length(part) < 256 \
                 UNION ALL \
                 SELECT a.key, v.number, a.id, a.sub FROM visited v JOIN kv_archive a \
                     ON substr(a.key, 1, 256) = v.part AND a.id <= $3 AND a.end_revision > $3 \
                 WHERE length(v.part) = 256\
             ) SELECT ",
            visited_columns!(),
            " FROM v LEFT JOIN LATERAL (\
                 (SELECT * FROM kv_archive h WHERE v.id IS NULL AND substr(h.key, 1, 256) = v.key AND h.id <= $3 \
                     ORDER BY h.id DESC, h.sub DESC LIMIT 1) \
                 UNION ALL \
                 (SELECT * FROM kv_archive h WHERE h.id = v.id AND h.sub = v.sub)\
             ) a ON a.end_revision > $3 AND NOT a.deleted \
             WHERE v.key >= $1 AND ($2 IS NULL OR v.key > $2) AND ($5 OR v.key < $6) ORDER BY v.number, v.key"
        )
    };
}

/// The archive of a log in Postgres. All instances on the database share it.
pub struct PostgresArchive {
    database: Database,
    member_id: u64,
}

impl PostgresArchive {
    pub(super) fn new(database: Database, member_id: u64) -> Self {
        Self { database, member_id }
    }
}

#[async_trait]
impl Archive for PostgresArchive {
    async fn begin(&self, compacted: Option<Revision>) -> Result<()> {
        let compacted = compacted.unwrap_or(Revision::EMPTY).0;
        let query = "SELECT orlop_begin_archive($1)";
        read!(self.database, connection => sqlx::query(query).bind(compacted).execute(connection)).map(|_| ())
    }

    fn shares_database(&self) -> bool {
        true
    }

    async fn state(&self) -> Result<ArchiveState> {
        read!(self.database, connection => sqlx::query_as(STATE).fetch_one(connection)).map(archive::state)
    }

    /// Both are one transaction on one connection: the server ends a transaction that is idle for long, and a copy reads the
    /// log and the archive one after the other.
    async fn freeze(&self, _: &dyn Log) -> Result<(Arc<dyn ReadLog>, Arc<dyn FrozenArchive>)> {
        let view = Arc::new(PostgresView::now(&self.database, self.member_id).await?);
        Ok((Arc::clone(&view) as Arc<dyn ReadLog>, view))
    }

    async fn copy(&self, rows: &[Superseded]) -> Result<()> {
        read!(self.database, connection => copy(connection, rows))?
    }

    async fn finish_copy(&self, compacted: Revision, server: i64) -> Result<()> {
        let query = "SELECT orlop_finish_copy($1, $2)";
        let is_same: bool = read!(self.database, connection =>
            sqlx::query_scalar(query).bind(server).bind(compacted.0).fetch_one(connection))?;
        if is_same { Ok(()) } else { Err(other_server()) }
    }

    /// The rows are deleted by [`Self::prune`].
    async fn give_up(&self, first: Revision) -> Result<()> {
        read!(self.database, connection => sqlx::query(GIVE_UP).bind(first.0).execute(connection)).map(|_| ())
    }

    async fn prune(&self, first: Revision, bytes_max: u64) -> Result<Reclaimed> {
        let bytes_max = i64::try_from(bytes_max).unwrap_or(i64::MAX);
        let has_more: bool = read!(self.database, connection =>
            sqlx::query_scalar("SELECT orlop_prune_archive($1, $2, $3)")
                .bind(first.0).bind(bytes_max).bind(PRUNE_ROWS).fetch_one(connection))?;
        Ok(if has_more { Reclaimed::More } else { Reclaimed::All })
    }

    /// Records the head of the database, which may be newer than that of this instance.
    async fn note_time(&self, _head: Revision, has_gap: bool) -> Result<()> {
        let noted = read!(self.database, connection =>
            sqlx::query("SELECT orlop_note_time($1)").bind(has_gap).execute(connection));
        noted.map(|_| ())
    }

    async fn now_ms(&self) -> Result<i64> {
        read!(self.database, connection => sqlx::query_scalar(NOW_MS).fetch_one(connection))
    }

    async fn first_moment(&self) -> Result<Option<Moment>> {
        let found = read!(self.database, connection => sqlx::query_as(FIRST_MOMENT).fetch_optional(connection))?;
        Ok(found.map(archive::moment))
    }

    async fn moment_at(&self, unix_ms: i64) -> Result<Option<Moment>> {
        let found = read!(self.database, connection =>
            sqlx::query_as(MOMENT_AT).bind(unix_ms).fetch_optional(connection))?;
        Ok(found.map(archive::moment))
    }

    async fn records(&self, revisions: &[Revision]) -> Result<Vec<Option<ArchivedMoment>>> {
        let ids: Vec<i64> = revisions.iter().map(|revision| revision.0).collect();
        let found: Vec<(Option<i64>, Option<i64>, Option<bool>)> =
            read!(self.database, connection => sqlx::query_as(RECORDS).bind(&ids).fetch_all(connection))?;
        let record =
            |(id, at, gap): (Option<i64>, Option<i64>, Option<bool>)| Some(archive::archived_moment((id?, at?, gap?)));
        Ok(found.into_iter().map(record).collect())
    }

    async fn clock_steps(&self) -> Result<Vec<ClockStep>> {
        read!(self.database, connection => sqlx::query_as(CLOCK_STEPS).fetch_all(connection)).map(archive::clock_steps)
    }

    async fn changes(&self, wanted: ArchivedChanges<'_>) -> Result<(Vec<PastRow>, Option<RowId>)> {
        read!(self.database, connection => changes(connection, &wanted))
    }

    async fn pairs_at(
        &self,
        range: &KeyRange,
        after: Option<&Key>,
        at: Revision,
    ) -> Result<(Vec<(Key, EncodedKv)>, Option<Key>)> {
        let page = read!(self.database, connection => pairs_at(connection, range, after, at))?;
        Ok(archive::pairs(page))
    }
}

#[async_trait]
impl FrozenArchive for PostgresView {
    async fn state(&self) -> Result<ArchiveState> {
        let connection = &mut *self.connection().await?;
        self.limited(sqlx::query_as(STATE).fetch_one(connection)).await.map(archive::state)
    }

    async fn rows(&self, from: RowId) -> Result<Vec<ArchivedRow>> {
        let connection = &mut *self.connection().await?;
        let query = sqlx::query(ROWS).bind(from.revision.0).bind(i64::from(from.sub)).bind(ARCHIVE_PAGE_ROWS as i64);
        self.limited(archive::archived_rows(query.fetch(connection))).await
    }

    async fn moments(&self, after: Revision) -> Result<Vec<ArchivedMoment>> {
        let connection = &mut *self.connection().await?;
        let query = sqlx::query_as(MOMENTS).bind(after.0).bind(ARCHIVE_PAGE_MOMENTS as i64);
        self.limited(query.fetch(connection).map_ok(archive::archived_moment).try_collect()).await
    }
}

async fn copy(connection: &mut PgConnection, rows: &[Superseded]) -> sqlx::Result<Result<()>> {
    let copied = sqlx::query("SELECT orlop_archive($1, $2, $3)")
        .bind(rows.iter().map(|it| it.row.revision.0).collect::<Vec<_>>())
        .bind(rows.iter().map(|it| i64::from(it.row.sub)).collect::<Vec<_>>())
        .bind(rows.iter().map(|it| it.end.0).collect::<Vec<_>>())
        .execute(connection)
        .await;
    let Err(error) = copied else { return Ok(Ok(())) };
    let code = sqlstate(&error).unwrap_or_default();
    if code == "53100" {
        return Ok(Err(Error::Full(error.to_string())));
    }
    if CLASSES_OF_ARCHIVE.iter().any(|class| code.starts_with(*class)) {
        return Ok(Err(Error::Corrupt(format!("archive of the history: {error}"))));
    }
    Err(error)
}

async fn changes(
    connection: &mut PgConnection,
    wanted: &ArchivedChanges<'_>,
) -> sqlx::Result<(Vec<PastRow>, Option<RowId>)> {
    let range = SqlRange::of(wanted.range);
    let (from, mut to) = wanted.rows;
    let sql = match (wanted.range, wanted.order) {
        (KeyRange::Single(_), Order::OldestFirst) => changes_of_key!("ASC"),
        (KeyRange::Single(_), Order::NewestFirst) => changes_of_key!("DESC"),
        (KeyRange::Span { .. }, _) => CHANGES_OF_SPAN,
    };
    let mut bound = None;
    if matches!(wanted.range, KeyRange::Span { .. }) {
        let found: Option<(i64, i64)> = sqlx::query_as(BOUND_OF_VISIT)
            .bind(from.revision.0)
            .bind(i64::from(from.sub))
            .bind(to.revision.0)
            .bind(i64::from(to.sub))
            .bind(ARCHIVE_VISITED_ROWS as i64 - 1)
            .fetch_optional(&mut *connection)
            .await?;
        bound = found.map(|(id, sub)| row_id(id, sub)).transpose().map_err(in_row)?;
        to = bound.unwrap_or(to);
    }
    let query = sqlx::query(sql)
        .bind(&range.start)
        .bind(from.revision.0)
        .bind(i64::from(from.sub))
        .bind(to.revision.0)
        .bind(i64::from(to.sub))
        .bind(ARCHIVE_PAGE_ROWS as i64);
    let query = match wanted.range {
        KeyRange::Single(_) => query,
        KeyRange::Span { .. } => query.bind(range.unbounded).bind(&range.end),
    };
    let page = archive::page(query.fetch(connection), ARCHIVE_PAGE_ROWS).await?;
    Ok(archive::changes(page, bound))
}

async fn pairs_at(
    connection: &mut PgConnection,
    range: &KeyRange,
    after: Option<&Key>,
    at: Revision,
) -> sqlx::Result<(Vec<PastRow>, Fill)> {
    let bounds = SqlRange::of(range);
    let start = after.map_or(bounds.start.as_slice(), |after| after.as_slice());
    let sql = match (after.is_some_and(|after| after.len() < 256), bounds.unbounded) {
        (true, true) => pairs_at!("> substr($1, 1, 256)", ""),
        (true, false) => pairs_at!("> substr($1, 1, 256)", " AND substr(key, 1, 256) <= substr($6, 1, 256)"),
        (false, true) => pairs_at!(">= substr($1, 1, 256)", ""),
        (false, false) => pairs_at!(">= substr($1, 1, 256)", " AND substr(key, 1, 256) <= substr($6, 1, 256)"),
    };
    let query = sqlx::query(sql)
        .bind(start)
        .bind(after.map(Key::as_slice))
        .bind(at.0)
        .bind(ARCHIVE_PAGE_KEYS as i64)
        .bind(bounds.unbounded)
        .bind(&bounds.end);
    archive::page(query.fetch(connection), ARCHIVE_PAGE_KEYS).await
}
