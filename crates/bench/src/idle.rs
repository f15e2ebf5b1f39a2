//! The scenario `idle`: keeps connections and watches open without any traffic. It has no measurements of its own:
//! `orlop bench compare` reads the CPU time and the memory of the server.

use std::collections::BTreeMap;

use tokio::time::{Instant, sleep_until};

use crate::{
    args::parse_count,
    bench::Bench,
    closed_loop::{Recorder, Run},
    error::Error,
    keyspace::setup_request,
    report::{self, Report},
    watch::open_stream,
};
use orlop_wire::proto::client::etcdserverpb::{RangeRequest, WatchCreateRequest};

#[derive(Debug, clap::Args)]
pub struct Idle {
    /// Number of watches, each on its own stream
    #[arg(long, default_value = "60", value_parser = parse_count, value_name = "N")]
    watches: usize,
}

impl Idle {
    /// Returns the number of streams that share the connections.
    pub fn streams(&self) -> usize {
        self.watches
    }

    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let Some(duration) = bench.plan.limits.duration else {
            return Err(Error::Flags("the scenario has no operations: use --duration instead of --total".to_owned()));
        };
        // Connections that carry no watch are used at least once.
        for number in 0..bench.pool.len() {
            let client = bench.pool.client(number);
            let request = RangeRequest { key: bench.keys.key(0, 0), ..RangeRequest::default() };
            setup_request("using a connection", &client, client.kv.clone().range(request)).await?;
        }
        let mut watches = Vec::with_capacity(self.watches);
        for number in 0..self.watches {
            let (key, range_end) = bench.keys.range();
            let create = WatchCreateRequest { key, range_end, ..WatchCreateRequest::default() };
            watches.push(open_stream(bench, number, vec![create]).await?);
        }
        let run = Run::begin(bench.plan.limits);
        let measured_from = run.measured_from();
        let until = Instant::now() + bench.plan.limits.warmup + duration;
        bench
            .observe(&run, async {
                tokio::select! {
                    () = sleep_until(until) => {}
                    () = bench.interrupt.wait() => {}
                }
            })
            .await;
        let elapsed = Instant::now().saturating_duration_since(measured_from);
        let extra = BTreeMap::from([
            ("watches", watches.len() as f64),
            ("elapsed_secs", report::rounded(elapsed.as_secs_f64())),
        ]);
        let report = bench.report("idle", 0, &Recorder::new(measured_from), extra);
        Ok(Report { results: Vec::new(), ..report })
    }
}
