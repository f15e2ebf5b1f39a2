//! The scenario `watch` (fan-out): many watchers watch one prefix, and a few clients put keys with that prefix.
//!
//! Each value begins with a [`Stamp`], so the delay of an event can be measured even if the event arrives before the
//! response of its put. By default a client puts again when every watcher has received the event of its last put: the
//! loop is closed, and rate and delay do not depend on the length of the run. With `--pace answered` a client waits
//! only for the response of the put. Puts can then be faster than deliveries: events wait in the server, the delay
//! grows with their number, and the server may send many events in one response. Puts use separate connections, so that
//! their responses do not wait behind events.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use tokio::{
    sync::Notify,
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic::{Status, Streaming};

use orlop_client::describe;

use crate::{
    args::{parse_count, parse_keys, parse_value_size},
    bench::Bench,
    closed_loop::{OpCounts, Recorder, Run, Worker},
    connection::{Client, Pool},
    error::Error,
    report::{Report, Row},
    summary::{Stamp, WatchSummary},
    write::KeyCycle,
};
use orlop_wire::proto::client::etcdserverpb::{
    PutRequest, WatchCreateRequest, WatchRequest, watch_request::RequestUnion,
};

/// Timeout for creating all watches of one stream.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Maximum time between two events. After that the outstanding events count as missing.
const EVENT_TIMEOUT: Duration = Duration::from_secs(10);

/// Interval of the checks for outstanding events.
const DRAIN_POLL_INTERVAL: Duration = Duration::from_millis(20);

const PUT_CONNECTIONS_MAX: usize = 4;

#[derive(Debug, clap::Args)]
pub struct Watch {
    /// Number of watchers, divided evenly among the streams
    #[arg(long, default_value = "1000", value_parser = parse_count, value_name = "N")]
    watchers: usize,

    /// Number of watch streams, at most one per watcher
    #[arg(long, default_value = "10", value_parser = parse_count, value_name = "N")]
    streams: usize,

    /// Size of each value in bytes, at least 12
    #[arg(long, default_value = "256", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,

    /// Number of keys, divided among the clients and written repeatedly
    #[arg(long, default_value = "1000", value_parser = parse_keys, value_name = "N", conflicts_with = "own_key")]
    key_space: usize,

    /// Let each watcher watch its own key instead of all keys
    #[arg(long)]
    own_key: bool,

    /// Condition under which a client sends its next put
    #[arg(long, value_enum, default_value_t = Pace::Delivered)]
    pace: Pace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Pace {
    /// Every watcher has received the event of the last put
    Delivered,
    /// The server has answered the last put
    Answered,
}

impl Watch {
    pub fn check_flags(&self) -> Result<(), Error> {
        if self.value_size < Stamp::LEN {
            let text = format!("--value-size must be at least {}, value_size={}", Stamp::LEN, self.value_size);
            return Err(Error::Flags(text));
        }
        Ok(())
    }

    pub fn streams(&self) -> usize {
        self.streams.min(self.watchers)
    }

    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let requests = self.create_requests(bench)?;
        let put_connections = bench.plan.clients.min(PUT_CONNECTIONS_MAX).max(bench.target.endpoints.len());
        let put_pool = Pool::connect(&bench.target, put_connections).await?;
        let streams = self.open_streams(bench, requests).await?;

        let run = Run::begin(bench.plan.limits);
        let deliveries = Arc::new(Deliveries::new(Arc::clone(&run), bench.plan.clients));
        // Aborts the readers when dropped.
        let mut readers = JoinSet::new();
        for responses in streams {
            readers.spawn(read(responses, Arc::clone(&deliveries)));
        }
        let putter = |number| Putter {
            client: put_pool.client(number),
            keys: KeyCycle::new(&bench.keys, number, Some(bench.keys_per_client(self.keys()))),
            value: vec![b'x'; self.value_size],
            number,
            deliveries: Arc::clone(&deliveries),
            deliveries_expected: if self.pace == Pace::Delivered { self.watchers_per_key() } else { 0 },
        };
        bench.observe(&run, run.drive(bench.workers(putter), &bench.interrupt)).await;
        let rounds = run.finish();
        let expected = rounds.latency.len() * self.watchers_per_key() as u64;
        deliveries.drain(expected, bench).await;
        let mut recorders = deliveries.recorders.lock();
        let Recorders { puts, events, lags } = &mut *recorders;
        for recorder in [puts, events, lags] {
            run.extend(recorder);
        }
        Ok(self.report(bench, &rounds, &recorders, expected))
    }

    fn keys(&self) -> usize {
        if self.own_key { self.watchers } else { self.key_space }
    }

    fn watchers_per_key(&self) -> usize {
        if self.own_key { 1 } else { self.watchers }
    }

