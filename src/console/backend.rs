//! What the pages need from a server, Orlop or etcd, over one shared connection.
//!
//! Orlop's own services are used where they exist. etcd has no names below a prefix, so keys are listed and the rest of
//! each segment is skipped; and no history, so the versions of a key are read one by one, back to its creation or the
//! compact revision.

pub(super) mod deleted;
mod failure;

use std::{convert::Infallible, future::Future, sync::Arc, time::Duration};

use futures_util::{StreamExt as _, stream};
use http::HeaderValue;
use orlop_client::{Client, Endpoint, ServerFlags};
use orlop_core::types::{child_prefix, prefix_end};
use orlop_objects::{LastManagers, Manager, Managers};
use orlop_wire::proto::client::{
    etcdserverpb::{
        AuthStatusRequest, AuthenticateRequest, Compare, PutRequest, RangeRequest, RequestOp, TxnRequest,
        WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
        compare::{CompareResult, CompareTarget, TargetUnion},
        request_op::Request,
        watch_request::RequestUnion,
    },
    mvccpb::KeyValue,
    orlopb::{ChildrenRequest, HistoryChange, HistoryChangesRequest, HistoryPairsRequest, NamedChild},
};
use tokio::{
    io::DuplexStream,
    sync::{Mutex, oneshot},
    time::{sleep, timeout},
};
use tonic::{Code, Status, Streaming};

pub(super) use self::failure::Failure;
use super::limits::Renderer;

/// Maximum time of a request to the server.
const REQUEST_MAX: Duration = Duration::from_secs(10);
/// Time between two requests for the progress of a watch.
const PROGRESS_PAUSE: Duration = Duration::from_secs(10);
/// Bytes that the pipe to a server in the same process buffers.
const PIPE_BYTES: usize = 64 << 10;
/// Keys per request of a listing, and the maximum number of requests for one page of names, for etcd.
const LISTED_KEYS: i64 = 200;
const LISTINGS_MAX: usize = 60;

/// The server that the pages are about.
pub(super) struct Backend {
    place: Place,
    /// Opened when it is needed, and again when it is lost.
    shared: Mutex<Option<Client>>,
}

/// Serves a connection in the same process.
pub type ServePipe = Arc<dyn Fn(DuplexStream) + Send + Sync>;

pub(super) enum Place {
    Remote(Box<ServerFlags>),
    /// The server of this process.
    Local(Endpoint, ServePipe),
}

impl Backend {
    pub fn new(place: Place) -> Self {
        Self { place, shared: Mutex::default() }
    }

    /// Returns the URL of the server.
    pub fn endpoint(&self) -> String {
        match &self.place {
            Place::Remote(flags) => flags.endpoint().to_string(),
            Place::Local(endpoint, _) => endpoint.to_string(),
        }
    }

    /// Returns the name that the form to log in suggests.
    pub fn user(&self) -> Option<String> {
        match &self.place {
            Place::Remote(flags) => flags.user(),
            Place::Local(..) => None,
        }
    }

    /// Returns a client without a token.
    pub async fn client(&self) -> Result<Client, Failure> {
        let mut shared = self.shared.lock().await;
        if let Some(client) = shared.as_ref().filter(|client| !client.is_lost()) {
            return Ok(client.clone());
        }
        let client = match &self.place {
            Place::Remote(flags) => flags.connect_without_login().await?,
            Place::Local(endpoint, serve) => {
                let (ours, theirs) = tokio::io::duplex(PIPE_BYTES);
                serve(theirs);
                Client::over(ours, endpoint).await?
            }
        };
        Ok(shared.insert(client).clone())
    }

    /// Returns whether users have to log in.
    pub async fn is_auth_enabled(&self, client: &Client) -> Result<bool, Failure> {
        let mut auth = client.auth();
        let failure = match within(auth.auth_status(AuthStatusRequest {})).await {
            Ok(status) => return Ok(status.into_inner().enabled),
            // etcd before 3.5 reports it only in the answer to a login.
            Err(status) if status.code() == Code::Unimplemented => {
                match within(auth.authenticate(AuthenticateRequest::default())).await {
                    Err(status) if status.code() == Code::FailedPrecondition => return Ok(false),
                    // There is no user without a name.
                    Err(status) if status.code() == Code::InvalidArgument => return Ok(true),
                    Err(status) => status,
                    Ok(_) => return Ok(true),
                }
            }
            Err(status) => status,
        };
        failure::must_log_in(failure)
    }

