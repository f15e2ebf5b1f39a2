//! Snapshots: a log in one file. The file is a consistent copy of the log, a SQLite database in Orlop's format,
//! followed by its SHA-256 checksum of 32 bytes, as in etcd's snapshots.

mod checksum;
mod command;
mod dated;
mod save;
mod schedule;

use std::{
    fs::File,
    path::{Path, PathBuf},
    time::SystemTime,
};

use tempfile::NamedTempFile;

pub use self::{
    checksum::{HashCheck, Hashing},
    command::{Args, run},
    dated::DatedFolder,
    schedule::Schedule,
};
use crate::config::Datastore;
use orlop_core::{
    log::{self, Cluster, History, Load, Log, WithPrev},
    private,
    store::{hash, replay},
    types::{KeyRange, Revision},
};
use orlop_sql::{SqliteLoader, SqliteView};

/// Start of the names of temporary files.
const TEMPORARY_PREFIX: &str = "orlop-snapshot-";

/// Errors of taking, reading and restoring snapshots.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A text for the operator that contains the name of the file.
    #[error("{0}")]
    File(String),
    #[error(transparent)]
    Log(#[from] log::Error),
}

pub type Result<T> = std::result::Result<T, Error>;

/// A snapshot on disk without its checksum. Its file has no directory entry, so it is deleted when this value is
/// dropped.
pub struct Snapshot {
    pub file: File,
    pub bytes: u64,
}

/// The directory in which snapshots are written before they are sent.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Folder {
    /// A directory that only this server uses. It is created when the first file is.
    Own(PathBuf),
    /// A directory of the system that others also use. Orlop's files have unpredictable names.
    Shared(PathBuf),
}

impl Folder {
    /// Returns the directory of a datastore. For SQLite it is next to the database file, whose disk should have space
    /// for a copy; for Postgres it is the temporary directory of the system.
    pub fn of(datastore: &Datastore) -> Self {
        match datastore {
            Datastore::Sqlite(file) => {
                let mut folder = file.clone();
                folder.as_mut_os_string().push(".snapshots");
                Self::Own(folder)
            }
            Datastore::Postgres(_) => Self::Shared(std::env::temp_dir()),
        }
    }

