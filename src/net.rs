//! Listeners: binds addresses, accepts connections and serves them.
//!
//! gRPC and HTTP share a port. A connection passes these layers: TLS ([`tls`]), timeouts ([`timeouts`]), rewriting of
//! `:authority` ([`authority`]), pacing ([`orlop_core::overload`]), write coalescing, hyper. The number of connections is
//! limited ([`ConnectionLimit`]).

mod authority;
mod bind;
mod connection_limit;
mod remote;
mod timeouts;
pub mod tls;

use std::{error::Error, io, net::SocketAddr, path::Path, sync::Arc, time::Duration};

use bytes::Bytes;
use http::{Request, Response};
use hyper::{body::Incoming, service::Service};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
};
use tokio::{
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, mpsc, watch},
    task::JoinSet,
    time::{sleep, timeout},
};
use tokio_rustls::server::TlsStream;
use tokio_util::{either::Either, task::AbortOnDropHandle};
use tracing::{debug, error, warn};

use self::{
    authority::AuthorityRewriter,
    bind::{bind_tcp, bind_unix},
    remote::{Client, WithClient},
    timeouts::TimedConnection,
};
pub use self::{
    connection_limit::ConnectionLimit,
    remote::{CertificateUser, Remote, WithTls},
};
use crate::config::{FileMode, ListenUrl, Scheme};
use orlop_core::{
    log_limit::LogLimit,
    overload::{Steps, paced},
    supervise::{catch_panics, vital},
};
use orlop_wire::write_coalescing::coalesce_writes;

/// Flow-control window of a stream, in bytes.
const STREAM_WINDOW: u32 = 2 << 20;
/// Flow-control window of a connection, in bytes. h2 also allows unread small frames, at about 250 bytes each, up to
/// half of it: with 4 MiB, connections that opened 10,000 streams at once were sometimes closed.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// Bytes that a stream buffers for its connection: two chunks of a large response.
const SEND_BUFFER: usize = 128 << 10;
/// Read buffer of an HTTP/1 connection, in bytes, and so the maximum size of a request's headers. The limit is the same
/// with HTTP/2.
const HTTP1_BUFFER: usize = 16 << 10;
/// Maximum number of streams of a connection that the client reset before the server looked at them. After a pause of the
/// server, the calls of a client whose deadlines passed meanwhile arrive together with their resets; hyper's limit of 20
/// would close the connection, with all watches on it.
const PENDING_RESETS_MAX: usize = 1_000;
/// Maximum number of resets by the server in the life of a connection: one for each frame of a call that it has already
/// refused, about ten for a request of 4 MiB. hyper's limit is 1,024. Each takes about 200 bytes until it is sent.
const OWN_RESETS_MAX: usize = 20_000;
/// Maximum time for the headers of a request with HTTP/1, and between two requests.
const HTTP1_IDLE_MAX: Duration = Duration::from_mins(2);
/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;
/// Maximum time until the first byte of a connection to a port that serves http and https.
const FIRST_BYTE_MAX: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example if no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
static ACCEPT_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));
static REJECTED_LOG: LogLimit = LogLimit::every(Duration::from_secs(1));

/// Settings of connections.
#[derive(Clone, Debug)]
pub struct Settings {
    pub max_concurrent_streams: u32,
    /// Time without traffic after which the server sends a keepalive ping. As in etcd, 0 here or as the timeout means
    /// that no pings are sent.
    pub keepalive_interval: Duration,
    pub keepalive_timeout: Duration,
    pub connection_limit: ConnectionLimit,
    /// The queue in which connections wait before they read more.
    pub steps: Arc<Steps>,
}

/// A bound address.
pub struct Listener {
    /// The address, with the actual port if port 0 was requested. There are two if http and https share a port.
    pub urls: Vec<ListenUrl>,
    /// The address as configured.
    address: String,
    socket: Socket,
    security: Security,
}

