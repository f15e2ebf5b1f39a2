//! The changes that were published while watches were behind.
//!
//! A read of the log takes a moment, and under load there are new changes at its end. A watch that has read the log up to
//! the first change here gets the others from here and joins. Otherwise it would never join while there are changes during
//! each read, and its stream would get no progress notification.

use crate::{
    change_tail::ChangeTail,
    types::{Change, Revision},
};

/// Maximum number of changes: those of 0.2 s on a store that writes as fast as it can.
const CHANGES_MAX: usize = if cfg!(test) { 8 } else { 16 << 10 };
/// Maximum bytes of their pairs, most of which are in the cache of values as well.
const BYTES_MAX: usize = 16 << 20;

pub(super) struct Recent {
    changes: ChangeTail,
    /// The changes of this revision and the later ones are complete.
    from: Revision,
}

impl Recent {
    /// Starts after `head`.
    pub(super) fn new(head: Revision) -> Self {
        Self { changes: ChangeTail::new(CHANGES_MAX, BYTES_MAX), from: head.next() }
    }

    /// Drops all changes and starts again after `head`.
    pub(super) fn restart(&mut self, head: Revision) {
        self.changes.clear();
        self.from = head.next();
    }

    /// Adds published changes, which follow those before.
    pub(super) fn push(&mut self, changes: &[Change]) {
        if let Some(dropped) = self.changes.push(changes) {
            self.from = dropped.next();
        }
    }

    /// Returns the changes from `next` on; `None`: some of them are not here.
    pub(super) fn since(&self, next: Revision) -> Option<impl Iterator<Item = &Change>> {
        (next >= self.from).then(|| self.changes.since(next))
    }
}
