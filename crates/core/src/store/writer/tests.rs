//! Tests of the writer over a log in memory.

use futures_util::{FutureExt as _, future::join};

use super::*;
use crate::{
    auth::{AuthChange, Caller},
    index::ReadAt,
    log::{Append, Appended, Log as _, Member, Reclaim, memory::MemoryLog},
    overload::ReadMemory,
    store::{
        compactor::{CompactionRate, compact},
        fixtures::shared,
        request::{
            Consistency, DeleteRequest, Op, Projection, PutLease, PutRequest, PutValue, RangeRequest, TxnRequest,
        },
    },
    types::{ChangeKind, EncodedKv, Key, KeyRange, Revision, Version},
    watch::{Flavor, Session, Spec},
};

fn delete() -> Request {
    Request::Delete(DeleteRequest { range: KeyRange::from_wire(b"k", b""), prev_kv: false })
}

fn put(key: &'static str) -> Request {
    let value = PutValue::New("v".into());
    Request::Put(PutRequest { key: key.into(), value, lease: PutLease::Set(None), prev_kv: false })
}

/// Lists keys.
fn keys() -> RangeRequest {
    RangeRequest {
        range: KeyRange::from_wire(b"k", b"l"),
        at: ReadAt::Latest,
        limit: None,
        sort: None,
        filter: Default::default(),
        projection: Projection::KeysOnly,
        consistency: Consistency::Linearizable,
    }
}

/// The writer does not run, so every accepted request waits.
#[tokio::test]
async fn full_queue_rejects_requests_until_it_is_drained() {
    let (mut writer, queue) = Writer::new(Arc::new(shared(0)), SlowThresholds::default(), BusyPoll::new(false));
    let mut waiting: Vec<_> =
        (0..QUEUE_REQUESTS_MAX).map(|_| Box::pin(queue.submit(&Caller::Server, delete()))).collect();
    assert!(waiting.iter_mut().all(|submitted| submitted.now_or_never().is_none()), "accepted and waiting");
    assert!(matches!(queue.submit(&Caller::Server, delete()).now_or_never(), Some(Err(Error::TooManyRequests))));

    assert!(writer.collect().await);
    assert!(queue.submit(&Caller::Server, delete()).now_or_never().is_none(), "the queue has capacity again");
}

#[tokio::test]
async fn request_that_needs_values_is_dropped_when_its_client_has_left() {
    let (writer, queue) = Writer::new(Arc::new(shared(0)), SlowThresholds::default(), BusyPoll::new(false));
    let delete = || {
        let range = KeyRange::from_wire(b"k", b"");
        queue.submit(&Caller::Server, Request::Delete(DeleteRequest { range, prev_kv: true }))
    };
    let client = async {
        queue.submit(&Caller::Server, put("k")).await.unwrap();
        assert!(delete().now_or_never().is_none(), "queued");
        let Ok(Outcome::Delete(response)) = delete().await else { panic!("the key is deleted") };
        assert_eq!(response.deleted, 1, "the abandoned request has deleted nothing");
        queue.close();
    };
    tokio::join!(writer.run(), client);
}

/// Otherwise a put that keeps a value would replace it by an empty one.
#[tokio::test]
async fn value_that_the_log_lacks_is_not_taken_for_an_empty_one() {
    let shared = Arc::new(shared(0));
    let (writer, queue) = Writer::new(Arc::clone(&shared), SlowThresholds::default(), BusyPoll::new(false));
    let client = async {
        queue.submit(&Caller::Server, put("k")).await.unwrap();
        let rows = [RowId::new(Revision(2), 0)];
        shared.log.reclaim(Reclaim::Rows { rows: &rows, compacted: Revision::EMPTY, server: 0 }).await.unwrap();
        let Request::Put(put) = put("k") else { unreachable!("it is a put") };
        let range = KeyRange::from_wire(b"k", b"");
        for request in [
            Request::Put(PutRequest { value: PutValue::Keep, ..put.clone() }),
            Request::Put(PutRequest { prev_kv: true, ..put }),
            Request::Delete(DeleteRequest { range, prev_kv: true }),
        ] {
            let outcome = queue.submit(&Caller::Server, request).await;
            assert!(matches!(outcome, Err(Error::Corrupt)), "{outcome:?}");
        }
        queue.close();
    };
    tokio::join!(writer.run(), client);
    assert_eq!(shared.index.read().head(), Revision(2));
}

