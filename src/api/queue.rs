//! Queues of locks and elections: keys below a prefix, ordered by age.
//!
//! A caller enters by putting a key named after its lease below `NAME/`; the key with the smallest create revision is
//! first. Clients that do the same themselves (etcdctl's `lock` and `elect`, etcd's client library) share the queues.
//! The services that use this module return every error as Unknown with etcd's text, as etcd does.

use std::sync::Arc;

use bytes::Bytes;
use futures_util::StreamExt as _;
use prost::Message as _;
use tonic::Status;
use tracing::warn;

use super::{Context, kv, status::from_store};
use orlop_core::{
    store,
    supervise::{catch_panics, log_request_panic},
    types::{KeyRange, Revision},
    watch::{Flavor, Message, Messages, Outbox, Session, Spec},
};
use orlop_wire::proto::server::{
    etcdserverpb::{
        self as pb, compare::CompareResult, compare::CompareTarget, compare::TargetUnion, range_request::SortOrder,
        range_request::SortTarget, request_op, response_op,
    },
    mvccpb::{Event, KeyValue, event::EventType},
};

/// TTL in seconds of a lease that the server grants to a caller without one. Nobody renews it.
const OWN_LEASE_TTL_SECS: i64 = 60;

pub(super) fn unknown(status: Status) -> Status {
    Status::unknown(status.message())
}

/// A queue `NAME/`, and the lease of the caller's entries.
pub(super) struct Queue {
    context: Arc<Context>,
    prefix: Vec<u8>,
    lease: i64,
}

/// A key in a queue.
#[derive(Clone, Debug)]
pub(super) struct Entry {
    pub(super) key: Bytes,
    pub(super) create_revision: i64,
    /// The revision of the transaction that created or found the entry.
    pub(super) header: Option<pb::ResponseHeader>,
    /// Its value, if it existed before.
    pub(super) found: Option<Bytes>,
}

impl Queue {
    /// Opens a queue with the caller's lease, or with a new one.
    pub(super) async fn join(context: &Arc<Context>, name: &[u8], lease: i64) -> Result<Self, Status> {
        let lease = match lease {
            0 => context.store.grant(None, OWN_LEASE_TTL_SECS).await.map_err(from_store)?.id.0,
            lease => lease,
        };
        Ok(Self { context: Arc::clone(context), prefix: prefix(name), lease })
    }

    pub(super) fn lease(&self) -> i64 {
        self.lease
    }

    /// Adds the caller's key at the end, or finds it.
    pub(super) async fn enter(&self, value: Bytes) -> Result<Entry, Status> {
        let key = Bytes::from([&self.prefix[..], format!("{:x}", self.lease).as_bytes()].concat());
        let put = pb::PutRequest { key: key.clone(), value, lease: self.lease, ..Default::default() };
        let get = pb::RangeRequest { key: key.clone(), ..Default::default() };
        let answer = guarded(
            &self.context,
            &key,
            0,
            request_op::Request::RequestPut(put),
            Some(request_op::Request::RequestRange(get)),
        )
        .await?;
        let head = answer.header.as_ref().map_or(0, |header| header.revision);
        let mut entry = Entry { key, create_revision: head, header: answer.header, found: None };
        if !answer.succeeded
            && let Some(pb::ResponseOp { response: Some(response_op::Response::ResponseRange(range)) }) =
                answer.responses.into_iter().next()
            && let Some(kv) = decoded(range.kvs)?.pop()
        {
            entry.create_revision = kv.create_revision;
            entry.found = Some(kv.value);
        }
        Ok(entry)
    }

    /// Waits until the entry is first. If the caller stops waiting, the entry is removed. Returns whether it had to
    /// wait.
    pub(super) async fn wait(&self, entry: &Entry) -> Result<Waited, Status> {
        let leave = Leave { entry: Some((Arc::clone(&self.context), entry.clone())) };
        let mut waited = Waited::No;
        loop {
            let before = pb::RangeRequest {
                max_create_revision: entry.create_revision - 1,
                ..newest(&self.prefix, SortOrder::Descend)
            };
            let answer = kv::range(Arc::clone(&self.context), before).await?;
            let head = answer.header.as_ref().map_or(0, |header| header.revision);
            let Some(last) = decoded(answer.kvs)?.pop() else { break };
            waited = Waited::Yes;
            let mut watch = Watch::new(&self.context, KeyRange::from_wire(&last.key, b""), Revision(head).next());
            while watch.next().await?.r#type() != EventType::Delete {}
        }
        leave.cancel();
        Ok(waited)
    }
}

/// Whether the entry had to wait.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Waited {
    Yes,
    No,
}

/// Removes a waiting entry when its caller stops waiting.
struct Leave {
    entry: Option<(Arc<Context>, Entry)>,
}

impl Leave {
    fn cancel(mut self) {
        self.entry = None;
    }
}

impl Drop for Leave {
    fn drop(&mut self) {
        let Some((context, entry)) = self.entry.take() else { return };
        tokio::spawn(async move {
            match catch_panics(remove(&context, &entry.key, entry.create_revision)).await {
                Ok(Ok(_)) => {}
                Ok(Err(status)) => {
                    warn!(
                        error = status.message(),
                        "cannot remove an abandoned entry of a queue; it remains until its lease expires"
                    );
                }
                Err(panic) => {
                    log_request_panic(&context.store.metrics().rpc.panics, "removing an entry of a queue", &panic)
                }
            }
        });
    }
}

