//! Observes the clock by which times of revisions are recorded. A clock that is set forward makes all rows look old, and
//! what retention deletes because of it does not come back when the clock is corrected.

use std::time::Duration;

use tokio::time::Instant;

/// Time for which the clock must have run evenly, unless the retention is shorter.
const EVEN_TIME: Duration = Duration::from_secs(60 * 60);
/// A smaller jump is not noticed. Clocks that are corrected slowly stay below it.
const JUMP_MIN: Duration = Duration::from_secs(60);

#[derive(Default)]
pub(super) struct EvenClock(Option<Observed>);

struct Observed {
    /// The first call, or the last jump.
    even_since: Instant,
    last: (Instant, i64),
}

impl EvenClock {
    /// Compares the clock's time, in milliseconds since 1970, with that of the call before. Returns whether the clock has
    /// run evenly for [`EVEN_TIME`], or for the retention if that is shorter.
    pub(super) fn observe(&mut self, now: Instant, unix_ms: i64, retention: Duration) -> bool {
        let observed = self.0.get_or_insert(Observed { even_since: now, last: (now, unix_ms) });
        let (last, last_ms) = observed.last;
        let expected = i64::try_from((now - last).as_millis()).unwrap_or(i64::MAX);
        let jump = unix_ms.saturating_sub(last_ms).saturating_sub(expected).unsigned_abs();
        if u128::from(jump) >= JUMP_MIN.as_millis() {
            observed.even_since = now;
        }
        observed.last = (now, unix_ms);
        now - observed.even_since >= EVEN_TIME.min(retention)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn jump_of_the_clock_defers_deletions() {
        const HOUR: i64 = 3_600;
        const WEEK: i64 = 7 * 24 * HOUR;
        let begin = Instant::now();
        let mut clock = EvenClock::default();
        // Seconds since the start, seconds by which the clock is ahead then, and whether rows may be deleted.
        for (at, ahead, expected) in [
            (0, 0, false),
            (HOUR - 1, 0, false),
            (HOUR, 0, true),
            (HOUR + 10, 59, true),
            (HOUR + 20, WEEK, false),
            (HOUR + 30, WEEK, false),
            (HOUR + 40, 0, false),
            (2 * HOUR + 39, 0, false),
            (2 * HOUR + 40, 0, true),
        ] {
            let now = begin + Duration::from_secs(at.unsigned_abs());
            let even = clock.observe(now, (at + ahead) * 1_000, Duration::from_secs(WEEK.unsigned_abs()));
            assert_eq!(even, expected, "after {at} s");
        }
        let mut clock = EvenClock::default();
        for (at, expected) in [(0, false), (2, false), (3, true)] {
            let now = begin + Duration::from_secs(at);
            assert_eq!(clock.observe(now, at.cast_signed() * 1_000, Duration::from_secs(3)), expected, "after {at} s");
        }
    }
}
