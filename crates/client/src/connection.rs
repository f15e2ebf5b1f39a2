//! One connection to an endpoint.
//!
//! A [`Connection`] is one HTTP/2 connection of hyper, used directly: tonic's channel would add a queue and a task to
//! each request.

use std::{
    future::Future,
    io,
    pin::Pin,
    sync::{Arc, OnceLock},
    task::{Context, Poll},
    time::Duration,
};

use http::{HeaderValue, Request, Response, Uri, uri::PathAndQuery};
use http_body_util::{BodyExt as _, Full};
use hyper::{
    body::{Bytes, Incoming},
    client::conn::{
        http1,
        http2::{self, SendRequest},
    },
};
use hyper_util::rt::TokioIo;
use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpStream, UnixStream},
    task::AbortHandle,
    time::timeout,
};
use tokio_rustls::{TlsConnector, rustls::pki_types::ServerName};
use tokio_util::{either::Either, task::AbortOnDropHandle};
use tonic::{Code, Status, body::Body};
use tower_service::Service;

use crate::{
    Error, MetricsPage, describe, dial,
    endpoint::{Address, Endpoint, Target},
    mismatch::{Tls, explained, needs_tls},
};
use orlop_wire::proto::client::etcdserverpb::{
    AuthenticateRequest, auth_client::AuthClient, cluster_client::ClusterClient, kv_client::KvClient,
    lease_client::LeaseClient, maintenance_client::MaintenanceClient, watch_client::WatchClient,
};
use orlop_wire::proto::client::orlopb::{history_client::HistoryClient, insight_client::InsightClient};
use orlop_wire::proto::client::v3lockpb::lock_client::LockClient;
use orlop_wire::write_coalescing::{Flusher, coalesce_writes};

/// HTTP/2 flow-control windows, large enough that the server never waits for a WINDOW_UPDATE frame.
const STREAM_WINDOW_BYTES: u32 = 16 << 20;
const CONNECTION_WINDOW_BYTES: u32 = 32 << 20;

const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// Maximum time to wait for the first response. A server that is starting answers later.
const FIRST_ANSWER_MAX: Duration = Duration::from_secs(1);
const HEALTH_CHECK: &str = "grpc.health.v1.Health/Check";
const METRICS: &str = "/metrics";

/// etcd's services over one shared connection.
#[derive(Clone)]
pub struct Client {
    connection: Connection,
    origin: Uri,
    endpoint: Arc<Endpoint>,
}

