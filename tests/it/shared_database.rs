//! Others use the database, too: they hold locks, close connections and use them up, and statistics are made while a table is
//! small.

use std::time::Duration;

use orlop_wire::proto::client::etcdserverpb::{
    DefragmentRequest, LeaseGrantRequest, MemberListRequest, RequestOp, StatusRequest, TxnRequest, request_op::Request,
};
use sqlx::{ConnectOptions as _, Connection as _, Executor as _, PgConnection, sqlite::SqliteConnectOptions};
use tokio::{
    task::JoinSet,
    time::{Instant, sleep},
};

use crate::support::{Client, Postgres, Server, Stream, database_name, eventually, everything, get, put};

/// Stops a server and starts it again beside `until_ready`.
async fn restarted(mut server: Server, until_ready: impl Future<Output = ()>) -> Server {
    server.terminate().await;
    let starting = tokio::spawn(async move {
        server.restart().await;
        server
    });
    until_ready.await;
    starting.await.expect("the server starts")
}

/// Runs statements, for example `BEGIN; LOCK TABLE ...`, on a connection of another program to the server's database.
async fn executed(server: &Server, sql: &'static str) -> PgConnection {
    let mut other = PgConnection::connect(server.datastore().expect("Postgres")).await.expect("the database exists");
    other.execute(sql).await.expect("the statements are right");
    other
}

async fn logged(postgres: &Postgres, text: &str) {
    eventually(text, async || {
        let log = postgres.log();
        if log.contains(text) { Ok(()) } else { Err(log) }
    })
    .await;
}

/// Every role that may connect to the database can send one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn false_notification_makes_no_load_and_hides_no_append() {
    let Some(postgres) = Postgres::start().await else { return };
    let database = postgres.create_database();
    let one = Server::orlop_on(&database, &["--name", "one"]).await;
    let two = Server::orlop_on(&database, &["--name", "two"]).await;
    let (mut a, mut b) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    let mut stream = Stream::open(&mut b).await;
    stream.create(everything(0)).await;
    let notify = "SELECT pg_notify('orlop_' || 'kv_log'::regclass::oid, '9223372036854775807')";
    let mut other = executed(&one, notify).await;
    let commits = "SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()";
    let mut commits = async || sqlx::query_scalar::<_, i64>(commits).fetch_one(&mut other).await.expect("a number");
    let before = commits().await;
    sleep(Duration::from_secs(3)).await;
    let made = commits().await - before;
    assert!(made < 1_000, "{made} transactions in 3 s");
    let revision = a.put("key", "value").await;
    assert_eq!(stream.read_until(revision).await, [revision]);
}

/// The connection with which the start began still answers.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_waits_for_a_lock_on_a_table() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let other = executed(&server, "BEGIN; LOCK TABLE member").await;
    let server = restarted(server, async {
        logged(&postgres, "canceling statement due to lock timeout").await;
        other.close().await.expect("the lock is released");
    })
    .await;
    Client::connect(server.endpoint()).await.put("key", "value").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_waits_for_free_connections() {
    let Some(postgres) = Postgres::start().await else { return };
    let mut server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let role = database_name(server.datastore().expect("Postgres")).to_owned();
    // One is not enough for the check of the session, two are not for the log.
    for limit in [1, 2] {
        postgres.psql("postgres", &format!("ALTER ROLE {role} CONNECTION LIMIT {limit}"));
        let before = postgres.log().len();
        server = restarted(server, async {
            eventually("a refused connection", async || {
                let log = postgres.log();
                if log[before..].contains("too many connections for role") { Ok(()) } else { Err(log) }
            })
            .await;
            postgres.psql("postgres", &format!("ALTER ROLE {role} CONNECTION LIMIT -1"));
        })
        .await;
        assert!(server.log().contains("too many connections for role"), "{}", server.log());
    }
    Client::connect(server.endpoint()).await.put("key", "value").await;
}

/// A managed service makes a database read-only while its disk is nearly full.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn start_waits_until_the_database_accepts_writes() {
    let Some(postgres) = Postgres::shared().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let role = database_name(server.datastore().expect("Postgres")).to_owned();
    postgres.psql("postgres", &format!("ALTER ROLE {role} SET default_transaction_read_only = on"));
    let log = server.data_dir().with_file_name("log");
    let server = restarted(server, async {
        eventually("a start that waits", async || {
            let log = std::fs::read_to_string(&log).expect("there is a log");
            let waits = |line: &str| {
                line.contains("cannot connect yet") && line.contains("default_transaction_read_only is on")
            };
            if log.lines().any(waits) { Ok(()) } else { Err(log) }
        })
        .await;
        postgres.psql("postgres", &format!("ALTER ROLE {role} RESET default_transaction_read_only"));
    })
    .await;
    Client::connect(server.endpoint()).await.put("key", "value").await;
}

