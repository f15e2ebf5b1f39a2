//! The applier: the only path by which committed rows reach the index, the value cache, the leases and the watchers.

use tokio::time::Instant;
use tracing::warn;

use super::{
    batch::{Batch, BatchChange},
    shared::Shared,
    txn::Fetched,
};
use crate::{
    lease,
    log::{LeaseChange, Position},
    types::{Change, Revision},
};

impl Shared {
    /// Applies a batch that this instance committed at `expected`. Index and hub advance together: if a client has read
    /// a revision, the hub is at that revision or a later one. Changes that were already read from the log are skipped.
    pub(super) fn apply_batch(&self, batch: &Batch, expected: Position, now: Instant) {
        let epoch = if batch.advances_epoch() { expected.epoch + 1 } else { expected.epoch };
        self.hub.publish(batch.changes(), batch.head(), |changes| {
            self.apply_changes(changes, |leases| {
                let first = changes.first().map(|change| change.row);
                let is_epoch_new = epoch > leases.epoch;
                for change in batch.in_order() {
                    match change {
                        BatchChange::Key(change) if first.is_some_and(|first| change.row >= first) => {
                            leases.apply(change)
                        }
                        BatchChange::Key(_) => {}
                        BatchChange::Lease(change) if is_epoch_new => match change {
                            LeaseChange::Grant { id, ttl_secs } => leases.grant(id, ttl_secs, now),
                            LeaseChange::Revoke { id } | LeaseChange::Expire { id } => leases.revoke(id),
                        },
                        BatchChange::Lease(_) => {}
                    }
                }
                leases.epoch = leases.epoch.max(epoch);
                if let Some(change) = batch.alarm().filter(|_| is_epoch_new) {
                    self.space.apply(change);
                }
                if let Some(update) = batch.auth().filter(|_| is_epoch_new) {
                    self.authority.set(update.state.clone());
                }
            });
        });
        if !batch.leases().is_empty() {
            self.count_leases(batch.leases());
            self.lease_deadline.notify_one();
        }
        if let Some(revision) = batch.compaction() {
            self.note_compaction(revision);
        }
    }

    /// Applies changes that were read from the log, all up to `head`.
    pub(super) fn apply_logged(&self, changes: &[Change], head: Revision) {
        self.hub.publish(changes, head, |changes| {
            self.apply_changes(changes, |leases| changes.iter().for_each(|change| leases.apply(change)));
        });
    }

    /// Applies changes to the index, the lease table and the value cache, and keeps the newest for comparison with
    /// another server's log. Index and lease table advance under both locks: the writer, on another thread, evaluates
    /// requests at the head of the index and must find the keys of a lease as of that head.
    fn apply_changes(&self, changes: &[Change], apply_to_leases: impl FnOnce(&mut lease::Table)) {
        let mut index = self.index.write();
        let mut leases = self.leases.lock();
        for change in changes {
            index.apply(change);
        }
        apply_to_leases(&mut leases);
        drop((leases, index));
        self.values.apply(changes);
        self.count(changes);
        self.replication.note_applied(changes, self.log.shared().is_some());
    }

    fn count_leases(&self, changes: &[LeaseChange]) {
        let metrics = &self.metrics.store;
        for change in changes {
            match *change {
                LeaseChange::Grant { ttl_secs, .. } => {
                    metrics.leases_granted.inc();
                    metrics.lease_ttl.observe(ttl_secs as f64);
                }
                LeaseChange::Revoke { .. } | LeaseChange::Expire { .. } => metrics.leases_revoked.inc(),
            }
        }
    }

    /// Adds changes to the metrics and to the used space.
    fn count(&self, changes: &[Change]) {
        let (mut puts, mut bytes) = (0, 0);
        for change in changes {
            if let Some(kv) = change.kv() {
                puts += 1;
                bytes += kv.len();
            }
        }
        let metrics = &self.metrics.store;
        metrics.puts.inc_by(puts);
        metrics.deletes.inc_by(changes.len() as u64 - puts);
        metrics.events.inc_by(changes.len() as u64);
        let bytes = i64::try_from(bytes).unwrap_or(i64::MAX);
        metrics.put_bytes.add(bytes);
        metrics.written_bytes.add(bytes);
        self.space.note_written(changes, bytes);
    }

