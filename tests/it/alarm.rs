//! Alarms: raised and cleared by clients, and by the quota.

use std::{fs, time::Instant};

use orlop_wire::proto::client::etcdserverpb::{
    AlarmMember, AlarmRequest, AlarmType, CompactionRequest, DefragmentRequest, DeleteRangeRequest, LeaseGrantRequest,
    RequestOp, StatusRequest, TxnRequest, alarm_request::AlarmAction, request_op::Request,
};
use tonic::{Code, Status};

use crate::support::{
    Backend, Client, DEADLINE, Disk, Place, Postgres, Server, delete, eventually, get, http_get, on_both_backends,
    orlop, prints, put, run, run_within,
};

const NO_SPACE: &str = "etcdserver: mvcc: database space exceeded";
const CORRUPT: &str = "etcdserver: corrupt cluster";

fn txn(requests: Vec<Request>) -> TxnRequest {
    let success = requests.into_iter().map(|request| RequestOp { request: Some(request) }).collect();
    TxnRequest { success, ..Default::default() }
}

async fn alarm(client: &mut Client, action: AlarmAction, alarm: AlarmType) -> Vec<AlarmMember> {
    let request = AlarmRequest { action: action.into(), member_id: 7, alarm: alarm.into() };
    client.maintenance.alarm(request).await.expect("alarms are always served").into_inner().alarms
}

/// Sends one request of each kind. Returns its name, and the error text if it was refused.
async fn refusals(client: &mut Client) -> Vec<(&'static str, Option<String>)> {
    let text = |status: Status| status.message().to_owned();
    let mut answers = Vec::new();
    answers.push(("put", client.kv.put(put("k", "v")).await.map(drop)));
    let with_put = txn(vec![Request::RequestPut(put("k", "v"))]);
    answers.push(("txn with a put", client.kv.txn(with_put).await.map(drop)));
    let without_put = txn(vec![Request::RequestDeleteRange(delete("nothing"))]);
    answers.push(("txn without a put", client.kv.txn(without_put).await.map(drop)));
    answers.push(("range", client.kv.range(get("k")).await.map(drop)));
    answers.push(("txn that only reads", client.kv.txn(txn(vec![Request::RequestRange(get("k"))])).await.map(drop)));
    answers.push(("delete", client.kv.delete_range(delete("nothing")).await.map(drop)));
    answers.push(("grant", client.lease.lease_grant(LeaseGrantRequest { ttl: 60, id: 0 }).await.map(drop)));
    let revision =
        client.kv.range(get("k")).await.ok().map_or(1, |range| range.into_inner().header.expect("a header").revision);
    let compaction = client.kv.compact(CompactionRequest { revision, physical: false }).await.map(drop);
    answers.push(("compact", compaction));
    answers.into_iter().map(|(what, answer)| (what, answer.err().map(text))).collect()
}

fn expected(refused: &[&str], text: &str) -> Vec<(&'static str, Option<String>)> {
    ["put", "txn with a put", "txn without a put", "range", "txn that only reads", "delete", "grant", "compact"]
        .map(|what| (what, refused.contains(&what).then(|| text.to_owned())))
        .to_vec()
}

