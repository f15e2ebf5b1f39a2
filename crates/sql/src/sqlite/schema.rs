//! The schema of a database file, read before anything migrates it.

use std::path::Path;

use sqlx::Connection as _;

use super::{SqliteLog, view::SqliteView};
use crate::migrations::{self, is_older};

impl SqliteLog {
    /// Returns whether the file has the schema of an older version of Orlop, which [`SqliteLog::open`] would migrate.
    /// Writes nothing.
    ///
    /// Returns false if the file cannot be read as a database of Orlop: [`SqliteLog::open`] names the cause.
    pub async fn has_older_schema(file: &Path) -> bool {
        let Ok(view) = SqliteView::of_database(file).await else { return false };
        // A connection that is only dropped is closed later, while the log opens the same file.
        let _ = view.connection.into_inner().close().await;
        is_older(view.schema, &migrations::sqlite())
    }
}
