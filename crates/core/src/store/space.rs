//! Alarms and the space quota.
//!
//! While NOSPACE is raised, by any instance, puts, transactions with puts and new leases are rejected. Reads, deletes
//! and compactions are served, because they free space. The server raises the alarm if the used space plus the current
//! write would exceed the quota, and clears it when enough space is free again. An alarm that a client raised is
//! cleared only by a client. While CORRUPT is raised, nothing is served.
//!
//! Between measurements, the used space is the last measured size plus the bytes written since. A write is rejected
//! only after a measurement.

use std::{
    collections::BTreeMap,
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicI64, Ordering},
    },
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    sync::{Notify, watch},
    time::{Instant, sleep},
};
use tracing::{debug, error, info, warn};

use super::{
    Error, Result, Shared, Store,
    request::{Op, TxnRequest},
    writer::{Request, WriteQueue},
};
use crate::{
    log::{Alarm, AlarmChange, AlarmKind, Cause, Meta, Precision, Reclaim, Reclaimed, Size},
    types::Change,
};

/// etcd's default quota in bytes.
const QUOTA_DEFAULT: u64 = 2 << 30;
/// Interval between measurements.
const INTERVAL: Duration = Duration::from_secs(5);
/// Interval between measurements while NOSPACE is raised.
const ALARMED_INTERVAL: Duration = Duration::from_secs(1);
/// Approximate overhead of a row in bytes, besides its key and value.
const ROW_BYTES: i64 = 100;
/// Percentage of the quota below which NOSPACE is cleared.
const CLEAR_PERCENT: i64 = 90;
/// Percentage of the quota above which the size is measured exactly.
const EXACT_PERCENT: i64 = 75;

/// The used space, the quota and the alarms.
pub(super) struct Space {
    /// Bytes; `None`: no quota.
    quota: Option<i64>,
    /// Approximate bytes in use.
    used: AtomicI64,
    /// Notified when the size should be measured.
    measure_requested: Notify,
    /// Whether a write was rejected since the last measurement.
    refused: AtomicBool,
    alarms: Mutex<BTreeMap<Alarm, Cause>>,
    no_space: AtomicBool,
    corrupt: AtomicBool,
}

impl Space {
    /// Like etcd's `--quota-backend-bytes`: 0 is 2 GiB, a negative value is no quota.
    pub(super) fn new(quota_bytes: i64) -> Self {
        let quota = match quota_bytes {
            0 => Some(QUOTA_DEFAULT.cast_signed()),
            quota if quota < 0 => None,
            quota => Some(quota),
        };
        Self {
            quota,
            used: AtomicI64::new(0),
            measure_requested: Notify::new(),
            refused: AtomicBool::new(false),
            alarms: Mutex::default(),
            no_space: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
        }
    }

    /// Returns the quota in bytes, 0 if there is none.
    pub(super) fn quota(&self) -> u64 {
        self.quota.map_or(0, i64::cast_unsigned)
    }

    /// # Errors
    ///
    /// [`Error::Corrupt`] while the CORRUPT alarm is raised.
    pub(super) fn check_sound(&self) -> Result<()> {
        if self.corrupt.load(Ordering::Relaxed) { Err(Error::Corrupt) } else { Ok(()) }
    }

    /// Requests a measurement, because space may have been freed.
    pub(super) fn note_freed(&self) {
        self.measure_requested.notify_one();
    }

