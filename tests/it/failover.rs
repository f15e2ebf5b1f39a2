//! Failovers of Postgres under load: a primary and two standbys behind a URL with three hosts, and Patroni.
//!
//! The clients and the checks are those of the torture tests: every acknowledged write must exist, and no refused one.
//!
//! `ORLOP_FAILOVER_LONG` sets the number of failovers of the long form.

mod moved;
mod patroni;
mod standby;

use std::{collections::BTreeMap, sync::Arc, time::Duration};

use orlop_wire::proto::client::etcdserverpb::{LeaseGrantRequest, SnapshotRequest};
use tokio::time::{Instant, sleep};
use tonic::Code;

use crate::{
    foreign::{has_pooler, pooler},
    support::{
        self, Client, Cluster, Link, NetworkState, Postgres, Random, Replication, Server, database_name, env_number,
        eventually, get, put,
    },
    torture::{judge, report::Report, workload::Workload},
};

/// Maximum time until every client succeeds again after a failover.
const RECOVERY_TIME_MAX: Duration = Duration::from_secs(60);

/// What happens to the cluster. A promotion beside a primary that still answers is not among it: until an instance has
/// noticed it, its linearizable reads may be stale (see `promotion_beside_a_running_primary_is_noticed`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Event {
    /// The primary is killed, and a standby is promoted. The former primary becomes a standby by pg_rewind.
    Kill,
    /// As before, but the former primary is started as a primary first.
    KillAndReturn,
    /// The primary is stopped, and a standby is promoted. The former primary becomes a standby.
    Switchover,
    /// The primary answers nobody any more, and a standby is promoted.
    Silence,
    /// As before, but the promotion comes only after the instances have noticed the outage, as that of Patroni.
    LongSilence,
    /// The network between the instances and the primary fails.
    CutFromInstances,
    /// The network between the primary and its standbys fails.
    CutFromStandbys,
    /// Both standbys are killed and started again.
    LoseStandbys,
}

const EVENTS: [Event; 8] = [
    Event::Kill,
    Event::KillAndReturn,
    Event::Switchover,
    Event::Silence,
    Event::LongSilence,
    Event::CutFromInstances,
    Event::CutFromStandbys,
    Event::LoseStandbys,
];

/// Instances and their clients.
struct Load {
    servers: Vec<Server>,
    workload: Workload,
}

impl Load {
    async fn start(endpoint: &str, names: &[&str], seed: u64) -> Self {
        let mut servers = Vec::new();
        for name in names {
            servers.push(Server::orlop_on(endpoint, &["--name", name]).await);
        }
        let endpoints: Vec<String> = servers.iter().map(|server| server.endpoint().to_owned()).collect();
        Self { servers, workload: Workload::start(&endpoints, seed) }
    }

    /// Waits until every client has a response to a request sent after this call.
    async fn wait_for_all_clients(&mut self, after: &str) {
        let since = self.workload.now();
        let deadline = Instant::now() + RECOVERY_TIME_MAX;
        while self.workload.recovered_since(since) < self.workload.clients() {
            for server in &mut self.servers {
                assert!(server.runs(), "after {after}, an instance ended; it logged:\n{}", server.log_tail());
            }
            assert!(
                Instant::now() < deadline,
                "after {after}, {} of {} clients succeed within {RECOVERY_TIME_MAX:?}; the log:\n{}",
                self.workload.recovered_since(since),
                self.workload.clients(),
                self.servers[0].log_tail()
            );
            sleep(Duration::from_millis(5)).await;
        }
    }

    fn log_lengths(&self) -> Vec<usize> {
        self.servers.iter().map(|server| server.log().len()).collect()
    }

    /// Waits until every instance has logged a text after the given ends of the logs.
    async fn wait_for_log(&self, logged: &[usize], text: &str) {
        for (server, logged) in self.servers.iter().zip(logged) {
            eventually("a message in the log", async || {
                if server.log()[*logged..].contains(text) { Ok(()) } else { Err(server.log_tail()) }
            })
            .await;
        }
    }

    /// Ends the clients and checks what they saw. Prints the longest pause of each client in each failover.
    async fn finish(mut self, what: &str, failovers: &[Failover]) {
        let endpoints = Arc::clone(self.workload.endpoints());
        let seen = self.workload.finish().await;
        let mut waits: Vec<Duration> = Vec::new();
        let mut by_event: BTreeMap<&str, (usize, Vec<Duration>)> = BTreeMap::new();
        for failover in failovers {
            let pauses = seen.pauses(failover.began, failover.ended);
            waits.extend(&pauses);
            let (count, all) = by_event.entry(&failover.event).or_default();
            *count += 1;
            all.extend(pauses);
        }
        let judged = judge::judge(seen, &endpoints).await;
        for server in &mut self.servers {
            assert!(!server.log().contains("panicked"), "{}", server.log());
            server.terminate().await;
        }
        judge::check_store(&self.servers[0]);
        for (event, (count, mut pauses)) in by_event {
            pauses.sort_unstable();
            let [median, longest] = [pauses.len() / 2, pauses.len() - 1].map(|at| pauses[at]);
            println!("{event}: {count} times, clients paused {median:.1?}, at most {longest:.1?}");
        }
        Report { fault: what, target: "Postgres", times: failovers.len(), judged, waits }.publish();
    }
}

