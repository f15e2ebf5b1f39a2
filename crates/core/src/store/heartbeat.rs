//! The heartbeat of this instance, and the members that the database reports in return.

use std::{sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{MissedTickBehavior, interval, timeout},
};
use tracing::warn;

use super::{
    handle::Store,
    shared::{Shared, WAIT_MAX},
    tasks::until_stopped,
};
use crate::{
    log::{Error, HEARTBEAT_INTERVAL, Member, Result, SharedLog},
    log_limit::LogLimit,
};

/// Every list of the members may cause this message.
static MEMBERS_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));

impl Shared {
    /// Sends this instance's heartbeat and updates the list of live members.
    pub(super) async fn beat(&self, log: &dyn SharedLog) -> Result<Vec<Member>> {
        let live = log.beat().await?;
        if self.members.update(&live) {
            self.metrics.store.leader_changes.inc();
        }
        Ok(live)
    }
}

impl Store {
    /// Returns the live members that serve clients, refreshed from the database if it answers within 7 s. Callers that
    /// wait for a running refresh share the next one, so the list is never older than the call.
    pub async fn members(&self) -> Vec<Member> {
        if let Some(queries) = &self.queries {
            let error = match timeout(WAIT_MAX, queries.members.query(())).await {
                Ok(Some(Err(error))) => Some(error.to_string()),
                // `None`: the store is being dropped.
                Ok(Some(Ok(())) | None) => None,
                Err(_) => Some(format!("no answer within {} s", WAIT_MAX.as_secs())),
            };
            if let Some(error) = error
                && let Some(count) = MEMBERS_LOG.count()
            {
                warn!(error, count, "cannot read the members; returning the last known ones");
            }
        }
        self.shared.members.serving()
    }

    /// Returns the live members that serve clients, as of the last heartbeat, and the time since then; `None` if no other
    /// instance can use the log, so there are no heartbeats.
    pub fn last_members(&self) -> (Vec<Member>, Option<Duration>) {
        let members = &self.shared.members;
        (members.serving(), self.shared.log.shared().map(|_| members.since_last_beat()))
    }

    /// Returns whether this instance is cut off from a database that it shares with others: they may write what it does not
    /// learn of.
    pub fn cut_off(&self) -> watch::Receiver<bool> {
        self.shared.members.cut_off()
    }

    /// Returns the id of the leader.
    pub fn leader(&self) -> u64 {
        self.shared.members.leader()
    }
}

/// Sends heartbeats.
pub(super) async fn run(shared: Arc<Shared>, stop: watch::Receiver<bool>) {
    let work = async {
        let Some(log) = shared.log.shared() else { return };
        // A heartbeat may wait for the database as long as it is away.
        tokio::join!(beat_forever(&shared, log), note_cut_off_forever(&shared));
    };
    until_stopped(stop, work).await;
}

async fn beat_forever(shared: &Shared, log: &dyn SharedLog) {
    let mut ticks = interval(HEARTBEAT_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    let mut is_failing = false;
    loop {
        ticks.tick().await;
        let beat: std::result::Result<_, Error> = shared.beat(log).await;
        if let (Err(error), false) = (&beat, is_failing) {
            warn!(%error, "cannot send the heartbeat of this member; trying again");
        }
        is_failing = beat.is_err();
        shared.metrics.store.failed_beats.inc_by(u64::from(is_failing));
    }
}

async fn note_cut_off_forever(shared: &Shared) {
    let mut ticks = interval(HEARTBEAT_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        shared.members.note_cut_off();
    }
}
