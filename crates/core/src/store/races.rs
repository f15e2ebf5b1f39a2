//! The store under schedules of its threads ([`crate::sync`]): the writer, its queue, catching up, readers and the
//! compactor run as threads that can stop each other at every lock.

use std::sync::{
    Arc, LazyLock, Mutex,
    atomic::{AtomicUsize, Ordering::Relaxed},
};

use bytes::Bytes;
use futures_util::FutureExt as _;
use shuttle::{
    sync::atomic::{AtomicBool, Ordering::SeqCst},
    thread,
};

use super::{
    busy_poll::BusyPoll,
    compactor::{self, CompactionRate},
    error::Error,
    fixtures::shared,
    queue::WriteQueue,
    request::{Consistency, Op, Projection, PutLease, PutRequest, PutValue, RangeRequest, TxnRequest},
    shared::Shared,
    timing::SlowThresholds,
    write_request::{Outcome, Request},
    writer::Writer,
};
use crate::{
    auth::Caller,
    index::ReadAt,
    log::{Append, Appended},
    metrics::Metrics,
    sync::schedules::{self, block_on},
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, LeaseId, Revision, RowId, Version},
    watch::Hub,
};

/// A store whose writer is a thread of the schedule.
struct World {
    shared: Arc<Shared>,
    queue: WriteQueue,
    writer: thread::JoinHandle<()>,
}

impl World {
    fn new() -> Self {
        // Creating the metrics takes longer than a schedule.
        static METRICS: LazyLock<Arc<Metrics>> = LazyLock::new(Arc::default);
        let hub = Arc::new(Hub::new(Revision::EMPTY, None, Arc::clone(&METRICS)));
        let shared = Arc::new(Shared { metrics: Arc::clone(&METRICS), hub, ..shared(0) });
        let (writer, queue) = Writer::new(Arc::clone(&shared), SlowThresholds::default(), BusyPoll::new(false));
        let writer = thread::spawn(move || block_on(writer.run()));
        Self { shared, queue, writer }
    }

    fn spawn<T: Send + 'static>(
        &self,
        run: impl FnOnce(Arc<Shared>, WriteQueue) -> T + Send + 'static,
    ) -> thread::JoinHandle<T> {
        let (shared, queue) = (Arc::clone(&self.shared), self.queue.clone());
        thread::spawn(move || run(shared, queue))
    }

    /// Closes the queue and waits for the writer.
    fn stop(self) -> Arc<Shared> {
        self.queue.close();
        self.writer.join().expect("the writer ends");
        assert_eq!((self.queue.len(), self.queue.waiting_bytes.load(SeqCst)), (0, 0), "nothing waits");
        self.shared
    }
}

fn put(key: &str, value: Bytes) -> PutRequest {
    PutRequest {
        key: Bytes::copy_from_slice(key.as_bytes()),
        value: PutValue::New(value),
        lease: PutLease::Set(None),
        prev_kv: false,
    }
}

fn submit(queue: &WriteQueue, request: Request) -> Result<Outcome, Error> {
    block_on(queue.submit(&Caller::Server, request))
}

/// Reads a and b at one revision. Returns the head, and the pairs.
fn read(shared: &Shared, at: ReadAt) -> Result<(Revision, Vec<EncodedKv>), Error> {
    let request = RangeRequest {
        range: KeyRange::from_wire(b"a", b"c"),
        at,
        limit: None,
        sort: None,
        filter: Default::default(),
        projection: Projection::Full,
        consistency: Consistency::Serializable,
    };
    block_on(shared.range_once(&Caller::Server, &request)).map(|response| (response.revision, response.kvs))
}

/// Checks that a read at revision `at` returned the state at that revision: each transaction puts its number as a and b.
fn check_whole(at: Revision, pairs: &[EncodedKv]) {
    let expected = if at == Revision::EMPTY { vec![] } else { vec![at; 2] };
    assert_eq!(pairs.iter().map(EncodedKv::mod_revision).collect::<Vec<_>>(), expected, "at {at}");
    let values: Vec<&[u8]> = pairs.iter().map(EncodedKv::value_slice).collect();
    assert!(values.windows(2).all(|pair| pair[0] == pair[1]), "{values:?} at {at}");
}

