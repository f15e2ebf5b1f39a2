//! The watches that read the log.

use std::{
    collections::BTreeMap,
    ops::Bound,
    sync::{Arc, Weak},
};

use super::{WatchKey, watch_key};
use crate::{
    types::{KeyRange, Revision, WatchId},
    watch::{outbox::Outbox, spec::Flavor},
};

#[derive(Default)]
pub(super) struct BehindWatches {
    watches: BTreeMap<WatchKey, BehindWatch>,
    /// How many of them requested previous pairs.
    prev_kv: usize,
}

pub(super) struct BehindWatch {
    pub(super) outbox: Weak<Outbox>,
    pub(super) range: KeyRange,
    prev_kv: bool,
    /// The first revision that was not queued.
    pub(super) next: Revision,
}

impl BehindWatches {
    /// Adds a watch, or moves it to `next`.
    pub(super) fn insert(
        &mut self,
        outbox: &Arc<Outbox>,
        id: WatchId,
        range: &KeyRange,
        flavor: Flavor,
        next: Revision,
    ) {
        let Self { watches, prev_kv } = self;
        let new_watch = || {
            *prev_kv += usize::from(flavor.prev_kv);
            BehindWatch { outbox: Arc::downgrade(outbox), range: range.clone(), prev_kv: flavor.prev_kv, next }
        };
        watches.entry(watch_key(outbox, id)).or_insert_with(new_watch).next = next;
    }

    pub(super) fn remove(&mut self, outbox: &Arc<Outbox>, id: WatchId) {
        if !self.watches.is_empty()
            && let Some(removed) = self.watches.remove(&watch_key(outbox, id))
        {
            self.prev_kv -= usize::from(removed.prev_kv);
        }
    }

    pub(super) fn is_empty(&self) -> bool {
        self.watches.is_empty()
    }

    /// Returns whether any of them requested previous pairs.
    pub(super) fn want_prev(&self) -> bool {
        self.prev_kv > 0
    }

    pub(super) fn from(&self, from: Bound<WatchKey>) -> impl Iterator<Item = (&WatchKey, &BehindWatch)> {
        self.watches.range((from, Bound::Unbounded))
    }
}
