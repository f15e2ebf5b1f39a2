//! One question to the log for many who ask it at the same time.

use std::{future::Future, sync::Arc, time::Duration};

use tokio::{
    sync::{mpsc, oneshot},
    time::sleep,
};

use crate::watchdog::Pulse;

/// So many answers are told before a rest, at least: with all that whoever asked does with them, that takes some 60
/// microseconds.
const ANSWERS_AT_ONCE: usize = 16;
/// In so many parts at most. Those who ask again wait for the last one of them, and so does what they have to ask in time.
const PARTS_MAX: usize = 8;

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
        Self::with_rests(ask, Duration::ZERO, pulse)
    }

    /// The same for clients who may ask without end: after a question comes a rest, and one half as long after some of the
    /// answers to it.
    pub fn with_rests<F, A>(ask: F, rest: Duration, pulse: Arc<Pulse>) -> (Self, impl Future<Output = ()> + Send)
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
                let at_once =
                    if rest.is_zero() { items.len() } else { ANSWERS_AT_ONCE.max(items.len().div_ceil(PARTS_MAX)) };
                let mut answers = ask(items).await.into_iter().zip(waiting).peekable();
                while answers.peek().is_some() {
                    for (answer, waiting) in answers.by_ref().take(at_once) {
                        // Who asked may be gone.
                        let _ = waiting.send(answer);
                    }
                    if !rest.is_zero() {
                        sleep(if answers.peek().is_some() { rest / 2 } else { rest }).await;
                        pulse.beat();
                    }
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
    use tokio::time::Instant;

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

    #[tokio::test(start_paused = true)]
    async fn between_two_questions_there_is_a_rest() {
        const REST: Duration = Duration::from_secs(1);
        let (coalesced, run) = Coalesced::with_rests(async |items: Vec<u32>| items, REST, Arc::default());
        tokio::spawn(run);
        let began = Instant::now();
        for (item, rests) in [(1, 0), (2, 1), (3, 2)] {
            assert_eq!(coalesced.ask(item).await, Some(item));
            assert_eq!(began.elapsed(), REST * rests);
        }
        tokio::time::advance(REST * 2).await;
        let began = Instant::now();
        assert_eq!(
            (coalesced.ask(4).await, began.elapsed()),
            (Some(4), Duration::ZERO),
            "who comes later need not wait"
        );
    }

    #[tokio::test(start_paused = true)]
    async fn many_answers_come_by_and_by() {
        const REST: Duration = Duration::from_secs(1);
        // How many ask, and after how many halves of a rest so many of them are answered.
        let rows: [(u32, &[(u32, usize)]); 4] = [
            (1, &[(0, 1)]),
            (16, &[(0, 16)]),
            (40, &[(0, 16), (1, 16), (2, 8)]),
            (1_000, &[(0, 125), (1, 125), (7, 125)]),
        ];
        for (many, expected) in rows {
            let (coalesced, run) = Coalesced::with_rests(async |items: Vec<u32>| items, REST, Arc::default());
            let (began, coalesced) = (Instant::now(), &coalesced);
            let asked = join_all((0..many).map(|item| async move {
                assert_eq!(coalesced.ask(item).await, Some(item));
                began.elapsed()
            }));
            // All have asked when it begins.
            let answered = tokio::select! { biased; answered = asked => answered, () = run => panic!("it ran out") };
            for (halves, answers) in expected {
                let then = answered.iter().filter(|after| **after == REST / 2 * *halves).count();
                assert_eq!(then, *answers, "of {many}, after {halves} halves of a rest");
            }
        }
    }
}
