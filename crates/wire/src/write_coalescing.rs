//! Write coalescing: all bytes that a connection writes during one poll of its task are sent together.
//!
//! h2 writes every DATA frame of 256 bytes or more separately and flushes after it. Without coalescing, each response
//! that contains a Kubernetes object, and every 16 KiB of a list, requires a system call, a TCP segment and a wake-up
//! of the client. [`CoalescingStream`] buffers writes and reports them as flushed. [`Flusher`] polls the connection and
//! sends the buffer after each poll: when `poll` returns, the connection has written all bytes that it can write now.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// Maximum number of buffered bytes. The kernel can send this many bytes as one segment.
const BUFFER_LEN_MAX: usize = 64 << 10;
/// Maximum capacity of the buffer of an idle connection, in bytes. A larger buffer is freed after it was sent.
const BUFFER_CAPACITY_IDLE: usize = 8 << 10;

/// A stream that buffers writes until its [`Flusher`] sends them.
pub struct CoalescingStream<S>(Arc<Mutex<Shared<S>>>);

/// Sends the buffer of a [`CoalescingStream`].
pub struct Flusher<S>(Arc<Mutex<Shared<S>>>);

/// Only the task of the connection takes the lock, so the lock is never contended.
struct Shared<S> {
    stream: S,
    buffer: Vec<u8>,
    /// Number of bytes of `buffer` that are already written to `stream`.
    sent: usize,
    state: State,
    /// The error of a failed send, until the connection's next call returns it.
    error: Option<io::Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// The buffer is empty.
    Idle,
    /// The buffer accepts more bytes.
    Buffering,
    /// The stream did not accept the whole buffer. The buffer accepts no bytes until it is sent.
    Blocked,
    /// A send failed. Every further call fails.
    Failed,
}

/// Returns the stream for the connection, and the flusher that must drive the connection.
pub fn coalesce_writes<S>(stream: S) -> (CoalescingStream<S>, Flusher<S>) {
    let shared = Shared { stream, buffer: Vec::new(), sent: 0, state: State::Idle, error: None };
    let shared = Arc::new(Mutex::new(shared));
    (CoalescingStream(Arc::clone(&shared)), Flusher(shared))
}

impl<S: AsyncWrite + Unpin> Flusher<S> {
    /// Runs the future that owns the connection, and sends the buffer after each of its polls.
    pub async fn drive<F: Future>(self, connection: F) -> F::Output {
        let mut connection = pin!(connection);
        let output = poll_fn(|context| {
            let output = connection.as_mut().poll(context);
            self.send(context);
            output
        })
        .await;
        // hyper does not shut down every connection that ends, for example after a response to an upgrade request.
        let _ = poll_fn(|context| self.0.lock().poll_send(context)).await;
        output
    }

    fn send(&self, context: &mut Context<'_>) {
        let mut shared = self.0.lock();
        let before = shared.state;
        if matches!(before, State::Idle | State::Failed) {
            return;
        }
        let sent = shared.poll_send(context);
        let needs_wake = match sent {
            // The connection may be waiting for space in the buffer.
            Poll::Ready(Ok(())) => before == State::Blocked,
            Poll::Ready(Err(error)) => {
                shared.error = Some(error);
                true
            }
            Poll::Pending => false,
        };
        if needs_wake {
            context.waker().wake_by_ref();
        }
    }
}

