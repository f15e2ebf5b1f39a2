//! One client for each service of a server, all over one connection.

use orlop_wire::proto::client::{
    etcdserverpb::{
        cluster_client::ClusterClient, kv_client::KvClient, lease_client::LeaseClient,
        maintenance_client::MaintenanceClient, watch_client::WatchClient,
    },
    v3electionpb::election_client::ElectionClient,
    v3lockpb::lock_client::LockClient,
};
use tonic::transport::{Channel, Endpoint};

#[derive(Clone)]
pub struct Client {
    pub kv: KvClient<Channel>,
    pub watch: WatchClient<Channel>,
    pub lease: LeaseClient<Channel>,
    pub maintenance: MaintenanceClient<Channel>,
    pub cluster: ClusterClient<Channel>,
    pub lock: LockClient<Channel>,
    pub election: ElectionClient<Channel>,
}

impl Client {
    /// # Panics
    /// If nothing listens at the endpoint.
    pub async fn connect(endpoint: &str) -> Self {
        Self::try_connect(endpoint).await.expect("a ready server accepts connections")
    }

    pub async fn try_connect(endpoint: &str) -> Result<Self, tonic::transport::Error> {
        let channel = Endpoint::from_shared(endpoint.to_owned())?.connect().await?;
        Ok(Self {
            kv: KvClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            watch: WatchClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            lease: LeaseClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            maintenance: MaintenanceClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            lock: LockClient::new(channel.clone()),
            election: ElectionClient::new(channel.clone()),
            cluster: ClusterClient::new(channel).max_decoding_message_size(usize::MAX),
        })
    }
}
