//! The remaining times of leases while no server runs.
//!
//! A running server has the deadlines only in memory. When it stops, it records how many seconds are left of each lease
//! as a fact, and the next start takes these facts. A start after a crash finds none and gives each lease its full TTL,
//! so a lease may end late but never early.

use std::collections::HashMap;

use rusqlite::{Connection, Result};

use super::append::SET_FACT;
use orlop_core::{
    log::{LoggedLease, lease_left_fact, lease_of_fact},
    types::LeaseId,
};

/// Removes the recorded times from the database and returns the remaining seconds of each lease.
pub(super) fn take(connection: &mut Connection) -> Result<HashMap<LeaseId, f64>> {
    let transaction = connection.transaction()?;
    let facts: Vec<(String, i64)> = transaction
        .prepare("SELECT name, value FROM meta")?
        .query_map([], |row| Ok((row.get(0)?, row.get(1)?)))?
        .collect::<Result<_>>()?;
    let times = facts.iter().filter_map(|(name, secs)| Some((lease_of_fact(name)?, *secs as f64)));
    let times: HashMap<LeaseId, f64> = times.collect();
    for id in times.keys() {
        transaction.prepare_cached("DELETE FROM meta WHERE name = ?")?.execute([lease_left_fact(*id)])?;
    }
    transaction.commit()?;
    Ok(times)
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
