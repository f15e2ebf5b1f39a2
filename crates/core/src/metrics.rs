//! The server's metrics, under etcd's names where the meaning is the same, and under `orlop_` otherwise.
//!
//! Each group is a table and belongs to the code that updates it. Counters and histograms are updated when the event
//! happens; the gauges of [`State`] are updated when metrics are requested (see `http::metrics`).
//!
//! Updating a metric without labels neither allocates nor locks. Finding the metric of a label value takes a lock, so
//! code that knows its label values in advance finds their metrics once, at the start.

mod process;

use std::time::SystemTime;

use prometheus::{
    Encoder as _, Histogram, HistogramOpts, HistogramVec, IntCounter, IntCounterVec, IntGauge, IntGaugeVec, Opts,
    Registry, TextEncoder, core::Collector, exponential_buckets, process_collector::ProcessCollector,
};

use self::process::Process;
use crate::clock::unix_secs;

/// Returns `count` bucket bounds that double from `from` on.
fn doubling(from: f64, count: usize) -> Vec<f64> {
    exponential_buckets(from, 2.0, count).expect("the first bound is positive, and the number of buckets is not zero")
}

/// A kind of metric, built from its row of a table.
trait Metric: Collector + Clone + Sized + 'static {
    fn make(opts: Opts, labels: &[&str], buckets: Vec<f64>) -> prometheus::Result<Self>;
}

macro_rules! kinds {
    ($($kind:ident => |$opts:ident, $labels:ident, $buckets:ident| $make:expr;)+) => {
        $(impl Metric for $kind {
            fn make($opts: Opts, $labels: &[&str], $buckets: Vec<f64>) -> prometheus::Result<Self> {
                $make
            }
        })+
    };
}

kinds! {
    IntCounter => |opts, _labels, _buckets| Self::with_opts(opts);
    IntCounterVec => |opts, labels, _buckets| Self::new(opts, labels);
    IntGauge => |opts, _labels, _buckets| Self::with_opts(opts);
    IntGaugeVec => |opts, labels, _buckets| Self::new(opts, labels);
    Histogram => |opts, _labels, buckets| Self::with_opts(HistogramOpts { common_opts: opts, buckets });
    HistogramVec => |opts, labels, buckets| Self::new(HistogramOpts { common_opts: opts, buckets }, labels);
}

fn register<M: Metric>(registry: &Registry, name: &str, help: &str, labels: &[&str], buckets: Vec<f64>) -> M {
    let made = M::make(Opts::new(name, help), labels, buckets).and_then(|metric| {
        registry.register(Box::new(metric.clone()))?;
        Ok(metric)
    });
    made.unwrap_or_else(|error| panic!("{name}: {error}"))
}

