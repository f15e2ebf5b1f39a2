//! The clients of a run and the responses that they received.
//!
//! Half of the clients are those of the linearizability test: they put, swap, read and delete a few shared keys. The
//! others write their own keys, one write at a time; every third write is a transaction of two keys. No client repeats
//! a failed request: after an error it connects to the next endpoint, as etcd's clients do, and sends another request.
//! A watcher receives all events.

use std::{
    sync::{Arc, Mutex, atomic::Ordering},
    time::Duration,
};

use orlop_wire::proto::client::etcdserverpb::{RequestOp, TxnRequest, request_op::Request};
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, sleep},
};

use crate::{
    linearizability::{
        connection::{Endpoints, connect},
        watcher::Watcher,
        workload::{self, ANSWER_MAX, Entry, Failure, Progress, failure, revision},
    },
    support::{self, Client as Connection, Random},
};

const SHARING_CLIENTS: usize = 4;
const LOAD_CLIENTS: usize = 4;
/// Length of a value, which is a number padded with spaces.
const VALUE_BYTES: usize = 400;

/// The outcome of a write.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    Written(i64),
    /// The write must not have been applied.
    Refused,
    /// The write may have been applied.
    Unknown,
}

/// A write of one or two keys that only its client writes.
#[derive(Clone, Debug)]
pub struct Write {
    pub keys: Vec<String>,
    pub value: u64,
    pub outcome: Outcome,
    pub began: u64,
    pub ended: u64,
}

/// The running clients and the watcher.
pub struct Workload {
    started: Instant,
    endpoints: Endpoints,
    progress: Vec<Progress>,
    sharing: Vec<JoinHandle<Vec<Entry>>>,
    load: Vec<JoinHandle<Vec<Write>>>,
    watcher: JoinHandle<Watcher>,
    stop: watch::Sender<bool>,
    end: watch::Sender<Option<i64>>,
}

/// The records of all clients and of the watcher.
pub struct Seen {
    pub shared: Vec<Vec<Entry>>,
    pub load: Vec<Vec<Write>>,
    pub watcher: Watcher,
    pub head: i64,
}

impl Workload {
    pub fn start(endpoints: &[String], seed: u64) -> Self {
        let started = Instant::now();
        let endpoints: Endpoints = Arc::new(Mutex::new(endpoints.to_vec()));
        let (stop, stopped) = watch::channel(false);
        let (end, ends) = watch::channel(None);
        let (mut progress, mut sharing, mut load) = (Vec::new(), Vec::new(), Vec::new());
        for number in 0..SHARING_CLIENTS {
            let random = Random::new(seed ^ (number as u64 + 1) << 32);
            let client = workload::Client::new(number, Arc::clone(&endpoints), started, random);
            progress.push(client.progress());
            sharing.push(tokio::spawn(client.run(stopped.clone())));
        }
        for number in 0..LOAD_CLIENTS {
            let own_progress = Progress::default();
            progress.push(Arc::clone(&own_progress));
            let writer =
                Writer { number, endpoint: number, endpoints: Arc::clone(&endpoints), started, progress: own_progress };
            load.push(tokio::spawn(writer.run(stopped.clone())));
        }
        let watcher = tokio::spawn(Watcher::new(0, Arc::clone(&endpoints)).run(ends));
        Self { started, endpoints, progress, sharing, load, watcher, stop, end }
    }

    /// Returns the time in nanoseconds on the clients' clock.
    pub fn now(&self) -> u64 {
        nanoseconds(self.started.elapsed())
    }

    /// Returns the number of clients with a response to a request that was sent after `since`.
    pub fn recovered_since(&self, since: u64) -> usize {
        self.progress.iter().filter(|progress| progress.load(Ordering::Relaxed) > since).count()
    }

    pub fn clients(&self) -> usize {
        self.progress.len()
    }

    pub fn endpoints(&self) -> &Endpoints {
        &self.endpoints
    }

    /// Stops the clients, and stops the watcher when it has received all events.
    pub async fn finish(self) -> Seen {
        self.stop.send_replace(true);
        let (mut shared, mut load) = (Vec::new(), Vec::new());
        for client in self.sharing {
            shared.push(client.await.expect("a client ends"));
        }
        for client in self.load {
            load.push(client.await.expect("a client ends"));
        }
        let head = workload::head(&self.endpoints).await;
        self.end.send_replace(Some(head));
        let watcher = self.watcher.await.expect("a watch keeps its guarantees");
        Seen { shared, load, watcher, head }
    }
}

