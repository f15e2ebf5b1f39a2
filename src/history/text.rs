//! How pairs and versions are printed.

use std::io::IsTerminal as _;

use clap::ValueEnum;
use orlop_objects::{ManagedFields, Manager, Secrets, Shown, Style, View};
use orlop_wire::proto::client::{mvccpb::KeyValue, orlopb::HistoryChange};
use serde_json::{Map, Value, json};

use crate::{
    output::Format,
    text::{bytes, shown_key, shown_managers, shown_time},
};

/// The flags for output.
#[derive(Debug, Clone, Copy, clap::Args)]
pub(super) struct OutputFlags {
    /// Output format; json is one object per line
    #[arg(short, long, default_value = "simple", value_name = "FORMAT")]
    pub(super) write_out: Format,

    /// Show the data of Kubernetes' Secrets
    #[arg(long)]
    show_secrets: bool,

    /// Show metadata.managedFields of Kubernetes' objects
    #[arg(long)]
    managed_fields: bool,

    /// Colours of differences; auto: on a terminal, unless NO_COLOR is set
    #[arg(long, default_value = "auto", value_name = "WHEN")]
    color: Colors,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Colors {
    Auto,
    Always,
    Never,
}

impl OutputFlags {
    pub(super) fn view(self) -> View {
        View {
            secrets: if self.show_secrets { Secrets::Show } else { Secrets::Mask },
            managed_fields: if self.managed_fields { ManagedFields::Show } else { ManagedFields::Hide },
        }
    }

    pub(super) fn style(self) -> Style {
        let is_wanted = std::env::var_os("NO_COLOR").is_none_or(|value| value.is_empty());
        match self.color {
            Colors::Always => Style::Coloured,
            Colors::Auto if is_wanted && std::io::stdout().is_terminal() => Style::Coloured,
            Colors::Auto | Colors::Never => Style::Plain,
        }
    }
}

/// Returns a pair as JSON: its metadata, and its value as an object, a text or base64.
pub(super) fn pair_json(pair: &KeyValue, shown: &Shown) -> Map<String, Value> {
    let mut object = key_json(&pair.key);
    object.insert("modRevision".to_owned(), json!(pair.mod_revision));
    object.insert("createRevision".to_owned(), json!(pair.create_revision));
    object.insert("version".to_owned(), json!(pair.version));
    object.insert("lease".to_owned(), json!(pair.lease));
    object.insert("bytes".to_owned(), json!(pair.value.len()));
    // `form` and, for Kubernetes' objects, their type.
    if let Value::Object(form) = json!(shown.form) {
        object.extend(form);
    }
    object.insert("value".to_owned(), shown.json.clone());
    object
}

/// Returns a key as JSON: `key` if it is UTF-8, else `keyBase64`.
pub(super) fn key_json(key: &[u8]) -> Map<String, Value> {
    use base64::{Engine as _, prelude::BASE64_STANDARD};
    let (name, value) = match std::str::from_utf8(key) {
        Ok(text) => ("key", text.to_owned()),
        Err(_) => ("keyBase64", BASE64_STANDARD.encode(key)),
    };
    Map::from_iter([(name.to_owned(), Value::String(value))])
}

/// Returns one line about a version, which `managers` wrote.
pub(super) fn heading(pair: &KeyValue, change: &HistoryChange, managers: &[Manager]) -> String {
    let time = match change.unix_ms {
        0 => "time unknown".to_owned(),
        time if change.time_is_latest => format!("by {}", shown_time(time)),
        time => shown_time(time),
    };
    let key = shown_key(&pair.key);
    if change.deleted {
        return format!("revision {}  {time}  deleted  {key}\n", pair.mod_revision);
    }
    let what = if pair.version == 1 { "created".to_owned() } else { format!("version {}", pair.version) };
    let lease = if pair.lease == 0 { String::new() } else { format!("  lease {:x}", pair.lease) };
    let size = bytes(i64::try_from(pair.value.len()).unwrap_or(i64::MAX));
    let by = if managers.is_empty() { String::new() } else { format!("  by {}", shown_managers(managers)) };
    format!("revision {}  {time}  {what}  {size}{lease}{by}  {key}\n", pair.mod_revision)
}

/// Indents each line of a text.
pub(super) fn indented(text: &str) -> String {
    text.lines().map(|line| format!("    {line}\n")).collect()
}
