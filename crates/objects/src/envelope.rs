//! The envelope in which Kubernetes stores objects in protobuf: four bytes, then a `runtime.Unknown` with the object.
//!
//! Source: Kubernetes API Concepts, "Alternate representations of resources", "Kubernetes Protobuf encoding".

use crate::wire::{Damaged, Fields, WireValue};

pub(crate) const MAGIC: &[u8] = b"k8s\0";

/// What the envelope contains. Fields that were not sent are empty.
#[derive(Default, Debug)]
pub(crate) struct Envelope<'a> {
    pub api_version: String,
    pub kind: String,
    pub raw: &'a [u8],
    pub content_encoding: String,
    pub content_type: String,
    /// The envelope ends in the middle of a field, or has something else that cannot be right.
    pub damaged: bool,
    pub unknown_fields: Vec<u32>,
}

impl<'a> Envelope<'a> {
    /// Reads what follows [`MAGIC`].
    pub fn of(wire: &'a [u8]) -> Self {
        let mut envelope = Self::default();
        for field in Fields::of(wire) {
            match field {
                Ok((1, WireValue::Bytes(types))) => envelope.types(types),
                Ok((2, WireValue::Bytes(raw))) => envelope.raw = raw,
                Ok((3, WireValue::Bytes(text))) => envelope.content_encoding = lossy(text),
                Ok((4, WireValue::Bytes(text))) => envelope.content_type = lossy(text),
                Ok((number, _)) => envelope.unknown_fields.push(number),
                Err(Damaged) => envelope.damaged = true,
            }
        }
        envelope.unknown_fields.dedup();
        envelope.unknown_fields.truncate(8);
        envelope
    }

    fn types(&mut self, wire: &[u8]) {
        for field in Fields::of(wire) {
            match field {
                Ok((1, WireValue::Bytes(text))) => self.api_version = lossy(text),
                Ok((2, WireValue::Bytes(text))) => self.kind = lossy(text),
                Ok((number, _)) => self.unknown_fields.push(number),
                Err(Damaged) => self.damaged = true,
            }
        }
    }
}

fn lossy(text: &[u8]) -> String {
    String::from_utf8_lossy(text).into_owned()
}
