//! Watches the source after the cut over: whoever still writes there is named, because nobody else would notice.

use std::{collections::BTreeSet, convert::Infallible, time::Duration};

use orlop_wire::proto::client::mvccpb::{Event, event::EventType};
use tokio::time::{MissedTickBehavior, interval, sleep};
use tracing::{error, warn};

use super::{
    Result,
    source::{Session, Source, revision},
};
use orlop_core::types::{LeaseId, Revision, shown};

/// Pause before the source is connected to again.
const PAUSE: Duration = Duration::from_secs(5);
/// Interval at which the leases of the source are listed.
const LEASE_INTERVAL: Duration = Duration::from_secs(10);
/// Writes that are logged one by one. Of later ones only the number is logged.
const NAMED_WRITES: u64 = 20;

/// The state of the source at the cut over, and what was written since.
pub(super) struct AfterCut {
    pub source: Source,
    pub cluster_id: u64,
    /// The next revision that the source must not have.
    pub next: Revision,
    /// The leases that the copy took over, and those that were reported.
    pub leases: BTreeSet<LeaseId>,
    pub writes: u64,
}

impl AfterCut {
    /// Watches the source as long as it exists.
    pub(super) async fn run(mut self) -> Infallible {
        loop {
            // A source that was stopped is what the operator wants.
            if let Ok(session) = self.source.connect().await
                && session.cluster_id == self.cluster_id
            {
                let _ = self.watch(&session).await;
            }
            sleep(PAUSE).await;
        }
    }

    async fn watch(&mut self, session: &Session) -> Result<()> {
        let mut watch = session.watch(self.next).await?;
        let mut leases = interval(LEASE_INTERVAL);
        leases.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            tokio::select! {
                events = watch.next() => {
                    for event in events? {
                        self.next = revision(&event).next();
                        self.report(&event);
                    }
                }
                _ = leases.tick() => {
                    for id in session.lease_ids().await? {
                        if self.leases.insert(id) {
                            warn!(lease = format!("{:x}", id.0), "a lease was granted by the source after the cut over; it is not in this store");
                        }
                    }
                }
            }
        }
    }

    fn report(&mut self, event: &Event) {
        self.writes += 1;
        if self.writes > NAMED_WRITES && !self.writes.is_power_of_two() {
            return;
        }
        let action = match event.r#type() {
            EventType::Put => "put",
            EventType::Delete => "delete",
        };
        let key = event.kv.as_ref().map_or_else(String::new, |kv| shown(&kv.key));
        error!(
            action,
            key,
            revision = revision(event).0,
            writes = self.writes,
            "a client wrote to the source after the cut over; the write is not in this store"
        );
    }
}
