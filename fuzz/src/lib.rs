//! The fuzz targets: functions that pass arbitrary bytes to the parsers of external input and panic if a property is
//! violated, as fuzzers require. `tests/seeds.rs` runs every target on its seeds and on 300 to 20,000 mutations of
//! them.
//!
//! Each target checks a property in addition to the absence of panics: re-encoding a decoded message preserves it, a
//! fast check decides like a slow one, or a damaged file is refused with an error that names the file.

pub mod objects;
mod snapshot;

use std::{sync::LazyLock, time::Duration};

use bytes::Bytes;
use clap::{Args as _, FromArgMatches as _};
use prost::Message;
use prost_reflect::{DescriptorPool, MessageDescriptor};

use orlop::{
    api::{convert, grpc::field_limits, interval_check::check_intervals, watch},
    auth::Tokens,
    config::{Flags, Settings},
    http::gateway::{self, split::Values},
};
use orlop_core::{
    auth::{Caller, Credential},
    index::TreeIndex,
    lease,
    overload::ReadMemory,
    store::{
        batch::Batch,
        request::{PutLease, PutRequest, PutValue},
        txn::{Evaluation, Fetched},
        values::ValueCache,
    },
    types::{Change, ChangeKind, EncodedKv, Key, KeyRange, Revision, RowId, Version},
};
use orlop_wire::proto::{
    DESCRIPTORS,
    server::{
        etcdserverpb::{self as pb, request_op::Request},
        orlopb, v3electionpb, v3lockpb,
    },
};

/// The default of the setting `max-txn-ops`.
const TXN_OPS_MAX: usize = 128;
/// The default of the setting `max-request-bytes`, 1.5 MiB, plus the 512 KiB that the transport allows in addition.
const MESSAGE_BYTES_MAX: usize = 2 << 20;

/// A fuzz target. Its seeds are the inputs from which mutation starts.
pub struct Target {
    pub name: &'static str,
    pub run: fn(&[u8]),
    pub seeds: fn() -> Vec<Vec<u8>>,
}

pub const TARGETS: [Target; 7] = [
    Target { name: "requests", run: requests, seeds: request_seeds },
    Target { name: "txn", run: txn, seeds: txn_seeds },
    Target { name: "gateway", run: gateway, seeds: gateway_seeds },
    Target { name: "token", run: token, seeds: token_seeds },
    Target { name: "settings", run: settings, seeds: settings_seeds },
    Target { name: "snapshot", run: snapshot::run, seeds: snapshot::seeds },
    Target { name: "objects", run: objects::run, seeds: objects::seeds },
];

macro_rules! decoders {
    ($($package:ident: $($message:ident)+;)+) => {
        [$($((check_encoding::<$package::$message>, stringify!($message))),+),+]
    };
}

