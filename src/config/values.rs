//! Types of settings and their text forms.

use std::{fmt, path::PathBuf, str::FromStr, time::Duration};

use clap::ValueEnum;
use serde::{Deserialize, Deserializer, Serialize, Serializer, de};

use super::ListenUrl;

/// The history that automatic compaction keeps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Retention {
    Time(Duration),
    Revisions(i64),
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum AutoCompactionMode {
    /// By time
    Periodic,
    /// By number of revisions
    Revision,
}

/// TLS settings of listeners.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Tls {
    /// Certificate chain of the server, PEM.
    pub cert_file: PathBuf,
    /// Key of the certificate, PEM.
    pub key_file: PathBuf,
    /// Content of the two files if they are generated when they do not exist; `None`: they must exist.
    pub self_signed: Option<SelfSigned>,
    /// Requirements for client certificates; `None`: any client may connect.
    pub clients: Option<TlsClients>,
    /// Minimum and maximum version.
    pub versions: (TlsVersion, TlsVersion),
    /// Empty: all supported suites.
    pub cipher_suites: Vec<CipherSuite>,
}

/// Requirements for client certificates. Every client must present one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TlsClients {
    /// Root certificates, PEM.
    pub trusted_ca_file: PathBuf,
    /// Revoked certificates, PEM or DER.
    pub crl_file: Option<PathBuf>,
    /// Accepted names; empty: any.
    pub allowed_hostnames: Vec<String>,
}

/// A self-signed certificate.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SelfSigned {
    pub hosts: Vec<String>,
    pub validity_years: u32,
}

/// A TLS version, written as in etcd.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
pub enum TlsVersion {
    #[value(name = "TLS1.2")]
    #[serde(rename = "TLS1.2")]
    Tls12,
    #[value(name = "TLS1.3")]
    #[serde(rename = "TLS1.3")]
    Tls13,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum MetricsDetail {
    Basic,
    Extensive,
}

/// A cipher suite by its IANA name, as in etcd.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CipherSuite(String);

impl CipherSuite {
    /// Supported cipher suites; rustls has each of them.
    pub const NAMES: [&'static str; 9] = [
        "TLS_AES_128_GCM_SHA256",
        "TLS_AES_256_GCM_SHA384",
        "TLS_CHACHA20_POLY1305_SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_128_GCM_SHA256",
        "TLS_ECDHE_ECDSA_WITH_AES_256_GCM_SHA384",
        "TLS_ECDHE_ECDSA_WITH_CHACHA20_POLY1305_SHA256",
        "TLS_ECDHE_RSA_WITH_AES_128_GCM_SHA256",
        "TLS_ECDHE_RSA_WITH_AES_256_GCM_SHA384",
        "TLS_ECDHE_RSA_WITH_CHACHA20_POLY1305_SHA256",
    ];

    pub fn name(&self) -> &str {
        &self.0
    }
}

impl Datastore {
    pub fn kind(&self) -> &'static str {
        match self {
            Self::Sqlite(_) => "SQLite",
            Self::Postgres(_) => "Postgres",
        }
    }

    /// Returns the name for messages, without user, password and parameters.
    pub fn name(&self) -> String {
        match self {
            Self::Sqlite(file) => format!("sqlite://{}", file.display()),
            Self::Postgres(url) => {
                let address = url.split_once("://").map_or("", |(_, address)| address);
                let address = address.split_once('?').map_or(address, |(address, _)| address);
                format!("postgres://{}", address.rsplit_once('@').map_or(address, |(_, address)| address))
            }
        }
    }
}

impl FromStr for CipherSuite {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        // Go's older names of two suites.
        let name = if text.ends_with("_CHACHA20_POLY1305") { format!("{text}_SHA256") } else { text.to_owned() };
        if Self::NAMES.contains(&name.as_str()) {
            return Ok(Self(name));
        }
        Err(format!("{text:?} is not a supported cipher suite; use {}", Self::NAMES.join(", ")))
    }
}

