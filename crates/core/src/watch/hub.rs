//! The hub: sends each committed change to the synced watches whose range contains its key.
//!
//! One lock orders joining, progress and publishing. A watch that joins at a revision therefore receives every later
//! revision, and a progress notification is queued after all events that it covers. Publishing encodes an event once
//! per range and flavor, regardless of the number of watches that share it.

mod behind;
mod lookup;
mod members;
mod recent;
mod survey;

use std::{collections::BTreeMap, sync::Arc};

use slab::Slab;
use tokio::sync::Semaphore;

pub use self::survey::{Survey, WatchedRange};
use self::{
    behind::BehindWatches,
    members::{Member, Members},
    recent::Recent,
};
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
    index::TreeIndex,
    metrics::Metrics,
    supervise::Lock,
    sync::RwLock,
    types::{Change, EncodedEvent, KeyRange, Revision, WatchId},
};

/// Distributes committed changes to the synced watches of all streams.
pub struct Hub {
    state: Lock<State>,
    /// The index that publishing advances. It is locked after `state`. `None` in tests of a hub without a store.
    index: Option<Arc<RwLock<TreeIndex>>>,
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
    behind: BehindWatches,
    recent: Recent,
    /// Streams that wait for a progress notification at or above this revision.
    progress: Vec<(Revision, Arc<Outbox>)>,
    /// Number of synced watches that requested previous pairs.
    prev_kv_members: usize,
    /// [`Spec::watch_bytes`] of all watches.
    watch_bytes: usize,
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
            index: None,
            state: Lock::new(State {
                head,
                compact_revision,
                ranges: Intervals::new(),
                groups: Slab::new(),
                future: BTreeMap::new(),
                behind: BehindWatches::default(),
                recent: Recent::new(head),
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

    /// Returns whether any watch requested previous pairs, so that changes should contain them.
    pub fn wants_prev(&self) -> bool {
        let state = self.state.lock();
        state.prev_kv_members > 0 || state.behind.want_prev()
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
            for FlavorGroup { flavor, members, .. } in flavors {
                for member in members {
                    member.fall_behind(&range, flavor, next, behind);
                }
            }
        }
        state.ranges = Intervals::new();
        state.prev_kv_members = 0;
        state.publish(&[], head);
        state.recent.restart(head);
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
            Some(start) => {
                let next = self.skip_unchanged(&state, &spec.range, start);
                state.join(outbox, id, spec, next)
            }
        };
        // A watch that begins at a compacted revision has ended, and is not removed.
        if !matches!(outcome, JoinOutcome::Compacted(_)) {
            state.watch_bytes = bytes;
        }
        Some(outcome)
    }

    /// Joins a watch for which all events before `next` were queued.
    pub(super) fn join(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> JoinOutcome {
        let mut state = self.state.lock();
        let next = self.skip_unchanged(&state, &spec.range, next);
        state.join(outbox, id, spec, next)
    }

    pub(super) fn compact_revision(&self) -> Option<Revision> {
        self.state.lock().compact_revision
    }

    /// Removes a watch that was created, in any state.
    pub(super) fn remove(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec) {
        let mut state = self.state.lock();
        state.watch_bytes -= spec.watch_bytes();
        state.remove(outbox, id, &spec.range, spec.flavor);
        state.behind.remove(outbox, id);
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
            // Without writes, nothing is published that would remove the streams that have ended.
            state.progress.retain(|(_, other)| !Arc::ptr_eq(other, outbox) && !other.has_ended());
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
            self.behind.insert(outbox, id, &spec.range, spec.flavor, next);
        } else {
            self.behind.remove(outbox, id);
        }
        outcome
    }

    fn join_at(&mut self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> JoinOutcome {
        if let Some(compacted) = self.compact_revision.filter(|compacted| next < *compacted) {
            return JoinOutcome::Compacted(compacted);
        }
        if next <= self.head && !self.send_recent(outbox, id, spec, next) {
            return JoinOutcome::Behind;
        }
        if next > self.head.next() {
            self.future.entry(next).or_default().push(Member::new(outbox, id, spec));
            return JoinOutcome::Waiting;
        }
        self.add(outbox, id, spec);
        JoinOutcome::Synced
    }

    /// Sends a watch what was published from `next` on. Returns false if the watch has to read that from the log: not all of
    /// it is here, or it is more than one message, or previous pairs are missing or must not be sent.
    fn send_recent(&self, outbox: &Arc<Outbox>, id: WatchId, spec: &Spec, next: Revision) -> bool {
        let Some(changes) = self.recent.since(next) else { return false };
        let wanted: Vec<&Change> =
            changes.filter(|change| spec.flavor.admits(change) && spec.range.contains(&change.key)).collect();
        let needs_log = |change: &&Change| change.lacks_prev() || Some(change.row.revision) <= self.compact_revision;
        if (spec.flavor.prev_kv && wanted.iter().any(needs_log))
            || wanted.iter().map(|change| change.key.len() + change.pair_bytes()).sum::<usize>() > CHUNK_BYTES_MAX
        {
            return false;
        }
        let chunks = Chunk::encode(wanted, spec.flavor, usize::MAX, encode);
        chunks.into_iter().all(|chunk| outbox.push_chunk(id, &ChunkRef::in_new_run(chunk, self.head), spec.fragment))
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
        if self.behind.is_empty() {
            self.recent.restart(head);
        } else {
            self.recent.push(changes);
        }
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
                    member.fall_behind(range, *flavor, next, behind);
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

#[cfg(test)]
mod tests;
