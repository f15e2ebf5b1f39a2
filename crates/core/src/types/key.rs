//! Keys and ranges of keys.

use std::{borrow::Borrow, fmt, ops::Bound, ops::Deref};

/// A key: any bytes, ordered bytewise. It owns exactly its bytes, so it never keeps a request's buffer alive.
#[derive(Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Key(Box<[u8]>);

impl Key {
    pub fn as_slice(&self) -> &[u8] {
        &self.0
    }
}

/// Maximum number of characters of a key in logs.
const SHOWN_CHARS: usize = 128;

/// Formats a key for logs: escaped and truncated.
pub fn shown(key: &[u8]) -> String {
    key.escape_ascii().to_string().chars().take(SHOWN_CHARS).collect()
}

impl From<&[u8]> for Key {
    fn from(bytes: &[u8]) -> Self {
        Self(bytes.into())
    }
}

impl From<Vec<u8>> for Key {
    fn from(bytes: Vec<u8>) -> Self {
        Self(bytes.into_boxed_slice())
    }
}

impl Deref for Key {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.0
    }
}

impl Borrow<[u8]> for Key {
    fn borrow(&self) -> &[u8] {
        &self.0
    }
}

impl fmt::Debug for Key {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.0.escape_ascii())
    }
}

/// Bounds of a range in an ordered map.
pub type KeyBounds<'a> = (Bound<&'a [u8]>, Bound<&'a [u8]>);

/// Returns the range end of all keys that begin with `prefix`, as in a request of etcd: the first key after them, or `"\0"`
/// if there is none.
pub fn prefix_end(prefix: &[u8]) -> Vec<u8> {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end;
        }
    }
    vec![0]
}

/// Returns the child of a prefix to which a key below it belongs, if the child is a prefix, too: the key up to the next `/`.
/// `None`: the key itself is the child.
pub fn child_prefix(key: &[u8], prefix_len: usize) -> Option<&[u8]> {
    let slash = key.get(prefix_len..)?.iter().position(|byte| *byte == b'/')?;
    Some(&key[..=prefix_len + slash])
}

/// Returns the longest prefix ending in `/` that two keys share.
pub fn common_path<'a>(first: &'a [u8], last: &[u8]) -> Option<&'a [u8]> {
    let shared = first.iter().zip(last).take_while(|(a, b)| a == b).count();
    let slash = first[..shared].iter().rposition(|byte| *byte == b'/')?;
    Some(&first[..=slash])
}

/// The keys that a request refers to.
#[derive(Clone, PartialEq, Eq, Hash, Debug, PartialOrd, Ord)]
pub enum KeyRange {
    /// A single key.
    Single(Key),
    /// The keys in [start, end); without an end, all keys from `start` on.
    Span { start: Key, end: Option<Key> },
}

impl KeyRange {
    /// Converts a key and range end of the wire: an empty `range_end` means the single key, `"\0"` means all keys from
    /// `key` on.
    ///
    /// The result may be an empty range (`key >= range_end`), which contains no key and is not an error.
    pub fn from_wire(key: &[u8], range_end: &[u8]) -> Self {
        match range_end {
            [] => Self::Single(key.into()),
            [0] => Self::Span { start: key.into(), end: None },
            end => Self::Span { start: key.into(), end: Some(end.into()) },
        }
    }

    /// Returns key and range end of the wire; the inverse of [`Self::from_wire`].
    pub fn to_wire(&self) -> (&[u8], &[u8]) {
        match self {
            Self::Single(key) => (key, b""),
            Self::Span { start, end: None } => (start, b"\0"),
            Self::Span { start, end: Some(end) } => (start, end),
        }
    }

    /// Returns the range of all keys that begin with `prefix`.
    pub fn of_prefix(prefix: &[u8]) -> Self {
        Self::from_wire(prefix, &prefix_end(prefix))
    }

    /// Returns the range of all keys.
    pub fn all() -> Self {
        Self::Span { start: Key::from(&b""[..]), end: None }
    }

