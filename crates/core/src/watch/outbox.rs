//! The outbox of a watch stream: a bounded queue between the hub and the connection.
//!
//! The hub and the session push messages, the connection pops them. A full outbox rejects events, but never other
//! messages: those respond to requests, and requests are read only while the outbox has capacity. The limit is on
//! memory: a chunk that several watches of the stream receive is counted once.
//!
//! Many streams that are not read could still use much memory together: for queue slots, and for chunks if each stream
//! has its own range. Above a global limit, each stream may queue only [`SHORT_MEMORY_BYTES_MAX`]; its watches then
//! read the log.

use std::{
    pin::Pin,
    sync::Arc,
    task::{Context, Poll, Waker},
};

use futures_util::Stream;
use tokio::sync::Notify;

use super::{
    message::{End, Message},
    queue::{MessageQueue, Pending, Queued},
    run::ChunkRef,
};
use crate::{
    sync::{Mutex, MutexGuard},
    types::{Revision, WatchId},
};

/// Maximum bytes waiting on one stream. Small in unit tests.
const OUTBOX_BYTES_MAX: usize = if cfg!(test) { 1 << 10 } else { 8 << 20 };
/// Maximum bytes waiting on one stream while all streams together exceed the memory limit.
const SHORT_MEMORY_BYTES_MAX: usize = if cfg!(test) { 1 << 9 } else { 16 << 10 };

/// The outbox of one stream, shared by the hub, the session and the connection.
#[derive(Debug)]
pub struct Outbox {
    inner: Mutex<Inner>,
    /// Notified when the session has work: the outbox has capacity again, a watch fell behind, a progress request can
    /// be answered, or the stream has ended.
    pub(super) notify: Notify,
}

#[derive(Debug)]
struct Inner {
    queue: MessageQueue,
    reader: Option<Waker>,
    end: Option<End>,
    /// The session waits until the outbox has capacity.
    is_awaited: bool,
    /// Watches that the hub dropped because the outbox was full, with the next revision that each needs.
    lagging: Vec<(WatchId, Revision)>,
}

impl Inner {
    /// Returns whether less than `bytes_max` bytes wait; while memory is short, less than [`SHORT_MEMORY_BYTES_MAX`].
    fn has_capacity(&self, bytes_max: usize) -> bool {
        let bytes = self.queue.bytes();
        bytes < bytes_max && (bytes < SHORT_MEMORY_BYTES_MAX || !self.queue.is_memory_short())
    }
}

impl Outbox {
    /// Creates an outbox whose waiting messages are counted in `pending`.
    pub(super) fn new(pending: &Pending) -> Self {
        let queue = MessageQueue::new(pending);
        let inner = Inner { queue, reader: None, end: None, is_awaited: false, lagging: Vec::new() };
        Self { inner: Mutex::new(inner), notify: Notify::new() }
    }

    /// Queues a message. This never fails, even if the outbox is full.
    pub fn push(&self, message: Message) {
        let mut inner = self.inner.lock();
        inner.queue.push(message);
        wake(inner);
    }

    /// Queues events, in pieces of at most `fragment` bytes if that is given. Returns false and queues nothing if the
    /// outbox is full.
    #[must_use]
    pub(super) fn push_chunk(&self, id: WatchId, chunk: &ChunkRef, fragment: Option<usize>) -> bool {
        let mut inner = self.inner.lock();
        if !inner.has_capacity(OUTBOX_BYTES_MAX) {
            return false;
        }
        match fragment.filter(|limit| chunk.len >= *limit) {
            Some(limit) => {
                let mut pieces = chunk.pieces(limit).into_iter().peekable();
                while let Some(piece) = pieces.next() {
                    let fragment = pieces.peek().is_some();
                    inner.queue.push(Message::Events { id, revision: chunk.revision, events: vec![piece], fragment });
                }
            }
            None => inner.queue.push_chunk(id, chunk),
        }
        wake(inner);
        true
    }

    /// Records that a watch must catch up from `next` and notifies the session.
    pub(super) fn mark_lagging(&self, id: WatchId, next: Revision) {
        self.inner.lock().lagging.push((id, next));
        self.notify.notify_one();
    }

