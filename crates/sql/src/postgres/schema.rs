//! What a database contains, read before anything migrates its schema.

use sqlx::{Connection as _, PgConnection};

use super::{
    PostgresLog,
    connection::{Database, with_timeout},
};
use crate::{
    Durability,
    migrations::{self, VERSIONS, is_older},
    rows::HAS_ROWS,
};
use orlop_core::log::{HEARTBEAT_TIMEOUT, Result};

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
    /// [`orlop_core::log::Error::Open`] if the database cannot be reached or read.
    pub async fn is_of_older_version(endpoint: &str) -> Result<bool> {
        let database = Database::new(endpoint, 1, Durability::Synced)?;
        let mut connection = database.connect_first().await?.connection;
        if !has_table(&database, &mut connection, "_sqlx_migrations").await? {
            return Ok(false);
        }
        let versions = with_timeout(sqlx::query_scalar(VERSIONS).fetch_all(&mut connection)).await;
        let failed = |error: sqlx::Error| database.open_error("read", &error);
        let versions: Vec<i64> = versions.map_err(failed)?;
        let mut is_used = false;
        if versions.last().is_some_and(|schema| is_older(*schema, &migrations::postgres())) {
            let has_rows =
                with_timeout(sqlx::query_scalar(HAS_ROWS).fetch_one(&mut connection)).await.map_err(failed)?;
            let live = sqlx::query_scalar::<_, String>(LIVE_MEMBER).bind(HEARTBEAT_TIMEOUT.as_secs_f64());
            let live = with_timeout(live.fetch_optional(&mut connection)).await.map_err(failed)?;
            is_used = has_rows || live.is_some();
        }
        // Nothing was written.
        let _ = with_timeout(connection.close()).await;
        Ok(is_used)
    }
}

/// Returns whether the schema in which a migration would create tables has a table.
pub(super) async fn has_table(database: &Database, connection: &mut PgConnection, name: &str) -> Result<bool> {
    let found = sqlx::query_scalar::<_, bool>(HAS_TABLE).bind(name).fetch_one(connection);
    with_timeout(found).await.map_err(|error| database.open_error("read", &error))
}
