//! Pacing of connections: how long one poll of a connection may read.
//!
//! hyper polls a connection until its socket is empty. A client that sends without pause would keep the thread busy for
//! as long as its data arrives, and every other client would wait. So a connection reads for 0.1 ms per poll; then its
//! next poll waits for a step ([`Steps`]). Parsing 16 KiB of small frames, such as PING or RST_STREAM, may take over a
//! millisecond, so a connection that was paced reads in smaller pieces until it has to wait for data.

use std::{
    future::poll_fn,
    io,
    pin::{Pin, pin},
    sync::Arc,
    task::{Context, Poll, ready},
    time::Duration,
};

use parking_lot::Mutex;
use tokio::{
    io::{AsyncRead, AsyncWrite, ReadBuf},
    time::Instant,
};

use super::Steps;

/// Maximum time that one poll of a connection reads.
const READ_TIME_MAX: Duration = Duration::from_micros(100);
/// Maximum bytes of one read of a connection that is not paced.
const READ_BYTES_MAX: usize = 16 << 10;
/// Maximum bytes of one read of a paced connection.
const PACED_READ_BYTES_MAX: usize = 2 << 10;

/// The reading side of a paced connection: a read returns `Pending` when the poll's time is over. Writes are not paced.
pub struct PacedReader<S> {
    stream: S,
    pace: Arc<Mutex<Pace>>,
}

/// The polling side of a paced connection: waits for a step when the reader has used up its time.
pub struct Pacer {
    pace: Arc<Mutex<Pace>>,
    steps: Arc<Steps>,
}

/// Only the task that owns the connection takes the lock.
#[derive(Debug)]
struct Pace {
    poll_began: Instant,
    /// The poll's time is over, and the reader has more to read.
    is_exhausted: bool,
    read_bytes_max: usize,
}

/// Splits a connection into the stream for hyper and the pacer, which must poll hyper's connection ([`Pacer::run`]).
pub fn paced<S>(stream: S, steps: &Arc<Steps>) -> (PacedReader<S>, Pacer) {
    let pace = Pace { poll_began: Instant::now(), is_exhausted: false, read_bytes_max: READ_BYTES_MAX };
    let pace = Arc::new(Mutex::new(pace));
    (PacedReader { stream, pace: Arc::clone(&pace) }, Pacer { pace, steps: Arc::clone(steps) })
}

impl Pacer {
    /// Runs the connection that reads from the [`PacedReader`].
    pub async fn run<F: Future>(self, connection: F) -> F::Output {
        let mut connection = pin!(connection);
        loop {
            let polled = poll_fn(|context| {
                self.pace.lock().poll_began = Instant::now();
                let polled = connection.as_mut().poll(context);
                if polled.is_pending() && self.pace.lock().is_exhausted { Poll::Ready(None) } else { polled.map(Some) }
            });
            if let Some(output) = polled.await {
                return output;
            }
            self.steps.request().await;
            self.pace.lock().is_exhausted = false;
        }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for PacedReader<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let bytes_max = {
            let mut pace = self.pace.lock();
            if pace.is_exhausted || pace.poll_began.elapsed() >= READ_TIME_MAX {
                // The pacer polls again when a step is granted.
                (pace.is_exhausted, pace.read_bytes_max) = (true, PACED_READ_BYTES_MAX);
                return Poll::Pending;
            }
            pace.read_bytes_max
        };
        let read = poll_read_at_most(bytes_max, Pin::new(&mut self.stream), context, buffer);
        if read.is_pending() {
            self.pace.lock().read_bytes_max = READ_BYTES_MAX;
        }
        read
    }
}

fn poll_read_at_most<S: AsyncRead>(
    bytes_max: usize,
    stream: Pin<&mut S>,
    context: &mut Context<'_>,
    buffer: &mut ReadBuf<'_>,
) -> Poll<io::Result<()>> {
    // The usual case. In the other case, the part of the buffer to be filled must be initialized first.
    if buffer.remaining() <= bytes_max {
        return stream.poll_read(context, buffer);
    }
    let mut part = ReadBuf::new(buffer.initialize_unfilled_to(bytes_max));
    ready!(stream.poll_read(context, &mut part))?;
    let bytes = part.filled().len();
    buffer.advance(bytes);
    Poll::Ready(Ok(()))
}

impl<S: AsyncWrite + Unpin> AsyncWrite for PacedReader<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.stream).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use tokio::{
        io::AsyncReadExt as _,
        time::{advance, timeout},
    };

    use super::*;

    /// A stream that has data for a hundred reads. Each takes `time` of the paused clock.
    struct Busy {
        time: Duration,
        read: Arc<Mutex<Vec<usize>>>,
    }

    impl AsyncRead for Busy {
        fn poll_read(
            self: Pin<&mut Self>,
            context: &mut Context<'_>,
            buffer: &mut ReadBuf<'_>,
        ) -> Poll<io::Result<()>> {
            if self.read.lock().len() == 100 {
                return Poll::Ready(Err(io::ErrorKind::ConnectionReset.into()));
            }
            // The clock moves at the first poll.
            let _ = pin!(advance(self.time)).poll(context);
            self.read.lock().push(buffer.remaining());
            buffer.put_slice(&vec![7; buffer.remaining()]);
            Poll::Ready(Ok(()))
        }
    }

    #[tokio::test(start_paused = true)]
    async fn client_that_sends_without_pause_waits_for_steps() {
        let (steps, grant) = Steps::new();
        let read = Arc::new(Mutex::new(Vec::new()));
        let (mut reader, pacer) = paced(Busy { time: READ_TIME_MAX, read: Arc::clone(&read) }, &steps);
        let connection = tokio::spawn(pacer.run(async move {
            let mut buffer = vec![0; 1 << 15];
            while reader.read(&mut buffer).await.is_ok() {}
        }));
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(*read.lock(), [READ_BYTES_MAX], "one read uses up the time, and no step is granted");
        tokio::spawn(grant);
        for _ in 0..10 {
            tokio::task::yield_now().await;
        }
        assert_eq!(read.lock()[..3], [READ_BYTES_MAX, PACED_READ_BYTES_MAX, PACED_READ_BYTES_MAX]);
        connection.abort();
    }

    #[tokio::test(start_paused = true)]
    async fn connection_that_pauses_waits_for_no_step() {
        // No step is granted.
        let (steps, _grant) = Steps::new();
        let (mut client, server) = tokio::io::duplex(1 << 20);
        let (mut reader, pacer) = paced(server, &steps);
        let sent: Vec<u8> = (0..100_000_u32).map(|number| (number % 251) as u8).collect();
        let expected = sent.clone();
        let connection = tokio::spawn(pacer.run(async move {
            let mut all = Vec::new();
            reader.read_to_end(&mut all).await.map(|_| all)
        }));
        for part in sent.chunks(1_000) {
            tokio::io::AsyncWriteExt::write_all(&mut client, part).await.expect("the buffer has space");
            tokio::task::yield_now().await;
        }
        drop(client);
        let received = timeout(Duration::from_secs(10), connection).await.expect("no step is needed");
        assert!(received.expect("the task ends").expect("the stream can be read") == expected);
    }
}