type Decoder = (fn(&[u8]), &'static str);

/// One decoder per request type.
const DECODERS: &[Decoder] = &decoders! {
    pb: RangeRequest PutRequest DeleteRangeRequest TxnRequest CompactionRequest WatchRequest LeaseGrantRequest
        LeaseRevokeRequest LeaseKeepAliveRequest LeaseTimeToLiveRequest LeaseLeasesRequest MemberAddRequest
        MemberRemoveRequest MemberUpdateRequest MemberListRequest MemberPromoteRequest AlarmRequest StatusRequest
        DefragmentRequest HashRequest HashKvRequest SnapshotRequest MoveLeaderRequest DowngradeRequest AuthEnableRequest
        AuthDisableRequest AuthStatusRequest AuthenticateRequest AuthUserAddRequest AuthUserGetRequest
        AuthUserListRequest AuthUserDeleteRequest AuthUserChangePasswordRequest AuthUserGrantRoleRequest
        AuthUserRevokeRoleRequest AuthRoleAddRequest AuthRoleGetRequest AuthRoleListRequest AuthRoleDeleteRequest
        AuthRoleGrantPermissionRequest AuthRoleRevokePermissionRequest WatchCreateRequest WatchCancelRequest
        WatchProgressRequest RequestOp;
    v3lockpb: LockRequest UnlockRequest;
    orlopb: WatchersRequest SlowRequestsRequest ExpiringLeasesRequest SizesRequest MembersRequest;
    v3electionpb: CampaignRequest ProclaimRequest LeaderRequest ResignRequest LeaderKey;
};

/// Checks that encoding and decoding a message preserves it.
fn check_encoding<M: Message + Default + PartialEq>(wire: &[u8]) {
    if let Ok(message) = M::decode(wire) {
        let again = M::decode(&*message.encode_to_vec()).expect("an encoded message can be decoded");
        assert!(message == again, "encoding and decoding preserves a message");
    }
}

/// Input: a byte that selects the request type, and the request, which is decoded, checked and converted.
pub fn requests(data: &[u8]) {
    let Some((kind, wire)) = data.split_first() else { return };
    let (decode, _) = DECODERS[usize::from(*kind) % DECODERS.len()];
    decode(wire);
    if let Ok(request) = pb::RangeRequest::decode(wire)
        && let Ok(converted) = convert::range(&request)
    {
        check_range(&converted.range, &request.key, &request.range_end);
    }
    if let Ok(request) = pb::PutRequest::decode(wire) {
        let key = request.key.clone();
        assert!(convert::put(request).is_err() || !key.is_empty());
    }
    if let Ok(request) = pb::DeleteRangeRequest::decode(wire)
        && let Ok(converted) = convert::delete(&request)
    {
        check_range(&converted.range, &request.key, &request.range_end);
    }
    if let Ok(request) = pb::WatchCreateRequest::decode(wire)
        && let Ok(spec) = watch::spec(&request, MESSAGE_BYTES_MAX)
    {
        assert!(!spec.range.is_empty(), "a watch of an empty range is refused");
    }
}

/// Checks that a converted range has the meaning that etcd gives to `key` and `range_end`.
fn check_range(range: &KeyRange, key: &[u8], range_end: &[u8]) {
    let to_the_end = range_end == [0];
    assert_eq!(range.contains(key), range_end.is_empty() || to_the_end || key < range_end);
    if !range.is_empty() {
        assert_eq!(range.start().as_slice(), key);
    }
}

/// The state in which transactions are evaluated: keys a to d, of which a has two versions, and no leases.
struct World {
    index: TreeIndex,
    values: ValueCache,
    memory: ReadMemory,
    leases: lease::Table,
}

static WORLD: LazyLock<World> = LazyLock::new(|| {
    let mut index = TreeIndex::new();
    let values = ValueCache::new(1 << 20);
    for (revision, name, created, version) in
        [(2, "a", 2, 1), (3, "b", 3, 1), (4, "a", 2, 2), (5, "c", 5, 1), (6, "d", 6, 1)]
    {
        let change = put(Key::from(name.as_bytes()), revision, Revision(created), version, b"value");
        if let Some(kv) = change.kv() {
            values.insert(change.row, kv.clone());
        }
        index.apply(&change);
    }
    World { index, values, memory: ReadMemory::new(0), leases: lease::Table::default() }
});

/// Input: a transaction, which is decoded, checked, converted and evaluated.
pub fn txn(wire: &[u8]) {
    let Ok(request) = pb::TxnRequest::decode(wire) else { return };
    for branch in [&request.success, &request.failure] {
        assert_eq!(check_intervals(branch).is_ok(), plainly_distinct(branch).is_some(), "{branch:?}");
    }
    let encoded = request.encode_to_vec();
    for ops_max in [2, TXN_OPS_MAX] {
        let is_refused = field_limits::count_txn(&encoded, ops_max).is_err();
        assert_eq!(is_refused, has_too_many_ops(&request, ops_max), "at most {ops_max} operations: {request:?}");
    }
    if has_too_many_ops(&request, TXN_OPS_MAX) {
        return;
    }
    let writes =
        request.success.iter().chain(&request.failure).any(|op| !matches!(op.request, Some(Request::RequestRange(_))));
    let Ok(converted) = convert::txn(request, TXN_OPS_MAX) else { return };
    assert!(converted.is_read_only() || writes, "a transaction that contains only ranges is read-only");
    let World { index, values, memory, leases } = &*WORLD;
    let (fetched, head) = (Fetched::new(), index.head());
    let mut batch = Batch::new(head);
    // An earlier request of the same batch.
    let before = PutRequest {
        key: bytes::Bytes::from_static(b"b"),
        value: PutValue::New(bytes::Bytes::from_static(b"new")),
        lease: PutLease::Set(None),
        prev_kv: false,
    };
    let first = Evaluation::new(index, leases, values, memory, &fetched, &mut batch).put(&before);
    assert!(first.is_ok());
    // The result does not matter.
    let _ = Evaluation::new(index, leases, values, memory, &fetched, &mut batch).txn(&converted);
}

/// Returns whether the request has more operations than [`field_limits::count_txn`] accepts.
fn has_too_many_ops(request: &pb::TxnRequest, ops_max: usize) -> bool {
    fn total(txn: &pb::TxnRequest) -> usize {
        let of = |op: &pb::RequestOp| {
            1 + if let Some(Request::RequestTxn(nested)) = &op.request { total(nested) } else { 0 }
        };
        txn.compare.len() + txn.success.iter().chain(&txn.failure).map(of).sum::<usize>()
    }
    let longest = request.compare.len().max(request.success.len()).max(request.failure.len());
    longest > ops_max || total(request) > field_limits::total_ops_max(ops_max)
}

/// Returns the keys that are put and the ranges that are deleted; `None` if a key is put twice, or put and deleted.
/// This is the check of [`check_intervals`], written as simply as possible; the rules are documented in its module.
fn plainly_distinct(ops: &[pb::RequestOp]) -> Option<(Vec<&[u8]>, Vec<KeyRange>)> {
    fn add<'a>(puts: &mut Vec<&'a [u8]>, deletes: &[KeyRange], key: &'a [u8]) -> Option<()> {
        let twice = puts.contains(&key) || deletes.iter().any(|range| range.contains(key));
        puts.push(key);
        (!twice).then_some(())
    }
    let requests = || ops.iter().filter_map(|op| op.request.as_ref());
    let (mut puts, mut deletes) = (Vec::new(), Vec::new());
    for request in requests() {
        if let Request::RequestDeleteRange(delete) = request
            && *delete.range_end != [0]
        {
            deletes.push(KeyRange::from_wire(&delete.key, &delete.range_end));
        }
    }
    for request in requests() {
        let Request::RequestTxn(txn) = request else { continue };
        let (success, failure) = (plainly_distinct(&txn.success)?, plainly_distinct(&txn.failure)?);
        for key in &success.0 {
            add(&mut puts, &deletes, key)?;
        }
        for key in failure.0.iter().filter(|key| !success.0.contains(*key)) {
            add(&mut puts, &deletes, key)?;
        }
        deletes.extend(success.1.into_iter().chain(failure.1));
    }
    for request in requests() {
        if let Request::RequestPut(put) = request {
            add(&mut puts, &deletes, &put.key)?;
        }
    }
    Some((puts, deletes))
}

