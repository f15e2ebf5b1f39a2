//! Leases: limits, keys, expiry, restarts.

use std::time::{Duration, Instant};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use orlop_core::{
    log::{Append, Appended, LeaseChange},
    types::LeaseId,
};
use orlop_wire::proto::client::etcdserverpb::{
    LeaseGrantRequest, LeaseKeepAliveRequest, LeaseLeasesRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest,
    PutRequest, RangeRequest, RequestOp, TxnRequest, WatchCreateRequest, WatchRequest, request_op::Request,
    watch_request::RequestUnion,
};
use sqlx::{Connection as _, PgConnection};
use tokio::task::JoinSet;
use tonic::Code;

use crate::{
    check::{Place, open_log},
    support::{
        Backend, Client, DEADLINE, Link, NetworkState, Postgres, Server, Stream, all, eventually, everything, get,
        http, on_both_backends, orlop, range, run,
    },
};

/// The lease that clients renew without pause, so that renewals wait for each other.
const BACKGROUND_LEASE: i64 = 1 << 40;

async fn put(client: &mut Client, key: &str, lease: i64) {
    let request = PutRequest { key: key.to_owned().into(), lease, ..Default::default() };
    client.kv.put(request).await.expect("a put");
}

/// Returns the TTL and the keys of a lease.
async fn ttl_and_keys(client: &mut Client, id: i64) -> (i64, Vec<String>) {
    let request = LeaseTimeToLiveRequest { id, keys: true };
    let answer = client.lease.lease_time_to_live(request).await.expect("a response").into_inner();
    (answer.granted_ttl, answer.keys.iter().map(|key| String::from_utf8_lossy(key).into_owned()).collect())
}

async fn grants_respect_ttl_and_id_limits(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    /// (requested id, requested TTL, the granted TTL or the error).
    type Row = (i64, i64, Result<i64, (Code, &'static str)>);
    let table: [Row; 8] = [
        (1, 100, Ok(100)),
        (-7, 100, Ok(100)),
        (1, 100, Err((Code::FailedPrecondition, "etcdserver: lease already exists"))),
        (2, 0, Ok(2)),
        (3, -5, Ok(2)),
        (4, 9_000_000_000, Ok(9_000_000_000)),
        (5, 9_000_000_001, Err((Code::OutOfRange, "etcdserver: too large lease TTL"))),
        (0, 100, Ok(100)),
    ];
    for (id, ttl, expected) in table {
        let answer = client.lease.lease_grant(LeaseGrantRequest { ttl, id }).await;
        match (answer, expected) {
            (Ok(answer), Ok(expected)) => {
                let answer = answer.into_inner();
                assert_eq!(answer.ttl, expected, "{id} {ttl}");
                assert!(if id == 0 { answer.id > 0 } else { answer.id == id });
            }
            (Err(status), Err(expected)) => assert_eq!((status.code(), status.message()), expected, "{id} {ttl}"),
            (answer, expected) => panic!("{id} {ttl}: the answer is {answer:?}, expected {expected:?}"),
        }
    }
    let unknown = client.lease.lease_revoke(LeaseRevokeRequest { id: 99 }).await.expect_err("the lease is unknown");
    assert_eq!((unknown.code(), unknown.message()), (Code::NotFound, "etcdserver: requested lease not found"));
    let unknown = client.lease.lease_time_to_live(LeaseTimeToLiveRequest { id: 99, keys: true }).await;
    assert_eq!(unknown.expect("no error").into_inner().ttl, -1);
}

async fn keys_expire_with_the_lease_of_their_last_put(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for id in [1, 2] {
        client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id }).await.expect("a grant");
    }
    for (key, lease) in [("c", 1), ("a", 1), ("b", 1), ("moved", 1), ("moved", 2), ("detached", 1), ("detached", 0)] {
        put(&mut client, key, lease).await;
    }
    assert_eq!(ttl_and_keys(&mut client, 1).await, (600, vec!["a".into(), "b".into(), "c".into()]));
    assert_eq!(ttl_and_keys(&mut client, 2).await, (600, vec!["moved".into()]));

    let watch = WatchCreateRequest { key: "\0".into(), range_end: "\0".into(), ..Default::default() };
    let requests = tokio_stream::iter([WatchRequest { request_union: Some(RequestUnion::CreateRequest(watch)) }]);
    let mut events = client.watch.watch(requests).await.expect("a stream").into_inner();
    assert!(events.message().await.expect("an answer").expect("an answer").created);
    client.lease.lease_revoke(LeaseRevokeRequest { id: 1 }).await.expect("a revocation");
    let gone = events.message().await.expect("an answer").expect("an answer").events;
    let gone: Vec<_> =
        gone.iter().map(|event| event.kv.as_ref().expect("a pair")).map(|kv| (&kv.key[..], kv.mod_revision)).collect();
    assert_eq!(gone, [(&b"a"[..], 9), (&b"b"[..], 9), (&b"c"[..], 9)], "in one revision, in the order of the keys");
    assert_eq!(client.kv.range(all()).await.expect("a range").into_inner().count, 2);
}

