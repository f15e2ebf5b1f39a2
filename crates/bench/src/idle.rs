//! The scenario in which nothing happens: connections and watches are held. What the server spends meanwhile is for the
//! caller to see.

use std::collections::BTreeMap;

use tokio::time::{Instant, sleep_until};

use super::{
    Bench, Error,
    args::at_least_one,
    closed_loop::{Recorder, Run},
    keyspace::step,
    report::Report,
    watch::open_stream,
};
use orlop_wire::proto::client::etcdserverpb::{RangeRequest, WatchCreateRequest};

#[derive(Debug, clap::Args)]
pub struct Idle {
    /// Watches, each on a stream of its own
    #[arg(long, default_value = "60", value_parser = at_least_one, value_name = "N")]
    watches: usize,
}

impl Idle {
    /// How many streams share the connections.
    pub fn streams(&self) -> usize {
        self.watches
    }

    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let Some(duration) = bench.plan.limits.duration else {
            return Err(Error::Flags(
                "nothing is counted while nothing happens: give --duration, not --total".to_owned(),
            ));
        };
        // A connection that carries no watch has at least been used.
        for number in 0..bench.pool.len() {
            let client = bench.pool.client(number);
            let request = RangeRequest { key: bench.keys.key(0, 0), ..RangeRequest::default() };
            step("using a connection", &client, client.kv.clone().range(request)).await?;
        }
        let mut watches = Vec::with_capacity(self.watches);
        for number in 0..self.watches {
            let (key, range_end) = bench.keys.range();
            let create = WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() };
            watches.push(open_stream(bench, number, vec![create]).await?);
        }
        let run = Run::begin(bench.plan.limits);
        let until = Instant::now() + bench.plan.limits.warmup + duration;
        bench
            .show(&run, async {
                tokio::select! {
                    () = sleep_until(until) => {}
                    () = bench.interrupt.wait() => {}
                }
            })
            .await;
        let facts = BTreeMap::from([("watches", watches.len() as f64)]);
        Ok(bench.report("idle", 0, &Recorder::new(run.measured_from()), facts))
    }
}