/// Whether connections use TLS.
#[derive(Clone)]
enum Security {
    Plain,
    Tls(Arc<tls::Acceptor>),
    /// The first byte of a connection tells.
    Either(Arc<tls::Acceptor>),
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// Binds addresses. http and https on the same host and port share a socket.
    ///
    /// # Errors
    ///
    /// If an address cannot be bound, or requires TLS and no certificate is configured. The text contains the address.
    pub async fn bind_all(
        urls: &[ListenUrl],
        tls: Option<&Arc<tls::Acceptor>>,
        socket_mode: FileMode,
    ) -> Result<Vec<Self>, String> {
        let mut listeners: Vec<Self> = Vec::new();
        for url in urls {
            let shared = match url {
                ListenUrl::Tcp(address, _) => listeners.iter_mut().find(|listener| listener.address == *address),
                ListenUrl::Unix(..) => None,
            };
            match (shared, tls) {
                (Some(listener), Some(tls)) => listener.share(url.scheme(), tls),
                (Some(_) | None, _) => listeners.push(Self::bind(url, tls, socket_mode).await?),
            }
        }
        Ok(listeners)
    }

    /// Serves another scheme on the same socket.
    fn share(&mut self, scheme: Scheme, tls: &Arc<tls::Acceptor>) {
        if let [ListenUrl::Tcp(address, bound)] = self.urls.as_slice()
            && *bound != scheme
        {
            self.urls.push(ListenUrl::Tcp(address.clone(), scheme));
            self.security = Security::Either(Arc::clone(tls));
        }
    }

    async fn bind(url: &ListenUrl, tls: Option<&Arc<tls::Acceptor>>, socket_mode: FileMode) -> Result<Self, String> {
        let failed = |error: io::Error| format!("cannot listen on {url}: {error}");
        let security = match (url.scheme(), tls) {
            (Scheme::Tls, None) => {
                return Err(format!("{url} requires a certificate and its key: set cert-file and key-file"));
            }
            (Scheme::Tls, Some(tls)) => Security::Tls(Arc::clone(tls)),
            (Scheme::Plain, tls) => {
                if tls.is_some() && matches!(url, ListenUrl::Tcp(..)) {
                    warn!(%url, "certificates are configured, but this address is served without TLS because its scheme is http");
                }
                Security::Plain
            }
        };
        let (bound, address, socket) = match url {
            ListenUrl::Tcp(address, scheme) => {
                let (socket, bound) = bind_tcp(address).await.map_err(failed)?;
                (ListenUrl::Tcp(bound, *scheme), address.clone(), Socket::Tcp(socket))
            }
            ListenUrl::Unix(path, _) => {
                remove_stale_socket(path).await.map_err(failed)?;
                let socket = bind_unix(path, socket_mode).map_err(failed)?;
                (url.clone(), String::new(), Socket::Unix(socket))
            }
        };
        Ok(Self { urls: vec![bound], address, socket, security })
    }

    /// Serves until `stopping` becomes true and the clients have finished. If the future is dropped, the connections of clients
    /// that have not finished end.
    pub async fn serve<S, R>(self, services: S, settings: Settings, stopping: watch::Receiver<bool>)
    where
        S: Service<Request<Incoming>, Response = Response<R>, Error: Into<BoxError>, Future: Send>,
        S: Clone + Send + 'static,
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let http = http(&settings);
        let steps = Arc::clone(&settings.steps);
        let (connections, accepting) = accept(self.socket, self.security, settings.connection_limit, settings.steps);
        serve_all(connections, accepting, http, services, steps, stopping).await;
        if let [ListenUrl::Unix(path, _)] = self.urls.as_slice() {
            // If this fails, the next start removes the socket.
            let _ = std::fs::remove_file(path);
        }
    }
}

type BoxError = Box<dyn Error + Send + Sync>;
type Http = auto::Builder<TokioExecutor>;

fn http(settings: &Settings) -> Http {
    let mut http = auto::Builder::new(TokioExecutor::new());
    let has_keepalive = !settings.keepalive_interval.is_zero() && !settings.keepalive_timeout.is_zero();
    // The timer enables hyper's time limit for the headers of a request.
    http.http1().timer(TokioTimer::new()).header_read_timeout(HTTP1_IDLE_MAX).max_buf_size(HTTP1_BUFFER);
    http.http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_concurrent_streams(settings.max_concurrent_streams)
        .max_pending_accept_reset_streams(PENDING_RESETS_MAX)
        .max_local_error_reset_streams(OWN_RESETS_MAX)
        .keep_alive_interval(has_keepalive.then_some(settings.keepalive_interval))
        .keep_alive_timeout(settings.keepalive_timeout)
        // gRPC servers do not send this header.
        .auto_date_header(false);
    http
}

