//! Connections to the endpoints under load. A lost connection is not reopened: its clients stop, and the report
//! contains the error.

use std::ops::Deref;

use http::uri::PathAndQuery;
use orlop_client::{Connection, Target, connection_lost};
use tonic::{Status, Streaming, client::Grpc};
use tonic_prost::ProstCodec;

use crate::{
    error::Error,
    summary::{RangeSummary, WatchSummary},
};
use orlop_wire::proto::client::etcdserverpb::{RangeRequest, WatchRequest, kv_client::KvClient};

/// Open connections, assigned round-robin.
pub struct Pool(Vec<Client>);

impl Pool {
    /// Opens `connections` connections, distributed evenly over the endpoints.
    pub async fn connect(target: &Target, connections: usize) -> Result<Self, Error> {
        let mut clients = Vec::with_capacity(connections);
        for endpoint in target.endpoints.iter().cycle().take(connections) {
            clients.push(Client::new(orlop_client::Client::connect(endpoint, target).await?));
        }
        assert!(!clients.is_empty(), "the flags require at least one endpoint and one connection");
        Ok(Self(clients))
    }

    /// Returns the connection of the client, loader or stream with this number.
    pub fn client(&self, number: usize) -> Client {
        self.0[number % self.0.len()].clone()
    }

    /// Returns all endpoints, for errors that any of them may have caused.
    pub fn endpoints(&self) -> String {
        let mut names: Vec<_> = self.0.iter().map(|client| client.endpoint().to_string()).collect();
        names.sort_unstable();
        names.dedup();
        names.join(",")
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }
}

/// The gRPC methods that the scenarios call, over one shared connection.
#[derive(Clone)]
pub struct Client {
    pub kv: KvClient<Connection>,
    raw: Grpc<Connection>,
    client: orlop_client::Client,
}

impl Deref for Client {
    type Target = orlop_client::Client;

    fn deref(&self) -> &Self::Target {
        &self.client
    }
}

impl Client {
    fn new(client: orlop_client::Client) -> Self {
        let raw = Grpc::with_origin(client.connection().clone(), client.origin().clone());
        Self { kv: client.kv(), raw: raw.max_decoding_message_size(usize::MAX), client }
    }

    /// Sends a Range request; counts the pairs of the response without decoding them.
    pub async fn range(&mut self, request: RangeRequest) -> Result<RangeSummary, Status> {
        self.raw.ready().await.map_err(connection_lost)?;
        let path = PathAndQuery::from_static("/etcdserverpb.KV/Range");
        let codec = ProstCodec::<RangeRequest, RangeSummary>::default();
        let response = self.raw.unary(tonic::Request::new(request), path, codec).await?;
        Ok(response.into_inner())
    }

    /// Sends a Range request; fails if the response does not contain `kvs` pairs.
    pub async fn range_exact(&mut self, request: RangeRequest, kvs: u64) -> Result<RangeSummary, Status> {
        let response = self.range(request).await?;
        if response.kvs == kvs {
            return Ok(response);
        }
        Err(Status::data_loss(format!("unexpected number of pairs in the response, kvs={} want={kvs}", response.kvs)))
    }

    /// Opens a watch stream; decodes only the summaries of its responses.
    pub async fn watch<S>(&mut self, requests: S) -> Result<Streaming<WatchSummary>, Status>
    where
        S: tokio_stream::Stream<Item = WatchRequest> + Send + 'static,
    {
        self.raw.ready().await.map_err(connection_lost)?;
        let path = PathAndQuery::from_static("/etcdserverpb.Watch/Watch");
        let codec = ProstCodec::<WatchRequest, WatchSummary>::default();
        let response = self.raw.streaming(tonic::Request::new(requests), path, codec).await?;
        Ok(response.into_inner())
    }
}