    /// Returns the create request of each watcher.
    fn create_requests(&self, bench: &Bench) -> Result<Vec<WatchCreateRequest>, Error> {
        let clients = bench.plan.clients;
        if !self.own_key {
            let (key, range_end) = bench.keys.range();
            return Ok(vec![WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() }; self.watchers]);
        }
        if !self.watchers.is_multiple_of(clients) {
            let text = format!("watchers={} clients={clients}", self.watchers);
            return Err(Error::Flags(format!("with --own-key, --watchers must be a multiple of --clients, {text}")));
        }
        let key = |watcher: usize| bench.keys.key(watcher % clients, (watcher / clients) as u64);
        let create = |watcher| WatchCreateRequest { key: key(watcher), ..WatchCreateRequest::default() };
        Ok((0..self.watchers).map(create).collect())
    }

    /// Returns the report. A round is a put and everything that its client waits for; a failed put is a failed round.
    fn report(&self, bench: &Bench, rounds: &Recorder, recorders: &Recorders, expected: u64) -> Report {
        let Recorders { puts, events, lags } = recorders;
        let extra = BTreeMap::from([
            ("watchers", self.watchers as f64),
            ("streams", self.streams() as f64),
            ("events_missing", expected.saturating_sub(events.latency.len()) as f64),
        ]);
        let mut report = bench.report("watch", self.value_size, rounds, extra);
        report.results = vec![Row::new("put", puts), Row::new("event", events), Row::new("round", rounds)];
        if self.pace == Pace::Delivered {
            report.results.push(Row::new("lag", lags));
        }
        report.first_error = rounds.first_error.clone().or_else(|| events.first_error.clone());
        report
    }

    async fn open_streams(
        &self,
        bench: &Bench,
        mut requests: Vec<WatchCreateRequest>,
    ) -> Result<Vec<Streaming<WatchSummary>>, Error> {
        let streams = self.streams();
        let mut open = Vec::with_capacity(streams);
        for number in 0..streams {
            let remaining = requests.len() * (streams - number - 1) / (streams - number);
            open.push(open_stream(bench, number, requests.split_off(remaining)).await?);
        }
        Ok(open)
    }
}

/// Opens the watch stream with this number and creates the watches on it.
pub(super) async fn open_stream(
    bench: &Bench,
    number: usize,
    creates: Vec<WatchCreateRequest>,
) -> Result<Streaming<WatchSummary>, Error> {
    let mut client = bench.pool.client(number);
    let opened = match timeout(CREATE_TIMEOUT, create_watches(&mut client, creates)).await {
        Ok(opened) => opened.map_err(|status| describe(&status)),
        Err(_) => Err(format!("no response within {CREATE_TIMEOUT:?}")),
    };
    let endpoint = client.endpoint().to_string();
    opened.map_err(|error| Error::Step { step: "creating watches", endpoint, error })
}

/// Opens a watch stream on the client's connection and creates the watches on it.
pub(super) async fn create_watches(
    client: &mut Client,
    creates: Vec<WatchCreateRequest>,
) -> Result<Streaming<WatchSummary>, Status> {
    let watches = creates.len();
    let request = |create| WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The request stream stays open, as in etcd's client.
    let requests = stream::iter(creates.into_iter().map(request)).chain(stream::pending());
    let mut responses = client.watch(requests).await?;
    let mut created = 0;
    while created < watches {
        let Some(response) = responses.message().await? else { return Err(Status::aborted("the watch stream ended")) };
        if response.canceled {
            return Err(Status::aborted(format!("the watch was rejected: {}", response.cancel_reason)));
        }
        created += usize::from(response.created);
    }
    Ok(responses)
}

/// Returns the next response of a watch stream. A canceled watch and the end of the stream are errors.
pub(super) async fn next_response(responses: &mut Streaming<WatchSummary>) -> Result<WatchSummary, String> {
    match responses.message().await {
        Ok(Some(response)) if response.canceled => Err(format!("a watch was canceled: {}", response.cancel_reason)),
        Ok(Some(response)) => Ok(response),
        Ok(None) => Err("the watch stream ended".to_owned()),
        Err(status) => Err(describe(&status)),
    }
}

async fn read(mut responses: Streaming<WatchSummary>, deliveries: Arc<Deliveries>) {
    loop {
        match next_response(&mut responses).await {
            Ok(response) => deliveries.record(&response),
            Err(error) => return deliveries.fail(|| error),
        }
    }
}

/// A client that puts a key and then waits until the expected number of watchers have received the event.
struct Putter {
    client: Client,
    keys: KeyCycle,
    value: Vec<u8>,
    number: usize,
    deliveries: Arc<Deliveries>,
    /// Number of deliveries to wait for after a put.
    deliveries_expected: usize,
}