#[tokio::test]
async fn transaction_that_lists_keys_is_refused_only_while_earlier_lists_hold_the_memory() {
    let shared = Arc::new(Shared { read_memory: ReadMemory::with_limit(10), ..shared(0) });
    let (writer, queue) = Writer::new(Arc::clone(&shared), SlowThresholds::default(), BusyPoll::new(false));
    let list = || {
        // Its value, which is read from the log, already takes more than the memory of lists.
        let value = RangeRequest { projection: Projection::Full, ..keys() };
        let success = vec![Op::Range(keys()), Op::Range(value)];
        let nested = TxnRequest { compares: vec![], success, failure: vec![] };
        let Request::Put(put) = put("other") else { unreachable!("it is a put") };
        let success = vec![Op::Put(put), Op::Txn(nested)];
        queue.submit(&Caller::Server, Request::Txn(TxnRequest { compares: vec![], success, failure: vec![] }))
    };
    let client = async {
        queue.submit(&Caller::Server, put("key")).await.unwrap();
        let first = list().await.unwrap();
        assert!(shared.read_memory.bytes() > 10, "the keys are counted");
        assert!(matches!(list().await, Err(Error::TooManyRequests)));
        queue.submit(&Caller::Server, put("key")).await.unwrap();
        drop(first);
        assert!(list().await.is_ok());
        queue.close();
    };
    tokio::join!(writer.run(), client);
    assert_eq!(shared.read_memory.bytes(), 0);
}

/// Each commit takes 5 ms. Without waiting, two clients take turns, so that there are twice as many commits.
#[tokio::test(start_paused = true)]
async fn clients_that_wait_for_responses_share_commits() {
    const PUTS: u64 = 20;
    let log = Arc::new(MemoryLog::with_append_time(Duration::from_millis(5)));
    let shared = Arc::new(Shared { log, ..shared(0) });
    let (writer, queue) = Writer::new(Arc::clone(&shared), SlowThresholds::default(), BusyPoll::new(false));
    let client = async |key: &'static str| {
        for _ in 0..PUTS {
            // The writer no longer collects when the next request is sent.
            for _ in 0..10 * COLLECT_YIELDS {
                yield_now().await;
            }
            queue.submit(&Caller::Server, put(key)).await.unwrap();
        }
    };
    let clients = async {
        let second = async {
            tokio::time::sleep(Duration::from_millis(2)).await;
            client("b").await;
        };
        tokio::join!(client("a"), second);
        queue.close();
    };
    tokio::join!(writer.run(), clients);
    // The first put of one client and the last of the other are alone.
    assert_eq!(shared.metrics.store.batch_requests.get_sample_count(), PUTS + 1);
}

#[tokio::test(start_paused = true)]
async fn next_batch_waits_only_a_moment() {
    let (mut writer, queue) = Writer::new(Arc::new(shared(0)), SlowThresholds::default(), BusyPoll::new(false));
    let took = Duration::from_millis(1);
    let last = joining::Commit { served: 2, waiting: 0, took, others: joining::Others::None };
    writer.joining.note_commit(&last, Instant::now());
    let submit = || queue.submit(&Caller::Server, delete());
    let late = async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        submit().await
    };
    tokio::select! {
        _ = async { tokio::join!(submit(), late) } => unreachable!("no request is served"),
        is_open = writer.collect() => assert!(is_open),
    }
    assert_eq!(writer.pending.len(), 1);
}

#[tokio::test]
async fn closed_queue_serves_waiting_requests_and_rejects_new_ones() {
    let (writer, queue) = Writer::new(Arc::new(shared(0)), SlowThresholds::default(), BusyPoll::new(false));
    let mut waiting = Box::pin(queue.submit(&Caller::Server, delete()));
    assert!(waiting.as_mut().now_or_never().is_none());
    queue.close();
    writer.run().await;
    assert!(matches!(waiting.await, Ok(Outcome::Delete(_))));
    assert!(matches!(queue.submit(&Caller::Server, delete()).await, Err(Error::Stopped)));
}

