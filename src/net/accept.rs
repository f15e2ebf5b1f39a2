//! Accepts clients: assigns each to a thread and makes the TLS handshake there.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    net::{TcpListener, TcpStream, UnixListener, UnixStream},
    sync::{OwnedSemaphorePermit, mpsc},
    task::JoinHandle,
    time::{sleep, timeout},
};
use tokio_rustls::server::TlsStream;
use tracing::{debug, error, warn};

use super::{
    Security, Settings,
    authority::AuthorityRewriter,
    log_limit::LogLimit,
    remote::{CertificateName, Client, Remote},
    timeouts::TimedConnection,
    tls,
    workers::Seat,
};
use orlop_core::supervise::{catch_panics, vital};

/// The first byte of a TLS handshake.
const TLS_HANDSHAKE: u8 = 22;
/// Maximum time until the first byte of a connection to a port that serves http and https.
const FIRST_BYTE_MAX: Duration = Duration::from_secs(10);
/// Pause after a failed accept, for example if no file descriptor is free.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
static ACCEPT_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));
static REJECTED_LOG: LogLimit = LogLimit::every(Duration::from_secs(1));

/// A listening socket.
pub(super) trait Accept: Send + Sync + 'static {
    type Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static;

    /// Accepts the next client. Returns its stream and its address.
    fn accept(&self) -> impl Future<Output = io::Result<(Self::Stream, String)>> + Send;

    /// Moves a stream to the runtime of its thread.
    fn moved(stream: Self::Stream, seat: &Seat) -> io::Result<Self::Stream>;

    /// Returns whether the client begins with a TLS handshake. Waits for its first byte, which remains to be read.
    fn begins_with_tls(stream: &Self::Stream) -> impl Future<Output = io::Result<bool>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;

    async fn accept(&self) -> io::Result<(TcpStream, String)> {
        let (stream, remote) = Self::accept(self).await?;
        // Fails only if the client has disconnected; the first read reports that.
        let _ = stream.set_nodelay(true);
        Ok((stream, remote.to_string()))
    }

    fn moved(stream: TcpStream, seat: &Seat) -> io::Result<TcpStream> {
        let Some(runtime) = seat.elsewhere() else { return Ok(stream) };
        let stream = stream.into_std()?;
        let _entered = runtime.enter();
        TcpStream::from_std(stream)
    }

    async fn begins_with_tls(stream: &TcpStream) -> io::Result<bool> {
        let mut first = [0];
        let bytes = stream.peek(&mut first).await?;
        Ok(bytes > 0 && first == [TLS_HANDSHAKE])
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;

    async fn accept(&self) -> io::Result<(UnixStream, String)> {
        Self::accept(self).await.map(|(stream, _)| (stream, "@".to_owned()))
    }

    fn moved(stream: UnixStream, seat: &Seat) -> io::Result<UnixStream> {
        let Some(runtime) = seat.elsewhere() else { return Ok(stream) };
        let stream = stream.into_std()?;
        let _entered = runtime.enter();
        UnixStream::from_std(stream)
    }

    async fn begins_with_tls(_: &UnixStream) -> io::Result<bool> {
        Err(io::Error::new(io::ErrorKind::Unsupported, "a unix socket has one scheme"))
    }
}

/// Waits for the next client.
///
/// If no file descriptor is free, the socket stays ready and accept fails; the pause prevents a busy loop.
async fn next_client<L: Accept>(socket: &L) -> (L::Stream, String) {
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

pub(super) type Accepted<S> = AuthorityRewriter<TimedConnection<Connection<S>>>;
pub(super) type Connections<S> = mpsc::Receiver<Incomer<S>>;
/// A connection that may be served, its client, and its thread.
pub(super) type Incomer<S> = (Accepted<S>, Client, Seat);

/// Returns accepted connections whose TLS handshake is complete. Dropping the handle stops accepting.
pub(super) fn accept<L: Accept>(
    socket: L,
    security: Security,
    settings: Settings,
) -> (Connections<L::Stream>, AbortOnDropHandle) {
    let (ready, connections) = mpsc::channel(1);
    let accepting = vital("a listener", accept_all(socket, security, settings, ready));
    (connections, AbortOnDropHandle(accepting))
}

pub(super) struct AbortOnDropHandle(JoinHandle<()>);

impl Drop for AbortOnDropHandle {
    fn drop(&mut self) {
        self.0.abort();
    }
}

async fn accept_all<L: Accept>(
    socket: L,
    security: Security,
    settings: Settings,
    ready: mpsc::Sender<Incomer<L::Stream>>,
) {
    let Settings { connection_limit, steps, workers, .. } = settings;
    loop {
        let permit = connection_limit.acquire().await;
        let (stream, remote) = next_client(&socket).await;
        // Each connection waits for its turn, so that clients that reconnect continuously do not delay others.
        steps.request().await;
        let seat = workers.seat();
        let stream = match L::moved(stream, &seat) {
            Ok(stream) => stream,
            Err(error) => {
                debug!(%error, "cannot serve a client");
                continue;
            }
        };
        if let Security::Plain = &security {
            // Fails only while the server stops.
            let client = Client { remote: Remote::new(&remote), certificate: None };
            let _ = ready.send((accepted(Connection::Plain(stream), permit), client, seat)).await;
            continue;
        }
        let (security, ready) = (security.clone(), ready.clone());
        seat.runtime().spawn(async move {
            match catch_panics(secure::<L>(stream, &security)).await {
                Ok(Ok(connection)) => {
                    let client = Client { remote: Remote::new(&remote), certificate: connection.certificate_name() };
                    drop(ready.send((accepted(connection, permit), client, seat)).await);
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
async fn secure<L: Accept>(stream: L::Stream, security: &Security) -> io::Result<Connection<L::Stream>> {
    let tls = match security {
        Security::Plain => return Ok(Connection::Plain(stream)),
        Security::Tls(tls) => tls,
        Security::Either(tls) => {
            let first = timeout(FIRST_BYTE_MAX, L::begins_with_tls(&stream)).await;
            if !first.unwrap_or_else(|_| Err(io::ErrorKind::TimedOut.into()))? {
                return Ok(Connection::Plain(stream));
            }
            tls
        }
    };
    tls.accept(stream).await.map(|stream| Connection::Tls(Box::new(stream)))
}

fn accepted<S>(connection: Connection<S>, permit: OwnedSemaphorePermit) -> Accepted<S> {
    AuthorityRewriter::new(TimedConnection::new(connection, permit))
}

/// A client's connection, with or without TLS.
pub(super) enum Connection<S> {
    Plain(S),
    Tls(Box<TlsStream<S>>),
}

impl<S> Connection<S> {
    /// Returns the common name of the client's certificate, which was verified in the handshake.
    fn certificate_name(&self) -> Option<CertificateName> {
        let Self::Tls(stream) = self else { return None };
        let certificate = stream.get_ref().1.peer_certificates()?.first()?;
        tls::common_name(certificate).map(|name| CertificateName(name.into()))
    }
}

/// Calls a method of the stream, which both variants have.
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
