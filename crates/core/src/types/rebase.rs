//! Moves the changes of a batch behind changes that another instance appended after the batch was evaluated.
//!
//! ```text
//! evaluated at 10:  own 11, 12
//! in the log:       others' 11, 12, 13   own 14, 15      base 10, by 3
//! ```

use super::{Change, ChangeKind, EncodedKv, Revision};

/// A move of a batch. Revisions of the batch are those above `base`; each increases by `by`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rebase {
    /// The head at which the batch was evaluated.
    pub base: Revision,
    /// Number of revisions that were appended between `base` and the batch.
    pub by: i64,
}

impl Rebase {
    /// Returns the head of the store after the move, for a head that was seen by the batch.
    pub fn head(self, head: Revision) -> Revision {
        Revision(head.0 + self.by)
    }

    /// Moves the revision of a version.
    pub fn revision(self, revision: &mut Revision) {
        if *revision > self.base {
            *revision = self.head(*revision);
        }
    }

    /// Moves the revisions in a pair.
    pub fn kv(self, kv: &mut EncodedKv) {
        // A pair that was created in the batch was also modified in it.
        if kv.mod_revision() > self.base {
            *kv = kv.with_revisions(|revision| self.revision(revision));
        }
    }

    pub fn change(self, change: &mut Change) {
        self.revision(&mut change.row.revision);
        if let ChangeKind::Put { kv, create_revision, .. } = &mut change.kind {
            self.kv(kv);
            self.revision(create_revision);
        }
        if let Some(prev) = &mut change.prev {
            self.revision(&mut prev.row.revision);
            prev.kv.iter_mut().for_each(|kv| self.kv(kv));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::types::{LeaseId, RowId, Version};

    fn kv(create: i64, modified: i64) -> EncodedKv {
        let version = Version { row: RowId::new(Revision(modified), 0), create_revision: Revision(create), version: 7 };
        EncodedKv::new(b"key", version, b"value", Some(LeaseId(5)))
    }

    #[test]
    fn only_revisions_above_the_base_move() {
        let rebase = Rebase { base: Revision(10), by: 300 };
        for (before, after) in [((3, 10), (3, 10)), ((3, 11), (3, 311)), ((11, 12), (311, 312)), ((10, 11), (10, 311))]
        {
            let mut pair = kv(before.0, before.1);
            rebase.kv(&mut pair);
            assert_eq!(pair, kv(after.0, after.1), "{before:?}");
        }
    }
}
