//! The Watch service: one session per stream.

use std::{
    convert::Infallible,
    pin::Pin,
    sync::{Arc, OnceLock},
    task,
    time::Duration,
};

use bytes::{BufMut as _, Bytes};
use futures_util::StreamExt as _;
use http::Request;
use prost::Message as _;
use tokio::time::{Instant, sleep, sleep_until};
use tonic::{
    Code, Status, Streaming,
    body::Body,
    codec::{BufferSettings, Codec, EncodeBuf, Encoder},
    codegen::{BoxFuture, Service},
    server::{NamedService, StreamingService},
};
use tonic_prost::ProstDecoder;
use tracing::{debug, warn};

use super::{
    Context, Responses,
    status::{COMPACTED, WATCH_RANGE_EMPTY, cancel_reason, from_store, panicked, unknown_method},
};
use crate::auth::Credentials;
use orlop_core::{
    auth,
    overload::PacedStream,
    store,
    supervise::{catch_panics, log_request_panic},
    types::{KeyRange, Revision, WatchId},
    watch::{End, Flavor, Message, Messages, NO_WATCH, NotCreated, Outbox, Session, Spec},
};
use orlop_wire::proto::server::etcdserverpb::{
    self as pb, watch_create_request::FilterType, watch_request::RequestUnion,
};

/// Pause before a catching-up watch reads from an unavailable database again.
const RETRY_PAUSE: Duration = Duration::from_millis(500);
/// Number of encoded bytes after which the encoder passes its buffer to the connection.
const YIELD_BYTES: usize = 64 << 10;

/// The Watch service.
#[derive(Clone)]
pub(super) struct WatchService(Arc<Context>);

impl WatchService {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self(context)
    }
}

impl NamedService for WatchService {
    const NAME: &'static str = "etcdserverpb.Watch";
}

impl Service<Request<Body>> for WatchService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> task::Poll<Result<(), Infallible>> {
        task::Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Body>) -> Self::Future {
        let method = WatchMethod(Arc::clone(&self.0));
        let longest = self.0.settings.max_message_bytes();
        Box::pin(async move {
            // tonic's router accepts longer paths.
            if request.uri().path() != "/etcdserverpb.Watch/Watch" {
                return Ok(unknown_method(request.uri().path()).into_http());
            }
            let mut grpc = tonic::server::Grpc::new(WatchCodec).apply_max_message_size_config(Some(longest), None);
            Ok(grpc.streaming(method, request).await)
        })
    }
}

struct WatchMethod(Arc<Context>);

impl StreamingService<pb::WatchRequest> for WatchMethod {
    type Response = Frame;
    type ResponseStream = Responses<Frame>;
    type Future = std::future::Ready<Result<tonic::Response<Self::ResponseStream>, Status>>;

    fn call(&mut self, request: tonic::Request<Streaming<pb::WatchRequest>>) -> Self::Future {
        let context = Arc::clone(&self.0);
        let outbox = Arc::new(context.store.hub().outbox());
        let messages = Messages::new(Arc::clone(&outbox));
        let bad_request = Arc::new(OnceLock::new());
        let client = Client {
            credentials: Credentials::of(&request),
            needs_leader: request.metadata().get("hasleader").is_some_and(|value| value == "true"),
        };
        let requests = Requests { stream: request.into_inner(), failure: Arc::clone(&bad_request) };
        tokio::spawn(serve_and_catch_panics(Arc::clone(&context), client, requests, outbox));
        let frames = messages.map(move |message| match message {
            Ok(message) => Ok(context.frame(message)),
            Err(End::ServerStopped | End::ClientGone) => Err(from_store(store::Error::Stopped)),
            Err(End::NoLeader) => Err(from_store(store::Error::Unavailable)),
            Err(End::BadRequest) => Err(bad_request.get().cloned().unwrap_or_else(panicked)),
            Err(End::Failed) => Err(panicked()),
        });
        std::future::ready(Ok(tonic::Response::new(Box::pin(frames) as Self::ResponseStream)))
    }
}

