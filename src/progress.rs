//! What a long command tells the operator: events on standard output; on standard error how far it is, as a bar on a
//! terminal and otherwise as a line now and then.

use std::time::Duration;

use indicatif::{ProgressBar, ProgressStyle};
use tokio::time::Instant;

use crate::output::print;

/// Interval between lines without a terminal.
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Interval between changes of the bar.
const BAR_INTERVAL: Duration = Duration::from_millis(100);

/// The progress of a command. Its bar is removed from the terminal when it is dropped.
pub(crate) struct Progress {
    bar: ProgressBar,
    shown: Option<Instant>,
    /// The last line of [`Progress::say_once`].
    said: String,
}

impl Progress {
    pub(crate) fn new() -> Self {
        let bar = ProgressBar::new(1);
        let style = ProgressStyle::with_template("{bar:32} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        Self { bar, shown: None, said: String::new() }
    }

    /// Returns `None` if standard error is not a terminal: the command then shows no lines either.
    pub(crate) fn on_terminal() -> Option<Self> {
        let progress = Self::new();
        (!progress.bar.is_hidden()).then_some(progress)
    }

    /// Writes a line to standard output.
    pub(crate) fn say(&mut self, text: &str) {
        // A reader that does not listen any more must not end the command.
        let _ = self.bar.suspend(|| print(format!("{text}\n").as_bytes()));
    }

    /// Writes a line, unless it is the same as the last one that was written so.
    pub(crate) fn say_once(&mut self, text: &str) {
        if self.said != text {
            self.said = text.to_owned();
            self.say(text);
        }
    }

    /// Shows how much is done of what is known now. `text` is asked only if it is shown.
    pub(crate) fn show(&mut self, done: u64, all: u64, text: impl FnOnce() -> String) {
        let interval = if self.bar.is_hidden() { LINE_INTERVAL } else { BAR_INTERVAL };
        let now = Instant::now();
        if self.shown.is_some_and(|shown| now - shown < interval) {
            return;
        }
        self.shown = Some(now);
        if self.bar.is_hidden() {
            return eprintln!("{}", text());
        }
        self.bar.set_length(all.max(1));
        self.bar.set_position(done.min(all));
        self.bar.set_message(text());
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.bar.finish_and_clear();
    }
}

/// Counts something per second.
pub(crate) struct Speed {
    since: Instant,
    count: u64,
    per_sec: f64,
}

impl Speed {
    pub(crate) fn new() -> Self {
        Self { since: Instant::now(), count: 0, per_sec: 0.0 }
    }

    pub(crate) fn add(&mut self, count: u64) {
        self.count += count;
    }

    /// Returns the number per second since about a second ago.
    pub(crate) fn per_sec(&mut self) -> f64 {
        let elapsed = self.since.elapsed();
        if elapsed >= Duration::from_secs(1) {
            *self = Self { since: Instant::now(), count: 0, per_sec: self.count as f64 / elapsed.as_secs_f64() };
        }
        self.per_sec
    }
}