impl fmt::Display for CipherSuite {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

/// A kind of database and its location.
#[derive(Clone, PartialEq, Eq)]
pub enum Datastore {
    Sqlite(PathBuf),
    /// A URL that may contain a password.
    Postgres(String),
}

/// A text that is never printed or logged.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Secret(pub(super) String);

impl Secret {
    pub fn text(&self) -> &str {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.0.is_empty() { "none" } else { "not shown" })
    }
}

impl FromStr for Secret {
    type Err = std::convert::Infallible;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Ok(Self(text.to_owned()))
    }
}

/// A list of values. A file contains a list or a comma-separated string; flags and variables contain the string.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct List<T>(pub Vec<T>);

pub type Urls = List<ListenUrl>;

impl<T> Default for List<T> {
    fn default() -> Self {
        Self(Vec::new())
    }
}

impl<T: FromStr> FromStr for List<T> {
    type Err = T::Err;

    fn from_str(text: &str) -> Result<Self, T::Err> {
        text.split(',')
            .map(str::trim)
            .filter(|item| !item.is_empty())
            .map(str::parse)
            .collect::<Result<_, _>>()
            .map(Self)
    }
}

impl<T: fmt::Display> Serialize for List<T> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.iter().map(ToString::to_string))
    }
}

impl<'de, T: FromStr<Err: fmt::Display>> Deserialize<'de> for List<T> {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a list or a comma-separated string")]
        enum Form {
            List(Vec<String>),
            Text(String),
        }
        let text = match Form::deserialize(deserializer)? {
            Form::List(items) => items.join(","),
            Form::Text(text) => text,
        };
        text.parse().map_err(de::Error::custom)
    }
}

/// Parses a number of bytes, with or without a unit: 8589934592, 8GiB, 8Gi, 8GB or 8G.
pub fn parse_bytes<T: TryFrom<i64>>(text: &str) -> Result<T, String> {
    let invalid = || format!("{text:?} is not a number of bytes; examples: 8589934592, 8GiB, 8GB");
    let (number, unit) = text.split_at(text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len()));
    let unit = unit.strip_suffix('B').unwrap_or(unit);
    let factor = match unit.to_ascii_uppercase().as_str() {
        "" => 1,
        "K" => 1_000,
        "M" => 1_000_000,
        "G" => 1_000_000_000,
        "T" => 1_000_000_000_000,
        "KI" => 1 << 10,
        "MI" => 1 << 20,
        "GI" => 1 << 30,
        "TI" => 1 << 40,
        _ => return Err(invalid()),
    };
    let bytes = number.trim().parse::<i64>().ok().and_then(|number| number.checked_mul(factor));
    bytes.and_then(|bytes| T::try_from(bytes).ok()).ok_or_else(invalid)
}

/// Deserializes a number of bytes from a number or a text.
pub(super) fn bytes<'de, D: Deserializer<'de>, T: TryFrom<i64>>(deserializer: D) -> Result<T, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a number of bytes, such as 8589934592 or \"8GiB\"")]
    enum Form {
        Number(i64),
        Text(String),
    }
    let text = match Form::deserialize(deserializer)? {
        Form::Number(number) => number.to_string(),
        Form::Text(text) => text,
    };
    parse_bytes(&text).map_err(de::Error::custom)
}

/// A file mode in octal, such as 0660.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileMode(pub u32);

impl FromStr for FileMode {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        const MAX: u32 = 0o777;
        match u32::from_str_radix(text, 8) {
            Ok(mode) if mode <= MAX => Ok(Self(mode)),
            Ok(_) | Err(_) => Err(format!("{text:?} is not a file mode; write it in octal, for example 0660")),
        }
    }
}

impl fmt::Display for FileMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:04o}", self.0)
    }
}

impl Serialize for FileMode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for FileMode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        String::deserialize(deserializer)?.parse().map_err(de::Error::custom)
    }
}

