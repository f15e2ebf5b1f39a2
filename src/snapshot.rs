//! Snapshots: a log in one file, as etcd writes it: a database of bbolt, followed by its SHA-256 checksum of 32 bytes. The
//! archive may be in the file, too.

mod archive_bucket;
mod buckets;
mod checksum;
mod command;
mod data_dir;
mod dated;
mod export;
mod import;
mod report;
mod save;
mod schedule;
mod wal;

use std::path::Path;

use tempfile::NamedTempFile;
use tokio::task::spawn_blocking;

use self::{checksum::Form, data_dir::DataDir, import::Import};
pub use self::{
    checksum::HashCheck,
    command::{Args, run},
    dated::DatedFolder,
    export::Export,
    import::Bump,
    save::receive,
    schedule::Schedule,
};
use orlop_core::{
    files::sync_folder_of,
    log::{self, Load, ReadLog, WithPrev},
    store::{PastError, replay},
    types::{KeyRange, Revision},
};
use orlop_sql::SqliteView;

/// Start of the names of temporary files.
const TEMPORARY_PREFIX: &str = "orlop-snapshot-";
/// End of the names of temporary files. A snapshot that somebody names `orlop-snapshot-monday.db` is none of them.
const TEMPORARY_SUFFIX: &str = ".tmp";

/// Errors of taking, reading and restoring snapshots.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A text for the operator that contains the name of the file.
    #[error("{0}")]
    File(String),
    /// The server does not send a whole snapshot.
    #[error("{}", orlop_client::describe(.0))]
    Server(Box<tonic::Status>),
    #[error(transparent)]
    Log(#[from] log::Error),
    #[error(transparent)]
    History(#[from] PastError),
}

pub type Result<T> = std::result::Result<T, Error>;

/// The error of [`Purpose::Copy`] for a store with a revision that has no change.
const IS_RAISED: &str = "the source was restored with --bump-revision, so its hash cannot be compared with a copy's; \
    stop the clients that write, and use `orlop snapshot save` and `orlop snapshot restore`";

/// What a snapshot is restored for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Purpose {
    NewStore(Option<Bump>),
    /// The copy of a running store, with which it is compared later, by etcd's hash.
    Copy,
}

/// What a snapshot contains.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Content {
    /// What those of etcd do.
    Log,
    /// In addition what the server keeps of the time before the compact revision.
    LogAndArchive,
}

/// Creates a temporary file that only its owner can read.
fn new_file_in(folder: &Path) -> Result<NamedTempFile> {
    let file = tempfile::Builder::new().prefix(TEMPORARY_PREFIX).suffix(TEMPORARY_SUFFIX).tempfile_in(folder);
    file.map_err(|error| file_error("create a file in", folder, &error))
}

/// Gives a temporary file its final name, so that the name never belongs to an incomplete file. A file that has the
/// name is replaced. Returns after both the file and the name are on disk.
fn publish(file: NamedTempFile, path: &Path) -> Result<()> {
    let failed = |error: std::io::Error| file_error("write", path, &error);
    file.as_file().sync_all().map_err(failed)?;
    file.persist(path).map_err(|error| failed(error.error))?;
    sync_folder_of(path).map_err(failed)
}

/// Copies a log that does not change during the copy.
async fn copy(from: &dyn ReadLog, mut into: Box<dyn Load>) -> log::Result<Revision> {
    let meta = from.meta().await?;
    let mut next = Revision::EMPTY.next();
    while next <= meta.position.head {
        let page = from.changes(next, meta.position.head, &KeyRange::all(), WithPrev::No).await?;
        into.add(&page.changes).await?;
        next = page.next;
    }
    into.finish(&meta, &from.auth().await?).await?;
    Ok(meta.position.head)
}

/// The content of a snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// etcd's hash of the whole file.
    pub hash: u32,
    /// The newest revision that has a row; 0 without rows.
    pub revision: Revision,
    pub compact_revision: Option<Revision>,
    /// Live keys.
    pub keys: usize,
    pub rows: usize,
    /// Rows of the archive; `None`: there is none.
    pub archived_rows: Option<usize>,
    pub leases: usize,
    /// Bytes without the checksum.
    pub bytes: u64,
    /// The version of etcd whose form the file has; empty before 3.6.
    pub version: String,
}

/// A file that was opened and verified.
enum Opened {
    Etcd(Box<Import>),
    Sqlite,
    /// A SQLite database without the checksum that was to be verified.
    BareSqlite,
}