/// The requests of a stream.
struct Requests {
    stream: Streaming<pb::WatchRequest>,
    /// Why no request can be read any more.
    failure: Arc<OnceLock<Status>>,
}

/// What the metadata of a stream say of its client.
struct Client {
    /// Checked again for each watch of the stream.
    credentials: Credentials,
    /// The stream must end when this instance is cut off from the database, so that the client goes to another one.
    needs_leader: bool,
}

/// Serves one stream. If its session panics, the stream ends with an error.
async fn serve_and_catch_panics(context: Arc<Context>, client: Client, requests: Requests, outbox: Arc<Outbox>) {
    let serving = serve(Arc::clone(&context), client, requests, Arc::clone(&outbox));
    if let Err(panic) = catch_panics(serving).await {
        log_request_panic(&context.store.metrics().rpc.panics, "/etcdserverpb.Watch/Watch", &panic);
        outbox.end(End::Failed);
    }
}

/// Serves one stream until the client disconnects or the server stops. A client that has closed its request stream
/// still receives events.
async fn serve(
    context: Arc<Context>,
    Client { credentials, needs_leader }: Client,
    Requests { stream, failure }: Requests,
    outbox: Arc<Outbox>,
) {
    let store = &context.store;
    let mut requests = PacedStream::new(stream, context.steps());
    let mut session = Session::new(Arc::clone(store.hub()), Arc::clone(store.log()), Arc::clone(&outbox));
    let (mut stopping, mut cut_off) = (context.stopping.clone(), store.cut_off());
    let mut requests_open = true;
    let mut tick = context.next_tick();
    let mut retry_at = Instant::now();
    let mut pending: Option<Pin<Box<dyn Future<Output = Checked> + Send + '_>>> = None;
    while !outbox.has_ended() {
        tokio::select! {
            request = requests.next(), if requests_open && pending.is_none() && outbox.has_capacity() => match request.transpose() {
                Ok(Some(pb::WatchRequest { request_union: Some(RequestUnion::ProgressRequest(_)) })) => {
                    // The response must include every revision that any instance has acknowledged before the request.
                    // The next request waits for this response, because requests are handled in order.
                    pending = Some(Box::pin(context.confirm_progress()));
                }
                Ok(Some(request)) => {
                    if let Some(create) = context.handle_request(&mut session, &credentials, request) {
                        pending = Some(Box::pin(context.check_watch(&credentials, create)));
                    }
                }
                Ok(None) => requests_open = false,
                Err(status) => {
                    debug!(error = %status, "watch stream failed");
                    // A client that is gone does not see it.
                    let _ = failure.set(status);
                    outbox.end(End::BadRequest);
                }
            },
            checked = outcome(&mut pending) => {
                pending = None;
                match checked {
                    Checked::Progress(Ok(())) => session.request_progress(),
                    // As in etcd, no response is sent; the client repeats the request.
                    Checked::Progress(Err(error)) => debug!(%error, "dropped a progress request"),
                    Checked::Create(create, Ok(())) => context.create_watch(&mut session, &create),
                    Checked::Create(_, Err(refused)) => session.refuse(NotCreated::Other(reason(&refused).into())),
                }
            }
            () = outbox.notified() => session.handle_notifications(),
            advanced = advance(&mut session, retry_at) => if let Err(error) = advanced {
                warn!(%error, "a watch cannot read the log; trying again");
                retry_at = Instant::now() + RETRY_PAUSE;
            },
            () = sleep_until(tick) => {
                // A client whose outbox is full receives no progress notifications.
                if outbox.has_capacity() {
                    session.tick();
                }
                tick = context.next_tick();
            }
            _ = stopping.wait_for(|stopping| *stopping) => outbox.end(End::ServerStopped),
            _ = cut_off.wait_for(|cut_off| *cut_off), if needs_leader => outbox.end(End::NoLeader),
        }
    }
}

/// The outcome of a request for which the stream had to wait.
enum Checked {
    Progress(store::Result<()>),
    /// A watch to create, and whether it is permitted.
    Create(pb::WatchCreateRequest, Result<(), Status>),
}

