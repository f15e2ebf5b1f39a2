//! The session of a watch stream: its watches and their states. It reads the log for the watches that are catching up.

use std::{
    collections::{BTreeMap, VecDeque, btree_map::Entry},
    sync::Arc,
};

use super::{
    chunk::{CHUNK_BYTES_MAX, Chunk},
    hub::{Hub, JoinOutcome, encode},
    message::{Message, NotCreated},
    outbox::Outbox,
    reading::{LONG_READ_BYTES_MAX, Reading},
    run::ChunkRef,
    spec::Spec,
};
use crate::{
    log::{Log, Page, Result},
    types::{Change, Revision, WatchId},
};

/// The watches of one stream. Its owner passes requests to it, and calls [`Session::advance`] while
/// [`Session::has_work`] returns true.
pub struct Session {
    hub: Arc<Hub>,
    log: Arc<dyn Log>,
    outbox: Arc<Outbox>,
    /// Ordered, so that the order of messages to several watches is deterministic.
    watches: BTreeMap<WatchId, Watch>,
    /// The numbers of watches by their start, for progress requests, of which a client may send many.
    starts: BTreeMap<Revision, usize>,
    next_id: i64,
    /// Watches that are catching up, served round-robin.
    behind: VecDeque<WatchId>,
    /// The page of the first of `behind`, once its read has begun.
    reading: Option<Reading>,
    is_progress_requested: bool,
    /// The head when [`Session::tick`] last looked for watches that need a progress notification.
    last_tick: Revision,
    /// Number of all watches, and number of watches that are catching up, as last reported to the metrics.
    reported: (i64, i64),
}

struct Watch {
    spec: Spec,
    state: State,
}

/// The state of a watch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Synced,
    /// Its start revision is above head + 1.
    Waiting,
    /// All events before `next` were queued.
    Behind {
        next: Revision,
    },
}

impl Session {
    pub fn new(hub: Arc<Hub>, log: Arc<dyn Log>, outbox: Arc<Outbox>) -> Self {
        let last_tick = hub.head();
        hub.metrics.watch.streams.inc();
        Self {
            hub,
            log,
            outbox,
            watches: BTreeMap::new(),
            starts: BTreeMap::new(),
            next_id: 0,
            behind: VecDeque::new(),
            reading: None,
            is_progress_requested: false,
            last_tick,
            reported: (0, 0),
        }
    }

    /// Creates a watch. The `Created` message is queued before its first event.
    pub fn create(&mut self, spec: Spec) {
        let id = match spec.id {
            Some(id) if self.watches.contains_key(&id) => return self.refuse(NotCreated::DuplicateId),
            Some(id) => id,
            None => self.free_id(),
        };
        let state = match self.hub.create(&self.outbox, id, &spec) {
            None => return self.refuse(NotCreated::TooManyRequests),
            Some(JoinOutcome::Synced) => State::Synced,
            Some(JoinOutcome::Waiting) => State::Waiting,
            Some(JoinOutcome::Behind) => {
                self.behind.push_back(id);
                State::Behind { next: spec.start.unwrap_or(Revision::EMPTY) }
            }
            Some(JoinOutcome::Compacted(compact_revision)) => {
                return self.outbox.push(Message::Compacted { id, compact_revision });
            }
        };
        if let Some(start) = spec.start {
            *self.starts.entry(start).or_default() += 1;
        }
        self.watches.insert(id, Watch { spec, state });
        self.report_counts();
    }

    /// Answers a request that creates no watch; the stream continues.
    pub fn refuse(&self, reason: NotCreated) {
        self.hub.with_head(|revision| self.outbox.push(Message::Refused { revision, reason }));
    }

