//! The short form of fuzzing: runs every target on its seeds and on pseudo-random mutations of them.
//! `ORLOP_FUZZ_SECS` is the minimum duration of each target.

use std::{
    fs,
    path::Path,
    time::{Duration, Instant},
};

use orlop_fuzz::{TARGETS, Target};

/// A generator of pseudo-random numbers with a fixed seed, so that a failure can be repeated.
struct Numbers(u64);

impl Numbers {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        let mixed = (self.0 >> 33) ^ self.0;
        mixed.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 16
    }

    fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.next() % end.max(1) as u64).expect("below a usize")
    }
}

/// Returns a seed with some bytes changed, removed, repeated, inserted, or copied from another seed.
fn mutated(seeds: &[Vec<u8>], numbers: &mut Numbers) -> Vec<u8> {
    let mut data = seeds[numbers.below(seeds.len())].clone();
    for _ in 0..=numbers.below(4) {
        let at = numbers.below(data.len() + 1);
        let len = numbers.below(8).min(data.len() - at);
        match numbers.below(6) {
            0 if at < data.len() => data[at] ^= 1 << numbers.below(8),
            1 if at < data.len() => data[at] = [0, 1, 0x7f, 0x80, 0xff][numbers.below(5)],
            2 => drop(data.drain(at..at + len)),
            3 => {
                let copy = data[at..at + len].to_vec();
                data.splice(at..at, copy);
            }
            4 => {
                let other = &seeds[numbers.below(seeds.len())];
                data.truncate(at);
                data.extend_from_slice(&other[numbers.below(other.len() + 1).min(other.len())..]);
            }
            _ => data.insert(at, numbers.below(256) as u8),
        }
    }
    data
}

fn check_target(name: &str, mutations: usize) {
    let target = TARGETS.iter().find(|target| target.name == name);
    let Target { run, seeds, .. } = target.expect("a target with this name exists");
    let seeds = seeds();
    assert!(!seeds.is_empty());
    seeds.iter().for_each(|seed| run(seed));
    let mut numbers = Numbers(7);
    let secs_min: u64 = std::env::var("ORLOP_FUZZ_SECS").ok().and_then(|text| text.parse().ok()).unwrap_or(0);
    let until = Instant::now() + Duration::from_secs(secs_min);
    let mut number = 0;
    while number < mutations || Instant::now() < until {
        number += 1;
        let data = mutated(&seeds, &mut numbers);
        if std::panic::catch_unwind(|| run(&data)).is_err() {
            panic!("{name}, mutation {number}: \"{}\"", data.escape_ascii());
        }
    }
    println!("{name}: {} seeds, {number} mutations", seeds.len());
}

#[test]
fn arbitrary_requests_are_decoded_and_checked() {
    check_target("requests", 20_000);
}

#[test]
fn arbitrary_transactions_are_checked_and_evaluated() {
    check_target("txn", 20_000);
}

#[test]
fn gateway_converts_arbitrary_messages() {
    check_target("gateway", 20_000);
}

#[test]
fn changed_tokens_identify_nobody_else() {
    check_target("token", 20_000);
}

#[test]
fn arbitrary_settings_are_read_or_refused() {
    check_target("settings", 10_000);
}

#[test]
fn error_of_a_damaged_snapshot_names_the_file() {
    check_target("snapshot", 300);
}

#[test]
fn arbitrary_values_are_shown_within_bounds() {
    check_target("objects", 20_000);
}

#[test]
#[ignore = "writes the initial corpus of the fuzzers"]
fn seeds_are_written_for_the_fuzzers() {
    for Target { name, seeds, .. } in TARGETS {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("corpus").join(name);
        fs::create_dir_all(&folder).expect("a folder for the seeds");
        for (number, seed) in seeds().into_iter().enumerate() {
            fs::write(folder.join(format!("seed-{number:03}")), seed).expect("a seed is written");
        }
    }
}