/// The server reads the keys in several steps and sends them in several chunks.
async fn all_keys_of_a_lease_are_returned_in_order(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: 1 }).await.expect("a grant");
    let keys: Vec<String> = (0..5_000).map(|number| format!("{number:0100}")).collect();
    for keys in keys.rchunks(100) {
        let puts = keys.iter().map(|key| {
            let put = PutRequest { key: key.clone().into(), lease: 1, ..Default::default() };
            RequestOp { request: Some(Request::RequestPut(put)) }
        });
        client.kv.txn(TxnRequest { success: puts.collect(), ..Default::default() }).await.expect("keys are put");
    }
    assert!(ttl_and_keys(&mut client, 1).await == (600, keys), "all keys, in their order");
    let json = http(server.endpoint(), "POST", "/v3/lease/timetolive", r#"{"ID": "1", "keys": true}"#).await;
    let json: serde_json::Value = serde_json::from_str(&json.body).expect("JSON");
    assert_eq!((json["grantedTTL"].as_str(), json["keys"].as_array().map(Vec::len)), (Some("600"), Some(5_000)));
    let without_keys = LeaseTimeToLiveRequest { id: 1, keys: false };
    let answer = client.lease.lease_time_to_live(without_keys).await.expect("a response").into_inner();
    assert_eq!((answer.granted_ttl, answer.keys.len()), (600, 0));
}

async fn lease_expires_only_without_renewal(backend: Backend) {
    const KEPT_TTL: i64 = 15;
    /// Without renewals, the other lease would end first.
    const LEFT_TTL: i64 = 16;
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut events = Stream::open(&mut client).await;
    events.create(everything(0)).await;
    let mut granted = Instant::now();
    for (id, key, ttl) in [(1, "kept", KEPT_TTL), (2, "left", LEFT_TTL)] {
        granted = Instant::now();
        client.lease.lease_grant(LeaseGrantRequest { ttl, id }).await.expect("a grant");
        put(&mut client, key, id).await;
    }
    let mut keeper = client.clone();
    let keeping = tokio::spawn(async move {
        loop {
            let request = stream::iter([LeaseKeepAliveRequest { id: 1 }]);
            let mut answers = keeper.lease.lease_keep_alive(request).await.expect("a stream").into_inner();
            assert_eq!(answers.message().await.expect("an answer").expect("an answer").ttl, KEPT_TTL);
            tokio::time::sleep(Duration::from_millis(200)).await;
        }
    });
    // Two puts and the expiry.
    events.read_until(4).await;
    assert!(granted.elapsed() >= Duration::from_secs(LEFT_TTL.unsigned_abs()), "never early");
    let kvs = client.kv.range(all()).await.expect("a range").into_inner().kvs;
    assert_eq!(kvs.iter().map(|kv| &kv.key[..]).collect::<Vec<_>>(), [b"kept"]);
    assert!(!keeping.is_finished(), "the lease was renewed until now");
    keeping.abort();
    let request = stream::iter([LeaseKeepAliveRequest { id: 2 }]);
    let mut answers = client.lease.lease_keep_alive(request).await.expect("a stream").into_inner();
    assert_eq!(
        answers.message().await.expect("an answer").expect("an answer").ttl,
        0,
        "an expired lease cannot be renewed"
    );
}

/// The clients of many leases have ended at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_that_expire_together_share_commits() {
    const COMMITS: &str = "etcd_disk_backend_commit_duration_seconds_count";
    const LEASES: i64 = 300;
    let Some(server) = Server::orlop(Backend::Sqlite).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for id in 1..=LEASES {
        client.lease.lease_grant(LeaseGrantRequest { ttl: 20, id }).await.expect("a lease");
        put(&mut client, &format!("k{id}"), id).await;
    }
    let before = server.metric(COMMITS).await;
    server.pause();
    tokio::time::sleep(Duration::from_secs(21)).await;
    server.resume();
    let all = RangeRequest { count_only: true, ..range("k", "l") };
    eventually("the end of the leases", async || {
        let left = client.clone().kv.range(all.clone()).await.expect("a range").into_inner().count;
        if left == 0 { Ok(()) } else { Err(left) }
    })
    .await;
    let commits = server.metric(COMMITS).await - before;
    assert!(commits < LEASES as f64 / 2.0, "{commits} commits");
}

