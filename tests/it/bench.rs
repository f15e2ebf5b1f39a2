//! `orlop bench`: each load runs the requested operations, reports them and removes its keys.

mod faults;

use std::{process::Output, time::Duration};

use orlop_wire::proto::client::etcdserverpb::RangeRequest;
use serde_json::Value;

use crate::support::{Backend, Client, Postgres, Server, all, etcd_tool, get, orlop, run, run_within, skip};

const OPERATIONS: u64 = 50;
/// Maximum time of a run. Some runs start several servers.
const RUN_TIME: Duration = Duration::from_secs(600);

/// Runs a load and returns its report.
#[track_caller]
fn bench(server: &Server, scenario: &[&str]) -> Value {
    let total = OPERATIONS.to_string();
    let flags = ["--endpoints", server.endpoint(), "--clients", "4", "--total", &total, "--warmup", "0s", "--json"];
    orlop_bench(&[scenario, &flags].concat())
}

#[track_caller]
fn orlop_bench(arguments: &[&str]) -> Value {
    parsed(arguments, &run_within(RUN_TIME, orlop(["bench"]).args(arguments)))
}

/// Returns the report of a run, which must have succeeded.
#[track_caller]
fn parsed(arguments: &[&str], output: &Output) -> Value {
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    serde_json::from_slice(&output.stdout).expect("one JSON object")
}

