//! One client for each service of a server, all over one connection, and requests of the service KV.

use std::sync::Arc;

use bytes::Bytes;
use orlop_wire::proto::client::{
    etcdserverpb::{
        AuthenticateRequest, DeleteRangeRequest, PutRequest, RangeRequest, auth_client::AuthClient,
        cluster_client::ClusterClient, kv_client::KvClient, lease_client::LeaseClient,
        maintenance_client::MaintenanceClient, watch_client::WatchClient,
    },
    orlopb::{history_client::HistoryClient, insight_client::InsightClient},
    v3electionpb::election_client::ElectionClient,
    v3lockpb::lock_client::LockClient,
};
use parking_lot::RwLock;
use tonic::{
    Request, Status,
    metadata::AsciiMetadataValue,
    service::{Interceptor, interceptor::InterceptedService},
    transport::{Channel, Endpoint},
};

/// A connection whose requests carry the token of [`Client::act_with`].
pub type Connection = InterceptedService<Channel, Token>;

#[derive(Clone)]
pub struct Client {
    pub kv: KvClient<Connection>,
    pub watch: WatchClient<Connection>,
    pub lease: LeaseClient<Connection>,
    pub maintenance: MaintenanceClient<Connection>,
    pub cluster: ClusterClient<Connection>,
    pub auth: AuthClient<Connection>,
    pub lock: LockClient<Connection>,
    pub election: ElectionClient<Connection>,
    pub history: HistoryClient<Connection>,
    pub insight: InsightClient<Connection>,
    token: Token,
}

/// The token that is sent with every request, if there is one.
#[derive(Clone, Default)]
pub struct Token(Arc<RwLock<Option<AsciiMetadataValue>>>);

impl Interceptor for Token {
    fn call(&mut self, mut request: Request<()>) -> Result<Request<()>, Status> {
        if let Some(token) = &*self.0.read() {
            request.metadata_mut().insert("token", token.clone());
        }
        Ok(request)
    }
}

impl Client {
    /// # Panics
    /// If nothing listens at the endpoint.
    pub async fn connect(endpoint: &str) -> Self {
        Self::try_connect(endpoint).await.expect("a ready server accepts connections")
    }

    pub async fn try_connect(endpoint: &str) -> Result<Self, tonic::transport::Error> {
        let channel = Endpoint::from_shared(endpoint.to_owned())?.connect().await?;
        let token = Token::default();
        let channel = InterceptedService::new(channel, token.clone());
        Ok(Self {
            kv: KvClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            watch: WatchClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            lease: LeaseClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            maintenance: MaintenanceClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            auth: AuthClient::new(channel.clone()),
            lock: LockClient::new(channel.clone()),
            election: ElectionClient::new(channel.clone()),
            history: HistoryClient::new(channel.clone()).max_decoding_message_size(usize::MAX),
            insight: InsightClient::new(channel.clone()),
            cluster: ClusterClient::new(channel).max_decoding_message_size(usize::MAX),
            token,
        })
    }

    /// Sends this token with all requests from now on, or none. Clones of the client send it, too.
    pub fn act_with(&self, token: Option<&str>) {
        *self.token.0.write() = token.map(|token| token.parse().expect("a token is ASCII"));
    }

    /// Returns a token for a user.
    pub async fn log_in(&mut self, name: &str, password: &str) -> Result<String, Status> {
        let request = AuthenticateRequest { name: name.to_owned(), password: password.to_owned() };
        Ok(self.auth.authenticate(request).await?.into_inner().token)
    }

    /// Puts a pair. Returns its revision.
    ///
    /// # Panics
    /// If the server refuses the put.
    pub async fn put(&mut self, key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> i64 {
        self.kv.put(put(key, value)).await.expect("a put").into_inner().header.expect("a header").revision
    }
}

/// Returns a request to put a pair without a lease.
pub fn put(key: impl AsRef<[u8]>, value: impl AsRef<[u8]>) -> PutRequest {
    PutRequest { key: bytes(key), value: bytes(value), ..Default::default() }
}

/// Returns a request for the pair of a key.
pub fn get(key: impl AsRef<[u8]>) -> RangeRequest {
    range(key, "")
}

/// Returns a request for the pairs of a range.
pub fn range(key: impl AsRef<[u8]>, range_end: impl AsRef<[u8]>) -> RangeRequest {
    RangeRequest { key: bytes(key), range_end: bytes(range_end), ..Default::default() }
}

/// Returns a request for all pairs.
pub fn all() -> RangeRequest {
    range("\0", "\0")
}

/// Returns a request to delete a key.
pub fn delete(key: impl AsRef<[u8]>) -> DeleteRangeRequest {
    DeleteRangeRequest { key: bytes(key), ..Default::default() }
}

fn bytes(of: impl AsRef<[u8]>) -> Bytes {
    Bytes::copy_from_slice(of.as_ref())
}
