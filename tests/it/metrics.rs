//! `/metrics`: the names are etcd's, and the values change with the load.

use std::collections::BTreeMap;

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, HashRequest, LeaseGrantRequest, RangeRequest, TxnRequest,
};

use crate::support::{
    Backend, Client, Postgres, Server, Stream, all, delete, eventually, everything, get, http_get, on_both_backends,
};

/// The metrics that the dashboard and the alerts of etcd's mixin, and so of kube-prometheus, query. The metrics of peers
/// are tested with two instances.
const MIXIN: [&str; 22] = [
    "etcd_disk_backend_commit_duration_seconds",
    "etcd_disk_wal_fsync_duration_seconds",
    "etcd_mvcc_db_total_size_in_bytes",
    "etcd_mvcc_db_total_size_in_use_in_bytes",
    "etcd_network_client_grpc_received_bytes_total",
    "etcd_network_client_grpc_sent_bytes_total",
    "etcd_server_has_leader",
    "etcd_server_leader_changes_seen_total",
    "etcd_server_proposals_applied_total",
    "etcd_server_proposals_committed_total",
    "etcd_server_proposals_failed_total",
    "etcd_server_proposals_pending",
    "etcd_server_quota_backend_bytes",
    // Of earlier versions of the mixin.
    "etcd_debugging_snap_save_total_duration_seconds",
    "etcd_http_failed_total",
    "etcd_http_received_total",
    "etcd_http_successful_duration_seconds",
    "grpc_server_handled_total",
    "grpc_server_handling_seconds",
    "grpc_server_msg_sent_total",
    "grpc_server_started_total",
    "process_resident_memory_bytes",
];

/// Returns the names of etcd's metrics that Orlop lacks, from docs/reference/metrics.md. Each has a reason.
fn missing_metrics() -> Vec<&'static str> {
    let page = include_str!("../../docs/reference/metrics.md");
    let (_, list) = page.split_once("## Metrics of etcd that Orlop lacks").expect("the page has a list");
    let rows = list.lines().filter_map(|line| line.strip_prefix("| `")?.strip_suffix(" |"));
    let names = rows.flat_map(|row| {
        let (names, reason) = row.rsplit_once("` | ").expect("a row has names and a reason");
        assert!(!reason.is_empty(), "{names}");
        names.split("`, `")
    });
    names.collect()
}

/// Returns whether `listed` is this name, or its beginning followed by `...`.
fn is_listed(name: &str, listed: &str) -> bool {
    listed.strip_suffix("...").map_or(name == listed, |beginning| name.starts_with(beginning))
}

/// Returns every series with its value.
async fn series(server: &Server) -> BTreeMap<String, f64> {
    let text = http_get(server.endpoint(), "/metrics").await.body;
    let lines = text.lines().filter(|line| !line.starts_with('#'));
    lines
        .filter_map(|line| line.rsplit_once(' '))
        .map(|(name, value)| (name.to_owned(), value.parse().expect(name)))
        .collect()
}

