//! Watches under load: slow readers, large responses, clients that have closed their sending half, and a server
//! that shuts down.

use std::time::Duration;

use orlop_wire::proto::client::etcdserverpb::{
    LeaseKeepAliveRequest, RequestOp, TxnRequest, WatchCancelRequest, WatchCreateRequest, WatchProgressRequest,
    WatchRequest, request_op::Request, watch_request::RequestUnion,
};
use tokio::{
    sync::mpsc,
    time::{interval, timeout},
};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::Code;

use crate::support::{Backend, Client, DEADLINE, Server, Stream, everything, on_both_backends, put};

async fn slow_watcher_loses_no_events_and_delays_no_other(backend: Backend) {
    const PUTS: i64 = 16_000;
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    // Each stream has its own connection, so that flow control stops only the slow stream.
    let mut slow_client = Client::connect(server.endpoint()).await;
    let mut slow = Stream::open(&mut slow_client).await;
    slow.create(everything(0)).await;
    let mut fast_client = Client::connect(server.endpoint()).await;
    let mut fast = Stream::open(&mut fast_client).await;
    fast.create(everything(0)).await;
    let fast = tokio::spawn(async move { fast.read_until(PUTS + 1).await });

    let mut writers = Vec::new();
    for _ in 0..16 {
        let mut client = client.clone();
        writers.push(tokio::spawn(async move {
            for _ in 0..PUTS / 16 {
                client.put("k", vec![b'v'; 1024]).await;
            }
        }));
    }
    for writer in writers {
        writer.await.expect("every put is answered");
    }
    let expected: Vec<i64> = (2..=PUTS + 1).collect();
    let fast = timeout(DEADLINE, fast).await.expect("the fast watcher is not delayed").expect("the task ends");
    assert!(fast == expected, "the fast watcher gets each event once, in order");

    // The slow stream gets further events while it reads.
    let last = client.put("k", "").await;
    let slow = slow.read_until(last).await;
    assert!(slow == (2..=last).collect::<Vec<_>>(), "the slow watcher gets each event once, in order");
}

async fn progress_is_answered_after_the_events_that_it_covers(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..3_000 {
        client.put("k", vec![b'v'; 512]).await;
    }
    let mut stream = Stream::open(&mut client).await;
    // The watch has 3,000 revisions to catch up on when progress is requested.
    stream.ask(RequestUnion::CreateRequest(everything(2)));
    stream.ask(RequestUnion::ProgressRequest(WatchProgressRequest {}));
    let mut newest = 0;
    loop {
        let answer = stream.next().await;
        if answer.watch_id == -1 {
            assert_eq!((newest, answer.header.expect("an answer has a header").revision), (3_001, 3_001));
            break;
        }
        newest = answer.events.last().map_or(newest, |event| event.kv.as_ref().expect("a pair").mod_revision);
    }
    // Once the watch is synced, the server answers each progress request at once.
    for _ in 0..3 {
        stream.ask(RequestUnion::ProgressRequest(WatchProgressRequest {}));
        assert_eq!(stream.next().await.watch_id, -1);
    }
}

/// kube-apiserver asks for progress again and again while a consistent read waits for its cache.
async fn requests_do_not_delay_catching_up(backend: Backend) {
    const PUTS: i64 = 3_000;
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..PUTS {
        client.put("k", vec![b'v'; 4_096]).await;
    }
    let mut stream = Stream::open(&mut client).await;
    let requests = stream.requests.clone().expect("the stream is open");
    let asking = tokio::spawn(async move {
        let mut often = interval(Duration::from_millis(1));
        let progress = || WatchRequest { request_union: Some(RequestUnion::ProgressRequest(WatchProgressRequest {})) };
        while (0..10).all(|_| requests.send(progress()).is_ok()) {
            often.tick().await;
        }
    });
    // With fragments the server reads several pages before it sends the first.
    stream.create(WatchCreateRequest { fragment: true, ..everything(2) }).await;
    assert_eq!(stream.read_until(PUTS + 1).await, (2..=PUTS + 1).collect::<Vec<_>>());
    asking.abort();
}

async fn fragments_split_one_revision(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let pair = |value: u8| {
        let put = |key: &str| put(key, vec![value; 700_000]);
        let success = ["a", "b"].map(|key| RequestOp { request: Some(Request::RequestPut(put(key))) });
        TxnRequest { success: success.to_vec(), ..Default::default() }
    };
    client.kv.txn(pair(1)).await.expect("a transaction below the limit");
    for (fragment, expected) in [(true, vec![(true, 1), (false, 1)]), (false, vec![(false, 2)])] {
        let mut stream = Stream::open(&mut client).await;
        stream.create(WatchCreateRequest { fragment, prev_kv: true, ..everything(0) }).await;
        client.kv.txn(pair(2)).await.expect("a transaction below the limit");
        let mut answers = Vec::new();
        for _ in 0..expected.len() {
            let answer = stream.next().await;
            answers.push((answer.fragment, answer.events.len()));
        }
        assert_eq!(answers, expected, "fragment={fragment}");
    }
}

