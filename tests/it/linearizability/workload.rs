//! Clients that record their requests and responses, and the check of the recorded history.

use std::{
    collections::{BTreeMap, HashMap, HashSet},
    future::Future,
    sync::{
        Arc,
        atomic::{AtomicU64, Ordering},
    },
    time::Duration,
};

use orlop_wire::proto::client::{
    etcdserverpb::{
        Compare, RequestOp, ResponseHeader, StatusRequest, TxnRequest, compare::TargetUnion,
        maintenance_client::MaintenanceClient, request_op::Request, response_op::Response,
    },
    mvccpb::KeyValue,
};
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tonic::{Code, Status};

use super::{
    KEYS_CHANGE,
    checker::{self, Answer, Ask, Found, Operation},
    connection::{Endpoints, connect, value},
    watcher::Log,
};
use crate::support::{Client as Clients, Connection, DEADLINE, Random, delete, eventually, get, put};

const KEYS: usize = 4;
/// Request timeout of a client, like that of kube-apiserver.
pub const ANSWER_MAX: Duration = Duration::from_secs(10);

/// Start of the newest operation that has a response, in nanoseconds since the start of the test.
pub type Progress = Arc<AtomicU64>;

/// An operation of the history.
#[derive(Clone, Debug)]
pub struct Entry {
    key: String,
    operation: Operation,
    /// The revision in the response's header.
    header: Option<i64>,
    /// The operation was refused: it must not have been applied.
    refused: bool,
}

impl Entry {
    /// Returns the start and the end of the operation. The end is `u64::MAX` if there was no response.
    pub fn span(&self) -> (u64, u64) {
        (self.operation.began, self.operation.ended)
    }
}

/// The failure of a call.
pub enum Failure {
    /// The operation was not applied.
    Refused,
    /// The operation may have been applied.
    Unknown,
}

pub struct Client {
    number: usize,
    /// The next endpoint to connect to. It changes after a failed call, as in etcd's clients.
    endpoint: usize,
    endpoints: Endpoints,
    started: Instant,
    random: Random,
    next_value: u64,
    /// The last value seen of each key, for swaps.
    seen: HashMap<String, u64>,
    progress: Progress,
}

impl Client {
    pub fn new(number: usize, endpoints: Endpoints, started: Instant, random: Random) -> Self {
        Self {
            number,
            endpoint: number,
            endpoints,
            started,
            random,
            next_value: 1,
            seen: HashMap::new(),
            progress: Progress::default(),
        }
    }

    pub fn progress(&self) -> Progress {
        Arc::clone(&self.progress)
    }

    pub async fn run(mut self, stopped: watch::Receiver<bool>) -> Vec<Entry> {
        let mut history = Vec::new();
        let mut connection = None;
        while !*stopped.borrow() {
            let Some(connected) = &mut connection else {
                connection = connect(&self.endpoints, self.endpoint).await;
                continue;
            };
            let (key, ask) = self.choose();
            let began = self.now();
            let maintenance = connected.maintenance.clone();
            let answer = answer(maintenance, call(connected, &key, ask)).await.unwrap_or_else(|| {
                println!("{ask:?} of {key} at {:.3} s had no answer in {ANSWER_MAX:?}", began as f64 / 1e9);
                Err(Failure::Unknown)
            });
            let mut entry = Entry {
                key,
                operation: Operation { ask, answer: Answer::Unknown, began, ended: u64::MAX },
                header: None,
                refused: false,
            };
            match answer {
                Ok((answer, header)) => {
                    entry.operation = Operation { answer, ended: self.now(), ..entry.operation };
                    entry.header = Some(header);
                    self.progress.store(began, Ordering::Relaxed);
                    self.learn(&entry);
                }
                Err(failure) => {
                    entry.refused = matches!(failure, Failure::Refused);
                    connection = None;
                    self.endpoint += 1;
                }
            }
            history.push(entry);
            sleep(Duration::from_millis(self.random.next() % 20)).await;
        }
        history
    }

    fn now(&self) -> u64 {
        u64::try_from(self.started.elapsed().as_nanos()).expect("a run is shorter than centuries")
    }

