//! Compare-and-append: one transaction per batch of any size.

use rusqlite::{
    CachedStatement, Connection, ErrorCode, Result, TransactionBehavior, ffi,
    types::{Null, Value},
};

use crate::auth::{self, Param, Statement};
use orlop_core::{
    log::{Append, Appended, FactChange, LeaseChange},
    types::{Change, ChangeKind, EncodedKv, Key, LeaseId, Revision, RowId},
};

const INSERT_FIRST: &str = "INSERT INTO kv_log (id, key, value, lease, version, create_revision, prev_revision, deleted) \
    VALUES (?, ?, ?, ?, ?, ?, ?, ?)";
const INSERT_MORE: &str = "INSERT INTO kv_log_more (id, key, value, lease, version, create_revision, prev_revision, deleted, sub) \
    VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)";
/// The parameter `sub`.
pub(super) const SUB: usize = 9;
pub(super) const SET_FACT: &str = "INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)";

/// A change on its way to the thread of the connection. It shares the memory of its value.
pub(super) struct Row {
    row: RowId,
    prev: Revision,
    content: Content,
}

enum Content {
    Put { kv: EncodedKv, create_revision: Revision, version: i64, lease: Option<LeaseId> },
    Delete { key: Key },
}

impl Row {
    pub(super) fn of(change: &Change) -> Self {
        let content = match &change.kind {
            ChangeKind::Put { kv, create_revision, version, lease } => {
                Content::Put { kv: kv.clone(), create_revision: *create_revision, version: *version, lease: *lease }
            }
            ChangeKind::Delete => Content::Delete { key: change.key.clone() },
        };
        let prev = change.prev.as_ref().map_or(Revision(0), |prev| prev.row.revision);
        Self { row: change.row, prev, content }
    }
}

/// Everything that one transaction appends.
pub(super) struct Batch {
    expected: Revision,
    rows: Vec<Row>,
    leases: Vec<LeaseChange>,
    compact: Option<Revision>,
    fact: Option<FactChange>,
    auth: Vec<OwnedStatement>,
}

impl Batch {
    pub(super) fn of(append: &Append<'_>) -> Self {
        Self {
            expected: append.expected.head,
            rows: append.changes.iter().map(Row::of).collect(),
            leases: append.leases.to_vec(),
            compact: append.compact,
            fact: append.fact,
            auth: append.auth.map(|append| OwnedStatement::all(auth::change(append))).unwrap_or_default(),
        }
    }

    /// Appends the batch if the head is the expected one, and nothing otherwise.
    pub(super) fn append(self, writer: &mut Connection) -> Result<Appended> {
        match self.try_append(writer) {
            // A row with one of these ids exists: another process wrote to the file.
            Err(error) if is_duplicate(&error) => Ok(Appended::Conflict),
            outcome => outcome,
        }
    }

    fn try_append(self, writer: &mut Connection) -> Result<Appended> {
        let transaction = writer.transaction_with_behavior(TransactionBehavior::Immediate)?;
        if insert(&transaction, &self.rows, self.expected)? == Appended::Conflict {
            return Ok(Appended::Conflict);
        }
        for change in &self.leases {
            match change {
                LeaseChange::Grant { id, ttl_secs } => add_lease(&transaction, *id, *ttl_secs)?,
                // Only this process has the deadlines, so the store's writer has already checked that the lease has
                // expired.
                LeaseChange::Revoke { id } | LeaseChange::Expire { id } => {
                    transaction.prepare_cached("DELETE FROM lease WHERE id = ?")?.execute([id.0])?;
                }
            }
        }
        if let Some(revision) = self.compact {
            const RAISE: &str = "INSERT INTO meta (name, value) VALUES ('compact_revision', ?) \
                ON CONFLICT (name) DO UPDATE SET value = max(value, excluded.value)";
            transaction.execute(RAISE, [revision.0])?;
        }
        if let Some((name, value)) = self.fact.map(|change| change.fact()) {
            match value {
                Some(value) => transaction.execute(SET_FACT, (name, value))?,
                None => transaction.execute("DELETE FROM meta WHERE name = ?", [name])?,
            };
        }
        for statement in &self.auth {
            statement.execute(&transaction)?;
        }
        transaction.commit()?;
        Ok(Appended::Done)
    }
}