async fn alarm_refuses_the_same_requests_as_etcd(backend: Backend) {
    let Some(mut server) = Server::under_test(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let member = |alarm: AlarmType| AlarmMember { member_id: 7, alarm: alarm.into() };
    let no_space = expected(&["put", "txn with a put", "grant"], NO_SPACE);
    let writes = ["put", "txn with a put", "txn without a put", "delete", "grant", "compact"];
    for (raised, refused) in [(AlarmType::Nospace, no_space), (AlarmType::Corrupt, expected(&writes, CORRUPT))] {
        assert_eq!(alarm(&mut client, AlarmAction::Activate, raised).await, [member(raised)]);
        assert_eq!(
            alarm(&mut client, AlarmAction::Activate, raised).await,
            [member(raised)],
            "raising it again has no effect"
        );
        assert_eq!(alarm(&mut client, AlarmAction::Get, AlarmType::None).await, [member(raised)]);
        assert_eq!(refusals(&mut client).await, refused);

        server.restart().await;
        client = Client::connect(server.endpoint()).await;
        assert_eq!(alarm(&mut client, AlarmAction::Get, raised).await, [member(raised)], "it survives a restart");
        let status = client.maintenance.status(StatusRequest {}).await.expect("a status").into_inner();
        assert_eq!(status.errors, [format!("memberID:7 alarm:{} ", raised.as_str_name())]);
        assert_eq!(http_get(server.endpoint(), "/health").await.status, 503);

        assert_eq!(alarm(&mut client, AlarmAction::Deactivate, raised).await, [member(raised)]);
        assert_eq!(alarm(&mut client, AlarmAction::Deactivate, raised).await, []);
        assert_eq!(http_get(server.endpoint(), "/health").await.status, 200);
        client.kv.put(put("k", "v")).await.expect("puts are accepted again");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_change_of_an_alarm_is_listed_at_another_instance() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let one = Server::orlop_on(&datastore, &["--name", "one"]).await;
    let two = Server::orlop_on(&datastore, &["--name", "two"]).await;
    let (mut a, mut b) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    for round in 0..50 {
        let raised = alarm(&mut a, AlarmAction::Activate, AlarmType::Nospace).await;
        assert_eq!(alarm(&mut b, AlarmAction::Get, AlarmType::None).await, raised, "round {round}");
        alarm(&mut a, AlarmAction::Deactivate, AlarmType::Nospace).await;
        assert_eq!(alarm(&mut b, AlarmAction::Get, AlarmType::None).await, [], "round {round}");
    }
}

/// Anyone who reaches the port can send probes. A failed one is counted, and must not cost a line of the log.
async fn failed_probes_do_not_fill_the_log(backend: Backend) {
    const PROBES: u32 = 100;
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let health = server.metric("etcd_server_health_failures").await;
    alarm(&mut client, AlarmAction::Activate, AlarmType::Corrupt).await;
    for (path, message) in [("/health", "serving /health false"), ("/readyz", "health check failed")] {
        let began = Instant::now();
        for _ in 0..PROBES {
            assert_eq!(http_get(server.endpoint(), path).await.status, 503, "{path}");
        }
        // The first one is logged, and one after each second.
        let lines_max = usize::try_from(began.elapsed().as_secs()).expect("few seconds") + 1;
        let lines = server.log().matches(message).count();
        assert!((1..=lines_max).contains(&lines), "{path}: {lines} lines, at most {lines_max} are expected");
    }
    let health = server.metric("etcd_server_health_failures").await - health;
    let check = "etcd_server_healthchecks_total{name=\"data_corruption\",status=\"error\",type=\"readyz\"}";
    assert_eq!((health, server.metric(check).await), (f64::from(PROBES), f64::from(PROBES)));
}

/// The store is filled until the alarm is raised; after compaction and defragmentation it accepts writes again, and no
/// key is lost.
async fn quota_raises_the_alarm_and_freed_space_clears_it(backend: Backend) {
    let quota = 4_000_000.to_string();
    let Some(server) = Server::orlop_with(backend, &["--quota-backend-bytes", &quota]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    client.kv.put(put("kept", "value")).await.expect("there is space");
    // Random values, so that the database cannot compress them.
    let mut random = crate::support::Random::new(1);
    let mut written = 0;
    let refused = loop {
        let value: Vec<u8> = (0..50_000).map(|_| (random.below(256)) as u8).collect();
        match client.kv.put(put("filler", value)).await {
            Ok(_) => written += 1,
            Err(refused) => break refused,
        }
        assert!(written < 200, "10 MB were written, although the quota is 4 MB");
    };
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, NO_SPACE));
    assert!(written > 50, "puts were refused after only {written} x 50 kB");
    eventually("the alarm", async || {
        let alarms = alarm(&mut client.clone(), AlarmAction::Get, AlarmType::Nospace).await;
        if alarms.len() == 1 { Ok(()) } else { Err(alarms) }
    })
    .await;
    assert_eq!(http_get(server.endpoint(), "/health?exclude=NOSPACE").await.status, 200);
    assert_eq!(http_get(server.endpoint(), "/readyz").await.status, 200, "reads are served");

    let revision =
        client.kv.range(get("kept")).await.expect("reads are served").into_inner().header.expect("a header").revision;
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("compactions are served");
    client.maintenance.defragment(DefragmentRequest {}).await.expect("defragmentation is served");
    eventually("free space", async || client.clone().kv.put(put("more", "value")).await.map(drop)).await;
    assert_eq!(alarm(&mut client, AlarmAction::Get, AlarmType::None).await, []);
    for key in ["kept", "filler", "more"] {
        assert_eq!(client.kv.range(get(key)).await.expect("a range").into_inner().count, 1, "{key}");
    }
}

/// A client that puts a key before it compacts, as kube-apiserver does, cannot compact while the alarm is raised.
async fn automatic_compaction_clears_the_alarm_that_history_has_raised(backend: Backend) {
    let flags = ["--quota-backend-bytes", "4000000", "--auto-compaction-retention", "2s"];
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    // Random values, so that the database cannot compress them.
    let mut random = crate::support::Random::new(1);
    let began = Instant::now();
    let (value, refused) = loop {
        let value: Vec<u8> = (0..400_000).map(|_| (random.below(256)) as u8).collect();
        if let Err(refused) = client.kv.put(put("overwritten", value.clone())).await {
            break (value, refused);
        }
        assert!(began.elapsed() < DEADLINE, "no put was refused");
    };
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, NO_SPACE));
    let raised = eventually("the alarm", async || {
        let log = server.log();
        let raised = log.lines().find(|line| line.contains("alarm raised")).map(str::to_owned);
        raised.ok_or(log)
    })
    .await;
    assert!(raised.contains("in_use=") && raised.contains("quota=4000000"), "{raised}");
    eventually("space for the refused value", async || {
        client.clone().kv.put(put("overwritten", value.clone())).await.map(drop)
    })
    .await;
    assert_eq!(alarm(&mut client, AlarmAction::Get, AlarmType::None).await, []);
}

