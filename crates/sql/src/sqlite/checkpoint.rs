//! Checkpoints: copies the WAL into the database file, concurrently with writes.
//!
//! A passive checkpoint copies committed pages without blocking writes. SQLite restarts the WAL at the first write
//! after all of it was copied. Under continuous load, a passive checkpoint never copies the last pages, so the WAL
//! grows. When it is longer than [`WAL_PAGES_MAX`], another passive checkpoint runs while writes are blocked. It copies
//! only the pages that were written during the previous checkpoint.
//!
//! SQLite syncs the database file only in the checkpoint that copies the last page. It would sync everything that the
//! others copied, while writes are blocked. Therefore each checkpoint syncs the file here (docs/adr/0001).
//!
//! If that sync fails, pages may be lost that SQLite will not copy again, because Linux marks them as clean. Then the
//! process ends. The next one rebuilds the index of the WAL, and so copies all of it.
//!
//! While somebody reads an old state of the database, SQLite cannot restart the WAL, which grows without a limit. The log's own
//! reads end early; those of another process do not, so a long WAL is logged ([`LongWal`]).
//!
//! If the disk is full, pages that are new in the WAL cannot be copied, and SQLite cannot restart the WAL. Then the log
//! refuses puts, and the deletion of rows does not make the WAL longer, until a checkpoint has succeeded.
//!
//! If a checkpoint finds that the database file is damaged, for example because a copy was written over it, the next start
//! could not read what is put from then on. The log refuses puts until the end of the process, and the store raises an alarm.

use std::{
    fs::File,
    io,
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    time::Duration,
};

use sqlx::{Connection as _, Row as _, SqliteConnection};
use tokio::{
    sync::{Mutex, Notify},
    task::{JoinHandle, spawn_blocking},
    time::timeout,
};
use tracing::warn;

use super::{
    identity::{Identity, Loss},
    integrity::{Damage, unreadable},
    load::with_suffix,
    result_code::{CODE_FULL, has_code},
    wal,
    writer::Writer,
};
use crate::Durability;
use orlop_core::{
    log::Error,
    log_limit::LogLimit,
    supervise::{disk_failed, vital},
    types::{Change, EncodedKv},
};

/// Approximate number of bytes written to the WAL between two checkpoints. A commit waits while the disk syncs these
/// bytes in the database file.
const CHECKPOINT_BYTES: usize = 1 << 20;
/// Approximate bytes of a row in the WAL in addition to key and value. A purged row counts as this number of bytes.
const ROW_BYTES: usize = 64;
/// Approximate bytes of a commit in the WAL in addition to its rows. A commit writes whole pages; usually the first and
/// the last contain mostly older rows.
const COMMIT_BYTES: usize = 8 << 10;
/// Length of the WAL above which a checkpoint runs while writes are blocked, in pages of 4 KiB (32 MiB).
const WAL_PAGES_MAX: i64 = 8_192;
/// Length of the WAL above which the log says that SQLite cannot reuse it.
const LONG_WAL_BYTES: u64 = 256 << 20;
/// Maximum time between two checkpoints if the WAL grows slowly, and between two looks at the database file.
const IDLE_INTERVAL: Duration = Duration::from_secs(5);
/// The same while the disk is full, because puts wait for the next one.
const FULL_INTERVAL: Duration = Duration::from_secs(1);
/// Minimum interval between messages about failed checkpoints. Under load they are tried again many times a second.
const FAILURE_LOG_INTERVAL: Duration = Duration::from_secs(5);
/// Maximum time to wait for each step of a last checkpoint, before the process ends.
const LAST_STEP_MAX: Duration = Duration::from_secs(10);
const SYNC_FAILED: &str = "cannot sync the database file; see the kernel log. The process exits, because the kernel may have \
                           discarded pages: the next start writes them again from the WAL";

pub(super) struct Checkpointer {
    shared: Arc<Shared>,
    task: Mutex<Option<JoinHandle<()>>>,
}

