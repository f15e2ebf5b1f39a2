//! Splits concatenated JSON objects that arrive in chunks of any size.
//!
//! Each byte is scanned once, so the cost does not depend on the sizes of the chunks. The caller parses the JSON.

use bytes::{Buf as _, Bytes};
use tonic::Status;

use crate::api::{grpc::received::Received, status::message_too_large};

/// The state of the scan.
pub struct Values {
    /// Maximum length of an object.
    bytes_max: usize,
    /// The incomplete object.
    text: Received,
    /// Number of open braces and brackets.
    depth: usize,
    string: StringState,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum StringState {
    Outside,
    Inside,
    Escaped,
}

impl Values {
    pub fn new(bytes_max: usize) -> Self {
        Self { bytes_max, text: Received::default(), depth: 0, string: StringState::Outside }
    }

    /// Returns the length of the incomplete object in bytes.
    pub fn buffered_bytes(&self) -> usize {
        self.text.len()
    }

    /// Removes the first object from `data` and returns it if it is complete; otherwise buffers all of `data` and
    /// returns `None`.
    ///
    /// # Errors
    ///
    /// If the object is longer than the maximum, or the data is not an object.
    pub fn next(&mut self, data: &mut Bytes) -> Result<Option<Received>, Status> {
        if self.depth == 0 {
            let blank = data.iter().take_while(|byte| byte.is_ascii_whitespace()).count();
            data.advance(blank);
            if data.first().is_some_and(|byte| *byte != b'{') {
                return Err(Status::invalid_argument("a message must be a JSON object"));
            }
        }
        let last = data.iter().position(|byte| self.ends_with(*byte));
        self.text.push_copy(&data.split_to(last.map_or(data.len(), |last| last + 1)));
        if self.buffered_bytes() > self.bytes_max {
            return Err(message_too_large(self.buffered_bytes(), self.bytes_max));
        }
        Ok(last.map(|_| std::mem::take(&mut self.text)))
    }

    /// Returns whether the object ends with this byte.
    fn ends_with(&mut self, byte: u8) -> bool {
        self.string = match (self.string, byte) {
            (StringState::Outside, b'"') | (StringState::Escaped, _) => StringState::Inside,
            (StringState::Inside, b'"') => StringState::Outside,
            (StringState::Inside, b'\\') => StringState::Escaped,
            (state, _) => state,
        };
        match byte {
            b'{' | b'[' if self.string == StringState::Outside => self.depth += 1,
            b'}' | b']' if self.string == StringState::Outside => self.depth -= 1,
            _ => {}
        }
        self.depth == 0
    }

    /// Returns the error for a body that ends inside an object.
    pub fn incomplete() -> Status {
        Status::invalid_argument("the last message is incomplete")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BYTES_MAX: usize = 100_000;

    fn read(pieces: &[&[u8]]) -> (Vec<Bytes>, bool) {
        let mut values = Values::new(BYTES_MAX);
        let mut found = Vec::new();
        for piece in pieces {
            let mut data = Bytes::copy_from_slice(piece);
            loop {
                match values.next(&mut data) {
                    Ok(Some(value)) => found.push(value.joined()),
                    Ok(None) => break,
                    Err(_) => return (found, false),
                }
            }
        }
        (found, true)
    }

    #[test]
    fn objects_are_found_across_chunk_boundaries() {
        let text = br#" {"a":1}{}  {"b":["}",{"\"{":"\\"}]} {"#;
        let objects: [&[u8]; 3] = [br#"{"a":1}"#, b"{}", br#"{"b":["}",{"\"{":"\\"}]}"#];
        for at in 0..=text.len() {
            let (head, tail) = text.split_at(at);
            let (found, sound) = read(&[head, tail]);
            assert!(sound && found == objects, "cut at {at}: {found:?}");
        }
        let bytes: Vec<&[u8]> = text.chunks(1).collect();
        assert_eq!(read(&bytes).0, objects);
    }

    #[test]
    fn non_objects_are_refused() {
        for text in ["[]", "1", "null", "}", "{} x", "\u{1}"] {
            assert!(!read(&[text.as_bytes()]).1, "{text}");
        }
        let endless = [b"{\"a\":\"".to_vec(), vec![b'x'; BYTES_MAX]].concat();
        assert!(!read(&[&endless]).1);
    }
}
