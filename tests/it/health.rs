//! The endpoints for probes.

use std::{
    pin::pin,
    time::{Duration, Instant},
};

use futures_util::future::join_all;
use orlop_wire::proto::client::etcdserverpb::{LeaseGrantRequest, StatusRequest};

use sqlx::{
    ConnectOptions as _, Connection as _, PgConnection,
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};
use tokio::{
    task::JoinSet,
    time::{sleep, timeout},
};

use crate::{
    support::{
        Backend, Client, Place, Postgres, Server, eventually, free_port, home, http, http_get, on_both_backends, put,
    },
    torture::preload::{EIO, Field, Preload, WAL},
};

async fn probes_respond_as_in_etcd(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let healthy = "{\"health\":\"true\",\"reason\":\"\"}";
    for (path, status, body) in [
        ("/health", 200, healthy),
        ("/health?serializable=true", 200, healthy),
        ("/health?exclude=NOSPACE", 200, healthy),
        ("/livez", 200, "ok\n"),
        ("/livez?verbose", 200, "[+]serializable_read ok\nok\n"),
        ("/livez?exclude=serializable_read&verbose", 200, "ok\n"),
        ("/livez/serializable_read", 200, "ok\n"),
        ("/livez/serializable_read?verbose", 200, "[+]serializable_read ok\nok\n"),
        ("/livez/nothing", 404, "404 page not found\n"),
        ("/readyz", 200, "ok\n"),
        ("/readyz/linearizable_read?verbose", 200, "[+]linearizable_read ok\nok\n"),
        ("/readyz/data_corruption?verbose", 200, "[+]data_corruption ok\nok\n"),
        ("/nothing", 404, "404 page not found\n"),
    ] {
        let answer = http_get(server.endpoint(), path).await;
        assert_eq!((answer.status, answer.body.as_str()), (status, body), "{path}");
        assert_eq!(answer.header("access-control-allow-origin"), Some("*"), "{path}");
    }
    for path in ["/health", "/livez", "/readyz", "/version"] {
        let answer = http(server.endpoint(), "POST", path, "{}").await;
        assert_eq!(answer.status, 405, "{path}");
        assert!(answer.header("allow").is_some_and(|allowed| allowed.contains("GET")), "{path}: {answer:?}");
    }
    let version = http_get(server.endpoint(), "/version").await;
    assert!(version.body.starts_with("{\"etcdserver\":\"3."), "{version:?}");
    let ready = http_get(server.endpoint(), "/readyz?verbose").await.body;
    for check in ["data_corruption", "serializable_read", "linearizable_read"] {
        assert!(ready.contains(&format!("[+]{check} ok\n")), "{ready}");
    }
}

