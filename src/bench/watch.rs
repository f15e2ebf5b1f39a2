//! The fan-out scenario: many watchers of one prefix, and some clients that put below it.
//!
//! Each value begins with the moment its put started, so an event tells its own delay, whether it overtakes the put's
//! answer or not. The puts do not wait for the watchers: with many watchers they outrun the deliveries, and the delay is
//! then the length of the server's queue. Puts have connections of their own, or their answers would stand behind the
//! events.

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use futures_util::stream::{self, StreamExt as _};
use parking_lot::Mutex;
use tokio::{
    task::JoinSet,
    time::{Instant, sleep, timeout},
};
use tonic::{Status, Streaming};

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Recorder, Run, describe},
    connection::{Client, Pool},
    report::{Report, Row},
    wire::{STAMP_LEN, WatchTally},
    write::{OwnKeys, Putter, Value},
};
use crate::proto::client::etcdserverpb::{WatchCreateRequest, WatchRequest, watch_request::RequestUnion};

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

    /// Bytes of each value, at least 8
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys that are written again and again, split among the clients
    #[arg(long, default_value = "1000", value_parser = at_least_one, value_name = "N")]
    key_space: usize,
}

impl Watch {
    pub fn check_flags(&self) -> Result<(), Error> {
        if self.value_size < STAMP_LEN {
            let text = format!("--value-size must hold the stamp of the put, value_size={}", self.value_size);
            return Err(Error::Flags(format!("{text} min={STAMP_LEN}")));
        }
        Ok(())
    }

    pub fn streams(&self) -> usize {
        self.streams.min(self.watchers)
    }

    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let put_connections = bench.plan.clients.min(PUT_CONNECTIONS_MAX).max(bench.endpoints.len());
        let put_pool = Pool::connect(&bench.endpoints, put_connections).await?;
        let streams = self.open_streams(bench).await?;

        let run = Run::begin(bench.plan.limits);
        let deliveries = Arc::new(Deliveries::new(Arc::clone(&run)));
        // Ends the readers when it goes out of scope.
        let mut readers = JoinSet::new();
        for answers in streams {
            readers.spawn(read(answers, Arc::clone(&deliveries)));
        }
        let putter = |number| Putter {
            client: put_pool.client(number),
            keys: OwnKeys::new(bench, number, Some(self.key_space)),
            value: Value::Stamped(vec![b'x'; self.value_size]),
        };
        run.drive((0..bench.plan.clients).map(putter).collect(), &bench.interrupt).await;
        let puts = run.take();
        let expected = puts.latency.len() * self.watchers as u64;
        deliveries.drain(expected, bench).await;
        Ok(self.report(bench, &puts, &deliveries.recorder.lock(), expected))
    }

    fn report(&self, bench: &Bench, puts: &Recorder, events: &Recorder, expected: u64) -> Report {
        let facts = BTreeMap::from([
            ("watchers", self.watchers as f64),
            ("streams", self.streams() as f64),
            ("events_missing", expected.saturating_sub(events.latency.len()) as f64),
        ]);
        let mut report = bench.report("watch", self.value_size, puts, facts);
        report.results = vec![Row::new("put", puts), Row::new("event", events)];
        report.first_error = puts.first_error.clone().or_else(|| events.first_error.clone());
        report
    }

    async fn open_streams(&self, bench: &Bench) -> Result<Vec<Streaming<WatchTally>>, Error> {
        let streams = self.streams();
        let mut open = Vec::with_capacity(streams);
        for number in 0..streams {
            // As even as it goes: the first streams carry the remainder.
            let watches = self.watchers / streams + usize::from(number < self.watchers % streams);
            let mut client = bench.pool.client(number);
            let (key, range_end) = bench.keys.range();
            let request = WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() };
            let opened = timeout(CREATE_TIMEOUT, open_stream(&mut client, request, watches)).await;
            let opened = match opened {
                Ok(Ok(answers)) => Ok(answers),
                Ok(Err(status)) => Err(describe(&status)),
                Err(_) => Err(format!("no answer within {CREATE_TIMEOUT:?}")),
            };
            let endpoint = || client.endpoint().to_string();
            open.push(opened.map_err(|error| Error::Step { step: "creating watches", endpoint: endpoint(), error })?);
        }
        Ok(open)
    }
}

/// A stream on which all watches are created.
async fn open_stream(
    client: &mut Client,
    create: WatchCreateRequest,
    watches: usize,
) -> Result<Streaming<WatchTally>, Status> {
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    // The server ends the watches when the requests end, so they never do.
    let requests = stream::iter(std::iter::repeat_n(request, watches)).chain(stream::pending());
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

struct Deliveries {
    run: Arc<Run>,
    /// Stamp from which events count.
    measured_from: u64,
    recorder: Mutex<Recorder>,
}

impl Deliveries {
    fn new(run: Arc<Run>) -> Self {
        let measured_from = run.stamp_measured_from();
        let recorder = Mutex::new(Recorder::new(run.measured_from()));
        Self { run, measured_from, recorder }
    }

    fn record(&self, answer: &WatchTally) {
        if answer.canceled {
            return self.fail(|| format!("a watch was canceled: {}", answer.cancel_reason));
        }
        let now = Instant::now();
        let stamp_now = self.run.stamp(now);
        let mut recorder = self.recorder.lock();
        for stamp in answer.stamps.iter().filter(|stamp| **stamp >= self.measured_from) {
            recorder.succeed(Duration::from_nanos(stamp_now.saturating_sub(*stamp)), now);
        }
    }

    fn fail(&self, describe: impl FnOnce() -> String) {
        self.recorder.lock().fail(1, describe);
    }

    /// Waits for the events that are still to come.
    async fn drain(&self, expected: u64, bench: &Bench) {
        let (mut seen, mut seen_at) = (0, Instant::now());
        while seen < expected && seen_at.elapsed() < SILENCE_MAX && !bench.interrupt.is_set() {
            sleep(DRAIN_POLL).await;
            let delivered = self.recorder.lock().latency.len();
            if delivered > seen {
                (seen, seen_at) = (delivered, Instant::now());
            }
        }
    }
}
