//! The checksum at the end of a snapshot.

use std::{
    fs::File,
    io::{Read, Seek as _, SeekFrom, Write as _},
    path::Path,
};

use sha2::{Digest as _, Sha256};

use super::{Error, Result, file_error};

/// Length of a SHA-256 checksum in bytes.
const CHECKSUM_BYTES: u64 = 32;
/// The size of a database file is a multiple of this number, in SQLite and in etcd's bbolt. The remainder shows whether
/// a checksum follows.
const BLOCK_BYTES: u64 = 512;
/// The first bytes of a SQLite database.
const SQLITE_MAGIC: &[u8] = b"SQLite format 3\0";
/// The magic number of bbolt, at offset 16, in little-endian order.
const BBOLT_MAGIC: &[u8] = &[0xed, 0xda, 0x0c, 0xed];

/// Whether a snapshot must have a valid checksum.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum HashCheck {
    Verify,
    /// For a database file that was copied with other tools.
    Skip,
}

/// A reader that computes the checksum of the bytes that are read.
pub struct Hashing<R> {
    reader: R,
    hash: Sha256,
}

impl<R> Hashing<R> {
    pub fn new(reader: R) -> Self {
        Self { reader, hash: Sha256::new() }
    }

    /// Adds bytes that were not read through this reader.
    pub fn update(&mut self, bytes: &[u8]) {
        self.hash.update(bytes);
    }

    pub fn checksum(self) -> Vec<u8> {
        self.hash.finalize().to_vec()
    }
}

impl<R: Read> Read for Hashing<R> {
    fn read(&mut self, buffer: &mut [u8]) -> std::io::Result<usize> {
        let read = self.reader.read(buffer)?;
        self.hash.update(&buffer[..read]);
        Ok(read)
    }
}

/// Appends the checksum to a file.
pub(super) fn append(file: &mut File) -> std::io::Result<()> {
    file.seek(SeekFrom::Start(0))?;
    let mut whole = Hashing::new(&mut *file);
    std::io::copy(&mut whole, &mut std::io::sink())?;
    let checksum = whole.checksum();
    file.write_all(&checksum)
}

/// Checks that a snapshot of Orlop or of etcd is complete.
pub(super) fn verify_received(path: &Path) -> Result<()> {
    let unreadable = |error: std::io::Error| file_error("read", path, &error);
    let file = File::open(path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    if size % BLOCK_BYTES != CHECKSUM_BYTES {
        return Err(Error::File("the received snapshot is truncated: it has no checksum at its end".to_owned()));
    }
    if !checksum_matches(file, size).map_err(unreadable)? {
        return Err(Error::File("the received snapshot is damaged: its checksum does not match".to_owned()));
    }
    Ok(())
}

/// Returns whether the last bytes of a file are the checksum of the others.
fn checksum_matches(mut file: impl Read, size: u64) -> std::io::Result<bool> {
    let mut whole = Hashing::new((&mut file).take(size - CHECKSUM_BYTES));
    std::io::copy(&mut whole, &mut std::io::sink())?;
    let checksum = whole.checksum();
    let mut stored = Vec::new();
    file.read_to_end(&mut stored)?;
    Ok(checksum == stored)
}

/// Checks that a file is a complete snapshot. Returns its size without the checksum, in bytes.
pub(super) fn verify(path: &Path, check: HashCheck) -> Result<u64> {
    let unreadable = |error: std::io::Error| file_error("read", path, &error);
    let name = path.display();
    let mut file = File::open(path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    let mut head = Vec::new();
    (&mut file).take(BLOCK_BYTES).read_to_end(&mut head).map_err(unreadable)?;
    if head.get(16..20) == Some(BBOLT_MAGIC) {
        return Err(Error::File(format!("{name} is a snapshot of etcd; only etcdutl can restore it")));
    }
    if !head.starts_with(SQLITE_MAGIC) {
        return Err(Error::File(format!(
            "{name} is not a snapshot: it does not start with the header of a SQLite database"
        )));
    }
    let has_checksum = size % BLOCK_BYTES == CHECKSUM_BYTES;
    if check == HashCheck::Skip {
        refuse_wal(path)?;
        return Ok(if has_checksum { size - CHECKSUM_BYTES } else { size });
    }
    if !has_checksum {
        return Err(Error::File(format!(
            "{name} has no checksum at its end: it is truncated, or a copy of a database file, which can be used with --skip-hash-check"
        )));
    }
    if !checksum_matches(head.chain(file), size).map_err(unreadable)? {
        return Err(Error::File(format!("{name} is damaged: its checksum does not match")));
    }
    Ok(size - CHECKSUM_BYTES)
}

/// Rejects a copied database file that has a WAL, because the commits in the WAL would be missing.
fn refuse_wal(path: &Path) -> Result<()> {
    let mut wal = path.to_owned();
    wal.as_mut_os_string().push("-wal");
    if !wal.metadata().is_ok_and(|metadata| metadata.len() > 0) {
        return Ok(());
    }
    let (name, wal) = (path.display(), wal.display());
    Err(Error::File(format!(
        "{name} is incomplete: the last commits are in {wal}; move them into the file with: sqlite3 {name} \
         'PRAGMA wal_checkpoint(TRUNCATE)'"
    )))
}
