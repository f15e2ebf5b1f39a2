//! The store: etcd's data model over a [`Log`].
//!
//! ```text
//! put, delete, txn,  ─▶ queue ─▶ writer ─▶ log.append ─▶ applier ─▶ index, value cache, leases, watch hub
//! grant, revoke,                 (batch)                   │
//! compact                                                  └─▶ responses
//! range ─▶ reader ─▶ index, value cache, log.values
//! ```
//!
//! [`Store`] is the handle that the server uses. One writer task evaluates write requests in batches ([`txn`], pure)
//! and commits each batch with one append. A request is answered after its commit is durable and applied to the index
//! and the watchers. Reads run concurrently on the index.
//!
//! If several instances share the log, a linearizable read first asks the database for the log's position
//! ([`Store::confirm`]; concurrent reads share one query). [`catch_up`] applies the changes that other instances
//! append.
//!
//! Lock order: the hub, then the index, then the lease table. No lock is held across an await.

mod applier;
mod auto_compact;
pub mod batch;
mod catch_up;
mod compactor;
mod expiry;
pub mod hash;
mod members;
mod open;
mod reader;
pub mod request;
mod room;
mod select;
pub mod shared_query;
mod space;
mod state;
pub mod tasks;
mod timing;
pub mod txn;
pub mod values;
mod wakeful;
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
    catch_up::ReplicationState,
    members::Members,
    request::{
        CompactionWait, DeleteRequest, DeleteResponse, LeaseGranted, PutRequest, PutResponse, TxnRequest, TxnResponse,
    },
    room::Room,
    shared_query::SharedQuery,
    space::Space,
    values::ValueCache,
    writer::{Outcome, Request, WriteQueue},
};
use crate::{
    index::{TreeIndex, Unreadable},
    lease::{self, Remaining, Renewal},
    log::{self, Log, LoggedLease, Precision, Size, Touch},
    metrics::Metrics,
    supervise::Lock,
    trace::{self, Part},
    turns::Turns,
    types::{LeaseId, Revision, RowId},
    watch::Hub,
    watchdog::{Pulse, Watchdog},
};

/// Maximum time a request waits for the database; after that it fails as not applied. etcd waits as long for a leader.
const WAIT_MAX: Duration = Duration::from_secs(7);
/// A linearizable read that waits longer than this for the log's position is counted as slow.
const SLOW_CONFIRM_MIN: Duration = Duration::from_millis(500);
/// Pause before a failed query is repeated.
const RETRY_PAUSE: Duration = Duration::from_millis(50);

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
    /// The database or its disk is full, or the NOSPACE alarm is raised.
    #[error("database space exceeded")]
    NoSpace,
    /// The write may or may not have happened.
    #[error("request timed out")]
    OutcomeUnknown,
    /// The database is unavailable. Nothing was done.
    #[error("database unavailable")]
    Unavailable,
    /// The server is stopping. Nothing was done.
    #[error("server stopped")]
    Stopped,
    /// The log is corrupt.
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

