//! Orlop's own History service: past states and changes.

use std::sync::Arc;

use tonic::{Request, Response, Status};

use super::{Context, Responses, convert::key_range, status::from_store, tasks::unfold};
use orlop_core::{
    auth::Caller,
    log::{Moment, Order, PastRow, Written},
    store::{PastChange, PastError},
    types::{EncodedKv, Key, KeyRange, Revision, RowId, Version},
};
use orlop_wire::proto::server::orlopb::{self as pb, history_server::History};

/// The service. It is a type of its own, because a trait of etcd has methods of the same names.
#[derive(Clone)]
pub(super) struct HistoryService(pub(super) Arc<Context>);

#[tonic::async_trait]
impl History for HistoryService {
    async fn state(
        &self,
        request: Request<pb::HistoryStateRequest>,
    ) -> Result<Response<pb::HistoryStateResponse>, Status> {
        let caller = self.0.caller_of(&request).await?;
        self.0.store.check_user(&caller).await.map_err(from_store)?;
        let state = self.0.store.history().await.map_err(from_past)?;
        Ok(Response::new(pb::HistoryStateResponse {
            revision: state.head.0,
            compact_revision: state.compact_revision.map_or(-1, |revision| revision.0),
            first_revision: state.first.0,
            archived_rows: state.rows.cast_signed(),
            archived_bytes: state.bytes.cast_signed(),
            retention_seconds: state.retention.map_or(0, |retention| retention.as_secs().cast_signed()),
            first_moment: state.first_moment.map(moment),
            now_unix_ms: state.now_ms,
        }))
    }

    async fn moment(
        &self,
        request: Request<pb::HistoryMomentRequest>,
    ) -> Result<Response<pb::HistoryMomentResponse>, Status> {
        let caller = self.0.caller_of(&request).await?;
        self.0.store.check_user(&caller).await.map_err(from_store)?;
        let found = self.0.store.moment_at(request.get_ref().unix_ms).await.map_err(from_past)?;
        Ok(Response::new(pb::HistoryMomentResponse {
            moment: found.map(|found| moment(found.moment)),
            may_lack_revisions: found.is_some_and(|found| found.may_lack_revisions),
        }))
    }

    type PairsStream = Responses<pb::HistoryPairsResponse>;

    async fn pairs(&self, request: Request<pb::HistoryPairsRequest>) -> Result<Response<Self::PairsStream>, Status> {
        let caller = self.0.caller_of(&request).await?;
        let request = request.into_inner();
        let range = key_range(&request.key, &request.range_end)?;
        let at = self.resolve(request.revision, 0).await?;
        let walk = Pairs { context: Arc::clone(&self.0), caller, range, at, after: Start::First };
        Ok(Response::new(unfold(&self.0, "/orlopb.History/Pairs", walk, Pairs::next)))
    }

    type ChangesStream = Responses<pb::HistoryChangesResponse>;

    async fn changes(
        &self,
        request: Request<pb::HistoryChangesRequest>,
    ) -> Result<Response<Self::ChangesStream>, Status> {
        let caller = self.0.caller_of(&request).await?;
        let request = request.into_inner();
        let range = key_range(&request.key, &request.range_end)?;
        let order = if request.newest_first { Order::NewestFirst } else { Order::OldestFirst };
        if order == Order::NewestFirst && !matches!(range, KeyRange::Single(_)) {
            return Err(Status::invalid_argument("orlop: newest_first is only for a single key, without range_end"));
        }
        if request.limit < 0 {
            return Err(Status::invalid_argument("orlop: limit must not be negative"));
        }
        let first = match request.from_revision {
            0 => self.0.store.history().await.map_err(from_past)?.first,
            from => Revision(from),
        };
        let to = self.resolve(request.to_revision, first.0).await?;
        let rows = (RowId::new(first, 0), RowId::new(to, u32::MAX));
        let left = usize::try_from(request.limit).ok().filter(|limit| *limit > 0).unwrap_or(usize::MAX);
        let walk = Changes { context: Arc::clone(&self.0), caller, range, rows: Some(rows), order, left };
        Ok(Response::new(unfold(&self.0, "/orlopb.History/Changes", walk, Changes::next)))
    }

    type SnapshotStream = Responses<pb::HistorySnapshotResponse>;

