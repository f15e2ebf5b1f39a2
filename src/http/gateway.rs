//! The JSON gateway: `POST /v3/...` for every gRPC call, as in etcd.
//!
//! It has no code for individual calls and uses the descriptors of `proto/`: JSON is converted to a message, which is
//! sent as a gRPC request to the services of this process, and response messages are converted to JSON. Conventions are
//! those of grpc-gateway: original field names, 64-bit numbers as strings, bytes in base64, defaults omitted; a
//! streaming response has one `{"result": ...}` per line, and streaming requests are concatenated JSON values.

mod text;
pub mod values;

use std::{convert::Infallible, future::poll_fn, panic::resume_unwind, sync::Arc, time::Duration};

use axum::{
    Router,
    body::{Body, BodyDataStream},
    extract::{Request, State},
    http::{HeaderMap, HeaderName, Method, StatusCode, header},
    response::{IntoResponse as _, Response},
    routing::any,
};
use bytes::{Buf as _, BufMut as _, Bytes, BytesMut};
use futures_util::{Stream, StreamExt as _, stream};
use http_body_util::BodyExt as _;
use prost::Message as _;
use prost_reflect::{
    DescriptorError, DescriptorPool, DynamicMessage, MessageDescriptor, MethodDescriptor, SerializeOptions,
};
use tokio::{
    sync::{OwnedSemaphorePermit, Semaphore},
    task::spawn_blocking,
    time::timeout,
};
use tonic::{Code, Status};
use tower::ServiceExt as _;

use self::{text::Text, values::Values};
use crate::{
    api::status::{request_too_late, too_many_requests},
    net::Remote,
};
use orlop_core::overload::{PartialRequest, PartialRequests};
use orlop_wire::proto::DESCRIPTORS;

/// Maximum size of the JSON of one message in bytes. The services have their own limits.
pub const MESSAGE_BYTES_MAX: usize = 16 << 20;
const FRAME_HEADER_BYTES: usize = 5;
/// Maximum memory of all large responses together, in KiB. The encoded message, the decoded message and the JSON of
/// each response count. Responses of up to [`SMALL_RESPONSE_BYTES`] do not count.
const RESPONSES_KIB_MAX: usize = 512 << 10;
const SMALL_RESPONSE_BYTES: usize = 1 << 20;
/// Memory of a large response as a multiple of the length of its encoded message.
const JSON_FACTOR: usize = 5;
/// Longer messages are converted on a blocking thread.
const BLOCKING_BYTES_MIN: usize = 256 << 10;
/// Maximum time a response waits for memory.
const MEMORY_WAIT_MAX: Duration = Duration::from_secs(7);

/// Paths and their calls.
const PATHS: [(&str, &str); 50] = [
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
];
const OBSERVE: (&str, &str) = ("election/observe", "v3electionpb.Election/Observe");

struct Gateway {
    pool: DescriptorPool,
    grpc: Router,
    partial_requests: Arc<PartialRequests>,
    /// Memory available for large responses, in KiB. A response releases its memory when it has been sent.
    response_memory: Arc<Semaphore>,
}

impl Gateway {
    fn new(pool: DescriptorPool, grpc: Router, partial_requests: Arc<PartialRequests>) -> Self {
        Self { pool, grpc, partial_requests, response_memory: Arc::new(Semaphore::new(RESPONSES_KIB_MAX)) }
    }
}

/// Returns the routes of the gateway.
///
/// # Errors
///
/// If the compiled-in descriptors cannot be read.
pub(super) fn routes(grpc: Router, partial_requests: Arc<PartialRequests>) -> Result<Router, DescriptorError> {
    let gateway = Gateway::new(DescriptorPool::decode(DESCRIPTORS)?, grpc, partial_requests);
    Ok(Router::new().route("/v3/{*path}", any(serve)).with_state(Arc::new(gateway)))
}

