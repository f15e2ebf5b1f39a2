//! A store without tasks, over a log in memory, for unit tests.

use std::sync::Arc;

use tokio::sync::{Notify, watch};

use super::{
    members::Members,
    replication::ReplicationState,
    shared::{Identity, Shared},
    space::Space,
    values::ValueCache,
};
use crate::{
    index::TreeIndex,
    lease,
    log::{Member, memory::MemoryLog},
    overload::{ReadMemory, Steps},
    supervise::Lock,
    sync::{Mutex, RwLock},
    types::Revision,
    watch::Hub,
};

pub(super) fn shared(cache_bytes: u64) -> Shared {
    Shared {
        log: Arc::new(MemoryLog::default()),
        identity: Identity { cluster_id: 1, member_id: 1 },
        replication: ReplicationState::new(0),
        members: Members::new(Member { id: 1, name: "default".to_owned(), client_urls: Vec::new() }),
        metrics: Arc::default(),
        space: Space::new(0),
        authority: Default::default(),
        hub: Arc::new(Hub::new(Revision::EMPTY, None, Arc::default())),
        index: RwLock::new(TreeIndex::new()),
        leases: Lock::new(lease::Table::default()),
        values: ValueCache::new(cache_bytes),
        read_memory: ReadMemory::new(cache_bytes),
        steps: Steps::new().0,
        lease_deadline: Notify::new(),
        compaction: Notify::new(),
        own_compaction: Mutex::default(),
        purged_on: Mutex::default(),
        rows_left_to_others: Mutex::default(),
        history: None,
        compaction_done: watch::Sender::new(None),
        hash_before_compaction: Mutex::default(),
        sizes: Default::default(),
        defragmenting: Arc::default(),
        pulses: Default::default(),
    }
}
