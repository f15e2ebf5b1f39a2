//! Shares one query among all callers that wait for it, like etcd's ReadIndex.

use std::{future::Future, sync::Arc};

use tokio::{
    sync::{mpsc, oneshot},
    time::{Instant, sleep, timeout_at},
};

use super::{
    error::{Error, Result},
    shared::{RETRY_PAUSE, WAIT_MAX},
};
use crate::{log, watchdog::Pulse};

/// A handle for queries that are sent together. Items that arrive while a query is running share the next one, so every
/// response comes from a query that started after its item arrived.
pub struct SharedQuery<I, O>(mpsc::UnboundedSender<(I, oneshot::Sender<O>)>);

impl<I, O> SharedQuery<I, O> {
    /// Returns the handle and the future that runs the queries until the handle is dropped. `run_query` returns a
    /// response for each item, in their order.
    pub fn new<F, A>(run_query: F, pulse: Arc<Pulse>) -> (Self, impl Future<Output = ()> + Send)
    where
        F: Fn(Vec<I>) -> A + Send,
        A: Future<Output = Vec<O>> + Send,
        I: Send,
        O: Send,
    {
        let (sender, mut requests) = mpsc::unbounded_channel::<(I, oneshot::Sender<O>)>();
        let run = async move {
            loop {
                pulse.rest();
                let Some(first) = requests.recv().await else { return };
                pulse.beat();
                let (mut items, mut callers) = (vec![first.0], vec![first.1]);
                while let Ok((item, caller)) = requests.try_recv() {
                    items.push(item);
                    callers.push(caller);
                }
                for (response, caller) in run_query(items).await.into_iter().zip(callers) {
                    // The caller may have stopped waiting.
                    let _ = caller.send(response);
                }
            }
        };
        (Self(sender), run)
    }

    /// Returns the response for an item, or `None` if the task has ended.
    pub async fn query(&self, item: I) -> Option<O> {
        let (sender, response) = oneshot::channel();
        self.0.send((item, sender)).ok()?;
        response.await.ok()
    }
}

impl<I: Copy, O> SharedQuery<I, log::Result<O>> {
    /// Returns the response of the log for an item. Repeats a query that fails.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if none succeeds within [`WAIT_MAX`].
    pub(super) async fn query_retrying(&self, item: I) -> Result<O> {
        let deadline = Instant::now() + WAIT_MAX;
        loop {
            match timeout_at(deadline, self.query(item)).await {
                Ok(Some(Ok(response))) => return Ok(response),
                Ok(Some(Err(_))) if Instant::now() < deadline => sleep(RETRY_PAUSE).await,
                Ok(_) | Err(_) => return Err(Error::Unavailable),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::{FutureExt as _, future::join_all};

    use super::*;

    #[tokio::test]
    async fn callers_during_a_query_share_the_next_one() {
        let sent = Arc::new(Mutex::new(Vec::new()));
        let sent_by_run = Arc::clone(&sent);
        let (queries, run) = SharedQuery::new(
            move |items: Vec<u32>| {
                sent_by_run.lock().unwrap().push(items.clone());
                async move {
                    tokio::task::yield_now().await;
                    items.into_iter().map(|item| item * 10).collect()
                }
            },
            Arc::default(),
        );
        let mut first = Box::pin(queries.query(1));
        assert!(first.as_mut().now_or_never().is_none());
        let mut run = Box::pin(run);
        assert!(run.as_mut().now_or_never().is_none(), "the first query is running");
        let others = join_all([2, 3, 4].map(|item| queries.query(item)));
        let all = async { (first.await, others.await) };
        let (first, others) = tokio::select! { responses = all => responses, () = run => panic!("the task ended") };
        assert_eq!(first, Some(10));
        assert_eq!(others, [Some(20), Some(30), Some(40)]);
        assert_eq!(*sent.lock().unwrap(), [vec![1], vec![2, 3, 4]]);
    }
}
