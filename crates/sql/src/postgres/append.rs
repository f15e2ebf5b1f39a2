//! Compare-and-append: one call of a database function per batch of any size.
//!
//! If other instances have appended first, but changed no key that this batch was evaluated on, the function appends
//! behind their rows and returns these. Otherwise the append fails; the instance reads the missing rows and retries.
//! Every retry could fail, so an instance that failed twice takes the lock that every append takes: it opens a
//! transaction that holds this lock until the append is complete. Postgres grants the lock in request order, and closes
//! a connection that holds it and is idle for 2 s.

use std::{
    sync::atomic::{AtomicBool, Ordering},
    time::Duration,
};

use sqlx::{Connection as _, PgConnection, Row as _, postgres::PgRow};

use super::{
    connection::{Database, SERVER_TIMEOUT, sqlstate, with_longer_timeout, with_timeout},
    dedicated::{Dedicated, InUse},
    primary::Found,
    replication,
};
use crate::{
    auth::{self, bind_params},
    error::describe,
    rows::{LogRow as _, RowColumns, SqlRange},
};
use orlop_core::{
    log::{Append, Appended, Error, LeaseChange, Result},
    types::{Change, ChangeKind, LeaseId, Revision, RowId},
};

const APPEND: &str = "SELECT orlop_append_at($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, $15, $16, $17, \
    $18, $19, $20, $21, $22, $23, $24, $25)";
/// Returns rows, see [`appended`].
const APPEND_BEHIND: &str = "SELECT * FROM orlop_append_behind($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11, $12, $13, $14, \
    $15, $16, $17, $18, $19, $20, $21, $22, $23, $24, $25, $26, $27, $28)";
/// Sets or removes any fact.
const FACT: &str = "SELECT orlop_set_fact($1, $2, $3, $4, $5, $6)";
/// No fact has the empty name, so this changes only the epoch.
const ADVANCE_EPOCH: &str = "SELECT orlop_set_fact($1, $2, $3, '', NULL, $4)";
/// For the transaction, in milliseconds. The server waits for the statement while the instance encodes and sends its rows.
const SET_TIMEOUTS: &str = "SELECT set_config('statement_timeout', $1, true), \
    set_config('idle_in_transaction_session_timeout', $1, true)";
const PURGE: &str = "SELECT orlop_purge_copied($1, $2, $3, $4, $5)";

/// Number of rows above which an append is large: it has more time, and the buffers of the connection are freed after it.
/// Only a delete of many keys has more rows. Its statement can take hundreds of megabytes, which the connection would
/// otherwise keep allocated.
const LARGE_ROWS_MIN: usize = 4_096;
/// Time that a row of a large append may take in addition, on the server and in the client.
const ROW_TIME_MAX: Duration = Duration::from_micros(100);

/// Appends on a connection of its own.
pub(super) struct Appender {
    connection: Dedicated,
    /// Identifies this start of the instance, so that it ignores the notifications of its own appends.
    run: i64,
    /// Whether commits of the newest connection wait for a standby, if the server has a synchronous one. It keeps the setting
    /// with which it was opened, also if that of the role changes.
    waits_for_standby: AtomicBool,
}

impl Appender {
    pub(super) async fn new(mut found: Found, run: i64) -> sqlx::Result<Self> {
        let waits = replication::waits_for_standby(&mut found.connection).await?;
        Ok(Self { connection: Dedicated::of(found), run, waits_for_standby: AtomicBool::new(waits) })
    }

    pub(super) fn waits_for_standby(&self) -> bool {
        self.waits_for_standby.load(Ordering::Relaxed)
    }