/// A failover, with the times on the clients' clock at which it began, and at which all clients had succeeded again.
struct Failover {
    event: String,
    began: u64,
    ended: u64,
}

/// A cluster, and the load on it.
struct Setting {
    // An instance ends before its database.
    load: Load,
    endpoint: String,
    cluster: Cluster,
}

impl Setting {
    async fn start(replication: Replication, seed: u64) -> Option<Self> {
        let cluster = Cluster::start(replication).await?;
        let endpoint = cluster.create_database();
        let load = Load::start(&endpoint, &["a", "b"], seed).await;
        Some(Self { load, endpoint, cluster })
    }

    /// Lets the event happen. Returns the time at which it began, and the former primary if it is not a standby yet.
    async fn inject(&mut self, event: Event) -> (u64, Option<usize>) {
        let cluster = &self.cluster;
        let primary = cluster.primary();
        let mut since = self.load.workload.now();
        let former = match event {
            Event::Kill | Event::KillAndReturn => {
                primary.postgres.crash();
                Some(cluster.promote(cluster.best_standby()))
            }
            Event::Switchover => {
                primary.postgres.shut_down();
                Some(cluster.promote(cluster.best_standby()))
            }
            Event::Silence | Event::LongSilence => {
                let logged = self.load.log_lengths();
                primary.link.set_network(NetworkState::Silent);
                primary.replication.set_network(NetworkState::Silent);
                if event == Event::LongSilence {
                    self.load.wait_for_log(&logged, "cannot send the heartbeat of this member").await;
                    since = self.load.workload.now();
                }
                Some(cluster.promote(cluster.best_standby()))
            }
            Event::CutFromInstances => {
                let logged = self.load.log_lengths();
                primary.link.set_network(NetworkState::Down);
                primary.link.reset();
                self.load.wait_for_log(&logged, "is a primary").await;
                self.cluster.primary().link.set_network(NetworkState::Normal);
                None
            }
            Event::CutFromStandbys => {
                primary.replication.set_network(NetworkState::Silent);
                self.wait_for_waiting_commit().await;
                self.cluster.primary().replication.set_network(NetworkState::Normal);
                None
            }
            Event::LoseStandbys => {
                let standbys: Vec<usize> =
                    (0..cluster.nodes().len()).filter(|number| *number != cluster.primary_number()).collect();
                standbys.iter().for_each(|number| cluster.nodes()[*number].postgres.crash());
                self.wait_for_waiting_commit().await;
                for number in standbys {
                    self.cluster.nodes()[number].postgres.start_again().await;
                }
                None
            }
        };
        (since, former)
    }

    /// Waits until a commit waits for a standby.
    async fn wait_for_waiting_commit(&self) {
        let waiting = "SELECT count(*) FROM pg_stat_activity WHERE wait_event = 'SyncRep'";
        eventually("a commit that waits for a standby", async || {
            let found = self.cluster.primary().postgres.psql("postgres", waiting);
            if found == "0" { Err(found) } else { Ok(()) }
        })
        .await;
    }

    /// Returns the last revision in the database of a server.
    fn head(&self, number: usize) -> String {
        let database = database_name(&self.endpoint);
        self.cluster.nodes()[number].postgres.psql(database, &format!("SELECT max(id) FROM {database}.kv_log"))
    }

    /// Checks that a former primary that accepts writes receives none, although the instances have to connect anew, and
    /// another one starts.
    async fn check_is_avoided(&mut self, former: usize, event: Event) {
        let (before, logged) = (self.head(former), self.load.log_lengths());
        let primary = self.cluster.primary();
        primary.link.set_network(NetworkState::Down);
        primary.link.reset();
        self.load.wait_for_log(&logged, "is a former primary").await;
        self.cluster.primary().link.set_network(NetworkState::Normal);
        self.load.wait_for_all_clients(&format!("{event:?} with the former primary back")).await;
        let newcomer = Server::orlop_on(&self.endpoint, &["--name", "newcomer"]).await;
        eventually("a write by a new instance", async || {
            Client::connect(newcomer.endpoint()).await.kv.put(put("newcomer", "1")).await
        })
        .await;
        assert_eq!(self.head(former), before, "the former primary receives no rows");
    }

