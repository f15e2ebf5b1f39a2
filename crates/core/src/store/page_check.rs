//! Checks the database for damage that its rows do not show ([`Log::check`]).
//!
//! The check reads the whole database. A start waits for it for a moment, which suffices for a small one, and serves a large
//! one meanwhile: a liveness probe would kill a server that does not answer for as long as it takes to read it.

use std::{sync::Arc, time::Duration};

use futures_util::future::BoxFuture;
use tokio::{
    sync::watch,
    time::{Instant, sleep, timeout},
};
use tracing::{error, info, warn};

use super::{queue::WriteQueue, shared::Shared, tasks::until_stopped, write_request::Request};
use crate::{
    auth::Caller,
    log::{Alarm, AlarmChange, AlarmKind, Cause, Error, Log, Result},
};

/// Time for which a start waits, after it has read the log.
const WAIT: Duration = Duration::from_millis(100);
/// Pause after an alarm could not be recorded.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// A check that has begun. It goes on while it is polled.
pub(super) struct PageCheck {
    check: BoxFuture<'static, Result<()>>,
    began: Instant,
    is_done: bool,
}

impl PageCheck {
    pub(super) fn begin(log: &Arc<dyn Log>) -> Self {
        let log = Arc::clone(log);
        Self { check: Box::pin(async move { log.check().await }), began: Instant::now(), is_done: false }
    }

    /// Checks while `work` is done, and a moment longer.
    ///
    /// # Errors
    ///
    /// The error of `work`, or the damage that was found.
    pub(super) async fn beside<T>(&mut self, work: impl Future<Output = Result<T>>) -> Result<T> {
        let mut work = std::pin::pin!(work);
        let done = loop {
            tokio::select! {
                biased;
                done = &mut work => break done?,
                checked = &mut self.check, if !self.is_done => {
                    self.is_done = true;
                    checked?;
                }
            }
        };
        if !self.is_done
            && let Ok(checked) = timeout(WAIT, &mut self.check).await
        {
            self.is_done = true;
            checked?;
        }
        Ok(done)
    }

    /// Finishes the check while the store is served, and waits for damage that a later statement finds. Damage raises the
    /// alarm CORRUPT, as in etcd: reads go on, and writes are refused.
    pub(super) async fn watch(self, shared: Arc<Shared>, queue: WriteQueue, stop: watch::Receiver<bool>) {
        let work = async {
            let damage = tokio::select! {
                damage = shared.log.damaged() => damage,
                damage = self.finish() => damage,
            };
            error!(damage, "the database is damaged: raising the alarm CORRUPT; restore a snapshot");
            let alarm = Alarm { member_id: shared.identity.member_id, kind: AlarmKind::Corrupt };
            let raise = AlarmChange::Raise { alarm, cause: Cause::Client };
            while let Err(error) = queue.submit(&Caller::Server, Request::Alarm(raise)).await {
                error!(%error, "cannot record the alarm CORRUPT; trying again");
                sleep(RETRY_PAUSE).await;
            }
        };
        until_stopped(stop, work).await;
    }

    /// Completes if the check finds damage.
    async fn finish(self) -> String {
        if !self.is_done {
            match self.check.await {
                Ok(()) => info!(elapsed_ms = self.began.elapsed().as_millis(), "pages of the database checked"),
                Err(Error::Corrupt(damage)) => return damage,
                Err(error) => warn!(%error, "cannot check the pages of the database; the next start tries again"),
            }
        }
        std::future::pending().await
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        log::memory::MemoryLog,
        store::{Settings, Store},
    };

    fn check(takes: Duration, found: Result<()>) -> PageCheck {
        let check = async move {
            sleep(takes).await;
            found
        };
        PageCheck { check: Box::pin(check), began: Instant::now(), is_done: false }
    }

    fn damage() -> Result<()> {
        Err(Error::Corrupt("a page".to_owned()))
    }

    async fn reading() -> Result<u8> {
        sleep(Duration::from_secs(1)).await;
        Ok(7)
    }

    #[tokio::test(start_paused = true)]
    async fn start_waits_for_a_short_check_only() {
        for (millis, found, is_refused, is_done) in [
            (10, Ok(()), false, true),
            (10, damage(), true, true),
            (1_050, damage(), true, true),
            (1_050, Ok(()), false, true),
            (5_000, damage(), false, false),
        ] {
            let mut check = check(Duration::from_millis(millis), found);
            let read = check.beside(reading()).await;
            assert_eq!((read.is_err(), check.is_done), (is_refused, is_done), "{millis} ms");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn damage_that_is_found_later_raises_an_alarm() {
        for (found, kinds) in
            [(Ok(()), vec![]), (damage(), vec![AlarmKind::Corrupt]), (Err(Error::Full(String::new())), vec![])]
        {
            let store = Store::open(Arc::new(MemoryLog::default()), Settings::default()).await.unwrap();
            let (_stop, stopped) = watch::channel(false);
            let check = check(Duration::from_secs(5), found);
            let watching = check.watch(Arc::clone(&store.shared), store.queue.clone(), stopped);
            // Without damage it goes on.
            assert_eq!(timeout(Duration::from_secs(60), watching).await.is_ok(), !kinds.is_empty());
            let raised: Vec<AlarmKind> = store.alarms().into_iter().map(|alarm| alarm.kind).collect();
            assert_eq!(raised, kinds);
        }
    }
}
