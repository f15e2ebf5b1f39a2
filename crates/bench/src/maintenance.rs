//! The scenario `maintenance`: clients put in three phases: without maintenance, during a compaction at the newest
//! revision, and during a defragmentation.

use std::{collections::BTreeMap, future::Future, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use orlop_client::describe;

use crate::{
    args::{parse_keys, parse_value_size},
    bench::Bench,
    closed_loop::{Limits, Recorder, Run},
    error::Error,
    report::{self, Report, Row},
    write,
};
use orlop_wire::proto::client::etcdserverpb::{CompactionRequest, DefragmentRequest};

/// Maximum duration of a compaction or a defragmentation. That of a large store takes minutes.
const OPERATION_TIME_MAX: Duration = Duration::from_secs(600);

#[derive(Debug, clap::Args)]
pub struct Maintenance {
    /// Size of each value in bytes
    #[arg(long, default_value = "256", value_parser = parse_value_size, value_name = "BYTES")]
    value_size: usize,

    /// Number of keys, divided among the clients and written repeatedly
    #[arg(long, default_value = "10000", value_parser = parse_keys, value_name = "N")]
    key_space: usize,
}

/// The measurements of one phase.
struct Phase {
    puts: Recorder,
    /// Duration of the maintenance operation.
    elapsed: Duration,
}

impl Maintenance {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let Some(duration) = bench.plan.limits.duration else {
            return Err(Error::Flags("the first phase needs a duration: use --duration instead of --total".to_owned()));
        };
        let warmup = bench.plan.limits.warmup;
        self.run_phase(bench, warmup, wait(warmup)).await?;
        let baseline = bench.measure_cpu(self.run_phase(bench, duration, wait(duration))).await?;
        let compacting = Box::pin(self.run_phase(bench, OPERATION_TIME_MAX, limited(bench, compact(bench)))).await?;
        let defragmenting = self.run_phase(bench, OPERATION_TIME_MAX, limited(bench, defragment(bench))).await?;

        let p99 = |phase: &Phase| phase.puts.latency.value_at_quantile(0.99) as f64;
        let extra = BTreeMap::from([
            ("compaction_secs", report::rounded(compacting.elapsed.as_secs_f64())),
            ("defragmentation_secs", report::rounded(defragmenting.elapsed.as_secs_f64())),
            ("puts_failed", defragmenting.puts.errors as f64),
            ("compacting_p99_ratio", report::rounded(p99(&compacting) / p99(&baseline).max(1.0))),
        ]);
        let mut report = bench.report("put", self.value_size, &baseline.puts, extra);
        let more = [("put-compacting", &compacting), ("put-defragmenting", &defragmenting)];
        report.results.extend(more.map(|(name, phase)| Row::new(name, &phase.puts)));
        report.scenario = "maintenance";
        // A server may reject writes while it defragments, so errors of that phase are only counted.
        report.first_error = baseline.puts.first_error.or(compacting.puts.first_error);
        Ok(report)
    }

    /// Puts until `operation` is completed, which takes at most `time_max`.
    async fn run_phase(
        &self,
        bench: &Bench,
        time_max: Duration,
        operation: impl Future<Output = Result<(), Error>>,
    ) -> Result<Phase, Error> {
        let began = Instant::now();
        let run = Run::begin(Limits { total: None, duration: Some(time_max), warmup: Duration::ZERO });
        let operating = async {
            let outcome = tokio::select! {
                outcome = operation => outcome,
                () = bench.interrupt.wait() => Err(Error::Interrupted),
            };
            run.stop();
            outcome.map(|()| began.elapsed())
        };
        let putters = write::putters(bench, bench.plan.clients, self.key_space, self.value_size);
        let (elapsed, ()) = tokio::join!(operating, run.drive(putters, &bench.interrupt));
        Ok(Phase { puts: run.finish(), elapsed: elapsed? })
    }
}

/// Fails if the operation takes longer than [`OPERATION_TIME_MAX`].
async fn limited(bench: &Bench, operation: impl Future<Output = Result<(), Error>>) -> Result<(), Error> {
    timeout(OPERATION_TIME_MAX, operation).await.unwrap_or_else(|_| {
        let error = format!("not completed within {OPERATION_TIME_MAX:?}");
        Err(Error::Step { step: "compacting or defragmenting", endpoint: bench.pool.endpoints(), error })
    })
}

async fn wait(duration: Duration) -> Result<(), Error> {
    sleep(duration).await;
    Ok(())
}

/// Compacts at the newest revision; returns when the superseded revisions are deleted.
async fn compact(bench: &Bench) -> Result<(), Error> {
    let client = bench.pool.client(0);
    let revision = bench.keys.revision(&client).await?;
    let compacted = client.kv.clone().compact(CompactionRequest { revision, physical: true }).await;
    compacted.map(|_| ()).map_err(|status| failed("compacting", bench, &status))
}

/// Defragments every endpoint, because each has its own file.
async fn defragment(bench: &Bench) -> Result<(), Error> {
    for number in 0..bench.target.endpoints.len() {
        let response = bench.pool.client(number).maintenance().defragment(DefragmentRequest::default()).await;
        response.map_err(|status| failed("defragmenting", bench, &status))?;
    }
    Ok(())
}

fn failed(step: &'static str, bench: &Bench, status: &tonic::Status) -> Error {
    Error::Step { step, endpoint: bench.pool.endpoints(), error: describe(status) }
}
