//! Events of the web page: as they happen, and after a browser has connected again.

use orlop_wire::proto::client::etcdserverpb::CompactionRequest;

use super::page::{Page, Visitor};
use crate::support::{Backend, Client, Server, delete, eventually, free_port, on_both_backends};

async fn events_are_shown_as_they_come(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let page = Page::about(server.endpoint(), &[]);
    let mut events = page.visitor().events("/r/").await;
    client.put("/other", b"1").await;
    client.put("/r/a", b"1").await;
    let text = events.until("/key?key=/r/a").await;
    assert!(text.contains("event: rows") && text.contains("created") && !text.contains("/other"), "{text}");
    client.kv.delete_range(delete("/r/a")).await.expect("a delete");
    events.until("deleted").await;
    // Streams are bounded, and a closed one makes room.
    let visitor = page.visitor();
    let mut open = Vec::new();
    for _ in 1..32 {
        open.push(visitor.events("/r/").await);
    }
    assert_eq!(page.visitor().get("/events/stream").await.status, 503);
    drop(open);
    drop(events);
    eventually("room for a stream", async || {
        client.clone().put("/r/a", b"1").await;
        visitor.try_events("/r/").await.map(drop)
    })
    .await;
}

async fn browser_that_connects_again_receives_what_it_missed(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let page = Page::about(server.endpoint(), &[]);
    let visitor = page.visitor();
    let events = visitor.events("/r/").await;
    let begin = events.last_id();
    drop(events);
    client.put("/r/a", b"1").await;
    let mut events = visitor.events_after("/r/", &begin).await;
    events.until("/key?key=/r/a").await;
    let last = events.last_id();
    drop(events);
    client.put("/r/b", b"1").await;
    let mut events = visitor.events_after("/r/", &last).await;
    let text = events.until("/key?key=/r/b").await;
    assert!(!text.contains("/key?key=/r/a"), "{text}");
    drop(events);
    let revision = client.put("/r/b", b"2").await;
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    client.put("/r/c", b"1").await;
    let mut events = visitor.events_after("/r/", &last).await;
    events.until("/key?key=/r/c").await;
    events.until(&format!("Changes before revision {revision} are compacted")).await;
    drop(events);
    // The store is another one.
    let mut events = visitor.events_after("/r/", "99999999").await;
    client.put("/r/d", b"1").await;
    events.until("/key?key=/r/d").await;
}

async fn compaction_loses_no_changes_of_a_quiet_prefix(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let page = Page::about(server.endpoint(), &[]);
    let visitor = page.visitor();
    let mut events = visitor.events("/r/").await;
    let revision = client.put("/other", b"1").await;
    events.until(&format!("\nid: {revision}\n")).await;
    let last = events.last_id();
    drop(events);
    client.kv.compact(CompactionRequest { revision, physical: true }).await.expect("a compaction");
    let mut events = visitor.events_after("/r/", &last).await;
    client.put("/r/a", b"1").await;
    let text = events.until("/key?key=/r/a").await;
    assert!(!text.contains("are compacted"), "{text}");
}

/// Waits until the server has this number of watches.
async fn wait_for_watches(server: &Server, wanted: f64) {
    eventually("the end of the other watches", async || {
        let found = server.metric("etcd_debugging_mvcc_watcher_total").await;
        if found == wanted { Ok(()) } else { Err(found) }
    })
    .await;
}

/// The server's connection to itself has at most 200 calls at the same time.
async fn watches_end_with_their_streams(backend: Backend) {
    let url = format!("http://127.0.0.1:{}", free_port());
    let Some(server) = Server::orlop_with(backend, &["--console-listen-url", &url]).await else { return };
    let page = Page::about(server.endpoint(), &[]);
    for url in [&url, &page.url] {
        let mut visitor = Visitor::new(url);
        // The first message follows a check of the rights, for which another watch was opened.
        let events = visitor.events("/r/").await;
        wait_for_watches(&server, 1.0).await;
        drop(events);
        wait_for_watches(&server, 0.0).await;
        for _ in 0..250 {
            eventually("room for a stream", async || visitor.try_events("/r/").await.map(drop)).await;
        }
        visitor.open("/keys").await;
        wait_for_watches(&server, 0.0).await;
    }
}

/// A browser connects again after such an end.
async fn stream_ends_without_a_message_if_the_server_goes_away(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let page = Page::about(server.endpoint(), &[]);
    let events = page.visitor().events("/r/").await;
    server.kill();
    let text = events.ended().await;
    assert!(!text.contains("event: failed"), "{text}");
}

on_both_backends!(
    events_are_shown_as_they_come,
    browser_that_connects_again_receives_what_it_missed,
    compaction_loses_no_changes_of_a_quiet_prefix,
    watches_end_with_their_streams,
    stream_ends_without_a_message_if_the_server_goes_away,
);
