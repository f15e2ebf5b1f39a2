//! What a database contains and how it is set, read before anything migrates its schema.

use std::fmt;

use sqlx::{Connection as _, PgConnection};
use tracing::warn;

use super::{
    PostgresLog,
    connection::{Database, with_timeout},
};
use crate::{
    Durability,
    migrations::{self, VERSIONS, foreign_table, is_older, log_migration},
    rows::HAS_ROWS,
};
use orlop_core::log::{Error, HEARTBEAT_TIMEOUT, Result};

/// A migration creates tables in the first schema of the search path. A later one may have those of another store.
const HAS_TABLE: &str =
    "SELECT EXISTS (SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = $1)";

/// The oldest version that has every function that the tables need, in the form of `server_version_num`.
const VERSION_MIN: i32 = 130_000;

/// The primary keys (`index` is NULL) and the other indexes of the migrations that a table of the store lacks, in the schema in
/// which `kv_log` is found. An older schema does not have every table. `check::indexes` in `tests/it` fails if the list is not
/// complete.
const MISSING_INDEXES: &str = "SELECT c.relname::text, e.index \
    FROM (VALUES ('_sqlx_migrations', NULL), ('auth_permission', 'auth_permission_role'), ('auth_role', NULL), \
        ('auth_user', NULL), ('auth_user_role', NULL), ('kv_archive', NULL), ('kv_archive', 'kv_archive_end'), \
        ('kv_archive', 'kv_archive_key'), ('kv_log', NULL), ('kv_log_more', NULL), ('kv_time', NULL), \
        ('kv_time', 'kv_time_at'), ('kv_time', 'kv_time_back'), ('lease', NULL), ('lease_change', NULL), \
        ('member', NULL), ('meta', NULL), ('saved_index', NULL)) AS e (name, index) \
    JOIN pg_class c ON c.relname = e.name \
        AND c.relnamespace = (SELECT relnamespace FROM pg_class WHERE oid = to_regclass('kv_log')) \
    WHERE NOT EXISTS ( \
        SELECT FROM pg_index i JOIN pg_class n ON n.oid = i.indexrelid \
        WHERE i.indrelid = c.oid AND i.indisvalid \
            AND CASE WHEN e.index IS NULL THEN i.indisprimary ELSE n.relname = e.index END) \
    ORDER BY c.relname <> 'kv_log', 1, 2 NULLS FIRST";

/// Reads a table of the first schema.
pub(super) const LIVE_MEMBER: &str =
    "SELECT name FROM member WHERE beat > clock_timestamp() - make_interval(secs => $1) LIMIT 1";

impl PostgresLog {
    /// Returns whether an older version of Orlop uses the database, whose schema [`PostgresLog::open`] would migrate. An
    /// empty one is what remains if the migration of a new database is interrupted. Writes nothing.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the database cannot be reached or read.
    pub async fn is_of_older_version(endpoint: &str) -> Result<bool> {
        let database = Database::new(endpoint, 1, Durability::Synced)?;
        let mut connection = database.connect_first().await?.connection;
        let mut is_used = false;
        if let Some(older) = Older::read(&database, &mut connection).await? {
            let has_rows = with_timeout(sqlx::query_scalar(HAS_ROWS).fetch_one(&mut connection)).await;
            let has_rows: bool = has_rows.map_err(|error| database.open_error("read", &error))?;
            is_used = has_rows || older.instance.is_some();
        }
        // Nothing was written.
        let _ = with_timeout(connection.close()).await;
        Ok(is_used)
    }
}

/// The schema of a database that this version migrates.
pub(super) struct Older {
    schema: i64,
    /// An instance that uses the database or has recently done so.
    instance: Option<String>,
}

impl Older {
    /// Returns `None` if the database is new, or its schema is not older than that of this version.
    pub(super) async fn read(database: &Database, connection: &mut PgConnection) -> Result<Option<Self>> {
        if !has_table(database, connection, "_sqlx_migrations").await? {
            return Ok(None);
        }
        let failed = |error: sqlx::Error| database.open_error("read", &error);
        let versions = with_timeout(sqlx::query_scalar(VERSIONS).fetch_all(&mut *connection)).await;
        let versions: Vec<i64> = versions.map_err(failed)?;
        let Some(schema) = versions.last().copied().filter(|schema| is_older(*schema, &migrations::postgres())) else {
            return Ok(None);
        };
        let instance = sqlx::query_scalar::<_, String>(LIVE_MEMBER).bind(HEARTBEAT_TIMEOUT.as_secs_f64());
        let instance = with_timeout(instance.fetch_optional(connection)).await.map_err(failed)?;
        Ok(Some(Self { schema, instance }))
    }

    /// Logs that the schema was migrated.
    pub(super) fn log_migration(&self, database: &Database) {
        log_migration(database.name(), self.schema, &migrations::postgres(), self.instance.as_deref());
    }
}

