//! The database becomes unavailable and comes back, with the same or with different contents.

mod crashed;
mod lost;
mod restored;

use std::{os::unix::fs::PermissionsExt as _, process::Command, time::Duration};

use orlop_wire::proto::client::etcdserverpb::{
    DefragmentRequest, RangeRequest, RangeResponse, RequestOp, StatusRequest, TxnRequest, WatchCreateRequest,
    request_op::Request, watch_request::RequestUnion,
};
use sqlx::{Connection as _, PgConnection};
use tokio::{
    task::JoinHandle,
    time::{Instant, sleep, timeout},
};
use tonic::{Code, metadata::MetadataMap};

use crate::{
    auth, insight, start,
    support::{
        Client, DEADLINE, Link, NetworkState, Place, Postgres, Server, Stream, database_name, eventually, everything,
        get, http_get, put,
    },
};

/// Starts a server whose network to the database can fail. Returns the direct endpoint of the database as well.
async fn server_behind_link(postgres: &Postgres, arguments: &[&str]) -> (Link, Server, String) {
    let link = Link::to(postgres.port()).await;
    let datastore = postgres.create_database();
    let server = Server::orlop_on(&link.endpoint(&datastore), arguments).await;
    (link, server, datastore)
}

/// Returns the client's port of a connection to the database, as soon as its last statement is like `statement`; of several
/// connections, that of the newest statement.
async fn port_of(postgres: &Postgres, database: &str, statement: &str) -> u16 {
    let sql = format!(
        "SELECT client_port FROM pg_stat_activity WHERE datname = '{database}' AND query LIKE '{statement}' \
         ORDER BY query_start DESC LIMIT 1"
    );
    eventually(statement, async || postgres.psql("postgres", &sql).parse()).await
}

/// Retries a put until it succeeds and returns its revision. A failed attempt may have been applied as well.
pub async fn put_with_retries(client: &Client, key: &str) -> i64 {
    eventually("a write after the database is back", async || {
        let answer = client.clone().kv.put(put(key, "value")).await?;
        Ok::<_, tonic::Status>(answer.into_inner().header.expect("a header").revision)
    })
    .await
}

/// A server keeps no values in memory and logs each read of one that is repeated.
const UNCACHED: [&str; 4] = ["--value-cache-bytes", "0", "--log-level", "debug"];
const READ_IS_REPEATED: &str = "cannot read values yet; trying again";

fn serializable(key: &str) -> RangeRequest {
    RangeRequest { serializable: true, ..get(key) }
}

/// Makes a call while the caller goes on. If it fails, then only after 7 s; the error is the time at which it began.
fn in_background<T: Send + 'static>(
    call: impl Future<Output = Result<tonic::Response<T>, tonic::Status>> + Send + 'static,
) -> JoinHandle<Result<T, Instant>> {
    tokio::spawn(async move {
        let began = Instant::now();
        let (answer, took) = (call.await, began.elapsed());
        assert!(answer.is_ok() || took >= Duration::from_secs(7), "{took:?}: {:?}", answer.err());
        answer.map(tonic::Response::into_inner).map_err(|_| began)
    })
}

/// Returns the answer of a call. It may have failed if the machine stalled and the database was back only after 5 s.
async fn answered<T>(call: JoinHandle<Result<T, Instant>>, back: Instant) -> Option<T> {
    let answer = call.await.expect("the call waits");
    let away = answer.as_ref().err().map(|began| back.duration_since(*began));
    assert!(away.is_none_or(|away| away > Duration::from_secs(5)), "the call failed, but waited only {away:?}");
    answer.ok()
}

fn read_in_background(client: &Client, key: &str) -> JoinHandle<Result<RangeResponse, Instant>> {
    let (mut client, range) = (client.clone(), serializable(key));
    in_background(async move { client.kv.range(range).await })
}

/// Waits until the log has this text `times` times.
async fn logged(server: &Server, text: &str, times: usize) {
    eventually(text, async || {
        let log = server.log();
        if log.matches(text).count() >= times { Ok(()) } else { Err(log) }
    })
    .await;
}

