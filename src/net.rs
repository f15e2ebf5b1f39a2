//! Addresses that clients come to: bound, accepted from, and served.
//!
//! gRPC and plain HTTP share a port. A client that takes long to say who it is holds up nobody else, and is let go; as many
//! may be connected as there are file descriptors for, but for those that the server itself needs ([`Places`]).

mod authority;
mod guard;
mod places;
mod seldom;
pub mod tls;

use std::{
    error::Error,
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use bytes::Bytes;
use http::{Request, Response};
use hyper::{body::Incoming, service::Service};
use hyper_util::{
    rt::{TokioExecutor, TokioIo, TokioTimer},
    server::{conn::auto, graceful::GracefulShutdown},
};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixSocket, UnixStream},
    sync::{mpsc, watch},
    task::JoinHandle,
    time::sleep,
};
use tokio_rustls::server::TlsStream;
use tracing::{debug, error, warn};

pub use self::places::Places;
use self::{guard::Guarded, seldom::Seldom};
use crate::config::{FileMode, ListenUrl, Scheme};
use orlop_core::{
    overload::{Steps, paced},
    supervise::{caught, vital},
};
use orlop_wire::write_coalescing::coalesce_writes;

/// What a client may send on a stream, and on a connection, before it is read. Bytes.
const STREAM_WINDOW: u32 = 2 << 20;
/// Half of it is also what h2 allows for small frames that were not read yet, at some 250 bytes each: 10,000 streams may
/// begin at once, which with half of this window ended their connection now and then.
const CONNECTION_WINDOW: u32 = 8 << 20;
/// What waits on a stream for its connection to send it. Two pieces of a large answer.
const SEND_BUFFER: usize = 128 << 10;
/// What is read of an HTTP/1 connection at once, which many that send without end share the server by. Headers have to fit,
/// as HTTP/2's do.
const HTTP1_BUFFER: usize = 16 << 10;
/// Clients that wait to be accepted on a unix socket, as many as the standard library has it.
const BACKLOG: u32 = 128;
/// Pause after the system would give no connection, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
static NOT_ACCEPTED: Seldom = Seldom::new();

/// How connections are treated.
#[derive(Clone, Debug)]
pub struct Settings {
    pub max_concurrent_streams: u32,
    /// A connection that is silent for this long is asked whether it is still there.
    pub keepalive_interval: Duration,
    pub keepalive_timeout: Duration,
    pub places: Places,
    /// The queue in which connections wait to read on.
    pub steps: Arc<Steps>,
}

/// A bound address.
pub struct Listener {
    /// A port of 0 has become a real one.
    pub url: ListenUrl,
    socket: Socket,
    tls: Option<Arc<tls::Acceptor>>,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

impl Listener {
    /// # Errors
    ///
    /// If the address cannot be bound, or is to speak TLS without certificates; the text names it.
    pub async fn bind(
        url: &ListenUrl,
        tls: Option<&Arc<tls::Acceptor>>,
        socket_mode: FileMode,
    ) -> Result<Self, String> {
        let failed = |error: io::Error| format!("cannot listen on {url}: {error}");
        let tls = match (url.scheme(), tls) {
            (Scheme::Tls, None) => {
                return Err(format!("{url} needs a certificate and its key: give cert-file and key-file"));
            }
            (Scheme::Tls, Some(tls)) => Some(Arc::clone(tls)),
            (Scheme::Plain, tls) => {
                if tls.is_some() && matches!(url, ListenUrl::Tcp(..)) {
                    warn!(%url, "this address is served without TLS, though there are certificates: its scheme is http");
                }
                None
            }
        };
        match url {
            ListenUrl::Tcp(address, scheme) => {
                let (socket, address) = bind_tcp(address).await.map_err(failed)?;
                Ok(Self { url: ListenUrl::Tcp(address, *scheme), socket: Socket::Tcp(socket), tls })
            }
            ListenUrl::Unix(path, _) => {
                remove_stale(path).await.map_err(failed)?;
                let socket = bind_unix(path, socket_mode).map_err(failed)?;
                Ok(Self { url: url.clone(), socket: Socket::Unix(socket), tls })
            }
        }
    }

    /// Serves until `stopping` turns true and the clients have finished.
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
                let (connections, accepting) = accept(socket, self.tls, settings.places, settings.steps);
                serve_all(connections, accepting, http, services, steps, stopping).await;
            }
            Socket::Unix(socket) => {
                let (connections, accepting) = accept(socket, self.tls, settings.places, settings.steps);
                serve_all(connections, accepting, http, services, steps, stopping).await;
            }
        }
        if let ListenUrl::Unix(path, _) = &self.url {
            // What is left over is cleared at the next start.
            let _ = std::fs::remove_file(path);
        }
    }
}

type BoxError = Box<dyn Error + Send + Sync>;
type Http = auto::Builder<TokioExecutor>;

fn http(settings: &Settings) -> Http {
    let mut http = auto::Builder::new(TokioExecutor::new());
    // With it goes a limit on how long the headers of a request may take.
    http.http1().timer(TokioTimer::new()).max_buf_size(HTTP1_BUFFER);
    http.http2()
        .timer(TokioTimer::new())
        .initial_stream_window_size(STREAM_WINDOW)
        .initial_connection_window_size(CONNECTION_WINDOW)
        .max_send_buf_size(SEND_BUFFER)
        .max_concurrent_streams(settings.max_concurrent_streams)
        .keep_alive_interval(settings.keepalive_interval)
        .keep_alive_timeout(settings.keepalive_timeout)
        // No gRPC server sends one, and no client looks at it.
        .auto_date_header(false);
    http
}

