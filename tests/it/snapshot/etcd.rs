//! Snapshots that etcd and Orlop exchange: each restores what the other one saved, with everything that clients see.

use std::collections::BTreeMap;

use bytes::Bytes;
use orlop_bolt::{Planner, Writer};
use orlop_wire::proto::client::{
    authpb::Permission,
    etcdserverpb::{
        AlarmRequest, AlarmType, AuthRoleAddRequest, AuthRoleGetRequest, AuthRoleGrantPermissionRequest,
        AuthUserAddRequest, AuthUserGetRequest, AuthUserGrantRoleRequest, AuthUserListRequest, DeleteRangeRequest,
        alarm_request::AlarmAction,
    },
    leasepb,
};
use prost::Message as _;
use sha2::{Digest as _, Sha256};

use super::*;
use crate::support::Etcd;

/// Every how many revisions the pairs are compared.
const STEP: usize = 23;

/// What clients see of a store.
#[derive(Debug, PartialEq)]
pub struct Seen {
    pub revision: i64,
    hash: u32,
    /// By revision, from the compact revision on.
    pairs: BTreeMap<i64, Vec<KeyValue>>,
    /// The TTL and the keys of each lease.
    leases: BTreeMap<i64, (i64, BTreeSet<Vec<u8>>)>,
    /// The roles of each user.
    users: BTreeMap<String, Vec<String>>,
    permissions: Vec<Permission>,
}

pub async fn seen(client: &mut Client) -> Seen {
    let hashed = client.maintenance.hash_kv(HashKvRequest { revision: 0 }).await.expect("a hash").into_inner();
    let revision = hashed.header.expect("a header").revision;
    let mut at: Vec<i64> = (hashed.compact_revision.max(1)..revision).step_by(STEP).collect();
    at.push(revision);
    let mut of_store = Seen {
        revision,
        hash: hashed.hash,
        pairs: BTreeMap::new(),
        leases: BTreeMap::new(),
        users: BTreeMap::new(),
        permissions: Vec::new(),
    };
    for revision in at {
        of_store.pairs.insert(revision, pairs(client, revision).await);
    }
    for id in leases(client).await {
        let asked = LeaseTimeToLiveRequest { id, keys: true };
        let lease = client.lease.lease_time_to_live(asked).await.expect("an answer").into_inner();
        let keys = lease.keys.iter().map(|key| key.to_vec()).collect();
        of_store.leases.insert(id, (lease.granted_ttl, keys));
    }
    for name in client.auth.user_list(AuthUserListRequest {}).await.expect("users").into_inner().users {
        let user = client.auth.user_get(AuthUserGetRequest { name: name.clone() }).await.expect("a user");
        of_store.users.insert(name, user.into_inner().roles);
    }
    let role = client.auth.role_get(AuthRoleGetRequest { role: "app".to_owned() }).await.expect("a role");
    of_store.permissions = role.into_inner().perm;
    of_store
}

pub async fn add_users(client: &mut Client) {
    client.auth.role_add(AuthRoleAddRequest { name: "app".to_owned() }).await.expect("a role");
    for (key, range_end, perm_type) in [("b", "", 0), ("a", "c", 2), ("x", "\0", 1)] {
        let perm = Permission { perm_type, key: key.to_owned().into(), range_end: range_end.to_owned().into() };
        let grant = AuthRoleGrantPermissionRequest { name: "app".to_owned(), perm: Some(perm) };
        client.auth.role_grant_permission(grant).await.expect("a permission");
    }
    for name in ["alice", "root"] {
        let add = AuthUserAddRequest { name: name.to_owned(), password: "wonder".to_owned(), ..Default::default() };
        client.auth.user_add(add).await.expect("a user");
    }
    let grant = AuthUserGrantRoleRequest { user: "alice".to_owned(), role: "app".to_owned() };
    client.auth.user_grant_role(grant).await.expect("a role");
}

/// Fills a store with random changes, leases, compactions and users, until nobody writes any more.
async fn fill(server: &Server, folder: &Path) -> Seen {
    let mut client = Client::connect(server.endpoint()).await;
    add_users(&mut client).await;
    let _ = save_under_load(server, folder).await;
    seen(&mut client).await
}

/// Runs a tool of etcd, which must succeed, and returns its output.
#[track_caller]
fn tool(tool: Option<PathBuf>, arguments: &[&str]) -> String {
    let tool = tool.expect("a tool comes with its server");
    let output = run(Command::new(tool).args(arguments));
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).expect("text")
}

