//! Clocks that are set, and that differ from one machine to another.

use std::time::UNIX_EPOCH;

use tempfile::TempDir;

use super::{
    commands::{at, command},
    *,
};
use crate::support::prints;

const HOUR_MS: i64 = 3_600_000;

/// Returns the time of a change of `a` as the answer has it, and whether the change may be older.
async fn stated_time(client: &mut Client, revision: i64) -> (i64, bool) {
    let request = changes_of((b"a", b""), revision, revision);
    let mut stream = client.history.changes(request).await.expect("changes").into_inner();
    let page = stream.message().await.expect("changes").expect("a change");
    (page.changes[0].unix_ms, page.changes[0].time_is_latest)
}

/// Otherwise no time would be known until the wrong one has come, and no row would be deleted because of its age.
async fn clock_that_was_set_back_is_believed(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    let begin = put_until_recorded(&mut client, &mut model).await;
    // As if the clock had been ten years ahead.
    Place::archive_of(&server).execute("UPDATE kv_time SET at = at + 315360000000").await;
    let time = put_until_recorded(&mut client, &mut model).await;
    assert!((begin..begin + 600_000).contains(&time), "{time}, expected a time soon after {begin}");
    let request = HistoryMomentRequest { unix_ms: time + 1_000 };
    let moment = client.history.moment(request).await.expect("a moment").into_inner().moment;
    assert_eq!(moment.map(|moment| moment.revision), Some(model.head()));
}

/// Otherwise a time that the clock reaches again would be that of a revision from before the clock was set back.
async fn times_of_a_clock_that_was_ahead_are_uncertain(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    let begin = put_until_recorded(&mut client, &mut model).await;
    let before = model.head();
    // As if the clock had been an hour ahead.
    Place::archive_of(&server).execute("UPDATE kv_time SET at = at + 3600000").await;
    let time = put_until_recorded(&mut client, &mut model).await;
    assert!((begin..begin + HOUR_MS / 6).contains(&time), "{time}, expected a time soon after {begin}");
    assert_eq!(revision_at(&mut client, begin + HOUR_MS).await, (Some(before), true));
    assert_eq!(revision_at(&mut client, begin - 1).await, (None, false));
    assert_eq!(revision_at(&mut client, time).await, (Some(model.head()), false));
    // The revisions before were written at an unknown time before that of the wrong clock.
    assert_eq!(stated_time(&mut client, before).await, (begin + HOUR_MS, true));
}

/// A rewind to a time in the hour before would do nothing, or bring back a wrong state.
async fn times_of_a_clock_that_was_behind_are_uncertain(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let archive = Place::archive_of(&server);
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    let begin = put_until_recorded(&mut client, &mut model).await;
    let before = model.head();
    // As if the clock were an hour behind from now on, and then set right again.
    archive.execute("UPDATE kv_time SET at = at + 3600000").await;
    let during = put_until_recorded(&mut client, &mut model).await - HOUR_MS;
    let behind = model.head();
    archive.execute("UPDATE kv_time SET at = at - 3600000").await;
    let end = put_until_recorded(&mut client, &mut model).await;
    assert_eq!(revision_at(&mut client, during - HOUR_MS).await, (None, false));
    assert_eq!(revision_at(&mut client, during).await, (Some(behind), true));
    assert_eq!(revision_at(&mut client, begin).await, (Some(before), true));
    assert_eq!(revision_at(&mut client, end).await, (Some(model.head()), false));
    assert_eq!(stated_time(&mut client, before).await, (begin, true));
    // It was written after the recorded time.
    assert_eq!(stated_time(&mut client, behind).await, (0, false));
}