/// Starts a server, whose database does not answer until `release` is called, and checks its probes before and after.
async fn check_start(mut start: impl Future<Output = Server> + Unpin, probes: &str, release: impl FnOnce()) {
    let expected = [
        ("/livez", 200, "ok\n"),
        ("/livez/progress", 200, "ok\n"),
        ("/readyz", 503, "[-]start failed: the server starts: it opens the database\nreadyz check failed\n"),
        ("/health", 503, "{\"health\":\"false\",\"reason\":\"the server starts: it opens the database\"}"),
        ("/metrics", 503, "the server starts: it opens the database\n"),
    ];
    let asked = async {
        eventually("an answer while the server starts", async || {
            let connected = tokio::net::TcpStream::connect(probes.trim_start_matches("http://")).await;
            connected.map(drop)
        })
        .await;
        // All at once, because the server waits for the lock of a SQLite file only for some seconds.
        join_all(expected.map(|(path, _, _)| http_get(probes, path))).await
    };
    let answers = tokio::select! {
        _ = &mut start => panic!("the server has started without its database"),
        answers = asked => answers,
    };
    release();
    for ((path, status, body), answer) in expected.into_iter().zip(answers) {
        assert_eq!((answer.status, answer.body.as_str()), (status, body), "{path}");
    }
    let server = start.await;
    for path in ["/livez", "/readyz", "/health", "/metrics", "/version"] {
        assert_eq!(http_get(probes, path).await.status, 200, "{path}");
    }
    assert_eq!(http_get(server.endpoint(), "/readyz").await.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_while_the_server_starts_on_postgres() {
    let Some(postgres) = Postgres::start().await else { return };
    let (datastore, probes) = (postgres.create_database(), format!("http://127.0.0.1:{}", free_port()));
    let paused = postgres.pause();
    let flags = ["--listen-metrics-urls", &probes];
    check_start(pin!(Server::orlop_on(&datastore, &flags)), &probes, || drop(paused)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn probes_are_answered_while_the_server_starts_on_sqlite() {
    let folder = home();
    let file = SqliteConnectOptions::new().filename(folder.path().join("orlop.db")).create_if_missing(true);
    let locked = file.journal_mode(SqliteJournalMode::Wal).pragma("locking_mode", "EXCLUSIVE");
    let mut lock = locked.connect().await.expect("the database is created");
    sqlx::query("BEGIN EXCLUSIVE").execute(&mut lock).await.expect("a lock");
    let probes = format!("http://127.0.0.1:{}", free_port());
    let place = Place { data: Some(folder.path().to_owned()), ..Place::default() };
    let flags = ["--listen-metrics-urls", &probes];
    check_start(pin!(Server::orlop_at(None, &flags, place)), &probes, || drop(lock)).await;
}

/// If the database is down, /livez succeeds and /readyz fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_without_its_database_is_live_but_not_ready() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    assert_eq!(http_get(server.endpoint(), "/readyz").await.status, 200);
    postgres.stop();
    let ready = http_get(server.endpoint(), "/readyz").await;
    assert_eq!(ready.status, 503);
    assert!(ready.body.contains("[-]linearizable_read failed: etcdserver: "), "{ready:?}");
    assert_eq!(http_get(server.endpoint(), "/livez").await.status, 200);
    assert_eq!(http_get(server.endpoint(), "/health").await.status, 503);
    let metrics = http_get(server.endpoint(), "/metrics").await.body;
    assert!(metrics.contains("\netcd_server_has_leader 0\n"), "the metric shows the outage");
    postgres.start_again().await;
    eventually("readiness", async || match http_get(server.endpoint(), "/readyz").await {
        ready if ready.status == 200 => Ok(()),
        other => Err(other),
    })
    .await;
}

async fn has_leader_becomes(server: &Server, value: f64) {
    eventually("the change of the metric", async || match server.metric("etcd_server_has_leader").await {
        found if found == value => Ok(()),
        found => Err(found),
    })
    .await;
}

/// Checks that the server soon shows an outage, although reads succeed. A read that needs a new connection may fail once.
async fn outage_of_writes_is_shown(server: &Server) {
    for (path, status) in [("/health", 503), ("/health?serializable=true", 200), ("/readyz", 200), ("/livez", 200)] {
        eventually("the answer of a probe", async || match http_get(server.endpoint(), path).await {
            answer if answer.status == status => Ok(()),
            answer => Err((path, answer)),
        })
        .await;
    }
    has_leader_becomes(server, 0.0).await;
    let mut client = Client::connect(server.endpoint()).await;
    let status = client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    assert_eq!((status.leader, status.errors), (0, vec!["etcdserver: no leader".to_owned()]));
}

async fn no_outage_is_shown(server: &Server) {
    has_leader_becomes(server, 1.0).await;
    assert_eq!(http_get(server.endpoint(), "/health").await.status, 200);
}

/// Writes without pause, also while writes fail.
async fn write_forever(mut client: Client) {
    loop {
        let _ = client.kv.put(put("k", "v")).await;
    }
}

/// Without writes of clients, the heartbeat shows it. That the deadline of a lease cannot be read is logged once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn read_only_postgres_is_an_outage() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &["--log-level", "info"]).await;
    no_outage_is_shown(&server).await;
    let lease = LeaseGrantRequest { ttl: 2, ..Default::default() };
    Client::connect(server.endpoint()).await.lease.lease_grant(lease).await.expect("a lease");
    postgres.psql("postgres", "ALTER SYSTEM SET default_transaction_read_only = on");
    postgres.psql("postgres", "SELECT pg_reload_conf()");
    outage_of_writes_is_shown(&server).await;
    let logged = async |text: &str| {
        eventually(text, async || match server.log().matches(text).count() {
            0 => Err("nothing"),
            times => Ok(times),
        })
        .await
    };
    logged("cannot read lease deadlines; trying again").await;
    postgres.psql("postgres", "ALTER SYSTEM RESET default_transaction_read_only");
    postgres.psql("postgres", "SELECT pg_reload_conf()");
    no_outage_is_shown(&server).await;
    logged("lease deadlines can be read again").await;
    assert_eq!(logged("cannot read lease deadlines; trying again").await, 1, "{}", server.log());
}

/// The heartbeat succeeds, because it uses another table.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn locked_table_is_an_outage() {
    let Some(server) = Server::orlop(Backend::Postgres).await else { return };
    let datastore = server.datastore().expect("Postgres has an endpoint");
    let mut other = PgConnection::connect(datastore).await.expect("the database exists");
    let locked = sqlx::raw_sql("BEGIN; LOCK TABLE kv_log IN EXCLUSIVE MODE").execute(&mut other).await;
    locked.expect("the table is locked");
    let mut writers = JoinSet::new();
    writers.spawn(write_forever(Client::connect(server.endpoint()).await));
    outage_of_writes_is_shown(&server).await;
    other.close().await.expect("the connection closes");
    no_outage_is_shown(&server).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn sqlite_on_a_disk_that_cannot_sync_is_an_outage() {
    let preload = Preload::build();
    let place = Place { environment: preload.environment(), ..Place::default() };
    let server = Server::orlop_at(None, &[], place).await;
    preload.set(Field::SyncErrno, EIO);
    preload.set(Field::SyncFiles, WAL);
    let mut writers = JoinSet::new();
    writers.spawn(write_forever(Client::connect(server.endpoint()).await));
    outage_of_writes_is_shown(&server).await;
    preload.set(Field::SyncFiles, 0);
    no_outage_is_shown(&server).await;
}

/// Returns whether tests run that last longer than the watchdog's limit, which is a minute.
fn runs_slow_tests() -> bool {
    ["CI", "ORLOP_SLOW_TESTS"].into_iter().any(|variable| std::env::var_os(variable).is_some())
}

/// A hanging database cannot be distinguished from a slow one. A restart would not help, so the watchdog must not
/// mistake waiting for the database for a stuck event loop. Where slow tests run, the outage lasts longer than the
/// watchdog's limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_database_does_not_trigger_the_watchdog() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let client = Client::connect(server.endpoint()).await;
    let outage = Duration::from_secs(if runs_slow_tests() { 100 } else { 10 });
    let paused = postgres.pause();
    let began = Instant::now();
    let mut refused = 0;
    // At least one request is always waiting.
    while began.elapsed() < outage {
        refused += usize::from(client.clone().kv.put(put("k", "v")).await.is_err());
        let live = http_get(server.endpoint(), "/livez?verbose").await;
        assert_eq!((live.status, live.body.as_str()), (200, "[+]serializable_read ok\nok\n"), "{}", server.log_tail());
    }
    assert!(refused > 0, "writes fail without the database");
    assert_eq!(http_get(server.endpoint(), "/readyz").await.status, 503);
    assert_eq!(http_get(server.endpoint(), "/livez/progress").await.status, 200);
    drop(paused);
    eventually("readiness", async || match http_get(server.endpoint(), "/readyz").await {
        ready if ready.status == 200 => Ok(()),
        other => Err(other),
    })
    .await;
    let metrics = http_get(server.endpoint(), "/metrics").await.body;
    for task in ["writer", "follower", "expiry", "compactor", "heads", "renewals", "runtime"] {
        assert!(metrics.contains(&format!("\norlop_stuck_tasks{{task=\"{task}\"}} 0\n")), "{task}: {metrics}");
    }
}

/// Waits until /livez has a status. This may take as long as the disk hangs.
async fn live_becomes(server: &Server, status: u16) {
    let changed = async {
        while http_get(server.endpoint(), "/livez").await.status != status {
            sleep(Duration::from_secs(1)).await;
        }
    };
    let changed = timeout(Duration::from_secs(180), changed).await;
    changed.unwrap_or_else(|_| panic!("/livez has not become {status}: {}", server.log_tail()));
}

/// No deadline ends a call of the kernel that hangs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_disk_triggers_the_watchdog() {
    if !runs_slow_tests() {
        println!("skipped: no ORLOP_SLOW_TESTS, and this takes a minute and a half");
        return;
    }
    let preload = Preload::build();
    let place = Place { environment: preload.environment(), ..Place::default() };
    let server = Server::orlop_at(None, &[], place).await;
    let mut client = Client::connect(server.endpoint()).await;
    preload.set(Field::SyncDelayMs, 85_000);
    let written = tokio::spawn(async move { client.kv.put(put("k", "v")).await });
    eventually("a sync that hangs", async || match preload.get(Field::SyncsDelayed) {
        0 => Err("no sync"),
        _ => Ok(()),
    })
    .await;
    // Later syncs do not hang.
    preload.set(Field::SyncDelayMs, 0);
    assert_eq!(http_get(server.endpoint(), "/livez").await.status, 200);
    live_becomes(&server, 503).await;
    let live = http_get(server.endpoint(), "/livez").await.body;
    assert!(live.contains("[-]progress failed: writer has made no progress for "), "{live}");
    live_becomes(&server, 200).await;
    written.await.expect("the put ends").expect("the put succeeds");
}

on_both_backends!(probes_respond_as_in_etcd,);
