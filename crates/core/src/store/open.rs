//! Opens a store: rebuilds the index and the leases from the log, then starts the tasks.

use std::{
    collections::HashMap,
    sync::{Arc, atomic::AtomicBool},
    time::{Duration, Instant as WallInstant},
};

use parking_lot::{Mutex, RwLock};
use tokio::{
    sync::{Notify, watch},
    time::Instant,
};
use tracing::info;

use super::{
    Identity, Pulses, Shared, Store,
    auto_compact::{self, AutoCompaction},
    catch_up::{self, ReplicationState, lease_table},
    compactor::{self, Pace},
    expiry,
    members::{self, Members},
    room::Room,
    shared_query::SharedQuery,
    space::{self, Space},
    tasks::vital,
    timing::Patience,
    values::ValueCache,
    wakeful::Wakeful,
    writer::{WriteQueue, Writer},
};
use crate::{
    index::{CompactionCursor, Contradiction, TreeIndex},
    log::{Error, History, Log, LoggedLease, Member, Meta, Result, Touch},
    metrics::Metrics,
    supervise::Lock,
    turns::Turns,
    types::{Change, LeaseId, Revision, RowId, shown},
    watch::Hub,
    watchdog::Watchdog,
};

/// Interval of progress messages while the log is read.
const PROGRESS_INTERVAL: Duration = Duration::from_secs(1);
/// Pause after a query that renews leases; half of it between groups of its responses. All renewals that arrive during
/// the pause share the next query. Without it, clients that renew without a pause would keep the database and the
/// server busy for nothing.
const RENEWAL_PAUSE: Duration = Duration::from_millis(2);

#[derive(Debug, Clone)]
pub struct Settings {
    /// Size of the value cache in bytes of encoded pairs.
    pub value_cache_bytes: u64,
    /// Interval at which a shared log is polled when no notification arrives.
    pub poll_interval: Duration,
    /// This instance's name.
    pub name: String,
    /// URLs at which clients reach this instance.
    pub client_urls: Vec<String>,
    pub metrics: Arc<Metrics>,
    pub patience: Patience,
    /// Quota in bytes; 0: etcd's default of 2 GiB; negative: no quota.
    pub quota_bytes: i64,
    pub auto_compaction: Option<AutoCompaction>,
    pub compaction: Pace,
    /// Whether the writer polls without sleeping during the commit of a single client. This needs a second core beside
    /// the one that runs everything else.
    pub stays_awake: bool,
    /// Observes the loops of the store.
    pub watchdog: Arc<Watchdog>,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            value_cache_bytes: 256 << 20,
            poll_interval: Duration::from_millis(100),
            name: "default".to_owned(),
            client_urls: Vec::new(),
            metrics: Arc::default(),
            patience: Patience::default(),
            quota_bytes: 0,
            auto_compaction: None,
            compaction: Pace::default(),
            stays_awake: false,
            watchdog: Arc::default(),
        }
    }
}