    pub(super) fn note_written(&self, changes: &[Change], bytes: i64) {
        self.used.fetch_add(bytes + ROW_BYTES * i64::try_from(changes.len()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns whether `more` additional bytes would exceed the quota, as of the known size.
    fn is_beyond(&self, more: i64) -> bool {
        self.quota.is_some_and(|quota| self.used.load(Ordering::Relaxed).saturating_add(more) > quota)
    }

    fn is_above(&self, percent: i64) -> bool {
        self.quota.is_some_and(|quota| self.used.load(Ordering::Relaxed) > quota / 100 * percent)
    }

    pub(super) fn set_alarms(&self, meta: &Meta) {
        self.update(|alarms| *alarms = meta.alarms.iter().copied().collect());
    }

    pub(super) fn apply(&self, change: AlarmChange) {
        self.update(|alarms| match change {
            AlarmChange::Raise { alarm, cause } => {
                error!(alarm = alarm.kind.name(), member_id = format!("{:x}", alarm.member_id), "alarm raised");
                alarms.insert(alarm, cause);
            }
            AlarmChange::Clear { alarm } => {
                info!(alarm = alarm.kind.name(), member_id = format!("{:x}", alarm.member_id), "alarm cleared");
                alarms.remove(&alarm);
            }
        });
    }

    fn update(&self, change: impl FnOnce(&mut BTreeMap<Alarm, Cause>)) {
        let mut alarms = self.alarms.lock();
        change(&mut alarms);
        let raised = |kind| alarms.keys().any(|alarm| alarm.kind == kind);
        self.no_space.store(raised(AlarmKind::NoSpace), Ordering::Relaxed);
        self.corrupt.store(raised(AlarmKind::Corrupt), Ordering::Relaxed);
    }

    /// Returns the alarms that the server raised because of the quota.
    fn raised_by_quota(&self) -> Vec<Alarm> {
        self.alarms.lock().iter().filter(|(_, cause)| **cause == Cause::Quota).map(|(alarm, _)| *alarm).collect()
    }
}

impl Shared {
    /// Checks a request against the alarms and the quota.
    ///
    /// # Errors
    ///
    /// [`Error::NoSpace`], [`Error::Corrupt`].
    pub(super) async fn admit(&self, request: &Request, bytes: usize) -> Result<()> {
        let space = &self.space;
        if let Request::Alarm(_) = request {
            return Ok(());
        }
        space.check_sound()?;
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        let is_tight = space.no_space.load(Ordering::Relaxed) || space.is_beyond(bytes);
        if !is_tight || !needs_space(request) {
            return Ok(());
        }
        // An exact measurement may read the whole log, so it is done once until the alarm is raised.
        if !space.no_space.load(Ordering::Relaxed) && !space.refused.load(Ordering::Relaxed) {
            self.measure(Precision::Exact).await;
            if !space.is_beyond(bytes) {
                return Ok(());
            }
            space.refused.store(true, Ordering::Relaxed);
            space.measure_requested.notify_one();
        }
        Err(Error::NoSpace)
    }

    /// Measures the used space. If the database does not answer, the known size is kept.
    async fn measure(&self, precision: Precision) {
        match self.log.size(precision).await {
            Ok(Size { in_use, .. }) => self.space.used.store(in_use, Ordering::Relaxed),
            Err(error) => debug!(%error, "cannot measure the database"),
        }
    }
}

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
        Request::Delete(_) | Request::Revoke(_) | Request::Expire(_) | Request::Compact(_) | Request::Alarm(_) => false,
    }
}

/// Measures the used space and raises or clears the alarm.
pub(super) async fn run(shared: Arc<Shared>, queue: WriteQueue, mut stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            let alarmed = shared.space.no_space.load(Ordering::Relaxed);
            tokio::select! {
                biased;
                () = shared.space.measure_requested.notified() => {}
                () = sleep(if alarmed { ALARMED_INTERVAL } else { INTERVAL }) => {}
            }
            if let Some(change) = required_change(&shared).await
                && let Err(error) = queue.submit(Request::Alarm(change)).await
            {
                warn!(%error, "cannot record an alarm; trying again");
            }
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// Returns the change of alarms that the current size requires.
async fn required_change(shared: &Shared) -> Option<AlarmChange> {
    let space = &shared.space;
    shared.measure(Precision::Quick).await;
    if space.is_above(EXACT_PERCENT) {
        shared.measure(Precision::Exact).await;
    }
    let refused = space.refused.swap(false, Ordering::Relaxed);
    let raised = space.raised_by_quota();
    if space.no_space.load(Ordering::Relaxed) {
        return raised
            .first()
            .filter(|_| !space.is_above(CLEAR_PERCENT))
            .map(|alarm| AlarmChange::Clear { alarm: *alarm });
    }
    let alarm = Alarm { member_id: shared.identity.member_id, kind: AlarmKind::NoSpace };
    (refused || space.is_beyond(0)).then_some(AlarmChange::Raise { alarm, cause: Cause::Quota })
}

impl Store {
    pub fn alarms(&self) -> Vec<Alarm> {
        self.shared.space.alarms.lock().keys().copied().collect()
    }

    /// Raises or clears an alarm for all instances. Repeating a change has no effect.
    pub async fn change_alarm(&self, change: AlarmChange) -> Result<()> {
        self.submit_for_revision(Request::Alarm(change)).await.map(drop)
    }

    /// Returns the database's free space to the file system, in steps between which writes can run.
    pub async fn defragment(&self) -> Result<()> {
        let metrics = &self.shared.metrics.maintenance;
        let begun = Instant::now();
        metrics.defrag_inflight.inc();
        let done = async {
            while self.shared.log.reclaim(Reclaim::Space).await? == Reclaimed::More {
                tokio::task::yield_now().await;
            }
            Ok(())
        };
        let done: crate::log::Result<()> = done.await;
        metrics.defrag_inflight.dec();
        metrics.defrag.observe(begun.elapsed().as_secs_f64());
        self.shared.space.note_freed();
        info!(elapsed_ms = begun.elapsed().as_millis(), "defragmented");
        Ok(done?)
    }

    pub fn quota(&self) -> u64 {
        self.shared.space.quota()
    }
}
