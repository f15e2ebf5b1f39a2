//! Memory for answers: values that are read from the log and that no client has taken yet.
//!
//! What the value cache holds costs an answer nothing; what it lacks is read, and stays until the answer has left. So many
//! clients that range over everything, or one that asks and never reads, would take as much as they like. Here such values
//! are counted as long as anything refers to them. While there are too many, those who need more wait, and who waits long is
//! told to come again.
//!
//! Nobody waits for what those hold who wait as well. An answer does not wait for itself: one that is larger than all room
//! there is goes through alone. Of lists that are being read one has the right of way, and waits only for what was read and
//! has not left. And those whose turn has not come hold nothing, not even what the cache had for them.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Mutex, Notify, Semaphore, SemaphorePermit},
    time::timeout,
};
use tracing::warn;

use super::{Error, Result};
use crate::types::{EncodedKv, RowId};

/// Beside twice what the value cache may hold: that may hold what was read, and a list that is being read may hold what it had
/// at another time.
const BYTES_MAX: usize = 256 << 20;
/// Lists that are read from the log at the same time; others wait, in the order in which they came.
const LISTS_MAX: usize = 4;
/// How long a read waits for room, a list from when it has the right of way.
const WAIT_MAX: Duration = Duration::from_secs(7);
/// Who waits for room is told each time that this much has come free (2 to the power of it, in bytes).
const FREED_BITS: u32 = 20;

/// See the module's page.
pub(super) struct Room {
    taken: Arc<Taken>,
    /// Bytes of the lists that are being read.
    reading: AtomicUsize,
    lists: Semaphore,
    right_of_way: Semaphore,
}

struct Taken {
    bytes: AtomicUsize,
    max: usize,
    freed: Notify,
}

/// What a value takes, until nobody refers to it.
struct Held {
    taken: Arc<Taken>,
    bytes: usize,
}

impl Drop for Held {
    fn drop(&mut self) {
        let before = self.taken.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
        if before >> FREED_BITS != (before - self.bytes) >> FREED_BITS {
            self.taken.freed.notify_waiters();
        }
    }
}

impl Room {
    pub(super) fn new(value_cache_bytes: u64) -> Self {
        let cached = usize::try_from(value_cache_bytes).unwrap_or(usize::MAX);
        Self::of(cached.saturating_mul(2).saturating_add(BYTES_MAX))
    }

    fn of(max: usize) -> Self {
        let taken = Taken { bytes: AtomicUsize::new(0), max, freed: Notify::new() };
        Self {
            taken: Arc::new(taken),
            reading: AtomicUsize::new(0),
            lists: Semaphore::new(LISTS_MAX),
            right_of_way: Semaphore::new(1),
        }
    }

    /// A list, when it is its turn.
    pub(super) async fn list(&self) -> List<'_> {
        let turn = self.lists.acquire().await.expect("nobody closes it");
        List { room: self, own: AtomicUsize::new(0), right_of_way: Mutex::new(None), _turn: turn }
    }

    /// Whether there is room for a few pairs: there is some even when lists have taken theirs.
    pub(super) fn has_some(&self) -> bool {
        self.bytes() < self.taken.max.saturating_mul(2)
    }

    /// Waits for that.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyRequests`] if there is none for long.
    pub(super) async fn wait_for_some(&self) -> Result<()> {
        self.waited(|| self.has_some()).await
    }

    async fn waited(&self, has_room: impl Fn() -> bool) -> Result<()> {
        let wait = async {
            while !has_room() {
                self.freed(&has_room).await;
            }
        };
        timeout(WAIT_MAX, wait).await.map_err(|_| {
            warn!(bytes = self.bytes(), "a read is refused: clients have not taken the answers that they asked for");
            Error::TooManyRequests
        })
    }

    /// Returns when some bytes have come free, when there is room already, or after a while: not all that makes room is told.
    async fn freed(&self, has_room: impl Fn() -> bool) {
        let freed = self.taken.freed.notified();
        if !has_room() {
            let _ = timeout(WAIT_MAX / 50, freed).await;
        }
    }

    pub(super) fn bytes(&self) -> usize {
        self.taken.bytes.load(Ordering::Relaxed)
    }

    /// Counts what was read.
    pub(super) fn count(&self, found: Vec<(RowId, EncodedKv)>) -> Vec<(RowId, EncodedKv)> {
        let count = |(row, kv): (RowId, EncodedKv)| {
            let bytes = kv.len();
            self.taken.bytes.fetch_add(bytes, Ordering::Relaxed);
            (row, kv.held_by(Held { taken: Arc::clone(&self.taken), bytes }))
        };
        found.into_iter().map(count).collect()
    }
}