/// The request and response messages of every method of every service.
static MESSAGES: LazyLock<Vec<MessageDescriptor>> = LazyLock::new(|| {
    let pool = DescriptorPool::decode(DESCRIPTORS).expect("descriptors that were compiled in");
    let methods: Vec<_> = pool.services().flat_map(|service| service.methods().collect::<Vec<_>>()).collect();
    methods.iter().flat_map(|method| [method.input(), method.output()]).collect()
});

/// Input: a byte that selects the message type, a byte that selects the format, and a JSON text, a protobuf message, or
/// a request body with several JSON values.
pub fn gateway(data: &[u8]) {
    let [kind, form, rest @ ..] = data else { return };
    let kind = &MESSAGES[usize::from(*kind) % MESSAGES.len()];
    match form % 3 {
        0 => {
            if let Ok(message) = gateway::message(kind.clone(), rest) {
                through_json(kind, message.encode_to_vec());
            }
        }
        1 => through_json(kind, rest.to_vec()),
        _ => in_pieces(rest),
    }
}

/// Checks that converting a message to JSON and back preserves it.
fn through_json(kind: &MessageDescriptor, wire: Vec<u8>) {
    let Ok(json) = gateway::json(kind.clone(), wire.into()) else { return };
    let again = gateway::message(kind.clone(), &json).expect("the gateway reads what it wrote");
    let json_again = gateway::json(kind.clone(), again.encode_to_vec().into()).expect("a message of the same kind");
    assert!(json == json_again, "{} and {}", json.escape_ascii(), json_again.escape_ascii());
}

