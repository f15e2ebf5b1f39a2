//! The fan-out scenario: many watchers of one prefix, and some clients that put below it.
//!
//! Each value begins with a stamp of its put, so an event tells its own delay, whether it overtakes the put's answer or
//! not. By default a client puts again when every watcher has its last put: the loop is closed, and the rate and the
//! delay hold for any length of the run. With `--pace answered` it only waits for the put's answer: the puts outrun the
//! deliveries, the delay is the length of the server's queue, and a server may catch up with many events in one answer.
//! Puts have connections of their own, or their answers would stand behind the events.

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

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Done, Recorder, Run, Worker, describe},
    connection::{Client, Pool},
    report::{Report, Row},
    wire::{Stamp, WatchTally},
    write::OwnKeys,
};
use orlop_wire::proto::client::etcdserverpb::{
    PutRequest, WatchCreateRequest, WatchRequest, watch_request::RequestUnion,
};

/// Until all watches of one stream are created.
const CREATE_TIMEOUT: Duration = Duration::from_secs(30);

/// Events that are this long in coming after the one before are given up as missing.
const SILENCE_MAX: Duration = Duration::from_secs(10);

const DRAIN_POLL: Duration = Duration::from_millis(20);

const PUT_CONNECTIONS_MAX: usize = 4;

#[derive(Debug, clap::Args)]
pub struct Watch {
    /// Watchers, split evenly among the streams
    #[arg(long, default_value = "1000", value_parser = at_least_one, value_name = "N")]
    watchers: usize,

    /// Watch streams, at most one a watcher
    #[arg(long, default_value = "10", value_parser = at_least_one, value_name = "N")]
    streams: usize,

    /// Bytes of each value, at least 12
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys that are written again and again, split among the clients
    #[arg(long, default_value = "1000", value_parser = at_least_one, value_name = "N", conflicts_with = "own_key")]
    key_space: usize,

    /// Each watcher watches one key of its own, instead of all
    #[arg(long)]
    own_key: bool,

    /// When a client puts again
    #[arg(long, value_enum, default_value_t = Pace::Delivered)]
    pace: Pace,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Pace {
    /// When every watcher has the event of its last put
    Delivered,
    /// When its last put is answered
    Answered,
}

impl Watch {
    pub fn check_flags(&self) -> Result<(), Error> {
        if self.value_size < Stamp::LEN {
            let text = format!("--value-size must hold the stamp of the put, value_size={}", self.value_size);
            return Err(Error::Flags(format!("{text} min={}", Stamp::LEN)));
        }
        Ok(())
    }

    pub fn streams(&self) -> usize {
        self.streams.min(self.watchers)
    }

    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let wanted = self.wanted(bench)?;
        let put_connections = bench.plan.clients.min(PUT_CONNECTIONS_MAX).max(bench.target.endpoints.len());
        let put_pool = Pool::connect(&bench.target, put_connections).await?;
        let streams = self.open_streams(bench, wanted).await?;

        let run = Run::begin(bench.plan.limits);
        let deliveries = Arc::new(Deliveries::new(Arc::clone(&run), bench.plan.clients));
        // Ends the readers when it goes out of scope.
        let mut readers = JoinSet::new();
        for answers in streams {
            readers.spawn(read(answers, Arc::clone(&deliveries)));
        }
        let putter = |number| Putter {
            client: put_pool.client(number),
            keys: OwnKeys::new(&bench.keys, number, Some(bench.share(self.keys()))),
            value: vec![b'x'; self.value_size],
            number,
            deliveries: Arc::clone(&deliveries),
            awaited: if self.pace == Pace::Delivered { self.watchers_of_a_key() } else { 0 },
        };
        bench.show(&run, run.drive(bench.workers(putter), &bench.interrupt)).await;
        let rounds = run.take();
        let expected = rounds.latency.len() * self.watchers_of_a_key() as u64;
        deliveries.drain(expected, bench).await;
        Ok(self.report(bench, &rounds, &deliveries.recorders.lock(), expected))
    }

    fn keys(&self) -> usize {
        if self.own_key { self.watchers } else { self.key_space }
    }

    fn watchers_of_a_key(&self) -> usize {
        if self.own_key { 1 } else { self.watchers }
    }