/// The record before the clock was behind may be deleted alone, because the store keeps a limited number of bytes.
async fn times_of_a_clock_that_was_behind_stay_uncertain_when_older_ones_are_deleted(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let archive = Place::archive_of(&server);
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    put_until_recorded(&mut client, &mut model).await;
    archive.execute("UPDATE kv_time SET at = at + 3600000").await;
    let during = put_until_recorded(&mut client, &mut model).await - HOUR_MS;
    let behind = model.head();
    archive.execute("UPDATE kv_time SET at = at - 3600000").await;
    let end = put_until_recorded(&mut client, &mut model).await;
    assert_eq!(revision_at(&mut client, during).await, (Some(behind), true));
    let name = if backend == Backend::Sqlite { "first_revision" } else { "archive_first" };
    archive.execute(&format!("UPDATE meta SET value = {behind} WHERE name = '{name}'")).await;
    let found = eventually("the deletion of times", async || match revision_at(&mut client.clone(), during).await {
        found if found == (Some(behind), true) => Err(found),
        found => Ok(found),
    });
    assert_eq!(found.await, (None, false));
    assert_eq!(revision_at(&mut client, end).await, (Some(model.head()), false));
}

async fn snapshot_takes_contradictions_of_times_along(backend: Backend) {
    let Some(source) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    let mut model = Model::new();
    let begin = put_until_recorded(&mut client, &mut model).await;
    let before = model.head();
    // As if the clock had been an hour ahead.
    Place::archive_of(&source).execute("UPDATE kv_time SET at = at + 3600000").await;
    let end = put_until_recorded(&mut client, &mut model).await;
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("with.db");
    let file = file.to_str().expect("a path in UTF-8");
    prints(&["snapshot", "save", "--history", file, "--endpoints", source.endpoint()]);
    for into in [Backend::Sqlite, Backend::Postgres] {
        let Some(datastore) = into.empty_database(home.path(), "restored.db").await else { return };
        prints(&["snapshot", "restore", file, "--datastore-endpoint", &datastore]);
        let server = Server::orlop_on(&datastore, &KEEP).await;
        let mut client = Client::connect(server.endpoint()).await;
        assert_eq!(revision_at(&mut client, begin + HOUR_MS).await, (Some(before), true), "into {into:?}");
        assert_eq!(revision_at(&mut client, end).await, (Some(model.head()), false), "into {into:?}");
    }
}

/// Points are times of the clock that records them, also if the clock of the command's machine differs.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn commands_use_the_clock_of_the_database() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = datastore.rsplit_once('/').expect("the endpoint has a database").1;
    // The clock of the database is an hour ahead.
    let ahead = format!(
        "CREATE FUNCTION {database}.clock_timestamp() RETURNS timestamptz LANGUAGE sql VOLATILE AS \
         'SELECT pg_catalog.clock_timestamp() + interval ''1 hour'''; \
         ALTER ROLE {database} SET search_path = {database}, pg_catalog"
    );
    postgres.psql(database, &ahead);
    let server = Server::orlop_on(&datastore, &KEEP).await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    let recorded = put_until_recorded(&mut client, &mut model).await;
    let ahead_ms = state(&mut client).await.now_unix_ms - clock::unix_ms(clock::now());
    assert!((HOUR_MS - 60_000..HOUR_MS + 60_000).contains(&ahead_ms), "{ahead_ms}");
    let time = humantime::format_rfc3339_millis(UNIX_EPOCH + Duration::from_millis(recorded.cast_unsigned()));
    for point in ["1ms", &time.to_string()] {
        let (status, text, error) = at(&server, &["get", "a", "--at", point]).await;
        let found = format!("orlop: at revision {}, the newest one at ", model.head());
        assert!((status, &*text) == (0, "value\n") && error.starts_with(&found), "{point}: {text}{error}");
        let get = ["get", "a", "--at", point, "--datastore-endpoint", &datastore];
        let output = command(&get).output().await.expect("orlop starts");
        assert_eq!((output.status.code(), &*output.stdout), (Some(0), &b"value\n"[..]), "{point}: {output:?}");
    }
    let (status, text, error) = at(&server, &["rewind", "a", "--to", &time.to_string(), "--dry-run"]).await;
    assert_eq!((status, &*error), (0, ""));
    let until_second = &time.to_string()[..19];
    assert!(text.contains(&format!(", the newest one at {until_second}Z")), "{text}");
}

on_both_backends!(
    clock_that_was_set_back_is_believed,
    times_of_a_clock_that_was_ahead_are_uncertain,
    times_of_a_clock_that_was_behind_are_uncertain,
    times_of_a_clock_that_was_behind_stay_uncertain_when_older_ones_are_deleted,
    snapshot_takes_contradictions_of_times_along,
);
