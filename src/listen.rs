//! Addresses that clients come to: bound, accepted from, and served.
//!
//! gRPC and plain HTTP share a port. A client that takes long to say who it is holds up nobody else.

pub mod tls;

use std::{
    fmt,
    fs::Permissions,
    io,
    os::unix::fs::PermissionsExt as _,
    path::Path,
    pin::Pin,
    sync::Arc,
    task::{Context, Poll},
    time::Duration,
};

use futures_util::{Stream, stream::unfold};
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixSocket, UnixStream},
    sync::{Semaphore, mpsc, watch},
    task::JoinHandle,
    time::{Instant, sleep},
};
use tokio_rustls::server::TlsStream;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{
    service::Routes,
    transport::{Server, server::Connected},
};
use tracing::{debug, error, warn};

use crate::{
    config::{FileMode, ListenUrl, Scheme},
    supervise::{caught, vital},
};

/// What a client may send on a stream, and on a connection, before it is read. Bytes.
const STREAM_WINDOW: u32 = 2 << 20;
const CONNECTION_WINDOW: u32 = 16 << 20;
/// Handshakes at the same time; who comes then waits in the system's queue.
const HANDSHAKES_MAX: usize = 512;
/// Clients that wait to be accepted on a unix socket, as many as the standard library has it.
const BACKLOG: u32 = 128;
/// Pause after the system would give no connection, for example for want of file descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// How often that is said.
const ACCEPT_TELL_INTERVAL: Duration = Duration::from_secs(5);

/// How connections are treated.
#[derive(Clone, Copy, Debug)]
pub struct Settings {
    pub max_concurrent_streams: u32,
    /// A connection that is silent for this long is asked whether it is still there.
    pub keepalive_interval: Duration,
    pub keepalive_timeout: Duration,
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
    pub async fn serve(
        self,
        routes: Routes,
        settings: Settings,
        mut stopping: watch::Receiver<bool>,
    ) -> Result<(), tonic::transport::Error> {
        let stopped = async move {
            // A sender that is gone means the same.
            let _ = stopping.wait_for(|stopping| *stopping).await;
        };
        let server = Server::builder()
            .accept_http1(true)
            .initial_stream_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .max_concurrent_streams(settings.max_concurrent_streams)
            .http2_keepalive_interval(Some(settings.keepalive_interval))
            .http2_keepalive_timeout(Some(settings.keepalive_timeout))
            .add_routes(routes);
        let outcome = match (self.socket, self.tls) {
            (Socket::Tcp(socket), None) => server.serve_with_incoming_shutdown(accept_plain(socket), stopped).await,
            (Socket::Unix(socket), None) => server.serve_with_incoming_shutdown(accept_plain(socket), stopped).await,
            (Socket::Tcp(socket), Some(tls)) => {
                let (connections, _accepting) = accept_tls(socket, tls);
                server.serve_with_incoming_shutdown(connections, stopped).await
            }
            (Socket::Unix(socket), Some(tls)) => {
                let (connections, _accepting) = accept_tls(socket, tls);
                server.serve_with_incoming_shutdown(connections, stopped).await
            }
        };
        if let ListenUrl::Unix(path, _) = &self.url {
            // What is left over is cleared at the next start.
            let _ = std::fs::remove_file(path);
        }
        outcome
    }
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
    let mut told: Option<Instant> = None;
    loop {
        match socket.accept().await {
            Ok(accepted) => return accepted,
            // The client went before its turn came.
            Err(error) if error.kind() == io::ErrorKind::ConnectionAborted => debug!(%error, "a client is gone again"),
            Err(error) => {
                if told.is_none_or(|told| told.elapsed() >= ACCEPT_TELL_INTERVAL) {
                    warn!(
                        %error,
                        "cannot accept a connection; trying again. If there are too many open files, raise the limit of \
                         file descriptors (ulimit -n, LimitNOFILE)"
                    );
                    told = Some(Instant::now());
                }
                sleep(ACCEPT_PAUSE).await;
            }
        }
    }
}

fn accept_plain<L: Accept>(socket: L) -> impl Stream<Item = io::Result<L::Stream>> {
    unfold(socket, async |socket| Some((Ok(next_client(&socket).await.0), socket)))
}

type TlsConnections<S> = ReceiverStream<io::Result<TlsConnection<S>>>;

/// Those who have said who they are; nobody is accepted any more when the second is dropped.
fn accept_tls<L: Accept>(socket: L, acceptor: Arc<tls::Acceptor>) -> (TlsConnections<L::Stream>, AbortOnDropHandle) {
    let (ready, connections) = mpsc::channel(1);
    let accepting = vital("the listener with TLS", shake_hands(socket, acceptor, ready));
    (ReceiverStream::new(connections), AbortOnDropHandle(accepting))
}

struct AbortOnDropHandle(JoinHandle<()>);

impl Drop for AbortOnDropHandle {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn shake_hands<L: Accept>(
    socket: L,
    acceptor: Arc<tls::Acceptor>,
    ready: mpsc::Sender<io::Result<TlsConnection<L::Stream>>>,
) {
    let handshakes = Arc::new(Semaphore::new(HANDSHAKES_MAX));
    // The semaphore is never closed.
    while let Ok(handshake) = Arc::clone(&handshakes).acquire_owned().await {
        let (stream, remote) = next_client(&socket).await;
        let (acceptor, ready) = (Arc::clone(&acceptor), ready.clone());
        tokio::spawn(async move {
            let accepted = caught(acceptor.accept(stream)).await;
            drop(handshake);
            match accepted {
                // Nobody takes it any more once the server goes down.
                Ok(Ok(stream)) => drop(ready.send(Ok(TlsConnection(stream))).await),
                Ok(Err(error)) => debug!(%remote, %error, "rejected connection"),
                Err(panic) => error!(%remote, place = panic.place, message = panic.message, "a handshake panicked"),
            }
        });
    }
}

/// A client's connection.
struct TlsConnection<S>(TlsStream<S>);

impl<S> Connected for TlsConnection<S> {
    type ConnectInfo = ();

    fn connect_info(&self) {}
}

impl<S> fmt::Debug for TlsConnection<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TlsConnection")
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for TlsConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_read(context, buffer)
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncWrite for TlsConnection<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.0).poll_shutdown(context)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.0).poll_write_vectored(context, buffers)
    }

    fn is_write_vectored(&self) -> bool {
        self.0.is_write_vectored()
    }
}

/// Clears a socket that a killed server left behind; one that is in use stays, and binding it fails.
async fn remove_stale(path: &Path) -> io::Result<()> {
    match UnixStream::connect(path).await {
        Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => std::fs::remove_file(path),
        Ok(_) | Err(_) => Ok(()),
    }
}