    /// Takes the watches that fell behind, with the next revision that each needs.
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
    pub async fn notified(&self) {
        self.notify.notified().await;
    }

    /// Returns whether the outbox is less than half full. While memory is short, it must also be below the lower limit.
    /// Otherwise no requests are served and no watch catches up; [`Outbox::notified`] returns when it has capacity again.
    pub fn has_capacity(&self) -> bool {
        let mut inner = self.inner.lock();
        let has_capacity = inner.has_capacity(OUTBOX_BYTES_MAX / 2);
        inner.is_awaited |= !has_capacity;
        has_capacity
    }

    /// Returns what waits for each watch, or `None` if nothing waits.
    pub(super) fn queued(&self) -> Option<Queued> {
        self.inner.lock().queue.queued()
    }

    /// Ends the stream after the waiting messages are sent.
    pub fn end(&self, end: End) {
        let mut inner = self.inner.lock();
        inner.end.get_or_insert(end);
        wake(inner);
        self.notify.notify_one();
    }

    pub fn has_ended(&self) -> bool {
        self.inner.lock().end.is_some()
    }

    /// Returns the next message, or the end of the stream after the last one.
    fn poll_message(&self, context: &mut Context<'_>) -> Poll<Option<Result<Message, End>>> {
        let mut inner = self.inner.lock();
        let Some(message) = inner.queue.pop() else {
            return match inner.end {
                Some(End::ClientGone) => Poll::Ready(None),
                Some(end @ (End::ServerStopped | End::NoLeader | End::BadRequest | End::Failed)) => {
                    // The stream returns `None` after this error.
                    inner.end = Some(End::ClientGone);
                    Poll::Ready(Some(Err(end)))
                }
                None => {
                    inner.reader = Some(context.waker().clone());
                    Poll::Pending
                }
            };
        };
        // A notification that nobody waits for would interrupt a watch that is reading the log.
        if inner.is_awaited && inner.has_capacity(OUTBOX_BYTES_MAX / 2) {
            inner.is_awaited = false;
            drop(inner);
            self.notify.notify_one();
        }
        Poll::Ready(Some(Ok(message)))
    }
}

/// Releases the lock, then wakes the connection.
fn wake(mut inner: MutexGuard<'_, Inner>) {
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
    use futures_util::{FutureExt as _, StreamExt as _};

    use super::{
        super::{
            chunk::Chunk,
            queue::{ALL_BYTES_MAX, SLOT_BYTES},
        },
        *,
    };

    /// Returns the number of 50-byte events that the outbox accepts.
    fn count_accepted(outbox: &Outbox) -> usize {
        let chunk = |revision| ChunkRef::in_new_run(Chunk::of_event(&[7; 50], Revision(revision)), Revision(revision));
        (2..).take_while(|revision| outbox.push_chunk(WatchId(1), &chunk(*revision), None)).count()
    }

    #[test]
    fn session_is_notified_of_capacity_only_if_it_waits_for_it() {
        for is_awaited in [true, false] {
            let outbox = Arc::new(Outbox::new(&Pending::unregistered()));
            count_accepted(&outbox);
            if is_awaited {
                assert!(!outbox.has_capacity());
            }
            let mut messages = Messages::new(Arc::clone(&outbox));
            while messages.next().now_or_never().is_some() {}
            assert_eq!(outbox.notified().now_or_never().is_some(), is_awaited);
        }
    }

    #[test]
    fn stream_limit_is_lowered_while_memory_is_short() {
        let each = SLOT_BYTES + 50;
        for (others, want) in [(0, OUTBOX_BYTES_MAX), (ALL_BYTES_MAX / SLOT_BYTES + 1, SHORT_MEMORY_BYTES_MAX)] {
            let pending = Pending::unregistered();
            pending.add_slots(others);
            let outbox = Arc::new(Outbox::new(&pending));
            assert!(outbox.has_capacity());
            assert_eq!(count_accepted(&outbox), want.div_ceil(each), "{others} messages wait on other streams");
            assert!(!outbox.has_capacity());
            drop(outbox);
            assert_eq!((pending.messages.get(), pending.slots()), (0, others));
        }
    }
}
