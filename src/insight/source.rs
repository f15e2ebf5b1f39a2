//! Reads snapshots from an endpoint.
//!
//! Sizes can take seconds with a million keys, so they are read in the background ([`SizesReader`]); a snapshot contains
//! the last result.

use std::{collections::BTreeMap, time::Duration};

use orlop_client::{Client, Error, MetricsPage, ServerFlags, describe, hint_at_user};
use orlop_core::clock;
use orlop_wire::proto::client::{
    etcdserverpb::{MemberListRequest, StatusRequest, StatusResponse},
    orlopb as pb,
};
use tokio::time::{Instant, timeout};
use tonic::{Code, Status};

use super::{
    Counters,
    parts::{
        KeyName, Lease, Leases, Member, Members, Phase, ServerState, SlowRequest, SlowRequests, Snapshot, WatchedRange,
        Watchers, printable,
    },
    sizes::SizesReader,
};

/// Maximum time of a read, without sizes.
const READ_MAX: Duration = Duration::from_secs(5);
/// Maximum time of a part that may be missing.
const PART_MAX: Duration = Duration::from_secs(4);
/// Maximum time to wait for sizes if they are awaited.
pub const SIZES_WAIT_MAX: Duration = Duration::from_secs(120);
/// Time to wait for sizes otherwise. Small stores answer at once.
pub const SIZES_WAIT: Duration = Duration::from_millis(50);
/// Maximum number of ranges with watchers, leases and path segments that a source reads, each.
const ROWS_MAX: u32 = 100;
/// Why sizes are missing at first.
pub const BEING_COLLECTED: &str = "being collected";
/// Why a part is missing if the user is not root.
pub const ONLY_ROOT: &str = "only a user with the role root may read this";
/// Why a part is missing if the server is not an Orlop that has the service `orlopb.Insight`.
const NOT_IN_ETCD: &str = "not reported by etcd";

/// Whether the parts that only a user with the role root may read are requested.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RootParts {
    Request,
    /// They are missing, because the server has refused them to the user before.
    Skip,
}

/// Reads snapshots from one endpoint. Connects when it is needed, and again after an error.
pub struct Source {
    flags: ServerFlags,
    client: Option<Client>,
    sizes: SizesReader,
}

impl Source {
    pub fn new(flags: ServerFlags) -> Self {
        Self { flags, client: None, sizes: SizesReader::default() }
    }

    /// Returns the URL of the endpoint.
    pub fn endpoint(&self) -> String {
        self.flags.endpoint().to_string()
    }

    /// Reads a snapshot with the sizes of all keys, for which it waits at most `sizes_wait`. After an error, the next read
    /// opens a new connection and logs in again.
    ///
    /// # Errors
    ///
    /// [`Error::Flags`] if the flags name a file that cannot be used; then every further read fails, too. Otherwise if
    /// the endpoint does not answer within 5 seconds or refuses the user.
    ///
    /// # Cancel safety
    ///
    /// Cancel safe.
    pub async fn read(&mut self, sizes_wait: Duration) -> Result<Snapshot, Error> {
        let (client, mut snapshot) = self.read_without_sizes().await?;
        match self.sizes.read(&client, b"", ROWS_MAX, sizes_wait).await {
            Some(Ok(sizes)) => snapshot.sizes = Some(sizes),
            Some(Err(reason)) => drop(snapshot.missing.insert("sizes", reason)),
            None => drop(snapshot.missing.insert("sizes", BEING_COLLECTED.to_owned())),
        }
        // An older etcd checks the token of some parts only.
        let is_logged_out = snapshot.missing.values().any(|reason| refuses_token(reason));
        self.client = Some(client).filter(|_| !is_logged_out);
        Ok(snapshot)
    }

    /// Reads with the client of the last read, or with a new one if its connection is lost or its token has expired.
    async fn read_without_sizes(&mut self) -> Result<(Client, Snapshot), Error> {
        if let Some(client) = self.client.take().filter(|client| !client.is_lost()) {
            match read(&client, ROWS_MAX, RootParts::Request).await {
                Err(Error::Request { error, .. }) if refuses_token(&error) => {}
                outcome => return outcome.map(|snapshot| (client, snapshot)),
            }
        }
        let client = self.flags.connect().await?;
        let snapshot = read(&client, ROWS_MAX, RootParts::Request).await?;
        Ok((client, snapshot))
    }
}

