//! The Lock and Election services. They use the same keys as clients that implement locks and elections themselves.

use std::time::Duration;

use futures_util::future::select;
use orlop_wire::proto::client::{
    etcdserverpb::{LeaseGrantRequest, LeaseRevokeRequest, RangeRequest},
    v3electionpb::{CampaignRequest, LeaderKey, LeaderRequest, LeaderResponse, ProclaimRequest, ResignRequest},
    v3lockpb::{LockRequest, UnlockRequest},
};
use prost::Message as _;
use tokio::{
    process::Command,
    sync::mpsc,
    task::{JoinHandle, yield_now},
    time::{Instant, sleep, timeout},
};
use tonic::{Code, Status};

use crate::{
    outage::put_with_retries,
    support::{Backend, Client, DEADLINE, Postgres, Server, delete, eventually, on_both_backends, range, skip},
};

async fn grant(client: &mut Client, id: i64) -> i64 {
    let granted = client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id }).await.expect("a lease").into_inner();
    granted.id
}

async fn revoke(client: &mut Client, id: i64) {
    client.lease.lease_revoke(LeaseRevokeRequest { id }).await.expect("the lease existed");
}

/// Requests a lock in a task; the task returns the lock's key.
fn lock(client: &Client, name: &str, lease: i64) -> JoinHandle<Result<String, Status>> {
    let (mut lock, name) = (client.lock.clone(), name.to_owned());
    tokio::spawn(async move {
        let answer = lock.lock(LockRequest { name: name.into(), lease }).await?.into_inner();
        Ok(String::from_utf8_lossy(&answer.key).into_owned())
    })
}

/// Waits until the lock is granted; returns its key.
async fn held(lock: JoinHandle<Result<String, Status>>) -> String {
    let answer = timeout(DEADLINE, lock).await.expect("a response in time").expect("the task ends");
    answer.expect("the lock is granted")
}

/// Waits until `count` keys exist below the prefix.
async fn wait_for_keys(client: &Client, prefix: &str, count: i64) {
    let end = format!("{}0", &prefix[..prefix.len() - 1]);
    let range = RangeRequest { count_only: true, ..range(prefix, end) };
    eventually(&format!("a count of {count} keys below {prefix}"), async || {
        let found = client.clone().kv.range(range.clone()).await.expect("a range").into_inner().count;
        if found == count { Ok(()) } else { Err(found) }
    })
    .await;
}

/// Returns the keys that begin with `prefix`.
async fn keys(client: &mut Client, prefix: &str) -> Vec<String> {
    let range = RangeRequest { keys_only: true, ..range(prefix, format!("{prefix}~")) };
    let found = client.kv.range(range).await.expect("a range").into_inner().kvs;
    found.into_iter().map(|kv| String::from_utf8_lossy(&kv.key).into_owned()).collect()
}

/// Repeats a call in a task until the database is available.
fn repeat<T: Send + 'static>(
    call: impl Fn() -> JoinHandle<Result<T, Status>> + Send + 'static,
) -> JoinHandle<Result<T, Status>> {
    tokio::spawn(async move {
        loop {
            match call().await.expect("the task ends") {
                Err(status) if status.code() == Code::Unavailable => sleep(Duration::from_millis(10)).await,
                done => return done,
            }
        }
    })
}

async fn lock_is_granted_in_request_order(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for id in [0x10, 0x11, 0x12, 0x13] {
        grant(&mut client, id).await;
    }
    assert_eq!(held(lock(&client, "door", 0x10)).await, "door/10");
    assert_eq!(held(lock(&client, "door", 0x10)).await, "door/10", "the holder can lock it again");
    assert_eq!(held(lock(&client, "other", 0x11)).await, "other/11", "another lock is free");
    grant(&mut client, -0x1f).await;
    assert_eq!(held(lock(&client, "third", -0x1f)).await, "third/-1f", "as etcd's client names it");
    let mut waiting = Vec::new();
    for (place, id) in [0x11, 0x12, 0x13].into_iter().enumerate() {
        waiting.push(lock(&client, "door", id));
        wait_for_keys(&client, "door/", 2 + place as i64).await;
    }
    let [second, third, fourth] = <[_; 3]>::try_from(waiting).expect("three wait");
    assert!(!second.is_finished() && !third.is_finished() && !fourth.is_finished());

    client.lock.unlock(UnlockRequest { key: "door/10".into() }).await.expect("the lock is released");
    assert_eq!(held(second).await, "door/11");
    // A client that cancels leaves the queue.
    third.abort();
    wait_for_keys(&client, "door/", 2).await;
    assert!(!fourth.is_finished());
    revoke(&mut client, 0x11).await;
    assert_eq!(held(fourth).await, "door/13", "the end of a lease releases its locks");
}

