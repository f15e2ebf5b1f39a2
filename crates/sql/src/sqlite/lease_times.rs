//! The remaining times of leases while no server runs.
//!
//! A running server has the deadlines only in memory. When it stops, it records how many seconds are left of each lease
//! as a fact. The next start reads these facts, and removes them once it has read the log: a start that ends before leaves
//! them to the next one. A start after a crash finds none and gives each lease its full TTL, so a lease may end late but
//! never early.

use std::collections::HashMap;

use rusqlite::{Connection, Result};

use super::{SqliteLog, append::SET_FACT};
use orlop_core::{
    log::{self, LoggedLease, lease_left_fact, lease_of_fact},
    types::LeaseId,
};

impl SqliteLog {
    /// Removes the times that were recorded when the log was opened.
    pub(super) async fn remove_lease_times(&self) -> log::Result<()> {
        if self.lease_times.is_empty() {
            return Ok(());
        }
        let ids: Vec<LeaseId> = self.lease_times.keys().copied().collect();
        let writer = self.writer.lock().await.map_err(|error| self.refusal(error))?;
        writer.run(move |writer| remove(writer, &ids)).await.map_err(|error| self.failure(&error))
    }

    pub(super) async fn record_lease_times(&self, leases: &[LoggedLease]) -> Result<()> {
        let leases = leases.to_vec();
        self.writer.lock().await?.run(move |writer| record(writer, &leases)).await
    }
}

/// Returns the remaining seconds of each lease.
pub(super) fn read(connection: &Connection) -> Result<HashMap<LeaseId, f64>> {
    let facts: Vec<(String, i64)> = connection
        .prepare("SELECT name, value FROM meta")?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_>>()?;
    Ok(facts.iter().filter_map(|(name, secs)| Some((lease_of_fact(name)?, *secs as f64))).collect())
}

fn remove(connection: &mut Connection, ids: &[LeaseId]) -> Result<()> {
    let transaction = connection.transaction()?;
    for id in ids {
        transaction.prepare_cached("DELETE FROM meta WHERE name = ?")?.execute([lease_left_fact(*id)])?;
    }
    transaction.commit()
}

/// Records the remaining times.
pub(super) fn record(connection: &mut Connection, leases: &[LoggedLease]) -> Result<()> {
    let transaction = connection.transaction()?;
    for LoggedLease { id, left_secs, .. } in leases {
        let Some(left) = left_secs else { continue };
        // Rounded up, because a lease must not end early.
        let left = left.max(0.0).ceil() as i64;
        transaction.prepare_cached(SET_FACT)?.execute((lease_left_fact(*id), left))?;
    }
    transaction.commit()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use orlop_core::{
        log::{Append, Appended, LeaseChange, Log as _, ReadLog as _},
        types::Revision,
    };

    use super::*;

    const LEASE: LoggedLease = LoggedLease { id: LeaseId(7), ttl_secs: 60, left_secs: Some(5.5) };

    /// Opens the log and reads it, as a start does. Returns it with the time of the lease.
    async fn start(file: &Path) -> (SqliteLog, Option<f64>) {
        let log = SqliteLog::open(file).await.unwrap();
        let meta = log.replay(Revision::EMPTY, &mut |_, _| Ok(())).await.unwrap();
        let left = meta.leases[0].left_secs;
        (log, left)
    }

    #[tokio::test]
    async fn times_stay_until_a_start_has_succeeded() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("orlop.db");
        let log = SqliteLog::open(&file).await.unwrap();
        let expected = log.meta().await.unwrap().position;
        let leases = &[LeaseChange::Grant { id: LEASE.id, ttl_secs: LEASE.ttl_secs }];
        let grant = Append { expected, changes: &[], reads: None, leases, compact: None, fact: None, auth: None };
        assert_eq!(log.append(grant).await.unwrap(), Appended::Done);
        log.close(&[LEASE]).await;
        drop(log);
        for (is_successful, expected) in [(false, Some(6.0)), (true, Some(6.0)), (true, None)] {
            let (log, left) = start(&file).await;
            assert_eq!(left, expected);
            if is_successful {
                log.forget_lease_times().await.unwrap();
            }
            log.close(&[]).await;
        }
    }
}
