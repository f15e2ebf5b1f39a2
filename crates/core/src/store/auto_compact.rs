//! Automatic compaction, like etcd's `--auto-compaction-mode`. If several instances share the log, only the leader
//! compacts.

use std::{collections::VecDeque, sync::Arc, time::Duration};

use tokio::{
    sync::watch,
    time::{Instant, MissedTickBehavior, interval},
};
use tracing::{info, warn};

use super::{error::Error, queue::WriteQueue, shared::Shared, tasks::until_stopped, write_request::Request};
use crate::{auth::Caller, types::Revision};

/// The history that automatic compaction keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum AutoCompaction {
    /// Revisions that were current within this period.
    Periodic(Duration),
    /// This number of revisions below the head.
    Revision(i64),
}

/// Maximum time between compactions, regardless of the retention.
const PERIOD_MAX: Duration = Duration::from_secs(60 * 60);
/// Samples of the head per period.
const SAMPLES: u32 = 10;
/// Interval of compactions in revision mode.
const REVISION_INTERVAL: Duration = Duration::from_secs(5 * 60);

/// Compacts according to the policy until stopped.
pub(super) async fn run(shared: Arc<Shared>, queue: WriteQueue, policy: AutoCompaction, stop: watch::Receiver<bool>) {
    let work = async {
        let mut schedule = Schedule::new(policy);
        let mut ticks = interval(schedule.tick());
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        loop {
            ticks.tick().await;
            let (head, compacted) = {
                let index = shared.index.read();
                (index.head(), index.compact_revision())
            };
            let Some(target) = schedule.next_target(head, Instant::now()) else { continue };
            if !shared.members.is_leader() || Some(target) <= compacted || target > head {
                continue;
            }
            info!(compact_revision = target.0, "starting auto compaction");
            match queue.submit(&Caller::Server, Request::Compact(target)).await {
                Ok(_) | Err(Error::Compacted) => {}
                Err(error) => {
                    warn!(
                        %error,
                        compact_revision = target.0,
                        "auto compaction failed; trying again at the next interval"
                    )
                }
            }
        }
    };
    until_stopped(stop, work).await;
}

/// Decides when to compact and at which revision. Pure.
struct Schedule {
    policy: AutoCompaction,
    /// Samples of the head with their times, oldest first.
    samples: VecDeque<(Instant, Revision)>,
    compacted_at: Option<Instant>,
}

impl Schedule {
    fn new(policy: AutoCompaction) -> Self {
        Self { policy, samples: VecDeque::new(), compacted_at: None }
    }

    /// Returns the interval at which the head is sampled.
    fn tick(&self) -> Duration {
        match self.policy {
            AutoCompaction::Periodic(retention) => (retention.min(PERIOD_MAX) / SAMPLES).max(Duration::from_millis(1)),
            AutoCompaction::Revision(_) => REVISION_INTERVAL,
        }
    }

    /// Records a sample of the head. Returns the revision at which to compact now, if any.
    fn next_target(&mut self, head: Revision, now: Instant) -> Option<Revision> {
        match self.policy {
            AutoCompaction::Revision(kept) => {
                let target = head.0.saturating_sub(kept);
                (target > 0).then_some(Revision(target))
            }
            AutoCompaction::Periodic(retention) => self.periodic_target(head, now, retention),
        }
    }

    /// The first compaction runs after one retention period. Each later one follows after another retention period or
    /// one hour, whichever is shorter.
    fn periodic_target(&mut self, head: Revision, now: Instant, retention: Duration) -> Option<Revision> {
        self.samples.push_back((now, head));
        let old = self.samples.iter().take_while(|(at, _)| now.duration_since(*at) >= retention).count();
        let target = self.samples.get(old.checked_sub(1)?)?.1;
        self.samples.drain(..old - 1);
        if self.compacted_at.is_some_and(|at| now.duration_since(at) < retention.min(PERIOD_MAX)) {
            return None;
        }
        self.compacted_at = Some(now);
        Some(target)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(policy: AutoCompaction, heads: impl Fn(u64) -> i64, minutes: u64, expected: &[(u64, i64)]) {
        let mut schedule = Schedule::new(policy);
        let start = Instant::now();
        let tick = schedule.tick();
        let mut compactions = Vec::new();
        let mut at = Duration::ZERO;
        while at <= Duration::from_secs(60 * minutes) {
            let minute = at.as_secs() / 60;
            if let Some(target) = schedule.next_target(Revision(heads(minute)), start + at) {
                compactions.push((minute, target.0));
            }
            at += tick;
        }
        assert_eq!(compactions, expected);
    }

    #[test]
    fn periodic_mode_keeps_revisions_within_the_retention() {
        let minutes = |minutes: u64| AutoCompaction::Periodic(Duration::from_secs(60 * minutes));
        // One revision per minute, from 1.
        let heads = |minute: u64| minute as i64 + 1;
        check(minutes(10), heads, 9, &[]);
        check(minutes(10), heads, 30, &[(10, 1), (20, 11), (30, 21)]);
        check(minutes(120), heads, 240, &[(120, 1), (180, 61), (240, 121)]);
    }

    #[test]
    fn revision_mode_keeps_a_number_of_revisions() {
        let heads = |minute: u64| 100 * minute as i64 + 1;
        check(AutoCompaction::Revision(1_000), heads, 20, &[(10, 1), (15, 501), (20, 1_001)]);
    }
}
