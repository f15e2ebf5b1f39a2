//! What every call requires of its caller.

use std::collections::BTreeSet;

use orlop_wire::proto::{
    DESCRIPTORS,
    client::{
        authpb::Permission,
        etcdserverpb::{compare::TargetUnion, request_op::Request, watch_request::RequestUnion, *},
        orlopb::{
            ChildrenRequest, ExpiringLeasesRequest, HistoryChangesRequest, HistoryMomentRequest, HistoryPairsRequest,
            HistorySnapshotRequest, HistoryStateRequest, MembersRequest, SizesRequest, SlowRequestsRequest,
            WatchersRequest,
        },
        v3electionpb::{CampaignRequest, LeaderKey, LeaderRequest, ProclaimRequest, ResignRequest},
        v3lockpb::{LockRequest, UnlockRequest},
    },
};
use prost::Message as _;
use prost_types::FileDescriptorSet;
use tonic::{Code, Status};

use super::{CHEAP, DENIED, INVALID_TOKEN, NOBODY, act_as, check_refused, enable, password};
use crate::support::{Backend, Client, Server, delete, get, on_both_backends, put, range};

/// What a call requires.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Level {
    Public,
    /// Any user.
    User,
    /// Rights on the keys of the request, which `user` does not have.
    Keys,
    /// The same, for a request whose keys `user` may read and write.
    OwnKeys,
    /// The role root.
    Root,
}

/// A lease with the key `x`, which `user` may not write.
const LEASE: i64 = 7;
/// A lease without keys.
const OWN_LEASE: i64 = 8;
/// A lease for queues, so that a caller finds its own entry in them instead of waiting behind it.
const QUEUE_LEASE: i64 = 9;

fn txn(ops: Vec<Request>) -> TxnRequest {
    let success = ops.into_iter().map(|op| RequestOp { request: Some(op) }).collect();
    TxnRequest { success, ..Default::default() }
}

fn compare(key: &'static str) -> TxnRequest {
    let compare = Compare { key: key.into(), target_union: Some(TargetUnion::Version(0)), ..Default::default() };
    TxnRequest { compare: vec![compare], ..Default::default() }
}

/// Returns the reason with which the watch is refused, as an error.
async fn watch(client: &mut Client, key: &'static str, range_end: &'static str) -> Result<(), Status> {
    let create = WatchCreateRequest { key: key.into(), range_end: range_end.into(), ..Default::default() };
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let stream = tokio_stream::StreamExt::chain(tokio_stream::iter([request]), tokio_stream::pending());
    let created = client.watch.watch(stream).await?.into_inner().message().await?.expect("a response");
    if !created.canceled {
        return Ok(());
    }
    let (code, text) = created.cancel_reason.split_once(" desc = ").expect("a code and a text");
    let code = match code {
        "rpc error: code = PermissionDenied" => Code::PermissionDenied,
        "rpc error: code = Unauthenticated" => Code::Unauthenticated,
        "rpc error: code = InvalidArgument" => Code::InvalidArgument,
        other => panic!("{other}"),
    };
    Err(Status::new(code, text))
}

async fn keep_alive(client: &mut Client, id: i64) -> Result<(), Status> {
    let stream = tokio_stream::iter([LeaseKeepAliveRequest { id }]);
    client.lease.lease_keep_alive(stream).await?.into_inner().message().await.map(drop)
}

async fn lock_and_unlock(client: &mut Client) -> Result<(), Status> {
    let key = client.lock.lock(LockRequest { name: "a/lock".into(), lease: 0 }).await?.into_inner().key;
    client.lock.unlock(UnlockRequest { key }).await.map(drop)
}

fn past_pairs(key: &'static str, range_end: &'static str) -> HistoryPairsRequest {
    HistoryPairsRequest { key: key.into(), range_end: range_end.into(), ..Default::default() }
}

fn past_changes(key: &'static str, range_end: &'static str) -> HistoryChangesRequest {
    HistoryChangesRequest { key: key.into(), range_end: range_end.into(), ..Default::default() }
}

async fn first<T>(stream: Result<tonic::Response<tonic::Streaming<T>>, Status>) -> Result<(), Status> {
    stream?.into_inner().message().await.map(drop)
}

