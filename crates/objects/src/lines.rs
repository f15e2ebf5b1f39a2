//! The lines that a value is shown as, and their bounds. Every line passes [`Lines::push`], which escapes what could
//! control a terminal.

use std::fmt::Write as _;

use crate::node::Digest;

/// Maximum size of a rendered value in bytes.
pub(crate) const TEXT_BYTES_MAX: usize = 8 << 20;
/// Maximum number of lines of a rendered value.
const LINES_MAX: usize = 200_000;
/// Maximum size of a line in bytes.
const LINE_BYTES_MAX: usize = 256 << 10;

#[derive(Clone, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Line {
    pub text: String,
    /// A digest of what the line stands for but does not show: a masked value, or the rest of what was cut.
    pub hidden: Option<Digest>,
}

#[derive(Clone, Debug, Default)]
pub(crate) struct Lines {
    lines: Vec<Line>,
    bytes: usize,
    full: bool,
}

impl Lines {
    pub fn push(&mut self, text: &str, hidden: Option<Digest>) {
        if self.full || self.lines.len() >= LINES_MAX || self.bytes >= TEXT_BYTES_MAX {
            self.full = true;
            return;
        }
        let (mut shown, mut hidden) = (escaped(text), hidden);
        if shown.len() > LINE_BYTES_MAX {
            let end = shown.floor_char_boundary(LINE_BYTES_MAX);
            let cut = shown.len() - end;
            shown.truncate(end);
            _ = write!(shown, "… (cut: {cut} bytes)");
            let whole = Digest::of(text.as_bytes());
            hidden = Some(hidden.map_or(whole, |masked| masked.and(whole)));
        }
        self.bytes += shown.len() + 1;
        self.lines.push(Line { text: shown, hidden });
    }

    /// Reports whether lines were dropped, so that a renderer can stop.
    pub fn is_full(&self) -> bool {
        self.full
    }

    /// Returns the lines of a value; the last line says so if some were dropped.
    pub fn finish(mut self, value: &[u8]) -> Vec<Line> {
        if self.full {
            let text = format!("# cut: only the first part of {} bytes is shown", value.len());
            self.lines.push(Line { text, hidden: Some(Digest::of(value)) });
        }
        self.lines
    }
}

/// Reports whether a terminal or an editor could act on a character instead of showing it: control characters, line
/// separators, the characters that change the direction of text, and U+FFFE and U+FFFF, which YAML does not allow.
pub fn is_hazard(c: char) -> bool {
    let direction =
        matches!(c, '\u{61c}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}');
    c.is_control() || direction || matches!(c, '\u{2028}' | '\u{2029}' | '\u{feff}' | '\u{fffe}' | '\u{ffff}')
}

/// Writes a hazardous character in a form that YAML, too, reads as that character.
pub(crate) fn push_escape(out: &mut String, c: char) {
    // Writing to a string cannot fail.
    _ = match u32::from(c) {
        code @ 0..=0xff => write!(out, "\\x{code:02x}"),
        code => write!(out, "\\u{code:04x}"),
    };
}

/// Returns a line with all hazardous characters but tabs escaped.
pub fn escaped(text: &str) -> String {
    if !text.contains(|c| is_hazard(c) && c != '\t') {
        return text.to_owned();
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        if is_hazard(c) && c != '\t' { push_escape(&mut out, c) } else { out.push(c) }
    }
    out
}
