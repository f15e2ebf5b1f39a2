//! The Insight service, which etcd does not have: watchers, slow requests, leases, sizes and members of one instance.
//! All calls but `Children` need the role root.

use std::time::Duration;

use tonic::{Request, Response, Status};

use super::{Context, slow_requests::SlowRequest, status::from_store};
use orlop_core::{
    clock,
    lease::Expiring,
    store::children::NamedChild,
    store::sizes::{CHILDREN_MAX, Child, ChildKind, NAME_BYTES_MAX, PairSizes},
    watch::WatchedRange,
};
use orlop_wire::proto::server::{
    etcdserverpb::ResponseHeader,
    orlopb::{self as pb, insight_server::Insight},
};

const RANGES_DEFAULT: usize = 100;
const RANGES_MAX: usize = 1_000;
const LEASES_DEFAULT: usize = 20;
const LEASES_MAX: usize = 1_000;
const CHILDREN_DEFAULT: usize = 100;
const NAMES_MAX: usize = 1_000;

/// Returns the limit of a request.
fn limit(requested: u32, default: usize, max: usize) -> usize {
    match usize::try_from(requested) {
        Ok(0) => default,
        Ok(limit) => limit.min(max),
        Err(_) => max,
    }
}

fn micros(time: Duration) -> u64 {
    u64::try_from(time.as_micros()).unwrap_or(u64::MAX)
}

fn millis(time: Duration) -> u64 {
    u64::try_from(time.as_millis()).unwrap_or(u64::MAX)
}

impl Context {
    fn current_header(&self) -> Option<ResponseHeader> {
        self.header(self.store.head())
    }
}

#[tonic::async_trait]
impl Insight for Context {
    async fn watchers(&self, request: Request<pb::WatchersRequest>) -> Result<Response<pb::WatchersResponse>, Status> {
        self.check_root(&request).await?;
        let limit = limit(request.into_inner().limit, RANGES_DEFAULT, RANGES_MAX);
        let survey = self.store.hub().survey(limit, self.steps()).await;
        Ok(Response::new(pb::WatchersResponse {
            header: self.current_header(),
            ranges: survey.ranges.into_iter().map(watched_range).collect(),
            ranges_total: survey.ranges_total as u64,
            watchers_total: survey.watches_total as u64,
            is_partial: survey.is_partial,
        }))
    }

    async fn slow_requests(
        &self,
        request: Request<pb::SlowRequestsRequest>,
    ) -> Result<Response<pb::SlowRequestsResponse>, Status> {
        self.check_root(&request).await?;
        let (requests, total) = self.slow_requests.list();
        Ok(Response::new(pb::SlowRequestsResponse {
            header: self.current_header(),
            requests: requests.into_iter().map(slow_request).collect(),
            total,
            threshold_us: micros(self.settings.slow_threshold),
        }))
    }

    async fn expiring_leases(
        &self,
        request: Request<pb::ExpiringLeasesRequest>,
    ) -> Result<Response<pb::ExpiringLeasesResponse>, Status> {
        self.check_root(&request).await?;
        let limit = limit(request.into_inner().limit, LEASES_DEFAULT, LEASES_MAX);
        let (total, leases) = self.store.soonest_leases(limit).await.map_err(from_store)?;
        Ok(Response::new(pb::ExpiringLeasesResponse {
            header: self.current_header(),
            leases: leases.into_iter().map(expiring_lease).collect(),
            total: total as u64,
        }))
    }

