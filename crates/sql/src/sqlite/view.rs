//! A read-only snapshot of a log.

use std::{
    path::{Path, PathBuf},
    sync::Arc,
};

use async_trait::async_trait;
use sqlx::{ConnectOptions as _, SqliteConnection, sqlite::SqliteConnectOptions};
use tokio::sync::Mutex;

use super::{
    BUSY_TIMEOUT,
    foreign::has_kines_table,
    identity::Identity,
    integrity::{is_damage, refuse_damage, unreadable},
    load::with_suffix,
    read,
    result_code::{CODE_BUSY, CODE_CANNOT_OPEN, CODE_FULL, CODE_IO, CODE_READ_ONLY, disk_hint, has_code},
    wal::Growth,
};
use crate::{
    auth,
    error::unavailable,
    migrations::{self, check_schema},
};
use orlop_core::{
    auth::AuthState,
    log::{Error, Meta, Page, ReadLog, Result, Visit, WithPrev},
    types::{KeyRange, Revision},
};

/// Growth of the WAL, or the size of the database if that is more, after which a view of a database in use ends.
const WAL_GROWTH_MAX: u64 = 1 << 30;

/// A connection with a read transaction, or with a file that no process writes.
pub struct SqliteView {
    pub(super) connection: Mutex<SqliteConnection>,
    /// A read transaction of the archive, for `orlop check`.
    pub(super) archive: Mutex<Option<SqliteConnection>>,
    /// The file's name.
    pub(super) name: String,
    /// The file, if it was opened without a WAL. If a WAL exists later, a server has started to write.
    pub(super) file_without_wal: Option<PathBuf>,
    /// The WAL of the server in this process.
    wal: Option<Wal>,
    /// The newest migration of the database.
    pub(super) schema: i64,
}

/// A WAL that SQLite cannot reuse while the view exists.
struct Wal {
    growth: Growth,
    /// Growth after which the view ends: its reader is too slow for the writes beside it.
    bytes_max: u64,
}

impl SqliteView {
    /// Opens a database file that no server uses, without locks and without writing or creating any file.
    ///
    /// # Errors
    ///
    /// [`Error::Open`] with the name of the file, if it is not a database of this version of Orlop.
    pub async fn of_file(file: &Path) -> Result<Self> {
        let options = SqliteConnectOptions::new().filename(file).read_only(true).immutable(true);
        let name = file.display().to_string();
        let (connection, schema) = open(&name, options).await?;
        Ok(Self::new(connection, name, schema))
    }

    /// Opens the database of a server, which may be running, including its WAL. Writes nothing to the database.
    ///
    /// # Errors
    ///
    /// The same as [`SqliteView::of_file`], and [`Error::Corrupt`] if the database is damaged.
    pub async fn of_database(file: &Path) -> Result<Self> {
        let name = file.display().to_string();
        let failed = |error: std::io::Error| Error::Open(format!("cannot open {name}: {error}"));
        if !std::fs::metadata(file).map_err(failed)?.is_file() {
            return Err(Error::Open(format!("cannot open {name}: it is not a file")));
        }
        let immutable = may_be_immutable(file);
        let options = SqliteConnectOptions::new().filename(file).read_only(true).immutable(immutable);
        let (mut connection, schema) = open(&name, options.busy_timeout(BUSY_TIMEOUT)).await?;
        // The first read of the transaction takes the snapshot.
        let begin = sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut connection).await;
        begin.map_err(unreadable)?;
        let file_without_wal = immutable.then(|| file.to_owned());
        Ok(Self { file_without_wal, ..Self::new(connection, name, schema) })
    }

    fn new(connection: SqliteConnection, name: String, schema: i64) -> Self {
        let connection = Mutex::new(connection);
        Self { connection, archive: Mutex::default(), name, file_without_wal: None, wal: None, schema }
    }

    /// Checks every page of the file.
    ///
    /// # Errors
    ///
    /// [`Error::Corrupt`] if a page is inconsistent.
    pub async fn refuse_damage(&self) -> Result<()> {
        refuse_damage(&mut *self.connection.lock().await).await
    }

    /// Opens a snapshot of the current state of a database that is in use. Until it is dropped, later writes remain in
    /// the WAL, so it ends when the WAL has grown too much. The process ends if the database file was replaced.
    pub(super) async fn now(options: &SqliteConnectOptions, identity: &Arc<Identity>) -> Result<Self> {
        let name = options.get_filename().display().to_string();
        // Also before: a connection to another file would use the WAL of this one.
        identity.check_async().await;
        let connected = options.connect().await;
        identity.check_async().await;
        let mut connection = connected.map_err(unavailable)?;
        // The first read of the transaction takes the snapshot of the log.
        let begin = sqlx::raw_sql("BEGIN; SELECT 1 FROM meta").execute(&mut connection).await;
        begin.map_err(unavailable)?;
        let file = options.get_filename();
        let bytes = file.metadata().map_or(0, |metadata| metadata.len());
        let wal = Wal { growth: Growth::of(file).await, bytes_max: bytes.max(WAL_GROWTH_MAX) };
        let schema = migrations::newest(&migrations::sqlite());
        Ok(Self { wal: Some(wal), ..Self::new(connection, name, schema) })
    }

    async fn refuse_long_wal(&self) -> Result<()> {
        let Some(Wal { growth, bytes_max }) = &self.wal else { return Ok(()) };
        if growth.bytes().await <= *bytes_max {
            return Ok(());
        }
        Err(Error::Unavailable(format!(
            "it is read more slowly than others write: the WAL has grown by {} MiB meanwhile",
            bytes_max >> 20
        )))
    }
}

