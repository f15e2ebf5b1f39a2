//! Calls whose message is encoded once, so that reading it costs the server more than sending it costs the test.

use bytes::{Buf as _, BufMut as _, Bytes};
use http::uri::PathAndQuery;
use tonic::{
    Request, Status,
    client::Grpc,
    codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder},
    transport::{Channel, Endpoint},
};

/// A codec that sends the message as it is and ignores the response's content.
struct Encoded;

impl Codec for Encoded {
    type Encode = Bytes;
    type Decode = ();
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Encoded {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, message: Bytes, buffer: &mut EncodeBuf<'_>) -> Result<(), Status> {
        buffer.put(message);
        Ok(())
    }
}

impl Decoder for Encoded {
    type Item = ();
    type Error = Status;

    fn decode(&mut self, buffer: &mut DecodeBuf<'_>) -> Result<Option<()>, Status> {
        buffer.advance(buffer.remaining());
        Ok(Some(()))
    }
}

/// A connection for such calls.
pub struct Caller(Grpc<Channel>);

impl Caller {
    pub async fn connect(endpoint: &str) -> Self {
        let endpoint = Endpoint::from_shared(endpoint.to_owned()).expect("an endpoint");
        Self(Grpc::new(endpoint.connect().await.expect("a ready server accepts connections")))
    }

    pub async fn call(&mut self, method: &'static str, message: Bytes) -> Result<(), Status> {
        self.0.ready().await.expect("the connection lasts");
        let answer = self.0.unary(Request::new(message), PathAndQuery::from_static(method), Encoded).await;
        answer.map(tonic::Response::into_inner)
    }

    /// Calls with the same message repeatedly and ignores the responses.
    pub async fn call_in_a_loop(mut self, method: &'static str, message: Bytes) {
        loop {
            let _ = self.call(method, message.clone()).await;
            tokio::task::yield_now().await;
        }
    }
}