/// Checks that the JSON values found in a body do not depend on how the body is split into pieces.
fn in_pieces(body: &[u8]) {
    let read = |size: usize| {
        let (mut values, mut found) = (Values::new(usize::MAX), Vec::new());
        for piece in body.chunks(size) {
            let mut data = Bytes::copy_from_slice(piece);
            loop {
                match values.next(&mut data) {
                    Ok(Some(value)) => found.push(value.joined()),
                    Ok(None) => break,
                    Err(_) => return (found, None),
                }
            }
        }
        let open = values.buffered_bytes() > 0;
        (found, Some(open))
    };
    let whole = read(body.len().max(1));
    for size in [1, 2, 7] {
        assert_eq!(read(size), whole, "in pieces of {size}");
    }
}

/// Input: a byte that selects the source, and a text: TOML, YAML, variables or flags, one per line.
pub fn settings(data: &[u8]) {
    let Some((source, text)) = data.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let none = Flags::default();
    let read = match source % 4 {
        0 => Settings::of_texts(Some(text), None, &[], &none),
        1 => Settings::of_texts(None, Some(text), &[], &none),
        2 => {
            let pair = |line: &str| line.split_once('=').map(|(key, text)| (key.to_owned(), text.to_owned()));
            Settings::of_texts(None, None, &text.lines().filter_map(pair).collect::<Vec<_>>(), &none)
        }
        _ => {
            let words = std::iter::once("orlop").chain(text.lines());
            let command = Flags::augment_args(clap::Command::new("orlop"));
            let Ok(matches) = command.try_get_matches_from(words) else { return };
            let flags = Flags::from_arg_matches(&matches).expect("clap has validated the flags");
            Settings::of_texts(None, None, &[], &flags)
        }
    };
    match read {
        Ok(settings) => {
            settings.datastore().expect("validated settings have a datastore");
            settings.tls().expect("validated settings have a TLS configuration");
            settings.auto_compaction().expect("validated settings have a compaction policy");
            assert!(!settings.member_name().is_empty());
        }
        Err(error) => assert!(!error.is_empty(), "an error has a text"),
    }
}

static TOKENS: LazyLock<Tokens> =
    LazyLock::new(|| Tokens::simple(b"a key of this target", Duration::from_secs(3_600)).expect("a key"));

/// Verifies a token: any valid one identifies the user of a seed, because nobody else has the key.
pub fn token(data: &[u8]) {
    let text = data.escape_ascii();
    match TOKENS.verify(data) {
        None => {}
        Some(Caller::User(identity)) => {
            assert_eq!(identity.user, "a user", "{text}");
            assert!(matches!(identity.credential, Credential::SimpleToken { given_at: 1..=3 }), "{text}");
        }
        Some(other) => panic!("{text} identifies {other:?}"),
    }
}

fn token_seeds() -> Vec<Vec<u8>> {
    (1..=3).map(|revision| TOKENS.give("a user", revision).expect("a token").into_bytes()).collect()
}

fn request_seeds() -> Vec<Vec<u8>> {
    let kinds = 0..u8::try_from(DECODERS.len()).unwrap_or(u8::MAX);
    let range =
        pb::RangeRequest { key: "a".into(), range_end: "b".into(), limit: 3, revision: 7, ..Default::default() };
    let watch = pb::WatchCreateRequest { key: "a".into(), filters: vec![0, 1], watch_id: 9, ..Default::default() };
    let user = pb::AuthUserAddRequest { name: "n".into(), password: "p".into(), ..Default::default() };
    let wires = [range.encode_to_vec(), watch.encode_to_vec(), user.encode_to_vec(), Vec::new()];
    kinds.zip(wires.into_iter().cycle()).map(|(kind, wire)| [vec![kind], wire].concat()).collect()
}

