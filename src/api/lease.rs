//! The Lease service.

use std::{
    convert::Infallible,
    sync::Arc,
    task::{self, Poll},
};

use futures_util::{StreamExt as _, TryStreamExt as _, stream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tonic::{
    Request, Response, Status, Streaming,
    body::Body,
    codegen::{BoxFuture, Service},
    metadata::MetadataMap,
    server::NamedService,
};

use super::{
    Context, Responses,
    grpc::{field_limits::LimitedFields, response_body::ResponseBody, unary},
    status::from_store,
};
use crate::auth::Credentials;
use orlop_core::{
    overload::PacedStream,
    store::{self, request::LeaseKeys},
    types::LeaseId,
};
use orlop_wire::proto::server::etcdserverpb::{
    self as pb,
    lease_server::{Lease, LeaseServer},
};

/// Maximum number of concurrent keep-alives of one stream. On Postgres one commit renews all of them, so that a client with
/// thousands of leases keeps them although a commit takes some milliseconds.
const KEEP_ALIVES_AT_ONCE: usize = 256;
/// Number of concurrent keep-alives that each stream may have in any case.
const KEEP_ALIVES_OF_EACH: usize = 16;
/// Maximum number of concurrent keep-alives beyond these, of all streams. Each takes about a kilobyte until the database has
/// answered, all answers are handled in one step, and a client may have thousands of streams.
pub(super) const MORE_KEEP_ALIVES: usize = 4_096;

/// The Lease service. tonic's service has the methods; responses with many keys or leases are sent like those of KV, in
/// chunks without a copy, and count in the memory of reads.
#[derive(Clone)]
pub(super) struct LeaseService {
    context: Arc<Context>,
    others: LeaseServer<Context>,
}

impl LeaseService {
    pub(super) fn new(context: Arc<Context>) -> Self {
        let others = LeaseServer::from_arc(Arc::clone(&context));
        Self { context, others }
    }
}

impl NamedService for LeaseService {
    const NAME: &'static str = "etcdserverpb.Lease";
}

impl Service<http::Request<Body>> for LeaseService {
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Self::Error>;

    fn poll_ready(&mut self, _: &mut task::Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<Body>) -> Self::Future {
        let context = Arc::clone(&self.context);
        match request.uri().path() {
            "/etcdserverpb.Lease/LeaseTimeToLive" => Box::pin(async move {
                let outcome = async { context.lease_time_to_live(context.short_request(request).await?).await };
                unary::respond(outcome.await.and_then(|response| ResponseBody::new(response.into_inner())))
            }),
            "/etcdserverpb.Lease/LeaseLeases" => Box::pin(async move {
                let outcome = async { context.lease_leases(context.short_request(request).await?).await };
                let body = outcome.await.and_then(|response| ResponseBody::new(response.into_inner()));
                unary::respond(body.map(|body| body.counted(context.store.read_memory())))
            }),
            _ => self.others.call(request),
        }
    }
}

impl Context {
    /// Reads the request of a unary call whose message has no keys and values.
    async fn short_request<M: LimitedFields>(&self, request: http::Request<Body>) -> Result<Request<M>, Status> {
        let (head, body) = request.into_parts();
        let message = unary::request(body, &self.settings).await?;
        Ok(Request::from_parts(MetadataMap::from_headers(head.headers), head.extensions, message))
    }

    /// Returns the permit for a keep-alive of a stream: one of its own, or else one of those that all streams share.
    async fn keep_alive_permit(&self, own: &Arc<Semaphore>) -> Option<OwnedSemaphorePermit> {
        let mut permits = [own, &self.more_keep_alives].into_iter();
        match permits.find_map(|permits| Arc::clone(permits).try_acquire_owned().ok()) {
            Some(permit) => Some(permit),
            // Not one of the shared permits: clients that do not read their responses may hold them for long.
            None => Arc::clone(own).acquire_owned().await.ok(),
        }
    }
}

#[tonic::async_trait]
impl Lease for Context {
    async fn lease_grant(
        &self,
        request: Request<pb::LeaseGrantRequest>,
    ) -> Result<Response<pb::LeaseGrantResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        let request = request.into_inner();
        let granted =
            self.store.grant(&caller, LeaseId::from_wire(request.id), request.ttl).await.map_err(from_store)?;
        Ok(Response::new(pb::LeaseGrantResponse {
            header: self.header(granted.revision),
            id: granted.id.0,
            ttl: granted.ttl_secs,
            error: String::new(),
        }))
    }

    async fn lease_revoke(
        &self,
        request: Request<pb::LeaseRevokeRequest>,
    ) -> Result<Response<pb::LeaseRevokeResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        let revision = self.store.revoke(&caller, LeaseId(request.into_inner().id)).await.map_err(from_store)?;
        Ok(Response::new(pb::LeaseRevokeResponse { header: self.header(revision) }))
    }

    type LeaseKeepAliveStream = Responses<pb::LeaseKeepAliveResponse>;

    async fn lease_keep_alive(
        &self,
        request: Request<Streaming<pb::LeaseKeepAliveRequest>>,
    ) -> Result<Response<Self::LeaseKeepAliveStream>, Status> {
        // The token is checked again for each renewal, which also keeps it from expiring.
        let credentials = Arc::new(Credentials::of(&request));
        let own_permits = Arc::new(Semaphore::new(KEEP_ALIVES_OF_EACH));
        let start = (self.clone(), PacedStream::new(request.into_inner(), self.steps()), own_permits);
        let requests = stream::try_unfold(start, |(mut service, mut requests, own_permits)| async move {
            let request = tokio::select! {
                request = requests.next() => request.transpose()?,
                _ = service.stopping.wait_for(|stopping| *stopping) => return Err(from_store(store::Error::Stopped)),
            };
            let Some(request) = request else { return Ok(None) };
            let permit = service.keep_alive_permit(&own_permits).await;
            Ok(Some(((request.id, permit), (service, requests, own_permits))))
        });
        let service = Arc::new(self.clone());
        let responses = requests.map_ok(move |(id, permit)| {
            let (service, credentials) = (Arc::clone(&service), Arc::clone(&credentials));
            async move {
                let _permit = permit;
                let caller = service.caller(&credentials).await?;
                let (revision, ttl) = service.store.keep_alive(&caller, LeaseId(id)).await.map_err(from_store)?;
                Ok(pb::LeaseKeepAliveResponse { header: service.header(revision), id, ttl })
            }
        });
        Ok(Response::new(Box::pin(responses.try_buffered(KEEP_ALIVES_AT_ONCE))))
    }

    async fn lease_time_to_live(
        &self,
        request: Request<pb::LeaseTimeToLiveRequest>,
    ) -> Result<Response<pb::LeaseTimeToLiveResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        let request = request.into_inner();
        let keys = if request.keys { LeaseKeys::Returned } else { LeaseKeys::Omitted };
        let lease = self.store.lease(&caller, LeaseId(request.id), keys).await.map_err(from_store)?;
        let header = self.header(self.store.head());
        let response = match lease {
            Some(lease) => pb::LeaseTimeToLiveResponse {
                header,
                id: request.id,
                ttl: lease.left_secs,
                granted_ttl: lease.granted_secs,
                keys: lease.keys,
            },
            None => pb::LeaseTimeToLiveResponse { header, id: request.id, ttl: -1, ..Default::default() },
        };
        Ok(Response::new(response))
    }

    async fn lease_leases(
        &self,
        request: Request<pb::LeaseLeasesRequest>,
    ) -> Result<Response<pb::LeaseLeasesResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        let leases = self.store.leases(&caller).await.map_err(from_store)?;
        let leases = leases.into_iter().map(|id| pb::LeaseStatus { id: id.0 }).collect();
        Ok(Response::new(pb::LeaseLeasesResponse { header: self.header(self.store.head()), leases }))
    }
}
