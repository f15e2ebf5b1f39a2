//! Stored values as people read them, and the differences between two versions of a value.
//!
//! etcd's values are bytes. [`Shown::of`] recognises what a value is and renders it:
//!
//! | value | shown as |
//! |---|---|
//! | a Kubernetes object in protobuf (`k8s\0`) | YAML, as `kubectl get -o yaml` shows it |
//! | a Kubernetes object in JSON, such as a custom resource | YAML |
//! | another object or array in JSON | JSON with one line for each scalar |
//! | JSON whose names are not unique, or with a number of more digits than a float has | text |
//! | a value that Kubernetes has encrypted (`k8s:enc:`) | what encrypted it, and a hex dump |
//! | UTF-8 | text |
//! | anything else | a hex dump |
//!
//! [`diff()`] compares two rendered values line by line. [`Managers`] tell who wrote a version of an object of Kubernetes.
//!
//! The crate knows nothing of keys, revisions or etcd. Values are untrusted: nothing in them causes a panic, all output
//! is bounded, and what could control a terminal is escaped. The data of Secrets is masked unless it is asked for; a
//! difference still tells that a masked value changed. What is not a Secret is not masked, whatever it contains.
//!
//! ```
//! use orlop_objects::{Secrets, Shown, Style, diff};
//!
//! let old = Shown::of(br#"{"apiVersion":"v1","kind":"Secret","data":{"user":"bWU=","key":"YWJj"}}"#, Secrets::Mask);
//! let new = Shown::of(br#"{"apiVersion":"v1","kind":"Secret","data":{"user":"bWU=","key":"eHl6"}}"#, Secrets::Mask);
//! assert_eq!(
//!     old.text(),
//!     "apiVersion: v1\ndata:\n  key: '<masked: 3 bytes>'\n  user: '<masked: 2 bytes>'\nkind: Secret\n"
//! );
//! assert_eq!(
//!     diff(Some(&old), Some(&new), 0).render(Style::Plain),
//!     "@@ -3,1 +3,1 @@\n-  key: '<masked: 3 bytes>'\n+  key: '<masked: 3 bytes>'  # changed\n"
//! );
//! ```
//!
//! Modules: `wire` and `envelope` read protobuf, `kubernetes` gives its fields their names, `node` is the tree that all
//! values become, `secret` masks it, `yaml`, `json` and `hex` write it to `lines`, and `diff` compares those. `managers` reads
//! who wrote an object, without the tree.
//!
//! The feature `kubernetes` adds the messages of Kubernetes' built-in kinds. Without it, and for kinds that it does not
//! know, objects in protobuf are shown by field numbers.

mod diff;
mod envelope;
mod hex;
mod json;
mod kubernetes;
mod lines;
mod managers;
mod node;
mod secret;
#[cfg(test)]
mod tests;
mod wire;
mod yaml;

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};
use serde::Serialize;
use serde_json::Value;

pub use self::{
    diff::{Change, Diff, DiffLine, Hunk, Style, diff},
    json::without_hazards,
    lines::{escaped, is_hazard},
    managers::{LastManagers, Manager, Managers},
};
use self::{
    envelope::{Envelope, MAGIC},
    lines::{Line, Lines},
    node::{Digest, Masked, Node},
};

/// Decides whether the data of Secrets is shown.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Secrets {
    Mask,
    Show,
}

/// Decides whether `metadata.managedFields` is shown, which is long and changes with every update.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum ManagedFields {
    Hide,
    Show,
}

/// What of a value is shown. A [`Secrets`] stands for a view without `managedFields`, as kubectl's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct View {
    pub secrets: Secrets,
    pub managed_fields: ManagedFields,
}

impl From<Secrets> for View {
    fn from(secrets: Secrets) -> Self {
        Self { secrets, managed_fields: ManagedFields::Hide }
    }
}

/// What a value is.
#[derive(Clone, PartialEq, Eq, Debug, Serialize)]
#[serde(tag = "form", rename_all = "lowercase", rename_all_fields = "camelCase")]
pub enum Form {
    /// An object with an `apiVersion` and a `kind`, in protobuf or JSON. Both are escaped, and empty if the object is
    /// too damaged to tell.
    Kubernetes {
        api_version: String,
        kind: String,
    },
    Json,
    Text,
    Binary,
    /// Encrypted by Kubernetes; `provider` is what stands between `k8s:enc:` and the data, such as `aescbc:v1:key1`.
    Encrypted {
        provider: String,
    },
}

