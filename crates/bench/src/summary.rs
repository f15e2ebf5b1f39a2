//! Summaries of responses, read from the protobuf fields without decoding the messages.
//!
//! With a thousand watchers, or ranges of ten thousand pairs, decoding every `KeyValue` would make the load generator
//! slower than the server. A [`Summary`] reads from the connection's buffer only the fields that the report needs.
//! prost encodes the requests as usual.

use std::marker::PhantomData;

use bytes::Buf as _;
use prost::encoding::decode_varint;
use tonic::{
    Status,
    codec::{BufferSettings, Codec, DecodeBuf, Decoder},
};
use tonic_prost::ProstCodec;

/// The part of a response that the report needs.
pub trait Summary: Sized + Send + 'static {
    fn read(message: &[u8]) -> Result<Self, Malformed>;
}

/// The summary of a `RangeResponse`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RangeSummary {
    /// Number of pairs.
    pub kvs: u64,
    /// Length of the whole message.
    pub bytes: u64,
}

impl Summary for RangeSummary {
    fn read(message: &[u8]) -> Result<Self, Malformed> {
        let mut summary = Self { kvs: 0, bytes: message.len() as u64 };
        for field in Fields(message) {
            if let (range_response::KVS, Value::Bytes(_)) = field? {
                summary.kvs += 1;
            }
        }
        Ok(summary)
    }
}

/// The summary of a `WatchResponse`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct WatchSummary {
    pub created: bool,
    pub canceled: bool,
    pub cancel_reason: String,
    /// Number of events.
    pub events: u64,
    /// The stamps of those events that contain one, in order.
    pub stamps: Vec<Stamp>,
}

impl Summary for WatchSummary {
    fn read(message: &[u8]) -> Result<Self, Malformed> {
        let mut summary = Self::default();
        for field in Fields(message) {
            match field? {
                (watch_response::CREATED, Value::Varint(created)) => summary.created = created != 0,
                (watch_response::CANCELED, Value::Varint(canceled)) => summary.canceled = canceled != 0,
                (watch_response::CANCEL_REASON, Value::Bytes(reason)) => {
                    summary.cancel_reason = String::from_utf8_lossy(reason).into_owned();
                }
                (watch_response::EVENTS, Value::Bytes(event)) => {
                    summary.events += 1;
                    summary.stamps.extend(event_stamp(event)?);
                }
                _ => {}
            }
        }
        Ok(summary)
    }
}

/// The first bytes of a watched key's value. They identify the put that caused an event.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stamp {
    /// Start of the put, in nanoseconds since the start of the run.
    pub started: u64,
    pub client: u32,
}

impl Stamp {
    pub const LEN: usize = size_of::<u64>() + size_of::<u32>();

    /// Overwrites the first bytes of the value with the stamp, if the value is long enough.
    pub fn write(self, value: &mut [u8]) {
        if let Some((started, rest)) = value.split_first_chunk_mut()
            && let Some(client) = rest.first_chunk_mut()
        {
            *started = self.started.to_be_bytes();
            *client = self.client.to_be_bytes();
        }
    }

    fn read(value: &[u8]) -> Option<Self> {
        let (started, rest) = value.split_first_chunk()?;
        let client = rest.first_chunk()?;
        Some(Self { started: u64::from_be_bytes(*started), client: u32::from_be_bytes(*client) })
    }
}

/// Returns the stamp of the event's value; `None` for a deletion and for a value that is too short.
fn event_stamp(event: &[u8]) -> Result<Option<Stamp>, Malformed> {
    let Some(kv) = bytes_field(event, event::KV)? else { return Ok(None) };
    let Some(value) = bytes_field(kv, key_value::VALUE)? else { return Ok(None) };
    Ok(Stamp::read(value))
}

fn bytes_field(message: &[u8], wanted: u32) -> Result<Option<&[u8]>, Malformed> {
    for field in Fields(message) {
        if let (number, Value::Bytes(bytes)) = field?
            && number == wanted
        {
            return Ok(Some(bytes));
        }
    }
    Ok(None)
}

/// Field numbers of `etcdserverpb.RangeResponse`.
mod range_response {
    pub const KVS: u32 = 2;
}

/// Field numbers of `etcdserverpb.WatchResponse`.
mod watch_response {
    pub const CREATED: u32 = 3;
    pub const CANCELED: u32 = 4;
    pub const CANCEL_REASON: u32 = 6;
    pub const EVENTS: u32 = 11;
}

/// Field numbers of `mvccpb.Event`.
mod event {
    pub const KV: u32 = 2;
}

/// Field numbers of `mvccpb.KeyValue`.
mod key_value {
    pub const VALUE: u32 = 5;
}

/// The response is not a valid protobuf message.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("malformed protobuf message")]
pub struct Malformed;

#[derive(Debug, PartialEq, Eq)]
enum Value<'a> {
    Varint(u64),
    Bytes(&'a [u8]),
    /// A fixed32 or fixed64, which etcd's messages do not contain.
    Fixed,
}

/// Iterator over the fields of a message as (number, value), in wire order. It ends after the first malformed field.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    /// Returns the next field; `None` if it is malformed.
    fn take_field(&mut self) -> Option<(u32, Value<'a>)> {
        let tag = u32::try_from(self.take_varint()?).ok()?;
        let value = match tag & 7 {
            0 => Value::Varint(self.take_varint()?),
            1 => self.take_bytes(8).map(|_| Value::Fixed)?,
            2 => {
                let len = usize::try_from(self.take_varint()?).ok()?;
                Value::Bytes(self.take_bytes(len)?)
            }
            5 => self.take_bytes(4).map(|_| Value::Fixed)?,
            _ => return None,
        };
        Some((tag >> 3, value))
    }

    fn take_varint(&mut self) -> Option<u64> {
        decode_varint(&mut self.0).ok()
    }

    fn take_bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (bytes, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(bytes)
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = Result<(u32, Value<'a>), Malformed>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() {
            return None;
        }
        let field = self.take_field();
        if field.is_none() {
            self.0 = &[];
        }
        Some(field.ok_or(Malformed))
    }
}

