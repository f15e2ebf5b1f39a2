//! Measures the time of the same code as `instructions.rs`, at the size of a large cluster: `just bench-cores`.

mod inputs;

use criterion::{BatchSize, Criterion, Throughput, criterion_group, criterion_main};
use inputs::{Answer, Index, Transactions, Watchers};

const KEYS: usize = 1_000_000;
const CALLS: usize = 1_000;

fn index(criterion: &mut Criterion) {
    let index = Index::new(KEYS);
    let (puts, wanted) = (index.puts(CALLS), index.wanted(CALLS));
    let mut group = criterion.benchmark_group("index of 1,000,000 keys");
    group.throughput(Throughput::Elements(CALLS as u64));
    group.bench_function("get", |bench| bench.iter(|| index.get(&wanted)));
    // Each sample copies the index, which takes long but is not measured.
    group.sample_size(10);
    group.bench_function("put", |bench| {
        bench.iter_batched_ref(|| index.clone(), |index| index.apply(&puts), BatchSize::PerIteration);
    });
    group.throughput(Throughput::Elements(10_000));
    group.bench_function("range of 10,000", |bench| bench.iter(|| index.range(10)));
    let mut twice = index.clone();
    twice.apply(&index.puts(KEYS));
    group.throughput(Throughput::Elements(KEYS as u64));
    group.bench_function("compact", |bench| {
        bench.iter_batched_ref(|| twice.clone(), Index::compact, BatchSize::PerIteration);
    });
    group.finish();
}

fn transactions(criterion: &mut Criterion) {
    let transactions = Transactions::new(KEYS, CALLS);
    let mut group = criterion.benchmark_group("transactions");
    group.throughput(Throughput::Elements(CALLS as u64));
    group.bench_function("compare and put", |bench| bench.iter(|| transactions.evaluate()));
    group.finish();
}

fn answers(criterion: &mut Criterion) {
    let answer = Answer::new(500, 1024);
    let mut group = criterion.benchmark_group("answers");
    group.throughput(Throughput::Bytes(500 * 1024));
    group.bench_function("list of 500 x 1 KiB", |bench| {
        bench.iter_batched(|| answer.clone(), Answer::encode, BatchSize::SmallInput);
    });
    group.finish();
}

fn watchers(criterion: &mut Criterion) {
    let watchers = Watchers::new(10_000);
    let changed = watchers.changed(CALLS);
    let mut group = criterion.benchmark_group("10,000 watchers");
    group.throughput(Throughput::Elements(CALLS as u64));
    group.bench_function("of a key", |bench| bench.iter(|| watchers.visit(&changed)));
    group.finish();
}

criterion_group!(benches, index, transactions, answers, watchers);
criterion_main!(benches);