/// The pool would keep the connections that it has, because each heartbeat uses one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lost_connection_is_replaced_by_an_unused_one_of_the_pool_at_the_limit() {
    let Some(postgres) = Postgres::shared().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let role = database_name(server.datastore().expect("Postgres")).to_owned();
    let mut client = Client::connect(server.endpoint()).await;
    client.put("key", "value").await;
    client.kv.range(get("key")).await.expect("a range");
    let of_role = |what: &str, query: &str| {
        let sql = format!("SELECT {what} FROM pg_stat_activity WHERE usename = '{role}' AND query LIKE '{query}'");
        postgres.psql("postgres", &sql)
    };
    let position = "SELECT (SELECT coalesce(max(id), 1) FROM kv_log), %orlop_server()";
    // Those for appends, positions and notifications, and at least one of the pool.
    for query in ["%orlop_append%", position, "LISTEN %", "SELECT id, name, client_urls FROM member%"] {
        eventually(query, async || match of_role("count(*)", query).parse::<u32>() {
            Ok(1..) => Ok(()),
            other => Err(other),
        })
        .await;
    }
    postgres.psql("postgres", &format!("ALTER ROLE {role} CONNECTION LIMIT 3"));
    let lost = of_role("pg_terminate_backend(pid), pid", position);
    let lost = lost.strip_prefix("t|").expect("one connection is terminated");
    let ended = format!("SELECT NOT EXISTS (SELECT 1 FROM pg_stat_activity WHERE pid = {lost})");
    eventually("its end", async || if postgres.psql("postgres", &ended) == "t" { Ok(()) } else { Err("it exists") })
        .await;
    eventually("a read", async || client.clone().kv.range(get("key")).await).await;
    let log = server.log();
    assert!(
        log.contains("the database has no free connection") && log.contains("too many connections for role"),
        "{log}"
    );
}

/// The table is analyzed while it has one row, and then no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn plans_of_a_small_table_do_not_read_a_large_one() {
    let Some(postgres) = Postgres::shared().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let database = database_name(server.datastore().expect("Postgres")).to_owned();
    for table in ["kv_log", "lease"] {
        postgres.psql(&database, &format!("ALTER TABLE {database}.{table} SET (autovacuum_enabled = off)"));
    }
    let mut client = Client::connect(server.endpoint()).await;
    let grant = || LeaseGrantRequest { ttl: 600, ..Default::default() };
    client.put("first", "value").await;
    client.lease.lease_grant(grant()).await.expect("a lease");
    client.maintenance.defragment(DefragmentRequest {}).await.expect("a defragmentation");
    postgres.psql(&database, &format!("ANALYZE {database}.kv_log, {database}.lease"));
    // A server counts when its connections end.
    let server = restarted(server, async {}).await;
    let scans = || {
        let sql = "SELECT sum(seq_scan) FROM pg_stat_user_tables WHERE relname IN ('kv_log', 'lease')";
        postgres.psql(&database, sql).parse::<u64>().expect("a number")
    };
    let before = scans();
    let mut client = Client::connect(server.endpoint()).await;
    for index in 0..200 {
        client.put(index.to_string(), "value").await;
        let id = client.lease.lease_grant(grant()).await.expect("a lease").into_inner().id;
        client.lease.lease_grant(LeaseGrantRequest { id, ..grant() }).await.expect_err("it exists");
    }
    drop(restarted(server, async {}).await);
    let made = scans() - before;
    assert!(made < 20, "{made} reads of a whole table for 200 puts and leases");
}

