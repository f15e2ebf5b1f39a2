//! Sources that a plain copy would take over wrongly, and members that cannot be a source.

use std::{fs, process::Command};

use orlop_wire::proto::client::etcdserverpb::{
    AlarmRequest, AlarmType, AuthEnableRequest, AuthUserAddRequest, AuthUserGrantRoleRequest, LeaseGrantRequest,
    LeaseLeasesRequest, LeaseRevokeRequest, LeaseTimeToLiveRequest, MemberAddRequest, PutRequest,
    alarm_request::AlarmAction,
};

use super::{Destination, Source, source};
use crate::{
    snapshot::{self, etcd::add_users},
    support::{Backend, Client, Etcd, Server, etcd_tool, eventually, get, on_both_backends, put, range, run, skip},
};

/// `auth enable` does not change the revision of users and roles.
async fn auth_that_was_enabled_after_the_snapshot_is_copied(backend: Backend) {
    for of in [Source::Etcd(Etcd::Reference), Source::Orlop] {
        let Some(source) = source(of, backend).await else { continue };
        let Some(destination) = Destination::new(backend).await else { return };
        let mut client = Client::connect(source.endpoint()).await;
        add_users(&mut client).await;
        let root = AuthUserGrantRoleRequest { user: "root".to_owned(), role: "root".to_owned() };
        client.auth.user_grant_role(root).await.expect("a role");
        let mut migrator = destination.migrate(source.endpoint(), &[]);
        migrator.says("restored a snapshot").await;
        migrator.kill();
        client.auth.auth_enable(AuthEnableRequest {}).await.expect("users");
        let output = destination.copied(&source, &["--user", "root:wonder"]).await;
        assert!(output.contains("Auth was enabled; starting again with a new snapshot"), "{output}");
        let copy = destination.server().await;
        let refused = Client::connect(copy.endpoint()).await.kv.range(get("a")).await.expect_err("a login is needed");
        assert_eq!(refused.message(), "etcdserver: user name is empty");
    }
}

/// A JWT names the revision of users and roles, so a change makes the migration's token old.
async fn users_that_change_are_copied_although_the_token_is_old(backend: Backend) {
    let Some(destination) = Destination::new(backend).await else { return };
    let key = destination.home.path().join("key");
    fs::write(&key, [7_u8; 32]).expect("a file can be written");
    let tokens = format!("jwt,sign-method=HS256,priv-key={},ttl=10m", key.display());
    let Some(source) = Server::etcd_with(&["--auth-token", &tokens]).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    add_users(&mut client).await;
    let root = AuthUserGrantRoleRequest { user: "root".to_owned(), role: "root".to_owned() };
    client.auth.user_grant_role(root).await.expect("a role");
    client.auth.auth_enable(AuthEnableRequest {}).await.expect("users");
    let token = client.log_in("root", "wonder").await.expect("a login");
    client.act_with(Some(&token));
    let mut migrator = destination.migrate(source.endpoint(), &["--user", "root:wonder"]);
    migrator.says("restored a snapshot").await;
    let bob = AuthUserAddRequest { name: "bob".to_owned(), password: "late".to_owned(), ..Default::default() };
    client.auth.user_add(bob).await.expect("a user");
    migrator.says("trying again").await;
    let (status, output) = migrator.terminate().await;
    assert!(status.success() && output.contains("users or roles of the source have changed"), "{output}");
    let copy = destination.server().await;
    Client::connect(copy.endpoint()).await.log_in("bob", "late").await.expect("the user is copied");
}

/// The copy has the first lease before the second one is granted.
async fn lease_that_was_granted_again_has_its_new_ttl(backend: Backend) {
    for of in [Source::Etcd(Etcd::Reference), Source::Orlop] {
        let Some(source) = source(of, backend).await else { continue };
        let Some(destination) = Destination::new(backend).await else { return };
        let mut client = Client::connect(source.endpoint()).await;
        for ttl in [600, 5_000] {
            client.lease.lease_grant(LeaseGrantRequest { ttl, id: 123 }).await.expect("a lease");
            client.kv.put(PutRequest { lease: 123, ..put("leased", [1]) }).await.expect("a put");
            let output = destination.copied(&source, &[]).await;
            assert!(output.contains("verified"), "{output}");
            client.lease.lease_revoke(LeaseRevokeRequest { id: 123 }).await.expect("a revocation");
        }
        let copy = destination.server().await;
        let asked = LeaseTimeToLiveRequest { id: 123, keys: true };
        let lease = Client::connect(copy.endpoint()).await.lease.lease_time_to_live(asked).await.expect("an answer");
        let lease = lease.into_inner();
        assert!(lease.granted_ttl == 5_000 && lease.keys.len() == 1, "{lease:?}");
    }
}

