//! The web page of a server, and a visitor who sends the requests of a browser and keeps cookies.

use std::{collections::BTreeMap, fs, process::Stdio};

use percent_encoding::{NON_ALPHANUMERIC, percent_encode};
use tempfile::NamedTempFile;
use tokio::{
    io::{AsyncReadExt as _, AsyncWriteExt as _},
    net::{TcpSocket, TcpStream},
    time::timeout,
};

use crate::support::{Answer, DEADLINE, Lines, Started, memory_kib, orlop};

/// Start of the line with the address of the page.
const READY: &str = "orlop: the web page is at ";

/// The password of a page that has one.
pub const PAGE_PASSWORD: &str = "the page's password";

/// `orlop console`; dropping it ends the process.
pub struct Page {
    process: Started,
    pub url: String,
    /// The file with [`PAGE_PASSWORD`].
    password: Option<NamedTempFile>,
}

impl Page {
    /// Starts `orlop console` about the server at `endpoint`.
    pub fn about(endpoint: &str, arguments: &[&str]) -> Self {
        let mut command = orlop(["console", "--endpoints", endpoint, "--listen-url", "http://127.0.0.1:0"]);
        command.args(arguments).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut page = Self { process: Started::spawn(&mut command), url: String::new(), password: None };
        let line = Lines::of(page.process.stdout.take().expect("a pipe")).next().expect("a line");
        page.url = line.strip_prefix(READY).unwrap_or_else(|| panic!("not an address: {line}")).to_owned();
        page
    }

    /// Starts `orlop console` with [`PAGE_PASSWORD`].
    pub fn with_password(endpoint: &str, arguments: &[&str]) -> Self {
        let file = password_file(PAGE_PASSWORD);
        let path = file.path().to_str().expect("a path in UTF-8");
        let mut page = Self::about(endpoint, &[&["--console-password-file", path], arguments].concat());
        page.password = Some(file);
        page
    }

    /// Replaces the password.
    pub fn change_password(&self, password: &str) {
        let file = self.password.as_ref().expect("the page has a password");
        fs::write(file.path(), password).expect("the file can be written");
    }

    pub fn visitor(&self) -> Visitor {
        Visitor::new(&self.url)
    }

    /// Returns a visitor who has logged in with [`PAGE_PASSWORD`].
    pub async fn writer(&self) -> Visitor {
        let mut visitor = self.visitor();
        assert_eq!(visitor.log_in("", PAGE_PASSWORD).await.status, 303);
        visitor
    }

    /// Returns the most memory that the process has used, in MiB.
    pub fn peak_mib(&self) -> u64 {
        memory_kib(self.process.id(), "VmHWM") >> 10
    }
}

/// Writes a file with a password of a page.
pub fn password_file(password: &str) -> NamedTempFile {
    let file = NamedTempFile::new().expect("a temporary file");
    fs::write(file.path(), format!("{password}\n")).expect("the file can be written");
    file
}

/// A browser without scripts.
#[derive(Clone)]
pub struct Visitor {
    address: String,
    cookies: BTreeMap<String, String>,
}

impl Visitor {
    pub fn new(url: &str) -> Self {
        let address = url.strip_prefix("http://").expect("an http address").to_owned();
        Self { address, cookies: BTreeMap::new() }
    }

    pub async fn get(&mut self, path: &str) -> Answer {
        self.send("GET", path, &[], "").await
    }

    /// Opens a page that must answer 200. Returns its text.
    pub async fn open(&mut self, path: &str) -> String {
        let answer = self.get(path).await;
        assert_eq!(answer.status, 200, "{path}: {}", answer.body);
        answer.body
    }

    /// Sends a form from this page.
    pub async fn post(&mut self, path: &str, fields: &[(&str, &str)]) -> Answer {
        let origin = format!("http://{}", self.address);
        self.send("POST", path, &[("Origin", &origin)], &form(fields)).await
    }

    /// Sends a request over HTTP/1.0. A `Host` in `headers` replaces the visitor's.
    pub async fn send(&mut self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        let text = timeout(DEADLINE, self.exchange(method, path, headers, body)).await.expect("an answer");
        let answer = Answer::parse(&text).unwrap_or_else(|| panic!("not an HTTP response: {text}"));
        for (_, cookie) in answer.headers.iter().filter(|(name, _)| name == "set-cookie") {
            let pair = cookie.split(';').next().expect("a pair");
            let (name, value) = pair.split_once('=').expect("a pair");
            self.cookies.insert(name.to_owned(), value.to_owned());
        }
        answer
    }

    fn head(&self, method: &str, path: &str, headers: &[(&str, &str)], length: usize) -> String {
        let cookies: Vec<String> = self.cookies.iter().map(|(name, value)| format!("{name}={value}")).collect();
        let host = headers.iter().find(|(name, _)| *name == "Host").map_or(self.address.as_str(), |(_, host)| *host);
        let mut head = format!("{method} {path} HTTP/1.0\r\nHost: {host}\r\nContent-Length: {length}\r\n");
        for (name, value) in headers.iter().filter(|(name, _)| *name != "Host") {
            head.push_str(&format!("{name}: {value}\r\n"));
        }
        head.push_str(&format!("Cookie: {}\r\n\r\n", cookies.join("; ")));
        head
    }