/// Requests arrive during each commit, so that some wait whenever the writer looks at its queue.
#[tokio::test(start_paused = true)]
async fn closed_queue_ends_the_writer_although_clients_go_on() {
    const REQUESTS_BEFORE: u32 = 100;
    type Make = fn(u32) -> Request;
    let kinds: [(&str, Make); 2] = [
        ("requests that share a batch", |_| put("k")),
        ("requests of which some are always pending", |number| {
            Request::Auth(AuthChange::AddRole { role: number.to_string() })
        }),
    ];
    for (what, request) in kinds {
        let log = Arc::new(MemoryLog::with_append_time(Duration::from_millis(5)));
        let shared = Arc::new(Shared { log, ..shared(0) });
        let (writer, queue) = Writer::new(shared, SlowThresholds::default(), BusyPoll::new(false));
        let clients = async {
            for number in 0.. {
                if number == REQUESTS_BEFORE {
                    queue.close();
                }
                // Nobody waits for the outcome of an accepted request.
                let refused = queue.submit(&Caller::Server, request(number)).now_or_never();
                if let Some(Err(Error::Stopped)) = refused {
                    break;
                }
                tokio::time::sleep(Duration::from_millis(1)).await;
            }
        };
        let ended = tokio::time::timeout(Duration::from_secs(10), join(writer.run(), clients)).await;
        assert!(ended.is_ok(), "{what}");
    }
}

/// The compactor is late: it looks for its work while the next compaction is being recorded.
#[tokio::test(start_paused = true)]
async fn rows_of_an_own_compaction_are_deleted_although_the_next_one_is_being_recorded() {
    let append_time = Duration::from_millis(5);
    let log = Arc::new(MemoryLog::with_append_time(append_time));
    let shared = Arc::new(Shared { log, ..shared(0) });
    shared.members.update(&[Member { id: 2, name: "other".to_owned(), client_urls: Vec::new() }]);
    *shared.purged_on.lock() = Some(shared.position().server);
    let (writer, queue) = Writer::new(Arc::clone(&shared), SlowThresholds::default(), BusyPoll::new(false));
    let submit = async |request: Request| queue.submit(&Caller::Server, request).await.unwrap();
    let late = async {
        tokio::time::sleep(append_time / 2).await;
        assert_eq!(shared.index.read().compact_revision(), Some(Revision(3)));
        compact(&shared, CompactionRate::default()).await;
        assert!(shared.rows_left_to_others.lock().is_empty(), "nobody else deletes them");
    };
    let client = async {
        for _ in 0..3 {
            submit(put("k")).await;
        }
        submit(Request::Compact(Revision(3))).await;
        tokio::join!(submit(Request::Compact(Revision(4))), late);
        queue.close();
    };
    tokio::join!(writer.run(), client);
}

/// A store without cached values on which another instance writes whenever a value is read.
struct Contended {
    log: Arc<MemoryLog>,
    shared: Arc<Shared>,
}

impl Contended {
    /// With memory for lists up to `list_bytes`.
    fn new(list_bytes: usize) -> Self {
        let log = Arc::new(MemoryLog::with_yielding_values());
        let read_memory = ReadMemory::with_limit(list_bytes);
        Self { shared: Arc::new(Shared { log: Arc::clone(&log) as _, read_memory, ..shared(0) }), log }
    }

    fn start(&self) -> (Writer, WriteQueue) {
        Writer::new(Arc::clone(&self.shared), SlowThresholds::default(), BusyPoll::new(false))
    }

    /// Appends a change of another instance.
    async fn append(&self) -> Vec<Change> {
        let head = self.shared.index.read().head();
        let mut batch = Batch::new(head);
        let Request::Put(put) = put("other") else { unreachable!("it is a put") };
        let evaluated = {
            let (index, leases) = (self.shared.index.read(), self.shared.leases.lock());
            let (values, memory, none) = (&self.shared.values, &self.shared.read_memory, Fetched::new());
            Evaluation::new(&index, &leases, values, memory, &none, &mut batch).put(&put).is_ok()
        };
        assert!(evaluated, "it needs no values");
        let appended = self.log.append(Append::rows(head, batch.changes())).await;
        assert_eq!(appended.ok(), Some(Appended::Done));
        batch.changes().to_vec()
    }

