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
}

impl Pieces {
    pub(super) fn new(turns: &Arc<Turns>) -> Self {
        Self { turns: Arc::clone(turns), bytes: 0, work: None }
    }

    /// Ready when something may be read.
    pub(super) fn poll(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if self.bytes < PIECE_BYTES {
            return Poll::Ready(());
        }
        // Also where it is alone: who polls a connection may do so again before others come.
        ready!(self.work.get_or_insert_with(|| self.turns.work()).poll_given(context));
        self.bytes = 0;
        Poll::Ready(())
    }

    /// What reading came to.
    pub(super) fn read(&mut self, bytes: Poll<usize>) {
        match bytes {
            Poll::Ready(bytes) => self.bytes += bytes,
            Poll::Pending => (self.bytes, self.work) = (0, None),
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
    async fn who_reads_on_lets_others_go_first_though_alone() {
        let (turns, give) = Turns::new();
        let mut pieces = Pieces::new(&turns);
        tokio::spawn(give);
        for _ in 0..3 {
            pieces.read(Poll::Ready(PIECE_BYTES));
            assert!(!may_read(&mut pieces) && !may_read(&mut pieces), "others come first, however often it is polled");
            poll_fn(|context| pieces.poll(context)).await;
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
        tokio::spawn(give);
        for pieces in &mut many {
            poll_fn(|context| pieces.poll(context)).await;
        }
    }

    #[tokio::test]
    async fn who_has_read_all_asks_no_longer() {
        let (turns, _nobody_gives) = Turns::new();
        let mut pieces = Pieces::new(&turns);
        pieces.read(Poll::Ready(PIECE_BYTES));
        assert!(!may_read(&mut pieces));
        pieces.read(Poll::Pending);
        assert!(may_read(&mut pieces), "what comes next is short");
        pieces.read(Poll::Ready(PIECE_BYTES - 1));
        assert!(may_read(&mut pieces));
    }
}
