//! Memory for answers: values that are read from the log and that no client has taken yet.
//!
//! What the value cache holds costs an answer nothing; what it lacks is read, and stays until the answer has left. So many
//! clients that range over everything, or one that asks and never reads, would take as much as they like. Here such values
//! are counted as long as anything refers to them. While there are too many, those who need more wait, and who waits long is
//! told to come again. An answer does not wait for itself: one that is larger than all room there is goes through alone.

use std::{
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use tokio::{
    sync::{Notify, Semaphore, SemaphorePermit},
    time::timeout,
};
use tracing::warn;

use super::{Error, Result};
use crate::types::{EncodedKv, RowId};

/// Beside what the value cache may hold, as that may hold what was read.
const BYTES_MAX: usize = 256 << 20;
/// Lists that are read from the log at the same time; others wait, in the order in which they came.
const LISTS_MAX: usize = 4;
/// How long a read waits for room.
const WAIT_MAX: Duration = Duration::from_secs(7);

/// See the module's page.
pub(super) struct Room {
    taken: Arc<Taken>,
    lists: Semaphore,
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
        if before >= self.taken.max && before - self.bytes < self.taken.max {
            self.taken.freed.notify_waiters();
        }
    }
}

/// How much a read asks for.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) enum Asked {
    /// A few pairs, for which there is some room even when lists have taken theirs.
    Few,
    /// A list, which has so many bytes by now.
    List { own: usize },
}

impl Room {
    pub(super) fn new(value_cache_bytes: u64) -> Self {
        let cached = usize::try_from(value_cache_bytes).unwrap_or(usize::MAX);
        Self::of(BYTES_MAX.saturating_add(cached))
    }

    fn of(max: usize) -> Self {
        let taken = Taken { bytes: AtomicUsize::new(0), max, freed: Notify::new() };
        Self { taken: Arc::new(taken), lists: Semaphore::new(LISTS_MAX) }
    }

    /// The turn of a list.
    pub(super) async fn list(&self) -> SemaphorePermit<'_> {
        self.lists.acquire().await.expect("nobody closes it")
    }

    /// Waits until there is room.
    ///
    /// # Errors
    ///
    /// [`Error::TooManyRequests`] if there is none for long.
    pub(super) async fn wait(&self, asked: Asked) -> Result<()> {
        if self.has_room(asked) {
            return Ok(());
        }
        let wait = async {
            loop {
                let freed = self.taken.freed.notified();
                if self.has_room(asked) {
                    return;
                }
                // Others may have taken it; and a list's own bytes may be what is over the limit.
                let _ = timeout(WAIT_MAX / 50, freed).await;
            }
        };
        timeout(WAIT_MAX, wait).await.map_err(|_| {
            let bytes = self.taken.bytes.load(Ordering::Relaxed);
            warn!(bytes, "a read is refused: clients have not taken the answers that they asked for");
            Error::TooManyRequests
        })
    }

    fn has_room(&self, asked: Asked) -> bool {
        let bytes = self.taken.bytes.load(Ordering::Relaxed);
        match asked {
            Asked::Few => bytes < self.taken.max.saturating_mul(2),
            Asked::List { own } => bytes.saturating_sub(own) < self.taken.max,
        }
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

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::types::{Revision, Version};

    fn values(room: &Room, count: usize) -> Vec<(RowId, EncodedKv)> {
        let row = RowId::new(Revision(2), 0);
        let version = Version { row, create_revision: Revision(2), version: 1 };
        room.count(vec![(row, EncodedKv::new(b"k", version, &[7; 1_000], None)); count])
    }

    #[tokio::test(start_paused = true)]
    async fn who_lists_waits_for_others_and_not_for_itself() {
        let room = Room::of(10_000);
        let held = values(&room, 11);
        let own = room.taken.bytes.load(Ordering::Relaxed);
        let list = |own| Asked::List { own };
        for (asked, passes) in [(Asked::Few, true), (list(own), true), (list(own / 2), true), (list(0), false)] {
            assert_eq!(room.wait(asked).now_or_never().is_some(), passes);
        }
        assert_eq!(room.wait(list(0)).await, Err(Error::TooManyRequests));
        let slice: Vec<_> = held.iter().map(|(_, kv)| kv.value()).collect();
        drop(held);
        assert!(room.wait(list(0)).now_or_never().is_none(), "a part of a pair holds all of it");
        let mut waits = Box::pin(room.wait(list(0)));
        assert!(waits.as_mut().now_or_never().is_none());
        drop(slice);
        assert_eq!(waits.await, Ok(()));
        assert_eq!(room.taken.bytes.load(Ordering::Relaxed), 0);
    }
}
