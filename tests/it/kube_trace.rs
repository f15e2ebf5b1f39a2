//! Replays the recorded traffic of a whole Kubernetes control plane on an empty store and compares every response.
//!
//! `tests/data/README.md` describes the recording. Its calls overlap, so they are replayed in causal order instead of
//! by time: writes one after the other in the order of their revisions, and every other call while the store is at the
//! revision in the recorded response's header. The responses must then be equal, except for [`compare::EXCEPTIONS`].
//!
//! If a real etcd is installed, the same replay runs against it: a comparison that fails with etcd proves nothing.

pub mod compare;
pub mod replay;
pub mod trace;
mod watched;

use compare::Peer;
use replay::Compared;

use crate::support::{Backend, Place, Postgres, Server, on_both_backends, skip};

/// The contents of the recording. A replay that compares less has skipped something.
const RECORDED: Compared =
    Compared { txn: 709, range: 882, lease_grant: 24, compact: 4, status: 4, streams: 60, events: 633, progress: 192 };

async fn replays_equal_on_orlop(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    replays_equal(&[server.endpoint()], Peer::Orlop).await;
}

/// The recording does not name connections, so consecutive steps go to different instances.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn replays_equal_on_two_instances_of_one_database() {
    let Some(postgres) = Postgres::shared().await else { return };
    let datastore = postgres.create_database();
    // Clients do not notice that compacted rows are kept.
    let keep = ["--history-retention", "1h"];
    let (one, other) = (Server::orlop_on(&datastore, &keep).await, Server::orlop_on(&datastore, &keep).await);
    replays_equal(&[one.endpoint(), other.endpoint()], Peer::Orlop).await;
}

#[tokio::test]
async fn replays_equal_on_etcd() {
    let Some(server) = Server::etcd().await else { return };
    match replay::etcd_minor_version(server.endpoint()).await {
        minor @ 5.. => replays_equal(&[server.endpoint()], Peer::Etcd { minor }).await,
        // Older versions let progress responses overtake events.
        _ => skip("etcd 3.5 or later"),
    }
}

/// The control plane is moved in the middle of the recording.
async fn replays_equal_moved_from_etcd_to_orlop(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let minor @ 5.. = replay::etcd_minor_version(source.endpoint()).await else { return skip("etcd 3.5 or later") };
    let datastore = match backend {
        Backend::Sqlite => None,
        Backend::Postgres => match Postgres::shared().await {
            Some(postgres) => Some(postgres.create_database()),
            None => return,
        },
    };
    let cut_over = async {
        let flags = ["migrate", "--from", source.endpoint(), "--cut-over", "--fence"];
        let copy = Server::orlop_at(datastore, &flags, Place::default()).await;
        (copy.endpoint().to_owned(), copy)
    };
    let replayed = replay::replay_moved(source.endpoint(), Peer::Etcd { minor }, trace::load(), cut_over);
    match Box::pin(replayed).await {
        Ok(compared) => assert_eq!(compared, RECORDED),
        Err(mismatch) => panic!("{mismatch}"),
    }
}

async fn replays_equal(endpoints: &[&str], peer: Peer) {
    match replay::replay(endpoints, peer, trace::load()).await {
        Ok(compared) => assert_eq!(compared, RECORDED),
        Err(mismatch) => panic!("{mismatch}"),
    }
}

on_both_backends!(replays_equal_on_orlop, replays_equal_moved_from_etcd_to_orlop);