    async fn snapshot(
        &self,
        request: Request<pb::HistorySnapshotRequest>,
    ) -> Result<Response<Self::SnapshotStream>, Status> {
        self.0.check_root(&request).await?;
        self.0.snapshots_with_archive.send().await
    }
}

impl HistoryService {
    /// Returns the revision of a request, at most the head; 0 means the head. Every write that was acknowledged before is
    /// at or below the head.
    async fn resolve(&self, revision: i64, least: i64) -> Result<Revision, Status> {
        self.0.store.confirm().await.map_err(from_store)?;
        let head = self.0.store.head();
        match revision {
            0 => Ok(head),
            revision if revision < least.max(1) => Err(Status::invalid_argument(format!(
                "orlop: revision {revision} is invalid; it must be at least {}",
                least.max(1)
            ))),
            revision if revision > head.0 => Err(from_store(orlop_core::store::Error::FutureRevision)),
            revision => Ok(Revision(revision)),
        }
    }
}

/// Where a page begins.
enum Start {
    First,
    After(Key),
    /// The last page was returned.
    End,
}

/// A state that is sent page by page.
struct Pairs {
    context: Arc<Context>,
    caller: Caller,
    range: KeyRange,
    at: Revision,
    after: Start,
}

impl Pairs {
    async fn next(mut self) -> Result<Option<(pb::HistoryPairsResponse, Self)>, Status> {
        self.context.check_running()?;
        let after = match &self.after {
            Start::First => None,
            Start::After(key) => Some(key),
            Start::End => return Ok(None),
        };
        let page = self.context.store.past_pairs(&self.caller, &self.range, after, self.at).await.map_err(from_past)?;
        self.after = page.after.map_or(Start::End, Start::After);
        let kvs = page.pairs.into_iter().map(EncodedKv::into_bytes).collect();
        Ok(Some((pb::HistoryPairsResponse { revision: self.at.0, kvs }, self)))
    }
}

/// Changes that are sent page by page.
struct Changes {
    context: Arc<Context>,
    caller: Caller,
    range: KeyRange,
    /// The rows that are left; `None` after the last page.
    rows: Option<(RowId, RowId)>,
    order: Order,
    /// Number of changes that may still be sent.
    left: usize,
}

impl Changes {
    async fn next(mut self) -> Result<Option<(pb::HistoryChangesResponse, Self)>, Status> {
        loop {
            self.context.check_running()?;
            let Some((from, to)) = self.rows else { return Ok(None) };
            let store = &self.context.store;
            let page = store.past_changes(&self.caller, &self.range, (from, to), self.order, self.left).await;
            let page = page.map_err(from_past)?;
            self.left -= page.changes.len();
            self.rows = page.next.filter(|_| self.left > 0).map(|next| match self.order {
                Order::OldestFirst => (next, to),
                Order::NewestFirst => (from, next),
            });
            // A page of a long log may be empty.
            if !page.changes.is_empty() {
                let changes = page.changes.into_iter().map(change).collect();
                return Ok(Some((pb::HistoryChangesResponse { changes }, self)));
            }
            self.context.steps().request().await;
        }
    }
}

impl Context {
    /// Ends a stream when the server stops.
    fn check_running(&self) -> Result<(), Status> {
        if *self.stopping.borrow() { Err(from_store(orlop_core::store::Error::Stopped)) } else { Ok(()) }
    }
}

fn moment(moment: Moment) -> pb::HistoryMoment {
    pb::HistoryMoment { revision: moment.revision.0, unix_ms: moment.unix_ms }
}

fn change(change: PastChange) -> pb::HistoryChange {
    let PastChange { row: PastRow { row, key, kv }, written } = change;
    let deleted = kv.is_none();
    let kv = kv.unwrap_or_else(|| {
        let version = Version { row, create_revision: Revision(0), version: 0 };
        EncodedKv::new(&key, version, &[], None)
    });
    let Written { unix_ms, is_latest } = written.unwrap_or(Written { unix_ms: 0, is_latest: false });
    pb::HistoryChange { kv: kv.into_bytes(), deleted, unix_ms, time_is_latest: is_latest }
}

fn from_past(error: PastError) -> Status {
    match error {
        PastError::Store(error) => from_store(error),
        error @ PastError::Begins { .. } => Status::out_of_range(format!("orlop: {error}")),
        error @ PastError::Copying { .. } => Status::unavailable(format!("orlop: {error}")),
    }
}
