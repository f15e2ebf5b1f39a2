//! The store that is copied: a running etcd or Orlop, as its clients see it.

use std::{collections::BTreeMap, path::Path, time::Duration};

use futures_util::{FutureExt as _, StreamExt as _, TryFutureExt as _, TryStreamExt as _, stream};
use orlop_client::{Client, Credentials, Endpoint, Target, WatchStream, describe, hint_at_root};
use orlop_wire::proto::client::{
    etcdserverpb::{
        AlarmRequest, AlarmType, AuthStatusRequest, HashKvRequest, LeaseLeasesRequest, LeaseTimeToLiveRequest,
        RangeRequest, StatusRequest, WatchCreateRequest, alarm_request::AlarmAction, watch_create_request::FilterType,
    },
    mvccpb::Event,
};
use tempfile::NamedTempFile;
use tokio::time::timeout;
use tonic::{Code, Response, Status};

use super::{Failure, Result};
use crate::snapshot::{self, Content};
use orlop_core::{
    log::AuthMark,
    types::{LeaseId, Revision},
};

/// Maximum time for the answer to a request that reads no more than a few pairs.
const ANSWER_MAX: Duration = Duration::from_secs(10);
/// Maximum time for a hash, for which the source reads its whole history.
const HASH_MAX: Duration = Duration::from_secs(10 * 60);
/// Time within which etcd ends a watch that begins at a compacted revision.
const COMPACTED_WATCH_MAX: Duration = Duration::from_secs(1);
/// Requests about leases that are sent at the same time.
const LEASE_REQUESTS: usize = 32;
/// Number of events, and bytes of their values, above which no further responses of a watch are taken at once. They are
/// written with one sync.
const EVENTS_AT_ONCE: usize = 1_000;
const BYTES_AT_ONCE: usize = 8 << 20;
/// etcd's errors for a token of before the last change of users or roles. A JWT names the revision of users and roles. The
/// second form comes without a code, on streams.
const OLD_TOKEN: [&str; 2] = ["etcdserver: revision of auth store is old", "auth: revision in header is old"];
/// The first possible key. As `range_end` it means all keys from the first one on.
const ALL_KEYS: &[u8] = b"\0";

/// The addresses of the source.
pub(super) struct Source {
    pub endpoints: Vec<Endpoint>,
    pub credentials: Credentials,
}

/// A connection to one member of the source.
pub(super) struct Session {
    client: Client,
    pub cluster_id: u64,
    pub(super) member_id: u64,
}

/// The hash of the source at a revision.
pub(super) struct SourceHash {
    pub hash: u32,
    pub compact_revision: Option<Revision>,
}

impl Source {
    /// Connects to the first member that answers.
    ///
    /// # Errors
    ///
    /// The error of the last member if none answers.
    pub(super) async fn connect(&self) -> Result<Session> {
        let mut failure = Failure::Fatal("--from names no address".to_owned());
        for endpoint in &self.endpoints {
            match self.connect_to(endpoint).await {
                Ok(session) => return Ok(session),
                Err(error) => failure = error,
            }
        }
        Err(failure)
    }

    async fn connect_to(&self, endpoint: &Endpoint) -> Result<Session> {
        let failed = |error: orlop_client::Error| match error {
            orlop_client::Error::Connect { .. } | orlop_client::Error::Request { .. } => {
                Failure::Source(error.to_string())
            }
            orlop_client::Error::Flags(_) | orlop_client::Error::LogIn { .. } => Failure::Fatal(error.to_string()),
        };
        let target = Target::new(vec![endpoint.clone()], &self.credentials).await.map_err(failed)?;
        let client = Client::connect(endpoint, &target).await.map_err(failed)?;
        let status = answer(client.maintenance().status(StatusRequest {})).await?;
        let header = status.header.unwrap_or_default();
        let session = Session { client, cluster_id: header.cluster_id, member_id: header.member_id };
        // A member without a quorum tells its status, but neither reads nor writes.
        session.head().await?;
        Ok(session)
    }
}

