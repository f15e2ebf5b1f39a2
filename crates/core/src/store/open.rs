//! Opens a store: rebuilds the index and the leases from the log, then starts the tasks.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::{
    sync::{Notify, watch},
    time::Instant,
};

use super::{
    authority::CurrentAuthority,
    auto_compact::{self, AutoCompaction},
    busy_poll::BusyPoll,
    catch_up,
    compactor::{self, CompactionRate},
    expiry,
    handle::Store,
    heartbeat,
    history::{self, HistoryKeeper, HistorySettings},
    leases::lease_table,
    members::Members,
    page_check::PageCheck,
    queue::WriteQueue,
    quota,
    replay::{ReadProgress, Replayed},
    replication::ReplicationState,
    saved_index::{self, Saving, Unread, replay_with_saved},
    shared::{Identity, Pulses, Shared},
    shared_query::SharedQuery,
    sizes::SizesCache,
    space::Space,
    tasks::vital,
    timing::SlowThresholds,
    values::ValueCache,
    write_outage::WriteOutage,
    writer::Writer,
};
use crate::{
    index::TreeIndex,
    log::{Error, Log, LoggedLease, Member, Meta, Result, Touch},
    metrics::Metrics,
    overload::{ReadMemory, Steps},
    supervise::Lock,
    sync::{Mutex, RwLock},
    types::LeaseId,
    watch::Hub,
    watchdog::Watchdog,
};

/// The settings of a store.
#[derive(Debug, Clone)]
pub struct Settings {
    /// Maximum size of the value cache in bytes.
    pub value_cache_bytes: u64,
    /// Interval at which a shared log is polled when no notification arrives.
    pub poll_interval: Duration,
    /// This instance's name.
    pub name: String,
    /// URLs at which clients reach this instance.
    pub client_urls: Vec<String>,
    pub metrics: Arc<Metrics>,
    pub slow_thresholds: SlowThresholds,
    /// Quota in bytes; 0: etcd's default of 2 GiB; negative: no quota.
    pub quota_bytes: i64,
    pub auto_compaction: Option<AutoCompaction>,
    pub compaction: CompactionRate,
    /// Whether the writer polls the commit of a single client instead of sleeping. This needs another core for the
    /// database.
    pub busy_poll: bool,
    /// Whether leases end when their time is over. A process that only looks ends none.
    pub expires_leases: bool,
    /// Whether the alarm of the quota is raised and cleared. A process that only looks does not know the quota of the servers.
    pub changes_alarms: bool,
    /// Keeps compacted rows; `None`: they are only deleted.
    pub history: Option<HistorySettings>,
    pub saving: Saving,
    /// Set while the log is read.
    pub progress: Arc<ReadProgress>,
    /// Observes the loops of the store.
    pub watchdog: Arc<Watchdog>,
}

impl Settings {
    pub const VALUE_CACHE_BYTES: u64 = 256 << 20;
    pub const POLL_INTERVAL: Duration = Duration::from_millis(100);
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            value_cache_bytes: Self::VALUE_CACHE_BYTES,
            poll_interval: Self::POLL_INTERVAL,
            name: "default".to_owned(),
            client_urls: Vec::new(),
            metrics: Arc::default(),
            slow_thresholds: SlowThresholds::default(),
            quota_bytes: 0,
            auto_compaction: None,
            compaction: CompactionRate::default(),
            busy_poll: false,
            expires_leases: true,
            changes_alarms: true,
            history: None,
            saving: Saving::default(),
            progress: Arc::default(),
            watchdog: Arc::default(),
        }
    }
}

async fn refuse_unfinished_copy(log: &dyn Log) -> Result<()> {
    if log.meta().await?.source.is_none() {
        return Ok(());
    }
    let text = "it is the unfinished copy of another store; continue `orlop migrate`, or use an empty database";
    Err(Error::Open(text.to_owned()))
}

