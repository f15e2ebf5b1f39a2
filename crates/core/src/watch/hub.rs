//! The hub: sends each committed change to the synced watches whose range contains its key.
//!
//! One lock orders joining, progress and publishing. A watch that joins at a revision therefore receives every later
//! revision, and a progress notification is queued after all events that it covers. Publishing encodes an event once
//! per range and flavor, regardless of the number of watches that share it.

mod members;
mod survey;

use std::{
    collections::BTreeMap,
    sync::{Arc, Weak},
};

use slab::Slab;
use tokio::sync::Semaphore;

use self::members::Members;
pub use self::survey::{Survey, WatchedRange};
use super::{
    chunk::{CHUNK_BYTES_MAX, Chunk},
    intervals::Intervals,
    message::Message,
    outbox::Outbox,
    queue::Pending,
    run::{ChunkRef, RunTail},
    spec::{Flavor, NO_WATCH, Spec},
};
use crate::{
    metrics::Metrics,
    supervise::Lock,
    types::{Change, EncodedEvent, KeyRange, Revision, WatchId},
};

/// Distributes committed changes to the synced watches of all streams.
pub struct Hub {
    state: Lock<State>,
    pub(super) pending: Pending,
    /// Held by a catching-up watch while it reads several pages, which limits the memory of all of them.
    pub(super) long_reads: Semaphore,
    pub(super) metrics: Arc<Metrics>,
}

/// Maximum number of watches that read several pages at the same time.
const LONG_READS_MAX: usize = 4;
/// Maximum of [`Spec::watch_bytes`] of all watches.
const WATCH_BYTES_MAX: usize = 1 << 30;

struct State {
    head: Revision,
    compact_revision: Option<Revision>,
    ranges: Intervals<usize>,
    /// By the number in `ranges`.
    groups: Slab<RangeGroup>,
    /// Watches whose start revision is above head + 1.
    future: BTreeMap<Revision, Members>,
    /// Watches that read the log, by their outbox and id. Only [`Hub::survey`] uses it.
    behind: BTreeMap<WatchKey, BehindWatch>,
    /// Streams that wait for a progress notification at or above this revision.
    progress: Vec<(Revision, Arc<Outbox>)>,
    /// Number of synced watches that requested previous pairs.
    prev_kv_members: usize,
    /// [`Spec::watch_bytes`] of all watches.
    watch_bytes: usize,
}

/// A watch that reads the log.
struct BehindWatch {
    outbox: Weak<Outbox>,
    range: KeyRange,
    /// The first revision that was not queued.
    next: Revision,
}

/// The address of an outbox, which exists as long as the watch, and the id of a watch of its stream.
type WatchKey = (usize, WatchId);

fn watch_key(outbox: &Arc<Outbox>, id: WatchId) -> WatchKey {
    (Arc::as_ptr(outbox).addr(), id)
}

/// The synced watches of one range.
struct RangeGroup {
    range: KeyRange,
    flavors: Vec<FlavorGroup>,
}

/// The watches of a group that receive the same events.
struct FlavorGroup {
    flavor: Flavor,
    members: Members,
    tail: RunTail,
}

/// A watch that is synced, or waits for its start revision.
struct Member {
    outbox: Arc<Outbox>,
    id: WatchId,
    fragment: Option<usize>,
    /// The newest revision that was queued. Periodic progress is sent only to a watch that received nothing recently.
    sent: Option<Revision>,
}

/// The result of joining the hub.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum JoinOutcome {
    Synced,
    /// The start revision is above head + 1. The session is notified when that revision is committed.
    Waiting,
    /// The watch needs revisions that are already in the log.
    Behind,
    Compacted(Revision),
}

impl Hub {
    pub fn new(head: Revision, compact_revision: Option<Revision>, metrics: Arc<Metrics>) -> Self {
        Self {
            pending: Pending::new(metrics.state.pending_events.clone()),
            long_reads: Semaphore::new(LONG_READS_MAX),
            metrics,
            state: Lock::new(State {
                head,
                compact_revision,
                ranges: Intervals::new(),
                groups: Slab::new(),
                future: BTreeMap::new(),
                behind: BTreeMap::new(),
                progress: Vec::new(),
                prev_kv_members: 0,
                watch_bytes: 0,
            }),
        }
    }

    /// Creates the outbox of a client's stream.
    pub fn outbox(&self) -> Outbox {
        Outbox::new(&self.pending)
    }

    /// Returns the newest published revision.
    pub fn head(&self) -> Revision {
        self.state.lock().head
    }

