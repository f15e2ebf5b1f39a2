//! The JSON gateway: `POST /v3/...` for every gRPC call, as in etcd.
//!
//! It has no code for individual calls and uses the descriptors of `proto/`: JSON is converted to a message, which is
//! sent as a gRPC request to the services of this process, and response messages are converted to JSON. Conventions are
//! those of grpc-gateway: original field names, 64-bit numbers as strings, bytes in base64, defaults omitted; a
//! streaming response has one `{"result": ...}` per line, and streaming requests are concatenated JSON values.

mod line_breaks;
mod memory;
mod metadata;
mod request_body;
pub mod split;

use std::{convert::Infallible, sync::Arc};

use axum::{
    Router,
    body::Body,
    extract::{Path, Request, State},
    http::{HeaderMap, Method, StatusCode, header},
    response::{IntoResponse as _, Response},
    routing::any,
};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::stream;
use http_body_util::BodyExt as _;
use prost::Message as _;
use prost_reflect::{
    DescriptorError, DescriptorPool, DynamicMessage, MessageDescriptor, MethodDescriptor, SerializeOptions,
};
use tonic::{Code, Status};
use tower::ServiceExt as _;

use self::{
    memory::{Memory, Reserved},
    metadata::metadata,
    request_body::{next, read_body, request_frames},
    split::Values,
};
use crate::{
    api::grpc::{
        frame::{FRAME_HEADER_BYTES, announced_len},
        received::Received,
    },
    net::Remote,
};
use orlop_core::overload::{PartialRequest, PartialRequests};
use orlop_wire::proto::DESCRIPTORS;

/// The JSON of a message may be this many times as long as the longest message, and [`JSON_SLACK_BYTES`] longer. Base64
/// takes a third more than the bytes; the rest is for names of fields and white space.
const JSON_FACTOR: usize = 2;
const JSON_SLACK_BYTES: usize = 64 << 10;

/// Paths and their calls.
const PATHS: [(&str, &str); 51] = [
    ("kv/range", "etcdserverpb.KV/Range"),
    ("kv/put", "etcdserverpb.KV/Put"),
    ("kv/deleterange", "etcdserverpb.KV/DeleteRange"),
    ("kv/txn", "etcdserverpb.KV/Txn"),
    ("kv/compaction", "etcdserverpb.KV/Compact"),
    ("watch", "etcdserverpb.Watch/Watch"),
    ("lease/grant", "etcdserverpb.Lease/LeaseGrant"),
    ("lease/revoke", "etcdserverpb.Lease/LeaseRevoke"),
    ("kv/lease/revoke", "etcdserverpb.Lease/LeaseRevoke"),
    ("lease/keepalive", "etcdserverpb.Lease/LeaseKeepAlive"),
    ("lease/timetolive", "etcdserverpb.Lease/LeaseTimeToLive"),
    ("kv/lease/timetolive", "etcdserverpb.Lease/LeaseTimeToLive"),
    ("lease/leases", "etcdserverpb.Lease/LeaseLeases"),
    ("kv/lease/leases", "etcdserverpb.Lease/LeaseLeases"),
    ("cluster/member/add", "etcdserverpb.Cluster/MemberAdd"),
    ("cluster/member/remove", "etcdserverpb.Cluster/MemberRemove"),
    ("cluster/member/update", "etcdserverpb.Cluster/MemberUpdate"),
    ("cluster/member/list", "etcdserverpb.Cluster/MemberList"),
    ("cluster/member/promote", "etcdserverpb.Cluster/MemberPromote"),
    ("maintenance/alarm", "etcdserverpb.Maintenance/Alarm"),
    ("maintenance/status", "etcdserverpb.Maintenance/Status"),
    ("maintenance/defragment", "etcdserverpb.Maintenance/Defragment"),
    ("maintenance/hash", "etcdserverpb.Maintenance/Hash"),
    ("maintenance/hashkv", "etcdserverpb.Maintenance/HashKV"),
    ("maintenance/snapshot", "etcdserverpb.Maintenance/Snapshot"),
    ("maintenance/transfer-leadership", "etcdserverpb.Maintenance/MoveLeader"),
    ("maintenance/downgrade", "etcdserverpb.Maintenance/Downgrade"),
    ("auth/enable", "etcdserverpb.Auth/AuthEnable"),
    ("auth/disable", "etcdserverpb.Auth/AuthDisable"),
    ("auth/status", "etcdserverpb.Auth/AuthStatus"),
    ("auth/authenticate", "etcdserverpb.Auth/Authenticate"),
    ("auth/user/add", "etcdserverpb.Auth/UserAdd"),
    ("auth/user/get", "etcdserverpb.Auth/UserGet"),
    ("auth/user/list", "etcdserverpb.Auth/UserList"),
    ("auth/user/delete", "etcdserverpb.Auth/UserDelete"),
    ("auth/user/changepw", "etcdserverpb.Auth/UserChangePassword"),
    ("auth/user/grant", "etcdserverpb.Auth/UserGrantRole"),
    ("auth/user/revoke", "etcdserverpb.Auth/UserRevokeRole"),
    ("auth/role/add", "etcdserverpb.Auth/RoleAdd"),
    ("auth/role/get", "etcdserverpb.Auth/RoleGet"),
    ("auth/role/list", "etcdserverpb.Auth/RoleList"),
    ("auth/role/delete", "etcdserverpb.Auth/RoleDelete"),
    ("auth/role/grant", "etcdserverpb.Auth/RoleGrantPermission"),
    ("auth/role/revoke", "etcdserverpb.Auth/RoleRevokePermission"),
    ("lock/lock", "v3lockpb.Lock/Lock"),
    ("lock/unlock", "v3lockpb.Lock/Unlock"),
    ("election/campaign", "v3electionpb.Election/Campaign"),
    ("election/proclaim", "v3electionpb.Election/Proclaim"),
    ("election/leader", "v3electionpb.Election/Leader"),
    ("election/resign", "v3electionpb.Election/Resign"),
    ("election/observe", "v3electionpb.Election/Observe"),
];

