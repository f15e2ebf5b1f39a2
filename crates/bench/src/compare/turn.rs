//! One turn: a server, a group's loads, and what is read off.

use std::{process::Stdio, time::Duration};

use serde_json::Value;
use tokio::process::Command;

use super::{
    Error, Sample,
    groups::{Group, Load, Of, Step},
    machine,
    server::{Kind, Lab, Server, Usage},
};

/// What a load left to read off.
struct Seen {
    /// What `orlop bench --json` printed; null after a restart.
    report: Value,
    start: Duration,
    usage: Usage,
    cpu_percent: f64,
    size_mib: f64,
}

/// The machine's own pace is taken before and after, while no server runs.
pub async fn take(lab: &Lab, kind: Kind, group: &Group, duration: Duration) -> Result<Sample, Error> {
    let pace_before = machine::pace();
    let mut server = Server::start(lab, kind, group.flags).await?;
    let mut steps = Vec::with_capacity(group.steps.len());
    for step in &group.steps {
        let seen = run(&mut server, step, duration).await?;
        steps.push(step.figures.iter().map(|figure| read(&seen, figure.of)).collect::<Result<_, _>>()?);
    }
    server.stop().await;
    Ok(Sample { pace: pace_before.min(machine::pace()), steps })
}

async fn run(server: &mut Server<'_>, step: &Step, duration: Duration) -> Result<Seen, Error> {
    let mut start = Duration::ZERO;
    let before = server.usage()?;
    let began = tokio::time::Instant::now();
    let report = match &step.load {
        Load::Bench(arguments) => bench(server, arguments, duration * step.lasts).await?,
        Load::Restart => {
            start = server.restart().await?;
            Value::Null
        }
    };
    let usage = server.usage()?;
    let cpu = usage.cpu.saturating_sub(before.cpu).as_secs_f64() / began.elapsed().as_secs_f64();
    Ok(Seen { report, start, usage, cpu_percent: cpu * 100.0, size_mib: server.size_mib().await? })
}

/// `orlop bench` as a process of its own.
async fn bench(server: &Server<'_>, arguments: &str, duration: Duration) -> Result<Value, Error> {
    let failed = |error: String| Error::Step { step: "a load", endpoint: server.endpoint(), error };
    let program = std::env::current_exe()?;
    let mut command = Command::new(program);
    command.args(["bench", "--json", "--endpoints", &server.endpoint()]);
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
        // A figure of a load that partly failed compares with nothing.
        Some(error) => Err(failed(format!("{arguments}: {error}"))),
        None => Ok(report),
    }
}

fn read(seen: &Seen, of: Of) -> Result<f64, Error> {
    let result = |operation: &str, field: &str| {
        let rows = seen.report["results"].as_array();
        let row = rows.and_then(|rows| rows.iter().find(|row| row["operation"] == operation));
        row.and_then(|row| row[field].as_f64())
    };
    let read = match of {
        Of::PerSec(operation) => result(operation, "per_sec"),
        Of::P50(operation) => result(operation, "p50_ms"),
        Of::P99(operation) => result(operation, "p99_ms"),
        Of::Max(operation) => result(operation, "max_ms"),
        Of::Fact(name) => seen.report[name].as_f64(),
        Of::Start => Some(seen.start.as_secs_f64()),
        Of::Memory => Some(seen.usage.memory_mib),
        Of::Size => Some(seen.size_mib),
        Of::Cpu => Some(seen.cpu_percent),
    };
    read.ok_or_else(|| Error::Flags(format!("the report has no such figure, figure=`{of:?}`")))
}
