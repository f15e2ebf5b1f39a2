//! Timeouts of a connection: it is closed if its client sends no request, or reads no bytes. Addresses for probes and the
//! web page also have an idle limit.
//!
//! hyper has no timeout for the first bytes of a connection, and none for HTTP/2 connections without requests. HTTP/2's
//! pings would detect a client that reads nothing, but their default interval is 2 hours, as in etcd.

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
    time::Duration,
};

use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    sync::OwnedSemaphorePermit,
    time::{Instant, Sleep, sleep},
};
use tracing::{debug, warn};

use orlop_core::log_limit::LogLimit;

/// Maximum time until a client has sent [`FIRST_BYTES`] or receives a response.
const FIRST_REQUEST_TIME_MAX: Duration = Duration::from_secs(10);
/// Length of HTTP/2's preface; a request of HTTP/1 is about as long.
const FIRST_BYTES: usize = 24;
/// Maximum time for which a client may read none of the bytes that are sent to it.
const STALL_TIME_MAX: Duration = Duration::from_secs(60);

static SILENT_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));
static STALLED_LOG: LogLimit = LogLimit::every(Duration::from_secs(10));

/// A client's connection with timeouts. It counts towards the limit of connections until it is dropped.
pub(super) struct TimedConnection<S> {
    inner: S,
    first_request: Option<FirstRequest>,
    stall: Option<Pin<Box<Sleep>>>,
    idle: Option<Idle>,
    _permit: OwnedSemaphorePermit,
}

struct FirstRequest {
    bytes: usize,
    deadline: Pin<Box<Sleep>>,
}

/// The time without a byte in either direction.
struct Idle {
    time_max: Duration,
    deadline: Pin<Box<Sleep>>,
}

impl<S> TimedConnection<S> {
    /// `idle_time_max`: maximum time without a byte in either direction; `None`: no limit.
    pub(super) fn new(inner: S, permit: OwnedSemaphorePermit, idle_time_max: Option<Duration>) -> Self {
        let first_request = FirstRequest { bytes: 0, deadline: Box::pin(sleep(FIRST_REQUEST_TIME_MAX)) };
        let idle = idle_time_max.map(|time_max| Idle { time_max, deadline: Box::pin(sleep(time_max)) });
        Self { inner, first_request: Some(first_request), stall: None, idle, _permit: permit }
    }

    /// Restarts the idle time.
    fn reset_idle(&mut self) {
        if let Some(Idle { time_max, deadline }) = &mut self.idle {
            deadline.as_mut().reset(Instant::now() + *time_max);
        }
    }

    /// Returns an error if the connection was idle for too long.
    fn check_idle(&mut self, context: &mut Context<'_>) -> io::Result<()> {
        let Some(Idle { time_max, deadline }) = &mut self.idle else { return Ok(()) };
        if deadline.as_mut().poll(context).is_ready() {
            debug!("closed a connection that was idle for {time_max:?}");
            return Err(timed_out(format!("the connection was idle for {time_max:?}")));
        }
        Ok(())
    }

    /// Returns the outcome of a write, or an error if the client has read nothing for [`STALL_TIME_MAX`].
    fn check_stall<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() {
            self.stall = None;
            // A client that receives a response has sent a request.
            self.first_request = None;
            return written;
        }
        let stall = self.stall.get_or_insert_with(|| Box::pin(sleep(STALL_TIME_MAX)));
        ready!(stall.as_mut().poll(context));
        if let Some(connections) = STALLED_LOG.count() {
            warn!(connections, "closed connections whose clients read nothing for {STALL_TIME_MAX:?}");
        }
        Poll::Ready(Err(timed_out(format!("the client read nothing within {STALL_TIME_MAX:?}"))))
    }
}

fn timed_out(text: String) -> io::Error {
    io::Error::new(io::ErrorKind::TimedOut, text)
}

