//! Values of the domain: revisions, keys, ranges, rows. They need no clock, log or lock.
//!
//! Sentinels of the wire format (0, an empty range end, `"\0"`) are converted at the edge, in `api`; below it they are
//! enums and options. The only exception is the inside of [`crate::index`], which packs them to save memory.

mod encoded;
mod key;
mod rebase;

use std::fmt;

pub(crate) use encoded::held_by;
pub use encoded::{EncodedEvent, EncodedKv};
pub use key::{Key, KeyBounds, KeyRange, child_prefix, common_path, prefix_end, shown};
pub use rebase::Rebase;

/// A revision of the store: the id of a row in `kv_log`. An empty store is at [`Revision::EMPTY`]. Each transaction
/// that changes something increases the revision by 1.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub i64);

impl Revision {
    /// The revision of an empty store.
    pub const EMPTY: Self = Self(1);
    pub const MAX: Self = Self(i64::MAX);

    pub const fn next(self) -> Self {
        Self(self.0 + 1)
    }

    pub const fn prev(self) -> Self {
        Self(self.0 - 1)
    }
}

impl fmt::Debug for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "r{}", self.0)
    }
}

impl fmt::Display for Revision {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// The position of one change in the log: its revision, and its number among the changes of that revision, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RowId {
    pub revision: Revision,
    pub sub: u32,
}

impl RowId {
    pub const fn new(revision: Revision, sub: u32) -> Self {
        Self { revision, sub }
    }

    /// Returns the lowest row behind this one, whether the log contains it or not.
    pub const fn next(self) -> Self {
        match self.sub.checked_add(1) {
            Some(sub) => Self { sub, ..self },
            None => Self::new(self.revision.next(), 0),
        }
    }
}

/// A row and the revision at which it was superseded.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub struct Superseded {
    pub row: RowId,
    /// The first revision, at or after that of the row, whose state does not contain the row: the revision of the next
    /// change of its key, or its own if it is a tombstone.
    pub end: Revision,
}

/// A lease's ID. Clients may choose any number but 0, including negative ones.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

impl LeaseId {
    /// Converts the ID on the wire, where 0 means no lease.
    pub const fn from_wire(id: i64) -> Option<Self> {
        if id == 0 { None } else { Some(Self(id)) }
    }

    pub const fn to_wire(lease: Option<Self>) -> i64 {
        match lease {
            Some(Self(id)) => id,
            None => 0,
        }
    }
}

impl fmt::Debug for LeaseId {
    /// Prints the ID in hexadecimal, as etcdctl does.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// A watch's ID, unique on its stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WatchId(pub i64);

/// The metadata of one version of a key.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    pub row: RowId,
    pub create_revision: Revision,
    /// 1 at creation; each put adds 1.
    pub version: i64,
}

/// One change of one key, as it is appended to the log and passed to the index, the lease table and the watchers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    pub row: RowId,
    pub key: Key,
    pub kind: ChangeKind,
    /// The version that was live before the transaction.
    pub prev: Option<Prev>,
    /// The lease that the key was attached to before this change.
    pub prev_lease: Option<LeaseId>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ChangeKind {
    Put { kv: EncodedKv, create_revision: Revision, version: i64, lease: Option<LeaseId> },
    Delete,
}

/// The version of a key that was live before a transaction.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Prev {
    pub row: RowId,
    /// The pair of this version; `None` if it was not read, although the version has one.
    pub kv: Option<EncodedKv>,
}

impl ChangeKind {
    /// Returns the put that wrote a pair, with the create revision, the version and the lease of the pair.
    pub fn put(kv: EncodedKv) -> Self {
        let [create_revision, _, version, lease] = kv.ints();
        Self::Put { kv, create_revision: Revision(create_revision), version, lease: LeaseId::from_wire(lease) }
    }
}

impl Change {
    /// Returns the change as a watch event without the previous pair.
    pub fn event(&self) -> EncodedEvent {
        match &self.kind {
            ChangeKind::Put { kv, .. } => EncodedEvent::put(kv, None),
            ChangeKind::Delete => EncodedEvent::delete(&self.key, self.row.revision, None),
        }
    }

    /// Returns the change as a watch event with the previous pair, if there is one and it is available.
    pub fn event_with_prev(&self) -> EncodedEvent {
        let prev = self.prev.as_ref().and_then(|prev| prev.kv.as_ref());
        match &self.kind {
            // A key that was deleted and created in one transaction has a previous version, but its event shows none,
            // as in etcd.
            ChangeKind::Put { kv, version: 1, .. } => EncodedEvent::put(kv, None),
            ChangeKind::Put { kv, .. } => EncodedEvent::put(kv, prev),
            ChangeKind::Delete => EncodedEvent::delete(&self.key, self.row.revision, prev),
        }
    }

    /// Returns whether the event has a previous pair that is not available here.
    pub fn lacks_prev(&self) -> bool {
        !matches!(self.kind, ChangeKind::Put { version: 1, .. })
            && self.prev.as_ref().is_some_and(|prev| prev.kv.is_none())
    }

    pub fn is_delete(&self) -> bool {
        matches!(self.kind, ChangeKind::Delete)
    }

    /// Returns the pair that a put wrote.
    pub fn kv(&self) -> Option<&EncodedKv> {
        match &self.kind {
            ChangeKind::Put { kv, .. } => Some(kv),
            ChangeKind::Delete => None,
        }
    }

    /// Returns the bytes of the pairs in memory: that of a put, and the previous one.
    pub fn pair_bytes(&self) -> usize {
        let put = self.kv().map_or(0, EncodedKv::len);
        put + self.prev.as_ref().and_then(|prev| prev.kv.as_ref()).map_or(0, EncodedKv::len)
    }
}
