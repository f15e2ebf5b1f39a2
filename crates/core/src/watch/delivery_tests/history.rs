//! The committed changes, and the events that watches must receive for them.

use std::collections::BTreeMap;

use prost::Message as _;

use super::schedule::{KEYS, Txn};
use crate::{
    index::TreeIndex,
    types::{Change, ChangeKind, EncodedEvent, EncodedKv, Key, LeaseId, Prev, Revision, RowId, Version},
};
use orlop_wire::proto::client::{etcdserverpb::WatchResponse, mvccpb::Event};

/// A committed change.
#[derive(Clone, Debug)]
pub(super) struct Committed {
    pub(super) change: Change,
    /// The previous pair that the event of a `prev_kv` watch contains.
    pub(super) shown_prev: Option<EncodedKv>,
}

#[derive(Default)]
pub(super) struct History {
    pub(super) index: TreeIndex,
    pub(super) committed: Vec<Committed>,
    pub(super) pairs: BTreeMap<Key, (Version, EncodedKv)>,
    pub(super) compact_revision: Option<Revision>,
}

impl History {
    /// Commits transactions ([`Txn`]) and returns their changes, with previous pairs if `with_prev`.
    pub(super) fn commit(&mut self, txns: &[Txn], with_prev: bool) -> Vec<Change> {
        let known = self.committed.len();
        for txn in txns {
            let revision = self.index.head().next();
            for (sub, (key, put)) in (0..).zip(txn) {
                self.change(RowId::new(revision, sub), KEYS[*key], *put);
            }
        }
        let mut changes: Vec<Change> =
            self.committed[known..].iter().map(|committed| committed.change.clone()).collect();
        if !with_prev {
            changes.iter_mut().filter_map(|change| change.prev.as_mut()).for_each(|prev| prev.kv = None);
        }
        changes
    }

    fn change(&mut self, row: RowId, key: &str, put: bool) {
        let key = Key::from(key.as_bytes());
        let before = self.pairs.get(&key).cloned();
        let kind = if put || before.is_none() {
            let version = match &before {
                Some((version, _)) => Version { row, version: version.version + 1, ..*version },
                None => Version { row, create_revision: row.revision, version: 1 },
            };
            let kv = EncodedKv::new(&key, version, format!("value at {}", row.revision).as_bytes(), None::<LeaseId>);
            self.pairs.insert(key.clone(), (version, kv.clone()));
            ChangeKind::put(kv)
        } else {
            self.pairs.remove(&key);
            ChangeKind::Delete
        };
        let prev = before.map(|(version, kv)| Prev { row: version.row, kv: Some(kv) });
        let shown_prev = prev.as_ref().and_then(|prev| prev.kv.clone());
        let change = Change { row, key, kind, prev, prev_lease: None };
        self.index.apply(&change);
        self.committed.push(Committed { change, shown_prev });
    }
}

impl Committed {
    pub(super) fn event(&self, prev: Option<&EncodedKv>) -> Event {
        let Change { row, key, kind, .. } = &self.change;
        let encoded = match kind {
            ChangeKind::Put { kv, .. } => EncodedEvent::put(kv, prev),
            ChangeKind::Delete => EncodedEvent::delete(key, row.revision, prev),
        };
        decode(encoded.as_bytes()).remove(0)
    }
}

pub(super) fn decode(bytes: &[u8]) -> Vec<Event> {
    WatchResponse::decode(bytes).expect("events are encoded as fields of a response").events
}
