//! Real faults on real processes: kill -9, power cuts, networks, disks, clocks and limits that fail under a load.
//!
//! [`faults`] is the table. Each fault is made again and again while [`workload`] writes and reads; after each every client
//! has to come through, and at the end [`judge`] looks whether all that was acknowledged is there and nothing that was
//! refused is. [`report`] says how long clients waited.
//!
//! `ORLOP_TORTURE` says how often the frequent ones are made; without it each is made once or twice, and etcd, whose
//! figures stand beside Orlop's, is left alone. `ORLOP_TORTURE_REPORT` names a file for the figures, `ORLOP_SEED` repeats
//! the choices (not their timing).

mod disk;
mod faults;
mod judge;
mod preload;
mod report;
mod rig;
mod workload;

use std::{
    env,
    hash::{BuildHasher as _, RandomState},
    sync::Arc,
    time::Duration,
};

use tokio::time::sleep;

use self::{
    faults::{FAULTS, NO_ROOM_FOR_A_THREAD, OFTEN},
    report::Report,
    rig::{Rig, Target},
    workload::Workload,
};
use crate::support::Random;

/// How often a fault is made where nothing is said, if it is a frequent one, and if it is not.
const TIMES: [usize; 2] = [4, 1];

/// A wait that is told with the time of its fault, as more than most faults last.
const REMARKABLE_WAIT: Duration = Duration::from_secs(5);

/// Makes the fault of that name.
async fn torture(name: &str, target: Target) {
    let Some(fault) = FAULTS.iter().find(|fault| fault.name == name) else { panic!("{name} is not in the table") };
    let times = match number("ORLOP_TORTURE") {
        Some(often) => (often * fault.per_thousand).div_ceil(1_000).max(1),
        None if target == Target::Etcd => return println!("skipped: etcd is tortured where ORLOP_TORTURE is set"),
        None => TIMES[usize::from(fault.per_thousand < OFTEN)],
    };
    let seed = number("ORLOP_SEED").map_or_else(|| RandomState::new().hash_one(()) >> 16, |seed| seed as u64);
    println!("{name} on {}, seed {seed}", target.name());
    let mut random = Random::new(seed);
    let Some(mut rig) = Rig::build(fault, target).await else { return };
    let workload = Workload::start(&rig.endpoints(), seed);
    let mut struck = Vec::new();
    for _ in 0..times {
        rig.all_through(&workload).await;
        // Each time at another point of what goes on.
        sleep(Duration::from_millis(random.next() % 100)).await;
        struck.push(faults::strike(fault.kind, &mut rig, &workload, &mut random).await);
        rig.all_through(&workload).await;
    }
    let endpoints = Arc::clone(workload.endpoints());
    let seen = workload.finish().await;
    let mut waits = Vec::new();
    for (strike, since) in struck.into_iter().enumerate() {
        let waited = seen.waits(since);
        if waited.iter().any(|wait| *wait > REMARKABLE_WAIT) {
            println!("after strike {strike}, at {:.3} s, clients waited {waited:.1?}", since as f64 / 1e9);
        }
        waits.extend(waited);
    }
    let judged = judge::judge(seen, &endpoints).await;
    if target != Target::Etcd {
        let log: String = rig.servers.iter().map(|server| server.log()).collect();
        let is_said = fault.says.is_empty() || fault.says.iter().any(|text| log.contains(text));
        assert!(is_said, "the log says none of {:?}:\n{}", fault.says, rig.servers[0].log_tail());
        // Only such a panic, where that is what the log should say.
        let is_meant = |line: &str| line.contains(NO_ROOM_FOR_A_THREAD) && fault.says.contains(&NO_ROOM_FOR_A_THREAD);
        let panic = log.lines().find(|line| line.contains("panicked") && !is_meant(line));
        assert!(panic.is_none(), "{log}");
        for server in &mut rig.servers {
            server.terminate().await;
        }
        judge::check_store(&rig.servers[0]);
    }
    Report { fault: fault.what, target: target.name(), times, judged, waits }.publish();
}

fn number(variable: &str) -> Option<usize> {
    let text = env::var(variable).ok()?;
    Some(text.parse().unwrap_or_else(|error| panic!("{variable} is `{text}`: {error}")))
}

/// Makes a test of each fault on each target.
macro_rules! on_targets {
    ($($module:ident, $target:ident: $($name:ident)+;)+) => {
        $(mod $module {
            $(#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
            async fn $name() {
                super::torture(stringify!($name), super::Target::$target).await;
            })+
        })+
    };
}

on_targets! {
    sqlite, Sqlite:
        kill power_cut client_reset client_cut client_silence client_delay pause disk_full no_space wal_write_fails
        database_write_fails wal_sync_fails database_sync_fails slow_sync clock_forward clock_back no_descriptors no_memory;
    postgres, Postgres:
        kill postgres_crash backend_kill client_reset client_cut client_silence client_delay database_reset database_cut
        database_silence database_delay pause_one_of_three disk_full clock_forward clock_back database_clock_forward
        database_clock_back no_descriptors no_memory;
    etcd, Etcd:
        kill client_reset client_cut client_silence client_delay pause disk_full no_descriptors;
}
