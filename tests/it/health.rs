//! The endpoints for probes.

use std::time::{Duration, Instant};

use orlop_wire::proto::client::etcdserverpb::PutRequest;

use crate::support::{Backend, Client, Fsync, Postgres, Server, eventually, http, http_get, on_both_backends};

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

/// If the database is down, /livez succeeds and /readyz fails.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_without_its_database_is_live_but_not_ready() {
    let Some(postgres) = Postgres::start(Fsync::Off).await else { return };
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

/// A hanging database cannot be distinguished from a slow one. A restart would not help, so the watchdog must not
/// mistake waiting for the database for a stuck event loop. With slow tests enabled the outage lasts longer than the
/// watchdog's limit.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn hung_database_does_not_trigger_the_watchdog() {
    let Some(postgres) = Postgres::start(Fsync::Off).await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let client = Client::connect(server.endpoint()).await;
    let outage = Duration::from_secs(if std::env::var_os("ORLOP_SLOW_TESTS").is_some() { 100 } else { 10 });
    let paused = postgres.pause();
    let began = Instant::now();
    let mut refused = 0;
    let put = PutRequest { key: "k".into(), value: "v".into(), ..Default::default() };
    // At least one request is always waiting.
    while began.elapsed() < outage {
        refused += usize::from(client.clone().kv.put(put.clone()).await.is_err());
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

on_both_backends!(probes_respond_as_in_etcd,);
