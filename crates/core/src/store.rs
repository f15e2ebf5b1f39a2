//! The store: etcd's data model over a [`Log`].
//!
//! ```text
//! put, delete, txn,  ─▶ queue ─▶ writer ─▶ log.append ─▶ applier ─▶ index, value cache, leases, watch hub
//! grant, revoke,                 (batch)                   │
//! compact                                                  └─▶ answers
//! range ─▶ reader ─▶ index, value cache, log.values
//! ```
//!
//! [`Store`] is the handle that `api` sees. One writer task evaluates requests in batches ([`txn`], pure) and commits a
//! batch with one append; an answer leaves after its commit and after the index and the watchers have it. Reads run
//! beside it on the index.
//!
//! Where several instances share the log, a linearizable read first asks where the log stands ([`Store::confirm`], one
//! question for all who wait), and what the others append comes in by [`catch_up`].
//!
//! Lock order: the hub's, then the index's, then the lease table's. None is held across an await.

mod applier;
mod auto_compact;
pub mod batch;
mod busy_poll;
mod catch_up;
pub mod coalesce;
mod compactor;
mod expiry;
pub mod hash;
mod members;
mod open;
mod reader;
pub mod request;
mod select;
mod space;
mod state;
pub mod tasks;
mod timing;
pub mod txn;
pub mod values;
mod writer;

use std::{
    hash::{BuildHasher as _, RandomState},
    sync::{Arc, atomic::AtomicBool},
    time::Duration,
};

use parking_lot::{Mutex, RwLock};
use prometheus::Histogram;
use tokio::{
    sync::{Notify, watch},
    task::JoinHandle,
    time::{Instant, sleep, timeout_at},
};

pub use self::open::{Replayed, replay};
pub use self::{auto_compact::AutoCompaction, compactor::Pace, open::Settings, reader::RangePieces, timing::Patience};
use self::{
    catch_up::Standing,
    coalesce::Coalesced,
    members::Members,
    request::{
        CompactionWait, DeleteRequest, DeleteResponse, LeaseGranted, PutRequest, PutResponse, TxnRequest, TxnResponse,
    },
    space::Space,
    values::ValueCache,
    writer::{Outcome, Request, WriteQueue},
};
use crate::{
    index::{TreeIndex, Unreadable},
    lease::{self, Remaining, Renewal},
    log::{self, Log, LoggedLease, Precision, Size, Touch},
    metrics::Metrics,
    overload::{Exhausted, ReadMemory, Steps},
    supervise::Lock,
    trace::{self, Part},
    types::{LeaseId, Revision, RowId},
    watch::Hub,
    watchdog::{Pulse, Watchdog},
};

/// How long a request waits for the database before it is told that nothing was done, as long as etcd's for a leader.
const WAIT_MAX: Duration = Duration::from_secs(7);
/// A linearizable read that waits longer for the log's head is counted as slow.
const SLOW_CONFIRM: Duration = Duration::from_millis(500);
/// Pause before the database is asked again that did not answer.
const ASK_PAUSE: Duration = Duration::from_millis(50);

/// Why a request failed, by what the caller should do about it.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Error {
    #[error("required revision has been compacted")]
    Compacted,
    #[error("required revision is a future revision")]
    FutureRevision,
    #[error("key not found")]
    KeyNotFound,
    #[error("lease not found")]
    LeaseNotFound,
    #[error("lease already exists")]
    LeaseExists,
    #[error("lease ttl too large")]
    LeaseTtlTooLarge,
    /// The queue of writes is full. Nothing was done; try again later.
    #[error("too many requests")]
    TooManyRequests,
    /// The database, or its disk, has no room for it, or the alarm that says so is raised.
    #[error("database space exceeded")]
    NoSpace,
    /// The write may or may not have happened.
    #[error("request timed out")]
    OutcomeUnknown,
    /// The database cannot be read just now. Nothing was done.
    #[error("database unavailable")]
    Unavailable,
    /// The server is going down. Nothing was done.
    #[error("server stopped")]
    Stopped,
    /// The log contradicts itself.
    #[error("corrupt log")]
    Corrupt,
}

