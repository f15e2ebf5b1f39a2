//! Connections for reads, opened on demand.
//!
//! sqlx's pool opens every connection with the options that it was given last. It does not ask for them when it needs a
//! connection, which is when the primary has to be searched and the password read, and it does not know to which server
//! an idle connection leads. This pool opens each connection to the current primary (see [`super::primary`]), and closes
//! those to a former one.

use std::{
    ops::{Deref, DerefMut},
    sync::Arc,
    time::Duration,
};

use parking_lot::Mutex;
use sqlx::{Connection as _, PgConnection};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    time::{Instant, timeout},
};

use super::{
    dedicated::answers,
    primary::{Generation, Primary},
};
use orlop_core::log::Connections;

/// Time after which an unused connection is closed.
const IDLE_MAX: Duration = Duration::from_secs(600);
/// Maximum time for a connection to become ready for the next query after a query was cancelled. The server ends a query
/// earlier. Until then the connection counts as used, so that cancelled queries are also limited in number.
const SETTLE_MAX: Duration = Duration::from_secs(12);

pub(super) struct Pool {
    /// The connection used last is at the end.
    idle: Mutex<Vec<Idle>>,
    /// One permit per connection in use.
    permits: Arc<Semaphore>,
    connections_max: usize,
    primary: Arc<Primary>,
}

struct Idle {
    connection: PgConnection,
    generation: Generation,
    since: Instant,
}

impl Pool {
    pub(super) fn new(connections_max: u32, primary: Arc<Primary>) -> Arc<Self> {
        let connections_max = usize::try_from(connections_max).unwrap_or(usize::MAX).min(Semaphore::MAX_PERMITS);
        Arc::new(Self {
            idle: Mutex::default(),
            permits: Arc::new(Semaphore::new(connections_max)),
            connections_max,
            primary,
        })
    }

    /// Waits for the right to use a connection. Returns `None` if the pool is closed or the time is over.
    pub(super) async fn permit(&self, max_wait: Duration) -> Option<OwnedSemaphorePermit> {
        timeout(max_wait, Arc::clone(&self.permits).acquire_owned()).await.ok()?.ok()
    }

    /// Takes an unused connection of the generation that answers. Closes those of earlier ones.
    pub(super) async fn take_idle(&self, generation: Generation) -> Option<PgConnection> {
        let Idle { mut connection, since, .. } = {
            let mut idle = self.idle.lock();
            idle.retain(|it| it.generation >= generation && it.since.elapsed() < IDLE_MAX);
            idle.pop()?
        };
        if answers(&mut connection, since).await {
            return Some(connection);
        }
        // What has dropped this connection, such as a firewall, may have dropped the others.
        self.close_idle();
        None
    }

    /// Closes the unused connections.
    pub(super) fn close_idle(&self) {
        self.idle.lock().clear();
    }

    pub(super) fn connections(&self) -> Connections {
        let used = self.connections_max.saturating_sub(self.permits.available_permits());
        Connections { idle: self.idle.lock().len(), used }
    }

    pub(super) async fn close(&self) {
        self.permits.close();
        let idle = std::mem::take(&mut *self.idle.lock());
        for it in idle {
            // A closing handshake may fail if the server is gone.
            let _ = it.connection.close().await;
        }
    }

    fn put_back(&self, connection: PgConnection, generation: Generation) {
        if !self.permits.is_closed() {
            self.idle.lock().push(Idle { connection, generation, since: Instant::now() });
        }
    }
}

/// A connection in use.
///
/// When dropped, it is checked in the background and then returned to the pool, because a query may have been
/// cancelled before its response was read. [`Pooled::keep`] returns it at once; [`Pooled::discard`] closes it.
pub(super) struct Pooled {
    connection: Option<PgConnection>,
    pub(super) generation: Generation,
    pool: Arc<Pool>,
    permit: Option<OwnedSemaphorePermit>,
}

impl Pooled {
    pub(super) fn new(
        connection: PgConnection,
        generation: Generation,
        pool: Arc<Pool>,
        permit: OwnedSemaphorePermit,
    ) -> Self {
        Self { connection: Some(connection), generation, pool, permit: Some(permit) }
    }

    /// Returns the connection, which has answered every query, to the pool.
    pub(super) fn keep(mut self) {
        if let Some(connection) = self.connection.take() {
            self.pool.put_back(connection, self.generation);
        }
    }

    /// Closes the connection.
    pub(super) fn discard(mut self) {
        self.connection = None;
    }
}

impl Deref for Pooled {
    type Target = PgConnection;

    fn deref(&self) -> &PgConnection {
        self.connection.as_ref().expect("only keep, discard and drop take it")
    }
}

impl DerefMut for Pooled {
    fn deref_mut(&mut self) -> &mut PgConnection {
        self.connection.as_mut().expect("only keep, discard and drop take it")
    }
}

impl Drop for Pooled {
    fn drop(&mut self) {
        let Some(mut connection) = self.connection.take() else { return };
        let (pool, generation, permit) = (Arc::clone(&self.pool), self.generation, self.permit.take());
        // Without a runtime the connection is closed.
        let Ok(runtime) = tokio::runtime::Handle::try_current() else { return };
        runtime.spawn(async move {
            let settling = timeout(SETTLE_MAX, connection.ping());
            let is_ready = tokio::select! {
                settled = settling => settled.is_ok_and(|answer| answer.is_ok()),
                () = pool.primary.superseded(generation) => false,
            };
            if is_ready {
                pool.put_back(connection, generation);
            }
            drop(permit);
        });
    }
}