    /// Takes the connection. Asks a new one for its setting before it appends.
    async fn take(&self, database: &Database) -> Result<InUse<'_>> {
        let taking = async {
            let mut in_use = self.connection.take(database).await?;
            if in_use.is_new {
                let asking = with_timeout(replication::waits_for_standby(&mut in_use.connection));
                let waits = database.unless_superseded(in_use.generation, asking).await?;
                self.waits_for_standby.store(waits, Ordering::Relaxed);
            }
            Ok(in_use)
        };
        taking.await.map_err(|error| database.unavailable(&error))
    }

    /// See [`orlop_core::log::SharedLog::lock_appends`].
    pub(super) async fn lock_appends(&self, database: &Database) -> Result<()> {
        let mut in_use = self.take(database).await?;
        if !in_use.holds_lock {
            let locking = with_timeout(sqlx::raw_sql("BEGIN; SELECT orlop_lock()").execute(&mut in_use.connection));
            let locked = database.unless_superseded(in_use.generation, locking).await;
            locked.map_err(|error| database.unavailable(&error))?;
            in_use.holds_lock = true;
        }
        in_use.keep();
        Ok(())
    }

    /// Appends a batch, or only releases the lock if the batch is empty.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped or fails, the connection is closed.
    pub(super) async fn append(&self, database: &Database, append: Append<'_>) -> Result<Appended> {
        let mut in_use = self.take(database).await?;
        let was_locked = std::mem::take(&mut in_use.holds_lock);
        let appended = tokio::select! {
            biased;
            appended = commit(&mut in_use.connection, database, append, (was_locked, self.run)) => appended?,
            () = database.superseded(in_use.generation) => {
                return Err(Error::OutcomeUnknown("another server has become the primary".to_owned()));
            }
        };
        in_use.keep();
        Ok(appended)
    }

    pub(super) async fn close(&self) {
        self.connection.close().await;
    }
}

/// Appends a batch in one transaction; `was_locked`: in the one that holds the lock.
async fn commit(
    connection: &mut PgConnection,
    database: &Database,
    append: Append<'_>,
    (was_locked, run): (bool, i64),
) -> Result<Appended> {
    let is_large = append.changes.len() > LARGE_ROWS_MIN;
    // A change of users and roles takes several statements; a large append has its own limit of time.
    let in_transaction = was_locked || append.auth.is_some() || is_large;
    if in_transaction && !was_locked {
        let begun = with_timeout(sqlx::raw_sql("BEGIN").execute(&mut *connection)).await;
        begun.map_err(|error| database.unavailable(&error))?;
    }
    let mut more_time = Duration::ZERO;
    if is_large {
        // The end of a lease with a million keys cannot be divided, and would otherwise never succeed.
        more_time = ROW_TIME_MAX * u32::try_from(append.changes.len()).unwrap_or(u32::MAX);
        let limit = (SERVER_TIMEOUT + more_time).as_millis().to_string();
        let set = with_timeout(sqlx::query(SET_TIMEOUTS).bind(limit).execute(&mut *connection)).await;
        set.map_err(|error| database.refusal(&error))?;
    }
    let appended = if append.is_empty() {
        Appended::Done
    } else {
        match with_longer_timeout(more_time, call(&mut *connection, append, run)).await {
            Ok(appended) => appended?,
            // Such a batch has one request, which would be refused again.
            Err(error) if (append.auth.is_some() || append.fact.is_some()) && is_final(&error) => {
                return Err(Error::Refused(describe(&error)));
            }
            // The transaction was not committed, so nothing was written.
            Err(error) if in_transaction => return Err(database.refusal(&error)),
            Err(error) => return Err(append_error(database, &error)),
        }
    };
    if in_transaction {
        let is_written = appended != Appended::Conflict && !append.is_empty();
        let end = if is_written { "COMMIT" } else { "ROLLBACK" };
        let ended = with_longer_timeout(more_time, sqlx::raw_sql(end).execute(&mut *connection)).await;
        ended.map_err(|error| append_error(database, &error))?;
    }
    if is_large {
        connection.shrink_buffers();
    }
    Ok(appended)
}

/// Maps an error of an append. If the statement failed, its transaction was rolled back. After an error that closes the
/// connection, the outcome is unknown.
fn append_error(database: &Database, error: &sqlx::Error) -> Error {
    // Classes of SQLSTATE.
    const NOTHING_WRITTEN: [&str; 9] = ["22", "23", "25", "42", "53", "54", "55", "58", "P0"];
    let refused = sqlstate(error).is_some_and(|code| {
        NOTHING_WRITTEN.iter().any(|class| code.starts_with(class))
            || ["40001", "40P01", "57014"].contains(&code.as_str())
    });
    if refused { database.refusal(error) } else { Error::OutcomeUnknown(describe(error)) }
}

