//! The state that the writer, the readers and the background tasks share.

use std::{collections::BTreeSet, sync::Arc, time::Duration};

use tokio::sync::{Notify, watch};

use super::{
    authority::CurrentAuthority, hash::Hashed, history::HistoryKeeper, members::Members, replication::ReplicationState,
    sizes::SizesCache, space::Space, values::ValueCache, write_outage::WriteOutage,
};
use crate::{
    index::TreeIndex,
    lease,
    log::Log,
    metrics::Metrics,
    overload::{ReadMemory, Steps},
    supervise::Lock,
    sync::{Mutex, RwLock},
    types::{Revision, Superseded},
    watch::Hub,
    watchdog::Pulse,
};

/// Maximum time a request waits for the database; after that it fails as not applied. Equals etcd's wait for a leader.
pub(super) const WAIT_MAX: Duration = Duration::from_secs(7);
/// Pause before a failed query is repeated.
pub(super) const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// The identity in etcd's response headers.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    pub cluster_id: u64,
    pub member_id: u64,
}

/// The state that the writer, the readers and the background tasks share.
pub(super) struct Shared {
    pub(super) log: Arc<dyn Log>,
    pub(super) identity: Identity,
    pub(super) replication: ReplicationState,
    pub(super) members: Members,
    pub(super) space: Space,
    pub(super) write_outage: WriteOutage,
    pub(super) authority: CurrentAuthority,
    pub(super) metrics: Arc<Metrics>,
    pub(super) hub: Arc<Hub>,
    /// The hub looks up in it what watches have missed.
    pub(super) index: Arc<RwLock<TreeIndex>>,
    pub(super) leases: Lock<lease::Table>,
    pub(super) values: ValueCache,
    /// Limits the memory of values and of keys of leases that were read for responses.
    pub(super) read_memory: ReadMemory,
    /// Schedules the steps of long reads.
    pub(super) steps: Arc<Steps>,
    /// Notified when the earliest lease deadline may have become earlier.
    pub(super) lease_deadline: Notify,
    /// Notified when there is something to compact.
    pub(super) compaction: Notify,
    /// The compactions that this instance recorded, may have recorded or is recording, and whose rows it therefore deletes.
    /// Those below the compact revision of the index are removed when the next one is added. Taken before the index.
    pub(super) own_compactions: Mutex<BTreeSet<Revision>>,
    /// The server ([`Position::server`](crate::log::Position::server)) from which compacted rows were deleted last; `None`
    /// until the rows that the start found are deleted, and while others are.
    pub(super) purged_on: Mutex<Option<i64>>,
    /// Rows that the compaction at `compaction_done` made unreadable and that another instance has to delete. Taken before the
    /// lock of `compaction_done`, where both are read or replaced.
    pub(super) rows_left_to_others: Mutex<Vec<Superseded>>,
    /// Keeps compacted rows; `None`: they are only deleted.
    pub(super) history: Option<HistoryKeeper>,
    /// The newest revision whose compaction has finished.
    pub(super) compaction_done: watch::Sender<Option<Revision>>,
    /// The hash at the compact revision, computed before that compaction.
    pub(super) hash_before_compaction: Mutex<Option<Hashed>>,
    /// Held by the compaction for which that hash is computed, until it is recorded.
    pub(super) hashing: Arc<tokio::sync::Mutex<()>>,
    /// Held while a hash is computed. Acquired after `hashing`, and before the lock of catching up.
    pub(super) computing_hash: tokio::sync::Mutex<()>,
    pub(super) sizes: SizesCache,
    /// Held by the running defragmentation.
    pub(super) defragmenting: Arc<tokio::sync::Mutex<()>>,
    pub(super) pulses: Pulses,
}

/// The heartbeats through which the watchdog observes the loops.
#[derive(Default)]
pub(super) struct Pulses {
    pub(super) writer: Arc<Pulse>,
    pub(super) expiry: Arc<Pulse>,
    pub(super) compactor: Arc<Pulse>,
    /// The task that follows the log.
    pub(super) follower: Arc<Pulse>,
    /// The task that queries the log's position.
    pub(super) heads: Arc<Pulse>,
    /// The task that renews leases in the log.
    pub(super) renewals: Arc<Pulse>,
}
