//! The requests of a stream, of which those that came at once are taken in by portions.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Poll, ready},
};

use futures_util::Stream;
use tonic::Status;

use orlop_core::turns::{Portions, Turns};

/// Requests that are taken in before others come, if that takes no longer than a portion may.
const AT_ONCE_MAX: usize = 128;

/// See the module's page.
pub(super) struct Inbox<S> {
    requests: S,
    portions: Portions,
}

impl<M, S: Stream<Item = Result<M, Status>> + Unpin> Inbox<S> {
    pub(super) fn new(requests: S, turns: &Arc<Turns>) -> Self {
        Self { requests, portions: Portions::new(turns, 4..=AT_ONCE_MAX) }
    }

    /// The next one; none when the client has sent all.
    ///
    /// # Errors
    ///
    /// What the stream broke by.
    ///
    /// # Cancel safety
    ///
    /// Nothing is lost.
    pub(super) async fn message(&mut self) -> Result<Option<M>, Status> {
        poll_fn(|context| {
            ready!(self.portions.poll(context));
            let polled = Pin::new(&mut self.requests).poll_next(context);
            self.portions.took(if polled.is_ready() { Poll::Ready(1) } else { Poll::Pending });
            polled.map(Option::transpose)
        })
        .await
    }
}

#[cfg(test)]
mod tests {
    use futures_util::{FutureExt as _, stream};

    use super::*;

    /// How many requests of an endless stream are taken in before others come.
    async fn taken(inbox: &mut Inbox<impl Stream<Item = Result<usize, Status>> + Unpin>) -> usize {
        let mut taken = 0;
        while let Some(request) = inbox.message().now_or_never() {
            assert!(request.is_ok_and(|request| request.is_some()));
            taken += 1;
        }
        taken
    }

    #[tokio::test]
    async fn a_client_that_asks_without_a_pause_lets_others_go_first() {
        let (turns, give) = Turns::new();
        let mut inbox = Inbox::new(stream::iter((0..).map(Ok)), &turns);
        let first = taken(&mut inbox).await;
        assert!((1..=AT_ONCE_MAX).contains(&first), "{first} at once");
        assert_eq!(taken(&mut inbox).await, 0, "nobody gives turns");
        tokio::spawn(give);
        let next = inbox.message().await.expect("no error");
        assert_eq!(next, Some(first), "nothing is lost");
    }
}
