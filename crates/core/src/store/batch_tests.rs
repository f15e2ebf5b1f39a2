//! Tests batches against a naive implementation: the state that a request in a batch sees, for all kinds of ranges, and
//! rollback.

use std::{collections::BTreeMap, time::Duration};

use proptest::{collection::vec, prelude::*, sample::select};
use tokio::time::Instant;

use super::{
    batch::{Batch, BatchChange, Current},
    generators::{KEYS, key_ranges},
};
use crate::{
    index::{Entry, Lease, TreeIndex},
    lease,
    log::LeaseChange,
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, LeaseId, Prev, Revision, RowId, Version},
};

/// One change of a transaction.
#[derive(Clone, Copy, Debug)]
enum Op {
    Put { key: &'static str, lease: i64 },
    Delete { key: &'static str },
    Grant,
}

/// The operations of a transaction, and whether it is committed or rolled back.
type Txn = (Vec<Op>, bool);
/// The version and lease of each live key, and its pair if the batch wrote it.
type Live = BTreeMap<Key, (Version, Option<LeaseId>, Option<EncodedKv>)>;
type Checked = Result<(), TestCaseError>;

proptest! {
    #![proptest_config(ProptestConfig::with_cases(500))]

    #[test]
    fn requests_see_the_index_and_the_changes_of_the_batch(
        before in vec(txns(), 0..6),
        txns in vec(txns(), 0..6),
        ranges in vec(key_ranges(), 12),
    ) {
        let (index, live) = indexed(&before);
        let mut world = World { batch: Batch::new(index.head()), index, live, made: Vec::new() };
        world.check(&ranges)?;
        for txn in &txns {
            world.run(txn)?;
            world.check(&ranges)?;
        }
    }
}

#[test]
fn second_change_of_a_key_shows_the_pair_before_the_transaction() {
    let (index, _) = indexed(&[(vec![Op::Put { key: "a", lease: 1 }], true)]);
    let mut batch = Batch::new(index.head());
    let savepoint = batch.savepoint();
    for put in [false, true] {
        let current = batch.current(&index, b"a");
        let change = change(batch.next_row(savepoint), "a", put.then_some(2), current.as_ref());
        batch.push(change);
    }
    batch.seal(savepoint);
    let prev: Vec<_> = batch.changes().iter().map(|change| change.prev.as_ref().map(|prev| prev.row)).collect();
    let first = RowId::new(Revision(2), 0);
    assert_eq!(prev, [Some(first), Some(first)]);
}

struct World {
    index: TreeIndex,
    batch: Batch,
    live: Live,
    /// All changes that were not rolled back, in order. A lease change is represented by its id.
    made: Vec<Result<RowId, LeaseId>>,
}

impl World {
    fn run(&mut self, (ops, is_committed): &Txn) -> Checked {
        let (live, made, text) = (self.live.clone(), self.made.clone(), format!("{:?}", self.batch));
        let (savepoint, head) = (self.batch.savepoint(), self.batch.head());
        for op in ops {
            let row = self.batch.next_row(savepoint);
            let Some((key, lease)) = op.target() else {
                self.batch.push_lease(LeaseChange::Grant { id: LeaseId(9), ttl_secs: 9 });
                self.made.push(Err(LeaseId(9)));
                continue;
            };
            let current = self.batch.current(&self.index, key.as_bytes());
            if lease.is_none() && current.is_none() {
                continue;
            }
            self.batch.push(change(row, key, lease, current.as_ref()));
            self.made.push(Ok(row));
            note(&mut self.live, self.batch.changes().last().expect("just pushed"), true);
        }
        if *is_committed {
            let changed = self.made[made.len()..].iter().any(Result::is_ok);
            prop_assert_eq!(self.batch.changed_since(savepoint), changed);
            self.batch.seal(savepoint);
            prop_assert_eq!(self.batch.head(), if changed { head.next() } else { head });
        } else {
            self.batch.roll_back(savepoint);
            prop_assert_eq!(format!("{:?}", self.batch), text);
            (self.live, self.made) = (live, made);
        }
        Ok(())
    }

    fn check(&self, ranges: &[KeyRange]) -> Checked {
        for key in KEYS.into_iter().chain(["", "aa", "d"]) {
            let current = self.batch.current(&self.index, key.as_bytes()).map(fields);
            prop_assert_eq!(current.as_ref(), self.live.get(key.as_bytes()), "{:?}", key);
        }
        let all = KeyRange::from_wire(b"\0", b"\0");
        for range in ranges.iter().chain([&all]) {
            let mut seen = Vec::new();
            let visited =
                self.batch.visit(&self.index, range, |key, current| seen.push((key.clone(), fields(current))));
            prop_assert_eq!(visited, self.known_keys(range), "{:?}", range);
            let within = self.live.iter().filter(|(key, _)| range.contains(key));
            let expected: Vec<_> = within.map(|(key, state)| (key.clone(), state.clone())).collect();
            prop_assert_eq!(seen, expected, "{:?}", range);
        }
        let in_order = self.batch.in_order().map(|change| match change {
            BatchChange::Key(change) => Ok(change.row),
            BatchChange::Lease(
                LeaseChange::Grant { id, .. } | LeaseChange::Revoke { id } | LeaseChange::Expire { id },
            ) => Err(id),
        });
        prop_assert_eq!(in_order.collect::<Vec<_>>(), self.made.clone());
        prop_assert_eq!(self.batch.is_empty(), self.made.is_empty());
        Ok(())
    }

    /// Returns the number of keys of a range that the index or the batch knows, live or deleted. A single key is looked up
    /// in any case.
    fn known_keys(&self, range: &KeyRange) -> usize {
        if matches!(range, KeyRange::Single(_)) {
            return 1;
        }
        let is_changed = |key: &[u8]| self.batch.changes().iter().any(|change| change.key.as_slice() == key);
        let is_known = |key: &[u8]| is_changed(key) || !self.index.changes(key, Revision(0), 1).is_empty();
        KEYS.iter().filter(|key| range.contains(key.as_bytes()) && is_known(key.as_bytes())).count()
    }
}

fn fields(current: Current) -> (Version, Option<LeaseId>, Option<EncodedKv>) {
    let entry = Entry { version: current.version, lease: Lease::Known(current.lease) };
    assert_eq!(current.entry(), entry);
    (current.version, current.lease, current.kv)
}

/// Returns the index after these transactions, and its live keys.
fn indexed(txns: &[Txn]) -> (TreeIndex, Live) {
    let (mut index, mut live) = (TreeIndex::new(), Live::new());
    for (ops, _) in txns {
        let revision = index.head().next();
        let mut sub = 0;
        for (key, lease) in ops.iter().filter_map(|op| op.target()) {
            let current = live.get(key.as_bytes()).map(|(version, lease, _)| Current {
                version: *version,
                lease: *lease,
                kv: None,
            });
            if lease.is_none() && current.is_none() {
                continue;
            }
            let change = change(RowId::new(revision, sub), key, lease, current.as_ref());
            sub += 1;
            index.apply(&change);
            note(&mut live, &change, false);
        }
    }
    (index, live)
}

fn note(live: &mut Live, change: &Change, with_pair: bool) {
    match &change.kind {
        ChangeKind::Put { kv, create_revision, version, lease } => {
            let version = Version { row: change.row, create_revision: *create_revision, version: *version };
            live.insert(change.key.clone(), (version, *lease, with_pair.then(|| kv.clone())));
        }
        ChangeKind::Delete => {
            live.remove(&change.key);
        }
    }
}

/// Returns a put with a lease, or a delete if `lease` is `None`.
fn change(row: RowId, key: &str, lease: Option<i64>, current: Option<&Current>) -> Change {
    let version = match current {
        Some(current) => Version { row, version: current.version.version + 1, ..current.version },
        None => Version { row, create_revision: row.revision, version: 1 },
    };
    let kind = match lease.map(LeaseId::from_wire) {
        Some(lease) => ChangeKind::put(EncodedKv::new(key.as_bytes(), version, b"value", lease)),
        None => ChangeKind::Delete,
    };
    let prev = current.map(|current| Prev { row: current.version.row, kv: None });
    Change { row, key: Key::from(key.as_bytes()), kind, prev, prev_lease: current.and_then(|current| current.lease) }
}

impl Op {
    /// Returns the key and, for a put, the lease.
    fn target(self) -> Option<(&'static str, Option<i64>)> {
        match self {
            Self::Put { key, lease } => Some((key, Some(lease))),
            Self::Delete { key } => Some((key, None)),
            Self::Grant => None,
        }
    }
}

/// Changes of distinct keys, except that a key may be deleted and put again.
fn txns() -> impl Strategy<Value = Txn> {
    let op = (select(KEYS.to_vec()), 0..3_i64, 0..8_u8).prop_map(|(key, lease, kind)| match kind {
        0..4 => vec![Op::Put { key, lease }],
        4..6 => vec![Op::Delete { key }],
        6 => vec![Op::Delete { key }, Op::Put { key, lease }],
        _ => vec![Op::Grant],
    });
    let ops = vec(op, 0..4).prop_map(|groups| {
        let mut seen = Vec::new();
        let mut new = |group: &Vec<Op>| match group[0].target() {
            Some((key, _)) if seen.contains(&key) => false,
            target => {
                seen.extend(target.map(|(key, _)| key));
                true
            }
        };
        groups.into_iter().filter(|group| new(group)).flatten().collect()
    });
    (ops, prop::bool::weighted(0.7))
}

#[test]
fn lease_granted_again_by_the_batch_is_not_expired() {
    let (now, id) = (Instant::now(), LeaseId(1));
    let mut leases = lease::Table::default();
    leases.grant(id, 3, now);
    let later = now + Duration::from_secs(4);
    let mut batch = Batch::new(Revision::EMPTY);
    assert!(!batch.is_lease_expired(&leases, id, now));
    assert!(batch.is_lease_expired(&leases, id, later));
    // Two requests expire a lease, and its id is granted again between them.
    batch.push_lease(LeaseChange::Expire { id });
    assert!(!batch.is_lease_expired(&leases, id, later), "the lease was expired by the batch");
    batch.push_lease(LeaseChange::Grant { id, ttl_secs: 4 });
    assert!(!batch.is_lease_expired(&leases, id, later), "the lease was granted again");
}
