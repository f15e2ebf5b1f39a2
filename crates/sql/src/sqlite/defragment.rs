//! Defragmentation of a database that no server uses.

use std::path::Path;

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection};

use super::{FileLock, SqliteLog, read, view::SqliteView};
use orlop_core::log::{Error, Result};

/// Sizes of a database in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Defragmented {
    pub bytes_before: i64,
    pub bytes_after: i64,
}

impl SqliteLog {
    /// Rewrites the database file without free pages and with full pages. This needs free space for two copies of its
    /// content in its folder: a temporary file and the WAL. The content is unchanged after an error or a crash.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] if the file does not exist, a server uses it, or it is not a database of this version of Orlop.
    pub async fn defragment(file: &Path) -> Result<Defragmented> {
        let name = file.display();
        let failed = |error: sqlx::Error| Error::Open(format!("cannot defragment {name}: {error}"));
        if !file.is_file() {
            return Err(Error::Open(format!("cannot defragment {name}: the file does not exist")));
        }
        let _lock = FileLock::acquire(file)?;
        drop(SqliteView::of_database(file).await?);
        let mut options = Self::options(file).create_if_missing(false).pragma("temp_store", "FILE");
        if let Some(folder) = file.parent().and_then(Path::to_str).filter(|folder| !folder.is_empty()) {
            // The folder for temporary files of the system may be too small for the copy.
            options = options.pragma("temp_store_directory", format!("'{}'", folder.replace('\'', "''")));
        }
        let mut connection = options.connect().await.map_err(failed)?;
        let bytes_before = read::size(&mut connection).await?.total;
        vacuum(&mut connection).await.map_err(failed)?;
        let bytes_after = read::size(&mut connection).await?.total;
        connection.close().await.map_err(failed)?;
        Ok(Defragmented { bytes_before, bytes_after })
    }
}

async fn vacuum(connection: &mut SqliteConnection) -> sqlx::Result<()> {
    sqlx::raw_sql("VACUUM").execute(&mut *connection).await?;
    // The file has its new size only when it contains the pages in the WAL.
    sqlx::raw_sql("PRAGMA wal_checkpoint(TRUNCATE)").execute(connection).await.map(drop)
}