/// Refuses a schema that contains only tables of other applications.
pub(super) async fn refuse_other_tables(database: &Database, connection: &mut PgConnection) -> Result<()> {
    const TABLES: &str = "SELECT tablename::text FROM pg_tables WHERE schemaname = current_schema() ORDER BY 1";
    let tables = with_timeout(sqlx::query_scalar(TABLES).fetch_all(connection)).await;
    let tables: Vec<String> = tables.map_err(|error| database.open_error("read", &error))?;
    foreign_table(&tables).map_or(Ok(()), |table| {
        Err(Error::Open(format!(
            "database {} contains tables of another application, for example {table}; create a database or a schema for \
             Orlop",
            database.name()
        )))
    })
}

/// Refuses a server that is too old, a database without a schema for the tables, one whose tables are in a later schema than
/// new ones would be, and a new one that cannot store every name. Logs what causes errors or a loss later. Returns the owner
/// of the tables, if there are any, and whether the role has the owner's rights.
pub(super) async fn check_settings(
    database: &Database,
    connection: &mut PgConnection,
) -> Result<Option<(String, bool)>> {
    /// The version, whether commits are synced, the schema, the encoding; if there is a log, its schema and its owner, and
    /// whether this role has the owner's rights.
    type State = (i32, bool, Option<String>, String, Option<String>, Option<String>, Option<bool>);
    const STATE: &str = "SELECT current_setting('server_version_num')::int, current_setting('fsync')::bool, \
        current_schema()::text, current_setting('server_encoding'), n.nspname::text, \
        pg_get_userbyid(c.relowner)::text, pg_has_role(c.relowner, 'USAGE') \
        FROM (SELECT to_regclass('kv_log') AS log) l \
        LEFT JOIN pg_class c ON c.oid = l.log LEFT JOIN pg_namespace n ON n.oid = c.relnamespace";
    let state = with_timeout(sqlx::query_as(STATE).fetch_one(connection)).await;
    let (version, syncs, schema, encoding, log_schema, owner, is_owner): State =
        state.map_err(|error| database.open_error("read", &error))?;
    let (role, name) = (database.user(), database.name());
    if let Some(version) = unsupported(version) {
        return Err(Error::Open(format!(
            "the server of database {name} is Postgres {version}; Orlop needs 13 or later"
        )));
    }
    let Some(schema) = schema else {
        return Err(Error::Open(format!(
            "no schema in the search path of role {role} exists in database {name}; create one, for example with \
             CREATE SCHEMA AUTHORIZATION {}",
            quoted(role)
        )));
    };
    // The tables of another role in a later schema are another store.
    let owner = match log_schema {
        Some(log_schema) if log_schema != schema && is_owner == Some(true) => {
            return Err(Error::Open(format!(
                "the tables of Orlop are in schema {log_schema} of database {name}, but schema {schema} precedes it in \
                 the search path of role {role}, so that an empty store would be made there; drop schema {0}, or set \
                 the search path: ALTER ROLE {1} SET search_path = {2}, or = {0} for another store",
                quoted(&schema),
                quoted(role),
                quoted(&log_schema)
            )));
        }
        Some(log_schema) if log_schema != schema => None,
        Some(_) | None => owner.zip(is_owner),
    };
    check_encoding(database, &encoding, owner.is_some())?;
    if let Some((owner, false)) = &owner {
        warn!(
            database = name,
            owner,
            role,
            "the role does not own the tables of Orlop: the next update will fail, and defragmentations may; use \
             REASSIGN OWNED, or ALTER ... OWNER TO for each table, view and function"
        );
    }
    if !syncs {
        warn!(database = name, "the Postgres server has fsync = off: a crash of its machine loses acknowledged writes");
    }
    Ok(owner)
}

/// A primary key, or another index, that a table lacks. `pg_restore` creates both after it has loaded the rows.
pub(super) struct MissingIndex {
    table: String,
    /// `None`: the primary key.
    index: Option<String>,
}

impl fmt::Display for MissingIndex {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.index {
            None => write!(f, "{} has no primary key", self.table)?,
            Some(index) => write!(f, "{} has no index {index}", self.table)?,
        }
        f.write_str(": a restore into this database did not end, or failed")
    }
}

/// Returns what the tables of the store lack, the primary key of `kv_log` first.
pub(super) async fn missing_indexes(connection: &mut PgConnection) -> sqlx::Result<Vec<MissingIndex>> {
    let missing: Vec<(String, Option<String>)> = sqlx::query_as(MISSING_INDEXES).fetch_all(connection).await?;
    Ok(missing.into_iter().map(|(table, index)| MissingIndex { table, index }).collect())
}

