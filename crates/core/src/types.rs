//! The domain's words: revisions, keys, ranges, rows. Pure values, no behaviour that needs a clock, a log or a lock.
//!
//! Sentinels of the wire (0, an empty range end, `"\0"`) end at the edge, in `api`; from here down they are enums and
//! options. The one exception is the inside of [`crate::index`], which packs them for size.

mod encoded;
mod key;

use std::fmt;

pub use encoded::{EncodedEvent, EncodedKv};
pub use key::{Key, KeyBounds, KeyRange, shown};

/// A store revision: the id of a row in `kv_log`. The empty store stands at [`Revision::EMPTY`]; each transaction that
/// changes something adds exactly one.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Revision(pub i64);

impl Revision {
    /// The revision of a store that holds nothing yet.
    pub const EMPTY: Self = Self(1);

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

/// One change's place in the log: its revision, and its number among the changes of that revision, from 0.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct RowId {
    pub revision: Revision,
    pub sub: u32,
}

impl RowId {
    pub const fn new(revision: Revision, sub: u32) -> Self {
        Self { revision, sub }
    }
}

/// A lease's id. Clients may choose any but 0, negative ones too.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct LeaseId(pub i64);

impl LeaseId {
    /// The wire's 0 means "no lease".
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
    /// In hexadecimal, as etcdctl prints it.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:x}", self.0)
    }
}

/// A watch's id, unique on its stream.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Debug)]
pub struct WatchId(pub i64);

/// What is known of a key's version without its value.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Version {
    pub row: RowId,
    pub create_revision: Revision,
    /// 1 at creation, one more with each put.
    pub version: i64,
}

/// One change of one key, as it is appended to the log and handed to the index, the lease table and the watchers.
#[derive(Clone, Debug)]
pub struct Change {
    pub row: RowId,
    pub key: Key,
    pub kind: ChangeKind,
    /// The version that was live before the transaction.
    pub prev: Option<Prev>,
    /// The lease that the key hung on just before this change.
    pub prev_lease: Option<LeaseId>,
}

#[derive(Clone, Debug)]
pub enum ChangeKind {
    Put { kv: EncodedKv, create_revision: Revision, version: i64, lease: Option<LeaseId> },
    Delete,
}

/// The version before a transaction.
#[derive(Clone, Debug)]
pub struct Prev {
    pub row: RowId,
    /// Its pair, where it was at hand; `None` does not say that there was none.
    pub kv: Option<EncodedKv>,
}

impl Change {
    /// The change as a watch event without the previous pair.
    pub fn event(&self) -> EncodedEvent {
        match &self.kind {
            ChangeKind::Put { kv, .. } => EncodedEvent::put(kv, None),
            ChangeKind::Delete => EncodedEvent::delete(&self.key, self.row.revision, None),
        }
    }

    /// The change as a watch event with the previous pair, where there was one and it is at hand.
    pub fn event_with_prev(&self) -> EncodedEvent {
        let prev = self.prev.as_ref().and_then(|prev| prev.kv.as_ref());
        match &self.kind {
            // After a delete in the same transaction there is one, but as in etcd a creation shows none.
            ChangeKind::Put { kv, version: 1, .. } => EncodedEvent::put(kv, None),
            ChangeKind::Put { kv, .. } => EncodedEvent::put(kv, prev),
            ChangeKind::Delete => EncodedEvent::delete(&self.key, self.row.revision, prev),
        }
    }

    /// Whether its event shows a previous pair, and that is not at hand.
    pub fn lacks_prev(&self) -> bool {
        !matches!(self.kind, ChangeKind::Put { version: 1, .. })
            && self.prev.as_ref().is_some_and(|prev| prev.kv.is_none())
    }

    pub fn is_delete(&self) -> bool {
        matches!(self.kind, ChangeKind::Delete)
    }
}
