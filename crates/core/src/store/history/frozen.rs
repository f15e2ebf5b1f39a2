//! The store as of one moment, with its history, for a copy of both.

use super::past::{PastError, when_copied};
use crate::{
    log::{self, FrozenArchive, History, Meta},
    store::handle::Store,
    types::Revision,
};

/// A log as of one moment and, if rows are kept, the archive as of a later one. Together they have every row from
/// [`crate::log::ArchiveState::first`] on. The archive may have rows that a later compaction than the log's has removed.
pub struct Frozen {
    pub log: Box<dyn History>,
    /// The state of the log.
    pub meta: Meta,
    pub archive: Option<Box<dyn FrozenArchive>>,
}

impl Store {
    /// Freezes the log alone.
    ///
    /// # Errors
    ///
    /// If the database is unavailable.
    pub async fn freeze(&self) -> log::Result<Frozen> {
        let log = self.shared.log.freeze().await?;
        Ok(Frozen { meta: log.meta().await?, log, archive: None })
    }

    /// Freezes the log and the archive.
    ///
    /// # Errors
    ///
    /// [`PastError::Copying`] if the rows of the last compaction are not copied in time.
    pub async fn freeze_with_archive(&self) -> Result<Frozen, PastError> {
        let frozen = self.freeze().await?;
        let compacted = frozen.meta.compact_revision.unwrap_or(Revision::EMPTY);
        let Some(history) = &self.shared.history else { return Ok(frozen) };
        let archive = when_copied(async || {
            let archive = history.archive.freeze().await?;
            let state = archive.state().await?;
            match state.first {
                // It was never begun.
                Revision::MAX => Ok(None),
                _ if state.copied < compacted => Err(PastError::Copying { compacted }),
                _ => Ok(Some(archive)),
            }
        });
        Ok(Frozen { archive: archive.await?, ..frozen })
    }
}
