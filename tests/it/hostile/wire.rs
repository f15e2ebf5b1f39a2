//! HTTP/2 frame by frame, for input that no client library sends.

use std::{io, time::Duration};

use bytes::Bytes;
use tokio::{
    io::{AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _, copy, sink},
    net::TcpStream,
    time::timeout,
};

use crate::support::DEADLINE;

pub const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";
pub const DATA: u8 = 0;
pub const HEADERS: u8 = 1;
pub const RST_STREAM: u8 = 3;
pub const SETTINGS: u8 = 4;
pub const PING: u8 = 6;
const GOAWAY: u8 = 7;
pub const WINDOW_UPDATE: u8 = 8;
pub const CONTINUATION: u8 = 9;
pub const END_STREAM: u8 = 1;
pub const ACK: u8 = 1;
pub const END_HEADERS: u8 = 4;

/// A connection that sends arbitrary bytes.
pub struct Wire(pub TcpStream);

pub fn frame(kind: u8, flags: u8, stream: u32, payload: &[u8]) -> Vec<u8> {
    let len = u32::try_from(payload.len()).expect("a frame is short").to_be_bytes();
    [&len[1..], &[kind, flags], &stream.to_be_bytes()[..], payload].concat()
}

/// Returns the HEADERS block of a gRPC call with additional headers; none is compressed.
pub fn headers(path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    headers_to("x", path, more)
}

pub fn headers_to(authority: &str, path: &str, more: &[(&str, &str)]) -> Vec<u8> {
    let usual = [
        (":method", "POST"),
        (":scheme", "http"),
        (":path", path),
        (":authority", authority),
        ("content-type", "application/grpc"),
        ("te", "trailers"),
    ];
    let mut block = Vec::new();
    for (name, value) in usual.iter().chain(more) {
        block.push(0);
        for text in [name, value] {
            length(&mut block, text.len());
            block.extend_from_slice(text.as_bytes());
        }
    }
    block
}

/// Appends a length as an HPACK integer with a 7-bit prefix.
fn length(block: &mut Vec<u8>, mut len: usize) {
    if len < 127 {
        return block.push(len as u8);
    }
    block.push(127);
    len -= 127;
    while len >= 128 {
        block.push((len % 128) as u8 | 128);
        len /= 128;
    }
    block.push(len as u8);
}

pub fn message(bytes: &[u8]) -> Vec<u8> {
    let len = u32::try_from(bytes.len()).expect("a message is short");
    [&[0], &len.to_be_bytes()[..], bytes].concat()
}

pub fn address(endpoint: &str) -> &str {
    endpoint.rsplit("//").next().expect("an endpoint is a URL")
}

/// Sends the bytes repeatedly, in chunks as clients do.
async fn send_in_chunks_forever(to: &mut (impl AsyncWrite + Unpin), bytes: &[u8]) {
    for piece in bytes.chunks(16 << 10).cycle() {
        if to.write_all(piece).await.is_err() {
            return;
        }
    }
}

impl Wire {
    pub async fn tcp(endpoint: &str) -> Self {
        Self(TcpStream::connect(address(endpoint)).await.expect("the server accepts"))
    }

    /// Connects and sends the preface and settings with the largest windows.
    pub async fn open(endpoint: &str) -> Self {
        Self::greet(Self::tcp(endpoint).await.0).await
    }

    async fn greet(tcp: TcpStream) -> Self {
        let mut wire = Self(tcp);
        let window = [&[0, 4], &0x7fff_ffff_u32.to_be_bytes()[..]].concat();
        let start = [
            PREFACE.to_vec(),
            frame(SETTINGS, 0, 0, &window),
            frame(WINDOW_UPDATE, 0, 0, &0x7000_0000_u32.to_be_bytes()),
        ];
        assert!(wire.send(&start.concat()).await, "the server reads a preface");
        wire
    }

    /// Returns false if the server has closed the connection or does not read.
    pub async fn send(&mut self, bytes: &[u8]) -> bool {
        matches!(timeout(DEADLINE, self.0.write_all(bytes)).await, Ok(Ok(())))
    }

    /// Sends a call, whose DATA frame has the flags, and reads nothing of its response.
    pub async fn call(&mut self, stream: u32, path: &str, body: &[u8], flags: u8) -> bool {
        let head = frame(HEADERS, END_HEADERS, stream, &headers(path, &[]));
        self.send(&[head, frame(DATA, flags, stream, &message(body))].concat()).await
    }

    /// Sends the same frames repeatedly and reads the responses; reconnects when the server closes the connection.
    pub async fn flood(mut self, endpoint: String, frames: Bytes) {
        loop {
            let (mut answers, mut requests) = self.0.split();
            let mut discarded = sink();
            tokio::select! {
                () = send_in_chunks_forever(&mut requests, &frames) => {}
                _ = copy(&mut answers, &mut discarded) => {}
            }
            self = loop {
                // Local ports may be temporarily exhausted. If the server refuses connections, the bystander fails.
                match TcpStream::connect(address(&endpoint)).await {
                    Ok(tcp) => break Self::greet(tcp).await,
                    Err(_) => tokio::time::sleep(Duration::from_millis(10)).await,
                }
            };
        }
    }

    /// Returns the message of the next call's response, or `None` if the call is reset.
    pub async fn message(&mut self) -> Option<Vec<u8>> {
        loop {
            match self.next_frame().await {
                (DATA, _, mut payload) => return Some(payload.split_off(5)),
                (RST_STREAM, ..) => return None,
                _ => {}
            }
        }
    }

    /// Returns whether the server answers a PING. It answers the frames before it first, unless it ends the connection.
    pub async fn answers_ping(&mut self) -> bool {
        let payload = *b"are you ";
        self.send(&frame(PING, 0, 0, &payload)).await
            && loop {
                match self.next_frame().await {
                    (PING, ACK, answer) if answer == payload => break true,
                    (GOAWAY, ..) => break false,
                    _ => {}
                }
            }
    }

    /// Returns the kind, the flags and the payload of the next frame.
    pub async fn next_frame(&mut self) -> (u8, u8, Vec<u8>) {
        timeout(DEADLINE, self.frame_or_end()).await.expect("a frame in time").expect("a frame")
    }

    /// Like [`Wire::next_frame`], without a deadline. Returns an error if the server closes the connection.
    pub async fn frame_or_end(&mut self) -> io::Result<(u8, u8, Vec<u8>)> {
        let mut head = [0; 9];
        self.0.read_exact(&mut head).await?;
        let mut payload = vec![0; u32::from_be_bytes([0, head[0], head[1], head[2]]) as usize];
        self.0.read_exact(&mut payload).await?;
        Ok((head[3], head[4], payload))
    }

    /// Reads until the server closes the connection; returns the error code of its GOAWAY, if it sent one.
    pub async fn ended(&mut self) -> Option<u32> {
        let mut all = Vec::new();
        // A reset is accepted as a close.
        let _ = timeout(DEADLINE * 2, self.0.read_to_end(&mut all)).await.expect("the server ends the connection");
        let (mut rest, mut error) = (&all[..], None);
        while rest.len() >= 9 {
            let len = u32::from_be_bytes([0, rest[0], rest[1], rest[2]]) as usize;
            let payload = rest.get(9..9 + len)?;
            if rest[3] == GOAWAY {
                error = Some(u32::from_be_bytes([payload[4], payload[5], payload[6], payload[7]]));
            }
            rest = &rest[9 + len..];
        }
        error
    }
}
