//! Several instances on one Postgres database: each sees the writes that another acknowledged, even if an instance
//! is slow, paused or stopped.

mod leases;

use std::{collections::BTreeSet, time::Duration};

use orlop_wire::proto::client::etcdserverpb::{
    CompactionRequest, Compare, DeleteRangeRequest, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseLeasesRequest,
    LeaseRevokeRequest, LeaseTimeToLiveRequest, MemberListRequest, PutRequest, RangeRequest, RequestOp, StatusRequest,
    TxnRequest, WatchProgressRequest, compare::TargetUnion, request_op::Request, watch_request::RequestUnion,
};
use sqlx::{Connection as _, PgConnection, postgres::PgListener};
use tokio::task::JoinSet;
use tonic::Code;

use crate::support::{Client, Postgres, Server, Stream, all, delete, eventually, everything, get, put, range};

/// Instances of one store, named a, b, c.
async fn instances<const N: usize>() -> Option<[(Server, Client); N]> {
    let datastore = Postgres::shared().await?.create_database();
    let mut all = Vec::new();
    for name in ["a", "b", "c"].iter().take(N) {
        let server = Server::orlop_on(&datastore, &["--name", name]).await;
        let client = Client::connect(server.endpoint()).await;
        all.push((server, client));
    }
    all.try_into().ok()
}

/// Returns the key's value at the revision of the request.
async fn value_at(client: &mut Client, request: RangeRequest) -> Option<String> {
    let kvs = client.kv.range(request).await.expect("the server takes a range").into_inner().kvs;
    kvs.first().map(|kv| String::from_utf8_lossy(&kv.value).into_owned())
}

/// Puts `new` if the key's value is `old`.
fn swap(key: &str, old: &str, new: &str) -> TxnRequest {
    let compare = Compare {
        key: key.to_owned().into(),
        target: 3,
        target_union: Some(TargetUnion::Value(old.to_owned().into())),
        ..Default::default()
    };
    let op = |request| RequestOp { request: Some(request) };
    TxnRequest {
        compare: vec![compare],
        success: vec![op(Request::RequestPut(put(key, new)))],
        failure: vec![op(Request::RequestRange(get(key)))],
    }
}

pub async fn keep_alive(client: &mut Client, id: i64) -> i64 {
    let request = tokio_stream::iter([LeaseKeepAliveRequest { id }]);
    let mut answers = client.lease.lease_keep_alive(request).await.expect("a stream").into_inner();
    answers.message().await.expect("an answer").expect("an answer").ttl
}

#[tokio::test]
async fn each_instance_reads_what_another_acknowledged() {
    let Some([(_one, mut a), (_two, mut b), (_three, mut c)]) = instances().await else { return };
    for round in 0..60 {
        let value = format!("value {round}");
        let revision = a.put("k", &value).await;
        assert_eq!(value_at(&mut b, get("k")).await.as_ref(), Some(&value), "a range");
        let read = TxnRequest { success: swap("k", "", "").failure, ..Default::default() };
        let answer = c.kv.txn(read).await.expect("a transaction").into_inner();
        assert!(answer.header.expect("a header").revision >= revision, "a transaction that reads");
        let swapped = b.kv.txn(swap("k", &value, "swapped")).await.expect("a transaction").into_inner();
        assert!(swapped.succeeded, "a compare");
        let again = a.kv.txn(swap("k", &value, "again")).await.expect("a transaction").into_inner();
        assert!(!again.succeeded, "a compare that fails and writes nothing");
        assert!(again.header.expect("a header").revision > revision);
        let delete = DeleteRangeRequest { prev_kv: true, ..delete("k") };
        let deleted = c.kv.delete_range(delete.clone()).await.expect("a delete").into_inner();
        assert_eq!(&deleted.prev_kvs[0].value[..], b"swapped");
        let nothing = a.kv.delete_range(delete).await.expect("a delete").into_inner();
        assert_eq!(nothing.deleted, 0);
        assert!(nothing.header.expect("a header").revision >= deleted.header.expect("a header").revision);
    }
}

