//! The length of the WAL's file.
//!
//! While a file grows, each sync also waits for the file system's journal, and so for other writes to the disk
//! (docs/adr/0001). So the file's blocks are allocated before the first write and kept; SQLite ignores the space after
//! the WAL's last frame.

use std::{fs::OpenOptions, io, path::Path};

use rustix::fs::{FallocateFlags, fallocate};

use super::load::with_suffix;

/// A WAL is checkpointed to its end beyond 32 MiB ([`super::checkpoint`]), and grows meanwhile.
const FILE_BYTES: u64 = 48 << 20;
/// Bytes that the file keeps when it is restarted; a large transaction may make it longer.
pub(super) const FILE_BYTES_MAX: &str = "67108864";

/// Allocates the WAL's file at its usual length, if the file system can do so without writing.
///
/// # Errors
///
/// If the disk is full or the file cannot be opened; it is then unchanged.
pub(super) fn preallocate(database: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(with_suffix(database, "-wal"))?;
    match fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES) {
        Ok(()) => file.sync_all(),
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
