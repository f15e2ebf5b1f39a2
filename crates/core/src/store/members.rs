//! The live instances that share the log, as of the last heartbeat.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::{info, warn};

use super::{Shared, Store};
use crate::log::{BEAT_INTERVAL, Error, Member, Result, SharedLog};

/// The members of the cluster.
pub(super) struct Members {
    own: Member,
    state: Mutex<State>,
}

struct State {
    /// Not empty; the longest-living member first.
    live: Vec<Member>,
    last_beat: Instant,
}

impl Members {
    pub(super) fn new(own: Member) -> Self {
        Self { state: Mutex::new(State { live: vec![own.clone()], last_beat: Instant::now() }), own }
    }

    /// Returns the id of the leader: the longest-living member. It is the first to do work that only one instance
    /// should do.
    pub(super) fn leader(&self) -> u64 {
        self.state.lock().live.first().map_or(self.own.id, |member| member.id)
    }

    /// Returns the live members as of the last heartbeat.
    pub(super) fn live(&self) -> Vec<Member> {
        self.state.lock().live.clone()
    }

    pub(super) fn is_leader(&self) -> bool {
        self.leader() == self.own.id
    }

    pub(super) fn is_alone(&self) -> bool {
        self.state.lock().live.iter().all(|member| member.id == self.own.id)
    }
}

impl Shared {
    /// Sends this instance's heartbeat and updates the list of live members.
    pub(super) async fn beat(&self, log: &dyn SharedLog) -> Result<Vec<Member>> {
        let live = log.beat().await?;
        let mut state = self.members.state.lock();
        state.last_beat = Instant::now();
        if !live.is_empty() && live != state.live {
            let names: Vec<&str> = live.iter().map(|member| member.name.as_str()).collect();
            info!(members = ?names, "members changed");
            if live.first().map(|leader| leader.id) != state.live.first().map(|leader| leader.id) {
                self.metrics.store.leader_changes.inc();
            }
            state.live.clone_from(&live);
        }
        Ok(live)
    }

    /// Returns the time since this instance's last heartbeat. An instance that was paused must send one before it
    /// expires leases.
    pub(super) fn since_last_beat(&self) -> Duration {
        self.members.state.lock().last_beat.elapsed()
    }
}

impl Store {
    /// Returns the live members, refreshed from the database if it answers.
    pub async fn members(&self) -> Vec<Member> {
        if let Some(log) = self.shared.log.shared()
            && let Err(error) = self.shared.beat(log).await
        {
            warn!(%error, "cannot read the members; returning the last known ones");
        }
        self.shared.members.state.lock().live.clone()
    }

    /// Returns the id of the leader.
    pub fn leader(&self) -> u64 {
        self.shared.members.leader()
    }
}

/// Sends heartbeats.
pub(super) async fn run(shared: Arc<Shared>, mut stop: watch::Receiver<bool>) {
    let work = async {
        let Some(log) = shared.log.shared() else { return };
        let mut ticks = interval(BEAT_INTERVAL);
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        let mut failing = false;
        loop {
            ticks.tick().await;
            let beat: std::result::Result<_, Error> = shared.beat(log).await;
            if let (Err(error), false) = (&beat, failing) {
                warn!(%error, "cannot send the heartbeat of this member; trying again");
            }
            failing = beat.is_err();
            shared.metrics.store.failed_beats.inc_by(u64::from(failing));
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}
