//! The schema of a database file: its version, and its migration.

use std::path::Path;

use orlop_core::log::{Error, Result};
use sqlx::{Connection as _, SqliteConnection};

use super::{
    SqliteLog,
    foreign::refuse_other_tables,
    view::{SqliteView, journal_of},
};
use crate::{
    migrations::{self, VERSIONS, cannot_migrate, is_older, log_migration},
    rows::HAS_ROWS,
};

impl SqliteLog {
    /// Returns whether an older version of Orlop has written rows or leases to the file, whose schema [`SqliteLog::open`]
    /// would migrate. An empty one is what remains if the migration of a new file is interrupted. Writes nothing, unless a
    /// crash has interrupted a transaction, which is rolled back: before, the version cannot be read.
    ///
    /// Returns false if the file cannot be read as a database of Orlop: [`SqliteLog::open`] names the cause.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if a transaction cannot be rolled back, or the file is that of another application.
    pub async fn is_of_older_version(file: &Path) -> Result<bool> {
        if journal_of(file).exists() {
            refuse_other_tables(file).await?;
        }
        let Ok(view) = SqliteView::of_database(file).await else { return Ok(false) };
        let mut connection = view.connection.into_inner();
        let is_used = is_older(view.schema, &migrations::sqlite())
            && sqlx::query_scalar(HAS_ROWS).fetch_one(&mut connection).await.unwrap_or(false);
        // A connection that is only dropped is closed later, while the log opens the same file.
        let _ = connection.close().await;
        Ok(is_used)
    }
}

/// Migrates the schema of a database, and logs that it was an older one.
pub(super) async fn migrate(connection: &mut SqliteConnection, database: &str) -> Result<()> {
    let known = migrations::sqlite();
    // A new database has no such table. If another one cannot be read, the migration fails with the reason.
    let versions: Vec<i64> = sqlx::query_scalar(VERSIONS).fetch_all(&mut *connection).await.unwrap_or_default();
    known.run(connection).await.map_err(|error| Error::Open(cannot_migrate(database, &error)))?;
    if let Some(from) = versions.last().filter(|schema| is_older(**schema, &known)) {
        log_migration(database, *from, &known, None);
    }
    Ok(())
}