/// One attempt to read a value takes up to 2 s; a restart takes longer.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn reads_of_values_wait_for_a_restart() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &UNCACHED).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("key", "value").await;

    postgres.stop();
    let get = read_in_background(&client, "key");
    let read = RequestOp { request: Some(Request::RequestRange(serializable("key"))) };
    let txn = TxnRequest { success: vec![read], ..Default::default() };
    let txn = in_background({
        let mut client = client.clone();
        async move { client.kv.txn(txn).await }
    });
    let keys = RangeRequest { keys_only: true, ..serializable("key") };
    assert_eq!(client.kv.range(keys).await.expect("keys are in memory").into_inner().kvs.len(), 1);
    logged(&server, READ_IS_REPEATED, 2).await;
    postgres.start_again().await;
    let back = Instant::now();
    if let Some(found) = answered(get, back).await {
        assert_eq!(&found.kvs[0].value[..], b"value");
    }
    answered(txn, back).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn outage_is_reported_and_survived() {
    let Some(postgres) = Postgres::start().await else { return };
    let datastore = postgres.create_database();
    let (one, two) = (Server::orlop_on(&datastore, &[]).await, Server::orlop_on(&datastore, &[]).await);
    let (mut a, mut b) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    let mut stream = Stream::open(&mut b).await;
    stream.create(everything(0)).await;
    let before = a.put("before", "value").await;
    stream.read_until(before).await;

    postgres.stop();
    let (timed_out, no_leader) = ("etcdserver: request timed out", "etcdserver: no leader");
    let refused = a.kv.put(put("during", "value")).await.expect_err("there is no database");
    assert_eq!(refused.code(), Code::Unavailable);
    assert!([timed_out, no_leader].contains(&refused.message()), "{refused:?}");
    let unread = b.kv.range(get("before")).await.expect_err("a linearizable read needs the database");
    assert_eq!((unread.code(), unread.message()), (Code::Unavailable, no_leader));
    let status = b.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    assert_eq!((status.leader, &status.errors[..]), (0, &[no_leader.to_owned()][..]));
    let stale = b.kv.range(serializable("before")).await.expect("a serializable read does not need the database");
    assert_eq!(stale.into_inner().count, 1);

    postgres.start_again().await;
    let after = put_with_retries(&a, "after").await;
    assert_eq!(stream.read_until(after).await, (before + 1..=after).collect::<Vec<_>>(), "no gap in the same stream");
    assert_eq!(b.kv.range(get("before")).await.expect("a range").into_inner().count, 1);
}

/// A server that does not answer must not make the metrics exceed the time for which Prometheus waits, 10 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn metrics_and_status_do_not_wait_for_a_silent_database() {
    let Some(postgres) = Postgres::start().await else { return };
    let (link, server, _) = server_behind_link(&postgres, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    link.set_network(NetworkState::Silent);
    let page = timeout(Duration::from_secs(8), http_get(server.endpoint(), "/metrics")).await.expect("in time");
    assert!(page.body.contains("etcd_server_has_leader 0\n"), "{}", page.body);
    let status = timeout(Duration::from_secs(8), client.maintenance.status(StatusRequest {})).await.expect("in time");
    let status = status.expect("a status").into_inner();
    assert_eq!((status.leader, status.errors), (0, vec!["etcdserver: no leader".to_owned()]));
}

/// Its errors tell a user about the outage.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn status_of_a_user_needs_no_database() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &auth::CHEAP).await;
    let mut client = Client::connect(server.endpoint()).await;
    auth::enable(&mut client).await;
    auth::act_as(&mut client, "user").await;
    postgres.stop();
    let status = client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
    assert_eq!((status.leader, status.errors), (0, vec!["etcdserver: no leader".to_owned()]));
    client.act_with(Some("forged"));
    let refused = client.maintenance.status(StatusRequest {}).await.expect_err("the token is not valid");
    assert_eq!((refused.code(), refused.message()), (Code::Unauthenticated, "etcdserver: invalid auth token"));
}

/// Some parts of the screen need the database, and one of them waits for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn top_shows_an_outage() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    postgres.stop();
    let shown = insight::top(&["--once", "--interval", "100ms", "--endpoints", server.endpoint()]);
    assert!(shown.contains("etcdserver: no leader"), "{shown}");
}

