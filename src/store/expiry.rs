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

/// Leases ended before the next look at the clock, as many as etcd ends at once.
const ROUND_LEASES_MAX: usize = 500;
/// Pause when the writer would not take an expiry.
const RETRY_PAUSE: Duration = Duration::from_millis(500);

pub(super) async fn run(shared: Arc<Shared>, queue: WriteQueue, mut stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            wait_for_deadline(&shared).await;
            let expired = shared.leases.lock().expired(Instant::now(), ROUND_LEASES_MAX);
            for id in expired {
                match queue.submit(Request::Expire(id)).await {
                    Ok(_) => debug!(lease_id = ?id, "lease expired"),
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
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

async fn wait_for_deadline(shared: &Shared) {
    loop {
        let changed = shared.lease_deadline.notified();
        let deadline = shared.leases.lock().next_deadline();
        match deadline {
            Some(deadline) if deadline <= Instant::now() => return,
            Some(deadline) => tokio::select! {
                () = sleep_until(deadline) => {}
                () = changed => {}
            },
            None => changed.await,
        }
    }
}
