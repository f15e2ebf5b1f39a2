//! One question to the log for many who ask it at the same time.

use std::{future::Future, sync::Arc};

use tokio::sync::{mpsc, oneshot};

use crate::watchdog::Pulse;

/// Items that are asked about together: those that come while one question is under way share the next, so that every
/// answer is of a question that began after it was asked for.
pub struct Coalesced<I, O>(mpsc::UnboundedSender<(I, oneshot::Sender<O>)>);

impl<I, O> Coalesced<I, O> {
    /// The future that asks runs until the handle is dropped. `ask` answers each item, in their order.
    pub fn new<F, A>(ask: F, pulse: Arc<Pulse>) -> (Self, impl Future<Output = ()> + Send)
    where
        F: Fn(Vec<I>) -> A + Send,
        A: Future<Output = Vec<O>> + Send,
        I: Send,
        O: Send,
    {
        let (asks, mut asked) = mpsc::unbounded_channel::<(I, oneshot::Sender<O>)>();
        let run = async move {
            loop {
                pulse.rest();
                let Some(first) = asked.recv().await else { return };
                pulse.beat();
                let (mut items, mut waiting) = (vec![first.0], vec![first.1]);
                while let Ok((item, answer)) = asked.try_recv() {
                    items.push(item);
                    waiting.push(answer);
                }
                for (answer, waiting) in ask(items).await.into_iter().zip(waiting) {
                    // Who asked may be gone.
                    let _ = waiting.send(answer);
                }
            }
        };
        (Self(asks), run)
    }

    /// `None`: nobody answers any more.
    pub async fn ask(&self, item: I) -> Option<O> {
        let (sender, answer) = oneshot::channel();
        self.0.send((item, sender)).ok()?;
        answer.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::{FutureExt as _, future::join_all};

    use super::*;

    #[tokio::test]
    async fn those_who_ask_meanwhile_share_the_next_question() {
        let questions = Arc::new(Mutex::new(Vec::new()));
        let asked = Arc::clone(&questions);
        let (coalesced, run) = Coalesced::new(
            move |items: Vec<u32>| {
                asked.lock().unwrap().push(items.clone());
                async move {
                    tokio::task::yield_now().await;
                    items.into_iter().map(|item| item * 10).collect()
                }
            },
            Arc::default(),
        );
        let mut first = Box::pin(coalesced.ask(1));
        assert!(first.as_mut().now_or_never().is_none());
        let mut run = Box::pin(run);
        assert!(run.as_mut().now_or_never().is_none(), "the first question is under way");
        let others = join_all([2, 3, 4].map(|item| coalesced.ask(item)));
        let all = async { (first.await, others.await) };
        let (first, others) = tokio::select! { answers = all => answers, () = run => panic!("it ran out") };
        assert_eq!(first, Some(10));
        assert_eq!(others, [Some(20), Some(30), Some(40)]);
        assert_eq!(*questions.lock().unwrap(), [vec![1], vec![2, 3, 4]]);
    }
}