    /// Returns whether any synced watch requested previous pairs, so that changes should contain them.
    pub fn wants_prev(&self) -> bool {
        self.state.lock().prev_kv_members > 0
    }

    /// Publishes the changes up to `head` that were not published yet. `apply` makes them readable; between `apply` and
    /// publishing no watch joins and no progress is sent.
    pub fn publish(&self, changes: &[Change], head: Revision, apply: impl FnOnce(&[Change])) {
        let mut state = self.state.lock();
        let known = changes.partition_point(|change| change.row.revision <= state.head);
        let changes = &changes[known..];
        apply(changes);
        let head = head.max(state.head);
        state.publish(changes, head);
    }

    /// Moves to `head` without publishing the changes up to it. `apply` makes them readable. Watches read these
    /// changes from the log; a watch ends if changes that it needs were compacted.
    pub fn reset_to(&self, head: Revision, compact_revision: Option<Revision>, apply: impl FnOnce()) {
        let mut state = self.state.lock();
        apply();
        let next = state.head.next();
        state.compact_revision = state.compact_revision.max(compact_revision);
        let State { groups, behind, .. } = &mut *state;
        for RangeGroup { range, flavors } in groups.drain() {
            for member in flavors.into_iter().flat_map(|flavor_group| flavor_group.members) {
                member.fall_behind(&range, next, behind);
            }
        }
        state.ranges = Intervals::new();
        state.prev_kv_members = 0;
        state.publish(&[], head);
    }

    /// Records a compaction. `apply` makes it effective for reads.
    pub fn record_compaction(&self, revision: Revision, apply: impl FnOnce()) {
        let mut state = self.state.lock();
        apply();
        state.compact_revision = state.compact_revision.max(Some(revision));
    }

    /// Queues the `Created` message and joins the watch, atomically. `None`: the watches of all streams use as much memory as
    /// they may, so there is neither a message nor a watch.
    pub(super) fn create(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) -> Option<JoinOutcome> {
        let mut state = self.state.lock();
        let bytes = state.watch_bytes + spec.watch_bytes();
        if bytes > WATCH_BYTES_MAX {
            return None;
        }
        outbox.push(Message::Created { id, revision: state.head });
        let outcome = match spec.start {
            None => {
                state.add(outbox, id, spec);
                JoinOutcome::Synced
            }
            Some(start) => state.join(outbox, id, spec, start),
        };
        // A watch that begins at a compacted revision has ended, and is not removed.
        if !matches!(outcome, JoinOutcome::Compacted(_)) {
            state.watch_bytes = bytes;
        }
        Some(outcome)
    }