/// Saves a snapshot with etcdctl.
fn saved_by(etcd: Etcd, server: &Server, folder: &Path) -> PathBuf {
    let file = folder.join("saved.db");
    tool(etcd.etcdctl(), &["--endpoints", server.endpoint(), "snapshot", "save", path(&file)]);
    file
}

/// Starts etcd on what its tool restores from a snapshot.
async fn restored_by(etcd: Etcd, file: &Path, folder: &Path, flags: &[&str]) -> Option<Server> {
    let data = folder.join(etcd.to_string());
    tool(etcd.etcdutl(), &[&["snapshot", "restore", path(file), "--data-dir", path(&data)], flags].concat());
    Server::etcd_of(etcd, &[], Some(data)).await
}

/// etcd 3.4 and 3.5 count all entries of the file as keys, so these are not compared.
fn check_status(etcd: Etcd, file: &Path) {
    let theirs = tool(etcd.etcdutl(), &["snapshot", "status", path(file), "-w", "json"]);
    let theirs: serde_json::Value = serde_json::from_str(&theirs).expect("JSON");
    let ours = status(file);
    for field in ["hash", "revision", "totalSize"] {
        assert_eq!(ours[field], theirs[field], "{field}");
    }
    let line = |text: String| {
        let fields: Vec<String> = text.trim_end_matches('\n').split(", ").map(str::to_owned).collect();
        [0, 1, 3].map(|field| fields[field].clone())
    };
    let status = ["snapshot", "status", path(file)];
    assert_eq!(line(prints(&status)), line(tool(etcd.etcdutl(), &status)), "hash, revision and size");
}

#[track_caller]
pub fn check_same(left: &Seen, right: &Seen) {
    for (revision, pairs) in &left.pairs {
        assert_eq!(right.pairs.get(revision), Some(pairs), "at revision {revision}");
    }
    assert!(left == right, "{left:?}\n{right:?}");
}

async fn snapshots_go_from_etcd_to_orlop_and_back(backend: Backend) {
    for etcd in Etcd::ALL {
        println!("{etcd}");
        let Some(source) = Server::etcd_of(etcd, &[], None).await else { continue };
        let home = TempDir::new().expect("a folder");
        let before = fill(&source, home.path()).await;
        let file = saved_by(etcd, &source, home.path());
        check_status(etcd, &file);
        let Some(orlop) = restored(backend, &file, home.path()).await else { return };
        let mut client = Client::connect(orlop.endpoint()).await;
        check_same(&seen(&mut client).await, &before);

        let file = saved_by(etcd, &orlop, home.path());
        check_status(etcd, &file);
        let Some(back) = restored_by(etcd, &file, home.path(), &[]).await else { return };
        let mut back = Client::connect(back.endpoint()).await;
        check_same(&seen(&mut back).await, &before);
        for client in [&mut client, &mut back] {
            assert_eq!(client.put("new", "").await, before.revision + 1);
        }
    }
}

async fn snapshots_of_orlop_are_restored_by_etcd(backend: Backend) {
    let Some(orlop) = Server::orlop_with(backend, &["--history-retention", "1h"]).await else { return };
    let home = TempDir::new().expect("a folder");
    let before = fill(&orlop, home.path()).await;
    let file = save(&mut Client::connect(orlop.endpoint()).await, home.path()).await;
    // etcd ignores the history.
    let with_history = home.path().join("history.db");
    prints(&["snapshot", "save", "--history", path(&with_history), "--endpoints", orlop.endpoint()]);
    assert_eq!(status(&file)["archivedRows"], serde_json::Value::Null);
    assert!(status(&with_history)["archivedRows"].as_u64() > Some(0));
    for etcd in Etcd::ALL {
        println!("{etcd}");
        if etcd.server().is_none() {
            skip(&etcd.to_string());
            continue;
        }
        for file in [&file, &with_history] {
            check_status(etcd, file);
            let folder = TempDir::new_in(home.path()).expect("a folder");
            let Some(copy) = restored_by(etcd, file, folder.path(), &[]).await else { return };
            check_same(&seen(&mut Client::connect(copy.endpoint()).await).await, &before);
        }
    }
}

