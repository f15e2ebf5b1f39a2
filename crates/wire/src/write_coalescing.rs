//! What a connection writes in one turn, sent together.
//!
//! h2 writes each frame of data from 256 bytes on by itself, and flushes behind it: an answer that holds a Kubernetes object
//! is a system call of its own, with the kernel's way to the client and the client's wake-up, and so is every 16 KiB of a
//! list. [`Gathered`] takes what is written and says that it is flushed; [`Tail`] sends it once whoever has the connection
//! has nothing more to say for now, which the connection itself cannot know.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
};

use parking_lot::Mutex;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

/// What is gathered at most. The kernel sends so much in one segment where nothing is in its way.
const GATHERED_MAX: usize = 64 << 10;
/// What a connection keeps for the next turn. Longer turns are given their room anew.
const KEPT_MAX: usize = 8 << 10;

/// A connection whose writes wait for the end of the turn.
pub struct Gathered<S>(Arc<Mutex<Line<S>>>);

/// Sends what waits in a [`Gathered`].
pub struct Tail<S>(Arc<Mutex<Line<S>>>);

/// Lock order: it is the only lock, and only the one task that has the connection takes it.
struct Line<S> {
    stream: S,
    waiting: Vec<u8>,
    /// Bytes of `waiting` that have left.
    sent: usize,
    state: State,
    /// Why it is broken, until the connection asks.
    failed: Option<io::Error>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum State {
    /// Nothing waits.
    Idle,
    /// There is room for more.
    Gathering,
    /// The stream has refused to take all: nothing is gathered before it did.
    HeldUp,
    /// The stream takes nothing any more.
    Broken,
}

/// The connection, and what has to be run with it.
pub fn gather<S>(stream: S) -> (Gathered<S>, Tail<S>) {
    let line = Line { stream, waiting: Vec::new(), sent: 0, state: State::Idle, failed: None };
    let line = Arc::new(Mutex::new(line));
    (Gathered(Arc::clone(&line)), Tail(line))
}

impl<S: AsyncWrite + Unpin> Tail<S> {
    /// Runs what has the connection, and sends what it wrote whenever it stops to wait.
    pub async fn behind<F: Future>(self, connection: F) -> F::Output {
        let mut connection = pin!(connection);
        let output = poll_fn(|context| {
            let output = connection.as_mut().poll(context);
            self.send(context);
            output
        })
        .await;
        // hyper does not shut down each connection that it is done with: not where an answer was to a request for an upgrade.
        let _ = poll_fn(|context| self.0.lock().poll_send(context)).await;
        output
    }

    fn send(&self, context: &mut Context<'_>) {
        let mut line = self.0.lock();
        let before = line.state;
        if matches!(before, State::Idle | State::Broken) {
            return;
        }
        let sent = line.poll_send(context);
        let is_told = match sent {
            // The connection may wait for just this.
            Poll::Ready(Ok(())) => before == State::HeldUp,
            Poll::Ready(Err(error)) => {
                line.failed = Some(error);
                true
            }
            Poll::Pending => false,
        };
        if is_told {
            context.waker().wake_by_ref();
        }
    }
}

impl<S: AsyncWrite + Unpin> Line<S> {
    fn check(&mut self) -> io::Result<()> {
        match self.state {
            State::Broken => Err(self.failed.take().unwrap_or_else(|| io::ErrorKind::BrokenPipe.into())),
            State::Idle | State::Gathering | State::HeldUp => Ok(()),
        }
    }

    fn poll_send(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        if self.state == State::Idle {
            return Poll::Ready(Ok(()));
        }
        self.state = State::HeldUp;
        let sent = ready!(self.poll_drain(context));
        self.state = if sent.is_ok() { State::Idle } else { State::Broken };
        self.sent = 0;
        self.waiting.clear();
        if self.waiting.capacity() > KEPT_MAX {
            self.waiting = Vec::new();
        }
        Poll::Ready(sent)
    }

    fn poll_drain(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while self.sent < self.waiting.len() {
            let left = &self.waiting[self.sent..];
            match ready!(Pin::new(&mut self.stream).poll_write(context, left))? {
                0 => return Poll::Ready(Err(io::ErrorKind::WriteZero.into())),
                taken => self.sent += taken,
            }
        }
        Pin::new(&mut self.stream).poll_flush(context)
    }

    /// Makes room for another byte at least.
    fn poll_room(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        if self.state == State::HeldUp || self.waiting.len() >= GATHERED_MAX {
            ready!(self.poll_send(context))?;
        }
        Poll::Ready(self.check())
    }

