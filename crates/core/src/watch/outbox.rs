//! The outbox of a watch stream: a bounded queue between the hub and the connection.
//!
//! The hub and the session push messages, the connection pops them. A full outbox rejects events, but never other
//! messages: those respond to requests, and requests are read only while the outbox has capacity. The limit is on
//! memory: a chunk that several watches of the stream receive is counted once.
//!
//! Many streams that are not read could still use much memory together, for chunks if each has its own range, and for
//! queue slots. Above a global limit, each stream may keep only a small queue; its watches read the log later.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures_util::Stream;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    run::ChunkRef,
    waiting::{Pending, Waiting},
};
use crate::types::{Revision, WatchId};

/// Maximum bytes waiting on one stream. Small in unit tests.
const OUTBOX_BYTES_MAX: usize = if cfg!(test) { 1 << 10 } else { 8 << 20 };
/// The same while all streams together exceed the memory limit.
const CROWDED_BYTES_MAX: usize = if cfg!(test) { 1 << 9 } else { 16 << 10 };

/// A message on a watch stream.
#[derive(Clone, Debug)]
pub enum Message {
    Created {
        id: WatchId,
        revision: Revision,
    },
    /// The watch was not created; the stream continues.
    Refused {
        revision: Revision,
        reason: &'static str,
    },
    Canceled {
        id: WatchId,
        revision: Revision,
    },
    /// The watch ended because it needs compacted revisions.
    Compacted {
        id: WatchId,
        compact_revision: Revision,
    },
    /// All events at or below the revision were sent before.
    Progress {
        id: WatchId,
        revision: Revision,
    },
    Events {
        id: WatchId,
        /// At or above the newest event's revision.
        revision: Revision,
        /// Encoded events, one after another.
        events: Vec<Bytes>,
        /// Whether the next message continues this one.
        fragment: bool,
    },
}

/// The reason why a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    ClientGone,
    ServerStopped,
    /// A bug in the server.
    Failed,
}

/// The outbox of one stream, shared by the hub, the session and the connection.
#[derive(Debug)]
pub struct Outbox {
    inner: Mutex<Inner>,
    /// Notified when the session has work: the outbox has capacity again, a watch fell behind, a progress request can
    /// be answered, or the client is gone.
    pub(super) attention: Notify,
}

#[derive(Debug, Default)]
struct Inner {
    waiting: Waiting,
    reader: Option<Waker>,
    end: Option<End>,
    /// Watches that the hub dropped because the outbox was full, with the next revision that each needs.
    lagging: Vec<(WatchId, Revision)>,
}

impl Inner {
    /// Returns whether less than `bytes_max` bytes wait; while memory is short, less than [`CROWDED_BYTES_MAX`].
    fn is_below(&self, bytes_max: usize) -> bool {
        let bytes = self.waiting.bytes();
        bytes < bytes_max && (bytes < CROWDED_BYTES_MAX || !self.waiting.is_crowded())
    }
}

impl Outbox {
    pub fn new() -> Self {
        Self { inner: Mutex::default(), attention: Notify::new() }
    }

    /// Creates an outbox whose waiting messages are counted in `pending`.
    pub fn counted(pending: &Pending) -> Self {
        let waiting = Waiting::counted(pending);
        Self { inner: Mutex::new(Inner { waiting, ..Inner::default() }), attention: Notify::new() }
    }

    pub fn push(&self, message: Message) {
        let mut inner = self.inner.lock();
        inner.waiting.push(message);
        wake(inner);
    }

    /// Queues events, in pieces of at most `fragment` bytes if that is given. Returns false and queues nothing if the
    /// outbox is full.
    #[must_use]
    pub(super) fn push_chunk(&self, id: WatchId, place: &ChunkRef, fragment: Option<usize>) -> bool {
        let mut inner = self.inner.lock();
        if !inner.is_below(OUTBOX_BYTES_MAX) {
            return false;
        }
        match fragment.filter(|limit| place.len >= *limit) {
            Some(limit) => {
                let mut pieces = place.pieces(limit).into_iter().peekable();
                while let Some(piece) = pieces.next() {
                    let fragment = pieces.peek().is_some();
                    inner.waiting.push(Message::Events { id, revision: place.revision, events: vec![piece], fragment });
                }
            }
            None => inner.waiting.push_chunk(id, place),
        }
        wake(inner);
        true
    }

    /// Notes that a watch must catch up from `next` and notifies the session.
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

    /// Waits until the session has work: the outbox has capacity again, a watch fell behind, a progress request can be
    /// answered, or the stream has ended.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe: a notification is not lost.
    pub async fn attention(&self) {
        self.attention.notified().await;
    }

    /// Returns whether the outbox is at most half full, so that requests can be served and watches can catch up.
    pub fn has_room(&self) -> bool {
        self.inner.lock().is_below(OUTBOX_BYTES_MAX / 2)
    }

    /// Ends the stream after the waiting messages are sent.
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
        let before = inner.waiting.bytes();
        let Some(message) = inner.waiting.pop() else {
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
        let now = inner.waiting.bytes();
        // The session may be waiting for either threshold.
        if [OUTBOX_BYTES_MAX / 2, CROWDED_BYTES_MAX].iter().any(|room| before >= *room && now < *room) {
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

/// Wakes the connection after the lock is released.
fn wake(mut inner: parking_lot::MutexGuard<'_, Inner>) {
    let reader = inner.reader.take();
    drop(inner);
    if let Some(reader) = reader {
        reader.wake();
    }
}

/// The connection's end of an outbox. Dropped when the client disconnects.
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
    use prometheus::IntGauge;

    use super::{
        super::{
            chunk::Chunk,
            waiting::{ALL_BYTES_MAX, SLOT_BYTES},
        },
        *,
    };

    /// Returns the number of 50-byte events that the outbox accepts.
    fn takes(outbox: &Outbox) -> usize {
        let alone = |revision| ChunkRef::in_new_run(Chunk::of(&[7; 50], Revision(revision)), Revision(revision));
        (2..).take_while(|revision| outbox.push_chunk(WatchId(1), &alone(*revision), None)).count()
    }

    #[test]
    fn stream_limit_is_lowered_while_memory_is_short() {
        let each = SLOT_BYTES + 50;
        for (others, want) in [(0, OUTBOX_BYTES_MAX), (ALL_BYTES_MAX / SLOT_BYTES + 1, CROWDED_BYTES_MAX)] {
            let pending = Pending::new(IntGauge::new("pending", "Waiting messages.").expect("a gauge"));
            pending.hold(others);
            let outbox = Arc::new(Outbox::counted(&pending));
            assert!(outbox.has_room());
            assert_eq!(takes(&outbox), want.div_ceil(each), "{others} messages wait on other streams");
            assert!(!outbox.has_room());
            drop(outbox);
            assert_eq!((pending.messages.get(), pending.slots()), (0, others));
        }
    }
}