impl Client {
    /// Connects to `endpoint` with the TLS settings and the token of `target`.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`], also if the server does not accept within 5 seconds.
    pub async fn connect(endpoint: &Endpoint, target: &Target) -> Result<Self, Error> {
        let connected = timeout(CONNECT_TIMEOUT, Self::establish(endpoint, target)).await;
        let client = connected.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)));
        let client = client.map_err(|source| explained(source, endpoint));
        client.map_err(|source| Error::Connect { endpoint: endpoint.to_string(), source })
    }

    async fn establish(endpoint: &Endpoint, target: &Target) -> io::Result<Self> {
        let tls = target.tls.as_ref().filter(|_| endpoint.has_tls);
        let (stream, authority) = match &endpoint.address {
            Address::Tcp(authority) => {
                let stream = dial::connect(authority).await?;
                stream.set_nodelay(true)?;
                (Either::Left(stream), authority.as_str())
            }
            Address::Unix(path) => (Either::Right(UnixStream::connect(path).await?), "localhost"),
        };
        let connection = Connection::establish(stream, tls, authority, target).await?;
        let scheme = if endpoint.has_tls { "https" } else { "http" };
        let origin = Uri::builder().scheme(scheme).authority(authority).path_and_query("/").build();
        let origin = origin.map_err(io::Error::other)?;
        let client = Self { connection, origin, endpoint: Arc::new(endpoint.clone()) };
        client.check_first_answer(tls).await?;
        Ok(client)
    }

    /// Checks that the server answers. A server with TLS accepts a connection without it, and breaks it only when it
    /// has read the beginning; one that requires a client certificate breaks it after the client's handshake. The
    /// request is one of gRPC, because etcd 3.4 closes a connection with another one.
    async fn check_first_answer(&self, tls: Option<&Tls>) -> io::Result<()> {
        let uri = format!("{}{HEALTH_CHECK}", self.origin).parse::<Uri>().map_err(io::Error::other)?;
        let empty_message = Full::<Bytes>::from(&[0; 5][..]);
        let request = Request::post(uri)
            .header(http::header::CONTENT_TYPE, "application/grpc")
            .header(http::header::TE, "trailers")
            .body(Body::new(empty_message))
            .map_err(io::Error::other)?;
        match timeout(FIRST_ANSWER_MAX, self.connection.clone().call(request)).await {
            Ok(Err(_)) => match tls {
                // The next request reports another cause.
                Some(tls) => tls.refusal().map_or(Ok(()), Err),
                None => Err(needs_tls(&self.endpoint.address)),
            },
            // Any response; or the server is starting.
            Ok(Ok(_)) | Err(_) => Ok(()),
        }
    }

    /// Connects over an open stream without TLS, for example to a server in the same process. `endpoint` is the name of
    /// the server in errors.
    ///
    /// # Errors
    ///
    /// [`Error::Connect`].
    pub async fn over<S>(stream: S, endpoint: &Endpoint) -> Result<Self, Error>
    where
        S: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    {
        let connection = Connection::open(Box::new(stream), None).await;
        let connection = connection.map_err(|source| Error::Connect { endpoint: endpoint.to_string(), source })?;
        let origin = Uri::from_static("http://localhost/");
        Ok(Self { connection, origin, endpoint: Arc::new(endpoint.clone()) })
    }

    /// Returns a client of the same connection that sends another token with every request, or none.
    pub fn with_token(&self, token: Option<HeaderValue>) -> Self {
        let connection = Connection { token, ..self.connection.clone() };
        Self { connection, ..self.clone() }
    }

    /// Returns a token for the user; `None` if authentication is disabled.
    ///
    /// # Errors
    ///
    /// [`Error::LogIn`].
    pub async fn log_in(&self, name: String, password: String) -> Result<Option<HeaderValue>, Error> {
        let failed = |error: String| Error::LogIn { endpoint: self.endpoint.to_string(), error };
        match self.auth().authenticate(AuthenticateRequest { name, password }).await {
            Ok(response) => {
                let token = HeaderValue::try_from(response.into_inner().token);
                token.map(Some).map_err(|error| failed(error.to_string()))
            }
            Err(status) if status.code() == Code::FailedPrecondition => Ok(None),
            Err(status) => Err(failed(describe(&status))),
        }
    }

    /// Returns the connection, for clients that this type does not have.
    pub fn connection(&self) -> &Connection {
        &self.connection
    }

    /// Returns the scheme and the authority of the endpoint.
    pub fn origin(&self) -> &Uri {
        &self.origin
    }

    pub fn kv(&self) -> KvClient<Connection> {
        KvClient::with_origin(self.connection.clone(), self.origin.clone()).max_decoding_message_size(usize::MAX)
    }

    /// Returns the service that only Orlop has.
    pub fn history(&self) -> HistoryClient<Connection> {
        HistoryClient::with_origin(self.connection.clone(), self.origin.clone()).max_decoding_message_size(usize::MAX)
    }

    pub fn maintenance(&self) -> MaintenanceClient<Connection> {
        MaintenanceClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    pub fn leases(&self) -> LeaseClient<Connection> {
        LeaseClient::with_origin(self.connection.clone(), self.origin.clone()).max_decoding_message_size(usize::MAX)
    }

    pub fn cluster(&self) -> ClusterClient<Connection> {
        ClusterClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    /// Returns the service that only Orlop has.
    pub fn insight(&self) -> InsightClient<Connection> {
        InsightClient::with_origin(self.connection.clone(), self.origin.clone()).max_decoding_message_size(usize::MAX)
    }

    pub fn watch(&self) -> WatchClient<Connection> {
        WatchClient::with_origin(self.connection.clone(), self.origin.clone()).max_decoding_message_size(usize::MAX)
    }

    pub fn auth(&self) -> AuthClient<Connection> {
        AuthClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    pub fn locks(&self) -> LockClient<Connection> {
        LockClient::with_origin(self.connection.clone(), self.origin.clone())
    }

    /// Returns the metrics of the server. etcd without TLS serves them at this address only to clients of HTTP/1.
    ///
    /// # Errors
    ///
    /// If the connection is lost or the server has no metrics at this address.
    pub async fn metrics(&self) -> Result<MetricsPage, Status> {
        let page = match self.get(METRICS).await {
            Err(status) => match &self.endpoint.address {
                Address::Tcp(authority) if !self.endpoint.has_tls => get_over_http1(authority, METRICS).await?,
                Address::Tcp(_) | Address::Unix(_) => return Err(status),
            },
            Ok(page) => page,
        };
        Ok(MetricsPage::new(page))
    }

    /// Sends an HTTP GET request; returns the body of the response.
    ///
    /// # Errors
    ///
    /// If the connection is lost or the response is not successful.
    pub async fn get(&self, path: &'static str) -> Result<String, Status> {
        let mut uri = self.origin.clone().into_parts();
        uri.path_and_query = Some(PathAndQuery::from_static(path));
        let request = Uri::from_parts(uri).ok().and_then(|uri| Request::get(uri).body(Body::empty()).ok());
        let Some(request) = request else { return Err(Status::internal("the endpoint is not a valid HTTP address")) };
        let mut connection = self.connection.clone();
        std::future::poll_fn(|cx| connection.poll_ready(cx)).await.map_err(connection_lost)?;
        let response = connection.call(request).await.map_err(connection_lost)?;
        if !response.status().is_success() {
            return Err(Status::unknown(format!("GET {path} returned {}", response.status())));
        }
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

/// Sends an HTTP/1 GET request over a new connection; returns the body of the response.
async fn get_over_http1(authority: &str, path: &'static str) -> Result<String, Status> {
    let exchange = async {
        let stream = dial::connect(authority).await?;
        let (mut sender, connection) = http1::handshake(TokioIo::new(stream)).await.map_err(io::Error::other)?;
        let driver = AbortOnDropHandle::new(tokio::spawn(connection));
        let request = Request::get(path).header(http::header::HOST, authority).body(Body::empty());
        let response = sender.send_request(request.map_err(io::Error::other)?).await.map_err(io::Error::other)?;
        if !response.status().is_success() {
            return Err(io::Error::other(format!("GET {path} returned {}", response.status())));
        }
        let text = response.into_body().collect().await.map_err(io::Error::other)?.to_bytes();
        drop(driver);
        Ok(String::from_utf8_lossy(&text).into_owned())
    };
    let exchanged = timeout(CONNECT_TIMEOUT, exchange).await;
    let exchanged = exchanged.unwrap_or_else(|_| Err(io::Error::from(io::ErrorKind::TimedOut)));
    exchanged.map_err(|error| Status::unavailable(error.to_string()))
}

/// Converts an error of hyper to a status.
pub fn connection_lost(error: hyper::Error) -> Status {
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

/// The stream of a connection: a socket, TLS over it, or a pipe. It is boxed, so that hyper is compiled for one type.
trait Io: AsyncRead + AsyncWrite + Unpin + Send {}

impl<S: AsyncRead + AsyncWrite + Unpin + Send> Io for S {}

type Stream = Box<dyn Io>;

/// Spawns hyper's tasks. The first owns the socket and is driven by the flusher; the others belong to requests.
#[derive(Clone)]
struct Executor {
    flusher: Arc<Mutex<Option<Flusher<Stream>>>>,
    socket_task: Arc<OnceLock<AbortHandle>>,
}

impl<F> hyper::rt::Executor<F> for Executor
where
    F: Future + Send + 'static,
    F::Output: Send + 'static,
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
    async fn establish(
        stream: Either<TcpStream, UnixStream>,
        tls: Option<&Tls>,
        authority: &str,
        target: &Target,
    ) -> io::Result<Self> {
        let token = target.token.clone();
        let Some(tls) = tls else { return Self::open(Box::new(stream), token).await };
        let host = authority.rsplit_once(':').map_or(authority, |(host, _)| host);
        let host = host.trim_start_matches('[').trim_end_matches(']').to_owned();
        let name = ServerName::try_from(host).map_err(io::Error::other)?;
        let connector = TlsConnector::from(Arc::clone(&tls.config));
        let stream = connector.connect(name, stream).await.map_err(|error| tls.explained(error))?;
        Self::open(Box::new(stream), token).await.map_err(|error| tls.explained(error))
    }

    async fn open(stream: Stream, token: Option<HeaderValue>) -> io::Result<Self> {
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
        let error = Client::connect(&target.endpoints[0], &target).await.map(|_| ()).unwrap_err().to_string();
        assert!(error.contains(&closed.to_string()), "{error}");
    }
}
