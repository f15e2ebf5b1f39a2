//! The state of this instance relative to the log: the server that it follows, its running append, and the changes that
//! it applied last.

use std::sync::atomic::Ordering;

use tokio::sync::{Mutex as AsyncMutex, watch};

use crate::{
    change_tail::ChangeTail,
    sync::{AtomicBool, AtomicI64, Mutex},
    types::Change,
};

/// Maximum number of applied changes kept for comparison with another server's log.
const TAIL_CHANGES_MAX: usize = 256;
/// Maximum bytes of the pairs of the kept changes.
const TAIL_BYTES_MAX: usize = 1 << 20;

/// The state of this instance relative to the log.
pub(super) struct ReplicationState {
    /// Held while catching up.
    pub(super) lock: AsyncMutex<()>,
    /// The database server whose log was last verified to contain the changes that this instance applied.
    pub(super) server: AtomicI64,
    /// Whether an append of this instance is running.
    pub(super) is_appending: AtomicBool,
    /// Notified when changes were applied, and when an append of this instance has ended.
    pub(super) applied: watch::Sender<()>,
    /// The newest applied changes.
    pub(super) tail: Mutex<ChangeTail>,
    /// The newest compaction that was read from the log; `i64::MIN` if there is none. It is read once per epoch and
    /// takes effect when its revision is applied, which may be in a later attempt to catch up.
    pub(super) recorded_compaction: AtomicI64,
    /// The reason why this instance must stop.
    pub(super) failed: watch::Sender<Option<String>>,
}

impl ReplicationState {
    pub(super) fn new(server: i64) -> Self {
        Self {
            lock: AsyncMutex::new(()),
            server: AtomicI64::new(server),
            is_appending: AtomicBool::new(false),
            applied: watch::Sender::new(()),
            tail: Mutex::new(ChangeTail::new(TAIL_CHANGES_MAX, TAIL_BYTES_MAX)),
            recorded_compaction: AtomicI64::new(i64::MIN),
            failed: watch::Sender::new(None),
        }
    }

    /// Marks an append of this instance as running until the guard is dropped.
    pub(super) fn mark_append(&self) -> impl Drop + '_ {
        struct Appending<'a>(&'a ReplicationState);
        impl Drop for Appending<'_> {
            fn drop(&mut self) {
                self.0.is_appending.store(false, Ordering::Relaxed);
                self.0.applied.send_replace(());
            }
        }
        self.is_appending.store(true, Ordering::Relaxed);
        Appending(self)
    }

    /// Records applied changes and wakes callers that wait for them.
    pub(super) fn note_applied(&self, changes: &[Change], is_shared: bool) {
        if is_shared {
            self.tail.lock().push(changes);
            self.applied.send_replace(());
        }
    }
}
