//! A Postgres primary with two standbys, which the tests promote, cut off and bring back.
//!
//! Each server is reached over two links: one for Orlop, and one for the servers that replicate from it.

use std::sync::atomic::{AtomicUsize, Ordering};

use super::{Link, Postgres, eventually};

/// Whether a commit waits for a standby.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Replication {
    Asynchronous,
    /// A commit waits until one of the standbys has it on its disk.
    Synchronous,
}

/// The settings of every server.
const SETTINGS: [&str; 4] =
    ["wal_log_hints = on", "wal_keep_size = '256MB'", "wal_retrieve_retry_interval = '100ms'", "max_wal_size = '1GB'"];

pub struct Cluster {
    nodes: Vec<Node>,
    primary: AtomicUsize,
}

pub struct Node {
    pub postgres: Postgres,
    /// The link over which Orlop reaches the server.
    pub link: Link,
    /// The link over which other servers replicate from this one.
    pub replication: Link,
}

impl Node {
    async fn of(postgres: Postgres) -> Self {
        let (link, replication) = (Link::to(postgres.port()).await, Link::to(postgres.port()).await);
        Self { postgres, link, replication }
    }
}

impl Cluster {
    /// Starts a primary and two standbys. Returns `None` if Postgres is not installed.
    pub async fn start(replication: Replication) -> Option<Self> {
        let primary = Postgres::start().await?;
        for setting in SETTINGS {
            primary.psql("postgres", &format!("ALTER SYSTEM SET {setting}"));
        }
        primary.stop();
        primary.start_again().await;
        let mut nodes = vec![Node::of(primary).await];
        for number in 1..=2 {
            let standby = Postgres::standby_of(&nodes[0].postgres, nodes[0].replication.port(), &name(number)).await;
            nodes.push(Node::of(standby).await);
        }
        let cluster = Self { nodes, primary: AtomicUsize::new(0) };
        cluster.wait_for_standbys(2).await;
        if replication == Replication::Synchronous {
            for node in &cluster.nodes {
                // A standby does not use the setting until it is promoted.
                node.postgres.psql("postgres", "ALTER SYSTEM SET synchronous_standby_names = 'ANY 1 (*)'");
                node.postgres.psql("postgres", "SELECT pg_reload_conf()");
            }
            cluster.wait_for_standbys(2).await;
        }
        Some(cluster)
    }

    pub fn nodes(&self) -> &[Node] {
        &self.nodes
    }

    pub fn primary_number(&self) -> usize {
        self.primary.load(Ordering::Relaxed)
    }

    pub fn primary(&self) -> &Node {
        &self.nodes[self.primary_number()]
    }

    /// Returns the endpoint of a new database with all hosts.
    pub fn create_database(&self) -> String {
        let primary = &self.primary().postgres;
        let hosts: Vec<String> = self.nodes.iter().map(|node| format!("127.0.0.1:{}", node.link.port())).collect();
        primary.create_database().replace(&format!("127.0.0.1:{}", primary.port()), &hosts.join(","))
    }

    /// Returns the running standby that has received most, which has every commit that was acknowledged with
    /// synchronous replication.
    pub fn best_standby(&self) -> usize {
        let received = |number: &usize| {
            let bytes = "SELECT coalesce(pg_last_wal_receive_lsn() - '0/0', 0)::bigint";
            self.nodes[*number].postgres.psql("postgres", bytes).parse::<i64>().expect("a number")
        };
        let running =
            (0..self.nodes.len()).filter(|it| *it != self.primary_number() && self.nodes[*it].postgres.runs());
        running.max_by_key(received).expect("a standby runs")
    }

    /// Promotes a standby; the other one follows it, if it runs. Returns the number of the former primary.
    pub fn promote(&self, number: usize) -> usize {
        self.nodes[number].postgres.promote();
        let former = self.primary.swap(number, Ordering::Relaxed);
        for other in (0..self.nodes.len()).filter(|it| *it != number && *it != former) {
            self.follow(other);
        }
        former
    }

    fn follow(&self, number: usize) {
        self.nodes[number].postgres.follow(self.primary().replication.port(), &name(number));
    }

    /// Brings a former primary, which does not run, back as a standby.
    pub async fn rejoin(&self, number: usize) {
        let node = &self.nodes[number].postgres;
        node.rewind(&self.primary().postgres);
        self.follow(number);
        node.start_again().await;
    }

    /// Waits until `count` standbys receive the primary's changes as they are made.
    pub async fn wait_for_standbys(&self, count: usize) {
        let streaming = "SELECT count(*) FROM pg_stat_replication WHERE state = 'streaming'";
        eventually("streaming to the standbys", async || {
            let found = self.primary().postgres.psql("postgres", streaming);
            if found == count.to_string() { Ok(()) } else { Err(found) }
        })
        .await;
    }
}

fn name(number: usize) -> String {
    format!("node{number}")
}
