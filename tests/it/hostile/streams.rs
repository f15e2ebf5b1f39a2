//! Attackers that obey HTTP/2: streams opened through `h2`.

use super::*;

fn call(path: &str) -> http::Request<()> {
    let request = http::Request::post(format!("http://x{path}"));
    request.header("content-type", "application/grpc").header("te", "trailers").body(()).expect("a request")
}

/// Connects through `h2`, which respects the server's flow control windows. It accepts nothing of a response but its head.
/// The connection ends when the tasks are dropped.
async fn connect(endpoint: &str) -> (JoinSet<()>, h2::client::SendRequest<Bytes>) {
    let tcp = TcpStream::connect(wire::address(endpoint)).await.expect("the server accepts");
    let (client, connection) = h2::client::Builder::new()
        .initial_window_size(0)
        .max_concurrent_streams(1_000_000)
        .initial_max_send_streams(1_000_000)
        .handshake::<_, Bytes>(tcp)
        .await
        .expect("a handshake");
    let mut tasks = JoinSet::new();
    tasks.spawn(async move {
        if let Err(error) = connection.await {
            println!("the attacker's connection ended: {error}");
        }
    });
    (tasks, client)
}

/// Opens streams. They end when the returned values are dropped.
pub async fn streams(
    endpoint: &str,
    count: usize,
    path: &'static str,
    body: Vec<u8>,
) -> (JoinSet<()>, Vec<h2::client::ResponseFuture>, Vec<h2::SendStream<Bytes>>) {
    let (tasks, mut client) = connect(endpoint).await;
    let (mut answers, mut senders) = (Vec::new(), Vec::new());
    let body = Bytes::from(body);
    for _ in 0..count {
        client = client.ready().await.expect("ready");
        let (answer, mut sender) = client.send_request(call(path), false).expect("a stream");
        if !body.is_empty() {
            sender.send_data(body.clone(), false).expect("data is queued");
        }
        answers.push(answer);
        senders.push(sender);
    }
    (tasks, answers, senders)
}

/// Sends complete requests on one connection.
pub async fn complete_requests(
    endpoint: &str,
    count: usize,
    path: &'static str,
    body: &'static [u8],
) -> (JoinSet<()>, Vec<h2::client::ResponseFuture>) {
    let (tasks, mut client) = connect(endpoint).await;
    let mut answers = Vec::new();
    for _ in 0..count {
        client = client.ready().await.expect("ready");
        let (answer, mut sender) = client.send_request(call(path), false).expect("a stream");
        sender.send_data(Bytes::from_static(body), true).expect("data is queued");
        answers.push(answer);
    }
    (tasks, answers)
}

/// Sends complete requests on one connection, and waits for the heads of all responses.
pub async fn unread_responses(
    endpoint: &str,
    count: usize,
    path: &'static str,
    body: &'static [u8],
) -> (JoinSet<()>, Vec<http::Response<h2::RecvStream>>) {
    let (tasks, answers) = complete_requests(endpoint, count, path, body).await;
    let mut responses = Vec::new();
    for answer in answers {
        responses.push(timeout(DEADLINE, answer).await.expect("a head in time").expect("a response"));
    }
    (tasks, responses)
}

/// Sends the same bytes repeatedly on its own stream, as fast as flow control permits, and reads the responses.
pub async fn pump(endpoint: String, path: &'static str, body: Bytes) {
    let tcp = TcpStream::connect(wire::address(&endpoint)).await.expect("the server accepts");
    let (client, connection) = h2::client::Builder::new()
        .initial_window_size(1 << 30)
        .initial_connection_window_size(1 << 30)
        .handshake::<_, Bytes>(tcp)
        .await
        .expect("a handshake");
    let mut client = client.ready().await.expect("ready");
    let (answer, mut sender) = client.send_request(call(path), false).expect("a stream");
    let send = async {
        let mut rest = body.clone();
        loop {
            if rest.is_empty() {
                rest = body.clone();
            }
            sender.reserve_capacity(rest.len());
            match poll_fn(|context| sender.poll_capacity(context)).await {
                Some(Ok(granted)) => {
                    let piece = rest.split_to(granted.min(rest.len()));
                    sender.send_data(piece, false).expect("the capacity is granted");
                }
                ended => return println!("{path}: {ended:?}"),
            }
        }
    };
    let take = async {
        let mut answers = answer.await.expect("an answer").into_body();
        while let Some(piece) = answers.data().await {
            let len = piece.expect("more answers").len();
            answers.flow_control().release_capacity(len).expect("the data was received");
        }
    };
    tokio::select! {
        () = send => {}
        () = take => {}
        ended = connection => println!("{path}: {ended:?}"),
    }
}