/// Returns every metric with its type.
async fn kinds(server: &Server) -> BTreeMap<String, String> {
    let text = http_get(server.endpoint(), "/metrics").await.body;
    let kinds = text.lines().filter_map(|line| line.strip_prefix("# TYPE ")?.split_once(' '));
    kinds.map(|(name, kind)| (name.to_owned(), kind.to_owned())).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn etcd_metrics_are_exported_or_listed_as_missing() {
    let Some(etcd) = Server::etcd().await else { return };
    let Some(orlop) = Server::orlop(Backend::Sqlite).await else { return };
    // Some metrics appear only after the first call or the first health check.
    for server in [&etcd, &orlop] {
        Client::connect(server.endpoint()).await.kv.range(all()).await.expect("a range");
        http_get(server.endpoint(), "/readyz").await;
    }
    let (theirs, ours) = (kinds(&etcd).await, kinds(&orlop).await);
    let missing = missing_metrics();
    for listed in &missing {
        assert!(theirs.keys().any(|name| is_listed(name, listed)), "{listed} is listed, but not a metric of etcd");
    }
    for (name, kind) in theirs {
        let is_listed = missing.iter().any(|listed| is_listed(&name, listed));
        match ours.get(&name) {
            Some(own) => {
                assert!(*own == kind && !is_listed, "{name} is a {own} in Orlop, a {kind} in etcd, listed: {is_listed}")
            }
            None => assert!(is_listed, "{name}, a {kind}, is neither exported nor listed in docs/reference/metrics.md"),
        }
    }
}

#[test]
fn reference_names_every_metric_of_orlop() {
    let page = include_str!("../../docs/reference/metrics.md");
    let strings = include_str!("../../crates/core/src/metrics.rs").split('"');
    let names: Vec<&str> = strings.filter(|text| text.starts_with("orlop_")).collect();
    assert!(names.contains(&"orlop_batch_requests"), "{names:?}");
    let is_named = |name: &str| ["`", "{"].iter().any(|end| page.contains(&format!("`{name}{end}")));
    let missing: Vec<_> = names.into_iter().filter(|name| !is_named(name)).collect();
    assert!(missing.is_empty(), "docs/reference/metrics.md does not name {missing:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn series_of_etcds_mixin_exist() {
    let Some(server) = Server::orlop_with(Backend::Sqlite, &["--metrics", "extensive"]).await else { return };
    let kinds = kinds(&server).await;
    let missing: Vec<_> = MIXIN.iter().filter(|name| !kinds.contains_key(**name)).collect();
    assert!(missing.is_empty(), "{missing:?}");
}

async fn requests_are_counted(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let before = series(&server).await;
    let mut stream = Stream::open(&mut client).await;
    stream.create(everything(0)).await;
    for _ in 0..3 {
        client.put("k", "v").await;
    }
    client.kv.range(get("k")).await.expect("a range");
    client.kv.range(RangeRequest::default()).await.expect_err("a range without a key");
    client.kv.delete_range(delete("k")).await.expect("a delete");
    client.kv.txn(TxnRequest::default()).await.expect("a transaction");
    client.lease.lease_grant(LeaseGrantRequest { ttl: 60, id: 0 }).await.expect("a grant");
    stream.read_until(5).await;
    let after = series(&server).await;
    let call = |metric: &str, kind: &str, service: &str, method: &str, code: &str| {
        let code = if code.is_empty() { String::new() } else { format!("grpc_code=\"{code}\",") };
        format!(
            "{metric}{{{code}grpc_method=\"{method}\",grpc_service=\"etcdserverpb.{service}\",grpc_type=\"{kind}\"}}"
        )
    };
    for (name, grown) in [
        ("etcd_mvcc_put_total".to_owned(), 3.0),
        ("etcd_mvcc_delete_total".to_owned(), 1.0),
        ("etcd_mvcc_txn_total".to_owned(), 1.0),
        ("etcd_mvcc_range_total".to_owned(), 1.0),
        ("etcd_debugging_mvcc_events_total".to_owned(), 4.0),
        ("etcd_debugging_mvcc_current_revision".to_owned(), 4.0),
        ("etcd_debugging_mvcc_watch_stream_total".to_owned(), 1.0),
        ("etcd_debugging_mvcc_watcher_total".to_owned(), 1.0),
        ("etcd_debugging_lease_granted_total".to_owned(), 1.0),
        ("orlop_leases".to_owned(), 1.0),
        ("etcd_disk_wal_fsync_duration_seconds_count".to_owned(), 5.0),
        ("etcd_server_apply_duration_seconds_count{op=\"Put\",success=\"true\",version=\"v3\"}".to_owned(), 3.0),
        ("etcd_debugging_mvcc_put_total".to_owned(), 3.0),
        ("etcd_debugging_mvcc_range_total".to_owned(), 1.0),
        ("etcd_disk_backend_commit_duration_seconds_count".to_owned(), 5.0),
        ("etcd_disk_wal_write_duration_seconds_count".to_owned(), 5.0),
        ("promhttp_metric_handler_requests_total{code=\"200\"}".to_owned(), 1.0),
        (call("grpc_server_started_total", "unary", "KV", "Put", ""), 3.0),
        (call("grpc_server_handled_total", "unary", "KV", "Put", "OK"), 3.0),
        (call("grpc_server_msg_received_total", "unary", "KV", "Put", ""), 3.0),
        (call("grpc_server_msg_sent_total", "unary", "KV", "Put", ""), 3.0),
        (call("grpc_server_handled_total", "unary", "KV", "Range", "InvalidArgument"), 1.0),
        (call("grpc_server_started_total", "bidi_stream", "Watch", "Watch", ""), 1.0),
        (call("grpc_server_msg_received_total", "bidi_stream", "Watch", "Watch", ""), 1.0),
        (call("grpc_server_handled_total", "bidi_stream", "Watch", "Watch", "OK"), 0.0),
    ] {
        let read = |series: &BTreeMap<String, f64>| series.get(&name).copied();
        let (Some(from), Some(to)) = (read(&before), read(&after)) else { panic!("{name} is not exported") };
        assert_eq!(to - from, grown, "{name}");
    }
    check_gauges(backend, &before, &after);
    client.kv.compact(CompactionRequest { revision: 5, physical: true }).await.expect("a compaction");
    client.maintenance.hash(HashRequest {}).await.expect("a hash");
    let last = eventually("the end of the compaction", async || {
        let series = series(&server).await;
        if series["etcd_debugging_mvcc_db_compaction_last"] > 1.7e9 { Ok(series) } else { Err(series) }
    })
    .await;
    assert_eq!(last["etcd_mvcc_hash_duration_seconds_count"], 1.0);
    let connections = ["idle", "used"].map(|state| last[&format!("orlop_database_connections{{state=\"{state}\"}}")]);
    assert!(connections.iter().sum::<f64>() >= 1.0, "{connections:?}");
}

fn check_gauges(backend: Backend, before: &BTreeMap<String, f64>, after: &BTreeMap<String, f64>) {
    for (name, expected) in [
        ("etcd_server_has_leader", 1.0),
        ("etcd_server_is_leader", 1.0),
        ("orlop_instances", 1.0),
        ("etcd_server_go_version{server_go_version=\"none\"}", 1.0),
        ("promhttp_metric_handler_requests_in_flight", 1.0),
        ("etcd_debugging_mvcc_pending_events_total", 0.0),
        ("etcd_debugging_mvcc_db_compaction_last", 0.0),
    ] {
        assert_eq!(after.get(name), Some(&expected), "{name}");
    }
    for name in ["go_goroutines", "go_threads", "os_fd_used", "os_fd_limit", "process_virtual_memory_max_bytes"] {
        assert!(after[name] >= 1.0, "{name}");
    }
    // Requests over the loopback interface count.
    assert!(after["process_network_receive_bytes_total"] > before["process_network_receive_bytes_total"]);
    let has_disk = after.get("orlop_disk_free_bytes").is_some_and(|free| *free > 0.0);
    assert_eq!(has_disk, backend == Backend::Sqlite, "the disk of Postgres is unknown");
    let has_wal = after.get("orlop_sqlite_wal_bytes").is_some_and(|bytes| *bytes > 0.0);
    assert_eq!(has_wal, backend == Backend::Sqlite);
    for name in ["orlop_postgres_synchronous_replication", "orlop_postgres_standbys"] {
        let expected = (backend == Backend::Postgres).then_some(&0.0);
        assert_eq!(after.get(name), expected, "{name}");
    }
}

/// The series of etcd's peers exist for the other instances.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_instances_are_peers() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let [first, second] = [
        Server::orlop_on(&datastore, &["--name", "first"]).await,
        Server::orlop_on(&datastore, &["--name", "second"]).await,
    ];
    let names = |id: &str, series: &BTreeMap<String, f64>| {
        let of_peer = |name: &&String| name.starts_with("etcd_network_") && name.contains(id) && !name.contains("le=");
        let found = series.iter().filter(|(name, _)| of_peer(name));
        found.map(|(name, value)| (name.split('{').next().unwrap_or_default().to_owned(), *value)).collect::<Vec<_>>()
    };
    let own = series(&second)
        .await
        .into_keys()
        .find_map(|name| Some(name.strip_prefix("etcd_server_id{server_id=\"")?.strip_suffix("\"}")?.to_owned()));
    let own = own.expect("the id of an instance");
    let expected = [
        ("etcd_network_active_peers", 1.0),
        ("etcd_network_known_peers", 1.0),
        ("etcd_network_peer_received_bytes_total", 0.0),
        ("etcd_network_peer_received_failures_total", 0.0),
        ("etcd_network_peer_round_trip_time_seconds_count", 0.0),
        ("etcd_network_peer_round_trip_time_seconds_sum", 0.0),
        ("etcd_network_peer_sent_bytes_total", 0.0),
        ("etcd_network_peer_sent_failures_total", 0.0),
    ];
    let expected: Vec<_> = expected.map(|(name, value)| (name.to_owned(), value)).into();
    eventually("the other instance", async || {
        let found = names(&own, &series(&first).await);
        if found == expected { Ok(()) } else { Err(found) }
    })
    .await;
}

