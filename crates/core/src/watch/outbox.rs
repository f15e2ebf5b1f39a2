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
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use bytes::Bytes;
use futures_util::Stream;
use parking_lot::Mutex;
use tokio::sync::Notify;

use super::{
    run::Place,
    waiting::{Pending, Waiting},
};
use crate::types::{Revision, WatchId};

/// Bytes of events that may wait on one stream. Unit tests have it full soon.
const OUTBOX_BYTES_MAX: usize = if cfg!(test) { 1 << 10 } else { 8 << 20 };
/// The same when what waits on all streams takes too much.
const CROWDED_BYTES_MAX: usize = if cfg!(test) { 1 << 9 } else { 16 << 10 };

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
    waiting: Waiting,
    reader: Option<Waker>,
    end: Option<End>,
    /// Watches that the hub dropped because the outbox was full, with the revision that each needs next.
    lagging: Vec<(WatchId, Revision)>,
}

impl Inner {
    /// Whether less waits than so much, and little where streams together hold too much.
    fn is_below(&self, bytes_max: usize) -> bool {
        let bytes = self.waiting.bytes();
        bytes < bytes_max && (bytes < CROWDED_BYTES_MAX || !self.waiting.is_crowded())
    }
}

impl Outbox {
    pub fn new() -> Self {
        Self { inner: Mutex::default(), attention: Notify::new() }
    }

    /// One whose messages are counted while they wait.
    pub fn counted(pending: &Pending) -> Self {
        let waiting = Waiting::counted(pending);
        Self { inner: Mutex::new(Inner { waiting, ..Inner::default() }), attention: Notify::new() }
    }

    pub fn push(&self, message: Message) {
        let mut inner = self.inner.lock();
        inner.waiting.push(message);
        wake(inner);
    }

    /// Queues events, in pieces of at most `fragment` bytes if that is given. Returns false, and takes nothing, if the
    /// outbox is full.
    #[must_use]
    pub(super) fn push_chunk(&self, id: WatchId, place: &Place, fragment: Option<usize>) -> bool {
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
        self.inner.lock().is_below(OUTBOX_BYTES_MAX / 2)
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
        // Either may have been what the session waited for.
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
    use prometheus::IntGauge;

    use super::{
        super::{
            chunk::Chunk,
            waiting::{ALL_BYTES_MAX, SLOT_BYTES},
        },
        *,
    };

    /// Events of 50 bytes that it takes.
    fn takes(outbox: &Outbox) -> usize {
        let alone = |revision| Place::alone(Chunk::of(&[7; 50], Revision(revision)), Revision(revision));
        (2..).take_while(|revision| outbox.push_chunk(WatchId(1), &alone(*revision), None)).count()
    }

    #[test]
    fn stream_keeps_less_when_others_keep_much() {
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
