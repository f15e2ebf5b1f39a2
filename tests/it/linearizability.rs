//! Linearizability of several instances on one database while components fail.
//!
//! Clients on three instances put, swap, read and delete a few keys, and watches on all instances receive the events.
//! Meanwhile instances are killed, terminated, paused and restarted, and Postgres is stopped in immediate mode and
//! started again. Then
//! [`checker`] checks the history of responses, and [`watcher`] checks what the watches received.
//!
//! The long form with failovers has a synchronously replicated Postgres, whose primary is killed and replaced by a
//! standby. It runs if `ORLOP_LINEAR_FAILOVERS` is set.
//!
//! `ORLOP_LINEAR_SECS` sets the duration of the run in seconds, `ORLOP_SEED` repeats its choices (not its timing).

mod checker;
pub mod connection;
pub mod watcher;
pub mod workload;

use std::{
    env,
    sync::{Arc, Mutex},
    time::Duration,
};

use tokio::{
    sync::watch,
    time::{Instant, sleep},
};

use self::{connection::Endpoints, watcher::Watcher};
use crate::support::{Cluster, Postgres, Random, Replication, Server, env_number, seed};

const INSTANCES: usize = 3;
const CLIENTS: usize = 9;
/// Time after which the clients change to new keys. It keeps the history of each key short enough for the checker.
const KEYS_CHANGE: Duration = Duration::from_secs(4);
/// Minimum time between two restarts of Postgres, each of which takes some seconds.
const POSTGRES_RESTART_INTERVAL: Duration = Duration::from_secs(12);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_is_linearizable_under_faults() {
    let Some(postgres) = Postgres::start().await else { return };
    check(&postgres.create_database(), &Database::Alone(&postgres)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn history_is_linearizable_under_failovers() {
    if env::var_os("ORLOP_LINEAR_FAILOVERS").is_none() {
        return println!("skipped: ORLOP_LINEAR_FAILOVERS is not set");
    }
    let Some(cluster) = Cluster::start(Replication::Synchronous).await else { return };
    check(&cluster.create_database(), &Database::Replicated(&cluster)).await;
}

/// The database of a run.
enum Database<'a> {
    Alone(&'a Postgres),
    Replicated(&'a Cluster),
}

impl Database<'_> {
    /// Restarts Postgres, or lets it fail over.
    async fn disturb(&self, random: &mut Random) {
        match self {
            Self::Alone(postgres) => {
                postgres.stop();
                sleep(Duration::from_millis(random.next() % 1_000)).await;
                postgres.start_again().await;
            }
            Self::Replicated(cluster) => {
                cluster.primary().postgres.crash();
                let former = cluster.promote(cluster.best_standby());
                sleep(Duration::from_millis(random.next() % 1_000)).await;
                cluster.rejoin(former).await;
                cluster.wait_for_standbys(2).await;
            }
        }
    }
}

async fn check(datastore: &str, database: &Database<'_>) {
    let secs: u64 = env_number("ORLOP_LINEAR_SECS").unwrap_or(if env::var_os("CI").is_some() { 300 } else { 20 });
    let seed = seed();
    println!("seed {seed}, {secs} seconds");
    let mut servers = Vec::new();
    for name in ["a", "b", "c"] {
        servers.push(Server::orlop_on(datastore, &["--name", name]).await);
    }
    let endpoints: Endpoints = Arc::new(Mutex::new(servers.iter().map(|it| it.endpoint().to_owned()).collect()));

    let (stop, stopped) = watch::channel(false);
    let (end, ends) = watch::channel(None);
    let started = Instant::now();
    let clients: Vec<_> = (0..CLIENTS)
        .map(|client| {
            let random = Random::new(seed ^ (client as u64 + 1) << 32);
            let run = workload::Client::new(client, Arc::clone(&endpoints), started, random);
            tokio::spawn(run.run(stopped.clone()))
        })
        .collect();
    let watchers: Vec<_> = (0..INSTANCES)
        .map(|instance| tokio::spawn(Watcher::new(instance, Arc::clone(&endpoints)).run(ends.clone())))
        .collect();

    let faults = inject_faults(database, &mut servers, &endpoints, Duration::from_secs(secs), Random::new(seed)).await;
    stop.send_replace(true);
    let mut history = Vec::new();
    for client in clients {
        history.extend(client.await.expect("a client ends"));
    }
    let head = workload::head(&endpoints).await;
    end.send_replace(Some(head));
    let log = watcher::read_all(&endpoints, head).await;
    for watcher in watchers {
        watcher.await.expect("a watch keeps its guarantees").check(&log, head);
    }
    let checked = workload::check(history, &log).unwrap_or_else(|wrong| panic!("seed {seed}: {wrong}"));
    println!("{faults:?}: {checked:?}");
    assert!(checked.acknowledged > secs as usize * 20, "enough writes are acknowledged: {checked:?}");
}

/// Numbers of injected faults.
#[derive(Debug, Default)]
struct Faults {
    killed: usize,
    terminated: usize,
    paused: usize,
    postgres_restarted: usize,
}

/// Injects a fault from time to time. All components run again when this function returns.
async fn inject_faults(
    database: &Database<'_>,
    servers: &mut [Server],
    endpoints: &Endpoints,
    duration: Duration,
    mut random: Random,
) -> Faults {
    let mut faults = Faults::default();
    let (started, mut postgres_restarted) = (Instant::now(), Instant::now());
    while started.elapsed() < duration {
        sleep(Duration::from_millis(random.next() % 1_500)).await;
        let victim = random.below(servers.len());
        match random.weighted(&[3, 1, 3, 2]) {
            0 => {
                faults.killed += 1;
                servers[victim].restart().await;
            }
            1 => {
                faults.terminated += 1;
                servers[victim].terminate().await;
                servers[victim].restart().await;
            }
            2 => {
                faults.paused += 1;
                servers[victim].pause();
                sleep(Duration::from_millis(random.next() % 3_500)).await;
                servers[victim].resume();
            }
            _ if postgres_restarted.elapsed() > POSTGRES_RESTART_INTERVAL => {
                faults.postgres_restarted += 1;
                database.disturb(&mut random).await;
                postgres_restarted = Instant::now();
            }
            _ => {}
        }
        let current: Vec<String> = servers.iter().map(|server| server.endpoint().to_owned()).collect();
        *endpoints.lock().expect("the lock is not poisoned") = current;
    }
    faults
}
