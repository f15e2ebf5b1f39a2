//! A batch: changes that are evaluated but not yet in the log. The writer collects them between two commits.
//!
//! A request in a batch sees the changes of the requests before it. The batch is therefore read together with the index
//! on which it was evaluated.

use std::{collections::BTreeMap, ops::Bound};

use tokio::time::Instant;

use crate::{
    auth::{AuthChange, AuthState, KeySet},
    index::{Entry, Lease, TreeIndex},
    lease,
    log::{AlarmChange, LeaseChange},
    types::{Change, ChangeKind, EncodedKv, Key, KeyBounds, KeyRange, LeaseId, Rebase, Revision, RowId, Version},
};

/// The changes of one commit, in the order in which they were made.
#[derive(Debug)]
pub struct Batch {
    base: Revision,
    head: Revision,
    changes: Vec<Change>,
    /// For each changed key, the position of its newest change in `changes`.
    newest: BTreeMap<Key, usize>,
    /// For each change, the position that `newest` contained for its key before, if any. A rollback restores it.
    replaced: Vec<Option<usize>>,
    leases: Vec<LeaseChange>,
    /// For each lease change, the number of key changes before it.
    lease_positions: Vec<usize>,
    compaction: Option<Revision>,
    alarm: Option<AlarmChange>,
    auth: Option<AuthUpdate>,
}

/// A change of users and roles, and the state after it.
#[derive(Debug)]
pub struct AuthUpdate {
    pub change: AuthChange,
    pub state: AuthState,
}

/// A savepoint to which a failed request is rolled back.
#[derive(Clone, Copy, Debug)]
pub struct Savepoint {
    head: Revision,
    changes: usize,
    leases: usize,
}

/// One change of a batch.
#[derive(Clone, Copy, Debug)]
pub enum BatchChange<'a> {
    Key(&'a Change),
    Lease(LeaseChange),
}

/// A live key as the next request in the batch sees it.
#[derive(Clone, Debug)]
pub struct Current {
    pub version: Version,
    pub lease: Option<LeaseId>,
    /// Its pair, if the batch wrote it.
    pub kv: Option<EncodedKv>,
}

impl Current {
    pub fn entry(&self) -> Entry {
        Entry { version: self.version, lease: Lease::Known(self.lease) }
    }
}

impl Batch {
    pub fn new(base: Revision) -> Self {
        Self {
            base,
            head: base,
            changes: Vec::new(),
            newest: BTreeMap::new(),
            replaced: Vec::new(),
            leases: Vec::new(),
            lease_positions: Vec::new(),
            compaction: None,
            alarm: None,
            auth: None,
        }
    }

    /// Returns the log's head after this batch.
    pub fn head(&self) -> Revision {
        self.head
    }

    /// Returns the log's head before this batch.
    pub fn base(&self) -> Revision {
        self.base
    }

    /// Returns the changes of keys.
    pub fn changes(&self) -> &[Change] {
        &self.changes
    }

    pub fn changes_mut(&mut self) -> &mut [Change] {
        &mut self.changes
    }

    pub fn leases(&self) -> &[LeaseChange] {
        &self.leases
    }

    pub fn is_empty(&self) -> bool {
        self.changes.is_empty() && !self.advances_epoch()
    }

    /// Returns whether the batch changes anything other than keys.
    pub fn advances_epoch(&self) -> bool {
        !self.leases.is_empty() || self.compaction.is_some() || self.alarm.is_some() || self.auth.is_some()
    }

    pub fn alarm(&self) -> Option<AlarmChange> {
        self.alarm
    }

    pub fn set_alarm(&mut self, change: AlarmChange) {
        self.alarm = Some(change);
    }

    pub fn auth(&self) -> Option<&AuthUpdate> {
        self.auth.as_ref()
    }

    pub fn set_auth(&mut self, update: AuthUpdate) {
        self.auth = Some(update);
    }

    pub fn compaction(&self) -> Option<Revision> {
        self.compaction
    }

    pub fn set_compaction(&mut self, revision: Revision) {
        self.compaction = Some(revision);
    }

    pub fn savepoint(&self) -> Savepoint {
        Savepoint { head: self.head, changes: self.changes.len(), leases: self.leases.len() }
    }

