//! Limits the fields of a request, and the operations of a transaction, before it is decoded.
//!
//! A request of 2 MiB may have a million fields, whose decoding takes tens of milliseconds and hundreds of MiB.
//! Counting stops when the limit is exceeded.

use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use tonic::Status;

use crate::api::status::Invalid;
use orlop_wire::proto::server::etcdserverpb as pb;

/// Shorter requests are not counted, because counting would cost as much as decoding.
const COUNTED_BYTES_MIN: usize = 16 << 10;
/// Maximum number of fields. Only a transaction has more than 13 known fields.
const FIELDS_MAX: usize = 1_024;
/// Fields that each operation and compare of a transaction adds to the maximum: 13 of a range, one of the operation
/// that contains the range, and one of the list that contains the operation.
const FIELDS_PER_OP: usize = 15;
/// Minimum number of bytes of an operation or a compare: its tag and its length.
const OP_BYTES_MIN: usize = 2;
/// Maximum number of operations and compares of a transaction, including nested transactions, as a multiple of
/// `max_txn_ops`. Without this limit the numbers of the levels multiply: etcd accepts tens of thousands of
/// operations in one request, and executes no other request at the same time.
const TOTAL_OPS_FACTOR: usize = 64;

/// Returns the maximum number of operations and compares of a transaction, including nested transactions.
pub fn total_ops_max(ops_max: usize) -> usize {
    ops_max.saturating_mul(TOTAL_OPS_FACTOR)
}

/// A request with a limited number of fields.
pub trait LimitedFields: Message + Default + 'static {
    /// Checks an encoded request. Does not report malformed requests; the decoder does.
    ///
    /// # Errors
    ///
    /// If it has too many fields.
    fn check_fields(message: &[u8], _ops_max: usize) -> Result<(), Status> {
        if message.len() < COUNTED_BYTES_MIN || Fields(message).nth(FIELDS_MAX).is_none() {
            Ok(())
        } else {
            Err(Status::invalid_argument(format!("orlop: the request has more than {FIELDS_MAX} fields")))
        }
    }
}

impl LimitedFields for pb::RangeRequest {}
impl LimitedFields for pb::PutRequest {}
impl LimitedFields for pb::DeleteRangeRequest {}
impl LimitedFields for pb::CompactionRequest {}
impl LimitedFields for pb::LeaseTimeToLiveRequest {}
impl LimitedFields for pb::LeaseLeasesRequest {}

impl LimitedFields for pb::TxnRequest {
    /// Checks any request that is long enough to exceed the limit of operations, which is checked nowhere else.
    fn check_fields(message: &[u8], ops_max: usize) -> Result<(), Status> {
        let counted_bytes_min = COUNTED_BYTES_MIN.min(total_ops_max(ops_max).saturating_mul(OP_BYTES_MIN));
        if message.len() < counted_bytes_min { Ok(()) } else { count_txn(message, ops_max) }
    }
}

/// Counts operations, compares and fields of an encoded `TxnRequest`.
///
/// # Errors
///
/// If it has too many operations, or more fields than the limit for its number of operations.
pub fn count_txn(message: &[u8], ops_max: usize) -> Result<(), Status> {
    let total_max = total_ops_max(ops_max);
    let (mut ops, mut fields) = (0_usize, 0);
    let mut count = |is_op: bool| {
        ops += usize::from(is_op);
        fields += 1;
        if ops > total_max {
            return Err(Invalid::TooManyOps.into());
        }
        // An operation is counted before the fields that it contains.
        if fields <= ops.saturating_mul(FIELDS_PER_OP).saturating_add(FIELDS_MAX) {
            return Ok(());
        }
        let text = format!("orlop: the request has more than {FIELDS_MAX} fields outside its operations");
        Err(Status::invalid_argument(text))
    };
    // Lengths of the lists of the outermost transaction: compares, success and failure.
    let mut lists = [0; 3];
    let mut levels = vec![(Part::Txn, message)];
    let mut is_outermost = true;
    while let Some((part, content)) = levels.pop() {
        for (tag, content) in Fields(content) {
            let inner = match (part, tag) {
                (Part::Txn, 1) => Part::Leaf,
                (Part::Txn, 2 | 3) => Part::Op,
                (Part::Op, 4) => Part::Txn,
                (Part::Op, _) => Part::Leaf,
                _ => {
                    count(false)?;
                    continue;
                }
            };
            count(part == Part::Txn)?;
            if is_outermost && let Some(list) = lists.get_mut(tag as usize - 1) {
                *list += 1;
                if *list > ops_max {
                    return Err(Invalid::TooManyOps.into());
                }
            }
            if !content.is_empty() {
                levels.push((inner, content));
            }
        }
        is_outermost = false;
    }
    Ok(())
}

/// The kind of a message inside a transaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Txn,
    /// An operation, which contains one request.
    Op,
    /// A compare or a request, which contains no message.
    Leaf,
}

/// Iterates over the fields of a message. An item is the field number, and the content if the field is
/// length-delimited. Ends at the first malformed field. Fields in a group count as fields of the message; no request of
/// etcd has groups.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn read(&mut self) -> Result<(u32, &'a [u8]), DecodeError> {
        let (tag, wire_type) = decode_key(&mut self.0)?;
        match wire_type {
            WireType::LengthDelimited => {
                let len = usize::try_from(decode_varint(&mut self.0)?).unwrap_or(usize::MAX);
                // A truncated field is the last one.
                let (content, rest) = self.0.split_at_checked(len).unwrap_or((self.0, &[]));
                self.0 = rest;
                return Ok((tag, content));
            }
            WireType::StartGroup | WireType::EndGroup => {}
            WireType::Varint | WireType::SixtyFourBit | WireType::ThirtyTwoBit => {
                skip_field(wire_type, tag, &mut self.0, DecodeContext::default())?;
            }
        }
        Ok((tag, &[]))
    }
}