pub type Result<T> = std::result::Result<T, Error>;

impl From<Unreadable> for Error {
    fn from(unreadable: Unreadable) -> Self {
        match unreadable {
            Unreadable::Compacted => Self::Compacted,
            Unreadable::Future => Self::FutureRevision,
        }
    }
}

impl From<Exhausted> for Error {
    fn from(_: Exhausted) -> Self {
        Self::TooManyRequests
    }
}

impl From<log::Error> for Error {
    /// The caller learns what to do; the operator finds the cause in the server's own log.
    fn from(error: log::Error) -> Self {
        let id = trace::current().map(tracing::field::display);
        tracing::error!(id, %error, "request failed on the database");
        match error {
            log::Error::Unavailable(_) | log::Error::Open(_) | log::Error::Diverged(_) => Self::Unavailable,
            log::Error::Full(_) => Self::NoSpace,
            log::Error::OutcomeUnknown(_) => Self::OutcomeUnknown,
            log::Error::Corrupt(_) => Self::Corrupt,
        }
    }
}

/// Which store this is, among all there are.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    pub cluster_id: u64,
    pub member_id: u64,
}

/// The handle. Cheap to share behind an [`Arc`].
pub struct Store {
    shared: Arc<Shared>,
    queue: WriteQueue,
    /// Who waits to stand where the log stands. `None` where this process is the only one on the log: it always does.
    heads: Option<Coalesced<(), log::Result<()>>>,
    /// Leases to be renewed in the log. `None` where deadlines are in memory alone.
    renewals: Option<Coalesced<LeaseId, log::Result<Option<LoggedLease>>>>,
    /// A request that takes longer is slow.
    patience: Duration,
    /// Times of ranges, of those that failed first.
    range_times: [Histogram; 2],
    tasks: Mutex<Vec<JoinHandle<()>>>,
    stop_background: watch::Sender<bool>,
    watchdog: Arc<Watchdog>,
}

/// What the writer, the readers and the background tasks have in common.
struct Shared {
    log: Arc<dyn Log>,
    identity: Identity,
    standing: Standing,
    members: Members,
    space: Space,
    metrics: Arc<Metrics>,
    hub: Arc<Hub>,
    index: RwLock<TreeIndex>,
    leases: Lock<lease::Table>,
    values: ValueCache,
    /// Limits the values that were read for responses.
    read_memory: ReadMemory,
    /// Steps of long reads.
    steps: Arc<Steps>,
    /// Set when the next deadline of a lease may have come nearer.
    lease_deadline: Notify,
    /// Set when there is something to compact.
    compaction: Notify,
    /// Whether this instance recorded a compaction, and so deletes its rows.
    purge_duty: AtomicBool,
    /// Rows that the newest compaction freed and that another instance was to delete.
    left_to_others: Mutex<Vec<RowId>>,
    /// The newest revision whose compaction has freed index and rows.
    compaction_done: watch::Sender<Option<Revision>>,
    pulses: Pulses,
}

/// By which the watchdog sees whether the loops move.
#[derive(Default)]
struct Pulses {
    writer: Arc<Pulse>,
    expiry: Arc<Pulse>,
    compactor: Arc<Pulse>,
    follower: Arc<Pulse>,
    heads: Arc<Pulse>,
    renewals: Arc<Pulse>,
}

impl Store {
    pub fn identity(&self) -> Identity {
        self.shared.identity
    }

    /// The newest revision applied.
    pub fn head(&self) -> Revision {
        self.shared.index.read().head()
    }

    pub fn hub(&self) -> &Arc<Hub> {
        &self.shared.hub
    }

    pub fn log(&self) -> &Arc<dyn Log> {
        &self.shared.log
    }

