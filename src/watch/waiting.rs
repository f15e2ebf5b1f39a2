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
/// What a message costs beside its events: its place in the queue.
pub(super) const PLACE_BYTES: usize = size_of::<Queued>();
const _: () = assert!(PLACE_BYTES <= 32);
/// Events of one watch that are sent as one message, in bytes, when several wait.
const MERGE_BYTES_MAX: usize = if cfg!(test) { 256 } else { 1 << 20 };

/// What waits on all streams.
#[derive(Clone, Debug)]
pub struct Pending {
    /// Messages, as long as they are not merged.
    pub messages: IntGauge,
    /// In queues.
    places: Arc<AtomicUsize>,
}

impl Pending {
    pub fn new(messages: IntGauge) -> Self {
        Self { messages, places: Arc::default() }
    }

    /// Whether it takes as much memory as it may.
    fn is_too_much(&self) -> bool {
        Chunk::waiting_bytes() + self.places.load(Ordering::Relaxed) * PLACE_BYTES >= ALL_BYTES_MAX
    }

    #[cfg(test)]
    pub(super) fn hold(&self, places: usize) {
        self.places.fetch_add(places, Ordering::Relaxed);
    }

    #[cfg(test)]
    pub(super) fn places(&self) -> usize {
        self.places.load(Ordering::Relaxed)
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
    /// The message before has the same chunk, and it is counted there.
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

    /// What it costs this stream. A chunk that several of its watches get is counted once.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// Whether all streams together hold as much as they may.
    pub fn is_crowded(&self) -> bool {
        self.pending.as_ref().is_some_and(Pending::is_too_much)
    }

    pub fn push(&mut self, message: Message) {
        let events = if let Message::Events { events, .. } = &message { events.as_slice() } else { &[] };
        let events: usize = events.iter().map(Bytes::len).sum();
        let cost = PLACE_BYTES + size_of::<(Message, usize)>() + events;
        self.push_place(Queued::Other(Box::new((message, cost))), cost);
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
                self.pending.iter().for_each(|pending| pending.messages.inc());
                return;
            }
            is_counted = before.last == *number;
        }
        let chunks = Chunks { id, run: Arc::clone(run), first: *number, last: *number, is_counted };
        self.push_place(Queued::Chunks(chunks), PLACE_BYTES + if is_counted { 0 } else { *len });
    }

    fn push_place(&mut self, queued: Queued, cost: usize) {
        self.bytes += cost;
        self.queue.push_back(queued);
        if let Some(pending) = &self.pending {
            pending.messages.inc();
            pending.places.fetch_add(1, Ordering::Relaxed);
        }
    }

    pub fn pop(&mut self) -> Option<Message> {
        if let Some(Queued::Chunks(Chunks { id, .. })) = self.queue.front() {
            let id = *id;
            return Some(self.pop_events(id));
        }
        let Some(Queued::Other(other)) = self.pop_place() else { return None };
        let (message, cost) = *other;
        self.bytes -= cost;
        self.pending.iter().for_each(|pending| pending.messages.dec());
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
            self.pending.iter().for_each(|pending| pending.messages.dec());
            if chunks.first == chunks.last {
                self.pop_place();
                self.bytes -= PLACE_BYTES;
            } else {
                chunks.first += 1;
            }
        }
        Message::Events { id, revision, events, fragment: false }
    }

    fn pop_place(&mut self) -> Option<Queued> {
        let popped = self.queue.pop_front()?;
        if let Some(pending) = &self.pending {
            pending.places.fetch_sub(1, Ordering::Relaxed);
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
        pending.places.fetch_sub(self.queue.len(), Ordering::Relaxed);
    }
}
