//! History that outlasts compactions: states and changes of the past, retention, and restarts.

mod clocks;
mod commands;
mod damage;
mod managers;
mod model;
mod moved;
mod pages;
mod rewind;
mod shared;
mod versions;

use std::time::{Duration, Instant};

use orlop_core::clock;
use orlop_wire::proto::client::{
    etcdserverpb::{CompactionRequest, RangeRequest, RequestOp, TxnRequest, request_op::Request},
    mvccpb::KeyValue,
    orlopb::{
        HistoryChangesRequest, HistoryMomentRequest, HistoryPairsRequest, HistoryStateRequest, HistoryStateResponse,
    },
};
use serde_json::Value;
use tokio::time::sleep;
use tonic::{Code, Status};

use self::model::{Model, ModelChange};
use crate::{
    check::Place,
    support::{
        self, Backend, Client, DEADLINE, Postgres, Random, Server, delete, eventually, get, on_both_backends, prints,
    },
};

const KEYS: [&str; 7] = ["a", "a/1", "a/2", "a/\u{ff}", "b", "b/1", "c"];
const KEEP: [&str; 2] = ["--history-retention", "1h"];

/// (key, range end) of requests.
const RANGES: [(&[u8], &[u8]); 6] =
    [(b"a/1", b""), (b"c", b""), (b"a/", b"a0"), (b"a", b"b"), (b"\0", b"\0"), (b"zz", b"")];

fn contains(range: (&[u8], &[u8]), key: &[u8]) -> bool {
    match range.1 {
        b"" => key == range.0,
        b"\0" => key >= range.0,
        end => range.0 <= key && key < end,
    }
}

async fn state(client: &mut Client) -> HistoryStateResponse {
    client.history.state(HistoryStateRequest {}).await.expect("the state").into_inner()
}

async fn pairs(client: &mut Client, range: (&[u8], &[u8]), revision: i64) -> Result<Vec<KeyValue>, Status> {
    let (key, range_end) = (range.0.to_vec().into(), range.1.to_vec().into());
    let mut stream = client.history.pairs(HistoryPairsRequest { key, range_end, revision }).await?.into_inner();
    let mut all = Vec::new();
    while let Some(page) = stream.message().await? {
        all.extend(page.kvs);
    }
    Ok(all)
}

/// Returns the changes and their times; 0: not known exactly.
async fn changes(client: &mut Client, request: HistoryChangesRequest) -> Result<(Vec<ModelChange>, Vec<i64>), Status> {
    let mut stream = client.history.changes(request).await?.into_inner();
    let (mut all, mut times) = (Vec::new(), Vec::new());
    while let Some(page) = stream.message().await? {
        for change in page.changes {
            let kv = change.kv.expect("a change has a pair");
            all.push((kv.mod_revision, kv.key.to_vec(), (!change.deleted).then_some(kv)));
            times.push(if change.time_is_latest { 0 } else { change.unix_ms });
        }
    }
    Ok((all, times))
}

fn changes_of(range: (&[u8], &[u8]), from_revision: i64, to_revision: i64) -> HistoryChangesRequest {
    let (key, range_end) = (range.0.to_vec().into(), range.1.to_vec().into());
    HistoryChangesRequest { key, range_end, from_revision, to_revision, ..Default::default() }
}

async fn put(client: &mut Client, model: &mut Model, key: &str, value: &str) {
    assert_eq!(client.put(key, value).await, model.write(&[(key, Some(value))]));
}

async fn compact(client: &mut Client, revision: i64) {
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
}

/// Writes at random: a put, a delete of a range, or a transaction of puts and deletes of different keys.
async fn write(client: &mut Client, model: &mut Model, random: &mut Random) {
    let value = format!("{:x}", random.next()).repeat(random.below(40));
    let kind = random.weighted(&[6, 2, 2]);
    let (key, first) = (random.pick(&KEYS), random.below(KEYS.len()));
    if kind == 0 {
        return put(client, model, key, &value).await;
    }
    let mut writes: Vec<(&str, Option<&str>)> = Vec::new();
    let mut success = Vec::new();
    for key in KEYS.iter().cycle().skip(first).take(if kind == 1 { 1 } else { 3 }) {
        let op = if kind == 2 && random.chance(60) {
            writes.push((key, Some(&value)));
            Request::RequestPut(support::put(key, &value))
        } else {
            writes.push((key, None));
            Request::RequestDeleteRange(delete(key))
        };
        success.push(RequestOp { request: Some(op) });
    }
    let answer = client.kv.txn(TxnRequest { success, ..Default::default() }).await.expect("a transaction").into_inner();
    assert_eq!(answer.header.expect("a header").revision, model.write(&writes));
}