    /// Returns a token for a user; `None` if authentication is disabled.
    pub async fn log_in(&self, name: String, password: String) -> Result<Option<HeaderValue>, LogInError> {
        let client = self.client().await.map_err(LogInError::Failed)?;
        let mut auth = client.auth();
        match within(auth.authenticate(AuthenticateRequest { name, password })).await {
            Ok(response) => match HeaderValue::try_from(response.into_inner().token) {
                Ok(token) => Ok(Some(token)),
                Err(error) => Err(LogInError::Failed(Failure::Unavailable(error.to_string()))),
            },
            Err(status) if status.code() == Code::FailedPrecondition => Ok(None),
            Err(status) if status.code() == Code::Unavailable => Err(LogInError::Failed(status.into())),
            Err(status) => Err(LogInError::Refused(status.message().to_owned())),
        }
    }
}

pub(super) enum LogInError {
    /// The server's reason.
    Refused(String),
    Failed(Failure),
}

/// Limits the time of a request.
async fn within<T>(request: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let answer = timeout(REQUEST_MAX, request).await;
    answer.unwrap_or_else(|_| Err(Status::unavailable(format!("no answer within {} s", REQUEST_MAX.as_secs()))))
}

/// A path segment below a prefix.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Name {
    pub name: Vec<u8>,
    pub is_prefix: bool,
}

/// A page of names.
pub(super) struct Names {
    pub names: Vec<Name>,
    pub more: bool,
    /// Whether the server is an Orlop, and so knows keys that were deleted.
    pub has_history: bool,
}

/// Returns names below a prefix, after one of them. There are fewer than `limit` if they are long.
pub(super) async fn names(client: &Client, prefix: &[u8], after: &[u8], limit: u32) -> Result<Names, Failure> {
    let request = ChildrenRequest { prefix: prefix.to_vec().into(), after: after.to_vec().into(), limit };
    match within(client.insight().children(request)).await {
        Ok(page) => {
            let page = page.into_inner();
            let name = |child: NamedChild| Name { name: child.name.into(), is_prefix: child.is_prefix };
            let names = page.children.into_iter().map(name).collect();
            Ok(Names { names, more: page.more, has_history: true })
        }
        Err(status) if status.code() == Code::Unimplemented => list_names(client, prefix, after, limit as usize).await,
        Err(status) => Err(status.into()),
    }
}

async fn list_names(client: &Client, prefix: &[u8], after: &[u8], limit: usize) -> Result<Names, Failure> {
    let page = |names: Vec<Name>, more: bool| Ok(Names { names, more, has_history: false });
    let end = prefix_end(prefix);
    let mut start = match after {
        [] => prefix.to_vec(),
        [.., b'/'] => prefix_end(after),
        _ => [after, &[0]].concat(),
    };
    let mut names: Vec<Name> = Vec::new();
    for _ in 0..LISTINGS_MAX {
        if start == [0] && !prefix.is_empty() || start == end && end != [0] {
            return page(names, false);
        }
        let request = RangeRequest {
            key: if start.is_empty() { vec![0].into() } else { start.clone().into() },
            range_end: end.clone().into(),
            limit: LISTED_KEYS,
            keys_only: true,
            serializable: true,
            ..RangeRequest::default()
        };
        let listed = within(client.kv().range(request)).await?.into_inner();
        for kv in &listed.kvs {
            let child = child_prefix(&kv.key, prefix.len());
            let name = child.unwrap_or(&kv.key);
            if names.last().is_none_or(|last| last.name != name) {
                names.push(Name { name: name.to_vec(), is_prefix: child.is_some() });
            }
        }
        if names.len() > limit {
            names.truncate(limit);
            return page(names, true);
        }
        match names.last().filter(|_| listed.more) {
            Some(last) if last.is_prefix => start = prefix_end(&last.name),
            Some(last) => start = [&last.name, &[0][..]].concat(),
            None => return page(names, false),
        }
    }
    page(names, true)
}

/// Returns the pair of a key at a revision, 0: the newest one; `None` if it does not exist there.
pub(super) async fn pair(client: &Client, key: &[u8], revision: i64) -> Result<Option<KeyValue>, Failure> {
    Ok(pair_at(client, key, revision).await?.0)
}

