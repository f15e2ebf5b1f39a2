//! The schema of a database file, read before anything migrates it.

use std::path::Path;

use sqlx::Connection as _;

use super::{SqliteLog, view::SqliteView};
use crate::{
    migrations::{self, is_older},
    rows::HAS_ROWS,
};

impl SqliteLog {
    /// Returns whether an older version of Orlop has written rows or leases to the file, whose schema [`SqliteLog::open`]
    /// would migrate. An empty one is what remains if the migration of a new file is interrupted. Writes nothing.
    ///
    /// Returns false if the file cannot be read as a database of Orlop: [`SqliteLog::open`] names the cause.
    pub async fn is_of_older_version(file: &Path) -> bool {
        let Ok(view) = SqliteView::of_database(file).await else { return false };
        let mut connection = view.connection.into_inner();
        let is_used = is_older(view.schema, &migrations::sqlite())
            && sqlx::query_scalar(HAS_ROWS).fetch_one(&mut connection).await.unwrap_or(false);
        // A connection that is only dropped is closed later, while the log opens the same file.
        let _ = connection.close().await;
        is_used
    }
}