    fn choose(&mut self) -> (String, Ask) {
        let period = self.started.elapsed().as_secs() / KEYS_CHANGE.as_secs();
        let key = format!("lin/{period:04}/{}", self.random.below(KEYS));
        self.next_value += 1;
        let new = self.next_value * 1_000 + self.number as u64;
        let ask = match (self.random.weighted(&[4, 4, 5, 1]), self.seen.get(&key)) {
            (0, _) => Ask::Put(new),
            (1, Some(old)) => Ask::Swap { old: *old, new },
            (3, _) => Ask::Delete,
            _ => Ask::Read,
        };
        (key, ask)
    }

    fn learn(&mut self, entry: &Entry) {
        let value = match (entry.operation.ask, entry.operation.answer) {
            (Ask::Put(value) | Ask::Swap { new: value, .. }, Answer::Written(_))
            | (_, Answer::Found(Some((value, _)))) => value,
            _ => return,
        };
        self.seen.insert(entry.key.clone(), value);
    }
}

/// Returns the current revision. Retries until a read succeeds, because the last fault may have just ended.
pub async fn head(endpoints: &Endpoints) -> i64 {
    eventually("a read after the last fault", async || {
        let mut connection = connect(endpoints, 0).await.ok_or("no connection")?;
        let answer = timeout(DEADLINE, connection.kv.range(get("k"))).await.map_err(|_| "no answer")?;
        Ok::<_, &str>(revision(answer.map_err(|_| "an error")?.into_inner().header))
    })
    .await
}

pub fn revision(header: Option<ResponseHeader>) -> i64 {
    header.expect("an answer has a header").revision
}

/// Waits for a response until the client's timeout; returns `None` if there was none.
///
/// If a connection ends just as a request is handed to it, the request may stay in tonic's channel, neither answered
/// nor failed, until the channel is used again: tokio's unbounded queue keeps a message that is sent while the receiver
/// is dropped. Connections of kube-apiserver always have other traffic. Here a status request every one or two seconds
/// takes the place of that traffic.
pub async fn answer<T>(mut maintenance: MaintenanceClient<Connection>, call: impl Future<Output = T>) -> Option<T> {
    let traffic = async {
        loop {
            sleep(Duration::from_secs(1)).await;
            // The response does not matter.
            let _ = timeout(Duration::from_secs(1), maintenance.status(StatusRequest {})).await;
        }
    };
    tokio::select! {
        answer = timeout(ANSWER_MAX, call) => answer.ok(),
        () = traffic => None,
    }
}

async fn call(connection: &mut Clients, key: &str, ask: Ask) -> Result<(Answer, i64), Failure> {
    let kv = &mut connection.kv;
    match ask {
        Ask::Put(value) => {
            let header = revision(kv.put(put(key, value.to_string())).await.map_err(failure)?.into_inner().header);
            Ok((Answer::Written(header), header))
        }
        Ask::Read => {
            let answer = kv.range(get(key)).await.map_err(failure)?.into_inner();
            Ok((Answer::Found(found(&answer.kvs)), revision(answer.header)))
        }
        Ask::Delete => {
            let answer = kv.delete_range(delete(key)).await.map_err(failure)?.into_inner();
            let header = revision(answer.header);
            Ok((if answer.deleted == 0 { Answer::Nothing } else { Answer::Written(header) }, header))
        }
        Ask::Swap { old, new } => {
            let compare = Compare {
                key: key.to_owned().into(),
                target: 3,
                target_union: Some(TargetUnion::Value(old.to_string().into())),
                ..Default::default()
            };
            let op = |request| RequestOp { request: Some(request) };
            let txn = TxnRequest {
                compare: vec![compare],
                success: vec![op(Request::RequestPut(put(key, new.to_string())))],
                failure: vec![op(Request::RequestRange(get(key)))],
            };
            let answer = kv.txn(txn).await.map_err(failure)?.into_inner();
            let header = revision(answer.header);
            if answer.succeeded {
                return Ok((Answer::Written(header), header));
            }
            let response = answer.responses.into_iter().next().and_then(|response| response.response);
            let Some(Response::ResponseRange(range)) = response else { panic!("no range response") };
            Ok((Answer::Found(found(&range.kvs)), header))
        }
    }
}

fn found(kvs: &[KeyValue]) -> Found {
    kvs.first().map(|kv| (value(&kv.value), kv.mod_revision))
}

