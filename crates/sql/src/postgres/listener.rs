//! Receives notifications of other instances' appends through LISTEN. If a notification is lost, polling finds the
//! append later, so no event is lost.

use std::time::Duration;

use sqlx::{
    Connection as _,
    postgres::{PgListener, PgPoolOptions},
};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tracing::{debug, info};

use super::connection::Database;
use orlop_core::{supervise::vital, types::Revision};

/// Pause before listening again after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Listener {
    heads: watch::Receiver<Revision>,
    task: JoinHandle<()>,
}

impl Listener {
    pub(super) fn start(database: Database, channel: String) -> Self {
        let (sender, heads) = watch::channel(Revision(0));
        Self { heads, task: vital("the listener for appends", run(database, channel, sender)) }
    }

    /// Waits for a notification of a revision above `seen` and returns it, or `None` after `max_wait`.
    pub(super) async fn notified_above(&self, seen: Revision, max_wait: Duration) -> Option<Revision> {
        let mut heads = self.heads.clone();
        timeout(max_wait, async {
            let head = heads.wait_for(|head| *head > seen).await.map(|head| *head);
            match head {
                Ok(head) => head,
                // The listening task has ended. The caller polls after the timeout.
                Err(_) => std::future::pending().await,
            }
        })
        .await
        .ok()
    }

    pub(super) fn stop(&self) {
        self.task.abort();
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.stop();
    }
}

async fn run(database: Database, channel: String, sender: watch::Sender<Revision>) {
    loop {
        match listen(&database, &channel, &sender).await {
            Ok(()) => info!("the connection that listens for appends was lost; reconnecting"),
            Err(error) => debug!(%error, "LISTEN failed; polling the log"),
        }
        sleep(RETRY_PAUSE).await;
    }
}

/// Listens until the connection fails or another server has become the primary.
///
/// sqlx's listener opens its connection itself, so the primary is found by another connection before.
async fn listen(database: &Database, channel: &str, sender: &watch::Sender<Revision>) -> sqlx::Result<()> {
    let found = database.find().await?;
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
    // The connection is closed, not checked and kept, because the pool is dropped too.
    let pool = pool.after_release(|_, _| Box::pin(async { Ok(false) }));
    let pool = pool.acquire_timeout(Duration::from_secs(5)).connect_lazy_with(found.options);
    // The server may be gone.
    let _ = timeout(Duration::from_secs(1), found.connection.close()).await;
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.eager_reconnect(false);
    listener.listen(channel).await?;
    let receiving = receive(listener, sender);
    database.unless_superseded(found.timeline, receiving).await
}

/// Passes on the revisions of notifications until the connection fails.
async fn receive(mut listener: PgListener, sender: &watch::Sender<Revision>) -> sqlx::Result<()> {
    while let Some(notification) = listener.try_recv().await? {
        if let Ok(head) = notification.payload().parse() {
            sender.send_if_modified(|newest| {
                let is_new = Revision(head) != *newest;
                *newest = Revision(head);
                is_new
            });
        }
    }
    Ok(())
}
