//! A connection that is kept for one purpose, outside of the pool.

use std::time::Duration;

use sqlx::{Connection as _, PgConnection};
use tokio::{
    sync::{Mutex, MutexGuard},
    time::{Instant, timeout},
};

use super::{
    connection::Database,
    primary::{Found, Generation},
};

/// Time without use after which a connection must answer before it is used: a pooler or an administrator may have closed it, or
/// the network may have lost it.
const UNUSED_MAX: Duration = Duration::from_secs(2);
/// Maximum time for this answer.
const ANSWER_MAX: Duration = Duration::from_secs(1);

/// A connection for one purpose. It is opened at the first use, and again after it failed or another server has become
/// the primary.
#[derive(Default)]
pub(super) struct Dedicated(Mutex<Option<Session>>);

struct Session {
    connection: PgConnection,
    generation: Generation,
    holds_lock: bool,
    last_used: Instant,
}

impl From<Found> for Session {
    fn from(Found { connection, generation, .. }: Found) -> Self {
        Self { connection, generation, holds_lock: false, last_used: Instant::now() }
    }
}

/// Exclusive use of a dedicated connection. When dropped, it closes the connection unless [`InUse::keep`] was called,
/// so that the next use does not receive a connection in an unknown state.
pub(super) struct InUse<'a> {
    slot: MutexGuard<'a, Option<Session>>,
    pub(super) connection: PgConnection,
    pub(super) generation: Generation,
    /// Whether the connection is in the transaction that holds the lock for appends.
    pub(super) holds_lock: bool,
    /// Whether the connection was opened for this use.
    pub(super) is_new: bool,
}

impl Dedicated {
    pub(super) fn of(found: Found) -> Self {
        Self(Mutex::new(Some(found.into())))
    }

    pub(super) async fn take(&self, database: &Database) -> sqlx::Result<InUse<'_>> {
        let mut slot = self.0.lock().await;
        // A former primary is left before the search for its successor.
        let current = match slot.take().filter(|session| session.generation >= database.generation()) {
            Some(session) => session.answering().await,
            None => None,
        };
        let is_new = current.is_none();
        let Session { connection, generation, holds_lock, .. } = match current {
            Some(session) => session,
            None => database.find_dedicated().await?.into(),
        };
        Ok(InUse { slot, connection, generation, holds_lock, is_new })
    }

    pub(super) async fn close(&self) {
        if let Some(session) = self.0.lock().await.take() {
            let _ = timeout(Duration::from_secs(1), session.connection.close()).await;
        }
    }
}

impl Session {
    /// Returns the session, unless it was unused for long and does not answer.
    async fn answering(mut self) -> Option<Self> {
        answers(&mut self.connection, self.last_used).await.then_some(self)
    }
}

/// Returns whether a connection can be used. One that was used a moment ago is not asked.
pub(super) async fn answers(connection: &mut PgConnection, last_used: Instant) -> bool {
    if last_used.elapsed() < UNUSED_MAX {
        return true;
    }
    timeout(ANSWER_MAX, connection.ping()).await.is_ok_and(|answer| answer.is_ok())
}

impl InUse<'_> {
    pub(super) fn keep(self) {
        let Self { mut slot, connection, generation, holds_lock, .. } = self;
        *slot = Some(Session { connection, generation, holds_lock, last_used: Instant::now() });
    }
}
