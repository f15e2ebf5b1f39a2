//! The checker on histories whose verdict is known, and beside a search that tries everything.

use std::{sync::Arc, time::Instant};

use super::{
    checker,
    history::{Answer, Call, Effect, Expected, Moment, OpId, Operation, Outcome, Pair},
    sample::sample,
};
use crate::support::Random;

fn ms(millis: u64) -> Moment {
    Moment::from_millis(millis)
}

fn put(value: &str) -> Call {
    Call::Put(value.into())
}

fn swap(revision: i64, value: &str) -> Call {
    Call::Swap { expected: Expected::Revision(revision), value: value.into() }
}

fn swap_value(expected: &str, value: &str) -> Call {
    Call::Swap { expected: Expected::Value(expected.into()), value: value.into() }
}

fn written(revision: i64) -> Option<Answer> {
    Some(Answer { revision, effect: Effect::Written })
}

fn saw(value: &str, mod_revision: i64, revision: i64) -> Option<Answer> {
    let pair = Pair { value: value.into(), mod_revision };
    Some(Answer { revision, effect: Effect::Saw(Some(pair)) })
}

fn absent(revision: i64) -> Option<Answer> {
    Some(Answer { revision, effect: Effect::Saw(None) })
}

/// Called at, returned at, call, answer if one came.
type Row = (u64, u64, Call, Option<Answer>);

fn history(rows: &[Row]) -> Vec<Operation> {
    let operation = |(id, (called, returned, call, answer)): (usize, &Row)| Operation {
        id: OpId(id as u64),
        client: id as u64,
        key: "k".into(),
        call: call.clone(),
        called: ms(*called),
        outcome: answer.clone().map_or(Outcome::Unknown, |answer| Outcome::Answered { at: ms(*returned), answer }),
    };
    rows.iter().enumerate().map(operation).collect()
}

#[track_caller]
fn check(what: &str, linearizable: bool, rows: &[Row]) {
    let history = history(rows);
    let complaints = checker::check(&history);
    assert_eq!(complaints.is_empty(), linearizable, "{what}: {complaints:?}");
    assert_eq!(tries_everything(&history), linearizable, "{what}, by trying everything");
}

#[test]
fn known_histories_get_their_verdicts() {
    use Call::{Delete, Read};
    let ok = true;
    let bad = false;
    check("nothing", ok, &[]);
    check("an absent key", ok, &[(0, 1, Read, absent(1)), (2, 3, Delete, absent(1))]);
    check("a read after a write", ok, &[(0, 1, put("a"), written(2)), (2, 3, Read, saw("a", 2, 2))]);
    check("a stale read", bad, &[(0, 1, put("a"), written(2)), (2, 3, Read, absent(1))]);
    check(
        "a stale read of a value",
        bad,
        &[(0, 1, put("a"), written(2)), (2, 3, put("b"), written(3)), (4, 5, Read, saw("a", 2, 2))],
    );
    check(
        "a read beside the write may see either",
        ok,
        &[
            (0, 1, put("a"), written(2)),
            (2, 9, put("b"), written(3)),
            (3, 4, Read, saw("a", 2, 2)),
            (5, 6, Read, saw("b", 3, 3)),
        ],
    );
    check(
        "what one has read the next does not miss",
        bad,
        &[
            (0, 1, put("a"), written(2)),
            (2, 9, put("b"), written(3)),
            (3, 4, Read, saw("b", 3, 3)),
            (5, 6, Read, saw("a", 2, 2)),
        ],
    );
    check("a header that does not cover what it shows", bad, &[(0, 9, put("a"), written(3)), (1, 2, Read, saw("a", 3, 2))]);
    check(
        "a header that covers what it does not show",
        bad,
        &[(0, 1, put("a"), written(2)), (2, 9, put("b"), written(3)), (2, 9, Read, saw("a", 2, 3))],
    );
    check("a value under another revision", bad, &[(0, 1, put("a"), written(2)), (2, 3, Read, saw("a", 3, 3))]);
    check("revisions against time", bad, &[(0, 1, put("a"), written(3)), (2, 3, put("b"), written(2))]);
    check("revisions of writes side by side", ok, &[(0, 3, put("a"), written(3)), (2, 3, put("b"), written(2))]);
    check(
        "a lost update",
        bad,
        &[(0, 1, put("a"), written(2)), (2, 9, swap(2, "b"), written(3)), (3, 8, swap(2, "c"), written(4))],
    );
    check(
        "a lost update, by value",
        bad,
        &[(0, 1, put("a"), written(2)), (2, 9, swap_value("a", "b"), written(3)), (3, 8, swap_value("a", "c"), written(4))],
    );
    check(
        "an update that another forestalled",
        ok,
        &[(0, 1, put("a"), written(2)), (2, 9, swap(2, "b"), written(3)), (3, 8, swap(2, "c"), saw("b", 3, 3))],
    );
    check(
        "a refusal though the comparison held",
        bad,
        &[(0, 1, put("a"), written(2)), (2, 3, swap(2, "b"), saw("a", 2, 2))],
    );
    check("two that create", bad, &[(0, 9, swap(0, "a"), written(2)), (0, 9, swap(0, "b"), written(3))]);
    check("a delete of nothing though there was something", bad, &[(0, 1, put("a"), written(2)), (2, 3, Delete, absent(2))]);
    check(
        "one put, deleted twice",
        bad,
        &[(0, 1, put("a"), written(2)), (2, 9, Delete, written(3)), (2, 9, Delete, written(4))],
    );
}

