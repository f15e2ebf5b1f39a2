//! [`Store`]: the handle through which the server uses the store.

use std::{sync::Arc, time::Duration};

use prometheus::Histogram;
use tokio::{
    sync::watch,
    task::JoinHandle,
    time::{Instant, timeout},
};

use super::{
    error::{Error, Result},
    queries::{Queries, SIZE_MAX, size},
    queue::WriteQueue,
    request::{CompactionWait, DeleteRequest, DeleteResponse, PutRequest, PutResponse, TxnRequest, TxnResponse},
    shared::{Identity, Shared},
    write_request::{Outcome, Request},
};
use crate::{
    auth::Caller,
    index::TreeIndex,
    log::{Log, Size},
    overload::{ReadMemory, Steps},
    sync::Mutex,
    trace::{self, Part},
    types::Revision,
    watch::Hub,
    watchdog::Watchdog,
};

/// A linearizable read that waits longer than this for the log's position is counted as slow.
const SLOW_CONFIRM_MIN: Duration = Duration::from_millis(500);

/// The handle through which the server uses the store. Shared behind an [`Arc`].
///
/// # Errors
///
/// Any call that reads or writes may fail with [`Error::Unavailable`], [`Error::Corrupt`], [`Error::TooManyRequests`] and
/// [`Error::Auth`]. Any write may also fail with [`Error::NoSpace`], [`Error::Stopped`] and [`Error::OutcomeUnknown`]; only
/// after the last one may it have happened. [`Error::Refused`] is for changes of alarms, users and roles, and
/// [`Store::defragment`]. The other errors are about the request.
pub struct Store {
    pub(super) shared: Arc<Shared>,
    pub(super) queue: WriteQueue,
    /// Queries of the database that concurrent requests share; `None` if this process is the only one that uses the log.
    pub(super) queries: Option<Queries>,
    /// Duration above which a request is slow.
    pub(super) slow_threshold: Duration,
    /// Durations of ranges: failed, successful.
    pub(super) range_durations: [Histogram; 2],
    pub(super) tasks: Mutex<Vec<JoinHandle<()>>>,
    pub(super) stop_background: watch::Sender<bool>,
    pub(super) watchdog: Arc<Watchdog>,
}

impl Store {
    pub fn identity(&self) -> Identity {
        self.shared.identity
    }

    /// Returns the newest applied revision.
    pub fn head(&self) -> Revision {
        self.shared.index.read().head()
    }

    pub fn hub(&self) -> &Arc<Hub> {
        &self.shared.hub
    }

    pub fn log(&self) -> &Arc<dyn Log> {
        &self.shared.log
    }

    /// Waits until this instance has applied everything that was in the log when this was called. A later read then
    /// sees every write that any instance acknowledged before the call.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the database does not answer within 7 seconds.
    pub async fn confirm(&self) -> Result<()> {
        let Some(queries) = &self.queries else { return Ok(()) };
        let metrics = &self.shared.metrics.store;
        let started = Instant::now();
        let confirmed = queries.position.query_retrying(()).await;
        trace::add_to_part(Part::Confirm, started.elapsed());
        if started.elapsed() > SLOW_CONFIRM_MIN {
            metrics.slow_confirms.inc();
        }
        metrics.failed_confirms.inc_by(u64::from(confirmed.is_err()));
        confirmed
    }

    /// Waits for an error after which the store cannot continue and returns its text for the operator.
    pub fn failed(&self) -> impl Future<Output = String> + Send + use<> {
        let mut failed = self.shared.replication.failed.subscribe();
        async move {
            let text = failed.wait_for(Option::is_some).await.ok().and_then(|failed| failed.clone());
            match text {
                Some(text) => text,
                None => std::future::pending().await,
            }
        }
    }

    /// Returns the limit of the memory of reads.
    pub fn read_memory(&self) -> &ReadMemory {
        &self.shared.read_memory
    }

    /// Returns the queue in which all long work of this server waits for its next step.
    pub fn steps(&self) -> &Arc<Steps> {
        &self.shared.steps
    }

    pub fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    /// Returns the size of the database.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the database does not answer within 3 s. Metrics and a status must not take longer than
    /// those who ask for them wait.
    pub async fn size(&self) -> Result<Size> {
        let Some(queries) = &self.queries else { return Ok(size(&self.shared).await?) };
        match timeout(SIZE_MAX, queries.size.query(())).await {
            Ok(Some(size)) => Ok(size?),
            Ok(None) | Err(_) => Err(Error::Unavailable),
        }
    }

    /// Returns a copy of the index, for comparison with one that was rebuilt from the log.
    pub fn index_snapshot(&self) -> TreeIndex {
        self.shared.index.read().clone()
    }

    /// # Cancel safety
    ///
    /// Dropping the future does not cancel the write. This applies to every write of the store.
    pub async fn put(&self, caller: &Caller, request: PutRequest) -> Result<PutResponse> {
        let Outcome::Put(response) = self.queue.submit(caller, Request::Put(request)).await? else {
            unreachable!("a put returns a put response")
        };
        Ok(response)
    }

    pub async fn delete(&self, caller: &Caller, request: DeleteRequest) -> Result<DeleteResponse> {
        let Outcome::Delete(response) = self.queue.submit(caller, Request::Delete(request)).await? else {
            unreachable!("a delete returns a delete response")
        };
        Ok(response)
    }

    /// Executes a transaction. A read-only transaction bypasses the writer.
    pub async fn txn(&self, caller: &Caller, request: TxnRequest) -> Result<TxnResponse> {
        self.shared.metrics.store.txns.inc();
        if request.is_read_only() {
            return self.read_txn(caller, request).await;
        }
        let Outcome::Txn(response) = self.queue.submit(caller, Request::Txn(request)).await? else {
            unreachable!("a transaction returns a transaction response")
        };
        Ok(response)
    }

    /// Compacts the log at `revision`: reads below it fail from now on. Returns the head.
    pub async fn compact(&self, caller: &Caller, revision: Revision, wait: CompactionWait) -> Result<Revision> {
        if wait == CompactionWait::ForRevision {
            return self.submit_for_revision(caller, Request::Compact(revision)).await;
        }
        // The writer checks the caller, too, but the hash reads the whole store.
        self.check_root(caller).await?;
        let head = self.compact_with_hash(caller, revision).await?;
        let mut done = self.shared.compaction_done.subscribe();
        done.wait_for(|done| *done >= Some(revision)).await.map_err(|_| Error::Stopped)?;
        Ok(head)
    }

    /// Submits a request whose outcome is a revision.
    pub(super) async fn submit_for_revision(&self, caller: &Caller, request: Request) -> Result<Revision> {
        self.queue.submit_for_revision(caller, request).await
    }

    /// Completes the accepted writes, rejects new ones, and closes the log.
    pub async fn stop(&self) {
        self.queue.close();
        self.stop_background.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the store failed");
            }
        }
        let leases = self.shared.leases.lock().with_times(Instant::now());
        if let Some(history) = &self.shared.history {
            let head = self.shared.index.read().head();
            history.close(head).await;
        }
        self.shared.log.close(&leases).await;
    }
}