impl Worker for Putter {
    async fn step(&mut self, started: u64) -> Result<OpCounts, Status> {
        let stamp = Stamp { started, client: u32::try_from(self.number).unwrap_or(u32::MAX) };
        stamp.write(&mut self.value);
        self.deliveries.begin_round(self.number, started, self.deliveries_expected);
        let value = Bytes::copy_from_slice(&self.value);
        self.client.kv.put(PutRequest { key: self.keys.next_key(), value, ..PutRequest::default() }).await?;
        self.deliveries.record_put(self.number, started);
        let delivered = timeout(EVENT_TIMEOUT, self.deliveries.wait_for_round(self.number)).await;
        let late = |_| Status::deadline_exceeded(format!("some watchers received no event within {EVENT_TIMEOUT:?}"));
        delivered.map(|()| OpCounts::default()).map_err(late)
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

/// The received events, shared by the readers of the streams, the clients and the report.
struct Deliveries {
    run: Arc<Run>,
    /// End of the warm-up, in nanoseconds since the start of the run. Puts that started later are measured, and so are
    /// their events.
    measured_from_nanos: u64,
    /// Lock order: taken before the lock of a round.
    recorders: Mutex<Recorders>,
    /// One per client.
    rounds: Vec<Round>,
}

struct Recorders {
    puts: Recorder,
    events: Recorder,
    /// Time from the response of a put to its event; zero if the event arrived first.
    lags: Recorder,
}

/// The last put of one client.
#[derive(Default)]
struct Round {
    state: Mutex<RoundState>,
    delivered: Notify,
}

/// Times are in nanoseconds since the start of the run.
#[derive(Default)]
struct RoundState {
    /// Start of the put, as in the stamp of its events.
    started: u64,
    /// Time of the put's response; `None` until it arrives.
    answered: Option<u64>,
    /// Number of outstanding deliveries.
    pending: usize,
}

impl Deliveries {
    fn new(run: Arc<Run>, clients: usize) -> Self {
        let measured_from_nanos = run.measured_from_nanos();
        let recorder = || Recorder::new(run.measured_from());
        let recorders = Mutex::new(Recorders { puts: recorder(), events: recorder(), lags: recorder() });
        let rounds = (0..clients).map(|_| Round::default()).collect();
        Self { run, measured_from_nanos, recorders, rounds }
    }

    fn record(&self, response: &WatchSummary) {
        let now = Instant::now();
        let now_nanos = self.run.nanos_at(now);
        let mut recorders = self.recorders.lock();
        for stamp in response.stamps() {
            let is_measured = stamp.started >= self.measured_from_nanos;
            if is_measured {
                recorders.events.succeed(Duration::from_nanos(now_nanos.saturating_sub(stamp.started)), now);
            }
            let Some(round) = self.rounds.get(stamp.client as usize) else { continue };
            let answered = round.deliver(stamp.started);
            if is_measured {
                let lag = answered.map_or(0, |answered| now_nanos.saturating_sub(answered));
                recorders.lags.succeed(Duration::from_nanos(lag), now);
            }
        }
    }

    fn record_put(&self, client: usize, started: u64) {
        let now = Instant::now();
        let now_nanos = self.run.nanos_at(now);
        self.rounds[client].state.lock().answered = Some(now_nanos);
        if started >= self.measured_from_nanos {
            let took = Duration::from_nanos(now_nanos.saturating_sub(started));
            self.recorders.lock().puts.succeed(took, now);
        }
    }

    fn fail(&self, describe: impl FnOnce() -> String) {
        self.recorders.lock().events.fail(1, describe);
    }

    /// Starts the client's next round.
    fn begin_round(&self, client: usize, started: u64, pending: usize) {
        *self.rounds[client].state.lock() = RoundState { started, answered: None, pending };
    }

    /// Waits until the client's round has no outstanding deliveries. Cancel safe: it changes no state.
    async fn wait_for_round(&self, client: usize) {
        let round = &self.rounds[client];
        // A permit of an abandoned round may cause one spurious wake-up.
        while round.state.lock().pending > 0 {
            round.delivered.notified().await;
        }
    }

    /// Waits for the outstanding events.
    async fn drain(&self, expected: u64, bench: &Bench) {
        let (mut received, mut received_at) = (0, Instant::now());
        while received < expected && received_at.elapsed() < EVENT_TIMEOUT && !bench.interrupt.is_set() {
            sleep(DRAIN_POLL_INTERVAL).await;
            let delivered = self.recorders.lock().events.latency.len();
            if delivered > received {
                (received, received_at) = (delivered, Instant::now());
            }
        }
    }
}

impl Round {
    /// Counts the delivery of the put that started at `started`. Returns the time of the put's response; `None` if the
    /// put is not answered yet or the client has started another put.
    fn deliver(&self, started: u64) -> Option<u64> {
        let mut state = self.state.lock();
        if state.started != started {
            return None;
        }
        if state.pending > 0 {
            state.pending -= 1;
            if state.pending == 0 {
                self.delivered.notify_one();
            }
        }
        state.answered
    }
}
