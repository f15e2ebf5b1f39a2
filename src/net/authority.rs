//! Rewriting of `:authority`, for clients that send one that h2 refuses.
//!
//! h2 0.4 resets a stream whose `:authority` is not valid in a URI, and has no setting to accept it. Go's server
//! accepts any text. Only the check of hosts (`http::access`) reads it, for plain HTTP. Clients of etcd 3.4 send their
//! endpoint with its scheme when they address one member (`etcdctl --endpoints http://... endpoint status`), and gRPC
//! for Python and Java sends the path of a unix socket. So the value is replaced in the header blocks (RFC 7541) before
//! h2 reads them. If the first header block of a connection needs no replacement, the rest of the connection is not
//! parsed. Delete this module when h2 has such a setting.

mod hpack;

use std::{
    io,
    pin::Pin,
    task::{Context, Poll, ready},
};

use http::uri::Authority;
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};

use self::hpack::find_authority;

/// The first bytes of every HTTP/2 connection.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// Bytes of a frame header: length, type, flags and stream.
const FRAME_HEADER: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Maximum size of a frame. A client that sends a longer one violates the protocol, and h2 closes its connection.
const FRAME_MAX: usize = 16 << 10;
/// The literal that replaces an authority, with its length. It is never longer than the value that it replaces. The
/// entry in h2's dynamic table is then at most as large as in the client's table, so h2 evicts no entry that the client
/// may still reference.
const REPLACEMENT: &[u8] = b"\x01-";

/// A connection whose reader replaces authorities that h2 refuses.
pub(super) struct AuthorityRewriter<S> {
    inner: S,
    /// `None` if the rest of the connection passes unchanged.
    rewriter: Option<Box<Rewriter>>,
}

impl<S> AuthorityRewriter<S> {
    pub(super) fn new(inner: S) -> Self {
        Self { inner, rewriter: Some(Box::default()) }
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for AuthorityRewriter<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let this = &mut *self;
        loop {
            let Some(rewriter) = &mut this.rewriter else {
                return Pin::new(&mut this.inner).poll_read(context, buffer);
            };
            let output = rewriter.output();
            if !output.is_empty() {
                let bytes = output.len().min(buffer.remaining());
                buffer.put_slice(&output[..bytes]);
                rewriter.consume(bytes);
                return Poll::Ready(Ok(()));
            }
            if rewriter.is_finished() {
                this.rewriter = None;
                continue;
            }
            let before = buffer.filled().len();
            ready!(Pin::new(&mut this.inner).poll_read(context, buffer))?;
            match &buffer.filled()[before..] {
                [] => rewriter.end(),
                sent => rewriter.push(sent),
            }
            buffer.set_filled(before);
        }
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for AuthorityRewriter<S> {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        Pin::new(&mut self.inner).poll_write(context, bytes)
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.inner).poll_shutdown(context)
    }
}

/// Rewrites the bytes that a client sends.
#[derive(Debug, Default)]
struct Rewriter {
    /// Bytes of the preface that have arrived.
    preface_bytes: usize,
    /// Whether an authority was replaced, so that more may follow.
    has_replaced: bool,
    /// Whether the rest of the connection passes unchanged.
    is_done: bool,
    /// Bytes of the current frame that have not arrived and pass unchanged.
    passing_bytes: usize,
    /// Received bytes that are not parsed yet.
    received: Vec<u8>,
    /// Bytes for h2.
    output: Vec<u8>,
    /// Bytes of `output` that h2 has read.
    read_bytes: usize,
}

impl Rewriter {
    /// Adds received bytes.
    fn push(&mut self, bytes: &[u8]) {
        self.received.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(taken) = self.advance(at) {
            at += taken;
        }
        self.received.drain(..at);
    }

    /// Ends the input: bytes that are not parsed yet pass unchanged.
    fn end(&mut self) {
        self.is_done = true;
        self.push(&[]);
    }

    /// Returns the bytes for h2.
    fn output(&self) -> &[u8] {
        &self.output[self.read_bytes..]
    }

    /// Removes bytes that h2 has read.
    fn consume(&mut self, bytes: usize) {
        self.read_bytes += bytes;
        if self.read_bytes == self.output.len() {
            self.output.clear();
            self.read_bytes = 0;
        }
    }

    /// Returns whether no bytes are buffered and the rest of the connection passes unchanged.
    fn is_finished(&self) -> bool {
        self.is_done && self.output.is_empty() && self.received.is_empty()
    }