/// A client's library ends a watch that is refused, so the answer waits for the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_of_a_user_is_created_after_the_outage() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &auth::CHEAP).await;
    let mut client = Client::connect(server.endpoint()).await;
    auth::enable(&mut client).await;
    auth::act_as(&mut client, "user").await;
    let mut stream = Stream::open(&mut client).await;

    postgres.stop();
    stream.ask(RequestUnion::CreateRequest(WatchCreateRequest { key: "a".into(), ..Default::default() }));
    // Without the database this read fails after the time for which the check of the watch waits as well.
    client.kv.range(get("a")).await.expect_err("there is no database");
    postgres.start_again().await;
    let created = stream.next().await;
    assert!(created.created && !created.canceled, "{created:?}");
    let revision = put_with_retries(&client, "a").await;
    assert_eq!(stream.read_until(revision).await.last(), Some(&revision));
}

/// kube-apiserver asks for it, and then watches at another instance.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn watch_that_needs_a_leader_ends_at_an_instance_that_is_cut_off() {
    let Some(postgres) = Postgres::start().await else { return };
    let (link, server, _) = server_behind_link(&postgres, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut with_leader = MetadataMap::new();
    with_leader.insert("hasleader", "true".parse().expect("ASCII"));
    let mut other = Stream::open(&mut client).await;
    other.create(everything(0)).await;
    let mut stream = Stream::open_with(&mut client, &with_leader).await;
    stream.create(everything(0)).await;

    link.set_network(NetworkState::Down);
    link.reset();
    for what in ["an open stream", "a new stream"] {
        // The instance waits a minute, in which most failovers end.
        let ended = timeout(4 * DEADLINE, stream.answers.message()).await.expect("the stream ends");
        let status = ended.expect_err("the stream ends with a status");
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "etcdserver: no leader"), "{what}");
        stream = Stream::open_with(&mut client, &with_leader).await;
    }
    link.set_network(NetworkState::Normal);
    let revision = put_with_retries(&client, "after").await;
    assert_eq!(other.read_until(revision).await.last(), Some(&revision), "a stream that needs no leader continues");
}

