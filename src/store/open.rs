//! Opening a store: the index and the leases are rebuilt from the log, then the tasks start.

use std::{
    sync::Arc,
    time::{Duration, Instant as WallInstant},
};

use parking_lot::{Mutex, RwLock};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tracing::info;

use super::{Identity, Shared, Store, compactor, expiry, values::ValueCache, writer::Writer};
use crate::{
    index::{CompactionCursor, TreeIndex},
    lease,
    log::{Error, Log, Meta, Result},
    types::{Revision, RowId},
    watch::Hub,
};

/// Rows read at a time while the index is rebuilt.
const REPLAY_ROWS: usize = 10_000;
/// How often a long start says how far it is.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);

#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Bytes of encoded pairs that are held in memory.
    pub value_cache_bytes: u64,
}

impl Store {
    /// Reads the log, which takes some 3 seconds a million rows, and starts serving it.
    ///
    /// # Errors
    ///
    /// If the log cannot be read, or its revisions are not dense.
    pub async fn open(log: Arc<dyn Log>, settings: Settings) -> Result<Self> {
        let meta = log.meta().await?;
        let (index, garbage) = restore(&*log, &meta).await?;
        let mut leases = lease::Table::default();
        let now = Instant::now();
        for (id, ttl_secs) in &meta.leases {
            leases.grant(*id, *ttl_secs, now);
        }
        Shared::attach_leases(&index, &mut leases);

        let (stop_background, stopped) = watch::channel(false);
        let shared = Arc::new(Shared {
            identity: Identity { cluster_id: meta.cluster_id, member_id: meta.member_id },
            hub: Arc::new(Hub::new(index.head(), index.compact_revision())),
            compaction_done: watch::Sender::new(index.compact_revision()),
            index: RwLock::new(index),
            leases: Mutex::new(leases),
            values: ValueCache::new(settings.value_cache_bytes),
            lease_deadline: Notify::new(),
            compaction: Notify::new(),
            log,
        });
        let (writer, queue) = Writer::new(Arc::clone(&shared));
        let tasks = vec![
            tokio::spawn(writer.run()),
            tokio::spawn(compactor::run(Arc::clone(&shared), garbage, stopped.clone())),
            tokio::spawn(expiry::run(Arc::clone(&shared), queue.clone(), stopped)),
        ];
        Ok(Self { shared, queue, tasks: Mutex::new(tasks), stop_background })
    }
}

/// The index, and the rows that were compacted away but are still there.
pub(super) async fn restore(log: &dyn Log, meta: &Meta) -> Result<(TreeIndex, Vec<RowId>)> {
    let started = WallInstant::now();
    let mut reported = started;
    let mut index = TreeIndex::new();
    let mut next = RowId::new(Revision(i64::MIN), 0);
    let mut rows = 0_usize;
    loop {
        let changes = log.replay(next, REPLAY_ROWS).await?;
        let (Some(first), Some(last)) = (changes.first(), changes.last()) else { break };
        check_order(meta, &index, first.row, last.row)?;
        changes.iter().for_each(|change| index.apply(change));
        rows += changes.len();
        next = RowId::new(last.row.revision, last.row.sub + 1);
        if reported.elapsed() > PROGRESS_INTERVAL {
            reported = WallInstant::now();
            info!(rows, revision = index.head().0, head = meta.head.0, "reading the log");
        }
    }
    if index.head() != meta.head {
        return Err(Error::Corrupt(format!("the log ends at revision {}, its head is {}", index.head(), meta.head)));
    }
    let mut garbage = Vec::new();
    if let Some(revision) = meta.compact_revision {
        if revision > meta.head {
            return Err(Error::Corrupt(format!("compact revision {revision} is beyond the head {}", meta.head)));
        }
        index.begin_compaction(revision);
        let mut cursor = CompactionCursor::default();
        while index.compact_step(&mut cursor, usize::MAX, &mut garbage) {}
    }
    info!(
        rows,
        keys = index.len(),
        revision = index.head().0,
        compact_revision = index.compact_revision().map(|revision| revision.0),
        elapsed_ms = started.elapsed().as_millis(),
        "log read"
    );
    Ok((index, garbage))
}

/// Above the compact revision no revision is missing.
fn check_order(meta: &Meta, index: &TreeIndex, first: RowId, last: RowId) -> Result<()> {
    if first.revision <= Revision(1) || last.revision > meta.head {
        return Err(Error::Corrupt(format!(
            "row {} lies outside the log, whose head is {}",
            first.revision, meta.head
        )));
    }
    let gap = first.revision > index.head().next();
    if gap && meta.compact_revision.is_none_or(|compacted| index.head() >= compacted) {
        return Err(Error::Corrupt(format!("revisions between {} and {} are missing", index.head(), first.revision)));
    }
    Ok(())
}
