//! gRPC's framing: each message is preceded by one byte of flags and four bytes of length.

use bytes::Buf as _;
use http::{HeaderMap, HeaderName, HeaderValue};
use tonic::{Code, Status, metadata::MetadataMap};

/// Bytes before each message.
pub const FRAME_HEADER_BYTES: usize = 5;

/// Returns the message length in a frame header.
///
/// # Errors
///
/// If the message is compressed.
pub fn message_len(mut header: &[u8]) -> Result<usize, Status> {
    if header.get_u8() != 0 {
        return Err(compressed());
    }
    Ok(header.get_u32() as usize)
}

/// Returns the status of a compressed request. In gRPC, it names the encodings that the server accepts.
fn compressed() -> Status {
    let text = "orlop: compressed requests are not supported; send them with identity encoding";
    let accepted = [("grpc-accept-encoding", "identity")];
    let accepted = accepted.map(|(name, value)| (HeaderName::from_static(name), HeaderValue::from_static(value)));
    Status::with_metadata(Code::Unimplemented, text, MetadataMap::from_headers(HeaderMap::from_iter(accepted)))
}

/// Returns the message length in the frame header at the start of `received`, if the header is complete.
pub fn announced_len(received: &[u8]) -> Option<usize> {
    let [_, len @ ..] = *received.first_chunk::<FRAME_HEADER_BYTES>()?;
    Some(u32::from_be_bytes(len) as usize)
}

/// Counts the messages of a stream that arrives in chunks of any size.
#[derive(Default)]
pub struct FrameCounter {
    header: [u8; FRAME_HEADER_BYTES],
    header_bytes: usize,
    /// Bytes of the current message.
    message_bytes: usize,
    /// Bytes of the current message that have not arrived.
    missing_bytes: usize,
    /// Bytes of the longest message.
    longest_bytes: usize,
}

impl FrameCounter {
    /// Returns the number of received bytes of an incomplete message, including its header.
    pub fn partial_bytes(&self) -> usize {
        match self.missing_bytes {
            0 => self.header_bytes,
            missing => FRAME_HEADER_BYTES + self.message_bytes - missing,
        }
    }

    /// Returns the size of the longest message whose header is complete, without its header.
    pub fn longest_bytes(&self) -> usize {
        self.longest_bytes
    }

    /// Adds received data. Returns the number of messages whose header is complete with it.
    pub fn count(&mut self, mut data: &[u8]) -> u64 {
        let mut messages = 0;
        loop {
            let skipped = self.missing_bytes.min(data.len());
            self.missing_bytes -= skipped;
            data.advance(skipped);
            if data.is_empty() {
                return messages;
            }
            let taken = (FRAME_HEADER_BYTES - self.header_bytes).min(data.len());
            self.header[self.header_bytes..self.header_bytes + taken].copy_from_slice(&data[..taken]);
            self.header_bytes += taken;
            data.advance(taken);
            if self.header_bytes == FRAME_HEADER_BYTES {
                self.header_bytes = 0;
                let [_, len @ ..] = self.header;
                self.message_bytes = u32::from_be_bytes(len) as usize;
                self.missing_bytes = self.message_bytes;
                self.longest_bytes = self.longest_bytes.max(self.message_bytes);
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
            assert_eq!((frames.partial_bytes(), frames.longest_bytes()), (0, 9));
        }
    }
}
