//! The network loses one of the connections to the database: nothing arrives on it, and nothing closes it.

use std::time::{Duration, Instant};

use orlop_wire::proto::client::etcdserverpb::{LeaseGrantRequest, PutRequest};
use tokio::time::sleep;

use super::{port_of, server_behind_link};
use crate::{
    instances::keep_alive,
    support::{Client, Postgres, Server, database_name, eventually, get, put},
};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn linearizable_reads_wait_for_another_connection() {
    const POSITION: &str = "SELECT (SELECT coalesce(max(id)%";
    let Some(postgres) = Postgres::shared().await else { return };
    let (link, server, datastore) = server_behind_link(postgres, &[]).await;
    let database = database_name(&datastore);
    let client = Client::connect(server.endpoint()).await;
    client.clone().kv.range(get("key")).await.expect("a read");
    let first = port_of(postgres, database, POSITION).await;
    link.lose(first);
    eventually("another connection", async || {
        // It would fail after 7 s.
        client.clone().kv.range(get("key")).await.expect("a read");
        let newest = port_of(postgres, database, POSITION).await;
        if newest == first { Err(first) } else { Ok(()) }
    })
    .await;
}

/// As if a firewall had lost its state. The other instance would expire the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_wait_for_another_connection() {
    /// Less than the time after which an instance abandons statements.
    const TTL: i64 = 9;
    let Some(postgres) = Postgres::shared().await else { return };
    let (link, server, datastore) = server_behind_link(postgres, &["--name", "one"]).await;
    let database = database_name(&datastore);
    let other = Server::orlop_on(&datastore, &["--name", "other"]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: TTL, id: 1 }).await.expect("a grant");
    client.kv.put(PutRequest { lease: 1, ..put("key", "value") }).await.expect("a put");
    assert_eq!(keep_alive(&mut client, 1).await, TTL);
    let ports = format!("SELECT client_port FROM pg_stat_activity WHERE datname = '{database}' AND client_port > 0");
    for port in postgres.psql("postgres", &ports).lines() {
        link.lose(port.parse().expect("a port"));
    }
    let lost = Instant::now();
    while lost.elapsed() < Duration::from_secs(2 * TTL as u64) {
        sleep(Duration::from_secs(TTL as u64 / 3)).await;
        // It would fail after 7 s.
        assert_eq!(keep_alive(&mut client, 1).await, TTL);
    }
    let found = Client::connect(other.endpoint()).await.kv.range(get("key")).await.expect("a read");
    assert_eq!(found.into_inner().count, 1, "the lease has not ended");
}
