//! Postgres crashes while its setting, or that of the role, makes commits asynchronous.

use super::put_with_retries;
use crate::support::{Client, Postgres, Server, database_name, eventually};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_stay_synchronous_when_the_server_is_reconfigured() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let client = Client::connect(server.endpoint()).await;
    put_with_retries(&client, "before").await;
    commit_asynchronously(&postgres).await;
    crash_loses_nothing(&postgres, &client).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commits_are_synchronous_if_those_of_the_role_are_not() {
    let Some(postgres) = Postgres::start().await else { return };
    commit_asynchronously(&postgres).await;
    let datastore = postgres.create_database();
    postgres.psql("postgres", &format!("ALTER ROLE {} SET synchronous_commit = off", database_name(&datastore)));
    let server = Server::orlop_on(&datastore, &[]).await;
    crash_loses_nothing(&postgres, &Client::connect(server.endpoint()).await).await;
}

/// Makes commits asynchronous, unless a session has another setting. The WAL writer is slow, so that a commit is flushed
/// only if it waits for that.
async fn commit_asynchronously(postgres: &Postgres) {
    for sql in ["ALTER SYSTEM SET synchronous_commit = off", "ALTER SYSTEM SET wal_writer_delay = '10s'"] {
        postgres.psql("postgres", sql);
    }
    postgres.psql("postgres", "SELECT pg_reload_conf()");
    eventually("the new setting", async || match postgres.psql("postgres", "SHOW synchronous_commit") {
        setting if setting == "off" => Ok(()),
        setting => Err(setting),
    })
    .await;
}

async fn crash_loses_nothing(postgres: &Postgres, client: &Client) {
    let mut head = 0;
    for _ in 0..20 {
        head = put_with_retries(client, "after").await;
    }
    postgres.crash();
    postgres.start_again().await;
    assert_eq!(put_with_retries(client, "later").await, head + 1);
}