    /// Removes all changes after the savepoint.
    pub fn roll_back(&mut self, savepoint: Savepoint) {
        while self.changes.len() > savepoint.changes {
            let change = self.changes.pop().expect("there are changes after the savepoint");
            match self.replaced.pop().flatten() {
                Some(position) => self.newest.insert(change.key, position),
                None => self.newest.remove(&change.key),
            };
        }
        self.leases.truncate(savepoint.leases);
        self.lease_positions.truncate(savepoint.leases);
        self.head = savepoint.head;
    }

    /// Returns whether a key changed since the savepoint.
    pub fn changed_since(&self, savepoint: Savepoint) -> bool {
        self.changes.len() > savepoint.changes
    }

    /// Ends the transaction that began at the savepoint. Without this call the next transaction would share its
    /// revision.
    pub fn seal(&mut self, savepoint: Savepoint) {
        if self.changed_since(savepoint) {
            self.head = self.head.next();
        }
    }

    /// Returns the row of the transaction's next change.
    pub fn next_row(&self, savepoint: Savepoint) -> RowId {
        let sub =
            u32::try_from(self.changes.len() - savepoint.changes).expect("a transaction has fewer than 2^32 changes");
        RowId::new(self.head.next(), sub)
    }

    /// Adds a change. If a transaction changes a key twice, the second change shows the version before the transaction
    /// as the previous one, as in etcd.
    pub fn push(&mut self, mut change: Change) {
        let position = self.changes.len();
        let replaced = self.newest.insert(change.key.clone(), position);
        if let Some(before) = replaced.map(|position| &self.changes[position])
            && before.row.revision == change.row.revision
        {
            change.prev.clone_from(&before.prev);
        }
        self.replaced.push(replaced);
        self.changes.push(change);
    }

    /// Adds a change of a lease.
    pub fn push_lease(&mut self, change: LeaseChange) {
        self.leases.push(change);
        self.lease_positions.push(self.changes.len());
    }

    /// Moves the batch behind changes of other instances.
    pub fn rebase(&mut self, rebase: Rebase) {
        self.base = rebase.head(self.base);
        self.head = rebase.head(self.head);
        self.changes.iter_mut().for_each(|change| rebase.change(change));
    }

