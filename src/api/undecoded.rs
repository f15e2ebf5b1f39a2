//! What a request is made of, looked at before it is decoded.
//!
//! A message of 2 MiB may have a million fields. To decode them takes tens of milliseconds in which a thread serves nobody
//! else, only for the request to be refused; to count them ends at the first one too many.

use prost::{
    DecodeError, Message,
    encoding::{DecodeContext, WireType, decode_key, decode_varint, skip_field},
};
use tonic::Status;

use super::status::Invalid;
use orlop_wire::proto::server::etcdserverpb as pb;

/// A shorter message costs no more to decode than to look at.
const LOOK_BYTES: usize = 16 << 10;
/// No request but a transaction has more than 13.
const FIELDS_MAX: usize = 1_024;
/// A transaction may have so many more for each of its operations and compares: a range has most, its 13, and that of the
/// operation, and its place in a list.
const FIELDS_PER_OP: usize = 15;
/// All operations and compares of a transaction and those nested in it may be so many times `max_txn_ops`.
const TOTAL_OPS_FACTOR: usize = 64;

/// Operations and compares in all.
pub(super) fn total_ops_max(ops_max: usize) -> usize {
    ops_max.saturating_mul(TOTAL_OPS_FACTOR)
}

/// A request that is looked at.
pub(super) trait Looked: Message + Default + 'static {
    /// # Errors
    ///
    /// As [`Self::look`].
    fn check(message: &[u8], ops_max: usize) -> Result<(), Status> {
        if message.len() < LOOK_BYTES { Ok(()) } else { Self::look(message, ops_max) }
    }

    /// Of a message, or of its beginning, of which what follows makes no less. One that is not well-formed is left to the
    /// decoder.
    ///
    /// # Errors
    ///
    /// If it has far more fields than such a request.
    fn look(message: &[u8], _ops_max: usize) -> Result<(), Status> {
        if Fields(message).nth(FIELDS_MAX).is_none() {
            Ok(())
        } else {
            Err(Status::invalid_argument(format!("orlop: the request has more than {FIELDS_MAX} fields")))
        }
    }
}

impl Looked for pb::RangeRequest {}
impl Looked for pb::PutRequest {}
impl Looked for pb::DeleteRangeRequest {}
impl Looked for pb::CompactionRequest {}

impl Looked for pb::TxnRequest {
    /// # Errors
    ///
    /// If it has more operations than are accepted, or more fields than so many operations have.
    fn look(message: &[u8], ops_max: usize) -> Result<(), Status> {
        count_txn(message, ops_max)
    }
}

/// Of a `TxnRequest`, however short.
pub fn count_txn(message: &[u8], ops_max: usize) -> Result<(), Status> {
    let total_max = total_ops_max(ops_max);
    let (mut ops, mut fields) = (0_usize, 0);
    let mut seen = |is_op: bool| {
        ops += usize::from(is_op);
        fields += 1;
        if ops > total_max {
            return Err(Invalid::TooManyOps.into());
        }
        // Each is seen before what is in it.
        if fields <= ops.saturating_mul(FIELDS_PER_OP).saturating_add(FIELDS_MAX) {
            return Ok(());
        }
        let text = format!("orlop: the request has more than {FIELDS_MAX} fields beside those of its operations");
        Err(Status::invalid_argument(text))
    };
    // Of the outermost transaction: compares and both branches.
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
                    seen(false)?;
                    continue;
                }
            };
            seen(part == Part::Txn)?;
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

/// What a message in a transaction is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Part {
    Txn,
    /// An operation, with one of several requests in it.
    Op,
    /// A compare or a request, in which is no other message.
    Leaf,
}

