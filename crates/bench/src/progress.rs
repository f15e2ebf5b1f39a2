//! How far a run is, on a terminal's standard error.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::{MissedTickBehavior, interval};

use super::closed_loop::{Limits, Run, SoFar};

/// Redrawing costs the machine that is measured.
const INTERVAL: Duration = Duration::from_millis(250);

/// Shows it until it is dropped. Where there is no terminal, shows nothing.
pub async fn show(run: &Run) {
    let bar = Cleared(ProgressBar::new(1_000));
    if bar.0.is_hidden() {
        return std::future::pending().await;
    }
    let style = ProgressStyle::with_template("{bar:32} {msg}");
    bar.0.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut ticks = interval(INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let so_far = run.so_far();
        bar.0.set_position(permille(&so_far, run.limits()));
        bar.0.set_message(message(&so_far));
    }
}

/// Leaves nothing of itself on the terminal.
struct Cleared(ProgressBar);

impl Drop for Cleared {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

fn permille(so_far: &SoFar, limits: Limits) -> u64 {
    let done = |done: u128, all: u128| u64::try_from(done * 1_000 / all.max(1)).unwrap_or(u64::MAX).min(1_000);
    let by_total = limits.total.map(|total| done(so_far.count.into(), total.into()));
    let by_time = limits.duration.map(|duration| done(so_far.elapsed.as_nanos(), duration.as_nanos()));
    by_total.or(by_time).unwrap_or_default()
}

fn message(so_far: &SoFar) -> String {
    if so_far.elapsed.is_zero() {
        return "warming up".to_owned();
    }
    let per_sec = so_far.count as f64 / so_far.elapsed.as_secs_f64();
    let p99_ms = so_far.p99_nanos as f64 / 1e6;
    let errors = if so_far.errors > 0 { format!(", {} errors", so_far.errors) } else { String::new() };
    format!("{} done, {per_sec:.0}/s, p99 {p99_ms:.2} ms{errors}", so_far.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_by_total_or_by_time() {
        let limits = |total, duration| Limits { total, duration, warmup: Duration::ZERO };
        let so_far = SoFar { count: 50, errors: 0, p99_nanos: 2_500_000, elapsed: Duration::from_secs(2) };
        for (limits, want) in [
            (limits(Some(200), None), 250),
            (limits(None, Some(Duration::from_secs(4))), 500),
            (limits(None, Some(Duration::from_secs(1))), 1_000),
            (limits(None, Some(Duration::ZERO)), 1_000),
        ] {
            assert_eq!(permille(&so_far, limits), want);
        }
        assert_eq!(message(&so_far), "50 done, 25/s, p99 2.50 ms");
        assert_eq!(message(&SoFar { elapsed: Duration::ZERO, ..so_far }), "warming up");
    }
}