/// A value as it is shown. It contains no data of Secrets if it was made with [`Secrets::Mask`], only digests whose key
/// is the process's own, by which [`diff()`] finds changes.
#[derive(Clone, Debug)]
pub struct Shown {
    pub form: Form,
    /// The value for programs: an object or array for Kubernetes and JSON, a string for text, base64 for other bytes.
    /// Strings in it are not escaped.
    pub json: Value,
    /// Remarks on the value that its rendering also contains: unknown fields, damage.
    pub remarks: Vec<String>,
    /// Number of masked values.
    pub masked: usize,
    /// Size of the value in bytes.
    pub bytes: usize,
    lines: Vec<Line>,
    stored: Digest,
}

impl Shown {
    /// Recognises and renders a value.
    pub fn of(value: &[u8], view: impl Into<View>) -> Self {
        let view = view.into();
        if let Some(wire) = value.strip_prefix(MAGIC) {
            return in_envelope(value, &Envelope::of(wire), view);
        }
        if let Some(encrypted) = value.strip_prefix(b"k8s:enc:") {
            return of_encrypted(value, encrypted);
        }
        if matches!(value.trim_ascii_start().first(), Some(b'{' | b'['))
            && let Some(node) = json::read(value)
        {
            return of_tree(value, node, Vec::new(), view);
        }
        let form = if is_text(value) { Form::Text } else { Form::Binary };
        if view.secrets == Secrets::Mask && secret::may_contain_secret(&String::from_utf8_lossy(value)) {
            return concealed(value, form);
        }
        match std::str::from_utf8(value) {
            Ok(text) if form == Form::Text => of_text(value, text),
            _ => of_binary(value, form, &[]),
        }
    }

    /// Returns the rendered value. Every line ends with a newline.
    pub fn text(&self) -> String {
        self.lines.iter().flat_map(|line| [&line.text, "\n"]).collect()
    }

    /// Returns the lines of the rendered value.
    pub fn lines(&self) -> impl Iterator<Item = &str> {
        self.lines.iter().map(|line| line.text.as_str())
    }
}

/// Makes a [`Shown`] of lines. `remarks` become lines too.
fn shown(value: &[u8], form: Form, json: Value, mut lines: Lines, remarks: &[Line]) -> Shown {
    for remark in remarks {
        lines.push(&format!("# {}", remark.text), remark.hidden);
    }
    let remarks = remarks.iter().map(|remark| escaped(&remark.text)).collect();
    let (lines, stored) = (lines.finish(value), Digest::of(value));
    Shown { form, json, remarks, masked: 0, bytes: value.len(), lines, stored }
}

fn remark(text: String) -> Line {
    Line { text, hidden: None }
}

/// Shows a tree: an object of Kubernetes as YAML, anything else as JSON.
fn of_tree(value: &[u8], mut node: Node, remarks: Vec<Line>, view: View) -> Shown {
    let text = |node: &Node, key| node.get(key).and_then(Node::as_text).map(escaped);
    let form = match (text(&node, "apiVersion"), text(&node, "kind")) {
        (Some(api_version), Some(kind)) => Form::Kubernetes { api_version, kind },
        _ => Form::Json,
    };
    let masked = match view.secrets {
        Secrets::Mask => secret::mask(&mut node),
        Secrets::Show => 0,
    };
    if view.managed_fields == ManagedFields::Hide
        && matches!(form, Form::Kubernetes { .. })
        && let Some(Node::Map(metadata)) = node.get_mut("metadata")
    {
        metadata.remove("managedFields");
    }
    let mut lines = Lines::default();
    match form {
        Form::Kubernetes { .. } => yaml::write(&mut lines, &node),
        Form::Json | Form::Text | Form::Binary | Form::Encrypted { .. } => json::write(&mut lines, &node),
    }
    Shown { masked, ..shown(value, form, node.to_json(), lines, &remarks) }
}