#[test]
fn unknown_outcomes_may_come_late_or_never_but_not_early() {
    use Call::{Delete, Read};
    let ok = true;
    let bad = false;
    check("never", ok, &[(0, 0, put("a"), None), (1, 2, Read, absent(1)), (3, 4, Read, absent(1))]);
    check("late", ok, &[(0, 0, put("a"), None), (1, 2, Read, absent(1)), (3, 4, Read, saw("a", 2, 2))]);
    check(
        "once is enough",
        bad,
        &[(0, 0, put("a"), None), (1, 2, Read, saw("a", 2, 2)), (3, 4, Delete, written(3)), (5, 6, Read, saw("a", 4, 4))],
    );
    check("early", bad, &[(0, 1, Read, saw("a", 2, 2)), (2, 2, put("a"), None)]);
    check(
        "after later writes",
        ok,
        &[(0, 0, put("a"), None), (1, 2, put("b"), written(2)), (3, 4, Read, saw("a", 3, 3))],
    );
    check(
        "an unknown swap that cannot have matched",
        bad,
        &[(0, 1, put("b"), written(2)), (2, 3, put("c"), written(3)), (4, 4, swap(2, "a"), None), (5, 6, Read, saw("a", 4, 4))],
    );
    check(
        "an unknown swap that has",
        ok,
        &[(0, 1, put("b"), written(2)), (2, 2, swap(2, "a"), None), (5, 6, Read, saw("a", 3, 3))],
    );
    check("an unknown delete seen", ok, &[(0, 1, put("a"), written(2)), (2, 2, Delete, None), (3, 4, Read, absent(3))]);
    check("it takes a revision", bad, &[(0, 1, put("a"), written(2)), (2, 2, Delete, None), (3, 4, Read, absent(2))]);
    check("it does not come early", bad, &[(0, 1, put("a"), written(2)), (2, 3, Read, absent(3)), (4, 4, Delete, None)]);
    check(
        "it counts once",
        bad,
        &[
            (0, 1, put("a"), written(2)),
            (2, 2, Delete, None),
            (3, 4, Read, absent(3)),
            (5, 6, put("b"), written(4)),
            (7, 8, Read, absent(5)),
        ],
    );
    check(
        "a put that only a delete found",
        ok,
        &[(0, 0, put("a"), None), (1, 2, Read, absent(1)), (3, 4, Delete, written(3)), (5, 6, Read, absent(3))],
    );
    check("it takes a revision too", bad, &[(0, 0, put("a"), None), (3, 4, Delete, written(2)), (5, 6, put("b"), written(2))]);
    check("a swap that wants it absent is no different", ok, &[(0, 0, swap(0, "a"), None), (3, 4, Delete, written(3))]);
}

#[test]
fn sequential_executions_told_with_wider_intervals_pass() {
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let (keys, overlap) = (1 + random.below(4), random.below(12));
        let complaints = checker::check(&sample(seed, keys, 200, overlap).history);
        assert!(complaints.is_empty(), "seed {seed}: {}", complaints.join("\n"));
    }
}

