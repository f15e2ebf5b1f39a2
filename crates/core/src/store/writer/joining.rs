//! Waiting for the clients that were just answered.
//!
//! A client that sends its next request when it has the response to the last one misses the commit that begins meanwhile. So a few
//! such clients are divided into two halves, and each waits for the commit of the other half as well as for its own. If the next
//! batch waits a moment for them, all share each commit. PostgreSQL's `commit_delay` is the same idea.
//!
//! Requests of clients that do not wait for responses gain nothing. When the expected requests do not arrive in time, waiting pauses.
//! Decision 14 (docs/adr) has the figures.

use std::time::Duration;

use tokio::time::Instant;

/// Maximum time for which a batch waits: after the last commit, or behind others' changes after its first request.
const WAIT_MAX: Duration = Duration::from_millis(1);
/// Time without waiting after a batch has waited in vain. It doubles with each further one, up to [`PAUSE_MAX`].
const PAUSE: Duration = Duration::from_millis(20);
const PAUSE_MAX: Duration = Duration::from_millis(640);
/// Number of requests above which a batch does not wait: with more clients, the server's thread is busy during commits anyway.
const REQUESTS_MAX: usize = 32;
/// Shorter commits end before clients come back, so waiting takes longer than it saves.
const COMMIT_TIME_MIN: Duration = Duration::from_micros(200);

/// Decides for how many requests the next batch waits, and for how long.
#[derive(Default)]
pub(super) struct Joining {
    next: Option<Next>,
    paused_until: Option<Instant>,
    /// Number of batches in a row that waited in vain.
    absences: u32,
}

enum Next {
    Returning {
        requests: usize,
        until: Instant,
    },
    /// The appends of the others precede the next one anyway, and requests that arrive while it waits for the append lock do not
    /// join it.
    BehindOthers {
        requests: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Expected {
    pub requests: usize,
    pub until: Instant,
    /// Whether waiting in vain shows that it does not pay.
    is_trial: bool,
}

/// What a commit tells about the requests that are in flight.
#[derive(Debug)]
pub(super) struct Commit {
    /// Requests of the batch, which are about to be answered.
    pub served: usize,
    /// Requests that arrived meanwhile.
    pub waiting: usize,
    pub took: Duration,
    pub others: Others,
}

/// The other instances that append to the log, as a commit found them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Others {
    /// There are none.
    None,
    /// The batch was appended behind their changes.
    Before,
    /// They appended nothing since the batch was evaluated.
    Idle,
}

impl Joining {
    /// Notes a commit that ended now.
    pub fn note_commit(&mut self, commit: &Commit, now: Instant) {
        let requests = commit.served + commit.waiting;
        let is_paused = self.paused_until.is_some_and(|until| now < until);
        let is_worthwhile = (2..=REQUESTS_MAX).contains(&requests) && commit.took >= COMMIT_TIME_MIN && !is_paused;
        self.next = match commit.others {
            Others::None if is_worthwhile => Some(Next::Returning { requests, until: now + WAIT_MAX }),
            Others::Before => Some(Next::BehindOthers { requests: commit.served }),
            Others::None | Others::Idle => None,
        };
    }

    /// Returns what the next batch, which has its first request now, waits for; once per commit.
    pub fn take(&mut self, now: Instant) -> Option<Expected> {
        Some(match self.next.take()? {
            Next::Returning { requests, until } => Expected { requests, until, is_trial: true },
            Next::BehindOthers { requests } => Expected { requests, until: now + WAIT_MAX, is_trial: false },
        })
    }

    /// Notes that a batch has waited until now, for `arrived` requests. A timer ends up to a millisecond late, so all may have
    /// arrived, but too late.
    pub fn note_wait(&mut self, expected: Expected, arrived: usize, now: Instant) {
        if !expected.is_trial {
            return;
        }
        if arrived >= expected.requests && now <= expected.until {
            self.absences = 0;
            return;
        }
        let pause = PAUSE.saturating_mul(2_u32.saturating_pow(self.absences)).min(PAUSE_MAX);
        self.paused_until = Some(now + pause);
        self.absences = self.absences.saturating_add(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn commit(served: usize, waiting: usize, others: Others) -> Commit {
        Commit { served, waiting, took: COMMIT_TIME_MIN, others }
    }

    #[test]
    fn next_batch_waits_for_few_requests_that_may_come_back() {
        let now = Instant::now();
        let fast = Commit { took: COMMIT_TIME_MIN / 2, ..commit(4, 4, Others::None) };
        for (commit, expected) in [
            (commit(1, 0, Others::None), None),
            (commit(1, 1, Others::None), Some(2)),
            (commit(4, 0, Others::None), Some(4)),
            (commit(4, 4, Others::None), Some(8)),
            (commit(REQUESTS_MAX, 0, Others::None), Some(REQUESTS_MAX)),
            (commit(REQUESTS_MAX, 1, Others::None), None),
            (fast, None),
            (commit(4, 4, Others::Idle), None),
            (commit(4, 4, Others::Before), Some(4)),
            (commit(REQUESTS_MAX + 1, 0, Others::Before), Some(REQUESTS_MAX + 1)),
        ] {
            let mut joining = Joining::default();
            joining.note_commit(&commit, now);
            let next = joining.take(now);
            assert_eq!(next.map(|next| next.requests), expected, "{commit:?}");
            assert!(next.is_none_or(|next| next.until == now + WAIT_MAX), "{commit:?}");
            assert_eq!(joining.take(now), None, "once per commit");
        }
    }

    #[test]
    fn waiting_pauses_after_a_wait_in_vain() {
        const IN_TIME: Duration = WAIT_MAX;
        const LATE: Duration = WAIT_MAX.saturating_mul(2);
        for (others, arrived, waited, after, is_expected) in [
            (Others::None, 4, IN_TIME, Duration::ZERO, true),
            (Others::None, 3, IN_TIME, PAUSE / 2, false),
            (Others::None, 3, IN_TIME, PAUSE, true),
            (Others::None, 4, LATE, PAUSE / 2, false),
            (Others::Before, 1, LATE, Duration::ZERO, true),
        ] {
            let (mut joining, began) = (Joining::default(), Instant::now());
            joining.note_commit(&commit(2, 2, others), began);
            let expected = joining.take(began).expect("the first batch waits");
            let ended = began + waited;
            joining.note_wait(expected, arrived, ended);
            joining.note_commit(&commit(2, 2, others), ended + after);
            assert_eq!(
                joining.take(ended + after).is_some(),
                is_expected,
                "{others:?}, {arrived} after {waited:?}, then {after:?}"
            );
        }
    }

    #[test]
    fn pause_doubles_until_requests_come_back() {
        let (mut joining, mut now) = (Joining::default(), Instant::now());
        let mut pause_after_wait = |arrived| {
            joining.note_commit(&commit(2, 2, Others::None), now);
            let expected = joining.take(now).expect("the pause has ended");
            joining.note_wait(expected, arrived, now);
            let pause = joining.paused_until.map_or(Duration::ZERO, |until| until.saturating_duration_since(now));
            now += pause;
            pause
        };
        for (arrived, pause) in [(1, PAUSE), (1, 2 * PAUSE), (1, 4 * PAUSE), (4, Duration::ZERO), (1, PAUSE)] {
            assert_eq!(pause_after_wait(arrived), pause);
        }
        for _ in 0..100 {
            pause_after_wait(1);
        }
        assert_eq!(pause_after_wait(1), PAUSE_MAX);
    }
}
