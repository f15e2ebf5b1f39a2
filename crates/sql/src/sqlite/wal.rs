//! The WAL file: what an earlier process left, preallocation and growth.
//!
//! While a file grows, each sync also waits for the journal of the file system, and so for other writes to the disk
//! (docs/adr/0001). Therefore the blocks of the file are allocated before the first write and are not freed. SQLite
//! ignores the space after the last frame of the WAL.
//!
//! The index of the WAL, the shared-memory file, also has its space from the start on. Otherwise a full disk would make the
//! space of the WAL useless: SQLite extends the index by 32 KiB for every 4,096 frames, and a start needs the index to read
//! the WAL.

use std::{
    fs::{File, OpenOptions},
    io,
    os::unix::fs::{FileExt as _, MetadataExt as _},
    path::{Path, PathBuf},
    time::Duration,
};

use rusqlite::{Connection, OpenFlags, TransactionBehavior, config::DbConfig};
use rustix::{
    fs::{FallocateFlags, fallocate, statvfs},
    io::Errno,
};

use super::{
    BUSY_TIMEOUT,
    load::with_suffix,
    result_code::{CODE_BUSY, has_code},
    view::has_wal,
};

/// Usual maximum length of the file. When the WAL is longer than 32 MiB, a checkpoint blocks writes, so that SQLite can
/// restart the WAL ([`super::checkpoint`]). Until then the WAL grows further.
pub(super) const FILE_BYTES: u64 = 48 << 20;
/// Free bytes that preallocation leaves on the disk. The server treats a disk with fewer than 4 MiB as full.
pub(super) const MARGIN_BYTES: u64 = 16 << 20;
/// Bytes per block of a file's metadata, whatever the file system.
const BLOCK_BYTES: u64 = 512;
/// Length to which SQLite truncates the file when it restarts the WAL. A large transaction may make the file longer.
pub(super) const FILE_BYTES_MAX: &str = "67108864";
/// Bytes of a frame of the WAL: a header and a page of 4 KiB.
pub(super) const FRAME_BYTES: u64 = 24 + 4_096;
/// Bytes of a block of the index (<https://sqlite.org/walformat.html>).
const INDEX_BLOCK_BYTES: u64 = 32 << 10;
/// Frames of a block of the index. The header of the index takes the place of some frames of the first block.
const INDEX_BLOCK_FRAMES: u64 = 4_096;
const INDEX_HEADER_FRAMES: u64 = 34;
/// Bytes of the index of a WAL of [`FILE_BYTES_MAX`].
const INDEX_BYTES: u64 =
    ((64_u64 << 20) / FRAME_BYTES + INDEX_HEADER_FRAMES).div_ceil(INDEX_BLOCK_FRAMES) * INDEX_BLOCK_BYTES;

/// Bytes that are read and written at a time.
const REWRITE_BYTES: usize = 1 << 20;
/// Interval at which the length of a growing file is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Writes the WAL that an earlier process left again, and syncs it. Call it before a connection writes.
///
/// SQLite reads every complete commit in it, and appends after the last one. The commit may never have been synced, or its
/// sync may have failed; then Linux counts its pages as clean, and another sync would not write them.
///
/// # Errors
///
/// If the file cannot be read, written or synced, or another process writes to the database for too long.
pub(super) async fn rewrite(database: &Path) -> io::Result<()> {
    let database = database.to_owned();
    // A slow disk does not delay other tasks.
    tokio::task::spawn_blocking(move || rewrite_file(&database)).await?
}

fn rewrite_file(database: &Path) -> io::Result<()> {
    if !has_wal(database) {
        return Ok(());
    }
    let _lock = lock_writes(database).map_err(|error| {
        let hint = if has_code(&error, CODE_BUSY) { ": another process writes to the database" } else { "" };
        io::Error::other(format!("cannot lock the WAL: {error}{hint}"))
    })?;
    let file = match OpenOptions::new().read(true).write(true).open(with_suffix(database, "-wal")) {
        // SQLite deletes a WAL beside an empty database.
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(()),
        opened => opened?,
    };
    let (mut piece, mut at) = (vec![0; REWRITE_BYTES], 0);
    loop {
        let read = file.read_at(&mut piece, at)?;
        if read == 0 {
            return file.sync_all();
        }
        file.write_all_at(&piece[..read], at)?;
        at += read as u64;
    }
}

