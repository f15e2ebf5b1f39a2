//! Enforces the space quota: measures the database, raises and clears NOSPACE, and rejects requests while it is raised.
//! A full disk of the database has the same effect as an exceeded quota.

use std::{
    sync::{Arc, atomic::Ordering},
    time::Duration,
};

use tokio::{sync::watch, time::sleep};
use tracing::{debug, warn};

use super::{
    error::{Error, Result},
    handle::Store,
    queue::WriteQueue,
    request::{Op, TxnRequest},
    shared::Shared,
    tasks::until_stopped,
    write_request::Request,
};
use crate::auth::Caller;
use crate::log::{Alarm, AlarmChange, AlarmKind, Cause, Precision, Size};

/// Interval between measurements.
const INTERVAL: Duration = Duration::from_secs(5);

/// Interval between measurements while NOSPACE is raised.
const ALARMED_INTERVAL: Duration = Duration::from_secs(1);

/// Percentage of the quota below which NOSPACE is cleared.
const CLEAR_PERCENT: i64 = 90;

/// Percentage of the quota above which the size is measured anew.
const FRESH_PERCENT: i64 = 75;

impl Shared {
    /// Checks a request against the alarms and the quota.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], [`Error::Corrupt`].
    pub(super) async fn admit(&self, request: &Request, bytes: usize) -> Result<()> {
        let space = &self.space;
        if let Request::Alarm(_) | Request::Auth(_) = request {
            return Ok(());
        }
        space.check_not_corrupt()?;
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let is_disk_full = space.is_disk_full.load(Ordering::Relaxed);
        let is_tight = is_disk_full || space.no_space.load(Ordering::Relaxed) || space.would_exceed_quota(bytes);
        if !is_tight || !needs_space(request) {
            return Ok(());
        }
        if is_disk_full {
            return Err(Error::NoSpace);
        }
        // Determining the free space takes time. After that, requests are rejected without a measurement until the
        // alarm is raised.
        if !space.no_space.load(Ordering::Relaxed) && !space.has_rejected.load(Ordering::Relaxed) {
            self.measure(Precision::Fresh).await;
            if !space.would_exceed_quota(bytes) {
                return Ok(());
            }
            space.has_rejected.store(true, Ordering::Relaxed);
            space.measure_requested.notify_one();
        }
        Err(Error::NoSpace)
    }

    /// Measures the used space before the first request, so that a store that exceeds its quota from the start accepts no
    /// write. Requests another measurement, after which the alarm is raised or cleared.
    pub(super) async fn measure_at_start(&self) {
        // A quick one, because the start waits for it. If it finds too much, the first write determines the free space.
        self.measure(Precision::Quick).await;
        self.space.measure_requested.notify_one();
    }

    /// Measures the used space. If the database does not answer, the known size is kept.
    async fn measure(&self, precision: Precision) {
        match self.log.size(precision).await {
            Ok(Size { in_use, disk_free, .. }) => {
                self.space.used.store(in_use, Ordering::Relaxed);
                self.space.set_disk_free(disk_free);
            }
            Err(error) => debug!(%error, "cannot measure the database"),
        }
    }
}

/// Returns whether a request can increase the used space.
fn needs_space(request: &Request) -> bool {
    fn puts(txn: &TxnRequest) -> bool {
        txn.success.iter().chain(&txn.failure).any(|op| match op {
            Op::Put(_) => true,
            Op::Txn(txn) => puts(txn),
            Op::Range(_) | Op::Delete(_) => false,
        })
    }
    match request {
        Request::Put(_) | Request::Grant { .. } => true,
        Request::Txn(txn) => puts(txn),
        Request::Delete(_)
        | Request::Revoke(_)
        | Request::Expire(_)
        | Request::Compact(_)
        | Request::Alarm(_)
        | Request::Auth(_) => false,
    }
}

/// Measures the used space and raises or clears the alarm.
pub(super) async fn run(shared: Arc<Shared>, queue: WriteQueue, stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            let space = &shared.space;
            let is_alarmed = space.no_space.load(Ordering::Relaxed) || space.is_disk_full.load(Ordering::Relaxed);
            tokio::select! {
                biased;
                () = shared.space.measure_requested.notified() => {}
                () = sleep(if is_alarmed { ALARMED_INTERVAL } else { INTERVAL }) => {}
            }
            if let Some(change) = required_change(&shared).await
                && let Err(error) = queue.submit(&Caller::Server, Request::Alarm(change)).await
            {
                // On a full disk the alarm is also raised without a record.
                if !shared.space.is_disk_full.load(Ordering::Relaxed) {
                    warn!(%error, "cannot record an alarm; trying again");
                }
                // Each failed write asks for a measurement, this one too.
                sleep(ALARMED_INTERVAL).await;
            }
        }
    };
    until_stopped(stop, work).await;
}

/// Returns the change of alarms that the current size requires.
async fn required_change(shared: &Shared) -> Option<AlarmChange> {
    let space = &shared.space;
    shared.measure(Precision::Quick).await;
    if space.is_above_percent(FRESH_PERCENT) {
        shared.measure(Precision::Fresh).await;
    }
    let has_rejected = space.has_rejected.swap(false, Ordering::Relaxed);
    let raised = space.raised_by_quota();
    let is_disk_full = space.is_disk_full.load(Ordering::Relaxed);
    if space.no_space.load(Ordering::Relaxed) {
        return raised
            .first()
            .filter(|_| !is_disk_full && !space.is_above_percent(CLEAR_PERCENT))
            .map(|alarm| AlarmChange::Clear { alarm: *alarm });
    }
    let alarm = Alarm { member_id: shared.identity.member_id, kind: AlarmKind::NoSpace };
    (has_rejected || is_disk_full || space.would_exceed_quota(0))
        .then_some(AlarmChange::Raise { alarm, cause: Cause::Quota })
}

impl Store {
    /// Returns the raised alarms. While the disk is full, NOSPACE is among them, although it cannot be recorded.
    pub fn alarms(&self) -> Vec<Alarm> {
        let mut alarms = self.shared.space.alarms.lock().clone();
        if self.shared.space.is_disk_full.load(Ordering::Relaxed) {
            alarms.insert(Alarm { member_id: self.identity().member_id, kind: AlarmKind::NoSpace }, Cause::Quota);
        }
        alarms.into_keys().collect()
    }

    /// Raises or clears an alarm for all instances. Repeating a change has no effect.
    pub async fn change_alarm(&self, caller: &Caller, change: AlarmChange) -> Result<()> {
        self.submit_for_revision(caller, Request::Alarm(change)).await.map(drop)
    }

    /// Returns the quota in bytes, 0 if there is none.
    pub fn quota(&self) -> u64 {
        self.shared.space.quota()
    }
}
