//! Submits an Expire request for each expired lease. The writer checks again, in log order, before it deletes anything.

use std::{sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use tokio::{
    sync::watch,
    time::{Instant, sleep, sleep_until},
};
use tracing::{debug, info, warn};

use super::{error::Error, queue::WriteQueue, shared::Shared, tasks::until_stopped, write_request::Request};
use crate::{
    auth::Caller,
    log::{self, HEARTBEAT_INTERVAL, Touch},
    types::LeaseId,
};

/// Maximum number of leases expired per round, as in etcd.
const ROUND_LEASES_MAX: usize = 500;
/// Number of leases whose ends can share a commit.
const SHARED_COMMIT: usize = 64;
/// Extra time that an instance waits before it expires a lease if it is not the leader.
const NON_LEADER_DELAY: Duration = Duration::from_secs(2);
/// Pause after a failed attempt.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

/// Expires leases until stopped.
pub(super) async fn run(shared: Arc<Shared>, queue: WriteQueue, stop: watch::Receiver<bool>) {
    let work = async {
        let mut is_failing = false;
        loop {
            shared.pulses.expiry.rest();
            wait_for_deadline(&shared).await;
            shared.pulses.expiry.beat();
            let expired = match leases_to_expire(&shared).await {
                Ok(expired) => expired,
                Err(error) => {
                    if !is_failing {
                        warn!(%error, "cannot read lease deadlines; trying again");
                    }
                    is_failing = true;
                    sleep(RETRY_PAUSE).await;
                    continue;
                }
            };
            if std::mem::take(&mut is_failing) {
                info!("lease deadlines can be read again");
            }
            let queue = &queue;
            let end = |id| async move { (id, queue.submit(&Caller::Server, Request::Expire(id)).await) };
            let mut ends = stream::iter(expired).map(end).buffer_unordered(SHARED_COMMIT);
            let mut has_failed = false;
            while let Some((id, ended)) = ends.next().await {
                shared.pulses.expiry.beat();
                match ended {
                    Ok(_) => {
                        shared.metrics.store.leases_expired.inc();
                        debug!(lease_id = ?id, "lease expired");
                    }
                    Err(Error::Stopped) => return,
                    // During an outage all of them fail.
                    Err(_) if has_failed => {}
                    Err(error) => {
                        warn!(lease_id = ?id, %error, "cannot expire a lease; trying again");
                        has_failed = true;
                    }
                }
            }
            if has_failed {
                sleep(RETRY_PAUSE).await;
            }
        }
    };
    until_stopped(stop, work).await;
}

/// Returns the leases to expire. A shared log is queried first, because another instance may have renewed them.
async fn leases_to_expire(shared: &Shared) -> log::Result<Vec<LeaseId>> {
    let expired = shared.leases.lock().expired(deadline_max(shared), ROUND_LEASES_MAX);
    let Some(log) = shared.log.shared().filter(|_| !expired.is_empty()) else { return Ok(expired) };
    // This instance was paused. If no other instance was alive meanwhile, the heartbeat extends the deadlines.
    if shared.members.since_last_beat() > 2 * HEARTBEAT_INTERVAL {
        shared.beat(log).await?;
    }
    let queried_at = Instant::now();
    let logged = log.leases(&expired, Touch::Read).await?;
    shared.set_lease_deadlines(&logged, queried_at);
    let now = Instant::now();
    if logged.len() < expired.len() {
        // Another instance revoked or expired the leases that are no longer in the log.
        shared.catch_up().await?;
    }
    let leases = shared.leases.lock();
    Ok(expired.into_iter().filter(|id| leases.is_expired(*id, now)).collect())
}

/// Returns the latest deadline of the leases that this instance may expire now.
fn deadline_max(shared: &Shared) -> Instant {
    let now = Instant::now();
    if shared.members.is_leader() { now } else { now.checked_sub(NON_LEADER_DELAY).unwrap_or(now) }
}

/// Waits until a lease is due for this instance.
async fn wait_for_deadline(shared: &Shared) {
    loop {
        let changed = shared.lease_deadline.notified();
        let wait = Instant::now() - deadline_max(shared);
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
