//! Masks the data of Secrets in a tree, wherever in it they are.
//!
//! Masked are the values of `data` and `stringData`, and the same in the copy of the object that `kubectl apply` keeps
//! in an annotation. In this copy every unknown field is masked as a whole, also inside the metadata, because its name
//! may be a misspelled one of these, or one of these at a wrong depth. Every other long annotation is masked as a
//! whole, because it may be the copy of another tool. What cannot be read well enough to know is masked as a whole,
//! too.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::{
    json,
    node::{Masked, Node},
};

const LAST_APPLIED: &str = "kubectl.kubernetes.io/last-applied-configuration";
/// The fields of a Secret.
const FIELDS: [&str; 7] = ["apiVersion", "kind", "metadata", "type", "immutable", "data", "stringData"];
/// The fields of the metadata of an object.
const METADATA_FIELDS: [&str; 15] = [
    "annotations",
    "creationTimestamp",
    "deletionGracePeriodSeconds",
    "deletionTimestamp",
    "finalizers",
    "generateName",
    "generation",
    "labels",
    "managedFields",
    "name",
    "namespace",
    "ownerReferences",
    "resourceVersion",
    "selfLink",
    "uid",
];
/// Length of an annotation in bytes from which on it may be a copy of the Secret.
const COPY_BYTES_MIN: usize = 64;
/// The envelope of an object in protobuf, in base64, as an object in a list would have it.
const ENVELOPE_BASE64: &str = "azhzA";

/// Reports whether objects of this kind contain data to mask.
pub(crate) fn is_secret_kind(kind: &str) -> bool {
    matches!(kind, "Secret" | "SecretList")
}

/// Reports whether a value that is no valid object could be a damaged Secret or a manifest of one.
pub(crate) fn may_contain_secret(text: &str) -> bool {
    let begin = text.trim_start_matches(|c: char| c.is_whitespace() || c == '\u{feff}');
    // In JSON and YAML, an escape can stand for any letter.
    begin.starts_with(['{', '[']) && ["Secret", "\\u", "\\x", "\\U"].iter().any(|part| text.contains(part))
        || is_secret_manifest(text)
}

/// Reports whether a text contains the key `kind` with a value that begins with `Secret`. YAML allows quotes around both
/// and blanks between them. With an anchor, a tag, an escape or a comment, or as a block, the value may be any word, so such
/// a text counts as a Secret if it also has data. Manifests of other kinds, which are written as plain words, do not.
fn is_secret_manifest(text: &str) -> bool {
    let is_blank_or_quote = |c: char| c.is_whitespace() || matches!(c, '"' | '\'');
    let is_part = |before: &str| before.ends_with(char::is_alphanumeric);
    let has_data =
        || ["data", "stringData"].iter().any(|name| text.match_indices(name).any(|(at, _)| !is_part(&text[..at])));
    let has_kind = text.split("kind").skip(1).any(|rest| {
        let Some(value) = rest.trim_start_matches(is_blank_or_quote).strip_prefix(':') else { return false };
        let value = value.trim_start_matches(is_blank_or_quote);
        let word = value.split(is_blank_or_quote).next().unwrap_or_default();
        let is_unusual = word.starts_with(['&', '*', '!', '|', '>', '#']) || word.contains('\\');
        word.starts_with("Secret") || is_unusual && has_data()
    });
    has_kind || has_escaped_key(text) && (text.contains("Secret") || has_data())
}

/// Reports whether a line begins with a key in quotes that contains an escape. The key may be `kind`.
fn has_escaped_key(text: &str) -> bool {
    text.lines().any(|line| {
        let line = line.trim_start_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '?' | '\u{feff}'));
        let key = line.strip_prefix('"').and_then(|line| line.split_once('"'));
        key.is_some_and(|(key, rest)| key.contains('\\') && rest.trim_start().starts_with(':'))
    })
}

/// Reports whether a text in a tree is the base64 of an object in protobuf, or of other bytes that may contain a Secret.
fn may_contain_secret_in_base64(text: &str) -> bool {
    text.starts_with(ENVELOPE_BASE64)
        || BASE64_STANDARD.decode(text).is_ok_and(|bytes| may_contain_secret(&String::from_utf8_lossy(&bytes)))
}

