//! The applier: the only way by which committed rows reach the index, the value cache, the leases and the watchers.

use std::collections::HashMap;

use tokio::time::Instant;
use tracing::warn;

use super::{
    Shared,
    batch::{Batch, BatchChange},
};
use crate::{
    index::{Lease, TreeIndex},
    lease,
    log::{self, LeaseChange, WithPrev},
    types::{Change, ChangeKind, KeyRange, LeaseId, Prev, RowId},
};

impl Shared {
    /// Takes up a batch that this instance committed. Index and hub move on together: whoever read a revision finds the hub
    /// at that revision or beyond.
    pub(super) fn apply_batch(&self, batch: &Batch, now: Instant) {
        self.hub.publish(batch.changes(), batch.head(), || {
            self.apply_to_index(batch.changes());
            let mut leases = self.leases.lock();
            for change in batch.in_order() {
                match change {
                    BatchChange::Key(change) => leases.apply(change),
                    BatchChange::Lease(LeaseChange::Grant { id, ttl_secs }) => leases.grant(id, ttl_secs, now),
                    BatchChange::Lease(LeaseChange::Revoke { id }) => leases.revoke(id),
                }
            }
        });
        if !batch.leases().is_empty() {
            self.lease_deadline.notify_one();
        }
    }

    fn apply_to_index(&self, changes: &[Change]) {
        let mut index = self.index.write();
        for change in changes {
            index.apply(change);
        }
        drop(index);
        for change in changes {
            self.values.apply(change);
        }
    }

    /// Takes up what the log has beyond the index: rows that another wrote, or of an append whose outcome was unknown.
    pub(super) async fn resync(&self) -> log::Result<()> {
        let everything = KeyRange::from_wire(b"\0", b"\0");
        let now = Instant::now();
        loop {
            let meta = self.log.meta().await?;
            self.resync_leases(&meta.leases, now);
            let next = self.index.read().head().next();
            if meta.head < next {
                return Ok(());
            }
            let mut page = self.log.changes(next, meta.head, &everything, WithPrev::Yes).await?;
            complete_prev(&self.index.read(), &mut page.changes);
            let head = page.next.prev().min(meta.head);
            self.hub.publish(&page.changes, head, || {
                self.apply_to_index(&page.changes);
                let mut leases = self.leases.lock();
                page.changes.iter().for_each(|change| leases.apply(change));
            });
        }
    }

    fn resync_leases(&self, logged: &[(LeaseId, i64)], now: Instant) {
        let mut leases = self.leases.lock();
        let logged: HashMap<LeaseId, i64> = logged.iter().copied().collect();
        for (id, ttl_secs) in leases.granted() {
            // With another TTL it was revoked and granted anew.
            if logged.get(&id) != Some(&ttl_secs) {
                leases.revoke(id);
            }
        }
        for (id, ttl_secs) in logged {
            if !leases.contains(id) {
                leases.grant(id, ttl_secs, now);
            }
        }
        drop(leases);
        self.lease_deadline.notify_one();
    }

    /// Completes changes with the pairs that they replace, for watchers that asked for them. A pair that cannot be had is
    /// left out, as etcd leaves out one that was compacted.
    pub(super) async fn fill_prev(&self, changes: &mut [Change]) {
        let lacking = |prev: &&Prev| prev.kv.is_none();
        let rows: Vec<RowId> = changes.iter().filter_map(|c| c.prev.as_ref()).filter(lacking).map(|p| p.row).collect();
        if rows.is_empty() {
            return;
        }
        let found: HashMap<_, _> = match self.log.values(&rows).await {
            Ok(found) => found.into_iter().collect(),
            Err(error) => {
                warn!(%error, "cannot read previous pairs for watchers");
                return;
            }
        };
        for prev in changes.iter_mut().filter_map(|change| change.prev.as_mut()) {
            if prev.kv.is_none() {
                prev.kv = found.get(&prev.row).cloned();
            }
        }
    }

    /// Hangs every key of the index on the lease that it names; for a start.
    pub(super) fn attach_leases(index: &TreeIndex, leases: &mut lease::Table) {
        let from_first = KeyRange::from_wire(b"", b"\0");
        for (key, entry) in index.range(from_first.bounds(), index.head()) {
            if let Lease::Known(Some(id)) = entry.lease {
                leases.attach(id, key.clone());
            }
        }
    }
}

/// Rows from the log name the revision of what they replaced; the index knows the row and its lease.
fn complete_prev(index: &TreeIndex, changes: &mut [Change]) {
    let mut newest: HashMap<&[u8], (RowId, Option<LeaseId>)> = HashMap::new();
    for change in changes {
        let known = newest.get(change.key.as_slice()).copied().or_else(|| {
            let entry = index.get(&change.key, index.head())?;
            let Lease::Known(lease) = entry.lease else { return None };
            Some((entry.version.row, lease))
        });
        if let Some((row, lease)) = known {
            change.prev_lease = lease;
            if let Some(prev) = change.prev.as_mut().filter(|prev| prev.row.revision == row.revision) {
                prev.row = row;
            }
        }
        let change: &Change = change;
        let lease = match &change.kind {
            ChangeKind::Put { lease, .. } => *lease,
            ChangeKind::Delete => None,
        };
        newest.insert(change.key.as_slice(), (change.row, lease));
    }
}
