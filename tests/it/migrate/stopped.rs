//! A migration with `--once --fence` that signals end: it leaves no fence, or says so.

use std::time::Duration;

use super::Destination;
use crate::support::{Backend, Client, Link, NetworkState, Server, on_both_backends, put};

const ONCE: [&str; 2] = ["--once", "--fence"];
const RECEIVES: &str = "receiving a snapshot";
const IS_FENCED: &str = "the source refuses writes from now on";

/// Returns a way to the source on which every answer takes 0.4 s, so that a migration can be stopped between two steps.
async fn slow_link(source: &Server) -> (Link, String) {
    let link = Link::to(source.port()).await;
    link.set_network(NetworkState::Slow(Duration::from_millis(200)));
    let address = format!("http://127.0.0.1:{}", link.port());
    (link, address)
}

async fn first_signal_ends_once_and_clears_the_alarm(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let (_link, address) = slow_link(&source).await;
    let mut client = Client::connect(source.endpoint()).await;
    client.put("key", [1]).await;
    for (stopped_at, was_fenced) in [(RECEIVES, false), (IS_FENCED, true)] {
        let Some(destination) = Destination::new(backend).await else { return };
        let mut migrator = destination.migrate(&address, &ONCE);
        migrator.says(stopped_at).await;
        let (status, output) = migrator.terminate().await;
        assert_eq!(status.code(), Some(1), "{output}");
        assert!(output.contains("stopped before the copy was complete"), "{output}");
        assert_eq!(output.contains(IS_FENCED), was_fenced, "{output}");
        client.kv.put(put("key", [2])).await.expect("the source accepts writes");
    }
}

async fn second_signal_names_the_alarm_that_remains(backend: Backend) {
    let Some(source) = Server::etcd().await else { return };
    let (_link, address) = slow_link(&source).await;
    let Some(destination) = Destination::new(backend).await else { return };
    let mut migrator = destination.migrate(&address, &ONCE);
    migrator.says(IS_FENCED).await;
    source.pause();
    migrator.signal();
    migrator.says("clearing the alarm at the source").await;
    let (status, output) = migrator.terminate().await;
    assert_eq!(status.code(), Some(1), "{output}");
    assert!(output.contains("may still refuse writes: run `etcdctl alarm disarm`"), "{output}");
}

on_both_backends!(first_signal_ends_once_and_clears_the_alarm, second_signal_names_the_alarm_that_remains);