/// Classifies an error. Only an error that guarantees that nothing was applied is a refusal.
pub fn failure(status: Status) -> Failure {
    match (status.code(), status.message()) {
        (Code::Unavailable, "etcdserver: no leader") | (Code::ResourceExhausted, _) => Failure::Refused,
        _ => Failure::Unknown,
    }
}

/// Counts of the checked operations and keys.
#[derive(Debug, Default)]
pub struct Checked {
    pub acknowledged: usize,
    pub unknown: usize,
    pub refused: usize,
    pub keys: usize,
}

/// Checks a history against the events of the log.
pub fn check(history: Vec<Entry>, log: &Log) -> Result<Checked, String> {
    check_headers(&history)?;
    let agreement = check_agreement(&history, log);
    let mut checked = Checked::default();
    let mut keys: BTreeMap<String, Vec<Operation>> = BTreeMap::new();
    let written: HashMap<u64, i64> =
        log.values().flatten().filter_map(|event| Some((event.value?, event.revision))).collect();
    let mut revisions = HashSet::new();
    for Entry { key, mut operation, refused, .. } in history {
        let value = match operation.ask {
            Ask::Put(value) | Ask::Swap { new: value, .. } => Some(value),
            Ask::Read | Ask::Delete => None,
        };
        match operation.answer {
            Answer::Written(revision) => {
                checked.acknowledged += 1;
                let event = log.get(&revision).and_then(|events| events.iter().find(|event| event.key == key));
                if event.is_none_or(|event| event.value != value) {
                    return Err(format!("{operation:?} of {key} was acknowledged, but the log has {event:?}"));
                }
                if !revisions.insert(revision) {
                    return Err(format!("revision {revision} was acknowledged twice"));
                }
            }
            Answer::Found(_) | Answer::Nothing => checked.acknowledged += 1,
            Answer::Unknown if refused => {
                checked.refused += 1;
                if value.is_some_and(|value| written.contains_key(&value)) {
                    return Err(format!("{operation:?} of {key} was refused but applied"));
                }
                continue;
            }
            Answer::Unknown => {
                checked.unknown += 1;
                // Values are unique, so the log shows whether the write was applied, but not when it became visible.
                match (operation.ask, value.map(|value| written.get(&value))) {
                    (Ask::Read, _) | (_, Some(None)) => continue,
                    (_, Some(Some(revision))) => operation.answer = Answer::Written(*revision),
                    (_, None) => {}
                }
            }
        }
        keys.entry(key).or_default().push(operation);
    }
    checked.keys = keys.len();
    for (key, operations) in keys {
        checker::check(operations).map_err(|around| format!("{key} is not linearizable; around:\n{around:#?}"))?;
    }
    agreement.map(|()| checked)
}

/// Checks that the responses and the log agree. Each event must belong to a write that was not refused, and each write
/// to at most one event. Each response must show the state of the log at the revision in its header; a client that
/// lists and then watches from the next revision relies on that.
fn check_agreement(history: &[Entry], log: &Log) -> Result<(), String> {
    let mut puts: HashMap<(&str, u64), bool> = HashMap::new();
    let (mut deleted, mut perhaps_deleted) = (HashSet::new(), HashMap::<&str, usize>::new());
    for Entry { key, operation, refused, .. } in history {
        match (operation.ask, operation.answer) {
            _ if *refused => {}
            (Ask::Put(value) | Ask::Swap { new: value, .. }, Answer::Written(_) | Answer::Unknown) => {
                puts.insert((key, value), false);
            }
            (Ask::Delete, Answer::Written(revision)) => drop(deleted.insert((key.as_str(), revision))),
            (Ask::Delete, Answer::Unknown) => *perhaps_deleted.entry(key).or_default() += 1,
            _ => {}
        }
    }
    let mut states: HashMap<&str, BTreeMap<i64, Found>> = HashMap::new();
    for event in log.values().flatten() {
        let (key, revision) = (event.key.as_str(), event.revision);
        states.entry(key).or_default().insert(revision, event.value.map(|value| (value, revision)));
        match event.value {
            Some(value) => match puts.get_mut(&(key, value)) {
                None => return Err(format!("no request wrote {event:?}")),
                Some(true) => return Err(format!("{event:?} was applied twice")),
                Some(happened) => *happened = true,
            },
            None if deleted.contains(&(key, revision)) => {}
            None => match perhaps_deleted.get_mut(key).filter(|left| **left > 0) {
                None => return Err(format!("no request deleted {event:?}")),
                Some(left) => *left -= 1,
            },
        }
    }
    for entry in history {
        let found = match entry.operation.answer {
            Answer::Found(found) => found,
            Answer::Nothing => None,
            Answer::Written(_) | Answer::Unknown => continue,
        };
        let Some(header) = entry.header else { continue };
        let newest = states.get(entry.key.as_str()).and_then(|states| states.range(..=header).next_back());
        let logged = newest.and_then(|(_, found)| *found);
        if logged != found {
            return Err(format!("{entry:?} does not match the log at the revision of its header: {logged:?}"));
        }
    }
    Ok(())
}