/// Until there are no more connections: those that are there finish what they have begun.
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
    let served = GracefulShutdown::new();
    loop {
        let connection = tokio::select! {
            connection = connections.recv() => connection,
            // A sender that is gone means the same.
            _ = stopping.wait_for(|stopping| *stopping) => None,
        };
        let Some(connection) = connection else { break };
        let (connection, pacer) = paced(connection, &steps);
        let (connection, flusher) = coalesce_writes(connection);
        let connection = http.serve_connection(TokioIo::new(connection), services.clone()).into_owned();
        let serving = pacer.run(flusher.drive(served.watch(connection)));
        tokio::spawn(async move {
            if let Err(error) = serving.await {
                debug!(error, "a connection broke");
            }
        });
    }
    drop((connections, accepting));
    served.shutdown().await;
}

/// The socket, and the address with its real port. The host stays as it was written, so that clients are told a name that
/// fits their certificates.
async fn bind_tcp(address: &str) -> io::Result<(TcpListener, String)> {
    let socket = TcpListener::bind(address).await?;
    let port = socket.local_addr()?.port();
    let host = address.rsplit_once(':').map_or(address, |(host, _)| host);
    Ok((socket, format!("{host}:{port}")))
}

/// Nobody can connect before the socket has its mode.
fn bind_unix(path: &Path, mode: FileMode) -> io::Result<UnixListener> {
    let socket = UnixSocket::new_stream()?;
    socket.bind(path)?;
    std::fs::set_permissions(path, Permissions::from_mode(mode.0))?;
    socket.listen(BACKLOG)
}

/// A socket that clients come to.
trait Accept: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// The next client, and a name for it.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, String)>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, String)> {
        let (stream, remote) = Self::accept(self).await?;
        // It fails for a client that is gone, of which whoever serves it hears.
        let _ = stream.set_nodelay(true);
        Ok((stream, remote.to_string()))
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, String)> {
        Self::accept(self).await.map(|(stream, _)| (stream, "@".to_owned()))
    }
}

/// Waits for the next client, however long the system gives none.
///
/// While file descriptors are wanting a socket is ready at once, again and again: without a pause that would take a core.
async fn next_client<L: Accept>(socket: &L) -> (L::Stream, String) {
    loop {
        match socket.accept().await {
            Ok(accepted) => return accepted,
            // The client went before its turn came.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => debug!(%error, "a client is gone again"),
            Err(error) => {
                if NOT_ACCEPTED.happens().is_some() {
                    warn!(
                        %error,
                        "cannot accept a connection; trying again. If there are too many open files, raise the limit of \
                         file descriptors (ulimit -n, LimitNOFILE)"
                    );
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

type Connections<S> = mpsc::Receiver<Guarded<Connection<S>>>;

/// Those who have said who they are; nobody is accepted any more when the second is dropped.
fn accept<L: Accept>(
    socket: L,
    tls: Option<Arc<tls::Acceptor>>,
    places: Places,
    steps: Arc<Steps>,
) -> (Connections<L::Stream>, AbortOnDropHandle) {
    let (ready, connections) = mpsc::channel(1);
    let accepting = vital("a listener", accept_all(socket, tls, places, steps, ready));
    (connections, AbortOnDropHandle(accepting))
}

struct AbortOnDropHandle(JoinHandle<()>);

impl Drop for AbortOnDropHandle {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn accept_all<L: Accept>(
    socket: L,
    tls: Option<Arc<tls::Acceptor>>,
    places: Places,
    steps: Arc<Steps>,
    ready: mpsc::Sender<Guarded<Connection<L::Stream>>>,
) {
    loop {
        let place = places.take().await;
        let (stream, remote) = next_client(&socket).await;
        // One connection is set up per step: clients may connect again and again.
        steps.request().await;
        let Some(tls) = &tls else {
            // Nobody takes it any more once the server goes down.
            let _ = ready.send(Guarded::new(Connection::Plain(stream), place)).await;
            continue;
        };
        let (tls, ready) = (Arc::clone(tls), ready.clone());
        tokio::spawn(async move {
            match caught(tls.accept(stream)).await {
                Ok(Ok(stream)) => {
                    drop(ready.send(Guarded::new(Connection::Tls(Box::new(stream)), place)).await);
                }
                Ok(Err(error)) => debug!(%remote, %error, "rejected connection"),
                Err(panic) => error!(%remote, place = panic.place, message = panic.message, "a handshake panicked"),
            }
        });
    }
}

/// What a client's bytes come by.
enum Connection<S> {
    Plain(S),
    Tls(Box<TlsStream<S>>),
}

/// The same call of either.
macro_rules! either {
    ($connection:expr, $stream:ident => $call:expr) => {
        match $connection.get_mut() {
            Connection::Plain($stream) => $call,
            Connection::Tls($stream) => $call,
        }
    };
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Connection<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_read(context, buffer))
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for Connection<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write(context, bytes))
    }

    fn poll_flush(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_flush(context))
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        either!(self, stream => Pin::new(stream).poll_shutdown(context))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        either!(self, stream => Pin::new(stream).poll_write_vectored(context, buffers))
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }
}

/// Clears a socket that a killed server left behind; one that is in use stays, and binding it fails.
async fn remove_stale(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Ok(_) | Err(_) => Ok(()),
    }
}