/// Sends every call. Returns each outcome with the call's method, what it requires and what was sent.
#[expect(clippy::too_many_lines, reason = "a table")]
async fn send_all(client: &mut Client) -> Vec<(&'static str, Level, &'static str, Result<(), Status>)> {
    let mut outcomes = Vec::new();
    macro_rules! send {
        ($($method:literal, $level:ident, $what:literal: $call:expr;)*) => {
            $(outcomes.push(($method, Level::$level, $what, $call.await.map(drop)));)*
        };
    }
    let perm = Some(Permission { perm_type: 0, key: "k".into(), range_end: "".into() });
    let leader = || Some(LeaderKey { name: "x".into(), key: "x/1".into(), rev: 1, lease: 1 });
    let c = client;
    send! {
        "KV/Range", Keys, "another key": c.kv.range(get("x"));
        "KV/Range", OwnKeys, "an own key": c.kv.range(get("a"));
        "KV/Range", OwnKeys, "the own range": c.kv.range(range("a", "b"));
        "KV/Range", Keys, "more than the own range": c.kv.range(range("a", "b\0"));
        "KV/Range", Keys, "all keys from an own one": c.kv.range(range("a", "\0"));
        "KV/Range", Keys, "serializable": c.kv.range(RangeRequest { serializable: true, ..get("x") });
        "KV/Range", Keys, "a count": c.kv.range(RangeRequest { count_only: true, ..get("x") });
        "KV/Range", Keys, "keys only": c.kv.range(RangeRequest { keys_only: true, ..get("x") });
        "KV/RangeStream", Keys, "another key": async { first(c.kv.range_stream(get("x")).await).await };
        "KV/RangeStream", OwnKeys, "an own key": async { first(c.kv.range_stream(range("a", "b")).await).await };
        "KV/RangeStream", Keys, "sorted": async {
            first(c.kv.range_stream(RangeRequest { sort_order: 1, sort_target: 4, ..get("x") }).await).await
        };
        "KV/Put", Keys, "another key": c.kv.put(put("x", "v"));
        "KV/Put", OwnKeys, "an own key": c.kv.put(PutRequest { prev_kv: true, ..put("a", "v") });
        "KV/Put", Keys, "a lease with another key": c.kv.put(PutRequest { lease: LEASE, ..put("a", "v") });
        "KV/DeleteRange", Keys, "another key": c.kv.delete_range(delete("x2"));
        "KV/DeleteRange", OwnKeys, "an own key": c.kv.delete_range(DeleteRangeRequest { prev_kv: true, ..delete("a9") });
        "KV/Txn", Keys, "a compare of another key": c.kv.txn(compare("x"));
        "KV/Txn", OwnKeys, "a compare of an own key": c.kv.txn(compare("a"));
        "KV/Txn", Keys, "a put in the branch that is not taken": c.kv.txn(TxnRequest {
            failure: txn(vec![Request::RequestPut(put("x", "v"))]).success,
            ..txn(vec![Request::RequestPut(put("a", "v"))])
        });
        "KV/Txn", Keys, "a read": c.kv.txn(txn(vec![Request::RequestRange(get("x"))]));
        "KV/Txn", Keys, "a nested read": c.kv.txn(txn(vec![Request::RequestTxn(txn(vec![Request::RequestRange(get("x"))]))]));
        "KV/Txn", Keys, "a nested compare": c.kv.txn(txn(vec![Request::RequestTxn(compare("x"))]));
        "KV/Txn", Keys, "a nested delete": c.kv.txn(txn(vec![Request::RequestTxn(txn(vec![Request::RequestDeleteRange(delete("x2"))]))]));
        "KV/Txn", Keys, "a put with a lease with another key": c.kv.txn(txn(vec![Request::RequestPut(PutRequest { lease: LEASE, ..put("a", "v") })]));
        "KV/Txn", OwnKeys, "own keys": c.kv.txn(txn(vec![
            Request::RequestPut(put("a", "v")),
            Request::RequestRange(range("a1", "b")),
        ]));
        "KV/Compact", Root, "": c.kv.compact(CompactionRequest { revision: 1, physical: false });
        "KV/Compact", Root, "physical": c.kv.compact(CompactionRequest { revision: 1, physical: true });
        "Watch/Watch", Keys, "another key": watch(c, "x", "");
        "Watch/Watch", Keys, "all keys from an own one": watch(c, "a", "\0");
        "Watch/Watch", OwnKeys, "the own range": watch(c, "a", "b");
        "Lease/LeaseGrant", User, "": c.lease.lease_grant(LeaseGrantRequest { id: 0, ttl: 100 });
        "Lease/LeaseGrant", User, "a TTL that is too large": c.lease.lease_grant(LeaseGrantRequest { id: 0, ttl: i64::MAX });
        "Lease/LeaseRevoke", User, "an unknown lease": c.lease.lease_revoke(LeaseRevokeRequest { id: 99 });
        "Lease/LeaseRevoke", Keys, "a lease with another key": c.lease.lease_revoke(LeaseRevokeRequest { id: LEASE + 10 });
        "Lease/LeaseKeepAlive", Keys, "a lease with another key": keep_alive(c, LEASE);
        "Lease/LeaseKeepAlive", OwnKeys, "a lease without keys": keep_alive(c, OWN_LEASE);
        "Lease/LeaseTimeToLive", User, "": c.lease.lease_time_to_live(LeaseTimeToLiveRequest { id: LEASE, keys: false });
        "Lease/LeaseTimeToLive", Keys, "with keys": c.lease.lease_time_to_live(LeaseTimeToLiveRequest { id: LEASE, keys: true });
        "Lease/LeaseLeases", Keys, "": c.lease.lease_leases(LeaseLeasesRequest {});
        "Cluster/MemberList", Public, "": c.cluster.member_list(MemberListRequest::default());
        "Cluster/MemberAdd", Root, "": c.cluster.member_add(MemberAddRequest {
            peer_ur_ls: vec!["http://127.0.0.1:2380".to_owned()],
            ..Default::default()
        });
        "Cluster/MemberRemove", Root, "": c.cluster.member_remove(MemberRemoveRequest { id: 1 });
        "Cluster/MemberUpdate", Root, "": c.cluster.member_update(MemberUpdateRequest::default());
        "Cluster/MemberPromote", Root, "": c.cluster.member_promote(MemberPromoteRequest { id: 1 });
        "Maintenance/Status", User, "": c.maintenance.status(StatusRequest {});
        "Maintenance/Alarm", User, "a list": c.maintenance.alarm(AlarmRequest::default());
        "Maintenance/Alarm", Root, "raised": c.maintenance.alarm(AlarmRequest { action: 1, member_id: 1, alarm: 0 });
        "Maintenance/Alarm", Root, "cleared": c.maintenance.alarm(AlarmRequest { action: 2, member_id: 1, alarm: 1 });
        "Maintenance/Defragment", Root, "": c.maintenance.defragment(DefragmentRequest {});
        "Maintenance/Hash", Root, "": c.maintenance.hash(HashRequest {});
        "Maintenance/HashKV", Root, "": c.maintenance.hash_kv(HashKvRequest { revision: 0 });
        "Maintenance/Snapshot", Root, "": async { first(c.maintenance.snapshot(SnapshotRequest {}).await).await };
        "Maintenance/MoveLeader", Root, "": c.maintenance.move_leader(MoveLeaderRequest { target_id: 1 });
        "Maintenance/Downgrade", Root, "": c.maintenance.downgrade(DowngradeRequest { version: "3.5".to_owned(), action: 0 });
        "Auth/Authenticate", Public, "": c.log_in("user", &password("user"));
        "Auth/AuthStatus", Root, "": c.auth.auth_status(AuthStatusRequest {});
        "Auth/AuthEnable", Root, "": c.auth.auth_enable(AuthEnableRequest {});
        "Auth/UserAdd", Root, "": c.auth.user_add(AuthUserAddRequest { name: "new".to_owned(), ..Default::default() });
        // Long passwords are refused when they are hashed, which takes long: a caller without rights is refused before.
        "Auth/UserAdd", Root, "a long password": c.auth.user_add(AuthUserAddRequest { name: "long".to_owned(), password: "x".repeat(73), ..Default::default() });
        "Auth/UserChangePassword", Root, "a long password": c.auth.user_change_password(AuthUserChangePasswordRequest {
            name: "new".to_owned(), password: "x".repeat(73), ..Default::default()
        });
        "Auth/UserChangePassword", Root, "a hash that is none": c.auth.user_change_password(AuthUserChangePasswordRequest {
            name: "new".to_owned(), hashed_password: "x".to_owned(), ..Default::default()
        });
        "Auth/UserChangePassword", Root, "": c.auth.user_change_password(AuthUserChangePasswordRequest { name: "new".to_owned(), ..Default::default() });
        "Auth/UserGet", Root, "another user": c.auth.user_get(AuthUserGetRequest { name: "new".to_owned() });
        "Auth/UserGet", OwnKeys, "the own user": c.auth.user_get(AuthUserGetRequest { name: "user".to_owned() });
        "Auth/UserList", Root, "": c.auth.user_list(AuthUserListRequest {});
        "Auth/RoleAdd", Root, "": c.auth.role_add(AuthRoleAddRequest { name: "new".to_owned() });
        "Auth/RoleGet", Root, "another role": c.auth.role_get(AuthRoleGetRequest { role: "new".to_owned() });
        "Auth/RoleGet", OwnKeys, "an own role": c.auth.role_get(AuthRoleGetRequest { role: "role".to_owned() });
        "Auth/RoleList", Root, "": c.auth.role_list(AuthRoleListRequest {});
        "Auth/RoleGrantPermission", Root, "": c.auth.role_grant_permission(AuthRoleGrantPermissionRequest { name: "new".to_owned(), perm });
        "Auth/RoleGrantPermission", Root, "no permission": c.auth.role_grant_permission(AuthRoleGrantPermissionRequest { name: "new".to_owned(), perm: None });
        "Auth/RoleRevokePermission", Root, "": c.auth.role_revoke_permission(AuthRoleRevokePermissionRequest {
            role: "new".to_owned(), key: "k".into(), range_end: "".into(),
        });
        "Auth/UserGrantRole", Root, "": c.auth.user_grant_role(AuthUserGrantRoleRequest { user: "new".to_owned(), role: "new".to_owned() });
        "Auth/UserRevokeRole", Root, "": c.auth.user_revoke_role(AuthUserRevokeRoleRequest { name: "new".to_owned(), role: "new".to_owned() });
        "Auth/RoleDelete", Root, "": c.auth.role_delete(AuthRoleDeleteRequest { role: "new".to_owned() });
        "Auth/UserDelete", Root, "": c.auth.user_delete(AuthUserDeleteRequest { name: "new".to_owned() });
        "Lock/Lock", Keys, "another name": c.lock.lock(LockRequest { name: "y".into(), lease: QUEUE_LEASE });
        "Lock/Lock", OwnKeys, "an own name": lock_and_unlock(c);
        "Lock/Unlock", Keys, "": c.lock.unlock(UnlockRequest { key: "x2".into() });
        "Election/Campaign", Keys, "": c.election.campaign(CampaignRequest { name: "z".into(), lease: QUEUE_LEASE, value: "v".into() });
        "Election/Proclaim", Keys, "": c.election.proclaim(ProclaimRequest { leader: leader(), value: "v".into() });
        "Election/Leader", Keys, "": c.election.leader(LeaderRequest { name: "z".into() });
        "Election/Observe", Keys, "": async { first(c.election.observe(LeaderRequest { name: "z".into() }).await).await };
        "Election/Resign", Keys, "": c.election.resign(ResignRequest { leader: leader() });
        "History/State", User, "": c.history.state(HistoryStateRequest {});
        "History/Moment", User, "": c.history.moment(HistoryMomentRequest { unix_ms: 1 });
        "History/Pairs", Keys, "another key": first(c.history.pairs(past_pairs("x", "")).await);
        "History/Pairs", Keys, "more than the own range": first(c.history.pairs(past_pairs("a", "b\0")).await);
        "History/Pairs", OwnKeys, "the own range": first(c.history.pairs(past_pairs("a", "b")).await);
        "History/Changes", Keys, "another key": first(c.history.changes(past_changes("x", "")).await);
        "History/Changes", Keys, "more than the own range": first(c.history.changes(past_changes("a", "b\0")).await);
        "History/Changes", OwnKeys, "the own range": first(c.history.changes(past_changes("a", "b")).await);
        "History/Snapshot", Root, "": first(c.history.snapshot(HistorySnapshotRequest {}).await);
        "Insight/Watchers", Root, "": c.insight.watchers(WatchersRequest::default());
        "Insight/SlowRequests", Root, "": c.insight.slow_requests(SlowRequestsRequest {});
        "Insight/ExpiringLeases", Root, "": c.insight.expiring_leases(ExpiringLeasesRequest::default());
        "Insight/Sizes", Root, "": c.insight.sizes(SizesRequest::default());
        "Insight/Children", Keys, "": c.insight.children(ChildrenRequest { prefix: "x".into(), ..Default::default() });
        "Insight/Members", Root, "": c.insight.members(MembersRequest {});
        // The last one, because it would end the checks.
        "Auth/AuthDisable", Root, "": async { Err::<(), _>(c.auth.auth_disable(AuthDisableRequest {}).await.err().unwrap_or_else(|| Status::ok(""))) };
    }
    outcomes
}

