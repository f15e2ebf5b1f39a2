//! All random choices of a run: one stream of numbers (SplitMix64) from its seed, shared by all tasks.

use std::{cell::Cell, time::Duration};

thread_local! {
    static STATE: Cell<u64> = const { Cell::new(0) };
}

pub(super) fn seed(seed: u64) {
    STATE.set(seed);
}

fn next() -> u64 {
    let state = STATE.get().wrapping_add(0x9e37_79b9_7f4a_7c15);
    STATE.set(state);
    let mixed = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    mixed ^ (mixed >> 31)
}

/// Returns a random number in [0, bound).
pub(super) fn below(bound: usize) -> usize {
    usize::try_from(next() % bound as u64).expect("a number below a usize is a usize")
}

/// Returns a random number in [low, high].
pub(super) fn between(low: i64, high: i64) -> i64 {
    low + i64::try_from(next() % (high - low + 1).cast_unsigned()).expect("the difference of the bounds is an i64")
}

/// Returns true with a probability of `chance` in 1,000.
pub(super) fn permille(chance: usize) -> bool {
    below(1_000) < chance
}

/// Returns true with a probability of `chance` in 100.
pub(super) fn percent(chance: usize) -> bool {
    below(100) < chance
}

/// Returns a random item.
pub(super) fn pick<T: Clone>(from: &[T]) -> T {
    from[below(from.len())].clone()
}

/// Returns a random duration in [low, high] milliseconds.
pub(super) fn millis(low: i64, high: i64) -> Duration {
    Duration::from_millis(between(low, high).cast_unsigned())
}
