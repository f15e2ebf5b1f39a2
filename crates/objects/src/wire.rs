//! Protobuf's wire format without a schema. Reads what is there and stops at the first byte that cannot be right.
//!
//! Source: protobuf.dev, "Encoding". Groups, which Kubernetes does not use, count as damage.

use std::collections::BTreeMap;

use base64::{Engine as _, prelude::BASE64_STANDARD};

use crate::{lines::is_hazard, node::Node};

/// Maximum depth of messages in messages. Kubernetes' own limit is the depth of its types, about twenty; a schema of a
/// custom resource nests deeper.
pub(crate) const DEPTH_MAX: usize = 100;

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) enum WireValue<'a> {
    Varint(u64),
    Fixed64(u64),
    Fixed32(u32),
    Bytes(&'a [u8]),
}

#[derive(Clone, Copy, PartialEq, Debug)]
pub(crate) struct Damaged;

/// The fields of an encoded message in their order. Ends after an error.
pub(crate) struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    pub fn of(message: &'a [u8]) -> Self {
        Self(message)
    }

    fn field(&mut self) -> Result<(u32, WireValue<'a>), Damaged> {
        let tag = self.varint()?;
        let number = u32::try_from(tag >> 3).ok().filter(|number| *number > 0).ok_or(Damaged)?;
        let value = match tag & 7 {
            0 => WireValue::Varint(self.varint()?),
            1 => WireValue::Fixed64(u64::from_le_bytes(self.array()?)),
            2 => {
                let len = usize::try_from(self.varint()?).map_err(|_| Damaged)?;
                WireValue::Bytes(self.take(len)?)
            }
            5 => WireValue::Fixed32(u32::from_le_bytes(self.array()?)),
            _ => return Err(Damaged),
        };
        Ok((number, value))
    }

    fn varint(&mut self) -> Result<u64, Damaged> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let [byte] = self.array()?;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Ok(value);
            }
        }
        Err(Damaged)
    }

    fn take(&mut self, len: usize) -> Result<&'a [u8], Damaged> {
        let (taken, rest) = self.0.split_at_checked(len).ok_or(Damaged)?;
        self.0 = rest;
        Ok(taken)
    }

    fn array<const N: usize>(&mut self) -> Result<[u8; N], Damaged> {
        let (taken, rest) = self.0.split_first_chunk().ok_or(Damaged)?;
        self.0 = rest;
        Ok(*taken)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, WireValue<'a>), Damaged>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.field();
        if field.is_err() {
            self.0 = &[];
        }
        Some(field)
    }
}

/// Returns a message of an unknown type as a map from field numbers to values; `None` if it is damaged.
///
/// The encoding does not tell texts from messages: what is a readable text is shown as one, what could be a message as
/// a message, and everything else in base64.
pub(crate) fn guessed(message: &[u8], depth: usize) -> Option<Node> {
    let mut fields: BTreeMap<u32, Vec<Node>> = BTreeMap::new();
    for field in Fields::of(message) {
        let (number, value) = field.ok()?;
        let node = match value {
            WireValue::Varint(value) | WireValue::Fixed64(value) => Node::Number(value.into()),
            WireValue::Fixed32(value) => Node::Number(value.into()),
            WireValue::Bytes(bytes) => guessed_bytes(bytes, depth),
        };
        fields.entry(number).or_default().push(node);
    }
    let one_or_list = |mut nodes: Vec<Node>| match nodes.len() {
        1 => nodes.remove(0),
        _ => Node::List(nodes),
    };
    Some(Node::Map(fields.into_iter().map(|(number, nodes)| (number.to_string(), one_or_list(nodes))).collect()))
}

fn guessed_bytes(bytes: &[u8], depth: usize) -> Node {
    match std::str::from_utf8(bytes) {
        Ok(text) if !text.contains(|c| is_hazard(c) && !matches!(c, '\n' | '\t')) => Node::text(text),
        _ if depth < DEPTH_MAX => {
            guessed(bytes, depth + 1).unwrap_or_else(|| Node::Text(BASE64_STANDARD.encode(bytes)))
        }
        _ => Node::Text(BASE64_STANDARD.encode(bytes)),
    }
}
