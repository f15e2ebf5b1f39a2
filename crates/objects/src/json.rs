//! Writes a tree as JSON with two spaces of indentation, one line for each scalar.

use crate::{
    lines::{Lines, is_hazard},
    node::Node,
};

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

/// Returns a text in quotes. `serde_json` escapes only the control characters of ASCII.
fn quoted(text: &str) -> String {
    let quoted = serde_json::Value::String(text.to_owned()).to_string();
    if !quoted.contains(is_hazard) {
        return quoted;
    }
    let escape = |c: char| if is_hazard(c) { format!("\\u{:04x}", u32::from(c)) } else { c.to_string() };
    quoted.chars().map(escape).collect()
}