pub(super) fn prefix(name: &[u8]) -> Vec<u8> {
    [name, b"/"].concat()
}

/// Returns the oldest or the newest key below the prefix.
fn newest(prefix: &[u8], order: SortOrder) -> pb::RangeRequest {
    pb::RangeRequest {
        key: Bytes::copy_from_slice(prefix),
        range_end: prefix_end(prefix),
        limit: 1,
        sort_order: order.into(),
        sort_target: SortTarget::Create.into(),
        ..Default::default()
    }
}

/// Returns the range of all keys with this prefix.
pub(super) fn below(prefix: &[u8]) -> KeyRange {
    KeyRange::from_wire(prefix, &prefix_end(prefix))
}

fn prefix_end(prefix: &[u8]) -> Bytes {
    let mut end = prefix.to_vec();
    while let Some(last) = end.pop() {
        if last < u8::MAX {
            end.push(last + 1);
            return end.into();
        }
    }
    Bytes::from_static(&[0])
}

/// Returns the first entry and the header of the read.
pub(super) async fn first(
    context: &Arc<Context>,
    prefix: &[u8],
) -> Result<(Option<pb::ResponseHeader>, Option<KeyValue>), Status> {
    let answer = kv::range(Arc::clone(context), newest(prefix, SortOrder::Ascend)).await?;
    Ok((answer.header, decoded(answer.kvs)?.pop()))
}

/// Executes `then` if the key has this create revision; 0 means that it must not exist.
pub(super) async fn guarded(
    context: &Arc<Context>,
    key: &Bytes,
    create_revision: i64,
    then: request_op::Request,
    otherwise: Option<request_op::Request>,
) -> Result<pb::TxnResponse, Status> {
    let compare = pb::Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Create.into(),
        key: key.clone(),
        target_union: Some(TargetUnion::CreateRevision(create_revision)),
        ..Default::default()
    };
    let op = |request| pb::RequestOp { request: Some(request) };
    let request = pb::TxnRequest {
        compare: vec![compare],
        success: vec![op(then)],
        failure: otherwise.map(op).into_iter().collect(),
    };
    kv::txn(Arc::clone(context), request).await
}

/// Removes an entry, unless its key belongs to another entry by now.
pub(super) async fn remove(
    context: &Arc<Context>,
    key: &Bytes,
    create_revision: i64,
) -> Result<pb::TxnResponse, Status> {
    let delete = pb::DeleteRangeRequest { key: key.clone(), ..Default::default() };
    guarded(context, key, create_revision, request_op::Request::RequestDeleteRange(delete), None).await
}

fn decoded(kvs: Vec<Bytes>) -> Result<Vec<KeyValue>, Status> {
    kvs.into_iter().map(|kv| KeyValue::decode(kv).map_err(|error| Status::data_loss(error.to_string()))).collect()
}

/// A watch inside the server.
pub(super) struct Watch {
    session: Session,
    outbox: Arc<Outbox>,
    messages: Messages,
    /// Events that arrived together and were not returned yet.
    events: std::vec::IntoIter<Event>,
    context: Arc<Context>,
}

impl Watch {
    pub(super) fn new(context: &Arc<Context>, range: KeyRange, start: Revision) -> Self {
        let outbox = Arc::new(Outbox::new());
        let messages = Messages::new(Arc::clone(&outbox));
        let store = &context.store;
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
    /// If the event was compacted, or the server stops.
    pub(super) async fn next(&mut self) -> Result<Event, Status> {
        let mut stopping = self.context.stopping.clone();
        loop {
            if let Some(event) = self.events.next() {
                return Ok(event);
            }
            tokio::select! {
                message = self.messages.next() => match message {
                    Some(Ok(Message::Events { events, .. })) => self.events = decoded_events(&events)?.into_iter(),
                    Some(Ok(Message::Compacted { .. })) => return Err(from_store(store::Error::Compacted)),
                    Some(Ok(_)) => {}
                    Some(Err(_)) | None => return Err(from_store(store::Error::Stopped)),
                },
                () = self.outbox.notified() => self.session.handle_notifications(),
                advanced = self.session.advance(), if self.session.has_work() => {
                    advanced.map_err(store::Error::from).map_err(from_store)?;
                }
                _ = stopping.wait_for(|stopping| *stopping) => return Err(from_store(store::Error::Stopped)),
            }
        }
    }
}

/// Concatenated `WatchResponse.events` fields.
fn decoded_events(encoded: &[Bytes]) -> Result<Vec<Event>, Status> {
    let mut events = Vec::new();
    for bytes in encoded {
        let answer = pb::WatchResponse::decode(bytes.clone());
        let answer = answer.map_err(|error| Status::data_loss(error.to_string()))?;
        for event in answer.events {
            events.push(Event::decode(event).map_err(|error| Status::data_loss(error.to_string()))?);
        }
    }
    Ok(events)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn prefix_ends_where_the_next_one_begins() {
        for (prefix, end) in [(&b"a/"[..], &b"a0"[..]), (b"a\xff", b"b"), (b"\xff\xff", b"\0")] {
            assert_eq!(prefix_end(prefix), end);
        }
    }
}