/// etcd keeps the history of a snapshot, and does not add what it compacts itself.
async fn history_in_etcd_is_taken_only_if_it_is_complete(backend: Backend) {
    let Some(_) = etcd_tool("etcdutl", "ORLOP_ETCDUTL") else { return skip("etcdutl") };
    let Some(orlop) = Server::orlop_with(backend, &["--history-retention", "1h"]).await else { return };
    let mut client = Client::connect(orlop.endpoint()).await;
    for value in 1..=6 {
        client.put("a", [value]).await;
    }
    client.kv.compact(CompactionRequest { revision: 4, physical: true }).await.expect("a compaction");
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("history.db");
    prints(&["snapshot", "save", "--history", path(&file), "--endpoints", orlop.endpoint()]);
    let Some(etcd) = restored_by(Etcd::Reference, &file, home.path(), &[]).await else { return };
    let mut client = Client::connect(etcd.endpoint()).await;
    let taken = ", with the history from revision 1 on\n";
    let left_out = ", without the history, which is that of an earlier compaction\n";
    for (compacted, flags, ending) in [
        (4, &[][..], taken),
        (4, &["--without-history"], ": revision 7\n"),
        (6, &[], left_out),
        (6, &["--without-history"], ": revision 7\n"),
    ] {
        let _ = client.kv.compact(CompactionRequest { revision: compacted, physical: true }).await;
        let folder = TempDir::new().expect("a folder");
        let file = save(&mut client, folder.path()).await;
        let datastore = backend.empty_database(folder.path(), "restored.db").await.expect("it is there");
        let restore = ["snapshot", "restore", path(&file), "--datastore-endpoint", &datastore];
        let found = prints(&[&restore[..], flags].concat());
        assert!(found.ends_with(ending), "{compacted} {flags:?}: {found}");
        prints(&["check", "--datastore-endpoint", &datastore]);
    }
}

/// `--bump-revision` leaves revisions without changes, so everything at or below the new revision is compacted.
async fn revisions_are_raised_as_etcdutl_does(backend: Backend) {
    let Some(_) = etcd_tool("etcdutl", "ORLOP_ETCDUTL") else { return skip("etcdutl") };
    let Some(source) = Server::etcd().await else { return };
    let home = TempDir::new().expect("a folder");
    let mut client = Client::connect(source.endpoint()).await;
    for key in ["a", "b", "a"] {
        client.put(key, [1]).await;
    }
    let file = save(&mut client, home.path()).await;
    let flags = ["--bump-revision", "1000", "--mark-compacted"];
    let Some(etcd) = restored_by(Etcd::Reference, &file, home.path(), &flags).await else { return };
    let Some(datastore) = backend.empty_database(home.path(), "restored.db").await else { return };
    let restore = ["snapshot", "restore", path(&file), "--datastore-endpoint", &datastore];
    check_refused_flags(&[&restore[..], &flags[..2]].concat());
    let far = (i64::MAX - 1_000).to_string();
    let refused = run(&mut orlop([&restore[..], &["--bump-revision", &far, "--mark-compacted"]].concat()));
    let text = String::from_utf8_lossy(&refused.stderr);
    assert!(!refused.status.success() && text.contains("no revisions are left"), "{text}");
    prints(&[&restore[..], &flags].concat());
    let orlop = Server::orlop_on(&datastore, &[]).await;
    // What etcdutl raised is raised as well.
    let raised = save(&mut Client::connect(etcd.endpoint()).await, home.path()).await;
    let second = TempDir::new().expect("a folder");
    let Some(again) = restored(backend, &raised, second.path()).await else { return };
    let third = TempDir::new().expect("a folder");
    let saved = save(&mut Client::connect(orlop.endpoint()).await, third.path()).await;
    let Some(back) = restored_by(Etcd::Reference, &saved, third.path(), &[]).await else { return };
    for server in [&etcd, &orlop, &again, &back] {
        let mut client = Client::connect(server.endpoint()).await;
        let found = pairs(&mut client, 1_004).await;
        let revisions: Vec<i64> = found.iter().map(|pair| pair.mod_revision).collect();
        assert_eq!(revisions, [4, 3], "at the head");
        let range = RangeRequest { revision: 1_003, ..get("a") };
        let refused = client.kv.range(range).await.expect_err("a compacted revision");
        assert!(refused.message().contains("has been compacted"), "{refused}");
        assert_eq!(client.put("c", "").await, 1_005);
    }
    let checked = prints(&["check", "--datastore-endpoint", &datastore]);
    assert!(checked.contains("sound"), "{checked}");
}

