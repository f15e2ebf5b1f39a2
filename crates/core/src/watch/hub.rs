//! The hub: hands each committed change to the synced watches whose range holds its key.
//!
//! One lock guards it. Joining, progress and publishing happen under that lock, so they have one order: a watch that joins at
//! a revision gets every later one, and a progress notification is queued behind all events that it covers. Publishing
//! puts an event together once for each range and flavor that it falls into, from pairs that are encoded already, however
//! many watches share them.

use std::{collections::BTreeMap, sync::Arc};

use super::{
    Flavor, NO_WATCH, Spec,
    chunk::Chunk,
    intervals::Intervals,
    outbox::{Message, Outbox},
    run::{Place, Tail},
    waiting::Pending,
};
use crate::{
    metrics::Metrics,
    supervise::Lock,
    types::{Change, EncodedEvent, KeyRange, Revision, WatchId},
};

/// See the module's page.
pub struct Hub {
    state: Lock<State>,
    pub(super) pending: Pending,
    pub(super) metrics: Arc<Metrics>,
}

struct State {
    head: Revision,
    compact_revision: Option<Revision>,
    ranges: Intervals<usize>,
    /// By the number that `ranges` gives; `None` where a group was removed.
    groups: Vec<Option<Group>>,
    free_groups: Vec<usize>,
    /// Watches that begin at a revision beyond the head.
    future: BTreeMap<Revision, Vec<(Arc<Outbox>, WatchId)>>,
    /// Streams that want a progress notification at this revision or later.
    progress: Vec<(Revision, Arc<Outbox>)>,
    prev_kv_members: usize,
}

/// The synced watches of one range.
struct Group {
    range: KeyRange,
    audiences: Vec<Audience>,
}

/// Those of them that get the same.
struct Audience {
    flavor: Flavor,
    members: Vec<Member>,
    tail: Tail,
}

struct Member {
    outbox: Arc<Outbox>,
    id: WatchId,
    fragment: Option<usize>,
    /// The newest revision that was queued for it, for periodic progress.
    sent: Option<Revision>,
}

/// Where a watch stands after it asked to join.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Joined {
    Synced,
    /// It will be told when its first revision is there.
    Waiting,
    /// The log has revisions that it needs.
    Behind,
    Compacted(Revision),
}

impl Hub {
    pub fn new(head: Revision, compact_revision: Option<Revision>, metrics: Arc<Metrics>) -> Self {
        Self {
            pending: Pending::new(metrics.state.pending_events.clone()),
            metrics,
            state: Lock::new(State {
                head,
                compact_revision,
                ranges: Intervals::new(),
                groups: Vec::new(),
                free_groups: Vec::new(),
                future: BTreeMap::new(),
                progress: Vec::new(),
                prev_kv_members: 0,
            }),
        }
    }

    /// For a client's stream.
    pub fn outbox(&self) -> Outbox {
        Outbox::counted(&self.pending)
    }

    /// The newest revision handed out.
    pub fn head(&self) -> Revision {
        self.state.lock().head
    }

    /// Whether some synced watch wants previous pairs, so that changes should come with them.
    pub fn wants_prev(&self) -> bool {
        self.state.lock().prev_kv_members > 0
    }

    /// Hands out committed changes, all up to `head`, but for those that were handed out before. `apply` makes the others
    /// readable; no watch, progress or join is served in between.
    pub fn publish(&self, changes: &[Change], head: Revision, apply: impl FnOnce(&[Change])) {
        let mut state = self.state.lock();
        let known = changes.partition_point(|change| change.row.revision <= state.head);
        let changes = &changes[known..];
        apply(changes);
        let head = head.max(state.head);
        state.publish(changes, head);
    }

    /// Stands at `head` without having been handed what lies before it. `apply` makes it readable. Watches read what they
    /// miss from the log, or learn there that it was compacted.
    pub fn start_over(&self, head: Revision, compact_revision: Option<Revision>, apply: impl FnOnce()) {
        let mut state = self.state.lock();
        apply();
        let next = state.head.next();
        state.compact_revision = state.compact_revision.max(compact_revision);
        for group in state.groups.drain(..).flatten() {
            for member in group.audiences.into_iter().flat_map(|audience| audience.members) {
                member.outbox.fall_behind(member.id, next);
            }
        }
        state.ranges = Intervals::new();
        state.free_groups.clear();
        state.prev_kv_members = 0;
        state.publish(&[], head);
    }

    /// Takes note of a compaction. `apply` makes it effective for reads.
    pub fn compacted(&self, revision: Revision, apply: impl FnOnce()) {
        let mut state = self.state.lock();
        apply();
        state.compact_revision = state.compact_revision.max(Some(revision));
    }

