//! Whether a commit waits for a standby: a message at the start and at each change, and two metrics.
//!
//! Each session keeps the `synchronous_commit` with which it was opened, so the session that asks and the one that appends
//! can differ after the setting of the role was changed. Replication counts as synchronous if both wait.
//!
//! Only settings that any role can read are used. `pg_stat_replication` shows an ordinary role the number of its rows,
//! which includes logical subscribers and running base backups, but not their state.

use std::{sync::Arc, time::Duration};

use parking_lot::Mutex;
use sqlx::PgConnection;
use tokio::time::Instant;
use tracing::{info, warn};

use orlop_core::metrics::Metrics;

/// Minimum time between two checks.
const INTERVAL: Duration = Duration::from_secs(5);

/// The settings of the session apply, because a role can have others than the server.
const STATE: &str = "SELECT (SELECT count(*) FROM pg_stat_replication), \
    current_setting('synchronous_standby_names') <> '' AND current_setting('synchronous_commit') NOT IN ('off', 'local')";

const WAITS: &str = "SELECT current_setting('synchronous_commit') NOT IN ('off', 'local')";

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct State {
    pub(super) standbys: i64,
    pub(super) is_synchronous: bool,
}

pub(super) async fn state(connection: &mut PgConnection) -> sqlx::Result<State> {
    let (standbys, is_synchronous) = sqlx::query_as(STATE).fetch_one(connection).await?;
    Ok(State { standbys, is_synchronous })
}

/// Returns whether commits of this session wait for a standby, if the server has a synchronous one.
pub(super) async fn waits_for_standby(connection: &mut PgConnection) -> sqlx::Result<bool> {
    sqlx::query_scalar(WAITS).fetch_one(connection).await
}

/// The last state, and where it is reported.
#[derive(Default)]
pub(super) struct Monitor {
    metrics: Option<Arc<Metrics>>,
    last: Mutex<Option<(State, Instant)>>,
}

impl Monitor {
    /// Reports the state in metrics from now on.
    pub(super) fn report_to(&mut self, metrics: Arc<Metrics>) {
        let last = *self.last.lock();
        if let Some((state, _)) = last {
            set_gauges(&metrics, state);
        }
        self.metrics = Some(metrics);
    }

    /// Returns whether it is time for another check.
    pub(super) fn is_due(&self) -> bool {
        let last = self.last.lock();
        last.is_none_or(|(_, checked)| checked.elapsed() >= INTERVAL)
    }

    pub(super) fn update(&self, state: State) {
        if let Some(metrics) = &self.metrics {
            set_gauges(metrics, state);
        }
        let mut last = self.last.lock();
        let is_known = last.is_some_and(|(last, _)| last.promise() == state.promise());
        *last = Some((state, Instant::now()));
        if !is_known {
            state.log();
        }
    }
}

fn set_gauges(metrics: &Metrics, state: State) {
    let replication = &metrics.replication;
    replication.standbys.with_label_values::<&str>(&[]).set(state.standbys);
    replication.synchronous.with_label_values::<&str>(&[]).set(i64::from(state.is_synchronous));
}

/// What a failover means for acknowledged writes.
#[derive(PartialEq, Eq)]
enum Promise {
    Kept,
    MayBeLost,
    NoStandby,
}

impl State {
    fn promise(self) -> Promise {
        match self {
            Self { is_synchronous: true, .. } => Promise::Kept,
            Self { standbys: 0, .. } => Promise::NoStandby,
            Self { .. } => Promise::MayBeLost,
        }
    }

    fn log(self) {
        let standbys = self.standbys;
        match self.promise() {
            Promise::Kept => info!(standbys, "replication is synchronous: a commit waits for a standby"),
            Promise::NoStandby => info!("the Postgres server has no standby"),
            Promise::MayBeLost => warn!(
                standbys,
                "replication is asynchronous: a failover can lose acknowledged writes; to prevent that, set \
                 synchronous_standby_names, or, if the role has synchronous_commit = local, reset it and restart the \
                 instances"
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{Promise, State};

    #[test]
    fn lone_server_promises_no_failover() {
        for (standbys, is_synchronous, expected) in [
            (0, false, Promise::NoStandby),
            (1, false, Promise::MayBeLost),
            (2, true, Promise::Kept),
            // Commits wait until a standby is back.
            (0, true, Promise::Kept),
        ] {
            assert!(State { standbys, is_synchronous }.promise() == expected, "{standbys} {is_synchronous}");
        }
    }
}
