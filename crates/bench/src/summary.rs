//! Summaries of responses: messages with only those fields that the report needs. prost skips the others.
//!
//! With a thousand watchers, or ranges of ten thousand pairs, decoding every `KeyValue` would make the load generator
//! slower than the server.

use bytes::{Buf, BufMut, Bytes};
use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, key_len, skip_field},
};

/// The summary of a `RangeResponse`.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct RangeSummary {
    /// Number of pairs.
    pub kvs: u64,
    /// Length of the whole message.
    pub bytes: u64,
}

/// Not derived: a derived message would allocate a value per pair. A summary is never encoded.
impl Message for RangeSummary {
    fn merge_field(
        &mut self,
        tag: u32,
        wire_type: WireType,
        buf: &mut impl Buf,
        context: DecodeContext,
    ) -> Result<(), DecodeError> {
        const KVS: u32 = 2;
        let before = buf.remaining();
        skip_field(wire_type, tag, buf, context)?;
        self.kvs += u64::from(tag == KVS);
        self.bytes += (key_len(tag) + before - buf.remaining()) as u64;
        Ok(())
    }

    fn encode_raw(&self, _: &mut impl BufMut) {}

    fn encoded_len(&self) -> usize {
        0
    }

    fn clear(&mut self) {
        *self = Self::default();
    }
}

/// The summary of a `WatchResponse`.
#[derive(Clone, PartialEq, Message)]
pub struct WatchSummary {
    #[prost(bool, tag = "3")]
    pub created: bool,
    #[prost(bool, tag = "4")]
    pub canceled: bool,
    #[prost(string, tag = "6")]
    pub cancel_reason: String,
    #[prost(message, repeated, tag = "11")]
    pub events: Vec<EventSummary>,
}

/// The summary of an `Event`.
#[derive(Clone, PartialEq, Message)]
pub struct EventSummary {
    #[prost(message, optional, tag = "2")]
    kv: Option<PairSummary>,
}

/// The summary of a `KeyValue`.
#[derive(Clone, PartialEq, Message)]
pub struct PairSummary {
    #[prost(bytes = "bytes", tag = "5")]
    value: Bytes,
}

impl WatchSummary {
    /// Returns the stamps of those events that contain one, in order.
    pub fn stamps(&self) -> impl Iterator<Item = Stamp> {
        self.events.iter().filter_map(|event| Stamp::read(&event.kv.as_ref()?.value))
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

#[cfg(test)]
mod tests {
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
            assert_eq!(RangeSummary::decode(response.as_slice()), Ok(want), "{count} pairs");
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
        let summary = WatchSummary::decode(response.encode_to_vec().as_slice()).unwrap();
        assert_eq!(summary.events.len(), 4);
        assert_eq!(summary.stamps().collect::<Vec<_>>(), stamps);
        assert_eq!(WatchSummary { events: Vec::new(), ..summary }, WatchSummary::default());
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
        assert_eq!(WatchSummary::decode(response.encode_to_vec().as_slice()), Ok(want));
    }
}