fn txn_seeds() -> Vec<Vec<u8>> {
    let op = |request| pb::RequestOp { request: Some(request) };
    let put = |key: &'static str| op(Request::RequestPut(pb::PutRequest { key: key.into(), ..Default::default() }));
    let delete = |key: &'static str, end: &'static str| {
        op(Request::RequestDeleteRange(pb::DeleteRangeRequest {
            key: key.into(),
            range_end: end.into(),
            prev_kv: true,
        }))
    };
    let range = |key: &'static str, end: &'static str| {
        op(Request::RequestRange(pb::RangeRequest { key: key.into(), range_end: end.into(), ..Default::default() }))
    };
    let compare =
        |target, union| pb::Compare { key: "a".into(), target, target_union: Some(union), ..Default::default() };
    use pb::compare::TargetUnion;
    let compares = vec![
        compare(0, TargetUnion::Version(2)),
        compare(1, TargetUnion::CreateRevision(2)),
        compare(2, TargetUnion::ModRevision(4)),
        compare(3, TargetUnion::Value("value".into())),
        compare(4, TargetUnion::Lease(0)),
    ];
    let nested =
        |success, failure| op(Request::RequestTxn(pb::TxnRequest { compare: compares.clone(), success, failure }));
    let branches = [
        vec![put("a"), put("e"), range("a", "\0")],
        vec![delete("a", "c"), delete("b", "d"), put("d"), range("b", "")],
        vec![range("c", "a"), delete("c", "a"), delete("a", "\0"), put("a")],
        vec![nested(vec![put("a"), delete("x", "z")], vec![put("a")]), nested(vec![put("y")], vec![range("a", "b")])],
    ];
    let request =
        |success: Vec<pb::RequestOp>| pb::TxnRequest { compare: compares.clone(), success, failure: vec![put("f")] };
    branches.map(|success| request(success).encode_to_vec()).to_vec()
}

fn gateway_seeds() -> Vec<Vec<u8>> {
    let texts: [&str; 4] = [
        r#"{"key":"Zm9v","range_end":"Zm9w","limit":"3","sort_order":"DESCEND","keys_only":true}"#,
        r#"{"compare":[{"target":"CREATE","key":"Zm9v","createRevision":"2"}],"success":[{"requestPut":{"key":"Zm9v","value":"YmFy"}}]}"#,
        r#"{"create_request":{"key":"Zm9v","start_revision":"1","filters":["NOPUT"]}} {"cancel_request":{"watch_id":"7"}}"#,
        r#"{"ID":7,"TTL":"600","name":"n","unknown":[{"a":"}\""}],"options":null}"#,
    ];
    let kinds = MESSAGES.len().min(usize::from(u8::MAX));
    let of = |kind: usize, form: u8, bytes: &[u8]| [&[kind as u8, form], bytes].concat();
    let json = (0..kinds).map(|kind| of(kind, 0, texts[kind % texts.len()].as_bytes()));
    let txn = txn_seeds().remove(3);
    let wire = (0..kinds).step_by(5).map(|kind| of(kind, 1, &txn));
    let bodies = texts.iter().map(|text| of(0, 2, text.repeat(3).as_bytes()));
    json.chain(wire).chain(bodies).collect()
}

fn settings_seeds() -> Vec<Vec<u8>> {
    let texts = [
        "name = \"n\"\nmax-txn-ops = 5\nlisten-client-urls = [\"http://127.0.0.1:1\", \"unix:///x\"]\nauto-compaction-retention = \"10m\"\n",
        "name: n\nmax-request-bytes: 1000\nlisten-address: \":2379\"\nquota-backend-bytes: -1\nmetrics: extensive\n",
        "name=7\nmax-txn-ops=5\nunix-socket-mode=0660\ngrpc-keepalive-interval=1h30m\ndatastore-endpoint=sqlite://x\n",
        "--name\nn\n--max-txn-ops\n9\n--listen-client-urls\nhttps://[::1]:2379\n--cert-file\nc\n--key-file\nk\n--auto-compaction-mode\nrevision\n",
        "datastore-endpoint = \"postgres://a:b@c:1/d\"\ncipher-suites = \"TLS_AES_128_GCM_SHA256\"\ntls-min-version = \"TLS1.3\"\n",
        "trusted-ca-file: a\ncert-file: b\nkey-file: c\nclient-cert-auth: true\nself-signed-cert-validity: 5\nlog-format: json\n",
    ];
    let sources = [0, 1, 2, 3, 0, 1];
    sources.into_iter().zip(texts).map(|(source, text)| [&[source], text.as_bytes()].concat()).collect()
}

/// Returns the change that puts a key.
fn put(key: Key, revision: i64, create_revision: Revision, version: i64, value: &[u8]) -> Change {
    let row = RowId::new(Revision(revision), 0);
    let kind = ChangeKind::put(EncodedKv::new(&key, Version { row, create_revision, version }, value, None));
    Change { row, key, kind, prev: None, prev_lease: None }
}