    /// Queues `created` and joins in one step.
    pub(super) fn create(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) -> Joined {
        let mut state = self.state.lock();
        outbox.push(Message::Created { id, revision: state.head });
        match spec.start {
            None => {
                state.add(outbox, id, spec);
                Joined::Synced
            }
            Some(start) => state.join(outbox, id, spec, start),
        }
    }

    /// Joins a watch that has been sent everything before `next`.
    pub(super) fn join(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> Joined {
        self.state.lock().join(outbox, id, spec, next)
    }

    pub(super) fn compact_revision(&self) -> Option<Revision> {
        self.state.lock().compact_revision
    }

    pub(super) fn leave(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) {
        let mut state = self.state.lock();
        state.remove(outbox, id, &spec.range, spec.flavor);
        if let Some(start) = spec.start
            && let Some(waiting) = state.future.get_mut(&start)
        {
            waiting.retain(|(other, other_id)| !(Arc::ptr_eq(other, outbox) && *other_id == id));
            if waiting.is_empty() {
                state.future.remove(&start);
            }
        }
    }

    /// Runs `f` with the head while nothing is published, joined or cancelled.
    pub(super) fn at_head<T>(&self, f: impl FnOnce(Revision) -> T) -> T {
        let state = self.state.lock();
        f(state.head)
    }

    /// Queues a progress notification for the stream, all of whose watches are synced or waiting, if none of them begins
    /// beyond the head (`newest_start` is the latest begin); otherwise the stream is woken when that is so.
    pub(super) fn progress(&self, outbox: &Arc<Outbox>, newest_start: Option<Revision>) -> bool {
        let mut state = self.state.lock();
        // Fallen behind since the session looked; it has been told.
        if outbox.is_lagging() {
            return false;
        }
        if let Some(start) = newest_start.filter(|start| *start > state.head) {
            state.progress.retain(|(_, other)| !Arc::ptr_eq(other, outbox));
            state.progress.push((start, Arc::clone(outbox)));
            return false;
        }
        outbox.push(Message::Progress { id: NO_WATCH, revision: state.head });
        true
    }

    /// Queues a progress notification for one synced watch, unless it was sent something after `since`.
    pub(super) fn progress_of(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, since: Revision) -> Revision {
        let state = self.state.lock();
        let sent = state.member(outbox, id, &spec.range, spec.flavor).map(|member| member.sent);
        if let Some(sent) = sent
            && sent.is_none_or(|sent| sent <= since)
            && spec.start.is_none_or(|start| start <= state.head)
        {
            outbox.push(Message::Progress { id, revision: state.head });
        }
        state.head
    }
}

impl State {
    fn join(&mut self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> Joined {
        if let Some(compacted) = self.compact_revision.filter(|compacted| next < *compacted) {
            return Joined::Compacted(compacted);
        }
        if next <= self.head {
            return Joined::Behind;
        }
        if next > self.head.next() {
            self.future.entry(next).or_default().push((Arc::clone(outbox), id));
            return Joined::Waiting;
        }
        self.add(outbox, id, spec);
        Joined::Synced
    }

    fn add(&mut self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) {
        self.prev_kv_members += usize::from(spec.flavor.prev_kv);
        let Self { ranges, groups, free_groups, .. } = self;
        let group = *ranges.get_or_insert_with(&spec.range, || {
            let group = Some(Group { range: spec.range.clone(), audiences: Vec::new() });
            match free_groups.pop() {
                Some(number) => {
                    groups[number] = group;
                    number
                }
                None => {
                    groups.push(group);
                    groups.len() - 1
                }
            }
        });
        let group = self.groups[group].as_mut().expect("ranges name groups that are there");
        let member = Member { outbox: Arc::clone(outbox), id, fragment: spec.fragment, sent: None };
        match group.audiences.iter_mut().find(|audience| audience.flavor == spec.flavor) {
            Some(audience) => audience.members.push(member),
            None => {
                let audience = Audience { flavor: spec.flavor, members: vec![member], tail: Tail::default() };
                group.audiences.push(audience);
            }
        }
    }

    fn member(&self, outbox: &Arc<Outbox>, id: WatchId, range: &KeyRange, flavor: Flavor) -> Option<&Member> {
        let mut found = None;
        self.ranges.visit(range.start(), &mut |group| {
            let group = self.groups[*group].as_ref().expect("ranges name groups that are there");
            if group.range == *range {
                found = group.audiences.iter().find(|audience| audience.flavor == flavor);
            }
        });
        found?.members.iter().find(|member| member.is(outbox, id))
    }

    fn remove(&mut self, outbox: &Arc<Outbox>, id: WatchId, range: &KeyRange, flavor: Flavor) {
        let Some(number) = self.ranges.get_mut(range).copied() else { return };
        let group = self.groups[number].as_mut().expect("ranges name groups that are there");
        if let Some(audience) = group.audiences.iter_mut().find(|audience| audience.flavor == flavor)
            && let Some(place) = audience.members.iter().position(|member| member.is(outbox, id))
        {
            audience.members.swap_remove(place);
            self.prev_kv_members -= usize::from(flavor.prev_kv);
        }
        self.drop_if_empty(number);
    }

    fn drop_if_empty(&mut self, number: usize) {
        let Some(group) = &self.groups[number] else { return };
        if group.audiences.iter().all(|audience| audience.members.is_empty()) {
            self.ranges.remove(&group.range);
            self.groups[number] = None;
            self.free_groups.push(number);
        }
    }

    fn publish(&mut self, changes: &[Change], head: Revision) {
        self.head = head;
        for (number, hits) in self.hits(changes) {
            self.publish_to(number, &hits, head);
            self.drop_if_empty(number);
        }
        // Those whose first revision has come catch up from it like any other.
        while let Some(waiting) = self.future.first_entry().filter(|entry| *entry.key() <= head) {
            let start = *waiting.key();
            for (outbox, id) in waiting.remove() {
                outbox.fall_behind(id, start);
            }
        }
        self.progress.retain(|(start, outbox)| {
            let due = *start <= head;
            if due {
                outbox.attention.notify_one();
            }
            !due && !outbox.has_ended()
        });
    }

    /// Of each group that some change falls into, those changes.
    fn hits<'a>(&self, changes: &'a [Change]) -> BTreeMap<usize, Vec<&'a Change>> {
        let mut hits: BTreeMap<usize, Vec<&Change>> = BTreeMap::new();
        for change in changes {
            self.ranges.visit(&change.key, &mut |group| hits.entry(*group).or_default().push(change));
        }
        hits
    }