/// Returns whether an error of the server, as text, means that a token is not valid, or not any more.
fn refuses_token(error: &str) -> bool {
    error.starts_with("Unauthenticated")
}

/// Reads a snapshot without sizes. `rows_max`: the maximum number of ranges with watchers, and of leases.
///
/// # Errors
///
/// If the server does not answer within 5 seconds or refuses the user.
///
/// # Cancel safety
///
/// Cancel safe.
pub async fn read(client: &Client, rows_max: u32, root_parts: RootParts) -> Result<Snapshot, Error> {
    let failed = |error: String| Error::Request { endpoint: client.endpoint().to_string(), error };
    match timeout(READ_MAX, read_parts(client, rows_max, root_parts)).await {
        Ok(Ok(snapshot)) => Ok(snapshot),
        Ok(Err(status)) => Err(failed(format!("{}{}", describe(&status), hint_at_user(&status)))),
        Err(_) => Err(failed(format!("no answer within {} s", READ_MAX.as_secs()))),
    }
}

/// Waits for a part, which may take longer than the others while the server cannot reach its database.
async fn in_time<T>(part: impl Future<Output = Result<T, Status>>) -> Result<T, Status> {
    let late = |_| Err(Status::deadline_exceeded(format!("no answer within {} s", PART_MAX.as_secs())));
    timeout(PART_MAX, Box::pin(part)).await.unwrap_or_else(late)
}

async fn read_parts(client: &Client, limit: u32, root_parts: RootParts) -> Result<Snapshot, Status> {
    let (mut maintenance, mut cluster) = (client.maintenance(), client.cluster());
    let (mut insight, mut second, mut third, mut fourth) =
        (client.insight(), client.insight(), client.insight(), client.insight());
    let of_root = async {
        match root_parts {
            RootParts::Request => tokio::join!(
                in_time(insight.watchers(pb::WatchersRequest { limit })),
                in_time(second.slow_requests(pb::SlowRequestsRequest {})),
                in_time(third.expiring_leases(pb::ExpiringLeasesRequest { limit })),
                in_time(fourth.members(pb::MembersRequest {})),
            ),
            RootParts::Skip => (Err(refused()), Err(refused()), Err(refused()), Err(refused())),
        }
    };
    let (status, page, listed, (watchers, slow, leases, members)) = tokio::join!(
        maintenance.status(StatusRequest {}),
        in_time(client.metrics()),
        in_time(cluster.member_list(MemberListRequest::default())),
        of_root,
    );
    let status = status?.into_inner();
    let mut missing = BTreeMap::new();
    let page = page.map_err(|error| missing.insert("operations", describe(&error))).ok();
    let mut part = |name: &'static str, status: &Status| {
        let reason = if status.code() == Code::Unimplemented {
            NOT_IN_ETCD.to_owned()
        } else if status.code() == Code::PermissionDenied {
            ONLY_ROOT.to_owned()
        } else {
            describe(status)
        };
        missing.insert(name, reason);
    };
    let own = status.header.as_ref().map_or(0, |header| header.member_id);
    let members = match (members, listed) {
        (Ok(members), _) => Some(orlop_members(members.into_inner(), own)),
        (Err(_), Ok(listed)) => Some(etcd_members(listed.into_inner().members, status.leader, own)),
        (Err(error), Err(_)) => {
            part("members", &error);
            None
        }
    };
    let watchers = watchers.map_err(|error| part("watchers", &error)).ok();
    let slow = slow.map_err(|error| part("slowRequests", &error)).ok();
    let leases = leases.map_err(|error| part("leases", &error)).ok();
    Ok(Snapshot {
        taken_at: Instant::now(),
        unix_ms: clock::unix_ms(clock::now()),
        endpoint: client.endpoint().to_string(),
        server: server_state(status, page.as_ref()),
        counters: page.as_ref().map(Counters::of),
        members,
        watchers: watchers.map(|response| watched(response.into_inner())),
        leases: leases.map(|response| expiring(response.into_inner())),
        slow_requests: slow.map(|response| slow_requests(response.into_inner())),
        sizes: None,
        missing,
    })
}

/// Returns what the server has said of a part that is not requested again.
fn refused() -> Status {
    Status::permission_denied(ONLY_ROOT)
}

fn hex(id: u64) -> String {
    format!("{id:x}")
}