struct Gateway {
    pool: DescriptorPool,
    grpc: Router,
    partial_requests: Arc<PartialRequests>,
    memory: Memory,
    /// Maximum length of the JSON of a message.
    json_bytes_max: usize,
}

impl Gateway {
    fn new(
        pool: DescriptorPool,
        grpc: Router,
        partial_requests: Arc<PartialRequests>,
        message_bytes_max: usize,
    ) -> Self {
        let json_bytes_max = message_bytes_max.saturating_mul(JSON_FACTOR).saturating_add(JSON_SLACK_BYTES);
        Self { pool, grpc, partial_requests, memory: Memory::default(), json_bytes_max }
    }
}

/// Returns the routes of the gateway. `message_bytes_max` is the limit of the services for the longest messages.
///
/// # Errors
///
/// If the compiled-in descriptors cannot be read.
pub(super) fn routes(
    grpc: Router,
    partial_requests: Arc<PartialRequests>,
    message_bytes_max: usize,
) -> Result<Router, DescriptorError> {
    let gateway = Gateway::new(DescriptorPool::decode(DESCRIPTORS)?, grpc, partial_requests, message_bytes_max);
    // etcd serves the older prefix as well.
    let routes = Router::new().route("/v3/{*path}", any(serve)).route("/v3beta/{*path}", any(serve));
    Ok(routes.with_state(Arc::new(gateway)))
}

async fn serve(State(gateway): State<Arc<Gateway>>, Path(path): Path<String>, request: Request) -> Response {
    let Some((_, method)) = PATHS.iter().find(|(known, _)| *known == path) else {
        return error_response(&Status::not_found("Not Found"));
    };
    if request.method() != Method::POST {
        return error_response(&Status::unimplemented("Method Not Allowed"));
    }
    match gateway.call(method, request).await {
        Ok(response) => response,
        Err(status) => error_response(&status),
    }
}

impl Gateway {
    async fn call(&self, method: &str, request: Request) -> Result<Response, Status> {
        let described = self.describe(method)?;
        let (head, body) = request.into_parts();
        let metadata = metadata(&head.headers)?;
        // Counts the text of a request until it is converted.
        let mut partial = PartialRequest::new(&self.partial_requests);
        let body = if described.is_client_streaming() {
            let (memory, values) = (self.memory.clone(), Values::new(self.json_bytes_max));
            let mut body = body.into_data_stream();
            // Before the response begins: afterwards hyper does not ask for a body that the client sends only when it is asked
            // to (`Expect: 100-continue`).
            let data = next(&mut body, &mut partial).await?.unwrap_or_default();
            Body::from_stream(request_frames(body, data, described.input(), memory, partial, values))
        } else {
            let json = read_body(body.into_data_stream(), &mut partial, self.json_bytes_max).await?;
            let framed = json_to_frame(described.input(), json, &self.memory).await?;
            drop(partial);
            Body::from(framed)
        };
        let request = http::Request::post(format!("http://gateway/{method}"))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .body(body)
            .map_err(|error| Status::internal(error.to_string()))?;
        let (mut grpc_head, body) = request.into_parts();
        grpc_head.headers.extend(metadata);
        // The name in a client's certificate is not passed on: as in etcd, requests through the gateway need a token.
        if let Some(remote) = head.extensions.get::<Remote>() {
            grpc_head.extensions.insert(remote.clone());
        }
        let request = http::Request::from_parts(grpc_head, body);
        let Ok(response) = self.grpc.clone().oneshot(request).await;
        if described.is_server_streaming() {
            return Ok(stream_responses(response, described.output(), self.memory.clone()));
        }
        unary_response(response, described.output(), &self.memory).await
    }