/// The fields of a message: their numbers, and what those with a length have in them. It ends where the message is not
/// well-formed. What is in a group counts as if it were beside it: no request has groups.
struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn read(&mut self) -> Result<(u32, &'a [u8]), DecodeError> {
        let (tag, wire_type) = decode_key(&mut self.0)?;
        match wire_type {
            WireType::LengthDelimited => {
                let len = usize::try_from(decode_varint(&mut self.0)?).unwrap_or(usize::MAX);
                // Too long: the message ends in it.
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
            ops.push(put(LOOK_BYTES));
            ops
        };
        let table = [
            ("short ones are left to the decoder", txn(0, empty(OPS_MAX + 1), vec![]), None),
            ("long values", txn(OPS_MAX, vec![put(LOOK_BYTES); OPS_MAX], vec![put(9); OPS_MAX]), None),
            ("compares", txn(OPS_MAX + 1, padded(vec![]), vec![]), Some(TOO_MANY)),
            ("success", txn(0, padded(empty(OPS_MAX)), vec![]), Some(TOO_MANY)),
            ("failure", txn(0, vec![], padded(empty(OPS_MAX))), Some(TOO_MANY)),
            ("nested, as many as may be", txn(0, nested(vec![put(9); 80], 100), vec![]), None),
            ("nested, one level too wide", txn(0, nested(vec![put(9); 82], 100), vec![]), Some(TOO_MANY)),
            ("nested twice", txn(0, nested(nested(vec![put(9); 20], 20), 21), vec![]), Some(TOO_MANY)),
        ];
        for (name, request, expected) in table {
            assert_eq!(
                refusal(pb::TxnRequest::check(&request.encode_to_vec(), OPS_MAX)).as_deref(),
                expected,
                "{name}"
            );
        }
    }

    #[test]
    fn fields_that_nobody_has_are_counted() {
        let long = PutRequest { key: "k".into(), value: vec![0; 1 << 20].into(), ..Default::default() };
        assert_eq!(refusal(pb::PutRequest::check(&long.encode_to_vec(), OPS_MAX)), None);
        let floods = [
            ("numbers", vec![0x78, 0]),
            ("of eight bytes", vec![0x79, 0, 0, 0, 0, 0, 0, 0, 0]),
            ("texts", vec![0x0a, 0]),
            ("groups", vec![0x7b, 0x7c]),
        ];
        for (name, field) in floods {
            let flood = field.repeat(200_000);
            assert!(
                refusal(pb::PutRequest::check(&flood, OPS_MAX)).is_some_and(|text| text.contains("1024 fields")),
                "{name}"
            );
            assert!(refusal(pb::TxnRequest::check(&flood, OPS_MAX)).is_some(), "{name}");
            let beginning = &flood[..LOOK_BYTES - 1];
            assert!(refusal(pb::PutRequest::look(beginning, OPS_MAX)).is_some(), "{name}: its beginning");
            // In a put of a transaction.
            let (mut op, mut txn) = (Vec::new(), Vec::new());
            encoding::bytes::encode(2, &flood, &mut op);
            encoding::bytes::encode(2, &op, &mut txn);
            assert!(
                refusal(pb::TxnRequest::check(&txn, OPS_MAX)).is_some_and(|text| text.contains("1024 fields beside")),
                "{name}"
            );
            let beginning = &txn[..LOOK_BYTES - 1];
            assert!(refusal(pb::TxnRequest::look(beginning, OPS_MAX)).is_some(), "{name}: its beginning");
        }
    }

    #[test]
    fn the_beginning_of_a_good_message_is_good() {
        let range = pb::RangeRequest {
            key: "k".into(),
            range_end: "l".into(),
            limit: 1,
            revision: 1,
            sort_order: 1,
            sort_target: 1,
            serializable: true,
            keys_only: true,
            count_only: true,
            min_mod_revision: 1,
            max_mod_revision: 1,
            min_create_revision: 1,
            max_create_revision: 1,
        };
        let range = RequestOp { request: Some(Inner::RequestRange(range)) };
        let ops = nested(vec![range; 100], total_ops_max(OPS_MAX) / 101);
        let message = TxnRequest { success: ops, ..Default::default() }.encode_to_vec();
        for len in (0..message.len()).step_by(100).chain([message.len()]) {
            assert_eq!(refusal(pb::TxnRequest::look(&message[..len], OPS_MAX)), None, "{len} bytes");
        }
    }

    #[test]
    fn what_is_not_well_formed_is_left_to_the_decoder() {
        for broken in [vec![0xff; LOOK_BYTES], [vec![0x12, 0xff, 0xff, 0x7f], vec![7; LOOK_BYTES]].concat()] {
            assert_eq!(refusal(pb::PutRequest::check(&broken, OPS_MAX)), None);
            assert_eq!(refusal(pb::TxnRequest::check(&broken, OPS_MAX)), None);
        }
    }
}
