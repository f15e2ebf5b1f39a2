//! Archives in a database that several instances share, which may run different versions or have different settings.

use sqlx::{Connection as _, PgConnection, Row as _};

use super::*;

async fn number(connection: &mut PgConnection, sql: &'static str) -> Option<i64> {
    sqlx::query(sql).fetch_one(connection).await.expect("a row").get(0)
}

const FIRST: &str = "SELECT max(value) FROM meta WHERE name = 'archive_first'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn rows_deleted_by_instances_without_an_archive_are_not_missed() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let server = Server::orlop_on(&datastore, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    for number in 0..10 {
        put(&mut client, &mut model, "a", &number.to_string()).await;
    }
    compact(&mut client, 5).await;
    let mut connection = PgConnection::connect(&datastore).await.expect("the database exists");
    // An instance that read the log before the compaction begins the archive.
    sqlx::query("SELECT orlop_begin_archive(1)").execute(&mut connection).await.expect("a call");
    assert_eq!(number(&mut connection, FIRST).await, Some(5));
    // An instance of an earlier version deletes rows with the function that it knows.
    let purge = "SELECT orlop_purge(orlop_server(), 4, ARRAY[4]::bigint[], '{}', '{}')::int::bigint";
    assert_eq!(number(&mut connection, purge).await, Some(1));
    assert_eq!(number(&mut connection, FIRST).await, Some(5), "the rows were not missing");
    sqlx::query("UPDATE meta SET value = 8 WHERE name = 'compact_revision'")
        .execute(&mut connection)
        .await
        .expect("set");
    let purge = "SELECT orlop_purge(orlop_server(), 8, ARRAY[6, 7]::bigint[], '{}', '{}')::int::bigint";
    assert_eq!(number(&mut connection, purge).await, Some(1));
    assert_eq!(number(&mut connection, FIRST).await, Some(8));
    // Another server may lack the copies.
    let finish = "SELECT orlop_finish_copy(orlop_server() - 1, 8)::int::bigint";
    assert_eq!(number(&mut connection, finish).await, Some(0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pruning_ends_if_the_bytes_are_wrong() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let _server = Server::orlop_on(&datastore, &KEEP).await;
    let mut connection = PgConnection::connect(&datastore).await.expect("the database exists");
    sqlx::query("UPDATE meta SET value = 1000 WHERE name = 'archive_bytes'")
        .execute(&mut connection)
        .await
        .expect("set");
    let prune = "SELECT orlop_prune_archive(1, 10, 500)::int::bigint";
    assert_eq!(number(&mut connection, prune).await, Some(0));
}