/// Waits until the gauge of unsent events satisfies `wanted`.
async fn pending_events(server: &Server, what: &str, wanted: impl Fn(f64) -> bool) {
    eventually(what, async || {
        let pending = series(server).await["etcd_debugging_mvcc_pending_events_total"];
        if wanted(pending) { Ok(()) } else { Err(pending) }
    })
    .await;
}

async fn events_of_a_stream_that_is_not_read_are_pending(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut writer = Client::connect(server.endpoint()).await;
    // A separate connection: flow control stops the unread stream, but not the writer.
    let mut stream = Stream::open(&mut Client::connect(server.endpoint()).await).await;
    stream.create(everything(0)).await;
    let value = vec![b'v'; 512 << 10];
    let mut last = 0;
    for _ in 0..8 {
        last = writer.put("k", &value).await;
    }
    pending_events(&server, "an increase of pending events", |pending| pending > 0.0).await;
    stream.read_until(last).await;
    pending_events(&server, "the delivery of the last event", |pending| pending == 0.0).await;

    for _ in 0..8 {
        writer.put("k", &value).await;
    }
    pending_events(&server, "another increase of pending events", |pending| pending > 0.0).await;
    drop(stream);
    pending_events(&server, "the end of the stream", |pending| pending == 0.0).await;
}