/// The quota was lowered, or the database is a copy of a larger one.
async fn store_above_the_quota_of_its_server_accepts_no_put(backend: Backend) {
    let Some(mut server) = server_with_a_megabyte(backend).await else { return };
    server.restart_with(&["--quota-backend-bytes", "500000"]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let refused = client.kv.put(put("first", "value")).await.expect_err("there is no space");
    assert_eq!((refused.code(), refused.message()), (Code::ResourceExhausted, NO_SPACE));
    eventually("the alarm", async || {
        let alarms = alarm(&mut client.clone(), AlarmAction::Get, AlarmType::Nospace).await;
        if alarms.len() == 1 { Ok(()) } else { Err(alarms) }
    })
    .await;
    assert_eq!(client.kv.range(get("kept")).await.expect("reads are served").into_inner().count, 1);

    server.restart_with(&[]).await;
    let client = Client::connect(server.endpoint()).await;
    eventually("free space", async || client.clone().kv.put(put("more", "value")).await.map(drop)).await;
}

/// The quota is a setting of the servers, and the command may have another one.
async fn command_on_a_database_has_no_quota(backend: Backend) {
    let Some(mut server) = server_with_a_megabyte(backend).await else { return };
    Client::connect(server.endpoint()).await.kv.put(put("kept", "small")).await.expect("there is space");
    assert!(server.terminate().await.success());
    let mut command = orlop(["rewind", "kept", "--to", "2", "--yes", "--datastore-endpoint", &server.url()]);
    let output = run(command.env("ORLOP_QUOTA_BACKEND_BYTES", "500000"));
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    let kept = client.kv.range(get("kept")).await.expect("a range").into_inner().kvs;
    assert_eq!(kept[0].value.len(), 1_000_000, "the old value was written");
    assert_eq!(alarm(&mut client, AlarmAction::Get, AlarmType::None).await, []);
}

/// Returns a server that stores a megabyte of random bytes, which the database cannot compress.
async fn server_with_a_megabyte(backend: Backend) -> Option<Server> {
    let server = Server::orlop(backend).await?;
    let mut random = crate::support::Random::new(1);
    let value: Vec<u8> = (0..1_000_000).map(|_| (random.below(256)) as u8).collect();
    Client::connect(server.endpoint()).await.kv.put(put("kept", value)).await.expect("there is space");
    Some(server)
}

/// On the smaller disk there is no space for the preallocated WAL. The server's own log is on the smaller disk and beside
/// the larger one.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_raises_the_alarm_and_free_space_clears_it() {
    for megabytes in [32, 80] {
        let Some(disk) = Disk::mount(megabytes) else { return };
        let is_log_on_disk = megabytes == 32;
        let path = Some(disk.path().to_owned());
        let place = if is_log_on_disk {
            Place { folder: path, ..Place::default() }
        } else {
            Place { data: path, ..Place::default() }
        };
        let server = Server::orlop_at(None, &[], place).await;
        let mut client = Client::connect(server.endpoint()).await;
        client.kv.put(put("kept", "value")).await.expect("there is space");
        disk.fill();
        eventually("a refusal", async || match client.clone().kv.put(put("filler", vec![7; 1_000_000])).await {
            Err(status) if status.message() == NO_SPACE => Ok(()),
            other => Err(other.map(drop)),
        })
        .await;
        eventually("the alarm", async || {
            let alarms = alarm(&mut client.clone(), AlarmAction::Get, AlarmType::Nospace).await;
            if alarms.len() == 1 { Ok(()) } else { Err(alarms) }
        })
        .await;
        assert_eq!(http_get(server.endpoint(), "/health").await.status, 503);
        assert_eq!(client.kv.range(get("kept")).await.expect("reads are served").into_inner().count, 1);
        assert!(is_log_on_disk || server.log().contains("the disk is full"), "{}", server.log());
        disk.empty();
        eventually("free space", async || client.clone().kv.put(put("more", "value")).await.map(drop)).await;
        eventually("no alarm", async || {
            let alarms = alarm(&mut client.clone(), AlarmAction::Get, AlarmType::None).await;
            if alarms.is_empty() { Ok(()) } else { Err(alarms) }
        })
        .await;
    }
}