/// Serves connections until `stopping` becomes true; open connections then finish their requests.
async fn serve_all<S, R>(
    mut connections: Connections,
    accepting: AbortOnDropHandle<()>,
    http: Http,
    services: S,
    steps: Arc<Steps>,
    mut stopping: watch::Receiver<bool>,
) where
    S: Service<Request<Incoming>, Response = Response<R>, Error: Into<BoxError>, Future: Send>,
    S: Clone + Send + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let graceful = GracefulShutdown::new();
    let mut open = JoinSet::<()>::new();
    loop {
        let connection = tokio::select! {
            biased;
            // First, so that connections that have ended use no memory while clients keep connecting.
            Some(_) = open.join_next() => continue,
            // A dropped sender also stops the server.
            _ = stopping.wait_for(|stopping| *stopping) => None,
            connection = connections.recv() => connection,
        };
        let Some((connection, client)) = connection else { break };
        let (connection, pacer) = paced(connection, &steps);
        let (connection, flusher) = coalesce_writes(connection);
        let services = WithClient::new(services.clone(), client);
        let connection = http.serve_connection(TokioIo::new(connection), services).into_owned();
        let serving = pacer.run(flusher.drive(graceful.watch(connection)));
        open.spawn(async move {
            if let Err(error) = serving.await {
                debug!(error, "connection failed");
            }
        });
    }
    drop((connections, accepting));
    graceful.shutdown().await;
}

/// The stream of a client, from a TCP socket (left) or a unix socket.
type Stream = Either<TcpStream, UnixStream>;
/// A client's connection, without TLS (left) or with it.
type Connection = Either<Stream, Box<TlsStream<Stream>>>;
type Accepted = AuthorityRewriter<TimedConnection<Connection>>;
type Connections = mpsc::Receiver<(Accepted, Client)>;

impl Socket {
    /// Accepts the next client. Returns its stream and its address.
    async fn accept(&self) -> io::Result<(Stream, String)> {
        match self {
            Self::Tcp(socket) => {
                let (stream, remote) = socket.accept().await?;
                // Fails only if the client has disconnected; the first read reports that.
                let _ = stream.set_nodelay(true);
                // A socket for IPv6 and IPv4 has clients of IPv4 with mapped addresses.
                let remote = SocketAddr::new(remote.ip().to_canonical(), remote.port());
                Ok((Either::Left(stream), remote.to_string()))
            }
            Self::Unix(socket) => {
                let (stream, _) = socket.accept().await?;
                Ok((Either::Right(stream), "@".to_owned()))
            }
        }
    }
}

