//! The scenario of the store's upkeep: clients put all the while, first undisturbed, then while the store is compacted at
//! its newest revision, then while it is defragmented.

use std::{collections::BTreeMap, future::Future, time::Duration};

use tokio::time::{Instant, sleep, timeout};

use super::{
    Bench, Error,
    args::{at_least_one, value_size},
    closed_loop::{Limits, Recorder, Run, describe},
    report::{self, Report, Row},
    write,
};
use orlop_wire::proto::client::etcdserverpb::{CompactionRequest, DefragmentRequest};

/// Compacting or defragmenting a large store takes minutes at most.
const STEP_MAX: Duration = Duration::from_secs(600);

#[derive(Debug, clap::Args)]
pub struct Maintenance {
    /// Bytes of each value
    #[arg(long, default_value = "256", value_parser = value_size, value_name = "BYTES")]
    value_size: usize,

    /// Keys that are written again and again, split among the clients
    #[arg(long, default_value = "10000", value_parser = at_least_one, value_name = "N")]
    key_space: usize,
}

/// What was measured while something else went on.
struct Phase {
    puts: Recorder,
    took: Duration,
}

impl Maintenance {
    pub async fn measure(&self, bench: &Bench) -> Result<Report, Error> {
        let Some(quiet) = bench.plan.limits.duration else {
            return Err(Error::Flags("the quiet phase needs an end: give --duration, not --total".to_owned()));
        };
        self.phase(bench, wait(bench.plan.limits.warmup)).await?;
        let undisturbed = self.phase(bench, wait(quiet)).await?;
        let compacting = self.phase(bench, compact(bench)).await?;
        let defragmenting = self.phase(bench, defragment(bench)).await?;

        let p99 = |phase: &Phase| phase.puts.latency.value_at_quantile(0.99) as f64;
        let facts = BTreeMap::from([
            ("compaction_secs", report::rounded(compacting.took.as_secs_f64())),
            ("defragmentation_secs", report::rounded(defragmenting.took.as_secs_f64())),
            ("puts_failed", defragmenting.puts.errors as f64),
            ("compacting_p99_ratio", report::rounded(p99(&compacting) / p99(&undisturbed).max(1.0))),
        ]);
        let mut report = bench.report("put", self.value_size, &undisturbed.puts, facts);
        let more = [("put-compacting", &compacting), ("put-defragmenting", &defragmenting)];
        report.results.extend(more.map(|(name, phase)| Row::new(name, &phase.puts)));
        report.scenario = "maintenance";
        // A server may refuse writes while it is defragmented; the others should go through.
        report.first_error = undisturbed.puts.first_error.or(compacting.puts.first_error);
        Ok(report)
    }

    /// Puts until the other work is done.
    async fn phase(&self, bench: &Bench, work: impl Future<Output = Result<(), Error>>) -> Result<Phase, Error> {
        let began = Instant::now();
        let run = Run::begin(Limits { total: None, duration: Some(STEP_MAX), warmup: Duration::ZERO });
        let working = async {
            let outcome = tokio::select! {
                outcome = timeout(STEP_MAX, work) => outcome.unwrap_or_else(|_| Err(late(bench))),
                () = bench.interrupt.wait() => Err(Error::Interrupted),
            };
            run.stop();
            outcome.map(|()| began.elapsed())
        };
        let putters = write::putters(bench, bench.plan.clients, self.key_space, self.value_size);
        let (took, ()) = tokio::join!(working, run.drive(putters, &bench.interrupt));
        Ok(Phase { puts: run.take(), took: took? })
    }
}

fn late(bench: &Bench) -> Error {
    let error = format!("not done after {STEP_MAX:?}");
    Error::Step { step: "compacting or defragmenting", endpoint: bench.pool.endpoints(), error }
}

async fn wait(duration: Duration) -> Result<(), Error> {
    sleep(duration).await;
    Ok(())
}

/// At the newest revision; done when the superseded revisions are gone from the disk's file.
async fn compact(bench: &Bench) -> Result<(), Error> {
    let client = bench.pool.client(0);
    let revision = bench.keys.revision(&client).await?;
    let compacted = client.kv.clone().compact(CompactionRequest { revision, physical: true }).await;
    compacted.map(|_| ()).map_err(|status| failed("compacting", bench, &status))
}

/// Every endpoint, as each has a file of its own.
async fn defragment(bench: &Bench) -> Result<(), Error> {
    for number in 0..bench.target.endpoints.len() {
        let answer = bench.pool.client(number).maintenance().defragment(DefragmentRequest::default()).await;
        answer.map_err(|status| failed("defragmenting", bench, &status))?;
    }
    Ok(())
}

fn failed(step: &'static str, bench: &Bench, status: &tonic::Status) -> Error {
    Error::Step { step, endpoint: bench.pool.endpoints(), error: describe(status) }
}
