//! A connection that is kept for one purpose, outside of the pool.

use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use tokio::{
    sync::{Mutex, MutexGuard},
    time::timeout,
};

use super::{connection::Database, primary::Generation};

/// A connection for one purpose. It is opened at the first use, and again after it failed or another server has become
/// the primary.
#[derive(Default)]
pub(super) struct Dedicated(Mutex<Option<(PgConnection, Generation)>>);

/// Exclusive use of a dedicated connection. When dropped, it closes the connection unless [`InUse::keep`] was called,
/// so that the next use does not receive a connection in an unknown state.
pub(super) struct InUse<'a> {
    slot: MutexGuard<'a, Option<(PgConnection, Generation)>>,
    pub(super) connection: PgConnection,
    pub(super) generation: Generation,
}

impl Dedicated {
    pub(super) async fn take(&self, database: &Database) -> sqlx::Result<InUse<'_>> {
        let mut slot = self.0.lock().await;
        let (connection, generation) = match slot.take() {
            Some((connection, generation)) if generation >= database.generation() => (connection, generation),
            Some(_) | None => {
                let found = database.find().await?;
                (found.connection, found.generation)
            }
        };
        Ok(InUse { slot, connection, generation })
    }

    pub(super) async fn close(&self) {
        if let Some((connection, _)) = self.0.lock().await.take() {
            let _ = timeout(Duration::from_secs(1), connection.close()).await;
        }
    }
}

impl InUse<'_> {
    pub(super) fn keep(self) {
        let Self { mut slot, connection, generation } = self;
        *slot = Some((connection, generation));
    }
}