impl<S: AsyncWrite + Unpin> Shared<S> {
    fn check(&mut self) -> io::Result<()> {
        match self.state {
            State::Failed => Err(self.error.take().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into())),
            State::Idle | State::Buffering | State::Blocked => Ok(()),
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        if self.state == State::Idle {
            return Poll::Ready(Ok(()));
        }
        self.state = State::Blocked;
        let sent = ready!(self.poll_drain(context));
        self.state = if sent.is_ok() { State::Idle } else { State::Failed };
        self.sent = 0;
        self.buffer.clear();
        if self.buffer.capacity() > BUFFER_CAPACITY_IDLE {
            self.buffer = Vec::new();
        }
        Poll::Ready(sent)
    }

    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.buffer.len() {
            let left = &self.buffer[self.sent..];
            match ready!(Pin::new(&mut self.stream).poll_write(context, left))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                taken => self.sent += taken,
            }
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Waits until the buffer accepts at least one byte.
    fn poll_space(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.state == State::Blocked || self.buffer.len() >= BUFFER_LEN_MAX {
            ready!(self.poll_send(context))?;
        }
        Poll::Ready(self.check())
    }

    /// Appends the bytes that fit; returns their number.
    fn append(&mut self, bytes: &[u8]) -> usize {
        let bytes = &bytes[..bytes.len().min(BUFFER_LEN_MAX - self.buffer.len())];
        let needed = self.buffer.len() + bytes.len();
        if needed > self.buffer.capacity() {
            let capacity = if needed > BUFFER_CAPACITY_IDLE { BUFFER_LEN_MAX } else { BUFFER_CAPACITY_IDLE };
            self.buffer.reserve_exact(capacity - self.buffer.len());
        }
        self.buffer.extend_from_slice(bytes);
        if self.state == State::Idle && !bytes.is_empty() {
            self.state = State::Buffering;
        }
        bytes.len()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for CoalescingStream<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.0.lock();
        shared.check()?;
        Pin::new(&mut shared.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for CoalescingStream<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut shared = self.0.lock();
        ready!(shared.poll_space(context))?;
        Poll::Ready(Ok(shared.append(bytes)))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut shared = self.0.lock();
        ready!(shared.poll_space(context))?;
        Poll::Ready(Ok(buffers.iter().map(|bytes| shared.append(bytes)).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// Reports success at once: the [`Flusher`] sends the buffer after the current poll.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.lock().check())
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut shared = self.0.lock();
        ready!(shared.poll_send(context))?;
        Pin::new(&mut shared.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use futures_util::FutureExt as _;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// A stream with a scripted result for each write: it accepts a number of bytes, is pending, or fails.
    #[derive(Default)]
    struct Scripted {
        script: VecDeque<Poll<io::Result<usize>>>,
        /// The accepted bytes of each write.
        writes: Vec<Vec<u8>>,
        shut: bool,
    }

    impl AsyncWrite for Scripted {
        fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
            let step = self.script.pop_front().unwrap_or(Poll::Ready(Ok(usize::MAX)));
            if step.is_pending() {
                context.waker().wake_by_ref();
            }
            let taken = ready!(step)?.min(bytes.len());
            if taken > 0 {
                self.writes.push(bytes[..taken].to_vec());
            }
            Poll::Ready(Ok(taken))
        }

        fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            Poll::Ready(Ok(()))
        }

        fn poll_shutdown(mut self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
            self.shut = true;
            Poll::Ready(Ok(()))
        }
    }

    fn scripted(
        script: impl IntoIterator<Item = Poll<io::Result<usize>>>,
    ) -> (CoalescingStream<Scripted>, Flusher<Scripted>) {
        coalesce_writes(Scripted { script: script.into_iter().collect(), ..Scripted::default() })
    }

    fn lengths(shared: &Mutex<Shared<Scripted>>) -> Vec<usize> {
        shared.lock().stream.writes.iter().map(Vec::len).collect()
    }

    #[tokio::test]
    async fn writes_of_one_poll_are_sent_together() {
        let sizes: [(&[usize], &[usize]); 5] = [
            (&[], &[]),
            (&[1], &[1]),
            (&[9, 16_384, 9, 100], &[16_502]),
            (&[BUFFER_LEN_MAX], &[BUFFER_LEN_MAX]),
            (&[BUFFER_LEN_MAX, 1, 2 * BUFFER_LEN_MAX], &[BUFFER_LEN_MAX, BUFFER_LEN_MAX, BUFFER_LEN_MAX, 1]),
        ];
        for (written, sent) in sizes {
            let (mut connection, flusher) = scripted([]);
            let shared = Arc::clone(&flusher.0);
            let work = async {
                for size in written {
                    connection.write_all(&vec![7; *size]).await.expect("the write is accepted");
                    connection.flush().await.expect("the write is accepted");
                }
                assert!(lengths(&shared).len() < sent.len().max(1), "the last bytes are sent after the poll");
            };
            flusher.drive(work).await;
            assert_eq!(lengths(&shared), sent);
            assert!(shared.lock().buffer.capacity() <= BUFFER_CAPACITY_IDLE);
        }
    }

    #[tokio::test]
    async fn blocked_bytes_are_sent_in_order_before_more_is_buffered() {
        let script = [Poll::Ready(Ok(10)), Poll::Pending, Poll::Ready(Ok(3)), Poll::Pending, Poll::Pending];
        let (mut connection, flusher) = scripted(script);
        let shared = Arc::clone(&flusher.0);
        let bytes: Vec<u8> = (0..200).collect();
        let work = async {
            for part in bytes.chunks(20) {
                connection.write_all(part).await.expect("the write is accepted");
                tokio::task::yield_now().await;
                assert!(shared.lock().buffer.len() <= 20, "nothing is appended to a blocked buffer");
            }
            connection.shutdown().await.expect("shutdown succeeds");
        };
        flusher.drive(work).await;
        let shared = shared.lock();
        assert_eq!(shared.stream.writes.concat(), bytes);
        assert!(shared.stream.shut);
    }

    #[tokio::test]
    async fn connection_waiting_for_space_is_woken_after_a_send() {
        let (mut connection, flusher) = scripted([Poll::Pending, Poll::Pending]);
        let work = async {
            connection.write_all(&[1; 2 * BUFFER_LEN_MAX]).await.expect("the write is accepted");
            connection.write_all(&[1]).await.expect("the write is accepted");
        };
        tokio::time::timeout(std::time::Duration::from_secs(10), flusher.drive(work))
            .await
            .expect("the connection is woken");
    }

    #[tokio::test]
    async fn next_call_returns_the_error_of_a_failed_send() {
        for step in [Poll::Ready(Err(io::ErrorKind::TimedOut.into())), Poll::Ready(Ok(0))] {
            let (mut connection, flusher) = scripted([step]);
            let work = async {
                connection.write_all(b"lost").await.expect("the write is buffered");
                tokio::task::yield_now().await;
                connection.flush().await
            };
            let shared = Arc::clone(&flusher.0);
            let failed = flusher.drive(work).await.expect_err("the send fails");
            assert!(matches!(failed.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WriteZero), "{failed}");
            assert!(connection.write_all(b"more").await.is_err() && connection.shutdown().await.is_err());
            assert!(lengths(&shared).is_empty(), "nothing is written to a failed stream");
        }
    }

    #[tokio::test]
    async fn buffer_is_sent_when_the_connection_ends_without_shutdown() {
        let (mut connection, flusher) = scripted([Poll::Pending, Poll::Ready(Ok(2)), Poll::Pending]);
        let shared = Arc::clone(&flusher.0);
        flusher.drive(async { connection.write_all(b"whole").await }).await.expect("the write is buffered");
        assert_eq!(shared.lock().stream.writes.concat(), b"whole");
    }

    #[tokio::test]
    async fn shutdown_sends_the_buffer_first() {
        let (mut connection, flusher) = scripted([]);
        connection.write_all(b"last").await.expect("the write is buffered");
        assert!(lengths(&flusher.0).is_empty());
        connection.shutdown().now_or_never().expect("the stream is not blocked").expect("shutdown succeeds");
        assert!(lengths(&flusher.0) == [4] && flusher.0.lock().stream.shut);
    }
}
