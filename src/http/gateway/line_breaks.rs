//! Line breaks in base64, which Go's decoder, and so etcd, ignores: encoders for e-mail insert one every 76 characters.

use prost_reflect::{Kind, MessageDescriptor};
use serde_json::Value;

/// Removes line breaks from the texts of all fields of bytes. Returns `None` if there are none, or the text is not JSON.
pub(super) fn removed(json: &[u8], kind: &MessageDescriptor) -> Option<Value> {
    let mut value = serde_json::from_slice(json).ok()?;
    remove(&mut value, kind).then_some(value)
}

fn remove(value: &mut Value, kind: &MessageDescriptor) -> bool {
    let Value::Object(fields) = value else { return false };
    let mut has_removed = false;
    for (name, value) in fields {
        let field = kind.get_field_by_json_name(name).or_else(|| kind.get_field_by_name(name));
        let Some(field) = field else { continue };
        let mut one = std::slice::from_mut(value);
        if let [Value::Array(values)] = one {
            one = values;
        }
        for value in one {
            has_removed |= match (field.kind(), value) {
                (Kind::Message(kind), value) => remove(value, &kind),
                (Kind::Bytes, Value::String(text)) => {
                    let len = text.len();
                    text.retain(|character| !matches!(character, '\r' | '\n'));
                    text.len() < len
                }
                _ => false,
            };
        }
    }
    has_removed
}
