//! The scenario of a watcher that was away: it watches from many revisions back and gets all their events.

use std::collections::BTreeMap;

use tonic::Status;

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Done, Limits, Worker},
    connection::Client,
    report::{self, Report},
    watch::create_watches,
    write,
};
use orlop_wire::proto::client::etcdserverpb::WatchCreateRequest;

/// Clients that write what is caught up with.
const WRITERS: usize = 64;

#[derive(Debug, clap::Args)]
pub struct CatchUp {
    /// Revisions to catch up with, each a put
    #[arg(long, default_value = "100000", value_parser = at_least_one, value_name = "N")]
    revisions: usize,

    /// Bytes of each value
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys that the puts write in turn
    #[arg(long, default_value = "10000", value_parser = at_least_one, value_name = "N")]
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
        let events_per_sec = report::per_sec(recorder.done.keys, recorder.elapsed());
        let facts = BTreeMap::from([("revisions", self.revisions as f64), ("events_per_sec", events_per_sec)]);
        Ok(bench.report("catch-up", self.value_size, &recorder, facts))
    }

    async fn write(&self, bench: &Bench) -> Result<(), Error> {
        let total = Some(self.revisions as u64);
        let limits = Limits { total, duration: None, warmup: std::time::Duration::ZERO };
        let putters = write::putters(bench, WRITERS, self.key_space, self.value_size);
        let error = bench.drive_within(limits, putters).await.first_error;
        error.map_or(Ok(()), |error| Err(Error::Step { step: "putting", endpoint: bench.pool.endpoints(), error }))
    }
}

/// Each step is a watch of its own.
struct Watcher {
    client: Client,
    create: WatchCreateRequest,
    events: u64,
}

impl Worker for Watcher {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        let mut answers = create_watches(&mut self.client, vec![self.create.clone()]).await?;
        let mut keys = 0;
        while keys < self.events {
            let Some(answer) = answers.message().await? else { return Err(Status::aborted("the watch stream ended")) };
            if answer.canceled {
                return Err(Status::aborted(format!("the watch was canceled: {}", answer.cancel_reason)));
            }
            keys += answer.events;
        }
        Ok(Done { keys, ..Done::default() })
    }

    fn client(&self) -> &Client {
        &self.client
    }
}