/// The last connection to a database usually deletes its WAL and the index of it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_starts_again_on_a_full_disk() {
    let Some(disk) = Disk::mount(80) else { return };
    let place = Place { data: Some(disk.path().to_owned()), ..Place::default() };
    let mut server = Server::orlop_at(None, &[], place).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.kv.put(put("kept", "value")).await.expect("there is space");
    assert!(server.terminate().await.success());
    server.restart().await;
    disk.fill();
    assert!(server.terminate().await.success());
    disk.fill();
    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.kv.range(get("kept")).await.expect("reads are served").into_inner().count, 1);
    disk.empty();
    eventually("free space", async || client.clone().kv.put(put("more", "value")).await.map(drop)).await;
    assert!(server.terminate().await.success());
    assert!(!disk.path().join("orlop.db-wal").exists(), "the file alone can be copied again");
}

/// The WAL has space for a part of the compaction, and only as long as its index can be extended. The rest waits for space.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn compaction_on_a_full_disk_ends_when_space_is_added() {
    const TXNS: usize = 480;
    let Some(disk) = Disk::mount(160) else { return };
    let data = disk.path().to_str().expect("a temporary path is text").to_owned();
    let place = Place { data: Some(disk.path().to_owned()), ..Place::default() };
    let mut server = Server::orlop_at(None, &[], place).await;
    let mut client = Client::connect(server.endpoint()).await;
    // Every third row is replaced, so a compaction changes each page of the rows, which is more than the WAL has space for,
    // and frees too few pages for a vacuum.
    for number in 0..TXNS {
        let keys = |key: usize| {
            [format!("kept/{number:03}/{key}"), format!("also/{number:03}/{key}"), format!("replaced/{key}")]
        };
        let puts = (0..42).flat_map(keys).map(|key| Request::RequestPut(put(key, vec![7; 900])));
        client.kv.txn(txn(puts.collect())).await.expect("there is space");
    }
    // The index of the WAL is short again.
    assert!(server.terminate().await.success());
    server.restart().await;
    disk.fill();
    let mut client = Client::connect(server.endpoint()).await;
    // Its rows make the database file longer, so no checkpoint succeeds.
    let some = DeleteRangeRequest { range_end: "kept/04".into(), ..delete("kept/00") };
    let deleted = client.kv.delete_range(some).await.expect("deletes are served").into_inner();
    assert_eq!(deleted.deleted, 40 * 42);
    let revision = deleted.header.expect("a header").revision;
    client.kv.compact(CompactionRequest { revision, physical: false }).await.expect("compactions are served");
    let failed = eventually("a failed deletion", async || {
        let log = server.log();
        let failed = log.lines().find(|line| line.contains("cannot delete compacted rows")).map(str::to_owned);
        failed.ok_or(log)
    })
    .await;
    assert!(failed.contains("; the disk is full"), "{failed}");
    // A start must not need a page of the WAL, however often the server is started.
    let mut keys = (200..TXNS).flat_map(|number| (0..42).map(move |key| format!("kept/{number}/{key}")));
    let refused = loop {
        let key = keys.next().expect("the WAL becomes full");
        if let Err(refused) = client.kv.delete_range(delete(key)).await {
            break refused;
        }
    };
    assert_eq!(refused.message(), NO_SPACE);

    for _ in 0..3 {
        assert!(server.terminate().await.success());
        prints(&["check", "--data-dir", &data]);
        disk.fill();
        server.restart().await;
    }
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(client.kv.range(get("kept/100/0")).await.expect("reads are served").into_inner().count, 1);
    disk.resize(320);
    let more = eventually("free space", async || client.clone().kv.put(put("more", "value")).await).await;
    // It begins when the rows of the first compaction are deleted.
    let revision = more.into_inner().header.expect("a header").revision;
    let compaction = client.kv.compact(CompactionRequest { revision, physical: true });
    tokio::time::timeout(2 * DEADLINE, compaction).await.expect("it ends").expect("a compaction");
    assert!(server.terminate().await.success());
    prints(&["check", "--data-dir", &data]);
}