/// Such as after a restore. Postgres would choose bitmap scans, which read all rows of a range for each page of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_tables_without_statistics_are_read_in_order() {
    const TXNS: u64 = 500;
    const TXN_KEYS: u64 = 100;
    let Some(postgres) = Postgres::shared().await else { return };
    let mut server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let database = database_name(server.datastore().expect("Postgres")).to_owned();
    for table in ["kv_log", "kv_log_more"] {
        postgres.psql(&database, &format!("ALTER TABLE {database}.{table} SET (autovacuum_enabled = off)"));
    }
    let mut client = Client::connect(server.endpoint()).await;
    let mut revision = 0;
    for _ in 0..TXNS {
        let puts =
            (0..TXN_KEYS).map(|key| RequestOp { request: Some(Request::RequestPut(put(key.to_string(), "value"))) });
        let txn = TxnRequest { success: puts.collect(), ..Default::default() };
        let written = client.kv.txn(txn).await.expect("a transaction").into_inner();
        revision = written.header.expect("a header").revision;
    }
    let mut stream = Stream::open(&mut client).await;
    stream.create(everything(2)).await;
    stream.read_until(revision).await;
    // A server counts when its connections end.
    assert!(server.terminate().await.success());
    // A bitmap scan counts the entries that it reads, and no rows.
    let reads = "SELECT sum(idx_tup_read), sum(idx_tup_fetch) FROM pg_stat_user_indexes WHERE relname LIKE 'kv\\_log%'";
    let (entries, rows) = eventually("the counts", async || {
        let counts = postgres.psql(&database, reads);
        let (entries, rows) = counts.split_once('|').expect("two columns");
        let count = |text: &str| text.parse::<u64>().expect("a number");
        if count(entries) >= TXNS * TXN_KEYS { Ok((count(entries), count(rows))) } else { Err(counts) }
    })
    .await;
    assert!(entries < rows + 1_000, "{} entries were read by bitmap scans", entries - rows);
}

/// A pooler or an administrator closes what nobody uses. Nothing was written on it, so no write may fail.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connection_that_was_closed_while_unused_is_replaced() {
    let Some(postgres) = Postgres::shared().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let database = database_name(server.datastore().expect("Postgres")).to_owned();
    let mut client = Client::connect(server.endpoint()).await;
    client.put("before", "value").await;
    // The time after which a connection counts as unused.
    sleep(Duration::from_secs(10)).await;
    let of_writes = |what: &str| {
        let sql = format!(
            "SELECT {what} FROM pg_stat_activity \
             WHERE datname = '{database}' AND query LIKE '%orlop_append%' AND pid <> pg_backend_pid()"
        );
        postgres.psql("postgres", &sql).trim().to_owned()
    };
    assert_eq!(of_writes("count(pg_terminate_backend(pid))"), "1");
    eventually("its end", async || if of_writes("count(*)") == "0" { Ok(()) } else { Err("it exists") }).await;
    client.put("after", "value").await;
}

/// The login role acts as the owner, as after a rotation of the password: its sessions cannot see what the others execute.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn defragmentation_waits_for_another_vacuum() {
    let Some(postgres) = Postgres::shared().await else { return };
    let endpoint = postgres.create_database();
    let owner = database_name(&endpoint);
    let login = format!("{owner}_b");
    let create = format!("CREATE ROLE {login} LOGIN PASSWORD 'pass word' IN ROLE {owner}");
    postgres.psql("postgres", &format!("{create}; ALTER ROLE {login} SET role = '{owner}'"));
    let server = Server::orlop_on(&endpoint.replace(&format!("//{owner}:"), &format!("//{login}:")), &[]).await;
    // The lock of a vacuum.
    let other = executed(&server, "BEGIN; LOCK TABLE kv_log IN SHARE UPDATE EXCLUSIVE MODE").await;
    let mut client = Client::connect(server.endpoint()).await;
    let began = Instant::now();
    let defragmenting = tokio::spawn(async move { client.maintenance.defragment(DefragmentRequest {}).await });
    // Longer than the limit for other statements, and than two checks whether the vacuum still runs.
    while began.elapsed() < Duration::from_secs(8) {
        assert!(!defragmenting.is_finished(), "it did not wait");
        sleep(Duration::from_millis(100)).await;
    }
    other.close().await.expect("the lock is released");
    defragmenting.await.expect("no panic").expect("a defragmentation");
}

