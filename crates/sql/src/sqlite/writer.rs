//! The connection for writes, used by one caller at a time.
//!
//! It is closed when anything fails on it, and the next caller opens a new one: SQLite rolls some transactions back by
//! itself, for example when the disk fails, so the state of the transaction would be unknown.

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::{Mutex, MutexGuard};
use tracing::debug;

pub(super) struct Writer {
    options: SqliteConnectOptions,
    slot: Mutex<Slot>,
}

pub(super) struct Slot {
    connection: Option<SqliteConnection>,
    /// The previous caller completed its work.
    is_sound: bool,
}

/// The guard of the connection. Unless [`Self::keep`] is called, dropping it closes the connection.
pub(super) struct Held<'a>(MutexGuard<'a, Slot>);

impl Writer {
    pub(super) fn new(options: SqliteConnectOptions, connection: SqliteConnection) -> Self {
        Self { options, slot: Mutex::new(Slot { connection: Some(connection), is_sound: true }) }
    }

    /// Waits for the connection. An error means that nothing can be written.
    pub(super) async fn hold(&self) -> sqlx::Result<Held<'_>> {
        let mut slot = self.slot.lock().await;
        if !slot.is_sound
            && let Some(failed) = slot.connection.take()
            && let Err(error) = failed.close().await
        {
            debug!(%error, "closing a connection that failed");
        }
        if slot.connection.is_none() {
            slot.connection = Some(self.options.connect().await?);
        }
        slot.is_sound = false;
        Ok(Held(slot))
    }

    /// Blocks all writes until the guard is dropped.
    pub(super) async fn pause(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().await
    }
}

impl Held<'_> {
    pub(super) fn connection(&mut self) -> &mut SqliteConnection {
        self.0.connection.as_mut().expect("opened before the lock was taken")
    }

    /// Keeps the connection: everything begun on it has ended.
    pub(super) fn keep(mut self) {
        self.0.is_sound = true;
    }
}
