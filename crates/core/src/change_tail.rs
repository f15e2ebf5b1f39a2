//! The newest changes, up to limits.

use std::collections::VecDeque;

use crate::types::{Change, Revision};

/// The newest changes, in order.
pub struct ChangeTail {
    changes: VecDeque<Change>,
    /// Bytes of their keys and pairs.
    bytes: usize,
    changes_max: usize,
    bytes_max: usize,
}

impl ChangeTail {
    /// Keeps at most `changes_max` changes, and as many as have at most `bytes_max` bytes of keys and pairs, or one.
    pub const fn new(changes_max: usize, bytes_max: usize) -> Self {
        Self { changes: VecDeque::new(), bytes: 0, changes_max, bytes_max }
    }

    /// Adds changes and drops the oldest ones above the limits. Returns the revision of the newest one that was dropped.
    pub fn push(&mut self, changes: &[Change]) -> Option<Revision> {
        let (skipped, kept) = changes.split_at(changes.len().saturating_sub(self.changes_max));
        let mut dropped = skipped.last().map(|change| change.row.revision);
        for change in kept {
            self.bytes += bytes(change);
            self.changes.push_back(change.clone());
        }
        while self.changes.len() > self.changes_max || (self.bytes > self.bytes_max && self.changes.len() > 1) {
            let Some(oldest) = self.changes.pop_front() else { break };
            self.bytes -= bytes(&oldest);
            dropped = dropped.max(Some(oldest.row.revision));
        }
        dropped
    }

    pub fn clear(&mut self) {
        (self.changes, self.bytes) = (VecDeque::new(), 0);
    }

    /// Returns the changes from a revision on.
    pub fn since(&self, revision: Revision) -> impl Iterator<Item = &Change> {
        let first = self.changes.partition_point(|change| change.row.revision < revision);
        self.changes.range(first..)
    }

    pub fn iter(&self) -> impl DoubleEndedIterator<Item = &Change> {
        self.changes.iter()
    }
}

fn bytes(change: &Change) -> usize {
    change.key.len() + change.pair_bytes()
}
