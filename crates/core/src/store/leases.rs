//! Lease requests, and updates of the lease table from the log.
//!
//! A shared log stores the deadlines of leases by the database's clock. A deadline is read from the log before a client
//! receives it and before the lease is expired. If the log is not shared, the deadlines are only in memory.

use std::{
    collections::{HashMap, HashSet},
    hash::{BuildHasher as _, RandomState},
};

use bytes::Bytes;
use tokio::time::Instant;
use tracing::warn;

use super::{
    error::{Error, Result},
    handle::Store,
    reader::pairs::{STEP_KEYS, StepCount},
    request::{LeaseGranted, LeaseKeys},
    shared::Shared,
    shared_query::SharedQuery,
    write_request::Request,
};
use crate::{
    auth::{AuthState, Caller},
    index::{Lease, TreeIndex},
    lease::{self, Expiring, Remaining, Renewal},
    log::{self, LeaseChange, LeaseScope, LoggedLease, Meta, Touch},
    types::{KeyRange, LeaseId, Revision},
};

/// A step of a walk over the keys of a lease ends with the key with which it reaches this size.
const STEP_BYTES: usize = 256 << 10;
/// Maximum number of reads of the log to find the leases that expire next.
const SOONEST_READS_MAX: usize = 4;

impl Store {
    /// Grants a lease with the given id, or with a free one. A TTL below the minimum is raised to the minimum.
    pub async fn grant(&self, caller: &Caller, id: Option<LeaseId>, ttl_secs: i64) -> Result<LeaseGranted> {
        if ttl_secs > lease::TTL_SECS_MAX {
            self.check_user(caller).await?;
            return Err(Error::LeaseTtlTooLarge);
        }
        let ttl_secs = ttl_secs.max(lease::TTL_SECS_MIN);
        let id = id.unwrap_or_else(|| self.free_lease_id());
        let revision = self.submit_for_revision(caller, Request::Grant { id, ttl_secs }).await?;
        Ok(LeaseGranted { revision, id, ttl_secs })
    }

    /// Returns a random positive id that no lease has.
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
    pub async fn revoke(&self, caller: &Caller, id: LeaseId) -> Result<Revision> {
        self.submit_for_revision(caller, Request::Revoke(id)).await
    }

    /// Renews a lease. Returns the head before the renewal, and the new TTL in seconds, or 0 if the lease is
    /// unknown or has expired.
    pub async fn keep_alive(&self, caller: &Caller, id: LeaseId) -> Result<(Revision, i64)> {
        self.check_lease(caller, id).await?;
        let head = self.head();
        loop {
            let renewal = match &self.queries {
                None => self.shared.leases.lock().renew(id, Instant::now()),
                Some(queries) => self.renew_in_log(&queries.renewal, id).await?,
            };
            match renewal {
                Renewal::Renewed { ttl_secs } => {
                    self.shared.metrics.store.leases_renewed.inc();
                    return Ok((head, ttl_secs));
                }
                Renewal::Unknown => return Ok((head, 0)),
                // The response is sent after the lease's keys are deleted.
                Renewal::Expired => {
                    self.submit_for_revision(&Caller::Server, Request::Expire(id)).await?;
                    // The lease is still live if its deadline was moved meanwhile, for example because no instance was
                    // alive for a while. The next round of the loop renews it.
                    if self.shared.leases.lock().remaining(id, Instant::now()).is_none() {
                        return Ok((head, 0));
                    }
                }
            }
        }
    }

    /// Renews a lease in the log, together with all waiting renewals.
    async fn renew_in_log(
        &self,
        renewals: &SharedQuery<LeaseId, log::Result<Option<LoggedLease>>>,
        id: LeaseId,
    ) -> Result<Renewal> {
        let Some(logged) = renewals.query_retrying(id).await? else { return Ok(Renewal::Unknown) };
        if logged.left_secs.is_some_and(|left| left > 0.0) {
            return Ok(Renewal::Renewed { ttl_secs: logged.ttl_secs });
        }
        // Another instance may have granted the lease. The writer can expire it only after this instance has read it.
        self.confirm().await?;
        Ok(Renewal::Expired)
    }