/// Returns the pair, and the revision that was read.
async fn pair_at(client: &Client, key: &[u8], revision: i64) -> Result<(Option<KeyValue>, i64), Failure> {
    let request = RangeRequest { key: key.to_vec().into(), revision, ..RangeRequest::default() };
    match within(client.kv().range(request)).await {
        Ok(answer) => {
            let answer = answer.into_inner();
            let head = answer.header.map_or(0, |header| header.revision);
            Ok((answer.kvs.into_iter().next(), if revision == 0 { head } else { revision }))
        }
        // Compacted revisions may be in the history.
        Err(compacted) if compacted.code() == Code::OutOfRange && revision > 0 => {
            let request = HistoryPairsRequest { key: key.to_vec().into(), range_end: Vec::new().into(), revision };
            let read = async {
                let mut pages = client.history().pairs(request).await?.into_inner();
                let page = pages.message().await?;
                Ok(page.and_then(|page| page.kvs.into_iter().next()))
            };
            match within(read).await {
                Err(status) if status.code() == Code::Unimplemented => Err(compacted.into()),
                read => Ok((read?, revision)),
            }
        }
        Err(status) => Err(status.into()),
    }
}

/// One change of a key. It does not keep the pair: a key and a value share the memory of the whole message in which they
/// arrived.
#[derive(Debug)]
pub(super) struct Version {
    pub mod_revision: i64,
    /// Number of changes since the key was created.
    pub version: i64,
    /// Length of the value in bytes.
    pub value_len: u64,
    pub is_delete: bool,
    /// A revision at which it is the newest version and can be read. Its own revision may be compacted.
    pub read_at: i64,
    /// Unix time in milliseconds; `None`: not known.
    pub unix_ms: Option<i64>,
    /// Whether it was written then or before.
    pub time_is_latest: bool,
    /// The field managers that wrote it, as far as that is known. [`name_writers`] sets them.
    pub managers: Vec<Manager>,
    /// The managers in its value.
    in_value: Managers,
}

impl Version {
    /// Returns the version that a read at `read_at` found.
    fn of(kv: &KeyValue, read_at: i64) -> Self {
        Self {
            mod_revision: kv.mod_revision,
            version: kv.version,
            value_len: kv.value.len() as u64,
            is_delete: false,
            read_at,
            unix_ms: None,
            time_is_latest: false,
            managers: Vec::new(),
            in_value: Managers::of(&kv.value),
        }
    }

    fn of_change(change: HistoryChange) -> Self {
        let kv = change.kv.unwrap_or_default();
        Self {
            is_delete: change.deleted,
            unix_ms: (change.unix_ms > 0).then_some(change.unix_ms),
            time_is_latest: change.time_is_latest,
            ..Self::of(&kv, kv.mod_revision)
        }
    }
}

/// The changes of a key, the newest first.
pub(super) struct Timeline {
    pub versions: Vec<Version>,
    pub more: bool,
    /// Whether the server has no history, so that versions before the key's last deletion are not found.
    pub since_creation: bool,
}

/// Sets who wrote each of the versions of a key, the newest first.
fn name_writers(versions: &mut [Version]) {
    let mut last = LastManagers::Unknown;
    for version in versions.iter_mut().rev().filter(|version| !version.is_delete) {
        if version.version == 1 {
            last.begin();
        }
        version.managers = last.advance(std::mem::take(&mut version.in_value), version.unix_ms);
    }
}

/// Returns the changes of a key up to a revision, 0: the newest one. `renderer` reads the values.
pub(super) async fn timeline(
    client: &Client,
    key: &[u8],
    to: i64,
    limit: usize,
    renderer: &Renderer,
) -> Result<Timeline, Failure> {
    let request = HistoryChangesRequest {
        key: key.to_vec().into(),
        to_revision: to,
        newest_first: true,
        limit: limit as i64 + 1,
        ..HistoryChangesRequest::default()
    };
    let read = async {
        let mut pages = client.history().changes(request).await?.into_inner();
        let mut versions: Vec<Version> = Vec::new();
        while let Some(page) = pages.message().await? {
            let bytes = page.changes.iter().flat_map(|change| &change.kv).map(|kv| kv.value.len()).sum::<usize>();
            let work = move || -> Vec<Version> { page.changes.into_iter().map(Version::of_change).collect() };
            let found = renderer.run(bytes, work).await;
            versions.extend(found.map_err(|_| Status::unavailable("the process stops"))?);
        }
        Ok(versions)
    };
    let mut versions = match within(read).await {
        Err(status) if status.code() == Code::Unimplemented => {
            return walk_back(client, key, to, limit, renderer).await;
        }
        versions => versions?,
    };
    let more = versions.len() > limit;
    let is_complete = versions.last().is_some_and(|last| last.version == 1);
    if !more && !is_complete {
        // The change that made the first readable version is compacted, but not the version.
        let before = versions.last().map_or(to, |last| last.mod_revision - 1);
        match pair_at(client, key, before).await {
            Ok((Some(kv), read_at)) => versions.push(read_version(kv, read_at, renderer).await?),
            Ok((None, _)) | Err(Failure::Missing(_)) => {}
            Err(failure) => return Err(failure),
        }
    }
    name_writers(&mut versions);
    if more {
        versions.truncate(limit);
    }
    Ok(Timeline { versions, more, since_creation: false })
}