    /// Fills in the previous pairs of changes, for watchers that requested them. A pair that cannot be read is left
    /// out, as etcd leaves out a compacted one. Adds those that it reads to `fetched`.
    pub(super) async fn fill_prev(&self, changes: &mut [Change], fetched: &mut Fetched) {
        let mut missing = Vec::new();
        for prev in changes.iter_mut().filter_map(|change| change.prev.as_mut()).filter(|prev| prev.kv.is_none()) {
            prev.kv = fetched.get(&prev.row).cloned().flatten();
            if prev.kv.is_none() {
                missing.push(prev.row);
            }
        }
        if missing.is_empty() {
            return;
        }
        match self.log.values(&missing).await {
            Ok(found) => fetched.extend(found.into_iter().map(|(row, kv)| (row, Some(kv)))),
            Err(error) => return warn!(%error, "cannot read previous pairs for watchers"),
        }
        for prev in changes.iter_mut().filter_map(|change| change.prev.as_mut()).filter(|prev| prev.kv.is_none()) {
            prev.kv = fetched.get(&prev.row).cloned().flatten();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        auth::{AuthChange, AuthState},
        log::{Alarm, AlarmChange, AlarmKind, Cause, LeaseScope, LoggedLease},
        store::{batch::AuthUpdate, fixtures::shared},
        types::{ChangeKind, EncodedKv, Key, LeaseId, RowId, Version},
    };

    /// A task that follows the log has read them, and later changes of other instances, before the writer applies them.
    #[tokio::test]
    async fn own_changes_that_were_read_from_the_log_are_not_applied_again() {
        const ID: LeaseId = LeaseId(7);
        let shared = shared(0);
        let mut meta = shared.log.meta().await.unwrap();

        let expected = shared.position();
        let mut batch = Batch::new(expected.head);
        batch.push_lease(LeaseChange::Grant { id: ID, ttl_secs: 600 });
        let savepoint = batch.savepoint();
        let row: RowId = batch.next_row(savepoint);
        let version = Version { row, create_revision: row.revision, version: 1 };
        let kind = ChangeKind::put(EncodedKv::new(b"k", version, b"", Some(ID)));
        batch.push(Change { row, key: Key::from(&b"k"[..]), kind, prev: None, prev_lease: None });
        batch.seal(savepoint);
        meta.position.epoch = 1;
        meta.leases = vec![LoggedLease { id: ID, ttl_secs: 600, left_secs: None }];
        shared.update_leases(&meta, &LeaseScope::All, None);
        shared.apply_logged(batch.changes(), batch.head());
        shared.apply_batch(&batch, expected, Instant::now());
        assert_eq!(shared.leases.lock().keys(ID).len(), 1, "the key ends with its lease");

        let expected = shared.position();
        let mut batch = Batch::new(expected.head);
        let alarm = Alarm { member_id: 1, kind: AlarmKind::NoSpace };
        batch.set_alarm(AlarmChange::Raise { alarm, cause: Cause::Client });
        // Another instance has cleared it.
        meta.position.epoch = 3;
        shared.update_leases(&meta, &LeaseScope::All, None);
        shared.apply_batch(&batch, expected, Instant::now());
        assert!(shared.space.alarms.lock().is_empty());

        let expected = shared.position();
        let mut batch = Batch::new(expected.head);
        batch.set_auth(AuthUpdate { change: AuthChange::Disable, state: AuthState::default() });
        // Another instance has changed users since.
        meta.position.epoch = 5;
        let newest = AuthState { revision: 9, ..AuthState::default() };
        shared.update_leases(&meta, &LeaseScope::All, Some(newest.clone()));
        shared.apply_batch(&batch, expected, Instant::now());
        assert_eq!(shared.authority.get().state(), &newest);
    }
}
