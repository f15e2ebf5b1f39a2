//! One trial: starts a server, runs the loads of a group and reads the metrics.

use std::{process::Stdio, time::Duration};

use serde_json::Value;
use tokio::process::Command;

use super::{
    groups::{Group, Load, Source, Step},
    machine,
    results::Trial,
    server::Server,
    server_kind::ServerKind,
    test_bed::TestBed,
};
use crate::error::Error;

/// The measurements of one load.
struct Measurement {
    /// Output of `orlop bench --json`; null for a restart.
    report: Value,
    start_time: Duration,
    memory_mib: f64,
    size_mib: f64,
}

/// Runs a trial. The speed of the machine is measured before and after it, while no server runs.
pub async fn run(test_bed: &TestBed, kind: ServerKind, group: &Group, duration: Duration) -> Result<Trial, Error> {
    let cpu_speed = machine::cpu_speed();
    let mut server = Server::start(test_bed, kind, group.flags, group.instances).await?;
    let mut steps = Vec::with_capacity(group.steps.len());
    for step in &group.steps {
        let measurement = run_step(&mut server, step, duration).await?;
        steps.push(step.metrics.iter().map(|metric| read(&measurement, metric.source)).collect::<Result<_, _>>()?);
    }
    server.stop().await;
    Ok(Trial { cpu_speed: cpu_speed.min(machine::cpu_speed()), steps })
}

async fn run_step(server: &mut Server<'_>, step: &Step, duration: Duration) -> Result<Measurement, Error> {
    let mut start_time = Duration::ZERO;
    let report = match &step.load {
        Load::Bench(arguments) => {
            let measures_cpu = step.metrics.iter().any(|metric| metric.source == Source::Cpu);
            let pids = if measures_cpu { server.pids() } else { Vec::new() };
            bench(server, arguments, duration * step.duration_factor, &pids).await?
        }
        Load::Restart => {
            start_time = server.restart().await?;
            Value::Null
        }
    };
    Ok(Measurement { report, start_time, memory_mib: server.memory_mib()?, size_mib: server.size_mib().await? })
}

/// Runs `orlop bench` in a separate process, which measures the CPU time of the processes `pids`. Returns its report.
async fn bench(server: &Server<'_>, arguments: &str, duration: Duration, pids: &[u32]) -> Result<Value, Error> {
    let failed = |error: String| Error::Step { step: "running a load", endpoint: server.endpoints(), error };
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.args(["bench", "--json", "--endpoints", &server.endpoints()]);
    // The servers have no users.
    command.env_remove("ETCDCTL_USER").env_remove("ETCDCTL_PASSWORD");
    if !arguments.contains("--total") && !arguments.contains("--duration") {
        command.args(["--duration", &format!("{}ms", duration.as_millis())]);
    }
    if !arguments.contains("--warmup") {
        command.args(["--warmup", &format!("{}ms", duration.as_millis() / 3)]);
    }
    for pid in pids {
        command.arg("--server-pid").arg(pid.to_string());
    }
    let output = command.args(arguments.split_whitespace()).stdin(Stdio::null()).kill_on_drop(true).output().await?;
    // Also fails if some operations failed: the metrics of a partly failed load are not comparable.
    if !output.status.success() {
        return Err(failed(format!("{arguments}: {}", String::from_utf8_lossy(&output.stderr).trim_end())));
    }
    Ok(serde_json::from_slice(&output.stdout).map_err(std::io::Error::from)?)
}

fn read(measurement: &Measurement, source: Source) -> Result<f64, Error> {
    let result = |operation: &str, field: &str| {
        let rows = measurement.report["results"].as_array();
        let row = rows.and_then(|rows| rows.iter().find(|row| row["operation"] == operation));
        // The figures of an operation that was never completed are zero, which is not a measurement.
        let row = row.filter(|row| row["count"].as_u64() > Some(0));
        row.and_then(|row| row[field].as_f64())
    };
    let value = match source {
        Source::PerSec(operation) => result(operation, "per_sec"),
        Source::P50(operation) => result(operation, "p50_ms"),
        Source::P99(operation) => result(operation, "p99_ms"),
        Source::Max(operation) => result(operation, "max_ms"),
        Source::ReportField(name) => measurement.report[name].as_f64(),
        Source::StartTime => Some(measurement.start_time.as_secs_f64()),
        Source::Memory => Some(measurement.memory_mib),
        Source::DatabaseSize => Some(measurement.size_mib),
        Source::Cpu => {
            let cpu_secs = measurement.report["server_cpu"]["cpu_secs"].as_f64();
            let elapsed_secs = measurement.report["elapsed_secs"].as_f64().filter(|secs| *secs > 0.0);
            cpu_secs.zip(elapsed_secs).map(|(cpu, elapsed)| cpu / elapsed * 100.0)
        }
    };
    value.ok_or_else(|| Error::Flags(format!("the load did not measure the metric, metric=`{source:?}`")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn cpu_usage_is_that_of_the_measured_time() {
        let read_cpu = |report| {
            let measurement = Measurement { report, start_time: Duration::ZERO, memory_mib: 0.0, size_mib: 0.0 };
            read(&measurement, Source::Cpu).ok()
        };
        let report = serde_json::json!({ "elapsed_secs": 5.0, "server_cpu": { "cpu_secs": 0.25 } });
        assert_eq!(read_cpu(report), Some(5.0));
        assert_eq!(read_cpu(serde_json::json!({ "elapsed_secs": 5.0 })), None);
    }

    #[test]
    fn operation_without_a_count_has_no_metric() {
        for (count, want) in [(3, Some(1.5)), (0, None)] {
            let row = serde_json::json!({ "operation": "put", "count": count, "p99_ms": 1.5 });
            let report = serde_json::json!({ "results": [row] });
            let measurement = Measurement { report, start_time: Duration::ZERO, memory_mib: 0.0, size_mib: 0.0 };
            assert_eq!(read(&measurement, Source::P99("put")).ok(), want, "{count} operations");
        }
    }
}
