//! Pairs and events in the protobuf form that leaves the server, encoded once and shared.
//!
//! Layout of a pair (`mvccpb.KeyValue`): key 1, create_revision 2, mod_revision 3, version 4, value 5, lease 6. Fields
//! with their default value are omitted, and fields are in the order of their numbers, as prost writes them.

use bytes::{Buf, Bytes};
use prost::encoding::{WireType, decode_key, decode_varint, encode_key, encode_varint, encoded_len_varint};

use super::{LeaseId, Revision, RowId, Version};

/// Field numbers of `mvccpb.KeyValue`.
const KEY: u32 = 1;
const VALUE: u32 = 5;

/// An encoded `mvccpb.KeyValue`. Only [`EncodedKv::new`] creates one, so decoding it cannot fail.
#[derive(Clone, PartialEq, Eq)]
pub struct EncodedKv(Bytes);

impl EncodedKv {
    pub fn new(key: &[u8], version: Version, value: &[u8], lease: Option<LeaseId>) -> Self {
        let lease = LeaseId::to_wire(lease);
        let numbers = [version.create_revision.0, version.row.revision.0, version.version];
        let len =
            bytes_len(key) + numbers.iter().map(|n| int_len(*n)).sum::<usize>() + bytes_len(value) + int_len(lease);
        let mut buf = Vec::with_capacity(len);
        put_bytes(&mut buf, 1, key);
        for (tag, number) in (2..).zip(numbers) {
            put_int(&mut buf, tag, number);
        }
        put_bytes(&mut buf, 5, value);
        put_int(&mut buf, 6, lease);
        debug_assert_eq!(buf.len(), len, "the encoded length equals the computed length");
        Self(buf.into())
    }

    /// Attaches a guard that is dropped when the last reference to the pair's memory is dropped.
    pub fn held_by<G: Send + 'static>(self, guard: G) -> Self {
        Self(held_by(self.0, guard))
    }

    pub fn as_bytes(&self) -> &Bytes {
        &self.0
    }

    pub fn into_bytes(self) -> Bytes {
        self.0
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns the value, which shares the pair's memory.
    pub fn value(&self) -> Bytes {
        self.bytes_field(VALUE).map_or_else(Bytes::new, |field| self.0.slice(field.bytes))
    }

    pub fn key_slice(&self) -> &[u8] {
        self.bytes_of(KEY)
    }

    pub fn value_slice(&self) -> &[u8] {
        self.bytes_of(VALUE)
    }

    /// Returns the pair with an empty value.
    pub fn without_value(&self) -> Self {
        let Some(Field { whole, .. }) = self.bytes_field(VALUE) else { return self.clone() };
        Self([&self.0[..whole.start], &self.0[whole.end..]].concat().into())
    }

    pub fn mod_revision(&self) -> Revision {
        Revision(self.ints()[1])
    }

    /// Returns the pair after `change` was applied to its create revision and its mod revision.
    pub fn with_revisions(&self, change: impl Fn(&mut Revision)) -> Self {
        let [create, modified, version, lease] = self.ints();
        let (mut create_revision, mut modified) = (Revision(create), Revision(modified));
        change(&mut create_revision);
        change(&mut modified);
        let version = Version { row: RowId::new(modified, 0), create_revision, version };
        Self::new(self.bytes_of(KEY), version, self.bytes_of(VALUE), LeaseId::from_wire(lease))
    }

    /// Returns create revision, mod revision, version and lease.
    pub(super) fn ints(&self) -> [i64; 4] {
        let mut ints = [0; 4];
        for field in self.fields() {
            match field.tag {
                2 => ints[0] = field.number.cast_signed(),
                3 => ints[1] = field.number.cast_signed(),
                4 => ints[2] = field.number.cast_signed(),
                6 => ints[3] = field.number.cast_signed(),
                _ => {}
            }
        }
        ints
    }

    fn bytes_of(&self, tag: u32) -> &[u8] {
        self.bytes_field(tag).map_or(&[], |field| &self.0[field.bytes])
    }

    fn bytes_field(&self, tag: u32) -> Option<Field> {
        self.fields().find(|field| field.tag == tag)
    }

    fn fields(&self) -> impl Iterator<Item = Field> {
        let mut rest: &[u8] = &self.0;
        std::iter::from_fn(move || {
            if !rest.has_remaining() {
                return None;
            }
            let start = self.0.len() - rest.len();
            let (tag, wire) = decode_key(&mut rest).expect("made by EncodedKv::new");
            let number = decode_varint(&mut rest).expect("made by EncodedKv::new");
            let content = self.0.len() - rest.len();
            if wire == WireType::LengthDelimited {
                rest.advance(usize::try_from(number).expect("a length of this buffer"));
            }
            let end = self.0.len() - rest.len();
            Some(Field { tag, number, whole: start..end, bytes: content..end })
        })
    }
}

/// Attaches a guard that is dropped when the last reference to the bytes is dropped.
pub(crate) fn held_by<G: Send + 'static>(bytes: Bytes, guard: G) -> Bytes {
    Bytes::from_owner(HeldBy { bytes, _guard: guard })
}

struct HeldBy<G> {
    bytes: Bytes,
    _guard: G,
}

impl<G> AsRef<[u8]> for HeldBy<G> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

/// A field of a pair: its number or its length, and its position with tag and length, and without.
struct Field {
    tag: u32,
    number: u64,
    whole: std::ops::Range<usize>,
    bytes: std::ops::Range<usize>,
}

impl std::fmt::Debug for EncodedKv {
    /// Prints the pair without its value.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "EncodedKv({} bytes)", self.0.len())
    }
}