macro_rules! metrics {
    ($(#[$doc:meta])* $group:ident {
        $($field:ident: $kind:ident $name:literal $([$($label:literal),+])? $(in $buckets:expr)?, $help:literal;)+
    }) => {
        $(#[$doc])*
        #[derive(Debug)]
        pub struct $group {
            $(pub $field: $kind,)+
        }

        impl $group {
            fn new(registry: &Registry) -> Self {
                Self {
                    $($field: register(registry, $name, $help, &[$($($label),+)?], {
                        #[allow(unused_mut, unused_assignments, reason = "most metrics have no labels")]
                        let mut buckets = Vec::new();
                        $(buckets = $buckets;)?
                        buckets
                    }),)+
                }
            }
        }
    };
}

metrics! {
    /// Updated by the store: writer, readers, leases, compactor.
    Store {
        puts: IntCounter "etcd_mvcc_put_total", "Puts, including those in transactions and of other instances.";
        deletes: IntCounter "etcd_mvcc_delete_total", "Keys deleted, including those by other instances.";
        txns: IntCounter "etcd_mvcc_txn_total", "Transactions.";
        ranges: IntCounter "etcd_mvcc_range_total", "Ranges outside of transactions.";
        events: IntCounter "etcd_debugging_mvcc_events_total", "Changes passed to the watch hub.";
        put_bytes: IntGauge "etcd_debugging_mvcc_total_put_size_in_bytes", "Bytes of all pairs put.";
        apply: HistogramVec "etcd_server_apply_duration_seconds" ["version", "op", "success"] in doubling(0.0001, 20),
            "Time from a write's evaluation until it is committed and applied.";
        request: HistogramVec "etcd_server_request_duration_seconds" ["type", "success"] in doubling(0.001, 14),
            "Time from a write's arrival in the queue to its response.";
        range: HistogramVec "etcd_server_range_duration_seconds" ["success"] in doubling(0.0001, 20),
            "Duration of a range.";
        slow_applies: IntCounter "etcd_server_slow_apply_total", "Writes slower than warning-apply-duration.";
        failed: IntCounter "etcd_server_proposals_failed_total",
            "Batches that the log refused or whose outcome is unknown.";
        slow_confirms: IntCounter "etcd_server_slow_read_indexes_total",
            "Linearizable reads that waited long for the log's position.";
        failed_confirms: IntCounter "etcd_server_read_indexes_failed_total",
            "Linearizable reads that failed to get the log's position.";
        fsync: Histogram "etcd_disk_wal_fsync_duration_seconds" in doubling(0.001, 14),
            "Duration of an append's durable commit.";
        written_bytes: IntGauge "etcd_disk_wal_write_bytes_total", "Bytes of all pairs appended.";
        batch_requests: Histogram "orlop_batch_requests" in doubling(1.0, 12), "Requests per commit.";
        batch_rows: Histogram "orlop_batch_rows" in doubling(1.0, 14), "Rows per commit.";
        queue: Histogram "orlop_queue_duration_seconds" in doubling(0.0001, 18),
            "Time that the oldest request of a batch waited for the batch.";
        raced: IntCounter "orlop_append_conflicts_total", "Appends that lost the race against another instance.";
        appended_behind: IntCounter "orlop_appends_behind_total", "Appends behind changes of other instances, which changed none of the keys that the requests used.";
        leases_granted: IntCounter "etcd_debugging_lease_granted_total", "Leases granted.";
        leases_revoked: IntCounter "etcd_debugging_lease_revoked_total", "Leases revoked, including expired ones.";
        leases_renewed: IntCounter "etcd_debugging_lease_renewed_total", "Lease renewals.";
        leases_expired: IntCounter "etcd_debugging_server_lease_expired_total", "Leases that this instance expired.";
        lease_ttl: Histogram "etcd_debugging_lease_ttl_total" in doubling(1.0, 24), "Granted TTLs in seconds.";
        compacted_rows: IntCounter "etcd_debugging_mvcc_db_compaction_keys_total", "Rows deleted by compactions.";
        compaction_pause: Histogram "etcd_debugging_mvcc_db_compaction_pause_duration_milliseconds"
            in doubling(1.0, 13),
            "Duration of one step of deleting rows.";
        compaction_total: Histogram "etcd_debugging_mvcc_db_compaction_total_duration_milliseconds"
            in doubling(100.0, 14),
            "Duration of a whole compaction.";
        index_compaction_pause: Histogram "etcd_debugging_mvcc_index_compaction_pause_duration_milliseconds"
            in doubling(0.5, 12), "Duration of a compaction of the index.";
        leader_changes: IntCounter "etcd_server_leader_changes_seen_total", "Changes of the leader.";
        failed_beats: IntCounter "etcd_server_heartbeat_send_failures_total",
            "Failed heartbeats of this instance.";
    }
}

metrics! {
    /// Updated by watch streams.
    Watch {
        streams: IntGauge "etcd_debugging_mvcc_watch_stream_total", "Watch streams.";
        watchers: IntGauge "etcd_debugging_mvcc_watcher_total", "Watchers.";
        behind: IntGauge "etcd_debugging_mvcc_slow_watcher_total", "Unsynced watchers, which read the log.";
    }
}

metrics! {
    /// Updated by the log in Postgres; absent on SQLite.
    Replication {
        standbys: IntGaugeVec "orlop_postgres_standbys", "Connections that replicate from the Postgres server.";
        synchronous: IntGaugeVec "orlop_postgres_synchronous_replication", "1 if a commit waits for a standby.";
    }
}

metrics! {
    /// Updated by the API, per call.
    Rpc {
        started: IntCounterVec "grpc_server_started_total" ["grpc_type", "grpc_service", "grpc_method"], "Calls begun.";
        handled: IntCounterVec "grpc_server_handled_total" ["grpc_type", "grpc_service", "grpc_method", "grpc_code"],
            "Calls ended.";
        received: IntCounterVec "grpc_server_msg_received_total" ["grpc_type", "grpc_service", "grpc_method"],
            "Messages received.";
        sent: IntCounterVec "grpc_server_msg_sent_total" ["grpc_type", "grpc_service", "grpc_method"], "Messages sent.";
        received_bytes: IntCounter "etcd_network_client_grpc_received_bytes_total", "Bytes of messages received.";
        sent_bytes: IntCounter "etcd_network_client_grpc_sent_bytes_total", "Bytes of messages sent.";
        clients: IntCounterVec "etcd_server_client_requests_total" ["type", "client_api_version"],
            "Calls by the client's API version.";
        panics: IntCounter "orlop_request_panics_total",
            "Requests that ended in a panic, which is a bug in the server.";
    }
}

metrics! {
    /// Updated by the health endpoints.
    Health {
        success: IntCounter "etcd_server_health_success", "Successful /health requests.";
        failures: IntCounter "etcd_server_health_failures", "Failed /health requests.";
        check: IntGaugeVec "etcd_server_healthcheck" ["type", "name"], "1 if the newest run of a check succeeded.";
        checks: IntCounterVec "etcd_server_healthchecks_total" ["type", "name", "status"], "Results of checks.";
        stuck: IntGaugeVec "orlop_stuck_tasks" ["task"], "1 if a task has work and makes no progress.";
    }
}

metrics! {
    /// Updated by maintenance calls.
    Maintenance {
        defrag: Histogram "etcd_disk_backend_defrag_duration_seconds" in doubling(0.1, 13),
            "Duration of a defragmentation.";
        defrag_inflight: IntGauge "etcd_disk_defrag_inflight", "1 while a defragmentation runs.";
        snapshot_last: IntGauge "orlop_snapshot_last_timestamp_seconds",
            "Unix time of the last snapshot that this instance has stored or sent completely; 0: none.";
        snapshot_interval: IntGauge "orlop_snapshot_interval_seconds", "Interval of scheduled snapshots; 0: none.";
        history_rows: IntGauge "orlop_history_rows", "Compacted rows that are kept.";
        history_bytes: IntGauge "orlop_history_bytes", "Bytes of keys and values of compacted rows that are kept, and 64 for each.";
        snapshot_failures: IntCounter "orlop_snapshot_failures_total", "Snapshots that could not be taken.";
        snapshot: Histogram "etcd_disk_backend_snapshot_duration_seconds" in doubling(0.01, 17),
            "Duration of a snapshot.";
        hash: Histogram "etcd_mvcc_hash_duration_seconds" in doubling(0.01, 15), "Duration of a hash of the whole log.";
        hash_rev: Histogram "etcd_mvcc_hash_rev_duration_seconds" in doubling(0.01, 15),
            "Duration of a hash of the pairs.";
    }
}

impl Maintenance {
    /// Sets the time of the last snapshot.
    pub fn set_last_snapshot(&self, time: SystemTime) {
        self.snapshot_last.set(unix_secs(time));
    }
}

metrics! {
    /// Updated by `/metrics`, under the names of Go's HTTP handler.
    Scrapes {
        ended: IntCounterVec "promhttp_metric_handler_requests_total" ["code"], "Requests for metrics by HTTP status.";
        in_flight: IntGauge "promhttp_metric_handler_requests_in_flight", "Requests for metrics being served.";
    }
}

metrics! {
    /// Parts of etcd that Orlop lacks. Dashboards and alerts query these metrics; the values do not change.
    Absent {
        promotions: IntCounter "etcd_server_learner_promote_successes", "0: there are no learners.";
        go_version: IntGaugeVec "etcd_server_go_version" ["server_go_version"], "none: this is not a Go program.";
        go_info: IntGaugeVec "go_info" ["version"], "none: this is not a Go program.";
        http_received: IntCounterVec "etcd_http_received_total" ["method"], "0: there is no v2 API.";
        http_failed: IntCounterVec "etcd_http_failed_total" ["method", "code"], "0: there is no v2 API.";
        http_successful: HistogramVec "etcd_http_successful_duration_seconds" ["method"] in doubling(0.0005, 13),
            "Empty: there is no v2 API.";
        peer_sent: IntCounterVec "etcd_network_peer_sent_bytes_total" ["To"],
            "0: instances do not connect to each other.";
        peer_received: IntCounterVec "etcd_network_peer_received_bytes_total" ["From"],
            "0: instances do not connect to each other.";
        peer_sent_failures: IntCounterVec "etcd_network_peer_sent_failures_total" ["To"],
            "0: instances do not connect to each other.";
        peer_received_failures: IntCounterVec "etcd_network_peer_received_failures_total" ["From"],
            "0: instances do not connect to each other.";
        peer_round_trip: HistogramVec "etcd_network_peer_round_trip_time_seconds" ["To"] in doubling(0.0001, 16),
            "Empty: instances do not connect to each other.";
    }
}

impl Absent {
    fn set_constants(&self) {
        self.go_version.with_label_values(&["none"]).set(1);
        self.go_info.with_label_values(&["none"]).set(1);
        // Prometheus omits a metric without series.
        self.http_received.with_label_values(&["GET"]);
        self.http_failed.with_label_values(&["GET", "404"]);
        self.http_successful.with_label_values(&["GET"]);
    }

    /// Sets the other live instances, by id in hexadecimal.
    pub fn set_peers(&self, ids: &[String]) {
        let counters = [&self.peer_sent, &self.peer_received, &self.peer_sent_failures, &self.peer_received_failures];
        for counter in counters {
            counter.reset();
            ids.iter().for_each(|id| drop(counter.with_label_values(&[id])));
        }
        self.peer_round_trip.reset();
        ids.iter().for_each(|id| drop(self.peer_round_trip.with_label_values(&[id])));
    }
}

metrics! {
    /// Gauges, updated when metrics are requested.
    State {
        has_leader: IntGauge "etcd_server_has_leader", "1 while the database can be reached and accepts writes.";
        is_leader: IntGauge "etcd_server_is_leader",
            "1 if this instance is the leader, which runs tasks that only one instance should run.";
        is_learner: IntGauge "etcd_server_is_learner", "0: there are no learners.";
        pending: IntGauge "etcd_server_proposals_pending", "Writes in the queue.";
        applying_snapshot: IntGauge "etcd_server_snapshot_apply_in_progress_total", "1 while the index is rebuilt.";
        quota: IntGauge "etcd_server_quota_backend_bytes", "Maximum size of the database in bytes.";
        server_version: IntGaugeVec "etcd_server_version" ["server_version"],
            "1 for the etcd release whose API is served.";
        cluster_version: IntGaugeVec "etcd_cluster_version" ["cluster_version"], "1 for the cluster's version.";
        server_id: IntGaugeVec "etcd_server_id" ["server_id"], "1 for this member's id, in hexadecimal.";
        known_peers: IntGaugeVec "etcd_network_known_peers" ["Local", "Remote"], "1 for each other live instance.";
        db_bytes: IntGauge "etcd_mvcc_db_total_size_in_bytes", "Size of the database in bytes.";
        db_bytes_in_use: IntGauge "etcd_mvcc_db_total_size_in_use_in_bytes",
            "Size of the database without free pages in bytes.";
        reads: IntGauge "etcd_mvcc_db_open_read_transactions", "Queries that read the database.";
        keys: IntGauge "etcd_debugging_mvcc_keys_total", "Keys that exist at the head.";
        revision: IntGauge "etcd_debugging_mvcc_current_revision", "The head.";
        compact_revision: IntGauge "etcd_debugging_mvcc_compact_revision", "The compact revision, -1 before the first.";
        last_compaction: IntGauge "etcd_debugging_mvcc_db_compaction_last",
            "Unix time of the end of the last compaction.";
        pending_events: IntGauge "etcd_debugging_mvcc_pending_events_total",
            "Messages that wait to be sent to watchers.";
        auth_revision: IntGauge "etcd_debugging_auth_revision", "The auth store's revision.";
        alarms: IntGaugeVec "etcd_debugging_server_alarms" ["server_id", "alarm_type"], "1 for each active alarm.";
        tasks: IntGauge "go_goroutines", "Tasks of the asynchronous runtime.";
        disk_free: IntGaugeVec "orlop_disk_free_bytes", "Free bytes on the disk of the SQLite database.";
        wal_bytes: IntGaugeVec "orlop_sqlite_wal_bytes", "Bytes of the WAL of the SQLite database.";
        certificate_expiry: IntGaugeVec "orlop_tls_certificate_expiry_timestamp_seconds",
            "Unix time at which the served certificate expires.";
        cache_bytes: IntGauge "orlop_value_cache_bytes", "Bytes of pairs in the value cache.";
        cache_hits: IntGauge "orlop_value_cache_hits", "Pairs found in the value cache.";
        cache_misses: IntGauge "orlop_value_cache_misses", "Pairs read from the log.";
        leases: IntGauge "orlop_leases", "Leases.";
        instances: IntGauge "orlop_instances", "Live instances on this log.";
        connections: IntGaugeVec "orlop_database_connections" ["state"],
            "Connections to the database, idle and in use.";
        database: IntGaugeVec "orlop_database_info" ["kind"], "1 for the kind of the database.";
        build: IntGaugeVec "orlop_build_info" ["version"], "1 for the version of Orlop.";
    }
}

/// Metrics of etcd that have the values of another one: name, the other one, description.
const COPIES: [(&str, &str, &str); 17] = [
    ("etcd_debugging_mvcc_put_total", "etcd_mvcc_put_total", "The old name of etcd_mvcc_put_total."),
    ("etcd_debugging_mvcc_delete_total", "etcd_mvcc_delete_total", "The old name of etcd_mvcc_delete_total."),
    ("etcd_debugging_mvcc_txn_total", "etcd_mvcc_txn_total", "The old name of etcd_mvcc_txn_total."),
    ("etcd_debugging_mvcc_range_total", "etcd_mvcc_range_total", "The old name of etcd_mvcc_range_total."),
    ("etcd_disk_backend_commit_duration_seconds", COMMITS, "Duration of an append's durable commit."),
    ("etcd_disk_wal_write_duration_seconds", COMMITS, "Duration of an append's durable commit."),
    ("etcd_debugging_disk_backend_commit_write_duration_seconds", COMMITS, "Duration of an append's durable commit."),
    ("etcd_snap_fsync_duration_seconds", COMMITS, "Duration of an append's durable commit."),
    ("etcd_snap_db_fsync_duration_seconds", COMMITS, "Duration of an append's durable commit."),
    ("etcd_snap_db_save_total_duration_seconds", SNAPSHOTS, "Duration of a snapshot."),
    ("etcd_debugging_snap_save_total_duration_seconds", SNAPSHOTS, "Duration of a snapshot."),
    ("etcd_server_proposals_committed_total", HEAD, "The newest known committed revision."),
    ("etcd_server_proposals_applied_total", HEAD, "The newest revision applied."),
    ("etcd_network_active_peers", "etcd_network_known_peers", "1 for each other live instance."),
    ("go_threads", "process_threads", "Number of threads of the process."),
    ("os_fd_used", "process_open_fds", "Open file descriptors."),
    ("os_fd_limit", "process_max_fds", "Maximum number of open file descriptors."),
];
const COMMITS: &str = "etcd_disk_wal_fsync_duration_seconds";
const SNAPSHOTS: &str = "etcd_disk_backend_snapshot_duration_seconds";
const HEAD: &str = "etcd_debugging_mvcc_current_revision";

/// All metrics and their text format.
#[derive(Debug)]
pub struct Metrics {
    registry: Registry,
    pub store: Store,
    pub watch: Watch,
    pub replication: Replication,
    pub rpc: Rpc,
    /// The duration of each call, by method; `None` with [`Detail::Basic`].
    pub handling: Option<HistogramVec>,
    pub health: Health,
    pub maintenance: Maintenance,
    pub scrapes: Scrapes,
    pub absent: Absent,
    pub state: State,
}

/// The set of metrics, as in etcd's `--metrics`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Detail {
    Basic,
    /// Also the duration of each call, by method.
    Extensive,
}

