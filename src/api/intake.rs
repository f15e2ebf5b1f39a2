//! Bytes of messages that clients have begun to send: a bounded number for all clients together, and a time in which each
//! message has to be whole.
//!
//! A message that came in one piece costs nothing here; it is a matter of who answers it. What is announced counts for
//! nothing either: memory is taken as bytes come.

use std::{
    future::Future as _,
    pin::Pin,
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    task::{Context, Poll},
    time::Duration,
};

use tokio::time::{Sleep, sleep, timeout};
use tonic::Status;
use tracing::warn;

use orlop_core::turns::{Turns, Work};

/// Of unfinished messages in all.
const BYTES_MAX: usize = 256 << 20;
/// How long a message may take to arrive, from its first byte; 2 MiB at 35 KiB/s.
const MESSAGE_MAX: Duration = Duration::from_secs(60);

/// A message of more is long, and read by so many bytes at a turn.
const LONG_BYTES: usize = 16 << 10;
const TURN_BYTES: usize = 4 << 10;

/// What a request costs that is refused, with all that there is to a call.
const REFUSED_TIME: Duration = Duration::from_micros(50);
/// How long a refusal waits for its turn: a client whose deadline ends before it hears of it does not know what became of its
/// request.
const REFUSED_WAIT_MAX: Duration = Duration::from_millis(100);

/// See the module's page.
#[derive(Debug)]
pub struct Intake {
    bytes: AtomicUsize,
    refusing: std::sync::atomic::AtomicBool,
    turns: Arc<Turns>,
}

impl Intake {
    pub fn new(turns: &Arc<Turns>) -> Self {
        Self { bytes: AtomicUsize::default(), refusing: Default::default(), turns: Arc::clone(turns) }
    }

    /// Before a client is told that its request is refused, which it may answer with the next one.
    pub async fn refused(&self) {
        let _ = timeout(REFUSED_WAIT_MAX, self.turns.after(REFUSED_TIME)).await;
    }
}

#[cfg(test)]
impl Default for Intake {
    fn default() -> Self {
        Self::new(&Turns::new().0)
    }
}

/// One request's part of it.
pub struct Share {
    intake: Arc<Intake>,
    bytes: usize,
    deadline: Option<Pin<Box<Sleep>>>,
    /// Of a long message.
    work: Option<Work>,
    /// What it had at its last turn.
    had: usize,
}

impl Share {
    pub fn new(intake: &Arc<Intake>) -> Self {
        Self { intake: Arc::clone(intake), bytes: 0, deadline: None, work: None, had: 0 }
    }

    /// That so many bytes of a message that is not whole are there.
    ///
    /// # Errors
    ///
    /// If there is no room for them.
    pub fn holds(&mut self, bytes: usize) -> Result<(), Status> {
        if bytes == 0 {
            (self.deadline, self.work, self.had) = (None, None, 0);
        }
        let before = std::mem::replace(&mut self.bytes, bytes);
        if bytes <= before {
            self.intake.bytes.fetch_sub(before - bytes, Ordering::Relaxed);
            return Ok(());
        }
        let all = self.intake.bytes.fetch_add(bytes - before, Ordering::Relaxed) + bytes - before;
        let refuse = all > BYTES_MAX;
        if self.intake.refusing.swap(refuse, Ordering::Relaxed) != refuse && refuse {
            warn!(
                bytes = all,
                "clients have begun more messages than there is room for; they are refused until some are whole"
            );
        }
        if refuse { Err(Status::resource_exhausted("etcdserver: too many requests")) } else { Ok(()) }
    }

    /// Waits until more of a long message may be read.
    pub async fn turn(&mut self) {
        if self.bytes >= LONG_BYTES && self.bytes.saturating_sub(self.had) >= TURN_BYTES {
            self.had = self.bytes;
            self.work.get_or_insert_with(|| self.intake.turns.work()).turn().await;
        }
    }

    /// # Errors
    ///
    /// If the message that was begun took too long.
    pub fn poll_deadline(&mut self, context: &mut Context<'_>) -> Poll<Status> {
        if self.bytes == 0 {
            return Poll::Pending;
        }
        let deadline = self.deadline.get_or_insert_with(|| Box::pin(sleep(MESSAGE_MAX)));
        deadline
            .as_mut()
            .poll(context)
            .map(|()| Status::deadline_exceeded(format!("orlop: the message was not whole within {MESSAGE_MAX:?}")))
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        self.intake.bytes.fetch_sub(self.bytes, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn room_is_shared_and_given_back() {
        let intake = Arc::new(Intake::default());
        let mut shares: Vec<Share> = (0..4).map(|_| Share::new(&intake)).collect();
        for share in &mut shares {
            assert!(share.holds(BYTES_MAX / 4).is_ok());
        }
        let mut late = Share::new(&intake);
        assert!(late.holds(1).is_err(), "there is no room");
        shares[0].holds(10).expect("a message that is whole makes room");
        assert!(late.holds(2).is_ok());
        drop(shares);
        drop(late);
        assert_eq!(intake.bytes.load(Ordering::Relaxed), 0);
    }

    #[tokio::test(start_paused = true)]
    async fn a_long_message_is_read_at_turns_where_others_are() {
        // Turns that nobody gives.
        let (turns, _give) = Turns::new();
        let intake = Arc::new(Intake::new(&turns));
        let mut shares: Vec<Share> = (0..3).map(|_| Share::new(&intake)).collect();
        let mut waits = async |share: usize, bytes: usize| {
            shares[share].holds(bytes).expect("room");
            tokio::time::timeout(Duration::from_secs(1), shares[share].turn()).await.is_err()
        };
        assert!(!waits(0, LONG_BYTES).await, "a long one alone");
        assert!(!waits(1, LONG_BYTES - 1).await, "a short one");
        assert!(waits(1, LONG_BYTES).await, "a second long one");
        assert!(!waits(0, LONG_BYTES + TURN_BYTES - 1).await, "the first one, within what it may read at a turn");
        assert!(waits(0, LONG_BYTES + TURN_BYTES).await);
        assert!(!waits(2, 1).await);
        assert!(!waits(1, 0).await, "what was long is whole");
    }

    #[tokio::test(start_paused = true)]
    async fn a_message_has_its_time_and_the_next_one_too() {
        let mut share = Share::new(&Arc::default());
        let mut ended = async |bytes: usize, time: Duration| {
            share.holds(bytes).expect("room");
            tokio::time::timeout(time, std::future::poll_fn(|context| share.poll_deadline(context))).await.is_ok()
        };
        assert!(!ended(5, MESSAGE_MAX / 2).await);
        assert!(!ended(0, MESSAGE_MAX * 2).await, "nothing was begun");
        assert!(!ended(5, MESSAGE_MAX / 2).await);
        assert!(ended(6, MESSAGE_MAX).await, "a byte more does not make its time longer");
    }
}