/// An encoded `mvccpb.Event` with the tag and length that it has as an element of `WatchResponse.events`. Appending
/// such events to an encoded `WatchResponse` without events gives the encoded response with these events.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct EncodedEvent(Vec<u8>);

/// The field number of `WatchResponse.events`.
const EVENTS_TAG: u32 = 11;

impl EncodedEvent {
    pub fn put(kv: &EncodedKv, prev: Option<&EncodedKv>) -> Self {
        Self::frame(false, kv.as_bytes(), prev)
    }

    /// Encodes a deletion, whose pair contains only the key and the revision of the delete.
    pub fn delete(key: &[u8], revision: Revision, prev: Option<&EncodedKv>) -> Self {
        let mut kv = Vec::with_capacity(bytes_len(key) + int_len(revision.0));
        put_bytes(&mut kv, 1, key);
        put_int(&mut kv, 3, revision.0);
        Self::frame(true, &kv, prev)
    }

    fn frame(deleted: bool, kv: &[u8], prev: Option<&EncodedKv>) -> Self {
        let prev: &[u8] = prev.map_or(&[], |prev| prev.as_bytes());
        let len = int_len(i64::from(deleted)) + bytes_len(kv) + bytes_len(prev);
        let mut buf = Vec::with_capacity(1 + encoded_len_varint(len as u64) + len);
        encode_key(EVENTS_TAG, WireType::LengthDelimited, &mut buf);
        encode_varint(len as u64, &mut buf);
        put_int(&mut buf, 1, i64::from(deleted));
        put_bytes(&mut buf, 2, kv);
        put_bytes(&mut buf, 3, prev);
        Self(buf)
    }

    pub fn as_bytes(&self) -> &[u8] {
        &self.0
    }
}

// All field numbers are below 16, so each tag takes one byte.

fn bytes_len(bytes: &[u8]) -> usize {
    if bytes.is_empty() { 0 } else { 1 + encoded_len_varint(bytes.len() as u64) + bytes.len() }
}

fn int_len(number: i64) -> usize {
    if number == 0 { 0 } else { 1 + encoded_len_varint(number.cast_unsigned()) }
}

fn put_bytes(buf: &mut Vec<u8>, tag: u32, bytes: &[u8]) {
    if !bytes.is_empty() {
        encode_key(tag, WireType::LengthDelimited, buf);
        encode_varint(bytes.len() as u64, buf);
        buf.extend_from_slice(bytes);
    }
}

fn put_int(buf: &mut Vec<u8>, tag: u32, number: i64) {
    if number != 0 {
        encode_key(tag, WireType::Varint, buf);
        encode_varint(number.cast_unsigned(), buf);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use prost::Message as _;

    use super::*;
    use crate::types::RowId;
    use orlop_wire::proto::client::{etcdserverpb::WatchResponse, mvccpb};

    fn pair(key: &[u8], numbers: [i64; 4], value: &[u8]) -> (EncodedKv, mvccpb::KeyValue) {
        let [create, modified, version, lease] = numbers;
        let state = Version { row: RowId::new(Revision(modified), 3), create_revision: Revision(create), version };
        let kv = EncodedKv::new(key, state, value, LeaseId::from_wire(lease));
        let plain = mvccpb::KeyValue {
            key: Bytes::copy_from_slice(key),
            create_revision: create,
            mod_revision: modified,
            version,
            value: Bytes::copy_from_slice(value),
            lease,
        };
        (kv, plain)
    }

    proptest! {
        #[test]
        fn pairs_are_encoded_as_prost_does(key: Vec<u8>, value: Vec<u8>, numbers: [i64; 4]) {
            let (kv, plain) = pair(&key, numbers, &value);
            prop_assert_eq!(kv.as_bytes().to_vec(), plain.encode_to_vec());
            prop_assert_eq!(kv.value().to_vec(), value);
            let bare = mvccpb::KeyValue { value: Bytes::new(), ..plain.clone() };
            prop_assert_eq!(kv.without_value().as_bytes().to_vec(), bare.encode_to_vec());
            prop_assert_eq!(kv.mod_revision(), Revision(plain.mod_revision));
            let halved = kv.with_revisions(|revision| revision.0 /= 2);
            let [create_revision, mod_revision] = [plain.create_revision / 2, plain.mod_revision / 2];
            let plain = mvccpb::KeyValue { create_revision, mod_revision, ..plain };
            prop_assert_eq!(halved.as_bytes().to_vec(), plain.encode_to_vec());
        }

        #[test]
        fn events_are_encoded_as_prost_does(
            key in prop::collection::vec(any::<u8>(), 1..20),
            value: Vec<u8>,
            numbers: [i64; 4],
            with_prev: bool,
        ) {
            let (kv, plain) = pair(&key, numbers, &value);
            let prev = with_prev.then_some(&kv);
            let mut bytes = EncodedEvent::put(&kv, prev).as_bytes().to_vec();
            bytes.extend(EncodedEvent::delete(&key, Revision(7), prev).as_bytes());

            let response = WatchResponse::decode(bytes.as_slice()).expect("decodes");
            let prev_kv = with_prev.then(|| plain.clone());
            let deleted = mvccpb::KeyValue { key: key.into(), mod_revision: 7, ..Default::default() };
            let expected = [
                mvccpb::Event { r#type: 0, kv: Some(plain), prev_kv: prev_kv.clone() },
                mvccpb::Event { r#type: 1, kv: Some(deleted), prev_kv },
            ];
            prop_assert_eq!(response.events, expected);
        }
    }
}