/// Returns whether the server refused the statement because of its data, the tables or the rights of the role. Nothing
/// was written.
fn is_final(error: &sqlx::Error) -> bool {
    // Classes of SQLSTATE.
    const FINAL: [&str; 6] = ["22", "23", "42", "54", "55", "P0"];
    // A lock that was not granted in time.
    const LOCK_NOT_AVAILABLE: &str = "55P03";
    sqlstate(error).is_some_and(|code| FINAL.iter().any(|class| code.starts_with(class)) && code != LOCK_NOT_AVAILABLE)
}

/// Rows as one array per column.
#[derive(Default)]
pub(super) struct Columns<'a> {
    keys: Vec<&'a [u8]>,
    values: Vec<Option<&'a [u8]>>,
    leases: Vec<i64>,
    versions: Vec<i64>,
    creates: Vec<i64>,
    prevs: Vec<i64>,
    deletes: Vec<bool>,
}

impl<'a> Columns<'a> {
    pub(super) fn with_capacity(rows: usize) -> Self {
        Self {
            keys: Vec::with_capacity(rows),
            values: Vec::with_capacity(rows),
            leases: Vec::with_capacity(rows),
            versions: Vec::with_capacity(rows),
            creates: Vec::with_capacity(rows),
            prevs: Vec::with_capacity(rows),
            deletes: Vec::with_capacity(rows),
        }
    }

    pub(super) fn push(&mut self, change: &'a Change) {
        self.keys.push(change.key.as_slice());
        self.prevs.push(change.prev.as_ref().map_or(0, |prev| prev.row.revision.0));
        let (value, lease, version, create_revision) = match &change.kind {
            ChangeKind::Put { kv, create_revision, version, lease } => {
                (Some(kv.value_slice()), LeaseId::to_wire(*lease), *version, create_revision.0)
            }
            ChangeKind::Delete => (None, 0, 0, 0),
        };
        self.deletes.push(value.is_none());
        self.values.push(value);
        self.leases.push(lease);
        self.versions.push(version);
        self.creates.push(create_revision);
    }
}

async fn call(connection: &mut PgConnection, append: Append<'_>, run: i64) -> sqlx::Result<Result<Appended>> {
    if let Some(change) = append.fact {
        let (name, value) = change.fact();
        let expected = append.expected;
        let query = sqlx::query_scalar(FACT).bind(expected.head.0).bind(expected.epoch).bind(expected.server);
        return query.bind(name).bind(value).bind(run).fetch_one(connection).await.map(whether);
    }
    if let Some(auth) = append.auth {
        let expected = append.expected;
        let query = sqlx::query_scalar(ADVANCE_EPOCH).bind(expected.head.0).bind(expected.epoch).bind(expected.server);
        let advanced = query.bind(run).fetch_one(&mut *connection).await?;
        if advanced {
            for statement in auth::change(auth) {
                bind_params!(statement).execute(&mut *connection).await?;
            }
        }
        return Ok(whether(advanced));
    }
    rows(connection, append, run).await
}

/// Appends rows and changes of leases.
async fn rows(connection: &mut PgConnection, append: Append<'_>, run: i64) -> sqlx::Result<Result<Appended>> {
    let mut first = Columns::with_capacity(append.changes.len());
    let mut more = Columns::default();
    let (mut more_ids, mut more_subs) = (Vec::new(), Vec::new());
    for change in append.changes {
        if change.row.sub == 0 {
            first.push(change);
        } else {
            more_ids.push(change.row.revision.0);
            more_subs.push(i64::from(change.row.sub));
            more.push(change);
        }
    }
    let Leases { grants, revokes, expires } = Leases::of(append.leases);
    let (grants, ttls): (Vec<i64>, Vec<i64>) = grants.into_iter().unzip();
    let expected = append.expected;
    let sql = if append.reads.is_some() { APPEND_BEHIND } else { APPEND };
    let mut query = sqlx::query(sql).bind(expected.head.0).bind(expected.epoch).bind(expected.server);
    query = bind(query, first).bind(more_ids).bind(more_subs);
    query = bind(query, more)
        .bind(grants)
        .bind(ttls)
        .bind(revokes)
        .bind(expires)
        .bind(append.compact.map(|revision| revision.0))
        .bind(run);
    let Some(reads) = append.reads else {
        return query.fetch_one(connection).await?.try_get(0).map(whether);
    };
    let spans: Vec<SqlRange> = reads.spans.iter().map(|span| SqlRange::of(span)).collect();
    let rows = query
        .bind(&*reads.keys)
        .bind(spans.iter().map(|span| &*span.start).collect::<Vec<_>>())
        .bind(spans.iter().map(|span| (!span.unbounded).then_some(&*span.end)).collect::<Vec<_>>())
        .fetch_all(connection)
        .await?;
    Ok(appended(&rows, append.expected.head))
}

