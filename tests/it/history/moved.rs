//! History on its way into another database: by a snapshot, and by a migration.

use std::path::Path;

use tempfile::TempDir;

use super::*;
use crate::support::{orlop, prints, run};

/// Starts a server with retention on a database that was filled, and which must be sound.
async fn started(datastore: &str) -> (Server, Client) {
    prints(&["check", "--datastore-endpoint", datastore]);
    let server = Server::orlop_on(datastore, &KEEP).await;
    let client = Client::connect(server.endpoint()).await;
    (server, client)
}

/// Writes and compacts, so that rows are archived.
async fn fill(client: &mut Client, model: &mut Model, random: &mut Random) {
    for _ in 0..4 {
        for _ in 0..random.between(30, 80) {
            write(client, model, random).await;
        }
        compact(client, random.between(model.head() - 10, model.head())).await;
    }
    for _ in 0..10 {
        write(client, model, random).await;
    }
}

/// The whole history: rows as they are stored, and all times.
async fn whole(client: &mut Client, model: &Model) -> (HistoryStateResponse, Vec<(ModelChange, i64)>) {
    let all = changes_of((b"\0", b"\0"), 1, model.head());
    let (found, times) = changes(client, all).await.expect("changes");
    // The time of the question differs.
    let state = HistoryStateResponse { now_unix_ms: 0, ..state(client).await };
    (state, found.into_iter().zip(times).collect())
}

async fn snapshot_takes_the_history_along(backend: Backend) {
    let Some(source) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    let (mut model, mut random) = (Model::new(), Random::new(31));
    fill(&mut client, &mut model, &mut random).await;
    put_until_recorded(&mut client, &mut model).await;
    let of_source = whole(&mut client, &model).await;
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("with.db");
    let file = file.to_str().expect("a path in UTF-8");
    prints(&["snapshot", "save", "--history", file, "--endpoints", source.endpoint()]);
    let status = prints(&["snapshot", "status", file, "--write-out", "json"]);
    let status: serde_json::Value = serde_json::from_str(&status).expect("JSON");
    assert_eq!(status["archivedRows"], of_source.0.archived_rows);

    for into in [Backend::Sqlite, Backend::Postgres] {
        let Some(datastore) = into.empty_database(home.path(), "restored.db").await else { return };
        prints(&["snapshot", "restore", file, "--datastore-endpoint", &datastore]);
        let (_server, mut client) = started(&datastore).await;
        assert_eq!(whole(&mut client, &model).await, of_source, "into {into:?}");
        compare(&mut client, &model, 1, &mut random).await;
        // It goes on from there.
        let mut model = model.clone();
        fill(&mut client, &mut model, &mut random).await;
        compare(&mut client, &model, 1, &mut random).await;
        assert!(state(&mut client).await.archived_rows > of_source.0.archived_rows);
        prints(&["check", "--datastore-endpoint", &datastore]);
    }
}

async fn snapshot_without_history_begins_at_the_compact_revision(backend: Backend) {
    let Some(source) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    let (mut model, mut random) = (Model::new(), Random::new(32));
    fill(&mut client, &mut model, &mut random).await;
    let compacted = state(&mut client).await.compact_revision;
    let home = TempDir::new().expect("a folder");
    let (plain, with) = (home.path().join("plain.db"), home.path().join("with.db"));
    let path = |file: &Path| file.to_str().expect("a path in UTF-8").to_owned();
    prints(&["snapshot", "save", &path(&plain), "--endpoints", source.endpoint()]);
    prints(&["snapshot", "save", "--history", &path(&with), "--endpoints", source.endpoint()]);
    let raised = ["--bump-revision", "1000", "--mark-compacted"];
    for (name, file, flags, first) in [
        ("plain", &plain, &[][..], compacted),
        // The rows between the compact revision and the raised one are dropped.
        ("raised", &with, &raised, model.head() + 1000),
    ] {
        let Some(datastore) = backend.empty_database(home.path(), name).await else { return };
        if backend == Backend::Postgres {
            // A server has begun an archive on the empty database. It is of no use for the restored store.
            let mut server = Server::orlop_on(&datastore, &KEEP).await;
            server.terminate().await;
        }
        prints(&[&["snapshot", "restore", &path(file), "--datastore-endpoint", &datastore], flags].concat());
        let (_server, mut client) = started(&datastore).await;
        let state = state(&mut client).await;
        assert_eq!((state.first_revision, state.archived_rows), (first, 0), "{name}");
    }
}