async fn serve(State(gateway): State<Arc<Gateway>>, request: Request) -> Response {
    let path = request.uri().path().trim_start_matches("/v3/");
    let Some((_, method)) = PATHS.iter().chain([&OBSERVE]).find(|(known, _)| *known == path) else {
        return error_response(&Status::not_found("Not Found"));
    };
    if request.method() == Method::OPTIONS {
        return StatusCode::OK.into_response();
    }
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
        let body = if described.is_client_streaming() {
            Body::from_stream(request_frames(
                body.into_data_stream(),
                described.input(),
                PartialRequest::new(&self.partial_requests),
            ))
        } else {
            let json = read_body(body.into_data_stream(), PartialRequest::new(&self.partial_requests)).await?;
            Body::from(json_to_frame(described.input(), json).await?)
        };
        let request = http::Request::post(format!("http://gateway/{method}"))
            .header(header::CONTENT_TYPE, "application/grpc")
            .header(header::TE, "trailers")
            .body(body)
            .map_err(|error| Status::internal(error.to_string()))?;
        let (mut grpc_head, body) = request.into_parts();
        grpc_head.headers.extend(metadata(&head.headers));
        // The name in a client's certificate is not passed on: as in etcd, requests through the gateway need a token.
        if let Some(remote) = head.extensions.get::<Remote>() {
            grpc_head.extensions.insert(remote.clone());
        }
        let request = http::Request::from_parts(grpc_head, body);
        let response = match self.grpc.clone().oneshot(request).await {
            Ok(response) => response,
            Err(never) => match never {},
        };
        if described.is_server_streaming() {
            return Ok(stream_responses(response, described.output()));
        }
        unary_response(response, described.output(), &self.response_memory).await
    }

    fn describe(&self, method: &str) -> Result<MethodDescriptor, Status> {
        let (service, name) = method.split_once('/').unwrap_or_default();
        let service = self.pool.get_service_by_name(service);
        service
            .and_then(|service| service.methods().find(|known| known.name() == name))
            .ok_or_else(|| Status::unimplemented(format!("unknown method {method}")))
    }
}

/// Returns the gRPC metadata: the `authorization` header and the headers with the prefix `grpc-metadata-`.
fn metadata(headers: &HeaderMap) -> HeaderMap {
    const PREFIX: &str = "grpc-metadata-";
    let mut metadata = HeaderMap::new();
    for (name, value) in headers {
        let name = match name.as_str().strip_prefix(PREFIX) {
            Some(name) => HeaderName::try_from(name).ok(),
            None => (name == header::AUTHORIZATION).then(|| name.clone()),
        };
        if let Some(name) = name {
            metadata.append(name, value.clone());
        }
    }
    metadata
}

/// Parses a message from JSON. Empty input is an empty message.
pub fn message(kind: MessageDescriptor, json: &[u8]) -> Result<DynamicMessage, Status> {
    if json.iter().all(u8::is_ascii_whitespace) {
        return Ok(DynamicMessage::new(kind));
    }
    let mut values = serde_json::Deserializer::from_slice(json);
    let options = prost_reflect::DeserializeOptions::new().deny_unknown_fields(false);
    DynamicMessage::deserialize_with_options(kind, &mut values, &options)
        .map_err(|error| Status::invalid_argument(error.to_string()))
}

/// Parses a message from JSON and frames it for gRPC.
async fn json_to_frame(kind: MessageDescriptor, json: Text) -> Result<Bytes, Status> {
    spawn_if_long(json.len(), move || message(kind, &json.joined()).map(|message| frame(&message))).await
}

fn frame(message: &DynamicMessage) -> Bytes {
    let len = message.encoded_len();
    let mut bytes = BytesMut::with_capacity(FRAME_HEADER_BYTES + len);
    bytes.put_u8(0);
    bytes.put_u32(u32::try_from(len).unwrap_or(u32::MAX));
    bytes.put_slice(&message.encode_to_vec());
    bytes.freeze()
}

/// Runs work whose duration is proportional to the length of the message. For a long message it runs on a blocking
/// thread, so that it does not delay other requests.
async fn spawn_if_long<T: Send + 'static>(
    len: usize,
    work: impl FnOnce() -> Result<T, Status> + Send + 'static,
) -> Result<T, Status> {
    if len <= BLOCKING_BYTES_MIN {
        return work();
    }
    match spawn_blocking(work).await {
        Ok(done) => done,
        Err(ended) => match ended.try_into_panic() {
            Ok(panic) => resume_unwind(panic),
            Err(error) => Err(Status::unavailable(format!("orlop: the server is shutting down: {error}"))),
        },
    }
}

