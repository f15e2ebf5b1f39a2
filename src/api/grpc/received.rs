//! The parts of a message or a text that have arrived.
//!
//! They are joined once, when all have arrived: a growing buffer would be copied each time its capacity doubles, which
//! takes milliseconds and up to twice the memory. Most messages arrive in one frame and are not copied at all.

use bytes::{Bytes, BytesMut};

use super::frame::FRAME_HEADER_BYTES;

/// Minimum size of a part that is not copied. A part may keep a buffer of 16 KiB allocated.
const PART_BYTES_MIN: usize = 4 << 10;
/// Size from which a buffer of copies is a part, and the next copies need another buffer.
const TAIL_BYTES_MIN: usize = 64 << 10;

/// The received parts, in their order.
#[derive(Default)]
pub struct Received {
    first: Bytes,
    more: Vec<Bytes>,
    /// Copies. Without a copy, each short part would keep a much larger buffer allocated.
    tail: BytesMut,
    len: usize,
}

impl Received {
    /// Returns the number of received bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Adds a part of a gRPC message. A part that is not short is kept without a copy.
    pub fn push(&mut self, data: Bytes) {
        let is_part = data.len() >= if self.len == 0 { FRAME_HEADER_BYTES } else { PART_BYTES_MIN };
        // The frame header must be in one part.
        let may_end = !self.first.is_empty() || self.tail.is_empty() || self.tail.len() >= FRAME_HEADER_BYTES;
        if is_part && may_end {
            self.len += data.len();
            self.end_tail();
            self.push_part(data);
        } else {
            self.push_copy(&data);
        }
    }

    /// Adds a copy, so that the buffer of `data` can be freed.
    pub fn push_copy(&mut self, data: &[u8]) {
        self.len += data.len();
        self.tail.extend_from_slice(data);
        if self.tail.len() >= TAIL_BYTES_MIN {
            self.end_tail();
        }
    }

    fn push_part(&mut self, part: Bytes) {
        if self.first.is_empty() { self.first = part } else { self.more.push(part) }
    }

    fn end_tail(&mut self) {
        if !self.tail.is_empty() {
            let tail = std::mem::take(&mut self.tail).freeze();
            self.push_part(tail);
        }
    }

    /// Returns the frame header of a gRPC message if it has arrived.
    pub fn head(&self) -> Option<&[u8]> {
        let first = if self.first.is_empty() { &self.tail[..] } else { &self.first[..] };
        first.get(..FRAME_HEADER_BYTES)
    }

    /// Returns everything that was received. Copies it if it has several parts.
    pub fn joined(mut self) -> Bytes {
        self.end_tail();
        if self.more.is_empty() {
            return self.first;
        }
        let mut joined = BytesMut::with_capacity(self.len);
        joined.extend_from_slice(&self.first);
        self.more.iter().for_each(|part| joined.extend_from_slice(part));
        joined.freeze()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_does_not_depend_on_chunk_boundaries() {
        let message: Vec<u8> = (0..300_000_u32).map(|number| (number % 251) as u8).collect();
        let table: [(&str, &[usize], bool); 9] = [
            ("in one part", &[300_000], false),
            ("byte by byte", &[1], true),
            ("a head cut in two", &[2, 16 << 10], true),
            ("a head, and frames", &[5, 16 << 10], true),
            ("frames", &[16 << 10], true),
            ("frames and short parts", &[16 << 10, 3, 0, 20, 16 << 10], true),
            ("empty parts first", &[0, 0, 100_000], true),
            ("a byte less than a buffer of copies", &[TAIL_BYTES_MIN - 1], true),
            ("a buffer of copies, and a byte", &[TAIL_BYTES_MIN, 1], true),
        ];
        let push: fn(&mut Received, Bytes) = |received, data| received.push(data);
        let push_copy: fn(&mut Received, Bytes) = |received, data| received.push_copy(&data);
        for (name, sizes, is_copied) in table {
            for (push, is_copied, keeps_nothing) in [(push, is_copied, false), (push_copy, true, true)] {
                let whole = Bytes::from(message.clone());
                let (mut received, mut rest) = (Received::default(), whole.clone());
                for size in sizes.iter().cycle() {
                    push(&mut received, rest.split_to(rest.len().min(*size)));
                    let head = (received.len() >= FRAME_HEADER_BYTES).then(|| &message[..FRAME_HEADER_BYTES]);
                    assert_eq!(received.head(), head, "{name}");
                    assert!(received.more.len() * PART_BYTES_MIN <= received.len(), "{name}: many short parts");
                    if rest.is_empty() {
                        break;
                    }
                }
                drop(rest);
                assert!(whole.is_unique() || !keeps_nothing, "{name}: a copy keeps its buffer");
                let joined = received.joined();
                assert!(joined == message, "{name}");
                assert_eq!(joined.as_ptr() != whole.as_ptr(), is_copied, "{name}");
            }
        }
    }

    #[test]
    fn nothing_is_joined_to_nothing() {
        assert!(Received::default().joined().is_empty());
    }
}