/// Returns whether an outcome is a refusal because of who the caller is.
fn is_refusal(outcome: &Result<(), Status>) -> bool {
    [DENIED, NOBODY, INVALID_TOKEN]
        .iter()
        .any(|(_, text)| outcome.as_ref().is_err_and(|status| status.message().contains(text)))
}

/// Sends every call as every kind of caller to each server, all of which serve one store.
async fn check_calls(setup: &mut Client, servers: &[&Server]) {
    enable(setup).await;
    let _ = act_as(setup, "root").await;
    for (lease, key) in [(LEASE, "x"), (OWN_LEASE, ""), (QUEUE_LEASE, ""), (LEASE + 10, "x3")] {
        setup.lease.lease_grant(LeaseGrantRequest { id: lease, ttl: 1_000 }).await.expect("a lease");
        if !key.is_empty() {
            setup.kv.put(PutRequest { lease, ..put(key, "v") }).await.expect("a put");
        }
    }
    for server in servers {
        let mut client = Client::connect(server.endpoint()).await;
        for (who, refusals) in [
            ("nobody", [Some(NOBODY); 4]),
            ("a forger", [Some(INVALID_TOKEN); 4]),
            ("user", [None, Some(DENIED), None, Some(DENIED)]),
            ("root", [None; 4]),
        ] {
            match who {
                "nobody" => client.act_with(None),
                "a forger" => client.act_with(Some("abcdefghijklmnop.7")),
                user => drop(act_as(&mut client, user).await),
            }
            for (method, level, what, outcome) in send_all(&mut client).await {
                let expected = match level {
                    Level::Public => None,
                    Level::User => refusals[0],
                    Level::Keys => refusals[1],
                    Level::OwnKeys => refusals[2],
                    Level::Root => refusals[3],
                };
                let what = format!("{method} ({what}) by {who}");
                match expected {
                    None => assert!(!is_refusal(&outcome), "{what}: {outcome:?}"),
                    // The Lock and Election services have no codes, as in etcd.
                    Some((_, text)) if method.starts_with("Lock") || method.starts_with("Election") => {
                        check_refused(outcome, (Code::Unknown, text), &what);
                    }
                    Some(expected) => check_refused(outcome, expected, &what),
                }
            }
            if who == "root" {
                enable_again(&mut client).await;
            }
        }
    }
}

