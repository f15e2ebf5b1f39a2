//! What a database contains, read before anything migrates its schema.

use sqlx::{Connection as _, PgConnection};

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

/// Returns whether the schema in which a migration would create tables has a table.
pub(super) async fn has_table(database: &Database, connection: &mut PgConnection, name: &str) -> Result<bool> {
    let found = sqlx::query_scalar::<_, bool>(HAS_TABLE).bind(name).fetch_one(connection);
    with_timeout(found).await.map_err(|error| database.open_error("read", &error))
}