/// Puts a key with a lease of its own of a few seconds.
async fn put_for_seconds(client: &mut Client, key: &str) {
    let granted = client.lease.lease_grant(LeaseGrantRequest { ttl: 10, id: 0 }).await.expect("a lease").into_inner();
    client.kv.put(PutRequest { lease: granted.id, ..put(key, [1]) }).await.expect("a put");
}

/// A fenced Orlop does not list a lease that has expired, but has its keys.
async fn keys_of_leases_that_expired_under_the_fence_end_at_the_copy(backend: Backend) {
    let Some(source) = source(Source::Orlop, backend).await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    put_for_seconds(&mut client, "leased/snapshot").await;
    let mut migrator = destination.migrate(source.endpoint(), &[]);
    migrator.says("restored a snapshot").await;
    migrator.kill();
    put_for_seconds(&mut client, "leased/event").await;
    let fence = AlarmRequest { action: AlarmAction::Activate.into(), member_id: 7, alarm: AlarmType::Corrupt.into() };
    client.maintenance.alarm(fence).await.expect("an alarm");
    eventually("the end of the leases", async || {
        let listed = client.clone().lease.lease_leases(LeaseLeasesRequest {}).await.expect("leases").into_inner();
        if listed.leases.is_empty() { Ok(()) } else { Err(listed) }
    })
    .await;
    let leased = range("leased/", "leased0");
    let kept = client.kv.range(leased.clone()).await.expect("a range").into_inner();
    assert!(kept.kvs.iter().any(|pair| pair.key[..] == b"leased/event"[..]), "{kept:?}");
    destination.copied(&source, &[]).await;
    // The check finds keys whose lease does not exist.
    let copy = destination.server().await;
    let client = Client::connect(copy.endpoint()).await;
    eventually("the end of the keys", async || {
        let found = client.clone().kv.range(leased.clone()).await.expect("a range").into_inner();
        if found.kvs.is_empty() { Ok(()) } else { Err(found) }
    })
    .await;
}

/// Such a member tells its status, but does not answer a read.
async fn member_without_a_quorum_is_passed_over(backend: Backend) {
    let (Some(lost), Some(source)) = (Server::etcd().await, Server::etcd().await) else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(source.endpoint()).await;
    client.put("key", [1]).await;
    // The second of two members never starts.
    let second = MemberAddRequest { peer_ur_ls: vec!["http://127.0.0.1:1".to_owned()], ..Default::default() };
    Client::connect(lost.endpoint()).await.cluster.member_add(second).await.expect("a member");
    let mut migrator = destination.migrate(&format!("{},{}", lost.endpoint(), source.endpoint()), &["--once"]);
    let status = migrator.ended().await;
    let output = migrator.output();
    assert!(status.success() && output.contains("is at revision 2 of the source"), "{output}");
}

/// etcdutl adds a row without a change, which etcd's hash contains and Orlop's cannot.
async fn source_with_raised_revisions_is_refused_before_the_copy(backend: Backend) {
    let Some(etcdutl) = etcd_tool("etcdutl", "ORLOP_ETCDUTL") else { return skip("etcdutl") };
    let Some(before) = Server::etcd().await else { return };
    let Some(destination) = Destination::new(backend).await else { return };
    let mut client = Client::connect(before.endpoint()).await;
    client.put("key", [1]).await;
    let file = snapshot::save(&mut client, destination.home.path()).await;
    let data = destination.home.path().join("raised.etcd");
    let mut restore = Command::new(etcdutl);
    restore.args(["snapshot", "restore", "--bump-revision", "1000", "--mark-compacted", "--data-dir"]);
    let restored = run(restore.arg(&data).arg(&file));
    assert!(restored.status.success(), "{}", String::from_utf8_lossy(&restored.stderr));
    let Some(source) = Server::etcd_of(Etcd::Reference, &[], Some(data)).await else { return };
    // The second time, the database is as empty as the first time.
    for _ in 0..2 {
        destination.check_refused(&source, &["was restored with --bump-revision", "`orlop snapshot restore`"]).await;
    }
}

on_both_backends!(
    auth_that_was_enabled_after_the_snapshot_is_copied,
    users_that_change_are_copied_although_the_token_is_old,
    lease_that_was_granted_again_has_its_new_ttl,
    keys_of_leases_that_expired_under_the_fence_end_at_the_copy,
    member_without_a_quorum_is_passed_over,
    source_with_raised_revisions_is_refused_before_the_copy,
);
