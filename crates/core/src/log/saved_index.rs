//! A saved index beside a log, so that a start reads only the newest rows of the log. Instances that share a log share
//! its saved index.
//!
//! It is a cache: if anything about it is in doubt, it is not used, and the whole log is read.

use async_trait::async_trait;

use super::Result;
use crate::types::Revision;

/// Name of the fact with which a database recognizes its saved index.
pub const SAVED_INDEX_MARK: &str = "saved_index";

/// What a saved index shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SavedIndexState {
    /// The head at its first step: it contains all changes up to this revision, and may contain later ones.
    pub head: Revision,
    /// The compact revision. All rows that this compaction removed are deleted from the log.
    pub compact_revision: Option<Revision>,
    /// About this number of keys.
    pub keys: usize,
}

/// The saved index of a log.
#[async_trait]
pub trait SavedIndex: Send + Sync {
    /// Opens the saved index; `None` if there is none, or if it does not belong to this log as it is now: the log must
    /// have had all its changes.
    async fn open(&self) -> Result<Option<Box<dyn SavedIndexReader>>>;

    /// Begins to save another index, of the log on `server` ([`super::Position::server`]). It replaces the saved one when
    /// it is finished. `None` if another instance is saving one.
    async fn create(&self, state: SavedIndexState, server: i64) -> Result<Option<Box<dyn SavedIndexWriter + '_>>>;
}

#[async_trait]
pub trait SavedIndexReader: Send {
    fn state(&self) -> SavedIndexState;

    /// Returns the next block.
    ///
    /// # Errors
    ///
    /// [`super::Error::Corrupt`] if it is not as it was written.
    async fn next(&mut self) -> Result<Option<Vec<u8>>>;
}

#[async_trait]
pub trait SavedIndexWriter: Send {
    async fn add(&mut self, block: Vec<u8>) -> Result<()>;

    /// Makes the index the saved one. All changes that it contains must be durable in the log. Fails if the log is no
    /// longer on the server.
    async fn finish(self: Box<Self>) -> Result<()>;
}
