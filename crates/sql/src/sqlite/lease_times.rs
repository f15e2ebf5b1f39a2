//! The remaining times of leases while no server runs.
//!
//! A running server has the deadlines only in memory. When it stops, it records how many seconds are left of each lease
//! as a fact, and the next start takes these facts. A start after a crash finds none and gives each lease its full TTL,
//! so a lease may end late but never early.

use std::collections::HashMap;

use sqlx::{Connection as _, SqliteConnection};

use orlop_core::{
    log::{LoggedLease, lease_left_fact, lease_of_fact},
    types::LeaseId,
};

/// Removes the recorded times from the database and returns the remaining seconds of each lease.
pub(super) async fn take(connection: &mut SqliteConnection) -> sqlx::Result<HashMap<LeaseId, f64>> {
    let facts: Vec<(String, i64)> = sqlx::query_as("SELECT name, value FROM meta").fetch_all(&mut *connection).await?;
    let times = facts.iter().filter_map(|(name, secs)| Some((lease_of_fact(name)?, *secs as f64)));
    let times: HashMap<LeaseId, f64> = times.collect();
    let mut transaction = connection.begin().await?;
    for id in times.keys() {
        sqlx::query("DELETE FROM meta WHERE name = ?").bind(lease_left_fact(*id)).execute(&mut *transaction).await?;
    }
    transaction.commit().await?;
    Ok(times)
}

/// Records the remaining times.
pub(super) async fn record(connection: &mut SqliteConnection, leases: &[LoggedLease]) -> sqlx::Result<()> {
    let mut transaction = connection.begin().await?;
    for LoggedLease { id, left_secs, .. } in leases {
        let Some(left) = left_secs else { continue };
        // Rounded up, because a lease must not end early.
        let left = left.max(0.0).ceil() as i64;
        sqlx::query("INSERT OR REPLACE INTO meta (name, value) VALUES (?, ?)")
            .bind(lease_left_fact(*id))
            .bind(left)
            .execute(&mut *transaction)
            .await?;
    }
    transaction.commit().await
}
