//! Queues of locks and elections: keys with a common prefix, ordered by create revision.
//!
//! A caller enters a queue by putting the key `NAME/LEASE`, in which LEASE is the ID of its lease in hexadecimal
//! digits. The key with the smallest create revision is first. etcd's client library (and so etcdctl's `lock` and
//! `elect`) uses the same keys and therefore the same queues.
//!
//! A call that is cancelled or fails removes the key that it put, unless a later call with the same lease has taken that over,
//! or the key was first already when this call found it. If the outcome of the put is unknown, the key may remain.
//!
//! The services that use this module return every error as Unknown with etcd's text, as etcd does.

use std::{sync::Arc, time::Duration};

use bytes::Bytes;
use futures_util::StreamExt as _;
use prost::Message as _;
use tokio::time::sleep;
use tonic::{Code, Status};
use tracing::warn;

use super::{
    Context, kv,
    status::{Refusal, from_store, is_stopped},
    tasks::finish,
};
use orlop_core::{
    auth::Caller,
    store,
    supervise::{catch_panics, log_request_panic},
    types::{KeyRange, Revision, prefix_end},
    watch::{Flavor, Message, Messages, Outbox, Session, Spec},
};
use orlop_wire::proto::server::{
    etcdserverpb::{
        self as pb, compare::CompareResult, compare::CompareTarget, compare::TargetUnion, range_request::SortOrder,
        range_request::SortTarget, request_op, response_op,
    },
    mvccpb::{Event, KeyValue, event::EventType},
};

/// TTL in seconds of a lease that the server grants to a caller without one. It is not renewed.
const SERVER_LEASE_TTL_SECS: i64 = 60;
/// What panics of this module are logged with.
const ENTERING: &str = "entering a queue";
/// Pause before the server tries again to remove an entry.
const RETRY_PAUSE: Duration = Duration::from_secs(1);

/// Changes the code of an error to Unknown. A server that stops stays Unavailable, so that the client tries again.
pub(super) fn to_unknown(status: Status) -> Status {
    if is_stopped(&status) { status } else { Status::unknown(status.message()) }
}

/// A queue `NAME/`, and the lease of the caller's entries.
#[derive(Clone)]
pub(super) struct Queue {
    context: Arc<Context>,
    caller: Caller,
    prefix: Vec<u8>,
    lease: i64,
}

/// A key in a queue, as a call has put it.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: Bytes,
    pub(super) create_revision: i64,
    /// The revision at which this call put the key. A later call with the same lease puts it again.
    mod_revision: i64,
    /// The header of that transaction.
    pub(super) header: Option<pb::ResponseHeader>,
}

/// The result of [`Queue::create`].
enum Created {
    New(Entry, RemoveOnDrop),
    Found(KeyValue),
}

impl Queue {
    /// Opens a queue with the caller's lease, or with a new one.
    pub(super) async fn open(context: &Arc<Context>, caller: &Caller, name: &[u8], lease: i64) -> Result<Self, Status> {
        let lease = match lease {
            0 => context.store.grant(caller, None, SERVER_LEASE_TTL_SECS).await.map_err(from_store)?.id.0,
            lease => lease,
        };
        Ok(Self { context: Arc::clone(context), caller: caller.clone(), prefix: prefix(name), lease })
    }

    pub(super) fn lease(&self) -> i64 {
        self.lease
    }

    /// Adds the caller's key at the end of the queue, or takes over the existing one. Returns the entry, and what removes it in
    /// the background unless it is cancelled.
    ///
    /// # Cancel safety
    ///
    /// If the future is dropped while the key is written, that goes on, and the entry is removed afterwards.
    pub(super) async fn enter(&self, value: Bytes) -> Result<(Entry, RemoveOnDrop), Status> {
        // Go's client formats an ID with its sign.
        let sign = if self.lease < 0 { "-" } else { "" };
        let name = format!("{sign}{:x}", self.lease.unsigned_abs());
        let key = Bytes::from([&self.prefix[..], name.as_bytes()].concat());
        loop {
            let created = self.clone().create(key.clone(), value.clone());
            let found = match finish(&self.context, ENTERING, created).await? {
                Created::New(entry, removal) => return Ok((entry, removal)),
                Created::Found(found) => found,
            };
            // In a task of its own, so that a call that ended before does not take the key over.
            let taken = self.clone().take_over(found, value.clone());
            if let Some(entered) = finish(&self.context, ENTERING, taken).await? {
                return Ok(entered);
            }
        }
    }

