//! Requests whose `:authority` is none, served all the same.
//!
//! What a client says there is its own affair: Go's server passes it on as it is, and nothing here looks at it. But h2 resets
//! a stream whose authority could not stand in a URI. Clients of etcd 3.4 send their endpoint with its scheme when they ask
//! one member (`etcdctl --endpoints http://... endpoint status`), and gRPC for Python and Java sends the path of a unix socket.
//! So it is replaced before h2 sees it, in the header blocks (RFC 7541) of connections that began with such a one; of others
//! no more than the first is looked at.

use http::uri::Authority;

/// What every HTTP/2 connection begins with.
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
/// A frame's length, kind, flags and stream.
const FRAME_HEAD: usize = 9;
const HEADERS: u8 = 1;
const PADDED: u8 = 0x8;
const PRIORITY: u8 = 0x20;
/// Longer frames than these were not allowed to the client, and end their connection.
const FRAME_MAX: usize = 16 << 10;
/// In HPACK's static table.
const AUTHORITY: usize = 1;
/// A literal string of one character. An entry of the dynamic table that is smaller than the client's own leaves that table
/// sooner at the client than here, which no reference notices; a larger one would be missed.
const REPLACEMENT: &[u8] = b"\x01-";
/// HPACK's Huffman code is canonical: of each length, in bits, its characters in the order of their codes. No longer code is
/// one of a character that an authority may have.
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

/// What a client sends, on its way to h2.
#[derive(Debug, Default)]
pub(super) struct Authorities {
    /// Bytes of the preface that came.
    preface: usize,
    /// One header block was replaced: there may be more of them.
    replaces: bool,
    is_done: bool,
    /// What of a frame that needs no look is still to come.
    passing: usize,
    /// Received; not understood yet.
    waiting: Vec<u8>,
    ready: Vec<u8>,
    /// Bytes of `ready` that were given on.
    given: usize,
}

impl Authorities {
    pub(super) fn take(&mut self, bytes: &[u8]) {
        self.waiting.extend_from_slice(bytes);
        let mut at = 0;
        while let Some(taken) = self.advance(at) {
            at += taken;
        }
        self.waiting.drain(..at);
    }

    /// There is no more to come: what waits goes on as it is.
    pub(super) fn end(&mut self) {
        self.is_done = true;
        self.take(&[]);
    }

    /// What is to be given on.
    pub(super) fn ready(&self) -> &[u8] {
        &self.ready[self.given..]
    }

    pub(super) fn gave(&mut self, bytes: usize) {
        self.given += bytes;
        if self.given == self.ready.len() {
            self.ready.clear();
            self.given = 0;
        }
    }

    /// All has been given on, and what comes needs no look.
    pub(super) fn is_over(&self) -> bool {
        self.is_done && self.ready.is_empty() && self.waiting.is_empty()
    }

    /// Makes ready what stands at `at`. Returns its bytes; `None` if that takes more of them.
    fn advance(&mut self, at: usize) -> Option<usize> {
        let waiting = &self.waiting[at..];
        if waiting.is_empty() {
            return None;
        }
        if self.is_done {
            self.ready.extend_from_slice(waiting);
            return Some(waiting.len());
        }
        if self.passing > 0 {
            let bytes = self.passing.min(waiting.len());
            self.ready.extend_from_slice(&waiting[..bytes]);
            self.passing -= bytes;
            return Some(bytes);
        }
        if self.preface < PREFACE.len() {
            let rest = &PREFACE[self.preface..];
            let bytes = rest.len().min(waiting.len());
            self.is_done = waiting[..bytes] != rest[..bytes];
            self.preface += bytes;
            self.passing = bytes;
            return Some(0);
        }
        let head = waiting.first_chunk::<FRAME_HEAD>()?;
        let [length @ .., kind, _, _, _, _, _] = head;
        let length = length.iter().fold(0, |length, byte| length << 8 | usize::from(*byte));
        if *kind != HEADERS || length > FRAME_MAX {
            self.passing = FRAME_HEAD + length;
            return Some(0);
        }
        let frame = waiting.get(..FRAME_HEAD + length)?;
        match authority(frame) {
            Some((value, text)) if Authority::try_from(text.as_slice()).is_err() => {
                let shorter = length + REPLACEMENT.len() - value.len();
                let [_, length @ ..] = u32::try_from(shorter).unwrap_or_default().to_be_bytes();
                self.ready.extend(length);
                self.ready.extend_from_slice(&frame[3..value.start]);
                self.ready.extend_from_slice(REPLACEMENT);
                self.ready.extend_from_slice(&frame[value.end..]);
                self.replaces = true;
            }
            _ => {
                self.ready.extend_from_slice(frame);
                self.is_done = !self.replaces;
            }
        }
        Some(frame.len())
    }
}

