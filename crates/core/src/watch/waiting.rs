//! The queue of one stream: what waits in it, what that costs, and in which messages it leaves.

use std::{
    collections::VecDeque,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use prometheus::IntGauge;

use super::{
    chunk::Chunk,
    outbox::Message,
    run::{Place, Run},
};
use crate::types::{Revision, WatchId};

/// Bytes that may wait on all streams before each may keep little.
pub(super) const ALL_BYTES_MAX: usize = 256 << 20;
/// What a message costs beside its events, if it does not follow another of its run.
pub(super) const SLOT_BYTES: usize = size_of::<Queued>();
/// Streams of ranges of their own wait with one for each event.
const _: () = assert!(SLOT_BYTES <= 24);
/// Events of one watch that are sent as one message, in bytes, when several wait.
const MERGE_BYTES_MAX: usize = if cfg!(test) { 256 } else { 1 << 20 };

/// What waits on all streams.
#[derive(Clone, Debug)]
pub struct Pending {
    /// Messages, as long as they are not merged.
    pub messages: IntGauge,
    /// Of queues, that are taken.
    slots: Arc<AtomicUsize>,
}

impl Pending {
    pub fn new(messages: IntGauge) -> Self {
        Self { messages, slots: Arc::default() }
    }

    /// Whether it takes as much memory as it may.
    fn is_too_much(&self) -> bool {
        Chunk::waiting_bytes() + self.slots.load(Ordering::Relaxed) * SLOT_BYTES >= ALL_BYTES_MAX
    }

    #[cfg(test)]
    pub(super) fn hold(&self, slots: usize) {
        self.slots.fetch_add(slots, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn slots(&self) -> usize {
        self.slots.load(Ordering::Relaxed)
    }
}

/// See the module's page.
#[derive(Debug, Default)]
pub(super) struct Waiting {
    queue: VecDeque<Queued>,
    bytes: usize,
    pending: Option<Pending>,
}

#[derive(Debug)]
enum Queued {
    Chunks(Chunks),
    /// Anything else, with what it costs this stream.
    Other(Box<(Message, usize)>),
}

/// Of one watch, from the hub, or from the log while it catches up.
#[derive(Debug)]
struct Chunks {
    id: WatchId,
    run: Arc<Run>,
    /// Those of the run that wait, first and last.
    first: u16,
    last: u16,
    /// The slot before ends with the same chunk, which is counted there; this one has no other.
    is_counted: bool,
}

impl Chunks {
    fn len(&self) -> usize {
        usize::from(self.last - self.first) + 1
    }
}

impl Waiting {
    /// Counted with what waits on other streams.
    pub fn counted(pending: &Pending) -> Self {
        Self { queue: VecDeque::new(), bytes: 0, pending: Some(pending.clone()) }
    }

    /// What it costs this stream. A chunk that several of its watches get one after the other is counted once.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether all streams together hold as much as they may.
    pub fn is_crowded(&self) -> bool {
        self.pending.as_ref().is_some_and(Pending::is_too_much)
    }

    pub fn push(&mut self, message: Message) {
        let bytes: usize =
            if let Message::Events { events, .. } = &message { events.iter().map(Bytes::len).sum() } else { 0 };
        let cost = SLOT_BYTES + size_of::<(Message, usize)>() + bytes;
        self.push_slot(Queued::Other(Box::new((message, cost))), cost);
    }

    pub fn push_chunk(&mut self, id: WatchId, place: &Place) {
        let Place { run, number, len, .. } = place;
        let mut is_counted = false;
        if let Some(Queued::Chunks(before)) = self.queue.back_mut()
            && Arc::ptr_eq(&before.run, run)
        {
            if before.id == id && before.last + 1 == *number && !before.is_counted {
                before.last = *number;
                self.bytes += len;
                self.count(1);
                return;
            }
            is_counted = before.last == *number;
        }
        let chunks = Chunks { id, run: Arc::clone(run), first: *number, last: *number, is_counted };
        self.push_slot(Queued::Chunks(chunks), SLOT_BYTES + if is_counted { 0 } else { *len });
    }

    fn push_slot(&mut self, queued: Queued, cost: usize) {
        self.bytes += cost;
        self.queue.push_back(queued);
        self.count(1);
        if let Some(pending) = &self.pending {
            pending.slots.fetch_add(1, Ordering::Relaxed);
        }
    }

    /// Of messages.
    fn count(&self, more: i64) {
        if let Some(pending) = &self.pending {
            pending.messages.add(more);
        }
    }

    pub fn pop(&mut self) -> Option<Message> {
        if let Some(Queued::Chunks(Chunks { id, .. })) = self.queue.front() {
            let id = *id;
            return Some(self.pop_events(id));
        }
        let Some(Queued::Other(other)) = self.pop_slot() else { return None };
        let (message, cost) = *other;
        self.bytes -= cost;
        self.count(-1);
        Some(message)
    }

    /// All that comes next of one watch, as far as it is one message.
    fn pop_events(&mut self, id: WatchId) -> Message {
        let (mut events, mut bytes, mut revision) = (Vec::new(), 0, Revision::EMPTY);
        while let Some(Queued::Chunks(chunks)) = self.queue.front_mut()
            && chunks.id == id
        {
            let (chunk, told) = chunks.run.events(chunks.first);
            if !events.is_empty() && bytes + chunk.len() > MERGE_BYTES_MAX {
                break;
            }
            bytes += chunk.len();
            revision = told;
            self.bytes -= if chunks.is_counted { 0 } else { chunk.len() };
            events.push(chunk);
            if chunks.first == chunks.last {
                self.pop_slot();
                self.bytes -= SLOT_BYTES;
            } else {
                chunks.first += 1;
            }
            self.count(-1);
        }
        Message::Events { id, revision, events, fragment: false }
    }

    fn pop_slot(&mut self) -> Option<Queued> {
        let popped = self.queue.pop_front()?;
        if let Some(pending) = &self.pending {
            pending.slots.fetch_sub(1, Ordering::Relaxed);
        }
        Some(popped)
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let Some(pending) = &self.pending else { return };
        let messages =
            self.queue.iter().map(|queued| if let Queued::Chunks(chunks) = queued { chunks.len() } else { 1 });
        pending.messages.sub(i64::try_from(messages.sum::<usize>()).unwrap_or(i64::MAX));
        pending.slots.fetch_sub(self.queue.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::run::Tail, *};

    const EVENT_BYTES: usize = 100;

    fn published(tail: &mut Tail, revision: i64) -> Place {
        tail.append(Chunk::of(&[7; EVENT_BYTES], Revision(revision)), Revision(revision))
    }

    /// Watch, revision and events of each message that leaves.
    fn leaves(waiting: &mut Waiting) -> Vec<(i64, i64, usize)> {
        let shown = |message| {
            if let Message::Events { id, revision, events, .. } = message {
                (id.0, revision.0, events.len())
            } else if let Message::Progress { id, revision } = message {
                (id.0, revision.0, 0)
            } else {
                panic!("{message:?} was not pushed")
            }
        };
        std::iter::from_fn(|| waiting.pop()).map(shown).collect()
    }

    #[test]
    fn what_follows_takes_no_slot_and_all_of_it_leaves_in_its_order() {
        // Which watch each revision from 2 on goes to (0: progress), slots that takes, events that are counted, and the
        // messages that leave, of at most two events here.
        type Row<'a> = (&'a [&'a [i64]], usize, usize, &'a [(i64, i64, usize)]);
        let rows: [Row<'_>; 6] = [
            (&[&[1]], 1, 1, &[(1, 2, 1)]),
            (&[&[1], &[1], &[1]], 1, 3, &[(1, 3, 2), (1, 4, 1)]),
            // Two watches of the stream: the order in which they are told stays, and what both get is counted once.
            (&[&[1, 2], &[1, 2]], 4, 2, &[(1, 2, 1), (2, 2, 1), (1, 3, 1), (2, 3, 1)]),
            (&[&[1, 2], &[2], &[2]], 3, 3, &[(1, 2, 1), (2, 3, 2), (2, 4, 1)]),
            // A watch that one revision did not go to.
            (&[&[1], &[], &[1]], 2, 2, &[(1, 4, 2)]),
            (&[&[1], &[1, 0], &[1]], 3, 3, &[(1, 3, 2), (1, 3, 0), (1, 4, 1)]),
        ];
        for (told, slots, counted, messages) in rows {
            let pending = Pending::new(IntGauge::new("pending", "Waiting messages.").expect("a gauge"));
            let mut waiting = Waiting::counted(&pending);
            let (mut tail, mut others) = (Tail::default(), Vec::new());
            let mut pushed = 0;
            for (watches, revision) in told.iter().zip(2..) {
                let place = published(&mut tail, revision);
                for watch in *watches {
                    pushed += 1;
                    match watch {
                        0 => waiting.push(Message::Progress { id: WatchId(1), revision: Revision(revision) }),
                        watch => waiting.push_chunk(WatchId(*watch), &place),
                    }
                }
                // Somebody waits for all of it.
                others.push(place);
            }
            assert_eq!((pending.slots(), pending.messages.get()), (slots, pushed), "{told:?}");
            let progress = told.concat().iter().filter(|watch| **watch == 0).count() * size_of::<(Message, usize)>();
            assert_eq!(waiting.bytes(), slots * SLOT_BYTES + counted * EVENT_BYTES + progress, "{told:?}");
            assert_eq!(leaves(&mut waiting), messages, "{told:?}");
            assert_eq!((waiting.bytes(), pending.slots(), pending.messages.get()), (0, 0, 0), "{told:?}");
            // What never leaves is no longer counted either.
            others.iter().for_each(|place| waiting.push_chunk(WatchId(1), place));
            drop(waiting);
            assert_eq!((pending.slots(), pending.messages.get()), (0, 0), "{told:?}");
        }
    }
}