    /// Puts the key unless it exists.
    async fn create(self, key: Bytes, value: Bytes) -> Result<Created, Status> {
        let get = pb::RangeRequest { key: key.clone(), ..Default::default() };
        let otherwise = vec![request_op::Request::RequestRange(get)];
        let put = self.put(&key, value);
        let response = txn_if(&self.context, &self.caller, created_at(&key, 0), vec![put], otherwise).await?;
        if let Some(found) = first_pair(response.responses)? {
            return Ok(Created::Found(found));
        }
        let head = response.header.as_ref().map_or(0, |header| header.revision);
        let entry = Entry { key, create_revision: head, mod_revision: head, header: response.header };
        let removal = RemoveOnDrop { entry: Some((self.context, entry.clone())) };
        Ok(Created::New(entry, removal))
    }

    /// Puts the key that was found again, unless it has changed since. The call that put it before may have been cancelled,
    /// and its removal must not take the key away from this call. If the key is first, its client may hold the lock: this
    /// call does not remove it then.
    async fn take_over(self, found: KeyValue, value: Bytes) -> Result<Option<(Entry, RemoveOnDrop)>, Status> {
        let first = request_op::Request::RequestRange(entry_request(&self.prefix, SortOrder::Ascend));
        let then = vec![first, self.put(&found.key, value)];
        let is_unchanged = modified_at(&found.key, found.mod_revision);
        let response = txn_if(&self.context, &self.caller, is_unchanged, then, Vec::new()).await?;
        if !response.succeeded {
            return Ok(None);
        }
        let is_first = first_pair(response.responses)?.is_some_and(|first| first.key == found.key);
        let mod_revision = response.header.as_ref().map_or(0, |header| header.revision);
        let entry =
            Entry { key: found.key, create_revision: found.create_revision, mod_revision, header: response.header };
        let removal = RemoveOnDrop { entry: (!is_first).then(|| (self.context, entry.clone())) };
        Ok(Some((entry, removal)))
    }

    fn put(&self, key: &Bytes, value: Bytes) -> request_op::Request {
        let put = pb::PutRequest { key: key.clone(), value, lease: self.lease, ..Default::default() };
        request_op::Request::RequestPut(put)
    }

    /// Waits until the entry is first. Returns whether it had to wait.
    pub(super) async fn wait(&self, entry: &Entry) -> Result<Waited, Status> {
        let mut waited = Waited::No;
        loop {
            let before = pb::RangeRequest {
                max_create_revision: entry.create_revision - 1,
                ..entry_request(&self.prefix, SortOrder::Descend)
            };
            let response = kv::range(Arc::clone(&self.context), Ok(self.caller.clone()), before).await?;
            let head = response.header.as_ref().map_or(0, |header| header.revision);
            let Some(last) = decode_pairs(response.kvs)?.pop() else { return Ok(waited) };
            waited = Waited::Yes;
            let mut watch = Watch::new(&self.context, KeyRange::from_wire(&last.key, b""), Revision(head).next());
            while watch.next().await?.r#type() != EventType::Delete {}
        }
    }

    /// Checks that the entry still exists: its lease may have ended, which deletes the key. The queue may then be empty even
    /// if the call did not wait. Returns the header of the read.
    ///
    /// # Errors
    ///
    /// `gone` if the entry does not exist.
    pub(super) async fn check(&self, entry: &Entry, gone: Refusal) -> Result<Option<pb::ResponseHeader>, Status> {
        let get = pb::RangeRequest { key: entry.key.clone(), ..Default::default() };
        let response = kv::range(Arc::clone(&self.context), Ok(self.caller.clone()), get).await?;
        match decode_pairs(response.kvs)?.pop() {
            Some(kv) if kv.create_revision == entry.create_revision => Ok(response.header),
            Some(_) | None => Err(gone.into()),
        }
    }
}