/// Opens and verifies a snapshot, or the data directory of an etcd that has stopped.
fn open(file: &Path, check: HashCheck, content: Content) -> Result<Opened> {
    let data_dir = DataDir::of(file)?;
    let (file, check) = match &data_dir {
        Some(data_dir) if file.is_dir() => (data_dir.database(), HashCheck::Skip),
        Some(_) | None => (file.to_owned(), check),
    };
    let (form, bytes) = checksum::examine(&file, check)?;
    let verify = || if check == HashCheck::Verify { checksum::verify(&file) } else { Ok(()) };
    match form {
        Form::Etcd => {}
        Form::Sqlite => return verify().map(|()| Opened::Sqlite),
        Form::BareSqlite => return Ok(Opened::BareSqlite),
    }
    // Both read the whole file, so they run at the same time. The checksum explains other errors.
    let (verified, import) = std::thread::scope(|scope| {
        let verified = scope.spawn(verify);
        let import = Import::open(&file, bytes, content);
        (verified.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)), import)
    });
    verified?;
    let import = import?;
    if let Some(data_dir) = data_dir {
        data_dir.refuse_unapplied(import.facts())?;
    }
    Ok(Opened::Etcd(Box::new(import)))
}

/// Reads and verifies a snapshot.
///
/// # Errors
///
/// If the file is incomplete, not a snapshot, or damaged.
pub fn status(file: &Path, check: HashCheck) -> Result<Status> {
    let name = file.display();
    let refused = match open(file, check, Content::LogAndArchive)? {
        Opened::Etcd(import) => return Ok(import.status()),
        Opened::Sqlite => format!(
            "{name} is a SQLite database, the form of snapshots of Orlop 0.2.0 and before: `orlop snapshot restore` \
             accepts it, and `orlop check` reports its content"
        ),
        Opened::BareSqlite => format!(
            "{name} is a SQLite database without a checksum, such as that of a server: \
             `orlop check --datastore-endpoint sqlite://{name}` reports its content, and `orlop snapshot restore` accepts \
             a copy of a database of Orlop with --skip-hash-check"
        ),
    };
    Err(Error::File(refused))
}

/// What was restored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Restored {
    /// The newest revision.
    pub head: Revision,
    pub history: RestoredHistory,
}

/// What was restored of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RestoredHistory {
    /// The snapshot has no archive, or it was not wanted.
    None,
    /// The history from this revision on.
    From(Revision),
    /// Nothing, because the restored store is compacted at a later revision than that of the archive.
    LeftOut,
}

impl std::fmt::Display for RestoredHistory {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Self::None => Ok(()),
            Self::From(first) => write!(f, ", with the history from revision {first} on"),
            Self::LeftOut => f.write_str(", without the history, which is that of an earlier compaction"),
        }
    }
}

/// Runs what takes milliseconds or longer, such as encoding a page or reading a file, or waits for the disk.
async fn on_blocking_thread<T: Send + 'static>(work: impl FnOnce() -> Result<T> + Send + 'static) -> Result<T> {
    spawn_blocking(work).await.unwrap_or_else(|error| Err(Error::File(error.to_string())))
}

/// Restores a snapshot into an empty database, which `create` creates when the snapshot has been verified.
///
/// # Errors
///
/// The same as [`status`], if the database cannot be created or written, and if a copy would have another hash than its
/// source. The database is empty after an error.
pub async fn restore<E: From<Error> + From<log::Error>>(
    file: &Path,
    check: HashCheck,
    content: Content,
    purpose: Purpose,
    create: impl Future<Output = std::result::Result<Box<dyn Load>, E>>,
) -> std::result::Result<Restored, E> {
    let path = file.to_owned();
    let bump = match purpose {
        Purpose::NewStore(bump) => bump,
        Purpose::Copy => None,
    };
    match on_blocking_thread(move || open(&path, check, content)).await? {
        Opened::Etcd(import) if purpose == Purpose::Copy && import.is_raised() => {
            Err(Error::File(IS_RAISED.to_owned()).into())
        }
        Opened::Etcd(import) => import.load(bump, create).await,
        Opened::BareSqlite => {
            // The database of another program is refused in any case.
            if let Err(error @ log::Error::Open(_)) = SqliteView::of_file(file).await {
                return Err(error.into());
            }
            Err(checksum::missing(file).into())
        }
        Opened::Sqlite if bump.is_some() => Err(Error::File(format!(
            "{} is a SQLite database, whose revisions cannot be raised with --bump-revision",
            file.display()
        ))
        .into()),
        Opened::Sqlite => {
            let database = open_sqlite(file).await?;
            let head = copy(&database, create.await?).await?;
            Ok(Restored { head, history: RestoredHistory::None })
        }
    }
}

/// Opens a snapshot of Orlop 0.2.0 or before, or a copy of a database file.
async fn open_sqlite(file: &Path) -> Result<SqliteView> {
    let database = SqliteView::of_file(file).await?;
    let damaged = |error: log::Error| Error::File(format!("{} cannot be read: {error}", file.display()));
    database.refuse_damage().await.map_err(damaged)?;
    replay(&database).await.map_err(damaged)?;
    Ok(database)
}

fn file_error(action: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::File(format!("cannot {action} {}: {error}", path.display()))
}
