//! What waits to be sent on one watch stream: a bounded queue between the hub and the connection.
//!
//! The hub and the session push, the connection takes. A full outbox refuses events, never other messages; those answer
//! requests, and requests are read only while there is room. What counts is memory: a chunk that several watches of the
//! stream get is counted once.
//!
//! Many streams that are not read would still take much together, for their chunks, where each has a range of its own, and
//! for their places in the queues. When they do, each stream may keep little more than it needs to go on, and reads the
//! log later.

use std::{
    collections::VecDeque,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures_util::Stream;
use parking_lot::Mutex;
use prometheus::IntGauge;
use tokio::sync::Notify;

use super::chunk::Chunk;
use crate::types::{Revision, WatchId};

/// Bytes of events that may wait on one stream. Unit tests have it full soon.
const OUTBOX_BYTES_MAX: usize = if cfg!(test) { 1 << 10 } else { 8 << 20 };
/// The same when what waits on all streams takes more than the second.
const CROWDED_BYTES_MAX: usize = if cfg!(test) { 1 << 9 } else { 16 << 10 };
const ALL_BYTES_MAX: usize = 256 << 20;
/// What a message costs beside its events: its place in the queue.
const MESSAGE_BYTES: usize = size_of::<Queued>();
/// Nearly all are the hub's. With 88 bytes each, ten thousand streams that are not read took 717 MiB instead of 530.
const _: () = assert!(MESSAGE_BYTES <= 32);
/// Events of one watch that are sent as one message, in bytes, when several wait.
const MERGE_BYTES_MAX: usize = if cfg!(test) { 256 } else { 1 << 20 };

/// An answer on a watch stream.
#[derive(Clone, Debug)]
pub enum Message {
    Created {
        id: WatchId,
        revision: Revision,
    },
    /// A watch that was not created; the stream goes on.
    Refused {
        revision: Revision,
        reason: &'static str,
    },
    Canceled {
        id: WatchId,
        revision: Revision,
    },
    /// The watch needs revisions that were compacted away; it has ended.
    Compacted {
        id: WatchId,
        compact_revision: Revision,
    },
    /// Every event at or below the revision was sent before.
    Progress {
        id: WatchId,
        revision: Revision,
    },
    Events {
        id: WatchId,
        /// At or above the newest event's.
        revision: Revision,
        /// One behind the other.
        events: Vec<Bytes>,
        /// Whether more of this message follows in the next.
        fragment: bool,
    },
}

/// How a stream ends from the server's side.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    ClientGone,
    ServerStopped,
    /// By a mistake of the server.
    Failed,
}

/// See the module's page.
#[derive(Debug)]
pub struct Outbox {
    inner: Mutex<Inner>,
    /// Set when the session should look: there is room again, a watch fell behind, a progress can be answered, the client
    /// is gone.
    pub(super) attention: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    queue: Waiting,
    bytes: usize,
    reader: Option<Waker>,
    end: Option<End>,
    /// Watches that the hub dropped because the outbox was full, with the revision that each needs next.
    lagging: Vec<(WatchId, Revision)>,
}

impl Inner {
    fn push(&mut self, queued: Queued) {
        self.bytes += queued.cost();
        self.queue.push(queued);
    }

    fn pop(&mut self) -> Option<Queued> {
        let popped = self.queue.pop()?;
        self.bytes -= popped.cost();
        Some(popped)
    }
}

/// What waits, counted with what waits on other streams.
#[derive(Debug, Default)]
struct Waiting {
    queue: VecDeque<Queued>,
    gauge: Option<IntGauge>,
}

impl Waiting {
    fn push(&mut self, queued: Queued) {
        self.queue.push_back(queued);
        self.gauge.iter().for_each(IntGauge::inc);
    }

    fn pop(&mut self) -> Option<Queued> {
        let popped = self.queue.pop_front();
        if popped.is_some() {
            self.gauge.iter().for_each(IntGauge::dec);
        }
        popped
    }
}