impl Metrics {
    pub fn new(detail: Detail) -> Self {
        let registry = Registry::new();
        for process in [Box::new(ProcessCollector::for_self()) as Box<dyn Collector>, Box::new(Process::new())] {
            registry.register(process).expect("the names of the two collectors differ");
        }
        let handling = (detail == Detail::Extensive).then(|| {
            let labels = ["grpc_type", "grpc_service", "grpc_method"];
            let buckets = prometheus::DEFAULT_BUCKETS.to_vec();
            register(&registry, "grpc_server_handling_seconds", "Duration of a call.", &labels, buckets)
        });
        let absent = Absent::new(&registry);
        absent.set_constants();
        Self {
            store: Store::new(&registry),
            watch: Watch::new(&registry),
            replication: Replication::new(&registry),
            rpc: Rpc::new(&registry),
            handling,
            health: Health::new(&registry),
            maintenance: Maintenance::new(&registry),
            scrapes: Scrapes::new(&registry),
            absent,
            state: State::new(&registry),
            registry,
        }
    }

    /// Returns all metrics in Prometheus' text format.
    ///
    /// # Errors
    ///
    /// If a metric is inconsistent.
    pub fn text(&self) -> Result<Vec<u8>, prometheus::Error> {
        let mut families = self.registry.gather();
        process::set_cpu_time(&mut families);
        for (name, original, help) in COPIES {
            let Some(mut copy) = families.iter().find(|family| family.name() == original).cloned() else { continue };
            copy.set_name(name.to_owned());
            copy.set_help(help.to_owned());
            families.push(copy);
        }
        let mut text = Vec::with_capacity(64 << 10);
        TextEncoder::new().encode(&families, &mut text)?;
        Ok(text)
    }
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new(Detail::Basic)
    }
}
