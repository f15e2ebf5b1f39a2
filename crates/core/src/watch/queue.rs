//! The message queue of one stream: its memory use, and the merging of queued events into messages.

use std::{
    collections::{HashMap, VecDeque},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
};

use bytes::Bytes;
use prometheus::IntGauge;

use super::{
    chunk::Chunk,
    message::Message,
    run::{ChunkRef, ChunkRun},
};
use crate::types::{Revision, WatchId};

/// Memory limit of all streams together, in bytes of waiting chunks and slots. At or above it, the limit of each stream
/// is lowered.
pub(super) const ALL_BYTES_MAX: usize = 256 << 20;
/// Bytes of a slot. A chunk that follows another chunk of its run needs no slot of its own.
pub(super) const SLOT_BYTES: usize = size_of::<Slot>();
/// A stream may need one slot per event, for example if the events of two watches alternate.
const _: () = assert!(SLOT_BYTES <= 24);
/// Maximum bytes of queued events of one watch that are merged into one message.
const MERGE_BYTES_MAX: usize = if cfg!(test) { 256 } else { 1 << 20 };

/// Counts the messages that wait on all streams.
#[derive(Clone, Debug)]
pub struct Pending {
    /// Number of messages, before events are merged.
    pub messages: IntGauge,
    /// Number of used queue slots.
    slots: Arc<AtomicUsize>,
}

impl Pending {
    pub fn new(messages: IntGauge) -> Self {
        Self { messages, slots: Arc::default() }
    }

    /// Returns whether the memory limit is reached.
    fn is_limit_reached(&self) -> bool {
        Chunk::total_bytes() + self.slots.load(Ordering::Relaxed) * SLOT_BYTES >= ALL_BYTES_MAX
    }

    #[cfg(test)]
    pub(super) fn unregistered() -> Self {
        Self::new(IntGauge::new("pending", "Waiting messages.").expect("a valid name"))
    }