    fn describe(&self, method: &str) -> Result<MethodDescriptor, Status> {
        let (service, name) = method.split_once('/').unwrap_or_default();
        let service = self.pool.get_service_by_name(service);
        service
            .and_then(|service| service.methods().find(|known| known.name() == name))
            .ok_or_else(|| Status::unimplemented(format!("unknown method {method}")))
    }
}

/// Parses a message from JSON. Empty input is an empty message.
pub fn message(kind: MessageDescriptor, json: &[u8]) -> Result<DynamicMessage, Status> {
    if json.iter().all(u8::is_ascii_whitespace) {
        return Ok(DynamicMessage::new(kind));
    }
    let mut values = serde_json::Deserializer::from_slice(json);
    let options = prost_reflect::DeserializeOptions::new().deny_unknown_fields(false);
    DynamicMessage::deserialize_with_options(kind.clone(), &mut values, &options)
        .or_else(|error| match line_breaks::removed(json, &kind) {
            Some(values) => DynamicMessage::deserialize_with_options(kind, values, &options),
            None => Err(error),
        })
        .map_err(|error| Status::invalid_argument(error.to_string()))
}

/// Parses a message from JSON and frames it for gRPC.
async fn json_to_frame(kind: MessageDescriptor, json: Received, memory: &Memory) -> Result<Bytes, Status> {
    let reserved = memory.reserve(json.len()).await?;
    let convert = move || message(kind, &json.joined()).map(|message| frame(&message));
    reserved.convert(convert).await.map(|(framed, _)| framed)
}

fn frame(message: &DynamicMessage) -> Bytes {
    let len = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(FRAME_HEADER_BYTES + len);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
    message.encode_raw(&mut bytes);
    bytes.freeze()
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum StreamState {
    Open,
    Ended,
}

/// Returns the gRPC status in headers or trailers, if it is an error.
fn failure(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers).filter(|status| status.code() != Code::Ok)
}

