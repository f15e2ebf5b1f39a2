//! Connections to the endpoints under load.
//!
//! A [`Connection`] is one HTTP/2 connection of hyper, used directly: tonic's channel would add a queue and a task to
//! each request. A lost connection is not reopened: its clients stop, and the report contains the error.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Request, Response, Uri, uri::PathAndQuery};
use http_body_util::BodyExt as _;
use hyper::{
    body::Incoming,
    client::conn::http2::{self, SendRequest},
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    task::AbortHandle,
    time::timeout,
};
use tokio_rustls::{
    TlsConnector,
    rustls::{ClientConfig, pki_types::ServerName},
};
use tonic::{Code, Status, Streaming, body::Body, client::Grpc};
use tower_service::Service;

use crate::{
    endpoint::{Address, Endpoint, Target},
    error::Error,
    summary::{RangeSummary, SummaryCodec, WatchSummary},
};
use orlop_wire::proto::client::etcdserverpb::{
    AuthenticateRequest, RangeRequest, WatchRequest, auth_client::AuthClient, kv_client::KvClient,
    lease_client::LeaseClient, maintenance_client::MaintenanceClient,
};
use orlop_wire::proto::client::v3lockpb::lock_client::LockClient;
use orlop_wire::write_coalescing::{Flusher, coalesce_writes};

/// HTTP/2 flow-control windows, large enough that the server never waits for a WINDOW_UPDATE frame.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);

/// Open connections, assigned round-robin.
pub struct Pool(Vec<Client>);

impl Pool {
    /// Opens `connections` connections, distributed evenly over the endpoints.
    pub async fn connect(target: &Target, connections: usize) -> Result<Self, Error> {
        let mut clients = Vec::with_capacity(connections);
        for endpoint in target.endpoints.iter().cycle().take(connections) {
            let connected = timeout(CONNECT_TIMEOUT, Client::connect(endpoint, target)).await;
            let client = connected.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)));
            clients.push(client.map_err(|source| Error::Connect { endpoint: endpoint.to_string(), source })?);
        }
        assert!(!clients.is_empty(), "the flags require at least one endpoint and one connection");
        Ok(Self(clients))
    }

    /// Returns the connection of the client, loader or stream with this number.
    pub fn client(&self, number: usize) -> Client {
        self.0[number % self.0.len()].clone()
    }

    /// Returns all endpoints, for errors that any of them may have caused.
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

/// The gRPC methods that the scenarios call, over one shared connection.
#[derive(Clone)]
pub struct Client {
    pub kv: KvClient<Connection>,
    raw: Grpc<Connection>,
    connection: Connection,
    origin: Uri,
    endpoint: Arc<Endpoint>,
}

impl Client {
    async fn connect(endpoint: &Endpoint, target: &Target) -> io::Result<Self> {
        let tls = target.tls.as_ref().filter(|_| endpoint.has_tls);
        let (connection, authority) = match &endpoint.address {
            Address::Tcp(authority) => {
                let stream = TcpStream::connect(authority).await?;
                stream.set_nodelay(true)?;
                (Connection::establish(stream, tls, authority, target).await?, authority.as_str())
            }
            Address::Unix(path) => {
                let stream = UnixStream::connect(path).await?;
                (Connection::establish(stream, tls, "localhost", target).await?, "localhost")
            }
        };
        let scheme = if endpoint.has_tls { "https" } else { "http" };
        let origin = Uri::builder().scheme(scheme).authority(authority).path_and_query("/").build();
        let origin = origin.map_err(io::Error::other)?;
        let kv = KvClient::with_origin(connection.clone(), origin.clone()).max_decoding_message_size(usize::MAX);
        let raw = Grpc::with_origin(connection.clone(), origin.clone()).max_decoding_message_size(usize::MAX);
        Ok(Self { kv, raw, connection, origin, endpoint: Arc::new(endpoint.clone()) })
    }

    /// Sends a Range request; counts the pairs of the response without decoding them.
    pub async fn range(&mut self, request: RangeRequest) -> Result<RangeSummary, Status> {
        self.raw.ready().await.map_err(connection_lost)?;
        let path = PathAndQuery::from_static("/etcdserverpb.KV/Range");
        let codec = SummaryCodec::<RangeRequest, RangeSummary>::default();
        let response = self.raw.unary(tonic::Request::new(request), path, codec).await?;
        Ok(response.into_inner())
    }

    /// Sends a Range request; fails if the response does not contain `kvs` pairs.
    pub async fn range_exact(&mut self, request: RangeRequest, kvs: u64) -> Result<RangeSummary, Status> {
        let response = self.range(request).await?;
        if response.kvs == kvs {
            return Ok(response);
        }
        Err(Status::data_loss(format!("unexpected number of pairs in the response, kvs={} want={kvs}", response.kvs)))
    }

    /// Opens a watch stream; counts the events of its responses without decoding them.
    pub async fn watch<S>(&mut self, requests: S) -> Result<Streaming<WatchSummary>, Status>
    where
        S: tokio_stream::Stream<Item = WatchRequest> + Send + 'static,
    {
        self.raw.ready().await.map_err(connection_lost)?;
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let codec = SummaryCodec::<WatchRequest, WatchSummary>::default();
        let response = self.raw.streaming(tonic::Request::new(requests), path, codec).await?;
        Ok(response.into_inner())
    }

