//! A log as one file: a SQLite database of the form that Orlop itself keeps, of one moment, and behind it the 32 bytes of
//! its SHA-256, as etcd's snapshots have them.

mod checksum;
mod command;

use std::{
    fs::File,
    path::{Path, PathBuf},
};

use tempfile::{NamedTempFile, TempPath};

pub use self::{
    checksum::{CHECKSUM_BYTES, HashCheck, Hashing},
    command::{Args, run},
};
use crate::{
    log::{self, Cluster, History, Load, Log, SqliteLoader, SqliteView, WithPrev},
    store::{hash, replay},
    types::{KeyRange, Revision},
};

/// Why a snapshot cannot be taken, read or restored.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The text is for people, and names the file.
    #[error("{0}")]
    File(String),
    #[error(transparent)]
    Log(#[from] log::Error),
}

pub type Result<T> = std::result::Result<T, Error>;

/// A snapshot on the disk, without its checksum. Gone when it is dropped.
pub struct Snapshot {
    pub file: File,
    pub bytes: u64,
    _path: TempPath,
}

/// Where snapshots lie while they are sent: a folder of one server's own.
#[derive(Debug, Clone)]
pub struct Folder(pub PathBuf);

impl Folder {
    /// Removes what a server left that did not end well. Only who alone uses the folder may.
    ///
    /// # Errors
    ///
    /// If there is something that cannot be removed.
    pub fn clear(&self) -> Result<()> {
        match std::fs::remove_dir_all(&self.0) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(unusable("remove", &self.0, &error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    fn new_file(&self) -> Result<NamedTempFile> {
        std::fs::create_dir_all(&self.0)
            .and_then(|()| tempfile::Builder::new().prefix("orlop-snapshot-").tempfile_in(&self.0))
            .map_err(|error| unusable("create a file in", &self.0, &error))
    }

    /// Takes a snapshot of all that is in the log now; it is written to meanwhile.
    ///
    /// # Errors
    ///
    /// If the log cannot be read or there is no room.
    ///
    /// # Cancel safety
    ///
    /// What was written is removed.
    pub async fn take(&self, log: &dyn Log) -> Result<Snapshot> {
        let (file, path) = self.new_file()?.into_parts();
        let into = Box::new(SqliteLoader::scratch(&path, Cluster::Same).await?);
        copy(&*log.freeze().await?, into).await?;
        let bytes = file.metadata().map_err(|error| unusable("read", &path, &error))?.len();
        Ok(Snapshot { file, bytes, _path: path })
    }
}

/// Copies all of a log that does not change meanwhile.
async fn copy(from: &dyn History, mut into: Box<dyn Load>) -> log::Result<()> {
    let meta = from.meta().await?;
    let mut next = Revision::EMPTY.next();
    while next <= meta.position.head {
        let page = from.changes(next, meta.position.head, &KeyRange::all(), WithPrev::No).await?;
        into.add(&page.changes).await?;
        next = page.next;
    }
    into.finish(&meta).await
}

/// What a snapshot holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// As the Maintenance service's HashKV gives it at this revision.
    pub hash: u32,
    pub revision: Revision,
    pub compact_revision: Option<Revision>,
    /// That are live.
    pub keys: usize,
    pub rows: usize,
    pub leases: usize,
    pub cluster_id: u64,
    /// Without the checksum.
    pub bytes: u64,
}

/// Reads a snapshot whole.
///
/// # Errors
///
/// If it is not whole, not Orlop's, or contradicts itself.
pub async fn status(file: &Path, check: HashCheck) -> Result<Status> {
    open(file, check).await.map(|(_, status)| status)
}

/// Fills an empty database from a snapshot.
///
/// # Errors
///
/// As [`status`], and if the database cannot be written; then nothing of it is there.
pub async fn restore(file: &Path, check: HashCheck, into: Box<dyn Load>) -> Result<Status> {
    let (database, status) = open(file, check).await?;
    copy(&database, into).await?;
    Ok(status)
}

async fn open(file: &Path, check: HashCheck) -> Result<(SqliteView, Status)> {
    let bytes = checksum::verify(file, check)?;
    let database = SqliteView::of_file(file).await?;
    let replayed = replay(&database).await?;
    let hash = hash::of_history(&database, &replayed.index).await?;
    let status = Status {
        hash,
        revision: replayed.index.head(),
        compact_revision: replayed.meta.compact_revision,
        keys: replayed.index.range(KeyRange::all().bounds(), replayed.index.head()).count(),
        rows: replayed.rows,
        leases: replayed.meta.leases.len(),
        cluster_id: replayed.meta.cluster_id,
        bytes,
    };
    Ok((database, status))
}

fn unusable(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::File(format!("cannot {what} {}: {error}", path.display()))
}
