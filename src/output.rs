//! Output of commands.

use std::io::{ErrorKind, Write as _};

use clap::ValueEnum;

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Format {
    /// Text for people
    Simple,
    /// JSON
    Json,
}

/// Whether somebody reads standard output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Reader {
    Present,
    Gone,
}

/// Writes to standard output. A reader that stops early, such as `head`, is not an error.
///
/// # Errors
///
/// If standard output cannot be written.
pub fn print(text: &[u8]) -> std::io::Result<()> {
    print_to_reader(text).map(|_| ())
}

/// Like [`print()`], for a command that ends when nobody reads its output.
///
/// # Errors
///
/// The same.
pub fn print_to_reader(text: &[u8]) -> std::io::Result<Reader> {
    let mut stdout = std::io::stdout().lock();
    match stdout.write_all(text).and_then(|()| stdout.flush()) {
        Ok(()) => Ok(Reader::Present),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Reader::Gone),
        Err(error) => Err(error),
    }
}
