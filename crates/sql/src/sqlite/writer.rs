//! The connection that writes, which one at a time has.
//!
//! It is given up when anything fails on it, and opened anew for the next: after a statement that SQLite has rolled back by
//! itself, as it does when the disk fails, nobody has to know what is left of a transaction.

use sqlx::{ConnectOptions as _, Connection as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::{Mutex, MutexGuard};
use tracing::debug;

pub(super) struct Writer {
    options: SqliteConnectOptions,
    slot: Mutex<Slot>,
}

pub(super) struct Slot {
    connection: Option<SqliteConnection>,
    /// Whoever had it last was done with it.
    is_sound: bool,
}

/// The right to write. Unless it is kept, as when it is dropped amid something, the connection is given up.
pub(super) struct Held<'a>(MutexGuard<'a, Slot>);

impl Writer {
    pub(super) fn new(options: SqliteConnectOptions, connection: SqliteConnection) -> Self {
        Self { options, slot: Mutex::new(Slot { connection: Some(connection), is_sound: true }) }
    }

    /// Waits until nobody else has it. An error means that nothing can be written.
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

    /// Keeps all who would write waiting until the guard is dropped.
    pub(super) async fn pause(&self) -> MutexGuard<'_, Slot> {
        self.slot.lock().await
    }
}

impl Held<'_> {
    pub(super) fn connection(&mut self) -> &mut SqliteConnection {
        self.0.connection.as_mut().expect("it was opened before it was held")
    }

    /// Says that all that was begun on the connection is ended.
    pub(super) fn keep(mut self) {
        self.0.is_sound = true;
    }
}