/// Where the literal of an authority stands in a frame of headers, with its length before it, and its text. An empty one is
/// left out: it has no room for a replacement.
fn authority(frame: &[u8]) -> Option<(std::ops::Range<usize>, Vec<u8>)> {
    let flags = frame[4];
    let (mut at, mut end) = (FRAME_HEAD, frame.len());
    if flags & PADDED != 0 {
        end = end.checked_sub(usize::from(*frame.get(at)?))?;
        at += 1;
    }
    if flags & PRIORITY != 0 {
        at += 5;
    }
    let mut block = Block { bytes: frame.get(..end)?, at };
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
            // Nobody takes a text that cannot be decoded for an authority.
            let text = if is_huffman { decoded(text).unwrap_or_else(|| vec![b'/']) } else { text.to_vec() };
            return (!text.is_empty()).then_some((start..block.at, text));
        }
    }
}

/// A header block, or its beginning.
struct Block<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Block<'a> {
    /// An integer that begins in so many bits of a byte.
    fn number(&mut self, bits: u32) -> Option<usize> {
        let most = (1 << bits) - 1;
        let mut number = usize::from(*self.bytes.get(self.at)?) & most;
        self.at += 1;
        if number < most {
            return Some(number);
        }
        let mut shift = 0;
        loop {
            let byte = *self.bytes.get(self.at)?;
            self.at += 1;
            // What is larger stands in no frame.
            number = number.checked_add((usize::from(byte) & 0x7f).checked_shl(shift).filter(|_| shift < 28)?)?;
            shift += 7;
            if byte < 0x80 {
                return Some(number);
            }
        }
    }

    /// A string, and whether it is in Huffman's code.
    fn string(&mut self) -> Option<(bool, &'a [u8])> {
        let is_huffman = *self.bytes.get(self.at)? >= 0x80;
        let length = self.number(7)?;
        let string = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some((is_huffman, string))
    }
}