/// Checks that revisions do not go back: if an operation starts after another one has ended, the revision in its header
/// is not lower.
fn check_headers(history: &[Entry]) -> Result<(), String> {
    let answered = || history.iter().filter_map(|entry| Some((entry, entry.header?)));
    let mut ends: Vec<(u64, i64)> = answered().map(|(entry, header)| (entry.operation.ended, header)).collect();
    ends.sort_unstable();
    let mut begins: Vec<_> = answered().collect();
    begins.sort_by_key(|(entry, _)| entry.operation.began);
    let (mut at, mut newest) = (0, 0);
    for (entry, header) in begins {
        while at < ends.len() && ends[at].0 < entry.operation.began {
            newest = newest.max(ends[at].1);
            at += 1;
        }
        if header < newest {
            return Err(format!(
                "{entry:?} has revision {header}, but revision {newest} was returned before it started"
            ));
        }
    }
    Ok(())
}

mod tests {
    use super::{Entry, check};
    use crate::linearizability::{
        checker::{Answer, Ask, Operation},
        watcher::{Event, Log},
    };

    fn entry(ask: Ask, answer: Answer, began: u64, header: i64) -> Entry {
        let operation = Operation { ask, answer, began, ended: began + 1 };
        Entry { key: "k".to_owned(), operation, header: Some(header), refused: false }
    }

    #[test]
    fn check_rejects_histories_that_violate_the_log() {
        let event = |revision, value| (revision, vec![Event { revision, key: "k".to_owned(), value: Some(value) }]);
        let log: Log = [event(2, 1), event(3, 2)].into();
        let sound = vec![
            entry(Ask::Put(1), Answer::Written(2), 0, 2),
            entry(Ask::Put(2), Answer::Written(3), 2, 3),
            entry(Ask::Read, Answer::Found(Some((2, 3))), 4, 3),
        ];
        assert_eq!(check(sound.clone(), &log).expect("the history is valid").acknowledged, 3);
        let refused = Entry { refused: true, ..entry(Ask::Put(2), Answer::Unknown, 2, 3) };
        let altered = [
            (0, entry(Ask::Put(9), Answer::Written(2), 0, 2), "the log has"),
            (2, entry(Ask::Read, Answer::Found(Some((1, 2))), 4, 3), "not linearizable"),
            (2, entry(Ask::Read, Answer::Found(Some((2, 3))), 4, 2), "has revision 2"),
            (1, refused, "was refused but applied"),
        ];
        for (at, wrong, text) in altered {
            let mut history = sound.clone();
            history[at] = wrong;
            let error = check(history, &log).expect_err(text);
            assert!(error.contains(text), "{error}");
        }
        let logs: [(Log, &str); 2] = [
            ([event(2, 1), event(3, 2), event(4, 1)].into(), "was applied twice"),
            ([event(2, 1), event(3, 2), event(4, 9)].into(), "no request wrote"),
        ];
        for (log, text) in logs {
            let error = check(sound.clone(), &log).expect_err(text);
            assert!(error.contains(text), "{error}");
        }
        let overlapping = [
            (entry(Ask::Read, Answer::Found(Some((1, 2))), 1, 3), "does not match the log"),
            (entry(Ask::Read, Answer::Found(Some((2, 3))), 1, 2), "does not match the log"),
        ];
        for (read, text) in overlapping {
            let mut history = sound.clone();
            history[0].operation.ended = 3;
            history[1].operation.began = 1;
            history[2] = read;
            history[2].operation.ended = 9;
            let error = check(history, &log).expect_err(text);
            assert!(error.contains(text), "{error}");
        }
    }
}