async fn read_version(kv: KeyValue, read_at: i64, renderer: &Renderer) -> Result<Version, Failure> {
    renderer.run(kv.value.len(), move || Version::of(&kv, read_at)).await
}

/// Reads the versions of a key one by one.
async fn walk_back(
    client: &Client,
    key: &[u8],
    to: i64,
    limit: usize,
    renderer: &Renderer,
) -> Result<Timeline, Failure> {
    let mut versions: Vec<Version> = Vec::new();
    let (mut at, mut more) = (to, false);
    loop {
        match pair_at(client, key, at).await {
            Ok((Some(kv), read_at)) => {
                let is_first = kv.mod_revision <= kv.create_revision;
                at = kv.mod_revision - 1;
                versions.push(read_version(kv, read_at, renderer).await?);
                more = !is_first && versions.len() == limit;
                if is_first || more {
                    break;
                }
            }
            // Older versions were compacted.
            Ok((None, _)) | Err(Failure::Missing(_)) => break,
            Err(failure) => return Err(failure),
        }
    }
    name_writers(&mut versions);
    Ok(Timeline { versions, more, since_creation: true })
}

/// An open watch. It ends when it is dropped.
pub(super) struct Watch {
    pub responses: Streaming<WatchResponse>,
    /// The newest revision when it was opened.
    pub head: i64,
    /// The requests end when it is dropped. Without that, the call would stay open although nobody reads its responses.
    _requests: oneshot::Sender<Infallible>,
}

/// Opens a watch of the keys below a prefix, for changes after a revision; 0: after the newest one. The server refuses it
/// unless the user may read all of the keys. The watch also receives its progress: responses without events, with the
/// revision up to which all events were sent. `progress_notify` would be less frequent than compactions: the server's
/// default interval is 10 minutes, and kube-apiserver compacts every 5.
pub(super) async fn watch(client: &Client, prefix: &[u8], after: i64) -> Result<Watch, Failure> {
    let create = WatchCreateRequest {
        key: if prefix.is_empty() { vec![0].into() } else { prefix.to_vec().into() },
        range_end: prefix_end(prefix).into(),
        start_revision: if after > 0 { after.saturating_add(1) } else { 0 },
        ..WatchCreateRequest::default()
    };
    let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    let progress = stream::unfold((), |()| async {
        sleep(PROGRESS_PAUSE).await;
        Some((WatchRequest { request_union: Some(RequestUnion::ProgressRequest(WatchProgressRequest {})) }, ()))
    });
    let (guard, dropped) = oneshot::channel::<Infallible>();
    let requests = stream::iter([request]).chain(progress).take_until(dropped);
    let open = async {
        let mut responses = client.watch().watch(requests).await?.into_inner();
        let created = responses.message().await?;
        Ok((responses, created))
    };
    match within(open).await? {
        (responses, Some(created)) if !created.canceled => {
            let head = created.header.map_or(0, |header| header.revision);
            Ok(Watch { responses, head, _requests: guard })
        }
        (_, Some(refused)) => Err(Failure::of_text(refused.cancel_reason)),
        (_, None) => Err(Failure::Unavailable("the watch ended".to_owned())),
    }
}

/// The result of a conditional write.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Written {
    At(i64),
    /// Nothing was written, because the key has changed.
    Changed,
}

/// Writes a value if the newest change of the key is `expected`; 0: if it does not exist. The key keeps its lease.
pub(super) async fn put_if(client: &Client, key: &[u8], value: &[u8], expected: i64) -> Result<Written, Failure> {
    let compare = Compare {
        result: CompareResult::Equal.into(),
        target: CompareTarget::Mod.into(),
        key: key.to_vec().into(),
        target_union: Some(TargetUnion::ModRevision(expected)),
        ..Compare::default()
    };
    let put = PutRequest {
        key: key.to_vec().into(),
        value: value.to_vec().into(),
        ignore_lease: expected > 0,
        ..PutRequest::default()
    };
    let success = vec![RequestOp { request: Some(Request::RequestPut(put)) }];
    let txn = TxnRequest { compare: vec![compare], success, failure: Vec::new() };
    let answer = within(client.kv().txn(txn)).await?.into_inner();
    let revision = answer.header.map_or(0, |header| header.revision);
    Ok(if answer.succeeded { Written::At(revision) } else { Written::Changed })
}