impl Seen {
    /// Returns, for each client, the time from `since` to its first response to a request sent after `since`.
    pub fn waits(&self, since: u64) -> Vec<Duration> {
        let first_end = |spans: Vec<(u64, u64)>| spans.into_iter().find(|(began, _)| *began > since);
        let ends = self.responses().into_iter().filter_map(first_end);
        ends.map(|(_, end)| Duration::from_nanos(end - since)).collect()
    }

    /// Returns, for each client, the longest time between two responses, of which the first one came before `to` and the
    /// second one after `from`.
    pub fn pauses(&self, from: u64, to: u64) -> Vec<Duration> {
        let longest = |spans: Vec<(u64, u64)>| {
            let pairs = spans.windows(2).map(|pair| (pair[0].1, pair[1].1));
            pairs.filter(|(first, second)| *first < to && *second > from).map(|(first, second)| second - first).max()
        };
        self.responses().into_iter().filter_map(longest).map(Duration::from_nanos).collect()
    }

    /// Returns, for each client, start and end of each request that succeeded.
    fn responses(&self) -> Vec<Vec<(u64, u64)>> {
        let shared = self.shared.iter().map(|entries| entries.iter().map(Entry::span).collect());
        let written = |write: &&Write| matches!(write.outcome, Outcome::Written(_));
        let spans =
            |writes: &Vec<Write>| writes.iter().filter(written).map(|write| (write.began, write.ended)).collect();
        let all = shared.chain(self.load.iter().map(spans));
        all.map(|spans: Vec<(u64, u64)>| spans.into_iter().filter(|(_, ended)| *ended < u64::MAX).collect()).collect()
    }
}

fn nanoseconds(duration: Duration) -> u64 {
    u64::try_from(duration.as_nanos()).expect("a run is shorter than centuries")
}

/// A client that writes its own keys.
struct Writer {
    number: usize,
    endpoint: usize,
    endpoints: Endpoints,
    started: Instant,
    progress: Progress,
}

impl Writer {
    async fn run(mut self, stopped: watch::Receiver<bool>) -> Vec<Write> {
        let mut writes = Vec::new();
        let mut connection = None;
        for number in 1.. {
            let mut connected = loop {
                if *stopped.borrow() {
                    return writes;
                }
                match connection.take() {
                    Some(connected) => break connected,
                    None => connection = connect(&self.endpoints, self.endpoint).await,
                }
            };
            let name = format!("{}/{number}", self.number);
            let keys = if number % 3 == 0 {
                vec![format!("pair/{name}/a"), format!("pair/{name}/b")]
            } else {
                vec![format!("one/{name}")]
            };
            let value = number * 1_000 + self.number as u64;
            let began = nanoseconds(self.started.elapsed());
            let maintenance = connected.maintenance.clone();
            let answer = workload::answer(maintenance, put(&mut connected, &keys, value)).await;
            if answer.is_none() {
                println!("{keys:?}, written at {:.3} s, had no answer in {ANSWER_MAX:?}", began as f64 / 1e9);
            }
            let outcome = match answer.unwrap_or(Err(Failure::Unknown)) {
                Ok(revision) => {
                    // A client counts as recovered only when a transaction succeeds, because its code path differs from
                    // that of the puts before it.
                    if keys.len() > 1 {
                        self.progress.store(began, Ordering::Relaxed);
                    }
                    connection = Some(connected);
                    Outcome::Written(revision)
                }
                Err(failure) => {
                    self.endpoint += 1;
                    // The retry interval of etcd's client.
                    sleep(Duration::from_millis(25)).await;
                    if matches!(failure, Failure::Refused) { Outcome::Refused } else { Outcome::Unknown }
                }
            };
            writes.push(Write { keys, value, outcome, began, ended: nanoseconds(self.started.elapsed()) });
        }
        writes
    }
}

async fn put(connection: &mut Connection, keys: &[String], value: u64) -> Result<i64, Failure> {
    let put = |key: &String| support::put(key, format!("{value:<VALUE_BYTES$}"));
    let header = if let [key] = keys {
        connection.kv.put(put(key)).await.map_err(failure)?.into_inner().header
    } else {
        let success = keys.iter().map(|key| RequestOp { request: Some(Request::RequestPut(put(key))) }).collect();
        let txn = TxnRequest { success, ..Default::default() };
        connection.kv.txn(txn).await.map_err(failure)?.into_inner().header
    };
    Ok(revision(header))
}
