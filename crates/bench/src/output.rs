//! Standard output, and the formats that several reports share.

use std::io::{self, ErrorKind, Write as _};

use serde::Serialize;

use crate::error::Error;

/// Prints to standard output. A reader that stops early, such as `head`, is not an error.
pub fn print(text: &str) -> Result<(), Error> {
    let mut stdout = io::stdout().lock();
    match stdout.write_all(text.as_bytes()).and_then(|()| stdout.flush()) {
        Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error.into()),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Returns the value as JSON, with a line feed.
pub fn json_line(value: &impl Serialize) -> Result<String, Error> {
    Ok(serde_json::to_string(value).map_err(io::Error::from)? + "\n")
}

/// Formats with three significant digits below 1,000, without decimals above, with commas between thousands.
pub fn number(value: f64) -> String {
    if value < 1_000.0 {
        let decimals = if value.fract() == 0.0 {
            0
        } else if value < 1.0 {
            3
        } else if value < 10.0 {
            2
        } else {
            usize::from(value < 100.0)
        };
        return format!("{value:.decimals$}");
    }
    let digits = format!("{value:.0}");
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at) % 3 == 0 {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_have_three_digits() {
        for (value, want) in [
            (0.0, "0"),
            (64.0, "64"),
            (0.1234, "0.123"),
            (1.234, "1.23"),
            (12.34, "12.3"),
            (123.4, "123"),
            (999.6, "1000"),
            (1_234.5, "1,234"),
            (1_234_567.0, "1,234,567"),
        ] {
            assert_eq!(number(value), want, "{value}");
        }
    }
}
