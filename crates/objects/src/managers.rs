//! Who wrote a value: the field managers in `metadata.managedFields`, by which Kubernetes keeps track of the fields that a
//! client has set. A client chooses the name of its manager itself; it is not a user.
//!
//! kube-apiserver sets the time of a manager's entry, to the second, when the manager adds or changes a field. So the
//! entries with the newest time name the last writer, unless an earlier version has them already: a write that only removes
//! fields, a deletion with a grace period and a second write within the same second leave the times as they are, and an
//! earlier version may be written again. Those versions get no writer rather than a wrong one. The entry of a write to the
//! subresource `scale` has no time: it names the writer of the version in which it is new.
//!
//! Only these entries are read, so neither the kind of an object nor its size matters.
//!
//! Source: Kubernetes documentation, "Server-Side Apply", "Field management"; `meta/v1/generated.proto`.

use std::{fmt, time::UNIX_EPOCH};

use serde::{
    Deserialize, Deserializer, Serialize,
    de::{SeqAccess, Visitor},
};

use crate::{
    envelope::{Envelope, MAGIC},
    lines::escaped,
    wire::{Fields, WireValue},
};

/// Maximum length of a name in bytes. Kubernetes allows no longer name of a manager.
const NAME_BYTES_MAX: usize = 128;
/// Maximum number of managers of one time. Kubernetes merges the oldest entries if there are more than ten.
const MANAGERS_MAX: usize = 16;
/// Maximum difference between the time of an entry, by the clock of kube-apiserver, and the time of its version, by that of
/// the store.
const TIME_DIFFERENCE_MAX_SECS: u64 = 5;

/// A manager as its entry names it.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
pub struct Manager {
    pub manager: String,
    /// `Apply` or `Update`.
    pub operation: String,
    /// The subresource that was written, such as `status`; empty: the object itself.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub subresource: String,
}

impl Manager {
    /// Returns the approximate size in memory.
    fn bytes(&self) -> usize {
        size_of::<Self>() + self.manager.len() + self.operation.len() + self.subresource.len()
    }
}

/// Writes `kubectl-edit (Update)` or `kubelet (Update of status)`, without hazardous characters. A name with unusual ones is
/// in quotes.
impl fmt::Display for Manager {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let of = if self.subresource.is_empty() { "" } else { " of " };
        write!(formatter, "{} ({}{of}{})", quoted(&self.manager), self.operation, quoted(&self.subresource))
    }
}

/// Returns a name as it is, or in quotes if it has unusual characters: the name of a client could read like the end of the
/// line.
fn quoted(name: &str) -> String {
    if name.chars().all(|c| c.is_ascii_alphanumeric() || "._:/@+-".contains(c)) {
        return name.to_owned();
    }
    format!("\"{}\"", escaped(&name.replace('\\', "\\\\").replace('"', "\\\"")))
}

/// The managers of a value that may have written it.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct Managers {
    /// The newest time of an entry, in seconds since 1970.
    time: Option<i64>,
    /// Those with this time.
    newest: Vec<Manager>,
    /// Those without a time.
    timeless: Vec<Manager>,
}

impl Managers {
    /// Reads the managers of a value. What is no object of Kubernetes, or cannot be read, has none.
    pub fn of(value: &[u8]) -> Self {
        match value.strip_prefix(MAGIC) {
            Some(wire) => of_envelope(&Envelope::of(wire)),
            None => of_json(value),
        }
    }

    fn add(&mut self, entry: Entry) {
        let Entry { manager, operation, subresource, time } = entry;
        let is_known_operation = matches!(&*operation, "Apply" | "Update");
        if !is_known_operation || manager.is_empty() || manager.len().max(subresource.len()) > NAME_BYTES_MAX {
            return;
        }
        if time > self.time {
            self.time = time;
            self.newest.clear();
        }
        let same = match time {
            None => &mut self.timeless,
            time if time == self.time => &mut self.newest,
            Some(_) => return,
        };
        let manager = Manager { manager, operation, subresource };
        if same.len() < MANAGERS_MAX && !same.contains(&manager) {
            same.push(manager);
        }
    }

    fn bytes(&self) -> usize {
        self.newest.iter().chain(&self.timeless).map(Manager::bytes).sum()
    }

    /// Returns those that are not in a version before, whose newest time is not later.
    fn since(&self, before: &Self) -> Vec<Manager> {
        let new = |managers: &[Manager], known: &[Manager]| -> Vec<Manager> {
            managers.iter().filter(|manager| !known.contains(manager)).cloned().collect()
        };
        let newest = if self.time > before.time { self.newest.clone() } else { new(&self.newest, &before.newest) };
        if newest.is_empty() { new(&self.timeless, &before.timeless) } else { newest }
    }
}

/// The newest managers of the versions of a key before the next one.
#[derive(Clone, Debug, Default)]
pub enum LastManagers {
    /// No version is known.
    #[default]
    Unknown,
    /// Empty if there was no version.
    Known(Managers),
}