impl Waiting {
    /// Whether streams together hold as much as they may.
    fn is_crowded(&self) -> bool {
        let messages = self.gauge.as_ref().map_or(0, |gauge| usize::try_from(gauge.get()).unwrap_or(0));
        Chunk::waiting_bytes() + messages * MESSAGE_BYTES >= ALL_BYTES_MAX
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        let left = i64::try_from(self.queue.len()).unwrap_or(i64::MAX);
        self.gauge.iter().for_each(|gauge| gauge.sub(left));
    }
}

#[derive(Debug)]
enum Queued {
    /// From the hub, or from the log for a watch that catches up.
    Chunk {
        id: WatchId,
        revision: Revision,
        chunk: Chunk,
        /// The message before has the same chunk, and it is counted there.
        is_counted: bool,
    },
    /// Anything else, with what it costs this stream.
    Other(Box<(Message, usize)>),
}

impl Queued {
    /// What it costs this stream, in bytes.
    fn cost(&self) -> usize {
        match self {
            Self::Chunk { is_counted: true, .. } => MESSAGE_BYTES,
            Self::Chunk { chunk, .. } => MESSAGE_BYTES + chunk.len(),
            Self::Other(other) => other.1,
        }
    }
}

impl Outbox {
    pub fn new() -> Self {
        Self { inner: Mutex::default(), attention: Notify::new() }
    }

    /// One whose messages are counted while they wait.
    pub fn counted(gauge: &IntGauge) -> Self {
        let queue = Waiting { queue: VecDeque::new(), gauge: Some(gauge.clone()) };
        Self { inner: Mutex::new(Inner { queue, ..Inner::default() }), attention: Notify::new() }
    }

    pub fn push(&self, message: Message) {
        let mut inner = self.inner.lock();
        inner.push(Queued::Other(Box::new((message, MESSAGE_BYTES + size_of::<(Message, usize)>()))));
        wake(inner);
    }

    /// Queues events, in pieces of at most `fragment` bytes if that is given. Returns false, and takes nothing, if the
    /// outbox is full.
    #[must_use]
    pub(super) fn push_chunk(&self, id: WatchId, revision: Revision, chunk: &Chunk, fragment: Option<usize>) -> bool {
        let mut inner = self.inner.lock();
        if inner.bytes >= OUTBOX_BYTES_MAX || (inner.bytes >= CROWDED_BYTES_MAX && inner.queue.is_crowded()) {
            return false;
        }
        if let Some(limit) = fragment.filter(|limit| chunk.len() >= *limit) {
            let mut pieces = chunk.pieces(limit).peekable();
            while let Some(bytes) = pieces.next() {
                let fragment = pieces.peek().is_some();
                let len = bytes.len();
                let message = Message::Events { id, revision, events: vec![bytes], fragment };
                inner.push(Queued::Other(Box::new((message, len))));
            }
            wake(inner);
            return true;
        }
        let is_counted =
            matches!(inner.queue.queue.back(), Some(Queued::Chunk { chunk: last, .. }) if last.is_same(chunk));
        inner.push(Queued::Chunk { id, revision, chunk: chunk.clone(), is_counted });
        wake(inner);
        true
    }

    /// Remembers that a watch must catch up from `next` on.
    pub(super) fn fall_behind(&self, id: WatchId, next: Revision) {
        self.inner.lock().lagging.push((id, next));
        self.attention.notify_one();
    }

    pub(super) fn take_lagging(&self) -> Vec<(WatchId, Revision)> {
        std::mem::take(&mut self.inner.lock().lagging)
    }

    pub(super) fn is_lagging(&self) -> bool {
        !self.inner.lock().lagging.is_empty()
    }

    /// Waits until the session should look: a watch fell behind, there is room again, a progress can be answered, or the
    /// stream has ended.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost when it is dropped.
    pub async fn attention(&self) {
        self.attention.notified().await;
    }