    /// Makes the former primary a standby.
    async fn recover(&mut self, former: usize, event: Event) {
        let node = &self.cluster.nodes()[former];
        if event == Event::KillAndReturn {
            node.postgres.start_again().await;
            self.check_is_avoided(former, event).await;
        }
        let node = &self.cluster.nodes()[former];
        for link in [&node.link, &node.replication] {
            link.set_network(NetworkState::Normal);
            link.reset();
        }
        if node.postgres.runs() {
            node.postgres.stop();
        }
        self.cluster.rejoin(former).await;
    }
}

/// Returns the seed of a test, and prints it.
fn seed() -> u64 {
    let seed = support::seed();
    println!("seed {seed}");
    seed
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn acknowledged_write_survives_every_failover() {
    let seed = seed();
    let Some(mut setting) = Setting::start(Replication::Synchronous, seed).await else { return };
    let mut failovers = Vec::new();
    for (number, event) in (1..).zip(events(seed)) {
        setting.load.wait_for_all_clients("the start").await;
        let started = Instant::now();
        let (since, former) = setting.inject(event).await;
        let injected_after = started.elapsed();
        setting.load.wait_for_all_clients(&format!("{event:?}")).await;
        let recovered_after = started.elapsed();
        println!("{number}: {event:?} takes {injected_after:.1?}, all clients succeed after {recovered_after:.1?}");
        let ended = setting.load.workload.now();
        failovers.push(Failover { event: format!("{event:?}"), began: since, ended });
        if let Some(former) = former {
            setting.recover(former, event).await;
        }
        setting.cluster.wait_for_standbys(2).await;
    }
    setting.load.finish("failovers", &failovers).await;
}

/// Returns each event once, or a random sequence in the long form.
fn events(seed: u64) -> Vec<Event> {
    let Some(count) = env_number::<usize>("ORLOP_FAILOVER_LONG") else { return EVENTS.to_vec() };
    let mut random = Random::new(seed);
    (0..count).map(|_| EVENTS[random.weighted(&[6, 5, 5, 2, 1, 1, 1, 1])]).collect()
}

/// What becomes of the primary when a standby is promoted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    Killed,
    /// It runs, and the instance is connected to it.
    LeftRunning,
    /// As before, and the instance knows only an address that then leads to the standby.
    AddressMoved,
}