/// Of the compact revision, etcd keeps only the changes that a reader may still need.
async fn compacted_transactions_are_restored(backend: Backend) {
    let Some(etcd) = Server::etcd().await else { return };
    let mut client = Client::connect(etcd.endpoint()).await;
    let puts = |keys: &[&str]| {
        let operation = |key: &&str| RequestOp { request: Some(Request::RequestPut(put(key, [1]))) };
        TxnRequest { success: keys.iter().map(operation).collect(), ..Default::default() }
    };
    for keys in [&["a", "b", "c"][..], &["b"], &["a", "c", "d"]] {
        client.kv.txn(puts(keys)).await.expect("a transaction");
    }
    let delete = DeleteRangeRequest { range_end: "c".into(), ..delete("a") };
    client.kv.delete_range(delete).await.expect("a delete");
    client.kv.txn(puts(&["a", "d"])).await.expect("a transaction");
    for revision in 2..=6 {
        let home = TempDir::new().expect("a folder");
        client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
        let file = save(&mut client, home.path()).await;
        let Some(orlop) = restored(backend, &file, home.path()).await else { return };
        let mut copy = Client::connect(orlop.endpoint()).await;
        for at in revision..=6 {
            assert_eq!(pairs(&mut copy, at).await, pairs(&mut client, at).await, "at {at}, compacted at {revision}");
        }
        let file = save(&mut copy, home.path()).await;
        let second = TempDir::new().expect("a folder");
        let Some(back) = restored(backend, &file, second.path()).await else { return };
        let mut back = Client::connect(back.endpoint()).await;
        assert_eq!(hash(&mut back, 0).await, hash(&mut copy, 0).await, "compacted at {revision}");
    }
}

#[track_caller]
fn check_refused_flags(arguments: &[&str]) {
    let output = run(&mut orlop(arguments));
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(!output.status.success() && text.contains("--mark-compacted"), "{text}");
}

/// etcd saves the remaining time of a lease with a flag, every five minutes.
async fn leases_continue_with_their_remaining_time(backend: Backend) {
    let leases = [(1, 3_600, 40, 39..=40), (2, 3_600, 0, 3_595..=3_600)];
    let stored = leases.clone().map(|(id, ttl, remaining_ttl, _)| {
        let lease = leasepb::Lease { id, ttl, remaining_ttl };
        (Bytes::from(id.to_be_bytes().to_vec()), Bytes::from(lease.encode_to_vec()))
    });
    let mut planner = Planner::default();
    planner.bucket("lease").expect("in order");
    for (key, value) in &stored {
        planner.add(key.clone(), value.len()).expect("in order");
    }
    planner.bucket("meta").expect("in order");
    let mut writer = Writer::new(planner.finish());
    writer.bucket("lease").expect("in order");
    for (key, value) in stored {
        writer.add(key, value).expect("in order");
    }
    writer.bucket("meta").expect("in order");
    let home = TempDir::new().expect("a folder");
    let file = home.path().join("written.db");
    let database = [writer.take(), writer.finish().expect("as planned")].concat();
    fs::write(&file, [&database[..], &Sha256::digest(&database)].concat()).expect("a file can be written");
    let Some(server) = restored(backend, &file, home.path()).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for (id, granted, _, left) in leases {
        let asked = LeaseTimeToLiveRequest { id, keys: false };
        let lease = client.lease.lease_time_to_live(asked).await.expect("an answer").into_inner();
        assert!(lease.granted_ttl == granted && left.contains(&lease.ttl), "{lease:?}");
    }
}

/// etcd's database lacks the last requests while etcd runs, and after a crash until it has started again.
async fn data_of_a_stopped_etcd_is_restored(backend: Backend) {
    for etcd in Etcd::ALL {
        println!("{etcd}");
        Box::pin(stopped_etcd_is_restored(etcd, backend)).await;
    }
}

/// etcd 3.4 does not note in its database that it has applied requests that change no key.
async fn check_refused_unless_stopped(etcd: &mut Server) {
    let folder = etcd.data_dir();
    let status = ["snapshot", "status", path(&folder)];
    prints(&status);
    etcd.restart().await;
    let mut client = Client::connect(etcd.endpoint()).await;
    for id in [7, 8] {
        client.lease.lease_grant(LeaseGrantRequest { ttl: 600, id }).await.expect("a lease");
    }
    etcd.kill();
    check_refused(&status, &["was not stopped cleanly: its WAL has 2 requests that its database lacks"]);
    etcd.restart().await;
    let mut client = Client::connect(etcd.endpoint()).await;
    client.lease.lease_revoke(LeaseRevokeRequest { id: 8 }).await.expect("a revocation");
    client.kv.compact(CompactionRequest { revision: 200, physical: true }).await.expect("a compaction");
    let raise = AlarmRequest { action: AlarmAction::Activate.into(), member_id: 1, alarm: AlarmType::Nospace.into() };
    client.maintenance.alarm(raise).await.expect("an alarm");
    etcd.terminate().await;
    prints(&status);
    // The WAL alone does not tell whether 3.4 has applied this one.
    etcd.restart().await;
    let mut client = Client::connect(etcd.endpoint()).await;
    client.auth.role_add(AuthRoleAddRequest { name: "app".to_owned() }).await.expect("a role");
    etcd.terminate().await;
    if !run(&mut orlop(status)).status.success() {
        check_refused(&status, &["its WAL has 1 requests", "etcd 3.4", "write a key"]);
        etcd.restart().await;
        let lower = AlarmRequest { action: AlarmAction::Deactivate.into(), ..raise };
        let mut client = Client::connect(etcd.endpoint()).await;
        client.maintenance.alarm(lower).await.expect("an alarm");
        client.put("key/0", "").await;
        etcd.terminate().await;
    }
}

