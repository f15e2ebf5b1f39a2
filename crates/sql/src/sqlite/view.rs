//! A read-only snapshot of a log.

use std::{
    path::{Path, PathBuf},
    time::Duration,
};

use async_trait::async_trait;
use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use super::{
    integrity::{is_damage, refuse_damage, unreadable},
    load::with_suffix,
    read,
};
use crate::migrations;
use crate::rows::{check_schema, unavailable};
use orlop_core::{
    log::{Error, History, Meta, Page, Result, Visit, WithPrev},
    types::{KeyRange, Revision},
};

/// Maximum time that a view waits for a lock of SQLite, for example while a server opens the file.
const BUSY_TIMEOUT: Duration = Duration::from_secs(5);

/// A connection with a read transaction, or with a file that no process writes.
pub struct SqliteView {
    pub(super) connection: Mutex<SqliteConnection>,
    /// The file's name.
    pub(super) name: String,
    /// The file, if it was opened without a WAL. If a WAL exists later, a server has started to write.
    pub(super) file_without_wal: Option<PathBuf>,
}

impl SqliteView {
    /// Opens a database file that no server uses, without locks and without writing or creating any file.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] with the name of the file, if it is not a database of this version of Orlop.
    pub async fn of_file(file: &Path) -> Result<Self> {
        let options = SqliteConnectOptions::new().filename(file).read_only(true).immutable(true);
        let name = file.display().to_string();
        let connection = open(&name, options).await?;
        Ok(Self { connection: Mutex::new(connection), name, file_without_wal: None })
    }

    /// Opens the database of a server, which may be running, including its WAL. Writes nothing to the database.
    ///
    /// # Errors
    ///
    /// The same as [`SqliteView::of_file`], and [`Error::Corrupt`] if the database is damaged.
    pub async fn of_database(file: &Path) -> Result<Self> {
        let name = file.display().to_string();
        let failed = |error: std::io::Error| Error::Open(format!("cannot open {name}: {error}"));
        if !std::fs::metadata(file).map_err(failed)?.is_file() {
            return Err(Error::Open(format!("cannot open {name}: it is not a file")));
        }
        // SQLite may create a WAL and a shared-memory file when it reads a database. The option immutable prevents
        // that, and is possible only without a WAL.
        let has_wal = has_wal(file) || with_suffix(file, "-shm").exists();
        let options = SqliteConnectOptions::new().filename(file).read_only(true).immutable(!has_wal);
        let mut connection = open(&name, options.busy_timeout(BUSY_TIMEOUT)).await?;
        // The first read of the transaction takes the snapshot.
        let begin = sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut connection).await;
        begin.map_err(unreadable)?;
        Ok(Self { connection: Mutex::new(connection), name, file_without_wal: (!has_wal).then(|| file.to_owned()) })
    }

    /// Checks every page of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if a page is inconsistent.
    pub async fn refuse_damage(&self) -> Result<()> {
        refuse_damage(&mut *self.connection.lock().await).await
    }

    /// Opens a snapshot of the current state of a database that is in use. Until it is dropped, later writes remain in
    /// the WAL.
    pub(super) async fn now(options: &SqliteConnectOptions) -> Result<Self> {
        let name = options.get_filename().display().to_string();
        let mut connection = options.connect().await.map_err(unavailable)?;
        // The first read of the transaction takes the snapshot of the log.
        let begin = sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut connection).await;
        begin.map_err(unavailable)?;
        Ok(Self { connection: Mutex::new(connection), name, file_without_wal: None })
    }
}

/// Opens a database of this version of Orlop.
async fn open(name: &str, options: SqliteConnectOptions) -> Result<SqliteConnection> {
    let refused = |what: &str, error: sqlx::Error| {
        if is_damage(&error) {
            Error::Corrupt(format!("{name}: {error}"))
        } else {
            Error::Open(format!("{what}: {error}"))
        }
    };
    let mut connection = options
        .disable_statement_logging()
        .connect()
        .await
        .map_err(|error| refused(&format!("cannot open {name}"), error))?;
    let versions: Vec<i64> = sqlx::query_scalar("SELECT version FROM _sqlx_migrations ORDER BY version")
        .fetch_all(&mut connection)
        .await
        .map_err(|error| refused(&format!("{name} is not an Orlop database"), error))?;
    check_schema(name, &versions, &migrations::sqlite())?;
    Ok(connection)
}

pub(super) fn has_wal(file: &Path) -> bool {
    with_suffix(file, "-wal").metadata().is_ok_and(|metadata| metadata.len() > 0)
}

#[async_trait]
impl History for SqliteView {
    async fn meta(&self) -> Result<Meta> {
        read::meta(&mut *self.connection.lock().await).await
    }

    async fn replay(&self, visit: &mut Visit<'_>) -> Result<Meta> {
        read::replay(&mut *self.connection.lock().await, visit).await
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        read::changes(&mut *self.connection.lock().await, from, to, range, prev).await
    }
}
