//! How much of what one client sends is taken in before others come.
//!
//! A client that sends without a pause has more here before what came is looked at. Taken in for as long as there is any, it
//! would hold the thread for a millisecond each time, and fifty such clients every request of the others for as many,
//! wherever that waits. So much is taken in by portions, each at a turn (see [`Turns`]). What a portion is goes by the time
//! that the one before took: of a long value the thread has sixteen KiB copied in the time in which it answers a few dozen
//! PINGs, or resets a few streams.

use std::{
    ops::RangeInclusive,
    sync::Arc,
    task::{Context, Poll, ready},
    time::{Duration, Instant},
};

use super::{Asking, Kind, Turns};

/// What looking at a portion should take.
const PORTION_TIME: Duration = Duration::from_micros(50);

/// What it takes at least, with the reading itself: 16 KiB are copied from the kernel, and copied again.
const READ_TIME: Duration = Duration::from_micros(12);

/// So many times the least is the first portion.
const FIRST_TIMES: usize = 4;

/// See the module's page.
#[derive(Debug)]
pub struct Portions {
    turns: Arc<Turns>,
    /// What a portion may be, at least and at most: bytes, or messages.
    sizes: RangeInclusive<usize>,
    size: usize,
    /// Since the last turn, or since there was no more to be had.
    taken: usize,
    /// What looking at that took.
    time: Duration,
    /// When something came that is being looked at.
    came: Option<Instant>,
    /// While there is always more to be had.
    asking: Option<Asking>,
    /// What it waits for.
    asks_for: Option<Kind>,
}

impl Portions {
    pub fn new(turns: &Arc<Turns>, sizes: RangeInclusive<usize>) -> Self {
        // Of one who just came nothing is known, and some come again and again.
        let size = sizes.start().saturating_mul(FIRST_TIMES).min(*sizes.end());
        let turns = Arc::clone(turns);
        Self { turns, sizes, size, taken: 0, time: Duration::ZERO, came: None, asking: None, asks_for: None }
    }

    /// Ready when something may be taken, with how much: at least one.
    pub fn poll(&mut self, context: &mut Context<'_>) -> Poll<usize> {
        if let Some(came) = self.came.take() {
            self.time += came.elapsed();
        }
        if self.taken >= self.size || self.time >= PORTION_TIME {
            // Also where it is alone: who polls a connection may do so again before others come.
            let took = self.time.clamp(READ_TIME, PORTION_TIME);
            let kind = *self.asks_for.get_or_insert_with(|| self.turns.after_portion(took));
            ready!(self.asking.get_or_insert_with(|| self.turns.asking()).poll_given(kind, context));
            self.asks_for = None;
            self.size = self.next_size();
            (self.taken, self.time) = (0, Duration::ZERO);
        }
        Poll::Ready(self.size - self.taken)
    }

    /// What taking came to.
    pub fn took(&mut self, taken: Poll<usize>) {
        match taken {
            Poll::Ready(taken) => {
                self.taken = self.taken.saturating_add(taken);
                // What is short is not worth a look at the clock.
                if self.taken >= *self.sizes.start() {
                    self.came = Some(Instant::now());
                }
            }
            Poll::Pending => (self.taken, self.time, self.came, self.asking) = (0, Duration::ZERO, None, None),
        }
    }

    /// As much as would have taken the time that it should, but no more than twice what there was.
    fn next_size(&self) -> usize {
        let in_time = self.taken as u128 * PORTION_TIME.as_nanos() / self.time.as_nanos().max(1);
        let twice = self.size.saturating_mul(2);
        usize::try_from(in_time).unwrap_or(twice).min(twice).clamp(*self.sizes.start(), *self.sizes.end())
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::FutureExt as _;

    use super::*;

    const LEAST: usize = 1 << 10;
    const MOST: usize = 16 << 10;

    fn portions(turns: &Arc<Turns>) -> Portions {
        Portions::new(turns, LEAST..=MOST)
    }

    fn may_take(portions: &mut Portions) -> Option<usize> {
        poll_fn(|context| portions.poll(context)).now_or_never()
    }

    #[tokio::test]
    async fn what_is_short_never_waits() {
        let (turns, _nobody_gives) = Turns::new();
        let _long = [turns.work(), turns.work()];
        let mut portions = portions(&turns);
        portions.took(Poll::Ready(LEAST - 1));
        assert_eq!(may_take(&mut portions), Some(FIRST_TIMES * LEAST - LEAST + 1));
    }

    #[tokio::test]
    async fn who_goes_on_lets_others_go_first_though_alone() {
        let (turns, give) = Turns::new();
        let mut portions = portions(&turns);
        tokio::spawn(give);
        for _ in 0..3 {
            portions.took(Poll::Ready(MOST));
            let waits = may_take(&mut portions).is_none() && may_take(&mut portions).is_none();
            assert!(waits, "others come first, however often it is polled");
            poll_fn(|context| portions.poll(context)).await;
            assert!(may_take(&mut portions).is_some(), "until there is a portion more");
        }
    }

    #[tokio::test]
    async fn many_take_a_portion_at_a_turn() {
        let (turns, give) = Turns::new();
        let mut many: Vec<Portions> = (0..3).map(|_| portions(&turns)).collect();
        for portions in &mut many {
            portions.took(Poll::Ready(MOST));
            assert_eq!(may_take(portions), None);
        }
        tokio::spawn(give);
        for portions in &mut many {
            poll_fn(|context| portions.poll(context)).await;
        }
    }

    #[tokio::test]
    async fn who_has_taken_all_asks_no_longer() {
        let (turns, _nobody_gives) = Turns::new();
        let mut portions = portions(&turns);
        portions.took(Poll::Ready(MOST));
        assert_eq!(may_take(&mut portions), None);
        portions.took(Poll::Pending);
        assert!(may_take(&mut portions).is_some(), "what comes next is short");
    }

    #[tokio::test]
    async fn a_portion_is_what_can_be_looked_at_in_time() {
        let (turns, give) = Turns::new();
        tokio::spawn(give);
        let mut portions = portions(&turns);
        // So many times the time that it should have taken: what the next one is.
        let rows = [
            (0, 8 * LEAST),
            (0, MOST),
            (0, MOST),
            (4, MOST / 4),
            (2, MOST / 8),
            (100, LEAST),
            (100, LEAST),
            (0, 2 * LEAST),
            (0, 4 * LEAST),
        ];
        assert_eq!((portions.size, MOST), (4 * LEAST, 16 * LEAST));
        for (slow, next) in rows {
            portions.took(Poll::Ready(portions.size));
            (portions.came, portions.time) = (None, PORTION_TIME * slow);
            assert_eq!(poll_fn(|context| portions.poll(context)).await, next, "{slow} times as long");
        }
        // Before it is all taken, when its time is over.
        portions.took(Poll::Ready(1));
        portions.time = PORTION_TIME;
        assert_eq!(may_take(&mut portions), None);
    }
}