impl Store {
    /// Reads the log, which takes about 2 seconds per million rows without a saved index, and starts serving it.
    ///
    /// # Errors
    ///
    /// If the log cannot be read or is corrupt.
    pub async fn open(log: Arc<dyn Log>, settings: Settings) -> Result<Self> {
        refuse_unfinished_copy(&*log).await?;
        // Leases do not expire while no instance is alive: the first heartbeat extends their deadlines. It is sent before
        // the deadlines are read.
        let live = if let Some(shared) = log.shared() { shared.beat().await? } else { Vec::new() };
        let mut pages = PageCheck::begin(&log);
        let (Replayed { meta, index, garbage, rows }, saved_head) =
            pages.beside(replay_with_saved(&*log, &settings.progress)).await?;
        let (stop_background, stopped) = watch::channel(false);
        let (steps, grant_steps) = Steps::new();
        vital("the step scheduler", grant_steps);
        let shared = Arc::new(Shared::new(log, &meta, index, steps, &settings));
        shared.members.update(&live);
        shared.space.set_alarms(&meta);
        shared.authority.set(shared.log.auth().await?);
        shared.fill_tail().await?;
        shared.measure_at_start().await;
        if let Some(history) = &shared.history {
            history.begin(meta.compact_revision, meta.position.head).await;
        }
        // Last: a start that fails, or is stopped, leaves them to the next one.
        shared.log.forget_lease_times().await?;
        let (writer, queue) =
            Writer::new(Arc::clone(&shared), settings.slow_thresholds, BusyPoll::new(settings.busy_poll));
        let mut tasks = vec![
            vital("the writer", writer.run()),
            vital("the compactor", compactor::run(Arc::clone(&shared), settings.compaction, garbage, stopped.clone())),
            vital("the check of pages", pages.watch(Arc::clone(&shared), queue.clone(), stopped.clone())),
        ];
        if settings.changes_alarms {
            tasks.push(vital("the quota task", quota::run(Arc::clone(&shared), queue.clone(), stopped.clone())));
        }
        if settings.expires_leases {
            tasks.push(vital("the expiry of leases", expiry::run(Arc::clone(&shared), queue.clone(), stopped.clone())));
        }
        if shared.log.saved_index().is_some() {
            let unread = Unread::after_start(saved_head, meta.position.head, rows);
            let saving = saved_index::run(Arc::clone(&shared), settings.saving, unread, stopped.clone());
            tasks.push(vital("the saved index", saving));
        }
        if shared.history.is_some() {
            tasks.push(vital("the history", history::run(Arc::clone(&shared), stopped.clone())));
        }
        if let Some(policy) = settings.auto_compaction {
            let compacting = auto_compact::run(Arc::clone(&shared), queue.clone(), policy, stopped.clone());
            tasks.push(vital("auto compaction", compacting));
        }
        let is_shared = shared.log.shared().is_some();
        if is_shared {
            let following = catch_up::run(Arc::clone(&shared), settings.poll_interval, stopped.clone());
            tasks.push(vital("the follower of the log", following));
            tasks.push(vital("the heartbeat of this member", heartbeat::run(Arc::clone(&shared), stopped)));
        }
        let position_query = is_shared.then(|| position_query(Arc::clone(&shared)));
        let renewal_query = is_shared.then(|| renewal_query(Arc::clone(&shared)));
        let range_durations = ["false", "true"].map(|success| shared.metrics.store.range.with_label_values(&[success]));
        let slow_threshold = settings.slow_thresholds.request;
        let watchdog = settings.watchdog;
        shared.pulses.register(&watchdog, &queue);
        let tasks = Mutex::new(tasks);
        Ok(Self {
            shared,
            queue,
            position_query,
            renewal_query,
            slow_threshold,
            range_durations,
            tasks,
            stop_background,
            watchdog,
        })
    }
}

impl Shared {
    pub(super) fn new(
        log: Arc<dyn Log>,
        meta: &Meta,
        index: TreeIndex,
        steps: Arc<Steps>,
        settings: &Settings,
    ) -> Self {
        let client_urls = settings.client_urls.clone();
        let own = Member { id: meta.member_id, name: settings.name.clone(), client_urls };
        let metrics = Arc::clone(&settings.metrics);
        let hub = Hub::new(index.head(), index.compact_revision(), Arc::clone(&metrics));
        let compaction_done = watch::Sender::new(index.compact_revision());
        let leases = Lock::new(lease_table(meta, &index, Instant::now()));
        let index = Arc::new(RwLock::new(index));
        Self {
            identity: Identity { cluster_id: meta.cluster_id, member_id: meta.member_id },
            replication: ReplicationState::new(meta.position.server),
            members: Members::new(own),
            space: Space::new(settings.quota_bytes),
            write_outage: WriteOutage::default(),
            authority: CurrentAuthority::default(),
            hub: Arc::new(hub.with_index(Arc::clone(&index))),
            metrics,
            compaction_done,
            hash_before_compaction: Mutex::default(),
            hashing: Arc::default(),
            leases,
            index,
            values: ValueCache::new(settings.value_cache_bytes),
            read_memory: ReadMemory::new(settings.value_cache_bytes),
            steps,
            lease_deadline: Notify::new(),
            compaction: Notify::new(),
            own_compaction: Mutex::default(),
            purged_on: Mutex::default(),
            rows_left_to_others: Mutex::default(),
            sizes: SizesCache::default(),
            defragmenting: Arc::default(),
            pulses: Pulses::default(),
            history: settings.history.clone().map(HistoryKeeper::new),
            log,
        }
    }
}

impl Pulses {
    /// Registers the heartbeats with the watchdog.
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
    let (query, run) = SharedQuery::new(
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
    query
}

/// Starts the task that renews leases in the log. The result is `None` for a lease that the log does not contain.
fn renewal_query(shared: Arc<Shared>) -> SharedQuery<LeaseId, Result<Option<LoggedLease>>> {
    let pulse = Arc::clone(&shared.pulses.renewals);
    let (query, run) = SharedQuery::new(
        move |ids: Vec<LeaseId>| {
            let shared = Arc::clone(&shared);
            async move {
                let Some(log) = shared.log.shared() else { return vec![Ok(None); ids.len()] };
                // Several waiting requests may renew the same lease.
                let mut distinct = ids.clone();
                distinct.sort_unstable();
                distinct.dedup();
                let queried_at = Instant::now();
                match log.leases(&distinct, Touch::Renew).await {
                    Ok(found) => {
                        // A deadline is set relative to the current time, so it is set before the responses are sent.
                        shared.set_lease_deadlines(&found, queried_at);
                        let found: HashMap<LeaseId, LoggedLease> =
                            found.into_iter().map(|logged| (logged.id, logged)).collect();
                        ids.iter().map(|id| Ok(found.get(id).copied())).collect()
                    }
                    Err(error) => vec![Err(error); ids.len()],
                }
            }
        },
        pulse,
    );
    vital("the renewal of leases", run);
    query
}
