//! The keys of a command.

use orlop_core::types::prefix_end;

use super::time::Found;
use crate::text::shown_key;

/// A key or a prefix, or all keys. A command that needs KEY makes it required.
#[derive(Clone, Debug, clap::Args)]
pub(super) struct Selection {
    /// Key; one that ends with / is a prefix, an empty one needs --prefix. Escapes: \xNN for a byte, \\ for a backslash
    #[arg(id = "selected_key", value_name = "KEY", value_parser = parse_key)]
    key: Option<Key>,

    /// All keys that begin with KEY; if KEY is empty, all keys
    #[arg(long)]
    prefix: bool,

    /// Only KEY, although it ends with /
    #[arg(long, conflicts_with = "prefix", requires = "selected_key")]
    exact: bool,
}

/// The bytes of a key.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Key(Vec<u8>);

impl Selection {
    /// Refuses an empty key, such as that of a variable which is not set, unless all keys are asked for.
    pub(super) fn check(&self) -> super::Result<()> {
        if !self.prefix && self.key.as_ref().is_some_and(|Key(key)| key.is_empty()) {
            return Err("KEY is empty: give a key, or --prefix for all keys".into());
        }
        Ok(())
    }

    /// Returns key and range end of requests.
    pub(super) fn range(&self) -> (Vec<u8>, Vec<u8>) {
        match &self.key {
            Some(Key(key)) if !self.is_prefix() => (key.clone(), Vec::new()),
            Some(Key(key)) if !key.is_empty() => (key.clone(), prefix_end(key)),
            Some(_) | None => (vec![0], vec![0]),
        }
    }

    /// Reports on standard error that the command has found nothing, at the point in time that it was asked for, if any.
    pub(super) fn report_nothing_found(&self, at: Option<Found>) {
        eprintln!("orlop: {}", self.nothing_found(at));
    }

    fn nothing_found(&self, at: Option<Found>) -> String {
        let point = at.map(|at| format!(" at {at}")).unwrap_or_default();
        let key = self.key.as_ref().filter(|Key(key)| !key.is_empty());
        let Some(Key(key)) = key else { return format!("nothing found among all keys{point}") };
        let shown = shown_key(key);
        if self.is_prefix() {
            return format!("nothing found for the prefix {shown}{point}");
        }
        let hint = if self.exact { "" } else { "; a prefix ends with / or needs --prefix" };
        match at {
            Some(_) => format!("the key {shown} did not exist{point}{hint}"),
            None => format!("nothing found for the key {shown}{hint}"),
        }
    }

    pub(super) fn is_prefix(&self) -> bool {
        self.prefix || self.key.as_ref().is_none_or(|Key(key)| key.ends_with(b"/") && !self.exact)
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

    fn selection(key: Option<&str>, prefix: bool, exact: bool) -> Selection {
        Selection { key: key.map(|key| Key(key.as_bytes().to_vec())), prefix, exact }
    }

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
            (Some("/shop"), false, false, "nothing found for the key /shop; a prefix ends with / or needs --prefix"),
            (Some("/shop"), true, false, "nothing found for the prefix /shop"),
            (Some("/shop/"), false, false, "nothing found for the prefix /shop/"),
            (Some("/shop/"), false, true, "nothing found for the key /shop/"),
            (Some(""), true, false, "nothing found among all keys"),
            (None, false, false, "nothing found among all keys"),
        ] {
            assert_eq!(selection(key, prefix, exact).nothing_found(None), want);
        }
    }

    #[test]
    fn text_for_nothing_names_the_point_in_time() {
        let (revision, time) = (Found { revision: 7, unix_ms: None }, Found { revision: 7, unix_ms: Some(0) });
        for (key, exact, at, want) in [
            (
                Some("/shop"),
                false,
                revision,
                "the key /shop did not exist at revision 7; a prefix ends with / or needs --prefix",
            ),
            (
                Some("/shop"),
                true,
                time,
                "the key /shop did not exist at revision 7, the newest one at 1970-01-01T00:00:00Z",
            ),
            (Some("/shop/"), false, revision, "nothing found for the prefix /shop/ at revision 7"),
            (None, false, revision, "nothing found among all keys at revision 7"),
        ] {
            assert_eq!(selection(key, false, exact).nothing_found(Some(at)), want);
        }
    }

    #[test]
    fn ranges_are_those_of_requests() {
        for (key, prefix, exact, start, end) in [
            (Some("/shop"), false, false, "/shop", ""),
            (Some("/shop"), true, false, "/shop", "/shoq"),
            (Some("/shop/"), false, false, "/shop/", "/shop0"),
            (Some("/shop/"), false, true, "/shop/", ""),
            (Some(""), true, false, "\0", "\0"),
            (None, false, false, "\0", "\0"),
        ] {
            let selection = selection(key, prefix, exact);
            assert_eq!(selection.range(), (start.as_bytes().to_vec(), end.as_bytes().to_vec()), "{selection:?}");
            assert_eq!(selection.is_prefix(), !end.is_empty(), "{selection:?}");
        }
    }
}
