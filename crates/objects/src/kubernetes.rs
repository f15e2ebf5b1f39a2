//! Objects of Kubernetes' built-in kinds: from protobuf to the tree that `kubectl get -o yaml` shows.
//!
//! The messages come from a descriptor set that `build.rs` compiles from the proto files of one release. Fields that a
//! newer release added are reported by their numbers. Names of fields are JSON's, with the exceptions below; types that
//! write their own JSON are converted in [`special`].

mod omitempty;
mod special;

use std::{collections::BTreeMap, io::Read as _, sync::LazyLock};

use base64::{Engine as _, prelude::BASE64_STANDARD};
use flate2::read::ZlibDecoder;
use prost_reflect::{DescriptorPool, FieldDescriptor, Kind, MessageDescriptor};

use self::omitempty::omits_empty;
use crate::{
    hex,
    lines::Line,
    node::{Digest, Node},
    wire::{DEPTH_MAX, Damaged, Fields, WireValue},
};

/// Maximum estimated size of a decoded object in bytes. Names of fields make an object larger than its encoding.
const DECODED_BYTES_MAX: usize = 64 << 20;
/// Maximum number of remarks about one object.
const REMARKS_MAX: usize = 100;
/// Maximum number of bytes of an unknown field that a remark shows.
const REMARK_BYTES_MAX: usize = 64;

/// Groups whose proto package is not named like the first part of the group.
const PACKAGES: [(&str, &str); 5] = [
    ("", "api.core"),
    ("internal.apiserver.k8s.io", "api.apiserverinternal"),
    ("apiextensions.k8s.io", "apiextensions_apiserver.pkg.apis.apiextensions"),
    ("apiregistration.k8s.io", "kube_aggregator.pkg.apis.apiregistration"),
    ("meta.k8s.io", "apimachinery.pkg.apis.meta"),
];

/// Fields whose content belongs to the message around them: (message, field).
const INLINE: [(&str, &str); 17] = [
    ("ConfigMapEnvSource", "localObjectReference"),
    ("ConfigMapKeySelector", "localObjectReference"),
    ("ConfigMapProjection", "localObjectReference"),
    ("ConfigMapVolumeSource", "localObjectReference"),
    ("DeviceAllocationConfiguration", "deviceConfiguration"),
    ("DeviceClaimConfiguration", "deviceConfiguration"),
    ("DeviceClassConfiguration", "deviceConfiguration"),
    ("EphemeralContainer", "ephemeralContainerCommon"),
    ("IngressRule", "ingressRuleValue"),
    ("NamedRuleWithOperations", "ruleWithOperations"),
    ("PersistentVolumeSpec", "persistentVolumeSource"),
    ("Probe", "handler"),
    ("RuleWithOperations", "rule"),
    ("SecretEnvSource", "localObjectReference"),
    ("SecretKeySelector", "localObjectReference"),
    ("SecretProjection", "localObjectReference"),
    ("Volume", "volumeSource"),
];

static POOL: LazyLock<DescriptorPool> = LazyLock::new(|| {
    let mut set = Vec::new();
    let compressed: &[u8] = include_bytes!(concat!(env!("OUT_DIR"), "/kubernetes.bin"));
    ZlibDecoder::new(compressed).read_to_end(&mut set).expect("build.rs compressed it");
    DescriptorPool::decode(&*set).expect("build.rs wrote descriptors")
});

/// Decides whether remarks may contain bytes of the object.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Remarks {
    WithBytes,
    WithoutBytes,
}

/// A decoded object, and remarks on what of it is not in the tree.
pub(crate) struct Decoded {
    pub node: Node,
    pub remarks: Vec<Line>,
}

/// An object that is not shown by its fields: its kind is unknown, or it is too large.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum NotDecoded {
    UnknownKind,
    TooLarge,
}