async fn unary_response(response: Response, kind: MessageDescriptor, memory: &Memory) -> Result<Response, Status> {
    if let Some(status) = failure(response.headers()) {
        return Err(status);
    }
    let mut body = response.into_body();
    let (mut received, mut reserved) = (BytesMut::new(), None);
    while let Some(frame) = body.frame().await {
        match frame.map_err(|error| Status::internal(error.to_string()))?.into_data() {
            Ok(data) => received.extend_from_slice(&data),
            Err(frame) => {
                if let Some(status) = frame.trailers_ref().and_then(failure) {
                    return Err(status);
                }
            }
        }
        if let Some(len) = announced_len(&received).filter(|_| reserved.is_none()) {
            reserved = Some(memory.reserve(len).await?);
        }
    }
    let Some(reserved) = reserved else { return Err(Status::internal("the service sent no response")) };
    received.advance(FRAME_HEADER_BYTES);
    let (json, mut reserved) = reserved.convert(move || json(kind, received.freeze())).await?;
    reserved.shrink(json.capacity());
    let json = Bytes::from_owner(JsonResponse { json, _reserved: reserved });
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

/// A JSON response. Its memory is released when it has been sent.
struct JsonResponse {
    json: Vec<u8>,
    _reserved: Reserved,
}

impl AsRef<[u8]> for JsonResponse {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

pub fn json(kind: MessageDescriptor, bytes: Bytes) -> Result<Vec<u8>, Status> {
    let options =
        SerializeOptions::new().stringify_64_bit_integers(true).use_proto_field_name(true).skip_default_fields(true);
    let message = DynamicMessage::decode(kind, bytes).map_err(|error| Status::internal(error.to_string()))?;
    let mut json = Vec::new();
    message
        .serialize_with_options(&mut serde_json::Serializer::new(&mut json), &options)
        .map_err(|error| Status::internal(error.to_string()))?;
    Ok(json)
}

/// Converts a response stream to JSON, one message per line.
fn stream_responses(response: Response, kind: MessageDescriptor, memory: Memory) -> Response {
    if let Some(status) = failure(response.headers()) {
        let line = error_line(&status);
        return (http_status(status.code()), [(header::CONTENT_TYPE, "application/json")], line).into_response();
    }
    let start = (response.into_body(), kind, memory, BytesMut::new(), StreamState::Open);
    let lines = stream::unfold(start, |(mut body, kind, memory, mut received, mut state)| async move {
        while state == StreamState::Open {
            if let Some(message) = take_message(&mut received) {
                let line = match result_line(kind.clone(), message, &memory).await {
                    Ok(line) => line,
                    Err(status) => {
                        state = StreamState::Ended;
                        error_line(&status)
                    }
                };
                return Some((Ok::<_, Infallible>(line), (body, kind, memory, received, state)));
            }
            let failed = match body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        received.extend_from_slice(&data);
                        continue;
                    }
                    Err(frame) => frame.trailers_ref().and_then(failure),
                },
                Some(Err(error)) => Some(Status::unavailable(error.to_string())),
                None => None,
            };
            state = StreamState::Ended;
            if let Some(status) = failed {
                return Some((Ok(error_line(&status)), (body, kind, memory, received, state)));
            }
        }
        None
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response()
}

/// Converts a message of a response stream to a line of JSON.
async fn result_line(kind: MessageDescriptor, message: Bytes, memory: &Memory) -> Result<Vec<u8>, Status> {
    let reserved = memory.reserve(message.len()).await?;
    let convert = move || json(kind, message).map(|json| [b"{\"result\":", &json[..], b"}\n"].concat());
    reserved.convert(convert).await.map(|(line, _)| line)
}

/// Returns the first message when it is complete.
fn take_message(received: &mut BytesMut) -> Option<Bytes> {
    let len = announced_len(received)?;
    if received.len() < FRAME_HEADER_BYTES + len {
        return None;
    }
    received.advance(FRAME_HEADER_BYTES);
    Some(received.split_to(len).freeze())
}

fn error_response(status: &Status) -> Response {
    (http_status(status.code()), [(header::CONTENT_TYPE, "application/json")], error_json(status)).into_response()
}

/// Returns an error as a line of a response stream.
fn error_line(status: &Status) -> Vec<u8> {
    format!("{{\"error\":{}}}\n", error_json(status)).into_bytes()
}

fn error_json(status: &Status) -> String {
    serde_json::json!({ "code": status.code() as i32, "message": status.message() }).to_string()
}

/// Maps codes as grpc-gateway does.
fn http_status(code: Code) -> StatusCode {
    match code {
        Code::Ok => StatusCode::OK,
        Code::InvalidArgument | Code::FailedPrecondition | Code::OutOfRange => StatusCode::BAD_REQUEST,
        Code::Unauthenticated => StatusCode::UNAUTHORIZED,
        Code::PermissionDenied => StatusCode::FORBIDDEN,
        Code::NotFound => StatusCode::NOT_FOUND,
        Code::AlreadyExists | Code::Aborted => StatusCode::CONFLICT,
        Code::ResourceExhausted => StatusCode::TOO_MANY_REQUESTS,
        Code::Cancelled => StatusCode::from_u16(499).unwrap_or(StatusCode::BAD_REQUEST),
        Code::Unknown | Code::Internal | Code::DataLoss => StatusCode::INTERNAL_SERVER_ERROR,
        Code::Unimplemented => StatusCode::NOT_IMPLEMENTED,
        Code::Unavailable => StatusCode::SERVICE_UNAVAILABLE,
        Code::DeadlineExceeded => StatusCode::GATEWAY_TIMEOUT,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_path_has_an_existing_method() {
        let pool = DescriptorPool::decode(DESCRIPTORS).expect("descriptors");
        let gateway = Gateway::new(pool, Router::new(), Arc::default(), 2 << 20);
        for (path, method) in &PATHS {
            assert!(gateway.describe(method).is_ok(), "{path}: {method}");
        }
        let of_etcd = gateway.pool.services().filter(|service| service.parent_file().package_name() != "orlopb");
        let methods: usize = of_etcd.map(|service| service.methods().len()).sum();
        // Three calls have two paths; RangeStream has none.
        assert_eq!(PATHS.len(), methods - 1 + 3);
    }

    /// A peer without a user can use up the memory of partial requests.
    #[tokio::test]
    async fn complete_request_needs_no_memory_of_partial_requests() {
        let all = Arc::default();
        let mut others = PartialRequest::new(&all);
        assert!(others.set_bytes(1 << 30).is_err(), "all memory is used");
        let empty_message = async || Body::from(vec![0; FRAME_HEADER_BYTES]);
        let grpc = Router::new().fallback(empty_message);
        let gateway = routes(grpc, Arc::clone(&all), 2 << 20).expect("descriptors");
        let request = http::Request::post("/v3/maintenance/status").body(Body::from("{}")).expect("a request");
        let Ok(response) = gateway.oneshot(request).await;
        assert_eq!(response.status(), StatusCode::OK);
    }
}
