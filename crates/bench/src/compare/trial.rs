//! One trial: starts a server, runs the loads of a group and reads the metrics.

use std::{process::Stdio, time::Duration};

use serde_json::Value;
use tokio::process::Command;

use super::{
    groups::{Group, Load, Source, Step},
    machine,
    results::Trial,
    server::{Server, Usage},
    server_kind::ServerKind,
    test_bed::TestBed,
};
use crate::error::Error;

/// The measurements of one load.
struct Measurement {
    /// Output of `orlop bench --json`; null for a restart.
    report: Value,
    start_time: Duration,
    usage: Usage,
    cpu_percent: f64,
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
    let before = server.usage()?;
    let began = tokio::time::Instant::now();
    let report = match &step.load {
        Load::Bench(arguments) => bench(server, arguments, duration * step.duration_factor).await?,
        Load::Restart => {
            start_time = server.restart().await?;
            Value::Null
        }
    };
    let usage = server.usage()?;
    let cpu = usage.cpu.saturating_sub(before.cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    Ok(Measurement { report, start_time, usage, cpu_percent: cpu * 100.0, size_mib: server.size_mib().await? })
}

/// Runs `orlop bench` in a separate process; returns its report.
async fn bench(server: &Server<'_>, arguments: &str, duration: Duration) -> Result<Value, Error> {
    let failed = |error: String| Error::Step { step: "running a load", endpoint: server.endpoints(), error };
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.args(["bench", "--json", "--endpoints", &server.endpoints()]);
    if !arguments.contains("--total") && !arguments.contains("--duration") {
        command.args(["--duration", &format!("{}ms", duration.as_millis())]);
    }
    if !arguments.contains("--warmup") {
        command.args(["--warmup", &format!("{}ms", duration.as_millis() / 3)]);
    }
    let output = command.args(arguments.split_whitespace()).stdin(Stdio::null()).kill_on_drop(true).output().await?;
    if !output.status.success() {
        return Err(failed(format!("{arguments}: {}", String::from_utf8_lossy(&output.stderr).trim_end())));
    }
    let report: Value = serde_json::from_slice(&output.stdout).map_err(std::io::Error::from)?;
    match report["first_error"].as_str() {
        // The metrics of a partly failed load are not comparable.
        Some(error) => Err(failed(format!("{arguments}: {error}"))),
        None => Ok(report),
    }
}

fn read(measurement: &Measurement, source: Source) -> Result<f64, Error> {
    let result = |operation: &str, field: &str| {
        let rows = measurement.report["results"].as_array();
        let row = rows.and_then(|rows| rows.iter().find(|row| row["operation"] == operation));
        row.and_then(|row| row[field].as_f64())
    };
    let value = match source {
        Source::PerSec(operation) => result(operation, "per_sec"),
        Source::P50(operation) => result(operation, "p50_ms"),
        Source::P99(operation) => result(operation, "p99_ms"),
        Source::Max(operation) => result(operation, "max_ms"),
        Source::ReportField(name) => measurement.report[name].as_f64(),
        Source::StartTime => Some(measurement.start_time.as_secs_f64()),
        Source::Memory => Some(measurement.usage.memory_mib),
        Source::DatabaseSize => Some(measurement.size_mib),
        Source::Cpu => Some(measurement.cpu_percent),
    };
    value.ok_or_else(|| Error::Flags(format!("the report does not contain the metric, metric=`{source:?}`")))
}