    /// Parses the received bytes from `at` on. Returns the number of parsed bytes; `None` if more bytes are required.
    fn advance(&mut self, at: usize) -> Option<usize> {
        let received = &self.received[at..];
        if received.is_empty() {
            return None;
        }
        if self.is_done {
            self.output.extend_from_slice(received);
            return Some(received.len());
        }
        if self.passing_bytes > 0 {
            let bytes = self.passing_bytes.min(received.len());
            self.output.extend_from_slice(&received[..bytes]);
            self.passing_bytes -= bytes;
            return Some(bytes);
        }
        if self.preface_bytes < PREFACE.len() {
            let rest = &PREFACE[self.preface_bytes..];
            let bytes = rest.len().min(received.len());
            self.is_done = received[..bytes] != rest[..bytes];
            self.preface_bytes += bytes;
            self.passing_bytes = bytes;
            return Some(0);
        }
        let head = received.first_chunk::<FRAME_HEADER>()?;
        let [length @ .., kind, _, _, _, _, _] = head;
        let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        if *kind != HEADERS || length > FRAME_MAX {
            self.passing_bytes = FRAME_HEADER + length;
            return Some(0);
        }
        let frame = received.get(..FRAME_HEADER + length)?;
        match authority(frame) {
            Some((value, text)) if Authority::try_from(text.as_slice()).is_err() => {
                let shorter = length + REPLACEMENT.len() - value.len();
                let [_, length @ ..] = u32::try_from(shorter).unwrap_or_default().to_be_bytes();
                self.output.extend(length);
                self.output.extend_from_slice(&frame[3..value.start]);
                self.output.extend_from_slice(REPLACEMENT);
                self.output.extend_from_slice(&frame[value.end..]);
                self.has_replaced = true;
            }
            _ => {
                self.output.extend_from_slice(frame);
                self.is_done = !self.has_replaced;
            }
        }
        Some(frame.len())
    }
}