/// After a failover an address may temporarily lead to the old primary, now a standby.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn standby_is_not_read_and_a_start_waits_for_its_promotion() {
    let Some(postgres) = Postgres::start().await else { return };
    let datastore = postgres.create_database();
    let server = Server::orlop_on(&datastore, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.put("before", "value").await, 2);

    let signal = postgres.data().join("standby.signal");
    postgres.stop();
    std::fs::write(&signal, "").expect("a file can be written");
    postgres.start_again().await;
    let unread = client.kv.range(get("before")).await.expect_err("a standby may be behind");
    assert_eq!((unread.code(), unread.message()), (Code::Unavailable, "etcdserver: no leader"));
    // A connection that was unused for a second is checked first. If less time has passed, the first write finds it broken,
    // and the server cannot know whether the commit happened.
    for texts in [&["etcdserver: no leader", "etcdserver: request timed out"][..], &["etcdserver: no leader"]] {
        let refused = client.kv.put(put("during", "value")).await.expect_err("a standby takes no writes");
        assert!(refused.code() == Code::Unavailable && texts.contains(&refused.message()), "{refused:?}");
    }
    let waiting = start::message_of_waiting_start(&datastore);
    assert!(waiting.contains("is a standby") && !waiting.contains("pass"), "{waiting}");

    postgres.stop();
    std::fs::remove_file(&signal).expect("the file can be removed");
    postgres.start_again().await;
    assert_eq!(put_with_retries(&client, "after").await, 3);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn shorter_log_stops_the_instance() {
    let Some(postgres) = Postgres::start().await else { return };
    let mut server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..5 {
        client.put("kept", "value").await;
    }
    postgres.stop();
    let backup = postgres.data().with_extension("backup");
    copy(&postgres.data(), &backup);
    postgres.start_again().await;
    let head = put_with_retries(&client, "lost").await;
    assert_eq!(head, 7);

    postgres.stop();
    std::fs::remove_dir_all(postgres.data()).expect("the folder can be removed");
    copy(&backup, &postgres.data());
    postgres.start_again().await;
    assert!(!server.ended().await.success());
    let log = server.log_tail();
    assert!(log.contains("had revision 7") && log.contains("ends at revision 6"), "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replaced_log_stops_the_instance() {
    let Some(postgres) = Postgres::start().await else { return };
    let datastore = postgres.create_database();
    let mut server = Server::orlop_on(&datastore, &["--name", "one"]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("kept", "value").await;
    postgres.stop();
    let backup = postgres.data().with_extension("backup");
    copy(&postgres.data(), &backup);
    postgres.start_again().await;
    assert_eq!(put_with_retries(&client, "lost").await, 3);

    server.pause();
    postgres.stop();
    std::fs::remove_dir_all(postgres.data()).expect("the folder can be removed");
    copy(&backup, &postgres.data());
    postgres.start_again().await;
    let other = Server::orlop_on(&datastore, &["--name", "two"]).await;
    let mut other_client = Client::connect(other.endpoint()).await;
    for revision in [3, 4] {
        assert_eq!(other_client.put("another", "value").await, revision);
    }
    server.resume();
    assert!(!server.ended().await.success());
    let log = server.log_tail();
    assert!(log.contains("revision 3 differs") && log.contains("ends at revision 4"), "{log}");
    assert_eq!(other_client.put("another", "value").await, 5, "the other server continues");
}

/// Some hosted databases do not permit the functions by which a former primary is recognized.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_hides_its_timeline_is_served() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    postgres.psql(database, "REVOKE EXECUTE ON FUNCTION pg_control_system, pg_walfile_name FROM PUBLIC");
    let address = format!("127.0.0.1:{}", postgres.port());
    for (hosts, revision, is_warned) in [(address.clone(), 2, false), (format!("{address},{address}"), 3, true)] {
        let server = Server::orlop_on(&datastore.replace(&address, &hosts), &[]).await;
        assert_eq!(Client::connect(server.endpoint()).await.put("k", "value").await, revision);
        assert_eq!(server.log().contains("a former primary cannot be recognized"), is_warned, "{}", server.log());
    }
}

/// Such as Amazon Aurora without logical replication. The server logs each error.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_fails_to_report_its_timeline_is_served_and_asked_once() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    let fail = format!(
        "SET allow_system_table_mods = on; \
         ALTER FUNCTION pg_catalog.pg_current_wal_lsn() RENAME TO pg_current_wal_lsn_of_postgres; \
         CREATE FUNCTION pg_catalog.pg_current_wal_lsn() RETURNS pg_lsn LANGUAGE plpgsql AS $$ \
             BEGIN RAISE 'no WAL of {database} is reported' USING ERRCODE = '55000'; END $$"
    );
    postgres.psql(database, &fail);
    let server = Server::orlop_on(&datastore, &[]).await;
    assert_eq!(Client::connect(server.endpoint()).await.put("k", "value").await, 2);
    let log = postgres.log();
    assert_eq!(log.matches(&format!("no WAL of {database} is reported")).count(), 1, "{log}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_that_stops_reporting_its_timeline_is_still_used() {
    let Some(postgres) = Postgres::shared().await else { return };
    let (link, server, datastore) = server_behind_link(postgres, &[]).await;
    let client = Client::connect(server.endpoint()).await;
    put_with_retries(&client, "before").await;
    let hide = "REVOKE EXECUTE ON FUNCTION pg_control_system, pg_walfile_name FROM PUBLIC";
    postgres.psql(database_name(&datastore), hide);
    link.reset();
    put_with_retries(&client, "after").await;
    eventually("a linearizable read", async || client.clone().kv.range(get("after")).await).await;
}