    /// Another instance writes many times, and this one follows.
    async fn write_often(&self) {
        for _ in 0..1_000 {
            let changes = self.append().await;
            let head = self.shared.index.read().head().next();
            self.shared.apply_logged(&changes, head);
            yield_now().await;
        }
    }
}

/// The values of the transaction alone take more than the memory of lists.
#[tokio::test]
async fn requests_that_read_values_end_while_another_instance_writes() {
    const KEYS: usize = 20;
    let contended = Contended::new(10);
    let (writer, queue) = contended.start();
    let values = RangeRequest { projection: Projection::Full, ..keys() };
    let Request::Put(written) = put("written") else { unreachable!("it is a put") };
    let success = vec![Op::Range(keys()), Op::Range(values), Op::Put(written)];
    let txn = TxnRequest { compares: vec![], success, failure: vec![] };
    let delete = DeleteRequest { range: keys().range, prev_kv: true };
    let client = async {
        for key in 0..KEYS {
            let value = PutValue::New("v".into());
            let put = PutRequest { key: format!("k{key}").into(), value, lease: PutLease::Set(None), prev_kv: false };
            queue.submit(&Caller::Server, Request::Put(put)).await.unwrap();
        }
        for (request, read) in [(Request::Txn(txn), KEYS), (Request::Delete(delete), 2 * KEYS)] {
            let done = tokio::select! {
                done = queue.submit(&Caller::Server, request) => done,
                () = contended.write_often() => panic!("it does not end"),
            };
            done.expect("it is done");
            assert_eq!(contended.log.values_read(), read, "each value is read once");
        }
        queue.close();
    };
    tokio::join!(writer.run(), client);
}

#[tokio::test]
async fn pairs_for_watches_are_read_once_although_a_race_is_lost() {
    let contended = Contended::new(1 << 20);
    let (writer, queue) = contended.start();
    let (hub, log) = (Arc::clone(&contended.shared.hub), Arc::clone(&contended.log));
    let outbox = Arc::new(hub.outbox());
    let mut session = Session::new(hub, log, outbox);
    let flavor = Flavor { prev_kv: true, puts: true, deletes: true };
    let range = KeyRange::from_wire(b"k", b"");
    session.create(Spec { id: None, range, start: None, flavor, fragment: None, progress_notify: false });
    let client = async {
        queue.submit(&Caller::Server, put("k")).await.unwrap();
        contended.append().await;
        let Ok(Outcome::Delete(response)) = queue.submit(&Caller::Server, delete()).await else {
            panic!("the key is deleted")
        };
        assert_eq!(response.deleted, 1);
        queue.close();
    };
    tokio::join!(writer.run(), client);
    assert_eq!(contended.shared.metrics.store.raced.get(), 1);
    assert_eq!(contended.log.values_read(), 1);
}

/// Another instance has acknowledged a put after this one read the log, and before a client sends its request.
#[tokio::test]
async fn request_that_arrives_during_a_read_of_the_log_sees_what_was_acknowledged_before() {
    let log = Arc::new(MemoryLog::shared_with_others());
    let shared = Arc::new(Shared { log: Arc::clone(&log) as _, ..shared(0) });
    let (writer, queue) = Writer::new(Arc::clone(&shared), SlowThresholds::default(), BusyPoll::new(false));
    let append = async |revision: i64, key: &str| {
        let row = RowId::new(Revision(revision), 0);
        let version = Version { row, create_revision: row.revision, version: 1 };
        let kind = ChangeKind::put(EncodedKv::new(key.as_bytes(), version, b"", None));
        let change = Change { row, key: Key::from(key.as_bytes()), kind, prev: None, prev_lease: None };
        let appended = log.append(Append::rows(row.revision.prev(), &[change])).await;
        assert_eq!(appended.ok(), Some(Appended::Done));
    };
    append(2, "other").await;
    let first = async { queue.submit(&Caller::Server, delete()).await.unwrap() };
    let second = async {
        while log.pages() == 0 {
            yield_now().await;
        }
        append(3, "k").await;
        let Ok(Outcome::Delete(response)) = queue.submit(&Caller::Server, delete()).await else {
            panic!("the key is deleted")
        };
        assert_eq!(response.deleted, 1, "its put was acknowledged before");
    };
    let clients = async {
        join(first, second).await;
        queue.close();
    };
    // Polls the writer before the clients, always.
    join(writer.run(), clients).await;
}
