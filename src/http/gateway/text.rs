//! The text of a request body, stored in blocks.
//!
//! A contiguous buffer would be copied each time its capacity doubles, which takes milliseconds and up to twice the
//! memory.

use bytes::{Bytes, BytesMut};

const BLOCK_BYTES: usize = 64 << 10;

/// A text in blocks.
#[derive(Default)]
pub struct Text {
    full: Vec<Bytes>,
    last: BytesMut,
}

impl Text {
    pub fn len(&self) -> usize {
        self.full.len() * BLOCK_BYTES + self.last.len()
    }

    pub fn push(&mut self, mut data: &[u8]) {
        while let Some((head, tail)) = data.split_at_checked(BLOCK_BYTES - self.last.len()) {
            self.last.extend_from_slice(head);
            self.full.push(std::mem::replace(&mut self.last, BytesMut::with_capacity(BLOCK_BYTES)).freeze());
            data = tail;
        }
        self.last.extend_from_slice(data);
    }

    /// Returns the whole text. Copies it if it has several blocks.
    pub fn joined(mut self) -> Bytes {
        if self.full.is_empty() {
            return self.last.freeze();
        }
        self.full.push(self.last.freeze());
        self.full.concat().into()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_does_not_depend_on_chunk_sizes() {
        let all: Vec<u8> = (0..BLOCK_BYTES * 3 + 5).map(|at| (at % 251) as u8).collect();
        for piece in [1, 256, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, 2 * BLOCK_BYTES, all.len()] {
            for len in [0, 1, BLOCK_BYTES - 1, BLOCK_BYTES, BLOCK_BYTES + 1, all.len()] {
                let mut text = Text::default();
                all[..len].chunks(piece).for_each(|piece| text.push(piece));
                assert_eq!(text.len(), len, "{len} in pieces of {piece}");
                assert!(text.joined() == all[..len], "{len} in pieces of {piece}");
            }
        }
    }
}
