//! Receives notifications of other instances' appends through LISTEN. If a notification is lost, polling finds the
//! append later, so no event is lost.
//!
//! An instance that appends all the time does not listen: each of its appends returns the changes of the others. Waking
//! a listener costs as much as a small append ([adr/0011](../../../../docs/adr/0011-appends-behind-other-instances.md)).

use std::{
    sync::{
        Arc,
        atomic::{AtomicU32, Ordering},
    },
    time::Duration,
};

use sqlx::{
    Connection as _,
    postgres::{PgListener, PgNotification, PgPoolOptions},
};
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, MissedTickBehavior, interval, interval_at, sleep, timeout},
};
use tracing::{debug, info};

use super::connection::{Database, SESSION_SETTINGS, with_timeout, within};
use orlop_core::{supervise::vital, types::Revision};

/// Pause before listening again after a failure.
const RETRY_PAUSE: Duration = Duration::from_secs(1);
/// Interval in which the connection is checked: a server that is gone without a trace would never notify.
const CHECK_INTERVAL: Duration = Duration::from_secs(10);
/// Time for the server to answer the check.
const ANSWER_MAX: Duration = Duration::from_secs(5);
/// Interval in which own appends are counted.
const COUNT_INTERVAL: Duration = Duration::from_millis(10);
/// Number of own appends per interval from which on this instance does not listen.
const APPENDS_MIN: u32 = 3;

pub(super) struct Listener {
    heads: watch::Receiver<Revision>,
    own: Arc<OwnAppends>,
    task: JoinHandle<()>,
}

/// The appends of this instance.
#[derive(Default)]
struct OwnAppends {
    /// Number of appends since the last count.
    count: AtomicU32,
    /// Notified by the first append after a count.
    started: Notify,
    /// Notified when this instance listens again: it has missed notifications.
    missed: Notify,
}

impl Listener {
    pub(super) fn start(database: Database, channel: String) -> Self {
        let (sender, heads) = watch::channel(Revision(0));
        let own = Arc::<OwnAppends>::default();
        let task = vital("the listener for appends", run(database, channel, sender, Arc::clone(&own)));
        Self { heads, own, task }
    }

    /// Counts an append of this instance.
    pub(super) fn note_append(&self) {
        if self.own.count.fetch_add(1, Ordering::Relaxed) == 0 {
            self.own.started.notify_one();
        }
    }

    /// Waits for a notification of a revision above `seen` and returns it, or `None` after `max_wait` or if
    /// notifications may have been missed.
    pub(super) async fn notified_above(&self, seen: Revision, max_wait: Duration) -> Option<Revision> {
        let mut heads = self.heads.clone();
        let notified = async {
            let head = heads.wait_for(|head| *head > seen).await.map(|head| *head);
            match head {
                Ok(head) => head,
                // The listening task has ended. The caller polls after the timeout.
                Err(_) => std::future::pending().await,
            }
        };
        tokio::select! {
            biased;
            head = notified => Some(head),
            () = self.own.missed.notified() => None,
            () = sleep(max_wait) => None,
        }
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

async fn run(database: Database, channel: String, sender: watch::Sender<Revision>, own: Arc<OwnAppends>) {
    loop {
        match listen(&database, &channel, &sender, &own).await {
            Ok(()) => info!("the connection that listens for appends was lost; reconnecting"),
            Err(error) => debug!(%error, "LISTEN failed; polling the log"),
        }
        sleep(RETRY_PAUSE).await;
    }
}

/// Listens until the connection fails or another server has become the primary.
///
/// sqlx's listener opens its connection itself, so the primary is found by another connection before, and the session
/// is set up here.
async fn listen(
    database: &Database,
    channel: &str,
    sender: &watch::Sender<Revision>,
    own: &OwnAppends,
) -> sqlx::Result<()> {
    let found = database.find().await?;
    let pool = PgPoolOptions::new().max_connections(1).max_lifetime(None).idle_timeout(None);
    // The connection is closed, not checked and kept, because the pool is dropped too.
    let pool = pool.after_release(|_, _| Box::pin(async { Ok(false) }));
    let pool = pool.acquire_timeout(Duration::from_secs(5)).connect_lazy_with(found.options);
    // The server may be gone.
    let _ = timeout(Duration::from_secs(1), found.connection.close()).await;
    // On the heap, because sqlx's future is large.
    let listening = Box::pin(async {
        let mut listener = with_timeout(PgListener::connect_with(&pool)).await?;
        listener.eager_reconnect(false);
        with_timeout(sqlx::raw_sql(SESSION_SETTINGS).execute(&mut listener)).await?;
        with_timeout(listener.listen(channel)).await?;
        // The server may lack a revision of which another one notified.
        sender.send_replace(Revision(0));
        receive(listener, channel, sender, own).await
    });
    database.unless_superseded(found.generation, listening).await
}

/// Passes on the revisions of notifications until the connection fails. Does not listen while this instance appends all
/// the time.
async fn receive(
    mut listener: PgListener,
    channel: &str,
    sender: &watch::Sender<Revision>,
    own: &OwnAppends,
) -> sqlx::Result<()> {
    let (mut is_listening, mut is_counting) = (true, false);
    let mut counts = interval(COUNT_INTERVAL);
    counts.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut checks = interval_at(Instant::now() + CHECK_INTERVAL, CHECK_INTERVAL);
    checks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        // Dropping `try_recv` loses nothing: what has been read of a message stays in the connection's buffer.
        tokio::select! {
            notification = listener.try_recv() => match notification? {
                Some(notification) => pass_on(&notification, sender),
                None => return Ok(()),
            },
            _ = checks.tick() => {
                within(ANSWER_MAX, sqlx::query("SELECT 1").execute(&mut listener)).await?;
            }
            () = own.started.notified(), if !is_counting => is_counting = true,
            _ = counts.tick(), if is_counting => {
                let appends = own.count.swap(0, Ordering::Relaxed);
                is_counting = appends > 0;
                if is_listening && appends >= APPENDS_MIN {
                    with_timeout(listener.unlisten(channel)).await?;
                    is_listening = false;
                } else if !is_listening && appends == 0 {
                    with_timeout(listener.listen(channel)).await?;
                    is_listening = true;
                    own.missed.notify_one();
                }
            }
        }
    }
}

fn pass_on(notification: &PgNotification, sender: &watch::Sender<Revision>) {
    if let Ok(head) = notification.payload().parse() {
        sender.send_if_modified(|newest| {
            let is_new = Revision(head) != *newest;
            *newest = Revision(head);
            is_new
        });
    }
}