/// Opens a database of this version of Orlop or an earlier one. Returns its schema as well.
async fn open(name: &str, options: SqliteConnectOptions) -> Result<(SqliteConnection, i64)> {
    let file = options.get_filename().to_owned();
    let refused = |what: &str, error: sqlx::Error| {
        if is_damage(&error) {
            Error::Corrupt(format!("{name}: {error}"))
        } else {
            Error::Open(format!("{what}: {error}{}", disk_hint(&error, &file)))
        }
    };
    let mut connection = options
        .disable_statement_logging()
        .connect()
        .await
        .map_err(|error| refused(&format!("cannot open {name}"), error))?;
    let versions: Vec<i64> = match sqlx::query_scalar(migrations::VERSIONS).fetch_all(&mut connection).await {
        Ok(versions) => versions,
        Err(error) => {
            if has_kines_table(&mut connection).await {
                return Err(Error::Open(format!(
                    "{name} is a database of kine; fill one of Orlop from it with orlop import kine --from {name}"
                )));
            }
            let journal = journal_of(&file);
            // Of a file that exists, this means those that SQLite makes beside it.
            return Err(if has_code(&error, CODE_CANNOT_OPEN) {
                let why = "it has a WAL, and its folder is not writable; copy the file and its WAL to another folder";
                refused(&format!("cannot open {name}: {why}"), error)
            } else if has_code(&error, CODE_READ_ONLY) && journal.exists() {
                // SQLite first rolls back the transaction that was interrupted, and this connection cannot write.
                Error::Open(format!(
                    "cannot read {name} yet: a start was interrupted and left {}, which belongs to the database; start the \
                     server once, which completes it",
                    journal.display()
                ))
            } else if [CODE_IO, CODE_FULL, CODE_BUSY].iter().any(|code| has_code(&error, *code)) {
                refused(&format!("cannot open {name}"), error)
            } else {
                refused(&format!("{name} is not an Orlop database"), error)
            });
        }
    };
    let schema = check_schema(name, &versions, &migrations::sqlite())?;
    Ok((connection, schema))
}

/// Returns whether a database file has neither a WAL nor a journal. SQLite may create a WAL and a shared-memory file when
/// it reads a database; the option immutable prevents that, and is possible only for such a file.
pub(crate) fn may_be_immutable(file: &Path) -> bool {
    !has_wal(file) && !with_suffix(file, "-shm").exists() && !journal_of(file).exists()
}

/// Returns the rollback journal of a database file. One that exists while no process writes is that of a transaction that a
/// crash interrupted, such as the change to WAL mode in the first start on a restored file.
pub(super) fn journal_of(file: &Path) -> PathBuf {
    with_suffix(file, "-journal")
}

pub(super) fn has_wal(file: &Path) -> bool {
    with_suffix(file, "-wal").metadata().is_ok_and(|metadata| metadata.len() > 0)
}