/// Parses a switch with the words of Go's `strconv.ParseBool`.
pub fn parse_switch(text: &str) -> Result<bool, String> {
    match text {
        "1" | "t" | "T" | "TRUE" | "true" | "True" => Ok(true),
        "0" | "f" | "F" | "FALSE" | "false" | "False" => Ok(false),
        _ => Err(format!("{text:?} is not a switch; use true or false")),
    }
}

/// Parses a switch in a file, with the words of YAML 1.1, which etcd reads, in addition.
pub(super) fn parse_file_switch(text: &str) -> Result<bool, String> {
    match text.to_ascii_lowercase().as_str() {
        "y" | "yes" | "on" => Ok(true),
        "n" | "no" | "off" => Ok(false),
        _ => parse_switch(text),
    }
}

/// Deserializes a switch.
pub(super) fn switch<'de, D: Deserializer<'de>>(deserializer: D) -> Result<bool, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "true or false")]
    enum Form {
        Bool(bool),
        Text(String),
    }
    match Form::deserialize(deserializer)? {
        Form::Bool(switch) => Ok(switch),
        Form::Text(text) => parse_file_switch(&text).map_err(de::Error::custom),
    }
}

/// A duration such as 10m, 1h30m or 500ms. In YAML it may also be a number of nanoseconds, as in etcd's file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Interval(pub Duration);

impl Interval {
    /// Minimum progress interval, as in etcd.
    pub(super) const MIN: Duration = Duration::from_millis(100);
    /// Minimum interval of snapshots, whose names contain seconds.
    pub(super) const SNAPSHOT_MIN: Duration = Duration::from_secs(1);
    /// Minimum poll interval. A shorter one adds load to the database and finds no rows earlier.
    pub(super) const POLL_MIN: Duration = Duration::from_millis(1);
}

impl FromStr for Interval {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        if let Some(duration) = go_duration(text) {
            return Ok(Self(duration));
        }
        humantime::parse_duration(text)
            .map(Self)
            .map_err(|error| format!("{text:?} is not a duration ({error}); examples: 10m, 1h30m, 500ms"))
    }
}

/// Parses a duration in the form of Go: `0`, or numbers, which may have fractions, each with a unit.
fn go_duration(text: &str) -> Option<Duration> {
    if text == "0" {
        return Some(Duration::ZERO);
    }
    let (mut total, mut rest) = (Duration::ZERO, text);
    while !rest.is_empty() {
        let (number, after) = rest.split_at(rest.find(|c: char| !c.is_ascii_digit() && c != '.')?);
        let (unit, after) = after.split_at(after.find(|c: char| c.is_ascii_digit() || c == '.').unwrap_or(after.len()));
        let secs = match unit {
            "ns" => 1e-9,
            "us" | "µs" => 1e-6,
            "ms" => 1e-3,
            "s" => 1.0,
            "m" => 60.0,
            "h" => 3_600.0,
            _ => return None,
        };
        let part = Duration::try_from_secs_f64(number.parse::<f64>().ok()? * secs).ok()?;
        total = total.checked_add(part)?;
        rest = after;
    }
    (!text.is_empty()).then_some(total)
}

impl fmt::Display for Interval {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        humantime::format_duration(self.0).fmt(f)
    }
}

impl Serialize for Interval {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Interval {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "a duration such as 10m, or a number of nanoseconds")]
        enum Form {
            Nanos(u64),
            Text(String),
        }
        match Form::deserialize(deserializer)? {
            Form::Nanos(nanos) => Ok(Self(Duration::from_nanos(nanos))),
            Form::Text(text) => text.parse().map_err(de::Error::custom),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "lowercase")]
pub enum LogFormat {
    /// Text on a terminal, JSON otherwise
    Auto,
    /// Human-readable lines
    #[value(alias = "console")]
    #[serde(alias = "console")]
    Text,
    /// One JSON object per line
    Json,
}