    /// Returns all changes in the order in which they were made.
    pub fn in_order(&self) -> impl Iterator<Item = BatchChange<'_>> {
        let mut leases = self.leases.iter().zip(&self.lease_positions).peekable();
        let mut changes = self.changes.iter().enumerate().peekable();
        std::iter::from_fn(move || {
            let position = changes.peek().map_or(self.changes.len(), |(position, _)| *position);
            match leases.next_if(|(_, before)| **before <= position) {
                Some((lease, _)) => Some(BatchChange::Lease(*lease)),
                None => changes.next().map(|(_, change)| BatchChange::Key(change)),
            }
        })
    }

    /// Returns the key as the next request sees it, if it is live.
    pub fn current(&self, index: &TreeIndex, key: &[u8]) -> Option<Current> {
        match self.newest.get(key) {
            Some(position) => self.state_after(*position),
            None => index.get(key, self.base).map(from_index),
        }
    }

    /// Returns the state of a key after the change at `position`, or `None` if that is a delete.
    fn state_after(&self, position: usize) -> Option<Current> {
        let change = &self.changes[position];
        match &change.kind {
            ChangeKind::Put { kv, create_revision, version, lease } => Some(Current {
                version: Version { row: change.row, create_revision: *create_revision, version: *version },
                lease: *lease,
                kv: Some(kv.clone()),
            }),
            ChangeKind::Delete => None,
        }
    }

    /// Visits the live keys of a range in order, as the next request sees them. Returns the number of keys that it has
    /// looked at, including deleted ones.
    pub fn visit(&self, index: &TreeIndex, range: &KeyRange, mut visit: impl FnMut(&Key, Current)) -> usize {
        if let KeyRange::Single(key) = range {
            if let Some(current) = self.current(index, key) {
                visit(key, current);
            }
            return 1;
        }
        if range.is_empty() {
            return 0;
        }
        let mut visited = 0;
        let mut from = range.bounds().0;
        for (key, position) in self.newest.range::<[u8], _>(range.bounds()) {
            if let Some(before) = bounds_before(from, key) {
                visited += index.visit(before, self.base, |key, entry| visit(key, from_index(entry)));
            }
            visited += 1;
            if let Some(current) = self.state_after(*position) {
                visit(key, current);
            }
            from = Bound::Excluded(key);
        }
        let rest = (from, range.bounds().1);
        if !is_empty(rest) {
            visited += index.visit(rest, self.base, |key, entry| visit(key, from_index(entry)));
        }
        visited
    }

    /// Returns whether the lease exists for the next request.
    pub fn lease_exists(&self, leases: &lease::Table, wanted: LeaseId) -> bool {
        self.lease_change(wanted).unwrap_or_else(|| leases.contains(wanted))
    }

    /// Returns whether the lease has expired. Returns false if this batch granted, revoked or expired it.
    pub fn is_lease_expired(&self, leases: &lease::Table, wanted: LeaseId, now: Instant) -> bool {
        self.lease_change(wanted).is_none() && leases.is_expired(wanted, now)
    }

    /// Returns whether the lease exists after the batch's changes to it, or `None` if the batch does not change it.
    fn lease_change(&self, wanted: LeaseId) -> Option<bool> {
        self.leases.iter().rev().find_map(|change| match *change {
            LeaseChange::Grant { id, .. } => (id == wanted).then_some(true),
            LeaseChange::Revoke { id } | LeaseChange::Expire { id } => (id == wanted).then_some(false),
        })
    }

    /// Returns the live keys of the lease in order, as the next request sees them.
    pub fn lease_keys(&self, leases: &lease::Table, wanted: LeaseId) -> Vec<Key> {
        let unchanged = leases.keys(wanted).iter().filter(|key| !self.is_changed(key));
        let mut keys: Vec<Key> = unchanged.chain(self.changed_lease_keys(wanted)).cloned().collect();
        keys.sort_unstable();
        keys
    }

    /// Returns whether `set` lacks one of the lease's live keys, as the next request sees them. Keys within `set` cost
    /// nothing, except those that the batch has changed: a lease may have very many keys.
    pub fn has_lease_key_outside(&self, leases: &lease::Table, wanted: LeaseId, set: &KeySet) -> bool {
        set.outside(leases.keys(wanted)).any(|key| !self.is_changed(key))
            || self.changed_lease_keys(wanted).any(|key| !set.contains_key(key))
    }

    fn is_changed(&self, key: &Key) -> bool {
        self.newest.contains_key(key)
    }

    /// Returns the keys that the batch has changed and that have the lease now.
    fn changed_lease_keys(&self, wanted: LeaseId) -> impl Iterator<Item = &Key> {
        let has_lease = move |position: usize| match self.changes[position].kind {
            ChangeKind::Put { lease, .. } => lease == Some(wanted),
            ChangeKind::Delete => false,
        };
        self.newest.iter().filter(move |(_, position)| has_lease(**position)).map(|(key, _)| key)
    }
}

fn from_index(entry: Entry) -> Current {
    let lease = match entry.lease {
        Lease::Known(lease) => lease,
        Lease::InRow => None,
    };
    debug_assert!(matches!(entry.lease, Lease::Known(_)), "the newest version's lease is in the index");
    Current { version: entry.version, lease, kv: None }
}

/// Returns the bounds [`from`, `key`), or `None` if they are empty.
fn bounds_before<'a>(from: Bound<&'a [u8]>, key: &'a Key) -> Option<KeyBounds<'a>> {
    let bounds = (from, Bound::Excluded(key.as_slice()));
    (!is_empty(bounds)).then_some(bounds)
}

/// Returns whether nothing can be within the bounds. `BTreeMap::range` panics on such bounds.
fn is_empty(bounds: KeyBounds<'_>) -> bool {
    match bounds {
        (Bound::Included(from), Bound::Excluded(to))
        | (Bound::Excluded(from), Bound::Excluded(to) | Bound::Included(to)) => from >= to,
        (Bound::Included(from), Bound::Included(to)) => from > to,
        (Bound::Unbounded, _) | (_, Bound::Unbounded) => false,
    }
}
