//! Patroni moves the role of the primary while instances are under load. Its configuration store is another Orlop, on
//! SQLite.

use std::env;

use super::{Failover, Load, seed};
use crate::support::{Backend, Patroni, Scope, Server, eventually, psql};

const NAMES: [&str; 3] = ["one", "two", "three"];
const SYNCHRONOUS: &str = ", synchronous_mode: true";
const STRICT: &str = ", synchronous_mode: true, synchronous_mode_strict: true";
/// Switchovers of the long form.
const SWITCHOVERS: usize = 10;

/// Waits until a node is a synchronous standby, and returns its number.
async fn synchronous_standby(nodes: &[Patroni]) -> usize {
    eventually("a synchronous standby", async || {
        for (number, node) in nodes.iter().enumerate() {
            if node.is("/synchronous").await {
                return Ok(number);
            }
        }
        Err(nodes[0].log())
    })
    .await
}

/// Three nodes, of which the first is the primary, with Postgres behind them.
struct Nodes {
    nodes: Vec<Patroni>,
    endpoint: String,
    /// The configuration store.
    _store: Server,
}

/// Starts a cluster with a database for the servers under test.
async fn start(dcs: &str) -> Option<Nodes> {
    if !Patroni::is_installed() {
        return None;
    }
    let store = Server::orlop(Backend::Sqlite).await?;
    let scope = Scope { etcd: store.endpoint(), login: "", dcs };
    let mut nodes = vec![Patroni::start(&scope, NAMES[0])];
    nodes[0].wait_for("/primary").await;
    nodes.extend(NAMES[1..].iter().map(|name| Patroni::start(&scope, name)));
    // In strict mode, the first write waits for a standby.
    synchronous_standby(&nodes).await;
    let primary = nodes[0].postgres_port();
    psql(primary, "postgres", "CREATE ROLE orlop LOGIN PASSWORD 'secret'");
    psql(primary, "postgres", "CREATE DATABASE orlop OWNER orlop");
    let hosts: Vec<String> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.postgres_port())).collect();
    let endpoint = format!("postgres://orlop:secret@{}/orlop?target_session_attrs=read-write", hosts.join(","));
    Some(Nodes { nodes, endpoint, _store: store })
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn switchover_of_patroni_loses_nothing() {
    let Some(Nodes { nodes, endpoint, _store }) = start(SYNCHRONOUS).await else { return };
    let mut load = Load::start(&endpoint, &["a", "b"], seed()).await;

    let times = if env::var_os("ORLOP_FAILOVER_LONG").is_some() { SWITCHOVERS } else { 1 };
    let (mut primary, mut switchovers) = (0, Vec::new());
    for _ in 0..times {
        let candidate = synchronous_standby(&nodes).await;
        load.wait_for_all_clients("the start").await;
        let began = load.workload.now();
        nodes[primary].switch_over(NAMES[primary], NAMES[candidate]);
        load.wait_for_all_clients("a switchover").await;
        switchovers.push(Failover { event: "switchover".to_owned(), began, ended: load.workload.now() });
        nodes[candidate].wait_for("/primary").await;
        primary = candidate;
    }
    load.finish("switchover of Patroni", &switchovers).await;
}

/// The machine of the primary dies, so nobody releases the key of the leader: it ends with its TTL of 20 s.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn patroni_replaces_a_dead_primary_without_loss() {
    let Some(Nodes { mut nodes, endpoint, _store }) = start(STRICT).await else { return };
    let mut load = Load::start(&endpoint, &["a", "b"], seed()).await;
    load.wait_for_all_clients("the start").await;
    let began = load.workload.now();
    nodes[0].crash();
    load.wait_for_all_clients("the death of the primary").await;
    let failover = Failover { event: "death of the primary".to_owned(), began, ended: load.workload.now() };
    load.finish("failover of Patroni", &[failover]).await;
}