/// A change that a failover loses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lost {
    Put,
    /// It adds no row to the log.
    Lease,
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asynchronous_failover_that_lost_a_write_stops_the_instance() {
    lose_a_write(Lost::Put, Fate::Killed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn asynchronous_failover_that_lost_a_lease_stops_the_instance() {
    lose_a_write(Lost::Lease, Fate::Killed).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promotion_beside_a_running_primary_is_noticed() {
    lose_a_write(Lost::Put, Fate::LeftRunning).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn promotion_behind_a_single_address_is_noticed() {
    lose_a_write(Lost::Put, Fate::AddressMoved).await;
}

async fn lose_a_write(lost: Lost, fate: Fate) {
    let Some(cluster) = Cluster::start(Replication::Asynchronous).await else { return };
    let port = cluster.primary().postgres.port();
    let address = Link::to(port).await;
    let endpoint = match fate {
        Fate::Killed | Fate::LeftRunning => cluster.create_database(),
        Fate::AddressMoved => address.endpoint(&cluster.primary().postgres.create_database()),
    };
    let mut server = Server::orlop_on(&endpoint, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("k", "kept").await;
    let database = database_name(&endpoint);
    let head = format!("SELECT max(id) FROM {database}.kv_log");
    for node in &cluster.nodes()[1..] {
        eventually("the write on a standby", async || {
            let found = node.postgres.psql(database, &head);
            if found == "2" { Ok(()) } else { Err(found) }
        })
        .await;
    }
    cluster.primary().replication.set_network(NetworkState::Silent);
    let message = match lost {
        Lost::Put => {
            client.put("k", "lost").await;
            "this instance had revision 3, the database ends at revision 2"
        }
        Lost::Lease => {
            client.lease.lease_grant(LeaseGrantRequest { ttl: 60, id: 7 }).await.expect("a lease");
            "the database lost changes of leases"
        }
    };
    if fate == Fate::Killed {
        cluster.primary().postgres.crash();
    }
    cluster.promote(cluster.best_standby());
    address.set_target(cluster.primary().postgres.port());
    assert!(!server.ended().await.success());
    let log = server.log_tail();
    assert!(log.contains(message), "{log}");

    server.restart().await;
    let mut client = Client::connect(server.endpoint()).await;
    let found = client.kv.range(get("k")).await.expect("a range");
    assert_eq!(&found.into_inner().kvs[0].value[..], b"kept");
}

/// Nothing closes the connection that waits for rows.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn snapshot_ends_when_its_primary_is_replaced() {
    let Some(cluster) = Cluster::start(Replication::Synchronous).await else { return };
    let server = Server::orlop_on(&cluster.create_database(), &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    let mut random = Random::new(seed());
    for number in 0..300 {
        let value: Vec<u8> = (0..12_500).flat_map(|_| random.next().to_be_bytes()).collect();
        client.put(number.to_string(), value).await;
    }
    let mut snapshot = client.maintenance.snapshot(SnapshotRequest {}).await.expect("a stream").into_inner();
    assert!(snapshot.message().await.expect("a part").is_some());
    cluster.primary().link.set_network(NetworkState::Silent);
    // It reads all the time, because the server gives up a client that does not.
    let rest = tokio::spawn(async move {
        while snapshot.message().await?.is_some() {}
        Ok::<_, tonic::Status>(())
    });
    cluster.promote(cluster.best_standby());
    let ended = tokio::time::timeout(RECOVERY_TIME_MAX / 2, rest).await.expect("the snapshot ends");
    let error = ended.expect("no panic").expect_err("its primary is gone");
    assert_eq!(error.code(), Code::Internal, "{error:?}");
    assert!(error.message().starts_with("orlop: a snapshot cannot be taken: "), "{error:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn server_of_another_cluster_is_refused() {
    let Some(postgres) = Postgres::start().await else { return };
    let Some(other) = Postgres::start().await else { return };
    let address = Link::to(postgres.port()).await;
    let endpoint = postgres.create_database();
    assert_eq!(database_name(&other.create_database()), database_name(&endpoint), "the same role and database exist");
    let endpoint = address.endpoint(&endpoint);
    let server = Server::orlop_on(&endpoint, &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("k", "1").await;

    address.set_target(other.port());
    address.reset();
    eventually("the refusal", async || {
        let log = server.log();
        if log.contains("belongs to another database cluster") { Ok(()) } else { Err(log) }
    })
    .await;
    address.set_target(postgres.port());
    address.reset();
    eventually("a write after the address is right again", async || client.clone().kv.put(put("k", "1")).await).await;
}

/// A commit waits for a standby on the server; the client must not take it for done.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn write_that_no_standby_has_is_not_acknowledged() {
    let Some(cluster) = Cluster::start(Replication::Synchronous).await else { return };
    let server = Server::orlop_on(&cluster.create_database(), &[]).await;
    let mut client = Client::connect(server.endpoint()).await;
    client.put("before", "1").await;
    let standbys = &cluster.nodes()[1..];
    standbys.iter().for_each(|node| node.postgres.crash());
    for (key, text) in [("first", "etcdserver: request timed out"), ("second", "etcdserver: no leader")] {
        let refused = client.kv.put(put(key, "1")).await.expect_err("no standby has it");
        assert_eq!((refused.code(), refused.message()), (Code::Unavailable, text), "{key}");
    }
    let found = client.kv.range(get("before")).await.expect("a read does not wait for a standby");
    assert_eq!(found.into_inner().count, 1);

    standbys[0].postgres.start_again().await;
    eventually("a write after a standby is back", async || client.clone().kv.put(put("after", "1")).await).await;
    for (key, count) in [("first", 1), ("second", 0), ("after", 1)] {
        let found = client.kv.range(get(key)).await.expect("a range");
        assert_eq!(found.into_inner().count, count, "{key}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn failover_behind_a_pooler_needs_nobody() {
    if !has_pooler() {
        return;
    }
    let Some(cluster) = Cluster::start(Replication::Synchronous).await else { return };
    // The address that leads to the current primary.
    let address = Link::to(cluster.primary().postgres.port()).await;
    let database = cluster.primary().postgres.create_database();
    let port = cluster.primary().postgres.port();
    let database = database.replace(&format!(":{port}/"), &format!(":{}/", address.port()));
    let home = tempfile::tempdir().expect("a folder");
    let (_pooler, endpoint) = pooler(home.path(), address.port(), &database, "session").await;
    let load = Load::start(&endpoint, &["a"], seed()).await;
    let mut setting = Setting { load, endpoint, cluster };
    setting.load.wait_for_all_clients("the start").await;
    let (since, former) = setting.inject(Event::Kill).await;
    address.set_target(setting.cluster.primary().postgres.port());
    address.reset();
    setting.load.wait_for_all_clients("a failover behind a pooler").await;
    assert_eq!(former, Some(0));
    let ended = setting.load.workload.now();
    let failover = Failover { event: "Kill behind PgBouncer".to_owned(), began: since, ended };
    setting.load.finish("failover behind PgBouncer", &[failover]).await;
}