fn whether(is_appended: bool) -> Result<Appended> {
    Ok(if is_appended { Appended::Done } else { Appended::Conflict })
}

/// Reads the result of `orlop_append_behind`.
fn appended(rows: &[PgRow], expected: Revision) -> Result<Appended> {
    let Some((first, others)) = rows.split_first() else { return Ok(Appended::Conflict) };
    let base = Revision(first.int(0)?);
    if base == expected {
        return Ok(Appended::Done);
    }
    let change = |row: &PgRow| Ok(RowColumns::read(row, 0)?.into_change(None));
    let mut others: Vec<Change> = others.iter().map(change).collect::<Result<_>>()?;
    others.sort_by_key(|change| change.row);
    Ok(Appended::Behind { base, others })
}

/// The lease changes of a batch, combined per kind. `orlop_append_behind` deletes leases before it inserts leases.
#[derive(Default)]
struct Leases {
    /// IDs and TTLs in seconds.
    grants: Vec<(i64, i64)>,
    revokes: Vec<i64>,
    expires: Vec<i64>,
}

impl Leases {
    fn of(changes: &[LeaseChange]) -> Self {
        let mut all = Self::default();
        for change in changes {
            match *change {
                LeaseChange::Grant { id, ttl_secs } => all.grants.push((id.0, ttl_secs)),
                LeaseChange::Revoke { id } => {
                    all.remove_grant(id);
                    all.revokes.push(id.0);
                }
                // A lease granted by the same append is not in the table and cannot have expired.
                LeaseChange::Expire { id } if all.remove_grant(id) => all.revokes.push(id.0),
                LeaseChange::Expire { id } => all.expires.push(id.0),
            }
        }
        all
    }

    /// Removes the grant of a lease. Returns whether there was one.
    fn remove_grant(&mut self, id: LeaseId) -> bool {
        let before = self.grants.len();
        self.grants.retain(|(granted, _)| *granted != id.0);
        self.grants.len() < before
    }
}

pub(super) type RowsQuery<'q> = sqlx::query::Query<'q, sqlx::Postgres, sqlx::postgres::PgArguments>;

/// Binds the seven arrays of [`Columns`].
pub(super) fn bind<'q>(query: RowsQuery<'q>, columns: Columns<'q>) -> RowsQuery<'q> {
    query
        .bind(columns.keys)
        .bind(columns.values)
        .bind(columns.leases)
        .bind(columns.versions)
        .bind(columns.creates)
        .bind(columns.prevs)
        .bind(columns.deletes)
}

/// Deletes compacted rows. Returns false, without deleting, if the connection leads to another server or to one that
/// does not have this compaction.
pub(super) async fn purge(
    connection: &mut PgConnection,
    server: i64,
    rows: &[RowId],
    compacted: Revision,
) -> sqlx::Result<bool> {
    let (first, more): (Vec<RowId>, Vec<RowId>) = rows.iter().partition(|row| row.sub == 0);
    sqlx::query_scalar(PURGE)
        .bind(server)
        .bind(compacted.0)
        .bind(first.iter().map(|row| row.revision.0).collect::<Vec<_>>())
        .bind(more.iter().map(|row| row.revision.0).collect::<Vec<_>>())
        .bind(more.iter().map(|row| i64::from(row.sub)).collect::<Vec<_>>())
        .fetch_one(connection)
        .await
}