/// Returns the existing keys and the current revision.
async fn keys(client: &mut Client) -> (Vec<String>, i64) {
    let answer = client.kv.range(RangeRequest { keys_only: true, ..all() }).await.expect("a range").into_inner();
    let keys = answer.kvs.iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect();
    (keys, answer.header.expect("a header").revision)
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn loads_report_their_operations_and_leave_no_keys() {
    /// (flags, operations in the report with their counts, number of revisions that the run must exceed)
    type Row<'a> = (&'a [&'a str], &'a [(&'a str, u64)], u64);
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("not of the load", "").await;
    let rows: &[Row<'_>] = &[
        (&["put"], &[("put", OPERATIONS)], OPERATIONS),
        (&["create-txn"], &[("create-txn", OPERATIONS)], OPERATIONS),
        (&["update", "--key-space", "20"], &[("update", OPERATIONS)], OPERATIONS),
        (&["get", "--key-space", "20"], &[("get", OPERATIONS)], 1),
        (&["range", "--keys", "20"], &[("range", OPERATIONS)], 20),
        (&["range", "--keys", "20", "--page", "7", "--old-revision"], &[("range", OPERATIONS)], 40),
        (
            &["watch", "--watchers", "10", "--streams", "2", "--key-space", "8"],
            &[("put", OPERATIONS), ("event", 10 * OPERATIONS), ("round", OPERATIONS), ("lag", 10 * OPERATIONS)],
            OPERATIONS,
        ),
        (
            &["watch", "--watchers", "8", "--own-key"],
            &[("put", OPERATIONS), ("event", OPERATIONS), ("round", OPERATIONS), ("lag", OPERATIONS)],
            OPERATIONS,
        ),
        (&["catch-up", "--revisions", "1500", "--key-space", "30"], &[("catch-up", OPERATIONS)], 1500),
        (
            &["kubernetes", "--nodes", "5", "--pods", "20", "--watches", "6"],
            &[("kubernetes", OPERATIONS), ("kubernetes, sum of its kinds", OPERATIONS)],
            1,
        ),
    ];
    for (scenario, expected, revisions) in rows {
        let (_, head) = keys(&mut client).await;
        let report = bench(&server, scenario);
        assert_eq!((&report["scenario"], &report["first_error"]), (&scenario[0].into(), &Value::Null));
        assert_eq!((&report["interrupted"], &report["clients"]), (&false.into(), &4.into()), "{report}");
        // The clients know the mod revisions of the keys that they update.
        assert!(report.get("retries").is_none_or(|retries| *retries == 0.0), "{report}");
        assert_eq!(counts(&report), *expected, "{report}");
        let (left, now) = keys(&mut client).await;
        assert_eq!(left, ["not of the load"], "{scenario:?}");
        assert!(now - head > *revisions as i64, "{scenario:?} made the revisions from {head} to {now}");
    }
}

/// Returns each operation of a report with its count. The five kinds of Kubernetes operations are added up to one row.
/// Panics if an operation failed.
fn counts(report: &Value) -> Vec<(&str, u64)> {
    let mut counts: Vec<(&str, u64)> = Vec::new();
    for row in report["results"].as_array().expect("a list of operations") {
        let count = row["count"].as_u64().expect("a count");
        let histogram = row["histogram"].as_array().expect("a histogram");
        let in_buckets: u64 = histogram.iter().map(|bucket| bucket["count"].as_u64().expect("a count")).sum();
        assert_eq!((in_buckets, row["errors"].as_u64()), (count, Some(0)), "{row}");
        match row["operation"].as_str().expect("a name") {
            "renew-lease" => counts.push(("kubernetes, sum of its kinds", count)),
            "update-pod" | "probe" | "count" | "list-page" => counts.last_mut().expect("not the first kind").1 += count,
            operation => counts.push((operation, count)),
        }
    }
    counts
}

/// Loads that run for a duration instead of a number of operations.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn maintenance_runs_under_load_and_idle_connections_make_no_revision() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    let timed = |scenario: &[&str]| {
        let flags = ["--endpoints", server.endpoint(), "--duration", "200ms", "--warmup", "0s", "--json"];
        orlop_bench(&[scenario, &flags].concat())
    };
    let report = timed(&["maintenance", "--key-space", "50"]);
    let phases: Vec<_> = counts(&report).into_iter().map(|(phase, count)| (phase, count > 0)).collect();
    assert_eq!(phases, [("put", true), ("put-compacting", true), ("put-defragmenting", true)], "{report}");
    let (left, head) = keys(&mut client).await;
    assert!(left.is_empty(), "{left:?}");
    let before = RangeRequest { revision: 2, ..get("a") };
    assert!(client.kv.range(before).await.is_err_and(|status| status.message().contains("compacted")));

    let report = timed(&["idle", "--watches", "5", "--connections", "7"]);
    assert_eq!(
        (&report["watches"], &report["connections"], &report["first_error"]),
        (&5.0.into(), &7.into(), &Value::Null)
    );
    // The run wrote no key, so the cleanup deletes nothing and makes no revision.
    assert_eq!(keys(&mut client).await.1, head);
}

/// Flags of a short step with two watches.
const STEP: [&str; 7] = ["--json", "--warmup", "0s", "--duration", "500ms", "--watches", "2"];

/// Servers of all kinds that the machine has.
async fn servers() -> Vec<Server> {
    let mut servers = Vec::new();
    for backend in [Backend::Sqlite, Backend::Postgres] {
        servers.extend(Server::orlop(backend).await);
    }
    servers.extend(Server::etcd().await);
    servers
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_are_renewed_at_the_rate_of_the_nodes() {
    for server in servers().await {
        let renewals = ["kubernetes", "--renewals", "--nodes", "300", "--endpoints", server.endpoint()];
        let (pid, purge) = (server.pid().to_string(), ["--purge", "--prefix", "/registry/"]);
        // 300 nodes renew every 10 s: 30 renewals are due per second, and 15 within the step. They are the only kind.
        let expected = [("kubernetes, sum of its kinds", 15), ("event", 30)];
        let report = orlop_bench(&[&renewals[..], &STEP, &["--keep", "--server-pid", &pid]].concat());
        assert_eq!((counts(&report), &report["first_error"]), (expected.to_vec(), &Value::Null), "{report}");
        assert_eq!((&report["nodes"], &report["events_missing"]), (&300.0.into(), &0.0.into()), "{report}");
        let (used, threads) = (&report["server_cpu"], &report["server_cpu"]["threads"]);
        assert_eq!(used["operations"], 15, "{report}");
        assert!(threads.as_array().is_some_and(|threads| threads.len() <= 100), "{report}");

        let mut client = Client::connect(server.endpoint()).await;
        let (kept, head) = keys(&mut client).await;
        assert_eq!(kept.len(), 600);
        assert_eq!(kept[0], "/registry/leases/kube-node-lease/node-0000000");
        assert_eq!(kept[599], "/registry/minions/node-0000299");
        // The leases have the revisions of the first run, so no renewal is repeated.
        let report = orlop_bench(&[&renewals[..], &STEP, &["--existing", "--keep", "--prefix", "/registry/"]].concat());
        assert_eq!(counts(&report), expected, "{report}");
        assert_eq!(keys(&mut client).await, (kept, head + 15));
        let report = orlop_bench(&[&renewals[..], &STEP, &purge].concat());
        assert_eq!(counts(&report), expected, "{report}");
        assert!(keys(&mut client).await.0.is_empty());
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn search_finds_the_number_of_nodes_that_meet_the_limit() {
    for server in servers().await {
        for (nodes, limit, measured, found) in [
            ("1500", "1m", &[(1_000, true), (1_500, true)][..], 1_500),
            // No server answers within a microsecond. Each number is measured twice.
            ("4", "1us", &[(4, false), (4, false), (2, false), (2, false), (1, false), (1, false)], 0),
        ] {
            let search = ["kubernetes", "--find-nodes", "--nodes", nodes, "--p99-max", limit];
            let search = [&search[..], &STEP, &["--endpoints", server.endpoint()]].concat();
            let run_search = || run_within(RUN_TIME, orlop(["bench"]).args(&search));
            let mut output = run_search();
            // The machine was stopped for longer than a write may take.
            if String::from_utf8_lossy(&output.stderr).contains("request timed out") {
                output = run_search();
            }
            let report = parsed(&search, &output);
            assert_eq!(
                (&report["nodes"], &report["first_error"]),
                (&f64::from(found).into(), &Value::Null),
                "{report}"
            );
            let steps = report["steps"].as_array().expect("a list of steps");
            let steps: Vec<_> = steps.iter().map(|step| (step["nodes"].as_u64(), step["held"].as_bool())).collect();
            let measured: Vec<_> = measured.iter().map(|(nodes, held)| (Some(*nodes), Some(*held))).collect();
            assert_eq!(steps, measured, "{report}");
            assert!(keys(&mut Client::connect(server.endpoint()).await).await.0.is_empty());
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn invalid_flags_of_renewals_are_refused() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    for (flags, expected) in [
        (&["--find-nodes", "--renewals"][..], "cannot be used with"),
        (&["--find-nodes", "--pods", "5"], "cannot be used with"),
        (&["--p99-max", "1s"], "--find-nodes"),
        (&["--find-nodes", "--p99-max", "0s"], "must be more than 0"),
        (&["--find-nodes", "--nodes", "0"], "must be a number from 1"),
        (&["--renewals", "--nodes", "1000001"], "--nodes must be at most 1000000, nodes=1000001"),
        (&["--renewals", "--total", "5"], "--total has no effect on renewals"),
        (&["--renewals", "--purge"], "--purge deletes all keys below /registry/: confirm it with --prefix /registry/"),
        (&["--renewals", "--existing"], "--existing overwrites leases below /registry/: confirm it with --prefix"),
        (&["--renewals", "--nodes", "3", "--existing", "--keep", "--prefix", "a/"], "leases=0 nodes=3"),
        (&["--server-pid", "0"], "0 is not in 1.."),
        (&["--server-pid", "2147483647"], "--server-pid: no such process, pid=2147483647"),
    ] {
        let output = run(orlop(["bench", "kubernetes", "--endpoints", server.endpoint()]).args(flags));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(expected), "{flags:?}: {text}");
    }
}

/// A load that keeps the server busy: the threads that worked are listed.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn cpu_time_of_the_server_is_reported_by_thread() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let pid = server.pid().to_string();
    let flags = ["--endpoints", server.endpoint(), "--total", "3000", "--server-pid", &pid];
    for load in ["put", "kubernetes"] {
        let report = orlop_bench(&[&[load, "--json"][..], &flags].concat());
        let used = &report["server_cpu"];
        let threads = used["threads"].as_array().expect("a list of threads");
        let names: Vec<_> = threads.iter().filter_map(|thread| thread["name"].as_str()).collect();
        // The thread on which SQLite writes.
        assert!(names.contains(&"tokio-rt-worker"), "{report}");
        let figures = |field: &str| threads.iter().filter_map(|thread| thread[field].as_f64()).collect::<Vec<_>>();
        let (secs, micros) = (figures("cpu_secs"), figures("micros_per_operation"));
        assert!(secs.is_sorted_by(|a, b| a >= b) && secs.iter().all(|secs| *secs > 0.0), "{report}");
        assert!((secs.iter().sum::<f64>() - used["cpu_secs"].as_f64().expect("a sum")).abs() < 1e-6, "{report}");
        assert!((micros[0] - secs[0] * 1e6 / 3000.0).abs() < 0.01 && used["operations"] == 3000, "{report}");
    }
    let text = run(orlop(["bench", "put"]).args(flags)).stdout;
    assert!(String::from_utf8_lossy(&text).contains("server thread"), "{text:?}");
    let report = bench(&server, &["put"]);
    assert!(report.get("server_cpu").is_none(), "{report}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_of_an_earlier_run_can_be_reused() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    bench(&server, &["range", "--keys", "20", "--keep"]);
    let (kept, head) = keys(&mut client).await;
    // A run with --existing deletes no keys, with or without --keep.
    for flags in [&["--keep"][..], &[]] {
        bench(&server, &[&["range", "--keys", "20", "--existing"][..], flags].concat());
        assert_eq!(keys(&mut client).await, (kept.clone(), head));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn comparison_writes_a_page_with_plots_and_no_other_file() {
    if etcd_tool("etcd", "ORLOP_ETCD").is_none() {
        return skip("etcd");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let page = folder.path().join("page.md");
    let compare = || {
        let mut compare = orlop(["bench", "compare", "--servers", "etcd,sqlite", "--groups", "put-256b,get"]);
        compare
            .current_dir(env!("CARGO_MANIFEST_DIR"))
            // Long enough that each of 1,024 clients completes a put after the warm-up.
            .args(["--rounds", "1", "--duration", "800ms", "--work-dir"])
            .arg(folder.path())
            .arg("--output")
            .arg(&page);
        run_within(RUN_TIME, &mut compare)
    };
    let mut output = compare();
    // The machine was stopped for the whole duration of a load.
    if String::from_utf8_lossy(&output.stderr).contains("no operation was completed in the measured time") {
        output = compare();
    }
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    let text = std::fs::read_to_string(&page).expect("the page is written");
    for expected in ["### Puts, 256 B", "| put, 1,024 clients, 256 B | puts/s |", "fdatasync", "### Gets", "x**"] {
        assert!(text.contains(expected), "{expected}: {text}");
    }
    for plot in ["puts.svg", "puts-p99.svg", "times-etcd.svg"] {
        let drawn = std::fs::read_to_string(folder.path().join(plot)).expect("the plot is drawn");
        assert!(drawn.starts_with("<svg") && drawn.contains("Orlop, SQLite") && text.contains(plot), "{plot}");
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("the folder exists").flatten().collect();
    assert_eq!(left.len(), 4, "{left:?}");
}

/// A soak of a few seconds cannot show growth, but it detects resources that clients do not release.
#[test]
fn soak_compacts_reconnects_and_leaves_no_keys() {
    if !Postgres::is_installed() {
        return skip("postgres");
    }
    let folder = tempfile::tempdir().expect("a folder");
    let plots = folder.path().join("plots");
    let report = orlop_bench(&[
        "soak",
        "--minutes",
        "0.1",
        "--rate",
        "10",
        "--nodes",
        "5",
        "--pods",
        "20",
        "--watches",
        "6",
        "--json",
        "--work-dir",
        &folder.path().display().to_string(),
        "--output",
        &plots.display().to_string(),
    ]);
    assert_eq!((&report["scenario"], &report["interrupted"]), (&"soak".into(), &false.into()));
    let servers = report["servers"].as_array().expect("a list of servers");
    assert_eq!(
        servers.iter().map(|server| &server["server"]).collect::<Vec<_>>(),
        ["Orlop, SQLite", "Orlop, Postgres"]
    );
    for server in servers {
        assert_eq!(
            (&server["errors"], &server["first_error"], &server["left_behind"]),
            (&0.into(), &Value::Null, &Value::Array(vec![]))
        );
        for counter in ["operations", "events", "compactions", "visits"] {
            assert!(server[counter].as_u64().is_some_and(|count| count > 0), "{counter}: {server}");
        }
        // A sample lacks a latency if no such operation ended since the previous sample, for example on a busy machine.
        let samples = server["samples"].as_array().expect("a list of samples");
        for figure in
            ["memory", "size", "descriptors", "watchers", "leases", "keys in the index", "write p99", "read p50"]
        {
            assert!(samples.iter().any(|sample| sample[figure].is_number()), "{figure}: {server}");
        }
        assert!(samples.iter().any(|sample| sample["watchers"].as_f64() >= Some(6.0)), "{server}");
    }
    for plot in ["soak-memory.svg", "soak-size.svg", "soak-descriptors.svg", "soak-latency.svg"] {
        let drawn = std::fs::read_to_string(plots.join(plot)).expect("the plot is drawn");
        assert!(drawn.starts_with("<svg") && drawn.contains("Orlop, Postgres"), "{plot}");
    }
    let left: Vec<_> = std::fs::read_dir(folder.path()).expect("the folder exists").flatten().collect();
    assert_eq!(left.len(), 1, "{left:?}");
}

/// Against a running server the soak reads resource usage from the metrics and leaves no keys.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn soak_of_a_running_server_leaves_no_keys() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let report = orlop_bench(&[
        "soak",
        "--minutes",
        "0.1",
        "--rate",
        "40",
        "--nodes",
        "5",
        "--pods",
        "20",
        "--watches",
        "6",
        "--json",
        "--endpoints",
        server.endpoint(),
    ]);
    let soaked = &report["servers"][0];
    assert_eq!((&soaked["server"], &soaked["errors"]), (&"endpoints".into(), &0.into()), "{soaked}");
    assert!(soaked["operations"].as_u64().is_some_and(|count| count > 0), "{soaked}");
    assert!(soaked["samples"][0]["memory"].is_number() && soaked["samples"][0]["folder"].is_null(), "{soaked}");
    let (left, _) = keys(&mut Client::connect(server.endpoint()).await).await;
    // One key may still be attached to a lease that was left to expire.
    assert!(left.len() <= 1, "{left:?}");
}

#[test]
fn comparison_refuses_invalid_flags() {
    for (flags, expected) in [
        (&["--clients", "3"][..], "--clients has no effect here"),
        (&["--endpoints", "http://a:1"], "--endpoints has no effect here"),
        (&["--groups", "nonsense"], "must be one of put-256b"),
        (&["--servers", "mysql"], "etcd, sqlite, postgres"),
        (&["--etcd", "/not/there", "--servers", "etcd"], "/not/there failed"),
        (&["--work-dir", "/not/there", "--servers", "sqlite"], "--work-dir /not/there"),
        (&["--output", "/dev/null"], "the page has no marker for the tables"),
        (&["--user", "root:secret"], "--user has no effect here"),
        (&["--prefix", "a/"], "--prefix has no effect here"),
        (&["--duration", "0s"], "--duration must be at least 1ms"),
        (&["--servers", "sqlite", "--groups", "get,three-put"], "group=`three-put` instances=3"),
    ] {
        let output = run(orlop(["bench", "compare"]).env_remove("ETCDCTL_USER").args(flags));
        let text = String::from_utf8_lossy(&output.stderr);
        assert!(!output.status.success() && text.contains(expected), "{flags:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prefix_in_use_needs_a_flag() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    bench(&server, &["create-txn", "--keep"]);
    let (kept, _) = keys(&mut client).await;
    assert_eq!(kept.len() as u64, OPERATIONS);
    let again = ["bench", "put", "--total", "1", "--warmup", "0s", "--endpoints", server.endpoint()];
    let again = run(&mut orlop(again));
    let said = String::from_utf8_lossy(&again.stderr);
    assert!(!again.status.success() && said.contains("the prefix is in use") && said.contains("keys=50"), "{said}");
    assert_eq!(keys(&mut client).await.0, kept);
    bench(&server, &["put", "--purge"]);
    assert!(keys(&mut client).await.0.is_empty());
}
