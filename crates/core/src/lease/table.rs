//! The lease table: a cache of the log's leases, their deadlines and the keys attached to them.
//!
//! Pure: callers pass the time. If this process is the only one on the log, deadlines exist only here. A clean stop
//! records the remaining times; after a crash every lease has its full TTL, so a lease may end late but never early. If
//! several instances share the log, the log stores the deadlines and this table contains the last known ones.

use std::{
    collections::{BTreeSet, HashMap},
    ops::Bound,
    time::Duration,
};

use bytes::Bytes;
use tokio::time::Instant;

use crate::log::LoggedLease;
use crate::types::{Change, ChangeKind, Key, LeaseId};

/// The keys of a lease that does not exist.
static NO_KEYS: BTreeSet<Key> = BTreeSet::new();

#[derive(Debug, Default)]
pub struct Table {
    /// The log's epoch ([`crate::log::Position::epoch`]) up to which this table contains the changes of leases.
    pub epoch: i64,
    leases: HashMap<LeaseId, Lease>,
    deadlines: BTreeSet<(Instant, LeaseId)>,
}

#[derive(Debug)]
struct Lease {
    ttl_secs: i64,
    /// The time at which the lease was added to this table.
    since: Instant,
    deadline: Instant,
    keys: BTreeSet<Key>,
}

/// The result of a keep-alive.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Renewal {
    Renewed {
        ttl_secs: i64,
    },
    /// The lease has expired and is being revoked; it can no longer be renewed.
    Expired,
    Unknown,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remaining {
    pub granted_secs: i64,
    /// Remaining whole seconds, rounded down.
    pub left_secs: i64,
    /// Empty unless they were requested: a lease may have millions.
    pub keys: Vec<Bytes>,
}

/// A lease and the time until it expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Expiring {
    pub id: LeaseId,
    pub ttl_secs: i64,
    pub left: Duration,
    /// Number of attached keys.
    pub keys: usize,
}

impl Table {
    pub fn len(&self) -> usize {
        self.leases.len()
    }

    pub fn is_empty(&self) -> bool {
        self.leases.is_empty()
    }

    pub fn contains(&self, id: LeaseId) -> bool {
        self.leases.contains_key(&id)
    }

    pub fn grant(&mut self, id: LeaseId, ttl_secs: i64, now: Instant) {
        let deadline = deadline(now, ttl_secs);
        self.deadlines.insert((deadline, id));
        self.leases.insert(id, Lease { ttl_secs, since: now, deadline, keys: BTreeSet::new() });
    }

    pub fn revoke(&mut self, id: LeaseId) {
        if let Some(lease) = self.leases.remove(&id) {
            self.deadlines.remove(&(lease.deadline, id));
        }
    }

    pub fn renew(&mut self, id: LeaseId, now: Instant) -> Renewal {
        let Some(lease) = self.leases.get_mut(&id) else { return Renewal::Unknown };
        if lease.deadline <= now {
            return Renewal::Expired;
        }
        self.deadlines.remove(&(lease.deadline, id));
        lease.deadline = deadline(now, lease.ttl_secs);
        self.deadlines.insert((lease.deadline, id));
        Renewal::Renewed { ttl_secs: lease.ttl_secs }
    }

    /// Sets a lease's remaining seconds to the result of a query of the log that began at `queried_at`. Ignores the
    /// result if the lease was added after that time: it may refer to an earlier lease with the same ID.
    pub fn set_left(&mut self, id: LeaseId, left_secs: f64, queried_at: Instant, now: Instant) {
        let Some(lease) = self.leases.get_mut(&id).filter(|lease| lease.since <= queried_at) else { return };
        self.deadlines.remove(&(lease.deadline, id));
        // A negative time is replaced by 0, a time beyond the range of the clock by the full TTL.
        let left = Duration::try_from_secs_f64(left_secs.max(0.0)).unwrap_or(Duration::MAX);
        lease.deadline = now.checked_add(left).unwrap_or_else(|| deadline(now, lease.ttl_secs));
        self.deadlines.insert((lease.deadline, id));
    }

    /// Returns the times of a lease without its keys; `None`: it is unknown or has expired.
    pub fn remaining(&self, id: LeaseId, now: Instant) -> Option<Remaining> {
        let lease = self.leases.get(&id).filter(|lease| lease.deadline > now)?;
        Some(Remaining {
            granted_secs: lease.ttl_secs,
            left_secs: i64::try_from((lease.deadline - now).as_secs()).unwrap_or(i64::MAX),
            keys: Vec::new(),
        })
    }

    pub fn is_expired(&self, id: LeaseId, now: Instant) -> bool {
        self.leases.get(&id).is_some_and(|lease| lease.deadline <= now)
    }

    /// Returns the TTL in seconds of a lease, which may have expired.
    pub fn ttl_secs(&self, id: LeaseId) -> Option<i64> {
        self.leases.get(&id).map(|lease| lease.ttl_secs)
    }

    /// Returns all leases, including expired ones, with their TTLs in seconds.
    pub fn granted(&self) -> Vec<(LeaseId, i64)> {
        self.leases.iter().map(|(id, lease)| (*id, lease.ttl_secs)).collect()
    }

    /// Returns all leases with their remaining times; an expired lease has 0 seconds left.
    pub fn with_times(&self, now: Instant) -> Vec<LoggedLease> {
        let logged = |(id, lease): (&LeaseId, &Lease)| LoggedLease {
            id: *id,
            ttl_secs: lease.ttl_secs,
            left_secs: Some(lease.deadline.saturating_duration_since(now).as_secs_f64()),
        };
        self.leases.iter().map(logged).collect()
    }