impl Session {
    /// Returns the newest revision.
    pub(super) async fn head(&self) -> Result<Revision> {
        let response = answer(self.client.kv().range(one_key_at(0))).await?;
        Ok(Revision(response.header.unwrap_or_default().revision))
    }

    /// Saves a snapshot to a temporary file. It has no archive if the source has none.
    pub(super) async fn snapshot(
        &self,
        content: Content,
        folder: &Path,
        mut progress: impl FnMut(u64, u64),
    ) -> Result<NamedTempFile> {
        let saved = match snapshot::receive(&self.client, content, folder, &mut progress).await {
            Err(snapshot::Error::Server(status))
                if status.code() == Code::Unimplemented && content == Content::LogAndArchive =>
            {
                snapshot::receive(&self.client, Content::Log, folder, progress).await
            }
            saved => saved,
        };
        saved.map_err(|error| match error {
            snapshot::Error::Server(status) => failure(&status),
            snapshot::Error::File(text) => Failure::Fatal(text),
            snapshot::Error::Log(error) => error.into(),
            snapshot::Error::History(error) => Failure::Fatal(error.to_string()),
        })
    }

    /// Watches all keys from a revision on.
    pub(super) async fn watch(&self, from: Revision) -> Result<Watch> {
        self.watch_with(from, &[]).await
    }

    async fn watch_with(&self, from: Revision, filters: &[FilterType]) -> Result<Watch> {
        let create = WatchCreateRequest {
            key: ALL_KEYS.into(),
            range_end: ALL_KEYS.into(),
            start_revision: from.0,
            filters: filters.iter().map(|filter| (*filter).into()).collect(),
            fragment: true,
            ..Default::default()
        };
        let responses = answer(self.client.open_watch(create).map_ok(Response::new)).await?;
        Ok(Watch { responses, partial: Vec::new() })
    }

    /// Returns the compact revision. etcd tells it without much work only where a watch needs a compacted revision. While
    /// nothing is compacted, such a watch makes it read its whole history, for which writes wait, so a read is sent
    /// first.
    pub(super) async fn compact_revision(&self) -> Result<Option<Revision>> {
        let first = Revision::EMPTY;
        match answer(self.client.kv().range(one_key_at(first.0))).await {
            Err(Failure::Compacted(_)) => {}
            Err(failure) => return Err(failure),
            Ok(_) => return Ok(None),
        }
        let mut watch = self.watch_with(first, &[FilterType::Noput, FilterType::Nodelete]).await?;
        match timeout(COMPACTED_WATCH_MAX, watch.next()).await {
            Ok(Err(Failure::Compacted(revision))) => Ok(Some(revision)),
            Ok(Err(failure)) => Err(failure),
            Ok(Ok(_)) | Err(_) => Ok(None),
        }
    }

    pub(super) async fn lease_ids(&self) -> Result<Vec<LeaseId>> {
        let listed = answer(self.client.leases().lease_leases(LeaseLeasesRequest {})).await?;
        Ok(listed.leases.into_iter().map(|lease| LeaseId(lease.id)).collect())
    }

    /// Returns all leases with their TTLs in seconds, of which some are known.
    pub(super) async fn leases(&self, known: &BTreeMap<LeaseId, i64>) -> Result<BTreeMap<LeaseId, i64>> {
        let ids = self.lease_ids().await?;
        let ttls = stream::iter(ids).map(async |id| match known.get(&id) {
            Some(ttl) => Ok::<_, Failure>((id, Some(*ttl))),
            None => Ok((id, self.ttl(id).await?)),
        });
        let ttls: Vec<_> = ttls.buffer_unordered(LEASE_REQUESTS).try_collect().await?;
        Ok(ttls.into_iter().filter_map(|(id, ttl)| Some((id, ttl?))).collect())
    }