/// Enables Auth again, and puts what root has deleted.
async fn enable_again(client: &mut Client) {
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("Auth is enabled");
    let _ = act_as(client, "root").await;
    client.lease.lease_grant(LeaseGrantRequest { id: LEASE + 10, ttl: 1_000 }).await.expect("a lease");
    client.kv.put(PutRequest { lease: LEASE + 10, ..put("x3", "v") }).await.expect("a put");
    client.kv.put(PutRequest { lease: LEASE, ..put("x", "v") }).await.expect("a put");
}

async fn every_call_checks_its_caller(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &CHEAP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    match server.datastore().filter(|_| backend == Backend::Postgres) {
        // Tokens and rights are good at every instance.
        Some(datastore) => {
            let other = Server::orlop_on(datastore, &[&CHEAP[..], &["--name", "other"]].concat()).await;
            check_calls(&mut client, &[&other, &server]).await;
        }
        None => check_calls(&mut client, &[&server]).await,
    }
}

#[tokio::test]
async fn every_call_is_in_the_table() {
    let descriptors = FileDescriptorSet::decode(DESCRIPTORS).expect("descriptors");
    let calls: BTreeSet<String> = (descriptors.file.iter())
        .flat_map(|file| &file.service)
        .flat_map(|service| service.method.iter().map(|method| format!("{}/{}", service.name(), method.name())))
        .collect();
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("x", "v").await;
    client.lease.lease_grant(LeaseGrantRequest { id: QUEUE_LEASE, ttl: 1_000 }).await.expect("a lease");
    let sent: BTreeSet<String> =
        send_all(&mut client).await.into_iter().map(|(method, ..)| method.to_owned()).collect();
    assert_eq!(sent, calls);
}

on_both_backends!(every_call_checks_its_caller,);
