//! How much of a connection is read before others come.
//!
//! A client that sends megabytes without a pause has its next bytes here before those that came are looked at. Read for as
//! long as there are any, it would hold the thread for a millisecond each time, and fifty such clients every request of
//! the others for as many, wherever that waits. So what is long is read by pieces, each at a turn (see [`Turns`]).

use std::{
    sync::Arc,
    task::{Context, Poll, ready},
};

use crate::turns::{Turns, Work};

/// Bytes read at a turn: some microseconds.
const PIECE_BYTES: usize = 16 << 10;

/// See the module's page.
pub(super) struct Pieces {
    turns: Arc<Turns>,
    /// Since the last turn, or since there was no more to be read.
    bytes: usize,
    /// While there is always more to be read.
    work: Option<Work>,
    has_asked: bool,
}

impl Pieces {
    pub(super) fn new(turns: &Arc<Turns>) -> Self {
        Self { turns: Arc::clone(turns), bytes: 0, work: None, has_asked: false }
    }

    /// Ready when something may be read.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.bytes < PIECE_BYTES {
            return Poll::Ready(());
        }
        let work = self.work.get_or_insert_with(|| self.turns.work());
        let turn = work.poll_turn(context);
        if !std::mem::replace(&mut self.has_asked, true) {
            if turn.is_ready() {
                // It need not ask; those that are ready still come first.
                context.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
        ready!(turn);
        (self.bytes, self.has_asked) = (0, false);
        Poll::Ready(())
    }

    /// What reading came to.
    pub(super) fn read(&mut self, bytes: Poll<usize>) {
        match bytes {
            Poll::Ready(bytes) => self.bytes += bytes,
            Poll::Pending => (self.bytes, self.work, self.has_asked) = (0, None, false),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::future::poll_fn;

    use futures_util::FutureExt as _;

    use super::*;

    fn may_read(pieces: &mut Pieces) -> bool {
        poll_fn(|context| pieces.poll(context)).now_or_never().is_some()
    }

    #[tokio::test]
    async fn what_is_short_never_waits() {
        let (turns, _nobody_gives) = Turns::new();
        let _long = [turns.work(), turns.work()];
        let mut pieces = Pieces::new(&turns);
        pieces.read(Poll::Ready(PIECE_BYTES - 1));
        assert!(may_read(&mut pieces));
    }

    #[tokio::test]
    async fn who_is_alone_lets_others_go_first_and_reads_on() {
        let (turns, _nobody_gives) = Turns::new();
        let mut pieces = Pieces::new(&turns);
        for _ in 0..3 {
            pieces.read(Poll::Ready(PIECE_BYTES));
            assert!(!may_read(&mut pieces), "others come first");
            assert!(may_read(&mut pieces));
            assert!(may_read(&mut pieces), "until there is a piece more");
        }
    }

    #[tokio::test]
    async fn many_read_a_piece_at_a_turn() {
        let (turns, give) = Turns::new();
        let mut many: Vec<Pieces> = (0..3).map(|_| Pieces::new(&turns)).collect();
        for pieces in &mut many {
            pieces.read(Poll::Ready(PIECE_BYTES));
            assert!(!may_read(pieces));
        }
        // The first asked while it was alone.
        assert!(many.iter_mut().skip(1).all(|pieces| !may_read(pieces)), "nobody gives");
        tokio::spawn(give);
        for pieces in &mut many {
            poll_fn(|context| pieces.poll(context)).await;
        }
    }

    #[tokio::test]
    async fn who_has_read_all_is_no_longer_among_those_who_take_turns() {
        let (turns, _nobody_gives) = Turns::new();
        let mut many: Vec<Pieces> = (0..2).map(|_| Pieces::new(&turns)).collect();
        for pieces in &mut many {
            pieces.read(Poll::Ready(PIECE_BYTES));
            assert!(!may_read(pieces));
        }
        assert!(!may_read(&mut many[1]));
        many[1].read(Poll::Pending);
        assert!(may_read(&mut many[1]), "what comes next is short");
        many[1].read(Poll::Ready(PIECE_BYTES - 1));
        assert!(may_read(&mut many[1]));
        assert!(may_read(&mut many[0]), "it is alone");
    }
}