/// Takes SQLite's lock for writes, without which no other process can commit, or restart or truncate the WAL. While the
/// connection is open, no other one is the last, which would delete the WAL. Closing it neither copies nor deletes the WAL.
fn lock_writes(database: &Path) -> rusqlite::Result<Connection> {
    let flags = OpenFlags::SQLITE_OPEN_READ_WRITE | OpenFlags::SQLITE_OPEN_NO_MUTEX;
    let connection = Connection::open_with_flags(database, flags)?;
    connection.busy_timeout(BUSY_TIMEOUT)?;
    connection.set_db_config(DbConfig::SQLITE_DBCONFIG_NO_CKPT_ON_CLOSE, true)?;
    // If this reads a WAL after a crash, it finds the same commits as after the WAL was written again.
    connection.execute_batch("BEGIN IMMEDIATE")?;
    Ok(connection)
}

/// Allocates the WAL file at its usual maximum length, if the file system supports it.
///
/// # Errors
///
/// If the file cannot be opened, another process writes to the database for too long, or less than [`MARGIN_BYTES`] of the
/// disk would remain free. The file then has its previous length.
pub(super) fn preallocate(writer: &mut Connection, database: &Path) -> io::Result<()> {
    let wal = with_suffix(database, "-wal");
    // Another process must not commit before the file has its previous length again.
    let _lock = writer.transaction_with_behavior(TransactionBehavior::Immediate).map_err(io::Error::other)?;
    let file = OpenOptions::new().write(true).open(&wal)?;
    let before = file.metadata()?;
    let missing = FILE_BYTES.saturating_sub(before.blocks() * BLOCK_BYTES);
    if missing > 0 && free_bytes(&wal)? < missing + MARGIN_BYTES {
        return Err(Errno::NOSPC.into());
    }
    match fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES) {
        Ok(()) => file.sync_all(),
        Err(Errno::OPNOTSUPP) => Ok(()),
        Err(error) => {
            // Ext4 keeps the blocks that it has allocated before the disk was full.
            file.set_len(before.len())?;
            Err(error.into())
        }
    }
}

/// Opens the index of the WAL, after a connection has: the first connection of all processes truncates the file.
///
/// Do not close it before the last connection: that would release SQLite's locks on the file, because POSIX locks belong to
/// a process and not to a descriptor.
///
/// # Errors
///
/// If the file cannot be opened.
pub(super) fn open_index(database: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).open(with_suffix(database, "-shm"))
}

