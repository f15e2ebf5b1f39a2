//! The scenario `get`: reads one key per request, in order.

use std::collections::BTreeMap;

use tonic::Status;

use crate::{
    args::{parse_keys, parse_value_size},
    bench::Bench,
    closed_loop::{OpCounts, Worker},
    connection::Client,
    error::Error,
    report::Report,
};
use orlop_wire::proto::client::etcdserverpb::RangeRequest;

#[derive(Debug, clap::Args)]
pub struct Get {
    /// Size of each value in bytes
    #[arg(long, default_value = "256", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,

    /// Number of keys, read in order
    #[arg(long, default_value = "10000", value_parser = parse_keys, value_name = "N")]
    key_space: usize,

    /// Send serializable requests: the server may answer with stale data
    #[arg(long)]
    serializable: bool,
}

impl Get {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        bench.load(self.key_space, self.value_size).await?;
        let getter = |number| {
            // Each client starts at a different key, so that no two clients read the same keys at the same time.
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
    /// An endless iterator.
    requests: I,
}

impl<I: Iterator<Item = RangeRequest> + Send + 'static> Worker for Getter<I> {
    async fn step(&mut self, _started: u64) -> Result<OpCounts, Status> {
        let request = self.requests.next().unwrap_or_default();
        let response = self.client.range_exact(request, 1).await?;
        Ok(OpCounts { retries: 0, keys: response.kvs, bytes: response.bytes })
    }

    fn client(&self) -> &Client {
        &self.client
    }
}
