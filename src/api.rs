//! The edge: etcd's gRPC services over a [`Store`]. Protobuf types and the wire's sentinels stop here.
//!
//! Requests are validated once ([`convert`]), and errors become gRPC codes and etcd's texts in one table ([`status`]).
//! The KV and Watch services are served by hand ([`kv`], [`watch`]), because their answers are put together from pairs and
//! events that are already encoded; the others are tonic's generated ones.

mod auth;
mod cluster;
pub mod convert;
mod election;
pub mod grpc;
pub mod interval_check;
mod kv;
mod lease;
mod lock;
mod maintenance;
mod queue;
mod snapshot;
pub mod status;
pub mod watch;

use std::{sync::Arc, time::Duration};

use tokio::sync::watch as watch_channel;
use tonic::service::Routes;

use self::grpc::metering::Meter;
pub use self::grpc::router::Router;
use self::{election::ElectionService, lock::LockService, snapshot::Snapshots};
use crate::{snapshot::Folder, telemetry::Exporter};
use orlop_core::{
    overload::{PartialRequests, Steps},
    store::Store,
    types::Revision,
};
use orlop_wire::proto::{
    DESCRIPTORS,
    server::{
        etcdserverpb::{
            self as pb, auth_server::AuthServer, cluster_server::ClusterServer, lease_server::LeaseServer,
            maintenance_server::MaintenanceServer,
        },
        v3electionpb::election_server::ElectionServer,
        v3lockpb::lock_server::LockServer,
    },
};

/// The etcd release whose behaviour and API this server has; clients decide by it what they use.
pub const ETCD_VERSION: &str = "3.6.13";
/// The cluster's version and the storage's: the release without its patch.
pub const CLUSTER_VERSION: &str = "3.6.0";
pub const STORAGE_VERSION: &str = "3.6.0";
/// There are no terms, but clients expect one that is not 0.
const RAFT_TERM: u64 = 1;
/// What a request may be longer than `max_request_bytes` by before the transport refuses it.
const TRANSPORT_SLACK_BYTES: usize = 512 << 10;
/// Nothing that a request without keys and values has in it is long; in 2 MiB there would be room for a million fields,
/// which take long to decode.
const SMALL_MESSAGE_BYTES: usize = 256 << 10;

/// What the services answer by.
#[derive(Clone, Debug)]
pub struct Settings {
    /// Bytes of a request that writes.
    pub max_request_bytes: usize,
    /// Operations in a transaction, and compares.
    pub max_txn_ops: usize,
    pub watch_progress_notify_interval: Duration,
    /// Where snapshots are written.
    pub snapshots: Folder,
    /// A request that takes longer is named in the log.
    pub patience: Duration,
    /// Where requests are told as spans.
    pub exporter: Option<Arc<Exporter>>,
}

impl Settings {
    /// Bytes of a message with keys and values in it, which the transport takes, and above which a fragmented watch answer
    /// is cut.
    fn max_message_bytes(&self) -> usize {
        self.max_request_bytes.saturating_add(TRANSPORT_SLACK_BYTES)
    }

    /// Bytes of any other message.
    fn small_message_bytes(&self) -> usize {
        self.max_message_bytes().min(SMALL_MESSAGE_BYTES)
    }
}

/// What every service holds.
#[derive(Clone)]
struct Context {
    store: Arc<Store>,
    settings: Arc<Settings>,
    snapshots: Snapshots,
    /// Turns true when the server goes down.
    stopping: watch_channel::Receiver<bool>,
}

impl Context {
    fn steps(&self) -> &Arc<Steps> {
        self.store.steps()
    }

    fn header(&self, revision: Revision) -> Option<pb::ResponseHeader> {
        let identity = self.store.identity();
        Some(pb::ResponseHeader {
            cluster_id: identity.cluster_id,
            member_id: identity.member_id,
            revision: revision.0,
            raft_term: RAFT_TERM,
        })
    }
}

/// Builds all services. `stopping` ends the streams, which would otherwise outlive the server's drain.
///
/// # Errors
///
/// If the descriptors that were compiled in cannot be read.
pub fn services(
    store: Arc<Store>,
    settings: Settings,
    partial_requests: Arc<PartialRequests>,
    stopping: watch_channel::Receiver<bool>,
) -> Result<Router, tonic_reflection::server::Error> {
    let (small, long) = (settings.small_message_bytes(), settings.max_message_bytes());
    let (metrics, exporter) = (Arc::clone(store.metrics()), settings.exporter.clone());
    let meter = Meter::new(metrics, partial_requests, settings.patience, exporter)?;
    let snapshots = Snapshots::new(&store, settings.snapshots.clone());
    let context = Arc::new(Context { store, settings: Arc::new(settings), snapshots, stopping });
    let (_, health) = tonic_health::server::health_reporter();
    let reflection = || {
        tonic_reflection::server::Builder::configure()
            .register_encoded_file_descriptor_set(DESCRIPTORS)
            .register_encoded_file_descriptor_set(tonic_health::pb::FILE_DESCRIPTOR_SET)
    };
    let kv = kv::KvService::new(Arc::clone(&context));
    let routes = Routes::new(kv.clone())
        .add_service(watch::WatchService::new(Arc::clone(&context)))
        .add_service(LeaseServer::from_arc(Arc::clone(&context)).max_decoding_message_size(small))
        .add_service(ClusterServer::from_arc(Arc::clone(&context)).max_decoding_message_size(small))
        .add_service(AuthServer::from_arc(Arc::clone(&context)).max_decoding_message_size(small))
        .add_service(MaintenanceServer::from_arc(Arc::clone(&context)).max_decoding_message_size(small))
        .add_service(LockServer::new(LockService(Arc::clone(&context))).max_decoding_message_size(long))
        .add_service(ElectionServer::new(ElectionService(context)).max_decoding_message_size(long))
        .add_service(health.max_decoding_message_size(small))
        .add_service(reflection().build_v1()?.max_decoding_message_size(small))
        .add_service(reflection().build_v1alpha()?.max_decoding_message_size(small));
    Ok(Router::new(meter.around(kv), Routes::from(routes.into_axum_router().layer(meter))))
}

#[cfg(test)]
mod convert_tests;
#[cfg(test)]
mod interval_check_tests;
