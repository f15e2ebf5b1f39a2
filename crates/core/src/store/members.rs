//! The live instances that share the log, as of the last heartbeat.

use std::time::Duration;

use tokio::time::Instant;
use tracing::info;

use crate::{log::Member, sync::Mutex};

/// The members of the cluster.
pub(super) struct Members {
    own: Member,
    state: Mutex<State>,
}

struct State {
    /// Not empty; the oldest member first.
    live: Vec<Member>,
    last_beat: Instant,
}

impl Members {
    pub(super) fn new(own: Member) -> Self {
        Self { state: Mutex::new(State { live: vec![own.clone()], last_beat: Instant::now() }), own }
    }

    /// Returns the id of the leader, which is the oldest live member. Only the leader runs automatic compaction, and
    /// it is the first to expire leases.
    pub(super) fn leader(&self) -> u64 {
        self.state.lock().live.first().map_or(self.own.id, |member| member.id)
    }

    /// Returns the live members as of the last heartbeat.
    pub(super) fn live(&self) -> Vec<Member> {
        self.state.lock().live.clone()
    }

    /// Returns whether this instance is the leader.
    pub(super) fn is_leader(&self) -> bool {
        self.leader() == self.own.id
    }

    /// Returns whether no other instance is live.
    pub(super) fn is_alone(&self) -> bool {
        self.state.lock().live.iter().all(|member| member.id == self.own.id)
    }

    /// Replaces the live members after a heartbeat. Returns whether the leader changed.
    pub(super) fn update(&self, live: &[Member]) -> bool {
        let mut state = self.state.lock();
        state.last_beat = Instant::now();
        if live.is_empty() || live == state.live {
            return false;
        }
        let names: Vec<&str> = live.iter().map(|member| member.name.as_str()).collect();
        info!(members = ?names, "members changed");
        let leader_changed = live.first().map(|leader| leader.id) != state.live.first().map(|leader| leader.id);
        state.live = live.to_vec();
        leader_changed
    }

    /// Returns the time since this instance's last heartbeat. An instance that was paused must send one before it
    /// expires leases.
    pub(super) fn since_last_beat(&self) -> Duration {
        self.state.lock().last_beat.elapsed()
    }
}
