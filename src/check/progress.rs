//! Progress of a check, on a terminal's standard error.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use orlop_core::types::Revision;

/// A progress bar, which is removed from the terminal when dropped.
pub(super) struct Progress(ProgressBar);

/// Whether progress is shown.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Shown {
    /// If standard error is a terminal.
    OnTerminal,
    Never,
}

impl Progress {
    pub(super) fn new(shown: Shown) -> Self {
        let bar = match shown {
            Shown::OnTerminal => ProgressBar::new(0),
            Shown::Never => ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden()),
        };
        let style = ProgressStyle::with_template("{bar:32} {msg}");
        bar.set_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message("checking the file");
        bar.tick();
        Self(bar)
    }

    pub(super) fn set(&self, revision: Revision, head: Revision) {
        let number = |revision: Revision| u64::try_from(revision.0).unwrap_or(0);
        self.0.set_length(number(head));
        self.0.set_position(number(revision));
        self.0.set_message(format!("revision {revision} of {head}"));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        self.0.finish_and_clear();
    }
}
