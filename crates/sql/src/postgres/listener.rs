//! Hears of others' appends by LISTEN. What is not heard is found by looking, so that a lost notification costs time and no
//! event.

use std::time::Duration;

use sqlx::postgres::{PgListener, PgPoolOptions};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{sleep, timeout},
};
use tracing::{debug, info};

use super::connection::Database;
use orlop_core::{supervise::vital, types::Revision};

/// Pause before listening is tried again where the server did not allow it.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

pub(super) struct Listener {
    told: watch::Receiver<Revision>,
    task: JoinHandle<()>,
}

impl Listener {
    pub(super) fn start(database: Database, channel: String) -> Self {
        let (tell, told) = watch::channel(Revision(0));
        Self { told, task: vital("the listener for appends", run(database, channel, tell)) }
    }

    /// Returns a revision beyond `seen` when one was told of, and nothing after `patience`.
    pub(super) async fn told_beyond(&self, seen: Revision, patience: Duration) -> Option<Revision> {
        let mut told = self.told.clone();
        timeout(patience, async {
            let head = told.wait_for(|told| *told > seen).await.map(|told| *told);
            match head {
                Ok(head) => head,
                // A sender that is gone tells nothing more; looking goes on.
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

async fn run(database: Database, channel: String, tell: watch::Sender<Revision>) {
    loop {
        match listen(&database, &channel, &tell).await {
            Ok(()) => info!("listening for appends again"),
            Err(error) => debug!(%error, "not listening; the log is looked at from time to time"),
        }
        sleep(RETRY_PAUSE).await;
    }
}

/// Returns when the connection broke.
async fn listen(database: &Database, channel: &str, tell: &watch::Sender<Revision>) -> sqlx::Result<()> {
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
    let pool = pool.acquire_timeout(Duration::from_secs(5)).connect_lazy_with(database.options());
    let mut listener = PgListener::connect_with(&pool).await?;
    listener.listen(channel).await?;
    while let Some(notification) = listener.try_recv().await? {
        if let Ok(head) = notification.payload().parse() {
            tell.send_if_modified(|told| {
                let further = Revision(head) != *told;
                *told = Revision(head);
                further
            });
        }
    }
    Ok(())
}