async fn lock_refuses_invalid_requests_as_etcd(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let refused = lock(&client, "door", 99).await.expect("the task ends").expect_err("there is no such lease");
    assert_eq!((refused.code(), refused.message()), (Code::Unknown, "etcdserver: requested lease not found"));
    let refused = client.lock.unlock(UnlockRequest::default()).await.expect_err("there is no key");
    assert_eq!((refused.code(), refused.message()), (Code::Unknown, "etcdserver: key is not provided"));
    client.lock.unlock(UnlockRequest { key: "nothing".into() }).await.expect("unlocking an unknown key succeeds");
    let own = held(lock(&client, "door", 0)).await;
    assert!(own.starts_with("door/") && own.len() > "door/".len(), "the server grants a lease: {own}");

    grant(&mut client, 0x20).await;
    let waiting = lock(&client, "door", 0x20);
    wait_for_keys(&client, "door/", 2).await;
    revoke(&mut client, 0x20).await;
    client.lock.unlock(UnlockRequest { key: own.into() }).await.expect("the lock is released");
    let expired = timeout(DEADLINE, waiting)
        .await
        .expect("a response in time")
        .expect("the task ends")
        .expect_err("the lease has expired");
    assert_eq!((expired.code(), expired.message()), (Code::Unknown, "mutex: session is expired"));
}