    /// Returns the remaining time of a lease, or `None` if it is unknown or has expired. With `LeaseKeys::Returned` the
    /// caller needs the right to read all keys of the lease.
    pub async fn lease(&self, caller: &Caller, id: LeaseId, keys: LeaseKeys) -> Result<Option<Remaining>> {
        self.confirm().await?;
        // Requests do not share the query for a lease. Clients without a user must not cause it.
        self.shared.check_user(caller)?;
        let list = match keys {
            LeaseKeys::Omitted => None,
            LeaseKeys::Returned => Some(self.shared.read_memory.list().await?),
        };
        // After the wait, which may take seconds.
        self.refresh_leases(&[id]).await?;
        if list.is_some() {
            return self.shared.lease_with_keys(caller, id).await;
        }
        let leases = self.shared.leases.lock();
        self.shared.check_user(caller)?;
        Ok(leases.remaining(id, Instant::now()))
    }

    /// Returns the ids of all live leases. The caller needs the right to read all keys of all leases.
    ///
    /// The leases are listed in one step, because a renewal moves a lease to another place in the list.
    pub async fn leases(&self, caller: &Caller) -> Result<Vec<LeaseId>> {
        self.confirm().await?;
        self.shared.check_user(caller)?;
        let _list = self.shared.read_memory.list().await?;
        if self.queries.is_some() {
            let expired = self.shared.leases.lock().expired(Instant::now(), usize::MAX);
            self.refresh_leases(&expired).await?;
        }
        self.shared.steps.request().await;
        let leases = self.shared.leases.lock();
        if let Some(authority) = self.shared.authority.if_enabled() {
            let rights = authority.rights(caller)?;
            leases.keys_of_each().try_for_each(|keys| rights.check_read_keys(keys))?;
        }
        Ok(leases.list(Instant::now()))
    }

    /// Returns the number of all leases, and at most `limit` of them, those that expire next first.
    ///
    /// Leases that other instances renewed since this one read their deadlines may be missing or, after
    /// [`SOONEST_READS_MAX`] reads of the log, have deadlines that are too early.
    pub async fn soonest_leases(&self, limit: usize) -> Result<(usize, Vec<Expiring>)> {
        let read = || {
            let leases = self.shared.leases.lock();
            (leases.len(), leases.soonest(Instant::now(), limit))
        };
        let (mut total, mut soonest) = read();
        let mut refreshed = HashSet::new();
        for _ in 0..SOONEST_READS_MAX {
            // A renewed lease moves back, and others take its place.
            let unread: Vec<LeaseId> =
                soonest.iter().map(|lease| lease.id).filter(|id| refreshed.insert(*id)).collect();
            if self.queries.is_none() || unread.is_empty() {
                break;
            }
            self.refresh_leases(&unread).await?;
            (total, soonest) = read();
        }
        Ok((total, soonest))
    }

    /// Refreshes the deadlines of these leases from the log, if the log stores deadlines.
    async fn refresh_leases(&self, ids: &[LeaseId]) -> Result<()> {
        if let Some(log) = self.shared.log.shared().filter(|_| !ids.is_empty()) {
            let queried_at = Instant::now();
            let logged = log.leases(ids, Touch::Read).await?;
            self.shared.set_lease_deadlines(&logged, queried_at);
        }
        Ok(())
    }
}

impl Shared {
    /// Returns a lease with its keys, which it reads step by step; `None` if the lease ends meanwhile. Keys that are attached
    /// or detached meanwhile may be among them: in etcd, too, a transaction attaches its keys one after the other.
    async fn lease_with_keys(&self, caller: &Caller, id: LeaseId) -> Result<Option<Remaining>> {
        let (mut keys, mut step) = (Vec::<Bytes>::new(), StepCount::default());
        loop {
            let (mut buffer, mut lens) = (Vec::<u8>::new(), Vec::new());
            let (remaining, is_complete) = {
                let leases = self.leases.lock();
                let authority = self.authority.if_enabled();
                let rights = authority.as_deref().map(|authority| authority.rights(caller)).transpose()?;
                let mut left = leases.keys_after(id, keys.last().map(|key| &key[..]));
                while lens.len() < STEP_KEYS
                    && buffer.len() < STEP_BYTES
                    && let Some(key) = left.next()
                {
                    if let Some(rights) = rights {
                        rights.check_read_key(key)?;
                    }
                    buffer.extend_from_slice(key);
                    lens.push(key.len());
                }
                (leases.remaining(id, Instant::now()), left.next().is_none())
            };
            let Some(remaining) = remaining else { return Ok(None) };
            let bytes = buffer.capacity() + lens.len() * size_of::<Bytes>();
            let mut rest = self.read_memory.hold(buffer.into(), bytes);
            keys.extend(lens.into_iter().map(|len| rest.split_to(len)));
            if is_complete {
                return Ok(Some(Remaining { keys, ..remaining }));
            }
            step.next(&self.steps).await;
        }
    }

