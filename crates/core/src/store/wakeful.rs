//! Waiting for the commit of a lone client, awake.
//!
//! A client that puts one after another waits for four threads to wake up in turn: the server, the database, the server and
//! itself. While such a client is at work the server does not go to sleep over its commit, which on a machine of two cores is
//! a fifth of what it waits (docs/adr/0007). Other tasks run meanwhile as they come.

use std::{
    future::{Future, poll_fn},
    pin::pin,
    thread,
    time::Duration,
};

use tokio::time::Instant;

/// A commit that takes longer than this is slept over.
const COMMIT_MAX: Duration = Duration::from_millis(1);
/// A client that puts one after another is back within this.
const THINK_MAX: Duration = Duration::from_millis(1);
/// The database's thread may need the core that we are awake on; it has done with it within this.
const LENT_MAX: Duration = Duration::from_micros(300);
/// Where others want the core for longer, commits are slept over for so long.
const ASLEEP: Duration = Duration::from_secs(1);

pub(super) struct Wakeful {
    is_on: bool,
    last: Option<Lap>,
    /// Others want the core.
    asleep_until: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Lap {
    took: Duration,
    ended: Instant,
}

impl Wakeful {
    pub(super) fn new(is_on: bool) -> Self {
        Self { is_on, last: None, asleep_until: None }
    }

    /// What `commit` gives, whose batch has one request and nobody waits behind it where it `is_lone`.
    pub(super) async fn wait<T>(&mut self, is_lone: bool, commit: impl Future<Output = T>) -> T {
        let begun = Instant::now();
        let is_at_work =
            self.last.is_some_and(|last| last.took < COMMIT_MAX && begun.duration_since(last.ended) < THINK_MAX);
        let is_asleep = self.asleep_until.is_some_and(|until| begun < until);
        let mut until = (self.is_on && is_lone && is_at_work && !is_asleep).then(|| begun + COMMIT_MAX);
        let mut commit = pin!(commit);
        let done = poll_fn(|context| {
            let polled = commit.as_mut().poll(context);
            if polled.is_pending()
                && let Some(end) = until
            {
                let lends = Instant::now();
                thread::yield_now();
                let now = Instant::now();
                if !self.is_wanted(now.duration_since(lends), now) && now < end {
                    context.waker().wake_by_ref();
                } else {
                    until = None;
                }
            }
            polled
        })
        .await;
        let ended = Instant::now();
        self.last = Some(Lap { took: ended.duration_since(begun), ended });
        done
    }

    /// Whether others want the core, which was lent for so long.
    fn is_wanted(&mut self, lent: Duration, now: Instant) -> bool {
        let is_wanted = lent > LENT_MAX;
        if is_wanted {
            self.asleep_until = Some(now + ASLEEP);
        }
        is_wanted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How often a commit that comes from another thread is polled.
    async fn polls(wakeful: &mut Wakeful, is_lone: bool) -> u32 {
        let (sender, mut receiver) = tokio::sync::oneshot::channel();
        let thread = std::thread::spawn(move || {
            std::thread::park_timeout(COMMIT_MAX / 4);
            let _ = sender.send(());
        });
        let mut polls = 0;
        let commit = poll_fn(|context| {
            polls += 1;
            pin!(&mut receiver).poll(context).map(drop)
        });
        wakeful.wait(is_lone, commit).await;
        thread.join().expect("it only sends");
        polls
    }

    /// As one that ended just now.
    fn at_work(is_on: bool, took: Duration) -> Wakeful {
        Wakeful { is_on, last: Some(Lap { took, ended: Instant::now() }), asleep_until: None }
    }

    #[tokio::test]
    async fn only_the_commit_of_a_lone_client_at_work_is_waited_for_awake() {
        let mut lent = at_work(true, COMMIT_MAX / 2);
        assert!(!lent.is_wanted(LENT_MAX, Instant::now()), "the database's thread alone wants it");
        // Where other tests want the core it sleeps as well.
        let deadline = Instant::now() + Duration::from_secs(10);
        while polls(&mut lent, true).await <= 2 {
            assert!(Instant::now() < deadline, "it never stays awake");
            lent = at_work(true, COMMIT_MAX / 2);
        }
        let mut wanted = at_work(true, COMMIT_MAX / 2);
        assert!(wanted.is_wanted(LENT_MAX * 2, Instant::now()));
        for (mut wakeful, is_lone, why) in [
            (at_work(false, COMMIT_MAX / 2), true, "it is off"),
            (at_work(true, COMMIT_MAX / 2), false, "others wait behind it"),
            (at_work(true, COMMIT_MAX), true, "the disk is slow"),
            (Wakeful::new(true), true, "it is the first"),
            (wanted, true, "others want the core"),
        ] {
            assert!(polls(&mut wakeful, is_lone).await <= 2, "{why}");
        }
    }
}
