//! Alarms and the space quota.
//!
//! While NOSPACE is raised, by any instance, puts, transactions with puts and new leases are rejected. Reads are
//! served, and so are deletes and compactions, because they free space. The server raises the alarm if the used space
//! plus the current write would exceed the quota, and clears it when enough space is free again. An alarm that a client
//! raised is cleared only by a client. While CORRUPT is raised, all writes fail except changes of alarms, users and roles.
//!
//! Between measurements, the used space is the last measured size plus the bytes written since. The size is measured
//! again before a write is rejected, unless NOSPACE is raised or is about to be raised.

use std::{collections::BTreeMap, sync::atomic::Ordering};

use tokio::sync::Notify;
use tracing::{error, info};

use super::error::{Error, Result};
use crate::{
    log::{Alarm, AlarmChange, AlarmKind, Cause, Meta},
    sync::{AtomicBool, AtomicI64, Mutex},
    types::Change,
};

/// etcd's default quota in bytes.
const QUOTA_DEFAULT: i64 = 2 << 30;
/// Free bytes of the database's disk below which puts are rejected. They leave space for the alarm, for deletes, and for what
/// SQLite has only in its WAL. They do not always suffice: puts between two measurements, and the rows of many deletes, can
/// take all of it. Deletes and compactions then go on while SQLite's WAL has allocated space.
const DISK_FREE_MIN: u64 = 4 << 20;
/// Approximate overhead of a row in bytes, in addition to its key and value.
pub const ROW_BYTES: i64 = 100;

/// Returns the quota in bytes that a setting means, as etcd's `--quota-backend-bytes`: 0 is 2 GiB, and a negative value is
/// no quota.
pub fn quota_of(setting: i64) -> Option<i64> {
    match setting {
        0 => Some(QUOTA_DEFAULT),
        quota if quota < 0 => None,
        quota => Some(quota),
    }
}

/// The used space, the quota and the alarms.
pub(super) struct Space {
    /// Bytes; `None`: no quota.
    pub(super) quota: Option<i64>,
    /// Approximate bytes in use.
    pub(super) used: AtomicI64,
    /// Notified when the size should be measured.
    pub(super) measure_requested: Notify,
    /// Whether a write was rejected since the quota task last ran. The task then raises NOSPACE.
    pub(super) has_rejected: AtomicBool,
    pub(super) alarms: Mutex<BTreeMap<Alarm, Cause>>,
    pub(super) no_space: AtomicBool,
    pub(super) corrupt: AtomicBool,
    /// Whether the database's disk was full when it was last measured.
    pub(super) is_disk_full: AtomicBool,
}

impl Space {
    /// `quota_bytes`: see [`quota_of`].
    pub(super) fn new(quota_bytes: i64) -> Self {
        Self {
            quota: quota_of(quota_bytes),
            used: AtomicI64::new(0),
            measure_requested: Notify::new(),
            has_rejected: AtomicBool::new(false),
            alarms: Mutex::default(),
            no_space: AtomicBool::new(false),
            corrupt: AtomicBool::new(false),
            is_disk_full: AtomicBool::new(false),
        }
    }

    /// Returns the quota in bytes, 0 if there is none.
    pub(super) fn quota(&self) -> u64 {
        self.quota.map_or(0, i64::cast_unsigned)
    }

    /// # Errors
    ///
    /// [`Error::Corrupt`] while the CORRUPT alarm is raised.
    pub(super) fn check_not_corrupt(&self) -> Result<()> {
        if self.corrupt.load(Ordering::Relaxed) { Err(Error::Corrupt) } else { Ok(()) }
    }

    /// Requests a measurement, because space may have been freed.
    pub(super) fn note_freed(&self) {
        self.measure_requested.notify_one();
    }

    /// Records the free space of the database's disk.
    pub(super) fn set_disk_free(&self, free: Option<u64>) {
        let was_full = self.is_disk_full.load(Ordering::Relaxed);
        // The second limit is higher, so that the state does not change with every small write.
        let is_full = free.is_some_and(|free| free < DISK_FREE_MIN || (was_full && free < 2 * DISK_FREE_MIN));
        if is_full && !was_full {
            let free = free.unwrap_or(0);
            error!(free, "the disk is full: writes are rejected until space is freed, reads continue");
        }
        self.is_disk_full.store(is_full, Ordering::Relaxed);
    }

    /// Adds written changes to the used space.
    pub(super) fn note_written(&self, changes: &[Change], bytes: i64) {
        self.used.fetch_add(bytes + ROW_BYTES * i64::try_from(changes.len()).unwrap_or(0), Ordering::Relaxed);
    }

    /// Returns whether `more` additional bytes would exceed the quota, as of the known size.
    pub(super) fn would_exceed_quota(&self, more: i64) -> bool {
        self.quota.is_some_and(|quota| self.used.load(Ordering::Relaxed).saturating_add(more) > quota)
    }

    /// Returns whether the used space is above this percentage of the quota.
    pub(super) fn is_above_percent(&self, percent: i64) -> bool {
        self.quota.is_some_and(|quota| self.used.load(Ordering::Relaxed) > quota / 100 * percent)
    }

    /// Replaces the alarms by those in the log.
    pub(super) fn set_alarms(&self, meta: &Meta) {
        self.update(|alarms| *alarms = meta.alarms.iter().copied().collect());
    }

    /// Applies a change of this instance's own batch.
    pub(super) fn apply(&self, change: AlarmChange) {
        self.update(|alarms| match change {
            AlarmChange::Raise { alarm, cause } => {
                self.log_raised(alarm);
                alarms.insert(alarm, cause);
            }
            AlarmChange::Clear { alarm } => {
                info!(alarm = alarm.kind.name(), member_id = format!("{:x}", alarm.member_id), "alarm cleared");
                alarms.remove(&alarm);
            }
        });
    }

    /// Logs an alarm; NOSPACE with the used space, and the quota if there is one.
    fn log_raised(&self, alarm: Alarm) {
        let is_no_space = alarm.kind == AlarmKind::NoSpace;
        error!(
            alarm = alarm.kind.name(),
            member_id = format!("{:x}", alarm.member_id),
            in_use = is_no_space.then(|| self.used.load(Ordering::Relaxed)),
            quota = self.quota.filter(|_| is_no_space),
            "alarm raised"
        );
    }

    /// Changes the alarms and the flags that the request path reads.
    fn update(&self, change: impl FnOnce(&mut BTreeMap<Alarm, Cause>)) {
        let mut alarms = self.alarms.lock();
        change(&mut alarms);
        let raised = |kind| alarms.keys().any(|alarm| alarm.kind == kind);
        self.no_space.store(raised(AlarmKind::NoSpace), Ordering::Relaxed);
        self.corrupt.store(raised(AlarmKind::Corrupt), Ordering::Relaxed);
    }

    /// Returns the alarms that the server raised because of the quota.
    pub(super) fn raised_by_quota(&self) -> Vec<Alarm> {
        self.alarms.lock().iter().filter(|(_, cause)| **cause == Cause::Quota).map(|(alarm, _)| *alarm).collect()
    }
}