/// Refuses tables without their primary keys: nothing would prevent a second row with the same revision, and each append would
/// read the whole table. Without another index, only reads of the past and their deletion are slow; `orlop check` reports it.
pub(super) async fn refuse_missing_keys(database: &Database, connection: &mut PgConnection) -> Result<()> {
    let missing = with_timeout(missing_indexes(connection)).await;
    let missing = missing.map_err(|error| database.open_error("read", &error))?;
    missing.iter().find(|missing| missing.index.is_none()).map_or(Ok(()), |missing| {
        Err(Error::Open(format!(
            "cannot use database {}: {missing}; wait until pg_restore has ended, or repeat it in an empty database",
            database.name()
        )))
    })
}

/// Logs which other roles have rights on the tables. A managed service may grant them to all of its roles by default. If they
/// cannot be read, nothing is logged.
pub(super) async fn warn_of_rights(database: &Database, connection: &mut PgConnection) {
    const RIGHTS: &str = "SELECT format('%s (%s)', \
            CASE a.grantee WHEN 0 THEN 'PUBLIC' ELSE pg_get_userbyid(a.grantee) END, \
            lower(string_agg(DISTINCT a.privilege_type, ', '))) \
        FROM pg_class c, aclexplode(c.relacl) a \
        WHERE c.oid IN ('kv_log'::regclass, 'auth_token_key'::regclass) AND a.grantee <> c.relowner \
            AND pg_get_userbyid(a.grantee) <> current_user \
        GROUP BY a.grantee ORDER BY 1";
    let roles = with_timeout(sqlx::query_scalar(RIGHTS).fetch_all(connection)).await;
    let roles: Vec<String> = roles.unwrap_or_default();
    if !roles.is_empty() {
        warn!(
            database = database.name(),
            roles = roles.join(", "),
            "other roles have rights on the tables of Orlop: they can read or change keys without a user of Orlop, and \
             whoever reads the table auth_token_key can act as any user; revoke what was not granted on purpose, for \
             example by default privileges of the schema"
        );
    }
}

/// Returns the name of a version, given as `server_version_num`, if Orlop does not support it.
fn unsupported(version: i32) -> Option<String> {
    let (major, minor) = (version / 10_000, version / 100 % 100);
    // Before 10, the second number is a part of the name.
    let name = || if major < 10 { format!("{major}.{minor}") } else { major.to_string() };
    (version < VERSION_MIN).then(name)
}

/// Refuses a new database whose encoding lacks characters, and warns of one with a log.
fn check_encoding(database: &Database, encoding: &str, has_log: bool) -> Result<()> {
    if ["UTF8", "SQL_ASCII"].contains(&encoding) {
        return Ok(());
    }
    let name = database.name();
    if !has_log {
        return Err(Error::Open(format!(
            "database {name} has the encoding {encoding}; create it with ENCODING 'UTF8' TEMPLATE template0"
        )));
    }
    warn!(
        database = name,
        encoding,
        "the encoding of the database lacks characters, and names that contain them are refused; move the store to a \
         database with ENCODING 'UTF8'"
    );
    Ok(())
}

/// Returns whether the schema in which a migration would create tables has a table.
pub(super) async fn has_table(database: &Database, connection: &mut PgConnection, name: &str) -> Result<bool> {
    let found = sqlx::query_scalar::<_, bool>(HAS_TABLE).bind(name).fetch_one(connection);
    with_timeout(found).await.map_err(|error| database.open_error("read", &error))
}

/// Returns a name as SQL that is suggested to the operator contains it: in double quotes if it needs them.
pub(super) fn quoted(name: &str) -> String {
    let is_plain = name.starts_with(|first: char| first.is_ascii_lowercase() || first == '_')
        && name.chars().all(|it| it.is_ascii_lowercase() || it.is_ascii_digit() || it == '_');
    if is_plain { name.to_owned() } else { format!("\"{}\"", name.replace('"', "\"\"")) }
}

#[cfg(test)]
mod tests {
    use super::{quoted, unsupported};

    #[test]
    fn versions_before_13_are_refused() {
        for (version, expected) in
            [(180_004, None), (130_000, None), (120_022, Some("12")), (100_023, Some("10")), (90_624, Some("9.6"))]
        {
            assert_eq!(unsupported(version).as_deref(), expected, "{version}");
        }
    }

    #[test]
    fn names_in_suggested_sql_are_quoted_if_they_need_it() {
        for (name, expected) in [
            ("orlop", "orlop"),
            ("_orlop_2", "_orlop_2"),
            ("orlop-prod", "\"orlop-prod\""),
            ("Orlop", "\"Orlop\""),
            ("2orlop", "\"2orlop\""),
            ("an \"other\"", "\"an \"\"other\"\"\""),
            ("größe", "\"größe\""),
            ("", "\"\""),
        ] {
            assert_eq!(quoted(name), expected, "{name}");
        }
    }
}
