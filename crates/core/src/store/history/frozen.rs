//! The store as of one moment, with its history, for a copy of both.

use std::sync::Arc;

use tokio::time::{Duration, Instant, sleep};

use super::{
    HistoryKeeper,
    past::{COPY_POLL_PAUSE, PastError},
};
use crate::{
    log::{self, FrozenArchive, Meta, ReadLog},
    store::handle::Store,
    types::Revision,
};

/// Maximum time for a compaction to copy its rows. If the instance that copies dies, another one begins after a minute.
const COPY_TIME_MAX: Duration = Duration::from_secs(120);

/// A log as of one moment and, if rows are kept, the archive as of the same or a later one. Together they have every row
/// that is needed from [`crate::log::ArchiveState::first`] on. The archive may have rows that a later compaction than the
/// log's has removed.
pub struct FrozenStore {
    pub log: Arc<dyn ReadLog>,
    /// The state of the log.
    pub meta: Meta,
    pub archive: Option<Arc<dyn FrozenArchive>>,
}

impl Store {
    /// Freezes the log alone.
    ///
    /// # Errors
    ///
    /// If the database is unavailable.
    pub async fn freeze(&self) -> log::Result<FrozenStore> {
        let log: Arc<dyn ReadLog> = self.shared.log.freeze().await?.into();
        Ok(FrozenStore { meta: log.meta().await?, log, archive: None })
    }

    /// Freezes the log and the archive, once the rows of the last compaction were copied.
    ///
    /// # Errors
    ///
    /// [`PastError::Copying`] if that takes too long.
    pub async fn freeze_with_archive(&self) -> Result<FrozenStore, PastError> {
        let Some(HistoryKeeper { archive, .. }) = &self.shared.history else { return Ok(self.freeze().await?) };
        let deadline = Instant::now() + COPY_TIME_MAX;
        loop {
            // Nothing is frozen while it waits, because the database keeps what a frozen log may read.
            let compacted = self.history().await?.compact_revision.unwrap_or(Revision::EMPTY);
            let state = archive.state().await?;
            if state.first == Revision::MAX {
                // The archive was never begun.
                return Ok(self.freeze().await?);
            }
            if state.copied >= compacted {
                let (log, frozen) = archive.freeze(&*self.shared.log).await?;
                let meta = log.meta().await?;
                if frozen.state().await?.copied >= meta.compact_revision.unwrap_or(Revision::EMPTY) {
                    return Ok(FrozenStore { log, meta, archive: Some(frozen) });
                }
            }
            if Instant::now() >= deadline {
                return Err(PastError::Copying { compacted });
            }
            sleep(COPY_POLL_PAUSE).await;
        }
    }
}
