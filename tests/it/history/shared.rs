//! Archives in a database that several instances share, which may have different settings.

use std::process::Stdio;

use orlop_wire::proto::client::etcdserverpb::MemberListRequest;
use sqlx::{Connection as _, PgConnection, Row as _};
use tokio::{
    io::{AsyncBufReadExt as _, BufReader},
    time::timeout,
};

use super::{commands::command, *};
use crate::support::home;

async fn number(connection: &mut PgConnection, sql: &'static str) -> Option<i64> {
    sqlx::query(sql).fetch_one(connection).await.expect("a row").get(0)
}

const FIRST: &str = "SELECT max(value) FROM meta WHERE name = 'archive_first'";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn archive_begins_at_the_newest_compaction_and_is_filled_on_one_server() {
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
    // Another server may lack the copies.
    let finish = "SELECT orlop_finish_copy(orlop_server() - 1, 5)::int::bigint";
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

/// The leader records the times, so here nobody does.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn time_is_uncertain_if_the_leader_keeps_no_history() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let _leader = Server::orlop_on(&datastore, &["--name", "a"]).await;
    let server = Server::orlop_on(&datastore, &[&KEEP[..], &["--name", "b"]].concat()).await;
    let mut client = Client::connect(server.endpoint()).await;
    let first = state(&mut client).await.first_moment.expect("the first moment is recorded at the start");
    put(&mut client, &mut Model::new(), "a", "value").await;
    let written_by = clock::unix_ms(clock::now());
    assert_eq!(revision_at(&mut client, written_by).await, (Some(first.revision), true));
}

/// The leader compacts by schedule, records times and deletes old rows. Clients cannot reach the socket of a command.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn command_beside_a_server_neither_leads_nor_is_listed() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let mut server = Server::orlop_on(&datastore, &[&KEEP[..], &["--name", "a"]].concat()).await;
    put(&mut Client::connect(server.endpoint()).await, &mut Model::new(), "a", "value").await;
    let follow = ["history", "a", "--follow", "--brief", "--datastore-endpoint", &datastore];
    // The command is killed at the end, so its temporary folder remains.
    let folder = home();
    let mut process = command(&follow);
    let mut process = process.env("TMPDIR", folder.path()).stdout(Stdio::piped()).spawn().expect("orlop starts");
    let mut lines = BufReader::new(process.stdout.take().expect("a pipe")).lines();
    let line = timeout(DEADLINE, lines.next_line()).await.expect("in time").expect("the output is read");
    assert!(line.is_some_and(|line| line.starts_with("revision 2")));
    // From now on, the command is the oldest member.
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    let list = client.cluster.member_list(MemberListRequest::default()).await.expect("a list").into_inner();
    let urls: Vec<&str> = list.members.iter().flat_map(|member| &member.client_ur_ls).map(String::as_str).collect();
    assert_eq!(urls, [server.endpoint()]);
    assert_eq!(list.members.len(), 1, "{list:?}");
    assert_eq!(server.metric("etcd_server_is_leader").await, 1.0);
    assert_eq!(server.metric("orlop_instances").await, 1.0);
    let mut connection = PgConnection::connect(&datastore).await.expect("the database exists");
    assert_eq!(number(&mut connection, "SELECT count(*) FROM member").await, Some(2), "the command is a member");
    assert!(process.try_wait().expect("our child can be waited for").is_none(), "the command has ended");
}