    /// Whether it is half empty, so that requests may be answered and watches catch up.
    pub fn has_room(&self) -> bool {
        let inner = self.inner.lock();
        inner.bytes < OUTBOX_BYTES_MAX / 2 && (inner.bytes < CROWDED_BYTES_MAX || !inner.queue.is_crowded())
    }

    /// Ends the stream once what waits is sent.
    pub fn end(&self, end: End) {
        let mut inner = self.inner.lock();
        inner.end.get_or_insert(end);
        wake(inner);
        self.attention.notify_one();
    }

    pub fn has_ended(&self) -> bool {
        self.inner.lock().end.is_some()
    }

    fn poll_message(&self, context: &mut Context<'_>) -> Poll<Option<Result<Message, End>>> {
        let mut inner = self.inner.lock();
        let before = inner.bytes;
        let Some(queued) = inner.pop() else {
            return match inner.end {
                Some(End::ClientGone) => Poll::Ready(None),
                Some(end @ (End::ServerStopped | End::Failed)) => {
                    inner.end = Some(End::ClientGone);
                    Poll::Ready(Some(Err(end)))
                }
                None => {
                    inner.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            };
        };
        let message = match queued {
            Queued::Other(other) => other.0,
            Queued::Chunk { id, mut revision, chunk, .. } => {
                let mut events = vec![chunk.bytes().clone()];
                let mut bytes = chunk.len();
                while let Some(Queued::Chunk { id: next, revision: newer, chunk, .. }) = inner.queue.queue.front()
                    && *next == id
                    && bytes + chunk.len() <= MERGE_BYTES_MAX
                {
                    bytes += chunk.len();
                    revision = *newer;
                    events.push(chunk.bytes().clone());
                    inner.pop();
                }
                Message::Events { id, revision, events, fragment: false }
            }
        };
        // Either may have been what the session waited for.
        if [OUTBOX_BYTES_MAX / 2, CROWDED_BYTES_MAX].iter().any(|room| before >= *room && inner.bytes < *room) {
            drop(inner);
            self.attention.notify_one();
        }
        Poll::Ready(Some(Ok(message)))
    }
}

impl Default for Outbox {
    fn default() -> Self {
        Self::new()
    }
}

/// Wakes the connection after the lock is let go.
fn wake(mut inner: parking_lot::MutexGuard<'_, Inner>) {
    let reader = inner.reader.take();
    drop(inner);
    if let Some(reader) = reader {
        reader.wake();
    }
}

/// The connection's end of an outbox. Dropped when the client is gone.
#[derive(Debug)]
pub struct Messages(Arc<Outbox>);

impl Messages {
    pub fn new(outbox: Arc<Outbox>) -> Self {
        Self(outbox)
    }
}

impl Stream for Messages {
    type Item = Result<Message, End>;

    fn poll_next(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        self.0.poll_message(context)
    }
}

impl Drop for Messages {
    fn drop(&mut self) {
        self.0.end(End::ClientGone);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Messages of 50 bytes that it takes.
    fn takes(outbox: &Outbox) -> usize {
        let chunk = |revision| Chunk::of(&[7; 50], Revision(revision));
        (2..).take_while(|revision| outbox.push_chunk(WatchId(1), Revision(*revision), &chunk(*revision), None)).count()
    }

    #[test]
    fn stream_keeps_less_when_others_keep_much() {
        let each = MESSAGE_BYTES + 50;
        for (others, want) in [(0, OUTBOX_BYTES_MAX), (ALL_BYTES_MAX / MESSAGE_BYTES + 1, CROWDED_BYTES_MAX)] {
            let gauge = IntGauge::new("pending", "Waiting messages.").expect("a gauge");
            gauge.set(i64::try_from(others).expect("not so many"));
            let outbox = Arc::new(Outbox::counted(&gauge));
            assert!(outbox.has_room());
            assert_eq!(takes(&outbox), want.div_ceil(each), "{others} messages wait on other streams");
            assert!(!outbox.has_room());
            drop(outbox);
            assert_eq!(gauge.get(), i64::try_from(others).expect("not so many"));
        }
    }
}
