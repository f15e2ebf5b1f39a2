//! The KV service: Range, RangeStream, Put, DeleteRange, Txn, Compact.

use std::{
    convert::Infallible,
    future::Future,
    sync::Arc,
    task::{self, Poll},
};

use http::Request;
use prost::Message;
use tonic::{
    Status,
    body::Body,
    codegen::{BoxFuture, Service},
    server::NamedService,
};
use tonic_prost::ProstCodec;

use super::{
    Context, Responses, convert,
    grpc::{
        field_limits::LimitedFields,
        response_body::{IntoSegments, ResponseBody},
        unary::{self, RequestBody, Response},
    },
    status::{Invalid, from_store, unknown_method},
    tasks::unfold,
};
use orlop_core::{
    auth::Caller,
    store::{RangePieces, request::CompactionWait, request::Projection},
    types::Revision,
};
use orlop_wire::proto::server::etcdserverpb as pb;

/// Number of pairs in the first chunk of a RangeStream response; the numbers of later chunks depend on the size of the
/// pairs.
const FIRST_CHUNK_PAIRS: usize = 10;
const RANGE_STREAM: &str = "/etcdserverpb.KV/RangeStream";

/// Who sent a request, or why that is not known. As in etcd, an invalid request is refused before an invalid token.
type Known = Result<Caller, Status>;

/// The KV service.
#[derive(Clone)]
pub(super) struct KvService(Arc<Context>);

impl KvService {
    pub(super) fn new(context: Arc<Context>) -> Self {
        Self(context)
    }

    fn unary<B, M, A, F>(
        &self,
        request: Request<B>,
        respond: impl FnOnce(Arc<Context>, Known, M) -> F + Send + 'static,
    ) -> BoxFuture<http::Response<Body>, Infallible>
    where
        B: RequestBody,
        M: LimitedFields,
        A: IntoSegments,
        F: Future<Output = Result<A, Status>> + Send,
    {
        let context = Arc::clone(&self.0);
        Box::pin(async move {
            let outcome = async {
                let (head, body) = request.into_parts();
                let caller = context.authenticator.caller(&context.store, &head.headers, &head.extensions).await;
                let message = unary::request(body, &context.settings).await?;
                respond(context, caller, message).await
            };
            unary::respond(outcome.await.and_then(ResponseBody::new))
        })
    }
}

impl NamedService for KvService {
    const NAME: &'static str = "etcdserverpb.KV";
}

impl<B: RequestBody> Service<Request<B>> for KvService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<B>) -> Self::Future {
        match request.uri().path() {
            "/etcdserverpb.KV/Range" => self.unary(request, range),
            "/etcdserverpb.KV/Put" => self.unary(request, put),
            "/etcdserverpb.KV/Txn" => self.unary(request, txn),
            "/etcdserverpb.KV/DeleteRange" => self.unary(request, delete_range),
            "/etcdserverpb.KV/Compact" => self.unary(request, compact),
            RANGE_STREAM => {
                let method = RangeStream(Arc::clone(&self.0));
                let longest = self.0.settings.max_message_bytes();
                Box::pin(async move {
                    let mut grpc = tonic::server::Grpc::new(ProstCodec::default())
                        .apply_max_message_size_config(Some(longest), None);
                    Ok(grpc.server_streaming(method, request).await)
                })
            }
            path => {
                let status = unknown_method(path);
                Box::pin(async move { Response::Ok(status.into_http()) })
            }
        }
    }
}

pub(super) async fn range(
    context: Arc<Context>,
    caller: Known,
    request: pb::RangeRequest,
) -> Result<pb::RangeResponse, Status> {
    let request = convert::range(&request)?;
    let response = context.store.range(&caller?, &request).await.map_err(from_store)?;
    Ok(context.range_response(response))
}

async fn put(context: Arc<Context>, caller: Known, request: pb::PutRequest) -> Result<pb::PutResponse, Status> {
    let bytes = request.encoded_len();
    let request = convert::put(request)?;
    context.check_size(bytes)?;
    let response = context.store.put(&caller?, request).await.map_err(from_store)?;
    Ok(context.put_response(response))
}

