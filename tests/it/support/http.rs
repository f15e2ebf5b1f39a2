//! A minimal HTTP client that sends the same requests as probes and curl.

use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::TcpStream,
};

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
    let mut stream = TcpStream::connect(address).await.expect("a ready server accepts connections");
    let request = format!(
        "{method} {path} HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
        body.len()
    );
    stream.write_all(request.as_bytes()).await.expect("the server reads");
    let mut text = Vec::new();
    stream.read_to_end(&mut text).await.expect("the server answers");
    text
}

pub async fn http_get(endpoint: &str, path: &str) -> Answer {
    http(endpoint, "GET", path, "").await
}