#[async_trait]
impl ReadLog for SqliteView {
    async fn meta(&self) -> Result<Meta> {
        read::meta(&mut *self.connection.lock().await).await
    }

    async fn auth(&self) -> Result<AuthState> {
        if self.schema < auth::SCHEMA {
            return Ok(AuthState::default());
        }
        read::auth(&mut *self.connection.lock().await).await
    }

    async fn replay(&self, from: Revision, visit: &mut Visit<'_>) -> Result<Meta> {
        read::replay_view(&mut *self.connection.lock().await, from, visit).await
    }

    async fn changes(&self, from: Revision, to: Revision, range: &KeyRange, prev: WithPrev) -> Result<Page> {
        self.refuse_long_wal().await?;
        read::changes(&mut *self.connection.lock().await, from, to, range, prev).await
    }
}

#[cfg(test)]
mod tests {
    use orlop_core::log::Log as _;

    use super::*;
    use crate::sqlite::SqliteLog;

    #[tokio::test]
    async fn view_has_the_newest_schema() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.expect("a database");
        let view = SqliteView::now(&log.options, &log.identity).await.expect("a view");
        let versions: Vec<i64> = sqlx::query_scalar(migrations::VERSIONS)
            .fetch_all(&mut *view.connection.lock().await)
            .await
            .expect("the versions");
        assert_eq!(versions.last(), Some(&view.schema));
    }

    /// The first start on a restored file changes its mode from a rollback journal to a WAL.
    #[tokio::test]
    async fn interrupted_start_is_named_and_completed_by_the_next_one() {
        let folder = tempfile::tempdir().expect("a folder");
        let [made, file, crashed] = ["made.db", "orlop.db", "crashed.db"].map(|name| folder.path().join(name));
        let log = SqliteLog::open(&made).await.expect("a database");
        let cluster_id = log.meta().await.expect("facts").cluster_id;
        log.close(&[]).await;
        // No connection to the copy exists: one would keep its mode from being changed.
        std::fs::copy(&made, &file).expect("a copy");
        let mut connection = SqliteConnectOptions::new().filename(&file).connect().await.expect("a connection");
        // With a small cache, SQLite syncs the journal and writes to the file before the transaction ends.
        const INTERRUPTED: &str = "PRAGMA journal_mode = DELETE; PRAGMA cache_size = 1; BEGIN; \
            CREATE TABLE more AS WITH RECURSIVE n(i) AS (SELECT 1 UNION ALL SELECT i + 1 FROM n WHERE i < 1000) \
            SELECT i, randomblob(1000) AS filler FROM n";
        sqlx::raw_sql(INTERRUPTED).execute(&mut connection).await.expect("a transaction");
        std::fs::copy(&file, &crashed).expect("a copy");
        std::fs::copy(journal_of(&file), journal_of(&crashed)).expect("a copy");
        let error = SqliteView::of_database(&crashed).await.err().expect("the view is refused").to_string();
        let expected = format!("a start was interrupted and left {}", journal_of(&crashed).display());
        assert!(error.contains(&expected) && error.contains("start the server once"), "{error}");
        let log = SqliteLog::open(&crashed).await.expect("the start completes it");
        assert_eq!(log.meta().await.expect("facts").cluster_id, cluster_id);
        let view = SqliteView::of_database(&crashed).await.expect("a view");
        assert_eq!(view.meta().await.expect("facts").cluster_id, cluster_id);
    }

    #[tokio::test]
    async fn view_ends_when_the_wal_has_grown() {
        let folder = tempfile::tempdir().expect("a folder");
        let log = SqliteLog::open(&folder.path().join("orlop.db")).await.expect("a database");
        let mut view = SqliteView::now(&log.options, &log.identity).await.expect("a view");
        for (grown, is_readable) in [(0, true), (1, false)] {
            let growth = Growth::of(log.options.get_filename()).await;
            let wal = growth.file.clone();
            view.wal = Some(Wal { growth, bytes_max: 0 });
            let bytes = wal.metadata().expect("a WAL").len();
            let file = std::fs::OpenOptions::new().write(true).open(&wal).expect("a WAL");
            file.set_len(bytes + grown).expect("it can grow");
            let read = view.changes(Revision(1), Revision(2), &KeyRange::all(), WithPrev::No).await;
            assert_eq!(read.is_ok(), is_readable, "{grown}");
        }
    }
}