/// `None` if there is a character that no authority has.
fn decoded(string: &[u8]) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(string.len() * 8 / 5);
    let mut bits = string.iter().flat_map(|byte| (0..8).rev().map(move |bit| u32::from(byte >> bit & 1)));
    loop {
        let (mut code, mut length, mut first) = (0, 0, 0);
        let mut lengths = HUFFMAN.iter();
        let (mut of, mut characters): (u32, &[u8]) = *lengths.next()?;
        loop {
            let Some(bit) = bits.next() else {
                // What is left is padding: the beginning of a code, all ones.
                return (length < 8 && code == (1 << length) - 1).then_some(text);
            };
            (code, length, first) = (code << 1 | bit, length + 1, first << 1);
            if length < of {
                continue;
            }
            if let Some(character) = characters.get(usize::try_from(code - first).ok()?) {
                text.push(*character);
                break;
            }
            first += u32::try_from(characters.len()).ok()?;
            (of, characters) = *lengths.next()?;
        }
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, duplex};

    use super::*;

    /// Of a call of etcdctl 3.4 to `http://127.0.0.1:23791`, with its Huffman code, in hexadecimal digits.
    const ETCDCTL: &str = "8386459760a924882d9dcb6571afa066a925a87510ac6e48d36a3f41909d29aee30c044eae05c0b86e09975f0f5f8b1d75d0620d263\
        d4c4d65647a8b9acac8b4c7602bb2caecff40027465864d833505b11f40899acac8b24d494f6a7f8669f7db75b6ad408d25062d495875996ee5b\
        1063d5f03332e34";
    const ETCDCTL_REPLACED: &str = "8386459760a924882d9dcb6571afa066a925a87510ac6e48d36a3f41012d5f8b1d75d0620d263\
        d4c4d65647a8b9acac8b4c7602bb2caecff40027465864d833505b11f40899acac8b24d494f6a7f8669f7db75b6ad408d25062d495875996ee5b\
        1063d5f03332e34";

    fn bytes(hexadecimal: &str) -> Vec<u8> {
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

    /// What goes on of what comes in pieces of so many bytes.
    fn passed(sent: &[u8], piece: usize) -> Vec<u8> {
        let (mut authorities, mut passed) = (Authorities::default(), Vec::new());
        for piece in sent.chunks(piece) {
            authorities.take(piece);
            while !authorities.ready().is_empty() {
                let given = authorities.ready().len().min(7);
                passed.extend_from_slice(&authorities.ready()[..given]);
                authorities.gave(given);
            }
        }
        authorities.end();
        passed.extend_from_slice(authorities.ready());
        passed
    }

    #[test]
    fn what_could_stand_in_no_uri_is_replaced() {
        const ORDINARY: &str = "835f018641";
        let post = |authority: &str| [&[0x83, 0x86, 0x44, 2, b'/', b'a'][..], &literal(0x41, authority)].concat();
        let padded = |block: &[u8]| [&[3], &[0, 0, 0, 0, 9][..], block, &[0; 3]].concat();
        let settings = frame(4, 0, 0, &[0, 4, 0, 0, 0x80, 0]);
        // A header frame's payload, its flags, and what goes on of it.
        let rows = [
            (bytes(ETCDCTL), 4, bytes(ETCDCTL_REPLACED)),
            (post("/run/orlop.sock"), 4, post("-")),
            (post("run%2Forlop.sock"), 4, post("-")),
            (post("127.0.0.1:2379"), 4, post("127.0.0.1:2379")),
            (post(""), 4, post("")),
            // With its name, not to be in a table, never to be in one.
            (
                [literal(0, ":authority"), b"\x02/s".to_vec()].concat(),
                4,
                [literal(0, ":authority"), b"\x01-".to_vec()].concat(),
            ),
            (literal(0x01, "/s"), 4, literal(0x01, "-")),
            (literal(0x11, "/s"), 4, literal(0x11, "-")),
            // Behind others.
            (
                [literal(0, "x"), literal(2, "y"), literal(0x11, "/s")].concat(),
                4,
                [literal(0, "x"), literal(2, "y"), literal(0x11, "-")].concat(),
            ),
            (padded(&post("/s")), 4 | PADDED | PRIORITY, padded(&post("-"))),
            // Cut, or nothing of the kind.
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
    fn what_begins_otherwise_goes_on_as_it_is() {
        let replaced = frame(HEADERS, 4, 1, &literal(0x41, "/s"));
        let ordinary = frame(HEADERS, 4, 1, &literal(0x41, "x"));
        let rows = [
            [b"POST / HTTP/1.1\r\n\r\n", &replaced[..]].concat(),
            [b"PRI * HTTP/1.1\r\n\r\n", &replaced[..]].concat(),
            // Of a connection that did not need it no more is looked at.
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

    #[test]
    fn huffmans_code_is_read() {
        // The first two are RFC 7541's examples.
        let rows = [
            ("f1e3c2e5f23a6ba0ab90f4ff", Some("www.example.com")),
            ("a8eb10649cbf", Some("no-cache")),
            ("9d29aee30c044eae05c0b86e09975f0f", Some("http://127.0.0.1:23791")),
            ("", Some("")),
            // `<` has a longer code; `0` with too much padding, and with padding that is none.
            ("fff9ff", None),
            ("07ff", None),
            ("00", None),
        ];
        for (coded, text) in rows {
            assert_eq!(decoded(&bytes(coded)).as_deref(), text.map(str::as_bytes), "{coded}");
        }
    }

    /// The client's table is full again and again.
    #[tokio::test]
    async fn h2_serves_it_and_its_table_stays_the_clients() {
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
