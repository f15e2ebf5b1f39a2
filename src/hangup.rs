//! SIGHUP, which the processes of a terminal receive when it closes.

use tokio::signal::unix::{Signal, SignalKind, signal};

/// Returns the stream of SIGHUP; `None` if the process was started to ignore it, as `nohup` does: a handler would undo
/// that.
pub(crate) fn hangups() -> std::io::Result<Option<Signal>> {
    if is_ignored() { Ok(None) } else { signal(SignalKind::hangup()).map(Some) }
}

fn is_ignored() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // SIGHUP is signal 1, the lowest bit.
    mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}
