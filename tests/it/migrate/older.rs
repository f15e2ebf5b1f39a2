//! A database with the schema of the release 0.2.0, which may still use it, is refused and not migrated. A server migrates
//! it and logs that; an instance of the release that still runs can then no longer write.

use std::fs;

use sqlx::{
    ConnectOptions as _, Connection as _, PgConnection, SqlStr, SqliteConnection,
    migrate::{Migration, MigrationType, Migrator},
    sqlite::{SqliteConnectOptions, SqliteJournalMode},
};
use tempfile::TempDir;

use super::Destination;
use crate::support::{Backend, Postgres, Server, database_name, on_both_backends};

/// The schema of the release 0.2.0.
const FIRST_MIGRATION: &str = include_str!("../../../crates/sql/migrations/sqlite/0001_log.sql");
const SCHEMA: &str = "SELECT max(version) FROM _sqlx_migrations";

/// Creates an empty database with the first schema.
async fn of_the_first_schema(backend: Backend) -> Option<Destination> {
    let home = TempDir::new().expect("a folder");
    let datastore = match backend {
        Backend::Sqlite => {
            let file = home.path().join("orlop.db");
            let options = SqliteConnectOptions::new().filename(&file).create_if_missing(true);
            let mut database = options.journal_mode(SqliteJournalMode::Wal).connect().await.expect("a new file");
            let sql = SqlStr::from_static(FIRST_MIGRATION);
            let first = Migration::new(1, "log".into(), MigrationType::Simple, sql, false);
            Migrator::with_migrations(vec![first]).run(&mut database).await.expect("the migration succeeds");
            database.close().await.expect("the connection closes");
            format!("sqlite://{}", file.display())
        }
        Backend::Postgres => Postgres::shared().await?.create_database_of_the_first_schema().await,
    };
    Some(Destination { datastore, home })
}

/// Adds the row of a put.
async fn add_row(backend: Backend, datastore: &str) {
    match backend {
        Backend::Sqlite => {
            let mut database = SqliteConnection::connect(datastore).await.expect("a file");
            let insert = sqlx::raw_sql("INSERT INTO kv_log VALUES (2, x'61', x'76', 0, 1, 2, 0, 0)");
            insert.execute(&mut database).await.expect("a row");
            database.close().await.expect("the connection closes");
        }
        Backend::Postgres => {
            let mut database = PgConnection::connect(datastore).await.expect("a database");
            let insert = sqlx::raw_sql("INSERT INTO kv_log VALUES (2, 'a', 'v', 0, 1, 2, 0, false)");
            insert.execute(&mut database).await.expect("a row");
        }
    }
}

async fn schema(backend: Backend, datastore: &str) -> i64 {
    let found = match backend {
        Backend::Sqlite => {
            let mut database = SqliteConnection::connect(datastore).await.expect("a file");
            sqlx::query_scalar(SCHEMA).fetch_one(&mut database).await
        }
        Backend::Postgres => {
            let mut database = PgConnection::connect(datastore).await.expect("a database");
            sqlx::query_scalar(SCHEMA).fetch_one(&mut database).await
        }
    };
    found.expect("a version")
}

async fn database_of_an_older_version_is_refused_and_not_migrated(backend: Backend) {
    let source = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let Some(destination) = of_the_first_schema(backend).await else { return };
    add_row(backend, &destination.datastore).await;
    let because = ["contains other data", "it was written by an older version of Orlop; use an empty database"];
    destination.check_refused(&source, &because).await;
    assert_eq!(schema(backend, &destination.datastore).await, 1);
}

/// The version can be read when the transaction that a crash has interrupted is rolled back.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn interrupted_start_of_an_older_version_is_refused_and_not_migrated() {
    let source = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut destination = of_the_first_schema(Backend::Sqlite).await.expect("SQLite is built in");
    add_row(Backend::Sqlite, &destination.datastore).await;
    let mut database = SqliteConnection::connect(&destination.datastore).await.expect("a file");
    // With a small cache, SQLite syncs the journal and writes to the file before the transaction ends.
    const INTERRUPTED: &str = "PRAGMA journal_mode = DELETE; PRAGMA cache_size = 1; BEGIN; \
        CREATE TABLE more AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) \
        SELECT i, randomblob(1000) AS filler FROM n";
    sqlx::raw_sql(INTERRUPTED).execute(&mut database).await.expect("a transaction");
    let home = destination.home.path();
    for suffix in ["", "-journal"] {
        let copied = fs::copy(home.join(format!("orlop.db{suffix}")), home.join(format!("crashed.db{suffix}")));
        assert!(copied.is_ok_and(|bytes| bytes > 0), "{suffix}");
    }
    destination.datastore = format!("sqlite://{}", home.join("crashed.db").display());
    let because = ["contains other data", "it was written by an older version of Orlop; use an empty database"];
    destination.check_refused(&source, &because).await;
    assert_eq!(schema(Backend::Sqlite, &destination.datastore).await, 1);
}

