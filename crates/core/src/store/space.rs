//! Alarms, and the quota that raises one.
//!
//! While NOSPACE is raised, by whichever instance, puts, transactions with puts and new leases are refused; reads, deletes
//! and compactions are served, as they make room. The server raises it when what is in use, and the write at hand, would go
//! beyond the quota, and takes it back when there is room again; what a client raised, a client clears. While CORRUPT is
//! raised nothing is served.
//!
//! Between two measurements the bytes in use are what was measured and what was written since. A write is refused only
//! after a measurement.

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

/// etcd's quota where none is given.
const QUOTA_DEFAULT: u64 = 2 << 30;
/// How often the size is looked at.
const INTERVAL: Duration = Duration::from_secs(5);
/// How often it is looked at while NOSPACE is raised.
const ALARMED_INTERVAL: Duration = Duration::from_secs(1);
/// What a row takes beside its key and value, about.
const ROW_BYTES: i64 = 100;
/// There is room again below this part of the quota.
const ROOM_PERCENT: i64 = 90;
/// Above this part of the quota the size is counted exactly.
const EXACT_PERCENT: i64 = 75;

/// What is known of the room that there is, and of what is wrong.
pub(super) struct Space {
    /// `None`: there is none.
    quota: Option<i64>,
    /// Bytes in use, about.
    used: AtomicI64,
    /// Set when the size should be looked at.
    look: Notify,
    /// A write was refused.
    refused: AtomicBool,
    alarms: Mutex<BTreeMap<Alarm, Cause>>,
    no_space: AtomicBool,
    corrupt: AtomicBool,
}

impl Space {
    /// As etcd's `--quota-backend-bytes`: 0 is 2 GiB, below 0 is none.
    pub(super) fn new(quota_bytes: i64) -> Self {
        let quota = match quota_bytes {
            0 => Some(QUOTA_DEFAULT.cast_signed()),
            quota if quota < 0 => None,
            quota => Some(quota),
        };
        Self {
            quota,
            used: AtomicI64::new(0),
            look: Notify::new(),
            refused: AtomicBool::new(false),
            alarms: Mutex::default(),
            no_space: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
        }
    }

    /// Bytes, 0 if there is none.
    pub(super) fn quota(&self) -> u64 {
        self.quota.map_or(0, i64::cast_unsigned)
    }

    /// # Errors
    ///
    /// [`Error::Corrupt`] while that alarm is raised.
    pub(super) fn check_sound(&self) -> Result<()> {
        if self.corrupt.load(Ordering::Relaxed) { Err(Error::Corrupt) } else { Ok(()) }
    }

    /// Says that there may be room again.
    pub(super) fn note_freed(&self) {
        self.look.notify_one();
    }

    pub(super) fn note_written(&self, changes: &[Change], bytes: i64) {
        self.used.fetch_add(bytes + ROW_BYTES * i64::try_from(changes.len()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Whether this many more bytes are beyond the quota, as far as is known.
    fn is_beyond(&self, more: i64) -> bool {
        self.quota.is_some_and(|quota| self.used.load(Ordering::Relaxed).saturating_add(more) > quota)
    }

    fn is_above(&self, percent: i64) -> bool {
        self.quota.is_some_and(|quota| self.used.load(Ordering::Relaxed) > quota / 100 * percent)
    }

    pub(super) fn take_in(&self, meta: &Meta) {
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

    /// Alarms that the server raised by itself for want of space.
    fn raised_by_quota(&self) -> Vec<Alarm> {
        self.alarms.lock().iter().filter(|(_, cause)| **cause == Cause::Quota).map(|(alarm, _)| *alarm).collect()
    }
}

impl Shared {
    /// Whether a request may be served, by the alarms and the quota.
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
        if !is_tight || !takes_room(request) {
            return Ok(());
        }
        // Counting may read the whole log: once is enough until the alarm is raised.
        if !space.no_space.load(Ordering::Relaxed) && !space.refused.load(Ordering::Relaxed) {
            self.measure(Precision::Exact).await;
            if !space.is_beyond(bytes) {
                return Ok(());
            }
            space.refused.store(true, Ordering::Relaxed);
            space.look.notify_one();
        }
        Err(Error::NoSpace)
    }

    /// Looks at the size. Where the database does not tell, what was known stays.
    async fn measure(&self, precision: Precision) {
        match self.log.size(precision).await {
            Ok(Size { in_use, .. }) => self.space.used.store(in_use, Ordering::Relaxed),
            Err(error) => debug!(%error, "cannot measure the database"),
        }
    }
}

fn takes_room(request: &Request) -> bool {
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

/// Measures, and raises and clears the alarm.
pub(super) async fn run(shared: Arc<Shared>, queue: WriteQueue, mut stop: watch::Receiver<bool>) {
    let work = async {
        loop {
            let alarmed = shared.space.no_space.load(Ordering::Relaxed);
            tokio::select! {
                biased;
                () = shared.space.look.notified() => {}
                () = sleep(if alarmed { ALARMED_INTERVAL } else { INTERVAL }) => {}
            }
            if let Some(change) = due(&shared).await
                && let Err(error) = queue.submit(Request::Alarm(change)).await
            {
                warn!(%error, "an alarm cannot be recorded; trying again");
            }
        }
    };
    tokio::select! {
        biased;
        () = work => {}
        _ = stop.wait_for(|stop| *stop) => {}
    }
}

/// The change of alarms that the size asks for.
async fn due(shared: &Shared) -> Option<AlarmChange> {
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
            .filter(|_| !space.is_above(ROOM_PERCENT))
            .map(|alarm| AlarmChange::Clear { alarm: *alarm });
    }
    let alarm = Alarm { member_id: shared.identity.member_id, kind: AlarmKind::NoSpace };
    (refused || space.is_beyond(0)).then_some(AlarmChange::Raise { alarm, cause: Cause::Quota })
}

impl Store {
    pub fn alarms(&self) -> Vec<Alarm> {
        self.shared.space.alarms.lock().keys().copied().collect()
    }

    /// Raises an alarm or clears it, for all instances. One that is so already stays so.
    pub async fn change_alarm(&self, change: AlarmChange) -> Result<()> {
        self.submit_for_revision(Request::Alarm(change)).await.map(drop)
    }

    /// Gives the database's free space back, in steps between which writes have their turn.
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
