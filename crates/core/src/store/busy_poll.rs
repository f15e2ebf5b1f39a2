//! Busy polling: polls the commit of a lone client instead of sleeping until it is done.
//!
//! A client that writes one key after another waits for four thread wake-ups per put: in the server, in the database,
//! in the server again and in the client. Busy polling saves one of them, tens of microseconds. Other tasks run between
//! the polls.
//!
//! | puts per second of one client, three runs each (docs/adr/0007) | without | with busy polling |
//! |---|---|---|
//! | SQLite | 1,503 to 1,934 | 1,935 to 2,472 |
//! | Postgres | 1,480 to 1,951 | 1,643 to 2,862 |

use std::{
    future::{Future, poll_fn},
    pin::pin,
    thread,
    time::Duration,
};

use tokio::time::Instant;

/// Maximum time that a commit is polled. A commit is polled only if the previous commit took less than this.
const COMMIT_TIME_MAX: Duration = Duration::from_millis(1);
/// A client that writes one key after another sends the next request within this time.
const CLIENT_PAUSE_MAX: Duration = Duration::from_millis(1);
/// Maximum duration of a yield that runs only the database's thread. A longer yield means that other processes need the
/// core.
const YIELD_TIME_MAX: Duration = Duration::from_micros(300);
/// Time without polling after other processes needed the core.
const BACKOFF: Duration = Duration::from_secs(1);

/// Decides for each commit whether to poll it.
pub(super) struct BusyPoll {
    is_enabled: bool,
    last: Option<Commit>,
    paused_until: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Commit {
    took: Duration,
    ended: Instant,
}

impl BusyPoll {
    pub(super) fn new(is_enabled: bool) -> Self {
        Self { is_enabled, last: None, paused_until: None }
    }

    /// Returns the outcome of `commit`. `is_lone` means that the batch has at most one change.
    pub(super) async fn wait<T>(&mut self, is_lone: bool, commit: impl Future<Output = T>) -> T {
        let began = Instant::now();
        let mut poll_until = (is_lone && self.is_worthwhile(began)).then(|| began + COMMIT_TIME_MAX);
        let mut commit = pin!(commit);
        let outcome = poll_fn(|context| {
            let polled = commit.as_mut().poll(context);
            if polled.is_pending()
                && let Some(until) = poll_until
            {
                let before = Instant::now();
                thread::yield_now();
                let now = Instant::now();
                if now < until && !self.is_core_needed(now.duration_since(before), now) {
                    context.waker().wake_by_ref();
                } else {
                    poll_until = None;
                }
            }
            polled
        })
        .await;
        let ended = Instant::now();
        self.last = Some(Commit { took: ended.duration_since(began), ended });
        outcome
    }

    fn is_worthwhile(&self, now: Instant) -> bool {
        let is_client_busy = self
            .last
            .is_some_and(|last| last.took < COMMIT_TIME_MAX && now.duration_since(last.ended) < CLIENT_PAUSE_MAX);
        self.is_enabled && is_client_busy && self.paused_until.is_none_or(|until| now >= until)
    }

    /// Returns whether other processes need the core, judged by the duration of the yield. If they do, polling pauses.
    fn is_core_needed(&mut self, yielded: Duration, now: Instant) -> bool {
        let is_needed = yielded > YIELD_TIME_MAX;
        if is_needed {
            self.paused_until = Some(now + BACKOFF);
        }
        is_needed
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns how often a commit that another thread completes is polled.
    async fn polls(busy_poll: &mut BusyPoll, is_lone: bool) -> u32 {
        let (sender, mut receiver) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            std::thread::park_timeout(COMMIT_TIME_MAX / 4);
            let _ = sender.send(());
        });
        // The last poll of an earlier commit may have left a notification.
        tokio::task::yield_now().await;
        let mut polls = 0;
        let commit = poll_fn(|context| {
            polls += 1;
            pin!(&mut receiver).poll(context).map(drop)
        });
        busy_poll.wait(is_lone, commit).await;
        thread.join().expect("the thread only sends");
        polls
    }

    /// Returns the state after a commit that took `took` and ended just now.
    fn after_commit(is_enabled: bool, took: Duration) -> BusyPoll {
        BusyPoll { is_enabled, last: Some(Commit { took, ended: Instant::now() }), paused_until: None }
    }

    #[tokio::test]
    async fn only_commits_of_a_busy_lone_client_are_polled() {
        let mut busy_poll = after_commit(true, COMMIT_TIME_MAX / 2);
        assert!(!busy_poll.is_core_needed(YIELD_TIME_MAX, Instant::now()), "only the database's thread needs the core");
        // Polling pauses if other tests need the core, so several commits are tried.
        let deadline = Instant::now() + Duration::from_secs(10);
        while polls(&mut busy_poll, true).await <= 2 {
            assert!(Instant::now() < deadline, "no commit is polled");
            busy_poll = after_commit(true, COMMIT_TIME_MAX / 2);
        }
        let mut paused = after_commit(true, COMMIT_TIME_MAX / 2);
        assert!(paused.is_core_needed(YIELD_TIME_MAX * 2, Instant::now()));
        for (mut busy_poll, is_lone, why) in [
            (after_commit(false, COMMIT_TIME_MAX / 2), true, "polling is disabled"),
            (after_commit(true, COMMIT_TIME_MAX / 2), false, "the batch has several changes"),
            (after_commit(true, COMMIT_TIME_MAX), true, "the disk is slow"),
            (BusyPoll::new(true), true, "there was no commit before"),
            (paused, true, "other processes need the core"),
        ] {
            assert!(polls(&mut busy_poll, is_lone).await <= 2, "{why}");
        }
    }
}
