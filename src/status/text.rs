//! The status as lines.

use std::time::{Duration, SystemTime};

use super::{Status, requests::Durations};
use crate::text::shown_time;

const UNKNOWN: &str = "unknown";
const NONE: &str = "none";

pub(super) fn simple(status: &Status, now: SystemTime) -> String {
    let number = |number: Option<i64>| number.map_or(UNKNOWN.to_owned(), |number| number.to_string());
    let server = &status.server;
    let version = match &server.orlop_version {
        Some(version) => format!("Orlop {version}, API of etcd {}", server.version),
        None => server.unnamed_version(),
    };
    let compact_revision = match server.compact_revision {
        Some(..0) => NONE.to_owned(),
        revision => number(revision),
    };
    let watchers = match (server.watchers, server.watch_streams) {
        (Some(watchers), Some(streams)) => format!("{watchers} on {streams} streams"),
        (watchers, _) => number(watchers),
    };
    let rows = [
        ("endpoint", status.endpoint.clone()),
        ("version", version),
        ("database", server.database.clone().unwrap_or(UNKNOWN.to_owned())),
        ("revision", server.revision.to_string()),
        ("compact revision", compact_revision),
        ("keys", number(server.keys)),
        ("size", server.size_text(UNKNOWN)),
        ("kept history", server.history_text(UNKNOWN)),
        ("instances", number(status.instances)),
        ("leader", if status.is_leader { "this instance" } else { "another instance" }.to_owned()),
        ("watchers", watchers),
        ("leases", number(server.leases)),
        ("last compaction", time(status.last_compaction, "none since the start of the server", now)),
        ("last snapshot", time(status.last_snapshot, NONE, now)),
        ("slowest requests", lines(status.slowest_requests.iter().map(durations), UNKNOWN)),
        ("alarms, errors", lines(server.alarms.iter().cloned(), NONE)),
    ];
    rows.iter().map(|(name, value)| format!("{name:WIDTH$}{value}\n")).collect()
}

/// Width of the first column.
const WIDTH: usize = 18;

/// Returns the lines, of which all but the first are indented.
fn lines(lines: impl Iterator<Item = String>, none: &str) -> String {
    let lines: Vec<String> = lines.collect();
    if lines.is_empty() { none.to_owned() } else { lines.join(&format!("\n{:WIDTH$}", "")) }
}

/// Formats a time with its age. 0 means that there is none.
fn time(unix_seconds: Option<i64>, none: &str, now: SystemTime) -> String {
    match unix_seconds {
        None | Some(..0) => UNKNOWN.to_owned(),
        Some(0) => none.to_owned(),
        Some(seconds) => {
            let now = now.duration_since(SystemTime::UNIX_EPOCH).unwrap_or_default().as_secs();
            let age = Duration::from_secs(now.saturating_sub(seconds.cast_unsigned()));
            format!("{} ({} ago)", shown_time(seconds.saturating_mul(1_000)), humantime::format_duration(age))
        }
    }
}

fn durations(durations: &Durations) -> String {
    let ms = |seconds: f64| format!("{} ms", (seconds * 100_000.0).round() / 100.0);
    let requests = if durations.count == 1 { "request" } else { "requests" };
    let p99 = durations.p99_seconds.map_or("above all buckets".to_owned(), ms);
    format!("{}: p99 {p99}, mean {}, {} {requests}", durations.request, ms(durations.mean_seconds), durations.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_have_ages() {
        let now = SystemTime::UNIX_EPOCH + Duration::from_secs(1_800_003_661);
        for (seconds, want) in [
            (None, "unknown"),
            (Some(0), "none"),
            (Some(1_800_000_000), "2027-01-15T08:00:00Z (1h 1m 1s ago)"),
            (Some(1_800_009_999), "2027-01-15T10:46:39Z (0s ago)"),
            (Some(-1), "unknown"),
            (Some(i64::MAX), "9999-12-31T23:59:59Z (0s ago)"),
        ] {
            assert_eq!(time(seconds, "none", now), want);
        }
    }
}