    /// What each watcher asks for.
    fn wanted(&self, bench: &Bench) -> Result<Vec<WatchCreateRequest>, Error> {
        let clients = bench.plan.clients;
        if !self.own_key {
            let (key, range_end) = bench.keys.range();
            return Ok(vec![WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() }; self.watchers]);
        }
        if !self.watchers.is_multiple_of(clients) {
            let text = format!("watchers={} clients={clients}", self.watchers);
            return Err(Error::Flags(format!("with --own-key --watchers must be a multiple of --clients, {text}")));
        }
        let key = |watcher: usize| bench.keys.key(watcher % clients, (watcher / clients) as u64);
        let create = |watcher| WatchCreateRequest { key: key(watcher), ..WatchCreateRequest::default() };
        Ok((0..self.watchers).map(create).collect())
    }

    /// A round is a put with all that its client waits for; a put that fails is a round that fails.
    fn report(&self, bench: &Bench, rounds: &Recorder, recorders: &Recorders, expected: u64) -> Report {
        let Recorders { puts, events, lags } = recorders;
        let facts = BTreeMap::from([
            ("watchers", self.watchers as f64),
            ("streams", self.streams() as f64),
            ("events_missing", expected.saturating_sub(events.latency.len()) as f64),
        ]);
        let mut report = bench.report("watch", self.value_size, rounds, facts);
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
        mut wanted: Vec<WatchCreateRequest>,
    ) -> Result<Vec<Streaming<WatchTally>>, Error> {
        let streams = self.streams();
        let mut open = Vec::with_capacity(streams);
        for number in 0..streams {
            // As even as it goes.
            let others = wanted.len() * (streams - number - 1) / (streams - number);
            open.push(open_stream(bench, number, wanted.split_off(others)).await?);
        }
        Ok(open)
    }
}

/// A stream, the bench's so manieth, on which all watches are created.
pub(super) async fn open_stream(
    bench: &Bench,
    number: usize,
    wanted: Vec<WatchCreateRequest>,
) -> Result<Streaming<WatchTally>, Error> {
    let mut client = bench.pool.client(number);
    let opened = match timeout(CREATE_TIMEOUT, create_watches(&mut client, wanted)).await {
        Ok(opened) => opened.map_err(|status| describe(&status)),
        Err(_) => Err(format!("no answer within {CREATE_TIMEOUT:?}")),
    };
    let endpoint = client.endpoint().to_string();
    opened.map_err(|error| Error::Step { step: "creating watches", endpoint, error })
}

/// A stream on which all watches are created.
pub(super) async fn create_watches(
    client: &mut Client,
    wanted: Vec<WatchCreateRequest>,
) -> Result<Streaming<WatchTally>, Status> {
    let watches = wanted.len();
    let request = |create| WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The server ends the watches when the requests end, so they never do.
    let requests = stream::iter(wanted.into_iter().map(request)).chain(stream::pending());
    let mut answers = client.watch(requests).await?;
    let mut created = 0;
    while created < watches {
        let Some(answer) = answers.message().await? else { return Err(Status::aborted("the watch stream ended")) };
        if answer.canceled {
            return Err(Status::aborted(format!("a watch was refused: {}", answer.cancel_reason)));
        }
        created += usize::from(answer.created);
    }
    Ok(answers)
}

async fn read(mut answers: Streaming<WatchTally>, deliveries: Arc<Deliveries>) {
    loop {
        match answers.message().await {
            Ok(Some(answer)) => deliveries.record(&answer),
            Ok(None) => return deliveries.fail(|| "the watch stream ended".to_owned()),
            Err(status) => return deliveries.fail(|| describe(&status)),
        }
    }
}

/// A client that puts, and then waits until its event has arrived as often as it should.
struct Putter {
    client: Client,
    keys: OwnKeys,
    value: Vec<u8>,
    number: usize,
    deliveries: Arc<Deliveries>,
    /// Deliveries to wait for.
    awaited: usize,
}

impl Worker for Putter {
    async fn step(&mut self, started: u64) -> Result<Done, Status> {
        let stamp = Stamp { started, client: u32::try_from(self.number).unwrap_or(u32::MAX) };
        stamp.write(&mut self.value);
        self.deliveries.expect(self.number, started, self.awaited);
        let value = Bytes::copy_from_slice(&self.value);
        self.client.kv.put(PutRequest { key: self.keys.take(), value, ..PutRequest::default() }).await?;
        self.deliveries.record_put(self.number, started);
        let delivered = timeout(SILENCE_MAX, self.deliveries.wait(self.number)).await;
        let late = |_| Status::deadline_exceeded(format!("no event at some watchers after {SILENCE_MAX:?}"));
        delivered.map(|()| Done::default()).map_err(late)
    }

