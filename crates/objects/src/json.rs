//! Reads JSON as a tree, and writes a tree as JSON with two spaces of indentation, one line for each scalar.

use std::fmt::Write as _;

use serde_json::Value;

use crate::{
    lines::{Lines, is_hazard},
    node::Node,
};

/// Returns a value of JSON as a tree; `None` if it is invalid, or if the tree would show something else than the text: a
/// number with more digits than a float has, or one of two values of the same name.
pub(crate) fn read(text: &[u8]) -> Option<Node> {
    let value: Value = serde_json::from_slice(text).ok()?;
    // It is JSON, so all bytes are UTF-8.
    let names = is_exact(std::str::from_utf8(text).ok()?)?;
    (names == names_of(&value)).then(|| Node::from(value))
}

/// Returns the number of names in valid JSON; `None` if a number is not equal to the one that is shown.
fn is_exact(text: &str) -> Option<usize> {
    let (mut names, mut rest) = (0, text);
    while let Some(at) = rest.find(|c: char| matches!(c, '"' | ':' | '-') || c.is_ascii_digit()) {
        rest = &rest[at..];
        let len = match rest.as_bytes().first() {
            Some(b'"') => string_len(rest),
            Some(b':') => {
                names += 1;
                1
            }
            _ => {
                let is_part = |c: char| c.is_ascii_digit() || matches!(c, '-' | '+' | '.' | 'e' | 'E');
                let len = rest.find(|c| !is_part(c)).unwrap_or(rest.len());
                let shown: serde_json::Number = serde_json::from_str(&rest[..len]).ok()?;
                if decimal(&rest[..len])? != decimal(&shown.to_string())? {
                    return None;
                }
                len
            }
        };
        rest = &rest[len..];
    }
    Some(names)
}

/// Returns the length of the string at the beginning of a text, with its quotes.
fn string_len(text: &str) -> usize {
    let mut is_escaped = false;
    let end = text.bytes().skip(1).position(|byte| {
        let is_end = byte == b'"' && !is_escaped;
        is_escaped = byte == b'\\' && !is_escaped;
        is_end
    });
    end.map_or(text.len(), |end| end + 2)
}

/// Returns the sign, the digits without zeros at both ends, and the exponent of a number: equal numbers have the same.
fn decimal(number: &str) -> Option<(bool, String, i64)> {
    let (number, is_negative) = number.strip_prefix('-').map_or((number, false), |number| (number, true));
    let (mantissa, exponent) = number.split_once(['e', 'E']).unwrap_or((number, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{whole}{fraction}");
    let significant = digits.trim_end_matches('0');
    if significant.is_empty() {
        return Some((is_negative, String::new(), 0));
    }
    let zeros = i64::try_from(digits.len() - significant.len()).ok()?;
    let exponent =
        exponent.parse::<i64>().ok()?.checked_sub(i64::try_from(fraction.len()).ok()?)?.checked_add(zeros)?;
    Some((is_negative, significant.trim_start_matches('0').to_owned(), exponent))
}

fn names_of(value: &Value) -> usize {
    match value {
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => 0,
        Value::Array(items) => items.iter().map(names_of).sum(),
        Value::Object(map) => map.len() + map.values().map(names_of).sum::<usize>(),
    }
}

pub(crate) fn write(out: &mut Lines, node: &Node) {
    block(out, node, 0, "", "");
}

/// Writes a node between what stands in front of it in its first line and behind it in its last one.
fn block(out: &mut Lines, node: &Node, depth: usize, lead: &str, tail: &str) {
    let inner = " ".repeat(depth + 2);
    let comma = |index: usize, len: usize| if index + 1 < len { "," } else { "" };
    match node {
        Node::Map(map) if !map.is_empty() => {
            out.push(&format!("{lead}{{"), None);
            for (index, (key, child)) in map.iter().enumerate() {
                let lead = format!("{inner}{}: ", quoted(key));
                block(out, child, depth + 2, &lead, comma(index, map.len()));
                if out.is_full() {
                    return;
                }
            }
            out.push(&format!("{}}}{tail}", " ".repeat(depth)), None);
        }
        Node::List(items) if !items.is_empty() => {
            out.push(&format!("{lead}["), None);
            for (index, child) in items.iter().enumerate() {
                block(out, child, depth + 2, &inner, comma(index, items.len()));
                if out.is_full() {
                    return;
                }
            }
            out.push(&format!("{}]{tail}", " ".repeat(depth)), None);
        }
        Node::Null
        | Node::Bool(_)
        | Node::Number(_)
        | Node::Text(_)
        | Node::Masked(_)
        | Node::List(_)
        | Node::Map(_) => {
            let (text, hidden) = node.inline(quoted);
            out.push(&format!("{lead}{text}{tail}"), hidden);
        }
    }
}

/// Returns a text in quotes.
fn quoted(text: &str) -> String {
    without_hazards(Value::String(text.to_owned()).to_string())
}

/// Escapes the hazardous characters in JSON that `serde_json` has written in one line, so that all of them are in strings.
/// `serde_json` escapes only the control characters of ASCII, and not DEL.
pub fn without_hazards(json: String) -> String {
    if !json.contains(is_hazard) {
        return json;
    }
    let mut escaped = String::with_capacity(json.len() + 16);
    for c in json.chars() {
        if is_hazard(c) {
            let mut units = [0; 2];
            // Writing to a string cannot fail.
            c.encode_utf16(&mut units).iter().for_each(|unit| _ = write!(escaped, "\\u{unit:04x}"));
        } else {
            escaped.push(c);
        }
    }
    escaped
}