/// Starts `clients` clients that renew the background lease without pause.
async fn renew_background_lease(server: &Server, clients: usize) -> JoinSet<()> {
    let mut others = JoinSet::new();
    for _ in 0..clients {
        let mut client = Client::connect(server.endpoint()).await;
        others.spawn(async move {
            loop {
                let request = stream::iter([LeaseKeepAliveRequest { id: BACKGROUND_LEASE }]);
                let Ok(answers) = client.lease.lease_keep_alive(request).await else { return };
                let Ok(Some(_)) = answers.into_inner().message().await else { return };
            }
        });
    }
    others
}

/// Grants leases with the ids from 1 to `count`.
async fn grant_many(client: &Client, ttl: i64, count: i64) {
    let grants = (1..=count).map(|id| {
        let mut client = client.clone();
        async move { client.lease.lease_grant(LeaseGrantRequest { ttl, id }).await }
    });
    let granted: Result<Vec<_>, _> = stream::iter(grants).buffered(64).try_collect().await;
    assert_eq!(granted.expect("grants").len() as i64, count);
}

/// Renews these leases as a client does that renews all its leases at once, and checks that none of them is lost.
async fn renew_many(client: &mut Client, ttl: i64, count: i64) {
    let requests: Vec<_> = (1..=count).map(|id| LeaseKeepAliveRequest { id }).collect();
    let answers = client.lease.lease_keep_alive(stream::iter(requests)).await.expect("a stream").into_inner();
    let answers: Vec<_> = answers.map_ok(|answer| (answer.id, answer.ttl)).try_collect().await.expect("answers");
    assert!(answers == (1..=count).map(|id| (id, ttl)).collect::<Vec<_>>(), "each lease is renewed: {answers:?}");
}

/// Returns the number of commits that last wrote the leases. `xmin` identifies the transaction that wrote a row.
async fn lease_commits(datastore: &str) -> i64 {
    let mut database = PgConnection::connect(datastore).await.expect("the database exists");
    let commits = sqlx::query_scalar("SELECT count(DISTINCT xmin::text) FROM lease WHERE id <> $1");
    commits.bind(BACKGROUND_LEASE).fetch_one(&mut database).await.expect("the leases are rows")
}

async fn many_leases_are_kept_alive_on_one_stream(backend: Backend) {
    const TTL: i64 = 60;
    const LEASES: i64 = 1_500;
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: BACKGROUND_LEASE }).await.expect("a grant");
    grant_many(&client, TTL, LEASES).await;
    for others in [0, 16] {
        let _others = renew_background_lease(&server, others).await;
        for _ in 0..2 {
            renew_many(&mut client, TTL, LEASES).await;
        }
    }
    // If each renewal were a commit of its own, all of them could take longer than the TTL.
    let Some(datastore) = server.datastore() else { return };
    let commits = lease_commits(datastore).await;
    assert!(commits < LEASES / 4, "{commits} commits for {LEASES} leases");
}

/// While a commit takes milliseconds, a stream brings more than a few renewals. If a commit renewed only these, the leases of
/// a client with thousands of them would end.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn few_commits_of_a_distant_postgres_renew_many_leases() {
    const TTL: i64 = 600;
    const LEASES: i64 = 2_000;
    /// At least, on average.
    const RENEWED_BY_A_COMMIT: i64 = 32;
    let Some(postgres) = Postgres::shared().await else { return };
    let (link, datastore) = (Link::to(postgres.port()).await, postgres.create_database());
    let server = Server::orlop_on(&link.endpoint(&datastore), &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    grant_many(&client, TTL, LEASES).await;
    link.set_network(NetworkState::Slow(Duration::from_millis(10)));
    renew_many(&mut client, TTL, LEASES).await;
    let commits = lease_commits(&datastore).await;
    assert!(commits <= LEASES / RENEWED_BY_A_COMMIT, "{commits} commits for {LEASES} leases");
}

