//! Opens a store: rebuilds the index and the leases from the log, then starts the tasks.

use std::{sync::Arc, time::Duration};

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
    queries::Queries,
    queue::WriteQueue,
    quota,
    replay::{ReadProgress, Replayed},
    replication::ReplicationState,
    saved_index::{self, Saving, Unread, replay_with_saved},
    shared::{Identity, Pulses, Shared},
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
    log::{Error, Log, Member, Meta, Result},
    metrics::Metrics,
    overload::{ReadMemory, Steps},
    supervise::Lock,
    sync::{Mutex, RwLock},
    watch::Hub,
    watchdog::Watchdog,
};

/// Why a process opens a store.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Role {
    /// To serve clients.
    #[default]
    Server,
    /// For a command in the same process. Leases do not end when their time is over. The alarm of the quota is neither
    /// raised nor cleared, because a command does not know the quota of the servers.
    Local,
}

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
    pub role: Role,
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
            role: Role::default(),
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
        if settings.role == Role::Server {
            tasks.push(vital("the quota task", quota::run(Arc::clone(&shared), queue.clone(), stopped.clone())));
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
        if shared.log.shared().is_some() {
            let following = catch_up::run(Arc::clone(&shared), settings.poll_interval, stopped.clone());
            tasks.push(vital("the follower of the log", following));
            tasks.push(vital("the heartbeat of this member", heartbeat::run(Arc::clone(&shared), stopped)));
        }
        let queries = Queries::start(&shared);
        let range_durations = ["false", "true"].map(|success| shared.metrics.store.range.with_label_values(&[success]));
        let slow_threshold = settings.slow_thresholds.request;
        let watchdog = settings.watchdog;
        shared.pulses.register(&watchdog, &queue);
        let tasks = Mutex::new(tasks);
        Ok(Self { shared, queue, queries, slow_threshold, range_durations, tasks, stop_background, watchdog })
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
            computing_hash: tokio::sync::Mutex::default(),
            leases,
            index,
            values: ValueCache::new(settings.value_cache_bytes),
            read_memory: ReadMemory::new(settings.value_cache_bytes),
            steps,
            lease_deadline: Notify::new(),
            compaction: Notify::new(),
            own_compactions: Mutex::default(),
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