/// A list that is being read.
pub(super) struct List<'a> {
    room: &'a Room,
    /// Bytes that it has by now.
    own: AtomicUsize,
    right_of_way: Mutex<Option<SemaphorePermit<'a>>>,
    _turn: SemaphorePermit<'a>,
}

impl List<'_> {
    /// Waits until there is room for more of it.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyRequests`] if there is none for long.
    pub(super) async fn wait(&self) -> Result<()> {
        let room = self.room;
        let has_room_beside =
            |held: &AtomicUsize| room.bytes().saturating_sub(held.load(Ordering::Relaxed)) < room.taken.max;
        // Parts of it that are read at once ask one after the other.
        let mut right_of_way = self.right_of_way.lock().await;
        while right_of_way.is_none() {
            let has_room = || has_room_beside(&self.own);
            if has_room() {
                return Ok(());
            }
            tokio::select! {
                () = room.freed(has_room) => {}
                first = room.right_of_way.acquire() => *right_of_way = Some(first.expect("nobody closes it")),
            }
        }
        room.waited(|| has_room_beside(&room.reading)).await
    }

    /// As [`Room::count`].
    pub(super) fn count(&self, found: Vec<(RowId, EncodedKv)>) -> Vec<(RowId, EncodedKv)> {
        let bytes = found.iter().map(|(_, kv)| kv.len()).sum();
        self.room.reading.fetch_add(bytes, Ordering::Relaxed);
        self.own.fetch_add(bytes, Ordering::Relaxed);
        self.room.count(found)
    }
}

impl Drop for List<'_> {
    fn drop(&mut self) {
        self.room.reading.fetch_sub(*self.own.get_mut(), Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::types::{Revision, Version};

    fn values(count: usize) -> Vec<(RowId, EncodedKv)> {
        let row = RowId::new(Revision(2), 0);
        let version = Version { row, create_revision: Revision(2), version: 1 };
        vec![(row, EncodedKv::new(b"k", version, &[7; 1_000], None)); count]
    }

    #[tokio::test(start_paused = true)]
    async fn who_lists_waits_for_answers_and_not_for_itself() {
        let room = Room::of(10_000);
        let (list, owner) = (room.list().await, room.list().await);
        let own = owner.count(values(11));
        assert!(owner.wait().now_or_never().is_some() && room.wait_for_some().now_or_never().is_some());
        drop(owner);
        assert_eq!(list.wait().await, Err(Error::TooManyRequests));
        let slice: Vec<_> = own.iter().map(|(_, kv)| kv.value()).collect();
        drop(own);
        assert!(list.wait().now_or_never().is_none(), "a part of a pair holds all of it");
        let mut waits = Box::pin(list.wait());
        assert!(waits.as_mut().now_or_never().is_none());
        drop(slice);
        assert_eq!(waits.await, Ok(()));
        drop(list);
        assert_eq!((room.bytes(), room.reading.load(Ordering::Relaxed)), (0, 0));
    }

    #[tokio::test(start_paused = true)]
    async fn of_lists_that_wait_for_each_other_one_goes_first() {
        let room = Room::of(10_000);
        let mut lists = Vec::new();
        let mut answers = Vec::new();
        for _ in 0..LISTS_MAX {
            let list = room.list().await;
            answers.push(list.count(values(4)));
            lists.push(list);
        }
        // With its answer on the way there is still not room for the others, but for one of them.
        for waiting in (1..LISTS_MAX - 1).rev() {
            let first = lists.remove(0);
            assert_eq!(first.wait().await, Ok(()), "{waiting} wait beside it");
            assert_eq!(lists[0].wait().now_or_never(), None, "who waits");
            assert_eq!(first.wait().await, Ok(()), "it goes on");
        }
    }
}