    /// As many of the bytes as there is room for.
    fn take(&mut self, bytes: &[u8]) -> usize {
        let bytes = &bytes[..bytes.len().min(GATHERED_MAX - self.waiting.len())];
        let needed = self.waiting.len() + bytes.len();
        if needed > self.waiting.capacity() {
            let whole = if needed > KEPT_MAX { GATHERED_MAX } else { KEPT_MAX };
            self.waiting.reserve_exact(whole - self.waiting.len());
        }
        self.waiting.extend_from_slice(bytes);
        if self.state == State::Idle && !bytes.is_empty() {
            self.state = State::Gathering;
        }
        bytes.len()
    }
}

impl<S: AsyncRead + AsyncWrite + Unpin> AsyncRead for Gathered<S> {
    fn poll_read(self: Pin<&mut Self>, context: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        let mut line = self.0.lock();
        line.check()?;
        Pin::new(&mut line.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for Gathered<S> {
    fn poll_write(self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        let mut line = self.0.lock();
        ready!(line.poll_room(context))?;
        Poll::Ready(Ok(line.take(bytes)))
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffers: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let mut line = self.0.lock();
        ready!(line.poll_room(context))?;
        Poll::Ready(Ok(buffers.iter().map(|bytes| line.take(bytes)).sum()))
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    /// What was written leaves with the end of the turn.
    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(self.0.lock().check())
    }

    fn poll_shutdown(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let mut line = self.0.lock();
        ready!(line.poll_send(context))?;
        Pin::new(&mut line.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use futures_util::FutureExt as _;
    use tokio::io::AsyncWriteExt as _;

    use super::*;

    /// Takes what the script says: so many bytes, nothing for now, or an error.
    #[derive(Default)]
    struct Scripted {
        script: VecDeque<Poll<io::Result<usize>>>,
        /// Each write that was taken.
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

    fn scripted(script: impl IntoIterator<Item = Poll<io::Result<usize>>>) -> (Gathered<Scripted>, Tail<Scripted>) {
        gather(Scripted { script: script.into_iter().collect(), ..Scripted::default() })
    }

    fn lengths(line: &Mutex<Line<Scripted>>) -> Vec<usize> {
        line.lock().stream.writes.iter().map(Vec::len).collect()
    }

    #[tokio::test]
    async fn writes_of_a_turn_leave_together() {
        let sizes: [(&[usize], &[usize]); 5] = [
            (&[], &[]),
            (&[1], &[1]),
            (&[9, 16_384, 9, 100], &[16_502]),
            (&[GATHERED_MAX], &[GATHERED_MAX]),
            (&[GATHERED_MAX, 1, 2 * GATHERED_MAX], &[GATHERED_MAX, GATHERED_MAX, GATHERED_MAX, 1]),
        ];
        for (written, sent) in sizes {
            let (mut connection, tail) = scripted([]);
            let line = Arc::clone(&tail.0);
            let work = async {
                for size in written {
                    connection.write_all(&vec![7; *size]).await.expect("it is taken");
                    connection.flush().await.expect("it is taken");
                }
                assert!(lengths(&line).len() < sent.len().max(1), "the last waits for the turn's end");
            };
            tail.behind(work).await;
            assert_eq!(lengths(&line), sent);
            assert!(line.lock().waiting.capacity() <= KEPT_MAX);
        }
    }

    #[tokio::test]
    async fn what_a_stream_does_not_take_is_sent_in_order_before_more_is_gathered() {
        let stutters = [Poll::Ready(Ok(10)), Poll::Pending, Poll::Ready(Ok(3)), Poll::Pending, Poll::Pending];
        let (mut connection, tail) = scripted(stutters);
        let line = Arc::clone(&tail.0);
        let bytes: Vec<u8> = (0..200).collect();
        let work = async {
            for part in bytes.chunks(20) {
                connection.write_all(part).await.expect("it is taken");
                tokio::task::yield_now().await;
                assert!(line.lock().waiting.len() <= 20, "nothing is added to what is held up");
            }
            connection.shutdown().await.expect("it ends");
        };
        tail.behind(work).await;
        let line = line.lock();
        assert_eq!(line.stream.writes.concat(), bytes);
        assert!(line.stream.shut);
    }

    #[tokio::test]
    async fn connection_waiting_for_room_is_woken_when_the_tail_made_it() {
        let (mut connection, tail) = scripted([Poll::Pending, Poll::Pending]);
        let work = async {
            connection.write_all(&[1; 2 * GATHERED_MAX]).await.expect("it is taken");
            connection.write_all(&[1]).await.expect("it is taken");
        };
        tokio::time::timeout(std::time::Duration::from_secs(10), tail.behind(work)).await.expect("it goes on");
    }

    #[tokio::test]
    async fn failure_to_send_is_told_to_the_connection_once_it_asks() {
        for step in [Poll::Ready(Err(io::ErrorKind::TimedOut.into())), Poll::Ready(Ok(0))] {
            let (mut connection, tail) = scripted([step]);
            let work = async {
                connection.write_all(b"lost").await.expect("it is gathered");
                tokio::task::yield_now().await;
                connection.flush().await
            };
            let line = Arc::clone(&tail.0);
            let failed = tail.behind(work).await.expect_err("it could not be sent");
            assert!(matches!(failed.kind(), io::ErrorKind::TimedOut | io::ErrorKind::WriteZero), "{failed}");
            assert!(connection.write_all(b"more").await.is_err() && connection.shutdown().await.is_err());
            assert!(lengths(&line).is_empty(), "a broken stream is not written to");
        }
    }

    #[tokio::test]
    async fn connection_that_ends_without_a_shutdown_loses_nothing() {
        let (mut connection, tail) = scripted([Poll::Pending, Poll::Ready(Ok(2)), Poll::Pending]);
        let line = Arc::clone(&tail.0);
        tail.behind(async { connection.write_all(b"whole").await }).await.expect("it is gathered");
        assert_eq!(line.lock().stream.writes.concat(), b"whole");
    }

    #[tokio::test]
    async fn end_sends_what_waits_first() {
        let (mut connection, tail) = scripted([]);
        connection.write_all(b"last").await.expect("it is gathered");
        assert!(lengths(&tail.0).is_empty());
        connection.shutdown().now_or_never().expect("nothing holds it up").expect("it ends");
        assert!(lengths(&tail.0) == [4] && tail.0.lock().stream.shut);
    }
}
