//! The keys of a command.

use orlop_core::types::prefix_end;

use crate::text::shown_key;

/// A key or a prefix.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Selection {
    /// Key; one that ends with / is a prefix, an empty one needs --prefix. Escapes: \xNN for a byte, \\ for a backslash
    #[arg(id = "selected_key", value_name = "KEY", value_parser = parse_key)]
    key: Key,

    /// All keys that begin with KEY; if KEY is empty, all keys
    #[arg(long)]
    prefix: bool,

    /// Only KEY, although it ends with /
    #[arg(long, conflicts_with = "prefix")]
    exact: bool,
}

/// The bytes of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key(Vec<u8>);

impl Selection {
    /// Refuses an empty key, such as that of a variable which is not set, unless all keys are asked for.
    pub(super) fn check(&self) -> super::Result<()> {
        let Key(key) = &self.key;
        if key.is_empty() && !self.prefix {
            return Err("KEY is empty: give a key, or --prefix for all keys".into());
        }
        Ok(())
    }

    /// Returns key and range end of requests.
    pub(super) fn range(&self) -> (Vec<u8>, Vec<u8>) {
        let Key(key) = &self.key;
        if !self.is_prefix() {
            return (key.clone(), Vec::new());
        }
        if key.is_empty() {
            return (vec![0], vec![0]);
        }
        (key.clone(), prefix_end(key))
    }

    /// Reports on standard error that the command has found nothing.
    pub(super) fn report_nothing_found(&self) {
        eprintln!("orlop: {}", self.nothing_found());
    }

    fn nothing_found(&self) -> String {
        let Key(key) = &self.key;
        let shown = shown_key(key);
        match (self.is_prefix(), self.exact) {
            (true, _) if key.is_empty() => "nothing found: there are no keys".to_owned(),
            (true, _) => format!("nothing found for the prefix {shown}"),
            (false, true) => format!("nothing found for the key {shown}"),
            (false, false) => format!("nothing found for the key {shown}; a prefix ends with / or needs --prefix"),
        }
    }

    pub(super) fn is_prefix(&self) -> bool {
        let Key(key) = &self.key;
        self.prefix || (key.ends_with(b"/") && !self.exact)
    }
}

fn parse_key(text: &str) -> Result<Key, String> {
    let mut key = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        if byte != b'\\' {
            key.push(byte);
            continue;
        }
        let digit = |byte: Option<u8>| byte.and_then(|byte| char::from(byte).to_digit(16));
        match rest.next() {
            Some(b'\\') => key.push(b'\\'),
            Some(b'x') => match (digit(rest.next()), digit(rest.next())) {
                (Some(high), Some(low)) => key.push((high * 16 + low) as u8),
                _ => return Err("\\x needs two hexadecimal digits".to_owned()),
            },
            _ => return Err("the escapes are \\xNN and \\\\".to_owned()),
        }
    }
    Ok(Key(key))
}

#[cfg(test)]
mod tests {
    use orlop_objects::is_hazard;

    use super::*;

    #[test]
    fn keys_are_read_as_they_are_shown() {
        for key in [
            &b"/registry/pods"[..],
            b"a\\b",
            b"\x00\x1b[31m",
            "\u{fc}\u{85}".as_bytes(),
            "a\u{202e}b".as_bytes(),
            b"\xff\xfe a",
        ] {
            let shown = shown_key(key);
            assert!(!shown.contains(is_hazard), "{shown:?}");
            assert_eq!(parse_key(&shown), Ok(Key(key.to_vec())), "{shown}");
        }
        for invalid in ["\\", "\\x1", "\\xzz", "\\n"] {
            assert!(parse_key(invalid).is_err(), "{invalid}");
        }
    }

    #[test]
    fn text_for_nothing_hints_at_prefixes_where_they_may_be_meant() {
        for (key, prefix, exact, want) in [
            ("/shop", false, false, "nothing found for the key /shop; a prefix ends with / or needs --prefix"),
            ("/shop", true, false, "nothing found for the prefix /shop"),
            ("/shop/", false, false, "nothing found for the prefix /shop/"),
            ("/shop/", false, true, "nothing found for the key /shop/"),
            ("", true, false, "nothing found: there are no keys"),
        ] {
            let selection = Selection { key: Key(key.as_bytes().to_vec()), prefix, exact };
            assert_eq!(selection.nothing_found(), want);
        }
    }
}