pub(super) async fn delete_range(
    context: Arc<Context>,
    caller: Known,
    request: pb::DeleteRangeRequest,
) -> Result<pb::DeleteRangeResponse, Status> {
    let converted = convert::delete(&request)?;
    context.check_size(request.encoded_len())?;
    let response = context.store.delete(&caller?, converted).await.map_err(from_store)?;
    Ok(context.delete_response(response))
}

pub(super) async fn txn(
    context: Arc<Context>,
    caller: Known,
    request: pb::TxnRequest,
) -> Result<pb::TxnResponse, Status> {
    let bytes = request.encoded_len();
    let request = convert::txn(request, context.settings.max_txn_ops)?;
    if !request.is_read_only() {
        context.check_size(bytes)?;
    }
    let response = context.store.txn(&caller?, request).await.map_err(from_store)?;
    Ok(context.txn_response(response))
}

async fn compact(
    context: Arc<Context>,
    caller: Known,
    request: pb::CompactionRequest,
) -> Result<pb::CompactionResponse, Status> {
    let wait = if request.physical { CompactionWait::ForRows } else { CompactionWait::ForRevision };
    let head = context.store.compact(&caller?, Revision(request.revision), wait).await.map_err(from_store)?;
    Ok(pb::CompactionResponse { header: context.header(head) })
}

impl Context {
    /// Checks the size of a write request. The size of a read-only request is limited by the transport.
    fn check_size(&self, bytes: usize) -> Result<(), Invalid> {
        if bytes > self.settings.max_request_bytes { Err(Invalid::TooLarge) } else { Ok(()) }
    }
}

struct RangeStream(Arc<Context>);

impl tonic::server::ServerStreamingService<pb::RangeRequest> for RangeStream {
    type Response = pb::RangeStreamResponse;
    type ResponseStream = Responses<pb::RangeStreamResponse>;
    type Future = BoxFuture<tonic::Response<Self::ResponseStream>, Status>;

    fn call(&mut self, request: tonic::Request<pb::RangeRequest>) -> Self::Future {
        let context = Arc::clone(&self.0);
        Box::pin(async move {
            let caller = context.caller_of(&request).await;
            let request = request.into_inner();
            let converted = convert::range(&request)?;
            let pairs = if converted.projection == Projection::CountOnly { usize::MAX } else { FIRST_CHUNK_PAIRS };
            let pieces = context.store.range_pieces(&caller?, converted).await.map_err(from_store)?;
            let start = (Arc::clone(&context), pieces, pairs);
            let chunks = unfold(&context, RANGE_STREAM, start, |(context, mut pieces, pairs)| async move {
                next_chunk(&context, &mut pieces, pairs)
                    .await
                    .map(|chunk| chunk.map(|(response, pairs)| (response, (context, pieces, pairs))))
            });
            Ok(tonic::Response::new(chunks))
        })
    }
}

/// Returns the next chunk of a RangeStream response, and the number of pairs to request for the following chunk. Only
/// the last chunk has header, count and more.
async fn next_chunk(
    context: &Context,
    pieces: &mut RangePieces,
    pairs: usize,
) -> Result<Option<(pb::RangeStreamResponse, usize)>, Status> {
    let Some(chunk) = pieces.next(pairs).await.map_err(from_store)? else { return Ok(None) };
    let bytes: usize = chunk.kvs.iter().map(orlop_core::types::EncodedKv::len).sum();
    let target = context.settings.max_request_bytes;
    let pairs = if bytes < target / 2 {
        pairs.saturating_mul(2)
    } else if bytes > target.saturating_mul(2) {
        (pairs / 2).max(1)
    } else {
        pairs
    };
    let mut response = context.range_response(chunk);
    if !pieces.is_done() {
        response = pb::RangeResponse { kvs: response.kvs, ..Default::default() };
    }
    Ok(Some((pb::RangeStreamResponse { range_response: Some(response) }, pairs)))
}