/// Whether the entry had to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    Yes,
    No,
}

/// Removes an entry from its queue when dropped, unless cancelled.
#[must_use]
pub(super) struct RemoveOnDrop {
    entry: Option<(Arc<Context>, Entry)>,
}

impl RemoveOnDrop {
    pub(super) fn cancel(mut self) {
        self.entry = None;
    }
}

impl Drop for RemoveOnDrop {
    fn drop(&mut self) {
        let Some((context, entry)) = self.entry.take() else { return };
        tokio::spawn(async move {
            if let Err(panic) = catch_panics(remove_with_retries(&context, &entry)).await {
                log_request_panic(&context.store.metrics().rpc.panics, "removing an entry of a queue", &panic);
            }
        });
    }
}

/// Removes an entry, unless a later call has taken it over. While the database is unavailable or the queue of writes is full,
/// it tries again: an entry that remains blocks its queue as long as its client keeps the lease alive.
async fn remove_with_retries(context: &Arc<Context>, entry: &Entry) {
    let (server, mut stopping) = (Caller::Server, context.stopping.clone());
    let remove = || remove_if(context, &server, modified_at(&entry.key, entry.mod_revision));
    let mut removed = remove().await;
    if let Err(status) = &removed {
        warn!(
            error = status.message(),
            "cannot remove the entry of a cancelled call from its queue; it remains until another attempt succeeds or its \
             lease expires"
        );
    }
    while let Err(status) = &removed
        && matches!(status.code(), Code::ResourceExhausted | Code::Unavailable)
    {
        tokio::select! {
            () = sleep(RETRY_PAUSE) => {}
            _ = stopping.wait_for(|stopping| *stopping) => return,
        }
        removed = remove().await;
    }
}

pub(super) fn prefix(name: &[u8]) -> Vec<u8> {
    [name, b"/"].concat()
}

/// Returns a request for the first key with the prefix in this order of create revisions.
fn entry_request(prefix: &[u8], order: SortOrder) -> pb::RangeRequest {
    pb::RangeRequest {
        key: Bytes::copy_from_slice(prefix),
        range_end: prefix_end(prefix).into(),
        limit: 1,
        sort_order: order.into(),
        sort_target: SortTarget::Create.into(),
        ..Default::default()
    }
}

/// Returns the header of the read, and the first entry.
pub(super) async fn oldest_entry(
    context: &Arc<Context>,
    caller: &Caller,
    prefix: &[u8],
) -> Result<(Option<pb::ResponseHeader>, Option<KeyValue>), Status> {
    let response = kv::range(Arc::clone(context), Ok(caller.clone()), entry_request(prefix, SortOrder::Ascend)).await?;
    Ok((response.header, decode_pairs(response.kvs)?.pop()))
}

/// Returns the condition that the key has this create revision; 0 means that it does not exist.
pub(super) fn created_at(key: &Bytes, revision: i64) -> pb::Compare {
    equal(key, CompareTarget::Create, TargetUnion::CreateRevision(revision))
}

/// Returns the condition that the key was last written at this revision.
fn modified_at(key: &Bytes, revision: i64) -> pb::Compare {
    equal(key, CompareTarget::Mod, TargetUnion::ModRevision(revision))
}

fn equal(key: &Bytes, target: CompareTarget, value: TargetUnion) -> pb::Compare {
    pb::Compare {
        result: CompareResult::Equal.into(),
        target: target.into(),
        key: key.clone(),
        target_union: Some(value),
        ..Default::default()
    }
}

/// Executes `then` if the condition holds.
pub(super) async fn txn_if(
    context: &Arc<Context>,
    caller: &Caller,
    condition: pb::Compare,
    then: Vec<request_op::Request>,
    otherwise: Vec<request_op::Request>,
) -> Result<pb::TxnResponse, Status> {
    let ops = |requests: Vec<_>| requests.into_iter().map(|request| pb::RequestOp { request: Some(request) }).collect();
    let request = pb::TxnRequest { compare: vec![condition], success: ops(then), failure: ops(otherwise) };
    kv::txn(Arc::clone(context), Ok(caller.clone()), request).await
}