    /// Returns the leases that have not expired, in the order of their deadlines.
    pub fn list(&self, now: Instant) -> Vec<LeaseId> {
        self.deadlines.iter().filter(|(deadline, _)| *deadline > now).map(|(_, id)| *id).collect()
    }

    /// Returns at most `limit` leases, the earliest deadline first. An expired lease has no time left.
    pub fn soonest(&self, now: Instant, limit: usize) -> Vec<Expiring> {
        let expiring = |(deadline, id): &(Instant, LeaseId)| {
            let lease = &self.leases[id];
            let left = deadline.saturating_duration_since(now);
            Expiring { id: *id, ttl_secs: lease.ttl_secs, left, keys: lease.keys.len() }
        };
        self.deadlines.iter().take(limit).map(expiring).collect()
    }

    /// Returns at most `limit` expired leases.
    pub fn expired(&self, now: Instant, limit: usize) -> Vec<LeaseId> {
        self.deadlines.iter().take_while(|(deadline, _)| *deadline <= now).take(limit).map(|(_, id)| *id).collect()
    }

    pub fn next_deadline(&self) -> Option<Instant> {
        self.deadlines.first().map(|(deadline, _)| *deadline)
    }

    /// Returns the attached keys.
    pub fn keys(&self, id: LeaseId) -> &BTreeSet<Key> {
        self.leases.get(&id).map_or(&NO_KEYS, |lease| &lease.keys)
    }

    /// Returns the attached keys after `after`, or all of them, in their order.
    pub fn keys_after(&self, id: LeaseId, after: Option<&[u8]>) -> impl Iterator<Item = &Key> {
        let start = after.map_or(Bound::Unbounded, Bound::Excluded);
        self.keys(id).range::<[u8], _>((start, Bound::Unbounded))
    }

    /// Returns the keys of each lease.
    pub fn keys_of_each(&self) -> impl Iterator<Item = &BTreeSet<Key>> {
        self.leases.values().map(|lease| &lease.keys)
    }

    /// Moves the changed key from its previous lease to the lease of the change.
    pub fn apply(&mut self, change: &Change) {
        let before = change.prev_lease;
        let after = match &change.kind {
            ChangeKind::Put { lease, .. } => *lease,
            ChangeKind::Delete => None,
        };
        if before == after {
            return;
        }
        if let Some(lease) = before.and_then(|id| self.leases.get_mut(&id)) {
            lease.keys.remove(&change.key);
        }
        if let Some(id) = after {
            self.attach(id, change.key.clone());
        }
    }

    pub fn attach(&mut self, id: LeaseId, key: Key) {
        if let Some(lease) = self.leases.get_mut(&id) {
            lease.keys.insert(key);
        }
    }
}

fn deadline(now: Instant, ttl_secs: i64) -> Instant {
    let ttl = Duration::from_secs(ttl_secs.max(0).cast_unsigned());
    // An overflow is possible only near the end of the clock's range: TTLs are at most about 285 years.
    now.checked_add(ttl).unwrap_or(now)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{EncodedKv, Prev, Revision, RowId, Version};

    fn put(key: &[u8], before: Option<i64>, after: i64) -> Change {
        let row = RowId::new(Revision(5), 0);
        let version = Version { row, create_revision: Revision(5), version: 1 };
        Change {
            row,
            key: key.into(),
            kind: ChangeKind::put(EncodedKv::new(key, version, b"", LeaseId::from_wire(after))),
            prev: before.map(|_| Prev { row, kv: None }),
            prev_lease: before.and_then(LeaseId::from_wire),
        }
    }

    fn keys(table: &Table, id: i64) -> Vec<&[u8]> {
        table.keys(LeaseId(id)).iter().map(Key::as_slice).collect()
    }

    #[test]
    fn put_moves_its_key_to_another_lease() {
        let now = Instant::now();
        let mut table = Table::default();
        table.grant(LeaseId(1), 10, now);
        table.grant(LeaseId(-2), 10, now);
        table.apply(&put(b"b", None, 1));
        table.apply(&put(b"a", None, 1));
        assert_eq!(keys(&table, 1), [b"a", b"b"]);
        table.apply(&put(b"a", Some(1), -2));
        assert_eq!((keys(&table, 1), keys(&table, -2)), (vec![b"b".as_slice()], vec![b"a".as_slice()]));
        table.apply(&put(b"a", Some(-2), 0));
        assert!(keys(&table, -2).is_empty());
    }

    #[test]
    fn renewal_restarts_the_ttl_and_fails_after_the_deadline() {
        let start = Instant::now();
        let at = |secs| start + Duration::from_secs(secs);
        let mut table = Table::default();
        table.grant(LeaseId(1), 10, start);
        table.grant(LeaseId(2), 5, start);
        assert_eq!(table.list(start), [LeaseId(2), LeaseId(1)]);
        let soonest =
            |limit| table.soonest(at(4), limit).iter().map(|lease| (lease.id.0, lease.left.as_secs())).collect();
        assert_eq!((soonest(9), soonest(1)), (vec![(2, 1), (1, 6)], vec![(2, 1)]));
        assert_eq!(table.renew(LeaseId(2), at(4)), Renewal::Renewed { ttl_secs: 5 });
        assert_eq!(table.next_deadline(), Some(at(9)));
        assert_eq!(table.expired(at(8), 9), []);
        assert_eq!(table.expired(at(10), 9), [LeaseId(2), LeaseId(1)]);
        assert_eq!(table.renew(LeaseId(2), at(9)), Renewal::Expired);
        assert_eq!(table.remaining(LeaseId(2), at(9)), None);
        assert_eq!(table.renew(LeaseId(3), at(9)), Renewal::Unknown);
        table.revoke(LeaseId(2));
        assert_eq!(table.next_deadline(), Some(at(10)));
    }
}
