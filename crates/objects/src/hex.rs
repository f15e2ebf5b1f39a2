//! Writes bytes as a hex dump: offset, sixteen bytes, and what of them is printable ASCII.

use std::fmt::Write as _;

use crate::{lines::Lines, node::Digest};

/// Maximum number of bytes in a dump.
pub(crate) const DUMP_BYTES_MAX: usize = 4096;

pub(crate) fn write(out: &mut Lines, bytes: &[u8]) {
    let (shown, rest) = bytes.split_at(bytes.len().min(DUMP_BYTES_MAX));
    for (row, chunk) in shown.chunks(16).enumerate() {
        let printable = |byte: &u8| if byte.is_ascii_graphic() || *byte == b' ' { char::from(*byte) } else { '.' };
        let ascii: String = chunk.iter().map(printable).collect();
        out.push(&format!("{:08x}  {:<47}  |{ascii}|", row * 16, spaced(chunk)), None);
    }
    if !rest.is_empty() {
        out.push(&format!("# cut: {} more bytes", rest.len()), Some(Digest::of(rest)));
    }
}

/// Returns bytes as pairs of hex digits with spaces between them.
pub(crate) fn spaced(bytes: &[u8]) -> String {
    let mut out = String::with_capacity(bytes.len() * 3);
    for byte in bytes {
        let space = if out.is_empty() { "" } else { " " };
        // Writing to a string cannot fail.
        _ = write!(out, "{space}{byte:02x}");
    }
    out
}
