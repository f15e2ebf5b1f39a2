//! The live instances that share the log, as of the last heartbeat.

use std::time::Duration;

use tokio::{sync::watch, time::Instant};
use tracing::info;

use crate::{log::Member, sync::Mutex};

/// Time without a heartbeat after which this instance counts as cut off. Longer than most failovers of the database, in which
/// watches should continue: Patroni's, by default, takes up to 45 s.
const CUT_OFF_AFTER: Duration = Duration::from_secs(60);

/// The members of the cluster.
pub(super) struct Members {
    own: Member,
    state: Mutex<State>,
    is_cut_off: watch::Sender<bool>,
}

struct State {
    /// Not empty; in the order of [`SharedLog::beat`](crate::log::SharedLog::beat).
    live: Vec<Member>,
    last_beat: Instant,
}

impl Members {
    pub(super) fn new(own: Member) -> Self {
        let state = State { live: vec![own.clone()], last_beat: Instant::now() };
        Self { state: Mutex::new(state), own, is_cut_off: watch::Sender::new(false) }
    }

    /// Returns the id of the leader, which is the oldest live member that serves clients. Only the leader runs automatic
    /// compaction, and it is the first to expire leases.
    pub(super) fn leader(&self) -> u64 {
        self.state.lock().live.first().map_or(self.own.id, |member| member.id)
    }

    /// Returns the live members that serve clients, as of the last heartbeat.
    pub(super) fn serving(&self) -> Vec<Member> {
        let state = self.state.lock();
        state.live.iter().filter(|member| !member.client_urls.is_empty()).cloned().collect()
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

    /// Notes whether this instance is cut off from the database, by the time since its last heartbeat.
    pub(super) fn note_cut_off(&self) {
        let is_cut_off = self.since_last_beat() > CUT_OFF_AFTER;
        self.is_cut_off.send_if_modified(|known| std::mem::replace(known, is_cut_off) != is_cut_off);
    }

    pub(super) fn cut_off(&self) -> watch::Receiver<bool> {
        self.is_cut_off.subscribe()
    }
}