    /// Returns a token for the user; `None` if authentication is disabled.
    pub async fn authenticate(&self, name: String, password: String) -> Result<Option<String>, Status> {
        let mut auth = AuthClient::with_origin(self.connection.clone(), self.origin.clone());
        match auth.authenticate(AuthenticateRequest { name, password }).await {
            Ok(response) => Ok(Some(response.into_inner().token)),
            Err(status) if status.code() == Code::FailedPrecondition => Ok(None),
            Err(status) => Err(status),
        }
    }

    pub fn maintenance(&self) -> MaintenanceClient<Connection> {
        MaintenanceClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    pub fn leases(&self) -> LeaseClient<Connection> {
        LeaseClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    pub fn locks(&self) -> LockClient<Connection> {
        LockClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    /// Sends an HTTP GET request; returns the body of the response.
    pub async fn get(&self, path: &'static str) -> Result<String, Status> {
        let mut uri = self.origin.clone().into_parts();
        uri.path_and_query = Some(PathAndQuery::from_static(path));
        let request = Uri::from_parts(uri).ok().and_then(|uri| Request::get(uri).body(Body::empty()).ok());
        let Some(request) = request else { return Err(Status::internal("the endpoint is not a valid HTTP address")) };
        let mut connection = self.connection.clone();
        std::future::poll_fn(|cx| connection.poll_ready(cx)).await.map_err(connection_lost)?;
        let response = connection.call(request).await.map_err(connection_lost)?;
        let text = response.into_body().collect().await.map_err(connection_lost)?.to_bytes();
        Ok(String::from_utf8_lossy(&text).into_owned())
    }

    pub fn endpoint(&self) -> &Endpoint {
        &self.endpoint
    }

    /// Returns whether the connection is closed. It is not reopened.
    pub fn is_lost(&self) -> bool {
        self.connection.sender.is_closed()
    }
}

fn connection_lost(error: hyper::Error) -> Status {
    Status::unavailable(format!("connection lost: {error}"))
}

/// An HTTP/2 connection. It is closed when the last clone is dropped, even if streams are open.
#[derive(Clone)]
pub struct Connection {
    sender: SendRequest<Body>,
    token: Option<HeaderValue>,
    _abort_on_drop: Arc<AbortOnDrop>,
}

/// Aborts the task that owns the socket. Without this, a stream whose requests do not end would keep the connection
/// open.
struct AbortOnDrop(Arc<OnceLock<AbortHandle>>);

impl Drop for AbortOnDrop {
    fn drop(&mut self) {
        if let Some(connection) = self.0.get() {
            connection.abort();
        }
    }
}

/// Spawns hyper's tasks. The first owns the socket and is driven by the flusher; the others belong to requests.
struct Executor<S> {
    flusher: Arc<Mutex<Option<Flusher<S>>>>,
    socket_task: Arc<OnceLock<AbortHandle>>,
}

impl<S> Clone for Executor<S> {
    fn clone(&self) -> Self {
        Self { flusher: Arc::clone(&self.flusher), socket_task: Arc::clone(&self.socket_task) }
    }
}

impl<F, S> hyper::rt::Executor<F> for Executor<S>
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
    S: AsyncWrite + Unpin + Send + 'static,
{
    fn execute(&self, task: F) {
        match self.flusher.lock().take() {
            Some(flusher) => {
                let task = tokio::spawn(flusher.drive(task));
                self.socket_task.get_or_init(|| task.abort_handle());
            }
            None => drop(tokio::spawn(task)),
        }
    }
}

impl Connection {
    /// Opens a connection over the stream, with TLS if `tls` is set; `authority` is the server's name.
    async fn establish<S>(
        stream: S,
        tls: Option<&Arc<ClientConfig>>,
        authority: &str,
        target: &Target,
    ) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let token = target.token.clone();
        let Some(tls) = tls else { return Self::open(stream, token).await };
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let stream = TlsConnector::from(Arc::clone(tls)).connect(name, stream).await?;
        Self::open(stream, token).await
    }

    async fn open<S>(stream: S, token: Option<HeaderValue>) -> io::Result<Self>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let (stream, flusher) = coalesce_writes(stream);
        let socket_task = Arc::new(OnceLock::new());
        let executor = Executor { flusher: Arc::new(Mutex::new(Some(flusher))), socket_task: Arc::clone(&socket_task) };
        let (sender, driver) = http2::Builder::new(executor)
            .initial_stream_window_size(STREAM_WINDOW_BYTES)
            .initial_connection_window_size(CONNECTION_WINDOW_BYTES)
            .handshake(TokioIo::new(stream))
            .await
            .map_err(io::Error::other)?;
        // Every request fails when the connection fails, so the error of the driver is ignored.
        tokio::spawn(async { driver.await.ok() });
        Ok(Self { sender, token, _abort_on_drop: Arc::new(AbortOnDrop(socket_task)) })
    }
}

impl Service<Request<Body>> for Connection {
    type Response = Response<Incoming>;
    type Error = hyper::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Self::Response, Self::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Self::Error>> {
        self.sender.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Body>) -> Self::Future {
        if let Some(token) = &self.token {
            request.headers_mut().insert("token", token.clone());
        }
        Box::pin(self.sender.send_request(request))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn refused_connection_names_the_endpoint() {
        let closed = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
        let endpoint = Endpoint { address: Address::Tcp(closed.to_string()), has_tls: false };
        let target = Target { endpoints: vec![endpoint], tls: None, token: None };
        let error = Pool::connect(&target, 1).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(&closed.to_string()), "{error}");
    }
}