/// Decodes an object without its `apiVersion` and `kind`, which the envelope contains.
pub(crate) fn decode(api_version: &str, kind: &str, raw: &[u8], remarks: Remarks) -> Result<Decoded, NotDecoded> {
    let message = message(api_version, kind).ok_or(NotDecoded::UnknownKind)?;
    let mut decoder = Decoder { style: remarks, path: Vec::new(), remarks: Vec::new(), remarks_left_out: 0, bytes: 0 };
    let node = decoder.message(&message, raw);
    if decoder.bytes > DECODED_BYTES_MAX {
        return Err(NotDecoded::TooLarge);
    }
    Ok(Decoded { node, remarks: decoder.into_remarks() })
}

fn message(api_version: &str, kind: &str) -> Option<MessageDescriptor> {
    let (group, version) = api_version.rsplit_once('/').unwrap_or(("", api_version));
    let package = match PACKAGES.iter().find(|(named, _)| *named == group) {
        Some((_, package)) => (*package).to_owned(),
        None if group.ends_with(".k8s.io") => format!("api.{}", group.split('.').next()?),
        // apps, autoscaling, batch, extensions, policy.
        None if !group.contains('.') => format!("api.{group}"),
        None => return None,
    };
    POOL.get_message_by_name(&format!("{package}.{version}.{kind}"))
}

struct Decoder {
    style: Remarks,
    /// Where the decoder is, for remarks: names of fields and `[index]`.
    path: Vec<String>,
    remarks: Vec<Line>,
    remarks_left_out: usize,
    /// Estimated size of what was decoded.
    bytes: usize,
}

impl Decoder {
    fn message(&mut self, message: &MessageDescriptor, wire: &[u8]) -> Node {
        let special = special::of_bytes(message.full_name(), wire);
        let mut map = BTreeMap::new();
        for field in Fields::of(wire) {
            if self.bytes > DECODED_BYTES_MAX {
                break;
            }
            let Ok((number, value)) = field else {
                self.remark("damaged from here on", WireValue::Bytes(wire));
                break;
            };
            match message.get_field(number) {
                Some(_) if special.is_some() => {}
                Some(field) => self.field(&mut map, message, &field, value),
                None => self.remark(&format!("unknown field {number}"), value),
            }
        }
        special.unwrap_or_else(|| special::of_fields(message.full_name(), map))
    }

    fn field(
        &mut self,
        map: &mut BTreeMap<String, Node>,
        message: &MessageDescriptor,
        field: &FieldDescriptor,
        value: WireValue<'_>,
    ) {
        let name = special::json_name(message.name(), field.name());
        self.bytes += name.len() + size_of::<Node>();
        if self.path.len() > DEPTH_MAX {
            return self.remark(&format!("nested too deeply: {name}"), value);
        }
        let index = match map.get(&name) {
            Some(Node::List(items)) if field.is_list() => items.len(),
            _ => 0,
        };
        self.path.push(if field.is_list() { format!("{name}[{index}]") } else { name.clone() });
        if field.is_map() {
            self.map_entry(map, &name, field, value);
        } else if let Ok(node) = self.value(&field.kind(), value) {
            if field.is_list() {
                push(map, name, node);
            } else if INLINE.contains(&(message.name(), field.name())) {
                if let Node::Map(inner) = node {
                    map.extend(inner);
                }
            } else if matches!(node, Node::Null) || is_empty(&node) && omits_empty(message.name(), &name) {
                // As if it had not been sent.
            } else if map.insert(name, node).is_some() {
                self.remark("sent more than once; the last value is shown", value);
            }
        } else {
            self.remark("not of the field's type", value);
        }
        self.path.pop();
    }

    /// Decodes an entry of a map: a message of a key, field 1, and a value, field 2.
    fn map_entry(
        &mut self,
        map: &mut BTreeMap<String, Node>,
        name: &str,
        field: &FieldDescriptor,
        entry: WireValue<'_>,
    ) {
        let (Kind::Message(message), WireValue::Bytes(wire)) = (field.kind(), entry) else {
            return self.remark("not of the field's type", entry);
        };
        let kind = message.map_entry_value_field().kind();
        let (mut key, mut node) = (String::new(), None);
        for field in Fields::of(wire) {
            match field {
                Ok((1, WireValue::Bytes(bytes))) => key = self.text(bytes),
                Ok((2, value)) => node = self.value(&kind, value).ok(),
                Ok((number, value)) => self.remark(&format!("unknown field {number}"), value),
                Err(Damaged) => self.remark("damaged from here on", entry),
            }
        }
        let node = node.unwrap_or_else(|| Node::text(""));
        self.bytes += key.len() + size_of::<Node>();
        if let Node::Map(entries) = map.entry(name.to_owned()).or_insert_with(|| Node::Map(BTreeMap::new())) {
            entries.insert(key, node);
        }
    }