    #[cfg(test)]
    pub(super) fn add_slots(&self, slots: usize) {
        self.slots.fetch_add(slots, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn slots(&self) -> usize {
        self.slots.load(Ordering::Relaxed)
    }
}

/// The queue of one stream.
#[derive(Debug)]
pub(super) struct MessageQueue {
    queue: VecDeque<Slot>,
    bytes: usize,
    pending: Pending,
}

/// Maximum number of slots that [`MessageQueue::queued`] visits while the queue is locked.
const QUEUED_SLOTS_MAX: usize = 10_000;

/// The events that wait in a queue.
#[derive(Debug)]
pub(super) struct Queued {
    /// Number of chunks and oldest revision for each watch.
    pub(super) watches: HashMap<WatchId, (usize, Revision)>,
    /// Whether the queue is longer than [`QUEUED_SLOTS_MAX`].
    pub(super) is_partial: bool,
}

/// An entry of the queue.
#[derive(Debug)]
enum Slot {
    Chunks(Chunks),
    /// Any other message, with its size in bytes.
    Other(Box<(Message, usize)>),
}

/// Consecutive chunks of one run for one watch, from the hub or from the log.
#[derive(Debug)]
struct Chunks {
    id: WatchId,
    run: Arc<ChunkRun>,
    /// Numbers of the first and last waiting chunk in the run.
    first: u16,
    last: u16,
    /// Whether the bytes are counted already, because the previous slot ends with the same chunk. This slot then
    /// contains no other chunk.
    is_counted: bool,
}

impl Chunks {
    fn len(&self) -> usize {
        usize::from(self.last - self.first) + 1
    }
}

impl MessageQueue {
    /// Creates a queue whose contents are counted in `pending`.
    pub fn new(pending: &Pending) -> Self {
        Self { queue: VecDeque::new(), bytes: 0, pending: pending.clone() }
    }

    /// Returns the size in bytes. A chunk that several watches of the stream receive consecutively is counted once.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Returns whether all streams together have reached the memory limit.
    pub fn is_memory_short(&self) -> bool {
        self.pending.is_limit_reached()
    }

    /// Adds a message. [`Self::push_chunk`] adds the events of a whole chunk.
    pub fn push(&mut self, message: Message) {
        let bytes: usize =
            if let Message::Events { events, .. } = &message { events.iter().map(Bytes::len).sum() } else { 0 };
        let cost = SLOT_BYTES + size_of::<(Message, usize)>() + bytes;
        self.push_slot(Slot::Other(Box::new((message, cost))), cost);
    }

    /// Adds the events of a chunk. No new slot is needed if the last slot belongs to the same watch and ends with the
    /// previous chunk of the run.
    pub fn push_chunk(&mut self, id: WatchId, chunk: &ChunkRef) {
        let ChunkRef { run, number, len, .. } = chunk;
        let mut is_counted = false;
        if let Some(Slot::Chunks(before)) = self.queue.back_mut()
            && Arc::ptr_eq(&before.run, run)
        {
            if before.id == id && before.last + 1 == *number && !before.is_counted {
                before.last = *number;
                self.bytes += len;
                self.pending.messages.inc();
                return;
            }
            is_counted = before.last == *number;
        }
        let chunks = Chunks { id, run: Arc::clone(run), first: *number, last: *number, is_counted };
        self.push_slot(Slot::Chunks(chunks), SLOT_BYTES + if is_counted { 0 } else { *len });
    }

    /// Returns the events that wait, or `None` if the queue is empty.
    pub fn queued(&self) -> Option<Queued> {
        if self.queue.is_empty() {
            return None;
        }
        let mut watches = HashMap::new();
        for slot in self.queue.iter().take(QUEUED_SLOTS_MAX) {
            let (id, count, oldest) = match slot {
                Slot::Chunks(chunks) => (chunks.id, chunks.len(), chunks.run.first_revision(chunks.first)),
                Slot::Other(other) => {
                    let Message::Events { id, revision, .. } = &other.0 else { continue };
                    (*id, 1, *revision)
                }
            };
            watches.entry(id).or_insert((0, oldest)).0 += count;
        }
        Some(Queued { watches, is_partial: self.queue.len() > QUEUED_SLOTS_MAX })
    }

    fn push_slot(&mut self, slot: Slot, cost: usize) {
        self.bytes += cost;
        self.queue.push_back(slot);
        self.pending.messages.inc();
        self.pending.slots.fetch_add(1, Ordering::Relaxed);
    }

    /// Removes the next message.
    pub fn pop(&mut self) -> Option<Message> {
        if let Some(Slot::Chunks(Chunks { id, .. })) = self.queue.front() {
            let id = *id;
            return Some(self.pop_events(id));
        }
        let Some(Slot::Other(other)) = self.pop_slot() else { return None };
        let (message, cost) = *other;
        self.bytes -= cost;
        self.pending.messages.dec();
        Some(message)
    }

    /// Merges the next events of one watch into one message.
    fn pop_events(&mut self, id: WatchId) -> Message {
        let (mut events, mut bytes, mut revision) = (Vec::new(), 0, Revision::EMPTY);
        while let Some(Slot::Chunks(chunks)) = self.queue.front_mut()
            && chunks.id == id
        {
            let (chunk, chunk_revision) = chunks.run.events(chunks.first);
            if !events.is_empty() && bytes + chunk.len() > MERGE_BYTES_MAX {
                break;
            }
            bytes += chunk.len();
            revision = chunk_revision;
            self.bytes -= if chunks.is_counted { 0 } else { chunk.len() };
            events.push(chunk);
            if chunks.first == chunks.last {
                self.pop_slot();
                self.bytes -= SLOT_BYTES;
            } else {
                chunks.first += 1;
            }
            self.pending.messages.dec();
        }
        Message::Events { id, revision, events, fragment: false }
    }

    fn pop_slot(&mut self) -> Option<Slot> {
        let popped = self.queue.pop_front()?;
        self.pending.slots.fetch_sub(1, Ordering::Relaxed);
        Some(popped)
    }
}

impl Drop for MessageQueue {
    fn drop(&mut self) {
        let messages = self.queue.iter().map(|slot| if let Slot::Chunks(chunks) = slot { chunks.len() } else { 1 });
        self.pending.messages.sub(i64::try_from(messages.sum::<usize>()).unwrap_or(i64::MAX));
        self.pending.slots.fetch_sub(self.queue.len(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::{super::run::RunTail, *};

    const EVENT_BYTES: usize = 100;

    fn published(tail: &mut RunTail, revision: i64) -> ChunkRef {
        tail.append(Chunk::of_event(&[7; EVENT_BYTES], Revision(revision)), Revision(revision))
    }

    /// Pops all messages and returns watch, revision and number of event chunks of each.
    fn pop_all(queue: &mut MessageQueue) -> Vec<(i64, i64, usize)> {
        let summary = |message| {
            if let Message::Events { id, revision, events, .. } = message {
                (id.0, revision.0, events.len())
            } else if let Message::Progress { id, revision } = message {
                (id.0, revision.0, 0)
            } else {
                panic!("unexpected message {message:?}")
            }
        };
        std::iter::from_fn(|| queue.pop()).map(summary).collect()
    }

    #[test]
    fn consecutive_chunks_share_a_slot_and_keep_their_order() {
        // 1. For each revision from 2 on: the watches that receive its chunk; 0 is a progress message instead.
        // 2. The expected number of slots.
        // 3. The expected number of chunks whose bytes are counted.
        // 4. The expected messages: watch, revision, number of chunks (at most two, because of the limit in tests).
        type Row<'a> = (&'a [&'a [i64]], usize, usize, &'a [(i64, i64, usize)]);
        let rows: [Row<'_>; 6] = [
            (&[&[1]], 1, 1, &[(1, 2, 1)]),
            (&[&[1], &[1], &[1]], 1, 3, &[(1, 3, 2), (1, 4, 1)]),
            // Two watches of one stream: the order of the messages is kept, and a shared chunk is counted once.
            (&[&[1, 2], &[1, 2]], 4, 2, &[(1, 2, 1), (2, 2, 1), (1, 3, 1), (2, 3, 1)]),
            (&[&[1, 2], &[2], &[2]], 3, 3, &[(1, 2, 1), (2, 3, 2), (2, 4, 1)]),
            // The watch does not receive revision 3.
            (&[&[1], &[], &[1]], 2, 2, &[(1, 4, 2)]),
            (&[&[1], &[1, 0], &[1]], 3, 3, &[(1, 3, 2), (1, 3, 0), (1, 4, 1)]),
        ];
        for (sent, slots, counted, messages) in rows {
            let pending = Pending::unregistered();
            let mut queue = MessageQueue::new(&pending);
            let (mut tail, mut kept) = (RunTail::default(), Vec::new());
            let mut pushed = 0;
            for (watches, revision) in sent.iter().zip(2..) {
                let chunk = published(&mut tail, revision);
                for watch in *watches {
                    pushed += 1;
                    match watch {
                        0 => queue.push(Message::Progress { id: WatchId(1), revision: Revision(revision) }),
                        watch => queue.push_chunk(WatchId(*watch), &chunk),
                    }
                }
                // Without a reference the run would be freed, and the next chunk would start a new run.
                kept.push(chunk);
            }
            assert_eq!((pending.slots(), pending.messages.get()), (slots, pushed), "{sent:?}");
            let progress = sent.concat().iter().filter(|watch| **watch == 0).count() * size_of::<(Message, usize)>();
            assert_eq!(queue.bytes(), slots * SLOT_BYTES + counted * EVENT_BYTES + progress, "{sent:?}");
            assert_eq!(pop_all(&mut queue), messages, "{sent:?}");
            assert_eq!((queue.bytes(), pending.slots(), pending.messages.get()), (0, 0, 0), "{sent:?}");
            // Dropping a queue releases what it counted.
            kept.iter().for_each(|chunk| queue.push_chunk(WatchId(1), chunk));
            drop(queue);
            assert_eq!((pending.slots(), pending.messages.get()), (0, 0), "{sent:?}");
        }
    }
}
