//! Measures the time of the same code as `instructions.rs`, at the size of a large cluster, and prints it as the rows of
//! a table: `just bench-cores`.

mod inputs;

use std::{
    hint::black_box,
    time::{Duration, Instant},
};

use inputs::{Answer, Index, Transactions, Watchers};

const KEYS: usize = 1_000_000;
const CALLS: u32 = 1_000;
/// Number of times that an operation is measured.
const RUNS: usize = 10;

fn main() {
    let calls = CALLS as usize;
    let index = Index::new(KEYS);
    let (puts, wanted) = (index.puts(calls), index.wanted(calls));
    measure("look up a key among 1,000,000", CALLS, || (), |()| index.get(&wanted));
    measure("put a key among 1,000,000, cold caches", CALLS, || index.clone(), |index| index.apply(&puts));
    measure("walk 10,000 keys", 1, || (), |()| index.range(10));
    let mut twice = index.clone();
    twice.apply(&index.puts(KEYS));
    measure("compact 1,000,000 keys with two versions each", 1, || twice.clone(), Index::compact);
    let transactions = Transactions::new(KEYS, calls);
    measure("evaluate a compare and a put", CALLS, || (), |()| transactions.evaluate());
    let answer = Answer::new(500, 1024);
    let encode = |answers: &mut Vec<Answer>| answers.drain(..).all(Answer::encode);
    measure("encode a list of 500 x 1 KiB", CALLS, || vec![answer.clone(); calls], encode);
    let watchers = Watchers::new(10_000);
    let changed = watchers.changed(calls);
    measure("find the watchers of a key among 10,000", CALLS, || (), |()| watchers.visit(&changed));
}

/// Prints the median time of an operation, which each run repeats `count` times. Making and dropping a run's input is not
/// measured.
fn measure<I, O>(operation: &str, count: u32, input: impl Fn() -> I, run: impl Fn(&mut I) -> O) {
    let time = || {
        let mut input = input();
        let began = Instant::now();
        black_box(run(black_box(&mut input)));
        began.elapsed()
    };
    let mut times: Vec<Duration> = (0..RUNS).map(|_| time()).collect();
    times.sort_unstable();
    println!("| {operation} | {:.1?} |", times[RUNS / 2] / count);
}
