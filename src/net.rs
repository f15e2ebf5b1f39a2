//! Listeners: binds addresses, accepts connections and serves them.
//!
//! gRPC and HTTP share a port. A connection is assigned to a thread ([`Workers`]) and passes these layers: TLS ([`tls`]),
//! timeouts ([`timeouts`]), rewriting of `:authority` ([`authority`]), pacing ([`orlop_core::overload`]), write coalescing,
//! hyper. The number of connections is limited ([`ConnectionLimit`]).

mod accept;
mod authority;
mod connection_limit;
mod log_limit;
mod remote;
mod timeouts;
pub mod tls;
mod workers;

use std::{
    error::Error, fs::Permissions, io, os::unix::fs::PermissionsExt as _, path::Path, sync::Arc, time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use hyper::{body::Incoming, service::Service};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
};
use tokio::{
    io::{AsyncRead, AsyncWrite},
    net::{TcpListener, UnixListener, UnixSocket, UnixStream},
    sync::watch,
};
use tracing::{debug, warn};

use self::{
    accept::{AbortOnDropHandle, Connections, accept},
    remote::WithClient,
};
pub use self::{
    connection_limit::ConnectionLimit,
    remote::{CertificateName, Remote},
    workers::Workers,
};
use crate::config::{FileMode, ListenUrl, Scheme};
use orlop_core::overload::{Steps, paced};
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
/// Maximum number of clients that wait to be accepted on a unix socket; the value of the standard library.
const BACKLOG: u32 = 128;

/// Settings of connections.
#[derive(Clone, Debug)]
pub struct Settings {
    pub max_concurrent_streams: u32,
    /// Time without traffic after which the server sends a keepalive ping.
    pub keepalive_interval: Duration,
    pub keepalive_timeout: Duration,
    pub connection_limit: ConnectionLimit,
    /// The queue in which connections wait before they read more.
    pub steps: Arc<Steps>,
    /// The threads that serve the connections.
    pub workers: Workers,
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

    /// Serves until `stopping` becomes true and the clients have finished.
    pub async fn serve<S, R>(self, services: S, settings: Settings, stopping: watch::Receiver<bool>)
    where
        S: Service<Request<Incoming>, Response = Response<R>, Error: Into<BoxError>, Future: Send>,
        S: Clone + Send + 'static,
        R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
    {
        let http = http(&settings);
        let steps = Arc::clone(&settings.steps);
        match self.socket {
            Socket::Tcp(socket) => {
                let (connections, accepting) = accept(socket, self.security, settings);
                serve_all(connections, accepting, http, services, steps, stopping).await;
            }
            Socket::Unix(socket) => {
                let (connections, accepting) = accept(socket, self.security, settings);
                serve_all(connections, accepting, http, services, steps, stopping).await;
            }
        }
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
    // The timer enables hyper's time limit for the headers of a request.
    http.http1().timer(TokioTimer::new()).max_buf_size(HTTP1_BUFFER);
    http.http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_concurrent_streams(settings.max_concurrent_streams)
        .keep_alive_interval(settings.keepalive_interval)
        .keep_alive_timeout(settings.keepalive_timeout)
        // gRPC servers do not send this header.
        .auto_date_header(false);
    http
}

/// Serves connections until `stopping` becomes true; open connections then finish their requests.
async fn serve_all<C, S, R>(
    mut connections: Connections<C>,
    accepting: AbortOnDropHandle,
    http: Http,
    services: S,
    steps: Arc<Steps>,
    mut stopping: watch::Receiver<bool>,
) where
    C: AsyncRead + AsyncWrite + Unpin + Send + 'static,
    S: Service<Request<Incoming>, Response = Response<R>, Error: Into<BoxError>, Future: Send>,
    S: Clone + Send + 'static,
    R: http_body::Body<Data = Bytes, Error: Into<BoxError>> + Send + 'static,
{
    let graceful = GracefulShutdown::new();
    loop {
        let connection = tokio::select! {
            connection = connections.recv() => connection,
            // A dropped sender also stops the server.
            _ = stopping.wait_for(|stopping| *stopping) => None,
        };
        let Some((connection, client, seat)) = connection else { break };
        let (connection, pacer) = paced(connection, &steps);
        let (connection, flusher) = coalesce_writes(connection);
        let services = WithClient::new(services.clone(), client);
        let connection = http.serve_connection(TokioIo::new(connection), services).into_owned();
        let serving = pacer.run(flusher.drive(graceful.watch(connection)));
        seat.runtime().spawn(async move {
            if let Err(error) = serving.await {
                debug!(error, "connection failed");
            }
            drop(seat);
        });
    }
    drop((connections, accepting));
    graceful.shutdown().await;
}

/// Binds a TCP address. Returns the socket, and the address with its actual port. The host remains as configured, so
/// that the advertised name matches certificates.
async fn bind_tcp(address: &str) -> io::Result<(TcpListener, String)> {
    let socket = TcpListener::bind(address).await?;
    let port = socket.local_addr()?.port();
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    Ok((socket, format!("{host}:{port}")))
}

/// Binds a unix socket. Sets its mode before clients can connect.
fn bind_unix(path: &Path, mode: FileMode) -> io::Result<UnixListener> {
    let socket = UnixSocket::new_stream()?;
    socket.bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode.0))?;
    socket.listen(BACKLOG)
}

/// Removes the socket of a server that was killed. If the socket is in use, it remains, and binding fails.
async fn remove_stale_socket(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Ok(_) | Err(_) => Ok(()),
    }
}
