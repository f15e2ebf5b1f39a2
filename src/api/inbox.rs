//! The requests of a stream, of which those that came at once are taken in by portions.

use std::{
    future::poll_fn,
    pin::Pin,
    sync::Arc,
    task::{Poll, ready},
};

use futures_util::Stream;
use tonic::Status;

use crate::turns::{Portions, Turns};

/// See the module's page.
pub(super) struct Inbox<S> {
    requests: S,
    portions: Portions,
}

impl<M, S: Stream<Item = Result<M, Status>> + Unpin> Inbox<S> {
    pub(super) fn new(requests: S, turns: &Arc<Turns>) -> Self {
        Self { requests, portions: Portions::new(turns, 4..=128) }
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
