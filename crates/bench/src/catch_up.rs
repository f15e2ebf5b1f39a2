//! The scenario `catch-up`: starts a watch at an old revision and receives all events since.

use std::{collections::BTreeMap, time::Duration};

use tonic::Status;

use crate::{
    args::{parse_count, parse_keys, parse_value_size},
    bench::Bench,
    closed_loop::{Limits, OpCounts, Worker},
    connection::Client,
    error::Error,
    report::{self, Report},
    watch::create_watches,
    write,
};
use orlop_wire::proto::client::etcdserverpb::WatchCreateRequest;

/// Number of clients that write the revisions.
const WRITERS: usize = 64;

#[derive(Debug, clap::Args)]
pub struct CatchUp {
    /// Number of revisions to receive, each written by one put
    #[arg(long, default_value = "100000", value_parser = parse_count, value_name = "N")]
    revisions: usize,

    /// Size of each value in bytes
    #[arg(long, default_value = "256", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,

    /// Number of keys, written in order
    #[arg(long, default_value = "10000", value_parser = parse_keys, value_name = "N")]
    key_space: usize,
}

impl CatchUp {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let start_revision = bench.keys.revision(&bench.pool.client(0)).await? + 1;
        self.write(bench).await?;
        let (key, range_end) = bench.keys.range();
        let create = WatchCreateRequest { key, range_end, start_revision, ..WatchCreateRequest::default() };
        let watcher = |number| Watcher {
            client: bench.pool.client(number),
            create: create.clone(),
            events: self.revisions as u64,
        };
        let recorder = bench.drive(bench.workers(watcher)).await;
        let events_per_sec = report::per_sec(recorder.counts.keys, recorder.elapsed());
        let extra = BTreeMap::from([("revisions", self.revisions as f64), ("events_per_sec", events_per_sec)]);
        Ok(bench.report("catch-up", self.value_size, &recorder, extra))
    }

    async fn write(&self, bench: &Bench) -> Result<(), Error> {
        let total = Some(self.revisions as u64);
        let limits = Limits { total, duration: None, warmup: Duration::ZERO };
        let putters = write::putters(bench, WRITERS, self.key_space, self.value_size);
        let error = bench.drive_within(limits, putters).await.first_error;
        error.map_or(Ok(()), |error| {
            Err(Error::Step { step: "writing revisions", endpoint: bench.pool.endpoints(), error })
        })
    }
}

/// A client that starts a new watch in each operation.
struct Watcher {
    client: Client,
    create: WatchCreateRequest,
    /// Number of events to receive.
    events: u64,
}

impl Worker for Watcher {
    /// An operation receives all revisions.
    const SILENCE_MAX: Duration = Duration::from_secs(600);

    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        let mut responses = create_watches(&mut self.client, vec![self.create.clone()]).await?;
        let mut received = 0;
        while received < self.events {
            let Some(response) = responses.message().await? else {
                return Err(Status::aborted("the watch stream ended"));
            };
            if response.canceled {
                return Err(Status::aborted(format!("the watch was canceled: {}", response.cancel_reason)));
            }
            received += response.events.len() as u64;
        }
        Ok(OpCounts { keys: received, ..OpCounts::default() })
    }

    fn client(&self) -> &Client {
        &self.client
    }
}
