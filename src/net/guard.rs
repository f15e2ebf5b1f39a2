//! A client's connection, ended when the client leaves the server waiting: it has to say which protocol it speaks, and to take
//! what is sent to it. What it sends is read in [`Portions`], and comes to h2 by way of [`Authorities`].

use std::{
    fmt, io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::OwnedSemaphorePermit,
    time::{Sleep, sleep},
};
use tracing::warn;

use super::{authority::Authorities, seldom::Seldom};

/// How long a client has to say which protocol it speaks.
const HELLO_MAX: Duration = Duration::from_secs(10);
/// HTTP/2's preface; every request of HTTP/1 that is worth an answer is about as long.
const HELLO_BYTES: usize = 24;
/// How long nothing of what waits for a client may leave.
const STALL_MAX: Duration = Duration::from_secs(60);

static SILENT: Seldom = Seldom::new();
static STALLED: Seldom = Seldom::new();

/// See the module's page.
pub(super) struct Guarded<S> {
    inner: S,
    hello: Option<Hello>,
    stall: Option<Pin<Box<Sleep>>>,
    authorities: Option<Box<Authorities>>,
    /// Of those who may be connected at the same time.
    _place: OwnedSemaphorePermit,
}

struct Hello {
    bytes: usize,
    deadline: Pin<Box<Sleep>>,
}

impl<S> Guarded<S> {
    pub(super) fn new(inner: S, place: OwnedSemaphorePermit) -> Self {
        let hello = Hello { bytes: 0, deadline: Box::pin(sleep(HELLO_MAX)) };
        let authorities = Some(Box::default());
        Self { inner, hello: Some(hello), stall: None, authorities, _place: place }
    }

    /// Passes on what writing came to, unless it has been waiting for too long.
    fn moved<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stall = None;
            // Who is answered was understood.
            self.hello = None;
            return written;
        }
        let stall = self.stall.get_or_insert_with(|| Box::pin(sleep(STALL_MAX)));
        ready!(stall.as_mut().poll(context));
        if let Some(connections) = STALLED.happens() {
            warn!(connections, "closed, as their clients took nothing of what was sent to them for {STALL_MAX:?}");
        }
        Poll::Ready(Err(timed_out(format!("the client took nothing within {STALL_MAX:?}"))))
    }
}

fn timed_out(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, text)
}

impl<S: AsyncRead + Unpin> Guarded<S> {
    /// Reads what the client sends, as it is.
    fn poll_sent(&mut self, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        let bytes = buffer.filled().len() - before;
        let Some(hello) = &mut self.hello else { return read };
        hello.bytes += bytes;
        if hello.bytes >= HELLO_BYTES {
            self.hello = None;
        } else if read.is_pending() {
            ready!(hello.deadline.as_mut().poll(context));
            if let Some(connections) = SILENT.happens() {
                warn!(connections, "closed, as their clients began no request within {HELLO_MAX:?}");
            }
            return Poll::Ready(Err(timed_out(format!("no request began within {HELLO_MAX:?}"))));
        }
        read
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for Guarded<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let Some(authorities) = &mut this.authorities else { return this.poll_sent(context, buffer) };
            let ready = authorities.ready();
            if !ready.is_empty() {
                let bytes = ready.len().min(buffer.remaining());
                buffer.put_slice(&ready[..bytes]);
                authorities.gave(bytes);
                return Poll::Ready(Ok(()));
            }
            if authorities.is_over() {
                this.authorities = None;
                continue;
            }
            let before = buffer.filled().len();
            ready!(this.poll_sent(context, buffer))?;
            let Some(authorities) = &mut this.authorities else { return Poll::Ready(Ok(())) };
            match &buffer.filled()[before..] {
                [] => authorities.end(),
                sent => authorities.take(sent),
            }
            buffer.set_filled(before);
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Guarded<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        self.moved(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(context);
        // With nothing to flush it says nothing of the client.
        if flushed.is_ready() && self.stall.is_none() { flushed } else { self.moved(context, flushed) }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.inner).poll_shutdown(context);
        self.moved(context, shut)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write_vectored(context, buffers);
        self.moved(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.inner.is_write_vectored()
    }
}

impl<S> fmt::Debug for Guarded<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Guarded")
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
        sync::Semaphore,
        time::Instant,
    };

    use super::*;

    async fn guarded(buffer: usize) -> (Guarded<tokio::io::DuplexStream>, tokio::io::DuplexStream) {
        let place = Arc::new(Semaphore::new(1)).acquire_owned().await.expect("a place");
        let (server, client) = duplex(buffer);
        (Guarded::new(server, place), client)
    }

    #[tokio::test(start_paused = true)]
    async fn hello_has_to_be_whole_in_time() {
        for (said, waits) in [(&b""[..], false), (b"PRI * HTTP", false), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", true)] {
            let (mut server, mut client) = guarded(1_000).await;
            client.write_all(said).await.expect("room");
            let began = Instant::now();
            let mut all = Vec::new();
            let ended = tokio::time::timeout(HELLO_MAX * 2, server.read_to_end(&mut all)).await;
            assert_eq!((ended.is_err(), all.as_slice()), (waits, said));
            assert!(waits || began.elapsed() >= HELLO_MAX);
        }
    }

    /// A byte now and then does not make the time longer.
    #[tokio::test(start_paused = true)]
    async fn hello_is_not_said_by_and_by() {
        let (mut server, mut client) = guarded(1_000).await;
        tokio::spawn(async move {
            while client.write_all(b"P").await.is_ok() {
                sleep(HELLO_MAX / 4).await;
            }
        });
        let mut all = Vec::new();
        assert!(server.read_to_end(&mut all).await.is_err() && all.len() < HELLO_BYTES);
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_takes_nothing_is_let_go_and_one_that_is_slow_is_not() {
        let (mut server, mut client) = guarded(10).await;
        tokio::spawn(async move {
            let mut byte = [0];
            for _ in 0..30 {
                sleep(STALL_MAX / 2).await;
                client.read_exact(&mut byte).await.expect("more");
            }
            std::future::pending::<()>().await;
        });
        let began = Instant::now();
        assert!(server.write_all(&[7; 100]).await.is_err());
        assert!(began.elapsed() >= STALL_MAX / 2 * 30 + STALL_MAX / 2);
    }
}