    /// Cancels a watch. An unknown id is ignored, as in etcd.
    pub fn cancel(&mut self, id: WatchId) {
        if self.remove(id) {
            // Discards a notification that this watch fell behind, because a later watch may use its id.
            self.take_lagging();
            self.behind.retain(|behind| *behind != id);
            self.reading.take_if(|reading| reading.id == id);
            self.hub.with_head(|revision| self.outbox.push(Message::Canceled { id, revision }));
            // A progress request may have waited only for this watch.
            self.is_progress_requested &= !self.watches.is_empty();
            self.try_progress();
            self.report_counts();
        }
    }

    /// Requests a progress notification. It is sent when all watches of the stream are synced, once for all requests
    /// made until then. A stream without watches receives none, as in etcd.
    pub fn request_progress(&mut self) {
        self.is_progress_requested = !self.watches.is_empty();
        self.try_progress();
    }

    /// Sends a progress notification to each synced watch that requested periodic notifications and received nothing
    /// since the last tick.
    pub fn tick(&mut self) {
        self.take_lagging();
        let mut head = self.last_tick;
        for (id, watch) in &self.watches {
            if watch.spec.progress_notify && watch.state == State::Synced {
                head = self.hub.progress_for_watch(&self.outbox, *id, &watch.spec, self.last_tick);
            }
        }
        self.last_tick = head;
    }

    /// Returns whether [`Session::advance`] has something to read and the outbox has capacity, or a read has begun.
    pub fn has_work(&self) -> bool {
        self.reading.is_some() || (!self.behind.is_empty() && self.outbox.has_capacity())
    }

    /// Returns whether a read has begun. It may have a connection to the database until [`Session::advance`] returns.
    pub fn is_reading(&self) -> bool {
        self.reading.is_some()
    }

    /// Returns whether the stream has ended.
    pub fn has_ended(&self) -> bool {
        self.outbox.has_ended()
    }

    /// Handles the notifications of the hub after [`Outbox::notified`] returned.
    pub fn handle_notifications(&mut self) {
        self.take_lagging();
        self.try_progress();
    }

    /// Advances the next watch that is catching up by one page.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: the next call continues a read that has begun. Requests therefore do not delay it.
    pub async fn advance(&mut self) -> Result<()> {
        if self.reading.is_none() {
            self.reading = self.begin_reading();
        }
        let Some(reading) = &mut self.reading else { return Ok(()) };
        let page = reading.await;
        let Some(Reading { id, from, head, .. }) = self.reading.take() else { return Ok(()) };
        let joined = self.deliver(id, from, page?, head);
        self.advanced(id, joined);
        Ok(())
    }

    /// Begins to read for the next watch that is behind; `None`: it needs no read, or no watch is behind.
    fn begin_reading(&mut self) -> Option<Reading> {
        let id = self.behind.front().copied()?;
        let Some(Watch { spec, state: State::Behind { next } }) = self.watches.get(&id) else {
            self.behind.pop_front();
            self.try_progress();
            return None;
        };
        match self.hub.join(&self.outbox, id, spec, *next) {
            JoinOutcome::Behind => Some(Reading::begin(&self.hub, &self.log, id, spec, *next)),
            joined @ (JoinOutcome::Synced | JoinOutcome::Waiting | JoinOutcome::Compacted(_)) => {
                self.advanced(id, Some(joined));
                None
            }
        }
    }

    /// Ends the turn of the watch, which is the first of `behind`. `None`: the outbox is full.
    fn advanced(&mut self, id: WatchId, joined: Option<JoinOutcome>) {
        self.behind.pop_front();
        match joined {
            None | Some(JoinOutcome::Behind) => self.behind.push_back(id),
            Some(JoinOutcome::Compacted(compact_revision)) => {
                self.remove(id);
                self.outbox.push(Message::Compacted { id, compact_revision });
            }
            Some(JoinOutcome::Synced) => self.set_state(id, State::Synced),
            Some(JoinOutcome::Waiting) => self.set_state(id, State::Waiting),
        }
        self.report_counts();
        self.try_progress();
    }