struct Shared {
    /// Approximate number of bytes written to the WAL since the last checkpoint began.
    pending_bytes: AtomicUsize,
    wake: Notify,
    stop: Notify,
    /// While checkpoints fail because the disk is full, the length that the WAL may have; otherwise 0.
    wal_bytes_max: AtomicU64,
    /// Whether a checkpoint has found that the database file is damaged.
    has_found_damage: AtomicBool,
    damage: Arc<Damage>,
    /// To sync the database file; `None` if nothing is synced. It must not be closed before the connections that write:
    /// that would release the locks that they have on the file, because POSIX locks belong to a process and not to a
    /// descriptor.
    database: Option<File>,
    /// The index of the WAL. The same applies to it, and to all connections.
    _index: File,
}

impl Checkpointer {
    /// Starts the task.
    ///
    /// # Errors
    ///
    /// If the database file or the index of the WAL cannot be opened.
    pub(super) fn start(
        connection: SqliteConnection,
        writer: &Arc<Writer>,
        identity: &Arc<Identity>,
        damage: &Arc<Damage>,
        file: &Path,
        durability: Durability,
    ) -> io::Result<Self> {
        let database = match durability {
            Durability::Synced => Some(File::open(file)?),
            Durability::Unsynced => None,
        };
        let index = wal::open_index(file)?;
        if let Err(error) = wal::preallocate_index(&index) {
            let database = file.display();
            warn!(%error, %database, "cannot preallocate the index of the WAL; a full disk may stop compactions and starts");
        }
        let shared = Arc::new(Shared {
            pending_bytes: AtomicUsize::new(0),
            wake: Notify::new(),
            stop: Notify::new(),
            wal_bytes_max: AtomicU64::new(0),
            has_found_damage: AtomicBool::new(false),
            damage: Arc::clone(damage),
            database,
            _index: index,
        });
        let work = run(Arc::clone(&shared), Arc::clone(writer), connection, Arc::clone(identity), file.to_owned());
        let task = vital("the checkpointer", work);
        Ok(Self { shared, task: Mutex::new(Some(task)) })
    }

    pub(super) fn appended(&self, changes: &[Change]) {
        let bytes = changes.iter().map(|change| ROW_BYTES + change.kv().map_or(change.key.len(), EncodedKv::len));
        self.add(COMMIT_BYTES + bytes.sum::<usize>());
    }

    pub(super) fn purged(&self, rows: usize) {
        self.add(COMMIT_BYTES + rows * ROW_BYTES);
    }

    /// Returns the length that the WAL may have while checkpoints fail because the disk is full. Space that becomes free is
    /// for the checkpoint.
    pub(super) fn wal_bytes_max(&self) -> Option<u64> {
        Some(self.shared.wal_bytes_max.load(Ordering::Relaxed)).filter(|bytes| *bytes > 0)
    }

    pub(super) fn has_found_damage(&self) -> bool {
        self.shared.has_found_damage.load(Ordering::Relaxed)
    }

    fn add(&self, bytes: usize) {
        if self.shared.pending_bytes.fetch_add(bytes, Ordering::Relaxed) + bytes >= CHECKPOINT_BYTES {
            self.shared.wake.notify_one();
        }
    }

    /// Runs a last checkpoint and ends the task.
    pub(super) async fn finish(&self) {
        self.shared.stop.notify_one();
        if let Some(task) = self.task.lock().await.take()
            && let Err(error) = task.await
        {
            warn!(%error, "checkpoint task failed");
        }
    }
}

// The parameters are dropped in reverse order: the connection before the descriptor of its file in `shared`.
async fn run(
    shared: Arc<Shared>,
    writer: Arc<Writer>,
    mut connection: SqliteConnection,
    identity: Arc<Identity>,
    file: PathBuf,
) {
    let mut stopping = false;
    let mut interval = IDLE_INTERVAL;
    let mut long_wal = LongWal::new(LONG_WAL_BYTES);
    let failures = LogLimit::every(FAILURE_LOG_INTERVAL);
    while !stopping {
        tokio::select! {
            () = shared.wake.notified() => {}
            () = tokio::time::sleep(interval) => {}
            () = shared.stop.notified() => stopping = true,
            () = identity.found() => {}
        }
        // Also if nothing was written: the next write would be lost.
        if let Some(loss) = identity.loss_async().await {
            end_process(&loss, &identity, &mut connection, &writer).await;
        }
        if shared.pending_bytes.swap(0, Ordering::Relaxed) == 0 {
            continue;
        }
        let done = checkpoint(&mut connection, &writer, &shared).await;
        let lacks_space = done.as_ref().is_err_and(|error| has_code(error, CODE_FULL));
        shared.note_space(lacks_space, &file).await;
        interval = if lacks_space { FULL_INTERVAL } else { IDLE_INTERVAL };
        match done {
            Ok(progress) => long_wal.look(progress, &file),
            Err(error) => {
                if failures.count().is_some() {
                    warn!(%error, "checkpoint failed; trying again");
                }
                shared.pending_bytes.fetch_add(1, Ordering::Relaxed);
                shared.note_damage(&unreadable(error));
            }
        }
    }
    if let Err(error) = connection.close().await {
        warn!(%error, "cannot close the connection for checkpoints");
    }
}

