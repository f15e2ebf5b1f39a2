//! Visitors who send much at once or read nothing, and long values.

use std::{future::poll_fn, pin::pin, task::Poll};

use orlop_wire::proto::client::etcdserverpb::PutRequest;
use tokio::{net::TcpStream, task::JoinSet, time::timeout};

use super::page::{Page, Visitor, put, value_of};
use crate::{
    auth::{CHEAP, enable, password},
    support::{Backend, Client, DEADLINE, Link, NetworkState, Server, eventually, free_port},
};

/// A limit of a client of HTTP/2 until it has received that of the server.
const STREAMS_AT_FIRST: usize = 7;

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_log_ins_at_the_same_time_are_refused() {
    let server = Server::orlop_with(Backend::Sqlite, &CHEAP).await.expect("SQLite is always there");
    enable(&mut Client::connect(server.endpoint()).await).await;
    let port = server.endpoint().rsplit_once(':').expect("a port").1.parse().expect("a number");
    let link = Link::to(port).await;
    let page = Page::about(&format!("http://127.0.0.1:{}", link.port()), &[]);
    let mut visitor = page.visitor();
    let token = value_of(&visitor.get("/login").await.body, "token");
    // The server answers no more, so four passwords are being checked and 32 log-ins wait.
    link.set_network(NetworkState::Silent);
    let mut log_ins = JoinSet::new();
    for _ in 0..40 {
        let (mut visitor, token) = (visitor.clone(), token.clone());
        log_ins.spawn(async move {
            visitor.post("/login", &[("token", token.as_str()), ("name", "user"), ("password", "wrong")]).await
        });
    }
    for _ in 0..4 {
        let answer = log_ins.join_next().await.expect("a task").expect("an answer");
        assert_eq!(answer.status, 503, "{}", answer.body);
        assert!(answer.body.contains("Too many people log in at the same time."), "{}", answer.body);
        // The form is there to try again.
        assert!(!value_of(&answer.body, "token").is_empty(), "{}", answer.body);
    }
    link.set_network(NetworkState::Normal);
    eventually("a log-in", async || {
        let answer = page.visitor().log_in("user", &password("user")).await;
        if answer.status == 303 { Ok(()) } else { Err(answer) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_the_page_send_100_requests_at_the_same_time() {
    let url = format!("http://127.0.0.1:{}", free_port());
    let server = Server::orlop_with(Backend::Sqlite, &["--console-listen-url", &url]).await;
    let server = server.expect("SQLite is always there");
    let page = Page::about(server.endpoint(), &[]);
    for url in [&url, &page.url] {
        let address = url.strip_prefix("http://").expect("an address");
        let tcp = TcpStream::connect(address).await.expect("the page accepts connections");
        let mut builder = h2::client::Builder::new();
        builder.initial_max_send_streams(STREAMS_AT_FIRST);
        let (_client, connection) = builder.handshake::<_, bytes::Bytes>(tcp).await.expect("a handshake");
        let mut connection = pin!(connection);
        let limit = poll_fn(|context| {
            assert!(connection.as_mut().poll(context).is_pending(), "the connection ended");
            match connection.max_concurrent_send_streams() {
                STREAMS_AT_FIRST => Poll::Pending,
                limit => Poll::Ready(limit),
            }
        });
        assert_eq!(timeout(DEADLINE, limit).await.expect("the server's settings"), 100, "{url}");
    }
}

/// Each event is a value of 1 MiB for the page, and a row of about 350 KB for the browser.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn browsers_that_read_no_events_do_not_stop_the_page() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    put(&mut client, "/other/a", b"1").await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    let (mut first, _second) = (visitor.events("/r/").await, visitor.events("/r/").await);
    let key = [&b"/r/"[..], &[0xff; 50_000]].concat();
    // The rows are 22 MB together, more than the buffers between page and browser hold. The values of the rest would fill
    // the windows of both watches, 16 MiB each, and with them that of the connection to the server.
    for _ in 0..64 {
        let request =
            PutRequest { key: key.clone().into(), value: vec![b'x'; 1 << 20].into(), ..PutRequest::default() };
        client.kv.put(request).await.expect("a put");
    }
    for path in ["/keys?prefix=/other/", "/key?key=/other/a", "/"] {
        visitor.open(path).await;
    }
    // The browser reads again. It receives the newest events, and the number of the others.
    for number in 0..120 {
        put(&mut client, &format!("/r/{number}"), b"1").await;
    }
    first.until("more events, which came too fast to be shown").await;
    first.until("/key?key=/r/119\"").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_keys_keep_no_old_values_in_memory() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..50 {
        put(&mut client, "a", &vec![b'x'; 1 << 20]).await;
    }
    let page = Page::about(server.endpoint(), &[]);
    let mut visits = JoinSet::new();
    for _ in 0..12 {
        let mut visitor = page.visitor();
        visits.spawn(async move { visitor.open("/key?key=a").await });
    }
    while let Some(visit) = visits.join_next().await {
        let body = visit.expect("a page");
        assert_eq!(body.matches(", 1.0 MiB<").count(), 50, "the history has the sizes of all versions");
    }
    // The versions of all pages together are 600 MiB.
    let peak = page.peak_mib();
    assert!(peak < 300, "the page took {peak} MiB");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_values_are_shown_and_compared() {
    let url = format!("http://127.0.0.1:{}", free_port());
    let server = Server::orlop_with(Backend::Sqlite, &["--console-listen-url", &url]).await;
    let server = server.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    // All lines of both, in another order.
    let text = |step: u64| (0..60_000).map(|number| format!("{}\n", number * step % 60_000)).collect::<String>();
    let old = put(&mut client, "a", text(1).as_bytes()).await;
    let new = put(&mut client, "a", text(7_919).as_bytes()).await;
    let page = Page::about(server.endpoint(), &[]);
    for mut visitor in [Visitor::new(&url), page.visitor()] {
        for path in [
            "/key?key=a".to_owned(),
            format!("/diff?key=a&from={old}&to={new}"),
            format!("/put-back?key=a&revision={old}"),
        ] {
            let body = visitor.open(&path).await;
            assert!(body.contains("more lines are not shown."), "{path}: {} bytes", body.len());
        }
    }
}
