//! The queries of the database that concurrent requests share, one task for each. Without sharing, the requests of clients
//! that send without pause, some of which need no user, would take all connections.

use std::{collections::HashMap, sync::Arc, time::Duration};

use tokio::time::{Instant, timeout};

use super::{shared::Shared, shared_query::SharedQuery, tasks::vital};
use crate::{
    log::{Error, LoggedLease, Precision, Result, SharedLog, Size, Touch},
    types::LeaseId,
    watchdog::Pulse,
};

/// Maximum time to determine the size of the database.
pub(super) const SIZE_MAX: Duration = Duration::from_secs(3);

/// The shared queries of a log that several instances append to.
pub(super) struct Queries {
    /// Catches up with the log.
    pub(super) position: SharedQuery<(), Result<()>>,
    /// Renews leases in the log.
    pub(super) renewal: SharedQuery<LeaseId, Result<Option<LoggedLease>>>,
    /// Refreshes the list of live members.
    pub(super) members: SharedQuery<(), Result<()>>,
    /// Determines the size of the database.
    pub(super) size: SharedQuery<(), Result<Size>>,
}

impl Queries {
    /// Starts the tasks, which run until the queries are dropped. Returns `None` if this process is the only one that uses
    /// the log: then the index is up to date, deadlines of leases are in memory only, and the size takes microseconds.
    pub(super) fn start(shared: &Arc<Shared>) -> Option<Self> {
        shared.log.shared().is_some().then(|| Self {
            position: position_query(Arc::clone(shared)),
            renewal: renewal_query(Arc::clone(shared)),
            members: members_query(Arc::clone(shared)),
            size: size_query(Arc::clone(shared)),
        })
    }
}

fn shared_log(shared: &Shared) -> &dyn SharedLog {
    shared.log.shared().expect("these queries are started only for a log that several instances append to")
}

/// Starts the task of a query that has one answer for all callers.
fn query_for_all<T, A>(
    name: &'static str,
    pulse: Arc<Pulse>,
    run_query: impl Fn() -> A + Send + 'static,
) -> SharedQuery<(), Result<T>>
where
    T: Clone + Send + 'static,
    A: Future<Output = Result<T>> + Send + 'static,
{
    let run_for_all = move |waiting: Vec<()>| {
        let answer = run_query();
        async move { vec![answer.await; waiting.len()] }
    };
    let (query, run) = SharedQuery::new(run_for_all, pulse);
    vital(name, run);
    query
}

/// Starts the task that catches up with the log for linearizable reads.
fn position_query(shared: Arc<Shared>) -> SharedQuery<(), Result<()>> {
    let pulse = Arc::clone(&shared.pulses.heads);
    query_for_all("the query for the log's position", pulse, move || {
        let shared = Arc::clone(&shared);
        async move { shared.reach_head(shared_log(&shared)).await }
    })
}

/// Starts the task that sends heartbeats for clients that list the members. The watchdog does not observe it: without
/// an answer, clients get the last known members.
fn members_query(shared: Arc<Shared>) -> SharedQuery<(), Result<()>> {
    query_for_all("the query for the members", Arc::default(), move || {
        let shared = Arc::clone(&shared);
        async move { shared.beat(shared_log(&shared)).await.map(drop) }
    })
}

/// Starts the task that determines the size of the database. The watchdog does not observe it: without an answer, a
/// status contains an error.
fn size_query(shared: Arc<Shared>) -> SharedQuery<(), Result<Size>> {
    query_for_all("the query for the size", Arc::default(), move || {
        let shared = Arc::clone(&shared);
        async move { size(&shared).await }
    })
}

/// Determines the size of the database.
pub(super) async fn size(shared: &Shared) -> Result<Size> {
    match timeout(SIZE_MAX, shared.log.size(Precision::Quick)).await {
        Ok(size) => size,
        Err(_) => Err(Error::Unavailable("the size of the database is not known in time".to_owned())),
    }
}

/// Starts the task that renews leases in the log. The answer is `None` for a lease that the log does not contain.
fn renewal_query(shared: Arc<Shared>) -> SharedQuery<LeaseId, Result<Option<LoggedLease>>> {
    let pulse = Arc::clone(&shared.pulses.renewals);
    let (query, run) = SharedQuery::new(
        move |ids: Vec<LeaseId>| {
            let shared = Arc::clone(&shared);
            async move {
                // Several waiting requests may renew the same lease.
                let mut distinct = ids.clone();
                distinct.sort_unstable();
                distinct.dedup();
                let queried_at = Instant::now();
                match shared_log(&shared).leases(&distinct, Touch::Renew).await {
                    Ok(found) => {
                        // A deadline is set relative to the current time, so it is set before the responses are sent.
                        shared.set_lease_deadlines(&found, queried_at);
                        let found: HashMap<LeaseId, LoggedLease> =
                            found.into_iter().map(|logged| (logged.id, logged)).collect();
                        ids.iter().map(|id| Ok(found.get(id).copied())).collect()
                    }
                    Err(error) => vec![Err(error); ids.len()],
                }
            }
        },
        pulse,
    );
    vital("the renewal of leases", run);
    query
}