impl Shared {
    /// Records whether a checkpoint lacked space. The WAL may have the length that it has at the first such checkpoint: its
    /// file stays long after a long read.
    async fn note_space(&self, lacks_space: bool, file: &Path) {
        if !lacks_space {
            self.wal_bytes_max.store(0, Ordering::Relaxed);
        } else if self.wal_bytes_max.load(Ordering::Relaxed) == 0 {
            let bytes = wal::file_bytes(file).await.max(wal::FILE_BYTES);
            self.wal_bytes_max.store(bytes, Ordering::Relaxed);
        }
    }

    /// Takes note of the error of a checkpoint, if it is damage.
    fn note_damage(&self, error: &Error) {
        if matches!(error, Error::Corrupt(_)) {
            self.has_found_damage.store(true, Ordering::Relaxed);
            self.damage.see(error);
        }
    }
}

/// Copies the WAL into the database file, whatever their names are now, empties the WAL, and ends the process. The next process
/// may find the WAL and its index beside another database, which it would damage: a WAL that cannot be emptied, because somebody
/// reads it, gets another name. No write is acknowledged meanwhile.
async fn end_process(loss: &Loss, identity: &Identity, connection: &mut SqliteConnection, writer: &Writer) -> ! {
    let _blocked = timeout(LAST_STEP_MAX, writer.block()).await;
    let truncate = sqlx::query_scalar::<_, bool>("PRAGMA wal_checkpoint(TRUNCATE)").fetch_one(connection);
    // Its first column says whether it could not wait for the readers any longer.
    let is_empty = timeout(LAST_STEP_MAX, truncate).await.is_ok_and(|is_busy| is_busy.is_ok_and(|is_busy| !is_busy));
    if loss.is_of_database() {
        match identity.leave_name(is_empty) {
            Ok(Some(wal)) => warn!(
                wal = %wal.display(),
                "the WAL, which contains the last writes to the database file that was moved away, has another name now: before \
                 you use that file, rename the WAL to the file's name with -wal"
            ),
            // It is empty, or was moved with the database.
            Ok(None) => {}
            Err(error) => warn!(
                %error,
                "cannot rename the WAL or remove its index, which belong to the database file that was moved away: remove \
                 orlop.db-wal and orlop.db-shm before you start a server on another file"
            ),
        }
    }
    loss.end_process()
}

/// What a checkpoint has found, in pages; negative if another process makes one.
#[derive(Clone, Copy)]
struct Progress {
    wal: i64,
    /// Pages of the WAL that are in the database file.
    copied: i64,
}

/// Logs that SQLite cannot reuse the WAL, each time when it is twice as long.
struct LongWal {
    bytes_min: u64,
    /// The length above which the next message is due.
    next_above: u64,
}

impl LongWal {
    fn new(bytes_min: u64) -> Self {
        Self { bytes_min, next_above: bytes_min }
    }

    fn look(&mut self, progress: Progress, file: &Path) {
        if let Some(bytes) = self.due(progress) {
            warn!(
                "{} has {} MiB and cannot be reused, because a snapshot, a check or another process reads the database",
                with_suffix(file, "-wal").display(),
                bytes >> 20
            );
        }
    }

