//! Checks whether the history of one key is linearizable, with the algorithm of Wing and Gong and Lowe's cache of
//! visited states. The algorithm searches for a valid order of the operations. In a valid order every response is
//! correct, and every operation comes after all operations that had ended when it started.

use std::collections::HashSet;

/// The request of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ask {
    Put(u64),
    Swap { old: u64, new: u64 },
    Read,
    Delete,
}

/// A value and the revision of its write.
pub type Found = Option<(u64, i64)>;

/// The response of an operation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Answer {
    /// A put, a successful swap, or a delete of an existing key, at this revision.
    Written(i64),
    /// The value found by a read or by a swap that was not applied.
    Found(Found),
    /// A delete of a missing key.
    Nothing,
    /// No response: the operation may have been applied at any time after its start, or not at all.
    Unknown,
}

#[derive(Clone, Copy, Debug)]
pub struct Operation {
    pub ask: Ask,
    pub answer: Answer,
    pub began: u64,
    /// `u64::MAX` if there was no response.
    pub ended: u64,
}

/// The state of the key between two operations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Default)]
struct State {
    value: Option<u64>,
    revision: i64,
    /// The value was written at an unknown revision after `revision`, because that write had no response.
    is_later: bool,
}

impl State {
    /// Returns the state after an operation, or `None` if the operation cannot have this response in this state.
    fn after(self, operation: &Operation) -> Option<Self> {
        let written = |value: Option<u64>, revision: i64| {
            (self.revision < revision).then_some(Self { value, revision, is_later: false })
        };
        let unanswered = |value: Option<u64>| Some(Self { value, is_later: true, ..self });
        match (operation.ask, operation.answer) {
            (Ask::Put(value), Answer::Written(revision)) => written(Some(value), revision),
            (Ask::Put(value), Answer::Unknown) => unanswered(Some(value)),
            (Ask::Swap { old, new }, Answer::Written(revision)) if self.value == Some(old) => {
                written(Some(new), revision)
            }
            (Ask::Swap { old, new }, Answer::Unknown) if self.value == Some(old) => unanswered(Some(new)),
            (Ask::Swap { old, .. }, Answer::Found(found)) if self.value != Some(old) => self.shows(found),
            (Ask::Read, Answer::Found(found)) => self.shows(found),
            (Ask::Delete, Answer::Written(revision)) if self.value.is_some() => written(None, revision),
            (Ask::Delete, Answer::Nothing) if self.value.is_none() => Some(self),
            (Ask::Delete, Answer::Unknown) if self.value.is_some() => unanswered(None),
            _ => None,
        }
    }

    /// Returns the state after a read that returned `found`, or `None` if a read in this state cannot return that.
    fn shows(self, found: Found) -> Option<Self> {
        match found {
            None => self.value.is_none().then_some(self),
            Some((value, revision)) => {
                let fits = if self.is_later { self.revision < revision } else { self.revision == revision };
                (fits && self.value == Some(value)).then_some(Self { revision, is_later: false, ..self })
            }
        }
    }
}

/// Searches for a valid order of the operations.
///
/// # Errors
///
/// If there is none: the operations around the point up to which a valid order was found.
pub fn check(mut operations: Vec<Operation>) -> Result<(), Vec<Operation>> {
    operations.sort_by_key(|operation| operation.began);
    let mut done = vec![0_u64; operations.len().div_ceil(64)];
    let is_done = |done: &[u64], at: usize| done[at / 64] >> (at % 64) & 1 == 1;
    let mut seen: HashSet<(Vec<u64>, State)> = HashSet::new();
    let mut path: Vec<(usize, State)> = Vec::new();
    let (mut state, mut from, mut deepest) = (State::default(), 0, 0);
    loop {
        // The next operation must have started before any of the remaining ones ended.
        let mut first_end = u64::MAX;
        for (at, operation) in operations.iter().enumerate() {
            if operation.began > first_end {
                break;
            }
            if !is_done(&done, at) {
                first_end = first_end.min(operation.ended);
            }
        }
        if first_end == u64::MAX && left_are_unknown(&operations, |at| is_done(&done, at)) {
            return Ok(());
        }
        let mut next = None;
        for (at, operation) in operations.iter().enumerate().skip(from) {
            if operation.began > first_end {
                break;
            }
            if is_done(&done, at) {
                continue;
            }
            if let Some(after) = state.after(operation) {
                done[at / 64] |= 1 << (at % 64);
                if seen.insert((done.clone(), after)) {
                    next = Some((at, after));
                    break;
                }
                done[at / 64] &= !(1 << (at % 64));
            }
        }
        match next {
            Some((at, after)) => {
                path.push((at, state));
                state = after;
                from = 0;
                deepest = deepest.max(path.len());
            }
            None => {
                let Some((at, before)) = path.pop() else {
                    let around = deepest.saturating_sub(8)..(deepest + 8).min(operations.len());
                    return Err(operations[around].to_vec());
                };
                done[at / 64] &= !(1 << (at % 64));
                state = before;
                from = at + 1;
            }
        }
    }
}

fn left_are_unknown(operations: &[Operation], is_done: impl Fn(usize) -> bool) -> bool {
    operations.iter().enumerate().all(|(at, operation)| is_done(at) || operation.answer == Answer::Unknown)
}

mod tests {
    use super::{Answer, Ask, Operation, check};
    use crate::support::Random;