/// SQLite cannot create the index of the WAL.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn full_disk_is_named_if_a_file_with_a_wal_cannot_be_opened() {
    let Some(disk) = Disk::mount(80) else { return };
    let mut server = Server::orlop(Backend::Sqlite).await.expect("SQLite is built in");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("kept", "value").await;
    server.kill();
    for name in ["orlop.db", "orlop.db-wal", "orlop.db.lock"] {
        fs::copy(server.data_dir().join(name), disk.path().join(name)).expect("a copy");
    }
    disk.fill();
    let data = disk.path().to_str().expect("a temporary path is text");
    let serve = ["--listen-client-urls", "http://127.0.0.1:0", "--data-dir", data];
    for (arguments, status) in [(&["check", "--data-dir", data][..], 2), (&serve[..], 1)] {
        let output = run_within(DEADLINE, &mut orlop(arguments));
        let text = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
        assert!(text.contains("cannot open") && text.contains("; the disk is full"), "{arguments:?}: {text}");
        assert!(!text.contains("is not an Orlop database"), "{arguments:?}: {text}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn alarm_applies_to_all_instances() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let (one, two) = (Server::orlop_on(&datastore, &[]).await, Server::orlop_on(&datastore, &[]).await);
    let (mut a, mut b) = (Client::connect(one.endpoint()).await, Client::connect(two.endpoint()).await);
    alarm(&mut a, AlarmAction::Activate, AlarmType::Nospace).await;
    eventually("the alarm on the other instance", async || match b.clone().kv.put(put("k", "v")).await {
        Err(status) if status.message() == NO_SPACE => Ok(()),
        other => Err(other),
    })
    .await;
    alarm(&mut b, AlarmAction::Deactivate, AlarmType::Nospace).await;
    eventually("the end of the alarm on the first instance", async || a.clone().kv.put(put("k", "v")).await.map(drop))
        .await;
}

on_both_backends!(
    alarm_refuses_the_same_requests_as_etcd,
    failed_probes_do_not_fill_the_log,
    quota_raises_the_alarm_and_freed_space_clears_it,
    automatic_compaction_clears_the_alarm_that_history_has_raised,
    store_above_the_quota_of_its_server_accepts_no_put,
    command_on_a_database_has_no_quota,
);
