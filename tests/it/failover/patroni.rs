//! Patroni moves the role of the primary while instances are under load. Its configuration store is another Orlop, on
//! SQLite.

use std::{env, process::Command};

use super::{Failover, Load, seed};
use crate::support::{Backend, Patroni, Postgres, Scope, Server, eventually};

const NAMES: [&str; 3] = ["one", "two", "three"];
const SYNCHRONOUS: &str = ", synchronous_mode: true";
/// Switchovers of the long form.
const SWITCHOVERS: usize = 10;

/// Runs SQL as the superuser.
fn psql(node: &Patroni, database: &str, sql: &str) {
    let programs = Postgres::programs().expect("Postgres is installed");
    let output = Command::new(programs.join("psql"))
        .args(["-h", "127.0.0.1", "-p", &node.postgres_port().to_string(), "-U", "postgres", "-d", database])
        .args(["-X", "-q", "-v", "ON_ERROR_STOP=1", "-c", sql])
        .env("PGPASSWORD", "x")
        .output()
        .expect("psql can be started");
    assert!(output.status.success(), "{sql}: {}", String::from_utf8_lossy(&output.stderr));
}

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

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn switchover_of_patroni_loses_nothing() {
    if !Patroni::is_installed() {
        return;
    }
    let Some(store) = Server::orlop(Backend::Sqlite).await else { return };
    let scope = Scope { etcd: store.endpoint(), login: "", dcs: SYNCHRONOUS };
    let mut nodes = vec![Patroni::start(&scope, NAMES[0])];
    nodes[0].wait_for("/primary").await;
    nodes.extend(NAMES[1..].iter().map(|name| Patroni::start(&scope, name)));
    psql(&nodes[0], "postgres", "CREATE ROLE orlop LOGIN PASSWORD 'secret'");
    psql(&nodes[0], "postgres", "CREATE DATABASE orlop OWNER orlop");
    let hosts: Vec<String> = nodes.iter().map(|node| format!("127.0.0.1:{}", node.postgres_port())).collect();
    let endpoint = format!("postgres://orlop:secret@{}/orlop?target_session_attrs=read-write", hosts.join(","));
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