#[test]
fn twenty_thousand_operations_take_seconds() {
    let sample = sample(1, 6, 20_000, 15);
    let begun = Instant::now();
    assert_eq!(checker::check(&sample.history), [""; 0]);
    // Generous: the figure is some tenths of a second, and a search that goes astray takes hours.
    assert!(begun.elapsed() < crate::support::DEADLINE, "{:?}", begun.elapsed());

    // A failure takes longer, as everything is tried and the shortest part is looked for.
    let begun = Instant::now();
    let mut history = sample.history;
    let stale = history.iter().rposition(|it| it.seen().is_some()).expect("something is read");
    let first = history.iter().find(|it| it.key == history[stale].key && it.seen().is_some());
    let outdated = first.and_then(|it| it.answer()).expect("something was read before").1.clone();
    set_answer(&mut history[stale], outdated);
    assert_eq!(checker::check(&history).len(), 1);
    assert!(begun.elapsed() < crate::support::DEADLINE, "{:?}", begun.elapsed());
}

fn set_answer(operation: &mut Operation, new: Answer) {
    if let Outcome::Answered { answer, .. } = &mut operation.outcome {
        *answer = new;
    }
}

#[test]
fn mutated_histories_fail() {
    let mut mutations = [0; 3];
    for seed in 0..300 {
        let mut random = Random::new(seed);
        let mut history = sample(seed, 2, 150, 3).history;
        let kind = random.below(mutations.len());
        let at = random.below(history.len());
        let mutated = (at..history.len()).find(|at| match kind {
            0 => reads_what_was_before(&mut history, *at),
            1 => updates_twice(&mut history, *at),
            _ => swaps_revisions(&mut history, *at),
        });
        if mutated.is_some() {
            mutations[kind] += 1;
            assert!(!checker::check(&history).is_empty(), "seed {seed}, mutation {kind} passes: {mutated:?}");
        }
    }
    assert!(mutations.iter().all(|count| *count > 50), "{mutations:?}");
}

/// The read at `at` shows, header and all, what a read showed before a write that has ended.
fn reads_what_was_before(history: &mut [Operation], at: usize) -> bool {
    let late = &history[at];
    let Some((_, Answer { effect: Effect::Saw(Some(seen)), .. })) = late.answer() else { return false };
    let same_key = || history.iter().filter(|it| it.key == late.key);
    let covered = same_key()
        .any(|it| it.written_at() == Some(seen.mod_revision) && it.answer().is_some_and(|(at, _)| at < late.called));
    let before = same_key().filter_map(|it| it.answer()).map(|(_, answer)| answer);
    let before = before.filter(|it| it.effect != Effect::Written && it.revision < seen.mod_revision);
    match before.max_by_key(|answer| answer.revision).cloned() {
        Some(outdated) if covered && late.call == Call::Read => {
            set_answer(&mut history[at], outdated);
            true
        }
        _ => false,
    }
}

/// A swap that was refused is told to have been done, at the next revision.
fn updates_twice(history: &mut [Operation], at: usize) -> bool {
    let (Call::Swap { .. }, Some((_, answer))) = (&history[at].call, history[at].answer()) else { return false };
    if answer.effect == Effect::Written {
        return false;
    }
    let revision = answer.revision + 1;
    set_answer(&mut history[at], Answer { revision, effect: Effect::Written });
    true
}

/// A write and a later one of the key trade their revisions.
fn swaps_revisions(history: &mut [Operation], at: usize) -> bool {
    let Some(revision) = history[at].written_at() else { return false };
    let Some((returned, _)) = history[at].answer() else { return false };
    let later = history.iter().position(|it| {
        it.key == history[at].key && it.written_at().is_some_and(|it| it > revision) && it.called > returned
    });
    let Some(later) = later else { return false };
    let other = history[later].written_at().expect("it was chosen for it");
    set_answer(&mut history[later], Answer { revision, effect: Effect::Written });
    set_answer(&mut history[at], Answer { revision: other, effect: Effect::Written });
    true
}

#[test]
fn agrees_with_trying_everything() {
    let mut verdicts = [0; 2];
    for seed in 0..30_000 {
        let mut random = Random::new(seed);
        let operations = 2 + random.below(6);
        let mut history = sample(seed, 1, operations, 4).history;
        for _ in 0..random.below(3) {
            distort(&mut history, &mut random);
        }
        if !compares_name_what_was_shown(&history) {
            continue;
        }
        let expected = tries_everything(&history);
        verdicts[usize::from(expected)] += 1;
        let complaints = checker::check(&history);
        let lines: Vec<String> = history.iter().map(ToString::to_string).collect();
        assert_eq!(complaints.is_empty(), expected, "seed {seed}:\n{}\n{complaints:?}", lines.join("\n"));
    }
    assert!(verdicts.iter().all(|count| *count > 3_000), "{verdicts:?}");
}

