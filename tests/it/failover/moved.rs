//! The address of the database moves from a primary, which still answers, to its successor.

use crate::support::{Client, Cluster, Link, Replication, Server, database_name, eventually, get, put};

/// Only the run of the server tells that it is another one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn former_primary_that_hides_its_timeline_is_left() {
    let Some(cluster) = Cluster::start(Replication::Asynchronous).await else { return };
    let former = &cluster.primary().postgres;
    let address = Link::to(former.port()).await;
    let datastore = former.create_database();
    let database = database_name(&datastore);
    former.psql(database, "REVOKE EXECUTE ON FUNCTION pg_control_system, pg_walfile_name FROM PUBLIC");
    let server = Server::orlop_on(&address.endpoint(&datastore), &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("before", "1").await;
    let standby = &cluster.nodes()[cluster.best_standby()].postgres;
    let rows = format!("SELECT count(*) FROM {database}.kv_log");
    eventually("the write on the standby", async || {
        let found = standby.psql(database, &rows);
        if found == "1" { Ok(()) } else { Err(found) }
    })
    .await;

    cluster.promote(cluster.best_standby());
    address.set_target(cluster.primary().postgres.port());
    let successor = &cluster.primary().postgres;
    let beat = format!("SELECT max(beat) FROM {database}.member");
    let last = successor.psql(database, &beat);
    eventually("a heartbeat at the successor", async || {
        let found = successor.psql(database, &beat);
        if found == last { Err(found) } else { Ok(()) }
    })
    .await;
    eventually("a write", async || client.clone().kv.put(put("after", "1")).await).await;
    assert_eq!(successor.psql(database, &rows), "2");
    assert_eq!(former.psql(database, &rows), "1");
    assert_eq!(client.kv.range(get("after")).await.expect("a linearizable read").into_inner().count, 1);
}
