//! What clients that send without a pause may take of the server's time, all together, before their turns are those of long
//! work.
//!
//! Floods take all that there is, and what they take counts. What comes with KV requests that are done does not, up to what
//! reading them takes: clients who ask as much as the server can answer are no flood.

use std::time::Duration;

use tokio::time::Instant;

/// One part in so many of all time.
const PART: u32 = 3;
/// Beyond that part, at once: what 64 clients with a value of 64 KiB each take.
const BURST: Duration = Duration::from_millis(5);
/// Once it is exceeded the part is smaller, so that a flood has to end first: what it takes in other places does not count.
const PART_EXCEEDED: u32 = 16;
/// What the reading of a short request may take.
const REQUEST: Duration = Duration::from_micros(5);

/// See the module's page.
#[derive(Debug)]
pub(super) struct Allowance {
    spent: Duration,
    is_exceeded: bool,
    /// Who waits because it is exceeded. Of such time nothing is granted: it is the wait that makes clients take less.
    waiting: usize,
    /// Since when time is granted, or somebody waits.
    since: Instant,
    /// Time that is granted and not looked at yet.
    time: Duration,
    /// Requests that had been answered at the last look.
    answers: u64,
}

impl Default for Allowance {
    fn default() -> Self {
        Self {
            spent: Duration::ZERO,
            is_exceeded: false,
            waiting: 0,
            since: Instant::now(),
            time: Duration::ZERO,
            answers: 0,
        }
    }
}

impl Allowance {
    /// Whether it is not enough, now that something has taken so long and so many requests are answered in all.
    pub(super) fn is_exceeded(&mut self, now: Instant, took: Duration, answers: u64) -> bool {
        self.advance(now);
        let part = if self.is_exceeded { PART_EXCEEDED } else { PART };
        let answered = answers.saturating_sub(std::mem::replace(&mut self.answers, answers));
        let answered = u32::try_from(answered).unwrap_or(u32::MAX);
        let granted = std::mem::take(&mut self.time) / part + REQUEST.saturating_mul(answered);
        let left = self.spent.saturating_sub(granted);
        self.spent = (left + took).min(BURST);
        self.is_exceeded = if self.is_exceeded { left > Duration::ZERO } else { self.spent >= BURST };
        self.is_exceeded
    }

    /// Somebody waits because it is exceeded.
    pub(super) fn waits(&mut self, now: Instant) {
        self.advance(now);
        self.waiting += 1;
    }

    /// And has waited.
    pub(super) fn has_waited(&mut self, now: Instant) {
        self.advance(now);
        self.waiting -= 1;
    }

    fn advance(&mut self, now: Instant) {
        let passed = now.saturating_duration_since(std::mem::replace(&mut self.since, now));
        if self.waiting == 0 {
            self.time += passed;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// After how many of a thousand portions the allowance was exceeded first, if ever.
    fn exceeded_after(took: u64, between: u64, answers: u64) -> Option<u64> {
        let (mut allowance, mut now) = (Allowance::default(), Instant::now());
        (1..=1_000).find(|number| {
            now += Duration::from_micros(between);
            allowance.is_exceeded(now, Duration::from_micros(took), number * answers)
        })
    }

    #[tokio::test(start_paused = true)]
    async fn an_allowance_is_a_part_of_the_time_a_burst_and_what_is_answered() {
        // Microseconds that a portion takes and from one to the next, requests answered meanwhile, and after how many it is
        // too much.
        let rows = [
            (50, 0, 0, Some(100)),
            (50, 75, 0, Some(199)),
            (50, 150, 0, None),
            (12, 20, 0, Some(937)),
            (12, 36, 0, None),
            // Small puts, seventeen in 50 microseconds of reading, as fast as they can be answered.
            (50, 75, 17, None),
            (50, 75, 1, Some(249)),
        ];
        for (took, between, answers, after) in rows {
            let found = exceeded_after(took, between, answers);
            assert_eq!(found, after, "{took} us each {between} us with {answers} answers");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn a_flood_has_to_end_before_it_is_forgotten() {
        let (mut allowance, mut now) = (Allowance::default(), Instant::now());
        let portion = Duration::from_micros(50);
        while !allowance.is_exceeded(now, portion, 0) {}
        // As turns with rests leave it: two portions and a millisecond.
        for _ in 0..1_000 {
            now += Duration::from_millis(1);
            assert!((0..2).all(|_| allowance.is_exceeded(now, portion, 0)));
        }
        now += BURST * PART_EXCEEDED;
        assert!(!allowance.is_exceeded(now, portion, 0));
        assert_eq!(
            (0..200).filter(|_| allowance.is_exceeded(now, portion, 0)).count(),
            102,
            "the whole burst is there"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn nothing_is_granted_while_somebody_waits() {
        // Who waits at the same time, and whether the flood is forgotten after a time in which it would be.
        for (waiting, is_forgotten) in [(0, true), (1, false), (2, false)] {
            let (mut allowance, mut now) = (Allowance::default(), Instant::now());
            let portion = Duration::from_micros(50);
            while !allowance.is_exceeded(now, portion, 0) {}
            (0..waiting).for_each(|_| allowance.waits(now));
            now += BURST * PART_EXCEEDED;
            (0..waiting).for_each(|_| allowance.has_waited(now));
            assert_eq!(allowance.is_exceeded(now, portion, 0), !is_forgotten, "{waiting} wait");
            now += BURST * PART_EXCEEDED;
            assert!(!allowance.is_exceeded(now, portion, 0), "{waiting} have waited");
        }
    }
}