    /// Returns the TTL that a lease was granted, in seconds; `None`: the lease does not exist.
    pub(super) async fn ttl(&self, id: LeaseId) -> Result<Option<i64>> {
        let request = LeaseTimeToLiveRequest { id: id.0, keys: false };
        match answer(self.client.leases().lease_time_to_live(request)).await {
            // The TTL that is left is negative also for a lease that has expired and is not revoked yet.
            Ok(lease) => Ok((lease.granted_ttl > 0).then_some(lease.granted_ttl)),
            Err(Failure::Missing) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Returns the hash of the history up to a revision. `compacted` is a revision that the source has compacted.
    ///
    /// # Errors
    ///
    /// [`Failure::Compacted`] also if the source tells no such hash of its compact revision: etcd 3.4 refuses it, and
    /// later versions tell the one from before the compaction, unless the head is asked for without its number.
    pub(super) async fn hash(&self, revision: Revision, compacted: Option<Revision>) -> Result<SourceHash> {
        match self.hash_kv(revision.0).await {
            Ok((hash, _)) if compacted != Some(revision) || hash.compact_revision >= compacted => return Ok(hash),
            Ok(_) | Err(Failure::Compacted(_)) => {}
            Err(failure) => return Err(failure),
        }
        let (hash, head) = self.hash_kv(0).await?;
        if head == revision { Ok(hash) } else { Err(Failure::Compacted(Revision(0))) }
    }

    /// Returns the hash with the head of the source; revision 0: up to the head.
    async fn hash_kv(&self, revision: i64) -> Result<(SourceHash, Revision)> {
        let request = HashKvRequest { revision };
        let hashed = answer_within(HASH_MAX, self.client.maintenance().hash_kv(request)).await?;
        let compact_revision = Some(Revision(hashed.compact_revision)).filter(|compacted| *compacted > Revision(0));
        let head = hashed.header.map_or(0, |header| header.revision);
        Ok((SourceHash { hash: hashed.hash, compact_revision }, Revision(head)))
    }

    /// Returns the state of users and roles; `None` if the source does not tell it, as etcd before 3.5.
    pub(super) async fn auth(&self) -> Result<Option<AuthMark>> {
        match answer(self.client.auth().auth_status(AuthStatusRequest {})).await {
            Ok(status) => Ok(Some(AuthMark { enabled: status.enabled, revision: status.auth_revision })),
            Err(Failure::Unimplemented(_)) => Ok(None),
            Err(failure) => Err(failure),
        }
    }

    /// Raises or clears the alarm CORRUPT of a member, with which etcd refuses all writes and goes on serving reads.
    pub(super) async fn fence(&self, action: AlarmAction, member_id: u64) -> Result<()> {
        let request = AlarmRequest { action: action.into(), member_id, alarm: AlarmType::Corrupt.into() };
        answer(self.client.maintenance().alarm(request)).await.map(drop)
    }
}

/// A watch of all keys.
pub(super) struct Watch {
    responses: WatchStream,
    /// The events of a revision whose other events may follow.
    partial: Vec<Event>,
}

impl Watch {
    /// Returns the next events: all of each revision, and of several revisions as far as they have arrived.
    ///
    /// # Errors
    ///
    /// [`Failure::Compacted`] if the source has compacted the revision that the watch needs.
    ///
    /// # Cancel safety
    ///
    /// No event is lost if the future is dropped.
    pub(super) async fn next(&mut self) -> Result<Vec<Event>> {
        let mut events = self.next_response().await?;
        let bytes = |events: &[Event]| -> usize {
            events.iter().filter_map(|event| event.kv.as_ref()).map(|kv| kv.value.len()).sum()
        };
        let mut taken = bytes(&events);
        while events.len() < EVENTS_AT_ONCE
            && taken < BYTES_AT_ONCE
            && let Some(more) = self.next_response().now_or_never()
        {
            let more = more?;
            taken += bytes(&more);
            events.extend(more);
        }
        Ok(events)
    }

    /// Returns the events of the next response that has some.
    async fn next_response(&mut self) -> Result<Vec<Event>> {
        loop {
            let response = match self.responses.message().await {
                Ok(Some(response)) => response,
                Ok(None) => return Err(Failure::Source("the source has ended the watch".to_owned())),
                Err(status) => return Err(failure(&status)),
            };
            if response.canceled && response.compact_revision > 0 {
                return Err(Failure::Compacted(Revision(response.compact_revision)));
            }
            if response.canceled {
                return Err(Failure::Source(format!("the source has canceled the watch: {}", response.cancel_reason)));
            }
            let mut events = std::mem::take(&mut self.partial);
            events.extend(response.events);
            if response.fragment {
                // The last revision may go on in the next fragment.
                let last = events.last().map(revision);
                let whole =
                    events.iter().rposition(|event| Some(revision(event)) != last).map_or(0, |before| before + 1);
                self.partial = events.split_off(whole);
            }
            if !events.is_empty() {
                return Ok(events);
            }
        }
    }
}

/// Returns a read of one key without its value; revision 0: at the newest revision.
fn one_key_at(revision: i64) -> RangeRequest {
    RangeRequest { key: ALL_KEYS.into(), limit: 1, keys_only: true, revision, ..Default::default() }
}

/// Returns the lease of the event's pair.
pub(super) fn lease(event: &Event) -> Option<LeaseId> {
    LeaseId::from_wire(event.kv.as_ref()?.lease)
}

/// Returns the revision of an event.
pub(super) fn revision(event: &Event) -> Revision {
    Revision(event.kv.as_ref().map_or(0, |kv| kv.mod_revision))
}

async fn answer<T>(call: impl Future<Output = std::result::Result<Response<T>, Status>>) -> Result<T> {
    answer_within(ANSWER_MAX, call).await
}

async fn answer_within<T>(
    max: Duration,
    call: impl Future<Output = std::result::Result<Response<T>, Status>>,
) -> Result<T> {
    match timeout(max, call).await {
        Ok(Ok(response)) => Ok(response.into_inner()),
        Ok(Err(status)) => Err(failure(&status)),
        Err(_) => Err(Failure::Source(format!("the source has not answered for {} seconds", max.as_secs()))),
    }
}

/// Decides what an error of the source means for the migration.
fn failure(status: &Status) -> Failure {
    match status.code() {
        Code::OutOfRange if status.message().contains("compacted") => Failure::Compacted(Revision(0)),
        Code::NotFound => Failure::Missing,
        Code::Unimplemented => Failure::Unimplemented(describe(status)),
        // A new connection gets a new token.
        Code::InvalidArgument | Code::Unknown if OLD_TOKEN.contains(&status.message()) => {
            Failure::Source(describe(status))
        }
        Code::PermissionDenied | Code::InvalidArgument | Code::DataLoss => refused(status),
        // etcd sends errors of its Auth without a code where it sends a stream. A token that has expired is replaced.
        Code::Unknown if status.message().starts_with("auth: ") && !status.message().contains("token") => {
            refused(status)
        }
        Code::Ok
        | Code::Cancelled
        | Code::Unknown
        | Code::DeadlineExceeded
        | Code::AlreadyExists
        | Code::ResourceExhausted
        | Code::FailedPrecondition
        | Code::Aborted
        | Code::OutOfRange
        | Code::Internal
        | Code::Unavailable
        | Code::Unauthenticated => Failure::Source(describe(status)),
    }
}

fn refused(status: &Status) -> Failure {
    Failure::Fatal(format!("the source refuses a request: {}{}", describe(status), hint_at_root(status)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_refusals_that_a_new_token_does_not_mend_end_a_migration() {
        for (code, message, is_final) in [
            (Code::InvalidArgument, "etcdserver: revision of auth store is old", false),
            (Code::Unknown, "auth: revision in header is old", false),
            (Code::Unauthenticated, "etcdserver: invalid auth token", false),
            (Code::Unknown, "auth: invalid auth token", false),
            (Code::InvalidArgument, "etcdserver: user name is empty", true),
            (Code::Unknown, "auth: user name is empty", true),
            (Code::PermissionDenied, "etcdserver: permission denied", true),
        ] {
            let found = failure(&Status::new(code, message));
            let kind = (matches!(found, Failure::Source(_)), matches!(found, Failure::Fatal(_)));
            assert_eq!(kind, (!is_final, is_final), "{code:?} {message}: {found:?}");
        }
    }
}