/// A list of the members needs no user, and each refresh of the list writes a heartbeat.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_list_the_members_share_heartbeats() {
    const LISTS: usize = 500;
    let Some(postgres) = Postgres::shared().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &["--name", "only"]).await;
    let count_beats = "CREATE SEQUENCE beats; \
        CREATE FUNCTION count_beat() RETURNS trigger LANGUAGE plpgsql AS $$ \
            BEGIN PERFORM nextval('beats'), pg_sleep(0.005); RETURN NULL; END $$; \
        CREATE TRIGGER count_beats AFTER INSERT OR UPDATE ON member FOR EACH ROW EXECUTE FUNCTION count_beat()";
    let mut other = executed(&server, count_beats).await;
    let client = Client::connect(server.endpoint()).await;
    let mut lists = JoinSet::new();
    for _ in 0..LISTS {
        let mut client = client.clone();
        lists.spawn(async move { client.cluster.member_list(MemberListRequest::default()).await });
    }
    for list in lists.join_all().await {
        let members = list.expect("a list").into_inner().members;
        assert_eq!(members.iter().map(|member| &*member.name).collect::<Vec<_>>(), ["only"]);
    }
    let beats: i64 = sqlx::query_scalar("SELECT last_value FROM beats").fetch_one(&mut other).await.expect("a count");
    assert!(beats < 250, "{beats} heartbeats for {LISTS} lists");
}

/// While Auth is disabled, a status needs no user, either. It contains the size of the database.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn clients_that_ask_for_the_status_share_a_connection() {
    const STARTED: &str = "grpc_server_started_total\
        {grpc_method=\"Status\",grpc_service=\"etcdserverpb.Maintenance\",grpc_type=\"unary\"}";
    let Some(postgres) = Postgres::shared().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let database = database_name(server.datastore().expect("Postgres")).to_owned();
    let client = Client::connect(server.endpoint()).await;
    let other = executed(&server, "BEGIN; LOCK TABLE lease").await;
    let mut calls = JoinSet::new();
    for _ in 0..200 {
        let mut client = client.clone();
        calls.spawn(async move { client.maintenance.status(StatusRequest {}).await });
    }
    eventually("all calls", async || match server.metric(STARTED).await {
        started if started >= 200.0 => Ok(()),
        started => Err(started),
    })
    .await;
    let waiting = format!(
        "SELECT count(*) FROM pg_stat_activity \
         WHERE datname = '{database}' AND wait_event_type = 'Lock' AND query LIKE '%pg_total_relation_size%'"
    );
    let waiting = eventually("a query of the size", async || match postgres.psql("postgres", &waiting).trim() {
        "0" => Err("none"),
        number => Ok(number.parse::<usize>().expect("a number")),
    })
    .await;
    // The server itself may ask for the size, too, and a query that was given up still waits. The pool has 8 connections.
    assert!(waiting <= 4, "{waiting} connections wait for the size of the database");
    other.close().await.expect("the lock is released");
    assert!(calls.join_all().await.iter().all(Result::is_ok));
}

/// A managed service may grant rights on all new tables to its roles.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn roles_with_rights_on_the_tables_are_named() {
    const WARNING: &str = "other roles have rights on the tables of Orlop";
    let Some(postgres) = Postgres::shared().await else { return };
    let endpoint = postgres.create_database();
    let name = database_name(&endpoint);
    let reader = format!("{name}_reader");
    let grant = format!(
        "CREATE ROLE {reader}; \
         ALTER DEFAULT PRIVILEGES FOR ROLE {name} IN SCHEMA {name} GRANT SELECT ON TABLES TO {reader}"
    );
    postgres.psql(name, &grant);
    let server = Server::orlop_on(&endpoint, &[]).await;
    let log = server.log();
    assert!(log.contains(WARNING) && log.contains(&format!("{reader} (select)")), "{log}");
    postgres.psql(name, &format!("REVOKE ALL ON ALL TABLES IN SCHEMA {name} FROM {reader}"));
    let server = restarted(server, async {}).await;
    assert_eq!(server.log().matches(WARNING).count(), 1, "{}", server.log());
}

/// Such as `sqlite3` in a transaction. The write has not begun, so it is repeated.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_waits_for_another_process_on_sqlite() {
    let server = Server::orlop_at(None, &[], crate::support::Place::default()).await;
    let file = server.data_dir().join("orlop.db");
    let mut other = SqliteConnectOptions::new().filename(file).connect().await.expect("the database exists");
    other.execute("BEGIN IMMEDIATE").await.expect("the lock is free");
    let mut client = Client::connect(server.endpoint()).await;
    let write = tokio::spawn(async move { client.put("key", "value").await });
    eventually("an attempt that failed", async || {
        let log = server.log();
        if log.contains("another process writes to it") { Ok(()) } else { Err(log) }
    })
    .await;
    other.close().await.expect("the lock is released");
    write.await.expect("a put");
}