/// Every series that the dashboard and the alerts query exists. Every word with an underscore is treated as a series,
/// except for the functions and labels listed here.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn series_of_dashboard_and_alerts_exist() {
    const FUNCTIONS: [&str; 4] = ["histogram_quantile", "predict_linear", "last_over_time", "__rate_interval"];
    const LABELS: [&str; 6] = ["grpc_service", "grpc_method", "grpc_type", "grpc_code", "alarm_type", "server_id"];
    let flags = ["--metrics", "extensive", "--auto-tls"];
    let Some(server) = Server::orlop_with(Backend::Sqlite, &flags).await else { return };
    let mut kinds = kinds(&server).await;
    let postgres = Server::orlop(Backend::Postgres).await;
    if let Some(server) = &postgres {
        kinds.extend(self::kinds(server).await);
    }
    let mut queried = 0;
    for (file, text) in [
        ("dashboard", include_str!("../../monitoring/dashboard.json")),
        ("alerts", include_str!("../../monitoring/alerts.yaml")),
    ] {
        for name in expressions(text).iter().flat_map(|expression| words(expression)) {
            let is_untested = postgres.is_none() && name.starts_with("orlop_postgres_");
            if is_untested
                || !name.contains('_')
                || FUNCTIONS.contains(&name.as_str())
                || LABELS.contains(&name.as_str())
            {
                continue;
            }
            let base = ["_bucket", "_count", "_sum"].iter().find_map(|end| name.strip_suffix(end)).unwrap_or(&name);
            assert!(kinds.contains_key(base) || kinds.contains_key(&name), "{file} queries {name}");
            queried += 1;
        }
    }
    assert!(queried > 20, "the expressions are found in the files");
}

/// Returns the values of `expr`, in JSON and in one-line YAML.
fn expressions(text: &str) -> Vec<String> {
    let value = |line: &str| {
        let line = line.trim().trim_start_matches("- ");
        let value = line.strip_prefix("\"expr\":").or_else(|| line.strip_prefix("expr:"))?;
        Some(value.trim().trim_end_matches(',').replace("\\\"", "\""))
    };
    text.lines().filter_map(value).collect()
}

fn words(expression: &str) -> Vec<String> {
    // Every second part is between quotation marks: it is the value of a label.
    let code: String = expression.trim_matches('"').split('"').step_by(2).collect::<Vec<_>>().join(" ");
    code.split(|letter: char| !letter.is_ascii_alphanumeric() && letter != '_').map(ToOwned::to_owned).collect()
}

on_both_backends!(requests_are_counted, events_of_a_stream_that_is_not_read_are_pending,);