/// Two tasks apply the same changes, the writer and one that reads the log, while two read and one compacts.
#[test]
fn read_sees_all_of_a_revision_or_nothing() {
    const TXNS: i64 = 4;
    schedules::check(600, || {
        let world = World::new();
        let client = world.spawn(|_, queue| {
            for number in 0..TXNS {
                let value = Bytes::from(number.to_string());
                let success = ["a", "b"].map(|key| Op::Put(put(key, value.clone()))).to_vec();
                let txn = TxnRequest { compares: vec![], success, failure: vec![] };
                let Ok(Outcome::Txn(done)) = submit(&queue, Request::Txn(txn)) else { panic!("the queue is open") };
                assert_eq!(done.revision, Revision(number + 2));
            }
        });
        let reader = |shared: Arc<Shared>, _| {
            let mut last = Revision::EMPTY;
            while last <= Revision(TXNS) {
                let (head, pairs) = match read(&shared, ReadAt::Latest) {
                    Err(Error::Compacted) => continue,
                    read => read.expect("the log is whole"),
                };
                check_whole(head, &pairs);
                assert!(head >= last, "the head was {last} and is {head}");
                assert!(shared.hub.head() >= head, "a client reads revision {head}, and the hub does not know it");
                let past = last.max(Revision(2));
                match read(&shared, ReadAt::Revision(past)) {
                    Ok((_, pairs)) => check_whole(past, &pairs),
                    Err(error) => assert!(matches!(error, Error::Compacted | Error::FutureRevision), "{error:?}"),
                }
                last = head;
                thread::yield_now();
            }
        };
        let readers = [world.spawn(reader), world.spawn(reader)];
        let follower = world.spawn(|shared, _| {
            for _ in 0..2 {
                block_on(shared.catch_up()).expect("the log is whole");
            }
        });
        let compactor = world.spawn(|shared, queue| {
            for _ in 0..2 {
                let head = shared.index.read().head();
                match submit(&queue, Request::Compact(head)) {
                    Ok(_) => {
                        block_on(compactor::compact(&shared, CompactionRate { rows: 1, pause: Default::default() }))
                    }
                    Err(error) => assert!(matches!(error, Error::Compacted | Error::FutureRevision), "{error:?}"),
                }
            }
        });
        for thread in readers.into_iter().chain([client, follower, compactor]) {
            thread.join().expect("the thread does not panic");
        }
        world.stop();
    });
}

/// Another instance attaches a key to a lease. This instance revokes the lease while a task applies that change.
#[test]
fn revoked_lease_leaves_no_key_of_another_instance() {
    const LEASE: LeaseId = LeaseId(7);
    schedules::check(1_200, || {
        let world = World::new();
        submit(&world.queue, Request::Grant { id: LEASE, ttl_secs: 60 }).expect("the queue is open");
        let version = Version { row: RowId::new(Revision(2), 0), create_revision: Revision(2), version: 1 };
        let kind = ChangeKind::put(EncodedKv::new(b"k", version, b"", Some(LEASE)));
        let change = Change { row: version.row, key: Key::from(&b"k"[..]), kind, prev: None, prev_lease: None };
        let appended = block_on(world.shared.log.append(Append::rows(Revision::EMPTY, &[change])));
        assert!(matches!(appended, Ok(Appended::Done)));
        let follower = world.spawn(|shared, _| block_on(shared.catch_up()));
        let client = world.spawn(|_, queue| submit(&queue, Request::Revoke(LEASE)));
        follower.join().expect("no panic").expect("the log is whole");
        client.join().expect("no panic").expect("the lease exists");
        let shared = world.stop();
        let index = shared.index.read();
        assert_eq!(index.head(), Revision(3));
        assert!(index.get(b"k", index.head()).is_none(), "the lease ended, and its key exists");
    });
}

/// Clients submit more than the queue holds, one gives up, and the server stops.
#[test]
fn queue_answers_every_request_and_loses_none() {
    // Of all schedules: acknowledged, rejected because the queue is full, and because it is closed.
    static OUTCOMES: [AtomicUsize; 3] = [const { AtomicUsize::new(0) }; 3];
    schedules::check(1_000, || {
        let world = World::new();
        let is_closing = Arc::new(AtomicBool::new(false));
        let acknowledged = Arc::new(Mutex::new(Vec::new()));
        let clients = ["a", "b", "c"].map(|client| {
            let (is_closing, acknowledged) = (Arc::clone(&is_closing), Arc::clone(&acknowledged));
            world.spawn(move |shared, queue| {
                for number in 0..2 {
                    let key = format!("{client}{number}");
                    match submit(&queue, Request::Put(put(&key, vec![7; 400].into()))) {
                        Ok(Outcome::Put(done)) => {
                            OUTCOMES[0].fetch_add(1, Relaxed);
                            assert!(shared.index.read().head() >= done.revision, "acknowledged before it is applied");
                            acknowledged.lock().expect("no panic").push((key, done.revision));
                        }
                        Err(Error::TooManyRequests) => drop(OUTCOMES[1].fetch_add(1, Relaxed)),
                        Err(Error::Stopped) => {
                            OUTCOMES[2].fetch_add(1, Relaxed);
                            assert!(is_closing.load(SeqCst), "rejected although the queue is open");
                        }
                        other => panic!("{other:?}"),
                    }
                }
            })
        });
        let leaver = world.spawn(|_, queue| {
            let submitted = queue.submit(&Caller::Server, Request::Put(put("left", vec![7; 400].into())));
            drop(submitted.now_or_never());
        });
        let stopper = world.spawn(move |_, queue| {
            is_closing.store(true, SeqCst);
            queue.close();
        });
        for thread in clients.into_iter().chain([leaver, stopper]) {
            thread.join().expect("the thread does not panic");
        }
        let shared = world.stop();
        let index = shared.index.read();
        let all = KeyRange::all();
        let found = index.range(all.bounds(), index.head());
        let mut found: Vec<_> = found
            .map(|(key, entry)| (String::from_utf8_lossy(key).into_owned(), entry.version.row.revision))
            .filter(|(key, _)| key != "left")
            .collect();
        let mut acknowledged = acknowledged.lock().expect("no panic");
        found.sort_unstable();
        acknowledged.sort_unstable();
        assert_eq!(found, *acknowledged, "exactly the acknowledged puts are stored");
    });
    assert!(OUTCOMES.iter().all(|count| count.load(Relaxed) > 0), "{OUTCOMES:?}");
}