impl LastManagers {
    /// Notes that the key is created by the next version: if no version is known, there was none.
    pub fn begin(&mut self) {
        if matches!(self, Self::Unknown) {
            *self = Self::Known(Managers::default());
        }
    }

    /// Returns the managers that wrote the next version, as far as that is known, and keeps the newest ones. `unix_ms` is
    /// the time of the version in milliseconds since 1970; `None`: not known.
    pub fn advance(&mut self, version: Managers, unix_ms: Option<i64>) -> Vec<Manager> {
        let writers = match &*self {
            // An earlier version was written again.
            Self::Known(before) if version.time < before.time => return Vec::new(),
            Self::Known(before) => version.since(before),
            Self::Unknown => {
                let difference = unix_ms.zip(version.time).map(|(ms, secs)| (ms / 1000).abs_diff(secs));
                let is_near = difference.is_some_and(|secs| secs <= TIME_DIFFERENCE_MAX_SECS);
                if is_near { version.newest.clone() } else { Vec::new() }
            }
        };
        *self = Self::Known(version);
        writers
    }

    /// Returns the approximate size of the managers in memory.
    pub fn bytes(&self) -> usize {
        match self {
            Self::Unknown => 0,
            Self::Known(managers) => managers.bytes(),
        }
    }
}

/// An entry of `managedFields`. Fields that were not sent are empty.
#[derive(Default, Deserialize)]
#[serde(default)]
struct Entry {
    manager: String,
    operation: String,
    subresource: String,
    /// Seconds since 1970.
    #[serde(deserialize_with = "of_rfc_3339")]
    time: Option<i64>,
}

/// The part of an object in JSON that is read. What lacks one of these fields is no object of Kubernetes.
#[derive(Deserialize)]
struct Object {
    #[serde(rename = "apiVersion")]
    _api_version: String,
    #[serde(rename = "kind")]
    _kind: String,
    metadata: Metadata,
}

#[derive(Deserialize)]
struct Metadata {
    #[serde(default, rename = "managedFields", deserialize_with = "of_list")]
    managed_fields: Managers,
}

fn of_json(value: &[u8]) -> Managers {
    // A list would be read as the fields in their order.
    if value.trim_ascii_start().first() != Some(&b'{') {
        return Managers::default();
    }
    serde_json::from_slice::<Object>(value).map(|object| object.metadata.managed_fields).unwrap_or_default()
}

/// Reads a list of entries one by one: all of them together may be much larger than the value.
fn of_list<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Managers, D::Error> {
    struct Entries;

    impl<'de> Visitor<'de> for Entries {
        type Value = Managers;

        fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
            formatter.write_str("a list of entries")
        }

        fn visit_seq<A: SeqAccess<'de>>(self, mut entries: A) -> Result<Managers, A::Error> {
            let mut managers = Managers::default();
            while let Some(entry) = entries.next_element::<Entry>()? {
                managers.add(entry);
            }
            Ok(managers)
        }
    }

    deserializer.deserialize_seq(Entries)
}

/// Reads a time; one that cannot be read is as if there were none.
fn of_rfc_3339<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<i64>, D::Error> {
    let text = Option::<String>::deserialize(deserializer)?;
    let time = text.and_then(|text| humantime::parse_rfc3339(&text).ok());
    let since_epoch = time.and_then(|time| time.duration_since(UNIX_EPOCH).ok());
    Ok(since_epoch.and_then(|since_epoch| i64::try_from(since_epoch.as_secs()).ok()))
}

fn of_envelope(envelope: &Envelope<'_>) -> Managers {
    let Envelope { raw, content_encoding, content_type, damaged, .. } = envelope;
    if *damaged || !content_encoding.is_empty() {
        return Managers::default();
    }
    if content_type.starts_with("application/json") {
        return of_json(raw);
    }
    let mut managers = Managers::default();
    // Every object has its metadata, an `ObjectMeta`, in field 1. Lists, whose metadata have no field 17, are not stored.
    for (number, value) in Fields::of(raw).flatten() {
        let (1, WireValue::Bytes(metadata)) = (number, value) else { continue };
        for (number, value) in Fields::of(metadata).flatten() {
            let (17, WireValue::Bytes(entry)) = (number, value) else { continue };
            managers.add(of_entry(entry));
        }
    }
    managers
}

fn of_entry(wire: &[u8]) -> Entry {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let mut entry = Entry::default();
    for (number, value) in Fields::of(wire).flatten() {
        let WireValue::Bytes(bytes) = value else { continue };
        match number {
            1 => entry.manager = text(bytes),
            2 => entry.operation = text(bytes),
            4 => entry.time = seconds(bytes),
            8 => entry.subresource = text(bytes),
            _ => {}
        }
    }
    entry
}

/// Returns the seconds of a `Time`, its field 1. An empty message is no time.
fn seconds(time: &[u8]) -> Option<i64> {
    Fields::of(time).flatten().find_map(|field| match field {
        (1, WireValue::Varint(seconds)) => Some(seconds.cast_signed()),
        (_, WireValue::Varint(_) | WireValue::Fixed64(_) | WireValue::Fixed32(_) | WireValue::Bytes(_)) => None,
    })
}