/// Changes something of some operation, perhaps to no avail.
fn distort(history: &mut [Operation], random: &mut Random) {
    let pairs: Vec<Pair> = history.iter().filter_map(|it| it.seen().cloned()).collect();
    let at = random.below(history.len());
    let operation = &mut history[at];
    let Outcome::Answered { at, answer } = &mut operation.outcome else { return };
    match random.below(6) {
        0 => answer.revision += random.between(-1, 1),
        1 => operation.called = ms(random.below(10) as u64).min(*at),
        2 => *at = ms(random.below(10) as u64).max(operation.called),
        3 => operation.outcome = Outcome::Unknown,
        4 if !pairs.is_empty() && matches!(operation.call, Call::Read | Call::Swap { .. }) => {
            answer.effect = Effect::Saw(Some(random.pick(&pairs)));
        }
        _ => match (&operation.call, &answer.effect) {
            (Call::Delete, Effect::Written) | (Call::Read | Call::Swap { .. }, _) => answer.effect = Effect::Saw(None),
            (Call::Delete, _) => answer.effect = Effect::Written,
            (Call::Put(_), _) => {}
        },
    }
}

/// What the checker may rely on, and random changes can break.
fn compares_name_what_was_shown(history: &[Operation]) -> bool {
    let shown = |value: &Arc<str>| {
        history.iter().any(|it| {
            it.seen().is_some_and(|pair| pair.value == *value)
                || it.value() == Some(value) && it.written_at().is_some()
        })
    };
    history.iter().all(|it| match &it.call {
        Call::Swap { expected: Expected::Revision(0), .. } => true,
        Call::Swap { expected: Expected::Revision(revision), .. } => history.iter().any(|it| {
            it.seen().is_some_and(|pair| pair.mod_revision == *revision)
                || it.value().is_some() && it.written_at() == Some(*revision)
        }),
        Call::Swap { expected: Expected::Value(value), .. } => shown(value),
        Call::Put(_) | Call::Read | Call::Delete => true,
    })
}

/// Every order, every set of unknown operations that happened, every revision that these may have had.
fn tries_everything(history: &[Operation]) -> bool {
    let newest = history.iter().filter_map(|it| it.answer()).map(|(_, answer)| answer.revision).max().unwrap_or(0);
    goes_on(history, newest, &mut vec![false; history.len()], None, 0)
}

fn goes_on(history: &[Operation], newest: i64, placed: &mut [bool], state: Option<&Pair>, floor: i64) -> bool {
    let open = |placed: &[bool]| {
        let open = history.iter().zip(placed).filter(|(_, placed)| !**placed).map(|(operation, _)| operation);
        open.filter_map(|operation| operation.answer()).map(|(at, _)| at).min()
    };
    let Some(limit) = open(placed) else { return true };
    for (index, operation) in history.iter().enumerate() {
        if placed[index] || operation.called > limit || operation.outcome == Outcome::Failed {
            continue;
        }
        placed[index] = true;
        let found = match operation.answer() {
            Some((_, Answer { revision, effect: Effect::Saw(seen) })) => {
                let refused = match &operation.call {
                    Call::Swap { expected, .. } => !expected.holds(state),
                    Call::Delete => state.is_none(),
                    Call::Read => true,
                    Call::Put(_) => false,
                };
                refused
                    && *revision >= floor
                    && state == seen.as_ref()
                    && goes_on(history, newest, placed, state, *revision)
            }
            Some((_, Answer { revision, effect: Effect::Written })) => {
                *revision > floor && writes(history, newest, placed, state, operation, *revision)
            }
            None => (floor + 1..=newest).any(|revision| writes(history, newest, placed, state, operation, revision)),
        };
        placed[index] = false;
        if found {
            return true;
        }
    }
    false
}

fn writes(
    history: &[Operation],
    newest: i64,
    placed: &mut [bool],
    state: Option<&Pair>,
    operation: &Operation,
    revision: i64,
) -> bool {
    let pair = |value: &Arc<str>| Some(Pair { value: value.clone(), mod_revision: revision });
    let left = match &operation.call {
        Call::Put(value) => pair(value),
        Call::Swap { expected, value } if expected.holds(state) => pair(value),
        Call::Delete if state.is_some() => None,
        Call::Swap { .. } | Call::Delete | Call::Read => return false,
    };
    goes_on(history, newest, placed, left.as_ref(), revision)
}
