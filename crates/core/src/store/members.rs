//! The instances that serve the log, as far as this one has heard.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::{info, warn};

use super::{Shared, Store};
use crate::log::{BEAT_INTERVAL, Error, Member, Result, SharedLog};

/// What is known of the members.
pub(super) struct Members {
    own: Member,
    state: Mutex<State>,
}

struct State {
    /// Not empty; the one that has lived longest first.
    live: Vec<Member>,
    heard: Instant,
}

impl Members {
    pub(super) fn new(own: Member) -> Self {
        Self { state: Mutex::new(State { live: vec![own.clone()], heard: Instant::now() }), own }
    }

    /// The one that does first what one of all should do: the one that has lived longest.
    pub(super) fn leader(&self) -> u64 {
        self.state.lock().live.first().map_or(self.own.id, |member| member.id)
    }

    /// Those that live, as far as this one has heard.
    pub(super) fn live(&self) -> Vec<Member> {
        self.state.lock().live.clone()
    }

    pub(super) fn leads(&self) -> bool {
        self.leader() == self.own.id
    }

    pub(super) fn is_alone(&self) -> bool {
        self.state.lock().live.iter().all(|member| member.id == self.own.id)
    }
}

impl Shared {
    /// Says that this instance lives and takes note of who else does.
    pub(super) async fn beat(&self, log: &dyn SharedLog) -> Result<Vec<Member>> {
        let live = log.beat().await?;
        let mut state = self.members.state.lock();
        state.heard = Instant::now();
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

    /// How long ago this instance said that it lives: a paused one must say so again before it judges leases.
    pub(super) fn silent_for(&self) -> Duration {
        self.members.state.lock().heard.elapsed()
    }
}

impl Store {
    /// The live members, asked for anew where the database can be asked.
    pub async fn members(&self) -> Vec<Member> {
        if let Some(log) = self.shared.log.shared()
            && let Err(error) = self.shared.beat(log).await
        {
            warn!(%error, "members could not be asked for; telling those that were last heard of");
        }
        self.shared.members.state.lock().live.clone()
    }

    /// The member that does first what one of all should do.
    pub fn leader(&self) -> u64 {
        self.shared.members.leader()
    }
}

/// Says again and again that this instance lives.
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
                warn!(%error, "the other members cannot be told that this one lives; trying again");
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