    async fn sizes(&self, request: Request<pb::SizesRequest>) -> Result<Response<pb::SizesResponse>, Status> {
        self.check_root(&request).await?;
        let request = request.into_inner();
        if request.prefix.len() >= NAME_BYTES_MAX {
            return Err(Status::invalid_argument(format!("orlop: the prefix is too long, max=`{NAME_BYTES_MAX}`")));
        }
        let limit = limit(request.limit, CHILDREN_DEFAULT, CHILDREN_MAX);
        let sizes = self.store.sizes(&request.prefix).await.map_err(from_store)?;
        let first = |children: &[Child]| children.iter().take(limit).map(sized_child).collect();
        Ok(Response::new(pb::SizesResponse {
            header: self.current_header(),
            prefix: sizes.prefix.clone().into(),
            total: Some(pair_sizes(sizes.total)),
            children: first(&sizes.children),
            children_total: sizes.children_total,
            largest_keys: first(&sizes.largest_keys),
            age_ms: millis(sizes.collected_at.elapsed()),
            cost_us: micros(sizes.cost),
        }))
    }

    async fn children(&self, request: Request<pb::ChildrenRequest>) -> Result<Response<pb::ChildrenResponse>, Status> {
        let caller = self.caller_of(&request).await?;
        let request = request.into_inner();
        let limit = limit(request.limit, CHILDREN_DEFAULT, NAMES_MAX);
        let page = self.store.children(&caller, &request.prefix, &request.after, limit).await.map_err(from_store)?;
        let child =
            |child: NamedChild| pb::NamedChild { name: child.name.into(), is_prefix: child.kind == ChildKind::Prefix };
        Ok(Response::new(pb::ChildrenResponse {
            header: self.current_header(),
            children: page.children.into_iter().map(child).collect(),
            more: page.more,
        }))
    }

    async fn members(&self, request: Request<pb::MembersRequest>) -> Result<Response<pb::MembersResponse>, Status> {
        self.check_root(&request).await?;
        let (members, since_heartbeat) = self.store.last_members();
        let leader = self.store.leader();
        let member = |member: orlop_core::log::Member| pb::InsightMember {
            id: member.id,
            name: member.name,
            client_urls: member.client_urls,
            leads_expiry: member.id == leader,
        };
        Ok(Response::new(pb::MembersResponse {
            header: self.current_header(),
            members: members.into_iter().map(member).collect(),
            since_heartbeat_ms: since_heartbeat.map(millis),
        }))
    }
}

fn watched_range(watched: WatchedRange) -> pb::WatchedRange {
    let (key, range_end) = watched.range.to_wire();
    pb::WatchedRange {
        key: key.to_vec().into(),
        range_end: range_end.to_vec().into(),
        watchers: watched.watches as u64,
        catching_up: watched.catching_up as u64,
        queued: watched.queued as u64,
        revision_lag: watched.revision_lag,
    }
}

fn slow_request(slow: SlowRequest) -> pb::SlowRequest {
    let phase =
        |(part, took): (orlop_core::trace::Part, _)| pb::Phase { name: part.name().to_owned(), took_us: micros(took) };
    pb::SlowRequest {
        id: slow.trace.id.to_string(),
        ended_unix_ms: clock::unix_ms(slow.ended),
        phases: slow.phases().map(phase).collect(),
        method: slow.method,
        request: slow.trace.request.unwrap_or_default(),
        code: slow.code.to_owned(),
        took_us: micros(slow.took),
        response_bytes: slow.response_bytes as u64,
        pairs: slow.trace.pairs.map(|pairs| pairs as u64),
    }
}

fn expiring_lease(lease: Expiring) -> pb::ExpiringLease {
    pb::ExpiringLease {
        id: lease.id.0,
        ttl_secs: lease.ttl_secs,
        remaining_ms: i64::try_from(lease.left.as_millis()).unwrap_or(i64::MAX),
        keys: lease.keys as u64,
    }
}

fn pair_sizes(sizes: PairSizes) -> pb::PairSizes {
    pb::PairSizes { keys: sizes.keys, key_bytes: sizes.key_bytes, value_bytes: sizes.value_bytes }
}

fn sized_child(child: &Child) -> pb::SizedChild {
    pb::SizedChild {
        name: child.name.clone().into(),
        is_prefix: child.kind == ChildKind::Prefix,
        sizes: Some(pair_sizes(child.sizes)),
    }
}
