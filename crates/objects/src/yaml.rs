//! Writes a tree as YAML, laid out as kubectl does: keys sorted, lists at the indentation of their key.

use crate::{
    lines::{Lines, is_hazard, push_escape},
    node::Node,
};

/// Writes a tree that is a map or a list at the top level; anything else becomes one line.
pub(crate) fn write(out: &mut Lines, node: &Node) {
    block(out, node, 0, "");
}

/// Writes a node. `lead` is what stands in front of its first line, such as `- `; the other lines have `depth` spaces.
fn block(out: &mut Lines, node: &Node, depth: usize, lead: &str) {
    match node {
        Node::Map(map) if !map.is_empty() => {
            let mut lead = lead.to_owned();
            for (key, child) in map {
                entry(out, &format!("{lead}{}:", quoted(key)), child, depth);
                if out.is_full() {
                    return;
                }
                lead = " ".repeat(depth);
            }
        }
        Node::List(items) if !items.is_empty() => {
            let mut lead = lead.to_owned();
            for item in items {
                block(out, item, depth + 2, &format!("{lead}- "));
                if out.is_full() {
                    return;
                }
                lead = " ".repeat(depth);
            }
        }
        Node::Text(text) if is_literal(text) => literal(out, lead, text, depth),
        Node::Null
        | Node::Bool(_)
        | Node::Number(_)
        | Node::Text(_)
        | Node::Masked(_)
        | Node::List(_)
        | Node::Map(_) => {
            let (text, hidden) = node.inline(quoted);
            out.push(&format!("{lead}{text}"), hidden);
        }
    }
}

fn entry(out: &mut Lines, key: &str, child: &Node, depth: usize) {
    let depth = match child {
        Node::Map(map) if !map.is_empty() => depth + 2,
        Node::List(items) if !items.is_empty() => depth,
        Node::Null
        | Node::Bool(_)
        | Node::Number(_)
        | Node::Text(_)
        | Node::Masked(_)
        | Node::List(_)
        | Node::Map(_) => return block(out, child, depth + 2, &format!("{key} ")),
    };
    out.push(key, None);
    block(out, child, depth, &" ".repeat(depth));
}

/// Reports whether a text has several lines and can stand in YAML as it is.
fn is_literal(text: &str) -> bool {
    let first = text.trim_start_matches('\n');
    text.contains('\n')
        && !first.is_empty()
        && !first.starts_with([' ', '\t'])
        && !text.contains(|c| is_hazard(c) && c != '\n' && c != '\t')
}

fn literal(out: &mut Lines, lead: &str, text: &str, depth: usize) {
    let (body, chomp) = match text.strip_suffix('\n') {
        None => (text, "|-"),
        Some(body) if body.ends_with('\n') => (body, "|+"),
        Some(body) => (body, "|"),
    };
    out.push(&format!("{lead}{chomp}"), None);
    let indent = " ".repeat(depth);
    for line in body.split('\n') {
        if out.is_full() {
            return;
        }
        if line.is_empty() { out.push("", None) } else { out.push(&format!("{indent}{line}"), None) }
    }
}

/// Returns a text as a scalar: plain if it reads back as the same text, otherwise in single or double quotes.
fn quoted(text: &str) -> String {
    if text.contains(is_hazard) || is_other_type(text) {
        double_quoted(text)
    } else if is_plain(text) {
        text.to_owned()
    } else {
        format!("'{}'", text.replace('\'', "''"))
    }
}

fn is_plain(text: &str) -> bool {
    let first_ok = match text.as_bytes() {
        [] => false,
        [b'-' | b'?' | b':', next, ..] => !matches!(next, b' '),
        [b'-' | b'?' | b':'] => false,
        [first, ..] => !b",[]{}#&*!|>'\"%@` ".contains(first),
    };
    let document = text.starts_with("---") || text.starts_with("...");
    first_ok && !document && !text.ends_with([' ', ':']) && !text.contains(": ") && !text.contains(" #")
}

/// Reports whether a YAML parser would read a plain text as a number, a boolean, null, a date or a merge key.
fn is_other_type(text: &str) -> bool {
    const WORDS: [&str; 14] = ["", "~", "null", "true", "false", "yes", "no", "on", "off", "y", "n", "<<", "=", ".nan"];
    if WORDS.contains(&text.to_ascii_lowercase().as_str()) {
        return true;
    }
    let digits = text.trim_start_matches(['+', '-', '.']);
    if !digits.starts_with(|c: char| c.is_ascii_digit()) {
        return digits.eq_ignore_ascii_case("inf");
    }
    let prefixed = matches!(digits.as_bytes(), [b'0', b'x' | b'X' | b'o' | b'O' | b'b' | b'B', ..]);
    let date = matches!(digits.as_bytes(), [a, b, c, d, b'-', ..] if [a, b, c, d].iter().all(|c| c.is_ascii_digit()));
    let base_60 = digits.contains(':') && digits.chars().all(|c| c.is_ascii_digit() || matches!(c, ':' | '.' | '_'));
    prefixed || date || base_60 || text.replace('_', "").parse::<f64>().is_ok()
}

fn double_quoted(text: &str) -> String {
    let mut out = String::with_capacity(text.len() + 8);
    out.push('"');
    for c in text.chars() {
        match c {
            '"' => out.push_str("\\\""),
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\t' => out.push_str("\\t"),
            '\r' => out.push_str("\\r"),
            c if is_hazard(c) => push_escape(&mut out, c),
            c => out.push(c),
        }
    }
    out.push('"');
    out
}