/// Reads a whole body of at most [`MESSAGE_BYTES_MAX`].
async fn read_body(mut body: BodyDataStream, mut partial: PartialRequest) -> Result<Text, Status> {
    let mut text = Text::default();
    while let Some(data) = next(&mut body, &mut partial).await? {
        if text.len() + data.len() > MESSAGE_BYTES_MAX {
            return Err(Status::invalid_argument("a message is too long"));
        }
        text.push(&data);
        partial.set_bytes(text.len()).map_err(|_| too_many_requests())?;
    }
    Ok(text)
}

/// Returns the next data of a body.
///
/// # Errors
///
/// If the message is not complete within its deadline, or the body cannot be read.
async fn next(body: &mut BodyDataStream, partial: &mut PartialRequest) -> Result<Option<Bytes>, Status> {
    tokio::select! {
        data = body.next() => data.transpose().map_err(|error| Status::invalid_argument(error.to_string())),
        _ = poll_fn(|context| partial.poll_deadline(context)) => Err(request_too_late()),
    }
}

/// Converts concatenated JSON values to frames. Each value is converted as soon as it is complete.
fn request_frames(
    body: BodyDataStream,
    kind: MessageDescriptor,
    partial: PartialRequest,
) -> impl Stream<Item = Result<Bytes, axum::Error>> {
    let start = (body, kind, partial, Values::default(), Bytes::new());
    stream::try_unfold(start, |(mut body, kind, mut partial, mut values, mut data)| async move {
        loop {
            if let Some(text) = values.next(&mut data).map_err(axum::Error::new)? {
                // The next message has its own deadline.
                partial.set_bytes(0).map_err(|_| axum::Error::new(too_many_requests()))?;
                let frame = json_to_frame(kind.clone(), text).await.map_err(axum::Error::new)?;
                return Ok(Some((frame, (body, kind, partial, values, data))));
            }
            partial.set_bytes(values.buffered_bytes()).map_err(|_| axum::Error::new(too_many_requests()))?;
            match next(&mut body, &mut partial).await.map_err(axum::Error::new)? {
                Some(more) => data = more,
                None if values.buffered_bytes() == 0 => return Ok(None),
                None => return Err(axum::Error::new(Values::incomplete())),
            }
        }
    })
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum StreamState {
    Open,
    Ended,
}

/// Returns the gRPC status in headers or trailers.
fn status(headers: &HeaderMap) -> Option<Status> {
    Status::from_header_map(headers)
}

async fn unary_response(
    response: Response,
    kind: MessageDescriptor,
    response_memory: &Arc<Semaphore>,
) -> Result<Response, Status> {
    if let Some(status) = status(response.headers()).filter(|status| status.code() != Code::Ok) {
        return Err(status);
    }
    let mut body = response.into_body();
    let (mut received, mut permit) = (BytesMut::new(), None);
    while let Some(frame) = body.frame().await {
        match frame.map_err(|error| Status::internal(error.to_string()))?.into_data() {
            Ok(data) => received.extend_from_slice(&data),
            Err(frame) => {
                if let Some(status) = frame.trailers_ref().and_then(status).filter(|status| status.code() != Code::Ok) {
                    return Err(status);
                }
            }
        }
        if let Some(len) = message_len(&received).filter(|len| permit.is_none() && *len > SMALL_RESPONSE_BYTES) {
            permit = Some(reserve_memory(len, response_memory).await?);
        }
    }
    if received.len() < FRAME_HEADER_BYTES {
        return Err(Status::internal("the service sent no response"));
    }
    received.advance(FRAME_HEADER_BYTES);
    let json = spawn_if_long(received.len(), move || json(kind, received.freeze())).await?;
    let json = Bytes::from_owner(JsonResponse { json, _permit: permit });
    Ok(([(header::CONTENT_TYPE, "application/json")], json).into_response())
}

/// A JSON response. Its memory is released when it has been sent.
struct JsonResponse {
    json: Vec<u8>,
    _permit: Option<OwnedSemaphorePermit>,
}

impl AsRef<[u8]> for JsonResponse {
    fn as_ref(&self) -> &[u8] {
        &self.json
    }
}

/// Waits for memory for a response of the given length, its decoded form and its JSON. A response larger than the limit
/// waits for all of the memory.
async fn reserve_memory(len: usize, response_memory: &Arc<Semaphore>) -> Result<OwnedSemaphorePermit, Status> {
    let wanted = (len.saturating_mul(JSON_FACTOR) >> 10).min(RESPONSES_KIB_MAX);
    let wanted = u32::try_from(wanted).unwrap_or(u32::MAX);
    let permit = timeout(MEMORY_WAIT_MAX, Arc::clone(response_memory).acquire_many_owned(wanted)).await;
    permit.ok().and_then(Result::ok).ok_or_else(|| Status::resource_exhausted("etcdserver: too many requests"))
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
fn stream_responses(response: Response, kind: MessageDescriptor) -> Response {
    let failed = status(response.headers()).filter(|status| status.code() != Code::Ok);
    if let Some(failed) = failed {
        let line = format!("{{\"error\":{}}}\n", error_json(&failed));
        return (http_status(failed.code()), [(header::CONTENT_TYPE, "application/json")], line).into_response();
    }
    let start = (response.into_body(), kind, BytesMut::new(), StreamState::Open);
    let lines = stream::unfold(start, |(mut body, kind, mut received, mut state)| async move {
        while state == StreamState::Open {
            if let Some(message) = take_message(&mut received) {
                let kind_of = kind.clone();
                let line = match spawn_if_long(message.len(), move || json(kind_of, message)).await {
                    Ok(json) => [b"{\"result\":", &json[..], b"}\n"].concat(),
                    Err(status) => {
                        state = StreamState::Ended;
                        format!("{{\"error\":{}}}\n", error_json(&status)).into_bytes()
                    }
                };
                return Some((Ok::<_, Infallible>(line), (body, kind, received, state)));
            }
            let failed = match body.frame().await {
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        received.extend_from_slice(&data);
                        continue;
                    }
                    Err(frame) => frame.trailers_ref().and_then(status).filter(|status| status.code() != Code::Ok),
                },
                Some(Err(error)) => Some(Status::unavailable(error.to_string())),
                None => None,
            };
            state = StreamState::Ended;
            if let Some(status) = failed {
                let line = format!("{{\"error\":{}}}\n", error_json(&status)).into_bytes();
                return Some((Ok(line), (body, kind, received, state)));
            }
        }
        None
    });
    ([(header::CONTENT_TYPE, "application/json")], Body::from_stream(lines)).into_response()
}