    fn client(&self) -> &Client {
        &self.client
    }
}

/// What the readers of the streams tell the report and the clients.
struct Deliveries {
    run: Arc<Run>,
    /// Start from which puts and their events count.
    measured_from: u64,
    /// Lock order: before the lock of a round.
    recorders: Mutex<Recorders>,
    /// By client.
    rounds: Vec<Round>,
}

struct Recorders {
    puts: Recorder,
    events: Recorder,
    /// From a put's answer to its event; nothing where the event came first.
    lags: Recorder,
}

/// One client's put in flight.
#[derive(Default)]
struct Round {
    state: Mutex<RoundState>,
    delivered: Notify,
}

#[derive(Default)]
struct RoundState {
    /// Of the put; its events carry the same.
    started: u64,
    /// When the put was answered.
    answered: Option<u64>,
    /// Deliveries still to come.
    awaited: usize,
}

impl Deliveries {
    fn new(run: Arc<Run>, clients: usize) -> Self {
        let measured_from = run.stamp_measured_from();
        let recorder = || Recorder::new(run.measured_from());
        let recorders = Mutex::new(Recorders { puts: recorder(), events: recorder(), lags: recorder() });
        let rounds = (0..clients).map(|_| Round::default()).collect();
        Self { run, measured_from, recorders, rounds }
    }

    fn record(&self, answer: &WatchTally) {
        if answer.canceled {
            return self.fail(|| format!("a watch was canceled: {}", answer.cancel_reason));
        }
        let now = Instant::now();
        let stamp_now = self.run.stamp(now);
        let mut recorders = self.recorders.lock();
        for stamp in &answer.stamps {
            let is_measured = stamp.started >= self.measured_from;
            if is_measured {
                recorders.events.succeed(Duration::from_nanos(stamp_now.saturating_sub(stamp.started)), now);
            }
            let Some(round) = self.rounds.get(stamp.client as usize) else { continue };
            let answered = round.deliver(stamp.started);
            if is_measured {
                let lag = answered.map_or(0, |answered| stamp_now.saturating_sub(answered));
                recorders.lags.succeed(Duration::from_nanos(lag), now);
            }
        }
    }

    fn record_put(&self, client: usize, started: u64) {
        let now = Instant::now();
        let stamp_now = self.run.stamp(now);
        self.rounds[client].state.lock().answered = Some(stamp_now);
        if started >= self.measured_from {
            let took = Duration::from_nanos(stamp_now.saturating_sub(started));
            self.recorders.lock().puts.succeed(took, now);
        }
    }

    fn fail(&self, describe: impl FnOnce() -> String) {
        self.recorders.lock().events.fail(1, describe);
    }

    /// Begins the client's next round.
    fn expect(&self, client: usize, started: u64, awaited: usize) {
        *self.rounds[client].state.lock() = RoundState { started, answered: None, awaited };
    }

    /// Returns once nothing of the client's round is awaited. Cancel safe: it only looks.
    async fn wait(&self, client: usize) {
        let round = &self.rounds[client];
        // A permit left from a round that was given up wakes once for nothing.
        while round.state.lock().awaited > 0 {
            round.delivered.notified().await;
        }
    }

    /// Waits for the events that are still to come.
    async fn drain(&self, expected: u64, bench: &Bench) {
        let (mut seen, mut seen_at) = (0, Instant::now());
        while seen < expected && seen_at.elapsed() < SILENCE_MAX && !bench.interrupt.is_set() {
            sleep(DRAIN_POLL).await;
            let delivered = self.recorders.lock().events.latency.len();
            if delivered > seen {
                (seen, seen_at) = (delivered, Instant::now());
            }
        }
    }
}

impl Round {
    /// Returns when the put was answered, if it is the one that is awaited and was answered already.
    fn deliver(&self, started: u64) -> Option<u64> {
        let mut state = self.state.lock();
        if state.started != started {
            return None;
        }
        if state.awaited > 0 {
            state.awaited -= 1;
            if state.awaited == 0 {
                self.delivered.notify_one();
            }
        }
        state.answered
    }
}