    /// Returns the length of the WAL if a message is due. If everything was copied, the next write reuses the WAL or a reader
    /// has just begun.
    fn due(&mut self, Progress { wal, copied }: Progress) -> Option<u64> {
        let bytes = u64::try_from(wal).ok()? * wal::FRAME_BYTES;
        if bytes <= self.bytes_min {
            self.next_above = self.bytes_min;
        }
        if copied >= wal || bytes <= self.next_above {
            return None;
        }
        self.next_above = bytes.saturating_mul(2);
        Some(bytes)
    }
}

async fn checkpoint(
    connection: &mut SqliteConnection,
    writer: &Writer,
    shared: &Arc<Shared>,
) -> sqlx::Result<Progress> {
    let progress = passive(connection, shared).await?;
    if progress.wal <= WAL_PAGES_MAX {
        return Ok(progress);
    }
    // Another checkpoint without blocking writes, so that the last one copies and syncs only a few pages.
    passive(connection, shared).await?;
    let guard = writer.block().await;
    let progress = passive(connection, shared).await?;
    drop(guard);
    Ok(progress)
}

/// Runs a passive checkpoint and syncs the database file.
async fn passive(connection: &mut SqliteConnection, shared: &Arc<Shared>) -> sqlx::Result<Progress> {
    let copied = sqlx::query("PRAGMA wal_checkpoint(PASSIVE)").fetch_one(&mut *connection).await;
    // Also after an error, which may be that of a sync of this file.
    let shared = Arc::clone(shared);
    let synced = spawn_blocking(move || shared.database.as_ref().map_or(Ok(()), File::sync_data));
    // Syncing does not panic, so an error of the task means that the runtime ends.
    if let Err(error) = synced.await.map_err(|error| sqlx::Error::Io(error.into()))? {
        disk_failed(&error, SYNC_FAILED);
    }
    let copied = copied?;
    Ok(Progress { wal: copied.try_get(1)?, copied: copied.try_get(2)? })
}

#[cfg(test)]
mod tests {
    use std::fs::OpenOptions;

    use orlop_core::{
        log::{
            Alarm, AlarmChange, AlarmKind, Append, Appended, Cause, Error, FactChange, Log as _, ReadLog as _, Reclaim,
            Result,
        },
        types::{ChangeKind, Key, Revision, RowId, Version},
    };
    use sqlx::{ConnectOptions as _, sqlite::SqliteConnectOptions};

    use super::*;
    use crate::sqlite::SqliteLog;

    async fn put(log: &SqliteLog, value: &[u8]) {
        assert_eq!(try_put(log, value).await.expect("a put"), Appended::Done);
    }

    async fn try_put(log: &SqliteLog, value: &[u8]) -> Result<Appended> {
        let expected = log.meta().await.expect("facts").position;
        let row = RowId::new(Revision(expected.head.0 + 1), 0);
        let version = Version { row, create_revision: row.revision, version: 1 };
        let (key, kind) = (Key::from(b"k".to_vec()), ChangeKind::put(EncodedKv::new(b"k", version, value, None)));
        let changes = &[Change { row, key, kind, prev: None, prev_lease: None }];
        let append = Append { expected, changes, reads: None, leases: &[], compact: None, fact: None, auth: None };
        log.append(append).await
    }

    #[tokio::test]
    async fn wal_that_another_process_reads_is_reported_whenever_it_is_twice_as_long() {
        const BYTES_MIN: u64 = 64 << 10;
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("orlop.db");
        let log = SqliteLog::open(&file).await.expect("a database");
        let mut connection = log.options.connect().await.expect("a connection");
        let mut other = SqliteConnectOptions::new().filename(&file).read_only(true).connect().await.expect("it opens");
        let mut long_wal = LongWal::new(BYTES_MIN);
        for (state, reports_min, reports_max) in
            [("SELECT 1", 0, 0), ("BEGIN; SELECT 1 FROM meta", 3, 5), ("ROLLBACK", 0, 0)]
        {
            sqlx::raw_sql(state).execute(&mut other).await.expect("a state of the other process");
            let mut reports = Vec::new();
            for _ in 0..40 {
                put(&log, &[0; 8 << 10]).await;
                let progress = checkpoint(&mut connection, &log.writer, &log.checkpointer.shared).await;
                reports.extend(long_wal.due(progress.expect("a checkpoint")));
            }
            assert!((reports_min..=reports_max).contains(&reports.len()), "{state}: {reports:?}");
            assert!(reports.is_sorted_by(|one, next| 2 * one < *next), "{state}: {reports:?}");
            assert!(reports.iter().all(|bytes| *bytes > BYTES_MIN), "{state}: {reports:?}");
        }
        assert_eq!(long_wal.next_above, BYTES_MIN, "the WAL was reused");
    }