impl Store {
    /// Reads the log, which takes about 2 seconds per million rows, and starts serving it.
    ///
    /// # Errors
    ///
    /// If the log cannot be read or is corrupt.
    pub async fn open(log: Arc<dyn Log>, settings: Settings) -> Result<Self> {
        if let Some(shared) = log.shared() {
            // Before the leases are read: leases do not expire while no instance is alive.
            shared.beat().await?;
        }
        let Replayed { meta, index, garbage, .. } = replay(&*log).await?;
        let leases = lease_table(&meta, &index, Instant::now());
        let own = Member { id: meta.member_id, name: settings.name, client_urls: settings.client_urls };

        let (stop_background, stopped) = watch::channel(false);
        let (turns, give_turns) = Turns::new();
        vital("the giving of turns", give_turns);
        let shared = Arc::new(Shared {
            identity: Identity { cluster_id: meta.cluster_id, member_id: meta.member_id },
            replication: ReplicationState::new(meta.position.server),
            members: Members::new(own),
            space: Space::new(settings.quota_bytes),
            hub: Arc::new(Hub::new(index.head(), index.compact_revision(), Arc::clone(&settings.metrics))),
            metrics: settings.metrics,
            compaction_done: watch::Sender::new(index.compact_revision()),
            index: RwLock::new(index),
            leases: Lock::new(leases),
            values: ValueCache::new(settings.value_cache_bytes),
            room: Room::new(settings.value_cache_bytes),
            turns,
            lease_deadline: Notify::new(),
            compaction: Notify::new(),
            purge_duty: AtomicBool::new(false),
            rows_left_to_others: Mutex::default(),
            pulses: Pulses::default(),
            log,
        });
        shared.space.set_alarms(&meta);
        shared.fill_tail().await?;
        let (writer, queue) = Writer::new(Arc::clone(&shared), settings.patience, Wakeful::new(settings.stays_awake));
        let mut tasks = vec![
            vital("the writer", writer.run()),
            vital("the compactor", compactor::run(Arc::clone(&shared), settings.compaction, garbage, stopped.clone())),
            vital("the quota task", space::run(Arc::clone(&shared), queue.clone(), stopped.clone())),
            vital("the expiry of leases", expiry::run(Arc::clone(&shared), queue.clone(), stopped.clone())),
        ];
        if let Some(policy) = settings.auto_compaction {
            let compacting = auto_compact::run(Arc::clone(&shared), queue.clone(), policy, stopped.clone());
            tasks.push(vital("auto compaction", compacting));
        }
        let (mut heads, mut renewals) = (None, None);
        if shared.log.shared().is_some() {
            let following = catch_up::run(Arc::clone(&shared), settings.poll_interval, stopped.clone());
            tasks.push(vital("the follower of the log", following));
            tasks.push(vital("the heartbeat of this member", members::run(Arc::clone(&shared), stopped)));
            heads = Some(position_query(Arc::clone(&shared)));
            renewals = Some(renewal_query(Arc::clone(&shared)));
        }
        let range_durations = ["false", "true"].map(|success| shared.metrics.store.range.with_label_values(&[success]));
        let patience = settings.patience.request;
        let watchdog = settings.watchdog;
        shared.pulses.register(&watchdog, &queue);
        let tasks = Mutex::new(tasks);
        Ok(Self { shared, queue, heads, renewals, patience, range_durations, tasks, stop_background, watchdog })
    }
}

impl Pulses {
    fn register(&self, watchdog: &Watchdog, queue: &WriteQueue) {
        let Self { writer, expiry, compactor, follower, heads, renewals } = self;
        watchdog.follow_queue("writer", writer, queue.has_waiting());
        watchdog.follow("expiry", expiry);
        watchdog.follow("compactor", compactor);
        watchdog.follow("follower", follower);
        watchdog.follow("heads", heads);
        watchdog.follow("renewals", renewals);
    }
}

/// Starts the task that catches up with the log for linearizable reads.
fn position_query(shared: Arc<Shared>) -> SharedQuery<(), Result<()>> {
    let pulse = Arc::clone(&shared.pulses.heads);
    let (heads, run) = SharedQuery::new(
        move |waiting: Vec<()>| {
            let shared = Arc::clone(&shared);
            async move {
                let reached = match shared.log.shared() {
                    Some(log) => shared.reach_head(log).await,
                    None => Ok(()),
                };
                vec![reached; waiting.len()]
            }
        },
        pulse,
    );
    vital("the query for the log's position", run);
    heads
}