#[tokio::test]
async fn watches_get_events_of_all_instances_before_progress() {
    let Some([(_one, mut a), (_two, mut b)]) = instances().await else { return };
    let mut stream = Stream::open(&mut b).await;
    stream.create(everything(0)).await;
    let mut seen = Vec::new();
    for round in 0..100 {
        let revision = a.put("k", round.to_string()).await;
        stream.ask(RequestUnion::ProgressRequest(WatchProgressRequest {}));
        loop {
            let answer = stream.next().await;
            let header = answer.header.expect("a header").revision;
            if answer.events.is_empty() {
                assert!(header >= revision, "progress at {header}, requested after the put at {revision}");
                break;
            }
            seen.extend(answer.events.iter().map(|event| event.kv.as_ref().expect("a pair").mod_revision));
        }
        assert_eq!(seen.last(), Some(&revision), "progress does not overtake events");
    }
    assert_eq!(seen, (2..102).collect::<Vec<_>>());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn concurrent_increments_on_all_instances_are_counted_without_starvation() {
    let Some(all) = instances::<3>().await else { return };
    let mut first = all[0].1.clone();
    first.put("counter", "0").await;
    let mut tasks = Vec::new();
    for (_, client) in &all {
        for _ in 0..3 {
            let mut client = client.clone();
            tasks.push(tokio::spawn(async move {
                for _ in 0..40 {
                    loop {
                        let old = value_at(&mut client, get("counter")).await.expect("the counter exists");
                        let new = (old.parse::<u32>().expect("a number") + 1).to_string();
                        let txn = swap("counter", &old, &new);
                        if client.kv.txn(txn).await.expect("a transaction").into_inner().succeeded {
                            break;
                        }
                    }
                }
            }));
        }
    }
    for task in tasks {
        task.await.expect("every task counts to the end");
    }
    assert_eq!(value_at(&mut first, get("counter")).await.as_deref(), Some("360"));
    let at_361 = RangeRequest { revision: 361, ..get("counter") };
    assert_eq!(value_at(&mut first, at_361).await.as_deref(), Some("359"), "one revision per increment");
}

/// Each instance writes keys of its own, in all forms, and reads those of the others.
#[tokio::test]
async fn writes_of_different_keys_do_not_conflict() {
    const ROUNDS: i64 = 150;
    let Some(all) = instances::<3>().await else { return };
    for (server, _) in &all {
        eventually("an instance knows the others", async || match server.metric("orlop_instances").await {
            3.0 => Ok(()),
            known => Err(known),
        })
        .await;
    }
    let mut tasks = JoinSet::new();
    for (number, (server, client)) in all.into_iter().enumerate() {
        tasks.spawn(async move {
            let mut clients = [client.clone(), client.clone(), client];
            for round in 0..ROUNDS {
                let key = |kind: &str| format!("{number}/{kind}/{}", round % 10);
                let last = if round < 10 { String::new() } else { (round - 10).to_string() };
                let [a, b, c] = &mut clients;
                let delete = DeleteRangeRequest {
                    key: format!("{number}/put/").into(),
                    range_end: format!("{number}/put/5").into(),
                    prev_kv: true,
                };
                let (put, txn, delete) = tokio::join!(
                    a.kv.put(PutRequest { prev_kv: true, ..put(key("put"), round.to_string()) }),
                    b.kv.txn(swap(&key("swap"), &last, &round.to_string())),
                    async { if round % 10 == 9 { Some(c.kv.delete_range(delete).await) } else { None } },
                );
                let revision = put.expect("a put").into_inner().header.expect("a header").revision;
                let at = RangeRequest { revision, ..get(key("put")) };
                assert_eq!(value_at(a, at).await, Some(round.to_string()), "at the revision of the response");
                let txn = txn.expect("a transaction").into_inner();
                if round < 10 {
                    b.put(key("swap"), round.to_string()).await;
                } else {
                    assert!(txn.succeeded, "{txn:?}");
                }
                delete.map(|deleted| deleted.expect("a delete"));
            }
            (server, clients)
        });
    }
    let mut servers = Vec::new();
    while let Some(done) = tasks.join_next().await {
        servers.push(done.expect("the writes succeed"));
    }
    let mut moved = 0.0;
    for (server, _) in &servers {
        assert_eq!(server.metric("orlop_append_conflicts_total").await, 0.0);
        moved += server.metric("orlop_appends_behind_total").await;
    }
    assert!(moved > 0.0, "no append met another");
    let mut seen = Vec::new();
    for (_, [client, ..]) in &mut servers {
        seen.push(client.kv.range(range("0", "4")).await.expect("a range").into_inner().kvs);
    }
    assert!(seen.iter().all(|kvs| kvs == &seen[0] && kvs.len() >= 3 * 10), "{seen:?}");
}

#[tokio::test]
async fn members_join_and_leave_and_agree_on_a_leader() {
    let Some([(one, mut a), (mut two, mut b), (_three, mut c)]) = instances().await else { return };
    let mut ids = BTreeSet::new();
    for client in [&mut a, &mut b, &mut c] {
        let list = client.cluster.member_list(MemberListRequest::default()).await.expect("a list").into_inner();
        let names: Vec<&str> = list.members.iter().map(|member| member.name.as_str()).collect();
        assert_eq!(names, ["a", "b", "c"], "the oldest member first");
        assert_eq!(list.members[0].client_ur_ls, [one.endpoint()]);
        let header = list.header.expect("a header");
        assert!(list.members.iter().any(|member| member.id == header.member_id), "each member is in its own list");
        ids.insert((header.member_id, header.cluster_id));
    }
    assert_eq!(ids.len(), 3, "each member has its own id");
    assert_eq!(ids.iter().map(|(_, cluster)| cluster).collect::<BTreeSet<_>>().len(), 1, "one cluster");
    let mut leader = None;
    for client in [&mut a, &mut b, &mut c] {
        let status = eventually("an agreement on the leader", async || {
            let status = client.clone().maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
            let agreed = leader.is_none_or(|leader| leader == status.leader);
            if agreed { Ok(status) } else { Err(status.leader) }
        })
        .await;
        leader = Some(status.leader);
    }

    two.terminate().await;
    let list = c.cluster.member_list(MemberListRequest::default()).await.expect("a list").into_inner();
    let names: Vec<&str> = list.members.iter().map(|member| member.name.as_str()).collect();
    assert_eq!(names, ["a", "c"], "a stopped member deregisters");
    two.restart().await;
    let mut b = Client::connect(two.endpoint()).await;
    let list = b.cluster.member_list(MemberListRequest::default()).await.expect("a list").into_inner();
    let header = list.header.expect("a header");
    assert!(ids.contains(&(header.member_id, header.cluster_id)), "a restart keeps the id");
    assert_eq!(list.members.len(), 3);
}

#[tokio::test]
async fn leases_are_shared_by_all_instances() {
    let Some([(_one, mut a), (_two, mut b)]) = instances().await else { return };
    let grant = |id, ttl| LeaseGrantRequest { ttl, id };
    a.lease.lease_grant(grant(7, 100)).await.expect("a grant");
    let twice = b.lease.lease_grant(grant(7, 100)).await.expect_err("the id is taken");
    assert_eq!(twice.code(), Code::FailedPrecondition);
    b.kv.put(PutRequest { lease: 7, ..put("k", "1") }).await.expect("a put");
    assert_eq!(keep_alive(&mut b, 7).await, 100);
    let query = LeaseTimeToLiveRequest { id: 7, keys: true };
    let seen = a.lease.lease_time_to_live(query).await.expect("a response").into_inner();
    assert_eq!((seen.granted_ttl, &seen.keys[..]), (100, &["k".into()][..]));
    assert!((50..=99).contains(&seen.ttl), "{seen:?}");

    b.lease.lease_revoke(LeaseRevokeRequest { id: 7 }).await.expect("a revocation");
    assert_eq!(keep_alive(&mut a, 7).await, 0);
    let refused = a.kv.put(PutRequest { lease: 7, ..put("k", "2") }).await.expect_err("the lease is gone");
    assert_eq!(refused.code(), Code::NotFound);
    assert_eq!(value_at(&mut a, get("k")).await, None, "the key was deleted with the lease");
    assert_eq!(a.lease.lease_leases(LeaseLeasesRequest {}).await.expect("a list").into_inner().leases, []);
    a.lease.lease_grant(grant(7, 50)).await.expect("the id is free again");
    let seen = b.lease.lease_time_to_live(LeaseTimeToLiveRequest { id: 7, keys: true }).await.expect("a response");
    assert_eq!((seen.get_ref().granted_ttl, seen.get_ref().keys.len()), (50, 0));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn leases_granted_concurrently_on_all_instances_exist() {
    let Some(all) = instances::<3>().await else { return };
    let mut tasks = Vec::new();
    for (instance, (_, client)) in (0..).zip(&all) {
        for task in 0..4 {
            let mut client = client.clone();
            tasks.push(tokio::spawn(async move {
                for round in 0..60 {
                    let id = 1 + instance * 10_000 + task * 100 + round;
                    client.lease.lease_grant(LeaseGrantRequest { ttl: 100, id }).await.expect("a grant");
                    client.kv.put(PutRequest { lease: id, ..put(id.to_string(), "") }).await.expect("a put");
                    if round % 2 == 0 {
                        client.lease.lease_revoke(LeaseRevokeRequest { id }).await.expect("a revocation");
                    }
                }
            }));
        }
    }
    for task in tasks {
        task.await.expect("the granted lease exists");
    }
    for (_, client) in &all {
        let leases =
            client.clone().lease.lease_leases(LeaseLeasesRequest {}).await.expect("a list").into_inner().leases;
        assert_eq!(leases.len(), 3 * 4 * 30);
    }
}

/// The test sends a marker notification after an append. If the marker arrives first, the append has sent none.
#[tokio::test]
async fn append_notifies_only_if_another_instance_is_connected() {
    let Some([(one, mut a)]) = instances().await else { return };
    let datastore = one.datastore().expect("a database");
    let mut listener = PgListener::connect(datastore).await.expect("a connection");
    let mut database = PgConnection::connect(datastore).await.expect("a connection");
    let channel: String =
        sqlx::query_scalar("SELECT orlop_channel()").fetch_one(&mut database).await.expect("the channel's name");
    listener.listen(&channel).await.expect("the channel can be listened to");
    a.put("k", "alone").await;
    let marker = sqlx::query("SELECT pg_notify($1, 'marker')").bind(&channel).execute(&mut database).await;
    marker.expect("a notification can be sent");
    assert_eq!(listener.recv().await.expect("the marker comes").payload(), "marker");

    let _two = Server::orlop_on(datastore, &["--name", "b"]).await;
    let revision = a.put("k", "beside another").await;
    assert_eq!(listener.recv().await.expect("a notification").payload(), revision.to_string());
}

/// The paused instance granted the leases and, if it ran, would be the first to expire them.
#[tokio::test]
async fn lease_expires_once_while_an_instance_is_paused_and_stays_expired() {
    const KEPT_TTL: i64 = 6;
    let Some([(one, mut a), (_two, mut b)]) = instances().await else { return };
    let mut stream = Stream::open(&mut b).await;
    stream.create(everything(0)).await;
    // Long enough to renew the first lease on a machine that stalls. The second one ends before the paused instance counts
    // as dead, after 10 s.
    for (id, key, ttl) in [(1, "kept", KEPT_TTL), (2, "left", KEPT_TTL + 1)] {
        a.lease.lease_grant(LeaseGrantRequest { ttl, id }).await.expect("a grant");
        a.kv.put(PutRequest { lease: id, ..put(key, "1") }).await.expect("a put");
    }
    one.pause();
    let mut keeper = b.clone();
    let keeping = tokio::spawn(async move {
        loop {
            assert_eq!(keep_alive(&mut keeper, 1).await, KEPT_TTL, "the lease is renewed on the other instance");
            tokio::time::sleep(Duration::from_millis(300)).await;
        }
    });
    let mut deleted = Vec::new();
    while deleted.is_empty() {
        for event in stream.next().await.events.into_iter().filter(|event| event.r#type == 1) {
            deleted.push(event.kv.expect("a pair").key);
        }
    }
    assert_eq!(deleted, ["left"]);
    let after = b.put("left", "put again").await;

    one.resume();
    assert_eq!(keep_alive(&mut a, 2).await, 0, "an expired lease cannot be renewed");
    assert_eq!(keep_alive(&mut a, 1).await, KEPT_TTL);
    let end = a.put("end", "").await;
    assert_eq!(stream.read_until(end).await, (after..=end).collect::<Vec<_>>(), "there are no other events");
    assert_eq!(value_at(&mut a, get("left")).await.as_deref(), Some("put again"));
    assert!(!keeping.is_finished(), "the lease was renewed until now");
    keeping.abort();
}

#[tokio::test]
async fn compaction_applies_to_all_instances_and_cancels_older_watches() {
    let Some([(_one, mut a), (_two, mut b)]) = instances().await else { return };
    for round in 0..50 {
        a.put("k", round.to_string()).await;
    }
    let compact = CompactionRequest { revision: 40, physical: true };
    a.kv.compact(compact).await.expect("a compaction");
    let old = b.kv.range(RangeRequest { revision: 39, ..get("k") }).await.expect_err("the revision is compacted");
    assert_eq!(old.code(), Code::OutOfRange);
    assert_eq!(b.kv.compact(compact).await.expect_err("the revision is compacted").code(), Code::OutOfRange);
    assert_eq!(value_at(&mut b, RangeRequest { revision: 40, ..get("k") }).await.as_deref(), Some("38"));
    for client in [&mut a, &mut b] {
        let mut stream = Stream::open(client).await;
        stream.create(everything(5)).await;
        let canceled = stream.next().await;
        assert!(canceled.canceled && canceled.compact_revision == 40, "{canceled:?}");
        let created = stream.create(everything(41)).await;
        assert!(!created.canceled);
        assert_eq!(stream.read_until(51).await, (41..=51).collect::<Vec<_>>());
    }
}

/// The killed instance leaves a compacted put in the log. If the next compaction then deleted only the newer put and
/// the delete, a restarted instance would read the old put as live.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn instance_killed_before_purging_does_not_revive_deleted_keys() {
    for _ in 0..10 {
        let Some(pair) = instances().await else { return };
        if Box::pin(kill_between_compaction_and_deletion(pair)).await {
            return;
        }
    }
    panic!("no kill came before the rows were deleted");
}

/// Returns false if the process was killed too late.
async fn kill_between_compaction_and_deletion([(mut one, mut a), (two, mut b)]: [(Server, Client); 2]) -> bool {
    a.put("k", "1").await;
    let compacted = a.put("k", "2").await;
    // The rows are deleted half a second after the compaction, so the kill usually comes before that.
    let compact = CompactionRequest { revision: compacted, physical: false };
    a.kv.compact(compact).await.expect("a compaction");
    one.kill();
    let rows = async || {
        let mut database = PgConnection::connect(two.datastore().expect("a database")).await.expect("a connection");
        let ids = sqlx::query_scalar("SELECT id FROM kv_log ORDER BY id").fetch_all(&mut database).await;
        let ids: Vec<i64> = ids.expect("the log can be read with SQL");
        ids
    };
    if rows().await != [2, 3] {
        return false;
    }

    b.kv.delete_range(delete("k")).await.expect("a delete");
    let last = b.put("other", "1").await;
    b.kv.compact(CompactionRequest { revision: last, physical: true }).await.expect("a compaction");
    assert_eq!(rows().await, [last]);

    one.restart().await;
    assert_eq!(value_at(&mut Client::connect(one.endpoint()).await, get("k")).await, None);
    true
}

/// An instance is paused with writes in flight until the state they depend on is compacted.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn stale_writer_does_not_change_history() {
    let Some([(one, mut a), (two, mut b)]) = instances().await else { return };
    let mut stream = Stream::open(&mut a).await;
    stream.create(everything(0)).await;
    for number in 0..20 {
        a.put(format!("key {number}"), "before").await;
    }
    stream.read_until(21).await;
    let mut waiting = Vec::new();
    for number in 0..200 {
        let mut client = a.clone();
        waiting.push(tokio::spawn(async move {
            let key = format!("key {}", number % 20);
            let answer = client.kv.txn(swap(&key, "before", &format!("stale {number}"))).await;
            answer.map(|answer| (key, number, answer.into_inner()))
        }));
        if number == 100 {
            one.pause();
        }
    }
    // Waits until the database has executed all appends that the paused instance sent.
    let head_before_deletes = eventually("the end of the appends", async || {
        let head = |answer: tonic::Response<orlop_wire::proto::client::etcdserverpb::StatusResponse>| {
            answer.into_inner().header.expect("a header").revision
        };
        let before = head(b.clone().maintenance.status(StatusRequest {}).await.expect("a status"));
        tokio::time::sleep(Duration::from_millis(300)).await;
        let after = head(b.clone().maintenance.status(StatusRequest {}).await.expect("a status"));
        if before == after { Ok(after) } else { Err(after) }
    })
    .await;
    for number in 0..20 {
        b.kv.delete_range(delete(format!("key {number}"))).await.expect("a delete");
    }
    let last = b.put("last", "").await;
    b.kv.compact(CompactionRequest { revision: last, physical: true }).await.expect("a compaction");

    one.resume();
    let mut swapped = BTreeSet::new();
    for task in waiting {
        match task.await.expect("a request ends") {
            Ok((key, number, answer)) if answer.succeeded => {
                let revision = answer.header.expect("a header").revision;
                assert!(revision <= head_before_deletes, "{key} was swapped at {revision}, after it was deleted");
                assert!(swapped.insert(key.clone()), "{key} was swapped twice, the second time by {number}");
            }
            Ok((_, _, answer)) => assert!(answer.header.expect("a header").revision >= 21),
            Err(status) => assert_eq!(status.code(), Code::Unavailable, "{status:?}"),
        }
    }
    for client in [&mut a, &mut b] {
        let answer = client.kv.range(all()).await.expect("a range").into_inner();
        assert_eq!(answer.header.expect("a header").revision, last, "the resumed instance appended nothing");
        let keys: Vec<_> = answer.kvs.iter().map(|kv| &kv.key[..]).collect();
        assert_eq!(keys, [b"last"]);
    }
    let compacted = loop {
        let answer = stream.next().await;
        if answer.canceled {
            break answer;
        }
    };
    assert_eq!(compacted.compact_revision, last, "the watch is canceled as compacted");
    assert_eq!(a.put("next", "").await, last + 1, "writes continue");
    assert_eq!(value_at(&mut b, get("next")).await.as_deref(), Some(""));
    drop(two);
}
