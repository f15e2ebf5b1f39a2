//! The connection for writes to the archive, used by one caller at a time.
//!
//! After a failure the next caller closes it and opens a new one. On some errors, for example of the disk, SQLite rolls
//! the transaction back by itself, so it is unknown whether the failed connection is still in a transaction.

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::{Mutex, MutexGuard};
use tracing::debug;

pub(super) struct Writer {
    options: SqliteConnectOptions,
    slot: Mutex<Slot>,
}

pub(super) struct Slot {
    connection: Option<SqliteConnection>,
    /// Whether the previous caller completed its work without an error.
    is_usable: bool,
}

/// Exclusive use of the connection. Unless [`Self::keep`] is called, the next caller closes the connection and opens a
/// new one.
pub(super) struct WriterGuard<'a>(MutexGuard<'a, Slot>);

impl Writer {
    pub(super) fn new(options: SqliteConnectOptions) -> Self {
        Self { options, slot: Mutex::new(Slot { connection: None, is_usable: false }) }
    }

    /// Waits for exclusive use of the connection. Fails if a new connection cannot be opened.
    pub(super) async fn lock(&self) -> sqlx::Result<WriterGuard<'_>> {
        let mut slot = self.slot.lock().await;
        if !slot.is_usable
            && let Some(failed) = slot.connection.take()
            && let Err(error) = failed.close().await
        {
            debug!(%error, "cannot close a connection after a failure");
        }
        if slot.connection.is_none() {
            slot.connection = Some(self.options.connect().await?);
        }
        slot.is_usable = false;
        Ok(WriterGuard(slot))
    }

    pub(super) fn options(&self) -> &SqliteConnectOptions {
        &self.options
    }

    /// Blocks all writes until the guard is dropped.
    pub(super) async fn block(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().await
    }
}

impl Slot {
    /// Takes the connection, to close it.
    pub(super) fn take(&mut self) -> Option<SqliteConnection> {
        self.connection.take()
    }

    pub(super) fn put(&mut self, connection: SqliteConnection) {
        (self.connection, self.is_usable) = (Some(connection), true);
    }
}

impl WriterGuard<'_> {
    pub(super) fn connection(&mut self) -> &mut SqliteConnection {
        self.0.connection.as_mut().expect("`Writer::lock` opens the connection")
    }

    /// Keeps the connection for the next caller. Call it when all statements and transactions have ended.
    pub(super) fn keep(mut self) {
        self.0.is_usable = true;
    }
}
