//! A minimal HTTP client that sends the same requests as probes and curl.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
    time::timeout,
};

use super::DEADLINE;

/// A server's response.
#[derive(Debug)]
pub struct Answer {
    pub status: u16,
    /// Names in lower case.
    pub headers: Vec<(String, String)>,
    pub body: String,
}

impl Answer {
    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    pub fn parse(text: &str) -> Option<Self> {
        let (head, body) = text.split_once("\r\n\r\n")?;
        let mut lines = head.lines();
        let status = lines.next()?.split(' ').nth(1)?.parse().ok()?;
        let header = |line: &str| line.split_once(": ").map(|(name, value)| (name.to_lowercase(), value.to_owned()));
        Some(Self { status, headers: lines.filter_map(header).collect(), body: body.to_owned() })
    }
}

/// Sends a request, and returns the response with its text.
pub async fn http(endpoint: &str, method: &str, path: &str, body: &str) -> Answer {
    let text = http_bytes(endpoint, method, path, body).await;
    let text = String::from_utf8_lossy(&text);
    Answer::parse(&text).unwrap_or_else(|| panic!("not an HTTP response: {text}"))
}

/// Sends a request over HTTP/1.0, so that the server closes the connection at the end of its response. Returns the
/// whole response.
pub async fn http_bytes(endpoint: &str, method: &str, path: &str, body: &str) -> Vec<u8> {
    let address = endpoint.strip_prefix("http://").expect("an http endpoint");
    let length = body.len().to_string();
    let headers = [("Host", address), ("Content-Type", "application/json"), ("Content-Length", length.as_str())];
    exchange(address, method, path, &headers, body).await
}

/// Sends a request without a body, with only these headers.
pub async fn http_with(endpoint: &str, method: &str, path: &str, headers: &[(&str, &str)]) -> Answer {
    let address = endpoint.strip_prefix("http://").expect("an http endpoint");
    let text = exchange(address, method, path, headers, "").await;
    let text = String::from_utf8_lossy(&text);
    Answer::parse(&text).unwrap_or_else(|| panic!("not an HTTP response: {text}"))
}

async fn exchange(address: &str, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Vec<u8> {
    let headers: String = headers.iter().map(|(name, value)| format!("{name}: {value}\r\n")).collect();
    let request = format!("{method} {path} HTTP/1.0\r\n{headers}\r\n{body}");
    let mut text = Vec::new();
    let exchanged = async {
        let mut stream = TcpStream::connect(address).await.expect("a ready server accepts connections");
        stream.write_all(request.as_bytes()).await.expect("the server reads");
        stream.read_to_end(&mut text).await.expect("the server answers");
    };
    // Tests that expect a response sooner have a deadline of their own.
    let exchanged = timeout(DEADLINE * 4, exchanged).await;
    assert!(exchanged.is_ok(), "{method} {path}: only {:?} was received", String::from_utf8_lossy(&text));
    text
}

pub async fn http_get(endpoint: &str, path: &str) -> Answer {
    http(endpoint, "GET", path, "").await
}