/// Returns the first message when it is complete.
fn take_message(received: &mut BytesMut) -> Option<Bytes> {
    let len = message_len(received)?;
    if received.len() < FRAME_HEADER_BYTES + len {
        return None;
    }
    received.advance(FRAME_HEADER_BYTES);
    Some(received.split_to(len).freeze())
}

/// Returns the message length in a frame header.
fn message_len(received: &[u8]) -> Option<usize> {
    Some(u32::from_be_bytes(received.get(1..FRAME_HEADER_BYTES)?.try_into().ok()?) as usize)
}

fn error_response(status: &Status) -> Response {
    (http_status(status.code()), [(header::CONTENT_TYPE, "application/json")], error_json(status)).into_response()
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
    use tokio::time::sleep;

    use super::*;

    #[test]
    fn every_path_has_an_existing_method() {
        let pool = DescriptorPool::decode(DESCRIPTORS).expect("descriptors");
        let gateway = Gateway::new(pool, Router::new(), Arc::default());
        for (path, method) in PATHS.iter().chain([&OBSERVE]) {
            assert!(gateway.describe(method).is_ok(), "{path}: {method}");
        }
        let of_etcd = gateway.pool.services().filter(|service| service.parent_file().package_name() != "orlopb");
        let methods: usize = of_etcd.map(|service| service.methods().len()).sum();
        // Three calls have two paths; RangeStream has none.
        assert_eq!(PATHS.len() + 1, methods - 1 + 3);
    }

    #[tokio::test(start_paused = true)]
    async fn each_message_of_a_stream_has_its_own_deadline() {
        let pieces = stream::iter(["{}{", "}{", "}{", "}"]).then(|piece| async move {
            sleep(Duration::from_secs(40)).await;
            Ok::<_, Infallible>(piece)
        });
        let pool = DescriptorPool::decode(DESCRIPTORS).expect("descriptors");
        let kind = pool.get_message_by_name("etcdserverpb.WatchRequest").expect("a message");
        let body = Body::from_stream(pieces).into_data_stream();
        let read: Vec<_> = request_frames(body, kind, PartialRequest::new(&Arc::default())).collect().await;
        assert!(read.len() == 4 && read.iter().all(Result::is_ok), "{read:?}");
    }
}