/// Starts the task that renews leases in the log. The result is `None` for a lease that the log does not contain.
fn renewal_query(shared: Arc<Shared>) -> SharedQuery<LeaseId, Result<Option<LoggedLease>>> {
    let pulse = Arc::clone(&shared.pulses.renewals);
    let (renewals, run) = SharedQuery::with_pauses(
        move |ids: Vec<LeaseId>| {
            let shared = Arc::clone(&shared);
            async move {
                let Some(log) = shared.log.shared() else { return vec![Ok(None); ids.len()] };
                // Some clients renew the same lease continuously.
                let mut distinct = ids.clone();
                distinct.sort_unstable();
                distinct.dedup();
                let asked = Instant::now();
                match log.leases(&distinct, Touch::Renew).await {
                    Ok(found) => {
                        // Before the responses are sent, which takes time.
                        shared.set_lease_deadlines(&found, asked);
                        let found: HashMap<LeaseId, LoggedLease> =
                            found.into_iter().map(|logged| (logged.id, logged)).collect();
                        ids.iter().map(|id| Ok(found.get(id).copied())).collect()
                    }
                    Err(error) => vec![Err(error); ids.len()],
                }
            }
        },
        RENEWAL_PAUSE,
        pulse,
    );
    vital("the renewal of leases", run);
    renewals
}

/// The state that is rebuilt from a log.
pub struct Replayed {
    pub meta: Meta,
    pub index: TreeIndex,
    pub rows: usize,
    /// Rows that a compaction made unreadable and that are not deleted yet.
    pub garbage: Vec<RowId>,
}

/// Reads a whole log and rebuilds the index from it.
///
/// # Errors
///
/// [`Error::Corrupt`] if the log is inconsistent.
pub async fn replay(log: &dyn History) -> Result<Replayed> {
    let started = WallInstant::now();
    let mut reported = started;
    let mut index = TreeIndex::new();
    let mut rows = 0_usize;
    let mut last = RowId::new(Revision::EMPTY, 0);
    let meta = log
        .replay(&mut |meta, changes| {
            for change in &changes {
                check_order(meta, last, change.row)?;
                index.restore(change, meta.compact_revision).map_err(|error| inconsistent_row(change, error))?;
                last = change.row;
            }
            rows += changes.len();
            if reported.elapsed() > PROGRESS_INTERVAL {
                reported = WallInstant::now();
                info!(rows, revision = index.head().0, head = meta.position.head.0, "reading the log");
            }
            Ok(())
        })
        .await?;
    let head = meta.position.head;
    if index.head() != head {
        return Err(Error::Corrupt(format!("the log ends at revision {}, its head is {head}", index.head())));
    }
    let mut garbage = Vec::new();
    if let Some(revision) = meta.compact_revision {
        if revision > head {
            return Err(Error::Corrupt(format!("compact revision {revision} is beyond the head {head}")));
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
    Ok(Replayed { meta, index, rows, garbage })
}

/// Checks that no revision above the compact revision is missing, and no change within one.
fn check_order(meta: &Meta, last: RowId, row: RowId) -> Result<()> {
    if row.revision <= Revision::EMPTY || row.revision > meta.position.head {
        return Err(Error::Corrupt(format!(
            "row {} lies outside the log, whose head is {}",
            row.revision, meta.position.head
        )));
    }
    let compacted = meta.compact_revision.unwrap_or(Revision::EMPTY).max(Revision::EMPTY);
    if row.revision <= compacted {
        return Ok(());
    }
    let whole_until = last.revision.max(compacted);
    if row.revision > whole_until.next() {
        return Err(Error::Corrupt(format!("revisions between {whole_until} and {} are missing", row.revision)));
    }
    let sub = if last.revision == row.revision { last.sub + 1 } else { 0 };
    if row.sub != sub {
        return Err(Error::Corrupt(format!(
            "of revision {} change {sub} is missing before change {}",
            row.revision, row.sub
        )));
    }
    Ok(())
}

fn inconsistent_row(change: &Change, contradiction: Contradiction) -> Error {
    let RowId { revision, sub } = change.row;
    Error::Corrupt(format!("row id={revision} sub={sub} key=\"{}\": {contradiction}", shown(&change.key)))
}