    /// Refreshes the deadlines of the leases that these changes would have expired.
    pub(super) async fn refresh_expired_leases(&self, changes: &[LeaseChange]) {
        let ids: Vec<LeaseId> = changes
            .iter()
            .filter_map(|change| match change {
                LeaseChange::Expire { id } => Some(*id),
                LeaseChange::Grant { .. } | LeaseChange::Revoke { .. } => None,
            })
            .collect();
        let Some(log) = self.log.shared().filter(|_| !ids.is_empty()) else { return };
        let queried_at = Instant::now();
        match log.leases(&ids, Touch::Read).await {
            Ok(logged) => self.set_lease_deadlines(&logged, queried_at),
            Err(error) => warn!(%error, "cannot read lease deadlines"),
        }
    }

    /// Sets lease deadlines from the remaining times that the log returned. `queried_at` is the time before the query.
    pub(super) fn set_lease_deadlines(&self, logged: &[LoggedLease], queried_at: Instant) {
        let now = Instant::now();
        let mut leases = self.leases.lock();
        for lease in logged {
            if let Some(left_secs) = lease.left_secs {
                leases.set_left(lease.id, left_secs, queried_at, now);
            }
        }
    }

    /// Updates the lease table and the alarms to the state in the log, and users and roles if they have changed.
    pub(super) fn update_leases(&self, meta: &Meta, scope: &LeaseScope, auth: Option<AuthState>) {
        let now = Instant::now();
        let mut leases = self.leases.lock();
        if self.log.shared().is_some() && meta.position.epoch < leases.epoch {
            // An append of this instance was applied after `meta` was read.
            return;
        }
        let logged: HashMap<LeaseId, &LoggedLease> = meta.leases.iter().map(|lease| (lease.id, lease)).collect();
        let known: Vec<(LeaseId, i64)> = match scope {
            LeaseScope::All => leases.granted(),
            LeaseScope::Changed(ids) => ids.iter().filter_map(|id| Some((*id, leases.ttl_secs(*id)?))).collect(),
        };
        for (id, ttl_secs) in known {
            // A different TTL means that the lease was revoked and its id granted again.
            if logged.get(&id).is_none_or(|logged| logged.ttl_secs != ttl_secs) {
                leases.revoke(id);
            }
        }
        for logged in logged.values() {
            if !leases.contains(logged.id) {
                leases.grant(logged.id, logged.ttl_secs, now);
            }
            if let Some(left_secs) = logged.left_secs {
                leases.set_left(logged.id, left_secs, now, now);
            }
        }
        leases.epoch = leases.epoch.max(meta.position.epoch);
        // The lease table is still locked. Otherwise a newer change of this instance, which also advances the epoch,
        // could be overwritten.
        self.space.set_alarms(meta);
        if let Some(auth) = auth {
            self.authority.set(auth);
        }
        drop(leases);
        self.lease_deadline.notify_one();
    }
}

/// Builds the lease table from the leases in the log and the keys in the index.
pub(super) fn lease_table(meta: &Meta, index: &TreeIndex, now: Instant) -> lease::Table {
    let mut leases = lease::Table::default();
    for logged in &meta.leases {
        leases.grant(logged.id, logged.ttl_secs, now);
        if let Some(left_secs) = logged.left_secs {
            leases.set_left(logged.id, left_secs, now, now);
        }
    }
    leases.epoch = meta.position.epoch;
    for (key, entry) in index.range(KeyRange::all().bounds(), index.head()) {
        if let Lease::Known(Some(id)) = entry.lease {
            leases.attach(id, key.clone());
        }
    }
    leases
}

