//! The network loses one of the connections to the database: nothing arrives on it, and nothing closes it.

use std::time::Duration;

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

/// The other instance would expire the lease.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn renewals_wait_for_another_connection() {
    const RENEWAL: &str = "SELECT id, ttl, secs_left%";
    /// Less than the time after which an instance abandons other statements.
    const TTL: i64 = 9;
    let Some(postgres) = Postgres::shared().await else { return };
    let (link, server, datastore) = server_behind_link(postgres, &["--name", "one"]).await;
    let database = database_name(&datastore);
    let other = Server::orlop_on(&datastore, &["--name", "other"]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: TTL, id: 1 }).await.expect("a grant");
    client.kv.put(PutRequest { lease: 1, ..put("key", "value") }).await.expect("a put");
    // So that the newest statement is not one of the other instance.
    assert_eq!(keep_alive(&mut client, 1).await, TTL);
    let renewing = tokio::spawn(async move {
        loop {
            // It would fail after 7 s. The pauses are as long as those of a client.
            assert_eq!(keep_alive(&mut client, 1).await, TTL);
            sleep(Duration::from_secs(TTL as u64 / 3)).await;
        }
    });
    let first = port_of(postgres, database, RENEWAL).await;
    link.lose(first);
    eventually("another connection", async || {
        assert!(!renewing.is_finished(), "the lease is renewed");
        let newest = port_of(postgres, database, RENEWAL).await;
        if newest == first { Err(first) } else { Ok(()) }
    })
    .await;
    let found = Client::connect(other.endpoint()).await.kv.range(get("key")).await.expect("a read");
    assert_eq!(found.into_inner().count, 1, "the lease has not ended");
    renewing.abort();
}
