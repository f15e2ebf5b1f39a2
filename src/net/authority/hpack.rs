//! The part of HPACK (RFC 7541) that finds a header's literal value in a header block.

use std::ops::Range;

/// The index of `:authority` in the static table.
const AUTHORITY: usize = 1;
/// HPACK's canonical Huffman code: for each code length in bits, the characters in the order of their codes. Characters with
/// longer codes cannot occur in an authority.
const HUFFMAN: [(u32, &[u8]); 8] = [
    (5, b"012aceiost"),
    (6, b" %-./3456789=A_bdfghlmnpru"),
    (7, b":BCDEFGHIJKLMNOPQRSTUVWYjkqvwxyz"),
    (8, b"&*,;XZ"),
    (10, b"!\"()?"),
    (11, b"'+|"),
    (12, b"#>"),
    (13, b"\0$@[]~"),
];

/// Returns the range of the literal value of `:authority`, including its length, and its text. The block begins at `at`
/// and ends at the end of `bytes`. Returns `None` for an empty value, which is too short to be replaced.
pub(super) fn find_authority(bytes: &[u8], at: usize) -> Option<(Range<usize>, Vec<u8>)> {
    let mut block = Block { bytes, at };
    loop {
        let first = *block.bytes.get(block.at)?;
        let name = match first {
            0x80.. => {
                block.number(7)?;
                continue;
            }
            0x40..0x80 => block.number(6)?,
            0x20..0x40 => {
                block.number(5)?;
                continue;
            }
            0..0x20 => block.number(4)?,
        };
        let is_authority = match name {
            0 => block.string()? == (false, b":authority"),
            AUTHORITY => true,
            _ => false,
        };
        let start = block.at;
        let (is_huffman, text) = block.string()?;
        if is_authority {
            // A text that cannot be decoded is not a valid authority, and neither is "/".
            let text = if is_huffman { decoded(text).unwrap_or_else(|| vec![b'/']) } else { text.to_vec() };
            return (!text.is_empty()).then_some((start..block.at, text));
        }
    }
}

/// A header block that may be truncated.
struct Block<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Block<'a> {
    /// Reads an integer whose prefix in the first byte has the given number of bits.
    fn number(&mut self, bits: u32) -> Option<usize> {
        let max = (1 << bits) - 1;
        let mut number = usize::from(*self.bytes.get(self.at)?) & max;
        self.at += 1;
        if number < max {
            return Some(number);
        }
        let mut shift = 0;
        loop {
            let byte = *self.bytes.get(self.at)?;
            self.at += 1;
            // A larger number does not fit into a frame.
            number = number.checked_add((usize::from(byte) & 0x7f).checked_shl(shift).filter(|_| shift < 28)?)?;
            shift += 7;
            if byte < 0x80 {
                return Some(number);
            }
        }
    }

    /// Reads a string. Returns whether it is Huffman-coded, and its bytes.
    fn string(&mut self) -> Option<(bool, &'a [u8])> {
        let is_huffman = *self.bytes.get(self.at)? >= 0x80;
        let length = self.number(7)?;
        let string = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some((is_huffman, string))
    }
}

/// Decodes a Huffman-coded string; `None` if it contains a character that cannot occur in an authority.
fn decoded(string: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(string.len() * 8 / 5);
    let mut bits = string.iter().flat_map(|byte| (0..8).rev().map(move |bit| u32::from(byte >> bit & 1)));
    loop {
        let (mut code, mut length, mut first) = (0, 0, 0);
        let mut lengths = HUFFMAN.iter();
        let (mut code_bits, mut characters): (u32, &[u8]) = *lengths.next()?;
        loop {
            let Some(bit) = bits.next() else {
                // The rest is padding: less than a byte of ones.
                return (length < 8 && code == (1 << length) - 1).then_some(text);
            };
            (code, length, first) = (code << 1 | bit, length + 1, first << 1);
            if length < code_bits {
                continue;
            }
            if let Some(character) = characters.get(usize::try_from(code - first).ok()?) {
                text.push(*character);
                break;
            }
            first += u32::try_from(characters.len()).ok()?;
            (code_bits, characters) = *lengths.next()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::net::authority::tests::bytes;

    #[test]
    fn huffman_code_is_decoded() {
        // The first two are RFC 7541's examples.
        let rows = [
            ("f1e3c2e5f23a6ba0ab90f4ff", Some("www.example.com")),
            ("a8eb10649cbf", Some("no-cache")),
            ("9d29aee30c044eae05c0b86e09975f0f", Some("http://127.0.0.1:23791")),
            ("", Some("")),
            // `<`, whose code is longer; `0` with too much padding; `0` with padding that is not all ones.
            ("fff9ff", None),
            ("07ff", None),
            ("00", None),
        ];
        for (coded, text) in rows {
            assert_eq!(decoded(&bytes(coded)).as_deref(), text.map(str::as_bytes), "{coded}");
        }
    }
}