    /// Queues a page of events for a watch and tries to join it to the hub. Returns `None` if the outbox is full.
    fn deliver(&mut self, id: WatchId, from: Revision, mut page: Page, head: Revision) -> Option<JoinOutcome> {
        let watch = self.watches.get_mut(&id)?;
        // A compaction may have deleted rows during the read.
        let compacted = self.hub.compact_revision();
        if let Some(compacted) = compacted.filter(|compacted| from < *compacted) {
            return Some(JoinOutcome::Compacted(compacted));
        }
        // A compaction by another instance, which the hub has not applied yet, may also have deleted rows.
        if let Some(purged) = page.purged.filter(|purged| from < *purged) {
            return Some(JoinOutcome::Compacted(purged));
        }
        // Changes at or below the compact revision are sent without previous pairs, whether these still exist or not.
        let readable = |change: &&mut Change| Some(change.row.revision) > compacted;
        page.changes.iter_mut().take_while(|change| !readable(change)).for_each(|change| change.prev = None);
        let flavor = watch.spec.flavor;
        let chunk_bytes = if watch.spec.fragment.is_some() { LONG_READ_BYTES_MAX } else { CHUNK_BYTES_MAX };
        for chunk in Chunk::encode(&page.changes, flavor, chunk_bytes, encode) {
            let chunk = ChunkRef::in_new_run(chunk, head);
            if !self.outbox.push_chunk(id, &chunk, watch.spec.fragment) {
                watch.state = State::Behind { next: chunk.first };
                return None;
            }
        }
        watch.state = State::Behind { next: page.next };
        Some(self.hub.join(&self.outbox, id, &watch.spec, page.next))
    }

    fn set_state(&mut self, id: WatchId, state: State) {
        if let Some(watch) = self.watches.get_mut(&id) {
            watch.state = state;
        }
    }

    /// Lets the watches that the hub dropped catch up.
    fn take_lagging(&mut self) {
        for (id, next) in self.outbox.take_lagging() {
            if let Some(watch) = self.watches.get_mut(&id) {
                watch.state = State::Behind { next };
                self.behind.push_back(id);
            }
        }
        self.report_counts();
    }

    /// Reports changed counts to the metrics.
    fn report_counts(&mut self) {
        let now = (self.watches.len() as i64, self.behind.len() as i64);
        if now != self.reported {
            let metrics = &self.hub.metrics.watch;
            metrics.watchers.add(now.0 - self.reported.0);
            metrics.behind.add(now.1 - self.reported.1);
            self.reported = now;
        }
    }

    /// Sends the requested progress notification if all watches are synced.
    fn try_progress(&mut self) {
        if !self.is_progress_requested {
            return;
        }
        self.take_lagging();
        if self.behind.is_empty() {
            let newest_start = self.starts.last_key_value().map(|(start, _)| *start);
            self.is_progress_requested = !self.hub.progress(&self.outbox, newest_start);
        }
    }

    /// Removes a watch. Returns whether it existed.
    fn remove(&mut self, id: WatchId) -> bool {
        let Some(watch) = self.watches.remove(&id) else { return false };
        self.hub.remove(&self.outbox, id, &watch.spec);
        if let Some(start) = watch.spec.start
            && let Entry::Occupied(mut watches) = self.starts.entry(start)
        {
            *watches.get_mut() -= 1;
            if *watches.get() == 0 {
                watches.remove();
            }
        }
        true
    }

    fn free_id(&mut self) -> WatchId {
        loop {
            let id = WatchId(self.next_id);
            self.next_id += 1;
            if !self.watches.contains_key(&id) {
                return id;
            }
        }
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        for (id, watch) in &self.watches {
            self.hub.remove(&self.outbox, *id, &watch.spec);
        }
        let metrics = &self.hub.metrics.watch;
        metrics.streams.dec();
        metrics.watchers.sub(self.reported.0);
        metrics.behind.sub(self.reported.1);
    }
}
