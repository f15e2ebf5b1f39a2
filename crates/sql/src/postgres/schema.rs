//! What a database contains, read before anything migrates its schema.

use sqlx::{Connection as _, PgConnection};

use super::{
    PostgresLog,
    connection::{Database, with_timeout},
};
use crate::{
    Durability,
    migrations::{self, VERSIONS, is_older},
};
use orlop_core::log::Result;

/// A migration creates tables in the first schema of the search path. A later one may have those of another store.
const HAS_TABLE: &str =
    "SELECT EXISTS (SELECT 1 FROM pg_tables WHERE schemaname = current_schema() AND tablename = $1)";

impl PostgresLog {
    /// Returns whether the database has the schema of an older version of Orlop, which [`PostgresLog::open`] would
    /// migrate. Writes nothing.
    ///
    /// # Errors
    ///
    /// [`orlop_core::log::Error::Open`] if the database cannot be reached or read.
    pub async fn has_older_schema(endpoint: &str) -> Result<bool> {
        let database = Database::new(endpoint, 1, Durability::Synced)?;
        let mut connection = database.connect_first().await?.connection;
        if !has_table(&database, &mut connection, "_sqlx_migrations").await? {
            return Ok(false);
        }
        let versions = with_timeout(sqlx::query_scalar(VERSIONS).fetch_all(&mut connection)).await;
        let versions: Vec<i64> = versions.map_err(|error| database.open_error("read", &error))?;
        // Nothing was written.
        let _ = with_timeout(connection.close()).await;
        Ok(versions.last().is_some_and(|schema| is_older(*schema, &migrations::postgres())))
    }
}

/// Returns whether the schema in which a migration would create tables has a table.
pub(super) async fn has_table(database: &Database, connection: &mut PgConnection, name: &str) -> Result<bool> {
    let found = sqlx::query_scalar::<_, bool>(HAS_TABLE).bind(name).fetch_one(connection);
    with_timeout(found).await.map_err(|error| database.open_error("read", &error))
}