impl From<log::Error> for Error {
    /// Converts the error to what the caller should do. The cause is written to the server's log.
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

/// The identity that etcd's response headers carry.
#[derive(Debug, Clone, Copy)]
pub struct Identity {
    pub cluster_id: u64,
    pub member_id: u64,
}

/// The handle through which the server uses the store. Shared behind an [`Arc`].
pub struct Store {
    shared: Arc<Shared>,
    queue: WriteQueue,
    /// Shared queries for the log's position. `None` if this process is the only one that uses the log: it is always up
    /// to date.
    heads: Option<SharedQuery<(), log::Result<()>>>,
    /// Lease renewals in the log. `None` if deadlines are kept only in memory.
    renewals: Option<SharedQuery<LeaseId, log::Result<Option<LoggedLease>>>>,
    /// Duration above which a request is slow.
    patience: Duration,
    /// Durations of ranges: failed, successful.
    range_durations: [Histogram; 2],
    tasks: Mutex<Vec<JoinHandle<()>>>,
    stop_background: watch::Sender<bool>,
    watchdog: Arc<Watchdog>,
}

/// The state that the writer, the readers and the background tasks share.
struct Shared {
    log: Arc<dyn Log>,
    identity: Identity,
    replication: ReplicationState,
    members: Members,
    space: Space,
    metrics: Arc<Metrics>,
    hub: Arc<Hub>,
    index: RwLock<TreeIndex>,
    leases: Lock<lease::Table>,
    values: ValueCache,
    room: Room,
    /// Of long reads, and of the answers that they are sent in.
    turns: Arc<Turns>,
    /// Notified when the earliest lease deadline may have moved closer.
    lease_deadline: Notify,
    /// Notified when there is something to compact.
    compaction: Notify,
    /// Whether this instance recorded the newest compaction and therefore deletes its rows.
    purge_duty: AtomicBool,
    /// Rows that the newest compaction made unreadable and that another instance has to delete.
    rows_left_to_others: Mutex<Vec<RowId>>,
    /// The newest revision whose compaction has finished.
    compaction_done: watch::Sender<Option<Revision>>,
    pulses: Pulses,
}

/// The heartbeats through which the watchdog observes the loops.
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
    /// returns nothing older than what any instance acknowledged before the call.
    ///
    /// # Errors
    ///
    /// [`Error::Unavailable`] if the database does not answer within 7 seconds.
    pub async fn confirm(&self) -> Result<()> {
        let Some(heads) = &self.heads else { return Ok(()) };
        let metrics = &self.shared.metrics.store;
        let started = Instant::now();
        let deadline = started + WAIT_MAX;
        let _waiting = self.shared.turns.leave_time_to_the_database();
        let confirmed = loop {
            match timeout_at(deadline, heads.query(())).await {
                Ok(Some(Ok(()))) => break Ok(()),
                Ok(Some(Err(_))) if Instant::now() < deadline => sleep(RETRY_PAUSE).await,
                Ok(_) | Err(_) => break Err(Error::Unavailable),
            }
        };
        trace::note(Part::Confirm, started.elapsed());
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

    pub fn turns(&self) -> &Arc<Turns> {
        &self.shared.turns
    }

    pub fn watchdog(&self) -> &Arc<Watchdog> {
        &self.watchdog
    }

    pub async fn size(&self) -> Result<Size> {
        Ok(self.shared.log.size(Precision::Quick).await?)
    }

    /// Returns a copy of the index, for comparison with one that was rebuilt from the log.
    pub fn index_snapshot(&self) -> TreeIndex {
        self.shared.index.read().clone()
    }

    /// # Cancel safety
    ///
    /// Dropping the future does not cancel the write. This applies to every write of the store.
    pub async fn put(&self, request: PutRequest) -> Result<PutResponse> {
        let Outcome::Put(response) = self.queue.submit(Request::Put(request)).await? else {
            unreachable!("a put returns a put response")
        };
        Ok(response)
    }

    pub async fn delete(&self, request: DeleteRequest) -> Result<DeleteResponse> {
        let Outcome::Delete(response) = self.queue.submit(Request::Delete(request)).await? else {
            unreachable!("a delete returns a delete response")
        };
        Ok(response)
    }

    pub async fn txn(&self, request: TxnRequest) -> Result<TxnResponse> {
        self.shared.metrics.store.txns.inc();
        if request.is_read_only() {
            return self.read_txn(request).await;
        }
        let Outcome::Txn(response) = self.queue.submit(Request::Txn(request)).await? else {
            unreachable!("a transaction returns a transaction response")
        };
        Ok(response)
    }

    /// Compacts the log at `revision`: reads below it fail from now on. Returns the head.
    pub async fn compact(&self, revision: Revision, wait: CompactionWait) -> Result<Revision> {
        let head = self.submit_for_revision(Request::Compact(revision)).await?;
        if wait == CompactionWait::ForRows {
            let mut done = self.shared.compaction_done.subscribe();
            done.wait_for(|done| *done >= Some(revision)).await.map_err(|_| Error::Stopped)?;
        }
        Ok(head)
    }

    /// Grants a lease with the given id, or with a free one. A TTL below the minimum is raised to the minimum.
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
            // Randomness from the standard library: each RandomState has its own keys.
            let id = LeaseId(RandomState::new().hash_one(0).cast_signed() & i64::MAX);
            if id.0 != 0 && !leases.contains(id) {
                return id;
            }
        }
    }

    /// Revokes a lease and deletes its keys in one revision. Returns the head.
    pub async fn revoke(&self, id: LeaseId) -> Result<Revision> {
        self.submit_for_revision(Request::Revoke(id)).await
    }

    /// Renews a lease. Returns the head from before the renewal, and the new TTL in seconds, or 0 if the lease is
    /// unknown or has expired.
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
                // The response is sent after the lease's keys are deleted.
                Renewal::Expired => {
                    self.submit_for_revision(Request::Expire(id)).await?;
                    // If no instance was alive for a while, the deadline was extended meanwhile and the lease is still
                    // live.
                    if self.shared.leases.lock().remaining(id, Instant::now()).is_none() {
                        return Ok((head, 0));
                    }
                }
            }
        }
    }

    async fn renew_in_log(
        &self,
        renewals: &SharedQuery<LeaseId, log::Result<Option<LoggedLease>>>,
        id: LeaseId,
    ) -> Result<Renewal> {
        let deadline = Instant::now() + WAIT_MAX;
        let logged = loop {
            match timeout_at(deadline, renewals.query(id)).await {
                Ok(Some(Ok(logged))) => break logged,
                Ok(Some(Err(_))) if Instant::now() < deadline => sleep(RETRY_PAUSE).await,
                Ok(_) | Err(_) => return Err(Error::Unavailable),
            }
        };
        let Some(logged) = logged else { return Ok(Renewal::Unknown) };
        if logged.left_secs.is_some_and(|left| left > 0.0) {
            return Ok(Renewal::Renewed { ttl_secs: logged.ttl_secs });
        }
        // Another instance may have granted it; the writer must know the lease to end it.
        self.confirm().await?;
        Ok(Renewal::Expired)
    }

    /// Returns the remaining time of a lease, or `None` if it is unknown or has expired.
    pub async fn lease(&self, id: LeaseId) -> Result<Option<Remaining>> {
        self.confirm().await?;
        self.refresh_leases(&[id]).await?;
        Ok(self.shared.leases.lock().remaining(id, Instant::now()))
    }

    pub async fn leases(&self) -> Result<Vec<LeaseId>> {
        self.confirm().await?;
        if self.renewals.is_some() {
            let over = self.shared.leases.lock().expired(Instant::now(), usize::MAX);
            self.refresh_leases(&over).await?;
        }
        Ok(self.shared.leases.lock().list(Instant::now()))
    }

    /// Refreshes the deadlines of these leases from the log, if the log stores deadlines.
    async fn refresh_leases(&self, ids: &[LeaseId]) -> Result<()> {
        if let Some(log) = self.shared.log.shared().filter(|_| !ids.is_empty()) {
            let asked = Instant::now();
            let logged = log.leases(ids, Touch::Look).await?;
            self.shared.set_lease_deadlines(&logged, asked);
        }
        Ok(())
    }

    async fn submit_for_revision(&self, request: Request) -> Result<Revision> {
        let Outcome::Revision(revision) = self.queue.submit(request).await? else {
            unreachable!("this request returns a revision")
        };
        Ok(revision)
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
