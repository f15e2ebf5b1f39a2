//! Ends leases whose time is over. Only asks: the writer looks again, in its order, before it deletes.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, warn};

use super::{
    Error, Shared,
    writer::{Request, WriteQueue},
};
use crate::{
    log::{self, BEAT_INTERVAL, Touch},
    types::LeaseId,
};

/// Leases ended before the next look at the clock, as many as etcd ends at once.
const ROUND_LEASES_MAX: usize = 500;
/// How much later than the one that does it first another instance ends a lease.
const OTHERS_WAIT: Duration = Duration::from_secs(2);
/// Pause when the writer would not take an expiry.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

pub(super) async fn run(shared: Arc<Shared>, queue: WriteQueue, mut stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            shared.pulses.expiry.rest();
            wait_for_deadline(&shared).await;
            shared.pulses.expiry.beat();
            let expired = match over(&shared).await {
                Ok(expired) => expired,
                Err(error) => {
                    warn!(%error, "leases cannot be looked at; trying again");
                    sleep(RETRY_PAUSE).await;
                    continue;
                }
            };
            for id in expired {
                shared.pulses.expiry.beat();
                match queue.submit(Request::Expire(id)).await {
                    Ok(_) => {
                        shared.metrics.store.leases_expired.inc();
                        debug!(lease_id = ?id, "lease expired");
                    }
                    Err(Error::Stopped) => return,
                    Err(error) => {
                        warn!(lease_id = ?id, %error, "lease expiry failed; it is tried again");
                        sleep(RETRY_PAUSE).await;
                    }
                }
            }
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// The leases to end. Where instances share the log it has the word: another may have renewed them.
async fn over(shared: &Shared) -> log::Result<Vec<LeaseId>> {
    let expired = shared.leases.lock().expired(due(shared), ROUND_LEASES_MAX);
    let Some(log) = shared.log.shared().filter(|_| !expired.is_empty()) else { return Ok(expired) };
    // After a silence of all instances the deadlines have to be moved on first.
    if shared.silent_for() > 2 * BEAT_INTERVAL {
        shared.beat(log).await?;
    }
    let asked = Instant::now();
    let logged = log.leases(&expired, Touch::Look).await?;
    shared.set_lease_deadlines(&logged, asked);
    let now = Instant::now();
    if logged.len() < expired.len() {
        // Those that are gone there were ended by another, of which this instance is about to hear.
        shared.catch_up().await?;
    }
    let leases = shared.leases.lock();
    Ok(expired.into_iter().filter(|id| leases.is_expired(*id, now)).collect())
}

/// The time by which a lease must have been over for this instance to end it.
fn due(shared: &Shared) -> Instant {
    let now = Instant::now();
    if shared.members.leads() { now } else { now.checked_sub(OTHERS_WAIT).unwrap_or(now) }
}

async fn wait_for_deadline(shared: &Shared) {
    loop {
        let changed = shared.lease_deadline.notified();
        let wait = Instant::now() - due(shared);
        let deadline = shared.leases.lock().next_deadline().map(|deadline| deadline + wait);
        match deadline {
            Some(deadline) if deadline <= Instant::now() => return,
            Some(deadline) => tokio::select! {
                biased;
                () = sleep_until(deadline) => {}
                () = changed => {}
            },
            None => changed.await,
        }
    }
}