    #[tokio::test]
    async fn puts_leave_the_space_of_the_wal_to_deletes_if_a_checkpoint_lacks_space() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("orlop.db");
        let log = SqliteLog::open(&file).await.expect("a database");
        let expected = log.meta().await.expect("facts").position;
        log.checkpointer.shared.note_space(true, &file).await;
        let row = RowId::new(Revision(expected.head.0 + 1), 0);
        let version = Version { row, create_revision: row.revision, version: 1 };
        let (key, put) = (Key::from(b"k".to_vec()), ChangeKind::put(EncodedKv::new(b"k", version, b"v", None)));
        for (kind, is_done) in [(put, false), (ChangeKind::Delete, true)] {
            let changes = &[Change { row, key: key.clone(), kind, prev: None, prev_lease: None }];
            let append = Append { expected, changes, reads: None, leases: &[], compact: None, fact: None, auth: None };
            let done = log.append(append).await;
            assert_eq!(done.is_ok(), is_done, "{done:?}");
            assert!(is_done || matches!(done, Err(Error::Full(_))), "{done:?}");
        }
    }

    /// Such as `cp` of a copy to the name of the file: it truncates the file, which stays the same one.
    #[tokio::test]
    async fn damage_that_a_checkpoint_finds_is_noted_and_refuses_puts() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("orlop.db");
        let log = SqliteLog::open(&file).await.expect("a database");
        let mut connection = log.options.connect().await.expect("a connection");
        put(&log, &[0; 512 << 10]).await;
        let progress = checkpoint(&mut connection, &log.writer, &log.checkpointer.shared).await.expect("a checkpoint");
        assert_eq!(progress.copied, progress.wal);
        let database = OpenOptions::new().write(true).open(&file).expect("a file");
        // The first pages, which the tables begin with, remain.
        database.set_len(256 << 10).expect("a length");
        put(&log, b"acknowledged before the next checkpoint").await;
        log.checkpointer.shared.wake.notify_one();
        timeout(Duration::from_secs(60), log.damaged()).await.expect("the checkpoint finds the damage");
        let refused = try_put(&log, b"it could not be read later").await;
        assert!(matches!(refused, Err(Error::Corrupt(_))), "{refused:?}");

        let alarm = Alarm { member_id: 1, kind: AlarmKind::Corrupt };
        let fact = Some(FactChange::Alarm(AlarmChange::Raise { alarm, cause: Cause::Client }));
        let expected = log.meta().await.expect("facts").position;
        let raise = Append { expected, changes: &[], reads: None, leases: &[], compact: None, fact, auth: None };
        assert_eq!(log.append(raise).await.expect("the alarm can be recorded"), Appended::Done);
    }

    #[tokio::test]
    async fn deletions_leave_the_space_to_a_checkpoint_that_lacks_it() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("orlop.db");
        let log = SqliteLog::open(&file).await.expect("a database");
        let wal_file = OpenOptions::new().write(true).open(with_suffix(&file, "-wal")).expect("a WAL");
        let reclaim = async || log.reclaim(Reclaim::Rows { rows: &[], compacted: Revision(1), server: 0 }).await;
        // The lengths of the WAL at the first checkpoint that fails, and at the deletion. No checkpoint has anything to do.
        for (at_failure, now, is_done) in [(0, 0, true), (0, 1, false), (9, 9, true), (9, 10, false)] {
            let set_length = |bytes| wal_file.set_len(wal::FILE_BYTES + bytes).expect("a length");
            set_length(at_failure);
            log.checkpointer.shared.note_space(true, &file).await;
            set_length(now);
            // The first length counts.
            log.checkpointer.shared.note_space(true, &file).await;
            let done = reclaim().await;
            assert_eq!(done.is_ok(), is_done, "{at_failure}, {now}: {done:?}");
            log.checkpointer.shared.note_space(false, &file).await;
            reclaim().await.expect("there is space");
        }
    }
}
