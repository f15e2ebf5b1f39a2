//! The result codes of SQLite's errors, whichever crate reports them.

use std::path::Path;

use super::wal;
use crate::error::describe;

// Primary result codes of SQLite: the low byte of its codes.
pub(super) const CODE_ERROR: i32 = 1;
pub(super) const CODE_BUSY: i32 = 5;
pub(super) const CODE_LOCKED: i32 = 6;
pub(super) const CODE_NO_MEMORY: i32 = 7;
pub(super) const CODE_READ_ONLY: i32 = 8;
pub(super) const CODE_IO: i32 = 10;
pub(super) const CODE_CORRUPT: i32 = 11;
pub(super) const CODE_FULL: i32 = 13;
pub(super) const CODE_CANNOT_OPEN: i32 = 14;
pub(super) const CODE_NOT_A_DATABASE: i32 = 26;

/// A disk with fewer free bytes is the cause of a failed write: SQLite extends its files by up to this size.
const FULL_DISK_BYTES: u64 = 1 << 20;

/// An error of SQLite with its extended result code.
pub(super) trait ResultCode {
    fn result_code(&self) -> Option<i32>;
    /// Returns the text for an operator.
    fn text(&self) -> String;
}

impl ResultCode for sqlx::Error {
    fn result_code(&self) -> Option<i32> {
        self.as_database_error()?.code()?.parse().ok()
    }

    fn text(&self) -> String {
        describe(self)
    }
}

impl ResultCode for rusqlite::Error {
    fn result_code(&self) -> Option<i32> {
        self.sqlite_error().map(|error| error.extended_code)
    }

    fn text(&self) -> String {
        self.to_string()
    }
}

/// Returns whether an error has this primary result code of SQLite, which is the low byte of the extended code.
pub(super) fn has_code(error: &impl ResultCode, primary: i32) -> bool {
    error.result_code().is_some_and(|code| code & 0xff == primary)
}

/// Returns what to append to the text of an error on a database file, if the disk is the cause.
///
/// SQLite reports a failure of the disk, and not a full one, if it cannot extend the index of the WAL.
pub(super) fn disk_hint(error: &impl ResultCode, file: &Path) -> &'static str {
    let is_failure = has_code(error, CODE_IO);
    if !is_failure && !has_code(error, CODE_FULL) {
        return "";
    }
    if wal::free_bytes(file).is_ok_and(|free| free < FULL_DISK_BYTES) {
        return "; the disk is full";
    }
    if is_failure { "; the disk or its file system failed; see the kernel log" } else { "" }
}