/// Inserts rows in the transaction of the caller, if the head is `expected`.
pub(super) fn insert(transaction: &Connection, rows: &[Row], expected: Revision) -> Result<Appended> {
    let mut head = transaction.prepare_cached("SELECT coalesce(max(id), 1) FROM kv_log")?;
    if head.query_row([], |row| row.get::<_, i64>(0))? != expected.0 {
        return Ok(Appended::Conflict);
    }
    let mut first = transaction.prepare_cached(INSERT_FIRST)?;
    let mut more = transaction.prepare_cached(INSERT_MORE)?;
    for row in rows {
        let statement = if row.row.sub == 0 { &mut first } else { &mut more };
        bind(statement, row)?;
        if row.row.sub != 0 {
            statement.raw_bind_parameter(SUB, row.row.sub)?;
        }
        statement.raw_execute()?;
    }
    Ok(Appended::Done)
}

/// Binds all parameters but [`SUB`].
pub(super) fn bind(statement: &mut CachedStatement<'_>, row: &Row) -> Result<()> {
    statement.raw_bind_parameter(1, row.row.revision.0)?;
    statement.raw_bind_parameter(7, row.prev.0)?;
    match &row.content {
        Content::Put { kv, create_revision, version, lease } => {
            statement.raw_bind_parameter(2, kv.key_slice())?;
            statement.raw_bind_parameter(3, kv.value_slice())?;
            statement.raw_bind_parameter(4, LeaseId::to_wire(*lease))?;
            statement.raw_bind_parameter(5, *version)?;
            statement.raw_bind_parameter(6, create_revision.0)?;
            statement.raw_bind_parameter(8, 0)
        }
        Content::Delete { key } => {
            statement.raw_bind_parameter(2, key.as_slice())?;
            statement.raw_bind_parameter(3, Null)?;
            for (number, value) in [(4, 0), (5, 0), (6, 0), (8, 1)] {
                statement.raw_bind_parameter(number, value)?;
            }
            Ok(())
        }
    }
}

pub(super) fn add_lease(transaction: &Connection, id: LeaseId, ttl_secs: i64) -> Result<()> {
    transaction.prepare_cached("INSERT INTO lease (id, ttl) VALUES (?, ?)")?.execute((id.0, ttl_secs)).map(drop)
}

fn is_duplicate(error: &rusqlite::Error) -> bool {
    const DUPLICATES: [i32; 2] = [ffi::SQLITE_CONSTRAINT_PRIMARYKEY, ffi::SQLITE_CONSTRAINT_UNIQUE];
    let error = error.sqlite_error();
    error.is_some_and(|error| error.code == ErrorCode::ConstraintViolation && DUPLICATES.contains(&error.extended_code))
}

/// A statement of [`auth`] on its way to the thread of the connection.
pub(super) struct OwnedStatement {
    sql: &'static str,
    params: Vec<Value>,
}

impl OwnedStatement {
    pub(super) fn all(statements: Vec<Statement<'_>>) -> Vec<Self> {
        statements
            .into_iter()
            .map(|(sql, params)| Self { sql, params: params.into_iter().map(value).collect() })
            .collect()
    }

    pub(super) fn execute(&self, connection: &Connection) -> Result<()> {
        let mut statement = connection.prepare(self.sql)?;
        for (number, value) in (1..).zip(&self.params) {
            // SQLite numbers `$1`, `$2` in the order in which they first occur.
            if let Some(index) = statement.parameter_index(&format!("${number}"))? {
                statement.raw_bind_parameter(index, value)?;
            }
        }
        statement.raw_execute().map(drop)
    }
}

fn value(param: Param<'_>) -> Value {
    match param {
        Param::Text(text) => text.to_owned().into(),
        Param::MaybeText(text) => text.map(str::to_owned).into(),
        Param::Bytes(bytes) => bytes.to_vec().into(),
        Param::Int(number) => number.into(),
    }
}