/// Compares states and changes at random revisions from `first` on.
async fn compare(client: &mut Client, model: &Model, first: i64, random: &mut Random) {
    for range in RANGES {
        let revision = random.between(first, model.head());
        let within = |key: &[u8]| contains(range, key);
        let found = pairs(client, range, revision).await.expect("a state");
        assert_eq!(found, model.pairs(revision, within), "{range:?} at {revision}");

        let (from, to) = (revision, random.between(revision, model.head()));
        let mut expected = model.changes(from, to, within);
        let (found, times) = changes(client, changes_of(range, from, to)).await.expect("changes");
        assert_eq!(found, expected, "{range:?} from {from} to {to}");
        assert!(times.iter().filter(|time| **time != 0).is_sorted(), "{times:?}");
        if range.1.is_empty() {
            expected.reverse();
            expected.truncate(3);
            let request = HistoryChangesRequest { newest_first: true, limit: 3, ..changes_of(range, from, to) };
            let found = changes(client, request).await.expect("changes").0;
            assert_eq!(found, expected, "{range:?} from {to} back to {from}");
        }
    }
}

async fn past_equals_a_model_over_compactions_and_restarts(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut random = Random::new(7);
    let mut model = Model::new();
    let mut client = Client::connect(server.endpoint()).await;
    for round in 0..12 {
        for _ in 0..random.between(20, 120) {
            write(&mut client, &mut model, &mut random).await;
        }
        compare(&mut client, &model, 1, &mut random).await;
        let revision = random.between(model.head() - 20, model.head());
        let request = CompactionRequest { revision, physical: random.chance(50) };
        client.kv.compact(request).await.expect("a compaction");
        compare(&mut client, &model, 1, &mut random).await;
        if round % 3 == 2 {
            if random.chance(50) {
                server.kill();
            } else {
                server.terminate().await;
            }
            server.restart().await;
            client = Client::connect(server.endpoint()).await;
            compare(&mut client, &model, 1, &mut random).await;
        }
        // For etcd's API the revision is compacted.
        let get = RangeRequest { revision: revision - 1, ..get("a") };
        assert_eq!(client.kv.range(get).await.expect_err("a compacted revision").code(), Code::OutOfRange);
    }
    let state = state(&mut client).await;
    assert_eq!((state.first_revision, state.revision, state.retention_seconds), (1, model.head(), 3600));
    assert!(state.archived_rows > 0 && state.archived_bytes > 64 * state.archived_rows, "{state:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn past_is_the_same_at_every_instance() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let (mut servers, mut clients) = (Vec::new(), Vec::new());
    for name in ["a", "b", "c"] {
        let server = Server::orlop_on(&datastore, &[&KEEP[..], &["--name", name]].concat()).await;
        clients.push(Client::connect(server.endpoint()).await);
        servers.push(server);
    }
    let mut random = Random::new(8);
    let mut model = Model::new();
    for _ in 0..8 {
        for _ in 0..random.between(10, 60) {
            let client = random.below(3);
            write(&mut clients[client], &mut model, &mut random).await;
        }
        let (client, revision) = (random.below(3), random.between(model.head() - 10, model.head()));
        let request = CompactionRequest { revision, physical: false };
        clients[client].kv.compact(request).await.expect("a compaction");
        for client in &mut clients {
            compare(client, &model, 1, &mut random).await;
        }
    }
}

async fn history_begins_where_rows_were_not_kept(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &[]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    for number in 0..10 {
        put(&mut client, &mut model, "a", &number.to_string()).await;
    }
    compact(&mut client, 5).await;
    // Without retention: what etcd's API can read.
    assert_eq!(state(&mut client).await.first_revision, 5);
    let refused = pairs(&mut client, (b"a", b""), 4).await.expect_err("a compacted revision");
    assert_eq!(
        (refused.code(), refused.message()),
        (Code::OutOfRange, "orlop: the history begins at revision 5: older rows were compacted")
    );
    // With retention from now on.
    server.terminate().await;
    server.restart_with(&KEEP).await;
    let mut client = Client::connect(server.endpoint()).await;
    compact(&mut client, 9).await;
    assert_eq!(state(&mut client).await.first_revision, 5);
    let mut random = Random::new(9);
    compare(&mut client, &model, 5, &mut random).await;
    assert_eq!(pairs(&mut client, (b"a", b""), 4).await.expect_err("a revision before").code(), Code::OutOfRange);
    // A compaction without retention makes a gap, so the older rows are of no use.
    server.terminate().await;
    server.restart_with(&[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    assert_eq!(state(&mut client).await.first_revision, 5);
    compact(&mut client, 10).await;
    let state = state(&mut client).await;
    assert_eq!((state.first_revision, state.archived_rows, state.archived_bytes), (10, 0, 0));
}

async fn oldest_rows_are_deleted_above_the_limit(backend: Backend) {
    let flags = [&KEEP[..], &["--history-bytes", "20000"]].concat();
    let Some(server) = Server::orlop_with(backend, &flags).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    let mut random = Random::new(10);
    for number in 0..200 {
        put(&mut client, &mut model, KEYS[number % KEYS.len()], &"x".repeat(500)).await;
    }
    compact(&mut client, model.head()).await;
    let state = eventually("deletion of the oldest rows", async || {
        let state = state(&mut client.clone()).await;
        if state.archived_bytes <= 20_000 { Ok(state) } else { Err(state) }
    })
    .await;
    eventually("the metrics of the history", async || {
        let metrics = (server.metric("orlop_history_rows").await, server.metric("orlop_history_bytes").await);
        if metrics == (state.archived_rows as f64, state.archived_bytes as f64) { Ok(()) } else { Err(metrics) }
    })
    .await;
    assert!(state.archived_rows >= 30 && state.first_revision > 140, "{state:?}");
    let status = prints(&["status", "--endpoints", server.endpoint(), "-w", "json"]);
    let status: Value = serde_json::from_str(&status).expect("JSON");
    assert_eq!(status["historyBytes"], state.archived_bytes);
    compare(&mut client, &model, state.first_revision, &mut random).await;
    let refused = pairs(&mut client, (b"a", b""), state.first_revision - 1).await.expect_err("a deleted revision");
    assert_eq!(refused.code(), Code::OutOfRange);
}

/// Returns the newest revision that was recorded at or before a time, and whether later ones may be that old.
async fn revision_at(client: &mut Client, unix_ms: i64) -> (Option<i64>, bool) {
    let found = client.history.moment(HistoryMomentRequest { unix_ms }).await.expect("an answer").into_inner();
    (found.moment.map(|moment| moment.revision), found.may_lack_revisions)
}

/// Returns the time of a change of `a`; 0: not known exactly.
async fn time_of(client: &Client, revision: i64) -> i64 {
    changes(&mut client.clone(), changes_of((b"a", b""), revision, revision)).await.expect("changes").1[0]
}

/// Puts until the time of the last put is known, and returns that time. It is never known exactly if nobody recorded
/// times for three seconds: the machine was stopped, or another leader had not begun yet.
async fn put_until_recorded(client: &mut Client, model: &mut Model) -> i64 {
    let begins = Instant::now();
    while begins.elapsed() < DEADLINE {
        put(client, model, "a", "value").await;
        // Times are recorded each second.
        for _ in 0..10 {
            sleep(Duration::from_millis(200)).await;
            match time_of(client, model.head()).await {
                0 => {}
                time => return time,
            }
        }
    }
    panic!("no time is recorded");
}

async fn times_are_not_of_a_later_start(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    put(&mut client, &mut model, "a", "first").await;
    for is_crash in [true, false, true, false] {
        let recorded = put_until_recorded(&mut client, &mut model).await;
        put(&mut client, &mut model, "a", "the last one").await;
        let last = model.head();
        if is_crash {
            server.kill();
        } else {
            server.terminate().await;
        }
        let stopped_at = clock::unix_ms(clock::now());
        server.restart().await;
        client = Client::connect(server.endpoint()).await;
        put_until_recorded(&mut client, &mut model).await;
        let time = time_of(&client, last).await;
        // If the machine was stopped before the end, there is a gap.
        let is_known = !is_crash && stopped_at - recorded < 2_000;
        assert!(time <= stopped_at && (!is_known || time != 0), "{time}, stopped at {stopped_at}, crash: {is_crash}");
    }
}

/// `rewind` to such a time could bring back an older state than that of the time.
async fn time_at_which_nobody_recorded_times_is_uncertain(backend: Backend) {
    let Some(mut server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    let begin = put_until_recorded(&mut client, &mut model).await;
    let first = model.head();
    assert!(server.terminate().await.success());
    server.restart_with(&[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    put(&mut client, &mut model, "a", "untimed").await;
    assert_eq!(revision_at(&mut client, begin + 3_600_000).await, (Some(first), true));
    assert!(server.terminate().await.success());
    server.restart_with(&KEEP).await;
    let mut client = Client::connect(server.endpoint()).await;
    let end = put_until_recorded(&mut client, &mut model).await;
    assert_eq!(revision_at(&mut client, begin + 1).await, (Some(first), true));
    assert_eq!(revision_at(&mut client, end).await, (Some(model.head()), false));
}

async fn revisions_have_times(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    // The first moment is recorded at the start.
    let mut noted = Vec::new();
    for _ in 0..3 {
        let unix_ms = put_until_recorded(&mut client, &mut model).await;
        noted.push((unix_ms, model.head()));
    }
    assert!(noted.is_sorted(), "{noted:?}");
    for (unix_ms, revision) in noted {
        let answer = client.history.moment(HistoryMomentRequest { unix_ms }).await.expect("a moment").into_inner();
        let moment = answer.moment.expect("a moment was recorded");
        assert_eq!((moment.revision, moment.unix_ms), (revision, unix_ms));
    }
    let answer = client.history.moment(HistoryMomentRequest { unix_ms: 1 }).await.expect("an answer").into_inner();
    assert_eq!(answer.moment, None);
}

async fn invalid_requests_are_refused(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &[]).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    put(&mut client, &mut model, "a", "1").await;
    let no_key = pairs(&mut client, (b"", b""), 0).await.expect_err("no key");
    assert_eq!((no_key.code(), no_key.message()), (Code::InvalidArgument, "etcdserver: key is not provided"));
    let future = pairs(&mut client, (b"a", b""), 3).await.expect_err("a future revision");
    assert_eq!(
        (future.code(), future.message()),
        (Code::OutOfRange, "etcdserver: mvcc: required revision is a future revision")
    );
    let negative = pairs(&mut client, (b"a", b""), -1).await.expect_err("a negative revision");
    assert_eq!(negative.code(), Code::InvalidArgument);
    let request = HistoryChangesRequest { newest_first: true, ..changes_of((b"a", b"b"), 0, 0) };
    assert_eq!(changes(&mut client, request).await.expect_err("a range").code(), Code::InvalidArgument);
}

/// More keys than one page has, some longer than the part of a key in an index of Postgres, and more rows than one
/// page of changes visits.
async fn long_pasts_are_read_in_pages(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    let long = "l".repeat(280);
    let mut keys: Vec<String> = (0..250).map(|number| format!("key/{number:03}")).collect();
    keys.extend((0..220).map(|number| format!("{long}/{number:03}")));
    // The keys of the last round but one are deleted, and exist again.
    for round in 0..13 {
        for keys in keys.chunks(100) {
            let value = (round != 11).then_some("value");
            let writes: Vec<(&str, Option<&str>)> = keys.iter().map(|key| (key.as_str(), value)).collect();
            let success = keys.iter().map(|key| {
                let request = match value {
                    Some(value) => Request::RequestPut(support::put(key, value)),
                    None => Request::RequestDeleteRange(delete(key)),
                };
                RequestOp { request: Some(request) }
            });
            client
                .kv
                .txn(TxnRequest { success: success.collect(), ..Default::default() })
                .await
                .expect("a transaction");
            model.write(&writes);
        }
    }
    compact(&mut client, model.head()).await;
    assert!(state(&mut client).await.archived_rows > 5_000);
    for revision in [1, 3, 7, 55, 58, 61, model.head()] {
        for range in [&b"\0"[..], b"key/1", long.as_bytes()].map(|start| (start, &b"\0"[..])) {
            let within = |key: &[u8]| contains(range, key);
            let found = pairs(&mut client, range, revision).await.expect("a state");
            assert_eq!(found, model.pairs(revision, within), "at {revision}");
        }
    }
    for range in [(&b"nothing"[..], &b"nowhere"[..]), (b"key/007", b"key/009"), (b"\0", b"\0")] {
        let found = changes(&mut client, changes_of(range, 1, model.head())).await.expect("changes").0;
        assert_eq!(found.len(), model.changes(1, model.head(), |key| contains(range, key)).len(), "{range:?}");
    }
}

/// Values of a step are in memory together, and on Postgres are copied by one statement.
async fn large_rows_are_copied_in_several_steps(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &KEEP).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut model = Model::new();
    for _ in 0..12 {
        put(&mut client, &mut model, "a", &"x".repeat(1 << 20)).await;
    }
    compact(&mut client, model.head()).await;
    let steps = server.metric("etcd_debugging_mvcc_db_compaction_pause_duration_milliseconds_count").await;
    assert!(steps >= 3.0, "{steps} steps for 11 MiB");
    assert_eq!(state(&mut client).await.archived_rows, 11);
}

on_both_backends!(
    large_rows_are_copied_in_several_steps,
    long_pasts_are_read_in_pages,
    past_equals_a_model_over_compactions_and_restarts,
    history_begins_where_rows_were_not_kept,
    oldest_rows_are_deleted_above_the_limit,
    time_at_which_nobody_recorded_times_is_uncertain,
    revisions_have_times,
    times_are_not_of_a_later_start,
    invalid_requests_are_refused,
);
