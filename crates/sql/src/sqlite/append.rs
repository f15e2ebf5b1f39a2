//! Compare-and-append: one statement and one commit per batch of any size.

use std::sync::LazyLock;

use sqlx::{Connection as _, Sqlite, SqliteConnection, query::Query, sqlite::SqliteArguments};

use crate::auth::{self, bind_params};
use orlop_core::{
    log::{Append, Appended, LeaseChange},
    types::{Change, ChangeKind, LeaseId},
};

/// Maximum number of rows in one statement; larger batches use several statements in one transaction.
const STATEMENT_ROWS_MAX: usize = 512;

/// Statements for 1, 2, 4, ... rows. There are few, so all stay prepared. A batch uses the smallest statement that is
/// large enough; the unused rows are NULL and are not inserted.
static FIRST: LazyLock<Vec<String>> = LazyLock::new(|| statements(first_sql));
static MORE: LazyLock<Vec<String>> = LazyLock::new(|| statements(more_sql));

fn statements(sql: fn(usize) -> String) -> Vec<String> {
    (0..=STATEMENT_ROWS_MAX.ilog2()).map(|power| sql(1 << power)).collect()
}

/// Returns a statement that inserts rows if the head is the expected one, which is the last parameter.
fn first_sql(rows: usize) -> String {
    let values = vec!["(?,?,?,?,?,?,?,?)"; rows].join(",");
    format!(
        "INSERT INTO kv_log (id, key, value, lease, version, create_revision, prev_revision, deleted) \
         SELECT * FROM (VALUES {values}) \
         WHERE column1 IS NOT NULL AND (SELECT coalesce(max(id), 1) FROM kv_log) = ?"
    )
}

fn more_sql(rows: usize) -> String {
    let values = vec!["(?,?,?,?,?,?,?,?,?)"; rows].join(",");
    format!(
        "INSERT INTO kv_log_more (sub, id, key, value, lease, version, create_revision, prev_revision, deleted) \
         SELECT * FROM (VALUES {values}) WHERE column1 IS NOT NULL"
    )
}

pub(super) async fn append(writer: &mut SqliteConnection, append: Append<'_>) -> sqlx::Result<Appended> {
    let (first, more): (Vec<&Change>, Vec<&Change>) = append.changes.iter().partition(|change| change.row.sub == 0);
    let rows_alone =
        append.leases.is_empty() && append.compact.is_none() && append.fact.is_none() && append.auth.is_none();
    let outcome = if rows_alone && more.is_empty() && first.len() <= STATEMENT_ROWS_MAX {
        insert_first(writer, &first, append.expected.head.0).await
    } else {
        append_all(writer, &first, &more, append).await
    };
    match outcome {
        // A row with one of these ids exists: another process wrote to the file.
        Err(sqlx::Error::Database(error)) if error.is_unique_violation() => Ok(Appended::Conflict),
        outcome => outcome,
    }
}

async fn append_all(
    writer: &mut SqliteConnection,
    first: &[&Change],
    more: &[&Change],
    append: Append<'_>,
) -> sqlx::Result<Appended> {
    let mut transaction = writer.begin_with("BEGIN IMMEDIATE").await?;
    if insert(&mut transaction, first, more, append.expected.head.0).await? == Appended::Conflict {
        transaction.rollback().await?;
        return Ok(Appended::Conflict);
    }
    for change in append.leases {
        let query = match change {
            LeaseChange::Grant { id, ttl_secs } => {
                sqlx::query("INSERT INTO lease (id, ttl) VALUES (?, ?)").bind(id.0).bind(ttl_secs)
            }
            // Only this process has the deadlines, so the store's writer has already checked that the lease has
            // expired.
            LeaseChange::Revoke { id } | LeaseChange::Expire { id } => {
                sqlx::query("DELETE FROM lease WHERE id = ?").bind(id.0)
            }
        };
        query.execute(&mut *transaction).await?;
    }
    if let Some(revision) = append.compact {
        sqlx::query(
            "INSERT INTO meta (name, value) VALUES ('compact_revision', ?) \
             ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)",
        )
        .bind(revision.0)
        .execute(&mut *transaction)
        .await?;
    }
    if let Some(change) = append.fact {
        let query = match change.fact() {
            (name, Some(value)) => {
                sqlx::query("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)").bind(name).bind(value)
            }
            (name, None) => sqlx::query("DELETE FROM meta WHERE name = ?").bind(name),
        };
        query.execute(&mut *transaction).await?;
    }
    if let Some(auth) = append.auth {
        for statement in auth::change(auth) {
            bind_params!(statement).execute(&mut *transaction).await?;
        }
    }
    transaction.commit().await?;
    Ok(Appended::Done)
}

/// Inserts rows into both tables inside a transaction, if the head is `newest`.
pub(super) async fn insert(
    writer: &mut SqliteConnection,
    first: &[&Change],
    more: &[&Change],
    mut newest: i64,
) -> sqlx::Result<Appended> {
    for chunk in first.chunks(STATEMENT_ROWS_MAX) {
        if insert_first(writer, chunk, newest).await? == Appended::Conflict {
            return Ok(Appended::Conflict);
        }
        newest = chunk[chunk.len() - 1].row.revision.0;
    }
    for chunk in more.chunks(STATEMENT_ROWS_MAX) {
        let (mut query, padding) = statement(&MORE, chunk.len());
        for change in chunk {
            query = bind_row(query.bind(i64::from(change.row.sub)), change);
        }
        for _ in 0..padding * 9 {
            query = query.bind(None::<i64>);
        }
        query.execute(&mut *writer).await?;
    }
    Ok(Appended::Done)
}

async fn insert_first(writer: &mut SqliteConnection, rows: &[&Change], expected: i64) -> sqlx::Result<Appended> {
    if rows.is_empty() {
        return Ok(Appended::Done);
    }
    let (mut query, padding) = statement(&FIRST, rows.len());
    for change in rows {
        query = bind_row(query, change);
    }
    for _ in 0..padding * 8 {
        query = query.bind(None::<i64>);
    }
    let inserted = query.bind(expected).execute(writer).await?.rows_affected();
    Ok(if inserted == rows.len() as u64 { Appended::Done } else { Appended::Conflict })
}

type SqliteQuery = Query<'static, Sqlite, SqliteArguments>;

/// Returns the statement for a number of rows, and the number of its unused rows.
fn statement(statements: &'static [String], rows: usize) -> (SqliteQuery, usize) {
    let size = rows.next_power_of_two();
    (sqlx::query(&*statements[size.ilog2() as usize]), size - rows)
}

fn bind_row(query: SqliteQuery, change: &Change) -> SqliteQuery {
    let query = query.bind(change.row.revision.0).bind(change.key.as_slice());
    let prev = change.prev.as_ref().map_or(0, |prev| prev.row.revision.0);
    match &change.kind {
        ChangeKind::Put { kv, create_revision, version, lease } => query
            .bind(kv.value_slice())
            .bind(LeaseId::to_wire(*lease))
            .bind(*version)
            .bind(create_revision.0)
            .bind(prev)
            .bind(0),
        ChangeKind::Delete => query.bind(None::<Vec<u8>>).bind(0).bind(0).bind(0).bind(prev).bind(1),
    }
}
