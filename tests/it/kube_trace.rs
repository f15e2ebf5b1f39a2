//! The recorded traffic of a whole Kubernetes control plane, replayed on an empty store with every answer compared.
//!
//! `tests/data/README.md` says what was recorded. Its calls overlap, so they are replayed by cause and not by time: the
//! writes one after the other in the order of their revisions, and everything else while the store stands at the revision
//! that the recorded answer's header names. From then on the answers must be equal; what differs by nature is listed in
//! [`compare::EXCEPTIONS`].
//!
//! The same replay runs against a real etcd where there is one: what etcd itself does not pass proves nothing.

mod compare;
mod replay;
mod trace;
mod watched;

use compare::Peer;
use replay::Compared;

use crate::support::{Backend, Postgres, Server, on_both_backends, skip};

/// What the recording holds. A replay that compares less has skipped something.
const RECORDED: Compared =
    Compared { txn: 709, range: 882, lease_grant: 24, compact: 4, status: 4, streams: 60, events: 633, progress: 192 };

async fn replays_equal_on_orlop(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    replays_equal(&[server.endpoint()], Peer::Orlop).await;
}

/// The recording tells calls apart but not connections, so every step goes to the other instance than the one before.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replays_equal_on_two_instances_of_one_database() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    let (one, other) = (Server::orlop_on(&datastore, &[]).await, Server::orlop_on(&datastore, &[]).await);
    replays_equal(&[one.endpoint(), other.endpoint()], Peer::Orlop).await;
}

#[tokio::test]
async fn replays_equal_on_etcd() {
    let Some(server) = Server::etcd().await else { return };
    match replay::etcd_minor_version(server.endpoint()).await {
        minor @ 5.. => replays_equal(&[server.endpoint()], Peer::Etcd { minor }).await,
        // An older one lets progress answers overtake events.
        _ => skip("etcd 3.5 or later"),
    }
}

async fn replays_equal(endpoints: &[&str], peer: Peer) {
    match replay::replay(endpoints, peer, trace::load()).await {
        Ok(compared) => assert_eq!(compared, RECORDED),
        Err(mismatch) => panic!("{mismatch}"),
    }
}

on_both_backends!(replays_equal_on_orlop);
