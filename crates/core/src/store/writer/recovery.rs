//! Catches up after an append that failed or lost a race. Requests wait meanwhile.

use std::{sync::Arc, time::Duration};

use tokio::time::{Instant, sleep};
use tracing::{error, info};

use super::{RESYNC_PAUSE, Served, Writer};
use crate::{
    log,
    store::{error::Error, queue::QUEUE_REQUESTS_MAX, shared::WAIT_MAX},
};

impl Writer {
    /// Makes the requests of an unwritten batch pending again, in their order.
    pub(super) fn requeue(&mut self, served: Served) {
        // A row that was not found is read again.
        self.fetched.retain(|_, kv| kv.is_some());
        for (command, _) in served.into_iter().rev() {
            self.pending.push_front(command);
        }
    }

    /// Counts an evaluation that another instance has overtaken while values were read for it as a lost race, so that the
    /// next but one holds the append lock.
    pub(super) fn note_outdated(&mut self) {
        if !self.fetched.is_empty() {
            self.losses += 1;
            self.reject_overdue();
        }
    }

    /// Applies the part of the log that the index lacks, and retries until that succeeds. Requests that wait longer
    /// than [`WAIT_MAX`] meanwhile fail as not applied. If the log has another history, or reading fails while the
    /// queue is closed, all requests fail.
    pub(super) async fn resync(&mut self) {
        let shared = Arc::clone(&self.shared);
        let began = Instant::now();
        // The first attempt starts without a pause.
        let attempt = async |pause| {
            sleep(pause).await;
            shared.catch_up().await
        };
        let mut catching_up = Box::pin(attempt(Duration::ZERO));
        let mut is_failing = false;
        loop {
            tokio::select! {
                biased;
                caught_up = &mut catching_up => match caught_up {
                    Ok(()) => {
                        self.caught_up_since = Some(began);
                        break;
                    }
                    Err(failure) => {
                        if !is_failing {
                            error!(error = %failure, "cannot read the log; trying again");
                        }
                        is_failing = true;
                        shared.write_outage.note_failure(&failure);
                        if matches!(failure, log::Error::Diverged(_)) || self.is_closed {
                            return self.reject_all();
                        }
                        // The pulse beats here and not in the timer's arm, so that the watchdog detects an attempt to
                        // read the log that does not end.
                        self.shared.pulses.writer.beat();
                        catching_up.set(attempt(RESYNC_PAUSE));
                    }
                },
                () = sleep(RESYNC_PAUSE) => self.reject_overdue(),
                () = self.close.notified(), if !self.is_closed => {
                    self.commands.close();
                    self.is_closed = true;
                }
            }
        }
        if is_failing {
            info!("the log can be read again");
        }
    }

    /// Rejects pending requests that have waited longer than [`WAIT_MAX`].
    pub(super) fn reject_overdue(&mut self) {
        while self.pending.len() < QUEUE_REQUESTS_MAX {
            let Ok(command) = self.commands.try_recv() else { break };
            self.enqueue(command);
        }
        let (overdue, waiting) = std::mem::take(&mut self.pending)
            .into_iter()
            .partition::<Vec<_>, _>(|command| command.since.elapsed() > WAIT_MAX);
        self.pending = waiting.into();
        for command in overdue {
            command.ticket.reply(Err(Error::Unavailable), None);
        }
    }

    /// Rejects all waiting requests, because nothing can be written any more.
    fn reject_all(&mut self) {
        self.commands.close();
        while let Ok(command) = self.commands.try_recv() {
            self.enqueue(command);
        }
        for command in self.pending.drain(..) {
            command.ticket.reply(Err(Error::Unavailable), None);
        }
    }
}