/// Returns the range of the authority's literal in a HEADERS frame, and its text.
fn authority(frame: &[u8]) -> Option<(std::ops::Range<usize>, Vec<u8>)> {
    let flags = frame[4];
    let (mut at, mut end) = (FRAME_HEADER, frame.len());
    if flags & PADDED != 0 {
        end = end.checked_sub(usize::from(*frame.get(at)?))?;
        at += 1;
    }
    if flags & PRIORITY != 0 {
        at += 5;
    }
    find_authority(frame.get(..end)?, at)
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// A header block of etcdctl 3.4 for `http://127.0.0.1:23791`, Huffman-coded, in hexadecimal digits.
    const ETCDCTL: &str = "8386459760a924882d9dcb6571afa066a925a87510ac6e48d36a3f41909d29aee30c044eae05c0b86e09975f0f5f8b1d75d0620d263\
        d4c4d65647a8b9acac8b4c7602bb2caecff40027465864d833505b11f40899acac8b24d494f6a7f8669f7db75b6ad408d25062d495875996ee5b\
        1063d5f03332e34";
    const ETCDCTL_REPLACED: &str = "8386459760a924882d9dcb6571afa066a925a87510ac6e48d36a3f41012d5f8b1d75d0620d263\
        d4c4d65647a8b9acac8b4c7602bb2caecff40027465864d833505b11f40899acac8b24d494f6a7f8669f7db75b6ad408d25062d495875996ee5b\
        1063d5f03332e34";

    pub(super) fn bytes(hexadecimal: &str) -> Vec<u8> {
        let digits: Vec<u32> = hexadecimal.chars().filter_map(|digit| digit.to_digit(16)).collect();
        digits.chunks(2).map(|pair| u8::try_from(pair[0] << 4 | pair[1]).unwrap()).collect()
    }

    fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
        let length = u32::try_from(payload.len()).unwrap().to_be_bytes();
        [&length[1..], &[kind, flags], &stream.to_be_bytes(), payload].concat()
    }

    fn literal(first: u8, text: &str) -> Vec<u8> {
        [&[first, u8::try_from(text.len()).unwrap()], text.as_bytes()].concat()
    }

    /// Returns the output for input in chunks of the given size.
    fn passed(sent: &[u8], piece: usize) -> Vec<u8> {
        let (mut rewriter, mut passed) = (Rewriter::default(), Vec::new());
        for piece in sent.chunks(piece) {
            rewriter.push(piece);
            while !rewriter.output().is_empty() {
                let given = rewriter.output().len().min(7);
                passed.extend_from_slice(&rewriter.output()[..given]);
                rewriter.consume(given);
            }
        }
        rewriter.end();
        passed.extend_from_slice(rewriter.output());
        passed
    }

    #[test]
    fn authority_that_is_invalid_in_a_uri_is_replaced() {
        const ORDINARY: &str = "835f018641";
        let post = |authority: &str| [&[0x83, 0x86, 0x44, 2, b'/', b'a'][..], &literal(0x41, authority)].concat();
        let padded = |block: &[u8]| [&[3], &[0, 0, 0, 0, 9][..], block, &[0; 3]].concat();
        let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0x80, 0]);
        // The payload of a HEADERS frame, its flags, and the expected payload.
        let rows = [
            (bytes(ETCDCTL), 4, bytes(ETCDCTL_REPLACED)),
            (post("/run/orlop.sock"), 4, post("-")),
            (post("run%2Forlop.sock"), 4, post("-")),
            (post("127.0.0.1:2379"), 4, post("127.0.0.1:2379")),
            (post(""), 4, post("")),
            // With a literal name; without indexing; never indexed.
            (
                [literal(0, ":authority"), b"\x02/s".to_vec()].concat(),
                4,
                [literal(0, ":authority"), b"\x01-".to_vec()].concat(),
            ),
            (literal(0x01, "/s"), 4, literal(0x01, "-")),
            (literal(0x11, "/s"), 4, literal(0x11, "-")),
            // After other headers.
            (
                [literal(0, "x"), literal(2, "y"), literal(0x11, "/s")].concat(),
                4,
                [literal(0, "x"), literal(2, "y"), literal(0x11, "-")].concat(),
            ),
            (padded(&post("/s")), 4 | PADDED | PRIORITY, padded(&post("-"))),
            // Truncated, without an authority, or malformed.
            (post("/run/orlop.sock")[..12].to_vec(), 0, post("/run/orlop.sock")[..12].to_vec()),
            (bytes(ORDINARY), 4, bytes(ORDINARY)),
            (
                vec![0x41, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
                4,
                vec![0x41, 0x7f, 0xff, 0xff, 0xff, 0xff, 0xff, 0xff],
            ),
            (vec![200], 4 | PADDED, vec![200]),
            (vec![], 4 | PADDED, vec![]),
            (vec![0], 4 | PRIORITY, vec![0]),
        ];
        for (payload, flags, expected) in rows {
            let sent = |payload: &[u8]| {
                let data = frame(0, 1, 1, &post("/a request"));
                [PREFACE, &settings, &frame(HEADERS, flags, 1, payload), &data].concat()
            };
            for piece in [1, 2, 33, 1_000] {
                assert_eq!(passed(&sent(&payload), piece), sent(&expected), "{payload:x?}, by {piece}");
            }
        }
    }

    #[test]
    fn other_connections_pass_unchanged() {
        let replaced = frame(HEADERS, 4, 1, &literal(0x41, "/s"));
        let ordinary = frame(HEADERS, 4, 1, &literal(0x41, "x"));
        let rows = [
            [b"POST / HTTP/1.1\r\n\r\n", &replaced[..]].concat(),
            [b"PRI * HTTP/1.1\r\n\r\n", &replaced[..]].concat(),
            // A connection whose first header block needs no replacement.
            [PREFACE, &ordinary, &replaced].concat(),
            [PREFACE, &replaced[..replaced.len() - 1]].concat(),
            PREFACE[..10].to_vec(),
            [PREFACE, &frame(HEADERS, 4, 1, &[&literal(0x41, "/s")[..], &[0; FRAME_MAX]].concat())].concat(),
        ];
        for sent in rows {
            for piece in [1, 30, 100_000] {
                assert_eq!(passed(&sent, piece), sent, "by {piece}");
            }
        }
    }

    /// The client's dynamic table is small, so that it evicts entries.
    #[tokio::test]
    async fn h2_serves_rewritten_calls_with_the_clients_dynamic_table() {
        let (mut client, server) = duplex(1 << 20);
        let settings = frame(4, 0, 0, &[]);
        let block = |number: usize| {
            let path = format!("/{number:0>90}");
            // A call adds two entries of 128 bytes to a table of 4,096.
            let authority = if number.is_multiple_of(15) {
                literal(0x41, "/run/orlop.sock")
            } else {
                vec![0x80 | u8::try_from(62 + 2 * (number % 15)).unwrap()]
            };
            [&authority[..], &[0x83, 0x86], &literal(0x44, &path), &literal(0x54, &path)].concat()
        };
        let mut sent = [PREFACE, &settings].concat();
        for number in 0..60 {
            sent.extend(frame(HEADERS, 5, u32::try_from(1 + 2 * number).unwrap(), &block(number)));
        }
        client.write_all(&passed(&sent, 100)).await.unwrap();
        let mut calls = h2::server::handshake(server).await.unwrap();
        tokio::spawn(async move { client.read_to_end(&mut Vec::new()).await });
        for number in 0..60 {
            let (request, _) = calls.accept().await.expect("a call").expect("a call");
            assert_eq!(request.uri().authority().map(Authority::as_str), Some("-"));
            assert_eq!(request.uri().path(), format!("/{number:0>90}"));
        }
    }
}