/// A migration that was killed while it made the tables leaves such a database.
async fn empty_database_of_an_older_version_is_filled(backend: Backend) {
    let source = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let Some(destination) = of_the_first_schema(backend).await else { return };
    destination.copied(&source, &[]).await;
    assert!(schema(backend, &destination.datastore).await > 1);
}

/// The lines of a log about a migration of the schema.
fn migrations(log: &str) -> Vec<&str> {
    log.lines().filter(|line| line.contains("migrated the schema")).collect()
}

/// There is no way back but a snapshot of the older version, so the log says when that began.
async fn start_that_migrates_the_schema_logs_it(backend: Backend) {
    const FLAGS: [&str; 2] = ["--log-level", "info"];
    const MIGRATED: &str = "migrated the schema; older versions of Orlop can no longer open this database";
    let Some(destination) = of_the_first_schema(backend).await else { return };
    add_row(backend, &destination.datastore).await;
    let mut server = Server::orlop_on(&destination.datastore, &FLAGS).await;
    server.terminate().await;
    // It appends to the same log.
    server.restart().await;
    let log = server.log();
    let lines = migrations(&log);
    assert_eq!(lines.len(), 1, "{log}");
    assert!(["INFO", MIGRATED, "from=1 to=2"].iter().all(|part| lines[0].contains(part)), "{log}");
    let new = Server::orlop_with(backend, &FLAGS).await.expect("there is one already");
    assert!(migrations(&new.log()).is_empty(), "{}", new.log());
}

on_both_backends!(
    database_of_an_older_version_is_refused_and_not_migrated,
    empty_database_of_an_older_version_is_filled,
    start_that_migrates_the_schema_logs_it
);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_that_migrates_the_schema_beside_another_instance_warns_of_it() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database_of_the_first_schema().await;
    let name = database_name(&datastore);
    // An instance that is alive however long the start takes.
    let beat = "clock_timestamp() + interval '1 hour'";
    postgres.psql(name, &format!("INSERT INTO {name}.member VALUES (7, 'alice', '{{}}', 1, now(), {beat})"));
    let mut server = Server::orlop_on(&datastore, &[]).await;
    server.terminate().await;
    server.restart().await;
    let log = server.log();
    let lines = migrations(&log);
    assert_eq!(lines.len(), 1, "{log}");
    assert!(["WARN", "stop the instance", "alice"].iter().all(|part| lines[0].contains(part)), "{log}");
}

/// An instance of the release checks no rights of users, and records neither changes of leases nor copies of rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_of_the_first_release_cannot_write_after_the_migration() {
    // What the release calls, and the SQLSTATE after the migration. After 0A000 the release fails a write at once; after 42883, an
    // unknown function, it repeats an append for 7 seconds.
    const CALLS: [(&str, &str); 4] = [
        (
            "SELECT orlop_append(head, epoch, orlop_server(), ARRAY['a'::bytea], ARRAY['v'::bytea], '{0}', '{1}', \
                ARRAY[head + 1], '{0}', '{false}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{}', '{7}', '{60}', \
                '{}', '{}', NULL, 1) \
            FROM (SELECT coalesce(max(id), 1) AS head FROM kv_log) l, \
                (SELECT value AS epoch FROM meta WHERE name = 'epoch') m",
            "0A000",
        ),
        (
            "SELECT orlop_alarm(head, epoch, orlop_server(), '', NULL, 1) \
            FROM (SELECT coalesce(max(id), 1) AS head FROM kv_log) l, \
                (SELECT value AS epoch FROM meta WHERE name = 'epoch') m",
            "0A000",
        ),
        ("SELECT orlop_purge(orlop_server(), 1, '{2}', '{}', '{}')", "42883"),
        ("SELECT orlop_beat(7, 'alice', '{}', 1)", "42883"),
    ];
    const STATE: &str = "SELECT concat_ws(' ', (SELECT json_agg(e) FROM kv_events e), (SELECT json_agg(l) FROM lease l), \
        (SELECT json_agg(f ORDER BY f.name) FROM meta f), (SELECT json_agg(m) FROM member m))";
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database_of_the_first_schema().await;
    // A session that was open before keeps its prepared statements.
    let mut older = PgConnection::connect(&datastore).await.expect("a database");
    for (call, _) in CALLS {
        sqlx::query(call).execute(&mut older).await.expect(call);
    }
    let mut server = Server::orlop_on(&datastore, &[]).await;
    // A server that runs changes facts and members.
    server.terminate().await;
    let before: String = sqlx::query_scalar(STATE).fetch_one(&mut older).await.expect("a state");
    assert!(before.starts_with(r#"[{"id":2,"sub":0,"key":"\\x61","#), "the release could append: {before}");
    for (call, sqlstate) in CALLS {
        let error = sqlx::query(call).execute(&mut older).await.expect_err(call);
        let refusal = error.as_database_error().expect("an answer of Postgres");
        assert_eq!(refusal.code().as_deref(), Some(sqlstate), "{call}: {refusal}");
    }
    let after: String = sqlx::query_scalar(STATE).fetch_one(&mut older).await.expect("a state");
    assert_eq!(after, before);
}