/// Shows what an envelope contains.
fn in_envelope(value: &[u8], envelope: &Envelope<'_>, view: View) -> Shown {
    let Envelope { api_version, kind, raw, content_encoding, content_type, damaged, unknown_fields } = envelope;
    let form = Form::Kubernetes { api_version: escaped(api_version), kind: escaped(kind) };
    // The kind may be in the missing part.
    let conceal = view.secrets == Secrets::Mask && (kind.is_empty() || secret::is_secret_kind(kind));
    if *damaged {
        let remarks = [remark(format!("a damaged Kubernetes object: {api_version} {kind}"))];
        return if conceal { concealed(value, form) } else { of_binary(value, form, &remarks) };
    }
    let mut remarks: Vec<Line> =
        unknown_fields.iter().map(|number| remark(format!("the envelope: unknown field {number}"))).collect();
    if !content_encoding.is_empty() {
        remarks.push(remark(format!("content encoding: {content_encoding}")));
    } else if content_type.starts_with("application/json") {
        if let Some(node) = json::read(raw) {
            return with_type(value, envelope, node, remarks, view);
        }
        if view.secrets == Secrets::Mask && secret::may_contain_secret(&String::from_utf8_lossy(raw)) {
            return concealed(value, form);
        }
    } else if let Some(node) = decoded(envelope, conceal, &mut remarks) {
        return with_type(value, envelope, node, remarks, view);
    }
    if conceal {
        return concealed(value, form);
    }
    let fields = if content_encoding.is_empty() { wire::guessed(raw, 0) } else { None };
    let key = if fields.is_some() { "fields" } else { "raw" };
    let node = fields.unwrap_or_else(|| Node::Text(BASE64_STANDARD.encode(raw)));
    remarks.push(remark("the fields of this object are not known; they are shown by number".to_owned()));
    with_type(value, envelope, Node::Map(BTreeMap::from([(key.to_owned(), node)])), remarks, view)
}

/// Returns the object by its fields' names; `None` if its kind is not known.
fn decoded(envelope: &Envelope<'_>, conceal: bool, remarks: &mut Vec<Line>) -> Option<Node> {
    use kubernetes::{NotDecoded, Remarks};

    let style = if conceal { Remarks::WithoutBytes } else { Remarks::WithBytes };
    match kubernetes::decode(&envelope.api_version, &envelope.kind, envelope.raw, style) {
        Ok(decoded) => {
            remarks.extend(decoded.remarks);
            Some(decoded.node)
        }
        Err(NotDecoded::UnknownKind) => None,
        Err(NotDecoded::TooLarge) => {
            let text = format!("too large to be decoded: {} bytes", envelope.raw.len());
            remarks.push(Line { text, hidden: Some(Digest::of(envelope.raw)) });
            Some(Node::Map(BTreeMap::new()))
        }
    }
}

/// Shows an object with the type that its envelope states.
fn with_type(value: &[u8], envelope: &Envelope<'_>, node: Node, remarks: Vec<Line>, view: View) -> Shown {
    let mut map = if let Node::Map(map) = node { map } else { BTreeMap::from([("raw".to_owned(), node)]) };
    map.insert("apiVersion".to_owned(), Node::text(&envelope.api_version));
    map.insert("kind".to_owned(), Node::text(&envelope.kind));
    of_tree(value, Node::Map(map), remarks, view)
}

fn of_text(value: &[u8], text: &str) -> Shown {
    let mut lines = Lines::default();
    text.split('\n').for_each(|line| lines.push(line, None));
    shown(value, Form::Text, Value::String(text.to_owned()), lines, &[])
}

fn of_binary(value: &[u8], form: Form, remarks: &[Line]) -> Shown {
    let mut lines = Lines::default();
    lines.push(&format!("# {} bytes", value.len()), None);
    hex::write(&mut lines, value);
    shown(value, form, Value::String(BASE64_STANDARD.encode(value)), lines, remarks)
}

fn of_encrypted(value: &[u8], encrypted: &[u8]) -> Shown {
    // The provider, its version and the name of the key.
    let end = encrypted.iter().take(256).enumerate().filter(|(_, byte)| **byte == b':').nth(2);
    let (provider, data) = encrypted.split_at(end.map_or(0, |(index, _)| index));
    let provider = escaped(&String::from_utf8_lossy(provider));
    let mut lines = Lines::default();
    lines.push(&format!("# encrypted by Kubernetes: {provider}"), None);
    lines.push(&format!("# {} bytes", data.len()), None);
    hex::write(&mut lines, data);
    shown(value, Form::Encrypted { provider }, Value::String(BASE64_STANDARD.encode(value)), lines, &[])
}

/// Shows only the length of a value that may contain a Secret but cannot be read.
fn concealed(value: &[u8], form: Form) -> Shown {
    let Masked { shown: text, original } = Masked::new(value.len(), value);
    let remark = "this may be a Secret that cannot be decoded, so nothing of it is shown".to_owned();
    let mut lines = Lines::default();
    lines.push(&text, Some(original));
    Shown { masked: 1, ..shown(value, form, Value::String(text), lines, &[Line { text: remark, hidden: None }]) }
}

fn is_text(value: &[u8]) -> bool {
    !value.contains(&0) && std::str::from_utf8(value).is_ok()
}
