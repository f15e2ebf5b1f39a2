//! Changes of leases by one of two instances, as the other sees them, and what reading them costs.

use orlop_wire::proto::client::etcdserverpb::{
    LeaseGrantRequest, LeaseLeasesRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest, PutRequest,
};
use sqlx::{Connection as _, PgConnection};
use tonic::Code;

use super::{instances, value_at};
use crate::support::{Client, Postgres, Server, eventually, get, put};

async fn grant(client: &mut Client, id: i64, ttl: i64) {
    client.lease.lease_grant(LeaseGrantRequest { ttl, id }).await.expect("a grant");
}

async fn revoke(client: &mut Client, id: i64) {
    client.lease.lease_revoke(LeaseRevokeRequest { id }).await.expect("a revocation");
}

/// Returns the ids of all leases in ascending order.
async fn ids(client: &mut Client) -> Vec<i64> {
    let leases = client.lease.lease_leases(LeaseLeasesRequest {}).await.expect("a list").into_inner().leases;
    let mut ids: Vec<i64> = leases.iter().map(|lease| lease.id).collect();
    ids.sort_unstable();
    ids
}

/// Returns the granted TTL of a lease, 0 if it does not exist.
async fn granted_ttl(client: &mut Client, id: i64) -> i64 {
    let request = LeaseTimeToLiveRequest { id, keys: false };
    client.lease.lease_time_to_live(request).await.expect("a response").into_inner().granted_ttl
}

async fn connection(datastore: &str) -> PgConnection {
    PgConnection::connect(datastore).await.expect("a connection")
}

/// The other instance is paused during the changes. In the second and third case it misses more of them than are recorded.
#[tokio::test]
async fn changes_of_leases_reach_an_instance_that_was_paused() {
    const FORGOTTEN: [(&str, &str); 3] = [
        ("those that it has applied", "DELETE FROM lease_change WHERE epoch <= $1"),
        ("the first that it lacks", "DELETE FROM lease_change WHERE epoch <= $1 + 1"),
        ("all", "DELETE FROM lease_change WHERE epoch <= $1 + 1000"),
    ];
    for (forgotten, sql) in FORGOTTEN {
        let Some([(one, mut a), (two, mut b)]) = instances().await else { return };
        let datastore = one.datastore().expect("a database");
        let mut database = connection(datastore).await;
        for (id, ttl) in [(1, 600), (2, 600), (3, 600), (4, 2)] {
            grant(&mut a, id, ttl).await;
        }
        b.kv.put(PutRequest { lease: 2, ..put("k", "1") }).await.expect("a put");
        two.pause();
        let epoch = sqlx::query_scalar("SELECT value FROM meta WHERE name = 'epoch'").fetch_one(&mut database).await;
        let epoch: i64 = epoch.expect("the epoch is a fact");
        revoke(&mut a, 2).await;
        revoke(&mut a, 3).await;
        grant(&mut a, 3, 700).await;
        grant(&mut a, 5, 800).await;
        eventually("the expiry of lease 4", async || {
            let left = sqlx::query_scalar("SELECT id FROM lease ORDER BY id");
            let left: Vec<i64> = left.fetch_all(&mut connection(datastore).await).await.expect("leases");
            if left == [1, 3, 5] { Ok(()) } else { Err(left) }
        })
        .await;
        sqlx::query(sql).bind(epoch).execute(&mut database).await.expect("records can be deleted");

        two.resume();
        assert_eq!(ids(&mut b).await, [1, 3, 5], "forgotten: {forgotten}");
        for (id, ttl) in [(1, 600), (2, 0), (3, 700), (4, 0), (5, 800)] {
            assert_eq!(granted_ttl(&mut b, id).await, ttl, "lease {id}, forgotten: {forgotten}");
        }
        assert_eq!(value_at(&mut b, get("k")).await, None, "the key of lease 2, forgotten: {forgotten}");
        b.kv.put(PutRequest { lease: 5, ..put("k", "2") }).await.expect("a put");
        let refused = b.kv.put(PutRequest { lease: 2, ..put("k", "3") }).await.expect_err("the lease has ended");
        assert_eq!(refused.code(), Code::NotFound, "forgotten: {forgotten}");
    }
}

/// The other instance reads each lease that is granted or revoked, and not the 20,000 that exist.
#[tokio::test]
async fn change_of_a_lease_costs_no_read_of_the_others() {
    const LEASES: i64 = 20_000;
    const ADD_LEASES: &str = "INSERT INTO lease (id, ttl, deadline) \
        SELECT id, 600, clock_timestamp() + interval '600 s' FROM generate_series(1, $1) AS id";
    const SESSIONS_AND_READS: &str = "SELECT (SELECT count(*) FROM pg_stat_activity \
            WHERE application_name = 'orlop' AND datname = current_database()), \
        (SELECT (seq_tup_read + idx_tup_fetch)::bigint FROM pg_stat_user_tables WHERE relname = 'lease')";
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let mut one = Server::orlop_on(&datastore, &["--name", "a"]).await;
    one.terminate().await;
    let added = sqlx::query(ADD_LEASES).bind(LEASES).execute(&mut connection(&datastore).await).await;
    added.expect("leases can be added");
    one.restart().await;
    let mut two = Server::orlop_on(&datastore, &["--name", "b"]).await;
    let (mut a, mut b) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    for id in LEASES + 1..=LEASES + 100 {
        grant(&mut a, id, 600).await;
        assert_eq!(granted_ttl(&mut b, id).await, 600, "lease {id} was granted");
        revoke(&mut a, id).await;
        assert_eq!(granted_ttl(&mut b, id).await, 0, "lease {id} was revoked");
    }
    two.terminate().await;
    one.terminate().await;
    // A session reports its reads when it ends. Each instance reads all leases a few times at its start and its stop.
    let reads = eventually("the number of reads", async || {
        let found = sqlx::query_as(SESSIONS_AND_READS).fetch_one(&mut connection(&datastore).await).await;
        let (sessions, reads): (i64, i64) = found.expect("two numbers");
        if sessions == 0 && reads >= 2 * LEASES { Ok(reads) } else { Err((sessions, reads)) }
    })
    .await;
    assert!(reads < 50 * LEASES, "{reads} reads of rows");
}

#[tokio::test]
async fn changes_of_the_last_10000_epochs_are_kept() {
    const NOTE: &str = "SELECT orlop_note_leases(epoch, '{}') FROM generate_series(1000001, 1013000) AS epoch";
    let Some([(one, _)]) = instances().await else { return };
    let mut database = connection(one.datastore().expect("a database")).await;
    sqlx::query(NOTE).execute(&mut database).await.expect("the calls succeed");
    let kept = sqlx::query_as("SELECT min(epoch), count(*) FROM lease_change").fetch_one(&mut database).await;
    let kept: (i64, i64) = kept.expect("two numbers");
    assert_eq!(kept, (1_003_001, 10_000));
}