    fn publish_to(&mut self, number: usize, changes: &[&Change], head: Revision) {
        let group = self.groups[number].as_mut().expect("ranges name groups that are there");
        for Audience { flavor, members, tail } in &mut group.audiences {
            if members.is_empty() {
                continue;
            }
            // A watch that joined after the previous pairs were gathered reads what it needs from the log.
            let lacking = changes.iter().find(|change| flavor.prev_kv && flavor.admits(change) && change.lacks_prev());
            let lacking = lacking.map(|change| change.row.revision);
            let complete = changes.iter().copied();
            let complete = complete.take_while(|change| lacking.is_none_or(|lacking| change.row.revision < lacking));
            let chunks = Chunk::cut(complete, *flavor, encode);
            let places: Vec<Place> = chunks.into_iter().map(|chunk| tail.append(chunk, head)).collect();
            let before = members.len();
            members.retain_mut(|member| places.iter().all(|place| member.send(place)) && member.stays(lacking));
            if flavor.prev_kv {
                self.prev_kv_members -= before - members.len();
            }
        }
    }
}

pub(super) fn encode(change: &Change, flavor: Flavor) -> EncodedEvent {
    if flavor.prev_kv { change.event_with_prev() } else { change.event() }
}

impl Member {
    fn is(&self, outbox: &Arc<Outbox>, id: WatchId) -> bool {
        self.id == id && Arc::ptr_eq(&self.outbox, outbox)
    }

    /// Returns false if it must read the log from a revision on.
    fn stays(&self, lacking: Option<Revision>) -> bool {
        if let Some(next) = lacking {
            self.outbox.fall_behind(self.id, next);
        }
        lacking.is_none()
    }

    /// Returns false if the client is too slow for the hub.
    fn send(&mut self, place: &Place) -> bool {
        let taken = self.outbox.push_chunk(self.id, place, self.fragment);
        if taken {
            self.sent = Some(place.revision);
        } else {
            self.outbox.fall_behind(self.id, place.first);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_that_waits_with_its_progress_is_remembered_once() {
        let hub = Hub::new(Revision::EMPTY, None, Arc::default());
        let outbox = Arc::new(Outbox::new());
        for start in [9, 9, 8, 7] {
            assert!(!hub.progress(&outbox, Some(Revision(start))));
        }
        let waiting = |hub: &Hub| hub.state.lock().progress.iter().map(|(start, _)| start.0).collect::<Vec<_>>();
        assert_eq!(waiting(&hub), [7]);
        hub.publish(&[], Revision(7), |_| {});
        assert_eq!(waiting(&hub), [0; 0]);
    }
}