impl<S: AsyncRead + Unpin> AsyncRead for TimedConnection<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let read = Pin::new(&mut self.inner).poll_read(context, buffer);
        let bytes = buffer.filled().len() - before;
        if bytes > 0 {
            self.reset_idle();
        } else if read.is_pending() {
            self.check_idle(context)?;
        }
        let Some(first_request) = &mut self.first_request else { return read };
        first_request.bytes += bytes;
        if first_request.bytes >= FIRST_BYTES {
            self.first_request = None;
        } else if read.is_pending() {
            ready!(first_request.deadline.as_mut().poll(context));
            if let Some(connections) = SILENT_LOG.count() {
                warn!(
                    connections,
                    "closed connections whose clients sent no request within {FIRST_REQUEST_TIME_MAX:?}"
                );
            }
            return Poll::Ready(Err(timed_out(format!("no request within {FIRST_REQUEST_TIME_MAX:?}"))));
        }
        read
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for TimedConnection<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.inner).poll_write(context, bytes);
        // A response, or a part of it, is on its way.
        if matches!(written, Poll::Ready(Ok(1..))) {
            self.reset_idle();
        }
        self.check_stall(context, written)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.inner).poll_flush(context);
        // A flush without buffered bytes does not show that the client reads.
        if flushed.is_ready() && self.stall.is_none() { flushed } else { self.check_stall(context, flushed) }
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.inner).poll_shutdown(context);
        self.check_stall(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use tokio::{
        io::{AsyncReadExt as _, AsyncWriteExt as _, duplex},
        sync::Semaphore,
    };

    use super::*;

    async fn connection(buffer: usize) -> (TimedConnection<tokio::io::DuplexStream>, tokio::io::DuplexStream) {
        connection_with(buffer, None).await
    }

    async fn connection_with(
        buffer: usize,
        idle_time_max: Option<Duration>,
    ) -> (TimedConnection<tokio::io::DuplexStream>, tokio::io::DuplexStream) {
        let permit = Arc::new(Semaphore::new(1)).acquire_owned().await.expect("a permit");
        let (server, client) = duplex(buffer);
        (TimedConnection::new(server, permit, idle_time_max), client)
    }

    #[tokio::test(start_paused = true)]
    async fn idle_client_is_closed_and_active_client_is_not() {
        let idle_time_max = FIRST_REQUEST_TIME_MAX * 2;
        let (mut server, mut client) = connection_with(1_000, Some(idle_time_max)).await;
        tokio::spawn(async move {
            for _ in 0..10 {
                client.write_all(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n").await.expect("the buffer has space");
                sleep(idle_time_max / 2).await;
            }
            std::future::pending::<()>().await;
        });
        let began = Instant::now();
        let mut all = Vec::new();
        assert!(server.read_to_end(&mut all).await.is_err());
        assert_eq!((all.len(), began.elapsed().as_secs()), (10 * FIRST_BYTES, (idle_time_max * 11 / 2).as_secs()));
    }

    /// As a stream of events.
    #[tokio::test(start_paused = true)]
    async fn connection_is_not_idle_while_a_response_is_sent() {
        let idle_time_max = FIRST_REQUEST_TIME_MAX * 2;
        let (server, mut client) = connection_with(1_000, Some(idle_time_max)).await;
        client.write_all(b"GET /events HTTP/1.1\r\n\r\n").await.expect("the buffer has space");
        let (mut reader, mut writer) = tokio::io::split(server);
        let began = Instant::now();
        tokio::spawn(async move {
            for _ in 0..10 {
                sleep(idle_time_max / 2).await;
                writer.write_all(b": alive\n\n").await.expect("the buffer has space");
            }
            std::future::pending::<()>().await;
        });
        assert!(reader.read_to_end(&mut Vec::new()).await.is_err());
        assert_eq!(began.elapsed().as_secs(), (idle_time_max * 6).as_secs());
    }

    #[tokio::test(start_paused = true)]
    async fn first_request_has_a_deadline() {
        for (sent, stays_open) in
            [(&b""[..], false), (b"PRI * HTTP", false), (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", true)]
        {
            let (mut server, mut client) = connection(1_000).await;
            client.write_all(sent).await.expect("the buffer has space");
            let began = Instant::now();
            let mut all = Vec::new();
            let ended = tokio::time::timeout(FIRST_REQUEST_TIME_MAX * 2, server.read_to_end(&mut all)).await;
            assert_eq!((ended.is_err(), all.as_slice()), (stays_open, sent));
            assert!(stays_open || began.elapsed() >= FIRST_REQUEST_TIME_MAX);
        }
    }

    #[tokio::test(start_paused = true)]
    async fn single_bytes_do_not_extend_the_deadline() {
        let (mut server, mut client) = connection(1_000).await;
        tokio::spawn(async move {
            while client.write_all(b"P").await.is_ok() {
                sleep(FIRST_REQUEST_TIME_MAX / 4).await;
            }
        });
        let mut all = Vec::new();
        assert!(server.read_to_end(&mut all).await.is_err() && all.len() < FIRST_BYTES);
    }

    #[tokio::test(start_paused = true)]
    async fn stalled_client_is_closed_and_slow_client_is_not() {
        let (mut server, mut client) = connection(10).await;
        tokio::spawn(async move {
            let mut byte = [0];
            for _ in 0..30 {
                sleep(STALL_TIME_MAX / 2).await;
                client.read_exact(&mut byte).await.expect("more bytes");
            }
            std::future::pending::<()>().await;
        });
        let began = Instant::now();
        assert!(server.write_all(&[7; 100]).await.is_err());
        assert!(began.elapsed() >= STALL_TIME_MAX / 2 * 30 + STALL_TIME_MAX / 2);
    }
}
