//! Real faults in real processes: kill -9, power cuts, failing networks and disks, clock jumps and exhausted limits
//! under load.
//!
//! [`faults`] is the table of faults. Each fault is injected repeatedly while [`workload`] writes and reads. After each
//! injection every client must succeed again. At the end [`judge`] checks that every acknowledged write exists and that
//! no refused write does. [`report`] prints the times that clients waited.
//!
//! `ORLOP_TORTURE` sets the number of injections of a frequent fault, and adds the tests on etcd, whose figures are
//! compared with Orlop's. Without this variable, each fault is injected a few times, and not into etcd.
//! `ORLOP_TORTURE_REPORT` names a file for the figures, `ORLOP_SEED` repeats the choices (not their timing).

mod faults;
pub mod judge;
pub mod preload;
pub mod report;
mod rig;
mod strike;
pub mod workload;

use std::{sync::Arc, time::Duration};

use tokio::time::sleep;

use self::{
    faults::{FAULTS, NO_MEMORY_FOR_A_THREAD, OFTEN},
    report::Report,
    rig::{Rig, Target},
    workload::Workload,
};
use crate::support::{Random, env_number, seed};

/// Default number of injections of a frequent fault and of a rare one.
const TIMES: [usize; 2] = [4, 1];

/// A longer wait is printed with the time of the injection, because most faults end sooner.
const REMARKABLE_WAIT: Duration = Duration::from_secs(5);

/// Injects the named fault repeatedly and checks the outcomes.
async fn torture(name: &str, target: Target) {
    let Some(fault) = FAULTS.iter().find(|fault| fault.name == name) else { panic!("{name} is not in the table") };
    let times = match env_number::<usize>("ORLOP_TORTURE") {
        Some(often) => (often * fault.per_thousand).div_ceil(1_000).max(1),
        None if target == Target::Etcd => return println!("skipped: etcd is tested only if ORLOP_TORTURE is set"),
        None => TIMES[usize::from(fault.per_thousand < OFTEN)],
    };
    let seed = seed();
    println!("{name} on {}, seed {seed}", target.name());
    let mut random = Random::new(seed);
    let Some(mut rig) = Rig::build(fault, target).await else { return };
    let workload = Workload::start(&rig.endpoints(), seed);
    let mut injected_at = Vec::new();
    for _ in 0..times {
        rig.wait_for_all_clients(&workload).await;
        // A random delay, so that the injections occur in different states.
        sleep(Duration::from_millis(random.next() % 100)).await;
        injected_at.push(strike::strike(fault.kind, &mut rig, &workload, &mut random).await);
        rig.wait_for_all_clients(&workload).await;
    }
    let endpoints = Arc::clone(workload.endpoints());
    let seen = workload.finish().await;
    let mut waits = Vec::new();
    for (injection, since) in injected_at.into_iter().enumerate() {
        let waited = seen.waits(since);
        if waited.iter().any(|wait| *wait > REMARKABLE_WAIT) {
            println!("after injection {injection}, at {:.3} s, clients waited {waited:.1?}", since as f64 / 1e9);
        }
        waits.extend(waited);
    }
    let judged = judge::judge(seen, &endpoints).await;
    if target != Target::Etcd {
        let log: String = rig.servers.iter().map(|server| server.log()).collect();
        let is_logged = fault.log_texts.is_empty() || fault.log_texts.iter().any(|text| log.contains(text));
        assert!(is_logged, "the log contains none of {:?}:\n{}", fault.log_texts, rig.servers[0].log_tail());
        // A panic is expected only if it has this text and if the fault causes it.
        let is_expected =
            |line: &str| line.contains(NO_MEMORY_FOR_A_THREAD) && fault.log_texts.contains(&NO_MEMORY_FOR_A_THREAD);
        let panic = log.lines().find(|line| line.contains("panicked") && !is_expected(line));
        assert!(panic.is_none(), "{log}");
        for server in &mut rig.servers {
            server.terminate().await;
        }
        judge::check_store(&rig.servers[0]);
    }
    Report { fault: fault.what, target: target.name(), times, judged, waits }.publish();
}

/// Makes one test for each fault and target.
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
