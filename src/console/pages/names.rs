//! Keys and prefixes as text and as links. They are any bytes, and can be as long as a request to the server.

use maud::{Markup, html};

use crate::{console::query::encoded, text::shown_key};

/// Maximum length in bytes of the keys in a link. With more, the request can be larger than the page accepts.
pub(in crate::console) const LINKED_BYTES_MAX: usize = 5_000;
/// Maximum length in bytes of the shown part of a name.
const SHOWN_BYTES_MAX: usize = 1 << 10;

/// Returns a name as text; of a long one, only the beginning.
pub(super) fn shown_name(name: &[u8]) -> String {
    match name.split_at_checked(SHOWN_BYTES_MAX) {
        Some((start, rest)) if !rest.is_empty() => format!("{}… (cut: {} bytes)", shown_key(start), rest.len()),
        Some(_) | None => shown_key(name),
    }
}

/// Returns a text; of a long one, only the beginning.
pub(super) fn cut(text: &str) -> String {
    match text.split_at(text.floor_char_boundary(SHOWN_BYTES_MAX)) {
        (_, "") => text.to_owned(),
        (start, rest) => format!("{start}… (cut: {} bytes)", rest.len()),
    }
}

/// Returns a name with marks under spaces at its beginning and its end, which nobody would see.
pub(super) fn name(name: &[u8]) -> Markup {
    let text = shown_name(name);
    let (before, rest) = text.split_at(text.len() - text.trim_start_matches(' ').len());
    let (middle, behind) = rest.split_at(rest.trim_end_matches(' ').len());
    html! {
        @if !before.is_empty() { span.space { (before) } }
        (middle)
        @if !behind.is_empty() { span.space { (behind) } }
    }
}

/// Returns the address of a page about a key or a prefix; `None` if it would be too long. `place` ends with the name of a
/// parameter.
pub(super) fn href(place: &str, key: &[u8]) -> Option<String> {
    (key.len() <= LINKED_BYTES_MAX).then(|| format!("{place}{}", encoded(key)))
}

/// Returns a link to a page about a key or a prefix, or its text alone if the link would be too long.
pub(super) fn link(place: &str, key: &[u8], text: &Markup) -> Markup {
    linked(href(place, key), text)
}

/// Returns a link, or its text alone if there is no address because it would be too long.
pub(super) fn linked(href: Option<String>, text: &Markup) -> Markup {
    html! {
        @match href {
            Some(href) => a.key href=(href) { (text) },
            None => span.key title="too long for a link" { (text) },
        }
    }
}

/// Returns a link to the page of a key.
pub(in crate::console) fn key_link(key: &[u8]) -> Markup {
    link("/key?key=", key, &name(key))
}

/// Returns links from a key to the pages of its prefixes at `place`, such as `/keys`. Only short prefixes have links, so that
/// the length of all of them together is bounded.
pub(super) fn path(place: &str, key: &[u8]) -> Markup {
    let short = &key[..key.len().min(SHOWN_BYTES_MAX)];
    let slashes = short.iter().enumerate().filter(|(_, byte)| **byte == b'/').map(|(at, _)| at + 1);
    let mut start = 0;
    let mut steps: Vec<(&[u8], &[u8])> = Vec::new();
    for end in slashes {
        steps.push((&key[..end], &key[start..end]));
        start = end;
    }
    let place_of_prefix = format!("{place}?prefix=");
    html! {
        nav.path aria-label="Prefixes" {
            a href=(place) { "all keys" }
            @for (prefix, segment) in steps { " " (link(&place_of_prefix, prefix, &name(segment))) }
            @if start < key.len() { " " span.key { (name(&key[start..])) } }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_keys_are_cut_and_have_no_link() {
        for (len, is_linked, cut) in [
            (1, true, None),
            (SHOWN_BYTES_MAX, true, None),
            (SHOWN_BYTES_MAX + 1, true, Some("cut: 1 bytes")),
            (LINKED_BYTES_MAX, true, Some("cut: 3976 bytes")),
            (LINKED_BYTES_MAX + 1, false, Some("cut: 3977 bytes")),
            (1_500_000, false, Some("cut: 1498976 bytes")),
        ] {
            let link = key_link(&vec![b'k'; len]).0;
            assert_eq!(link.contains("href="), is_linked, "{len} bytes");
            assert_eq!(link.contains("cut: "), cut.is_some(), "{len} bytes");
            assert!(cut.is_none_or(|cut| link.contains(cut)), "{len} bytes: {link}");
        }
    }

    #[test]
    fn long_texts_are_cut() {
        let (k, u) = (|len| "k".repeat(len), |len| "ü".repeat(len));
        for (text, want) in [
            (u(1), u(1)),
            (k(SHOWN_BYTES_MAX), k(SHOWN_BYTES_MAX)),
            (k(SHOWN_BYTES_MAX + 9), k(SHOWN_BYTES_MAX) + "… (cut: 9 bytes)"),
            (k(1) + &u(SHOWN_BYTES_MAX / 2), k(1) + &u(SHOWN_BYTES_MAX / 2 - 1) + "… (cut: 2 bytes)"),
        ] {
            assert_eq!(cut(&text), want);
        }
    }

    #[test]
    fn links_of_a_path_are_bounded() {
        for key in [vec![b'/'; 1_500_000], [b'\xff', b'/'].repeat(10_000)] {
            let path = path("/keys", &key).0;
            assert!(path.len() < 2 << 20, "{} bytes", path.len());
        }
    }

    #[test]
    fn spaces_at_the_ends_are_marked() {
        let space = |text: &str| format!("<span class=\"space\">{text}</span>");
        for (key, expected) in [
            ("a b", "a b".to_owned()),
            (" a", space(" ") + "a"),
            ("a  ", "a".to_owned() + &space("  ")),
            ("  ", space("  ")),
        ] {
            assert_eq!(name(key.as_bytes()).0, expected);
        }
    }
}