/// A renewal of an old lease does not extend a new lease with the same id.
async fn lease_regranted_during_a_renewal_expires_on_time(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id: BACKGROUND_LEASE }).await.expect("a grant");
    let others = renew_background_lease(&server, 16).await;
    for id in 1..=60_i64 {
        client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id }).await.expect("a grant");
        let mut renewing = client.clone();
        let renewal = tokio::spawn(async move {
            let request = stream::iter([LeaseKeepAliveRequest { id }]);
            let mut answers = renewing.lease.lease_keep_alive(request).await.expect("a stream").into_inner();
            let _ = answers.message().await;
        });
        // In some of the rounds, the id is granted again between the renewal and its response, which are a few
        // milliseconds apart.
        tokio::time::sleep(Duration::from_millis(id.unsigned_abs() % 20)).await;
        client.lease.lease_revoke(LeaseRevokeRequest { id }).await.expect("a revocation");
        client.lease.lease_grant(LeaseGrantRequest { ttl: 2, id }).await.expect("the id is free again");
        renewal.await.expect("an answer");
    }
    drop(others);
    eventually("the expiry of all leases", async || {
        let left = client.clone().lease.lease_leases(LeaseLeasesRequest {}).await.expect("a list").into_inner().leases;
        if left.iter().all(|lease| lease.id == BACKGROUND_LEASE) { Ok(()) } else { Err(left.len()) }
    })
    .await;
}

/// A renewal that is written to the database costs a commit, so a renewal shortly after another one is not written.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn postgres_skips_the_write_of_a_lease_that_was_just_renewed() {
    const TTL: i64 = 600;
    let Some(server) = Server::orlop(Backend::Postgres).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.lease.lease_grant(LeaseGrantRequest { ttl: TTL, id: 1 }).await.expect("a grant");
    let mut database = PgConnection::connect(server.datastore().expect("Postgres has an endpoint"))
        .await
        .expect("the database exists");
    let (mut last_writer, mut written, mut not_written) = (String::new(), 0, 0);
    let deadline = Instant::now() + DEADLINE;
    while written < 3 || not_written == 0 {
        assert!(Instant::now() < deadline, "renewals written: {written}, not written: {not_written}");
        let began = Instant::now();
        let request = stream::iter([LeaseKeepAliveRequest { id: 1 }]);
        let mut answers = client.lease.lease_keep_alive(request).await.expect("a stream").into_inner();
        assert_eq!(answers.message().await.expect("an answer").expect("an answer").ttl, TTL);
        // `xmin` identifies the transaction that last wrote the row.
        let row = "SELECT xmin::text, extract(epoch FROM deadline - clock_timestamp())::float8 FROM lease";
        let (writer, left): (String, f64) =
            sqlx::query_as(row).fetch_one(&mut database).await.expect("the lease exists");
        let promised = TTL as f64 - began.elapsed().as_secs_f64();
        assert!((promised..=TTL as f64 + 0.1).contains(&left), "{left} s are left, expected at least {promised} s");
        if writer == last_writer {
            not_written += 1
        } else {
            written += 1
        }
        last_writer = writer;
    }
}

async fn leases_and_their_keys_survive_a_restart(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for id in [1, 2, 3] {
        client.lease.lease_grant(LeaseGrantRequest { ttl: 600 + id, id }).await.expect("a grant");
    }
    put(&mut client, "k", 1).await;
    put(&mut client, "l", 2).await;
    client.lease.lease_revoke(LeaseRevokeRequest { id: 3 }).await.expect("a revocation");
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    let leases = client.lease.lease_leases(LeaseLeasesRequest {}).await.expect("a list").into_inner().leases;
    assert_eq!(leases.iter().map(|lease| lease.id).collect::<Vec<_>>(), [1, 2]);
    assert_eq!(ttl_and_keys(&mut client, 1).await, (601, vec!["k".into()]));
    client.lease.lease_revoke(LeaseRevokeRequest { id: 2 }).await.expect("a revocation");
    let found = client.kv.range(get("l")).await.expect("a range").into_inner();
    assert_eq!(found.count, 0);
}

/// Starts Orlop on the data of a server that has stopped, in such a way that the start fails after it has read them.
fn start_in_vain(server: &Server) {
    let mut start = orlop(["--listen-client-urls", "http://127.0.0.1:0", "--data-dir"]);
    start.arg(server.data_dir()).args(["--auth-token", "jwt,sign-method=RS256,pub-key=/nowhere/key.pem"]);
    if let Some(datastore) = server.datastore() {
        start.args(["--datastore-endpoint", datastore]);
    }
    let ended = run(&mut start);
    let text = String::from_utf8_lossy(&ended.stderr);
    assert!(ended.status.code() == Some(1) && text.contains("cannot read /nowhere/key.pem"), "{ended:?}");
}