/// A firewall that forgot a connection drops its packets.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connection_for_notifications_is_replaced() {
    let Some(postgres) = Postgres::shared().await else { return };
    let arguments = ["--name", "reader", "--datastore-poll-interval", "1h"];
    let (link, reader, datastore) = server_behind_link(postgres, &arguments).await;
    let database = database_name(&datastore);
    let first = port_of(postgres, database, "LISTEN %").await;
    let mut client = Client::connect(reader.endpoint()).await;
    let mut stream = Stream::open(&mut client).await;
    stream.create(everything(0)).await;
    link.lose(first);
    eventually("another connection", async || {
        let newest = port_of(postgres, database, "LISTEN %").await;
        if newest == first { Err(first) } else { Ok(()) }
    })
    .await;
    let writer = Server::orlop_on(&datastore, &["--name", "writer"]).await;
    let revision = Client::connect(writer.endpoint()).await.put("k", "value").await;
    stream.read_until(revision).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_timeout_of_the_role_does_not_end_the_connection_for_notifications() {
    let Some(postgres) = Postgres::shared().await else { return };
    let version = postgres.psql("postgres", "SHOW server_version_num");
    if version.parse::<u32>().expect("a number") < 140_000 {
        return; // It has no such setting.
    }
    let datastore = postgres.create_database();
    let database = database_name(&datastore);
    postgres.psql("postgres", &format!("ALTER ROLE {database} SET idle_session_timeout = '1s'"));
    let _server = Server::orlop_on(&datastore, &[]).await;
    let first = port_of(postgres, database, "LISTEN %").await;
    sleep(Duration::from_secs(3)).await;
    assert_eq!(port_of(postgres, database, "LISTEN %").await, first);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connection_ends_a_defragmentation() {
    let Some(postgres) = Postgres::shared().await else { return };
    let (link, server, datastore) = server_behind_link(postgres, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut holder = PgConnection::connect(&datastore).await.expect("the database exists");
    let lock = "BEGIN; LOCK TABLE kv_log IN SHARE UPDATE EXCLUSIVE MODE";
    sqlx::raw_sql(lock).execute(&mut holder).await.expect("an owner may lock");
    let mut waiting = client.clone();
    let lost = tokio::spawn(async move { waiting.maintenance.defragment(DefragmentRequest {}).await });
    link.lose(port_of(postgres, database_name(&datastore), "VACUUM %").await);
    sqlx::raw_sql("ROLLBACK").execute(&mut holder).await.expect("the lock is released");
    // The vacuum ends, and two checks 3 s apart find that its result is missing.
    let lost = timeout(DEADLINE, lost).await.expect("it ends").expect("no panic");
    let error = lost.expect_err("its connection is lost");
    assert_eq!(error.code(), Code::Unavailable, "{error:?}");
    client.maintenance.defragment(DefragmentRequest {}).await.expect("a defragmentation");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn changed_password_needs_no_restart() {
    let Some(postgres) = Postgres::start().await else { return };
    let endpoint = postgres.create_database();
    let name = database_name(&endpoint);
    let rules = "host all postgres 127.0.0.1/32 trust\nhost all all 127.0.0.1/32 scram-sha-256\n";
    std::fs::write(postgres.data().join("pg_hba.conf"), rules).expect("a file can be written");
    postgres.psql("postgres", "SELECT pg_reload_conf()");
    let home = tempfile::tempdir().expect("a folder");
    let file = home.path().join("passwords");
    let save = |password: &str| {
        std::fs::write(&file, format!("*:*:*:{name}:{password}\n")).expect("a file can be written");
        std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).expect("the file is ours");
    };
    save("pass word");
    let endpoint = endpoint.replace(":pass%20word@", "@");
    let by_parameter = format!("{endpoint}?passfile={}", file.display());
    let variable = vec![("PGPASSFILE".to_owned(), file.clone().into_os_string())];
    let servers = [
        Server::orlop_on(&by_parameter, &[&["--name", "one"], &UNCACHED[..]].concat()).await,
        Server::orlop_at(
            Some(endpoint),
            &[&["--name", "two"], &UNCACHED[..]].concat(),
            Place { environment: variable, ..Place::default() },
        )
        .await,
    ];
    let mut clients = Vec::new();
    for server in &servers {
        let mut client = Client::connect(server.endpoint()).await;
        client.put("key", "value").await;
        clients.push(client);
    }

    postgres.psql("postgres", &format!("ALTER ROLE {name} PASSWORD 'new:word'"));
    postgres
        .psql("postgres", &format!("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = '{name}'"));
    let reads: Vec<_> = clients.iter().map(|client| read_in_background(client, "key")).collect();
    for server in &servers {
        logged(server, "password authentication failed", 1).await;
        logged(server, READ_IS_REPEATED, 1).await;
    }
    save("new\\:word");
    let back = Instant::now();
    for (read, client) in reads.into_iter().zip(&clients) {
        answered(read, back).await;
        put_with_retries(client, "after").await;
    }
}

/// Copies a folder with its owner and permissions, which Postgres checks.
fn copy(from: &std::path::Path, to: &std::path::Path) {
    let copied = Command::new("cp").arg("-a").args([from, to]).status();
    assert!(copied.is_ok_and(|status| status.success()), "the folder can be copied");
}