/// Waits for the pending request. Never completes if there is none.
async fn outcome<F: Future + Unpin>(pending: &mut Option<F>) -> F::Output {
    match pending {
        Some(pending) => pending.await,
        None => std::future::pending().await,
    }
}

/// Returns the reason with which a watch is refused. As in etcd, it contains the code, and any other error than that of a
/// missing, old or invalid token becomes a denied permission.
fn reason(refused: &Status) -> String {
    use auth::Error;
    let [denied, tokens @ ..] = [Error::PermissionDenied, Error::InvalidToken, Error::OldRevision, Error::UserEmpty]
        .map(|error| from_store(error.into()));
    let status = tokens.into_iter().find(|status| status.message() == refused.message()).unwrap_or(denied);
    format!("rpc error: code = {:?} desc = {}", status.code(), status.message())
}

/// Sends events of past revisions to watches that are not synced. Never completes if all are synced.
///
/// # Cancel safety
///
/// The same as [`Session::advance`].
async fn advance(session: &mut Session, retry_at: Instant) -> orlop_core::log::Result<()> {
    if !session.has_work() {
        return std::future::pending().await;
    }
    sleep_until(retry_at).await;
    session.advance().await
}

impl Context {
    /// Handles a request at once, or returns a watch that must be permitted before it is created.
    fn handle_request(
        &self,
        session: &mut Session,
        credentials: &Credentials,
        request: pb::WatchRequest,
    ) -> Option<pb::WatchCreateRequest> {
        match request.request_union {
            Some(RequestUnion::CreateRequest(create)) => {
                if self.store.is_auth_enabled() || credentials.has_token() {
                    return Some(create);
                }
                self.create_watch(session, &create);
            }
            Some(RequestUnion::CancelRequest(request)) => session.cancel(WatchId(request.watch_id)),
            // As in etcd, an empty request is ignored. Progress requests are handled by the stream.
            Some(RequestUnion::ProgressRequest(_)) | None => {}
        }
        None
    }

    async fn confirm_progress(&self) -> Checked {
        Checked::Progress(self.store.confirm().await)
    }

    fn create_watch(&self, session: &mut Session, create: &pb::WatchCreateRequest) {
        match spec(create, self.settings.max_message_bytes()) {
            Ok(spec) => session.create(spec),
            Err(reason) => session.refuse(NotCreated::Other(reason.into())),
        }
    }

    /// Checks whether a watch is permitted. Waits for the database as long as the stream exists: the client's library would
    /// end a watch that is refused.
    async fn check_watch(&self, credentials: &Credentials, create: pb::WatchCreateRequest) -> Checked {
        loop {
            let permitted = async {
                let caller = self.caller(credentials).await?;
                self.store.check_watch(&caller, &range(&create)).await.map_err(from_store)
            };
            match permitted.await {
                Err(status) if status.code() == Code::Unavailable => sleep(RETRY_PAUSE).await,
                permitted => return Checked::Create(create, permitted),
            }
        }
    }

    /// Returns the time of the next tick. It has up to 10 % jitter, so that the streams of a restarted server do not
    /// tick at the same time.
    fn next_tick(&self) -> Instant {
        use std::hash::{BuildHasher as _, RandomState};
        let interval = self.settings.watch_progress_notify_interval;
        let jitter = u32::try_from(RandomState::new().hash_one(0) % 100).unwrap_or(0);
        Instant::now() + interval + interval / 1000 * jitter
    }

    fn frame(&self, message: Message) -> Frame {
        let response = |id: WatchId, revision| pb::WatchResponse {
            header: self.header(revision),
            watch_id: id.0,
            ..Default::default()
        };
        match message {
            Message::Created { id, revision } => pb::WatchResponse { created: true, ..response(id, revision) }.into(),
            Message::Refused { revision, reason } => pb::WatchResponse {
                created: true,
                canceled: true,
                cancel_reason: cancel_reason(reason),
                ..response(NO_WATCH, revision)
            }
            .into(),
            Message::Canceled { id, revision } => pb::WatchResponse { canceled: true, ..response(id, revision) }.into(),
            Message::Compacted { id, compact_revision } => {
                pb::WatchResponse { canceled: true, compact_revision: compact_revision.0, ..response(id, Revision(0)) }
                    .into()
            }
            Message::Progress { id, revision } => response(id, revision).into(),
            Message::Events { id, revision, events, fragment } => {
                Frame { head: pb::WatchResponse { fragment, ..response(id, revision) }, events }
            }
        }
    }
}