async fn migration_takes_the_history_along(backend: Backend) {
    let other = if backend == Backend::Sqlite { Backend::Postgres } else { Backend::Sqlite };
    let Some(source) = Server::orlop_with(other, &KEEP).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    let (mut model, mut random) = (Model::new(), Random::new(33));
    let home = TempDir::new().expect("a folder");
    let Some(datastore) = backend.empty_database(home.path(), "copy.db").await else { return };
    let migrate = ["migrate", "--from", source.endpoint(), "--once", "--datastore-endpoint", &datastore];
    fill(&mut client, &mut model, &mut random).await;
    prints(&[&migrate[..], &KEEP].concat());
    // The second migration follows what was written and compacted after the first one.
    let copied = model.head();
    for _ in 0..50 {
        write(&mut client, &mut model, &mut random).await;
    }
    compact(&mut client, copied).await;
    prints(&[&migrate[..], &KEEP].concat());
    let of_source = state(&mut client).await;
    let (_server, mut client) = started(&datastore).await;
    compare(&mut client, &model, 1, &mut random).await;
    let of_copy = state(&mut client).await;
    assert_eq!((of_copy.first_revision, of_copy.archived_rows), (1, of_source.archived_rows));
    assert_eq!(of_copy.first_moment, of_source.first_moment);
}

/// As if a migration had been killed after it had recorded a compaction, and before it deleted rows.
async fn interrupted_compaction_of_a_copy_is_finished(backend: Backend) {
    let other = if backend == Backend::Sqlite { Backend::Postgres } else { Backend::Sqlite };
    let Some(source) = Server::orlop_with(other, &KEEP).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    let mut model = Model::new();
    let home = TempDir::new().expect("a folder");
    let Some(datastore) = backend.empty_database(home.path(), "copy.db").await else { return };
    let migrate = ["migrate", "--from", source.endpoint(), "--once", "--datastore-endpoint", &datastore];
    let migrate = [&migrate[..], &KEEP].concat();
    for (key, value) in [("a", "1"), ("a", "2"), ("b", "1")] {
        put(&mut client, &mut model, key, value).await;
    }
    prints(&migrate);
    let interrupted = "INSERT INTO meta (name, value) VALUES ('compact_revision', 3) \
        ON CONFLICT (name) DO UPDATE SET value = 3";
    Place::at(&datastore).execute(interrupted).await;
    compact(&mut client, 3).await;
    client.kv.delete_range(delete("a")).await.expect("a delete");
    model.write(&[("a", None)]);
    for value in ["2", "3"] {
        put(&mut client, &mut model, "b", value).await;
    }
    prints(&migrate);
    // It removes the delete.
    compact(&mut client, 6).await;
    prints(&migrate);
    let (_server, mut client) = started(&datastore).await;
    let found = client.kv.range(get("a")).await.expect("a range");
    assert_eq!(found.into_inner().count, 0, "a deleted key");
    compare(&mut client, &model, 1, &mut Random::new(36)).await;
    let of_source = state(&mut Client::connect(source.endpoint()).await).await;
    let of_copy = state(&mut client).await;
    assert_eq!((of_copy.first_revision, of_copy.archived_rows), (1, of_source.archived_rows));
}

/// A database is opened before it is known whose it is.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn refused_migration_leaves_no_archive_beside_another_store() {
    let mut servers = Vec::new();
    for key in ["a", "b"] {
        let server = Server::orlop_with(Backend::Sqlite, &[]).await.expect("SQLite is built in");
        put(&mut Client::connect(server.endpoint()).await, &mut Model::new(), key, "value").await;
        servers.push(server);
    }
    let (source, mut other) = (servers.remove(0), servers.remove(0));
    other.terminate().await;
    let datastore = format!("sqlite://{}", other.data_dir().join("orlop.db").display());
    let migrate = ["migrate", "--from", source.endpoint(), "--once", "--datastore-endpoint", &datastore];
    let refused = run(&mut orlop([&migrate[..], &KEEP].concat()));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("contains other data"), "{text}");
    assert!(!other.data_dir().join("orlop.db-archive").exists());
}