    const fn operation(ask: Ask, answer: Answer, began: u64, ended: u64) -> Operation {
        Operation { ask, answer, began, ended }
    }

    #[test]
    fn checker_accepts_only_linearizable_histories() {
        let put = |value, revision, began, ended| operation(Ask::Put(value), Answer::Written(revision), began, ended);
        let unknown = |value, began| operation(Ask::Put(value), Answer::Unknown, began, u64::MAX);
        let read = |found, began, ended| operation(Ask::Read, Answer::Found(found), began, ended);
        let swap = |old, new, revision, began, ended| {
            operation(Ask::Swap { old, new }, Answer::Written(revision), began, ended)
        };
        let delete = |answer, began, ended| operation(Ask::Delete, answer, began, ended);
        let table: [(&str, Vec<Operation>, bool); 14] = [
            ("a write, then a read", vec![put(1, 2, 0, 1), read(Some((1, 2)), 2, 3)], true),
            ("a stale read", vec![put(1, 2, 0, 1), put(2, 3, 2, 3), read(Some((1, 2)), 4, 5)], false),
            (
                "a read concurrent with a write returns the old value",
                vec![put(1, 2, 0, 1), put(2, 3, 2, 5), read(Some((1, 2)), 3, 4)],
                true,
            ),
            (
                "a read concurrent with a write returns the new value",
                vec![put(1, 2, 0, 1), put(2, 3, 2, 5), read(Some((2, 3)), 3, 4)],
                true,
            ),
            (
                "a read of the new value, then a read of the old value",
                vec![put(1, 2, 0, 1), put(2, 3, 2, 9), read(Some((2, 3)), 3, 4), read(Some((1, 2)), 5, 6)],
                false,
            ),
            ("two swaps of the same value", vec![put(1, 2, 0, 1), swap(1, 2, 3, 2, 5), swap(1, 3, 4, 2, 5)], false),
            (
                "a swap of the value that another swap wrote",
                vec![put(1, 2, 0, 1), swap(1, 2, 3, 2, 5), swap(2, 3, 4, 2, 5)],
                true,
            ),
            (
                "an unknown write that was never applied",
                vec![put(1, 2, 0, 1), unknown(2, 2), read(Some((1, 2)), 9, 10)],
                true,
            ),
            (
                "an unknown write that was applied late",
                vec![put(1, 2, 0, 1), unknown(2, 2), read(Some((1, 2)), 3, 4), read(Some((2, 5)), 5, 6)],
                true,
            ),
            (
                "an unknown write that was applied and then undone",
                vec![put(1, 2, 0, 1), unknown(2, 2), read(Some((2, 3)), 3, 4), read(Some((1, 2)), 5, 6)],
                false,
            ),
            ("a write that was applied before its request", vec![read(Some((2, 2)), 0, 1), unknown(2, 2)], false),
            ("a write at a lower revision than an earlier one", vec![put(1, 3, 0, 1), put(2, 2, 2, 3)], false),
            (
                "a key that was deleted twice",
                vec![put(1, 2, 0, 1), delete(Answer::Written(3), 2, 3), delete(Answer::Written(4), 4, 5)],
                false,
            ),
            (
                "a second delete that finds nothing",
                vec![
                    put(1, 2, 0, 1),
                    delete(Answer::Written(3), 2, 3),
                    delete(Answer::Nothing, 4, 5),
                    read(None, 6, 7),
                ],
                true,
            ),
        ];
        for (name, history, linearizable) in table {
            assert_eq!(check(history).is_ok(), linearizable, "{name}");
        }
    }

    /// A sequential history is linearizable, also if the intervals of its operations are extended. It is not
    /// linearizable if a read returns a value that was never written.
    #[test]
    fn checker_accepts_random_histories_and_rejects_altered_ones() {
        for seed in 0..200 {
            let mut random = Random::new(seed);
            let mut history = sequential(&mut random, 60);
            for operation in &mut history {
                operation.began = operation.began.saturating_sub(random.next() % 40);
                operation.ended += random.next() % 40;
            }
            assert!(check(history.clone()).is_ok(), "seed {seed}");
            let reads: Vec<usize> = (0..history.len()).filter(|at| history[*at].ask == Ask::Read).collect();
            let Some(read) = reads.last() else { continue };
            history[*read].answer = Answer::Found(Some((999_999, 7)));
            assert!(check(history).is_err(), "seed {seed}, altered");
        }
    }

    fn sequential(random: &mut Random, operations: u64) -> Vec<Operation> {
        let (mut found, mut revision): (super::Found, i64) = (None, 1);
        let mut history = Vec::new();
        for number in 0..operations {
            let ask = match random.below(4) {
                0 => Ask::Put(number),
                1 => Ask::Swap { old: found.map_or(0, |(value, _)| value), new: number },
                2 => Ask::Read,
                _ => Ask::Delete,
            };
            let writes = match ask {
                Ask::Put(value) => Some(Some(value)),
                Ask::Swap { new, .. } => found.map(|_| Some(new)),
                Ask::Read => None,
                Ask::Delete => found.map(|_| None),
            };
            let answer = match (ask, writes) {
                (_, Some(value)) => {
                    revision += 1;
                    found = value.map(|value| (value, revision));
                    Answer::Written(revision)
                }
                (Ask::Delete, None) => Answer::Nothing,
                (_, None) => Answer::Found(found),
            };
            history.push(operation(ask, answer, number * 10 + 100, number * 10 + 105));
        }
        history
    }
}
