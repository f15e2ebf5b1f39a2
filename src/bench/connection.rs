//! Connections to the endpoints under load.
//!
//! A [`Connection`] is one HTTP/2 connection, used straight from hyper: tonic's own channel would add a queue and a task
//! to each request. It is not opened again when it is lost; its clients stop and the report tells. Known limit: no TLS.

use std::{
    fmt,
    future::Future,
    io,
    path::PathBuf,
    pin::Pin,
    str::FromStr,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use http::{Request, Response, Uri, uri::PathAndQuery};
use hyper::{
    body::Incoming,
    client::conn::http2::{self, SendRequest},
};
use hyper_util::rt::{TokioExecutor, TokioIo};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    time::timeout,
};
use tonic::{Status, Streaming, body::Body, client::Grpc};
use tower_service::Service;

use super::{
    Error,
    wire::{RangeTally, TallyCodec, WatchTally},
};
use crate::proto::client::etcdserverpb::{RangeRequest, WatchRequest, kv_client::KvClient};

/// Windows so large that the server never waits for the client's leave to send.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Where a server listens: `http://host:port`, `host:port` or `unix://path`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Endpoint {
    /// Host and port.
    Tcp(String),
    Unix(PathBuf),
}

impl FromStr for Endpoint {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(path) = text.strip_prefix("unix:") {
            let path = path.strip_prefix("//").unwrap_or(path);
            return if path.is_empty() { Err("no path".to_owned()) } else { Ok(Self::Unix(path.into())) };
        }
        let authority = match text.split_once("://") {
            None => text,
            Some(("http", rest)) => rest.strip_suffix('/').unwrap_or(rest),
            Some(("https", _)) => return Err("TLS is not supported".to_owned()),
            Some((scheme, _)) => return Err(format!("unknown scheme `{scheme}`")),
        };
        let parsed: http::uri::Authority = authority.parse().map_err(|error| format!("{error}"))?;
        match parsed.port_u16() {
            Some(_) => Ok(Self::Tcp(authority.to_owned())),
            None => Err("no port".to_owned()),
        }
    }
}

impl fmt::Display for Endpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Tcp(authority) => write!(f, "http://{authority}"),
            Self::Unix(path) => write!(f, "unix://{}", path.display()),
        }
    }
}

/// Open connections, dealt out in turn.
pub struct Pool(Vec<Client>);

impl Pool {
    /// Opens `connections` connections, spread evenly over the endpoints.
    pub async fn connect(endpoints: &[Endpoint], connections: usize) -> Result<Self, Error> {
        let mut clients = Vec::with_capacity(connections);
        for endpoint in endpoints.iter().cycle().take(connections) {
            let connected = timeout(CONNECT_TIMEOUT, Client::connect(endpoint)).await;
            let client = connected.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)));
            clients.push(client.map_err(|source| Error::Connect { endpoint: endpoint.clone(), source })?);
        }
        assert!(!clients.is_empty(), "flags ask for at least one endpoint and connection");
        Ok(Self(clients))
    }

    /// The connection that the client, loader or stream with this number shares.
    pub fn client(&self, number: usize) -> Client {
        self.0[number % self.0.len()].clone()
    }

    /// All endpoints, to name them in an error that may be any one's.
    pub fn endpoints(&self) -> String {
        let mut names: Vec<_> = self.0.iter().map(|client| client.endpoint.to_string()).collect();
        names.sort_unstable();
        names.dedup();
        names.join(",")
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// The calls of the scenarios, over one shared connection.
#[derive(Clone)]
pub struct Client {
    pub kv: KvClient<Connection>,
    raw: Grpc<Connection>,
    connection: Connection,
    endpoint: Arc<Endpoint>,
}

impl Client {
    async fn connect(endpoint: &Endpoint) -> io::Result<Self> {
        let (connection, authority) = match endpoint {
            Endpoint::Tcp(authority) => {
                let stream = TcpStream::connect(authority).await?;
                stream.set_nodelay(true)?;
                (Connection::open(stream).await?, authority.as_str())
            }
            Endpoint::Unix(path) => (Connection::open(UnixStream::connect(path).await?).await?, "localhost"),
        };
        let origin = Uri::builder().scheme("http").authority(authority).path_and_query("/").build();
        let origin = origin.map_err(io::Error::other)?;
        let kv = KvClient::with_origin(connection.clone(), origin.clone()).max_decoding_message_size(usize::MAX);
        let raw = Grpc::with_origin(connection.clone(), origin).max_decoding_message_size(usize::MAX);
        Ok(Self { kv, raw, connection, endpoint: Arc::new(endpoint.clone()) })
    }

    /// A range whose pairs are counted and not decoded.
    pub async fn range(&mut self, request: RangeRequest) -> Result<RangeTally, Status> {
        self.raw.ready().await.map_err(lost)?;
        let path = PathAndQuery::from_static("/etcdserverpb.KV/Range");
        let codec = TallyCodec::<RangeRequest, RangeTally>::default();
        let answer = self.raw.unary(tonic::Request::new(request), path, codec).await?;
        Ok(answer.into_inner())
    }

    /// A watch stream whose events are counted and not decoded.
    pub async fn watch<S>(&mut self, requests: S) -> Result<Streaming<WatchTally>, Status>
    where
        S: tokio_stream::Stream<Item = WatchRequest> + Send + 'static,
    {
        self.raw.ready().await.map_err(lost)?;
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let codec = TallyCodec::<WatchRequest, WatchTally>::default();
        let answer = self.raw.streaming(tonic::Request::new(requests), path, codec).await?;
        Ok(answer.into_inner())
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Whether the connection is gone for good.
    pub fn is_lost(&self) -> bool {
        self.connection.0.is_closed()
    }
}

fn lost(error: hyper::Error) -> Status {
    Status::unavailable(format!("connection lost: {error}"))
}

#[derive(Clone)]
pub struct Connection(SendRequest<Body>);

impl Connection {
    async fn open<S>(stream: S) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (sender, driver) = http2::Builder::new(TokioExecutor::new())
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        // Each request tells when the connection fails; the driver's own error adds nothing.
        tokio::spawn(async { driver.await.ok() });
        Ok(Self(sender))
    }
}

impl Service<Request<Body>> for Connection {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        Box::pin(self.0.send_request(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(text: &str, want: Result<&str, &str>) {
        let got = text.parse::<Endpoint>().map(|endpoint| endpoint.to_string());
        assert_eq!(got.as_deref().map_err(String::as_str), want, "{text}");
    }

    #[test]
    fn endpoints_parse() {
        check("http://127.0.0.1:2379", Ok("http://127.0.0.1:2379"));
        check("http://[::1]:2379/", Ok("http://[::1]:2379"));
        check("db-1.example:80", Ok("http://db-1.example:80"));
        check("unix:///run/orlop.sock", Ok("unix:///run/orlop.sock"));
        check("unix://orlop.sock", Ok("unix://orlop.sock"));
        check("unix:orlop.sock", Ok("unix://orlop.sock"));
        check("unix://", Err("no path"));
        check("http://localhost", Err("no port"));
        check("https://localhost:2379", Err("TLS is not supported"));
        check("grpc://localhost:2379", Err("unknown scheme `grpc`"));
    }

    #[tokio::test]
    async fn refused_connection_names_the_endpoint() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let endpoint = Endpoint::Tcp(closed.to_string());
        let error = Pool::connect(&[endpoint], 1).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(&closed.to_string()), "{error}");
    }
}