    /// Waits until this instance stands where the log stood when this was called, so that what is read next is not older
    /// than anything that any instance acknowledged before.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the database does not answer for long.
    pub async fn confirm(&self) -> Result<()> {
        let Some(heads) = &self.heads else { return Ok(()) };
        let metrics = &self.shared.metrics.store;
        let started = Instant::now();
        let deadline = started + WAIT_MAX;
        let confirmed = loop {
            match timeout_at(deadline, heads.ask(())).await {
                Ok(Some(Ok(()))) => break Ok(()),
                Ok(Some(Err(_))) if Instant::now() < deadline => sleep(ASK_PAUSE).await,
                Ok(_) | Err(_) => break Err(Error::Unavailable),
            }
        };
        trace::note(Part::Confirm, started.elapsed());
        if started.elapsed() > SLOW_CONFIRM {
            metrics.slow_confirms.inc();
        }
        metrics.failed_confirms.inc_by(u64::from(confirmed.is_err()));
        confirmed
    }

    /// Why the store cannot go on, once that is so: the text is for the operator.
    pub fn failed(&self) -> impl Future<Output = String> + Send + use<> {
        let mut failed = self.shared.standing.failed.subscribe();
        async move {
            let text = failed.wait_for(Option::is_some).await.ok().and_then(|failed| failed.clone());
            match text {
                Some(text) => text,
                None => std::future::pending().await,
            }
        }
    }

    /// The queue in which all long work of this server waits for its next step.
    pub fn steps(&self) -> &Arc<Steps> {
        &self.shared.steps
    }

    pub fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    pub async fn size(&self) -> Result<Size> {
        Ok(self.shared.log.size(Precision::Quick).await?)
    }

    /// A copy of the index, to compare with one that was rebuilt from the log.
    pub fn index_snapshot(&self) -> TreeIndex {
        self.shared.index.read().clone()
    }

    /// # Cancel safety
    ///
    /// A dropped future does not take the write back; so it is with every write of the store.
    pub async fn put(&self, request: PutRequest) -> Result<PutResponse> {
        let Outcome::Put(response) = self.queue.submit(Request::Put(request)).await? else {
            unreachable!("a put is answered as one")
        };
        Ok(response)
    }

    pub async fn delete(&self, request: DeleteRequest) -> Result<DeleteResponse> {
        let Outcome::Delete(response) = self.queue.submit(Request::Delete(request)).await? else {
            unreachable!("a delete is answered as one")
        };
        Ok(response)
    }

    pub async fn txn(&self, request: TxnRequest) -> Result<TxnResponse> {
        self.shared.metrics.store.txns.inc();
        if request.is_read_only() {
            return self.read_txn(request).await;
        }
        let Outcome::Txn(response) = self.queue.submit(Request::Txn(request)).await? else {
            unreachable!("a transaction is answered as one")
        };
        Ok(response)
    }

    /// Forbids reads below `revision`. Returns the head.
    pub async fn compact(&self, revision: Revision, wait: CompactionWait) -> Result<Revision> {
        let head = self.submit_for_revision(Request::Compact(revision)).await?;
        if wait == CompactionWait::ForRows {
            let mut done = self.shared.compaction_done.subscribe();
            done.wait_for(|done| *done >= Some(revision)).await.map_err(|_| Error::Stopped)?;
        }
        Ok(head)
    }

    /// Grants a lease with the id that is asked for, or one that is free. A TTL below the minimum is raised to it.
    pub async fn grant(&self, id: Option<LeaseId>, ttl_secs: i64) -> Result<LeaseGranted> {
        if ttl_secs > lease::TTL_SECS_MAX {
            return Err(Error::LeaseTtlTooLarge);
        }
        let ttl_secs = ttl_secs.max(lease::TTL_SECS_MIN);
        let id = id.unwrap_or_else(|| self.free_lease_id());
        let revision = self.submit_for_revision(Request::Grant { id, ttl_secs }).await?;
        Ok(LeaseGranted { revision, id, ttl_secs })
    }

    fn free_lease_id(&self) -> LeaseId {
        let leases = self.shared.leases.lock();
        loop {
            // The standard library's source of randomness: each RandomState has keys of its own.
            let id = LeaseId(RandomState::new().hash_one(0).cast_signed() & i64::MAX);
            if id.0 != 0 && !leases.contains(id) {
                return id;
            }
        }
    }

    /// Ends a lease and deletes the keys on it in one revision. Returns the head.
    pub async fn revoke(&self, id: LeaseId) -> Result<Revision> {
        self.submit_for_revision(Request::Revoke(id)).await
    }