/// Returns the properties of a server, without control characters in its texts. `page`: its metrics, if it has any.
pub(crate) fn server_state(answer: StatusResponse, page: Option<&MetricsPage>) -> ServerState {
    let number = |name: &str| page?.value(name).map(|value| value as i64);
    let label = |metric: &str, label: &str| {
        let (labels, _) = page?.series(metric).find(|(_, value)| *value > 0.0)?;
        labels.get(label).map(|value| printable(value))
    };
    let header = answer.header.unwrap_or_default();
    let leads = answer.leader == header.member_id;
    // etcd before 3.6 does not report its quota in the response.
    let quota =
        number("etcd_server_quota_backend_bytes").or((answer.db_size_quota > 0).then_some(answer.db_size_quota));
    ServerState {
        orlop_version: label("orlop_build_info", "version"),
        version: printable(&answer.version),
        database: label("orlop_database_info", "kind"),
        member_id: hex(header.member_id),
        leader_id: hex(answer.leader),
        revision: header.revision,
        compact_revision: number("etcd_debugging_mvcc_compact_revision"),
        keys: number("etcd_debugging_mvcc_keys_total"),
        db_size: answer.db_size,
        db_size_in_use: answer.db_size_in_use,
        db_size_quota: quota,
        history_bytes: number("orlop_history_bytes").filter(|_| leads),
        watchers: number("etcd_debugging_mvcc_watcher_total"),
        slow_watchers: number("etcd_debugging_mvcc_slow_watcher_total"),
        watch_streams: number("etcd_debugging_mvcc_watch_stream_total"),
        leases: number("orlop_leases"),
        alarms: answer.errors.iter().map(|error| printable(error.trim())).collect(),
    }
}

fn orlop_members(response: pb::MembersResponse, own: u64) -> Members {
    let member = |member: pb::InsightMember| Member {
        id: hex(member.id),
        name: printable(&member.name),
        client_urls: member.client_urls.iter().map(|url| printable(url)).collect(),
        leads_expiry: member.leads_expiry,
        responds: member.id == own,
    };
    let members = response.members.into_iter().map(member).collect();
    Members { members, since_heartbeat_ms: response.since_heartbeat_ms }
}

fn etcd_members(listed: Vec<orlop_wire::proto::client::etcdserverpb::Member>, leader: u64, own: u64) -> Members {
    let members = listed.into_iter().map(|member| Member {
        id: hex(member.id),
        name: printable(&member.name),
        client_urls: member.client_ur_ls.iter().map(|url| printable(url)).collect(),
        leads_expiry: member.id == leader,
        responds: member.id == own,
    });
    Members { members: members.collect(), since_heartbeat_ms: None }
}

fn watched(response: pb::WatchersResponse) -> Watchers {
    let range = |range: pb::WatchedRange| {
        let (key, range_end) = (KeyName(range.key.into()), KeyName(range.range_end.into()));
        WatchedRange {
            text: WatchedRange::describe(&key, &range_end),
            key,
            range_end,
            watchers: range.watchers,
            catching_up: range.catching_up,
            queued: range.queued,
            revision_lag: range.revision_lag,
        }
    };
    Watchers {
        ranges: response.ranges.into_iter().map(range).collect(),
        ranges_total: response.ranges_total,
        watchers_total: response.watchers_total,
        is_partial: response.is_partial,
    }
}

fn expiring(response: pb::ExpiringLeasesResponse) -> Leases {
    let lease = |lease: pb::ExpiringLease| Lease {
        id: format!("{:x}", lease.id),
        ttl_secs: lease.ttl_secs,
        remaining_ms: lease.remaining_ms,
        keys: lease.keys,
    };
    Leases { leases: response.leases.into_iter().map(lease).collect(), total: response.total }
}

fn slow_requests(response: pb::SlowRequestsResponse) -> SlowRequests {
    let phase = |phase: pb::Phase| Phase { name: printable(&phase.name), took_us: phase.took_us };
    let request = |request: pb::SlowRequest| SlowRequest {
        id: printable(&request.id),
        ended_unix_ms: request.ended_unix_ms,
        method: printable(&request.method),
        request: printable(&request.request),
        code: printable(&request.code),
        took_us: request.took_us,
        phases: request.phases.into_iter().map(phase).collect(),
        response_bytes: request.response_bytes,
        pairs: request.pairs,
    };
    SlowRequests {
        requests: response.requests.into_iter().map(request).collect(),
        total: response.total,
        threshold_us: response.threshold_us,
    }
}
