//! The length of the WAL's file.
//!
//! While a file grows, each sync also waits for the file system's journal, and so for whatever else is written to the disk
//! (docs/adr/0001). So the file is given its blocks before the first write, and keeps them; what lies behind the WAL's last
//! frame SQLite takes for nothing.

use std::{fs::OpenOptions, io, path::Path};

use rustix::fs::{FallocateFlags, fallocate};

use super::load::with_suffix;

/// A WAL is checkpointed to its end beyond 32 MiB ([`super::checkpoint`]), and written to meanwhile.
const FILE_BYTES: u64 = 48 << 20;
/// Bytes that the file keeps when it is written from its start again; one large transaction may make it longer.
pub(super) const FILE_BYTES_MAX: &str = "67108864";

/// Makes the WAL's file of a database as long as it usually gets, where the file system can do so without writing.
///
/// # Errors
///
/// If there is no room, or the file cannot be opened; then it is as it was.
pub(super) fn lengthen(database: &Path) -> io::Result<()> {
    let file = OpenOptions::new().write(true).open(with_suffix(database, "-wal"))?;
    match fallocate(&file, FallocateFlags::empty(), 0, FILE_BYTES) {
        Ok(()) => file.sync_all(),
        Err(rustix::io::Errno::OPNOTSUPP) => Ok(()),
        Err(error) => Err(error.into()),
    }
}