    /// Renews a lease. Returns the seconds that it has before it again, 0 if it is unknown or its time was over, and the
    /// head from before.
    pub async fn keep_alive(&self, id: LeaseId) -> Result<(Revision, i64)> {
        let head = self.head();
        loop {
            let renewal = match &self.renewals {
                None => self.shared.leases.lock().renew(id, Instant::now()),
                Some(renewals) => self.renew_in_log(renewals, id).await?,
            };
            match renewal {
                Renewal::Renewed { ttl_secs } => {
                    self.shared.metrics.store.leases_renewed.inc();
                    return Ok((head, ttl_secs));
                }
                Renewal::Unknown => return Ok((head, 0)),
                // The answer that it is over leaves when its keys are gone.
                Renewal::Expired => {
                    self.submit_for_revision(Request::Expire(id)).await?;
                    // If nobody was heard of for a while its deadline was moved on meanwhile, and it lives.
                    if self.shared.leases.lock().remaining(id, Instant::now()).is_none() {
                        return Ok((head, 0));
                    }
                }
            }
        }
    }

    async fn renew_in_log(
        &self,
        renewals: &Coalesced<LeaseId, log::Result<Option<LoggedLease>>>,
        id: LeaseId,
    ) -> Result<Renewal> {
        let deadline = Instant::now() + WAIT_MAX;
        let logged = loop {
            match timeout_at(deadline, renewals.ask(id)).await {
                Ok(Some(Ok(logged))) => break logged,
                Ok(Some(Err(_))) if Instant::now() < deadline => sleep(ASK_PAUSE).await,
                Ok(_) | Err(_) => return Err(Error::Unavailable),
            }
        };
        let Some(logged) = logged else { return Ok(Renewal::Unknown) };
        if logged.left_secs.is_some_and(|left| left > 0.0) {
            return Ok(Renewal::Renewed { ttl_secs: logged.ttl_secs });
        }
        // It may have been granted elsewhere; the writer must know it to end it.
        self.confirm().await?;
        Ok(Renewal::Expired)
    }

    /// `None` for a lease that is unknown or whose time is over.
    pub async fn lease(&self, id: LeaseId) -> Result<Option<Remaining>> {
        self.confirm().await?;
        self.look_at(&[id]).await?;
        Ok(self.shared.leases.lock().remaining(id, Instant::now()))
    }

    pub async fn leases(&self) -> Result<Vec<LeaseId>> {
        self.confirm().await?;
        if self.renewals.is_some() {
            let over = self.shared.leases.lock().expired(Instant::now(), usize::MAX);
            self.look_at(&over).await?;
        }
        Ok(self.shared.leases.lock().list(Instant::now()))
    }

    /// Takes up how much time these leases have left by the log, where it keeps deadlines.
    async fn look_at(&self, ids: &[LeaseId]) -> Result<()> {
        if let Some(log) = self.shared.log.shared().filter(|_| !ids.is_empty()) {
            let asked = Instant::now();
            let logged = log.leases(ids, Touch::Look).await?;
            self.shared.set_lease_deadlines(&logged, asked);
        }
        Ok(())
    }

    async fn submit_for_revision(&self, request: Request) -> Result<Revision> {
        let Outcome::Revision(revision) = self.queue.submit(request).await? else {
            unreachable!("this request is answered with a revision")
        };
        Ok(revision)
    }

    /// Finishes the writes that were taken, refuses others, and lets go of the log.
    pub async fn stop(&self) {
        self.queue.close();
        self.stop_background.send_replace(true);
        let tasks = std::mem::take(&mut *self.tasks.lock());
        for task in tasks {
            if let Err(error) = task.await {
                tracing::error!(%error, "a task of the store failed");
            }
        }
        self.shared.log.close().await;
    }
}

#[cfg(test)]
mod batch_tests;
#[cfg(test)]
mod compactor_tests;
#[cfg(test)]
#[path = "../tests/model/mod.rs"]
mod model;
#[cfg(test)]
mod select_tests;
#[cfg(test)]
mod txn_tests;