/// Masks all Secrets in a tree and returns the number of masked values.
pub(crate) fn mask(node: &mut Node) -> usize {
    let kind = node.get("kind").and_then(Node::as_text).unwrap_or_default().to_owned();
    match node {
        Node::Map(map) => {
            let own = match (kind.as_str(), map.get_mut("items")) {
                ("Secret", _) => mask_secret(node),
                ("SecretList", Some(Node::List(items))) => items.iter_mut().map(mask_secret).sum(),
                _ => 0,
            };
            own + children(node)
        }
        Node::List(_) => children(node),
        Node::Text(text) if may_contain_secret_in_base64(text) => mask_value(node),
        Node::Null | Node::Bool(_) | Node::Number(_) | Node::Text(_) | Node::Masked(_) => 0,
    }
}

fn children(node: &mut Node) -> usize {
    match node {
        Node::Map(map) => map.values_mut().map(mask).sum(),
        Node::List(items) => items.iter_mut().map(mask).sum(),
        Node::Null | Node::Bool(_) | Node::Number(_) | Node::Text(_) | Node::Masked(_) => 0,
    }
}

fn mask_secret(secret: &mut Node) -> usize {
    let Node::Map(map) = secret else { return mask_value(secret) };
    let mut masked = 0;
    for name in ["data", "stringData"] {
        masked += match map.get_mut(name) {
            None | Some(Node::Null) => 0,
            Some(Node::Map(values)) => values.values_mut().map(|value| mask_data(value, name)).sum(),
            Some(other) => mask_value(other),
        };
    }
    masked
        + match secret.get_mut("metadata").and_then(|metadata| metadata.get_mut("annotations")) {
            None | Some(Node::Null) => 0,
            Some(Node::Map(values)) => values.iter_mut().map(|(name, value)| mask_annotation(name, value)).sum(),
            Some(other) => mask_value(other),
        }
}

fn mask_annotation(name: &str, value: &mut Node) -> usize {
    if name == LAST_APPLIED {
        return mask_copy(value);
    }
    let is_short = value.as_text().is_some_and(|text| text.len() < COPY_BYTES_MIN && !text.starts_with(['{', '[']));
    if is_short { 0 } else { mask_value(value) }
}

/// Masks the values in an annotation with a copy of the Secret as JSON.
fn mask_copy(copy: &mut Node) -> usize {
    let Some(original) = copy.as_text().map(str::to_owned) else { return mask_value(copy) };
    let Some(Node::Map(mut fields)) = json::read(original.as_bytes()) else { return mask_value(copy) };
    let mut unknown = mask_unknown(&mut fields, &FIELDS);
    unknown += match fields.get_mut("metadata") {
        None | Some(Node::Null) => 0,
        Some(Node::Map(metadata)) => mask_unknown(metadata, &METADATA_FIELDS),
        Some(other) => mask_value(other),
    };
    let mut object = Node::Map(fields);
    let masked = unknown + mask_secret(&mut object);
    let shown = object.to_json().to_string() + if original.ends_with('\n') { "\n" } else { "" };
    *copy = Node::Masked(Masked { shown, ..Masked::new(0, original.as_bytes()) });
    masked
}

fn mask_unknown(fields: &mut BTreeMap<String, Node>, known: &[&str]) -> usize {
    let unknown = fields.iter_mut().filter(|(name, _)| !known.contains(&name.as_str()));
    unknown.map(|(_, value)| mask_value(value)).sum()
}

/// Masks one value; the length shown is that of the bytes, not of their base64.
fn mask_data(value: &mut Node, field: &str) -> usize {
    let decoded = value.as_text().filter(|_| field == "data").and_then(|text| BASE64_STANDARD.decode(text).ok());
    match decoded {
        Some(bytes) => {
            *value = Node::Masked(Masked::new(bytes.len(), &bytes));
            1
        }
        None => mask_value(value),
    }
}

fn mask_value(value: &mut Node) -> usize {
    if matches!(value, Node::Masked(_)) {
        return 0;
    }
    let original = value.as_text().map_or_else(|| value.to_json().to_string(), str::to_owned);
    *value = Node::Masked(Masked::new(original.len(), original.as_bytes()));
    1
}