/// A kill between the last two steps of a restore leaves it, or somebody who has moved the database alone.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn archive_without_a_database_is_not_used() {
    const ANOTHER: &str = "another history";
    let source = Server::orlop_with(Backend::Sqlite, &KEEP).await.expect("SQLite is built in");
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    let file = file.to_str().expect("a path in UTF-8");
    prints(&["snapshot", "save", "--history", file, "--endpoints", source.endpoint()]);
    let restore = ["snapshot", "restore", file];
    let migrate = ["migrate", "--from", source.endpoint(), "--once"];
    let archive = home.path().join("other.db-archive");
    std::fs::write(&archive, ANOTHER).expect("a file");
    let datastore = format!("sqlite://{}", home.path().join("other.db").display());
    let refused = run(&mut orlop([&restore[..], &["--datastore-endpoint", &datastore]].concat()));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("other.db-archive exists already"), "{text}");
    assert_eq!(std::fs::read_to_string(&archive).expect("it stays"), ANOTHER);

    // As a restore leaves them that is killed between its last two steps.
    for (name, command) in [("restored.db", &restore[..]), ("copy.db", &migrate[..])] {
        let beside = |suffix: &str| home.path().join(format!("{name}{suffix}"));
        let unfinished = [".restoring", "-archive.restoring"].map(beside);
        for left in [&beside("-archive"), &unfinished[0], &unfinished[1]] {
            std::fs::write(left, ANOTHER).expect("a file");
        }
        let datastore = format!("sqlite://{}", beside("").display());
        prints(&[command, &["--datastore-endpoint", &datastore]].concat());
        let aside = std::fs::read_to_string(beside("-archive.unused")).expect("it is set aside");
        assert_eq!(aside, ANOTHER, "{name}");
        assert!(!unfinished.iter().any(|file| file.exists()), "{name}");

        // Somebody starts a server instead of restoring again.
        unfinished.iter().for_each(|file| std::fs::write(file, ANOTHER).expect("a file"));
        drop(started(&datastore).await);
        assert!(!unfinished.iter().any(|file| file.exists()), "a start on {name}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn saving_without_a_history_is_noted() {
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("saved.db");
    for (flags, notice) in
        [(&KEEP[..], ""), (&[], "orlop: saved without history, because the server keeps none (history-retention)\n")]
    {
        let server = Server::orlop_with(Backend::Sqlite, flags).await.expect("SQLite is built in");
        let file = file.to_str().expect("a path in UTF-8");
        let saved = run(&mut orlop(["snapshot", "save", "--history", file, "--endpoints", server.endpoint()]));
        assert_eq!(String::from_utf8_lossy(&saved.stderr), notice, "{flags:?}");
        assert!(saved.status.success() && String::from_utf8_lossy(&saved.stdout) == format!("{file}\n"), "{saved:?}");
    }
}

async fn history_of_etcd_is_refused(backend: Backend) {
    let Some(etcd) = Server::etcd().await else { return };
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("none.db");
    let file = file.to_str().expect("a path in UTF-8");
    let output = run(&mut orlop(["snapshot", "save", "--history", file, "--endpoints", etcd.endpoint()]));
    let text = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("the server does not send it: it is etcd or an older version of Orlop"), "{text}");
    // A migration begins the history at the copy.
    let Some(datastore) = backend.empty_database(home.path(), "copy.db").await else { return };
    let mut client = Client::connect(etcd.endpoint()).await;
    let mut model = Model::new();
    for number in 0..10 {
        put(&mut client, &mut model, "a", &number.to_string()).await;
    }
    compact(&mut client, 5).await;
    let migrate = ["migrate", "--from", etcd.endpoint(), "--once", "--datastore-endpoint", &datastore];
    prints(&[&migrate[..], &KEEP].concat());
    compact(&mut client, 8).await;
    prints(&[&migrate[..], &KEEP].concat());
    let (_server, mut client) = started(&datastore).await;
    let state = state(&mut client).await;
    assert_eq!((state.first_revision, state.compact_revision, state.archived_rows), (5, 8, 3));
    compare(&mut client, &model, 5, &mut Random::new(34)).await;
}

on_both_backends!(
    snapshot_takes_the_history_along,
    snapshot_without_history_begins_at_the_compact_revision,
    migration_takes_the_history_along,
    interrupted_compaction_of_a_copy_is_finished,
    history_of_etcd_is_refused,
);