/// Returns the range of a watch. Without a key it starts at the first key; other requests require a key.
fn range(request: &pb::WatchCreateRequest) -> KeyRange {
    let key: &[u8] = if request.key.is_empty() { b"\0" } else { &request.key };
    KeyRange::from_wire(key, &request.range_end)
}

/// Returns the specification of a watch, or the reason to refuse it. `fragment_bytes` is the maximum size of a
/// fragment.
pub fn spec(request: &pb::WatchCreateRequest, fragment_bytes: usize) -> Result<Spec, &'static str> {
    let range = range(request);
    if range.is_empty() {
        return Err(WATCH_RANGE_EMPTY);
    }
    if request.start_revision < 0 {
        return Err(COMPACTED);
    }
    let filters = |filter: FilterType| request.filters.contains(&(filter as i32));
    Ok(Spec {
        id: (request.watch_id != 0).then_some(WatchId(request.watch_id)),
        range,
        start: (request.start_revision != 0).then_some(Revision(request.start_revision)),
        flavor: Flavor {
            prev_kv: request.prev_kv,
            puts: !filters(FilterType::Noput),
            deletes: !filters(FilterType::Nodelete),
        },
        fragment: request.fragment.then_some(fragment_bytes),
        progress_notify: request.progress_notify,
    })
}

/// A watch response whose events are encoded.
pub(super) struct Frame {
    head: pb::WatchResponse,
    /// Concatenated `WatchResponse.events` fields.
    events: Vec<Bytes>,
}

impl From<pb::WatchResponse> for Frame {
    fn from(head: pb::WatchResponse) -> Self {
        Self { head, events: Vec::new() }
    }
}

/// Decodes requests with prost and assembles responses from encoded parts.
#[derive(Clone, Copy, Default)]
struct WatchCodec;

impl Codec for WatchCodec {
    type Encode = Frame;
    type Decode = pb::WatchRequest;
    type Encoder = FrameEncoder;
    type Decoder = ProstDecoder<pb::WatchRequest>;

    fn encoder(&mut self) -> FrameEncoder {
        FrameEncoder
    }

    fn decoder(&mut self) -> Self::Decoder {
        ProstDecoder::new(BufferSettings::default())
    }
}

struct FrameEncoder;

impl Encoder for FrameEncoder {
    type Item = Frame;
    type Error = Status;

    fn encode(&mut self, frame: Frame, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.reserve(frame.head.encoded_len() + frame.events.iter().map(Bytes::len).sum::<usize>());
        frame.head.encode_raw(buffer);
        for events in &frame.events {
            buffer.put_slice(events);
        }
        Ok(())
    }

    fn buffer_settings(&self) -> BufferSettings {
        BufferSettings::new(4 << 10, YIELD_BYTES)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn refused_watches_have_etcds_reasons() {
        use auth::Error;
        for (error, want) in [
            (Error::InvalidToken.into(), "Unauthenticated desc = etcdserver: invalid auth token"),
            (Error::OldRevision.into(), "InvalidArgument desc = etcdserver: revision of auth store is old"),
            (Error::UserEmpty.into(), "InvalidArgument desc = etcdserver: user name is empty"),
            (Error::PermissionDenied.into(), "PermissionDenied desc = etcdserver: permission denied"),
            (Error::UserNotFound.into(), "PermissionDenied desc = etcdserver: permission denied"),
            (store::Error::TooManyRequests, "PermissionDenied desc = etcdserver: permission denied"),
        ] {
            assert_eq!(reason(&from_store(error)), format!("rpc error: code = {want}"));
        }
    }
}