/// The server enforces the deadline itself, because a disconnected client cannot cancel.
async fn lock_wait_ends_at_the_callers_deadline(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for id in [0x10, 0x11] {
        grant(&mut client, id).await;
    }
    assert_eq!(held(lock(&client, "door", 0x10)).await, "door/10");
    let message = LockRequest { name: "door".into(), lease: 0x11 }.encode_to_vec();
    let folder = tempfile::tempdir().expect("a temporary directory can be made");
    let body = folder.path().join("body");
    let len = u8::try_from(message.len()).expect("the length fits");
    std::fs::write(&body, [&[0, 0, 0, 0, len], &message[..]].concat()).expect("a file can be written");
    let asked = Command::new("curl")
        .args(["--silent", "--max-time", "30", "--http2-prior-knowledge", "--dump-header", "-"])
        .args(["--header", "content-type: application/grpc", "--header", "te: trailers"])
        .args(["--header", "grpc-timeout: 300m", "--data-binary", &format!("@{}", body.display())])
        .arg(format!("{}/v3lockpb.Lock/Lock", server.endpoint()))
        .output();
    let Ok(answer) = asked.await else { return skip("curl") };
    let answer = String::from_utf8(answer.stdout).expect("headers are text");
    assert!(answer.contains("grpc-status: 4") && answer.contains("context%20deadline%20exceeded"), "{answer}");
    for (time, error, status) in
        [("300m", "context deadline exceeded", "504"), ("1s", "invalid grpc-timeout: 1s", "400")]
    {
        let asked = Command::new("curl")
            .args(["--silent", "--max-time", "30", "--write-out", "%{http_code}"])
            .args(["--header", &format!("Grpc-Timeout: {time}"), "--data", r#"{"name": "ZG9vcg==", "lease": "17"}"#])
            .arg(format!("{}/v3/lock/lock", server.endpoint()))
            .output();
        let answer = asked.await.expect("curl can be started").stdout;
        let answer = String::from_utf8(answer).expect("the answer is text");
        assert!(answer.contains(error) && answer.ends_with(status), "{answer}");
    }
    wait_for_keys(&client, "door/", 1).await;
}

/// Lets a first lease hold the lock `door`. Returns the call of a second one, which waits for it.
async fn second_in_queue(client: &mut Client) -> JoinHandle<Result<String, Status>> {
    for id in [0x10, 0x11] {
        grant(client, id).await;
    }
    assert_eq!(held(lock(client, "door", 0x10)).await, "door/10");
    let waiting = lock(client, "door", 0x11);
    wait_for_keys(client, "door/", 2).await;
    waiting
}

async fn waiting_lock_is_told_that_the_server_stops(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let waiting = second_in_queue(&mut client).await;
    server.terminate().await;
    let stopped = waiting.await.expect("the task ends").expect_err("the server stops");
    assert_eq!((stopped.code(), stopped.message()), (Code::Unavailable, "etcdserver: server stopped"));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn lock_is_shared_by_all_instances() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let (one, two) = (Server::orlop_on(&datastore, &[]).await, Server::orlop_on(&datastore, &[]).await);
    let (mut a, mut b) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    grant(&mut a, 0x10).await;
    grant(&mut b, 0x11).await;
    assert_eq!(held(lock(&a, "door", 0x10)).await, "door/10");
    let waiting = lock(&b, "door", 0x11);
    wait_for_keys(&a, "door/", 2).await;
    a.lock.unlock(UnlockRequest { key: "door/10".into() }).await.expect("the lock is released");
    assert_eq!(held(waiting).await, "door/11");
}

/// An entry that remains would block the lock as long as its client keeps the lease alive.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn client_that_cancels_during_an_outage_leaves_the_queue() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let waiting = second_in_queue(&mut client).await;
    postgres.stop();
    waiting.abort();
    eventually("a failed attempt", async || {
        let log = server.log();
        if log.contains("cannot remove the entry of a cancelled call") { Ok(()) } else { Err(log) }
    })
    .await;
    postgres.start_again().await;
    put_with_retries(&client, "after").await;
    wait_for_keys(&client, "door/", 1).await;
}

/// The server tries again to remove the entries of cancelled calls, until later calls with the same lease have found them.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn removal_after_an_outage_spares_the_entries_of_later_calls() {
    let Some(postgres) = Postgres::start().await else { return };
    let server = Server::orlop_on(&postgres.create_database(), &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let waiting = second_in_queue(&mut client).await;
    let first = elected(campaign(&client, "seat", 0x10, "alice")).await;
    let candidate = campaign(&client, "seat", 0x11, "bob");
    wait_for_keys(&client, "seat/", 2).await;
    grant(&mut client, 0x12).await;

    postgres.stop();
    waiting.abort();
    candidate.abort();
    eventually("two failed attempts", async || {
        let log = server.log();
        if log.matches("cannot remove the entry of a cancelled call").count() == 2 { Ok(()) } else { Err(log) }
    })
    .await;
    let (locks, campaigns) = (client.clone(), client.clone());
    let waiting = repeat(move || lock(&locks, "door", 0x11));
    let candidate = repeat(move || campaign(&campaigns, "seat", 0x11, "bob"));
    postgres.start_again().await;
    put_with_retries(&client, "after").await;
    client.lock.unlock(UnlockRequest { key: "door/10".into() }).await.expect("the lock is released");
    client.election.resign(ResignRequest { leader: Some(first) }).await.expect("the leader resigns");
    assert_eq!(held(waiting).await, "door/11");
    assert_eq!(&elected(candidate).await.key[..], b"seat/11");

    // A removal would follow within a second.
    let others = select(lock(&client, "door", 0x12), campaign(&client, "seat", 0x12, "carol"));
    assert!(timeout(Duration::from_secs(3), others).await.is_err(), "two clients have the same lock or seat");
    assert_eq!(keys(&mut client, "door/1").await, ["door/11", "door/12"]);
    assert_eq!(keys(&mut client, "seat/1").await, ["seat/11", "seat/12"]);
}

/// A client that gives up waiting for an answer, and tries again at once.
async fn call_that_repeats_a_cancelled_one_keeps_its_entry(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut expected = Vec::new();
    for round in 0..20 {
        let (first, second) = (0x100 + 2 * round, 0x101 + 2 * round);
        for lease in [first, second] {
            grant(&mut client, lease).await;
        }
        let (door, seat) = (format!("door{round:02}"), format!("seat{round:02}"));
        held(lock(&client, &door, first)).await;
        let leader = elected(campaign(&client, &seat, first, "alice")).await;
        let call = || (lock(&client, &door, second), campaign(&client, &seat, second, "bob"));
        let (waiting, candidate) = call();
        for name in [&door, &seat] {
            wait_for_keys(&client, &format!("{name}/"), 2).await;
        }
        waiting.abort();
        candidate.abort();
        let (waiting, candidate) = call();
        let mut holder = client.clone();
        holder.lock.unlock(UnlockRequest { key: format!("{door}/{first:x}").into() }).await.expect("it is released");
        holder.election.resign(ResignRequest { leader: Some(leader) }).await.expect("the leader resigns");
        expected.push(held(waiting).await);
        assert_eq!(String::from_utf8_lossy(&elected(candidate).await.key), format!("{seat}/{second:x}"));
        expected.push(format!("{seat}/{second:x}"));
    }
    expected.sort();
    let found = [keys(&mut client, "door").await, keys(&mut client, "seat").await].concat();
    assert_eq!(found, expected, "each call that was granted something has its key");
}

/// Also while its entry is being written.
async fn call_that_is_cancelled_at_any_moment_leaves_its_queue(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    grant(&mut client, 0x10).await;
    held(lock(&client, "door", 0x10)).await;
    elected(campaign(&client, "seat", 0x10, "alice")).await;
    for number in 0..100 {
        let lease = grant(&mut client, 0x100 + i64::from(number)).await;
        let (waiting, candidate) = (lock(&client, "door", lease), campaign(&client, "seat", lease, "bob"));
        wait_exactly(Duration::from_micros(50) * number).await;
        waiting.abort();
        candidate.abort();
    }
    for prefix in ["door/", "seat/"] {
        wait_for_keys(&client, prefix, 1).await;
    }
}

/// Its client has the lock whether it cancels the repeated call or not.
async fn call_that_repeats_a_granted_one_leaves_its_key(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let waiting = second_in_queue(&mut client).await;
    elected(campaign(&client, "seat", 0x10, "alice")).await;
    let candidate = campaign(&client, "seat", 0x11, "bob");
    wait_for_keys(&client, "seat/", 2).await;
    for number in 0..100 {
        let repeated = (lock(&client, "door", 0x10), campaign(&client, "seat", 0x10, "alice"));
        wait_exactly(Duration::from_micros(50) * number).await;
        repeated.0.abort();
        repeated.1.abort();
    }
    let granted = timeout(Duration::from_millis(500), select(waiting, candidate)).await;
    assert!(granted.is_err(), "two clients have the same lock or seat");
    assert_eq!(keys(&mut client, "door/1").await, ["door/10", "door/11"]);
    assert_eq!(keys(&mut client, "seat/1").await, ["seat/10", "seat/11"]);
}

/// Waits without sleeping, which is not exact enough.
async fn wait_exactly(time: Duration) {
    let moment = Instant::now() + time;
    while Instant::now() < moment {
        yield_now().await;
    }
}

fn campaign(client: &Client, name: &str, lease: i64, value: &str) -> JoinHandle<Result<LeaderKey, Status>> {
    let mut election = client.election.clone();
    let request = CampaignRequest { name: name.to_owned().into(), lease, value: value.to_owned().into() };
    tokio::spawn(async move { Ok(election.campaign(request).await?.into_inner().leader.expect("a leader")) })
}

async fn elected(campaign: JoinHandle<Result<LeaderKey, Status>>) -> LeaderKey {
    timeout(DEADLINE, campaign)
        .await
        .expect("a response in time")
        .expect("the task ends")
        .expect("the client is elected")
}

async fn leader(client: &mut Client) -> Result<String, Status> {
    let answer = client.election.leader(LeaderRequest { name: "seat".into() }).await?.into_inner();
    Ok(String::from_utf8_lossy(&answer.kv.expect("a leader has a pair").value).into_owned())
}

/// Returns the values of the successive leaders. The call is made in a task, because on etcd it does not return before
/// the first leader is elected.
fn observe(client: &Client) -> mpsc::UnboundedReceiver<String> {
    let (sender, values) = mpsc::unbounded_channel();
    let mut election = client.election.clone();
    tokio::spawn(async move {
        let observed = election.observe(LeaderRequest { name: "seat".into() }).await;
        let mut observed = observed.expect("a stream").into_inner();
        while let Ok(Some(LeaderResponse { kv: Some(kv), .. })) = observed.message().await {
            // The receiver is dropped when the test ends.
            sender.send(String::from_utf8_lossy(&kv.value).into_owned()).ok();
        }
    });
    values
}

async fn election_passes_from_one_to_the_next(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let none = leader(&mut client).await.expect_err("there is no leader");
    assert_eq!((none.code(), none.message()), (Code::Unknown, "election: no leader"));
    let mut observed = observe(&client);
    for id in [0x10, 0x11] {
        grant(&mut client, id).await;
    }
    let mut seen =
        async || timeout(DEADLINE, observed.recv()).await.expect("a leader comes").expect("the stream is open");
    let first = elected(campaign(&client, "seat", 0x10, "alice")).await;
    assert_eq!((&first.key[..], &first.name[..], first.lease), (&b"seat/10"[..], &b"seat"[..], 0x10));
    assert_eq!(leader(&mut client).await.expect("a leader"), "alice");
    assert_eq!(seen().await, "alice");
    let again = elected(campaign(&client, "seat", 0x10, "Alice")).await;
    assert_eq!((&again.key, again.rev), (&first.key, first.rev), "the leader stays, with another value");
    assert_eq!(seen().await, "Alice");
    let proclaim = |leader: &LeaderKey, value: &str| ProclaimRequest {
        leader: Some(leader.clone()),
        value: value.to_owned().into(),
    };
    client.election.proclaim(proclaim(&first, "ALICE")).await.expect("alice is the leader");
    assert_eq!(seen().await, "ALICE");

    let second = campaign(&client, "seat", 0x11, "bob");
    wait_for_keys(&client, "seat/", 2).await;
    assert_eq!(leader(&mut client).await.expect("a leader"), "ALICE");
    client.election.resign(ResignRequest { leader: Some(first.clone()) }).await.expect("the leader resigns");
    let second = elected(second).await;
    assert_eq!(seen().await, "bob");
    let late = client.election.proclaim(proclaim(&first, "alice")).await.expect_err("alice is no longer the leader");
    assert_eq!((late.code(), late.message()), (Code::Unknown, "election: not leader"));
    client.election.resign(ResignRequest { leader: Some(first) }).await.expect("resigning again has no effect");
    assert_eq!(leader(&mut client).await.expect("a leader"), "bob");
    revoke(&mut client, second.lease).await;
    assert_eq!(leader(&mut client).await.expect_err("the lease has expired").message(), "election: no leader");
}

async fn election_refuses_invalid_requests_as_etcd(backend: Backend) {
    let Some(server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let no_leader = "\"leader\" field must be provided";
    let no_key = "etcdserver: key is not provided";
    let empty = || Some(LeaderKey::default());
    let answers = [
        (client.election.proclaim(ProclaimRequest::default()).await.map(drop), no_leader),
        (client.election.resign(ResignRequest::default()).await.map(drop), no_leader),
        (client.election.proclaim(ProclaimRequest { leader: empty(), value: "v".into() }).await.map(drop), no_key),
        (client.election.resign(ResignRequest { leader: empty() }).await.map(drop), no_key),
    ];
    for (answer, text) in answers {
        let refused = answer.expect_err("the request has no leader");
        assert_eq!((refused.code(), refused.message()), (Code::Unknown, text));
    }
    let unleased =
        campaign(&client, "seat", 99, "v").await.expect("the task ends").expect_err("there is no such lease");
    assert_eq!((unleased.code(), unleased.message()), (Code::Unknown, "etcdserver: requested lease not found"));

    // A key that a client puts below the election's name counts as a candidate, like the server's own keys.
    client.put("seat/aa", "carol").await;
    assert_eq!(leader(&mut client).await.expect("a leader"), "carol");
    grant(&mut client, 0x10).await;
    let waiting = campaign(&client, "seat", 0x10, "dave");
    wait_for_keys(&client, "seat/", 2).await;
    assert!(!waiting.is_finished(), "dave waits");
    client.kv.delete_range(delete("seat/aa")).await.expect("a delete");
    assert_eq!(&elected(waiting).await.key[..], b"seat/10");
    assert_eq!(leader(&mut client).await.expect("a leader"), "dave");
}

/// etcd answers that the client is elected.
async fn campaign_of_an_ended_lease_is_refused(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for id in [0x10, 0x11] {
        grant(&mut client, id).await;
    }
    // The value is in the request once, so that a large one is accepted also from a leader.
    elected(campaign(&client, "seat", 0x10, &"a".repeat(1_000_000))).await;
    let first = elected(campaign(&client, "seat", 0x10, &"b".repeat(1_000_000))).await;
    let candidate = campaign(&client, "seat", 0x11, "bob");
    wait_for_keys(&client, "seat/", 2).await;
    revoke(&mut client, 0x11).await;
    client.election.resign(ResignRequest { leader: Some(first) }).await.expect("the leader resigns");
    let refused = timeout(DEADLINE, candidate).await.expect("a response in time").expect("the task ends");
    let refused = refused.expect_err("the lease has ended");
    assert_eq!((refused.code(), refused.message()), (Code::Unknown, "election: not leader"));
}

on_both_backends!(
    call_that_is_cancelled_at_any_moment_leaves_its_queue,
    call_that_repeats_a_cancelled_one_keeps_its_entry,
    call_that_repeats_a_granted_one_leaves_its_key,
    campaign_of_an_ended_lease_is_refused,
    lock_is_granted_in_request_order,
    lock_refuses_invalid_requests_as_etcd,
    lock_wait_ends_at_the_callers_deadline,
    waiting_lock_is_told_that_the_server_stops,
    election_passes_from_one_to_the_next,
    election_refuses_invalid_requests_as_etcd,
);
