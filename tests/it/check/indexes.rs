//! Primary keys and other indexes that a restore into Postgres did not create.

use super::*;
use crate::support::database_name;

/// The text without each index, and the statement that drops it.
const INDEXES: &str = "SELECT CASE WHEN i.indisprimary THEN format('%s has no primary key', t.relname) \
        ELSE format('%s has no index %s', t.relname, n.relname) END, \
        CASE WHEN i.indisprimary THEN format('ALTER TABLE %I DROP CONSTRAINT %I', t.relname, n.relname) \
        ELSE format('DROP INDEX %I', n.relname) END \
    FROM pg_index i JOIN pg_class t ON t.oid = i.indrelid JOIN pg_class n ON n.oid = i.indexrelid \
    WHERE t.relnamespace = current_schema()::regnamespace";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn each_index_that_a_table_lacks_is_reported() {
    let Some(postgres) = Postgres::shared().await else { return };
    let place = Place(postgres.create_database());
    drop(Server::orlop_on(&place.0, &[]).await);
    place.assert_sound();
    let database = database_name(&place.0);
    let indexes = postgres.psql(database, &format!("SET search_path = {database}; {INDEXES}"));
    let indexes = indexes.lines().map(|line| line.split_once('|').expect("two columns"));
    let (texts, drops): (Vec<&str>, Vec<&str>) = indexes.unzip();
    assert!(texts.contains(&"kv_log has no primary key"), "{texts:?}");
    place.execute(&drops.join("; ")).await;
    let report = |text: &&str| format!("database: {text}: a restore into this database did not end, or failed");
    let (mut found, mut expected) = (place.violations(), texts.iter().map(report).collect::<Vec<_>>());
    found.sort();
    expected.sort();
    assert_eq!(found, expected);
}

/// It has no effect on the requests of etcd's API.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn store_without_an_index_of_the_history_is_served() {
    let Some(postgres) = Postgres::shared().await else { return };
    let place = Place(postgres.create_database());
    drop(Server::orlop_on(&place.0, &[]).await);
    place.execute("DROP INDEX kv_archive_end").await;
    drop(Server::orlop_on(&place.0, &[]).await);
    assert_eq!(place.check(&[]).status.code(), Some(1));
}