/// A start that fails is not listed as a member, and changes no lease.
async fn lease_continues_with_its_remaining_time_after_a_stop(backend: Backend) {
    const TTL: i64 = 600;
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let granted = Instant::now();
    client.lease.lease_grant(LeaseGrantRequest { ttl: TTL, id: 1 }).await.expect("a grant");
    let left = async |client: &mut Client| {
        let request = LeaseTimeToLiveRequest { id: 1, keys: false };
        client.lease.lease_time_to_live(request).await.expect("the lease exists").into_inner().ttl
    };
    // The time is in whole seconds, rounded down.
    let left_min = |begin: Instant| TTL - 1 - begin.elapsed().as_secs().cast_signed();
    eventually("the passing of three seconds", async || match left(&mut client.clone()).await {
        ..=596 => Ok(()),
        left => Err(left),
    })
    .await;
    for starts_in_vain in 0..2 {
        assert!(server.terminate().await.success());
        (0..starts_in_vain).for_each(|_| start_in_vain(&server));
        if let Some(datastore) = server.datastore() {
            let mut database = PgConnection::connect(datastore).await.expect("the database exists");
            let members = sqlx::query_scalar("SELECT count(*) FROM member").fetch_one(&mut database).await;
            let members: i64 = members.expect("the members are rows");
            assert_eq!(members, 0, "after {starts_in_vain} starts in vain");
        }
        server.restart().await;
        let mut client = Client::connect(server.endpoint()).await;
        let left = left(&mut client).await;
        let min = left_min(granted);
        assert!((min..=TTL - 3).contains(&left), "{left} s are left, expected at least {min} s");
    }
    // After a renewal and a kill, the start ignores the remaining time that an earlier stop recorded.
    let mut client = Client::connect(server.endpoint()).await;
    let renewed = Instant::now();
    let request = stream::iter([LeaseKeepAliveRequest { id: 1 }]);
    let mut answers = client.lease.lease_keep_alive(request).await.expect("a stream").into_inner();
    assert_eq!(answers.message().await.expect("an answer").expect("an answer").ttl, TTL);
    server.kill();
    server.restart().await;
    let left = left(&mut Client::connect(server.endpoint()).await).await;
    let min = left_min(renewed);
    assert!((min..=TTL).contains(&left), "{left} s are left, expected at least {min} s");
}

/// A batch of requests is one append, which may grant a lease and also revoke it.
async fn changes_of_one_append_apply_in_order(backend: Backend) {
    let folder = tempfile::tempdir().expect("a folder");
    let Some(place) = Place::new(backend, &folder.path().join("orlop.db")).await else { return };
    let log = open_log(&place).await;
    let id = LeaseId(7);
    let (grant, revoke) = (|ttl_secs| LeaseChange::Grant { id, ttl_secs }, LeaseChange::Revoke { id });
    let table: [(&[LeaseChange], Option<i64>); 6] = [
        (&[grant(10)], Some(10)),
        (&[revoke, grant(20)], Some(20)),
        (&[revoke, grant(30), revoke], None),
        (&[grant(40), revoke], None),
        (&[grant(50), revoke, grant(60)], Some(60)),
        (&[revoke], None),
    ];
    for (leases, expected) in table {
        let before = log.meta().await.expect("a position").position;
        let append =
            Append { expected: before, changes: &[], reads: None, leases, compact: None, fact: None, auth: None };
        assert_eq!(log.append(append).await.expect("an append"), Appended::Done, "{leases:?}");
        let meta = log.meta().await.expect("leases");
        let found = meta.leases.first().map(|lease| lease.ttl_secs);
        assert_eq!((meta.leases.len(), found), (usize::from(expected.is_some()), expected), "{leases:?}");
        assert!(
            backend == Backend::Sqlite || meta.position.epoch == before.epoch + 1,
            "the new epoch tells other instances to read the leases: {leases:?}"
        );
    }
    log.close(&[]).await;
}

on_both_backends!(
    all_keys_of_a_lease_are_returned_in_order,
    changes_of_one_append_apply_in_order,
    grants_respect_ttl_and_id_limits,
    keys_expire_with_the_lease_of_their_last_put,
    lease_expires_only_without_renewal,
    leases_and_their_keys_survive_a_restart,
    lease_continues_with_its_remaining_time_after_a_stop,
    many_leases_are_kept_alive_on_one_stream,
    lease_regranted_during_a_renewal_expires_on_time,
);