/// As in etcd, all events of the past are one response, in pieces of less than 2 MiB.
async fn catching_up_in_fragments_takes_one_response(backend: Backend) {
    const VALUES: usize = 10;
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    for _ in 0..VALUES {
        client.put("k", vec![b'v'; 1 << 20]).await;
    }
    let mut stream = Stream::open(&mut client).await;
    stream.create(WatchCreateRequest { fragment: true, ..everything(1) }).await;
    for number in 1..=VALUES {
        let answer = stream.next().await;
        assert_eq!((answer.events.len(), answer.fragment), (1, number < VALUES), "message {number}");
    }
}

async fn client_that_closed_its_sending_half_still_gets_events(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut stream = Stream::open(&mut client).await;
    stream.create(everything(0)).await;
    stream.requests = None;
    let revision = client.put("k", "v").await;
    assert_eq!(stream.read_until(revision).await, [revision]);
}

async fn refused_watches_leave_the_stream_open(backend: Backend) {
    let Some(server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut stream = Stream::open(&mut client).await;
    let range = |key: &str, end: &str| WatchCreateRequest {
        key: key.to_owned().into(),
        range_end: end.to_owned().into(),
        ..Default::default()
    };
    assert_eq!(stream.create(WatchCreateRequest { watch_id: 7, ..everything(0) }).await.watch_id, 7);
    let table = [
        (WatchCreateRequest { watch_id: 7, ..everything(0) }, "mvcc: duplicate watch ID provided on the WatchStream"),
        (range("b", "a"), "mvcc: watcher range is empty"),
        (everything(-1), "etcdserver: mvcc: required revision has been compacted"),
    ];
    for (create, reason) in table {
        let refused = stream.create(create).await;
        assert_eq!((refused.canceled, refused.watch_id, refused.cancel_reason.as_str()), (true, -1, reason));
    }
    // A cancel of an unknown id gets no response, so the next response is for the known id.
    stream.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 99 }));
    stream.ask(RequestUnion::CancelRequest(WatchCancelRequest { watch_id: 7 }));
    let canceled = stream.next().await;
    assert_eq!((canceled.canceled, canceled.watch_id), (true, 7));
}

async fn idle_watch_receives_progress_notifications(backend: Backend) {
    let Some(server) = Server::orlop_with(backend, &["--watch-progress-notify-interval", "100ms"]).await else {
        return;
    };
    let mut client = Client::connect(server.endpoint()).await;
    let revision = client.put("other", "").await;
    let mut stream = Stream::open(&mut client).await;
    let watch = WatchCreateRequest { key: "k".into(), progress_notify: true, ..Default::default() };
    let id = stream.create(watch).await.watch_id;
    for _ in 0..2 {
        let progress = stream.next().await;
        assert_eq!((progress.watch_id, progress.events.len(), progress.created), (id, 0, false));
        assert_eq!(progress.header.expect("an answer has a header").revision, revision);
    }
}

async fn streams_end_with_a_status_at_shutdown(backend: Backend) {
    let Some(mut server) = Server::orlop(backend).await else { return };
    let mut client = Client::connect(server.endpoint()).await;
    let mut stream = Stream::open(&mut client).await;
    stream.create(everything(0)).await;
    let (requests, receiver) = mpsc::unbounded_channel();
    requests.send(LeaseKeepAliveRequest { id: 1 }).expect("the receiver exists");
    let renewals = client.lease.lease_keep_alive(UnboundedReceiverStream::new(receiver)).await;
    let mut renewals = renewals.expect("a stream opens").into_inner();
    renewals.message().await.expect("an answer").expect("an answer");
    let streams = [
        ("a watch", tokio::spawn(async move { stream.answers.message().await.map(drop) })),
        ("the renewals of leases", tokio::spawn(async move { renewals.message().await.map(drop) })),
    ];
    assert!(server.terminate().await.success());
    for (what, ended) in streams {
        let status = ended.await.expect("the reader ends").expect_err("the stream ends with a status");
        assert_eq!((status.code(), status.message()), (Code::Unavailable, "etcdserver: server stopped"), "{what}");
    }
}

on_both_backends!(
    slow_watcher_loses_no_events_and_delays_no_other,
    progress_is_answered_after_the_events_that_it_covers,
    requests_do_not_delay_catching_up,
    fragments_split_one_revision,
    catching_up_in_fragments_takes_one_response,
    client_that_closed_its_sending_half_still_gets_events,
    refused_watches_leave_the_stream_open,
    idle_watch_receives_progress_notifications,
    streams_end_with_a_status_at_shutdown,
);
