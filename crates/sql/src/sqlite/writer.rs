//! The connection for writes to the log, used by one caller at a time.
//!
//! It is one of rusqlite, which binds values without copying them twice and steps a prepared statement for each row
//! (docs/adr/0013). Those that read values and all rows ([`super::readers`]) and that fill a new file ([`super::load`]) are
//! also rusqlite's, all others sqlx's.
//!
//! After a failure the next caller opens a new connection. On some errors, for example of the disk, SQLite rolls the
//! transaction back by itself, so it is unknown whether the failed connection is still in a transaction.

use std::{path::PathBuf, sync::Arc};

use rusqlite::{Connection, OpenFlags, Result};
use tokio::sync::{Mutex, MutexGuard};

use super::{BUSY_TIMEOUT, PRAGMAS, identity::Identity};
use crate::Durability;
use orlop_core::{log, supervise};

/// How the connection is opened.
pub(super) struct Settings {
    pub(super) file: PathBuf,
    pub(super) durability: Durability,
    pub(super) identity: Arc<Identity>,
}

pub(super) struct Writer {
    settings: Arc<Settings>,
    /// `None` after a failure.
    connection: Mutex<Option<Connection>>,
}

/// Exclusive use of the connection.
pub(super) struct WriterGuard<'a>(MutexGuard<'a, Option<Connection>>);

impl Settings {
    /// Opens a connection to an existing database. The process ends if the file was replaced.
    pub(super) fn connect(&self) -> Result<Connection> {
        let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
        let connection = Connection::open_with_flags(&self.file, flags)?;
        // Before anything is read: a connection to another file would use the WAL of this one.
        self.identity.check();
        connection.busy_timeout(BUSY_TIMEOUT)?;
        connection.pragma_update(None, "synchronous", self.synchronous())?;
        for (name, value) in PRAGMAS {
            // Some of these return their new value.
            connection.execute_batch(&format!("PRAGMA {name} = {value}"))?;
        }
        Ok(connection)
    }

    /// Opens a connection that cannot write.
    pub(super) fn connect_to_read(&self) -> Result<Connection> {
        let connection = self.connect()?;
        connection.pragma_update(None, "query_only", "ON")?;
        Ok(connection)
    }

    fn synchronous(&self) -> &'static str {
        match self.durability {
            Durability::Synced => "FULL",
            Durability::Unsynced => "OFF",
        }
    }
}

impl Writer {
    pub(super) fn new(settings: Arc<Settings>, connection: Connection) -> Self {
        Self { settings, connection: Mutex::new(Some(connection)) }
    }

    /// Waits for exclusive use of the connection. Fails if a new connection cannot be opened.
    pub(super) async fn lock(&self) -> Result<WriterGuard<'_>> {
        let mut connection = self.connection.lock().await;
        if connection.is_none() {
            let settings = Arc::clone(&self.settings);
            *connection = Some(blocking(move || settings.connect()).await?);
        }
        Ok(WriterGuard(connection))
    }

    /// Blocks all writes until the guard is dropped.
    pub(super) async fn block(&self) -> WriterGuard<'_> {
        WriterGuard(self.connection.lock().await)
    }
}

impl WriterGuard<'_> {
    /// Runs work on the connection.
    ///
    /// # Cancel safety
    ///
    /// The work goes on if the future is dropped. The next caller opens a new connection then, and SQLite's lock makes it
    /// wait for the end of the work.
    pub(super) async fn run<T, W>(mut self, work: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&mut Connection) -> Result<T> + Send + 'static,
    {
        let connection = self.0.take().expect("`Writer::lock` opens the connection");
        let (connection, done) = run(connection, work).await?;
        *self.0 = Some(connection);
        Ok(done)
    }
}

/// Runs work on a connection, on a thread where it may block, and returns the connection with the result. After an error
/// the connection is closed.
pub(super) async fn run<T, W>(mut connection: Connection, work: W) -> Result<(Connection, T)>
where
    T: Send + 'static,
    W: FnOnce(&mut Connection) -> Result<T> + Send + 'static,
{
    blocking(move || work(&mut connection).map(|done| (connection, done))).await
}

pub(super) async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    let ended = || Err(rusqlite::Error::ToSqlConversionFailure("the server is shutting down".into()));
    supervise::blocking(work).await.unwrap_or_else(ended)
}

pub(super) fn unavailable(error: rusqlite::Error) -> log::Error {
    log::Error::Unavailable(error.to_string())
}