/// Waits for the next client.
///
/// If no file descriptor is free, the socket stays ready and accept fails; the pause prevents a busy loop.
async fn next_client(socket: &Socket) -> (Stream, String) {
    loop {
        match socket.accept().await {
            Ok(accepted) => return accepted,
            // The client disconnected before it was accepted.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => {
                debug!(%error, "client disconnected before it was accepted")
            }
            Err(error) => {
                if ACCEPT_LOG.count().is_some() {
                    warn!(
                        %error,
                        "cannot accept a connection; trying again. If too many files are open, raise the limit on file descriptors (ulimit -n, LimitNOFILE)"
                    );
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

/// Returns accepted connections whose TLS handshake is complete. Dropping the handle stops accepting.
fn accept(
    socket: Socket,
    security: Security,
    connection_limit: ConnectionLimit,
    steps: Arc<Steps>,
) -> (Connections, AbortOnDropHandle<()>) {
    let (ready, connections) = mpsc::channel(1);
    let accepting = vital("a listener", accept_all(socket, security, connection_limit, steps, ready));
    (connections, AbortOnDropHandle::new(accepting))
}

async fn accept_all(
    socket: Socket,
    security: Security,
    connection_limit: ConnectionLimit,
    steps: Arc<Steps>,
    ready: mpsc::Sender<(Accepted, Client)>,
) {
    let idle_time_max = connection_limit.idle_time_max();
    loop {
        let permit = connection_limit.acquire().await;
        let (stream, remote) = next_client(&socket).await;
        // Each connection waits for its turn, so that clients that reconnect continuously do not delay others.
        steps.request().await;
        if let Security::Plain = &security {
            // Fails only while the server stops.
            let connection = Either::Left(stream);
            let client = client(&connection, &remote);
            let _ = ready.send((accepted(connection, permit, idle_time_max), client)).await;
            continue;
        }
        let (security, ready) = (security.clone(), ready.clone());
        tokio::spawn(async move {
            match catch_panics(secure(stream, &security)).await {
                Ok(Ok(connection)) => {
                    let client = client(&connection, &remote);
                    drop(ready.send((accepted(connection, permit, idle_time_max), client)).await);
                }
                Ok(Err(error)) => {
                    if let Some(count) = REJECTED_LOG.count() {
                        // etcd's message and fields.
                        warn!("remote-addr" = remote, %error, count, "rejected connection on client endpoint");
                    }
                }
                Err(panic) => error!(%remote, place = panic.place, message = panic.message, "TLS handshake panicked"),
            }
        });
    }
}

/// Makes the TLS handshake unless the client begins without one and may.
async fn secure(stream: Stream, security: &Security) -> io::Result<Connection> {
    let tls = match security {
        Security::Plain => return Ok(Either::Left(stream)),
        Security::Tls(tls) => tls,
        Security::Either(tls) => {
            let first = timeout(FIRST_BYTE_MAX, begins_with_tls(&stream)).await;
            if !first.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? {
                return Ok(Either::Left(stream));
            }
            tls
        }
    };
    tls.accept(stream).await.map(|stream| Either::Right(Box::new(stream)))
}

/// Returns whether the client begins with a TLS handshake. Waits for its first byte, which remains to be read.
async fn begins_with_tls(stream: &Stream) -> io::Result<bool> {
    let Either::Left(stream) = stream else {
        return Err(io::Error::new(io::ErrorKind::Unsupported, "a unix socket has one scheme"));
    };
    let mut first = [0];
    let bytes = stream.peek(&mut first).await?;
    Ok(bytes > 0 && first == [TLS_HANDSHAKE])
}

fn accepted(connection: Connection, permit: OwnedSemaphorePermit, idle_time_max: Option<Duration>) -> Accepted {
    AuthorityRewriter::new(TimedConnection::new(connection, permit, idle_time_max))
}

/// Returns the client of a connection. Its certificate was verified in the handshake.
fn client(connection: &Connection, address: &str) -> Client {
    let remote = Remote::new(address);
    let Either::Right(stream) = connection else { return Client { remote, certificate: None, scheme: Scheme::Plain } };
    let certificate = stream.get_ref().1.peer_certificates().and_then(<[_]>::first);
    let certificate = certificate.and_then(tls::common_name).map(CertificateUser::new);
    Client { remote, certificate, scheme: Scheme::Tls }
}

/// Removes the socket of a server that was killed. If the socket is in use, it remains, and binding fails.
async fn remove_stale_socket(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Ok(_) | Err(_) => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use axum::{Router, routing::get};
    use hyper_util::service::TowerToHyperService;
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

    use super::*;

    /// A request that never ends keeps its connection open when the server stops.
    #[tokio::test]
    async fn connections_end_with_the_task_that_serves_them() {
        const DEADLINE: Duration = Duration::from_secs(30);
        let (steps, grant_steps) = Steps::new();
        vital("the step scheduler", grant_steps);
        let settings = Settings {
            max_concurrent_streams: 1,
            keepalive_interval: Duration::ZERO,
            keepalive_timeout: Duration::ZERO,
            connection_limit: ConnectionLimit::for_pages(),
            steps,
        };
        let url: ListenUrl = "http://127.0.0.1:0".parse().expect("a URL");
        let mut listeners = Listener::bind_all(&[url], None, FileMode(0o600)).await.expect("a port is free");
        let listener = listeners.pop().expect("a listener");
        let Some(ListenUrl::Tcp(address, _)) = listener.urls.first().cloned() else { panic!("a TCP address") };
        let (arrived, mut arrival) = mpsc::channel(1);
        let endless = move || {
            let arrived = arrived.clone();
            async move {
                let _ = arrived.send(()).await;
                std::future::pending::<()>().await;
            }
        };
        let routes: Router = Router::new().route("/", get(endless));
        let service = TowerToHyperService::new(routes);
        let (stop, stopping) = watch::channel(false);
        let serving = tokio::spawn(listener.serve(service, settings, stopping));
        let mut client = TcpStream::connect(&address).await.expect("a connection");
        client.write_all(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n").await.expect("a request");
        timeout(DEADLINE, arrival.recv()).await.expect("the request arrives").expect("the request arrives");
        stop.send_replace(true);
        serving.abort();
        let ended = timeout(DEADLINE, client.read_to_end(&mut Vec::new())).await;
        assert!(ended.is_ok(), "the connection is open");
    }
}
