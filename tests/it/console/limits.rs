//! Visitors who send much at once or read nothing, and long values.

use std::{future::poll_fn, pin::pin, task::Poll, time::Duration};

use orlop_wire::proto::client::etcdserverpb::{RequestOp, TxnRequest, request_op::Request};
use tokio::{io::AsyncReadExt as _, net::TcpStream, task::JoinSet, time::timeout};

use super::page::{Page, Visitor, value_of};
use crate::{
    auth::{CHEAP, enable, password},
    support::{Answer, Backend, Client, DEADLINE, Link, NetworkState, Server, eventually, free_port, put},
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

/// Their visitors have no session. 32 forms are received at the same time.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn too_many_unfinished_forms_are_refused() {
    let server = Server::orlop_with(Backend::Sqlite, &CHEAP).await.expect("SQLite is always there");
    enable(&mut Client::connect(server.endpoint()).await).await;
    let page = Page::about(server.endpoint(), &[]);
    let mut forms = JoinSet::new();
    for _ in 0..40 {
        let mut stream = page.visitor().begin_form("/login").await;
        forms.spawn(async move {
            let mut text = String::new();
            stream.read_to_string(&mut text).await.expect("the page answers");
            Answer::parse(&text).unwrap_or_else(|| panic!("not an HTTP response: {text}"))
        });
    }
    for _ in 0..8 {
        let answer = timeout(DEADLINE, forms.join_next()).await.expect("a refusal in time");
        let answer = answer.expect("a form").expect("a task");
        assert_eq!(answer.status, 503, "{}", answer.body);
        assert!(answer.body.contains("Too many forms are sent at the same time."), "{}", answer.body);
    }
    // Their visitors leave.
    drop(forms);
    eventually("a log-in", async || {
        let answer = page.visitor().log_in("user", &password("user")).await;
        if answer.status == 303 { Ok(()) } else { Err(answer) }
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connections_to_the_page_send_32_requests_at_the_same_time() {
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
        assert_eq!(timeout(DEADLINE, limit).await.expect("the server's settings"), 32, "{url}");
    }
}

/// Each event is a row of about 19 KB for the browser, and some have a value of 1 MiB for the page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn browsers_that_read_no_events_do_not_stop_the_page() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    client.put("/other/a", b"1").await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    let (mut first, _second) = (visitor.events("/r/").await, visitor.events("/r/").await);
    let key = [&b"/r/"[..], &[0xff; 4_900]].concat();
    // The rows are more than the buffers between page and browser hold. The values of the rest would fill the windows of
    // both watches, 16 MiB each, and with them that of the connection to the server.
    for number in 0..640 {
        let value = if number % 10 == 0 { vec![b'x'; 1 << 20] } else { Vec::new() };
        client.put(&key, value).await;
    }
    for path in ["/keys?prefix=/other/", "/key?key=/other/a", "/"] {
        visitor.open(path).await;
    }
    // The browser reads again. It receives the newest events, and the number of the others.
    let put = |number: i32| put(format!("/r/{number}"), "1");
    let success = (0..120).map(|number| RequestOp { request: Some(Request::RequestPut(put(number))) }).collect();
    client.kv.txn(TxnRequest { success, ..TxnRequest::default() }).await.expect("a transaction");
    first.until("more events, which are not shown").await;
    first.until("/key?key=/r/119\"").await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_of_keys_keep_no_old_values_in_memory() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..50 {
        client.put("a", vec![b'x'; 1 << 20]).await;
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

/// Their flow-control windows are empty, so they receive no part of a page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn pages_that_browsers_do_not_read_are_bounded() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    // In HTML, a quotation mark has six bytes.
    client.put("a", ("\"".repeat(99) + "\n").repeat(14_000)).await;
    let page = Page::about(server.endpoint(), &[]);
    let address = page.url.strip_prefix("http://").expect("an address");
    let mut responses = JoinSet::new();
    for _ in 0..2 {
        let tcp = TcpStream::connect(address).await.expect("the page accepts connections");
        let mut builder = h2::client::Builder::new();
        let (requests, connection) =
            builder.initial_window_size(0).handshake::<_, bytes::Bytes>(tcp).await.expect("a handshake");
        tokio::spawn(connection);
        for _ in 0..20 {
            let request = http::Request::get(format!("{}/key?key=a", page.url)).body(()).expect("a request");
            let mut requests = requests.clone().ready().await.expect("a free stream");
            let (response, _) = requests.send_request(request, true).expect("a request is sent");
            responses.spawn(response);
        }
    }
    let mut unread = Vec::new();
    while unread.len() < 16 {
        let response = responses.join_next().await.expect("a request").expect("a task").expect("a response");
        assert_eq!(response.status(), 200);
        unread.push(response);
    }
    let another = timeout(Duration::from_secs(2), responses.join_next()).await;
    assert!(another.is_err(), "more pages are in memory: {another:?}");
    page.visitor().open("/").await;
    let peak = page.peak_mib();
    assert!(peak < 400, "the page took {peak} MiB");
    // A page that was left makes room for another one.
    drop((unread, responses));
    page.visitor().open("/key?key=a").await;
}

/// Maximum number of connections to the page.
const CONNECTIONS_MAX: usize = 256;
/// Maximum time until an idle connection is closed: 90 s, and some time for a slow machine.
const IDLE_TIME_MAX: Duration = Duration::from_secs(110);

/// The clients acknowledge the server's pings, and send nothing else.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn idle_connections_do_not_keep_visitors_out() {
    let url = format!("http://127.0.0.1:{}", free_port());
    let flags = ["--console-listen-url", &url, "--grpc-keepalive-interval", "30s"];
    let _server = Server::orlop_with(Backend::Sqlite, &flags).await.expect("SQLite is always there");
    let address = url.strip_prefix("http://").expect("an address");
    let (mut connections, mut idle) = (JoinSet::new(), Vec::new());
    for _ in 0..CONNECTIONS_MAX {
        let tcp = TcpStream::connect(address).await.expect("the page accepts connections");
        let (mut requests, connection) = h2::client::handshake(tcp).await.expect("a handshake");
        connections.spawn(connection);
        let request = http::Request::get(format!("{url}/assets/icon.svg")).body(()).expect("a request");
        let (response, _) = requests.send_request(request, true).expect("a request is sent");
        let response = timeout(DEADLINE, response).await.expect("a response").expect("the page answers");
        assert_eq!(response.status(), 200);
        idle.push(requests);
    }
    let too_many = timeout(Duration::from_secs(2), Visitor::new(&url).get("/")).await;
    assert!(too_many.is_err(), "one more connection was served");
    let closed = timeout(IDLE_TIME_MAX, connections.join_next()).await;
    assert!(closed.is_ok_and(|closed| closed.is_some()), "no idle connection was closed");
    Visitor::new(&url).open("/").await;
    drop(idle);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_keys_are_cut_and_have_no_link() {
    let server = Server::orlop(Backend::Sqlite).await.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    for number in 0..60 {
        let key = [format!("/r/{number:02}").into_bytes(), vec![0xff; 1_000_000]].concat();
        client.put(key, "").await;
    }
    client.put(format!("/s/{}", "k".repeat(4_000)), b"value").await;
    let page = Page::about(server.endpoint(), &[]);
    let mut visitor = page.visitor();
    let names = visitor.open("/keys?prefix=/r/").await;
    assert!(names.contains("… (cut: ") && names.contains("There are more names."), "{names}");
    assert!(!names.contains("/key?key=") && names.len() < 200_000, "{} bytes: {names}", names.len());
    let peak = page.peak_mib();
    assert!(peak < 200, "the page took {peak} MiB");
    assert!(visitor.open("/keys?prefix=/s/").await.contains("/key?key=/s/kkk"));
    assert!(visitor.open(&format!("/key?key=/s/{}", "k".repeat(4_000))).await.contains("value"));
    // In sizes, the server cuts names after 4,096 bytes.
    let link = |letters| format!("href=\"/key?key=/t/{}\"", "k".repeat(letters));
    for letters in [4_000, 4_500] {
        client.put(format!("/t/{}", "k".repeat(letters)), b"value").await;
    }
    let sizes = eventually("sizes", async || {
        let sizes = visitor.clone().open("/sizes/live?prefix=/t/").await;
        if sizes.contains("data-complete") { Ok(sizes) } else { Err(sizes) }
    })
    .await;
    assert!(sizes.contains(&link(4_000)) && !sizes.contains(&link(4_096 - "/t/".len())), "{sizes}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn long_values_are_shown_and_compared() {
    let url = format!("http://127.0.0.1:{}", free_port());
    let server = Server::orlop_with(Backend::Sqlite, &["--console-listen-url", &url]).await;
    let server = server.expect("SQLite is always there");
    let mut client = Client::connect(server.endpoint()).await;
    // All lines of both, in another order.
    let text = |step: u64| (0..60_000).map(|number| format!("{}\n", number * step % 60_000)).collect::<String>();
    let old = client.put("a", text(1)).await;
    let new = client.put("a", text(7_919)).await;
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