    /// Joins a watch for which all events before `next` were queued.
    pub(super) fn join(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> JoinOutcome {
        self.state.lock().join(outbox, id, spec, next)
    }

    pub(super) fn compact_revision(&self) -> Option<Revision> {
        self.state.lock().compact_revision
    }

    /// Removes a watch that was created, in any state.
    pub(super) fn remove(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) {
        let mut state = self.state.lock();
        state.watch_bytes -= spec.watch_bytes();
        state.remove(outbox, id, &spec.range, spec.flavor);
        state.forget_behind(outbox, id);
        if let Some(start) = spec.start
            && let Some(waiting) = state.future.get_mut(&start)
            && waiting.remove(outbox, id)
            && waiting.is_empty()
        {
            state.future.remove(&start);
        }
    }

    /// Runs `f` with the head. Nothing is published, joined or canceled meanwhile.
    pub(super) fn with_head<T>(&self, f: impl FnOnce(Revision) -> T) -> T {
        let state = self.state.lock();
        f(state.head)
    }

    /// Queues a progress notification for a stream whose watches are all synced or waiting. If one starts above the
    /// head (`newest_start` is the latest start), returns false; the session is notified when that revision is
    /// published.
    pub(super) fn progress(&self, outbox: &Arc<Outbox>, newest_start: Option<Revision>) -> bool {
        let mut state = self.state.lock();
        // A watch fell behind in the meantime. Its session was notified and calls this again when it has caught up.
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

    /// Queues a progress notification for one synced watch, unless events above revision `since` were queued for it.
    /// Returns the head.
    pub(super) fn progress_for_watch(
        &self,
        outbox: &Arc<Outbox>,
        id: WatchId,
        spec: &Spec,
        since: Revision,
    ) -> Revision {
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
    fn join(&mut self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> JoinOutcome {
        let outcome = self.join_at(outbox, id, spec, next);
        if outcome == JoinOutcome::Behind {
            let watch = || BehindWatch { outbox: Arc::downgrade(outbox), range: spec.range.clone(), next };
            self.behind.entry(watch_key(outbox, id)).or_insert_with(watch).next = next;
        } else {
            self.forget_behind(outbox, id);
        }
        outcome
    }

    fn forget_behind(&mut self, outbox: &Arc<Outbox>, id: WatchId) {
        if !self.behind.is_empty() {
            self.behind.remove(&watch_key(outbox, id));
        }
    }

    fn join_at(&mut self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> JoinOutcome {
        if let Some(compacted) = self.compact_revision.filter(|compacted| next < *compacted) {
            return JoinOutcome::Compacted(compacted);
        }
        if next <= self.head {
            return JoinOutcome::Behind;
        }
        if next > self.head.next() {
            self.future.entry(next).or_default().push(Member::new(outbox, id, spec));
            return JoinOutcome::Waiting;
        }
        self.add(outbox, id, spec);
        JoinOutcome::Synced
    }

    /// Adds a synced watch.
    fn add(&mut self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) {
        self.prev_kv_members += usize::from(spec.flavor.prev_kv);
        let Self { ranges, groups, .. } = self;
        let new_group = || groups.insert(RangeGroup { range: spec.range.clone(), flavors: Vec::new() });
        let number = *ranges.get_or_insert_with(&spec.range, new_group);
        let group = &mut groups[number];
        let member = Member::new(outbox, id, spec);
        match group.flavors.iter_mut().find(|flavor_group| flavor_group.flavor == spec.flavor) {
            Some(flavor_group) => flavor_group.members.push(member),
            None => {
                let mut members = Members::default();
                members.push(member);
                group.flavors.push(FlavorGroup { flavor: spec.flavor, members, tail: RunTail::default() });
            }
        }
    }

    fn member(&self, outbox: &Arc<Outbox>, id: WatchId, range: &KeyRange, flavor: Flavor) -> Option<&Member> {
        let group = &self.groups[*self.ranges.get(range)?];
        group.flavors.iter().find(|flavor_group| flavor_group.flavor == flavor)?.members.get(outbox, id)
    }

    fn remove(&mut self, outbox: &Arc<Outbox>, id: WatchId, range: &KeyRange, flavor: Flavor) {
        let Some(number) = self.ranges.get(range).copied() else { return };
        let group = &mut self.groups[number];
        if let Some(flavor_group) = group.flavors.iter_mut().find(|flavor_group| flavor_group.flavor == flavor)
            && flavor_group.members.remove(outbox, id)
        {
            self.prev_kv_members -= usize::from(flavor.prev_kv);
        }
        self.drop_if_empty(number);
    }

    fn drop_if_empty(&mut self, number: usize) {
        let Some(group) = self.groups.get(number) else { return };
        if group.flavors.iter().all(|flavor_group| flavor_group.members.is_empty()) {
            self.ranges.remove(&group.range);
            self.groups.remove(number);
        }
    }

    /// Sends changes to the synced watches. Then notifies the watches and the progress requests that waited for a
    /// revision up to `head`.
    fn publish(&mut self, changes: &[Change], head: Revision) {
        self.head = head;
        for (number, hits) in self.hits(changes) {
            self.publish_to(number, &hits, head);
            self.drop_if_empty(number);
        }
        // A watch whose start revision is now committed catches up from that revision.
        while let Some(waiting) = self.future.first_entry().filter(|entry| *entry.key() <= head) {
            let start = *waiting.key();
            for member in waiting.remove() {
                member.outbox.mark_lagging(member.id, start);
            }
        }
        self.progress.retain(|(start, outbox)| {
            let due = *start <= head;
            if due {
                outbox.notify.notify_one();
            }
            !due && !outbox.has_ended()
        });
    }

    /// Returns the changes that each group receives.
    fn hits<'a>(&self, changes: &'a [Change]) -> BTreeMap<usize, Vec<&'a Change>> {
        let mut hits: BTreeMap<usize, Vec<&Change>> = BTreeMap::new();
        for change in changes {
            self.ranges.visit(&change.key, &mut |group| hits.entry(*group).or_default().push(change));
        }
        hits
    }

    /// Sends changes to the watches of a group. Watches whose outbox is full leave the group.
    fn publish_to(&mut self, number: usize, changes: &[&Change], head: Revision) {
        let Self { groups, behind, .. } = self;
        let RangeGroup { range, flavors } = &mut groups[number];
        for FlavorGroup { flavor, members, tail } in flavors {
            if members.is_empty() {
                continue;
            }
            // A change may lack its previous pair, for example if no watch had requested previous pairs when its batch
            // was committed. The watches then read the log from the first such change on.
            let incomplete =
                changes.iter().find(|change| flavor.prev_kv && flavor.admits(change) && change.lacks_prev());
            let incomplete = incomplete.map(|change| change.row.revision);
            let complete = changes.iter().copied();
            let complete =
                complete.take_while(|change| incomplete.is_none_or(|incomplete| change.row.revision < incomplete));
            let chunks = Chunk::encode(complete, *flavor, CHUNK_BYTES_MAX, encode);
            let chunks: Vec<ChunkRef> = chunks.into_iter().map(|chunk| tail.append(chunk, head)).collect();
            let before = members.len();
            members.retain_mut(|member| {
                let missed = chunks.iter().find(|chunk| !member.send(chunk)).map(|chunk| chunk.first).or(incomplete);
                if let Some(next) = missed {
                    member.fall_behind(range, next, behind);
                }
                missed.is_none()
            });
            if flavor.prev_kv {
                self.prev_kv_members -= before - members.len();
            }
        }
    }
}

/// Encodes the event of a change, with the previous pair if the flavor includes it.
pub(super) fn encode(change: &Change, flavor: Flavor) -> EncodedEvent {
    if flavor.prev_kv { change.event_with_prev() } else { change.event() }
}

impl Member {
    fn new(outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) -> Self {
        Self { outbox: Arc::clone(outbox), id, fragment: spec.fragment, sent: None }
    }

    /// Notifies the session that the watch must catch up from `next`.
    fn fall_behind(&self, range: &KeyRange, next: Revision, behind: &mut BTreeMap<WatchKey, BehindWatch>) {
        self.outbox.mark_lagging(self.id, next);
        let watch = BehindWatch { outbox: Arc::downgrade(&self.outbox), range: range.clone(), next };
        behind.insert(watch_key(&self.outbox, self.id), watch);
    }

    /// Returns false if the outbox is full.
    fn send(&mut self, chunk: &ChunkRef) -> bool {
        let taken = self.outbox.push_chunk(self.id, chunk, self.fragment);
        if taken {
            self.sent = Some(chunk.revision);
        }
        taken
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_waits_for_progress_at_most_once() {
        let hub = Hub::new(Revision::EMPTY, None, Arc::default());
        let outbox = Arc::new(hub.outbox());
        for start in [9, 9, 8, 7] {
            assert!(!hub.progress(&outbox, Some(Revision(start))));
        }
        let waiting = |hub: &Hub| hub.state.lock().progress.iter().map(|(start, _)| start.0).collect::<Vec<_>>();
        assert_eq!(waiting(&hub), [7]);
        hub.publish(&[], Revision(7), |_| {});
        assert_eq!(waiting(&hub), [0; 0]);
    }

    #[test]
    fn watches_of_all_streams_have_a_limit_together() {
        let hub = Hub::new(Revision(10), Some(Revision(5)), Arc::default());
        let streams = [Arc::new(hub.outbox()), Arc::new(hub.outbox())];
        let range = KeyRange::from_wire(b"a", b"z");
        let flavor = Flavor { prev_kv: false, puts: true, deletes: true };
        let spec = |start| Spec {
            id: None,
            range: range.clone(),
            start: Some(Revision(start)),
            flavor,
            fragment: None,
            progress_notify: false,
        };
        let (compacted, behind, future) = (spec(3), spec(7), spec(100));
        // Seven more fit.
        let others = WATCH_BYTES_MAX - 7 * behind.watch_bytes();
        hub.state.lock().watch_bytes = others;
        let create = |id: usize, spec: &Spec| hub.create(&streams[id % 2], WatchId(id as i64), spec);
        assert_eq!(create(0, &compacted), Some(JoinOutcome::Compacted(Revision(5))));
        for id in 1..=6 {
            assert_eq!(create(id, &behind), Some(JoinOutcome::Behind));
        }
        assert_eq!(create(7, &future), Some(JoinOutcome::Waiting));
        assert_eq!(create(8, &behind), None);
        hub.remove(&streams[1], WatchId(7), &future);
        assert_eq!(create(8, &behind), Some(JoinOutcome::Behind));
        for id in [1, 2, 3, 4, 5, 6, 8] {
            hub.remove(&streams[id % 2], WatchId(id as i64), &behind);
        }
        assert_eq!(hub.state.lock().watch_bytes, others);
    }
}
