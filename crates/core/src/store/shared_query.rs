//! Shares one query among all callers that wait for it, like etcd's ReadIndex.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};

use crate::watchdog::Pulse;

/// Minimum number of responses sent before a pause. Sending them, and what the callers then do, takes about 60
/// microseconds.
const RESPONSES_MIN: usize = 16;
/// Maximum number of groups in which responses are sent. Callers that repeat their query wait for the last group, and
/// so does any query that has a deadline.
const GROUPS_MAX: usize = 8;

/// A handle for queries that are sent together. Items that arrive while a query is running share the next one, so every
/// response comes from a query that started after its item arrived.
pub struct SharedQuery<I, O>(mpsc::UnboundedSender<(I, oneshot::Sender<O>)>);

impl<I, O> SharedQuery<I, O> {
    /// Returns the handle and the future that runs the queries until the handle is dropped. `ask` returns a response
    /// for each item, in their order.
    pub fn new<F, A>(ask: F, pulse: Arc<Pulse>) -> (Self, impl Future<Output = ()> + Send)
    where
        F: Fn(Vec<I>) -> A + Send,
        A: Future<Output = Vec<O>> + Send,
        I: Send,
        O: Send,
    {
        Self::with_pauses(ask, Duration::ZERO, pulse)
    }

    /// Like [`Self::new`], with a pause of `pause` after each query and of half of `pause` between groups of responses.
    /// For callers that repeat their queries without a pause.
    pub fn with_pauses<F, A>(ask: F, pause: Duration, pulse: Arc<Pulse>) -> (Self, impl Future<Output = ()> + Send)
    where
        F: Fn(Vec<I>) -> A + Send,
        A: Future<Output = Vec<O>> + Send,
        I: Send,
        O: Send,
    {
        let (sender, mut asked) = mpsc::unbounded_channel::<(I, oneshot::Sender<O>)>();
        let run = async move {
            loop {
                pulse.rest();
                let Some(first) = asked.recv().await else { return };
                pulse.beat();
                let (mut items, mut callers) = (vec![first.0], vec![first.1]);
                while let Ok((item, answer)) = asked.try_recv() {
                    items.push(item);
                    callers.push(answer);
                }
                let group_len =
                    if pause.is_zero() { items.len() } else { RESPONSES_MIN.max(items.len().div_ceil(GROUPS_MAX)) };
                let mut answers = ask(items).await.into_iter().zip(callers).peekable();
                while answers.peek().is_some() {
                    for (answer, caller) in answers.by_ref().take(group_len) {
                        // The caller may be gone.
                        let _ = caller.send(answer);
                    }
                    if !pause.is_zero() {
                        sleep(if answers.peek().is_some() { pause / 2 } else { pause }).await;
                        pulse.beat();
                    }
                }
            }
        };
        (Self(sender), run)
    }

    /// Returns the response for an item, or `None` if the task has ended.
    pub async fn query(&self, item: I) -> Option<O> {
        let (sender, answer) = oneshot::channel();
        self.0.send((item, sender)).ok()?;
        answer.await.ok()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use futures_util::{FutureExt as _, future::join_all};
    use tokio::time::Instant;

    use super::*;

    #[tokio::test]
    async fn callers_during_a_query_share_the_next_one() {
        let questions = Arc::new(Mutex::new(Vec::new()));
        let asked = Arc::clone(&questions);
        let (queries, run) = SharedQuery::new(
            move |items: Vec<u32>| {
                asked.lock().unwrap().push(items.clone());
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
        let (first, others) = tokio::select! { answers = all => answers, () = run => panic!("the task ended") };
        assert_eq!(first, Some(10));
        assert_eq!(others, [Some(20), Some(30), Some(40)]);
        assert_eq!(*questions.lock().unwrap(), [vec![1], vec![2, 3, 4]]);
    }

    #[tokio::test(start_paused = true)]
    async fn pauses_between_queries() {
        const PAUSE: Duration = Duration::from_secs(1);
        let (queries, run) = SharedQuery::with_pauses(async |items: Vec<u32>| items, PAUSE, Arc::default());
        tokio::spawn(run);
        let began = Instant::now();
        for (item, pauses) in [(1, 0), (2, 1), (3, 2)] {
            assert_eq!(queries.query(item).await, Some(item));
            assert_eq!(began.elapsed(), PAUSE * pauses);
        }
        tokio::time::advance(PAUSE * 2).await;
        let began = Instant::now();
        assert_eq!(
            (queries.query(4).await, began.elapsed()),
            (Some(4), Duration::ZERO),
            "a caller after the pause does not wait"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn many_responses_are_sent_in_groups() {
        const PAUSE: Duration = Duration::from_secs(1);
        // Number of callers, then pairs: number of half pauses elapsed, number of responses at that time.
        let rows: [(u32, &[(u32, usize)]); 4] = [
            (1, &[(0, 1)]),
            (16, &[(0, 16)]),
            (40, &[(0, 16), (1, 16), (2, 8)]),
            (1_000, &[(0, 125), (1, 125), (7, 125)]),
        ];
        for (many, expected) in rows {
            let (queries, run) = SharedQuery::with_pauses(async |items: Vec<u32>| items, PAUSE, Arc::default());
            let (began, queries) = (Instant::now(), &queries);
            let asked = join_all((0..many).map(|item| async move {
                assert_eq!(queries.query(item).await, Some(item));
                began.elapsed()
            }));
            // All callers have asked before the task starts.
            let answered =
                tokio::select! { biased; answered = asked => answered, () = run => panic!("the task ended") };
            for (halves, answers) in expected {
                let then = answered.iter().filter(|after| **after == PAUSE / 2 * *halves).count();
                assert_eq!(then, *answers, "{many} callers, after {halves} half pauses");
            }
        }
    }
}