#[cfg(test)]
mod tests {
    use futures_util::FutureExt as _;

    use super::*;
    use crate::{
        log::{Append, Appended, Log as _, ReadLog as _, memory::MemoryLog},
        store::{batch::Batch, fixtures::shared},
        types::Key,
    };

    const ID: LeaseId = LeaseId(7);

    /// Returns a store whose lease has this many keys of eight bytes, and the keys.
    fn shared_with_lease(count: usize) -> (Shared, Vec<String>) {
        let shared = shared(0);
        let keys: Vec<String> = (0..count).map(|number| format!("k{number:07}")).collect();
        let mut leases = shared.leases.lock();
        leases.grant(ID, 600, Instant::now());
        keys.iter().for_each(|key| leases.attach(ID, Key::from(key.as_bytes())));
        drop(leases);
        (shared, keys)
    }

    /// Returns a store on a log that other instances may use, and the log.
    fn shared_with_others() -> (Shared, std::sync::Arc<MemoryLog>) {
        let log = std::sync::Arc::new(MemoryLog::shared_with_others());
        (Shared { log: std::sync::Arc::clone(&log) as _, ..shared(0) }, log)
    }

    /// The writer grants a lease while another task reads the state of the log.
    #[tokio::test]
    async fn state_from_before_an_own_change_does_not_undo_it() {
        let (shared, log) = shared_with_others();
        let before = log.meta().await.unwrap();
        let mut batch = Batch::new(Revision::EMPTY);
        batch.push_lease(LeaseChange::Grant { id: ID, ttl_secs: 600 });
        shared.apply_batch(&batch, shared.position(), Instant::now());
        shared.update_leases(&before, &LeaseScope::All, None);
        assert!(shared.leases.lock().contains(ID));
    }

    /// Otherwise the writer would try to expire it again and again, and serve nothing else.
    #[tokio::test]
    async fn lease_whose_expiry_the_log_refused_gets_its_deadline_from_the_log() {
        let (shared, log) = shared_with_others();
        let grant = [LeaseChange::Grant { id: ID, ttl_secs: 600 }];
        let append = Append { leases: &grant, ..Append::rows(Revision::EMPTY, &[]) };
        assert_eq!(log.append(append).await.unwrap(), Appended::Done);
        shared.leases.lock().grant(ID, 0, Instant::now());
        assert!(shared.leases.lock().is_expired(ID, Instant::now()));
        shared.refresh_expired_leases(&[LeaseChange::Expire { id: ID }]).await;
        assert!(!shared.leases.lock().is_expired(ID, Instant::now()), "another instance has renewed it");
    }

    #[tokio::test]
    async fn keys_of_a_lease_count_until_they_are_dropped() {
        for count in [0, 1, STEP_KEYS, STEP_KEYS + 1, 5 * STEP_KEYS / 2] {
            let (shared, keys) = shared_with_lease(count);
            let lease = shared.lease_with_keys(&Caller::Server, ID).await.unwrap().unwrap();
            assert!(lease.keys == keys, "{count} keys");
            let counted = shared.read_memory.bytes();
            let least = (count / STEP_KEYS * STEP_KEYS) * (8 + size_of::<Bytes>());
            assert!(counted >= least, "{counted} bytes for {count} keys");
            drop(lease);
            assert_eq!(shared.read_memory.bytes(), 0, "{count} keys");
        }
    }

    #[tokio::test]
    async fn lease_that_ends_between_two_steps_is_unknown() {
        let (shared, _) = shared_with_lease(STEP_KEYS + 1);
        let mut lease = Box::pin(shared.lease_with_keys(&Caller::Server, ID));
        assert!(lease.as_mut().now_or_never().is_none(), "the keys are read in two steps");
        shared.leases.lock().revoke(ID);
        assert_eq!(lease.await, Ok(None));
        assert_eq!(shared.read_memory.bytes(), 0);
    }
}
