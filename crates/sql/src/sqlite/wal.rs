//! The WAL file: preallocation and growth.
//!
//! While a file grows, each sync also waits for the journal of the file system, and so for other writes to the disk
//! (docs/adr/0001). Therefore the blocks of the file are allocated before the first write and are not freed. SQLite
//! ignores the space after the last frame of the WAL.

use std::{
    fs::OpenOptions,
    io,
    path::{Path, PathBuf},
    time::Duration,
};

use rustix::{
    fs::{FallocateFlags, fallocate},
    io::Errno,
};
use tracing::warn;

use super::load::with_suffix;

/// Usual maximum length of the file. When the WAL is longer than 32 MiB, a checkpoint blocks writes, so that SQLite can
/// restart the WAL ([`super::checkpoint`]). Until then the WAL grows further.
const FILE_BYTES: u64 = 48 << 20;
/// Length to which SQLite truncates the file when it restarts the WAL. A large transaction may make the file longer.
pub(super) const FILE_BYTES_MAX: &str = "67108864";

/// Interval at which the length of a growing file is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Allocates the WAL file at its usual maximum length, if the disk has space for it, and syncs the file. A process that was
/// killed before it had synced its last commit may have left it there, and from now on it is read.
///
/// # Errors
///
/// If the file cannot be opened or synced.
pub(super) fn prepare(database: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(with_suffix(database, "-wal"))?;
    match fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES) {
        Ok(()) | Err(Errno::OPNOTSUPP) => {}
        Err(error) => {
            warn!(%error, database = %database.display(), "cannot preallocate the WAL; writes are slower while it grows");
        }
    }
    file.sync_all()
}

/// The growth of a WAL file since a moment.
pub(super) struct Growth {
    file: PathBuf,
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
            grown = length(&self.file).await.saturating_sub(self.bytes_before);
        }
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
    use tokio::time::timeout;

    use super::*;

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