    /// Removes the files of a server that was killed, if only this server uses the directory. Call it only while the
    /// lock of the log is held.
    ///
    /// # Errors
    ///
    /// If a file cannot be removed.
    pub fn clear(&self) -> Result<()> {
        let Self::Own(folder) = self else { return Ok(()) };
        match std::fs::remove_dir_all(folder) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(file_error("remove", folder, &error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Creates a file that only its owner can read.
    fn new_file(&self) -> Result<NamedTempFile> {
        let (made, folder) = match self {
            Self::Own(folder) => (private::make_folder(folder), folder),
            Self::Shared(folder) => (Ok(()), folder),
        };
        made.map_err(|error| file_error("create", folder, &error))?;
        new_file_in(folder)
    }

    /// Takes a snapshot of the current state of the log. Writes continue while it runs.
    ///
    /// # Errors
    ///
    /// If the log cannot be read or the disk is full.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped, the file is removed.
    pub async fn take(&self, log: &dyn Log) -> Result<Snapshot> {
        let (file, path) = self.write(log).await?.into_parts();
        let bytes = file.metadata().map_err(|error| file_error("read", &path, &error))?.len();
        // The file is removed now, so that it does not remain if the server is killed before the snapshot is sent.
        path.close().map_err(|error| Error::File(format!("cannot remove a snapshot's file: {error}")))?;
        Ok(Snapshot { file, bytes })
    }

    /// Writes a snapshot without its checksum to a temporary file.
    async fn write(&self, log: &dyn Log) -> Result<NamedTempFile> {
        let file = self.new_file()?;
        let into = Box::new(SqliteLoader::scratch(file.path(), Cluster::Same).await?);
        copy(&*log.freeze().await?, into).await?;
        Ok(file)
    }
}

/// Creates a temporary file that only its owner can read.
fn new_file_in(folder: &Path) -> Result<NamedTempFile> {
    let file = tempfile::Builder::new().prefix(TEMPORARY_PREFIX).tempfile_in(folder);
    file.map_err(|error| file_error("create a file in", folder, &error))
}

/// Gives a temporary file its final name, so that the name never belongs to an incomplete file. A file that has the
/// name is replaced. Returns after both the file and the name are on disk.
fn publish(file: NamedTempFile, path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| file_error("write", path, &error);
    file.as_file().sync_all().map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(folder).and_then(|folder| folder.sync_all()).map_err(failed)
}

/// Copies a log that does not change during the copy.
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

/// The content of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// The hash that HashKV returns at this revision.
    pub hash: u32,
    pub revision: Revision,
    pub compact_revision: Option<Revision>,
    /// Live keys.
    pub keys: usize,
    pub rows: usize,
    pub leases: usize,
    pub cluster_id: u64,
    /// Bytes without the checksum.
    pub bytes: u64,
}

/// Reads and verifies a snapshot.
///
/// # Errors
///
/// If the file is incomplete, not a snapshot of Orlop, or inconsistent.
pub async fn status(file: &Path, check: HashCheck) -> Result<Status> {
    open(file, check).await.map(|(_, status)| status)
}

/// Restores a snapshot into an empty database, which `create` creates when the snapshot has been verified.
///
/// # Errors
///
/// The same as [`status`], and if the database cannot be created or written. The database is empty after an error.
pub async fn restore<E: From<Error> + From<log::Error>>(
    file: &Path,
    check: HashCheck,
    create: impl Future<Output = std::result::Result<Box<dyn Load>, E>>,
) -> std::result::Result<Status, E> {
    let (database, status) = open(file, check).await?;
    copy(&database, create.await?).await?;
    Ok(status)
}

async fn open(file: &Path, check: HashCheck) -> Result<(SqliteView, Status)> {
    let bytes = checksum::verify(file, check)?;
    let database = SqliteView::of_file(file).await?;
    let damaged = |error: log::Error| Error::File(format!("{} cannot be read: {error}", file.display()));
    database.refuse_damage().await.map_err(damaged)?;
    let replayed = replay(&database).await.map_err(damaged)?;
    let hash = hash::of_history(&database, &replayed.index, replayed.index.head()).await.map_err(damaged)?.hash;
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

/// Returns the time for names of files and for monitoring.
#[expect(clippy::disallowed_methods, reason = "deadlines do not depend on it")]
pub fn now() -> SystemTime {
    SystemTime::now()
}

fn file_error(action: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::File(format!("cannot {action} {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::{fs, os::unix::fs::PermissionsExt as _};

    use super::*;

    #[test]
    fn only_a_new_folder_is_created_and_removed() {
        let home = tempfile::tempdir().unwrap();
        let own = Folder::of(&Datastore::Sqlite(home.path().join("orlop.db")));
        assert_eq!(own, Folder::Own(home.path().join("orlop.db.snapshots")));
        let elsewhere = Folder::of(&Datastore::Postgres("postgres://a@b/c".to_owned()));
        assert_eq!(elsewhere, Folder::Shared(std::env::temp_dir()));

        for (folder, place, clears) in [
            (own, home.path().join("orlop.db.snapshots"), true),
            (Folder::Shared(home.path().to_owned()), home.path().to_owned(), false),
        ] {
            let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
            let file = folder.new_file().unwrap();
            assert_eq!(mode(file.path()), 0o600);
            assert!(!clears || mode(&place) == 0o700);
            assert_eq!(file.path().parent(), Some(&*place));
            let left = place.join("left");
            fs::write(&left, "").unwrap();
            folder.clear().unwrap();
            assert_eq!(!left.exists(), clears, "{folder:?}");
        }
    }
}
