//! Commits that wait for a synchronous standby, and what is reported about them.

use std::fs;

use crate::support::{Client, Cluster, Postgres, Replication, Server, database_name, eventually, put};

const SYNCHRONOUS: &str = "orlop_postgres_synchronous_replication";
const STANDBYS: &str = "orlop_postgres_standbys";

async fn metric_becomes(server: &Server, name: &str, value: f64) {
    eventually(name, async || match server.metric(name).await {
        found if found == value => Ok(()),
        found => Err(found),
    })
    .await;
}

/// The connection that appends keeps the setting with which it was opened.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replication_is_not_called_synchronous_while_writes_do_not_wait() {
    let Some(cluster) = Cluster::start(Replication::Synchronous).await else { return };
    let endpoint = cluster.create_database();
    let (primary, role) = (&cluster.primary().postgres, database_name(&endpoint));
    primary.psql("postgres", &format!("ALTER ROLE {role} SET synchronous_commit = local"));
    let mut server = Server::orlop_on(&endpoint, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("before", "1").await;
    metric_becomes(&server, STANDBYS, 2.0).await;
    assert_eq!(server.metric(SYNCHRONOUS).await, 0.0);

    primary.psql("postgres", &format!("ALTER ROLE {role} RESET synchronous_commit"));
    let of_reads = format!("usename = '{role}' AND query NOT LIKE '%orlop_append%'");
    let end = format!("SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE {of_reads}");
    assert_ne!(primary.psql("postgres", &end), "0");
    let standbys = &cluster.nodes()[1..];
    standbys.iter().for_each(|node| node.postgres.crash());
    // One check reads both.
    metric_becomes(&server, STANDBYS, 0.0).await;
    client.kv.put(put("without a standby", "1")).await.expect("its commit does not wait");
    assert_eq!(server.metric(SYNCHRONOUS).await, 0.0);

    standbys[0].postgres.start_again().await;
    server.restart().await;
    metric_becomes(&server, SYNCHRONOUS, 1.0).await;
}

/// Sets the standbys for which commits wait.
async fn set_standbys(postgres: &Postgres, names: &str) {
    postgres.psql("postgres", &format!("ALTER SYSTEM SET synchronous_standby_names = '{names}'"));
    postgres.psql("postgres", "SELECT pg_reload_conf()");
    eventually("the setting", async || match postgres.psql("postgres", "SHOW synchronous_standby_names") {
        found if found == names => Ok(()),
        found => Err(found),
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_without_a_standby_names_the_cause_and_waits() {
    let Some(postgres) = Postgres::start().await else { return };
    let mut server = Server::orlop_on(&postgres.create_database(), &[]).await;
    server.terminate().await;
    set_standbys(&postgres, "absent").await;
    let log = server.data_dir().with_file_name("log");
    let starting = tokio::spawn(async move {
        server.restart().await;
        server
    });
    eventually("the cause in the log", async || {
        let text = fs::read_to_string(&log).expect("the server has a log");
        let cause = "cannot send the first heartbeat: commits do not complete; is a synchronous standby connected?";
        if text.contains(cause) { Ok(()) } else { Err(text) }
    })
    .await;
    set_standbys(&postgres, "").await;
    let server = starting.await.expect("the same process serves");
    Client::connect(server.endpoint()).await.put("key", "1").await;
}