    fn value(&mut self, kind: &Kind, value: WireValue<'_>) -> Result<Node, Damaged> {
        Ok(match (kind, value) {
            (Kind::Bool, WireValue::Varint(value)) => Node::Bool(value != 0),
            // Negative numbers are sent as 64 bits, whatever the type.
            (Kind::Int32 | Kind::Int64, WireValue::Varint(value)) => Node::Number(value.cast_signed().into()),
            (Kind::Uint32 | Kind::Uint64, WireValue::Varint(value)) => Node::Number(value.into()),
            (Kind::Double, WireValue::Fixed64(bits)) => {
                serde_json::Number::from_f64(f64::from_bits(bits)).map_or(Node::Null, Node::Number)
            }
            (Kind::String, WireValue::Bytes(bytes)) => Node::Text(self.text(bytes)),
            (Kind::Bytes, WireValue::Bytes(bytes)) => {
                self.bytes += bytes.len() * 4 / 3;
                Node::Text(BASE64_STANDARD.encode(bytes))
            }
            (Kind::Message(message), WireValue::Bytes(wire)) => self.message(message, wire),
            _ => return Err(Damaged),
        })
    }

    fn text(&mut self, bytes: &[u8]) -> String {
        self.bytes += bytes.len();
        if std::str::from_utf8(bytes).is_err() {
            self.remark("text that is not UTF-8", WireValue::Bytes(bytes));
        }
        String::from_utf8_lossy(bytes).into_owned()
    }

    fn remark(&mut self, what: &str, value: WireValue<'_>) {
        if self.remarks.len() >= REMARKS_MAX {
            self.remarks_left_out += 1;
            return;
        }
        let place = if self.path.is_empty() { "the object".to_owned() } else { self.path.join(".") };
        let (shown, bytes) = match value {
            WireValue::Varint(value) => (value.to_string(), value.to_le_bytes().to_vec()),
            WireValue::Fixed64(value) => (format!("{value:#018x}"), value.to_le_bytes().to_vec()),
            WireValue::Fixed32(value) => (format!("{value:#010x}"), value.to_le_bytes().to_vec()),
            WireValue::Bytes(bytes) if bytes.len() > REMARK_BYTES_MAX => {
                (format!("{} ... ({} bytes)", hex::spaced(&bytes[..REMARK_BYTES_MAX]), bytes.len()), bytes.to_vec())
            }
            WireValue::Bytes(bytes) => (format!("{} ({} bytes)", hex::spaced(bytes), bytes.len()), bytes.to_vec()),
        };
        let text = match self.style {
            Remarks::WithBytes => format!("{place}: {what}: {shown}"),
            Remarks::WithoutBytes => format!("{place}: {what}"),
        };
        self.remarks.push(Line { text, hidden: Some(Digest::of(&bytes)) });
    }

    fn into_remarks(mut self) -> Vec<Line> {
        if self.remarks_left_out > 0 {
            self.remarks.push(Line { text: format!("{} more remarks", self.remarks_left_out), hidden: None });
        }
        self.remarks
    }
}

fn push(map: &mut BTreeMap<String, Node>, name: String, node: Node) {
    if let Node::List(items) = map.entry(name).or_insert_with(|| Node::List(Vec::new())) {
        items.push(node);
    }
}

/// Reports whether Go's `omitempty` omits a value. Structs are never omitted.
fn is_empty(node: &Node) -> bool {
    match node {
        Node::Null => true,
        Node::Bool(is) => !is,
        Node::Number(number) => number.as_f64() == Some(0.0),
        Node::Text(text) => text.is_empty(),
        Node::Masked(_) | Node::Map(_) => false,
        Node::List(items) => items.is_empty(),
    }
}
