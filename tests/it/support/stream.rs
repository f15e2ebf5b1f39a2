//! A watch stream.

use orlop_wire::proto::client::etcdserverpb::{
    WatchCreateRequest, WatchRequest, WatchResponse, watch_request::RequestUnion,
};
use tokio::{sync::mpsc, time::timeout};
use tokio_stream::wrappers::UnboundedReceiverStream;
use tonic::{Request, Streaming, metadata::MetadataMap};

use super::{Client, DEADLINE};

/// A watch stream: sends requests and receives responses.
pub struct Stream {
    pub requests: Option<mpsc::UnboundedSender<WatchRequest>>,
    pub answers: Streaming<WatchResponse>,
}

impl Stream {
    pub async fn open(client: &mut Client) -> Self {
        Self::open_with(client, &MetadataMap::new()).await
    }

    pub async fn open_with(client: &mut Client, metadata: &MetadataMap) -> Self {
        let (requests, receiver) = mpsc::unbounded_channel();
        let mut request = Request::new(UnboundedReceiverStream::new(receiver));
        *request.metadata_mut() = metadata.clone();
        let answers = client.watch.watch(request).await.expect("a stream opens");
        Self { requests: Some(requests), answers: answers.into_inner() }
    }

    pub fn ask(&self, request: RequestUnion) {
        let requests = self.requests.as_ref().expect("the stream is not closed");
        requests.send(WatchRequest { request_union: Some(request) }).expect("the stream is open");
    }

    pub async fn create(&mut self, create: WatchCreateRequest) -> WatchResponse {
        self.ask(RequestUnion::CreateRequest(create));
        let created = self.next().await;
        assert!(created.created, "{created:?}");
        created
    }

    pub async fn next(&mut self) -> WatchResponse {
        let answer = timeout(DEADLINE, self.answers.message()).await.expect("an answer comes in time");
        answer.expect("the stream has not failed").expect("the stream has not ended")
    }

    /// Reads responses until the last event has this revision; returns the revisions of all events.
    pub async fn read_until(&mut self, revision: i64) -> Vec<i64> {
        let mut seen = Vec::new();
        while seen.last() != Some(&revision) {
            let answer = self.next().await;
            let header = answer.header.expect("an answer has a header").revision;
            for event in answer.events {
                let at = event.kv.expect("an event has a pair").mod_revision;
                assert!(at <= header, "header {header} covers event {at}");
                seen.push(at);
            }
        }
        seen
    }
}

/// Returns a request for a watch of all keys.
pub fn everything(start_revision: i64) -> WatchCreateRequest {
    WatchCreateRequest { key: "\0".into(), range_end: "\0".into(), start_revision, ..Default::default() }
}
