//! The scenarios that read: get and range. Both write their keys first and read each of them in turn.

use std::collections::BTreeMap;

use tonic::Status;

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Done, Worker},
    connection::Client,
    report::{self, Report},
};
use crate::proto::client::etcdserverpb::RangeRequest;

#[derive(Debug, clap::Args)]
pub struct Get {
    /// Bytes of each value
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys that are read in turn
    #[arg(long, default_value = "10000", value_parser = at_least_one, value_name = "N")]
    key_space: usize,

    /// Take what the endpoint has, without asking whether it is the newest
    #[arg(long)]
    serializable: bool,
}

impl Get {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        bench.load(self.key_space, self.value_size).await?;
        let getter = |number| {
            // The clients start apart, so that they do not follow each other from key to key.
            let first = number * self.key_space / bench.plan.clients % self.key_space;
            let sequences = (0..self.key_space as u64).cycle().skip(first);
            let keys = std::sync::Arc::clone(&bench.keys);
            let key = move |sequence| keys.key(0, sequence);
            let serializable = self.serializable;
            let requests = sequences.map(move |sequence| RangeRequest {
                key: key(sequence),
                serializable,
                ..RangeRequest::default()
            });
            Reader { client: bench.pool.client(number), requests, kvs: 1 }
        };
        let recorder = bench.drive(getter).await;
        Ok(bench.report("get", self.value_size, &recorder, BTreeMap::new()))
    }
}

#[derive(Debug, clap::Args)]
pub struct Range {
    /// Bytes of each value
    #[arg(long, default_value = "1024", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys in the range
    #[arg(long, default_value = "10000", value_parser = at_least_one, value_name = "N")]
    keys: usize,

    /// Take what the endpoint has, without asking whether it is the newest
    #[arg(long)]
    serializable: bool,
}

impl Range {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        bench.load(self.keys, self.value_size).await?;
        let (key, range_end) = bench.keys.range();
        let request = RangeRequest { key, range_end, serializable: self.serializable, ..RangeRequest::default() };
        let ranger = |number| Reader {
            client: bench.pool.client(number),
            requests: std::iter::repeat(request.clone()),
            kvs: self.keys as u64,
        };
        let recorder = bench.drive(ranger).await;
        let mebibytes = report::per_sec(recorder.done.bytes, recorder.elapsed()) / f64::from(1 << 20);
        let facts = BTreeMap::from([
            ("keys_per_sec", report::per_sec(recorder.done.keys, recorder.elapsed())),
            ("mib_per_sec", report::rounded(mebibytes)),
        ]);
        Ok(bench.report("range", self.value_size, &recorder, facts))
    }
}

struct Reader<I> {
    client: Client,
    /// Never ends.
    requests: I,
    /// How many pairs each answer has.
    kvs: u64,
}

impl<I: Iterator<Item = RangeRequest> + Send + 'static> Worker for Reader<I> {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        let request = self.requests.next().unwrap_or_default();
        let answer = self.client.range(request).await?;
        if answer.kvs != self.kvs {
            let text = format!("the answer has not all pairs, kvs={} want={}", answer.kvs, self.kvs);
            return Err(Status::data_loss(text));
        }
        Ok(Done { retries: 0, keys: answer.kvs, bytes: answer.bytes })
    }

    fn client(&self) -> &Client {
        &self.client
    }
}
