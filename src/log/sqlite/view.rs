//! A log that does not change while it is read.

use std::path::Path;

use async_trait::async_trait;
use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use super::read;
use crate::{
    log::{Error, History, Meta, Page, Result, Visit, WithPrev, rows::unavailable},
    types::{KeyRange, Revision},
};

/// One connection, with a transaction of its own or on a file that nobody writes.
pub struct SqliteView(Mutex<SqliteConnection>);

impl SqliteView {
    /// A database file that nobody serves, as it is: no lock is taken and nothing is written, not even beside it.
    ///
    /// # Errors
    ///
    /// [`Error::Open`], naming the file, if it is no database of Orlop's or one of another version's.
    pub async fn of_file(file: &Path) -> Result<Self> {
        let name = file.display();
        let options = SqliteConnectOptions::new().filename(file).read_only(true).immutable(true);
        let mut connection = options
            .disable_statement_logging()
            .connect()
            .await
            .map_err(|error| Error::Open(format!("cannot open {name}: {error}")))?;
        let versions: Vec<i64> = sqlx::query_scalar("SELECT version FROM _sqlx_migrations ORDER BY version")
            .fetch_all(&mut connection)
            .await
            .map_err(|error| Error::Open(format!("{name} is no database of orlop's: {error}")))?;
        let known: Vec<i64> = sqlx::migrate!("migrations/sqlite").iter().map(|migration| migration.version).collect();
        if versions != known {
            return Err(Error::Open(format!(
                "{name} was written by another version of orlop: it has the schema {}, this one reads the schema {}",
                versions.last().unwrap_or(&0),
                known.last().unwrap_or(&0),
            )));
        }
        Ok(Self(Mutex::new(connection)))
    }

    /// A database that is written to, as it is now. What is written later stays in the WAL while this is held.
    pub(super) async fn now(options: &SqliteConnectOptions) -> Result<Self> {
        let mut connection = options.connect().await.map_err(unavailable)?;
        // The moment is that of the first read.
        let begin = sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut connection).await;
        begin.map_err(unavailable)?;
        Ok(Self(Mutex::new(connection)))
    }
}

#[async_trait]
impl History for SqliteView {
    async fn meta(&self) -> Result<Meta> {
        read::meta(&mut *self.0.lock().await).await
    }

    async fn replay(&self, visit: &mut Visit<'_>) -> Result<Meta> {
        read::replay(&mut *self.0.lock().await, visit).await
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        read::changes(&mut *self.0.lock().await, from, to, range, prev).await
    }
}
