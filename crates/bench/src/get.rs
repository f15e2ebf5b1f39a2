//! The scenario that reads single keys, each in turn.

use std::collections::BTreeMap;

use tonic::Status;

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Done, Worker},
    connection::Client,
    report::Report,
};
use orlop_wire::proto::client::etcdserverpb::RangeRequest;

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
            Getter { client: bench.pool.client(number), requests }
        };
        let recorder = bench.drive(bench.workers(getter)).await;
        Ok(bench.report("get", self.value_size, &recorder, BTreeMap::new()))
    }
}

struct Getter<I> {
    client: Client,
    /// Never ends.
    requests: I,
}

impl<I: Iterator<Item = RangeRequest> + Send + 'static> Worker for Getter<I> {
    async fn step(&mut self, _stamp: u64) -> Result<Done, Status> {
        let request = self.requests.next().unwrap_or_default();
        let answer = self.client.range_of(request, 1).await?;
        Ok(Done { retries: 0, keys: answer.kvs, bytes: answer.bytes })
    }

    fn client(&self) -> &Client {
        &self.client
    }
}
