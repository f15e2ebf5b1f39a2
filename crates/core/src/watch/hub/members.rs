//! The watches of one range and flavor, or of one future start revision. One is found without a look at the others, because
//! a stream may have very many of them, and all leave when it ends.

use std::{collections::HashMap, sync::Arc};

use super::{WatchKey, behind::BehindWatches, watch_key};
use crate::{
    types::{KeyRange, Revision, WatchId},
    watch::{
        outbox::Outbox,
        run::ChunkRef,
        spec::{Flavor, Spec},
    },
};

/// Number of members from which a map has their positions. Fewer are compared one after the other.
const INDEXED_MIN: usize = 32;

/// A watch that is synced, or waits for its start revision.
pub(super) struct Member {
    pub(super) outbox: Arc<Outbox>,
    pub(super) id: WatchId,
    pub(super) fragment: Option<usize>,
    /// The newest revision that was queued. Periodic progress is sent only to a watch that received nothing recently.
    pub(super) sent: Option<Revision>,
}

impl Member {
    pub(super) fn new(outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) -> Self {
        Self { outbox: Arc::clone(outbox), id, fragment: spec.fragment, sent: None }
    }

    /// Notifies the session that the watch must catch up from `next`.
    pub(super) fn fall_behind(&self, range: &KeyRange, flavor: Flavor, next: Revision, behind: &mut BehindWatches) {
        self.outbox.mark_lagging(self.id, next);
        behind.insert(&self.outbox, self.id, range, flavor, next);
    }

    /// Returns false if the outbox is full.
    pub(super) fn send(&mut self, chunk: &ChunkRef) -> bool {
        let taken = self.outbox.push_chunk(self.id, chunk, self.fragment);
        if taken {
            self.sent = Some(chunk.revision);
        }
        taken
    }
}

#[derive(Default)]
pub(super) struct Members {
    all: Vec<Member>,
    #[expect(clippy::box_collection, reason = "most groups have none, and there are as many groups as watched ranges")]
    positions: Option<Box<HashMap<WatchKey, usize>>>,
}

impl Members {
    pub(super) fn push(&mut self, member: Member) {
        if let Some(positions) = &mut self.positions {
            positions.insert(watch_key(&member.outbox, member.id), self.all.len());
        }
        self.all.push(member);
        if self.positions.is_none() && self.all.len() >= INDEXED_MIN {
            self.index();
        }
    }

    pub(super) fn get(&self, outbox: &Arc<Outbox>, id: WatchId) -> Option<&Member> {
        self.position(outbox, id).map(|position| &self.all[position])
    }

    /// Returns whether there was such a member.
    pub(super) fn remove(&mut self, outbox: &Arc<Outbox>, id: WatchId) -> bool {
        let Some(position) = self.position(outbox, id) else { return false };
        self.all.swap_remove(position);
        if let Some(positions) = &mut self.positions {
            positions.remove(&watch_key(outbox, id));
            if let Some(moved) = self.all.get(position) {
                positions.insert(watch_key(&moved.outbox, moved.id), position);
            }
        }
        true
    }

    /// Removes the members for which `keep` returns false.
    pub(super) fn retain_mut(&mut self, keep: impl FnMut(&mut Member) -> bool) {
        let before = self.all.len();
        self.all.retain_mut(keep);
        if self.all.len() < before && self.positions.is_some() {
            self.index();
        }
    }

    pub(super) fn len(&self) -> usize {
        self.all.len()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Member> {
        self.all.iter()
    }

    fn position(&self, outbox: &Arc<Outbox>, id: WatchId) -> Option<usize> {
        match &self.positions {
            Some(positions) => positions.get(&watch_key(outbox, id)).copied(),
            None => self.all.iter().position(|member| member.id == id && Arc::ptr_eq(&member.outbox, outbox)),
        }
    }

    /// Records all positions, or none if there are few members.
    fn index(&mut self) {
        let keys = self.all.iter().map(|member| watch_key(&member.outbox, member.id));
        self.positions = (self.all.len() >= INDEXED_MIN).then(|| Box::new(keys.zip(0..).collect()));
    }
}

impl IntoIterator for Members {
    type Item = Member;
    type IntoIter = std::vec::IntoIter<Member>;

    fn into_iter(self) -> Self::IntoIter {
        self.all.into_iter()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::watch::queue::Pending;

    #[derive(Clone, Debug)]
    enum Step {
        Push,
        Remove(usize),
        /// Keeps the members whose id is not a multiple of this number.
        Retain(i64),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![8 => Just(Step::Push), 4 => (0_usize..1_000).prop_map(Step::Remove), 1 => (2_i64..9).prop_map(Step::Retain)]
    }

    proptest! {
        /// The number of members crosses [`INDEXED_MIN`] in both directions.
        #[test]
        fn members_are_found_until_they_are_removed(steps in prop::collection::vec(step(), 0..200)) {
            let outboxes = [(); 2].map(|()| Arc::new(Outbox::new(&Pending::unregistered())));
            let (mut members, mut expected, mut next) = (Members::default(), Vec::new(), 0);
            for step in steps {
                match step {
                    Step::Push => {
                        let (outbox, id) = (next % 2, WatchId(next as i64 / 2));
                        members.push(Member { outbox: Arc::clone(&outboxes[outbox]), id, fragment: None, sent: None });
                        expected.push((outbox, id));
                        next += 1;
                    }
                    Step::Remove(_) if expected.is_empty() => {}
                    Step::Remove(number) => {
                        let (outbox, id) = expected.remove(number % expected.len());
                        prop_assert!(members.remove(&outboxes[outbox], id));
                        prop_assert!(!members.remove(&outboxes[outbox], id));
                    }
                    Step::Retain(number) => {
                        members.retain_mut(|member| member.id.0 % number != 0);
                        expected.retain(|(_, id)| id.0 % number != 0);
                    }
                }
                prop_assert_eq!(members.len(), expected.len());
                for number in 0..next {
                    let (outbox, id) = (number % 2, WatchId(number as i64 / 2));
                    let found = members.get(&outboxes[outbox], id);
                    let is_found = found.is_some_and(|found| found.id == id && Arc::ptr_eq(&found.outbox, &outboxes[outbox]));
                    prop_assert_eq!(is_found, expected.contains(&(outbox, id)));
                }
            }
        }
    }
}
