//! The connections for reads of values, and of all rows at a start.
//!
//! They are rusqlite's: a statement is stepped for each row, and pairs and changes are built from SQLite's memory, without a
//! copy or a change of threads in between (docs/adr/0013).

use std::sync::Arc;

use parking_lot::Mutex;
use rusqlite::Connection;
use tokio::sync::Semaphore;

use super::{
    READERS_MAX,
    integrity::unreadable,
    writer::{Settings, blocking},
};
use orlop_core::log::{Connections, Error, Result};

pub(super) struct Readers {
    settings: Arc<Settings>,
    idle: Arc<Mutex<Vec<Connection>>>,
    /// One permit per connection that may be used.
    permits: Arc<Semaphore>,
}

impl Readers {
    pub(super) fn new(settings: Arc<Settings>) -> Self {
        Self { settings, idle: Arc::default(), permits: Arc::new(Semaphore::new(READERS_MAX as usize)) }
    }

    /// Runs a read on a free connection, on a thread where it may block.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if no connection can be opened, [`Error::Corrupt`] if the file is damaged, and the errors of
    /// `read`.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, a read that has begun goes on, and its connection is free after it.
    pub(super) async fn run<T, W>(&self, read: W) -> Result<T>
    where
        T: Send + 'static,
        W: FnOnce(&Connection) -> Result<T> + Send + 'static,
    {
        let permit = Arc::clone(&self.permits).acquire_owned().await;
        let permit = permit.map_err(|_| Error::Unavailable("the database is closed".to_owned()))?;
        let (settings, idle) = (Arc::clone(&self.settings), Arc::clone(&self.idle));
        let work = move || {
            let next = idle.lock().pop();
            let connection = next.map_or_else(|| settings.connect_to_read(), Ok)?;
            let read = read(&connection);
            idle.lock().push(connection);
            drop(permit);
            Ok::<_, rusqlite::Error>(read)
        };
        blocking(work).await.map_err(unreadable)?
    }

    pub(super) fn connections(&self) -> Connections {
        let used = READERS_MAX as usize - self.permits.available_permits();
        Connections { idle: self.idle.lock().len(), used }
    }

    /// Waits for the reads that have begun, and closes all connections.
    pub(super) async fn close(&self) {
        let all = self.permits.acquire_many(READERS_MAX).await;
        self.permits.close();
        drop(all);
        self.idle.lock().clear();
    }
}
