//! Query strings and forms. Keys and prefixes are any bytes, so values are bytes: percent-encoded, or in fields of forms,
//! which browsers convert to text, base64 under the name with `64` appended.

use std::convert::Infallible;

use axum::extract::FromRequestParts;
use base64::{Engine as _, prelude::BASE64_URL_SAFE_NO_PAD};
use http::request::Parts;
use percent_encoding::{AsciiSet, NON_ALPHANUMERIC, percent_decode, percent_encode};

/// Characters of keys that stay readable in a URL.
const ENCODED: &AsciiSet = &NON_ALPHANUMERIC.remove(b'/').remove(b'-').remove(b'_').remove(b'.').remove(b'~');

/// Names and values in the order in which they were sent.
#[derive(Debug, Default, PartialEq)]
pub(super) struct Query(Vec<(String, Vec<u8>)>);

impl Query {
    pub fn parse(text: &[u8]) -> Self {
        let decode = |part: &[u8]| -> Vec<u8> {
            let spaces: Vec<u8> = part.iter().map(|byte| if *byte == b'+' { b' ' } else { *byte }).collect();
            percent_decode(&spaces).collect()
        };
        let pair = |pair: &[u8]| {
            let end = pair.iter().position(|byte| *byte == b'=').unwrap_or(pair.len());
            let value = pair.get(end + 1..).unwrap_or_default();
            (String::from_utf8_lossy(&decode(&pair[..end])).into_owned(), decode(value))
        };
        Self(text.split(|byte| *byte == b'&').filter(|part| !part.is_empty()).map(pair).collect())
    }

    /// Returns the first value of a name; empty if there is none.
    pub fn raw(&self, name: &str) -> &[u8] {
        self.0.iter().find(|(known, _)| known == name).map_or(&[], |(_, value)| value)
    }

    /// Returns a key or a prefix: the value of `name`, or else of `name` with `64` appended.
    pub fn bytes(&self, name: &str) -> Vec<u8> {
        match self.raw(name) {
            [] => BASE64_URL_SAFE_NO_PAD.decode(self.raw(&format!("{name}64"))).unwrap_or_default(),
            value => value.to_vec(),
        }
    }

    pub fn text(&self, name: &str) -> String {
        String::from_utf8_lossy(self.raw(name)).into_owned()
    }

    /// Returns a number of at least 0; 0 if it is absent or invalid.
    pub fn number(&self, name: &str) -> i64 {
        self.text(name).parse().unwrap_or(0).max(0)
    }
}

impl<S: Sync> FromRequestParts<S> for Query {
    type Rejection = Infallible;

    async fn from_request_parts(parts: &mut Parts, _: &S) -> Result<Self, Infallible> {
        Ok(Self::parse(parts.uri.query().unwrap_or_default().as_bytes()))
    }
}

/// Returns bytes as part of a URL.
pub(super) fn encoded(bytes: &[u8]) -> String {
    percent_encode(bytes, ENCODED).to_string()
}

/// Returns bytes for a field whose name ends in `64`.
pub(super) fn base64(bytes: &[u8]) -> String {
    BASE64_URL_SAFE_NO_PAD.encode(bytes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_survive_urls_and_forms() {
        for key in [&b"/registry/pods/a b+c"[..], b"\0\xff&=%", "ü".as_bytes(), b""] {
            let query = Query::parse(format!("a=1&key={}", encoded(key)).as_bytes());
            assert_eq!(query.bytes("key"), key);
            let form = Query::parse(format!("key64={}&a", base64(key)).as_bytes());
            assert_eq!(form.bytes("key"), key);
        }
    }

    #[test]
    fn damaged_queries_have_empty_values() {
        let query = Query::parse(b"&&a&b=&=c&n=-1&m=7&m=8&x=%zz&key64=!");
        assert_eq!((query.raw("a"), query.raw("b"), query.raw("none")), (&b""[..], &b""[..], &b""[..]));
        assert_eq!((query.number("n"), query.number("m"), query.number("x")), (0, 7, 0));
        assert_eq!((query.text("x"), query.bytes("key")), ("%zz".to_owned(), Vec::new()));
    }
}
