//! gRPC's framing: each message is preceded by one byte of flags and four bytes of length.

use bytes::Buf as _;
use tonic::Status;

use crate::api::status::message_too_large;

/// Bytes before each message.
pub const FRAME_HEAD_BYTES: usize = 5;

/// Returns the length of the message that a frame's head announces.
///
/// # Errors
///
/// If the message is compressed or longer than `message_bytes_max`.
pub fn message_len(mut head: &[u8], message_bytes_max: usize) -> Result<usize, Status> {
    if head.get_u8() != 0 {
        return Err(Status::unimplemented(
            "orlop: compressed requests are not supported; send them with identity encoding",
        ));
    }
    let len = usize::try_from(head.get_u32()).unwrap_or(usize::MAX);
    if len > message_bytes_max { Err(message_too_large(len, message_bytes_max)) } else { Ok(len) }
}

/// Finds the messages of a stream in data that may be cut at any byte.
#[derive(Default)]
pub struct FrameCounter {
    head: [u8; FRAME_HEAD_BYTES],
    head_bytes: usize,
    /// Bytes of the current message.
    message_bytes: usize,
    /// Bytes of the current message that have not arrived.
    missing_bytes: usize,
}

impl FrameCounter {
    /// Returns how many bytes of an incomplete message have arrived, with its head.
    pub fn partial_bytes(&self) -> usize {
        match self.missing_bytes {
            0 => self.head_bytes,
            missing => FRAME_HEAD_BYTES + self.message_bytes - missing,
        }
    }

    /// Returns how many messages begin in the next `data`.
    pub fn count(&mut self, mut data: &[u8]) -> u64 {
        let mut messages = 0;
        loop {
            let skipped = self.missing_bytes.min(data.len());
            self.missing_bytes -= skipped;
            data.advance(skipped);
            if data.is_empty() {
                return messages;
            }
            let taken = (FRAME_HEAD_BYTES - self.head_bytes).min(data.len());
            self.head[self.head_bytes..self.head_bytes + taken].copy_from_slice(&data[..taken]);
            self.head_bytes += taken;
            data.advance(taken);
            if self.head_bytes == FRAME_HEAD_BYTES {
                self.head_bytes = 0;
                let [_, len @ ..] = self.head;
                self.message_bytes = u32::from_be_bytes(len) as usize;
                self.missing_bytes = self.message_bytes;
                messages += 1;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn message_count_does_not_depend_on_chunk_boundaries() {
        let message = |len: u8| [vec![0, 0, 0, 0, len], vec![7; usize::from(len)]].concat();
        let data = [message(3), message(0), message(9)].concat();
        for at in 0..=data.len() {
            let mut frames = FrameCounter::default();
            let first = frames.count(&data[..at]);
            let ends = [8, 13, 27];
            let complete = ends.into_iter().rfind(|end| *end <= at).unwrap_or(0);
            assert_eq!(frames.partial_bytes(), at - complete, "cut at {at}");
            assert_eq!(first + frames.count(&data[at..]), 3, "cut at {at}");
            assert_eq!(frames.partial_bytes(), 0);
        }
    }
}
