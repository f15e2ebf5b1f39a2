//! Output of commands.

use std::{
    fmt::Display,
    io::{ErrorKind, Write as _},
};

use clap::ValueEnum;
use orlop_objects::without_hazards;

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

/// Returns JSON that `serde_json` writes in one line, with a line break. Its strings, which may come from clients, cannot
/// control a terminal or the direction of text.
pub fn json_line(json: &impl Display) -> String {
    without_hazards(json.to_string()) + "\n"
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

#[cfg(test)]
mod tests {
    use orlop_objects::is_hazard;
    use serde_json::{Value, json};

    use super::*;

    #[test]
    fn json_contains_no_hazards_and_is_the_same_value() {
        let hazards: String = ('\0'..=char::MAX).filter(|c| is_hazard(*c)).collect();
        assert!(hazards.contains('\u{9b}') && hazards.contains('\u{202e}'));
        let value = json!({ "name": hazards, hazards: ["plain \u{e9} \u{1f600}", 1, null] });
        let line = json_line(&value);
        let text = line.strip_suffix('\n').unwrap();
        assert!(!text.contains(is_hazard), "{text:?}");
        assert_eq!(serde_json::from_str::<Value>(text).unwrap(), value);
        assert!(text.contains("plain \u{e9} \u{1f600}"), "{text:?}");
    }
}