impl<'a> Iterator for Fields<'a> {
    type Item = (u32, &'a [u8]);

    fn next(&mut self) -> Option<Self::Item> {
        if self.0.is_empty() { None } else { self.read().ok() }
    }
}

#[cfg(test)]
mod tests {
    use prost::encoding;
    use tonic::Code;

    use super::*;
    use orlop_wire::proto::server::etcdserverpb::{
        Compare, PutRequest, RequestOp, TxnRequest, request_op::Request as Inner,
    };

    const OPS_MAX: usize = 128;
    const TOO_MANY: &str = "etcdserver: too many operations in txn request";

    fn put(value: usize) -> RequestOp {
        let put = PutRequest { key: "k".into(), value: vec![b'v'; value].into(), ..Default::default() };
        RequestOp { request: Some(Inner::RequestPut(put)) }
    }

    fn nested(ops: Vec<RequestOp>, times: usize) -> Vec<RequestOp> {
        let txn = TxnRequest { success: ops, ..Default::default() };
        vec![RequestOp { request: Some(Inner::RequestTxn(txn)) }; times]
    }

    fn refusal(checked: Result<(), Status>) -> Option<String> {
        let status = checked.err()?;
        assert_eq!(status.code(), Code::InvalidArgument, "{status}");
        Some(status.message().to_owned())
    }

    #[test]
    fn operations_are_counted_in_every_list_and_level() {
        let txn =
            |compares, success, failure| TxnRequest { compare: vec![Compare::default(); compares], success, failure };
        let empty = |times| vec![RequestOp::default(); times];
        let padded = |mut ops: Vec<RequestOp>| {
            ops.push(put(COUNTED_BYTES_MIN));
            ops
        };
        let table = [
            ("short requests are left to the decoder", txn(0, empty(OPS_MAX + 1), vec![]), None),
            ("long values", txn(OPS_MAX, vec![put(COUNTED_BYTES_MIN); OPS_MAX], vec![put(9); OPS_MAX]), None),
            ("compares", txn(OPS_MAX + 1, padded(vec![]), vec![]), Some(TOO_MANY)),
            ("success", txn(0, padded(empty(OPS_MAX)), vec![]), Some(TOO_MANY)),
            ("failure", txn(0, vec![], padded(empty(OPS_MAX))), Some(TOO_MANY)),
            ("nested, the maximum", txn(0, nested(vec![put(9); 80], 100), vec![]), None),
            ("nested, one level too wide", txn(0, nested(vec![put(9); 82], 100), vec![]), Some(TOO_MANY)),
            ("nested twice", txn(0, nested(nested(vec![put(9); 20], 20), 21), vec![]), Some(TOO_MANY)),
        ];
        for (name, request, expected) in table {
            assert_eq!(
                refusal(pb::TxnRequest::check_fields(&request.encode_to_vec(), OPS_MAX)).as_deref(),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn short_transactions_are_counted_if_the_limit_is_low() {
        const OPS_MAX: usize = 60;
        // 110 operations, and the compares of a hundred transactions.
        for (compares, expected) in [(37, None), (39, Some(TOO_MANY))] {
            let innermost = TxnRequest { compare: vec![Compare::default(); compares], ..Default::default() };
            let innermost = RequestOp { request: Some(Inner::RequestTxn(innermost)) };
            let request = TxnRequest { success: nested(vec![innermost; 10], 10), ..Default::default() };
            let message = request.encode_to_vec();
            assert!(message.len() < COUNTED_BYTES_MIN);
            assert_eq!(refusal(pb::TxnRequest::check_fields(&message, OPS_MAX)).as_deref(), expected, "{compares}");
        }
    }

    #[test]
    fn unknown_fields_are_counted() {
        let long = PutRequest { key: "k".into(), value: vec![0; 1 << 20].into(), ..Default::default() };
        assert_eq!(refusal(pb::PutRequest::check_fields(&long.encode_to_vec(), OPS_MAX)), None);
        let floods = [
            ("numbers", vec![0x78, 0]),
            ("of eight bytes", vec![0x79, 0, 0, 0, 0, 0, 0, 0, 0]),
            ("texts", vec![0x0a, 0]),
            ("groups", vec![0x7b, 0x7c]),
        ];
        for (name, field) in floods {
            let flood = field.repeat(200_000);
            assert!(
                refusal(pb::PutRequest::check_fields(&flood, OPS_MAX)).is_some_and(|text| text.contains("1024 fields")),
                "{name}"
            );
            assert!(refusal(pb::TxnRequest::check_fields(&flood, OPS_MAX)).is_some(), "{name}");
            // In a put inside a transaction.
            let (mut op, mut txn) = (Vec::new(), Vec::new());
            encoding::bytes::encode(2, &flood, &mut op);
            encoding::bytes::encode(2, &op, &mut txn);
            assert!(
                refusal(pb::TxnRequest::check_fields(&txn, OPS_MAX))
                    .is_some_and(|text| text.contains("1024 fields outside")),
                "{name}"
            );
        }
    }

    #[test]
    fn malformed_requests_are_left_to_the_decoder() {
        for broken in
            [vec![0xff; COUNTED_BYTES_MIN], [vec![0x12, 0xff, 0xff, 0x7f], vec![7; COUNTED_BYTES_MIN]].concat()]
        {
            assert_eq!(refusal(pb::PutRequest::check_fields(&broken, OPS_MAX)), None);
            assert_eq!(refusal(pb::TxnRequest::check_fields(&broken, OPS_MAX)), None);
        }
    }
}
