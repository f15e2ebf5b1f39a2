//! The progress bar of a run, on standard error.

use std::{
    sync::atomic::{AtomicU64, Ordering::Relaxed},
    time::Duration,
};

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::{Instant, MissedTickBehavior, interval};

use crate::closed_loop::{Limits, Progress, Run};

/// Interval between redraws. Redrawing uses CPU time of the machine under test.
const REDRAW_INTERVAL: Duration = Duration::from_millis(250);
/// Interval between lines if standard error is not a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(5);

/// Shows the progress until the future is dropped. Shows nothing if standard error is not a terminal.
pub async fn show(run: &Run) {
    let bar = ClearOnDrop(ProgressBar::new(1_000));
    if bar.0.is_hidden() {
        return std::future::pending().await;
    }
    let style = ProgressStyle::with_template("{bar:32} {msg}");
    bar.0.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let mut ticks = interval(REDRAW_INTERVAL);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
    loop {
        ticks.tick().await;
        let progress = run.progress();
        bar.0.set_position(permille(&progress, run.limits()));
        bar.0.set_message(message(&progress));
    }
}

/// Shows how many of `total` objects are created until `driven` completes: a bar in a terminal, otherwise a line every few
/// seconds.
pub async fn show_count(what: &str, total: u64, created: &AtomicU64, driven: impl Future<Output = ()>) {
    let bar = ClearOnDrop(ProgressBar::new(total));
    let style = ProgressStyle::with_template("{bar:32} {msg}");
    bar.0.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
    let is_hidden = bar.0.is_hidden();
    let began = Instant::now();
    let message = || created_message(what, created.load(Relaxed), total, began.elapsed());
    let shown = async {
        let mut ticks = interval(if is_hidden { LINE_INTERVAL } else { REDRAW_INTERVAL });
        ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
        ticks.tick().await;
        loop {
            ticks.tick().await;
            if is_hidden {
                eprintln!("{}", message());
            } else {
                bar.0.set_position(created.load(Relaxed));
                bar.0.set_message(message());
            }
        }
    };
    tokio::select! {
        () = driven => {}
        () = shown => {}
    }
    if is_hidden {
        eprintln!("{}", message());
    }
}

fn created_message(what: &str, created: u64, total: u64, elapsed: Duration) -> String {
    let per_sec = created as f64 / elapsed.as_secs_f64().max(f64::MIN_POSITIVE);
    format!("created {created} of {total} {what}, {per_sec:.0}/s")
}

/// Removes the progress bar from the terminal when dropped.
struct ClearOnDrop(ProgressBar);

impl Drop for ClearOnDrop {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}

/// Returns the completed share of the run, in thousandths.
fn permille(progress: &Progress, limits: Limits) -> u64 {
    let done = |done: u128, all: u128| u64::try_from(done * 1_000 / all.max(1)).unwrap_or(u64::MAX).min(1_000);
    let by_total = limits.total.map(|total| done(progress.count.into(), total.into()));
    let by_time = limits.duration.map(|duration| done(progress.elapsed.as_nanos(), duration.as_nanos()));
    by_total.or(by_time).unwrap_or_default()
}

fn message(progress: &Progress) -> String {
    if progress.elapsed.is_zero() {
        return "warming up".to_owned();
    }
    let per_sec = progress.count as f64 / progress.elapsed.as_secs_f64();
    let p99_ms = progress.p99_nanos as f64 / 1e6;
    let errors = if progress.errors > 0 { format!(", {} errors", progress.errors) } else { String::new() };
    format!("{} done, {per_sec:.0}/s, p99 {p99_ms:.2} ms{errors}", progress.count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn progress_is_relative_to_total_or_duration() {
        let limits = |total, duration| Limits { total, duration, warmup: Duration::ZERO };
        let progress = Progress { count: 50, errors: 0, p99_nanos: 2_500_000, elapsed: Duration::from_secs(2) };
        for (limits, want) in [
            (limits(Some(200), None), 250),
            (limits(None, Some(Duration::from_secs(4))), 500),
            (limits(None, Some(Duration::from_secs(1))), 1_000),
            (limits(None, Some(Duration::ZERO)), 1_000),
        ] {
            assert_eq!(permille(&progress, limits), want);
        }
        assert_eq!(message(&progress), "50 done, 25/s, p99 2.50 ms");
        let created = created_message("nodes", 500, 1_000, Duration::from_secs(2));
        assert_eq!(created, "created 500 of 1000 nodes, 250/s");
        assert_eq!(message(&Progress { elapsed: Duration::ZERO, ..progress }), "warming up");
    }
}
