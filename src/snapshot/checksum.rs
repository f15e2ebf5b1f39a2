//! The checksum at the end of a snapshot.

use std::{fmt::Display, fs::File, io::Read, path::Path};

use sha2::{Digest as _, Sha256};

use super::{Error, Result, file_error};

/// Length of a SHA-256 checksum in bytes.
const CHECKSUM_BYTES: u64 = 32;
/// The size of a database file is a multiple of this number, in SQLite and in etcd's bbolt. The remainder shows whether
/// a checksum follows.
const BLOCK_BYTES: u64 = 512;
/// Bytes of a file that are read at a time.
const READ_BYTES: usize = 1 << 20;
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

/// What a snapshot's database is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Form {
    /// etcd's.
    Etcd,
    /// That of snapshots of Orlop 0.2.0 and before, and of database files.
    Sqlite,
    /// The same, without the checksum that is to be verified.
    BareSqlite,
}

/// Checks that a snapshot of Orlop or of etcd is complete.
pub(super) fn verify_received(path: &Path) -> Result<()> {
    let size = path.metadata().map_err(|error| file_error("read", path, &error))?.len();
    if size % BLOCK_BYTES != CHECKSUM_BYTES {
        return Err(Error::File("the received snapshot is truncated: it has no checksum at its end".to_owned()));
    }
    verify_as("the received snapshot", path)
}

/// Returns whether the last bytes of a file are the checksum of the others.
fn checksum_matches(mut file: impl Read, size: u64) -> std::io::Result<bool> {
    let mut hash = Sha256::new();
    let mut buffer = vec![0; READ_BYTES];
    let mut left = size.saturating_sub(CHECKSUM_BYTES);
    while left > 0 {
        let len = usize::try_from(left).map_or(READ_BYTES, |left| left.min(READ_BYTES));
        file.read_exact(&mut buffer[..len])?;
        hash.update(&buffer[..len]);
        left -= len as u64;
    }
    let mut stored = Vec::new();
    file.read_to_end(&mut stored)?;
    Ok(hash.finalize()[..] == stored)
}

/// Checks the beginning and the size of a snapshot. Returns its form, and its size without the checksum in bytes. A SQLite
/// database without a checksum is left to the caller, who can say more about it.
pub(super) fn examine(path: &Path, check: HashCheck) -> Result<(Form, u64)> {
    let unreadable = |error: std::io::Error| file_error("read", path, &error);
    let name = path.display();
    let file = File::open(path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    let mut head = Vec::new();
    file.take(BLOCK_BYTES).read_to_end(&mut head).map_err(unreadable)?;
    let form = if head.starts_with(SQLITE_MAGIC) { Form::Sqlite } else { Form::Etcd };
    // The first page of a copied database may be damaged, while the second one is valid.
    if form == Form::Etcd && check == HashCheck::Verify && head.get(16..20) != Some(BBOLT_MAGIC) {
        return Err(Error::File(format!("{name} is not a snapshot: it does not start as a database of etcd does")));
    }
    let has_checksum = size % BLOCK_BYTES == CHECKSUM_BYTES;
    if check == HashCheck::Skip {
        if form == Form::Sqlite {
            refuse_wal(path)?;
        }
        return Ok((form, if has_checksum { size - CHECKSUM_BYTES } else { size }));
    }
    match (form, has_checksum) {
        (_, true) => Ok((form, size - CHECKSUM_BYTES)),
        (Form::Sqlite | Form::BareSqlite, false) => Ok((Form::BareSqlite, size)),
        (Form::Etcd, false) => Err(missing(path)),
    }
}

/// Returns the error for a file that ends without a checksum.
pub(super) fn missing(path: &Path) -> Error {
    Error::File(format!(
        "{} has no checksum at its end: it is truncated, or a copy of a database file, which can be used with \
         --skip-hash-check",
        path.display()
    ))
}

/// Checks the checksum of a snapshot that [`examine`] accepted. Reads the whole file.
pub(super) fn verify(path: &Path) -> Result<()> {
    verify_as(path.display(), path)
}

/// Checks the checksum of a file, which an error names as `name`.
fn verify_as(name: impl Display, path: &Path) -> Result<()> {
    let unreadable = |error: std::io::Error| file_error("read", path, &error);
    let file = File::open(path).map_err(unreadable)?;
    let size = file.metadata().map_err(unreadable)?.len();
    match checksum_matches(file, size).map_err(unreadable)? {
        true => Ok(()),
        false => Err(Error::File(format!("{name} is damaged: its checksum does not match"))),
    }
}

/// Rejects a copied database file that has a WAL, because the commits in the WAL would be missing.
fn refuse_wal(path: &Path) -> Result<()> {
    // Beside the file to which a link leads.
    let mut wal = path.canonicalize().map_err(|error| file_error("read", path, &error))?;
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
