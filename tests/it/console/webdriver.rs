//! A real browser: Chromium, driven by chromedriver over WebDriver (https://www.w3.org/TR/webdriver2/).

use std::{
    io::{Read as _, Write as _},
    path::Path,
    process::{Child, Command, Stdio},
    time::Duration,
};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde_json::{Value, json};
use tokio::{
    io::{AsyncBufReadExt as _, AsyncReadExt as _, AsyncWriteExt as _, BufReader},
    net::TcpStream,
};

use crate::support::{DEADLINE, eventually, free_port, skip, wait};

/// The key of an element's id in WebDriver's messages.
const ELEMENT: &str = "element-6066-11e4-a52e-4f735466cecf";

/// Light or dark colours.
#[derive(Clone, Copy, Debug)]
pub enum Colours {
    Light,
    Dark,
}

/// A window; dropping it ends the browser.
pub struct Browser {
    driver: Option<Child>,
    address: String,
    session: String,
    _profile: tempfile::TempDir,
}

impl Browser {
    /// Opens a window; returns `None` if the machine has no Chromium.
    pub async fn open(colours: Colours, width: u32, height: u32) -> Option<Self> {
        let found = |names: [&'static str; 2]| {
            names.into_iter().find(|name| {
                Command::new(name).arg("--version").stdout(Stdio::null()).stderr(Stdio::null()).status().is_ok()
            })
        };
        let (Some(chromium), Some(driver)) =
            (found(["chromium", "google-chrome"]), found(["chromedriver", "chromium.chromedriver"]))
        else {
            skip("chromium and chromium-driver");
            return None;
        };
        let port = free_port();
        let driver = Command::new(driver)
            .args([format!("--port={port}"), "--log-level=SEVERE".to_owned()])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("chromedriver starts");
        let address = format!("127.0.0.1:{port}");
        let profile = tempfile::tempdir().expect("a folder");
        let mut browser = Self { driver: Some(driver), address, session: String::new(), _profile: profile };
        eventually("the start of chromedriver", async || TcpStream::connect(&browser.address).await).await;
        let mut arguments = vec![
            "--headless=new".to_owned(),
            // CI runs as root, in a container.
            "--no-sandbox".to_owned(),
            "--disable-dev-shm-usage".to_owned(),
            "--disable-gpu".to_owned(),
            "--hide-scrollbars".to_owned(),
            format!("--window-size={width},{height}"),
            format!("--user-data-dir={}", browser._profile.path().display()),
        ];
        if let Colours::Dark = colours {
            arguments.push("--blink-settings=preferredColorScheme=0".to_owned());
        }
        let options = json!({ "binary": which(chromium), "args": arguments });
        let wanted = json!({ "capabilities": { "alwaysMatch": {
            "browserName": "chrome", "goog:chromeOptions": options, "goog:loggingPrefs": { "browser": "ALL" },
        } } });
        let session = browser.request("POST", "/session", &wanted).await;
        browser.session = session["sessionId"].as_str().unwrap_or_else(|| panic!("no session: {session}")).to_owned();
        if width < 500 {
            // A window has a minimum width.
            let metrics = json!({ "width": width, "height": height, "deviceScaleFactor": 1, "mobile": true });
            let command = json!({ "cmd": "Emulation.setDeviceMetricsOverride", "params": metrics });
            browser.call("POST", "/goog/cdp/execute", &command).await;
        }
        Some(browser)
    }

    async fn request(&self, method: &str, path: &str, body: &Value) -> Value {
        self.attempt(method, path, body).await.unwrap_or_else(|error| panic!("{path}: {error}"))
    }

    /// Returns the value of a response, or the error that chromedriver reports.
    async fn attempt(&self, method: &str, path: &str, body: &Value) -> Result<Value, Value> {
        let body = if method == "GET" { String::new() } else { body.to_string() };
        let answer = tokio::time::timeout(DEADLINE * 2, self.exchange(method, path, &body)).await;
        let (head, text) = answer.unwrap_or_else(|_| panic!("no answer to {path}")).expect("chromedriver answers");
        let json: Value = serde_json::from_str(&text).unwrap_or_else(|error| panic!("{path}: {error}: {head} {text}"));
        let value = json["value"].clone();
        if head.starts_with("HTTP/1.1 200") { Ok(value) } else { Err(value) }
    }

    /// Sends a request over HTTP/1.1: chromedriver has no HTTP/1.0. Returns the head and the body of the response.
    async fn exchange(&self, method: &str, path: &str, body: &str) -> std::io::Result<(String, String)> {
        let mut stream = TcpStream::connect(&self.address).await?;
        let length = body.len();
        let head = format!("{method} {path} HTTP/1.1\r\nHost: {}\r\nContent-Length: {length}\r\n\r\n", self.address);
        stream.write_all(format!("{head}{body}").as_bytes()).await?;
        let mut stream = BufReader::new(stream);
        let (mut head, mut length) = (String::new(), 0);
        while !head.ends_with("\r\n\r\n") {
            let from = head.len();
            if stream.read_line(&mut head).await? == 0 {
                return Err(std::io::ErrorKind::UnexpectedEof.into());
            }
            let line = head[from..].to_lowercase();
            length = line.strip_prefix("content-length:").and_then(|text| text.trim().parse().ok()).unwrap_or(length);
        }
        let mut body = vec![0; length];
        stream.read_exact(&mut body).await?;
        Ok((head, String::from_utf8_lossy(&body).into_owned()))
    }

