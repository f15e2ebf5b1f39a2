//! The Lock service: a call returns when the caller holds the lock. See [`super::lock_queue`].

use std::sync::Arc;

use bytes::Bytes;
use tonic::{Request, Response, Status};

use super::{
    Context, kv,
    lock_queue::{Queue, Waited, to_unknown},
    status::LOCK_SESSION_EXPIRED,
};
use orlop_wire::proto::server::{
    etcdserverpb as pb,
    v3lockpb::{LockRequest, LockResponse, UnlockRequest, UnlockResponse, lock_server::Lock},
};

/// The Lock service.
pub(super) struct LockService(pub(super) Arc<Context>);

impl LockService {
    async fn lock(&self, request: Request<LockRequest>) -> Result<LockResponse, Status> {
        let caller = self.0.caller_of(&request).await?;
        let request = request.into_inner();
        let queue = Queue::open(&self.0, &caller, &request.name, request.lease).await?;
        let (entry, removal) = queue.enter(Bytes::new()).await?;
        let waited = queue.wait(&entry).await?;
        let checked = queue.check(&entry, LOCK_SESSION_EXPIRED).await?;
        removal.cancel();
        let header = if waited == Waited::Yes { checked } else { entry.header };
        Ok(LockResponse { header, key: entry.key })
    }
}

#[tonic::async_trait]
impl Lock for LockService {
    async fn lock(&self, request: Request<LockRequest>) -> Result<Response<LockResponse>, Status> {
        LockService::lock(self, request).await.map(Response::new).map_err(to_unknown)
    }

    async fn unlock(&self, request: Request<UnlockRequest>) -> Result<Response<UnlockResponse>, Status> {
        let caller = self.0.caller_of(&request).await;
        let delete = pb::DeleteRangeRequest { key: request.into_inner().key, ..Default::default() };
        let deleted = kv::delete_range(Arc::clone(&self.0), caller, delete).await.map_err(to_unknown)?;
        Ok(Response::new(UnlockResponse { header: deleted.header }))
    }
}