/// Removes the key of the condition if that holds.
pub(super) async fn remove_if(
    context: &Arc<Context>,
    caller: &Caller,
    condition: pb::Compare,
) -> Result<pb::TxnResponse, Status> {
    let delete = pb::DeleteRangeRequest { key: condition.key.clone(), ..Default::default() };
    let delete = request_op::Request::RequestDeleteRange(delete);
    txn_if(context, caller, condition, vec![delete], Vec::new()).await
}

/// Returns the first pair of the first response, if that is a range.
fn first_pair(responses: Vec<pb::ResponseOp>) -> Result<Option<KeyValue>, Status> {
    let Some(pb::ResponseOp { response: Some(response_op::Response::ResponseRange(range)) }) =
        responses.into_iter().next()
    else {
        return Ok(None);
    };
    Ok(decode_pairs(range.kvs)?.into_iter().next())
}

fn decode_pairs(kvs: Vec<Bytes>) -> Result<Vec<KeyValue>, Status> {
    kvs.into_iter().map(|kv| KeyValue::decode(kv).map_err(|error| Status::data_loss(error.to_string()))).collect()
}

/// A watch inside the server.
pub(super) struct Watch {
    session: Session,
    outbox: Arc<Outbox>,
    messages: Messages,
    /// Received events that were not returned yet.
    events: std::vec::IntoIter<Event>,
    context: Arc<Context>,
}

impl Watch {
    pub(super) fn new(context: &Arc<Context>, range: KeyRange, start: Revision) -> Self {
        let store = &context.store;
        let outbox = Arc::new(store.hub().outbox());
        let messages = Messages::new(Arc::clone(&outbox));
        let mut session = Session::new(Arc::clone(store.hub()), Arc::clone(store.log()), Arc::clone(&outbox));
        session.create(Spec {
            id: None,
            range,
            start: Some(start),
            flavor: Flavor { prev_kv: false, puts: true, deletes: true },
            fragment: None,
            progress_notify: false,
        });
        Self { session, outbox, messages, events: Vec::new().into_iter(), context: Arc::clone(context) }
    }

    /// Returns the next event.
    ///
    /// # Errors
    ///
    /// If the event was compacted, the watch is refused because all watches use too much memory, or the server is stopping.
    pub(super) async fn next(&mut self) -> Result<Event, Status> {
        let mut stopping = self.context.stopping.clone();
        loop {
            // A read that has begun may have a connection to the database. It ends first, because the caller may not come
            // back for the next event.
            if !self.session.is_reading()
                && let Some(event) = self.events.next()
            {
                return Ok(event);
            }
            let has_events = self.events.len() > 0;
            tokio::select! {
                message = self.messages.next(), if !has_events => match message {
                    Some(Ok(Message::Events { events, .. })) => self.events = decode_events(&events)?.into_iter(),
                    Some(Ok(Message::Compacted { .. })) => return Err(from_store(store::Error::Compacted)),
                    Some(Ok(Message::Refused { .. })) => return Err(from_store(store::Error::TooManyRequests)),
                    Some(Ok(Message::Created { .. } | Message::Canceled { .. } | Message::Progress { .. })) => {}
                    Some(Err(_)) | None => return Err(from_store(store::Error::Stopped)),
                },
                () = self.outbox.notified() => self.session.handle_notifications(),
                advanced = self.session.advance(), if self.session.has_work() => match advanced {
                    // The received events are returned before the next attempt.
                    Err(_) if has_events => {}
                    advanced => advanced.map_err(store::Error::from).map_err(from_store)?,
                },
                _ = stopping.wait_for(|stopping| *stopping) => return Err(from_store(store::Error::Stopped)),
            }
        }
    }
}

/// Decodes concatenated `WatchResponse.events` fields.
fn decode_events(encoded: &[Bytes]) -> Result<Vec<Event>, Status> {
    let mut events = Vec::new();
    for bytes in encoded {
        let response = pb::WatchResponse::decode(bytes.clone());
        let response = response.map_err(|error| Status::data_loss(error.to_string()))?;
        for event in response.events {
            events.push(Event::decode(event).map_err(|error| Status::data_loss(error.to_string()))?);
        }
    }
    Ok(events)
}
