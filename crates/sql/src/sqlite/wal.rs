//! The WAL file: preallocation and growth.
//!
//! While a file grows, each sync also waits for the journal of the file system, and so for other writes to the disk
//! (docs/adr/0001). Therefore the blocks of the file are allocated before the first write and are not freed. SQLite
//! ignores the space after the last frame of the WAL.

use std::{fs::OpenOptions, io, path::Path, time::Duration};

use rustix::fs::{FallocateFlags, fallocate};

use super::load::with_suffix;

/// Usual maximum length of the file. When the WAL is longer than 32 MiB, a checkpoint blocks writes, so that SQLite can
/// restart the WAL ([`super::checkpoint`]). Until then the WAL grows further.
const FILE_BYTES: u64 = 48 << 20;
/// Length to which SQLite truncates the file when it restarts the WAL. A large transaction may make the file longer.
pub(super) const FILE_BYTES_MAX: &str = "67108864";

/// Interval at which the length of a growing file is looked at.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Allocates the WAL file at its usual maximum length, if the file system supports it.
///
/// # Errors
///
/// If the disk is full or the file cannot be opened. The file is then unchanged.
pub(super) fn preallocate(database: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(with_suffix(database, "-wal"))?;
    match fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES) {
        Ok(()) => file.sync_all(),
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}

/// Waits until the WAL file of `database` has grown by `bytes`.
pub(super) async fn has_grown_by(database: &Path, bytes: u64) {
    let file = with_suffix(database, "-wal");
    let length_max = length(&file).await.saturating_add(bytes);
    while length(&file).await < length_max {
        tokio::time::sleep(LOOK_INTERVAL).await;
    }
}

/// Returns 0 if the file cannot be looked at. A disk that stalls does not delay other tasks.
async fn length(file: &Path) -> u64 {
    let file = file.to_owned();
    let length = tokio::task::spawn_blocking(move || file.metadata().map_or(0, |metadata| metadata.len()));
    length.await.unwrap_or(0)
}
