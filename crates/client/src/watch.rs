//! A watch with a stream of its own.

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Status, Streaming};

use crate::Client;
use orlop_wire::proto::client::etcdserverpb::{
    WatchCreateRequest, WatchRequest, WatchResponse, watch_request::RequestUnion,
};

/// The responses of a watch, which ends when they are dropped.
pub struct WatchStream {
    responses: Streaming<WatchResponse>,
    /// The server ends the watch at the end of the requests. Without that, their task would keep the stream open.
    _requests: mpsc::Sender<WatchRequest>,
}

impl Client {
    /// Opens a watch.
    ///
    /// # Errors
    ///
    /// If the connection is lost or the server refuses the stream. That the server refuses the watch is a response.
    pub async fn open_watch(&self, create: WatchCreateRequest) -> Result<WatchStream, Status> {
        let request = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let (requests, received) = mpsc::channel(1);
        requests.try_send(request).map_err(|error| Status::internal(error.to_string()))?;
        let responses = self.watch().watch(ReceiverStream::new(received)).await?.into_inner();
        Ok(WatchStream { responses, _requests: requests })
    }
}

impl WatchStream {
    /// Returns the next response; `None` if the server has ended the stream.
    ///
    /// # Errors
    ///
    /// If the connection is lost or the server has ended the stream with an error.
    ///
    /// # Cancel safety
    ///
    /// No response is lost if the future is dropped.
    pub async fn message(&mut self) -> Result<Option<WatchResponse>, Status> {
        self.responses.message().await
    }
}
