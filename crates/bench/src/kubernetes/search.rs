//! The search for the largest number of nodes that a server holds: doubling until a number is not held, then bisection
//! between the largest number that was held and the smallest that was not.
//!
//! It assumes that a server that holds a number of nodes holds every smaller one.

/// The first number of nodes.
const START: usize = 1_000;
/// The search ends when the two numbers differ by less than this share of the smaller one: a twentieth.
const PRECISION: usize = 20;

/// State of the search.
#[derive(Clone, Copy, Debug)]
pub struct Search {
    /// The largest number that was held; 0 if none was.
    held: usize,
    /// The smallest number that was not held; `None` while doubling.
    not_held: Option<usize>,
    max: usize,
}

impl Search {
    /// Returns a search for a number up to `max`.
    pub fn new(max: usize) -> Self {
        Self { held: 0, not_held: None, max }
    }

    /// Returns the next number to measure; `None` if the search is complete.
    pub fn next(&self) -> Option<usize> {
        match self.not_held {
            None if self.held == self.max => None,
            None if self.held == 0 => Some(START.min(self.max)),
            None => Some(self.held.saturating_mul(2).min(self.max)),
            Some(not_held) if not_held - self.held <= (self.held / PRECISION).max(1) => None,
            Some(not_held) => Some(self.held.midpoint(not_held)),
        }
    }

    /// Records whether the number that [`Search::next`] returned was held.
    pub fn record(&mut self, nodes: usize, is_held: bool) {
        if is_held { self.held = nodes } else { self.not_held = Some(nodes) }
    }

    pub fn held(&self) -> usize {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Searches with a server that holds `capacity` nodes; returns the measured numbers and the result.
    fn search(capacity: usize, max: usize) -> (Vec<usize>, usize) {
        let mut search = Search::new(max);
        let mut measured = Vec::new();
        while let Some(nodes) = search.next() {
            measured.push(nodes);
            search.record(nodes, nodes <= capacity);
        }
        (measured, search.held())
    }

    #[test]
    fn search_doubles_and_bisects() {
        let (measured, held) = search(5_500, 1_000_000);
        assert_eq!(measured, [1_000, 2_000, 4_000, 8_000, 6_000, 5_000, 5_500, 5_750]);
        assert_eq!(held, 5_500);
    }

    #[test]
    fn result_is_precise_and_the_number_of_steps_bounded() {
        for capacity in [0, 1, 2, 999, 1_000, 1_001, 12_345, 250_000, 999_999, 1_000_000, 2_000_000] {
            for max in [1, 500, 1_000, 300_000, 1_000_000] {
                let (measured, held) = search(capacity, max);
                let want = capacity.min(max);
                assert!(held <= want && want - held <= (held / PRECISION).max(1), "{held} of {want}, max {max}");
                assert!(measured.len() <= 16, "{measured:?}");
            }
        }
    }
}