/// Damage may hide requests that etcd has acknowledged. It refuses to start then, or starts with another database.
fn check_damage_is_refused(folder: &Path) {
    let status = ["snapshot", "status", path(folder)];
    let wal = folder.join("member/wal/0000000000000000-0000000000000000.wal");
    let whole = fs::read(&wal).expect("the WAL can be read");
    // In the record after the first one.
    let mut damaged = whole.clone();
    damaged[40] ^= 1;
    for file in [damaged, Vec::new()] {
        fs::write(&wal, file).expect("the WAL can be written");
        check_refused(&status, &["is damaged", "copy member/snap/db to another folder"]);
    }
    fs::remove_file(&wal).expect("the WAL can be removed");
    check_refused(&status, &["has no files"]);
    fs::write(&wal, whole).expect("the WAL can be written");
    let received = ["00000000ffffffff.snap.db", "0000000000000002-00000000ffffffff.snap"]
        .map(|name| folder.join("member/snap").join(name));
    received.iter().for_each(|file| fs::write(file, "").expect("a file can be written"));
    check_refused(&status, &["has a newer database, member/snap/00000000ffffffff.snap.db", "start this etcd"]);
    received.iter().for_each(|file| fs::remove_file(file).expect("a file can be removed"));
    prints(&status);
}

async fn stopped_etcd_is_restored(etcd: Etcd, backend: Backend) {
    // Until it stops, this etcd writes nothing to its database.
    let lazy = ["--backend-batch-interval", "1h", "--backend-batch-limit", "1000000"];
    let Some(mut etcd) = Server::etcd_of(etcd, &lazy, None).await else { return };
    let mut client = Client::connect(etcd.endpoint()).await;
    for number in 0..300_u16 {
        client.put(format!("key/{number}"), vec![7; 500]).await;
    }
    let (folder, file) = (etcd.data_dir(), etcd.data_dir().join("member/snap/db"));
    check_refused(&["snapshot", "status", path(&folder)], &["an etcd uses"]);
    etcd.kill();
    for data in [&folder, &file] {
        let because = ["was not stopped cleanly", "requests that its database lacks"];
        check_refused(&["snapshot", "status", path(data), "--skip-hash-check"], &because);
    }
    etcd.restart().await;
    etcd.terminate().await;
    check_refused_unless_stopped(&mut etcd).await;
    check_damage_is_refused(&folder);
    check_refused(&["snapshot", "status", path(&folder.join("member"))], &["is not a data directory of etcd"]);
    let home = TempDir::new().expect("a folder");
    check_refused(&["snapshot", "status", path(&file)], &["--skip-hash-check"]);
    let Some(datastore) = backend.empty_database(home.path(), "restored.db").await else { return };
    let of_file = prints(&["snapshot", "status", path(&file), "--skip-hash-check"]);
    assert_eq!(prints(&["snapshot", "status", path(&folder)]), of_file);
    prints(&["snapshot", "restore", path(&folder), "--datastore-endpoint", &datastore]);
    let server = Server::orlop_on(&datastore, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(pairs(&mut client, 301).await.len(), 300);
    assert_eq!(leases(&mut client).await, BTreeSet::from([7]));
}

on_both_backends!(
    snapshots_go_from_etcd_to_orlop_and_back,
    snapshots_of_orlop_are_restored_by_etcd,
    history_in_etcd_is_taken_only_if_it_is_complete,
    revisions_are_raised_as_etcdutl_does,
    compacted_transactions_are_restored,
    leases_continue_with_their_remaining_time,
    data_of_a_stopped_etcd_is_restored,
);
