//! The end of a log: its connections for reads are closed, and its WAL is copied into the database file.

use std::time::Duration;

use rusqlite::{Connection, config::DbConfig};
use tokio::time::timeout;
use tracing::warn;

use super::{SqliteLog, wal};

/// Maximum time to wait for the reads that have begun. A server that stops needs none of them.
const READS_MAX: Duration = if cfg!(test) { Duration::from_millis(100) } else { Duration::from_secs(5) };

/// What became of the WAL.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Wal {
    Truncated,
    /// The next start uses it, because the disk is full.
    Left,
    /// The next start uses it, because somebody reads the database.
    Busy,
}

/// Waits until connections for reads are closed, but not for ever: nothing may keep a server from stopping.
pub(super) async fn close_readers(closing: impl Future<Output = ()>) {
    if timeout(READS_MAX, closing).await.is_err() {
        warn!("reads of the database have not ended; they are abandoned");
    }
}

impl SqliteLog {
    /// Copies the whole WAL into the database file, so that the file alone can be copied while the server is stopped.
    pub(super) async fn end_wal(&self) {
        match self.truncate_wal().await {
            Ok(Wal::Truncated | Wal::Left) => {}
            Ok(Wal::Busy) => {
                warn!("cannot truncate the WAL, because the database is being read; the next start uses it");
            }
            Err(error) => warn!(%error, "cannot truncate the WAL; the next start uses it"),
        }
    }

    /// On a full disk the WAL is left: the last connection would delete it and its index, and the next start could not
    /// create them.
    async fn truncate_wal(&self) -> rusqlite::Result<Wal> {
        let is_disk_full = self.disk_free().is_some_and(|free| free < wal::MARGIN_BYTES);
        let truncate = |writer: &mut Connection| -> rusqlite::Result<Wal> {
            // Its first column is not an error: the checkpoint could not wait for the readers any longer.
            let is_busy: bool = writer.query_row("PRAGMA wal_checkpoint(TRUNCATE)", [], |row| row.get(0))?;
            Ok(if is_busy { Wal::Busy } else { Wal::Truncated })
        };
        let leave = |writer: &mut Connection| {
            writer.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true).map(|_| Wal::Left)
        };
        let writer = self.writer.lock().await?;
        if is_disk_full { writer.run(leave).await } else { writer.run(truncate).await }
    }
}

#[cfg(test)]
mod tests {
    use orlop_core::{
        log::{Log as _, LoggedLease},
        types::LeaseId,
    };

    use super::*;

    /// For example of a compaction that the end of the server has cancelled.
    #[tokio::test]
    async fn log_is_closed_after_its_writer_has_failed() {
        let folder = tempfile::tempdir().unwrap();
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.unwrap();
        let writer = log.writer.lock().await.unwrap();
        writer.run(|_| -> rusqlite::Result<()> { Err(rusqlite::Error::InvalidQuery) }).await.unwrap_err();
        let lease = LoggedLease { id: LeaseId(7), ttl_secs: 60, left_secs: Some(5.0) };
        timeout(Duration::from_secs(20), log.close(&[lease])).await.expect("the log is closed in time");
        drop(log);
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.unwrap();
        assert_eq!(log.lease_times.get(&LeaseId(7)), Some(&5.0));
    }

    #[tokio::test]
    async fn read_that_does_not_end_keeps_the_wal_and_not_the_process() {
        let folder = tempfile::tempdir().unwrap();
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.unwrap();
        let lease = LoggedLease { id: LeaseId(7), ttl_secs: 60, left_secs: Some(5.0) };
        log.record_lease_times(&[lease]).await.unwrap();
        let writer = log.writer.lock().await.unwrap();
        writer.run(|writer| writer.busy_timeout(Duration::ZERO)).await.unwrap();
        let mut reader = log.reader().await.unwrap();
        sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut *reader).await.unwrap();
        assert_eq!(log.truncate_wal().await.unwrap(), Wal::Busy);
        timeout(Duration::from_secs(30), log.close(&[lease])).await.expect("the log is closed in time");
        sqlx::raw_sql("ROLLBACK").execute(&mut *reader).await.unwrap();
        assert_eq!(log.truncate_wal().await.unwrap(), Wal::Truncated);
    }
}
