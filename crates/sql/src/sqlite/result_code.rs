//! The result codes of SQLite's errors, whichever crate reports them.

use crate::error::describe;

// Primary result codes of SQLite: the low byte of its codes.
pub(super) const CODE_ERROR: i32 = 1;
pub(super) const CODE_BUSY: i32 = 5;
pub(super) const CODE_LOCKED: i32 = 6;
pub(super) const CODE_NO_MEMORY: i32 = 7;
pub(super) const CODE_IO: i32 = 10;
pub(super) const CODE_CORRUPT: i32 = 11;
pub(super) const CODE_FULL: i32 = 13;
pub(super) const CODE_CANNOT_OPEN: i32 = 14;
pub(super) const CODE_NOT_A_DATABASE: i32 = 26;

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