/// A codec that sends the prost message `M` and receives the summary `T`.
pub struct SummaryCodec<M, T>(PhantomData<(M, T)>);

impl<M, T> Default for SummaryCodec<M, T> {
    fn default() -> Self {
        Self(PhantomData)
    }
}

impl<M: prost::Message + 'static, T: Summary> Codec for SummaryCodec<M, T> {
    type Encode = M;
    type Decode = T;
    type Encoder = <ProstCodec<M, ()> as Codec>::Encoder;
    type Decoder = SummaryDecoder<T>;

    fn encoder(&mut self) -> Self::Encoder {
        ProstCodec::<M, ()>::raw_encoder(BufferSettings::default())
    }

    fn decoder(&mut self) -> Self::Decoder {
        SummaryDecoder(PhantomData)
    }
}

pub struct SummaryDecoder<T>(PhantomData<T>);

impl<T: Summary> Decoder for SummaryDecoder<T> {
    type Item = T;
    type Error = Status;

    fn decode(&mut self, src: &mut DecodeBuf<'_>) -> Result<Option<T>, Status> {
        let len = src.remaining();
        // tonic keeps a message in one contiguous chunk. If that changes, the message is copied into one chunk first.
        let summary = if src.chunk().len() == len { T::read(src.chunk()) } else { T::read(&src.copy_to_bytes(len)) };
        src.advance(src.remaining());
        summary.map(Some).map_err(|error| Status::internal(error.to_string()))
    }
}

#[cfg(test)]
mod tests {
    use bytes::Bytes;
    use prost::Message as _;

    use super::*;
    use orlop_wire::proto::client::{
        etcdserverpb::{RangeResponse, ResponseHeader, WatchResponse},
        mvccpb::{Event, KeyValue},
    };

    fn pair(value: &[u8]) -> KeyValue {
        KeyValue {
            key: Bytes::from_static(b"registry/a"),
            create_revision: 300,
            mod_revision: i64::MAX,
            version: -1,
            value: Bytes::copy_from_slice(value),
            lease: 7,
        }
    }

    fn put(value: &[u8]) -> Event {
        Event { r#type: 0, kv: Some(pair(value)), prev_kv: Some(pair(b"the previous pair")) }
    }

    fn header() -> Option<ResponseHeader> {
        Some(ResponseHeader { cluster_id: u64::MAX, member_id: 1, revision: 12, raft_term: 2 })
    }

    #[test]
    fn range_summary_counts_pairs() {
        for count in [0, 1, 3, 1000] {
            let response =
                RangeResponse { header: header(), kvs: vec![pair(&[0; 200]); count], more: true, count: 5000 }
                    .encode_to_vec();
            let want = RangeSummary { kvs: count as u64, bytes: response.len() as u64 };
            assert_eq!(RangeSummary::read(&response), Ok(want), "{count} pairs");
        }
    }

    #[test]
    fn watch_summary_contains_stamps() {
        let deletion = Event { r#type: 1, kv: Some(pair(b"")), prev_kv: None };
        let stamps = [Stamp { started: 3, client: 0 }, Stamp { started: u64::MAX, client: u32::MAX }];
        let with_stamp = |stamp: Stamp| {
            let mut value = [b'x'; Stamp::LEN + 5];
            stamp.write(&mut value);
            put(&value)
        };
        let response = WatchResponse {
            header: header(),
            watch_id: 5,
            events: vec![with_stamp(stamps[0]), deletion, put(b"too short"), with_stamp(stamps[1])],
            ..WatchResponse::default()
        };
        let want = WatchSummary { events: 4, stamps: stamps.to_vec(), ..WatchSummary::default() };
        assert_eq!(WatchSummary::read(&response.encode_to_vec()), Ok(want));
    }

    #[test]
    fn watch_summary_contains_created_and_canceled() {
        let response = WatchResponse {
            header: header(),
            watch_id: -1,
            created: true,
            canceled: true,
            cancel_reason: "etcdserver: permission denied".to_owned(),
            ..WatchResponse::default()
        };
        let want = WatchSummary {
            created: true,
            canceled: true,
            cancel_reason: "etcdserver: permission denied".to_owned(),
            ..WatchSummary::default()
        };
        assert_eq!(WatchSummary::read(&response.encode_to_vec()), Ok(want));
    }

    #[test]
    fn truncated_messages_do_not_panic() {
        let response =
            WatchResponse { header: header(), watch_id: 5, events: vec![put(b"value")], ..Default::default() }
                .encode_to_vec();
        for len in 0..response.len() {
            let events = WatchSummary::read(&response[..len]).map_or(0, |summary| summary.events);
            assert_eq!(events, 0, "truncated to {len} bytes");
        }
    }

    #[test]
    fn invalid_tags_are_malformed() {
        for message in [&[0x0b_u8][..], &[0xff; 11], &[0x12, 0xff, 0x01, 0x00], &[0x09, 0, 0]] {
            assert_eq!(RangeSummary::read(message), Err(Malformed), "{message:x?}");
        }
        let fixed = [0x09, 0, 0, 0, 0, 0, 0, 0, 0, 0x0d, 0, 0, 0, 0];
        assert_eq!(RangeSummary::read(&fixed), Ok(RangeSummary { kvs: 0, bytes: 14 }));
    }
}