    /// Sends the beginning of a form, and no more.
    pub async fn begin_form(&self, path: &str) -> TcpStream {
        let mut stream = TcpStream::connect(&self.address).await.expect("the page accepts connections");
        let request = self.head("POST", path, &[], 100) + "n";
        stream.write_all(request.as_bytes()).await.expect("the page reads");
        stream
    }

    async fn exchange(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> String {
        let mut stream = TcpStream::connect(&self.address).await.expect("the page accepts connections");
        let request = self.head(method, path, headers, body.len()) + body;
        stream.write_all(request.as_bytes()).await.expect("the page reads");
        let mut text = Vec::new();
        stream.read_to_end(&mut text).await.expect("the page answers");
        String::from_utf8_lossy(&text).into_owned()
    }

    /// Opens a stream of events. The visitor's next reads are of [`Events::until`].
    pub async fn events(&self, prefix: &str) -> Events {
        self.try_events(prefix).await.expect("a stream of events")
    }

    /// Like [`Visitor::events`]. Returns the status of a response without events.
    pub async fn try_events(&self, prefix: &str) -> Result<Events, Option<u16>> {
        self.events_with(prefix, "").await
    }

    /// Like [`Visitor::events`], as a browser that connects again with the id of the last message that it has received.
    pub async fn events_after(&self, prefix: &str, last_id: &str) -> Events {
        self.events_with(prefix, last_id).await.expect("a stream of events")
    }

    async fn events_with(&self, prefix: &str, last_id: &str) -> Result<Events, Option<u16>> {
        let socket = TcpSocket::new_v4().expect("a socket");
        // Unread rows soon reach the page.
        socket.set_recv_buffer_size(16 << 10).expect("a small buffer");
        let address = self.address.parse().expect("an address");
        let mut stream = socket.connect(address).await.expect("the page accepts connections");
        let path = format!("/events/stream?prefix={}", encoded(prefix.as_bytes()));
        let head = self.head("GET", &path, &[("Last-Event-ID", last_id)], 0);
        stream.write_all(head.as_bytes()).await.expect("the page reads");
        let mut events = Events { stream, text: String::new() };
        let status = Answer::parse(events.until("\r\n\r\n").await).map(|answer| answer.status);
        if status != Some(200) {
            return Err(status);
        }
        // The first message.
        events.until("\n\n").await;
        Ok(events)
    }

    /// Logs in with the form, and follows to the page that it returns to.
    pub async fn log_in(&mut self, name: &str, password: &str) -> Answer {
        let form = self.get("/login").await.body;
        let fields =
            [("token", value_of(&form, "token")), ("name", name.to_owned()), ("password", password.to_owned())];
        let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.post("/login", &fields).await
    }

    /// Sends the form of a page that puts a version back, with some fields replaced.
    pub async fn confirm(&mut self, page: &str, replaced: &[(&str, &str)]) -> Answer {
        let names = ["token", "key64", "revision", "expected"];
        let value = |name: &str| {
            let given = replaced.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned());
            given.unwrap_or_else(|| value_of(page, name))
        };
        let fields: Vec<(&str, String)> = names.iter().map(|name| (*name, value(name))).collect();
        let fields: Vec<(&str, &str)> = fields.iter().map(|(name, value)| (*name, value.as_str())).collect();
        self.post("/put-back", &fields).await
    }
}

/// An open stream of events.
pub struct Events {
    stream: TcpStream,
    text: String,
}

impl Events {
    /// Reads until a text has arrived. Returns everything that has arrived.
    pub async fn until(&mut self, wanted: &str) -> &str {
        let read = async {
            let mut searched = 0;
            while !self.text[searched..].contains(wanted) {
                // The text may begin in the part that was searched.
                searched = self.text.floor_char_boundary(self.text.len().saturating_sub(wanted.len()));
                let mut part = vec![0; 256 << 10];
                let bytes = self.stream.read(&mut part).await.expect("the page answers");
                assert!(bytes > 0, "the stream ended: {}", self.text);
                self.text.push_str(&String::from_utf8_lossy(&part[..bytes]));
            }
        };
        if timeout(DEADLINE, read).await.is_err() {
            panic!("no {wanted}: {}", self.text);
        }
        &self.text
    }

    /// Returns the id of the last message.
    pub fn last_id(&self) -> String {
        let (_, rest) = self.text.rsplit_once("\nid: ").expect("a message has an id");
        rest.lines().next().expect("an id").to_owned()
    }

    /// Reads until the stream ends. Returns everything that has arrived.
    pub async fn ended(mut self) -> String {
        let mut rest = Vec::new();
        timeout(DEADLINE, self.stream.read_to_end(&mut rest))
            .await
            .expect("the stream ends")
            .expect("the page answers");
        self.text.push_str(&String::from_utf8_lossy(&rest));
        self.text
    }
}

/// Returns the value of a hidden field.
pub fn value_of(page: &str, name: &str) -> String {
    let field = format!("name=\"{name}\" value=\"");
    let rest = page.split_once(&field).unwrap_or_else(|| panic!("no field {name}: {page}")).1;
    rest.split('"').next().expect("a value").to_owned()
}

pub fn encoded(bytes: &[u8]) -> String {
    percent_encode(bytes, NON_ALPHANUMERIC).to_string()
}

fn form(fields: &[(&str, &str)]) -> String {
    let fields: Vec<String> =
        fields.iter().map(|(name, value)| format!("{name}={}", encoded(value.as_bytes()))).collect();
    fields.join("&")
}
