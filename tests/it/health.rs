//! What probes ask for.

use crate::support::{Backend, Fsync, Postgres, Server, eventually, http, http_get, on_both_backends};

async fn probes_answer_as_etcds(backend: Backend) {
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

/// Without its database an instance lives, and should be asked for nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_without_its_database_is_live_and_not_ready() {
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
    assert!(metrics.contains("\netcd_server_has_leader 0\n"), "it says so");
    postgres.start_again().await;
    eventually("readiness", async || match http_get(server.endpoint(), "/readyz").await {
        ready if ready.status == 200 => Ok(()),
        other => Err(other),
    })
    .await;
}

on_both_backends!(probes_answer_as_etcds,);
