//! The log goes back, or is replaced, while the same run of Postgres continues. A start while a log is being restored.

use std::{path::Path, process::Command, time::Duration};

use tokio::time::{sleep, timeout};

use crate::{
    start::check_refused,
    support::{Client, DEADLINE, Postgres, Server, database_name, eventually, get, text},
};

/// Runs a program of Postgres as the superuser.
fn run(postgres: &Postgres, program: &str, arguments: &[&str]) {
    let programs = Postgres::programs().expect("a server runs, so its programs are there");
    let output = Command::new(programs.join(program))
        .args(["-h", "127.0.0.1", "-p", &postgres.port().to_string(), "-U", "postgres"])
        .args(arguments)
        .output()
        .expect("the program can be started");
    assert!(output.status.success(), "{program}: {}", String::from_utf8_lossy(&output.stderr));
}

fn dump(postgres: &Postgres, database: &str, file: &Path) {
    run(postgres, "pg_dump", &["-Fc", "-f", text(file), database]);
}

/// Replaces a database by an empty one.
fn create_anew(postgres: &Postgres, database: &str) {
    postgres.psql("postgres", &format!("DROP DATABASE {database} WITH (FORCE)"));
    postgres.psql("postgres", &format!("CREATE DATABASE {database}"));
}

/// Replaces a database by its dump.
fn restore(postgres: &Postgres, database: &str, file: &Path) {
    create_anew(postgres, database);
    // No instance sees a part of it.
    run(postgres, "pg_restore", &["--single-transaction", "-d", database, text(file)]);
}

/// Writes revisions 2 to 5, lets `go_back` remove those from 3 on, and checks that the instance stops without serving
/// another read.
async fn check_stopped(go_back: impl Fn(&Postgres, &str, &Path)) {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    let mut server = Server::orlop_on(&datastore, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.put("kept", "value").await, 2);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("dump");
    dump(postgres, database, &file);
    for revision in 3..=5 {
        assert_eq!(client.put("lost", "value").await, revision);
    }
    go_back(postgres, database, &file);
    let reading = async {
        while server.runs() {
            client.kv.range(get("lost")).await.expect_err("the database does not have this key");
            sleep(Duration::from_millis(10)).await;
        }
    };
    timeout(DEADLINE, reading).await.expect("the instance stops");
    assert!(!server.ended().await.success());
    let log = server.log_tail();
    assert!(log.contains("had revision 5") && log.contains("ends at revision 2"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_log_stops_the_instance_before_it_serves_a_read() {
    check_stopped(restore).await;
}

/// The table is the same as before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn deleted_end_of_the_log_stops_the_instance_before_it_serves_a_read() {
    let delete = |postgres: &Postgres, database: &str, _: &Path| {
        postgres.psql(database, &format!("DELETE FROM {database}.kv_log WHERE id > 2"));
    };
    check_stopped(delete).await;
}

/// The head alone does not show that the log was replaced.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn restored_log_that_another_instance_wrote_past_stops_the_instance() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    let mut server = Server::orlop_on(&datastore, &["--name", "one"]).await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.put("kept", "value").await, 2);
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("dump");
    dump(postgres, database, &file);
    assert_eq!(client.put("lost", "value").await, 3);

    server.pause();
    restore(postgres, database, &file);
    let other = Server::orlop_on(&datastore, &["--name", "two"]).await;
    let mut other_client = Client::connect(other.endpoint()).await;
    for revision in 3..=7 {
        assert_eq!(other_client.put("another", "value").await, revision);
    }
    server.resume();
    assert!(!server.ended().await.success());
    let log = server.log_tail();
    assert!(log.contains("revision 3 differs") && log.contains("ends at revision 7"), "{log}");
    assert_eq!(other_client.put("another", "value").await, 8, "the other instance continues");
}

/// A table that was created again with the same rows must not stop or block an instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_continues_when_only_the_number_of_the_log_changes() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    let server = Server::orlop_on(&datastore, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.put("before", "value").await, 2);
    let copy = format!(
        "SET search_path = {database}; BEGIN; LOCK TABLE kv_log; ALTER TABLE kv_log RENAME TO old; \
         CREATE TABLE kv_log (LIKE old INCLUDING ALL); ALTER TABLE kv_log OWNER TO {database}; \
         INSERT INTO kv_log SELECT * FROM old; COMMIT"
    );
    postgres.psql(database, &copy);
    assert_eq!(client.put("after", "value").await, 3);
    assert_eq!(client.kv.range(get("before")).await.expect("a linearizable read").into_inner().count, 1);
}

/// A restored table has the row of an earlier run of the instance, once.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_takes_only_a_live_one_for_another_of_its_name() {
    const WARNING: &str = "another instance has the same name";
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    let query = |what: &str| postgres.psql(database, &format!("SET search_path = {database}; {what}"));
    let server = Server::orlop_on(&datastore, &["--name", "one"]).await;
    let run =
        eventually("the first heartbeat", async || match query("UPDATE member SET run = run # 1 RETURNING run # 1") {
            run if run.is_empty() => Err("no row"),
            run => Ok(run),
        })
        .await;
    let beat = eventually("the next heartbeat", async || {
        let beat = query(&format!("SELECT beat FROM member WHERE run = {run}"));
        if beat.is_empty() { Err("the other row") } else { Ok(beat) }
    })
    .await;
    eventually("a heartbeat after the warning", async || match query("SELECT beat FROM member") {
        later if later == beat => Err(later),
        _ => Ok(()),
    })
    .await;
    assert!(!server.log().contains(WARNING), "{}", server.log_tail());
    let _other = Server::orlop_on(&datastore, &["--name", "one"]).await;
    eventually("the warning", async || if server.log().contains(WARNING) { Ok(()) } else { Err(server.log_tail()) })
        .await;
}

/// `pg_restore` creates the primary keys after it has loaded the rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_during_a_restore_is_refused_and_spoils_nothing() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    let mut server = Server::orlop_on(&datastore, &[]).await;
    assert_eq!(Client::connect(server.endpoint()).await.put("kept", "value").await, 2);
    assert!(server.terminate().await.success());
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("dump");
    dump(postgres, database, &file);
    create_anew(postgres, database);
    let restore = |section: &str| {
        run(postgres, "pg_restore", &["--exit-on-error", "--section", section, "-d", database, text(&file)]);
    };
    for section in ["pre-data", "data"] {
        restore(section);
        let flags = ["--datastore-endpoint", &datastore, "--listen-client-urls", "http://127.0.0.1:0"];
        let because =
            "kv_log has no primary key: a restore into this database did not end, or failed; wait until pg_restore";
        check_refused(&flags, &[], &["cannot use database", because]);
    }
    restore("post-data");
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.kv.range(get("kept")).await.expect("a linearizable read").into_inner().count, 1);
    assert_eq!(client.put("kept", "value").await, 3);
}