/// Allocates the index of the WAL at the length that it has with the longest WAL, if the file system supports it.
///
/// SQLite may use the file meanwhile: it maps a block at a time, extends the file only if it is shorter than that, and clears
/// a block before its first entry. Do not make the file longer without its blocks, nor shorter: SQLite writes to the mapped
/// memory, and the process would die of SIGBUS.
///
/// # Errors
///
/// If the disk is full. SQLite then extends the file itself.
pub(super) fn preallocate_index(index: &File) -> io::Result<()> {
    match fallocate(index, FallocateFlags::empty(), 0, INDEX_BYTES) {
        Ok(()) | Err(Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Returns the length of the WAL of a database; 0 if it cannot be looked at.
pub(super) async fn file_bytes(database: &Path) -> u64 {
    length(&with_suffix(database, "-wal")).await
}

/// Returns the bytes that this process may still write to the disk of a file.
pub(super) fn free_bytes(file: &Path) -> io::Result<u64> {
    let disk = statvfs(file)?;
    Ok(disk.f_bavail.saturating_mul(disk.f_frsize))
}

/// The growth of a WAL file since a moment.
pub(super) struct Growth {
    pub(super) file: PathBuf,
    bytes_before: u64,
}

impl Growth {
    /// Begins now.
    pub(super) async fn of(database: &Path) -> Self {
        let file = with_suffix(database, "-wal");
        Self { bytes_before: length(&file).await, file }
    }

    /// Waits until the file has grown by `bytes`.
    pub(super) async fn reach(&self, bytes: u64) {
        let mut grown = 0;
        while grown < bytes {
            tokio::time::sleep(LOOK_INTERVAL).await;
            grown = self.bytes().await;
        }
    }

    pub(super) async fn bytes(&self) -> u64 {
        length(&self.file).await.saturating_sub(self.bytes_before)
    }
}

/// Returns 0 if the file cannot be looked at. A disk that stalls does not delay other tasks.
async fn length(file: &Path) -> u64 {
    let file = file.to_owned();
    let length = tokio::task::spawn_blocking(move || file.metadata().map_or(0, |metadata| metadata.len()));
    length.await.unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use std::time::SystemTime;

    use orlop_core::log::Log as _;
    use sqlx::{ConnectOptions as _, sqlite::SqliteConnectOptions};
    use tokio::time::timeout;

    use super::*;
    use crate::sqlite::SqliteLog;

    /// Otherwise a commit that the other process makes meanwhile could be lost, for example one of Litestream.
    #[tokio::test]
    async fn wal_is_not_written_again_while_another_process_writes() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = folder.path().join("orlop.db");
        SqliteLog::open(&database).await.expect("a database").close(&[]).await;
        let mut other = SqliteConnectOptions::new().filename(&database).connect().await.expect("a connection");
        sqlx::raw_sql("PRAGMA user_version = 1; BEGIN IMMEDIATE")
            .execute(&mut other)
            .await
            .expect("a commit and a lock");
        let wal = File::options().write(true).open(with_suffix(&database, "-wal")).expect("there is a WAL");
        wal.set_modified(SystemTime::UNIX_EPOCH).expect("a time can be set");
        let mut opening = Box::pin(SqliteLog::open(&database));
        assert!(timeout(Duration::from_millis(500), &mut opening).await.is_err(), "the start waits for the lock");
        let modified = wal.metadata().and_then(|metadata| metadata.modified()).expect("there is a WAL");
        assert_eq!(modified, SystemTime::UNIX_EPOCH, "the WAL was written");
        sqlx::raw_sql("ROLLBACK").execute(&mut other).await.expect("the lock is released");
        let opened = timeout(Duration::from_secs(60), opening).await.expect("the start ends");
        assert!(opened.is_ok(), "{:?}", opened.err());
    }

    #[test]
    fn index_has_a_block_for_each_4096_frames() {
        let frames_max: u64 = FILE_BYTES_MAX.parse::<u64>().expect("a number") / FRAME_BYTES;
        let (first, others) = (INDEX_BLOCK_FRAMES - INDEX_HEADER_FRAMES, INDEX_BLOCK_FRAMES);
        let frames = first + (INDEX_BYTES / INDEX_BLOCK_BYTES - 1) * others;
        assert!((frames_max..frames_max + others).contains(&frames), "{frames} frames of {frames_max}");
    }

    #[tokio::test(start_paused = true)]
    async fn growth_counts_from_its_beginning() {
        let folder = tempfile::tempdir().expect("a folder");
        let database = folder.path().join("orlop.db");
        let write = |bytes| std::fs::write(with_suffix(&database, "-wal"), vec![0; bytes]).expect("a WAL");
        write(1_000);
        let growth = Growth::of(&database).await;
        for (length, is_reached) in [(1_000, false), (1_099, false), (1_100, true), (10, false)] {
            write(length);
            let reached = timeout(10 * LOOK_INTERVAL, growth.reach(100)).await;
            assert_eq!(reached.is_ok(), is_reached, "{length} bytes");
        }
    }
}