    async fn call(&self, method: &str, path: &str, body: &Value) -> Value {
        self.request(method, &format!("/session/{}{path}", self.session), body).await
    }

    /// Opens a page and waits until it is complete.
    pub async fn go(&self, url: &str) {
        self.call("POST", "/url", &json!({ "url": url })).await;
    }

    /// Runs the body of a function; returns its result.
    pub async fn run(&self, script: &str) -> Value {
        self.call("POST", "/execute/sync", &json!({ "script": script, "args": [] })).await
    }

    /// Runs the body of a function whose last argument is called with the result.
    pub async fn run_async(&self, script: &str) -> Value {
        self.call("POST", "/execute/async", &json!({ "script": script, "args": [] })).await
    }

    /// Waits for an element: a click returns before the page to which it leads is there.
    async fn find(&self, selector: &str) -> String {
        let exists = format!("return document.querySelector({}) !== null", json!(selector));
        eventually(selector, async || if self.run(&exists).await == true { Ok(()) } else { Err(self.text().await) })
            .await;
        let found = self.call("POST", "/element", &json!({ "using": "css selector", "value": selector })).await;
        found[ELEMENT].as_str().unwrap_or_else(|| panic!("no {selector}: {found}")).to_owned()
    }

    /// Clicks an element as a person would: it must be visible. The page replaces parts of itself, so the element that was
    /// found may be gone.
    pub async fn click(&self, selector: &str) {
        eventually(selector, async || {
            let path = format!("/session/{}/element/{}/click", self.session, self.find(selector).await);
            match self.attempt("POST", &path, &json!({})).await {
                Err(error) if !error.to_string().contains("stale element") => panic!("{path}: {error}"),
                clicked => clicked,
            }
        })
        .await;
    }

    /// Replaces the text of a field.
    pub async fn type_in(&self, selector: &str, text: &str) {
        let element = self.find(selector).await;
        self.call("POST", &format!("/element/{element}/clear"), &json!({})).await;
        self.call("POST", &format!("/element/{element}/value"), &json!({ "text": text })).await;
    }

    /// Returns the visible text of the page.
    pub async fn text(&self) -> String {
        self.run("return document.body.innerText").await.as_str().unwrap_or_default().to_owned()
    }

    /// Waits until the page contains a text.
    pub async fn wait_for(&self, wanted: &str) {
        eventually(wanted, async || {
            let text = self.text().await;
            if text.contains(wanted) { Ok(()) } else { Err(text) }
        })
        .await;
    }

    /// Checks that the browser has reported nothing since the last call, such as a refusal by the content security
    /// policy or an error in a script.
    pub async fn check_console(&self, place: &str) {
        let log = self.call("POST", "/se/log", &json!({ "type": "browser" })).await;
        assert_eq!(log, json!([]), "{place}");
    }

    /// Checks that the page is not wider than the window.
    pub async fn check_width(&self, place: &str) {
        let excess =
            self.run("return document.documentElement.scrollWidth - document.documentElement.clientWidth").await;
        assert!(excess.as_i64().is_some_and(|pixels| pixels <= 0), "{place} is too wide by {excess} pixels");
    }

    /// Writes a picture of the window.
    pub async fn picture(&self, file: &Path) {
        tokio::time::sleep(Duration::from_millis(100)).await;
        let picture = self.call("GET", "/screenshot", &Value::Null).await;
        let bytes = BASE64_STANDARD.decode(picture.as_str().expect("base64")).expect("base64");
        std::fs::write(file, bytes).expect("the picture can be written");
    }
}

impl Drop for Browser {
    fn drop(&mut self) {
        let Some(mut driver) = self.driver.take() else { return };
        // chromedriver leaves its browsers running when it is killed.
        let shut_down = std::net::TcpStream::connect(&self.address).and_then(|mut stream| {
            stream.set_read_timeout(Some(DEADLINE))?;
            write!(stream, "GET /shutdown HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n\r\n", self.address)?;
            stream.read_to_end(&mut Vec::new())
        });
        if shut_down.is_err() {
            driver.kill().ok();
        }
        wait(DEADLINE, driver).ok();
    }
}

fn which(program: &str) -> String {
    let found = Command::new("sh").args(["-c", &format!("command -v {program}")]).output().expect("a shell");
    String::from_utf8_lossy(&found.stdout).trim().to_owned()
}