    pub fn contains(&self, key: &[u8]) -> bool {
        match self {
            Self::Single(only) => only.as_slice() == key,
            Self::Span { start, end } => start.as_slice() <= key && end.as_ref().is_none_or(|end| key < end.as_slice()),
        }
    }

    /// Returns whether the range contains no key.
    pub fn is_empty(&self) -> bool {
        match self {
            Self::Single(_) => false,
            Self::Span { start, end } => end.as_ref().is_some_and(|end| start >= end),
        }
    }

    pub fn start(&self) -> &Key {
        match self {
            Self::Single(key) | Self::Span { start: key, .. } => key,
        }
    }

    /// Returns the bounds for an ordered map. Do not call it on an empty range: ordered maps panic on its bounds.
    pub fn bounds(&self) -> KeyBounds<'_> {
        match self {
            Self::Single(key) => (Bound::Included(key), Bound::Included(key)),
            Self::Span { start, end } => {
                (Bound::Included(start), end.as_ref().map_or(Bound::Unbounded, |end| Bound::Excluded(end)))
            }
        }
    }

    /// Returns the bounds of the part of the range after `key`.
    pub fn bounds_after<'a>(&'a self, key: &'a [u8]) -> KeyBounds<'a> {
        (Bound::Excluded(key), self.bounds().1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[track_caller]
    fn check(key: &[u8], end: &[u8], inside: &[&[u8]], outside: &[&[u8]]) {
        let range = KeyRange::from_wire(key, end);
        for key in inside {
            assert!(range.contains(key), "{range:?} contains {key:?}");
        }
        for key in outside {
            assert!(!range.contains(key), "{range:?} does not contain {key:?}");
        }
    }

    #[test]
    fn prefix_end_is_the_first_key_after_the_prefix() {
        for (prefix, end) in
            [(&b"a/"[..], &b"a0"[..]), (b"a\xff", b"b"), (b"a\xff\xff", b"b"), (b"\xff\xff", b"\0"), (b"", b"\0")]
        {
            assert_eq!(prefix_end(prefix), end, "{prefix:?}");
        }
    }

    #[test]
    fn child_of_a_prefix_ends_at_the_next_slash() {
        for (key, prefix, child) in [
            ("/r/a/1", "", Some("/")),
            ("/r/a/1", "/r", Some("/r/")),
            ("/r/a/1", "/r/", Some("/r/a/")),
            ("/r/a//1", "/r/a/", Some("/r/a//")),
            ("/r/a/1", "/r/a/", None),
            ("/r", "/r", None),
            ("/a cut name", "/a cut name/", None),
        ] {
            let found = child_prefix(key.as_bytes(), prefix.len());
            assert_eq!(found, child.map(str::as_bytes), "{key} below {prefix}");
        }
    }

    #[test]
    fn common_path_is_the_longest_of_two_keys() {
        for (first, last, path) in [
            ("/r/a/1", "/r/a/2", Some("/r/a/")),
            ("/r/a/1", "/r/ab", Some("/r/")),
            ("/a/", "/a/", Some("/a/")),
            ("a", "b", None),
        ] {
            assert_eq!(common_path(first.as_bytes(), last.as_bytes()), path.map(str::as_bytes), "{first} {last}");
        }
    }

    #[test]
    fn wire_ranges_contain_these_keys() {
        check(b"a", b"", &[b"a"], &[b"", b"a\0", b"b"]);
        check(b"a", b"c", &[b"a", b"a\0", b"b", b"b\xff"], &[b"", b"A", b"c", b"d"]);
        check(b"b", b"\0", &[b"b", b"c", b"\xff\xff"], &[b"a", b"az", b"\0"]);
        check(b"\0", b"\0", &[b"\0", b"a", b"\xff"], &[]);
        check(b"b", b"a", &[], &[b"a", b"b", b"c"]);
        check(b"b", b"b", &[], &[b"a", b"b", b"c"]);
    }
}
