//! Counts the instructions of the store's pure code (index, evaluation, encoding, search of watchers) with valgrind's
//! callgrind. The count is the same in every run, so CI can fail when an operation becomes twice as expensive. Run with
//! `just instructions`.
//!
//! The benchmarks are built with the profile of the tests, in which `orlop-core` is optimized and the server is not.
//! Each limit is at most twice the count at the time at which the limit was set. To accept a deliberate increase, set a new
//! limit and state the reason.

mod inputs;

use std::hint::black_box;

use gungraun::{Callgrind, EventKind, LibraryBenchmarkConfig, library_benchmark, library_benchmark_group, main};
use inputs::{Answer, Index, Transactions, Watchers};
use orlop_core::types::{Change, Key};

const KEYS: usize = 100_000;
const CALLS: usize = 1_000;

fn at_most(instructions: u64) -> LibraryBenchmarkConfig {
    let mut config = LibraryBenchmarkConfig::default();
    config.tool(Callgrind::default().hard_limits([(EventKind::Ir, instructions)]));
    config
}

fn index_and_puts() -> (Index, Vec<Change>) {
    let index = Index::new(KEYS);
    let puts = index.puts(CALLS);
    (index, puts)
}

fn index_and_keys() -> (Index, Vec<Key>) {
    let index = Index::new(KEYS);
    let keys = index.wanted(CALLS);
    (index, keys)
}

fn index_of_two_versions() -> Index {
    let mut index = Index::new(KEYS);
    let puts = index.puts(KEYS);
    index.apply(&puts);
    index
}

fn watchers_and_keys() -> (Watchers, Vec<Key>) {
    let watchers = Watchers::new(10_000);
    let keys = watchers.changed(CALLS);
    (watchers, keys)
}

// The benchmarks return their inputs and results, so that dropping them is not counted.

#[library_benchmark(config = at_most(3_100_000))]
#[bench::of_100_000(setup = index_and_puts)]
fn put((mut index, puts): (Index, Vec<Change>)) -> (Index, Vec<Change>) {
    index.apply(black_box(&puts));
    (index, puts)
}

#[library_benchmark(config = at_most(2_450_000))]
#[bench::of_100_000(setup = index_and_keys)]
fn get((index, keys): (Index, Vec<Key>)) -> (usize, Index, Vec<Key>) {
    (index.get(black_box(&keys)), index, keys)
}

#[library_benchmark(config = at_most(5_700_000))]
#[bench::of_10_000(args = (KEYS), setup = Index::new)]
fn range(index: Index) -> (usize, Index) {
    (index.range(black_box(10)), index)
}

#[library_benchmark(config = at_most(160_000_000))]
#[bench::of_100_000(setup = index_of_two_versions)]
fn compact(mut index: Index) -> (usize, Index) {
    (index.compact(), index)
}

#[library_benchmark(config = at_most(16_000_000))]
#[bench::compare_and_put(args = (KEYS, CALLS), setup = Transactions::new)]
fn evaluate(transactions: Transactions) -> (usize, Transactions) {
    (black_box(&transactions).evaluate(), transactions)
}

#[library_benchmark(config = at_most(1_100_000))]
#[bench::list_of_500(args = (500, 1024), setup = Answer::new)]
fn encode(answer: Answer) -> bool {
    black_box(answer).encode()
}

// The search is generic, so it is compiled here, where it is not optimized.
#[library_benchmark(config = at_most(8_000_000))]
#[bench::of_10_000(setup = watchers_and_keys)]
fn find_watchers((watchers, keys): (Watchers, Vec<Key>)) -> (usize, Watchers, Vec<Key>) {
    (watchers.visit(black_box(&keys)), watchers, keys)
}

library_benchmark_group!(name = cores, benchmarks = [put, get, range, compact, evaluate, encode, find_watchers]);
main!(library_benchmark_groups = cores);
