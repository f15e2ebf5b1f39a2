//! A decoded value as a tree, whatever it was encoded in.
//!
//! In addition to what JSON has, a tree contains masked text. What stands in its place is the same for equal lengths,
//! so the tree keeps a digest of the original, by which two versions are compared.

use std::{
    collections::BTreeMap,
    hash::{BuildHasher as _, RandomState},
    sync::LazyLock,
};

use serde_json::{Number, Value};

#[derive(Clone, Debug)]
pub(crate) enum Node {
    Null,
    Bool(bool),
    Number(Number),
    Text(String),
    Masked(Masked),
    List(Vec<Node>),
    Map(BTreeMap<String, Node>),
}

#[derive(Clone, Debug)]
pub(crate) struct Masked {
    pub shown: String,
    pub original: Digest,
}

/// A digest with a key that is drawn once per process and never leaves it, so a digest tells nothing about the value.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct Digest(u64);

impl Digest {
    pub fn of(bytes: &[u8]) -> Self {
        static KEY: LazyLock<RandomState> = LazyLock::new(RandomState::new);
        Self(KEY.hash_one(bytes))
    }

    /// Returns the digest of two values.
    pub fn and(self, other: Self) -> Self {
        Self::of([self.0, other.0].map(u64::to_le_bytes).as_flattened())
    }
}

impl Masked {
    pub fn new(len: usize, original: &[u8]) -> Self {
        Self { shown: format!("<masked: {len} bytes>"), original: Digest::of(original) }
    }
}

impl Node {
    pub fn text(text: impl Into<String>) -> Self {
        Self::Text(text.into())
    }

    pub fn get(&self, key: &str) -> Option<&Self> {
        match self {
            Self::Map(map) => map.get(key),
            Self::Null | Self::Bool(_) | Self::Number(_) | Self::Text(_) | Self::Masked(_) | Self::List(_) => None,
        }
    }

    pub fn get_mut(&mut self, key: &str) -> Option<&mut Self> {
        match self {
            Self::Map(map) => map.get_mut(key),
            Self::Null | Self::Bool(_) | Self::Number(_) | Self::Text(_) | Self::Masked(_) | Self::List(_) => None,
        }
    }

    pub fn as_text(&self) -> Option<&str> {
        match self {
            Self::Text(text) => Some(text),
            Self::Null | Self::Bool(_) | Self::Number(_) | Self::Masked(_) | Self::List(_) | Self::Map(_) => None,
        }
    }

    /// Returns a scalar, or an empty list or map, on one line, and the digest of what it masks. JSON and YAML differ only in
    /// how they quote a text.
    pub fn inline(&self, quoted: fn(&str) -> String) -> (String, Option<Digest>) {
        match self {
            Self::Null => ("null".to_owned(), None),
            Self::Bool(is) => (is.to_string(), None),
            Self::Number(number) => (number.to_string(), None),
            Self::Text(text) => (quoted(text), None),
            Self::Masked(masked) => (quoted(&masked.shown), Some(masked.original)),
            Self::List(_) => ("[]".to_owned(), None),
            Self::Map(_) => ("{}".to_owned(), None),
        }
    }

    pub fn to_json(&self) -> Value {
        match self {
            Self::Null => Value::Null,
            Self::Bool(is) => Value::Bool(*is),
            Self::Number(number) => Value::Number(number.clone()),
            Self::Text(text) => Value::String(text.clone()),
            Self::Masked(masked) => Value::String(masked.shown.clone()),
            Self::List(items) => Value::Array(items.iter().map(Self::to_json).collect()),
            Self::Map(map) => Value::Object(map.iter().map(|(key, node)| (key.clone(), node.to_json())).collect()),
        }
    }
}

impl From<Value> for Node {
    fn from(value: Value) -> Self {
        match value {
            Value::Null => Self::Null,
            Value::Bool(is) => Self::Bool(is),
            Value::Number(number) => Self::Number(number),
            Value::String(text) => Self::Text(text),
            Value::Array(items) => Self::List(items.into_iter().map(Self::from).collect()),
            Value::Object(map) => Self::Map(map.into_iter().map(|(key, value)| (key, Self::from(value))).collect()),
        }
    }
}
